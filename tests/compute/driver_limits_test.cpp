// SPDX-License-Identifier: Apache-2.0
// No thread drives far beyond its own need. A thread that submits or waits isn't kept for others'
// callables, however many there are and however long they take; a thread that waits in the limiter
// does the rest.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <latch>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/ledger.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"
#include "support/modelled_device.hpp"
#include "support/sharing_stream.hpp"
#include "support/threads.hpp"
#include "support/timed_device.hpp"

namespace driver_limits_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using gpushare::priority;
using support::manual_clock;
using support::manual_stream;
using support::sharing_stream;
using support::steady;
using support::timed_device;

namespace {

constexpr ns host_time = 3ms;  // that each callable takes of its thread

manual_stream& manual_of(manual_stream& s) { return s; }
manual_stream& manual_of(sharing_stream& s) { return s.manual(); }

/// On a clock that callables move: each takes its thread 3 ms, and there is always room for the
/// next.
template <class Stream>
struct slow_callables {
    using limiter = gpushare::compute_limiter<Stream, manual_clock>;

    typename limiter::ticket submit(client_id c, ns takes = host_time) {
        return compute
            .submit(c, stream,
                    [this, takes](Stream& s) {
                        clock.advance(takes);
                        if (device_runs) manual_of(s).reach_all();  // what came before
                        s.enqueue(10us);
                        ++run;
                    })
            .value();
    }
    /// So many of `c` wait until what is in flight is done: who comes then could be kept for all of
    /// them.
    void fill(client_id c, int n) {
        device_runs = false;
        for (int i = 0; i < 2 + n; ++i) waiting.push_back(submit(c));
        device_runs = true;
        run = 0;
    }
    /// How long the limiter's clock went on meanwhile.
    template <class F>
    ns stay(F call) {
        const auto before = clock.now();
        call();
        return clock.now() - before;
    }

    manual_clock clock;
    Stream stream;
    limiter compute{{.depth = 2}, clock};
    client_id a = compute.add({.weight = 50_pct}), b = compute.add({.weight = 50_pct});
    std::vector<typename limiter::ticket> waiting;
    bool device_runs = true;
    int run = 0;
};

}  // namespace

TEMPLATE_TEST_CASE("a submitting thread runs at most one callable of other threads", "[compute]", manual_stream,
                   sharing_stream) {
    slow_callables<TestType> t;
    t.fill(t.b, 50);
    manual_of(t.stream).reach_all();
    CHECK(t.stay([&] { (void)t.submit(t.a); }) <= 2 * host_time);  // its own among them, perhaps
    CHECK(t.run <= 2);
    CHECK(t.run >= 1);
    // Though nobody ever waits, each who comes does its part: all of it is enqueued.
    for (int i = 0; i < 60; ++i) {
        manual_of(t.stream).reach_all();
        CHECK(t.stay([&] { t.compute.poll(); }) <= host_time);
    }
    CHECK(t.run == 51);
}

TEMPLATE_TEST_CASE("clients with long callables get their shares, whichever threads drive", "[compute]", manual_stream,
                   sharing_stream) {
    // Of the same device time each: so a share is one of the callables. All of b's are handed over
    // before; a's come as they go.
    slow_callables<TestType> t;
    const auto [of_a, of_b] = GENERATE(std::pair(500U, 500U), std::pair(300U, 700U), std::pair(900U, 100U));
    CAPTURE(of_a, of_b);
    CHECK(t.compute.change(t.a, {.weight = gpushare::share::of_permille(of_a)}) == errc::none);
    CHECK(t.compute.change(t.b, {.weight = gpushare::share::of_permille(of_b)}) == errc::none);
    int run_a = 0, run_b = 0;
    const auto submit = [&](client_id c, int& run) {
        return t.compute
            .submit(c, t.stream,
                    [&t, &run](TestType& s) {
                        t.clock.advance(host_time);
                        s.enqueue(10us);
                        ++run;
                    })
            .value();
    };
    for (int i = 0; i < 1000; ++i) t.waiting.push_back(submit(t.b, run_b));
    for (int i = 0; i < 4; ++i) t.waiting.push_back(submit(t.a, run_a));
    const auto come_until = [&](int run) {
        while (run_a + run_b < run) {
            manual_of(t.stream).reach_all();
            while (t.waiting.size() < 1004 + static_cast<std::size_t>(run_a)) t.waiting.push_back(submit(t.a, run_a));
            CHECK(t.stay([&] { t.compute.poll(); }) <= host_time);
        }
    };
    come_until(100);  // until it is known how long they take
    const int before_a = run_a, before_b = run_b;
    come_until(1100);
    const double part = (run_a - before_a) / static_cast<double>(run_a + run_b - before_a - before_b);
    CHECK(part == Approx(of_a / 1000.0).margin(0.005));  // what was in flight at either end
}

TEMPLATE_TEST_CASE("a call is delayed by at most one callable of other threads", "[compute]", manual_stream,
                   sharing_stream) {
    slow_callables<TestType> t;
    t.fill(t.b, 50);
    manual_of(t.stream).reach_all();
    CHECK(t.stay([&] { t.compute.poll(); }) <= host_time);
    manual_of(t.stream).reach_all();
    CHECK(t.stay([&] { (void)t.compute.usage(t.a); }) <= host_time);
    CHECK(t.stay([&] { (void)t.compute.change(t.a, {.weight = 40_pct}); }) <= host_time);
    CHECK(t.stay([&] { (void)t.compute.set_policy({}); }) <= host_time);
    CHECK(t.stay([&] { CHECK(t.compute.close(t.a)); }) <= 2 * host_time);  // looks, and waits
    CHECK(t.stay([&] { gpushare::request<typename decltype(t)::limiter> r(t.compute, t.b, {.level = {1}}); }) <=
          2 * host_time);
    CHECK(t.run <= 8);
}

TEMPLATE_TEST_CASE("a waiting thread leaves once its work is done, although there is always work to admit", "[compute]",
                   manual_stream, sharing_stream) {
    slow_callables<TestType> t;
    const auto mine = t.submit(t.a);  // on the device
    t.fill(t.b, 50);
    manual_of(t.stream).reach_all();
    CHECK(t.stay([&] { CHECK(mine.wait()); }) <= host_time);
    CHECK(t.run <= 1);
}

TEST_CASE("a waiting thread whose work ends while it runs another thread's long callable begins no further callable",
          "[compute]") {
    slow_callables<manual_stream> t;
    manual_stream own(t.stream, {});
    const auto mine = t.compute.submit(t.a, own, [](manual_stream& s) { s.enqueue(10us); }).value();
    t.device_runs = false;
    t.waiting.push_back(t.submit(t.b));  // on the device, too: there is room for nobody else
    const auto long_one = t.compute.submit(t.b, t.stream, [&](manual_stream&) {
        t.clock.advance(host_time);
        own.reach_all();
    });
    for (int i = 0; i < 3; ++i) t.waiting.push_back(t.submit(t.b));
    t.run = 0;
    t.stream.on_wait([&] { t.stream.reach_all(); });
    CHECK(t.stay([&] { CHECK(mine.wait()); }) == host_time);
    CHECK(t.run == 0);
}

TEMPLATE_TEST_CASE("a waiting thread drives until its own work is done, and no longer", "[compute]", manual_stream,
                   sharing_stream) {
    slow_callables<TestType> t;
    t.fill(t.b, 3);
    const auto mine = t.submit(t.a);
    t.fill(t.b, 50);
    manual_of(t.stream).on_wait([&] { manual_of(t.stream).reach_all(); });
    CHECK(mine.wait());
    CHECK(t.run <= 10);  // a's turn comes soon, with half of the device
}

TEST_CASE("a waiting thread's deadline and stop request hold although there is always work to admit", "[compute]") {
    slow_callables<manual_stream> t;
    t.fill(t.b, 50);
    const auto last = t.submit(t.b);
    manual_of(t.stream).on_wait([&] { t.stream.reach_all(); });
    SECTION("the deadline") {
        CHECK(t.stay([&] { CHECK_FALSE(last.wait(t.clock.now() + 10ms)); }) <= 10ms + 2 * host_time);
    }
    SECTION("a stop request") {
        std::stop_source stop;
        stop.request_stop();
        CHECK(t.stay([&] { CHECK_FALSE(last.wait(gpushare::never, stop.get_token())); }) <= 2 * host_time);
    }
    CHECK(last.wait());
}

TEMPLATE_TEST_CASE("a permit's holder runs no other thread's callables before its own work", "[compute]", manual_stream,
                   sharing_stream) {
    slow_callables<TestType> t;
    auto held = t.compute.acquire(t.a).value();
    t.fill(t.b, 50);
    manual_of(t.stream).reach_all();
    const auto before = t.run;
    CHECK(t.stay([&] { held.enqueue(t.stream, [](TestType& s) { s.enqueue(10us); }); }) == 0ns);
    CHECK(t.run == before);
}

TEST_CASE("a thread that comes runs all callables that take no time", "[compute]") {
    slow_callables<manual_stream> t;
    (void)t.compute.submit(t.a, t.stream, [&](manual_stream&) {
        for (int i = 0; i < 50; ++i) t.waiting.push_back(t.submit(t.b, 0us));
    });
    CHECK(t.run >= 1);
    t.stream.reach_all();
    t.compute.poll();
    CHECK(t.run == 50);
}

TEST_CASE("a newcomer is delayed by one long callback, although each brings the next, and all are called",
          "[compute]") {
    int left = 50;
    std::function<void()> again;  // outlive the limiter, whose end calls back whom it still owes it
    slow_callables<manual_stream> t;
    again = [&] {
        (void)t.compute.submit(
            t.a, t.stream, [](manual_stream& s) { s.enqueue(10us); }, {},
            [&](const gpushare::completion&) {
                t.clock.advance(host_time);
                t.stream.reach_all();  // the other one, whose end the next submit notices
                if (--left > 0) again();
            });
    };
    again();
    again();
    t.stream.reach_all();
    int polls = 0;
    for (; left > 0 && polls < 100; ++polls) {  // nobody else waits: each who comes calls what is to be called
        CHECK(t.stay([&] { t.compute.poll(); }) <= host_time);
        t.stream.reach_all();
    }
    CHECK(left <= 0);
    CHECK(polls >= 50);
}

TEST_CASE("the next thread calls the callbacks that a leaving thread left", "[compute][threads]") {
    manual_clock clock;
    manual_stream stream;
    gpushare::compute_limiter<manual_stream, manual_clock> compute({.depth = 20}, clock);
    const auto c = compute.add({});
    const auto work = [](manual_stream& s) { s.enqueue(10us); };
    std::atomic<int> called{0};
    const auto callback = [&](const gpushare::completion&) {
        clock.advance(host_time);
        ++called;
    };
    for (int i = 0; i < 12; ++i) (void)compute.submit(c, stream, work, {}, callback);
    stream.reach_all();
    int expected = 0;
    const auto calls_one = [&](auto come) {
        const auto before = clock.now();
        come();
        CHECK(clock.now() - before == host_time);
        CHECK(called == ++expected);
        CHECK(compute.resume_at() <= clock.now());  // there are more
    };
    calls_one([&] { compute.poll(); });
    std::optional<decltype(compute)::ticket> in_flight;
    calls_one([&] { in_flight = compute.submit(c, stream, work).value(); });
    calls_one([&] { (void)compute.usage(c); });
    calls_one([&] { CHECK_FALSE(in_flight->wait(instant::min())); });
    calls_one([&] { CHECK(compute.enqueue(c, stream, work) == errc::none); });  // before it has its permit
    calls_one([&] {
        std::stop_source over;
        over.request_stop();
        compute.run(over.get_token());
    });
    stream.reach_all();
    SECTION("a dispatcher calls all of them") {
        std::jthread dispatcher([&](const std::stop_token& stop) { compute.run(stop); });
        for (const auto end = steady::now() + 5min; called < 12 && steady::now() < end;) std::this_thread::yield();
    }
    SECTION("and who closes waits for them") { CHECK(compute.close(c)); }
    CHECK(called == 12);
    CHECK(compute.resume_at() == gpushare::never);
}

// As a server has it: requests wait outside, two are handed over, and each end hands over the next
// one. Who drives comes late, as where all cores compute, and finds both over. If then a long call
// from below were let in first, the other requests would wait for that.
TEST_CASE("work from callbacks of a higher level goes before waiting work below", "[compute]") {
    using stream = support::modelled_device::stream;
    static constexpr ns late = 1ms, long_call = 60ms;
    struct kind {
        std::uint32_t sms;
        bool other_thread;
        bool asks = false;  // a callback lets the limiter drive before it submits
    };
    const std::vector<kind> cases{{1, false}, {1, true}, {2, false}, {2, true}, {1, false, true}, {1, true, true}};
    for (const auto& [sms, other_thread, asks] : cases) {
        for (const ns length : {300us, 2'000us}) {
            CAPTURE(sms, other_thread, asks, length.count());
            support::modelled_device device(sms);
            stream urgent(device, priority{1}, 1);
            std::deque<stream> streams;
            std::function<void(stream&)> call_below;
            std::function<void()> call_above;
            bool over = false;
            int waiting = 0;
            gpushare::compute_limiter<stream, support::modelled_device::clock> compute(
                {}, support::modelled_device::clock(device));
            const auto above = compute.add({.level = {1}}), below = compute.add({});
            call_below = [&](stream& on) {
                (void)compute.submit(
                    below, on, [](stream& s) { s.launch(1, long_call); }, {},
                    [&, elsewhere = other_thread](const gpushare::completion&) {
                        if (over) return;
                        if (elsewhere)
                            std::thread([&] { call_below(on); }).join();
                        else
                            call_below(on);
                    });
            };
            call_above = [&] {
                if (waiting == 0) return;
                --waiting;
                (void)compute.submit(
                    above, urgent, [length](stream& s) { s.launch(1, length); }, {},
                    [&, ask = asks](const gpushare::completion&) {
                        if (ask) compute.poll();
                        call_above();
                    });
            };
            const auto go_on = [&](ns for_so_long) {
                for (const auto until = device.now() + for_so_long; device.now() < until; compute.poll())
                    (void)device.step(late, until);
            };
            for (std::uint32_t i = 0; i <= sms; ++i) call_below(streams.emplace_back(device, priority{}, 0));
            for (int i = 0; i < 50; ++i) {  // how long calls take is learnt
                waiting = 1;
                call_above();
                go_on(200ms);
            }
            (void)device.blocks();
            waiting = 40;
            for (int i = 0; i < 2; ++i) call_above();
            go_on(3s);
            over = true;
            while (device.step(late)) compute.poll();
            auto blocks = device.blocks();
            std::ranges::sort(blocks, {}, &gpushare::host::block_record::start);
            const auto is_urgent = [](const auto& b) { return b.tag == 1; };
            const auto first = std::ranges::find_if(blocks, is_urgent);
            const auto end = std::find_if(blocks.rbegin(), blocks.rend(), is_urgent).base();
            REQUIRE(std::count_if(first, end, is_urgent) == 40);
            const auto from_below = std::count_if(first, end, std::not_fn(is_urgent));
            // On another SM a call may end meanwhile, and the next one begin.
            CHECK(from_below <= (sms - 1) * (1 + (std::prev(end)->end - first->start) / long_call));
        }
    }
}

// The device has room all the time, and an urgent end is always noticed before the callback of the
// one before it returns.
TEST_CASE("waiting work below is held for callbacks that are due, not for all later ones", "[compute]") {
    using stream = support::modelled_device::stream;
    support::modelled_device device(2);
    stream urgent(device, priority{1}, 1), beside(device, priority{}, 0);
    int left = 0;
    std::function<void()> call_above;
    std::vector<int> left_then;  // when a call from below was let in
    gpushare::compute_limiter<stream, support::modelled_device::clock> compute({},
                                                                               support::modelled_device::clock(device));
    const auto above = compute.add({.level = {1}}), below = compute.add({});
    const auto call_below = [&] {
        (void)compute.submit(below, beside, [&](stream& s) {
            left_then.push_back(left);
            s.launch(1, 1ms);
        });
    };
    call_above = [&] {
        (void)compute.submit(
            above, urgent, [](stream& s) { s.launch(1, 200us); }, {},
            [&](const gpushare::completion&) {
                if (left == 0) return;
                for (const auto until = device.now() + 1ms; device.now() < until;) (void)device.step(0ns, until);
                if (--left == 90) call_below();
                call_above();
            });
    };
    for (int i = 0; i < 50; ++i) {  // how long calls take is learnt
        call_above();
        call_below();
        while (device.step(0ns)) compute.poll();
    }
    left_then.clear();
    left = 100;
    for (int i = 0; i < 2; ++i) call_above();
    ns longest{};
    while (device.step(1ms) || compute.resume_at() <= device.now()) {
        const auto came = device.now();
        compute.poll();
        longest = std::max(longest, device.now() - came);
    }
    CHECK(left == 0);
    CHECK(longest == 1ms);  // that of one callback
    REQUIRE(left_then.size() == 1);
    CHECK(left_then.front() >= 85);
}

// While a thread watches the device and another one sleeps, one more comes and finds three urgent
// calls over.
TEST_CASE("a submitting thread runs at most one callback, although more work could be admitted after it",
          "[compute][threads]") {
    manual_clock clock;
    gpushare::compute_limiter<manual_stream, manual_clock> compute({.depth = 4}, clock);
    const auto above = compute.add({.level = {1}}), below = compute.add({}), idle = compute.add({});
    manual_stream urgent(priority{1}), beside(urgent, priority{}), watched(urgent, priority{});
    const auto work = [](manual_stream& s) { s.enqueue(10us); };
    std::atomic<bool> watches{false}, over{false};
    urgent.on_wait([&] {
        watches = true;
        while (!over) std::this_thread::yield();
        watched.reach_all();
    });
    const auto in_flight = compute.submit(idle, watched, work).value();
    std::jthread watcher([&] { (void)in_flight.wait(); });
    while (!watches) std::this_thread::yield();
    const auto asleep = compute.add({});
    compute.sleep(asleep);
    const auto never_goes = compute.submit(asleep, watched, work).value();
    // The first one may look at no more than its own: then one of these watches for all.
    std::jthread one([&] { (void)never_goes.wait(); }), another([&] { (void)never_goes.wait(); });

    const auto me = std::this_thread::get_id();
    std::atomic<int> called{0}, called_here{0};
    int fewest = 3;
    for (const auto end = steady::now() + 5min; fewest > 1 && steady::now() < end;) {
        std::this_thread::sleep_for(1ms);  // one of them is asleep sooner or later
        called = called_here = 0;
        for (int i = 0; i < 3; ++i) {
            const auto back = [&](const gpushare::completion&) {
                clock.advance(host_time);
                (void)compute.submit(above, urgent, work);
                if (std::this_thread::get_id() == me) ++called_here;
                ++called;
            };
            REQUIRE(compute.submit(above, urgent, work, {}, back));
        }
        std::vector<decltype(compute)::ticket> low;
        for (int i = 0; i < 3; ++i) low.push_back(compute.submit(below, beside, work).value());
        urgent.reach_all();
        compute.poll();
        if (const int n = called_here; n > 0) fewest = std::min(fewest, n);  // else another thread was first
        while (called < 3 || !std::ranges::all_of(low, [](const auto& t) { return t.done(); }) ||
               compute.usage(above).in_flight > 0) {
            urgent.reach_all();
            beside.reach_all();
            compute.poll();
        }
    }
    CHECK(fewest == 1);
    over = true;
    compute.wake(asleep);
    while (!never_goes.done()) {
        watched.reach_all();
        compute.poll();
    }
}

namespace {

void spin_for(ns d) {
    for (const auto until = steady::now() + d; steady::now() < until;) {
    }
}

/// Two or three clients that keep the limiter busy with callables of 3 ms of their thread and 1 ms
/// of the device, three at a time each; who waits, waits for the oldest.
struct server {
    using stream = timed_device::stream;
    using limiter = gpushare::compute_limiter<stream, steady>;
    static constexpr ns callable = 3ms;

    struct figures {
        std::atomic<int> run{0};  // callables, on whichever thread
    };

    template <class Over>
    void client(client_id c, figures& f, Over over, bool as_requests = false) {
        stream s(device);
        std::vector<limiter::ticket> out;
        std::optional<gpushare::request<limiter>> r;
        while (!over()) {
            while (out.size() >= 3) {
                (void)out.front().wait();
                out.erase(out.begin());
            }
            if (as_requests && (!r || f.run % 5 == 0)) r.emplace(compute, c);
            out.push_back(compute
                              .submit(c, s,
                                      [&f, this](stream& on) {
                                          spin_for(callable);
                                          on.enqueue(1ms);
                                          ++f.run;
                                          if (std::this_thread::get_id() == watched) ++run_by_watched;
                                      })
                              .value());
        }
        for (auto& t : out) (void)t.wait();
    }

    std::thread::id watched{};  // set before the clients begin
    int run_by_watched = 0;     // of that thread alone

    timed_device device;
    limiter compute;
};

}  // namespace

TEST_CASE("clients with long callables share the device, and no thread is held captive", "[compute][threads]") {
    const bool dispatched = GENERATE(false, true);
    const bool requests = GENERATE(false, true);
    CAPTURE(dispatched, requests);
    server t;
    const auto a = t.compute.add({.weight = 50_pct}), b = t.compute.add({.weight = 50_pct});
    server::figures of_a, of_b;
    // A client that is captured stays inside its first submission for as long as the other one goes
    // on.
    const auto limit = steady::now() + 5min;
    const auto over = [&] { return (of_a.run > 15 && of_b.run > 15) || steady::now() > limit; };
    {
        std::jthread dispatcher;
        if (dispatched) dispatcher = std::jthread([&](const std::stop_token& stop) { t.compute.run(stop); });
        support::together(2, [&](unsigned rank) {
            if (rank == 0)
                t.client(a, of_a, over, requests);
            else
                t.client(b, of_b, over);
        });
    }
    CHECK(of_a.run > 15);
    CHECK(of_b.run > 15);
    // The shares are in modelled time, above.
}

TEST_CASE("an urgent client's threads aren't kept for the callables of those below", "[compute][threads]") {
    const bool dispatched = GENERATE(false, true);
    CAPTURE(dispatched);
    server t;
    const auto urgent = t.compute.add({.weight = 20_pct, .level = {1}});
    const auto b = t.compute.add({.weight = 40_pct}), c = t.compute.add({.weight = 40_pct});
    server::figures of_b, of_c;
    std::atomic<int> rounds = 0;
    int most_in_a_round = 0;
    const auto limit = steady::now() + 5min;
    const auto over = [&] { return (rounds > 10 && of_b.run > 10 && of_c.run > 10) || steady::now() > limit; };
    {
        std::jthread dispatcher;
        if (dispatched) dispatcher = std::jthread([&](const std::stop_token& stop) { t.compute.run(stop); });
        std::latch known(3);
        support::together(3, [&](unsigned rank) {
            if (rank == 0) t.watched = std::this_thread::get_id();
            known.arrive_and_wait();
            if (rank == 1) t.client(b, of_b, over);
            if (rank == 2) t.client(c, of_c, over);
            if (rank != 0) return;
            server::stream s(t.device);
            for (; !over(); ++rounds) {
                std::this_thread::sleep_for(5ms);
                const int before = t.run_by_watched;
                const auto work = [](server::stream& on) { on.enqueue(100us); };
                (void)t.compute.submit(urgent, s, work).value().wait();
                (void)t.compute.enqueue(urgent, s, work);
                most_in_a_round = std::max(most_in_a_round, t.run_by_watched - before);
            }
        });
    }
    CAPTURE(rounds.load(), of_b.run.load(), of_c.run.load());
    CHECK(rounds > 10);
    CHECK(of_b.run > 10);
    CHECK(of_c.run > 10);
    CHECK(most_in_a_round <= 2);
}

TEST_CASE("a thread that sleeps in the limiter does the work that another thread leaves", "[compute][threads]") {
    timed_device device;
    gpushare::compute_limiter<timed_device::stream, steady> compute{{.depth = 1}};
    const auto a = compute.add({.weight = 50_pct}), b = compute.add({.weight = 50_pct});
    timed_device::stream s(device);
    // A thread that waits for the last of many slow ones of b drives; a's own come and go beside
    // it.
    std::vector<decltype(compute)::ticket> slow;
    for (int i = 0; i < 30; ++i)
        slow.push_back(compute
                           .submit(b, s,
                                   [](timed_device::stream& on) {
                                       spin_for(1ms);
                                       on.enqueue(10us);
                                   })
                           .value());
    std::jthread waiter([&] { (void)slow.back().wait(); });
    ns longest{};
    for (int i = 0; i < 10; ++i) {
        const auto began = steady::now();
        (void)compute.submit(a, s, [](timed_device::stream& on) { on.enqueue(10us); }).value();
        longest = std::max(longest, steady::now() - began);
    }
    waiter.join();
    CHECK(slow.back().done());  // nobody else was asked
    CHECK(longest < 25ms);      // all of them would be 30 ms and more
    CHECK(compute.close(a, steady::now() + 5min));
    CHECK(compute.close(b, steady::now() + 5min));
}

TEST_CASE("a close returns when the client's callbacks have been called, whichever thread calls them",
          "[compute][threads]") {
    timed_device device;
    gpushare::compute_limiter<timed_device::stream, steady> compute;
    const auto c = compute.add({});
    timed_device::stream s{device};
    std::atomic<bool> inside{false}, go_on{false};
    std::atomic<int> called{0}, sent{0};
    const auto callback = [&](const gpushare::completion&) {
        inside = true;
        while (!go_on) std::this_thread::yield();
        ++called;
    };
    std::jthread caller([&] {  // perhaps in the first of its submits already
        for (int i = 0; i < 3; ++i)
            if (compute.submit(
                    c, s, [](timed_device::stream& to) { to.enqueue(1us); }, {}, callback))
                ++sent;
        while (called < sent) compute.poll();
    });
    while (!inside) std::this_thread::yield();
    CHECK_FALSE(compute.close(c, steady::now() + 20ms));
    CHECK(called == 0);
    go_on = true;
    CHECK(compute.close(c, steady::now() + 5min));
    const int when_closed = called;
    caller.join();
    CHECK(when_closed == sent);
    CHECK(sent >= 1);
}

TEST_CASE("a callback may close its own client", "[compute]") {
    timed_device device;
    gpushare::compute_limiter<timed_device::stream, steady> compute;
    const auto c = compute.add({});
    timed_device::stream s{device};
    bool closed = false;
    const auto close = [&](const gpushare::completion&) { closed = compute.close(c, steady::now() + 5min); };
    const auto last = compute.submit(
        c, s, [](timed_device::stream& to) { to.enqueue(1us); }, {}, close);
    REQUIRE(last);
    while (!closed && last->wait(steady::now() + 5min)) compute.poll();
    CHECK(closed);
}

}  // namespace driver_limits_test
