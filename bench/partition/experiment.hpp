// SPDX-License-Identifier: Apache-2.0
// The published experiment. Pods arrive in random order until they have asked for 130 % of the
// GPUs. Each pod is placed if it fits, and no pod leaves. The result is the allocated percentage of
// the GPUs at each level of arrived demand.
//
//   const auto order = bench::arrivals(trace, seed, 1.3);
//   const bench::allocation a = bench::replay(trace, order, gpushare::best_fit{});
//   a.at(100);       // percent
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>

#include "partition/trace.hpp"

namespace bench {

inline constexpr int first_level = 50, last_level = 130;  // arrived demand in percent of capacity, in steps of 1

/// The pods of the trace in an order that the seed determines, followed by random pods of the
/// trace, until the pods ask for `demand` of the capacity.
[[nodiscard]] std::vector<gpushare::placement_request> arrivals(const placement_trace& trace, std::uint64_t seed,
                                                                double demand);

/// Allocated device time in percent of capacity for each level, and the cost of a decision.
class allocation {
public:
    explicit allocation(std::uint64_t capacity_permille) : capacity_(static_cast<double>(capacity_permille)) {}

    /// The caller must call this function after each arrival.
    void arrived(std::uint64_t permille, std::uint64_t placed_permille) {
        asked_ += static_cast<double>(permille);
        while (levels_.size() <= last_level - first_level &&
               100 * asked_ >= capacity_ * static_cast<double>(first_level + levels_.size()))
            levels_.push_back(100 * static_cast<double>(placed_permille) / capacity_);
    }
    [[nodiscard]] double at(int level) const { return levels_.at(static_cast<std::size_t>(level - first_level)); }
    [[nodiscard]] double asked_percent() const noexcept { return 100 * asked_ / capacity_; }

    double us_per_decision = 0;  // choosing and applying, in the thread's CPU time
    std::size_t moves = 0, refused = 0;

private:
    double capacity_, asked_ = 0;
    std::vector<double> levels_;
};

/// Adapts a policy that must look at every node each time, such as a random policy.
template <class Policy>
class scanned_cluster {
public:
    scanned_cluster(gpushare::cluster nodes, Policy policy) : nodes_(std::move(nodes)), policy_(std::move(policy)) {}

    [[nodiscard]] const gpushare::cluster& nodes() const noexcept { return nodes_; }
    [[nodiscard]] std::optional<gpushare::placement> choose(const gpushare::placement_request& r) {
        return gpushare::choose(policy_, nodes_, r);
    }
    void apply(const gpushare::placement& p) { nodes_.apply(p); }

private:
    gpushare::cluster nodes_;
    Policy policy_;
};

/// CPU time of the calling thread, which other programs don't affect.
[[nodiscard]] double thread_cpu_us();

/// CPU time of each decision, choosing and applying, in microseconds and in the order of arrival.
template <gpushare::stable_placement_policy Policy>
[[nodiscard]] std::vector<double> decision_times(const placement_trace& trace,
                                                 std::span<const gpushare::placement_request> order,
                                                 const Policy& policy) {
    gpushare::indexed_cluster<Policy> c(trace.nodes, policy);
    std::vector<double> times;
    times.reserve(order.size());
    for (const auto& r : order) {
        const double begin = thread_cpu_us();
        if (const auto p = c.choose(r)) c.apply(*p);
        times.push_back(thread_cpu_us() - begin);
    }
    return times;
}

template <class Cluster>
[[nodiscard]] allocation replay_on(Cluster c, std::span<const gpushare::placement_request> order) {
    allocation a(c.nodes().capacity_permille());
    const double begin = thread_cpu_us();
    for (const auto& r : order) {
        if (const auto p = c.choose(r))
            c.apply(*p);
        else
            ++a.refused;
        a.arrived(device_permille(r), c.nodes().placed_permille());
    }
    a.us_per_decision = (thread_cpu_us() - begin) / static_cast<double>(order.size());
    return a;
}

template <gpushare::placement_policy Policy>
[[nodiscard]] allocation replay(const placement_trace& trace, std::span<const gpushare::placement_request> order,
                                const Policy& policy) {
    if constexpr (gpushare::stable_placement_policy<Policy>)
        return replay_on(gpushare::indexed_cluster<Policy>(trace.nodes, policy), order);
    else
        return replay_on(scanned_cluster<Policy>(trace.nodes, policy), order);
}

/// Replays with moves, never more than one move per ten arrivals. Once nine tenths of the capacity
/// are placed, every tenth arrival moves pods if a move gains at least a hundredth of a device. If
/// a pod fits nowhere, one or two moves make room if possible.
template <gpushare::stable_placement_policy Policy>
[[nodiscard]] allocation replay_with_moves(const placement_trace& trace,
                                           std::span<const gpushare::placement_request> order, const Policy& policy) {
    constexpr std::size_t arrivals_per_move = 10;
    constexpr double least_gain = 10;  // in permille of a device
    gpushare::indexed_cluster<Policy> c(trace.nodes, policy);
    allocation a(c.nodes().capacity_permille());
    std::vector<gpushare::placement> placed;
    const auto carry_out = [&](const gpushare::rearrangement& plan) {
        gpushare::apply(c, plan);
        for (const auto& m : plan.moves) placed[m.which] = m.to;
        if (plan.added) placed.push_back(*plan.added);
        a.moves += plan.moves.size();
    };
    std::size_t arrived = 0;
    for (const auto& r : order) {
        const auto allowed = ++arrived / arrivals_per_move - a.moves;
        const bool nearly_full = 10 * c.nodes().placed_permille() >= 9 * c.nodes().capacity_permille();
        if (nearly_full && arrived % arrivals_per_move == 0 && allowed > 0)
            carry_out(gpushare::consolidate(c, placed, allowed, least_gain));
        if (const auto p = c.choose(r)) {
            c.apply(*p);
            placed.push_back(*p);
        } else if (const auto plan =
                       gpushare::make_room(policy, c.nodes(), placed, r, arrived / arrivals_per_move - a.moves)) {
            carry_out(*plan);
        } else {
            ++a.refused;
        }
        a.arrived(device_permille(r), c.nodes().placed_permille());
    }
    return a;
}

/// An upper bound on the allocated percentage. No placement of these requests can allocate more, in
/// any order and with any foresight.
///
/// The bound looks at devices alone, without nodes, cores or memory. A linear program fills devices
/// with parts of the arrived sizes in all possible combinations (column generation: Gilmore and
/// Gomory, "A linear programming approach to the cutting-stock problem", 1961). The function
/// returns the value of the dual program, which is an upper bound at any prices p: devices * (best
/// filling of one device at size - p) + p of all that has arrived.
[[nodiscard]] double allocation_bound(std::span<const gpushare::placement_request> arrived,
                                      std::uint64_t capacity_permille);

}  // namespace bench
