// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "memory.hpp"
#include "open_wait.hpp"
#include "percentile.hpp"

namespace gpu_engines {
namespace {

struct bars {
    const char* neighbour;
    double call, background;
};
constexpr bars neighbours[] = {{"inference", 1.5, 72}, {"prefill", 1.7, 72}, {"training", 2.0, 70}};
constexpr double p99_bar = 1.25, cost_bar = 2, share_bar = 1, metering_bar = 1, bound_bar = 3;
constexpr std::chrono::milliseconds planted_rest{3};

using rounds_of = std::vector<round_of>;
using kind = std::vector<double> latencies::*;

template <class Of>
std::vector<double> each(const rounds_of& rounds, Of of) {
    std::vector<double> values;
    for (const round_of& r : rounds) values.push_back(of(r));
    return values;
}
double median(std::vector<double> values) { return bench::value_of(bench::statistic::median, std::move(values)); }

std::vector<double> p99_over_alone(const rounds_of& rounds, const std::string& k, kind of) {
    return each(rounds, [&](const round_of& r) {
        return bench::percentile(r.beside.at(k).answers.*of, 0.99) / bench::percentile(r.alone.*of, 0.99);
    });
}
std::vector<double> background_pct(const rounds_of& rounds, const std::string& k, const std::string& name) {
    return each(rounds,
                [&](const round_of& r) { return 100 * r.beside.at(k).busy[0].passes_per_s / r.passes_alone.at(name); });
}

void report_alone(bench::report& out, const rounds_of& rounds) {
    const auto p99 = [&](const char* name, auto of, kind what) {
        out.figure(name, each(rounds, [&](const round_of& r) { return bench::percentile(r.*of.*what, 0.99); }), "us");
    };
    p99("gpu.engines_alone_p99_us", &round_of::alone, &latencies::from_arrival_us);
    p99("gpu.engines_alone_call_p99_us", &round_of::alone, &latencies::call_us);
    for (const bars& n : neighbours)
        out.figure(std::string("gpu.engines_alone_passes_per_s_") + n.neighbour,
                   each(rounds, [&](const round_of& r) { return r.passes_alone.at(n.neighbour); }), "1/s");
}

/// Reports the figures of another strategy, for comparison with the gate in the stream.
void report_strategy(bench::report& out, const rounds_of& rounds, const std::string& name, strategy how) {
    const std::string k = key(name, how), end = name + '_' + std::string(to_string(how));
    out.figure("gpu.engines_p99_vs_alone_" + end, p99_over_alone(rounds, k, &latencies::from_arrival_us), "x");
    out.figure("gpu.engines_call_p99_vs_alone_" + end, p99_over_alone(rounds, k, &latencies::call_us), "x");
    out.figure("gpu.engines_background_pct_" + end, background_pct(rounds, k, name), "%");
    if (how == strategy::held)
        out.figure("gpu.engines_held_longest_us_" + name,
                   each(rounds, [&](const round_of& r) { return r.beside.at(k).busy[0].longest_hold_us; }), "us");
}

/// The same neighbour with a planted fault: the neighbour rests between passes.
double resting_background_pct(cast& all, const rounds_of& rounds, busy_tenant& t) {
    const auto r = colocate(all.timed({.serving = &all.serving(strategy::gated, true),
                                       .busy = {{.tenant = &t, .rest = planted_rest}},
                                       .how = strategy::gated,
                                       .per_s = all.requests_per_s(true)}),
                            1);
    return 100 * r.busy[0].passes_per_s / rounds[0].passes_alone.at(t.name);
}

void report_gate(bench::report& out, cast& all, const rounds_of& rounds, busy_tenant& t, const bars& n) {
    const std::string k = key(t.name, strategy::gated), native = key(t.name, strategy::native);
    const auto latency = [&](const char* name, kind of, double bar) {
        out.figure(name + t.name, p99_over_alone(rounds, k, of), "x",
                   {bench::at_most(bar), median(p99_over_alone(rounds, native, of)), "native priorities alone"});
    };
    latency("gpu.engines_p99_vs_alone_", &latencies::from_arrival_us, p99_bar);
    latency("gpu.engines_call_p99_vs_alone_", &latencies::call_us, n.call);
    out.figure("gpu.engines_background_pct_" + t.name, background_pct(rounds, k, t.name), "%",
               {bench::at_least(n.background), resting_background_pct(all, rounds, t),
                "a neighbour that rests between two passes"});
}

void report_eager(bench::report& out, const rounds_of& rounds) {
    const std::string name = neighbours[0].neighbour;
    for (const strategy how : {strategy::gated, strategy::plain})
        out.figure("gpu.engines_eager_p99_vs_alone_" + name + (how == strategy::plain ? "_plain" : ""),
                   each(rounds,
                        [&](const round_of& r) {
                            return bench::percentile(r.eager_beside.at(key(name, how)).answers.from_arrival_us, 0.99) /
                                   bench::percentile(r.eager_alone.from_arrival_us, 0.99);
                        }),
                   "x");
}

/// The worse neighbour counts. `kept` is the fraction of the charges that the account keeps.
double metering_error_pct(const round_of& r, strategy how, double kept) {
    double worst = 0;
    for (const double charged : r.charged.at(how)) worst = std::max(worst, 100 * std::abs(kept * charged - 1));
    return worst;
}

void report_costs(bench::report& out, cast& all, const rounds_of& rounds) {
    const auto of = [&](auto what, strategy how) {
        return each(rounds, [&](const round_of& r) { return (r.*what).at(how); });
    };
    busy_tenant& first = *all.busy().front();
    const double resting =
        100 * (1 - alone_per_s(all, {.tenant = &first, .rest = planted_rest}) / rounds[0].passes_alone.at(first.name));
    const double untold = share_error_pp(all, rounds[0], strategy::gated, {30, 70}, false);
    for (const strategy how : gates) {
        const std::string end = how == strategy::held ? "_held" : "";
        out.figure(how == strategy::held ? "gpu.engines_hold_cost_pct" : "gpu.engines_gate_cost_pct",
                   of(&round_of::cost_pct, how), "%",
                   {bench::at_most(cost_bar), resting, "a neighbour that rests between two passes"});
        out.figure("gpu.engines_share_error_pp" + end, of(&round_of::share_error_pp, how), "pp",
                   {bench::at_most(share_bar), untold, "a gate that isn't told the weights"});
        out.figure("gpu.engines_alone_cost_pct" + end, of(&round_of::alone_cost_pct, how), "%",
                   {bench::at_most(cost_bar), resting, "a neighbour that rests between two passes"});
        out.figure("gpu.engines_side_by_side_cost_pct" + end, of(&round_of::beside_cost_pct, how), "%",
                   {bench::at_most(cost_bar), resting, "a neighbour that rests between two passes"});
        out.figure("gpu.engines_share_error_10_90_pp" + end, of(&round_of::tenth_error_pp, how), "pp",
                   {bench::at_most(share_bar), untold, "a gate that isn't told the weights"});
        out.figure("gpu.engines_share_error_three_pp" + end, of(&round_of::thirds_error_pp, how), "pp",
                   {bench::at_most(share_bar), untold, "a gate that isn't told the weights"});
        out.figure("gpu.engines_metering_error_pct" + end,
                   each(rounds, [&](const round_of& r) { return metering_error_pct(r, how, 1); }), "%",
                   {bench::at_most(metering_bar), metering_error_pct(rounds[0], how, 0.8),
                    "an account that lacks every fifth pass"});
    }
}

// The announced bound divided by the P99 of the waits. A wait is the time by which a call exceeds
// the P99 of calls alone.
double told_over_wait(const latencies& a, const latencies& alone) {
    const double wait = bench::percentile(a.call_us, 0.99) - bench::percentile(alone.call_us, 0.99);
    return bench::percentile(a.told_us, 0.5) / std::max(1.0, wait);
}
// Counts calls that took longer than their bound plus the longest call alone. Returns NaN without a
// call alone: a slow machine may answer no request within the time of a small run.
double violations(const latencies& a, const latencies& alone) {
    if (alone.call_us.empty()) return std::numeric_limits<double>::quiet_NaN();
    return static_cast<double>(
        std::ranges::count_if(a.beyond_us, [&](double us) { return us > alone.call_us.back(); }));
}

double worst_told_over_wait(const round_of& r, strategy how) {
    double worst = 0;
    for (const bars& n : neighbours)
        worst = std::max(worst, told_over_wait(r.beside.at(key(n.neighbour, how)).answers, r.alone));
    return worst;
}
double all_violations(const round_of& r, strategy how) {
    double sum = 0;
    for (const bars& n : neighbours) sum += violations(r.beside.at(key(n.neighbour, how)).answers, r.alone);
    return sum;
}

void report_bounds(bench::report& out, cast& all, const rounds_of& rounds) {
    const latencies& alone = rounds[0].alone;
    const auto loose = colocate(all.timed({.serving = &all.serving(strategy::gated, true),
                                           .in_flight = gpushare::ns{2'000'000},
                                           .busy = {{.tenant = all.busy().front().get()}},
                                           .how = strategy::gated,
                                           .per_s = all.requests_per_s(true)}),
                                1);
    latencies unheld = rounds[0].beside.at(key(neighbours[0].neighbour, strategy::plain)).answers;
    for (double& us : unheld.call_us) unheld.beyond_us.push_back(us - 1000);
    for (const strategy how : gates) {
        const std::string end = how == strategy::held ? "_held" : "";
        out.figure("gpu.engines_bound_vs_p99" + end,
                   each(rounds, [&](const round_of& r) { return worst_told_over_wait(r, how); }), "x",
                   {bench::at_most(bound_bar), told_over_wait(loose.answers, alone),
                    "pieces a tenth as long as the gate counts with"});
        out.figure("gpu.engines_bound_violations" + end,
                   each(rounds, [&](const round_of& r) { return all_violations(r, how); }), "calls",
                   {bench::at_most(0), violations(unheld, alone), "plain threads that are told a millisecond"});
    }
}

constexpr double memory_bar = 0.99;

void report_memory(bench::report& out, const cast& all) {
    for (const bool trains : {false, true}) {
        const auto r = pool_vs_cache([&] { return all.make_resnet(trains); }, all.is_small());
        out.figure(std::string("gpu.torch_pool_vs_cache_") + (trains ? "training" : "inference"), r.of_scope, "x",
                   {bench::at_least(memory_bar), r.of_no_cache, "a tenant that keeps no memory behind a pass"});
    }
}

}  // namespace

void report(bench::report& out, cast& all, const rounds_of& rounds) {
    report_alone(out, rounds);
    const bool device = all.where() == place::cuda;
    for (std::size_t i = 0; i < std::size(neighbours); ++i) {
        busy_tenant& t = *all.busy()[i];
        if (device) report_gate(out, all, rounds, t, neighbours[i]);
        for (const strategy how : {strategy::held, strategy::acquire, strategy::native, strategy::plain})
            if (device || how == strategy::plain) report_strategy(out, rounds, t.name, how);
    }
    if (!device) return;
    report_eager(out, rounds);
    report_costs(out, all, rounds);
    report_bounds(out, all, rounds);
    report_memory(out, all);
    if (const auto us = open_wait_us(all.is_small()); !us.empty()) out.figure("gpu.open_wait_us", us, "us");
}

}  // namespace gpu_engines
