// SPDX-License-Identifier: Apache-2.0
// Measures real engines that share a GPU, on a device in virtual time that replays launches
// recorded on an H100. The figures say how late an urgent model's answers are, how much work the
// neighbour still completes, and how closely the virtual device matches the real one.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <future>
#include <limits>
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
    // From data/h100/README.md: host time to enqueue, over the recorded time under a profiler.
    double host_pace;
    double call_bar, background_bar;
};
constexpr neighbour neighbours[] = {{"inference", "resnet50_inference", 4.5 / 6.6, 1.5, 72},
                                    {"prefill", "llm_prefill", 2.7 / 3.58, 1.7, 72},
                                    {"training", "resnet50_training", 15.0 / 38.0, 2.0, 70}};
constexpr double p99_bar = 1.25, cost_bar = 2, share_bar = 1, metering_bar = 1, bound_bar = 3, beyond_bar = 2;
constexpr strategy strategies[] = {strategy::plain, strategy::native, strategy::acquire, strategy::held,
                                   strategy::gated};
constexpr double quarter = 428;  // requests a second: a quarter of what BERT can serve alone

/// Measurements on an H100: run 1 of data/h100/colocation.csv. The rows with strategy "single" come
/// from an experiment with at most 500 us in flight.
struct measured {
    const char* neighbour;
    strategy how;
    double call_p99_us, p50_us, p90_us, p99_us, background;
};
// Fitted to that run's host: the P99 of a call alone is 860 us, the median about 600.
constexpr double late_launches = 0.025;
constexpr measured h100_did[] = {
    {"inference", strategy::plain, 4169, 192096, 367658, 396267, 0.924},
    {"inference", strategy::native, 2372, 3904, 10612, 18407, 0.898},
    {"inference", strategy::acquire, 2427, 4232, 11980, 20156, 0.902},
    {"inference", strategy::single, 1248, 1036, 1513, 2363, 0.667},
    {"prefill", strategy::plain, 5640, 901153, 1509830, 1650420, 0.960},
    {"prefill", strategy::native, 2486, 19296, 42896, 53004, 0.901},
    {"prefill", strategy::acquire, 2633, 17649, 38357, 55766, 0.890},
    {"prefill", strategy::single, 1421, 1213, 1739, 2500, 0.763},
    {"training", strategy::plain, 4983, 6268, 37005, 51954, 0.902},
    {"training", strategy::native, 3608, 3943, 9091, 13766, 0.860},
    {"training", strategy::acquire, 3229, 4184, 9901, 16215, 0.896},
};

engines::busy_model busy(const engines::recording& all, const neighbour& n, std::uint32_t weight = 1) {
    return {.model = &all.at(n.recorded), .host_pace = n.host_pace, .weight = weight};
}
engines::served_model bert(const engines::recording& all, double per_s = quarter) {
    return {.model = &all.at("bert_graph"), .per_s = per_s};
}
double alone_rate(const engines::busy_model& m, std::uint64_t seed) {
    return engines::colocate({.busy = {m}}, seed).busy[0].iterations_per_s;
}

/// Results for one seed: every neighbour with every strategy. Figures relate these to runs of the
/// same seed in which each model is alone. The same requests arrive in all runs.
struct round_of {
    engines::answers urgent_alone, urgent_alone_gated;
    std::map<std::string, engines::outcome> beside;  // key: "NEIGHBOUR STRATEGY"
    std::map<std::string, double> alone, held_alone, gated_alone;
};

std::string key(std::string_view name, strategy how) { return std::string(name) + ' ' + std::string(to_string(how)); }

// The neighbour's rate behind a gate whose urgent client never makes a request.
double rate_behind(engines::setting s, const engines::recording& all, const neighbour& n, std::uint64_t seed) {
    s.served = {bert(all, 0)};
    s.busy = {busy(all, n)};
    return engines::colocate(s, seed).busy[0].iterations_per_s;
}

round_of measure(const engines::recording& all, std::uint64_t seed) {
    round_of r;
    auto urgent = bert(all);
    urgent.arrivals = seed;
    r.urgent_alone = engines::colocate({.served = {urgent}}, seed).served[0];
    r.urgent_alone_gated = engines::colocate({.served = {urgent}, .how = strategy::gated}, seed).served[0];
    for (const neighbour& n : neighbours) {
        const auto m = busy(all, n);
        r.alone[n.name] = alone_rate(m, seed);
        r.gated_alone[n.name] = rate_behind({.how = strategy::gated}, all, n, seed);
        r.held_alone[n.name] = rate_behind({.how = strategy::held}, all, n, seed);
        for (const strategy how : strategies)
            r.beside[key(n.name, how)] = engines::colocate({.served = {urgent}, .busy = {m}, .how = how}, seed);
    }
    return r;
}

// Calls of(seed) for each seed on a separate thread. Time is virtual, so runs don't disturb each
// other's figures.
template <class Of>
auto of_seeds(std::uint64_t seeds, Of of) {
    std::vector<std::future<decltype(of(seeds))>> under_way;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) under_way.push_back(std::async(std::launch::async, of, seed));
    std::vector<decltype(of(seeds))> results;
    for (auto& result : under_way) results.push_back(result.get());
    return results;
}

template <class Of>
std::vector<double> each(const std::vector<round_of>& rounds, Of of) {
    std::vector<double> values;
    for (const round_of& r : rounds) values.push_back(of(r));
    return values;
}

std::vector<double> p99_over_alone(const std::vector<round_of>& rounds, const std::string& k,
                                   std::vector<double> engines::answers::*of) {
    return each(rounds, [&](const round_of& r) {
        return engines::percentile(r.beside.at(k).served[0].*of, 0.99) / engines::percentile(r.urgent_alone.*of, 0.99);
    });
}
std::vector<double> background(const std::vector<round_of>& rounds, const std::string& k, const std::string& name) {
    return each(rounds,
                [&](const round_of& r) { return 100 * r.beside.at(k).busy[0].iterations_per_s / r.alone.at(name); });
}

// Reports the figures with bars for the gate in the stream. The control for the latency figures is
// native priority alone, which must miss the bar.
void report_gate(bench::report& out, const engines::recording& all, const std::vector<round_of>& rounds,
                 const neighbour& n) {
    const std::string k = key(n.name, strategy::gated), native = key(n.name, strategy::native);
    const auto latency = [&](const char* name, auto of, double bar) {
        out.figure(std::string("engines.") + name + n.name, p99_over_alone(rounds, k, of), "x",
                   {bench::at_most(bar), bench::value_of(bench::statistic::median, p99_over_alone(rounds, native, of)),
                    "native priorities alone"});
    };
    latency("p99_vs_alone_", &engines::answers::from_arrival_us, p99_bar);
    latency("call_p99_vs_alone_", &engines::answers::call_us, n.call_bar);
    engines::setting slow{.served = {bert(all)}, .busy = {busy(all, n)}, .how = strategy::gated};
    slow.host.wait_in_stream = gpushare::ns{30'000};
    out.figure(std::string("engines.background_pct_") + n.name, background(rounds, k, n.name), "%",
               {bench::at_least(n.background_bar),
                100 * engines::colocate(slow, 1).busy[0].iterations_per_s / rounds[0].alone.at(n.name),
                "waits that cost 30 us each"});
}

void report_other(bench::report& out, const std::vector<round_of>& rounds, const neighbour& n, strategy how) {
    const std::string end = std::string(n.name) + '_' + std::string(to_string(how)), k = key(n.name, how);
    out.figure("engines.p99_vs_alone_" + end, p99_over_alone(rounds, k, &engines::answers::from_arrival_us), "x");
    out.figure("engines.call_p99_vs_alone_" + end, p99_over_alone(rounds, k, &engines::answers::call_us), "x");
    out.figure("engines.background_pct_" + end, background(rounds, k, n.name), "%");
    if (how == strategy::held)
        out.figure("engines.held_longest_us_" + std::string(n.name),
                   each(rounds, [&](const round_of& r) { return r.beside.at(k).busy[0].longest_hold_us; }), "us");
}

// The first function reports the loss of one engine without neighbours behind the gate: the worst
// of the three engines. The second function reports the loss in combined progress, compared with
// plain threads, of two engines with neither priority nor shares: inference beside prefill.
double cost_alone(const engines::recording& all, strategy how, std::uint64_t seed) {
    double worst = 0;
    for (const neighbour& n : neighbours) {
        const auto m = busy(all, n, 0);
        const auto rate = engines::colocate({.busy = {m}, .how = how}, seed).busy[0].iterations_per_s;
        worst = std::max(worst, 100 * (1 - rate / alone_rate(m, seed)));
    }
    return worst;
}
double cost_side_by_side(const engines::recording& all, strategy how, std::uint64_t seed) {
    const std::vector<engines::busy_model> two{busy(all, neighbours[0], 0), busy(all, neighbours[1], 0)};
    const auto done = [&](strategy by) {
        const auto r = engines::colocate({.busy = two, .how = by}, seed);
        double all_of_it = 0;
        for (std::size_t i = 0; i < two.size(); ++i) all_of_it += r.busy[i].iterations_per_s / alone_rate(two[i], seed);
        return all_of_it;
    };
    return 100 * (1 - done(how) / done(strategy::plain));
}

void report_costs_of_nothing(bench::report& out, const engines::recording& all, double planted, std::uint64_t seeds) {
    const auto figure = [&](const char* name, auto cost) {
        std::vector<double> worst;
        for (std::uint64_t seed = 1; seed <= seeds; ++seed)
            worst.push_back(std::max(cost(all, strategy::held, seed), cost(all, strategy::gated, seed)));
        out.figure(name, worst, "%", {bench::at_most(cost_bar), planted, "one launch in flight at a time"});
    };
    figure("engines.alone_cost_pct", cost_alone);
    figure("engines.side_by_side_cost_pct", cost_side_by_side);
}

// Reports the cost of the gate while the urgent client makes no request: the worst neighbour
// counts. The controls make the gate too expensive for one neighbour.
void report_costs(bench::report& out, const engines::recording& all, const std::vector<round_of>& rounds) {
    const auto worst = [&](auto rates) {
        return each(rounds, [&](const round_of& r) {
            double most = 0;
            for (const auto& [name, rate] : r.*rates) most = std::max(most, 100 * (1 - rate / r.alone.at(name)));
            return most;
        });
    };
    const auto cost = [&](const engines::setting& s) {
        return 100 * (1 - rate_behind(s, all, neighbours[0], 1) / rounds[0].alone.at(neighbours[0].name));
    };
    engines::setting dear{.how = strategy::gated}, tight{.how = strategy::held};
    dear.host.wait_in_stream = gpushare::ns{50'000};
    tight.gate.in_flight = gpushare::ns{1000};
    out.figure("engines.gate_cost_pct", worst(&round_of::gated_alone), "%",
               {bench::at_most(cost_bar), cost(dear), "a wait that costs its stream 50 us"});
    const double planted = cost(tight);
    out.figure("engines.hold_cost_pct", worst(&round_of::held_alone), "%",
               {bench::at_most(cost_bar), planted, "one launch in flight at a time"});
    report_costs_of_nothing(out, all, planted, 3);
}

// ---- shares and charges

/// The worst errors over all engines in a set of runs: device time against share, and charge
/// against device time. `progress_pct` adds up each engine's rate relative to its rate alone, and
/// keeps the lowest sum.
struct division_errors {
    double share_pp = 0, of_alone_pp = 0, metering_pct = 0, progress_pct = std::numeric_limits<double>::infinity();

    void add(const division_errors& e) {
        share_pp = std::max(share_pp, e.share_pp);
        of_alone_pp = std::max(of_alone_pp, e.of_alone_pp);
        metering_pct = std::max(metering_pct, e.metering_pct);
        progress_pct = std::min(progress_pct, e.progress_pct);
    }
};

/// `weights` are percentages for the engines in the order of `neighbours`; 0 leaves an engine out.
/// With `kept` false, the gate doesn't get the weights. `accounted` is the fraction of the charges
/// that reaches the account.
division_errors divide(const engines::recording& all, strategy how, const std::vector<std::uint32_t>& weights,
                       std::uint64_t seed, bool kept = true, double accounted = 1) {
    engines::setting s{.how = how};
    std::vector<double> shares, alone;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        if (weights[i] == 0) continue;
        s.busy.push_back(busy(all, neighbours[i], kept ? weights[i] : 1));
        shares.push_back(weights[i]);
        alone.push_back(alone_rate(s.busy.back(), seed));
    }
    const auto r = engines::colocate(s, seed);
    double device = 0, progress = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
        device += r.busy[i].device_s;
        progress += r.busy[i].iterations_per_s / alone[i];
    }
    division_errors worst{.progress_pct = 100 * progress};
    for (std::size_t i = 0; i < shares.size(); ++i) {
        const auto larger = [](double& into, double x) { into = std::max(into, std::abs(x)); };
        larger(worst.share_pp, 100 * r.busy[i].device_s / device - shares[i]);
        larger(worst.of_alone_pp, 100 * r.busy[i].iterations_per_s / alone[i] / progress - shares[i]);
        larger(worst.metering_pct, 100 * (accounted * r.busy[i].charged_s / r.busy[i].device_s - 1));
    }
    return worst;
}

void report_shares(bench::report& out, const engines::recording& all, std::uint64_t seeds) {
    const std::vector<std::uint32_t> divisions[] = {{30, 70}, {70, 30}, {10, 90}, {90, 10}, {0, 30, 70}, {20, 30, 50}};
    std::vector<double> share, of_alone, metering, progress;
    const auto errors = of_seeds(seeds, [&](std::uint64_t seed) {
        division_errors worst;
        for (const auto& weights : divisions)
            for (const strategy how : {strategy::held, strategy::gated}) worst.add(divide(all, how, weights, seed));
        return worst;
    });
    for (const division_errors& worst : errors) {
        share.push_back(worst.share_pp);
        of_alone.push_back(worst.of_alone_pp);
        metering.push_back(worst.metering_pct);
        progress.push_back(worst.progress_pct);
    }
    out.figure("engines.share_error_pp", share, "pp",
               {bench::at_most(share_bar), divide(all, strategy::held, divisions[0], 1, false).share_pp,
                "a gate that isn't told the weights"});
    out.figure("engines.share_of_alone_error_pp", of_alone, "pp");
    out.figure("engines.metering_error_pct", metering, "%",
               {bench::at_most(metering_bar), divide(all, strategy::held, divisions[0], 1, true, 0.8).metering_pct,
                "an account that lacks every fifth launch"});
    out.figure("engines.turns_progress_pct", progress, "%");
}

// ---- bounds

// The time of an urgent engine's calls without neighbours. These times scatter by less than a
// microsecond.
struct alone_call {
    double p99_us, longest_us;
    explicit alone_call(const engines::answers& a)
        : p99_us(engines::percentile(a.call_us, 0.99)), longest_us(a.call_us.back() + 1) {}
};
// The announced bound divided by the P99 of the waits. A wait is the time by which a call exceeds
// the P99 of calls alone.
double told_over_wait(const engines::answers& a, const alone_call& alone, double quantile) {
    return engines::percentile(a.told_us, quantile) /
           std::max(1.0, engines::percentile(a.call_us, 0.99) - alone.p99_us);
}

// Reports the worse of the two mechanisms.
void report_bounds(bench::report& out, const engines::recording& all, const std::vector<round_of>& rounds) {
    std::vector<double> over_p99, p99_over_p99, violations;
    for (const round_of& r : rounds) {
        // Includes the host time that the gate adds to a request.
        const alone_call alone(r.urgent_alone_gated);
        double most = 0, most_p99 = 0;
        std::ptrdiff_t broken = 0;
        for (const neighbour& n : neighbours)
            for (const strategy how : {strategy::held, strategy::gated}) {
                const auto& a = r.beside.at(key(n.name, how)).served[0];
                most = std::max(most, told_over_wait(a, alone, 0.5));
                most_p99 = std::max(most_p99, told_over_wait(a, alone, 0.99));
                broken += std::ranges::count_if(a.beyond_us, [&](double us) { return us > alone.longest_us; });
            }
        over_p99.push_back(most);
        p99_over_p99.push_back(most_p99);
        violations.push_back(static_cast<double>(broken));
    }
    const alone_call alone(rounds[0].urgent_alone_gated);
    engines::setting loose{.served = {bert(all)}, .busy = {busy(all, neighbours[0])}, .how = strategy::gated};
    loose.gate.in_flight = gpushare::ns{2'000'000};
    out.figure("engines.bound_vs_p99", over_p99, "x",
               {bench::at_most(bound_bar), told_over_wait(engines::colocate(loose, 1).served[0], alone, 0.5),
                "pieces a tenth as long as the gate counts with"});
    out.figure("engines.bound_p99_vs_p99", p99_over_p99, "x");
    const auto& native = rounds[0].beside.at(key(neighbours[0].name, strategy::native)).served[0];
    const auto& held = rounds[0].beside.at(key(neighbours[0].name, strategy::held)).served[0];
    out.figure("engines.bound_violations", violations, "calls",
               {bench::at_most(0),
                static_cast<double>(std::ranges::count_if(
                    native.call_us, [&](double us) { return us > alone.longest_us + held.told_us.back(); })),
                "nobody holds back"},
               bench::statistic::most);
}

// ---- further loads, with one bar for all

/// The worst P99 from arrival among the urgent engines, relative to the same engine without
/// neighbours.
double worst_p99_over(const engines::outcome& both, const engines::outcome& alone) {
    double worst = 0;
    for (std::size_t i = 0; i < both.served.size(); ++i)
        worst = std::max(worst, engines::percentile(both.served[i].from_arrival_us, 0.99) /
                                    engines::percentile(alone.served[i].from_arrival_us, 0.99));
    return worst;
}
engines::setting natively(engines::setting s) {
    s.how = strategy::native;
    return s;
}
engines::outcome without_busy(engines::setting s) {
    s.busy.clear();
    return engines::colocate(s, 1);
}

/// Reports the P99 relative to the same requests alone, and how much work the neighbour still
/// completes.
void report_beside(bench::report& out, const std::string& name, engines::setting s) {
    for (std::size_t i = 0; i < s.served.size(); ++i) s.served[i].arrivals = i + 1;
    const auto alone = without_busy(s), both = engines::colocate(s, 1), native = engines::colocate(natively(s), 1);
    const std::vector<double> p99{worst_p99_over(both, alone)};
    if (s.how == strategy::gated)
        out.figure("engines.p99_vs_alone_" + name, p99, "x",
                   {bench::at_most(beyond_bar), worst_p99_over(native, alone), "native priorities alone"});
    else
        out.figure("engines.p99_vs_alone_" + name, p99, "x");
    out.figure("engines.background_pct_" + name, {100 * both.busy[0].iterations_per_s / alone_rate(s.busy[0], 1)}, "%");
}

// ---- a step of decoding for each token, 100 a second, each with a deadline

engines::setting decoding(const engines::recording& all) {
    return {.served = {{.model = &all.at("llama_decode"), .per_s = 100}},
            .busy = {busy(all, neighbours[1])},
            .how = strategy::gated};
}

struct late_tokens {
    double alone_pct, more_pp;
    double background_per_s = 0;
};
// Counts late tokens: those that take longer from arrival than twice the median time of a decoding
// step alone. Returns the percentage alone, and how many points more are late beside neighbours,
// for the same tokens.
late_tokens late_of(const engines::answers& beside, const engines::answers& alone) {
    const double deadline = 2 * engines::percentile(alone.call_us, 0.5);
    const std::size_t tokens = std::min(beside.in_order.size(), alone.in_order.size());
    const auto late = [&](const engines::answers& a) {
        std::size_t n = 0;
        for (std::size_t i = 0; i < tokens; ++i)
            if (engines::detail::in_us(a.in_order[i].from_arrival) > deadline) ++n;
        return 100 * static_cast<double>(n) / static_cast<double>(tokens);
    };
    return {late(alone), late(beside) - late(alone)};
}
std::vector<late_tokens> late_beside(const engines::setting& s, std::uint64_t seeds) {
    return of_seeds(seeds, [&s](std::uint64_t seed) {
        engines::setting of = s;
        of.served[0].arrivals = seed;
        const auto both = engines::colocate(of, seed);
        of.busy.clear();
        late_tokens late = late_of(both.served[0], engines::colocate(of, seed).served[0]);
        late.background_per_s = both.busy[0].iterations_per_s;
        return late;
    });
}
std::vector<double> part(const std::vector<late_tokens>& seeds, double late_tokens::*which) {
    std::vector<double> values;
    for (const late_tokens& late : seeds) values.push_back(late.*which);
    return values;
}

// Explains why tokens are late: the part that no gate can prevent, and the part that remains when
// one cause is removed at a time.
void report_late_floors(bench::report& out, const engines::setting& s, const std::vector<late_tokens>& gated) {
    const auto figure = [&](const char* name, const engines::setting& other) {
        auto late = late_beside(other, gated.size());
        out.figure(name, part(late, &late_tokens::more_pp), "pp", bench::statistic::mean);
        return late;
    };
    engines::setting each_kernel = s, slows_nobody = s, shorter = s, even = s, ahead = s;
    constexpr gpushare::ns none{0};
    each_kernel.busy[0].piece = each_kernel.host.wait_in_stream = none;
    each_kernel.host.gate = {none, none, none, none, none};
    figure("engines.decode_late_floor_pp", each_kernel);
    slows_nobody.device.beside_memory = 0;
    figure("engines.decode_late_no_slowdown_pp", slows_nobody);
    const auto model = engines::cut(*s.busy[0].model, gpushare::ns{100'000});
    shorter.busy[0].model = &model;
    figure("engines.decode_late_short_kernels_pp", shorter);
    even.served[0].even = true;
    figure("engines.decode_late_even_pp", even);
    ahead.served[0].ahead = gpushare::ns{600'000};  // longer than any kernel of prefill
    const auto announced = figure("engines.decode_late_announced_pp", ahead);
    std::vector<double> cost;
    for (std::size_t i = 0; i < gated.size(); ++i)
        cost.push_back(100 * (1 - announced[i].background_per_s / gated[i].background_per_s));
    out.figure("engines.decode_announced_cost_pct", cost, "%");
}

void report_decoding(bench::report& out, const engines::recording& all) {
    engines::setting s = decoding(all);
    report_beside(out, "prefill_decode", s);
    // Late tokens are rare, so the run needs about 5,000 tokens.
    s.length = gpushare::ns{10'000'000'000};
    const auto late = late_beside(s, 5);
    out.figure("engines.decode_late_pp", part(late, &late_tokens::more_pp), "pp",
               {bench::at_most(1), late_beside(natively(s), 1)[0].more_pp, "native priorities alone"},
               bench::statistic::mean);
    out.figure("engines.decode_late_alone_pct", part(late, &late_tokens::alone_pct), "%", bench::statistic::mean);
    report_late_floors(out, s, late);
}

void report_beyond(bench::report& out, const engines::recording& all) {
    for (const neighbour& n : neighbours) {
        engines::setting s{.busy = {busy(all, n)}, .how = strategy::gated};
        const std::string name = n.name;
        for (const int load : {5, 50, 75}) {
            s.served = {bert(all, quarter * load / 25)};
            report_beside(out, name + "_load_" + std::to_string(load), s);
        }
        s.served = {bert(all)};
        s.served[0].burst = 8;
        report_beside(out, name + "_bursts_of_8", s);
        s.served = {bert(all, quarter / 2), bert(all, quarter / 2)};
        report_beside(out, name + "_two_urgent", s);
    }
    for (const strategy how : {strategy::gated, strategy::held}) {
        engines::setting graph{.served = {bert(all)}, .busy = {busy(all, neighbours[0])}, .how = how};
        graph.busy[0].as_graph = true;
        report_beside(out, "inference_graph" + std::string(how == strategy::held ? "_held" : ""), graph);
    }
}

// ---- how far this device is from an H100

/// A row of h100_did next to the virtual device's results.
struct modelled {
    measured there;
    double call_p50_us, call_p99_us, p50_us, p90_us, p99_us, background;
};

/// The changes that a control makes to the experiment or to the device. The defaults change
/// nothing.
struct altered {
    gpushare::ns in_flight{500'000};
    double per_s = quarter;
    engines::device_constants device{};
};
std::vector<modelled> model_all(const engines::recording& all, std::uint64_t seed, const altered& as = {}) {
    std::vector<modelled> cells;
    for (const measured& m : h100_did) {
        const neighbour& n = *std::ranges::find(neighbours, std::string_view(m.neighbour), &neighbour::name);
        engines::setting s{.served = {bert(all, as.per_s)}, .busy = {busy(all, n)}, .how = m.how};
        s.gate = {.in_flight = as.in_flight, .linger = gpushare::ns{0}};  // as in the experiment
        s.host.late = late_launches;
        s.device = as.device;
        const auto r = engines::colocate(s, seed);
        const auto of = [](const std::vector<double>& us, double q) { return engines::percentile(us, q); };
        const auto& [from_arrival, call, told, beyond, in_order] = r.served[0];
        cells.push_back({m, of(call, 0.5), of(call, 0.99), of(from_arrival, 0.5), of(from_arrival, 0.9),
                         of(from_arrival, 0.99), r.busy[0].iterations_per_s / alone_rate(s.busy[0], seed)});
    }
    return cells;
}

double error_pct(double here, double there) { return 100 * std::abs(here / there - 1); }
double call_error_pct(const modelled& c) { return error_pct(c.call_p99_us, c.there.call_p99_us); }
double background_error(const modelled& c) { return std::abs(c.background - c.there.background); }
// The worst error among the percentiles from arrival.
double arrival_error_pct(const modelled& c) {
    return std::max({error_pct(c.p50_us, c.there.p50_us), error_pct(c.p90_us, c.there.p90_us),
                     error_pct(c.p99_us, c.there.p99_us)});
}
// Counts only the strategy that holds launches back. With the other strategies, the queue
// multiplies any error.
double held_error_pct(const modelled& c) { return c.there.how == strategy::single ? arrival_error_pct(c) : 0; }
template <class Error>
double worst_of(const std::vector<modelled>& cells, Error error) {
    double worst = 0;
    for (const modelled& c : cells) worst = std::max(worst, error(c));
    return worst;
}
template <class Error>
double cells_within(const std::vector<modelled>& cells, Error error, double most) {
    return static_cast<double>(std::ranges::count_if(cells, [&](const modelled& c) { return error(c) <= most; }));
}
/// Counts pairs of strategies with the same neighbour whose call times rank differently on the
/// virtual device than on the H100. Pairs within 15 % on the H100 don't count, because even calls
/// alone differ by more between runs.
double pairs_in_another_order(const std::vector<modelled>& cells) {
    std::ptrdiff_t n = 0;
    for (const modelled& a : cells)
        n += std::ranges::count_if(cells, [&](const modelled& b) {
            return std::string_view(a.there.neighbour) == b.there.neighbour &&
                   1.15 * a.there.call_p99_us < b.there.call_p99_us && a.call_p99_us >= b.call_p99_us;
        });
    return static_cast<double>(n);
}

void print_model(bench::report& out, const std::vector<modelled>& cells) {
    std::string table =
        "neighbour, strategy: median call here, call P99 here and there, from arrival P50, P90 and P99 here and there, "
        "all in us; background here and there\n";
    for (const modelled& c : cells) {
        char line[256];
        std::snprintf(line, sizeof line,
                      "%s, %s: %.0f, %.0f and %.0f, %.0f and %.0f, %.0f and %.0f, %.0f and %.0f; %.3f and %.3f\n",
                      c.there.neighbour, to_string(c.there.how).data(), c.call_p50_us, c.call_p99_us,
                      c.there.call_p99_us, c.p50_us, c.there.p50_us, c.p90_us, c.there.p90_us, c.p99_us, c.there.p99_us,
                      c.background, c.there.background);
        table += line;
    }
    out.text("this device and an H100", table);
}

// Reports the strategies that don't hold launches back. No bar is possible for these strategies.
void report_arrivals(bench::report& out, const std::vector<modelled>& cells) {
    for (const strategy how : {strategy::plain, strategy::native, strategy::acquire}) {
        const auto error = [how](const modelled& c) { return c.there.how == how ? arrival_error_pct(c) : 0; };
        out.figure("engines.model_arrival_error_pct_" + std::string(to_string(how)), {worst_of(cells, error)}, "%");
    }
}

void report_model(bench::report& out, const engines::recording& all, std::uint64_t seed) {
    const auto cells = model_all(all, seed);
    print_model(out, cells);
    out.figure("engines.model_call_p99_error_pct", {worst_of(cells, call_error_pct)}, "%");
    out.figure("engines.model_background_error", {worst_of(cells, background_error)}, "of alone");
    report_arrivals(out, cells);
    const auto loose = model_all(all, seed, {.in_flight = gpushare::ns{20'000'000}});
    const auto even = model_all(all, seed, {.device = {.beside_memory = 0, .jitter = 0, .tail = 0}});
    const auto twice = model_all(all, seed, {.per_s = 2 * quarter});
    const auto count = [&](const char* name, auto error, double within, double bar, const auto& planted,
                           const char* fault) {
        out.figure(name, {cells_within(cells, error, within)}, "cells",
                   {bench::at_least(bar), cells_within(planted, error, within), fault});
    };
    // The bars require the same fraction of eleven cells as 14 and 16 of 18 cells.
    count("engines.model_call_p99_within_20_pct", call_error_pct, 20, 9, even, "blocks that don't slow each other");
    count("engines.model_background_within_8_pp", background_error, 0.08, 10, twice, "twice the requests");
    out.figure("engines.model_held_error_pct", {worst_of(cells, held_error_pct)}, "%",
               {bench::at_most(20), worst_of(loose, held_error_pct), "a hold that lets 20 ms through"});
    out.figure("engines.model_pairs_in_another_order", {pairs_in_another_order(cells)}, "pairs",
               {bench::at_most(0), pairs_in_another_order(loose), "a hold that lets 20 ms through"});
}

int run(const char* json) {
#ifdef GPUSHARE_SHARED_DATA
    const std::filesystem::path recorded = std::filesystem::path(GPUSHARE_SHARED_DATA) / "h100" / "kernels.csv.gz";
#else
    const std::filesystem::path recorded;
#endif
    bench::report out(
        "engines: 2 s of virtual time (tokens of a decoding: 10 s), requests at random at a quarter of what the urgent "
        "model can do");
    out.setting("clock", "virtual");
    if (!std::filesystem::exists(recorded)) {
        std::puts("# no recorded launches: nothing is measured");
        return 0;
    }
    const auto all = engines::read_recording(recorded.string());
    report_decoding(out, all);
    const auto rounds = of_seeds(5, [&all](std::uint64_t seed) { return measure(all, seed); });
    for (const neighbour& n : neighbours) {
        report_gate(out, all, rounds, n);
        for (const strategy how : {strategy::plain, strategy::native, strategy::acquire, strategy::held})
            report_other(out, rounds, n, how);
    }
    report_costs(out, all, rounds);
    report_shares(out, all, 3);
    report_bounds(out, all, rounds);
    report_beyond(out, all);
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
