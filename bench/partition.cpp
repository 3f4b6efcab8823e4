// SPDX-License-Identifier: Apache-2.0
// Measures placement: how much of a shared GPU cluster each policy allocates in a published
// experiment, and what a decision costs. Also measures reservations across devices.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/value_descent.hpp>

#include "harness.hpp"
#include "partition/experiment.hpp"
#include "partition/reserve.hpp"
#include "partition/robustness.hpp"
#include "partition/trace.hpp"

namespace {

constexpr double last_demand = bench::last_level / 100.0;

struct options {
    std::filesystem::path json, pods, nodes;
    std::uint64_t seeds = 10;
    std::string_view part;  // empty: all parts except the sweep

    [[nodiscard]] bool wants(std::string_view name) const { return part.empty() ? name != "sweep" : part == name; }
};

constexpr std::string_view parts[] = {"published", "others", "sweep", "growth", "reserve"};

void print_usage(const char* program) {
    std::printf(
        "usage: %s [OUT.json [PART]] [--pods FILE --nodes FILE] [--seeds N]\n"
        "Prints figures, and writes them with all their repeats to OUT.json.\n"
        "Parts:\n"
        "  published  the experiment as it was published\n"
        "  others     the same on lists that the policies weren't made on\n"
        "  growth     what a decision costs on a larger cluster\n"
        "  reserve    reservations across devices\n"
        "  sweep      what each constant of value_descent is worth; only where it is asked for\n"
        "Lists as those of cluster-trace-gpu-v2023, or --seeds orders of arrival, 10 by default.\n",
        program);
}

options read_options(int argc, char** argv) {
    options o;
    int i = 1;
    for (int at = 1; at < argc; ++at) {
        if (std::string_view(argv[at]) != "--help" && std::string_view(argv[at]) != "-h") continue;
        print_usage(argv[0]);
        std::exit(0);
    }
    if (i < argc && !std::string_view(argv[i]).starts_with("--")) o.json = argv[i++];
    if (i < argc && !std::string_view(argv[i]).starts_with("--")) {
        o.part = argv[i++];
        if (std::ranges::find(parts, o.part) == std::end(parts))
            throw std::invalid_argument("there is no part '" + std::string(o.part) + "'; --help lists them");
    }
    for (; i < argc; i += 2) {
        const std::string_view name = argv[i];
        if (i + 1 == argc) throw std::invalid_argument(std::string(name) + " needs a value");
        if (name == "--pods") {
            o.pods = argv[i + 1];
        } else if (name == "--nodes") {
            o.nodes = argv[i + 1];
        } else if (name == "--seeds") {
            o.seeds = std::strtoull(argv[i + 1], nullptr, 10);
            if (o.seeds == 0) throw std::invalid_argument("--seeds needs a number from 1 on");
        } else {
            throw std::invalid_argument("unknown option " + std::string(name) +
                                        "; there are --pods, --nodes and --seeds");
        }
    }
    return o;
}

bench::placement_trace load(options& o) {
#ifdef GPUSHARE_SHARED_DATA
    const std::filesystem::path shared = GPUSHARE_SHARED_DATA;
    if (o.pods.empty() && exists(shared / "openb_pod_list_default.csv")) o.pods = shared / "openb_pod_list_default.csv";
    if (o.nodes.empty() && exists(shared / "openb_node_list_gpu_node.csv"))
        o.nodes = shared / "openb_node_list_gpu_node.csv";
#endif
    if (o.pods.empty() != o.nodes.empty()) throw std::invalid_argument("--pods and --nodes belong together");
    constexpr std::uint64_t generator_seed = 2023;
    return o.pods.empty() ? bench::generate_trace(generator_seed) : bench::read_trace(o.pods, o.nodes);
}

std::string decimal(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", x);
    return text;
}

/// The runs of one policy, one for each seed.
struct series {
    std::string name;
    std::vector<bench::allocation> runs;

    [[nodiscard]] std::vector<double> at(int level) const {
        std::vector<double> values;
        for (const auto& r : runs) values.push_back(r.at(level));
        return values;
    }
    [[nodiscard]] double mean(int level) const {
        double sum = 0;
        for (const auto& r : runs) sum += r.at(level);
        return sum / static_cast<double>(runs.size());
    }
};

void print_table(const std::vector<series>& all) {
    std::printf("# GPUs allocated in %% when arrivals have asked for so many %%, mean of the seeds\n# %-28s", "policy");
    constexpr int levels[] = {50, 70, 80, 90, 95, 100, 110, 120, 130};
    for (const int level : levels) std::printf("%7d", level);
    for (const auto& s : all) {
        std::printf("\n# %-28s", s.name.c_str());
        for (const int level : levels) std::printf("%7.2f", s.mean(level));
    }
    std::printf("\n");
    std::fflush(stdout);
}

/// Enlarges a cluster: repeats the list of nodes until there are `devices` devices, and repeats the
/// pods in proportion.
bench::placement_trace grown(const bench::placement_trace& t, std::size_t devices) {
    bench::placement_trace big{t.name, {}, {}};
    for (std::uint32_t i = 0; big.nodes.devices() < devices; ++i)
        big.nodes.add(t.nodes[{i % static_cast<std::uint32_t>(t.nodes.size())}].whole);
    for (std::size_t i = 0; i < t.pods.size() * devices / t.nodes.devices(); ++i)
        big.pods.push_back(t.pods[i % t.pods.size()]);
    return big;
}

void placement_figures(bench::report& r, const bench::placement_trace& trace, const options& o) {
    const gpushare::workload usual(trace.pods);
    const gpushare::value_descent ours(trace.nodes, usual);
    const gpushare::fragmentation_descent fgd(usual);
    std::vector<series> all{
        {"random", {}},    {"spreading", {}}, {"dot product", {}},          {"bin packing", {}},     {"best fit", {}},
        {"first fit", {}}, {"FGD", {}},       {"value descent (ours)", {}}, {"ours, with moves", {}}};
    enum { random, spreading, dot_product, bin_packing, best_fit, first_fit, descent, own, own_moves };
    std::vector<double> bounds, decision, slowest, learning;
    std::vector<double> bound_means(bench::last_level - bench::first_level + 1);
    for (std::uint64_t seed = 1; seed <= o.seeds; ++seed) {
        const auto order = bench::arrivals(trace, seed, last_demand);
        const auto run = [&](std::size_t which, const auto& policy) {
            all[which].runs.push_back(bench::replay(trace, order, policy));
        };
        run(random, gpushare::random_fit(seed));
        run(spreading, gpushare::spreading{});
        run(dot_product, gpushare::dot_product{});
        run(bin_packing, gpushare::bin_packing{});
        run(best_fit, gpushare::best_fit{});
        run(first_fit, gpushare::first_fit{});
        run(descent, fgd);
        run(own, ours);
        all[own_moves].runs.push_back(bench::replay_with_moves(trace, order, ours));
        decision.push_back(all[own].runs.back().us_per_decision);
        auto times = bench::decision_times(trace, order, ours);
        const auto p99 = times.begin() + static_cast<std::ptrdiff_t>(times.size() * 99 / 100);
        std::ranges::nth_element(times, p99);
        slowest.push_back(*p99);
        const double begin = bench::thread_cpu_us();
        bench::keep(gpushare::value_descent(trace.nodes, usual));
        learning.push_back((bench::thread_cpu_us() - begin) / 1000);

        // Only counts arrivals, to find the level that they have reached.
        bench::allocation asked(trace.nodes.capacity_permille());
        std::size_t arrived = 0;
        for (int level = bench::first_level; level <= bench::last_level; ++level) {
            while (asked.asked_percent() < level) asked.arrived(device_permille(order[arrived++]), 0);
            const double bound = bench::allocation_bound({order.data(), arrived}, trace.nodes.capacity_permille());
            bound_means[static_cast<std::size_t>(level - bench::first_level)] += bound / static_cast<double>(o.seeds);
            if (level == 100) bounds.push_back(bound);
        }
    }
    print_table(all);

    std::vector<double> worst, worst_of_best_fit;
    for (int level = bench::first_level; level <= bench::last_level; ++level) {
        worst.push_back(all[own].mean(level) - all[descent].mean(level));
        worst_of_best_fit.push_back(all[best_fit].mean(level) - all[descent].mean(level));
    }
    using enum bench::statistic;
    r.figure("partition.random_pct_at_100", all[random].at(100), "%", mean);
    r.figure("partition.spreading_pct_at_100", all[spreading].at(100), "%", mean);
    r.figure("partition.dotproduct_pct_at_100", all[dot_product].at(100), "%", mean);
    r.figure("partition.binpacking_pct_at_100", all[bin_packing].at(100), "%", mean);
    r.figure("partition.firstfit_pct_at_100", all[first_fit].at(100), "%", mean);
    r.figure("partition.bestfit_pct_at_100", all[best_fit].at(100), "%", mean);
    r.figure("partition.fgd_pct_at_100", all[descent].at(100), "%", mean);
    r.figure("partition.alloc_bound_pct", bounds, "%", mean);
    r.figure("partition.alloc_pct_at_100", all[own].at(100), "%", mean);
    r.figure("partition.alloc_pct_at_100_moves", all[own_moves].at(100), "%", mean);
    r.figure("partition.worst_vs_fgd_pp", worst, "pp", least);
    r.figure("partition.bestfit_worst_vs_fgd_pp", worst_of_best_fit, "pp", least);
    r.figure("partition.decision_us", decision, "us", mean);
    r.figure("partition.decision_p99_us", slowest, "us", most);
    r.figure("partition.learn_ms", learning, "ms");

    // results.py draws this table. Each line has a level of demand and the allocation of each
    // policy at that level.
    std::string curve = "GPUs asked for, %;no packing allocates more";
    for (const series& one : all) curve += ";" + one.name;
    constexpr int from = 80;
    for (int level = from; level <= bench::last_level; ++level) {
        curve += "\n" + std::to_string(level) + ";";
        curve += decimal(bound_means[static_cast<std::size_t>(level - bench::first_level)]);
        for (const series& one : all) curve += ";" + decimal(one.mean(level));
    }
    r.setting("curve_of",
              "GPUs allocated, " + trace.name + ", mean of " + std::to_string(o.seeds) + " orders of arrival");
    r.text("curve", curve + "\n");
}

void growth_figure(bench::report& r, const bench::placement_trace& trace) {
    constexpr std::size_t repeats = 5, large = 100'000;
    const gpushare::value_descent policy(trace.nodes, gpushare::workload(trace.pods));
    const auto big = grown(trace, large);
    std::uint64_t seed = 0;
    const auto cost = [&](const bench::placement_trace& t) {
        return bench::replay(t, bench::arrivals(t, ++seed, last_demand), policy).us_per_decision;
    };
    r.figure("partition.decision_growth",
             bench::ratios(
                 repeats, [&] { return cost(big); }, [&] { return cost(trace); }),
             "x");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        auto o = read_options(argc, argv);
        const auto trace = load(o);
        bench::start_a_second_thread();
        bench::report r(trace.name + ": " + std::to_string(trace.nodes.size()) + " nodes, " +
                        std::to_string(trace.nodes.devices()) + " GPUs, " + std::to_string(trace.pods.size()) +
                        " pods, " + std::to_string(o.seeds) + " seeds");
        if (o.wants("published")) placement_figures(r, trace, o);
        if (o.wants("others")) bench::bench_other_lists(r, trace, o.seeds);
        if (o.wants("growth")) growth_figure(r, trace);
        if (o.wants("reserve")) bench::bench_reservations(r);
        if (o.wants("sweep")) bench::sweep_constants(trace, o.seeds);
        r.write(o.json.empty() ? nullptr : o.json.c_str());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_partition: %s\n", e.what());
        return 1;
    }
}
