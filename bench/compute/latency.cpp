// SPDX-License-Identifier: Apache-2.0
// Measures how long a tenant with high priority waits for tenants with lower priority. The first
// part runs requests of many kernels beside best-effort work that saturates the device. The second
// part compares single submissions with the bound that the limiter published before each
// submission.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "compute/measurements.hpp"
#include "compute/rig.hpp"

namespace bench::compute {

namespace {

using gpushare::device_id;
using gpushare::priority;

constexpr std::uint32_t devices = 4, sms = 2;
constexpr priority high{1};
constexpr ns neighbour = 100us;  // a best-effort kernel

/// Where the best-effort tenants run; there is one for each urgent tenant. With `nobody`, they have
/// devices of their own: the machine is then as busy, and its cores are as awake, as in the other
/// cases. With `gated` and `ungated`, they share the urgent tenants' devices, and only with `gated`
/// do they go through the limiter.
enum class beside { nobody, gated, ungated };
/// A client hands over a chain of kernels all at once, or each kernel after the previous kernel has
/// finished.
enum class chain { at_once, one_by_one };

/// A node with a limiter and an urgent client on each of 2 x `devices` devices. Best-effort clients
/// run on half of the devices: on the first half, which is measured, or on the second half as a
/// control.
struct crowd {
    explicit crowd(beside who, ns best_effort = neighbour, ns declared = neighbour) {
        for (std::uint32_t d = 0; d < 2 * devices; ++d) {
            limiters.emplace_back(configuration);
            urgent.push_back(limiters[d].add({.level = high, .longest = 250us}));
            const auto c = limiters[d].add({.longest = declared});
            if ((d < devices) == (who == beside::nobody)) continue;
            clients.emplace_back(who == beside::ungated ? nullptr : &limiters[d], c, node, device_id{d}, priority{}, 1,
                                 mixture{.any = gpushare::sim::random(d),
                                         .shortest = best_effort,
                                         .longest = best_effort,
                                         .only_kernels = true},
                                 8);
        }
    }

    gpushare::host::node node{{.devices = 2 * devices,
                               .memory = gpushare::bytes{1 << 20},
                               .sms = sms,
                               .timing = gpushare::host::timing::modelled}};
    std::deque<limiter> limiters;
    std::vector<gpushare::client_id> urgent;
    std::deque<backlogged> clients;
};

double quantile(std::vector<double>& values, double q) {
    std::ranges::sort(values);
    return values[std::min(values.size() - 1, static_cast<std::size_t>(q * static_cast<double>(values.size())))];
}

struct requests {
    double p99_ms = 0;         // from a request's arrival
    double neighbour_pct = 0;  // the best-effort tenants' part of their devices' time, by the ledger
};

/// Requests of 20 kernels of 250 us each arrive at random (Poisson) at 30 % load.
requests run_requests(beside who, chain how, std::uint64_t seed) {
    constexpr int kernels = 20;
    constexpr ns length = 250us, mean_gap = kernels * length * 10 / 3;
    constexpr auto lasts = 2500ms;
    crowd c(who);
    std::mutex mutex;
    std::vector<double> took;
    std::vector<std::jthread> threads;
    const auto begin = now();
    for (std::uint32_t d = 0; d < devices; ++d)
        threads.emplace_back([&, d] {
            auto s = c.node.make_stream(device_id{d}, high, 0);
            gpushare::sim::random any(seed + d);
            const auto launch = [](gpushare::host::stream& on) {
                on.launch({.blocks = sms, .hold = length}, gpushare::detail::empty_kernel{});
            };
            for (instant arrival = begin + any.exponential(mean_gap); arrival < begin + lasts;
                 arrival += any.exponential(mean_gap)) {
                sleep_until(arrival);
                if (who != beside::gated) {  // as without the library
                    for (int i = 0; i < kernels; ++i) {
                        launch(s);
                        if (how == chain::one_by_one) (void)s.record().wait(gpushare::never);
                    }
                    (void)s.record().wait(gpushare::never);
                } else {
                    auto& l = c.limiters[d];
                    gpushare::request r(l, c.urgent[d]);
                    const auto submit = [&] { return r.submit(s, launch).value(); };
                    std::deque<limiter::ticket> out;
                    for (int i = 0; i < kernels; ++i) {
                        out.push_back(submit());
                        if (how == chain::one_by_one) out.back().wait();
                    }
                    out.back().wait();
                }
                const std::lock_guard lock(mutex);
                took.push_back(std::chrono::duration<double, std::milli>(now() - arrival).count());
            }
        });
    threads.clear();
    c.clients.clear();
    double had = 0;
    for (std::uint32_t d = 0; d < 2 * devices; ++d)
        had += device_seconds(blocks_of(c.node, device_id{d}), begin, begin + lasts, 2, sms).of[1];
    return {quantile(took, 0.99), 100 * had / devices / std::chrono::duration<double>(lasts).count()};
}

struct waits {
    std::vector<double> us;      // from each submission until a worker of the node ran the kernel
    std::vector<double> ledger;  // until the device gave the kernel an SM, by the node's ledger
    std::vector<double> bound;   // published before the submission

    [[nodiscard]] double violations(const std::vector<double>& of) const {
        double n = 0;
        for (std::size_t i = 0; i < of.size(); ++i) n += of[i] > bound[i];
        return n;
    }
};
struct measured_waits {
    waits ours, control;  // devices with a best-effort tenant, and devices without one
};

/// Submits kernels one by one on every device, with priority over the best-effort tenants.
/// Best-effort tenants run on half of the devices.
measured_waits single_submissions(beside who, int submissions, ns best_effort = neighbour, ns declared = neighbour) {
    crowd c(who, best_effort, declared);
    std::mutex mutex;
    measured_waits all;
    constexpr std::uint32_t tag_of_urgent = 0;  // the neighbours have tag 1
    std::vector<std::jthread> threads;
    for (std::uint32_t d = 0; d < 2 * devices; ++d)
        threads.emplace_back([&, d] {
            auto s = c.node.make_stream(device_id{d}, high, tag_of_urgent);
            gpushare::sim::random any(d);
            auto& l = c.limiters[d];
            constexpr int until_clients_are_at_it = 20;
            for (int i = -until_clients_are_at_it; i < submissions; ++i) {
                std::this_thread::sleep_for(500us + any.exponential(2ms));
                std::atomic<std::int64_t> started{0};
                const ns bound = l.wait_bound();
                const auto asked = now();
                auto t = l.submit(c.urgent[d], s, [&started](auto& on) {
                              on.launch({.blocks = 1, .hold = neighbour}, [&started](auto&) {
                                  started.store(now().time_since_epoch().count(), std::memory_order_relaxed);
                              });
                          }).value();
                t.wait();
                const instant ran{ns{started.load(std::memory_order_relaxed)}};
                ns by_ledger{};
                for (const auto& block : blocks_of(c.node, device_id{d}))
                    if (block.tag == tag_of_urgent) by_ledger = block.start - asked;
                if (by_ledger <= ns{0}) throw std::runtime_error("the ledger lacks a kernel that ran");
                if (i < 0) continue;
                const auto in_us = [](ns span) { return std::chrono::duration<double, std::micro>(span).count(); };
                const std::lock_guard lock(mutex);
                auto& kind = d < devices ? all.ours : all.control;
                kind.us.push_back(in_us(ran - asked));
                kind.ledger.push_back(in_us(by_ledger));
                kind.bound.push_back(in_us(bound));
            }
        });
    threads.clear();
    return all;
}

/// Results by one way of timing: the start of the worker, or the node's ledger.
struct judged {
    std::vector<double> violations, wait_p99, control_p99, control_longest;  // by round
    double planted = 0;

    void add(const measured_waits& all, std::vector<double> waits::*of) {
        violations.push_back(all.ours.violations(all.ours.*of));
        auto wait = all.ours.*of, control = all.control.*of;
        wait_p99.push_back(quantile(wait, 0.99));
        control_p99.push_back(quantile(control, 0.99));
        control_longest.push_back(control.back());
    }
    void report_to(report& r, const std::string& by, double bound) const {
        const std::string name = "compute.preempt_bound_violations" + by;
        const double longest = std::ranges::max(control_longest);
        if (longest > bound)
            r.is_void(name, "on idle devices something waited " + std::to_string(std::lround(longest)) +
                                " us, and the bound is " + std::to_string(std::lround(bound)));
        else
            r.figure(name, violations, "violations", {at_most(0), planted, "a neighbour past the limiter"},
                     statistic::most);
        r.figure("compute.preempt_wait_p99" + by + "_us", wait_p99, "us");
        r.figure("compute.preempt_control_p99" + by + "_us", control_p99, "us");
        r.figure("compute.preempt_control_longest" + by + "_us", control_longest, "us", statistic::most);
    }
};

/// The figures aren't corrected in any way. A run is void if the control, which has nothing to wait
/// for, exceeded the bound. The planted fault is a best-effort tenant that bypasses the limiter
/// with kernels eight times as long; the measurement must find the fault.
void bound_figures(report& r) {
    judged by_start, by_ledger;
    std::vector<double> bounds, ratios_of_bound;
    for (int round = 0; round < 5; ++round) {
        auto all = single_submissions(beside::gated, 160);
        by_start.add(all, &waits::us);
        by_ledger.add(all, &waits::ledger);
        bounds.push_back(quantile(all.ours.bound, 0.5));
        ratios_of_bound.push_back(bounds.back() / by_ledger.wait_p99.back());
    }
    const auto planted = single_submissions(beside::ungated, 100, 8 * neighbour).ours;
    by_start.planted = planted.violations(planted.us);
    by_ledger.planted = planted.violations(planted.ledger);
    auto loose = single_submissions(beside::gated, 100, neighbour, 16 * neighbour).ours;
    const double least_bound = std::ranges::min(bounds);
    by_start.report_to(r, "", least_bound);
    by_ledger.report_to(r, "_by_ledger", least_bound);
    r.figure("compute.preempt_bound_us", bounds, "us");
    r.figure("compute.preempt_bound_vs_p99", ratios_of_bound, "x",
             {at_most(3), quantile(loose.bound, 0.5) / quantile(loose.ledger, 0.99),
              "neighbours that say their kernels take sixteen times as long"});
}

}  // namespace

bool go_before_other_programs() noexcept {
    const ::sched_param lowest{.sched_priority = ::sched_get_priority_min(SCHED_RR)};
    return ::sched_setscheduler(0, SCHED_RR, &lowest) == 0;
}

void machine_noise(report& r) {
    std::vector<double> late;
    for (int i = 0; i < 1000; ++i) {
        const auto wake_up = now() + 200us;
        sleep_until(wake_up);
        late.push_back(std::chrono::duration<double, std::micro>(now() - wake_up).count());
    }
    r.figure("compute.machine_noise_us", {quantile(late, 0.99)}, "us");
}

void latency(report& r) {
    for (const chain how : {chain::one_by_one, chain::at_once}) {
        const std::string suffix = how == chain::at_once ? "_at_once" : "";
        std::vector<double> ours, none, solos, had, had_by_none;
        for (std::uint64_t i = 0; i < 5; ++i) {
            const auto solo = run_requests(beside::nobody, how, 100 * i);
            const auto gated = run_requests(beside::gated, how, 100 * i);
            const auto ungated = run_requests(beside::ungated, how, 100 * i);
            solos.push_back(solo.p99_ms);
            ours.push_back(gated.p99_ms / solo.p99_ms);
            had.push_back(gated.neighbour_pct);
            none.push_back(ungated.p99_ms / solo.p99_ms);
            had_by_none.push_back(ungated.neighbour_pct);
        }
        r.figure("compute.solo_p99_ms" + suffix, solos, "ms");
        if (how == chain::one_by_one)
            r.figure("compute.p99_vs_solo", ours, "x",
                     {at_most(1.05), value_of(statistic::median, none), "no limiter, stream priorities alone"});
        else
            r.figure("compute.p99_vs_solo" + suffix, ours, "x");
        r.figure("compute.p99_neighbour_pct" + suffix, had, "%_of_the_device");
        r.figure("compute.p99_vs_solo_ungated" + suffix, none, "x");
        r.figure("compute.p99_neighbour_ungated_pct" + suffix, had_by_none, "%_of_the_device");
    }
    bound_figures(r);
}

}  // namespace bench::compute
