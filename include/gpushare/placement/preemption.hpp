// SPDX-License-Identifier: Apache-2.0
// Preemption of lower levels, with notice. A plan says which tenants would have to go for a request. A preemption
// follows its course: notice, then eviction of the victims that are still there when the notice has run out. Plain
// values: time is an argument, and the caller evicts.
//
//   if (auto plan = gpushare::plan_preemption(policy, cluster, placed, request, gpushare::priority{2})) {
//       gpushare::preemption p(*plan, now, 30s);      // tell plan->victims
//       p.left(victim);                               // one went by itself
//       if (p.ready(now)) for (auto v : p.remaining()) evict(v);     // then apply plan->added
//   }
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A placement on the cluster, and its level.
struct placed_tenant {
    placement where{};  ///< what it has
    priority level{};   ///< only lower ones have to go
};

/// Tenants that would have to go, by their places in the list that the plan was made from, and what fits then.
struct preemption_plan {
    std::vector<std::size_t> victims{};  ///< by their places in the list
    placement added{};                   ///< what fits then
    std::vector<placement> beside{};     ///< of a gang: the places of its other members, in their order
};

namespace detail {

/// The least costly victims on one node: with the lowest highest level, then the fewest, then the least device time.
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

    // Level by level from the lowest: all of them go, and then come back as far as the request lets them, the largest
    // first. Exact in the level; of victims, no single one could stay.
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
        for (const auto i : gone) cluster_.restore(placed_[i].where);
        return found;
    }

private:
    // Not the last one whom the request wants to be near.
    bool release(std::size_t i, node_id id) {
        const placement_request near{.group = request_.group, .near = request_.near};
        const bool was_near = cluster_.fits(near, id);
        if (!cluster_.try_release(placed_[i].where)) return false;
        const bool needed = was_near && !cluster_.fits(near, id);
        if (needed) cluster_.restore(placed_[i].where);
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
            cluster_.restore(placed_[i].where);
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
/// lower levels. It takes the node where the victims' highest level is lowest, then where they are
/// fewest, then where the least device time is lost. None if the request fits without victims, or
/// if no victims suffice. Looks at every node with tenants on it.
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

/// The same for a gang, whose members are placed together: victims of any nodes, all of lower
/// levels. Takes the lowest level up to which all of them going would do, and of these victims lets
/// stay whom the gang leaves room for: the higher levels first, then those with the most device
/// time. So no single victim could stay, but others might have been fewer. None if the gang fits
/// without victims, or no plan was found (plan_gang).
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

/// One preemption under way. It ends by finish() once it is ready, or by being destroyed, and then nobody has to go.
class preemption {
public:
    /// Notice is given at `now`, and lasts for `notice`.
    preemption(preemption_plan plan, instant now, ns notice)
        : plan_(std::move(plan)), remaining_(plan_.victims), until_(saturating_add(now, notice)) {}

    /// As it was given.
    [[nodiscard]] const preemption_plan& plan() const noexcept { return plan_; }
    /// When the notice ends.
    [[nodiscard]] instant until() const noexcept { return until_; }
    /// Victims that are still there. Once ready() they may be evicted; not before.
    [[nodiscard]] std::span<const std::size_t> remaining() const noexcept { return remaining_; }
    /// All have gone, or the notice has run out.
    [[nodiscard]] bool ready(instant now) const noexcept { return remaining_.empty() || now >= until_; }

    /// Notes that a victim has gone, by itself or evicted. False if it was no victim, or had gone already.
    bool left(std::size_t victim) noexcept { return std::erase(remaining_, victim) != 0; }

    /// Once all victims have gone: applies the placement that the plan was for. Otherwise returns what is in the way,
    /// and nothing happens.
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
