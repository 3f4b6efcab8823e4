// SPDX-License-Identifier: Apache-2.0
// Measures engines behind a limiter with default options: opaque calls of one block that take 0.3,
// 25 and 75 ms, and calls that keep their host thread longer than the device.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "compute/measurements.hpp"
#include "compute/rig.hpp"

namespace bench::compute {

namespace {

using gpushare::device_id;
using gpushare::share;
using gpushare::host::timing;

struct engine {
    ns length{};
    std::uint32_t blocks = 1;
    unsigned permille = 0;
    std::uint32_t threads = 1;
};

/// A tenant whose threads each have a stream and keep four calls submitted.
class tenant {
public:
    tenant(limiter& l, gpushare::host::node& node, std::uint32_t tag, const engine& e)
        : limiter_(&l), id_(l.add({.weight = share::of_permille(e.permille)})), what(e) {
        for (std::uint32_t i = 0; i < e.threads; ++i) {
            auto& s = streams_.emplace_back(node.make_stream(device_id{0}, gpushare::priority{}, tag));
            threads_.emplace_back([this, &s](const std::stop_token& stop) { run(s, stop); });
        }
    }
    /// Stops the tenant; returns its total charge.
    ns end() {
        for (auto& t : threads_) t.request_stop();
        threads_.clear();
        gpushare::client_usage account;
        limiter_->close(id_, gpushare::never, {}, &account);
        return account.device_time;
    }

private:
    void run(gpushare::host::stream& s, const std::stop_token& stop) {
        std::deque<limiter::ticket> out;
        const auto work = [e = what](gpushare::host::stream& to) {
            to.launch({.blocks = e.blocks, .hold = e.length}, gpushare::detail::empty_kernel{});
        };
        while (!stop.stop_requested()) {
            while (out.size() < 4) {
                auto t = limiter_->submit(id_, s, work);
                if (!t) return;
                out.push_back(*std::move(t));
            }
            (void)out.front().wait(gpushare::never, stop);
            while (!out.empty() && out.front().done()) out.pop_front();
        }
        for (const auto& t : out) (void)t.wait();
    }

    limiter* limiter_;
    gpushare::client_id id_;
    engine what;
    std::deque<gpushare::host::stream> streams_;
    std::deque<std::jthread> threads_;
};

struct measured {
    double share_pp = 0, share_rel = 0, metering = 0, idle = 0;
};

/// Judges by a ledger: shares and idle time in the ten seconds after `from`, metering over the
/// whole run.
measured judge(const std::vector<gpushare::host::block_record>& blocks, instant from, std::uint32_t sms,
               const std::vector<engine>& engines, const std::vector<double>& charged) {
    const device_seconds window(blocks, from, from + 10s, engines.size(), sms);
    const device_seconds all(blocks, instant{}, instant::max(), engines.size(), sms);
    measured worst;
    worst.idle = 100 * (1 - window.all / 10);
    for (std::size_t i = 0; i < engines.size(); ++i) {
        const double off = std::abs(100 * window.of[i] / window.all - engines[i].permille / 10.0);
        worst.share_pp = std::max(worst.share_pp, off);
        worst.share_rel = std::max(worst.share_rel, off / (engines[i].permille / 10.0));
        worst.metering = std::max(worst.metering, 100 * std::abs(charged[i] - all.of[i]) / all.of[i]);
    }
    return worst;
}

struct outcome {
    measured found, planted;
};

/// Runs the engines for a second, then measures for ten seconds.
outcome run(std::uint32_t sms, const std::vector<engine>& engines) {
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = sms, .timing = timing::modelled}};
    limiter l{configuration};
    std::deque<tenant> tenants;
    for (std::uint32_t i = 0; i < engines.size(); ++i) tenants.emplace_back(l, node, i, engines[i]);
    const auto from = now() + 1s;
    sleep_until(from + 10s);
    std::vector<double> charged;
    for (auto& t : tenants) charged.push_back(std::chrono::duration<double>(t.end()).count());
    const auto blocks = blocks_of(node, device_id{0});
    return {judge(blocks, from, sms, engines, charged), judge(without_a_fifth(blocks), from, sms, engines, charged)};
}

/// The time that this thread has spent in its own callables.
thread_local ns own_callables{};

/// A callable keeps its thread either by waiting, like a callable that waits for a driver, or by
/// computing.
enum class keeps_thread { waiting, computing };

/// Two clients submit callables that keep their thread for `host_time` and launch work of a third
/// of that length; each client keeps three calls submitted. Returns the longest delay of a thread:
/// the time in submit() without the thread's own callable, or the time in wait() after the work was
/// done.
double captured_ms(keeps_thread how, bool dispatcher, ns host_time) {
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = 1, .timing = timing::modelled}};
    limiter l{configuration};
    std::atomic<ns::rep> longest{0};
    const auto note = [&](ns t) {
        for (auto before = longest.load(); before < t.count() && !longest.compare_exchange_weak(before, t.count());) {
        }
    };
    std::jthread driver;
    if (dispatcher) driver = std::jthread([&](const std::stop_token& stop) { l.run(stop); });
    std::deque<gpushare::host::stream> streams;
    std::deque<std::jthread> clients;
    for (std::uint32_t tag = 0; tag < 2; ++tag) {
        const auto c = l.add({.weight = share::of_permille(500)});
        auto& s = streams.emplace_back(node.make_stream(device_id{0}, gpushare::priority{}, tag));
        clients.emplace_back([&, c](const std::stop_token& stop) {
            std::deque<limiter::ticket> out;
            while (!stop.stop_requested()) {
                for (; out.size() >= 3; out.pop_front()) {
                    const auto waits = now();  // the call may be done already
                    (void)out.front().wait();
                    note(now() - std::max(out.front().finished_at(), waits));
                }
                const auto own_before = own_callables;
                const auto began = now();
                auto t = l.submit(c, s, [me = std::this_thread::get_id(), how, host_time](gpushare::host::stream& to) {
                    const auto called = now(), end = called + host_time;
                    if (how == keeps_thread::waiting) sleep_until(end);
                    while (now() < end) {
                    }
                    to.launch({.hold = host_time / 3}, gpushare::detail::empty_kernel{});
                    if (std::this_thread::get_id() == me) own_callables += now() - called;
                });
                note(now() - began - (own_callables - own_before));
                out.push_back(*std::move(t));
            }
            for (auto& t : out) (void)t.wait();
        });
    }
    std::this_thread::sleep_for(3s);
    clients.clear();
    return std::chrono::duration<double, std::milli>(ns{longest.load()}).count();
}

}  // namespace

void engines(report& r) {
    std::vector<measured> all, planted;
    for (const std::uint32_t sms : {2U, 4U}) {
        const std::vector<std::vector<engine>> cases{
            {{75ms, 1, 300, sms}, {25ms, 1, 700, sms}},
            {{25ms, 1, 300, sms}, {300us, 1, 700, sms}},
            {{75ms, 1, 300, sms}, {25ms, 1, 500, sms}, {300us, 1, 200, sms}},
            {{300us, 1, 300, sms}, {300us, 2, 400, 2}, {300us, sms, 300, 2}},
            {{75ms, 1, 300, sms}, {25ms, 2, 400, 2}, {300us, sms, 300, 2}},
        };
        std::printf("# engines, %u SMs: worst tenant of ten seconds\n", sms);
        for (const auto& c : cases) {
            const auto [m, faulty] = run(sms, c);
            std::string name;
            for (const auto& e : c)
                name += (name.empty() ? "" : ", ") + std::to_string(e.length / 100us) + "00 us x " +
                        std::to_string(e.blocks);
            std::printf("#   %-36s %5.2f pp, metering %4.2f %%, idle %4.2f %%\n", name.c_str(), m.share_pp, m.metering,
                        m.idle);
            std::fflush(stdout);
            all.push_back(m);
            planted.push_back(faulty);
        }
    }
    const auto figure = [&](const char* name, double measured::*of, const char* unit, double most) {
        std::vector<double> values;
        for (const auto& m : all) values.push_back(m.*of);
        r.figure(name, values, unit, control{at_most(most), std::ranges::min(planted, {}, of).*of, lacks_a_fifth},
                 statistic::most);
    };
    figure("compute.engines_share_error_pp", &measured::share_pp, "pp", 0.5);
    figure("compute.engines_share_error_rel", &measured::share_rel, "of_a_share", 0.06);
    figure("compute.engines_metering_error_pct", &measured::metering, "%", 1);
    figure("compute.idle_while_waiting_pct", &measured::idle, "%_of_the_device", 1);
    constexpr ns host_time = 3ms;
    for (const auto how : {keeps_thread::waiting, keeps_thread::computing}) {
        std::vector<double> captured;
        for (int i = 0; i < 5; ++i)
            captured.push_back(std::max(captured_ms(how, false, host_time), captured_ms(how, true, host_time)));
        if (how == keeps_thread::computing)
            r.figure("compute.captured_computing_ms_max", captured, "ms", statistic::most);
        else
            r.figure("compute.captured_ms_max", captured, "ms",
                     {at_most(3), captured_ms(how, false, 4 * host_time), "callables of 12 ms"}, statistic::most);
    }
}

}  // namespace bench::compute
