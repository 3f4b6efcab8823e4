// SPDX-License-Identifier: Apache-2.0
// Makes room in a cluster by moving existing placements (defragmentation), or by evicting tenants
// of lower levels after a notice (preemption). A plan is a value, and nothing changes until it is
// applied.
//
// Moves make room for one request, or let more requests fit in general.
//
//   // at most 100 moves; each lowers the policy's cost by more than 5 (with value_descent, permille
//   // of a device's time)
//   auto plan = gpushare::consolidate(indexed, placed, 100, 5.0);
//   for (const auto& m : plan.moves) ...                             // tell the tenants
//   gpushare::apply(indexed, plan);       // whole or not at all; indexed: an indexed_cluster
//
// Placements with labels aren't moved, because their fit elsewhere depends on other placements.
//
// A preemption_plan says which tenants would have to go to make room for a request. A preemption
// has two steps: notice, and then the eviction of the victims that are still there when the notice
// ends. Time is an argument, and the caller evicts.
//
//   if (auto plan = gpushare::plan_preemption(policy, cluster, tenants, request, gpushare::priority{2})) {
//       gpushare::preemption p(*plan, now, 30s);      // tell plan->victims
//       p.left(victim);                               // one went by itself
//       if (p.ready(now)) for (auto v : p.remaining()) evict(v);     // then apply plan->added
//   }
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A planned move of a placement. `which` is the placement's index in the list from which the plan
/// was made.
struct placement_move {
    std::size_t which = 0;  ///< the placement's index in the list
    placement from{};       ///< the current place
    placement to{};         ///< the new place
};

/// Moves, each of a different placement, and the placement that fits afterwards. Each move has room
/// once the moves before it are done, so moves can be carried out one at a time.
struct rearrangement {
    std::vector<placement_move> moves{};  ///< carried out one at a time, in this order
    std::optional<placement> added{};     ///< the placement of the request for which room was made
};

/// Carries out the whole plan. If the cluster has changed in between, changes nothing and returns
/// the shortage.
[[nodiscard]] inline refusal try_apply(cluster& c, const rearrangement& plan) {
    cluster after = c;
    for (const auto& m : plan.moves) {
        if (!after.try_release(m.from)) return {shortage::devices, m.from.node, m.from.request.devices, 0};
        if (const auto why = after.try_apply(m.to)) return why;
    }
    if (plan.added)
        if (const auto why = after.try_apply(*plan.added)) return why;
    c = std::move(after);
    return {};
}
/// try_apply() on an indexed cluster.
template <class Policy>
[[nodiscard]] refusal try_apply(indexed_cluster<Policy>& c, const rearrangement& plan) {
    cluster after = c.nodes();
    if (const auto why = try_apply(after, plan)) return why;
    c.cluster_ = std::move(after);  // no statement from here on throws
    for (const auto& m : plan.moves) {
        c.note_change(m.from.node);
        c.note_change(m.to.node);
    }
    if (plan.added) c.note_change(plan.added->node);
    return {};
}
/// try_apply(), but throws operation_error.
template <class Cluster>
requires requires(Cluster& c, const rearrangement& plan) { try_apply(c, plan); }
void apply(Cluster& c, const rearrangement& plan) {
    if (const auto why = try_apply(c, plan)) throw operation_error(to_errc(why.missing), {}, describe(why).c_str());
}

namespace detail {

/// Looks for a node on which the request fits after one or two of the node's placements have moved
/// to other places.
template <class Policy>
class room_search {
public:
    room_search(const Policy& policy, const cluster& c, std::span<const placement> placed, const placement_request& r,
                device_set on)
        : policy_(policy), as_is_(c), cluster_(c), placed_(placed), request_(r), on_(on) {}

    // Whether the request fits without moves.
    [[nodiscard]] bool fits_already() const noexcept {
        for (std::uint32_t i = 0; i < as_is_.size(); ++i)
            if (has_place(as_is_, {i})) return true;
        return false;
    }
    std::optional<rearrangement> with(std::size_t moves) {
        best_.clear();
        std::vector<std::size_t> order(placed_.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::ranges::stable_sort(order, {}, [&](std::size_t i) { return placed_[i].node; });
        for (auto first = order.begin(); first != order.end();) {
            const auto id = placed_[*first].node;
            const auto last = std::find_if(first, order.end(), [&](std::size_t i) { return placed_[i].node != id; });
            try_node(id, {first, last}, moves);
            first = last;
        }
        for (const auto& c : best_)
            if (auto found = plan(c)) return found;
        return std::nullopt;
    }

private:
    struct candidate {
        double cost = std::numeric_limits<double>::infinity();
        std::vector<std::size_t> moved{};
        node_id node{};
    };
    static constexpr std::size_t most_candidates = 64;  // a plan looks at every node

    // Whether the request fits on devices of that node that it may use.
    [[nodiscard]] bool has_place(const cluster& c, node_id id) const noexcept {
        if (!c.fits(request_, id)) return false;
        if (on_.empty()) return true;
        const auto devices = c[id].devices;
        std::uint32_t fitting = 0;
        for (const auto d : on_) fitting += d.index < devices.size() && fits(request_, devices[d.index]) ? 1U : 0U;
        return fitting >= request_.devices;
    }
    // The policy's rating of that node for the request. The policy sees devices that the request
    // may not use as drained.
    [[nodiscard]] rating rated_for_request(const cluster& c, node_id id) const {
        node_view n = c[id];
        if (on_.empty()) return rated(policy_, n, request_);
        std::vector<free_device> seen(n.devices.begin(), n.devices.end());
        for (std::uint32_t d = 0; d < seen.size(); ++d)
            if (!on_.contains({d})) seen[d] = {.open = false};
        n.devices = seen;
        return rated(policy_, n, request_);
    }

    // Keeps the candidate if it is among the cheapest. Of candidates with equal cost, the first
    // stays.
    void note(candidate c) {
        const auto after = std::ranges::upper_bound(best_, c.cost, {}, &candidate::cost);
        if (best_.size() == most_candidates && after == best_.end()) return;
        best_.insert(after, std::move(c));
        if (best_.size() > most_candidates) best_.pop_back();
    }

    // The cost of the best place for the request in the current cluster; infinite if there is no
    // place.
    double elsewhere(const placement_request& r) {
        const auto [at, unknown] = elsewhere_.try_emplace(r, std::numeric_limits<double>::infinity());
        if (unknown)
            if (const auto p = choose(policy_, as_is_, r)) at->second = rated(policy_, as_is_[p->node], r).cost;
        return at->second;
    }

    // Releases up to `moves` of the placements in `here` in turn, in all combinations.
    void try_node(node_id id, std::span<const std::size_t> here, std::size_t moves, double cost = 0) {
        for (std::size_t i = 0; i < here.size(); ++i) {
            const placement& p = placed_[here[i]];
            if (has_labels(p.request)) continue;
            const double away = elsewhere(p.request);
            if (away == std::numeric_limits<double>::infinity() || !cluster_.try_release(p)) continue;
            moved_.push_back(here[i]);
            // The node's loss with the request in place of this placement, plus another node's loss
            // from the placement.
            const double back = cluster_.fits(p.request, id) ? rated(policy_, cluster_[id], p.request).cost : 0;
            const double swap = cost + away - back;
            if (has_place(cluster_, id)) {
                const double all = swap + rated_for_request(cluster_, id).cost;
                note({all, moved_, id});
            } else if (moves > 1) {
                try_node(id, here.subspan(i + 1), moves - 1, swap);
            }
            moved_.pop_back();
            cluster_.hold(p);  // its device may be drained, or may have shrunk
        }
    }

    // Finds places for the moved placements next to each other, and an order in which each move has
    // room. Without both, there is no plan.
    std::optional<rearrangement> plan(const candidate& c) const {
        cluster without = as_is_;
        for (const auto i : c.moved) without.release(placed_[i]);
        rearrangement result;
        result.added = {request_, c.node, rated_for_request(without, c.node).devices};
        // The request's place counts as taken while the moved placements look for theirs, so they
        // don't take it.
        cluster after = without;
        if (after.try_apply(*result.added)) return std::nullopt;
        for (const auto i : c.moved) {
            const auto to = choose(policy_, after, placed_[i].request);
            if (!to) return std::nullopt;
            after.apply(*to);
            // otherwise the placement stays
            if (*to != placed_[i]) result.moves.push_back({i, placed_[i], *to});
        }
        return in_order(std::move(result));
    }
    // An order in which each move has room, if there is one. Found by replaying the plan on a copy.
    std::optional<rearrangement> in_order(rearrangement plan) const {
        const auto works = [&] {
            cluster copy = as_is_;
            return !try_apply(copy, plan);
        };
        if (works()) return plan;
        // there are at most two moves: the second makes room for the first
        std::ranges::reverse(plan.moves);
        if (works()) return plan;
        return std::nullopt;
    }

    const Policy& policy_;
    const cluster& as_is_;
    cluster cluster_;  // the cluster with the moves that are being tried
    std::span<const placement> placed_;
    placement_request request_;
    device_set on_;  // the devices of a node that the request may use; empty for all
    std::map<placement_request, double> elsewhere_;
    std::vector<std::size_t> moved_;
    std::vector<candidate> best_;  // the cheapest candidates, ascending
};

/// Repeatedly looks for the move that gains most.
template <class Policy>
class gain_search {
public:
    gain_search(indexed_cluster<Policy> c, std::span<const placement> placed)
        : cluster_(std::move(c)), placed_(placed), on_(cluster_.nodes().size()), gain_(placed.size()) {
        for (std::size_t i = 0; i < placed.size(); ++i)
            if (!has_labels(placed[i].request)) on_[placed[i].node.index].push_back(i);
        for (std::uint32_t n = 0; n < on_.size(); ++n) rate_node({n});
    }

    // Each move is made on the copy before the next move is sought, so each move has room when its
    // turn comes.
    rearrangement plan(std::size_t most_moves, double least_gain) {
        rearrangement result;
        while (result.moves.size() < most_moves) {
            const auto m = best(least_gain);
            if (!m) break;
            cluster_.release(m->from);
            cluster_.apply(m->to);
            std::erase(on_[m->from.node.index], m->which);  // each placement moves only once
            rate_node(m->from.node);
            rate_node(m->to.node);
            result.moves.push_back(*m);
        }
        return result;
    }

private:
    void rate_node(node_id id) {
        for (const auto i : on_[id.index]) {
            cluster_.release(placed_[i]);
            // A placement on a drained or shrunk device frees nothing usable there by moving.
            gain_[i] = cluster_.nodes().fits(placed_[i].request, id)
                           ? rated(cluster_.policy(), cluster_.nodes()[id], placed_[i].request).cost
                           : std::numeric_limits<double>::lowest();
            cluster_.hold(placed_[i]);
        }
    }

    std::optional<placement_move> best(double least_gain) {
        std::vector<std::size_t> order;
        for (const auto& here : on_) {
            for (const auto i : here)
                if (gain_[i] > least_gain) order.push_back(i);
        }
        std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
            return std::pair{-gain_[a], a} < std::pair{-gain_[b], b};
        });
        std::optional<placement_move> found;
        for (const auto i : order) {
            if (gain_[i] <= least_gain) break;  // the cost elsewhere is subtracted from the gain
            const auto to = cluster_.choose(placed_[i].request);
            if (!to || to->node == placed_[i].node) continue;
            const double gain = gain_[i] - rated(cluster_.policy(), cluster_.nodes()[to->node], to->request).cost;
            if (gain <= least_gain) continue;
            least_gain = gain;
            found = {i, placed_[i], *to};
        }
        return found;
    }

    indexed_cluster<Policy> cluster_;
    std::span<const placement> placed_;
    std::vector<std::vector<std::size_t>> on_;  // for each node: placements that may be moved
    // for each placement: the gain of its node if the placement leaves
    std::vector<double> gain_;
};

}  // namespace detail

/// Makes a plan of at most `most_moves` moves, each of a different placement. Each move is the one
/// that lowers the policy's cost most at that step, by more than `least_gain`. The plan is empty if
/// there is no such move. For policies whose cost is a node's loss (`value_descent`, in permille of
/// device time). `placed` has the placements on the cluster, or only the movable ones. Throws
/// operation_error (invalid_specification) for a gain that isn't a finite number.
template <class Policy>
requires stable_placement_policy<Policy>
[[nodiscard]] rearrangement consolidate(const indexed_cluster<Policy>& c, std::span<const placement> placed,
                                        std::size_t most_moves, double least_gain) {
    detail::check_number(least_gain, std::numeric_limits<double>::lowest(), std::numeric_limits<double>::max(),
                         "least_gain of consolidate");
    return detail::gain_search<Policy>(c, placed).plan(most_moves, least_gain);
}

/// Makes a plan of at most `most_moves` moves (1 or 2) after which the request fits. There is no
/// plan if none was found, or if the request fits without moves. `placed` has the placements on the
/// cluster, or only the movable ones. Prefers the fewest moves, then the lowest cost by the policy.
/// The plan is replayed on a copy, so each move has room when its turn comes. The search looks at
/// every placement, and for two moves at pairs of placements on a node, which takes milliseconds
/// for thousands of placements. `on` has the only devices of a node that the request may use, and
/// is empty for any device; placements may move to all devices.
template <class Policy>
requires stable_placement_policy<Policy>
[[nodiscard]] std::optional<rearrangement> make_room(const Policy& policy, const cluster& c,
                                                     std::span<const placement> placed, const placement_request& r,
                                                     std::size_t most_moves, device_set on = {}) {
    detail::room_search search(policy, c, placed, r, on);
    if (search.fits_already()) return std::nullopt;
    for (std::size_t moves = 1; moves <= std::min<std::size_t>(most_moves, 2); ++moves)
        if (auto plan = search.with(moves)) return plan;
    return std::nullopt;
}

/// A placement on the cluster, and its level.
struct placed_tenant {
    placement where{};  ///< the tenant's place
    priority level{};   ///< only tenants of lower levels have to go
};

/// The tenants that would have to go, by their indices in the list from which the plan was made,
/// and the placement that then fits.
struct preemption_plan {
    std::vector<std::size_t> victims{};  ///< the tenants' indices in the list
    placement added{};                   ///< the placement that then fits
    /// for a gang: the places of its other members, in their order
    std::vector<placement> beside{};
};

namespace detail {

/// The least costly victims on one node: first those with the lowest maximum level, then the
/// fewest, then those with the least device time.
class victim_search {
public:
    victim_search(const cluster& c, std::span<const placed_tenant> placed, const placement_request& r, priority level)
        : cluster_(c), placed_(placed), request_(r), level_(level) {}

    struct victims {
        priority highest{};
        std::size_t count = 0;
        std::uint64_t device_time = 0;
        std::vector<std::size_t> who{};

        [[nodiscard]] bool costs_less_than(const victims& o) const noexcept {
            return std::tie(highest, count, device_time) < std::tie(o.highest, o.count, o.device_time);
        }
    };

    // Goes level by level from the lowest. All victims go, and then come back, the largest first,
    // as far as the request leaves room. The level is exact; of the final victims, no single one
    // could stay.
    std::optional<victims> on(node_id id) {
        std::vector<std::size_t> here;
        for (std::size_t i = 0; i < placed_.size(); ++i)
            if (placed_[i].where.node == id && placed_[i].level < level_) here.push_back(i);
        std::ranges::stable_sort(here, {}, [&](std::size_t i) { return placed_[i].level; });
        std::vector<std::size_t> gone;
        for (auto next = here.begin(); next != here.end() && !cluster_.fits(request_, id);) {
            const priority level = placed_[*next].level;
            for (; next != here.end() && placed_[*next].level == level; ++next)
                if (release(*next, id)) gone.push_back(*next);
        }
        std::optional<victims> found;
        if (cluster_.fits(request_, id) && !gone.empty()) {
            keep_whom_possible(id, gone);
            found = victims{.count = gone.size(), .who = gone};
            found->highest = placed_[gone.front()].level;
            for (const auto i : gone) {
                found->highest = std::max(found->highest, placed_[i].level);
                found->device_time += device_permille(placed_[i].where.request);
            }
        }
        for (const auto i : gone) cluster_.hold(placed_[i].where);
        return found;
    }

private:
    // Doesn't release the last tenant near which the request wants to be.
    bool release(std::size_t i, node_id id) {
        const placement_request near{.group = request_.group, .near = request_.near};
        const bool was_near = cluster_.fits(near, id);
        if (!cluster_.try_release(placed_[i].where)) return false;
        const bool needed = was_near && !cluster_.fits(near, id);
        if (needed) cluster_.hold(placed_[i].where);
        return !needed;
    }

    void keep_whom_possible(node_id id, std::vector<std::size_t>& gone) {
        auto order = gone;
        std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
            const auto rank = [&](std::size_t i) {
                return std::pair(placed_[i].level, device_permille(placed_[i].where.request));
            };
            return rank(a) > rank(b);
        });
        for (const auto i : order) {
            cluster_.hold(placed_[i].where);
            if (cluster_.fits(request_, id))
                std::erase(gone, i);
            else
                (void)cluster_.try_release(placed_[i].where);
        }
    }

    cluster cluster_;
    std::span<const placed_tenant> placed_;
    placement_request request_;
    priority level_;
};

}  // namespace detail

/// Chooses the victims whose removal lets a request of that level fit: tenants of one node, all of
/// lower levels. Takes the node where the victims' highest level is lowest, then the node with the
/// fewest victims, then the node where the least device time is lost. There is no plan if the
/// request fits without victims, or if no victims suffice. Looks at every node with tenants on it.
template <class P>
requires placement_policy<P>
[[nodiscard]] std::optional<preemption_plan> plan_preemption(P&& policy, const cluster& c,
                                                             std::span<const placed_tenant> placed,
                                                             const placement_request& r, priority level) {
    if (choose(policy, c, r)) return std::nullopt;
    std::vector<node_id> nodes;
    for (const auto& t : placed) nodes.push_back(t.where.node);
    std::ranges::sort(nodes);
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    detail::victim_search search(c, placed, r, level);
    std::optional<detail::victim_search::victims> best;
    node_id where{};
    for (const auto id : nodes) {
        auto found = search.on(id);
        if (!found || (best && !found->costs_less_than(*best))) continue;
        best = std::move(found);
        where = id;
    }
    if (!best) return std::nullopt;
    cluster after = c;
    for (const auto i : best->who) after.release(placed[i].where);
    return preemption_plan{std::move(best->who), {r, where, detail::rated(policy, after[where], r).devices}};
}

/// plan_preemption() for a gang, whose members are placed together. The victims may be on any
/// nodes, and all are of lower levels. Finds the lowest level such that the gang fits if all
/// tenants up to that level go. Then keeps each of these tenants for which the gang leaves room,
/// higher levels first, then tenants with more device time. So no single victim could stay,
/// although another set of victims might be smaller. There is no plan if the gang fits without
/// victims, or if plan_gang found no plan.
template <class P>
requires placement_policy<P>
[[nodiscard]] std::optional<preemption_plan> plan_preemption(P&& policy, const cluster& c,
                                                             std::span<const placed_tenant> placed,
                                                             std::span<const placement_request> members,
                                                             priority level) {
    if (members.empty() || plan_gang(policy, c, members)) return std::nullopt;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < placed.size(); ++i)
        if (placed[i].level < level) order.push_back(i);
    std::ranges::stable_sort(
        order, {}, [&](std::size_t i) { return std::pair(placed[i].level, device_permille(placed[i].where.request)); });
    cluster after = c;
    preemption_plan result;
    gang_plan found;
    for (auto next = order.begin(); next != order.end() && !found;) {
        const priority lowest = placed[*next].level;
        for (; next != order.end() && placed[*next].level == lowest; ++next)
            if (after.try_release(placed[*next].where)) result.victims.push_back(*next);
        found = plan_gang(policy, after, members);
    }
    if (!found) return std::nullopt;
    const auto gone = result.victims;
    for (auto i = gone.rbegin(); i != gone.rend(); ++i) {
        after.hold(placed[*i].where);
        if (auto beside = plan_gang(policy, after, members)) {
            found = std::move(beside);
            std::erase(result.victims, *i);
        } else {
            (void)after.try_release(placed[*i].where);
        }
    }
    result.added = found.placements->front();
    result.beside.assign(found.placements->begin() + 1, found.placements->end());
    return result;
}

/// One preemption under way. Once it is ready, finish() ends it. If the object is destroyed before,
/// no tenant has to go.
class preemption {
public:
    /// Notice is given at `now`, and lasts for `notice`.
    preemption(preemption_plan plan, instant now, ns notice)
        : plan_(std::move(plan)), remaining_(plan_.victims), until_(saturating_add(now, notice)) {}

    /// The plan from which the preemption was made.
    [[nodiscard]] const preemption_plan& plan() const noexcept { return plan_; }
    /// The time at which the notice ends.
    [[nodiscard]] instant until() const noexcept { return until_; }
    /// The victims that are still there. Evict them only once ready() is true.
    [[nodiscard]] std::span<const std::size_t> remaining() const noexcept { return remaining_; }
    /// Whether all victims have gone, or the notice has ended.
    [[nodiscard]] bool ready(instant now) const noexcept { return remaining_.empty() || now >= until_; }

    /// Records that a victim has gone, by itself or by eviction. Returns false if the tenant isn't
    /// a victim or had already gone.
    bool left(std::size_t victim) noexcept { return std::erase(remaining_, victim) != 0; }

    /// Applies the placement of the plan, once all victims have gone. Before that, changes nothing
    /// and returns the shortage.
    [[nodiscard]] refusal finish(cluster& c) const {
        if (plan_.beside.empty()) return c.try_apply(plan_.added);
        std::vector<placement> all{plan_.added};
        all.insert(all.end(), plan_.beside.begin(), plan_.beside.end());
        return try_apply_gang(c, all);
    }

private:
    preemption_plan plan_;
    std::vector<std::size_t> remaining_;
    instant until_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
