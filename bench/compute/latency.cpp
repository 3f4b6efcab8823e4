// SPDX-License-Identifier: Apache-2.0
// What a tenant of a high level waits for those below it: requests of many kernels beside best-effort work that saturates
// the device, and single submissions against the bound that was published before them.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "compute/measurements.hpp"
#include "compute/rig.hpp"
#include "compute/stolen_time.hpp"

namespace bench::compute {

namespace {

using gpushare::device_id;
using gpushare::priority;

constexpr std::uint32_t devices = 8, sms = 2;
constexpr std::uint32_t control = devices;  // one more, without a neighbour: what waits there waits for the machine
constexpr priority high{1};
constexpr ns neighbour = 100us;  // a best-effort kernel

/// Who is on the device beside the tenant that is looked at, and who decides.
enum class beside { nobody, gated, ungated };
/// How a chain is handed over: all at once, or each kernel when the one before was seen to be done.
enum class chain { at_once, one_by_one };

/// A node with a limiter and, if asked for, a best-effort client per device.
struct crowd {
    explicit crowd(beside who) {
        for (std::uint32_t d = 0; d <= control; ++d) {
            limiters.emplace_back(configuration);
            urgent.push_back(limiters[d].add({.level = high, .longest = 250us}));
            const auto c = limiters[d].add({.longest = neighbour});
            if (who == beside::nobody || d == control) continue;
            clients.emplace_back(
                who == beside::gated ? &limiters[d] : nullptr, c, node, device_id{d}, priority{}, 1,
                mixture{
                    .any = gpushare::sim::random(d), .shortest = neighbour, .longest = neighbour, .only_kernels = true},
                8);
        }
    }

    gpushare::host::node node{{.devices = devices + 1,
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

/// The 99th percentile of a request's time from its arrival, ms: 20 kernels of 250 us, Poisson arrivals at 30 % load.
double request_p99(beside who, chain how, std::uint64_t seed) {
    constexpr int kernels = 20;
    constexpr ns length = 250us, mean_gap = kernels * length * 10 / 3;
    crowd c(who);
    std::mutex mutex;
    std::vector<double> took;
    std::vector<std::jthread> threads;
    for (std::uint32_t d = 0; d < devices; ++d)
        threads.emplace_back([&, d] {
            auto s = c.node.make_stream(device_id{d}, high, 0);
            gpushare::sim::random any(seed + d);
            const auto launch = [](gpushare::host::stream& on) {
                on.launch({.blocks = sms, .hold = length}, gpushare::detail::empty_kernel{});
            };
            const auto end = now() + 2500ms;
            for (instant arrival = now() + any.exponential(mean_gap); arrival < end;
                 arrival += any.exponential(mean_gap)) {
                sleep_until(arrival);
                if (who == beside::ungated) {
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
    return quantile(took, 0.99);
}

struct waits {
    std::vector<double> us;      // of each submission, until its kernel started: a worker of the node ran it
    std::vector<double> ledger;  // until the device gave it an SM, by the node's own book
    std::vector<double> bound;   // published before it
    // The first two of those on the device without a neighbour.
    std::vector<double> control, control_ledger;
    std::vector<double> stolen;  // of the machine's cores, while it waited
};

waits single_submissions(beside who) {
    const stolen_time machine;
    crowd c(who);
    std::mutex mutex;
    waits all;
    constexpr std::uint32_t tag_of_urgent = 0;  // the neighbours have 1
    std::vector<std::jthread> threads;
    for (std::uint32_t d = 0; d <= control; ++d)
        threads.emplace_back([&, d] {
            auto s = c.node.make_stream(device_id{d}, high, tag_of_urgent);
            gpushare::sim::random any(d);
            auto& l = c.limiters[d];
            for (int i = 0; i < 400; ++i) {
                std::this_thread::sleep_for(500us + any.exponential(2ms));
                std::atomic<std::int64_t> started{0};
                const double bound = std::chrono::duration<double, std::micro>(l.wait_bound()).count();
                const auto asked = now();
                auto t = l.submit(c.urgent[d], s, [&started](auto& on) {
                              on.launch({.blocks = 1, .hold = neighbour}, [&started](auto&) {
                                  started.store(now().time_since_epoch().count(), std::memory_order_relaxed);
                              });
                          }).value();
                t.wait();
                const instant ran{ns{started.load(std::memory_order_relaxed)}};
                ns by_ledger{};
                for (const auto& block : c.node.ledger(device_id{d}).take().blocks)
                    if (block.tag == tag_of_urgent) by_ledger = block.start - asked;
                const ns stolen = machine.between(asked, ran);
                const std::lock_guard lock(mutex);
                if (i < 20) continue;  // until the clients are at it
                const auto in_us = [](ns span) { return std::chrono::duration<double, std::micro>(span).count(); };
                const double us = in_us(ran - asked);
                if (d == control) {
                    all.control.push_back(us);
                    all.control_ledger.push_back(in_us(by_ledger));
                    continue;
                }
                all.us.push_back(us);
                all.ledger.push_back(in_us(by_ledger));
                all.bound.push_back(bound);
                all.stolen.push_back(in_us(stolen));
            }
        });
    threads.clear();
    return all;
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
        std::vector<double> ours, none, solos;
        for (std::uint64_t i = 0; i < 3; ++i) {
            const double solo = request_p99(beside::nobody, how, 100 * i);
            solos.push_back(solo);
            ours.push_back(request_p99(beside::gated, how, 100 * i) / solo);
            none.push_back(request_p99(beside::ungated, how, 100 * i) / solo);
        }
        r.figure("compute.solo_p99_ms" + suffix, solos, "ms");
        r.figure("compute.p99_vs_solo" + suffix, ours, "x");
        r.figure("compute.p99_vs_solo_ungated" + suffix, none, "x");
    }
    auto idle_node = single_submissions(beside::nobody), ours = single_submissions(beside::gated);
    // What the machine adds isn't waiting: what it took of its cores meanwhile, and then as much as anything waited that had
    // nothing to wait for, on an idle node before or on an idle device of this one meanwhile. Uncorrected: by the longest of the idle node alone.
    struct judged {
        double sure = 0, uncorrected = 0;
    };
    const auto violations = [&](const std::vector<double>& of, const std::vector<double>& before,
                                const std::vector<double>& meanwhile) {
        const double idle = std::ranges::max(before), noise = std::max(idle, std::ranges::max(meanwhile));
        judged n;
        for (std::size_t i = 0; i < of.size(); ++i) {
            if (of[i] - ours.bound[i] <= idle) continue;
            ++n.uncorrected;
            if (of[i] - ours.stolen[i] > ours.bound[i] + noise) ++n.sure;
            std::printf(
                "# waited %.0f us until its worker ran, %.0f by the ledger; bound %.0f, taken of the cores %.0f\n",
                ours.us[i], ours.ledger[i], ours.bound[i], ours.stolen[i]);
        }
        return n;
    };
    const auto by_start = violations(ours.us, idle_node.us, ours.control);
    const auto by_ledger = violations(ours.ledger, idle_node.ledger, ours.control_ledger);
    std::printf(
        "# %zu submissions; waits on an idle node: 99th percentile %.0f us, longest %.0f us; by the ledger %.0f and "
        "%.0f\n",
        ours.us.size(), quantile(idle_node.us, 0.99), quantile(idle_node.us, 1), quantile(idle_node.ledger, 0.99),
        quantile(idle_node.ledger, 1));
    r.figure("compute.preempt_bound_violations", {by_start.sure}, "violations");
    r.figure("compute.preempt_bound_violations_uncorrected", {by_start.uncorrected}, "violations");
    r.figure("compute.preempt_bound_violations_by_ledger", {by_ledger.sure}, "violations");
    r.figure("compute.preempt_bound_violations_by_ledger_uncorrected", {by_ledger.uncorrected}, "violations");
    const double bound = quantile(ours.bound, 0.5), p99 = quantile(ours.us, 0.99);
    // Beside the same neighbours of other devices, with nothing to wait for: what is late there is late by the machine.
    r.figure("compute.preempt_control_p99_us", {quantile(ours.control, 0.99)}, "us");
    r.figure("compute.preempt_control_longest_us", {std::ranges::max(ours.control)}, "us");
    r.figure("compute.preempt_bound_us", {bound}, "us");
    r.figure("compute.preempt_wait_p99_us", {p99}, "us");
    r.figure("compute.preempt_wait_p99_by_ledger_us", {quantile(ours.ledger, 0.99)}, "us");
    r.figure("compute.preempt_bound_vs_p99", {bound / p99}, "x");
}

}  // namespace bench::compute
