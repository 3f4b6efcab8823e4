// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/report.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <range/v3/view/zip.hpp>
#include <set>

#include <gpushare/observe/metrics.hpp>

namespace trace_replay {

namespace {

template <class... Args>
std::string print(const char* format, Args... args) {
    std::array<char, 512> text{};
    const int n = std::snprintf(text.data(), text.size(), format, args...);
    return {text.data(), std::min(text.size() - 1, static_cast<std::size_t>(std::max(n, 0)))};
}

std::string milliseconds(double ms) {
    if (std::isnan(ms)) return "-";
    return ms < 100 ? print("%.1f", ms) : print("%.0f", ms);
}

std::string gib(gpushare::bytes b) { return print("%.1f", static_cast<double>(b.count()) / (1ULL << 30)); }

/// The tenant that goes first in the weighted run.
std::size_t urgent_tenant(const workload& w) {
    return static_cast<std::size_t>(std::ranges::find(w.tenants, true, &tenant_profile::urgent) - w.tenants.begin());
}

std::size_t refused(const outcome& o) {
    std::size_t n = 0;
    for (const auto& t : o.tenants) n += t.refused;
    return n;
}

/// Whether any two tenants were backlogged together for a second. Otherwise there is no share error
/// to report.
bool compared(const outcome& o) { return std::ranges::any_of(o.tenants, &tenant_outcome::windows); }

/// For example "5.1x shorter" or "1.3x longer".
std::string change(double from, double to) {
    return to <= from ? print("%.1fx shorter", from / to) : print("%.1fx longer", to / from);
}

/// The tenant whose P99 grew most between the two runs; the number of tenants if no P99 grew.
std::size_t biggest_loser(const workload& w, const outcome& from, const outcome& to) {
    std::size_t loser = w.tenants.size();
    double growth = 1;
    for (std::size_t t = 0; t < w.tenants.size(); ++t) {
        const double factor = quantile(to.tenants[t].latency_ms, 0.99) / quantile(from.tenants[t].latency_ms, 0.99);
        if (!(factor > growth)) continue;  // NaN if no requests were done
        growth = factor;
        loser = t;
    }
    return loser;
}

}  // namespace

double quantile(std::vector<double> values, double q) {
    if (values.empty()) return no_value;
    const auto rank = static_cast<std::size_t>(std::ceil(q * static_cast<double>(values.size())));
    const auto at = values.begin() + static_cast<std::ptrdiff_t>(std::max<std::size_t>(rank, 1) - 1);
    std::ranges::nth_element(values, at);
    return *at;
}

std::string to_table(const workload& w, const outcome& o) {
    using enum gpushare::align;
    gpushare::table t{{"tenant"},         {"done", right},       {"refused", right},        {"failed", right},
                      {"share %", right}, {"configured", right}, {"device seconds", right}, {"p50 ms", right},
                      {"p99 ms", right},  {"peak GiB", right},   {"quota GiB", right}};
    for (const auto& [profile, got] : ranges::views::zip(w.tenants, o.tenants)) {
        const bool first = o.how == way::weighted && profile.urgent;
        const bool compared = got.windows != 0;
        t.add_row({profile.name, std::to_string(got.done), std::to_string(got.refused), std::to_string(got.failed),
                   compared ? print("%.1f", got.achieved * 100) : "-",
                   first                     ? "goes first"
                   : !compared               ? "-"
                   : o.how == way::unlimited ? "none"
                                             : print("%.1f", got.configured * 100),
                   std::to_string(got.windows), milliseconds(quantile(got.latency_ms, 0.5)),
                   milliseconds(quantile(got.latency_ms, 0.99)), gib(got.peak),
                   o.how == way::unlimited ? "none" : gib(got.quota)});
    }
    auto text = print("%s: %.1f s, at least three tenants backlogged on one device for %.1f s\n",
                      std::string(to_string(o.how)).c_str(), o.length_s, o.together_s) +
                t.str();
    if (o.how == way::unlimited) return text;
    if (!compared(o))
        return text + "no two tenants were backlogged together for a whole second: no shares to compare\n";
    return text +
           print(
               "largest share error of a backlogged tenant over any second: %.2f percentage points, %.1f %% of a "
               "share\n",
               o.share_error_pp, o.share_error_percent);
}

std::size_t differing_results(std::span<const outcome> runs) {
    std::size_t differing = 0;
    for (std::size_t job = 0; job < runs.front().results.size(); ++job) {
        std::set<std::uint64_t> seen;
        for (const auto& run : runs)
            if (run.results[job] != 0) seen.insert(run.results[job]);
        differing += seen.size() > 1;
    }
    return differing;
}

std::string verdict(const workload& w, std::span<const outcome> runs) {
    const outcome &free = runs.front(), &weighted = runs.back();
    const auto u = urgent_tenant(w);
    const double before = quantile(free.tenants[u].latency_ms, 0.99);
    const double after = quantile(weighted.tenants[u].latency_ms, 0.99);
    const auto differing = differing_results(runs);
    const auto name = [&](std::size_t t) { return w.tenants[t].name.c_str(); };
    std::string text = "With gpushare";
    if (!std::isnan(before) && !std::isnan(after))
        text += print(" the p99 latency of priority tenant %s went from %s to %s ms (%s),", name(u),
                      milliseconds(before).c_str(), milliseconds(after).c_str(), change(before, after).c_str());
    if (const auto loser = biggest_loser(w, free, weighted); loser < w.tenants.size())
        text += print(" that of %s, who paid most for it, from %s to %s ms,", name(loser),
                      milliseconds(quantile(free.tenants[loser].latency_ms, 0.99)).c_str(),
                      milliseconds(quantile(weighted.tenants[loser].latency_ms, 0.99)).c_str());
    if (compared(weighted))
        text += print(" backlogged tenants got their configured shares within %.2f percentage points,",
                      weighted.share_error_pp);
    text += print(" refused requests went from %zu to %zu, and %s.", refused(free), refused(weighted),
                  differing == 0 ? "every result has the same bits in all three runs"
                                 : (std::to_string(differing) + " results differ between the runs").c_str());
    return text;
}

chart to_chart(const workload& w, std::span<const outcome> runs) {
    const double dx = std::chrono::duration<double>(runs.front().bin).count();
    chart c{.title = print("%zu tenants, one node, the same requests three ways", w.tenants.size()),
            .subtitle = print("%s; load %.2g while requests arrive (%.0f s), then the backlog", w.window.c_str(),
                              w.load, std::chrono::duration<double>(w.arrivals).count()),
            .x_label = "seconds",
            .dx = dx,
            .columns = {}};
    for (const auto& run : runs) {
        panel shares{.title = "device time", .y_label = "% of the node", .stacked = true, .y_max = 100};
        panel latency{.title = "median latency of requests done", .y_label = "ms", .log_y = true};
        for (const auto& [profile, got] : ranges::views::zip(w.tenants, run.tenants)) {
            series share{.name = profile.name};
            for (const double busy : got.busy) share.y.push_back(busy * 100);
            shares.lines.push_back(std::move(share));
            std::map<std::size_t, std::vector<double>> by_bin;
            for (const auto& [at, ms] : ranges::views::zip(got.finished_s, got.latency_ms))
                by_bin[static_cast<std::size_t>(at / dx)].push_back(ms);
            series line{.name = profile.name, .y = std::vector<double>(got.busy.size(), no_value)};
            for (auto& [bin, values] : by_bin)
                if (bin < line.y.size()) line.y[bin] = quantile(std::move(values), 0.5);
            latency.lines.push_back(std::move(line));
        }
        const auto u = urgent_tenant(w);
        const auto p99 = milliseconds(quantile(run.tenants[u].latency_ms, 0.99));
        c.columns.push_back(
            {.title = std::string(to_string(run.how)),
             .note = print("%zu refused; p99 of %s: %s ms", refused(run), w.tenants[u].name.c_str(), p99.c_str()),
             .panels = {std::move(shares), std::move(latency)}});
    }
    return c;
}

}  // namespace trace_replay
