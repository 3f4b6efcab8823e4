// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/workload.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <functional>
#include <map>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/stride.hpp>
#include <range/v3/view/zip.hpp>
#include <span>
#include <utility>

namespace trace_replay {

using namespace gpushare::literals;

namespace {

// A step of the replay takes about this long: long enough for a thread to wake up in time, and
// short enough for hundreds of requests in a few seconds.
constexpr double step_seconds = 1e-3;
// As on a device, a step of a big model consists of several kernels.
constexpr double longest_kernel = 1e-3;

using window = std::span<const request>;

double device_seconds(window w) { return ranges::accumulate(w, 0.0, std::plus{}, &request::exec_s); }

/// Groups by device time, the largest first.
std::vector<std::pair<std::string, double>> groups_of(window w) {
    std::map<std::string, double> seconds;
    for (const auto& r : w) seconds[r.group] += r.exec_s;
    std::vector<std::pair<std::string, double>> sorted(seconds.begin(), seconds.end());
    std::ranges::stable_sort(sorted, std::ranges::greater{}, &std::pair<std::string, double>::second);
    return sorted;
}

/// The number of requests that fill the run, with steps of about step_seconds.
std::size_t window_size(const trace& t, const options& o) {
    const double steps = ranges::accumulate(t.requests, 0.0, std::plus{}, &request::steps);
    const double mean_steps = steps / static_cast<double>(t.requests.size());
    const double wanted = o.load * o.devices * o.seconds / (mean_steps * step_seconds);
    return std::min(t.requests.size(), std::max<std::size_t>(1, static_cast<std::size_t>(wanted)));
}

/// Whether there are no requests during a tenth of the window, for example at night.
bool has_pause(window w) {
    const double longest = (w.back().arrival_s - w.front().arrival_s) / 10;
    return std::ranges::adjacent_find(
               w, [&](const request& a, const request& b) { return b.arrival_s - a.arrival_s > longest; }) != w.end();
}

/// The window in which the named tenants ask for most. Windows without a pause come before all
/// others. The seed selects a window further down the ranking.
window choose_window(const trace& t, const options& o) {
    const window all(t.requests);
    const auto size = window_size(t, o);
    const auto step = std::max<std::size_t>(1, size / 4);
    struct candidate {
        bool busy;
        double named;  // the fraction of the device time
        std::size_t start;
        auto operator<=>(const candidate&) const = default;
    };
    std::vector<candidate> ranking;
    for (const auto start : ranges::views::iota(std::size_t{0}, all.size() - size + 1) | ranges::views::stride(step)) {
        const auto w = all.subspan(start, size);
        if (w.back().arrival_s <= w.front().arrival_s) continue;
        const auto groups = groups_of(w);
        if (groups.size() <= o.tenants) continue;
        double named = 0;
        for (std::size_t i = 0; i < o.tenants; ++i) named += groups[i].second;
        ranking.push_back({!has_pause(w), named / device_seconds(w), start});
    }
    if (ranking.empty())
        throw usage_error("the trace has no window with more than " + std::to_string(o.tenants) +
                          " groups: too few usable requests");
    std::ranges::sort(ranking, std::ranges::greater{});
    return all.subspan(ranking[(o.seed == 0 ? 0 : o.seed - 1) % ranking.size()].start, size);
}

/// Checkpoints come in a few sizes. The size of a model is derived from its name.
gpushare::bytes model_size(const std::string& name) {
    constexpr std::array<std::uint64_t, 4> mib{2048, 2048, 4096, 6656};
    // FNV-1a, because std::hash differs between libraries
    std::uint64_t hash = 14695981039346656037ULL;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
    return gpushare::bytes{mib[(hash >> 32) % mib.size()] << 20};
}

gpushare::share to_share(double fraction) {
    return gpushare::share::of_permille(static_cast<unsigned long long>(std::max(1.0, std::round(fraction * 1000))));
}

/// Sets shares of device time. In the weighted run, each named tenant gets somewhat more than its
/// part of the demand, so the remaining tenants get less than they ask for, and every tenant is
/// short of something. The smallest named tenant goes first.
void entitle(std::vector<tenant_profile>& tenants) {
    const auto n = tenants.size();
    auto& others = tenants.back();
    const auto named = std::span(tenants).first(n - 1);
    named.back().urgent = true;
    const double generosity = std::min(1.2, 0.9 / (1 - others.demand));
    unsigned left = 1000;
    for (auto& t : named) {
        t.weighted = to_share(t.demand * generosity);
        left -= t.weighted.permille();
    }
    others.weighted = gpushare::share::of_permille(left);
    for (auto& t : tenants) t.fair = gpushare::share::of_permille(1000 / n);
}

/// Sets memory on each device, in whole MiB. A named tenant gets its biggest model and 1 GiB for
/// LoRAs and similar data, but all named tenants together get at most two thirds. The remaining
/// groups, with their many models, get the rest.
void set_quotas(workload& w, const options& o) {
    std::vector<gpushare::bytes> wanted(w.tenants.size() - 1, 1_GiB);
    for (const auto& j : w.jobs)
        if (j.tenant < wanted.size()) wanted[j.tenant] = std::max(wanted[j.tenant], w.models[j.model].size + 1_GiB);
    const auto sum = ranges::accumulate(wanted, gpushare::bytes{});
    const auto most = 1_GiB * o.memory_gib / 3 * 2;
    const double scale = sum <= most ? 1.0 : static_cast<double>(most.count()) / static_cast<double>(sum.count());
    auto left = 1_GiB * o.memory_gib;
    for (const auto& [tenant, bytes] : ranges::views::zip(w.tenants, wanted)) {
        const auto mib = static_cast<std::uint64_t>(static_cast<double>(bytes / 1_MiB) * scale);
        tenant.quota = 1_MiB * mib * o.devices;
        left -= 1_MiB * mib;
    }
    w.tenants.back().quota = left * o.devices;
}

std::string describe(const trace& t, window w) {
    const auto time = [&](double s) {
        const auto at = t.start + std::chrono::seconds(static_cast<long long>(s));
        const std::time_t seconds = at.time_since_epoch().count();
        std::tm parts{};
        gmtime_r(&seconds, &parts);
        std::array<char, 32> text{};
        const auto length = std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M", &parts);
        return std::string(text.data(), length);
    };
    return std::to_string(w.size()) + " requests from " + time(w.front().arrival_s) + " to " + time(w.back().arrival_s);
}

}  // namespace

workload make_workload(const trace& t, const options& o) {
    if (t.requests.empty()) throw usage_error("the trace has no usable request");
    const auto chosen = choose_window(t, o);
    const double asked = device_seconds(chosen);
    const double span = chosen.back().arrival_s - chosen.front().arrival_s;

    workload w;
    w.window = describe(t, chosen);
    w.load = o.load;
    w.speedup = asked / (o.load * o.devices * o.seconds);
    w.arrival_speedup = span / o.seconds;
    w.arrivals = gpushare::ns(std::llround(o.seconds * 1e9));

    std::map<std::string, std::size_t> tenant_of, model_of;
    const auto groups = groups_of(chosen);
    for (const auto& [i, group] : groups | ranges::views::enumerate) {
        tenant_of[group.first] = std::min<std::size_t>(i, o.tenants);
        if (i < o.tenants) w.tenants.push_back({.name = group.first, .demand = group.second / asked});
    }
    double named = 0;
    for (const auto& tenant : w.tenants) named += tenant.demand;
    w.tenants.push_back({.name = "others", .demand = 1 - named});

    for (const auto& r : chosen) {
        const auto [m, fresh] = model_of.try_emplace(r.model, w.models.size());
        if (fresh) w.models.push_back({r.model, model_size(r.model)});
        const auto tenant = tenant_of[r.group];
        ++w.tenants[tenant].requests;
        const double step = r.exec_s / w.speedup / r.steps;
        const auto kernels = static_cast<std::uint32_t>(std::max(1.0, std::ceil(step / longest_kernel)));
        w.jobs.push_back(
            {.arrival = gpushare::ns(std::llround((r.arrival_s - chosen.front().arrival_s) / w.arrival_speedup * 1e9)),
             .tenant = tenant,
             .model = m->second,
             .loras = r.loras,
             .steps = r.steps,
             .kernels = kernels,
             .kernel_time = gpushare::ns(std::llround(step / kernels * 1e9))});
    }
    entitle(w.tenants);
    set_quotas(w, o);
    return w;
}

}  // namespace trace_replay
