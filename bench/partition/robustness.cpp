// SPDX-License-Identifier: Apache-2.0
#include "partition/robustness.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/value_descent.hpp>

#include "partition/experiment.hpp"
#include "partition/other_lists.hpp"

namespace bench {

namespace {

using gpushare::fragmentation_descent;
using gpushare::placement_request;
using gpushare::value_descent;
using gpushare::workload;

constexpr double last_demand = last_level / 100.0;
constexpr int full = 100;  // the level of the main figure

double mean(std::span<const double> values) { return value_of(statistic::mean, {values.begin(), values.end()}); }

/// Compares the allocations of two policies over the seeds.
struct comparison {
    std::vector<double> ours, theirs;  // at 100 %, for each seed
    std::vector<double> ahead =        // for each level, summed over the seeds
        std::vector<double>(last_level - first_level + 1);

    void add(const allocation& a, const allocation& b) {
        ours.push_back(a.at(full));
        theirs.push_back(b.at(full));
        for (int level = first_level; level <= last_level; ++level)
            ahead[static_cast<std::size_t>(level - first_level)] += a.at(level) - b.at(level);
    }
    [[nodiscard]] std::vector<double> differences() const {
        std::vector<double> d(ours.size());
        std::ranges::transform(ours, theirs, d.begin(), [](double a, double b) { return a - b; });
        return d;
    }
    /// The mean over the seeds at the level where the mean is lowest.
    [[nodiscard]] double worst_level() const { return std::ranges::min(ahead) / static_cast<double>(ours.size()); }

    void print(std::string_view name) const {
        const auto d = differences();
        const auto worst = std::ranges::min_element(d) - d.begin();
        std::printf(
            "# %-34.*s %6.2f against %6.2f; ahead by %5.2f, at the worst level %5.2f, of the worst seed (%td) %5.2f\n",
            static_cast<int>(name.size()), name.data(), mean(ours), mean(theirs), mean(d), worst_level(), worst + 1,
            d[static_cast<std::size_t>(worst)]);
        std::fflush(stdout);
    }
};

/// Learns anew from all arrived requests each time their number has doubled.
allocation replay_learning(const placement_trace& trace, std::span<const placement_request> order,
                           const workload& at_first) {
    std::size_t next = 500;
    std::optional<gpushare::indexed_cluster<value_descent>> c;
    c.emplace(trace.nodes, value_descent(trace.nodes, at_first));
    allocation a(trace.nodes.capacity_permille());
    for (std::size_t arrived = 0; arrived < order.size(); ++arrived) {
        if (arrived == next) {
            auto state = c->nodes();
            c.emplace(std::move(state), value_descent(trace.nodes, workload(order.first(arrived))));
            next *= 2;
        }
        if (const auto p = c->choose(order[arrived])) c->apply(*p);
        a.arrived(device_permille(order[arrived]), c->nodes().placed_permille());
    }
    return a;
}

/// Our allocation at 100 %, as a mean over the seeds: on the list, on halves of the list, and on
/// lists in which everything has changed.
struct swept {
    double same = 0, half = 0, changed = 0;
};

swept sweep_one(const placement_trace& trace, std::uint64_t seeds, const gpushare::value_descent_options& o) {
    swept s;
    const auto at_full = [&](std::span<const placement_request> known, const placement_trace& judged,
                             std::uint64_t seed) {
        const value_descent policy(trace.nodes, workload(known), o);
        return replay(judged, arrivals(judged, seed, last_demand), policy).at(full) / static_cast<double>(seeds);
    };
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        s.same += at_full(trace.pods, trace, seed);
        const auto [known, judged] = halves(trace, seed);
        s.half += at_full(known, judged, seed);
        const auto other = perturbations().back().apply(trace, seed);
        s.changed += at_full(other.pods, other, seed);
    }
    return s;
}

}  // namespace

void bench_other_lists(report& r, const placement_trace& trace, std::uint64_t seeds) {
    comparison half;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        const auto [pods, judged] = halves(trace, seed);
        const workload known(pods);
        const auto order = arrivals(judged, seed, last_demand);
        half.add(replay(judged, order, value_descent(trace.nodes, known)),
                 replay(judged, order, fragmentation_descent(known)));
    }
    std::printf("# GPUs allocated in %% at 100 %%, ours against FGD, means of the seeds\n");
    half.print("half of the list known");
    r.figure("partition.alloc_pct_at_100_half", half.ours, "%", statistic::mean);
    r.figure("partition.fgd_pct_at_100_half", half.theirs, "%", statistic::mean);
    r.figure("partition.half_vs_fgd_pp", half.differences(), "pp", statistic::mean);

    const workload published(trace.pods);
    const value_descent old_prices(trace.nodes, published);
    std::vector<double> perturbed, perturbed_worst, stale, relearnt;
    for (const auto& p : perturbations()) {
        comparison informed, outdated, learning;
        for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
            const auto other = p.apply(trace, seed);
            const workload known(other.pods);
            const auto order = arrivals(other, seed, last_demand);
            const auto fgd = replay(other, order, fragmentation_descent(known));
            informed.add(replay(other, order, value_descent(trace.nodes, known)), fgd);
            outdated.add(replay(other, order, old_prices), replay(other, order, fragmentation_descent(published)));
            learning.add(replay_learning(other, order, published), fgd);
        }
        const std::string name(p.name);
        informed.print(name);
        outdated.print("  both with the published list");
        learning.print("  ours learns as they arrive");
        perturbed.push_back(mean(informed.differences()));
        perturbed_worst.push_back(informed.worst_level());
        stale.push_back(mean(outdated.differences()));
        relearnt.push_back(mean(learning.differences()));
    }
    r.figure("partition.perturbed_vs_fgd_pp", perturbed, "pp", statistic::least);
    r.figure("partition.perturbed_worst_vs_fgd_pp", perturbed_worst, "pp", statistic::least);
    r.figure("partition.stale_vs_fgd_pp", stale, "pp", statistic::least);
    r.figure("partition.relearnt_vs_fgd_pp", relearnt, "pp", statistic::least);
}

void sweep_constants(const placement_trace& trace, std::uint64_t seeds) {
    std::printf("# ours at 100 %%, mean of %llu seeds      on the list   on halves   all changed\n",
                static_cast<unsigned long long>(seeds));
    const auto print = [&](const char* what, double value, const gpushare::value_descent_options& o) {
        const auto s = sweep_one(trace, seeds, o);
        std::printf("# %-22s %8.4g %14.2f %11.2f %13.2f\n", what, value, s.same, s.half, s.changed);
        std::fflush(stdout);
    };
    for (const double w : {0.0, 1.0 / 128, 1.0 / 64, 1.0 / 32, 1.0 / 16, 1.0 / 8, 1.0 / 4})
        print("fragmentation_weight", w, {.fragmentation_weight = w});
    for (const std::size_t n : {25, 75, 150, 300, 600}) print("rounds", static_cast<double>(n), {.rounds = n});
    for (const double step : {0.125, 0.25, 0.5, 1.0}) print("first_step", step, {.first_step = step});
}

}  // namespace bench
