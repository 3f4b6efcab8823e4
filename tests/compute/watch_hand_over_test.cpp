// SPDX-License-Identifier: Apache-2.0
// A thread that watches the device for others hands the watch to another thread before it runs long
// user code. So the end of other threads' work is noticed, however long that code takes.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/sharing_stream.hpp"
#include "support/timed_device.hpp"

namespace watch_hand_over_test {

using namespace std::chrono_literals;
using gpushare::completion;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::priority;
using support::becomes;
using support::in_good_time;
using support::steady;

namespace {

/// Streams of a device on which nothing ends before let_go(), and others.
struct host_streams {
    using stream = gpushare::host::stream;
    [[nodiscard]] stream free() { return node.make_stream(gpushare::device_id{0}); }
    [[nodiscard]] stream held() {
        auto s = free();
        node.faults(gpushare::device_id{0}).stall(s);
        return s;
    }
    void let_go(stream& s) { node.faults(gpushare::device_id{0}).resume(s); }
    static void work(stream& on) { on.launch({.hold = 10us}, gpushare::detail::empty_kernel{}); }

    gpushare::host::node node{{.sms = 1, .timing = gpushare::host::timing::modelled}};
};
/// The same where nobody can end a wait for points: each has a timer.
template <class Stream>
struct manual_streams {
    using stream = Stream;
    static support::manual_stream of(support::manual_stream& s) { return s; }
    static support::manual_stream of(support::sharing_stream& s) { return s.manual(); }
    [[nodiscard]] stream held() const {
        if constexpr (gpushare::shared_timeline<stream>)
            return {first, instant{}};
        else
            return {first, {}};
    }
    [[nodiscard]] stream free() {
        auto s = held();
        const std::lock_guard lock(mutex);
        running.push_back(of(s));
        return s;
    }
    static void let_go(stream& s) { of(s).reach_all(); }
    static void work(stream& on) { on.enqueue(10us); }

    stream first;
    std::mutex mutex;
    std::vector<support::manual_stream> running;
    std::jthread device{[this](const std::stop_token& stop) {
        for (; !stop.stop_requested(); std::this_thread::yield()) {
            const std::lock_guard lock(mutex);
            for (auto& s : running) s.reach_all();
        }
    }};
};

enum class looks { as_dispatcher, for_ticket, at_gate, for_own_work };
enum class waits { for_ticket, at_gate, in_request, for_callback };

/// The first thread looks at the device, and what it sees lets it into code of the lower level that
/// takes until the second one, of the higher level, has what it waits for.
template <class Streams>
struct scene {
    using stream = typename Streams::stream;
    using limiter = gpushare::compute_limiter<stream, steady>;

    scene(bool in_callback, bool with_own) : compute{{.depth = with_own ? 2U : 1U, .horizon = 1ns}} {
        const auto work = [](stream& on) { Streams::work(on); };
        const auto code = [this] {
            inside = true;
            in_time = becomes([this] { return through.load(); });
        };
        if (with_own)
            own.emplace(compute.submit(other, before, work, {}, [this](const completion&) { through = true; }).value());
        // Once `last` ends the code is run.
        if (in_callback) {
            CHECK(compute.submit(other, last, work, {}, [code](const completion&) { code(); }));
        } else {
            CHECK(compute.submit(other, last, work));
            CHECK(compute.submit(below, free, [code, work](stream& on) {
                code();
                work(on);
            }));
        }
    }

    void look(looks how, const std::stop_token& stop) {
        switch (how) {
            case looks::as_dispatcher: return compute.run(stop);
            case looks::for_ticket: (void)compute.submit(below, free, Streams::work).value().wait(never, stop); return;
            case looks::for_own_work: (void)own->wait(never, stop); return;
            case looks::at_gate: (void)compute.enqueue(below, free, Streams::work, never, stop); return;
        }
    }
    /// Returns once it has what it waits for, or `stop`.
    void wait(waits how, const std::stop_token& stop) {
        std::optional<gpushare::request<limiter>> r;
        switch (how) {
            case waits::in_request: r.emplace(compute, above); [[fallthrough]];
            case waits::for_ticket: (void)compute.submit(above, urgent, Streams::work).value().wait(never, stop); break;
            case waits::at_gate: CHECK(compute.enqueue(above, urgent, Streams::work, never, stop) == errc::none); break;
            case waits::for_callback:
                (void)compute.submit(above, urgent, Streams::work, {}, [this](const completion&) { through = true; });
                return compute.run(stop);  // another dispatcher
        }
        if (!stop.stop_requested()) through = true;
    }

    Streams device;
    stream last{device.held()}, free{device.free()}, before{device.held()}, urgent{device.free()};
    limiter compute;
    gpushare::client_id below = compute.add({}), other = compute.add({}), above = compute.add({.level = priority{1}});
    std::optional<typename limiter::ticket> own;
    std::atomic<bool> inside{false}, through{false}, in_time{false};
};

}  // namespace

TEMPLATE_TEST_CASE("a thread's work is seen to end while the watching thread is in a long callable of others",
                   "[compute][threads]", host_streams, manual_streams<support::manual_stream>,
                   manual_streams<support::sharing_stream>) {
    const auto first = GENERATE(looks::as_dispatcher, looks::for_ticket, looks::at_gate);
    const auto second = GENERATE(waits::for_ticket, waits::at_gate, waits::in_request, waits::for_callback);
    const bool in_callback = GENERATE(false, true);
    // One callback is called at a time, whoever calls.
    if (in_callback && second == waits::for_callback) return;
    CAPTURE(static_cast<int>(first), static_cast<int>(second), in_callback);
    scene<TestType> t(in_callback, false);
    std::jthread watcher([&](const std::stop_token& stop) { t.look(first, stop); });
    std::this_thread::sleep_for(2ms);  // else it may run that before it ever watched
    t.device.let_go(t.last);
    REQUIRE(becomes([&] { return t.inside.load(); }));
    // Of its own level, and what comes then waits behind it.
    REQUIRE(t.compute.submit(t.above, t.before, TestType::work));
    std::jthread waiter([&](const std::stop_token& stop) { t.wait(second, stop); });
    std::this_thread::sleep_for(2ms);  // else there is nothing to hand over
    t.device.let_go(t.before);
    CHECK(becomes([&] { return t.in_time.load(); }));
    CHECK(t.through);
    for (auto* one : {&watcher, &waiter}) one->request_stop();
}

TEMPLATE_TEST_CASE("a thread's own work is seen by others while it is in a long callable of theirs",
                   "[compute][threads]", host_streams, manual_streams<support::manual_stream>,
                   manual_streams<support::sharing_stream>) {
    scene<TestType> t(false, true);
    std::jthread watcher([&](const std::stop_token& stop) { t.look(looks::for_own_work, stop); });
    std::jthread waiter([&](const std::stop_token& stop) {
        // It isn't the one that runs the callable.
        while (!t.inside && !stop.stop_requested()) std::this_thread::yield();
        t.compute.run(stop);
    });
    std::this_thread::sleep_for(2ms);
    t.device.let_go(t.last);
    REQUIRE(becomes([&] { return t.inside.load(); }));
    std::this_thread::sleep_for(2ms);
    t.device.let_go(t.before);
    CHECK(becomes([&] { return t.in_time.load(); }));
    for (auto* one : {&watcher, &waiter}) one->request_stop();
}

namespace {

/// Each thread is a client: it submits, waits, comes to the gate, has callbacks, with callables of
/// all lengths.
struct crowd {
    using stream = gpushare::host::stream;
    using limiter = gpushare::compute_limiter<stream, gpushare::host::steady_clock>;

    void client(unsigned rank, std::uint64_t seed, const std::stop_token& stop) {
        support::random any(seed);
        const auto c = clients[rank];
        auto s = node.make_stream(gpushare::device_id{0});
        const auto some = [&](std::chrono::microseconds most) {
            return std::chrono::microseconds(any.below(static_cast<std::uint64_t>(most.count())));
        };
        const auto wanted = [&] {
            const gpushare::ns takes = any.one_in(4) ? some(400us) : 0ns, lasts = some(200us);
            return [=](stream& on) {
                for (const auto end = steady::now() + takes; steady::now() < end;) {
                }
                on.launch({.hold = lasts}, gpushare::detail::empty_kernel{});
            };
        };
        for (int i = 0; i < rounds && !stop.stop_requested(); ++i) {
            switch (any.below(6)) {
                case 0: (void)compute.enqueue(c, s, wanted(), never, stop); break;
                case 1: {
                    const gpushare::request<limiter> r(compute, c);
                    (void)compute.submit(c, s, wanted()).value().wait(never, stop);
                    break;
                }
                case 2: {  // nobody waits for the first
                    (void)compute.submit(c, s, wanted(), {}, [this](const completion&) { ++told; });
                    ++to_be_told;
                    break;
                }
                case 3: std::this_thread::sleep_for(some(300us)); break;
                case 4: (void)compute.submit(c, s, wanted()).value().wait(steady::now() + some(400us), stop); break;
                default:
                    (void)compute.submit(c, s, wanted()).value().wait(any.one_in(2) ? never : in_good_time(), stop);
            }
        }
        (void)compute.submit(c, s, wanted()).value().wait(never, stop);
        ++through;
    }

    static constexpr unsigned threads = 5;
    static constexpr int rounds = 150;
    gpushare::host::node node{{.sms = 2, .timing = gpushare::host::timing::modelled}};
    limiter compute;
    std::vector<gpushare::client_id> clients;
    std::atomic<unsigned> through{0}, told{0}, to_be_told{0};
};

}  // namespace

TEST_CASE("threads that wait until the end, or nearly so long, all come through", "[compute][threads]") {
    const auto seed = support::seed(GENERATE(1U, 2U, 3U));
    const bool dispatched = GENERATE(false, true);
    CAPTURE(seed, dispatched);
    crowd all;
    for (unsigned i = 0; i < crowd::threads; ++i)
        all.clients.push_back(all.compute.add({.level = priority{static_cast<int>(i % 2)}}));
    std::vector<std::jthread> threads;
    if (dispatched) threads.emplace_back([&](const std::stop_token& stop) { all.compute.run(stop); });
    for (unsigned i = 0; i < crowd::threads; ++i)
        threads.emplace_back([&, i](const std::stop_token& stop) { all.client(i, seed + i, stop); });
    const bool through = becomes([&] { return all.through == crowd::threads; });
    CHECK(through);
    for (auto& t : threads) t.request_stop();
    threads.clear();
    for (const auto c : all.clients) CHECK(all.compute.close(c, in_good_time()));
    CHECK(all.told == all.to_be_told);
}

}  // namespace watch_hand_over_test
