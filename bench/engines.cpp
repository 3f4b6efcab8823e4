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
};
constexpr neighbour neighbours[] = {{"inference", "resnet50_inference", 4.5 / 6.6},
                                    {"prefill", "llm_prefill", 2.7 / 3.58},
                                    {"training", "resnet50_training", 15.0 / 38.0}};
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

// The figures of the gate in the stream have the plain names; others say what orders the two instead.
void report_neighbour(bench::report& out, const std::vector<round_of>& rounds, const neighbour& n, strategy how) {
    const std::string end =
        std::string("_") + n.name + (how == strategy::gated ? "" : '_' + std::string(to_string(how)));
    const std::string k = key(n.name, how);
    const auto p99_over_alone = [&](auto of) {
        return each(rounds, [&](const round_of& r) {
            return engines::percentile(r.beside.at(k).*of, 0.99) / engines::percentile(r.urgent_alone.*of, 0.99);
        });
    };
    out.figure("engines.p99_vs_alone" + end, p99_over_alone(&engines::outcome::from_arrival_us), "x");
    out.figure("engines.call_p99_vs_alone" + end, p99_over_alone(&engines::outcome::call_us), "x");
    out.figure(
        "engines.background_pct" + end,
        each(rounds, [&](const round_of& r) { return 100 * r.beside.at(k).iterations_per_s / r.alone.at(n.name); }),
        "%");
    if (how == strategy::held)
        out.figure("engines.held_longest_us_" + std::string(n.name),
                   each(rounds, [&](const round_of& r) { return r.beside.at(k).longest_hold_us; }), "us");
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
    for (const neighbour& n : neighbours)
        for (const strategy how : strategies) report_neighbour(out, rounds, n, how);
    const auto worst_cost = [&](auto rates) {
        return each(rounds, [&](const round_of& r) {
            double worst = 0;
            for (const auto& [name, rate] : r.*rates) worst = std::max(worst, 100 * (1 - rate / r.alone.at(name)));
            return worst;
        });
    };
    out.figure("engines.gate_cost_pct", worst_cost(&round_of::gated_alone), "%");
    out.figure("engines.hold_cost_pct", worst_cost(&round_of::held_alone), "%");
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
