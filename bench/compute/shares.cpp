// SPDX-License-Identifier: Apache-2.0
// Measures with the host device's ledger: how exactly the limiter divides the device, how exact the
// metering is, how much idle time the limiter lends, how fast a change takes effect, and how much
// throughput the limiter costs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "compute/measurements.hpp"
#include "compute/rig.hpp"

namespace bench::compute {

namespace {

using gpushare::device_id;
using gpushare::share;
using gpushare::host::timing;

constexpr int windows = 10;  // seconds measured after a first second that doesn't count

struct errors {
    double pp = 0, relative = 0, metering = 0, metering_in_all = 0, metering_second = 0;
    // Metering errors by an incomplete ledger: the lowest of all devices.
    double planted = std::numeric_limits<double>::infinity(), planted_in_all = planted;
    std::uint64_t gaps = 0;  // how often a tenant wasn't backlogged
};

using permille_of_tenants = std::vector<unsigned>;

/// One case on its own `devices` devices, while other cases run. Results are the worst of all
/// tenants and windows after the first second.
class share_case {
public:
    share_case(gpushare::host::node& node, std::uint32_t first, std::uint32_t devices, const permille_of_tenants& p,
               bool gated, std::uint64_t seed)
        : node_(&node), first_(first), permille_(p), ids_(devices) {
        for (std::uint32_t d = 0; d < devices; ++d) {
            limiters_.emplace_back(configuration);
            for (const unsigned part : p) ids_[d].push_back(limiters_[d].add({.weight = share::of_permille(part)}));
        }
        for (std::uint32_t d = 0; d < devices; ++d)
            for (std::uint32_t t = 0; t < p.size(); ++t)
                clients_.emplace_back(gated ? &limiters_[d] : nullptr, ids_[d][t], node, device_id{first + d},
                                      gpushare::priority{}, t,
                                      mixture{.any = gpushare::sim::random(seed + 100 * d + t)});
    }

    /// Reads the charges. Called between two windows.
    void read_meters() {
        auto& all = metered_.emplace_back(ids_.size());
        at_.push_back(now());
        for (std::size_t d = 0; d < ids_.size(); ++d)
            for (const auto c : ids_[d]) all[d].push_back(in_s(limiters_[d].usage(c).device_time));
    }

    /// Stops the clients and computes the errors.
    errors judge() {
        errors worst;
        for (const auto& c : clients_) worst.gaps += c.gaps();
        std::vector<std::vector<double>> in_all(ids_.size());
        // The clients of a device are neighbours in the list.
        for (std::size_t i = 0; i < clients_.size(); ++i)
            in_all[i / permille_.size()].push_back(in_s(clients_[i].end()));
        const std::uint32_t sms = node_->options().sms;
        for (std::uint32_t d = 0; d < ids_.size(); ++d) {
            const auto blocks = blocks_of(*node_, device_id{first_ + d});
            const auto used = [&](instant from, instant to) {
                return device_seconds(blocks, from, to, permille_.size(), sms);
            };
            for (std::size_t w = 0; w + 1 < at_.size(); ++w) {
                const auto truth = used(at_[w], at_[w + 1]);
                for (std::size_t t = 0; t < permille_.size(); ++t) {
                    const double wanted = permille_[t] / 1000.0, off = std::abs(truth.of[t] / truth.all - wanted);
                    worst.pp = std::max(worst.pp, 100 * off);
                    worst.relative = std::max(worst.relative, off / wanted);
                    worst.metering_second =
                        std::max(worst.metering_second,
                                 100 * std::abs(metered_[w + 1][d][t] - metered_[w][d][t] - truth.of[t]) / truth.all);
                }
            }
            // At each edge of a window, the limiter hasn't charged the work in progress, but the
            // ledger counts the work on both sides. The difference is up to 1 ms of the 200 ms that
            // a tenant of 2 % has in ten seconds. `all` covers the time from the first submission
            // to the last, without edges.
            const auto cut = used(at_.front(), at_.back()), all = used(instant{}, instant::max());
            const auto off = [](double charged, double truth) { return 100 * std::abs(charged - truth) / truth; };
            const auto charged = [&](std::size_t t) { return metered_.back()[d][t] - metered_.front()[d][t]; };
            for (std::size_t t = 0; t < permille_.size(); ++t) {
                worst.metering = std::max(worst.metering, off(charged(t), cut.of[t]));
                worst.metering_in_all = std::max(worst.metering_in_all, off(in_all[d][t], all.of[t]));
            }
            const auto lacking = without_a_fifth(blocks);
            const auto of_first = [&](instant from, instant to) {
                return device_seconds(lacking, from, to, permille_.size(), sms).of[0];
            };
            // The planted fault must show on every device, so the lowest error counts.
            worst.planted = std::min(worst.planted, off(charged(0), of_first(at_.front(), at_.back())));
            worst.planted_in_all =
                std::min(worst.planted_in_all, off(in_all[d][0], of_first(instant{}, instant::max())));
        }
        return worst;
    }

private:
    static double in_s(ns t) { return std::chrono::duration<double>(t).count(); }

    gpushare::host::node* node_;
    std::uint32_t first_;
    permille_of_tenants permille_;
    std::deque<limiter> limiters_;
    std::vector<std::vector<gpushare::client_id>> ids_;  // [device][tenant]
    // After the limiters, because the clients' threads use the limiters.
    std::deque<backlogged> clients_;
    std::vector<std::vector<std::vector<double>>> metered_;  // [reading][device][tenant]
    std::vector<instant> at_;
};

/// Runs several cases at once on one node for `seconds` windows, each on `devices_each` devices.
std::vector<errors> shares_hold(const std::vector<permille_of_tenants>& cases, std::uint32_t devices_each, timing how,
                                bool gated, int seconds, std::uint64_t seed) {
    gpushare::host::node node{{.devices = static_cast<std::uint32_t>(cases.size()) * devices_each,
                               .memory = gpushare::bytes{1 << 20},
                               .sms = how == timing::modelled ? 2U : 1U,
                               .timing = how}};
    std::deque<share_case> running;
    for (const auto& c : cases)
        running.emplace_back(node, static_cast<std::uint32_t>(running.size()) * devices_each, devices_each, c, gated,
                             seed + 1000 * running.size());
    const auto begin = now() + 1s;
    for (int w = 0; w <= seconds; ++w) {
        sleep_until(begin + w * 1s);
        for (auto& c : running) c.read_meters();
    }
    std::vector<errors> all;
    for (auto& c : running) all.push_back(c.judge());
    return all;
}

/// Under modelled timing, all cases run at once on two devices each. Under real timing, the cases
/// run one after another, so that the SM has a core for itself.
void share_figures(report& r) {
    const std::vector<permille_of_tenants> cases{{300, 700}, {100, 900}, {750, 250}, {20, 980}, {500, 300, 200}};
    std::vector<errors> all;
    const auto run = [&](const std::vector<permille_of_tenants>& some, std::uint32_t devices_each, timing how) {
        // A tenant that isn't backlogged has no share to keep. The run is then repeated, up to
        // twice.
        std::vector<errors> ours;
        const auto gaps = [&] {
            std::uint64_t n = 0;
            for (const auto& e : ours) n += e.gaps;
            return n;
        };
        std::uint64_t seed = 10'000;
        do ours = shares_hold(some, devices_each, how, true, windows, seed += 10'000);
        while (gaps() != 0 && seed < 40'000);
        for (std::size_t i = 0; i < some.size(); ++i) {
            std::string name;
            for (const auto p : some[i]) name += (name.empty() ? "" : "/") + std::to_string(p / 10);
            std::printf("#   %-9s %5.2f pp %6.1f %%, metering %4.2f %% (in all %4.2f), not backlogged %llu times\n",
                        name.c_str(), ours[i].pp, 100 * ours[i].relative, ours[i].metering, ours[i].metering_in_all,
                        static_cast<unsigned long long>(ours[i].gaps));
            all.push_back(ours[i]);
        }
        std::fflush(stdout);
    };
    std::printf("# shares, modelled, 2 devices a case: worst tenant, device and second\n");
    run(cases, 2, timing::modelled);
    const auto ungated = shares_hold(cases, 2, timing::modelled, false, 2, 1);  // the planted fault
    const auto least = [](const std::vector<errors>& some, double errors::*of) {
        return std::ranges::min(some, {}, of).*of;
    };
    std::printf("# shares, real, 1 SM\n");
    for (const auto& c : cases) run({c}, 1, timing::real);
    // Each case counts as a repeat, and the figure is the worst case.
    const bool backlogged_always = std::ranges::all_of(all, [](const errors& e) { return e.gaps == 0; });
    const auto values = [&](double errors::*of) {
        std::vector<double> v;
        for (const auto& e : all) v.push_back(e.*of);
        return v;
    };
    const auto share_figure = [&](const char* name, double errors::*of, const char* unit, double most) {
        const control without_limiter{at_most(most), least(ungated, of), "no limiter, the best of the cases"};
        backlogged_always ? r.figure(name, values(of), unit, without_limiter, statistic::most)
                          : r.is_void(name, "a tenant was found without work waiting, in three runs");
    };
    share_figure("compute.share_error_pp_max", &errors::pp, "pp", 0.3);
    share_figure("compute.share_error_rel_max", &errors::relative, "of_a_share", 0.06);
    r.figure("compute.metering_error_pct", values(&errors::metering), "%",
             control{at_most(1), least(all, &errors::planted), lacks_a_fifth}, statistic::most);
    r.figure("compute.metering_error_in_all_pct", values(&errors::metering_in_all), "%",
             control{at_most(0.5), least(all, &errors::planted_in_all), lacks_a_fifth}, statistic::most);
    r.figure("compute.metering_error_of_a_second_pct", values(&errors::metering_second), "%_of_the_second",
             statistic::most);
}

/// `one_at_a_time` is the planted fault: the device idles between kernels, and small kernels never
/// overlap.
enum class gate { none, by_default, one_at_a_time };

/// Percentage of 0.7 s that the device was busy, when `clients` clients saturate it with kernels of
/// one block.
double delivered(gate how, ns length, std::size_t clients, std::uint64_t seed, std::uint32_t sms = 1) {
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = sms, .timing = timing::modelled}};
    limiter l{how == gate::one_at_a_time ? gpushare::limiter_options{.depth = 1, .horizon = ns{0}} : configuration};
    std::deque<backlogged> running;
    for (std::uint32_t t = 0; t < clients; ++t)
        running.emplace_back(
            how == gate::none ? nullptr : &l, l.add({.weight = share::of_permille(100)}), node, device_id{0},
            gpushare::priority{}, t,
            mixture{
                .any = gpushare::sim::random(seed + t), .shortest = length, .longest = length, .only_kernels = true},
            64, 1);
    std::this_thread::sleep_for(100ms);
    const auto from = now();
    std::this_thread::sleep_for(700ms);
    const auto to = now();
    running.clear();
    const auto blocks = blocks_of(node, device_id{0});
    // Counts the kernels that ended within the window, each with the length that it asked for. A
    // kernel that the machine made longer is no gain.
    std::uint64_t kernels = 0;
    for (const auto& b : blocks)
        if (b.end > from && b.end <= to) ++kernels;
    return 100.0 * static_cast<double>(kernels) * static_cast<double>(length.count()) /
           static_cast<double>((to - from).count() * sms);
}

struct costs {
    std::vector<double> cost_pct, ungated_pct;
    double planted_pct = 0;

    [[nodiscard]] control planted(double most) const {
        return {at_most(most), planted_pct, "a limiter that lets one in at a time"};
    }
};
costs cost_of_gating(ns length, std::size_t clients, std::uint32_t sms) {
    costs c;
    std::uint64_t seed = 0;
    for (int i = 0; i < 5; ++i) {
        c.ungated_pct.push_back(delivered(gate::none, length, clients, seed += 10, sms));
        c.cost_pct.push_back(100 *
                             (1 - delivered(gate::by_default, length, clients, seed, sms) / c.ungated_pct.back()));
    }
    c.planted_pct = 100 * (1 - delivered(gate::one_at_a_time, length, clients, seed, sms) / c.ungated_pct.back());
    return c;
}

void throughput_figures(report& r) {
    for (const ns length : {50us, 10us}) {
        const auto c = cost_of_gating(length, 2, 1);
        const std::string us = std::to_string(length / 1us);
        r.figure(length == 50us ? "compute.throughput_cost_pct" : "compute.throughput_cost_10us_pct", c.cost_pct, "%",
                 c.planted(1.0));
        r.figure("compute.ungated_pct_" + us + "us", c.ungated_pct, "%_of_the_device");
    }
    // Kernels of one block, from tenants that can overlap on 4 SMs if nothing makes them take
    // turns.
    costs worst;
    for (const std::size_t tenants : {2U, 8U}) {
        const auto c = cost_of_gating(100us, tenants, 4);
        const std::string of = "_" + std::to_string(tenants) + "_tenants";
        r.figure("compute.turns_cost_pct" + of, c.cost_pct, "%");
        r.figure("compute.turns_ungated_pct" + of, c.ungated_pct, "%_of_the_device");
        if (worst.cost_pct.empty() ||
            value_of(statistic::median, c.cost_pct) > value_of(statistic::median, worst.cost_pct))
            worst = c;
    }
    r.figure("compute.turns_cost_pct", worst.cost_pct, "%", worst.planted(5));
}

/// Runs a tenant with a share of 10 % that always has work, beside a tenant with 90 % that wakes up
/// every 50 ms with 1 ms of work. Returns the percentage of the sleeping tenant's unused time that
/// the busy tenant uses, over one second. The busy tenant keeps `ahead` submissions queued.
double lent_pct(bool gated, std::size_t ahead, std::uint64_t seed) {
    constexpr ns length = 250us, period = 50ms;
    constexpr std::uint32_t sms = 1;
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = sms, .timing = timing::modelled}};
    limiter l{configuration};
    const auto busy = l.add({.weight = share::of_permille(100)}), sleeper = l.add({.weight = share::of_permille(900)});
    backlogged works(
        gated ? &l : nullptr, busy, node, device_id{0}, gpushare::priority{}, 0,
        mixture{.any = gpushare::sim::random(seed), .shortest = length, .longest = length, .only_kernels = true},
        ahead);
    auto s = node.make_stream(device_id{0}, gpushare::priority{}, 1);
    buffers unused;
    const auto from = now() + 100ms, to = from + 1s;
    for (instant wakes = from; wakes < to; wakes += period) {
        sleep_until(wakes);
        for (ns done{}; done < 1ms; done += length) {
            const auto work_of_it = [&](gpushare::host::stream& x) {
                enqueue(x, {.length = length}, true, sms, unused);
            };
            if (gated)
                (void)l.submit(sleeper, s, work_of_it);
            else
                work_of_it(s);
        }
    }
    sleep_until(to);
    (void)works.end();
    l.close(sleeper);
    (void)s.record().wait(gpushare::never);
    const auto blocks = blocks_of(node, device_id{0});
    const device_seconds had(blocks, from, to, 2, sms);
    return 100 * had.of[0] / (std::chrono::duration<double>(to - from).count() - had.of[1]);
}

/// The planted fault keeps nothing queued ahead, so the device idles between kernels. The figure
/// must show the difference.
void lent_figures(report& r) {
    std::uint64_t seed = 0;
    const double planted = lent_pct(true, 1, ++seed);
    r.figure("compute.lent_pct", repeated(5, [&] { return lent_pct(true, 24, ++seed); }), "%",
             {at_least(99), planted, "a device that is left idle between kernels"});
    r.figure("compute.lent_ungated_pct", repeated(5, [&] { return lent_pct(false, 24, ++seed); }), "%");
}

/// Kernels take 100 us here. In a window of 20 ms, a single longer kernel of the mixture would
/// shift the share by 5 pp.
constexpr ns window = 20ms;
struct change {
    double steady_pp = 0;     // the worst error before the change, against the old shares
    double converged_ms = 0;  // from the change until all later windows are within 2 pp
};

/// Changes the shares from 80/20 to 30/70. The time counts up to 300 ms. The change happens `late`
/// after the instant from which the time counts.
change converge(std::uint64_t seed, ns late = {}) {
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = 2, .timing = timing::modelled}};
    limiter l{configuration};
    const auto a = l.add({.weight = share::of_permille(800)}), b = l.add({.weight = share::of_permille(200)});
    std::deque<backlogged> clients;
    for (std::uint32_t t = 0; t < 2; ++t)
        clients.emplace_back(
            &l, t == 0 ? a : b, node, device_id{0}, gpushare::priority{}, t,
            mixture{.any = gpushare::sim::random(seed + t), .shortest = 100us, .longest = 100us, .only_kernels = true});
    std::this_thread::sleep_for(500ms);
    const auto changed = now();
    std::this_thread::sleep_for(late);
    l.change(a, {.weight = share::of_permille(300)});
    l.change(b, {.weight = share::of_permille(700)});
    sleep_until(changed + 320ms);
    clients.clear();
    const auto blocks = blocks_of(node, device_id{0});
    const auto off_pp = [&](instant from, double wanted) {
        const device_seconds truth(blocks, from, from + window, 2, 2);
        return 100 * std::abs(truth.of[0] / truth.all - wanted);
    };
    change c;
    for (ns before = 300ms; before >= window; before -= 1ms)
        c.steady_pp = std::max(c.steady_pp, off_pp(changed - before, 0.8));
    for (ns since{}; since + window <= 300ms; since += 1ms)
        if (off_pp(changed + since, 0.3) > 2)
            c.converged_ms = std::chrono::duration<double, std::milli>(since + 1ms).count();
    return c;
}

/// A run with windows outside 2 pp before the change says nothing about the change, and doesn't
/// count.
void converge_figures(report& r) {
    constexpr std::size_t wanted = 5, most_runs = 15;
    std::uint64_t seed = 0;
    std::vector<double> ms, steady;
    for (std::size_t i = 0; i < most_runs && ms.size() < wanted; ++i) {
        const auto c = converge(seed += 10);
        steady.push_back(c.steady_pp);
        if (c.steady_pp <= 2) ms.push_back(c.converged_ms);
    }
    r.figure("compute.converge_steady_pp", steady, "pp");
    const double planted = converge(seed += 10, 60ms).converged_ms;
    if (ms.size() < wanted)
        r.is_void("compute.converge_ms", "windows of 20 ms weren't within 2 pp before the change, in " +
                                             std::to_string(most_runs - ms.size()) + " of " +
                                             std::to_string(most_runs) + " runs");
    else
        r.figure("compute.converge_ms", ms, "ms", {at_most(20), planted, "a change that comes 60 ms late"});
}

}  // namespace

void shares(report& r) {
    share_figures(r);
    throughput_figures(r);
    lent_figures(r);
    converge_figures(r);
}

}  // namespace bench::compute
