// SPDX-License-Identifier: Apache-2.0
// The concept of a placement policy: a policy rates one node for one request. `choose` asks the
// policy about every node on which the request fits, and takes the node with the lowest cost.
//
//   struct emptiest {
//       gpushare::rating rate(const gpushare::node_view& n, const gpushare::placement_request& r) const {
//           // permille(): of free device time
//           return {-double(n.permille()), gpushare::tightest_devices(n, r)};
//       }
//   };
//   auto p = gpushare::choose(emptiest{}, cluster, request);
//
// This header also has the classic policies, for comparison with value_descent. None of them needs
// to know future requests:
//
//   auto q = gpushare::choose(gpushare::best_fit{}, cluster, request);
//
// A gang is a set of requests that are placed together or not at all. Its plan is a value, which
// can be inspected before it is applied:
//
//   auto plan = gpushare::plan_gang(emptiest{}, cluster, workers);
//   if (plan) gpushare::apply_gang(cluster, *plan.placements);
//   // the member that lacks something, and why
//   else log(plan.member, gpushare::describe(plan.why));
//
// An indexed_cluster is a cluster with a policy whose ratings it keeps, so that a decision needn't
// rate every node. It gives the same answers as `choose`, in a time that hardly grows with the
// cluster.
//
//   gpushare::indexed_cluster c(nodes, gpushare::value_descent(nodes, usual));
//   if (auto p = c.choose(request)) c.apply(*p);
//   c.change_nodes([](gpushare::cluster& nodes) { nodes.drain({3}); });
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/alike_nodes.hpp>
#include <gpushare/placement/detail/gang_search.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A policy's rating of a node: its cost, and the devices that the policy would take.
struct rating {
    /// The node with the lowest cost wins. A NaN counts as the largest finite number, and an
    /// infinite cost as the nearest finite number.
    double cost = std::numeric_limits<double>::infinity();
    device_set devices{};  ///< as many as the request wants
};

/// A policy rates a node on which the request fits, with a finite cost and as many fitting devices
/// as the request wants. A policy can't refuse and doesn't see other nodes, so every request that
/// fits somewhere is placed.
template <class P>
concept placement_policy = requires(P& policy, const node_view& n, const placement_request& r) {
    { policy.rate(n, r) } -> std::same_as<rating>;
};

/// A policy whose rating depends only on the node and the request: the same question gets the same
/// answer.
template <class P>
concept stable_placement_policy = placement_policy<const P>;

/// A policy whose rating depends only on the node's state. A policy with `static constexpr bool
/// by_state = true` gives the same rating to nodes with the same description and the same free
/// capacity. So only one of such nodes has to be rated.
template <class P>
concept rates_by_state = stable_placement_policy<P> && P::by_state;

/// The fitting devices with the least free share. Ties go to the least free memory, then to the
/// lowest id.
[[nodiscard]] inline device_set tightest_devices(const node_view& n, const placement_request& r) noexcept {
    device_set taken;
    for (std::uint32_t i = 0; i < r.devices; ++i) {
        std::optional<device_id> best;
        for (std::uint32_t d = 0; d < n.devices.size(); ++d) {
            if (taken.contains({d}) || !fits(r, n.devices[d])) continue;
            if (!best || n.devices[d] < n.devices[best->index]) best = device_id{d};
        }
        if (!best) break;
        taken.add(*best);
    }
    return taken;
}

namespace detail {

/// Throws operation_error (invalid_specification) for a value that is outside `least` to `most` or
/// isn't a number.
inline void check_number(double value, double least, double most, std::string_view what) {
    if (value >= least && value <= most) return;
    message m;
    std::array<char, 32> text{};
    (void)std::snprintf(text.data(), text.size(), "%g", value);
    m.add(what, " is ", std::string_view(text.data()), ", which is out of range");
    throw operation_error(failure{errc::invalid_specification}, {}, m);
}

/// The policy's rating, made safe: its cost is a number, and the request fits on its devices. So
/// any request that fits is placed, whatever a policy says.
template <class P>
[[nodiscard]] rating rated(P& policy, const node_view& n, const placement_request& r) {
    constexpr double most = std::numeric_limits<double>::max();
    rating here = policy.rate(n, r);
    if (!(here.cost < most)) here.cost = most;  // also true if the cost isn't a number
    if (here.cost < -most) here.cost = -most;
    std::uint32_t fitting = 0;
    for (const auto d : here.devices) fitting += d.index < n.devices.size() && fits(r, n.devices[d.index]) ? 1U : 0U;
    if (fitting != r.devices || here.devices.size() != r.devices) here.devices = tightest_devices(n, r);
    return here;
}

}  // namespace detail

/// The placement with the lowest cost; ties go to the lowest node id. No placement if the request
/// doesn't fit anywhere. Looks at every node.
template <class P>
requires placement_policy<P>
[[nodiscard]] std::optional<placement> choose(P&& policy, const cluster& c, const placement_request& r) {
    rating best;
    std::optional<placement> chosen;
    for (std::uint32_t i = 0; i < c.size(); ++i) {
        const node_id id{i};
        if (!c.fits(r, id)) continue;
        const rating here = detail::rated(policy, c[id], r);
        if (chosen && here.cost >= best.cost) continue;
        best = here;
        chosen = placement{r, id, here.devices};
    }
    return chosen;
}

/// The first node that has room.
struct first_fit {
    /// See placement_policy.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        return {static_cast<double>(n.id.index), tightest_devices(n, r)};
    }
};

namespace detail {
/// `of` as a fraction of `whole`; 0 if `whole` is 0.
[[nodiscard]] constexpr double part(double of, double whole) noexcept { return whole > 0 ? of / whole : 0; }
}  // namespace detail

/// Prefers the node with the least capacity left afterwards. Cores and device time count relative
/// to the largest node, in a hundred steps.
struct best_fit {
    double most_cpu_milli = 128'000;  ///< the largest node's cores
    double most_permille = 8'000;     ///< the largest node's device time

    /// See placement_policy.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        const double cpu = static_cast<double>(n.cpu_milli - r.cpu_milli) / most_cpu_milli;
        const double devices = static_cast<double>(n.permille() - device_permille(r)) / most_permille;
        return {-std::floor(100 * (1 - (cpu + devices) / 2)), tightest_devices(n, r)};
    }
};

/// Prefers used devices, the fullest first; then free devices of used nodes; unused nodes come
/// last, the smallest first.
struct bin_packing {
    /// See placement_policy.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        const auto at = tightest_devices(n, r);
        std::uint32_t opened = 0, left = 0;
        for (const auto d : at) {
            const auto x = n.devices[d.index].permille;
            opened += x == share::whole().permille() ? 1U : 0U;
            left += x;
        }
        const auto untouched =
            static_cast<double>(std::ranges::count(n.devices, share::whole().permille(), &free_device::permille));
        constexpr double tier = 1e6;
        if (untouched == static_cast<double>(n.devices.size())) return {2 * tier + untouched, at};
        if (opened != 0) return {tier + opened, at};
        return {static_cast<double>(left), at};
    }
};

/// Prefers the node with the most capacity left, and its emptiest devices: least interference, most
/// fragmentation.
struct spreading {
    /// See placement_policy.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        device_set at;
        while (at.size() < r.devices) {
            std::uint32_t best = 0, most = 0;
            for (std::uint32_t d = 0; d < n.devices.size(); ++d) {
                if (at.contains({d}) || !fits(r, n.devices[d]) || n.devices[d].permille < most) continue;
                if (n.devices[d].permille == most && most != 0) continue;
                best = d;
                most = n.devices[d].permille;
            }
            at.add({best});
        }
        return {-detail::part(static_cast<double>(n.permille()), 1000.0 * n.whole.devices) -
                    detail::part(static_cast<double>(n.cpu_milli), static_cast<double>(n.whole.cpu_milli)),
                at};
    }
};

/// Prefers the node whose free resources point least in the direction of the request: the smallest
/// product of free and requested amounts, so that large leftovers remain. After Grandl et al.,
/// "Multi-resource packing for cluster schedulers" (Tetris), SIGCOMM 2014, in the form that the
/// comparison of USENIX ATC 2023 uses.
struct dot_product {
    double most_cpu_milli = 128'000;  ///< the largest node's cores
    double most_permille = 8'000;     ///< the largest node's device time

    /// See placement_policy.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        const double cpu =
            static_cast<double>(n.cpu_milli) / most_cpu_milli * (static_cast<double>(r.cpu_milli) / most_cpu_milli);
        const double devices = static_cast<double>(n.permille()) / most_permille *
                               (static_cast<double>(device_permille(r)) / most_permille);
        return {cpu + devices, tightest_devices(n, r)};
    }
};

/// Takes any node that has room, each with the same probability. Not stable: each question draws a
/// new number.
class random_fit {
public:
    /// The same seed gives the same choices.
    explicit random_fit(std::uint64_t seed) noexcept : state_(seed) {}

    /// See placement_policy.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) {
        // splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014
        auto z = state_ += detail::golden_ratio;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
        return {static_cast<double>((z ^ (z >> 31)) >> 11), tightest_devices(n, r)};
    }

private:
    std::uint64_t state_;
};

static_assert(stable_placement_policy<first_fit>);
static_assert(stable_placement_policy<best_fit>);
static_assert(stable_placement_policy<bin_packing>);
static_assert(stable_placement_policy<spreading>);
static_assert(stable_placement_policy<dot_product>);
static_assert(placement_policy<random_fit> && !placement_policy<const random_fit>);

/// A placement for each member, in the order of the requests. Without placements, the plan names
/// the first member, in the order of the tries, that found no place alongside the members before
/// it.
struct gang_plan {
    /// One placement for each member; none if a member has no place.
    std::optional<std::vector<placement>> placements{};
    std::size_t member = 0;  ///< the member that has no place
    refusal why{};           ///< the resource that this member lacks
    /// Without placements: whether no plan exists, or only none was found in `most_steps`.
    bool proven = false;

    /// Whether all members have a place.
    [[nodiscard]] explicit operator bool() const noexcept { return placements.has_value(); }
};

/// Whether one of the members carries that label.
[[nodiscard]] inline bool carried_in(std::span<const placement_request> members, label group) noexcept {
    return std::ranges::find(members, group, &placement_request::group) != members.end();
}

namespace detail {

/// The order of placing: the largest members first, by devices, then device time, then device
/// memory, then host resources. Equal members keep the given order. Members that want to be near
/// another member come last.
[[nodiscard]] inline std::vector<std::size_t> order_of_placing(std::span<const placement_request> members) {
    std::vector<std::size_t> order(members.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
        const auto rank = [&](std::size_t i) {
            const placement_request& r = members[i];
            const bool leads = !r.near || r.near == r.group || !carried_in(members, r.near);
            return std::tuple(leads, r.devices, device_permille(r), r.device_memory, r.cpu_milli, r.memory);
        };
        return rank(a) > rank(b);
    });
    return order;
}

/// A member that has no place even alone, ignoring labels. In that case there is no plan for all
/// members.
[[nodiscard]] inline std::optional<gang_plan> lonely_member(const cluster& c,
                                                            std::span<const placement_request> members) {
    for (std::size_t i = 0; i < members.size(); ++i) {
        placement_request alone = members[i];
        alone.group = alone.near = alone.apart = {};
        if (const auto why = c.why_not(alone)) return gang_plan{.member = i, .why = why, .proven = true};
    }
    return std::nullopt;
}

}  // namespace detail

/// The most steps that plan_gang() takes after the greedy plan. They take a few hundred
/// microseconds.
inline constexpr std::size_t gang_steps = 2'000;

/// Plans the largest members first, and last the members that want to be near another member: the
/// policy places each member alongside the members before it. If a member then has no place, the
/// function tries all ways to place the members, within `most_steps` nodes or choices of devices.
/// So a gang of a few members on some tens of nodes is placed if it fits.
template <class P>
requires placement_policy<P>
[[nodiscard]] gang_plan plan_gang(P&& policy, const cluster& c, std::span<const placement_request> members,
                                  std::size_t most_steps = gang_steps) {
    auto order = detail::order_of_placing(members);
    gang_plan plan{.placements = std::vector<placement>(members.size())};
    cluster after = c;
    for (const auto i : order) {
        const auto p = choose(policy, after, members[i]);
        if (!p) {
            plan = {.member = i, .why = after.why_not(members[i]), .proven = members.size() == 1};
            break;
        }
        after.apply(*p);
        (*plan.placements)[i] = *p;
    }
    if (plan || plan.proven) return plan;
    if (auto alone = detail::lonely_member(c, members)) return *std::move(alone);
    detail::gang_search search(c, members, std::move(order), most_steps);
    if (search.run([](const cluster&, const placement&) { return true; }))
        plan = {.placements = std::move(search).placements()};
    else
        plan.proven = search.proven();
    return plan;
}

/// Applies all placements or none. Returns the shortage if the cluster has changed since the plan
/// was made.
[[nodiscard]] inline refusal try_apply_gang(cluster& c, std::span<const placement> gang) {
    // Applies the placements in the order of planning: a member that wants to be near another
    // member comes after that member. Adding labels can throw, so applied members are undone in the
    // reverse order.
    std::vector<placement_request> members;
    for (const auto& p : gang) members.push_back(p.request);
    const auto order = detail::order_of_placing(members);
    std::size_t done = 0;
    const auto undo = [&] {
        while (done != 0) (void)c.try_release(gang[order[--done]]);
    };
    try {
        for (; done < gang.size(); ++done) {
            if (const auto why = c.try_apply(gang[order[done]])) {
                undo();
                return why;
            }
        }
    } catch (...) {
        undo();
        throw;
    }
    return {};
}
/// try_apply_gang(), but throws operation_error.
inline void apply_gang(cluster& c, std::span<const placement> gang) {
    if (const auto why = try_apply_gang(c, gang))
        throw operation_error(to_errc(why.missing), {}, describe(why).c_str());
}

namespace detail {

/// The costs of nodes, and the lowest of them. The table keeps minima of blocks, so one change
/// costs at most one block.
class cost_table {
public:
    explicit cost_table(std::size_t nodes) : cost_(nodes, none), lowest_((nodes + block - 1) / block, none) {}

    static constexpr double none = std::numeric_limits<double>::infinity();

    void set(std::size_t node, double cost) noexcept {
        const double before = std::exchange(cost_[node], cost);
        double& lowest = lowest_[node / block];
        if (cost <= lowest) {
            lowest = cost;
        } else if (before == lowest) {
            const auto first = node - node % block;
            lowest = none;
            for (auto i = first; i < std::min(first + block, cost_.size()); ++i) lowest = std::min(lowest, cost_[i]);
        }
    }
    [[nodiscard]] double of(std::size_t node) const noexcept { return cost_[node]; }
    /// The first node with the lowest cost, or none.
    [[nodiscard]] std::optional<std::size_t> best() const noexcept {
        const auto at = std::ranges::min_element(lowest_);
        if (at == lowest_.end() || *at == none) return std::nullopt;
        auto node = static_cast<std::size_t>(at - lowest_.begin()) * block;
        while (cost_[node] != *at) ++node;
        return node;
    }

private:
    static constexpr std::size_t block = 64;
    std::vector<double> cost_, lowest_;
};

}  // namespace detail

struct rearrangement;

/// Keeps the cost of every node for each distinct request that was asked about, and a list of
/// changed nodes. A decision rates only the nodes that have changed since the last decision about
/// the same request. On average these are at most as many nodes as there are distinct requests,
/// however large the cluster is. Takes 8 bytes of memory for each node and distinct request, for at
/// most `most_requests` distinct requests, and drops the least recently used requests. Not
/// thread-safe.
template <class Policy>
requires stable_placement_policy<Policy>
class indexed_cluster {
public:
    /// Remembers the costs of the last `most_requests` distinct requests.
    indexed_cluster(cluster nodes, Policy policy, std::size_t most_requests = 1024)
        : cluster_(std::move(nodes)),
          policy_(std::move(policy)),
          most_requests_(std::max<std::size_t>(most_requests, 1)),
          changed_(std::max<std::size_t>(cluster_.size(), 1)),
          last_change_(cluster_.size(), 0) {}

    /// The nodes and their free capacity.
    [[nodiscard]] const cluster& nodes() const noexcept { return cluster_; }
    /// The policy.
    [[nodiscard]] const Policy& policy() const noexcept { return policy_; }

    /// Adds, resizes, drains, resumes and removes nodes and devices, or places on them:
    /// `change(nodes)` makes the change on the cluster. Known ratings are forgotten. If `change`
    /// throws, nothing is changed.
    template <std::invocable<cluster&> Change>
    void change_nodes(Change change) {
        cluster changed = cluster_;
        change(changed);
        std::vector<std::uint32_t> ring(std::max<std::size_t>(changed.size(), 1));
        std::vector<std::uint64_t> last(changed.size(), 0);
        known_.clear();
        cluster_ = std::move(changed);
        changed_ = std::move(ring);
        last_change_ = std::move(last);
        changes_ = 0;
    }

    /// Gives the same answer as `gpushare::choose`. For requests with labels, rates every node,
    /// because their fit doesn't depend on the node alone.
    [[nodiscard]] std::optional<placement> choose(const placement_request& r) {
        if (has_labels(r)) return gpushare::choose(policy_, cluster_, r);
        known& k = look_up(r);
        refresh(k, r);
        const auto best = k.costs.best();
        if (!best) return std::nullopt;
        const node_id id{static_cast<std::uint32_t>(*best)};
        return placement{r, id, detail::rated(policy_, cluster_[id], r).devices};
    }

    /// See cluster::try_apply.
    [[nodiscard]] refusal try_apply(const placement& p) {
        const auto why = cluster_.try_apply(p);
        if (!why) note_change(p.node);
        return why;
    }
    /// See cluster::apply.
    void apply(const placement& p) {
        cluster_.apply(p);
        note_change(p.node);
    }
    /// See cluster::hold.
    void hold(const placement& p) {
        cluster_.hold(p);
        note_change(p.node);
    }
    /// See cluster::try_release.
    [[nodiscard]] bool try_release(const placement& p) noexcept {
        const bool done = cluster_.try_release(p);
        if (done) note_change(p.node);
        return done;
    }
    /// See cluster::release.
    void release(const placement& p) {
        cluster_.release(p);
        note_change(p.node);
    }

private:
    template <class P>
    friend refusal try_apply(indexed_cluster<P>&, const rearrangement&);  // defragment.hpp

    struct known {
        detail::cost_table costs;
        std::uint64_t seen = 0;  // the number of changes taken into account
        std::uint64_t used = 0;  // the number of the last decision about this request
        bool fresh = true;
    };

    void note_change(node_id id) noexcept {
        changed_[changes_ % changed_.size()] = id.index;
        last_change_[id.index] = ++changes_;
    }

    known& look_up(const placement_request& r) {
        auto at = known_.find(r);
        if (at == known_.end()) {
            if (known_.size() >= most_requests_)
                known_.erase(std::ranges::min_element(known_, {}, [](const auto& k) { return k.second.used; }));
            at = known_.emplace(r, known{detail::cost_table(cluster_.size())}).first;
        }
        at->second.used = ++decisions_;
        return at->second;
    }

    void refresh(known& k, const placement_request& r) {
        if (k.fresh || changes_ - k.seen > changed_.size()) {
            k.fresh = true;  // until all nodes are rated; stays true if the policy throws
            rate_all(k, r);
            k.fresh = false;
        } else {
            for (auto c = k.seen; c < changes_; ++c) {
                const node_id id{changed_[c % changed_.size()]};
                // otherwise the node comes again later
                if (last_change_[id.index] == c + 1) rate(k, r, id);
            }
        }
        k.seen = changes_;
    }

    void rate(known& k, const placement_request& r, node_id id) {
        k.costs.set(id.index,
                    cluster_.fits(r, id) ? detail::rated(policy_, cluster_[id], r).cost : detail::cost_table::none);
    }

    void rate_all(known& k, const placement_request& r) {
        // A drained node looks like a full node, but a full node still takes an empty request.
        const bool by_state = rates_by_state<Policy> && (r.devices != 0 || r.cpu_milli != 0 || r.memory != bytes{});
        if (by_state) alike_.clear(cluster_.size());
        for (std::uint32_t i = 0; i < cluster_.size(); ++i) {
            const node_id like = by_state ? alike_.first_like(cluster_, {i}) : node_id{i};
            if (like.index != i)
                k.costs.set(i, k.costs.of(like.index));
            else
                rate(k, r, {i});
        }
    }

    cluster cluster_;
    Policy policy_;
    std::size_t most_requests_;
    std::map<placement_request, known> known_;
    std::vector<std::uint32_t> changed_;      // the latest changes, in a ring
    std::vector<std::uint64_t> last_change_;  // the number of each node's last change, from 1
    std::uint64_t changes_ = 0, decisions_ = 0;
    detail::alike_nodes alike_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
