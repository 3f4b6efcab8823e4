// SPDX-License-Identifier: Apache-2.0
// The figures of real engines beside each other on a GPU, on a device in virtual time that replays what they launched on an
// H100: how late an urgent model's answers become, and what its neighbour still gets done. And how far that device is from
// the real one.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engines/colocation.hpp"
#include "engines/recording.hpp"
#include "harness.hpp"

namespace {

using engines::strategy;

struct neighbour {
    const char* name;
    const char* recorded;
    double host_pace;  // data/h100/README.md: host time to enqueue, over the recorded time under a profiler
    double call_bar, background_bar;
};
constexpr neighbour neighbours[] = {{"inference", "resnet50_inference", 4.5 / 6.6, 1.5, 72},
                                    {"prefill", "llm_prefill", 2.7 / 3.58, 1.7, 72},
                                    {"training", "resnet50_training", 15.0 / 38.0, 2.0, 70}};
constexpr double p99_bar = 1.25, cost_bar = 2;
constexpr strategy strategies[] = {strategy::plain, strategy::native, strategy::held, strategy::gated};

/// What an H100 did, run 1 of data/h100/colocation.csv. The rows "held" are of an experiment with 500 us in flight.
struct measured {
    const char* neighbour;
    strategy how;
    double call_p99_us, p99_us, background;
};
constexpr measured h100_did[] = {
    {"inference", strategy::plain, 4169, 396267, 0.924}, {"inference", strategy::native, 2372, 18407, 0.898},
    {"inference", strategy::held, 1248, 2363, 0.667},    {"prefill", strategy::plain, 5640, 1650420, 0.960},
    {"prefill", strategy::native, 2486, 53004, 0.901},   {"prefill", strategy::held, 1421, 2500, 0.763},
    {"training", strategy::plain, 4983, 51954, 0.902},   {"training", strategy::native, 3608, 13766, 0.860},
};

/// One seed: everything beside everything, relative to the same seed's runs alone.
struct round_of {
    engines::outcome urgent_alone;
    std::map<std::string, engines::outcome> beside;  // by "NEIGHBOUR STRATEGY"
    std::map<std::string, double> alone, held_alone, gated_alone;
};

std::string key(std::string_view name, strategy how) { return std::string(name) + ' ' + std::string(to_string(how)); }

round_of measure(const engines::recording& all, std::uint64_t seed) {
    round_of r;
    engines::setting s;
    s.urgent = &all.at("bert_graph");
    r.urgent_alone = engines::colocate(s, seed);
    for (const neighbour& n : neighbours) {
        s.background = &all.at(n.recorded);
        s.host_pace = n.host_pace;
        auto alone = s;
        alone.urgent = nullptr;
        r.alone[n.name] = engines::colocate(alone, seed).iterations_per_s;
        // What a gate costs while its urgent client never asks.
        alone.how = strategy::gated;
        r.gated_alone[n.name] = engines::colocate(alone, seed).iterations_per_s;
        alone.how = strategy::held;
        r.held_alone[n.name] = engines::colocate(alone, seed).iterations_per_s;
        for (const strategy how : strategies) {
            s.how = how;
            r.beside[key(n.name, how)] = engines::colocate(s, seed);
        }
    }
    return r;
}

template <class Of>
std::vector<double> each(const std::vector<round_of>& rounds, Of of) {
    std::vector<double> values;
    for (const round_of& r : rounds) values.push_back(of(r));
    return values;
}

std::vector<double> p99_over_alone(const std::vector<round_of>& rounds, const std::string& k,
                                   std::vector<double> engines::outcome::*of) {
    return each(rounds, [&](const round_of& r) {
        return engines::percentile(r.beside.at(k).*of, 0.99) / engines::percentile(r.urgent_alone.*of, 0.99);
    });
}
std::vector<double> background(const std::vector<round_of>& rounds, const std::string& k, const std::string& name) {
    return each(rounds, [&](const round_of& r) { return 100 * r.beside.at(k).iterations_per_s / r.alone.at(name); });
}

// The gate in the stream has figures with bars; native priority alone is what has to miss those of latency.
void report_gate(bench::report& out, const engines::recording& all, const std::vector<round_of>& rounds,
                 const neighbour& n) {
    const std::string k = key(n.name, strategy::gated), native = key(n.name, strategy::native);
    const auto latency = [&](const char* name, auto of, double bar) {
        out.figure(std::string("engines.") + name + n.name, p99_over_alone(rounds, k, of), "x",
                   {bench::at_most(bar), bench::value_of(bench::statistic::median, p99_over_alone(rounds, native, of)),
                    "native priorities alone"});
    };
    latency("p99_vs_alone_", &engines::outcome::from_arrival_us, p99_bar);
    latency("call_p99_vs_alone_", &engines::outcome::call_us, n.call_bar);
    engines::setting slow;
    slow.urgent = &all.at("bert_graph");
    slow.background = &all.at(n.recorded);
    slow.host_pace = n.host_pace;
    slow.how = strategy::gated;
    slow.gate.linger = gpushare::ns{3'000'000};
    out.figure(std::string("engines.background_pct_") + n.name, background(rounds, k, n.name), "%",
               {bench::at_least(n.background_bar),
                100 * engines::colocate(slow, 1).iterations_per_s / rounds[0].alone.at(n.name), "a linger of 3 ms"});
}

void report_other(bench::report& out, const std::vector<round_of>& rounds, const neighbour& n, strategy how) {
    const std::string end = std::string(n.name) + '_' + std::string(to_string(how)), k = key(n.name, how);
    out.figure("engines.p99_vs_alone_" + end, p99_over_alone(rounds, k, &engines::outcome::from_arrival_us), "x");
    out.figure("engines.call_p99_vs_alone_" + end, p99_over_alone(rounds, k, &engines::outcome::call_us), "x");
    out.figure("engines.background_pct_" + end, background(rounds, k, n.name), "%");
    if (how == strategy::held)
        out.figure("engines.held_longest_us_" + std::string(n.name),
                   each(rounds, [&](const round_of& r) { return r.beside.at(k).longest_hold_us; }), "us");
}

// What the gate costs while its urgent client never asks, the worst neighbour; and where it costs too much, one of them.
void report_costs(bench::report& out, const engines::recording& all, const std::vector<round_of>& rounds) {
    const auto worst = [&](auto rates) {
        return each(rounds, [&](const round_of& r) {
            double most = 0;
            for (const auto& [name, rate] : r.*rates) most = std::max(most, 100 * (1 - rate / r.alone.at(name)));
            return most;
        });
    };
    const auto cost = [&](const engines::setting& s) {
        return 100 * (1 - engines::colocate(s, 1).iterations_per_s / rounds[0].alone.at(neighbours[0].name));
    };
    engines::setting s;
    s.background = &all.at(neighbours[0].recorded);
    s.host_pace = neighbours[0].host_pace;
    auto dear = s;
    dear.how = strategy::gated;
    dear.host.wait_in_stream = gpushare::ns{50'000};
    auto tight = s;
    tight.how = strategy::held;
    tight.gate.in_flight = gpushare::ns{1000};
    out.figure("engines.gate_cost_pct", worst(&round_of::gated_alone), "%",
               {bench::at_most(cost_bar), cost(dear), "a wait that costs its stream 50 us"});
    out.figure("engines.hold_cost_pct", worst(&round_of::held_alone), "%",
               {bench::at_most(cost_bar), cost(tight), "one launch in flight at a time"});
}

/// How far this device is from an H100: cells within what the bars allow, and the worst.
void report_model(bench::report& out, const engines::recording& all, std::uint64_t seed) {
    engines::setting s;
    s.urgent = &all.at("bert_graph");
    s.gate = {.in_flight = gpushare::ns{500'000}, .linger = gpushare::ns{0}};  // as in the experiment
    double worst_call = 0, worst_background = 0, worst_held = 0;
    std::string table = "neighbour, strategy: call P99 here and there in us, background here and there\n";
    for (const measured& m : h100_did) {
        for (const neighbour& n : neighbours) {
            if (std::string_view(n.name) != m.neighbour) continue;
            s.background = &all.at(n.recorded);
            s.host_pace = n.host_pace;
        }
        auto alone = s;
        alone.urgent = nullptr;
        alone.how = strategy::plain;
        s.how = m.how;
        const auto r = engines::colocate(s, seed);
        const double call = engines::percentile(r.call_us, 0.99);
        const double background = r.iterations_per_s / engines::colocate(alone, seed).iterations_per_s;
        worst_call = std::max(worst_call, 100 * std::abs(call / m.call_p99_us - 1));
        worst_background = std::max(worst_background, std::abs(background - m.background));
        if (m.how == strategy::held)
            worst_held =
                std::max(worst_held, 100 * std::abs(engines::percentile(r.from_arrival_us, 0.99) / m.p99_us - 1));
        char line[160];
        std::snprintf(line, sizeof line, "%s, %s: %.0f and %.0f, %.3f and %.3f\n", m.neighbour, to_string(m.how).data(),
                      call, m.call_p99_us, background, m.background);
        table += line;
    }
    out.text("this device and an H100", table);
    out.figure("engines.model_call_p99_error_pct", {worst_call}, "%");
    out.figure("engines.model_background_error", {worst_background}, "of alone");
    out.figure("engines.model_held_p99_error_pct", {worst_held}, "%");
}

int run(const char* json) {
#ifdef GPUSHARE_SHARED_DATA
    const std::filesystem::path recorded = std::filesystem::path(GPUSHARE_SHARED_DATA) / "h100" / "kernels.csv.gz";
#else
    const std::filesystem::path recorded;
#endif
    bench::report out("engines: 2 s of virtual time, requests at random at a quarter of what the urgent model can do");
    if (!std::filesystem::exists(recorded)) {
        std::puts("# no recorded launches: nothing is measured");
        return 0;
    }
    const auto all = engines::read_recording(recorded.string());
    std::vector<round_of> rounds;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) rounds.push_back(measure(all, seed));
    for (const neighbour& n : neighbours) {
        report_gate(out, all, rounds, n);
        for (const strategy how : {strategy::plain, strategy::native, strategy::held})
            report_other(out, rounds, n, how);
    }
    report_costs(out, all, rounds);
    report_model(out, all, 1);
    out.write(json);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && (std::string_view(argv[1]) == "--help" || std::string_view(argv[1]) == "-h")) {
        std::printf("usage: %s [OUT.json]\nPrints figures, and writes them with all their repeats to OUT.json.\n",
                    argv[0]);
        return 0;
    }
    try {
        return run(argc > 1 ? argv[1] : nullptr);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
        return 1;
    }
}
