// SPDX-License-Identifier: Apache-2.0
// Callbacks, coroutines, requests, gangs and waits for room: the layers around a limiter's queue
// and gate.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/policies/by_order.hpp>
#include <gpushare/detail/device_order_lock.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/detached.hpp"
#include "support/manual_timeline.hpp"
#include "support/threads.hpp"
#include "support/timed_device.hpp"

namespace limiter_shells_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::completion;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using support::detached;
using support::manual_clock;
using support::manual_stream;

namespace {

using limiter = gpushare::compute_limiter<manual_stream, manual_clock>;
using names = std::vector<std::string>;

struct setup {
    explicit setup(gpushare::limiter_options options = {.depth = 1}) : compute(options, clock) {}

    limiter::ticket submit(client_id c, std::string name, ns length = 1ms) {
        return compute.submit(c, stream, logs(std::move(name), length)).value();
    }
    gpushare::submission_work<manual_stream> logs(std::string name, ns length = 1ms) {
        return [this, name = std::move(name), length](manual_stream& s) {
            s.enqueue(length);
            enqueued.push_back(name);
        };
    }
    void finish_one(errc status = errc::none) {
        stream.reach_next();
        stream.reach_next(status);
        compute.poll();
    }
    void finish_all() {
        stream.reach_all();
        compute.poll();
    }

    manual_clock clock;
    manual_stream stream;
    names enqueued;
    limiter compute;
};

struct instant_stream {
    using point = gpushare::immediate_point;
    static point record() noexcept { return {}; }
};

}  // namespace

TEST_CASE("a callback is told how it went, once", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    std::vector<completion> told;
    const auto tell = [&](const completion& d) { told.push_back(d); };
    const auto good = t.compute.submit(c, t.stream, t.logs("good", 3ms), {}, tell).value();
    (void)t.compute.submit(
        c, t.stream, [](manual_stream&) { throw std::out_of_range("mine"); }, {}, tell);
    (void)t.compute.submit(c, t.stream, t.logs("fails"), {}, tell);
    (void)t.compute.submit(c, t.stream, t.logs("cancelled"), {}, tell);
    CHECK(told.empty());
    t.clock.advance(5ms);
    t.finish_one();
    REQUIRE(told.size() == 1);
    CHECK(told[0].status == errc::none);
    CHECK_NOTHROW(told[0].rethrow());  // nothing to throw
    CHECK_NOTHROW(good.rethrow());
    CHECK(told[0].device_time == 3ms);
    CHECK(told[0].finished_at == instant{5ms});
    t.finish_one();
    t.finish_one(errc::kernel_failed);
    REQUIRE(told.size() == 3);
    CHECK(told[1].status == errc::submission_failed);
    CHECK_THROWS_AS(std::rethrow_exception(told[1].error), std::out_of_range);
    CHECK(told[2].status == errc::kernel_failed);
    CHECK_FALSE(t.compute.close(c, instant::min()));
    REQUIRE(told.size() == 3);  // it is in flight
    t.finish_one();
    CHECK(t.compute.submit(c, t.stream, t.logs("refused"), {}, tell).code() == errc::closed);
    CHECK(told.size() == 4);
}

TEST_CASE("a callback may use the limiter, and isn't called from within itself", "[compute]") {
    manual_clock clock;
    gpushare::compute_limiter<instant_stream, manual_clock> compute{{.depth = 1}, clock};
    instant_stream stream;
    const auto c = compute.add({});
    int runs = 0, depth = 0, deepest = 0;
    struct again {
        void operator()(const completion&) {
            deepest = std::max(deepest, ++depth);
            if (++runs < 10'000)
                (void)compute.submit(
                    c, stream, [](instant_stream&) {}, {}, again{*this});
            --depth;
        }
        gpushare::compute_limiter<instant_stream, manual_clock>& compute;
        instant_stream& stream;
        client_id c;
        int &runs, &depth, &deepest;
    };
    (void)compute.submit(
        c, stream, [](instant_stream&) {}, {}, again{compute, stream, c, runs, depth, deepest});
    CHECK(runs == 10'000);
    CHECK(deepest == 1);
}

TEST_CASE("a coroutine goes on when its work is done", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    names log;
    const auto chain = [&]() -> detached {
        for (const auto* name : {"1", "2"}) {
            const auto done = co_await gpushare::async_submit(t.compute, c, t.stream, t.logs(name));
            log.push_back(done.status == errc::none ? name : "failed");
        }
        const auto failed = co_await gpushare::async_submit(t.compute, c, t.stream,
                                                            [](manual_stream&) { throw std::runtime_error("mine"); });
        log.push_back(failed.error ? "threw" : "didn't");
        const auto empty = co_await gpushare::async_submit(t.compute, c, t.stream, {});
        log.push_back(empty.status == errc::invalid_specification ? "refused" : "wasn't");
    };
    chain();
    CHECK(t.enqueued == names{"1"});
    CHECK(log.empty());
    t.finish_one();
    CHECK(log == names{"1"});
    CHECK(t.enqueued == names{"1", "2"});
    t.finish_one();
    t.finish_one();
    CHECK(log == names{"1", "2", "threw", "refused"});
}

TEST_CASE("a coroutine may be destroyed while it waits", "[compute][failures]") {
    setup t;
    const auto c = t.compute.add({});
    names log;
    const auto wait = [&](std::string name) -> support::held {
        const std::string own = name + ", as its coroutine has it";  // gone with it
        const auto how = co_await gpushare::async_submit(t.compute, c, t.stream, [&](manual_stream& s) {
            s.enqueue(1ms);
            t.enqueued.push_back(own);
        });
        log.push_back(name + ": " + std::string(gpushare::to_string(how.status)));
    };
    SECTION("queued: it never runs") {
        std::optional<support::held> first(wait("first")), second(wait("second")), third(wait("third"));
        CHECK(t.enqueued.size() == 1);
        second.reset();
        CHECK(t.compute.usage(c).waiting == 1);
        t.finish_one();
        t.finish_one();
        CHECK(log == names{"first: no error", "third: no error"});
        CHECK(t.enqueued.size() == 2);
    }
    SECTION("in flight: it goes on without it") {
        { const auto first = wait("first"); }
        CHECK(t.compute.usage(c).in_flight == 1);
        const auto second = wait("second");
        t.finish_one();
        t.finish_one();
        CHECK(log == names{"second: no error"});
        CHECK(t.compute.usage(c).completed == 2);
    }
    SECTION("done, and to be told: it isn't") {
        std::optional<support::held> second;
        const auto destroys = [&]() -> detached {
            (void)co_await gpushare::async_submit(t.compute, c, t.stream, t.logs("first"));
            second.reset();  // within the callback; both are told in one call
        };
        destroys();
        second.emplace(wait("second"));
        t.stream.reach_all();
        t.compute.poll();
        t.stream.reach_all();
        t.compute.poll();
        CHECK(log.empty());
    }
    SECTION("by its own callable") {
        std::optional<support::held> self;
        const auto one = [&]() -> support::held {
            (void)co_await gpushare::async_submit(t.compute, c, t.stream, [&](manual_stream& s) {
                s.enqueue(1ms);
                self.reset();
            });
            log.emplace_back("resumed");
        };
        const auto before = t.submit(c, "before");
        self.emplace(one());
        t.finish_one();
        t.finish_one();
        CHECK(log.empty());
        CHECK(t.compute.usage(c).completed == 2);
    }
    SECTION("with its client, which closes") {
        const auto first = wait("first");
        { const auto second = wait("second"); }
        t.stream.reach_all();
        CHECK(t.compute.close(c));
        CHECK(log == names{"first: no error"});
    }
    SECTION("it ended: its handle goes later") {
        const auto first = wait("first");
        t.finish_one();
        CHECK(first.over());
        CHECK(log.size() == 1);
    }
}

TEST_CASE("submissions that never ran are counted by reason, and the others' waits and runs are timed",
          "[compute][failures]") {
    using gpushare::unrun;
    setup t{{.depth = 1, .queue_limit = 2, .quarantine_after = 2}};
    const auto c = t.compute.add({});
    const auto of = [&] { return t.compute.usage(c); };
    const auto first = t.submit(c, "first", 3ms), second = t.submit(c, "second", 20ms), third = t.submit(c, "third");
    CHECK(t.compute.submit(c, t.stream, t.logs("no")).code() == errc::queue_full);
    CHECK(t.compute.acquire(c).code() == errc::queue_full);
    CHECK(third.cancel());
    CHECK(t.compute.try_acquire(c).code() == errc::deadline_exceeded);
    std::stop_source stop;
    stop.request_stop();
    CHECK(t.compute.acquire(c, gpushare::never, stop.get_token()).code() == errc::stopped);
    CHECK(t.compute.acquire(c, instant{0ms}).code() == errc::deadline_exceeded);
    CHECK(of().refused[unrun::queue_full] == 2);
    CHECK(of().refused[unrun::no_room] == 1);
    CHECK(of().refused.total() == 3);
    CHECK(of().cancelled[unrun::stopped] == 2);
    CHECK(of().cancelled[unrun::late] == 1);
    const auto late = t.compute.submit(c, t.stream, t.logs("late"), {.deadline = instant{1ms}, .drop_if_late = true});
    t.clock.advance(7ms);
    t.finish_one();
    t.finish_one();
    CHECK(late->status() == errc::deadline_exceeded);
    CHECK(of().cancelled[unrun::late] == 2);
    CHECK(of().dropped == 1);
    CHECK(of().queueing.count() == 2);
    CHECK(of().queueing.sum() == 7ms);
    CHECK(of().running.count() == 2);
    CHECK(of().running.sum() == 23ms);
    { const auto unused = t.compute.acquire(c); }
    CHECK(of().queueing.count() == 3);  // let in at once, and not used
    CHECK(t.compute.sleep(c, instant::min(), {}, gpushare::while_asleep::refuse));
    CHECK(t.compute.submit(c, t.stream, t.logs("asleep")).code() == errc::asleep);
    CHECK(of().refused[unrun::asleep] == 1);
    t.compute.wake(c);
    for (int i = 0; i < 2; ++i) {
        const auto fails = t.submit(c, "fails");
        if (i == 1) (void)t.submit(c, "behind it");
        t.finish_one(errc::kernel_failed);
    }
    CHECK(of().cancelled[unrun::quarantined] == 1);
    CHECK(t.compute.try_acquire(c).code() == errc::quarantined);
    CHECK(of().refused[unrun::quarantined] == 1);
    CHECK(t.compute.pardon(c) == errc::none);
    const auto last = t.submit(c, "last"), cut = t.submit(c, "cut");
    gpushare::client_usage account;
    CHECK_FALSE(t.compute.close(c, instant::min()));
    CHECK(cut.status() == errc::closed);
    t.finish_all();
    CHECK(t.compute.close(c, gpushare::never, {}, &account));
    CHECK(account.cancelled[unrun::closed] == 1);
    CHECK(account.cancelled.total() == 6);
    CHECK(account.completed == account.running.count());
}

TEST_CASE("an event reports work that waited while no thread drove", "[compute][failures]") {
    setup t;
    const auto c = t.compute.add({.name = "chat"});
    const auto first = t.submit(c, "first");
    t.clock.advance(5s);
    CHECK_FALSE(t.compute.take_event());  // nothing waits: nobody need come
    t.finish_one();
    (void)t.submit(c, "second");
    (void)t.submit(c, "third");    // waits
    for (int i = 0; i < 2; ++i) {  // asking for events is no driving
        t.clock.advance(400ms);
        CHECK_FALSE(t.compute.take_event());
    }
    t.clock.advance(300ms);
    SECTION("to who asks for events") {}
    SECTION("to who submits next") { (void)t.submit(c, "fourth"); }
    SECTION("to who comes to the gate") { CHECK(t.compute.try_acquire(c).code() == errc::deadline_exceeded); }
    const auto e = t.compute.take_event();
    REQUIRE(e);
    CHECK(e->what == gpushare::limiter_event::kind::undriven);
    CHECK(e->client == c);
    CHECK(e->name.view() == "chat");
    CHECK(e->took == 1100ms);
    CHECK(e->bound == 1s);
    CHECK_FALSE(t.compute.take_event());
    for (int i = 0; i < 10; ++i) {  // who drives now and then
        t.clock.advance(900ms);
        t.compute.poll();
    }
    CHECK_FALSE(t.compute.take_event());
    t.finish_all();
    t.finish_all();
    t.finish_all();
    t.clock.advance(5s);
    t.compute.poll();
    CHECK_FALSE(t.compute.take_event());
}

TEST_CASE("work that a policy holds back doesn't count as undriven before its turn", "[compute][failures]") {
    gpushare::limiter_core<> core;
    const auto c = core.add({});
    const auto at = [](gpushare::ns t) { return [t] { return instant{t}; }; };
    core.attend(at(0s));
    core.arrive(c, instant{0s});
    core.leave(at(0s));
    core.attend(at(999ms));
    core.leave(at(999ms));
    core.look_for_undriven(at(1998ms));
    CHECK_FALSE(core.events().take());
    core.look_for_undriven(at(1999ms));
    CHECK(core.events().take()->took == 1s);
    gpushare::detail::attendance held;
    held.leave(instant{0s}, instant{10s});
    CHECK(held.look(instant{10s}) == 0s);
    CHECK(held.look(instant{11s}) == 1s);
    CHECK(held.look(instant{11s}) == 0s);
}

TEST_CASE("a close within a callable, as by exit(), doesn't wait for what can't end meanwhile", "[compute][failures]") {
    setup t;
    const auto other = t.compute.add({.weight = 10_pct}), c = t.compute.add({.weight = 50_pct});
    int closed = 0, asleep = 0;
    const auto tries = [&](manual_stream& s) {
        s.enqueue(1ms);
        CHECK(t.compute.close(other));  // which has nothing that waits for this
        asleep += t.compute.sleep(c) ? 1 : 0;
        closed += t.compute.close(c) ? 1 : 0;
    };
    SECTION("queued") {
        const auto waits = [&] { return t.compute.submit(c, t.stream, tries).value(); }();
        CHECK(waits.bound() == 0ns);
    }
    SECTION("at the gate") { t.compute.acquire(c)->enqueue(t.stream, tries); }
    SECTION("at the gate, which throws") {
        CHECK_THROWS_AS(t.compute.acquire(c)->enqueue(t.stream,
                                                      [&](manual_stream& s) {
                                                          tries(s);
                                                          throw std::runtime_error("mine");
                                                      }),
                        std::runtime_error);
    }
    CHECK(closed == 0);
    CHECK(asleep == 0);
    CHECK(t.compute.submit(c, t.stream, t.logs("late")).code() == errc::closed);
    t.finish_all();
    CHECK(t.compute.close(c));
    const auto next = t.compute.add({});  // and this thread is in none any more
    const auto one = t.submit(next, "next");
    t.stream.on_wait([&] { t.stream.reach_all(); });
    CHECK(t.compute.close(next));
}

TEST_CASE("a coroutine that is destroyed waits for its callable, which another thread is in",
          "[compute][threads][failures]") {
    setup t;
    const auto c = t.compute.add({});
    std::atomic<bool> inside{false}, going{false}, read{false};
    const auto first = t.submit(c, "first");
    std::optional<support::held> second;
    const auto wait = [&]() -> support::held {
        const std::vector<int> own(64, 1);
        (void)co_await gpushare::async_submit(t.compute, c, t.stream, [&](manual_stream& s) {
            inside = true;
            while (!going) std::this_thread::yield();
            std::this_thread::sleep_for(1ms);  // in which it would be gone
            s.enqueue(own.size() * 1us);
            read = true;
        });
    };
    second.emplace(wait());
    std::thread drives([&] { t.finish_one(); });
    while (!inside) std::this_thread::yield();
    going = true;
    second.reset();
    CHECK(read);
    drives.join();
    t.finish_one();
    CHECK(t.compute.usage(c).completed == 2);
}

TEST_CASE("coroutines over work that is done at once don't pile up", "[compute]") {
    manual_clock clock;
    gpushare::compute_limiter<instant_stream, manual_clock> compute{{.depth = 1}, clock};
    instant_stream stream;
    const auto c = compute.add({});
    int done = 0;
    const auto many = [&]() -> detached {
        for (int i = 0; i < 10'000; ++i) {
            (void)co_await gpushare::async_submit(compute, c, stream, [](instant_stream&) {});
            ++done;
        }
    };
    many();
    CHECK(done == 10'000);
}

TEST_CASE("coroutines resumed by a dispatcher on another thread", "[compute][threads]") {
    using stream = support::timed_device::stream;
    support::timed_device device;
    gpushare::compute_limiter<stream, support::steady> compute{{.depth = 2}};
    const auto c = compute.add({});
    stream s(device);
    std::atomic<int> done{0};
    {
        const std::jthread driver([&](const std::stop_token& stop) { compute.run(stop); });
        const auto chain = [&]() -> detached {
            for (int i = 0; i < 100; ++i)
                if ((co_await gpushare::async_submit(compute, c, s, [](stream& to) { to.enqueue(5us); })).status ==
                    errc::none)
                    ++done;
        };
        for (int i = 0; i < 4; ++i) chain();
        const auto deadline = support::steady::now() + 5min;
        while (done < 400 && support::steady::now() < deadline) std::this_thread::yield();
    }
    CHECK(done == 400);
    CHECK(compute.close(c));
}

TEST_CASE("a full queue refuses, or is waited for", "[compute]") {
    setup t{{.depth = 1, .queue_limit = 1}};
    const auto c = t.compute.add({});
    const auto first = t.submit(c, "in flight"), second = t.submit(c, "waits");
    CHECK(t.compute.submit(c, t.stream, t.logs("no")).code() == errc::queue_full);
    SECTION("until there is room") {
        t.stream.on_wait([&] {
            t.stream.reach_next();
            t.stream.reach_next();
        });
        const auto third = t.compute.submit(c, t.stream, t.logs("third"), {.room_by = gpushare::never});
        REQUIRE(third);
        CHECK(third->wait());
        CHECK(t.enqueued == names{"in flight", "waits", "third"});
    }
    SECTION("until the deadline") {
        t.stream.on_wait([&] { t.clock.advance(1ms); });
        CHECK(t.compute.submit(c, t.stream, t.logs("no"), {.room_by = t.clock.now() + 5ms}).code() == errc::queue_full);
    }
    SECTION("until a stop is requested") {
        std::stop_source stop;
        t.stream.on_wait([&] { stop.request_stop(); });
        CHECK(t.compute.submit(c, t.stream, t.logs("no"), {.room_by = gpushare::never}, {}, stop.get_token()).code() ==
              errc::stopped);
    }
    CHECK(t.compute.usage(c).waiting <= 1);
}

TEST_CASE("waiting work can be cancelled, and work under way can't", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    errc told = errc::none;
    const auto first = t.submit(c, "first");
    const auto second =
        t.compute.submit(c, t.stream, t.logs("second"), {}, [&](const completion& d) { told = d.status; }).value();
    const auto third = t.submit(c, "third");
    CHECK_FALSE(first.cancel());
    CHECK(second.cancel());
    CHECK(second.done());
    CHECK(second.status() == errc::stopped);
    CHECK(told == errc::stopped);
    CHECK_FALSE(second.cancel());
    t.finish_one();
    t.finish_one();
    CHECK(third.status() == errc::none);
    CHECK(t.enqueued == names{"first", "third"});
    CHECK(t.compute.usage(c).completed == 2);
    CHECK(t.compute.close(c));
}

TEST_CASE("cancelling makes room for who waits for it", "[compute]") {
    setup t;
    const auto c = t.compute.add({.queue_limit = 1});
    (void)t.submit(c, "runs");
    const auto waits = t.submit(c, "waits");
    CHECK(t.compute.submit(c, t.stream, t.logs("no")).code() == errc::queue_full);
    t.stream.on_wait([&] { (void)waits.cancel(); });
    CHECK(t.compute.submit(c, t.stream, t.logs("in"), {.room_by = gpushare::never}));
    CHECK(waits.status() == errc::stopped);
    CHECK(t.compute.usage(c).waiting == 1);
}

TEST_CASE("a client that waited for room is called back, whatever was admitted meanwhile", "[compute]") {
    setup t{{.depth = 4, .horizon = 0ns}};
    const auto c = t.compute.add({.weight = 50_pct, .queue_limit = 1}), other = t.compute.add({.weight = 50_pct});
    (void)t.submit(c, "runs");
    for (const auto* name : {"1", "2", "3", "4"}) (void)t.submit(other, name);
    (void)t.submit(c, "waits");
    // Goes behind the one that waits for room, and by then all that is enqueued is done.
    (void)t.compute.submit(other, t.stream, [](manual_stream& s) { s.reach_all(); });
    t.stream.on_wait([&] { t.stream.reach_all(); });
    int told = 0;
    REQUIRE(t.compute.submit(c, t.stream, t.logs("mine"), {.room_by = gpushare::never},
                             [&](const completion&) { ++told; }));
    for (int i = 0; i < 3; ++i) t.finish_all();
    CHECK(t.enqueued == names{"runs", "1", "2", "3", "waits", "4", "mine"});
    CHECK(told == 1);
}

TEST_CASE("late work doesn't go through a free gate, if it says so", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    t.clock.advance(5ms);
    CHECK(t.compute.acquire(c, gpushare::never, {}, {.deadline = instant{5ms}, .drop_if_late = true}).code() ==
          errc::deadline_exceeded);
    CHECK(t.compute.usage(c).dropped == 1);
    CHECK(t.compute.usage(c).in_flight == 0);
    CHECK(t.compute.acquire(c, gpushare::never, {}, {.deadline = instant{6ms}, .drop_if_late = true}));
    CHECK(t.compute.usage(c).dropped == 1);
}

TEST_CASE("a submission at the gate is predicted as itself, though less urgent work of its client waits there",
          "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    (void)t.submit(c, "runs", 1ms);
    (void)t.compute.submit(c, t.stream, t.logs("less urgent"), {.cost = 10ms, .priority = {-1}});
    t.stream.on_wait([&] { t.stream.reach_all(); });
    const auto p = t.compute.acquire(c, gpushare::never, {}, {.cost = 2ms});
    REQUIRE(p);
    CHECK(t.enqueued == names{"runs"});
    // Itself, and one that waits of a client whose work took a millisecond so far.
    CHECK(t.compute.estimate(c).wait == 3ms);
}

TEST_CASE("work that is late when its turn comes never runs, if it says so", "[compute]") {
    setup t;
    const auto c = t.compute.add({.name = "chat"});
    const auto due = t.clock.now() + 5ms;
    (void)t.submit(c, "first");
    std::vector<errc> told;
    const auto tell = [&](const completion& d) { told.push_back(d.status); };
    const auto drop = gpushare::submit_options{.deadline = due, .drop_if_late = true};
    const auto in_time = t.compute.submit(c, t.stream, t.logs("in time"), drop, tell).value();
    const auto late = t.compute.submit(c, t.stream, t.logs("late"), drop, tell).value();
    const auto tolerant = t.compute.submit(c, t.stream, t.logs("tolerant"), {.deadline = due}, tell).value();
    t.clock.advance(5ms - 1ns);
    t.finish_one();
    CHECK(t.enqueued == names{"first", "in time"});
    t.clock.advance(1ns);
    t.finish_one();
    CHECK(t.enqueued == names{"first", "in time", "tolerant"});
    REQUIRE(late.done());
    CHECK(late.status() == errc::deadline_exceeded);
    CHECK_THROWS_WITH(late.rethrow(), "tenant 'chat': submission: deadline exceeded");
    t.finish_one();
    CHECK(told == std::vector{errc::none, errc::deadline_exceeded, errc::none});
    CHECK(t.compute.usage(c).dropped == 1);
    CHECK(t.compute.usage(c).completed == 3);
    CHECK(t.compute.usage(c).failed == 0);
}

TEST_CASE("a submission of a higher priority goes before its client's others, and before lower clients'", "[compute]") {
    setup t;
    const auto ordinary = t.compute.add({.weight = 50_pct, .ceiling = {3}}), other = t.compute.add({.weight = 50_pct});
    const auto at = [&](client_id c, const char* name, std::int32_t level) {
        return t.compute.submit(c, t.stream, t.logs(name), {.priority = {level}}).value();
    };
    (void)t.submit(ordinary, "runs");
    (void)t.submit(other, "other 1");
    (void)t.submit(other, "other 2");
    (void)at(ordinary, "lower", -1);
    (void)t.submit(ordinary, "plain");
    (void)at(ordinary, "urgent 1", 2);  // at once: a higher level has room of its own
    (void)at(ordinary, "urgent 2", 2);
    (void)at(ordinary, "urgent 3", 2);
    (void)at(ordinary, "most urgent", 3);
    for (int i = 0; i < 9; ++i) t.finish_one();
    REQUIRE(t.enqueued.size() == 9);
    // Then its client is one like the other again.
    CHECK(names(t.enqueued.begin(), t.enqueued.begin() + 5) ==
          names{"runs", "urgent 1", "most urgent", "urgent 2", "urgent 3"});
    const auto place = [&](const char* name) { return std::ranges::find(t.enqueued, name) - t.enqueued.begin(); };
    CHECK(place("plain") < place("lower"));
    CHECK(place("other 1") < place("lower"));
    CHECK(place("other 1") < place("other 2"));
}

TEST_CASE("a client has a queue limit of its own", "[compute]") {
    setup t{{.depth = 1, .queue_limit = 3}};
    const auto small = t.compute.add({.queue_limit = 1}), usual = t.compute.add({});
    (void)t.submit(usual, "runs");
    (void)t.submit(small, "waits");
    CHECK(t.compute.submit(small, t.stream, t.logs("no")).code() == errc::queue_full);
    for (int i = 0; i < 3; ++i) (void)t.submit(usual, "waits");
    CHECK(t.compute.submit(usual, t.stream, t.logs("no")).code() == errc::queue_full);
    CHECK(t.compute.change(small, {.queue_limit = 2}) == errc::none);
    (void)t.submit(small, "waits");
    CHECK(t.compute.submit(small, t.stream, t.logs("no")).code() == errc::queue_full);
}

TEST_CASE("a client that sleeps has nothing in flight, and loses nothing that waits", "[compute]") {
    setup t;
    const auto c = t.compute.add({.queue_limit = 4}), other = t.compute.add({});
    (void)t.submit(c, "in flight");
    (void)t.submit(c, "1");
    CHECK_FALSE(t.compute.sleep(c, instant::min()));  // it is in flight still, and so nothing has changed
    t.finish_one();
    CHECK(t.enqueued == names{"in flight", "1"});
    (void)t.submit(c, "2");
    const auto cancelled = t.submit(c, "cancelled");
    t.stream.reach_all();
    (void)t.compute.usage(other);
    // Whatever began by that is over, too.
    while (!t.compute.sleep(c, instant::min())) t.stream.reach_all();
    const auto before = t.enqueued;
    const auto late = t.compute.submit(c, t.stream, t.logs("late"), {.deadline = instant{1ms}, .drop_if_late = true});
    (void)t.submit(c, "3");
    CHECK(t.compute.acquire(c, instant::min()).code() == errc::deadline_exceeded);
    const auto urgent = t.compute.submit(c, t.stream, t.logs("urgent"), {.priority = {1}});
    (void)t.submit(other, "other");
    t.finish_one();
    t.compute.poll();
    CHECK(std::ranges::count(t.enqueued, "3") == 0);
    CHECK(t.compute.usage(c).in_flight == 0);
    CHECK(t.compute.usage(c).waiting >= 3);
    t.clock.advance(2ms);
    t.compute.wake(c);
    for (int i = 0; i < 8; ++i) {
        t.stream.reach_all();
        t.compute.poll();
    }
    const auto count = [&](const char* name) { return std::ranges::count(t.enqueued, name); };
    CHECK(t.enqueued[before.size() + 1] == "urgent");
    CHECK(count("2") == 1);
    CHECK(count("3") == 1);
    CHECK(count("late") == 0);
    CHECK(t.compute.usage(c).waiting == 0);
    CHECK(t.compute.usage(c).dropped == 1);
    CHECK(t.compute.sleep(c));
    const auto never_ran = t.submit(c, "never");
    CHECK(t.compute.close(c));
    CHECK(never_ran.status() == errc::closed);
    CHECK_FALSE(t.compute.sleep(c));
}

TEST_CASE("a client that sleeps and refuses has nothing that waits, and takes nothing", "[compute]") {
    constexpr auto refuse = gpushare::while_asleep::refuse;
    setup t;
    const auto c = t.compute.add({.queue_limit = 2}), other = t.compute.add({});
    (void)t.submit(other, "in flight");
    std::vector<errc> told;
    const auto tell = [&](const completion& d) { told.push_back(d.status); };
    const auto waits = t.compute.submit(c, t.stream, t.logs("waits"), {}, tell).value();
    (void)t.submit(c, "waits");
    t.stream.on_wait([&] {  // while it waits for room
        t.stream.on_wait({});
        CHECK(t.compute.sleep(c, gpushare::never, {}, refuse));
    });
    CHECK(t.compute.submit(c, t.stream, t.logs("no"), {.room_by = gpushare::never}).code() == errc::asleep);
    CHECK(waits.status() == errc::asleep);
    CHECK(told == std::vector{errc::asleep});
    CHECK(t.compute.usage(c).waiting == 0);
    CHECK(t.compute.submit(c, t.stream, t.logs("no")).code() == errc::asleep);
    CHECK(t.compute.acquire(c).code() == errc::asleep);
    CHECK(t.compute.sleep(c));  // from now on what comes waits
    (void)t.submit(c, "waits");
    CHECK(t.compute.usage(c).waiting == 1);
    CHECK(t.compute.sleep(c, gpushare::never, {}, refuse));
    CHECK(t.compute.usage(c).waiting == 0);
    t.compute.wake(c);
    (void)t.submit(c, "runs");
    t.finish_one();
    CHECK(t.enqueued == names{"in flight", "runs"});
    // At the deadline it isn't asleep after all.
    CHECK_FALSE(t.compute.sleep(c, instant::min(), {}, refuse));
    (void)t.submit(c, "goes on");
    CHECK(t.compute.usage(c).waiting == 1);
}

TEST_CASE("while a request is under way, work of lower levels is held back for a bounded moment", "[compute]") {
    setup t{{.depth = 2, .anticipation = 200us}};
    const auto low = t.compute.add({});
    const auto high = t.compute.add({.level = {1}});
    std::optional<gpushare::request<limiter>> request(std::in_place, t.compute, high);
    (void)request->submit(t.stream, t.logs("chain 1"));
    (void)t.submit(low, "low");
    CHECK(t.enqueued == names{"chain 1"});  // there is room, but the chain goes on
    t.finish_one();
    CHECK(t.enqueued == names{"chain 1"});
    CHECK(t.compute.resume_at() == t.clock.now() + 200us);
    SECTION("the next submission of the chain comes in time, and doesn't wait") {
        t.clock.advance(150us);
        (void)request->submit(t.stream, t.logs("chain 2"));
        CHECK(t.enqueued == names{"chain 1", "chain 2"});
        t.clock.advance(150us);
        t.finish_one();
        t.clock.advance(150us);
        t.compute.poll();
        CHECK(t.enqueued == names{"chain 1", "chain 2"});
        request.reset();
        CHECK(t.enqueued == names{"chain 1", "chain 2", "low"});
    }
    SECTION("it comes too late") {
        t.clock.advance(201us);
        t.compute.poll();
        CHECK(t.enqueued == names{"chain 1", "low"});
        (void)request->submit(t.stream, t.logs("chain 2"));
        CHECK(t.enqueued == names{"chain 1", "low", "chain 2"});
    }
    SECTION("the request ends: at once") {
        request.reset();
        CHECK(t.enqueued == names{"chain 1", "low"});
    }
    SECTION("what isn't below isn't held back") {
        const auto peer = t.compute.add({.level = {1}});
        (void)t.submit(peer, "peer");
        CHECK(t.enqueued == names{"chain 1", "peer"});
    }
}

TEST_CASE("work is also held back for a request above its client's level, though no client has that level",
          "[compute]") {
    setup t{{.depth = 2, .anticipation = 200us}};
    const auto low = t.compute.add({});
    const auto lifted = t.compute.add({.ceiling = {1}});
    gpushare::request<limiter> request(t.compute, lifted, {.level = {1}});
    (void)request.submit(t.stream, t.logs("chain 1"));
    (void)t.submit(low, "low");
    t.finish_one();
    CHECK(t.enqueued == names{"chain 1"});
    CHECK(t.compute.resume_at() == t.clock.now() + 200us);
    (void)request.submit(t.stream, t.logs("chain 2"));
    t.finish_one();
    CHECK(t.enqueued == names{"chain 1", "chain 2"});
    t.clock.advance(200us);
    t.compute.poll();
    CHECK(t.enqueued == names{"chain 1", "chain 2", "low"});
}

TEST_CASE("the end of a request leaves what others of its client and level hold back", "[compute]") {
    setup t{{.depth = 2, .anticipation = 200us}};
    const auto low = t.compute.add({});
    const auto high = t.compute.add({.level = {1}, .ceiling = {2}});
    // None has a level of its own; both have, but are served at their client's ceiling.
    const auto [first, second] = GENERATE(std::pair{gpushare::no_priority, gpushare::no_priority},
                                          std::pair{gpushare::priority{3}, gpushare::priority{4}});
    std::optional<gpushare::request<limiter>> one(std::in_place, t.compute, high,
                                                  gpushare::request_options{.level = first});
    std::optional<gpushare::request<limiter>> other(std::in_place, t.compute, high,
                                                    gpushare::request_options{.level = second});
    (void)one->submit(t.stream, t.logs("chain"));
    (void)t.submit(low, "low");
    t.finish_one();
    other.reset();
    CHECK(t.enqueued == names{"chain"});
    one.reset();
    CHECK(t.enqueued == names{"chain", "low"});
}

TEST_CASE("after the end of a request its last work holds nothing back, and is charged for its own time", "[compute]") {
    setup t{{.depth = 2, .anticipation = 200us}};
    const auto low = t.compute.add({});
    const auto high = t.compute.add({.ceiling = {1}});
    std::optional<gpushare::request<limiter>> request(std::in_place, t.compute, high,
                                                      gpushare::request_options{.level = {1}});
    (void)request->submit(t.stream, t.logs("chain"));
    (void)t.submit(low, "low");
    CHECK(t.enqueued == names{"chain"});
    SECTION("the request ends while its work is on the device") {
        request.reset();
        t.finish_one();
        CHECK(t.enqueued == names{"chain", "low"});
    }
    SECTION("another request, of another level, goes on") {
        const gpushare::request<limiter> other(t.compute, high);
        request.reset();
        t.finish_one();
        CHECK(t.enqueued == names{"chain", "low"});
    }
    SECTION("another request of that level goes on") {
        const gpushare::request<limiter> other(t.compute, high, {.level = {1}});
        request.reset();
        t.finish_one();
        CHECK(t.enqueued == names{"chain"});
    }
}

namespace {

/// Notes whether it is ever told an earlier time than before.
struct timed_policy : gpushare::fifo {
    void wake(client_id c, const gpushare::queue_head& head, instant now) noexcept {
        *goes_back |= now < std::exchange(latest, std::max(latest, now));
        gpushare::fifo::wake(c, head, now);
    }
    bool* goes_back;
    instant latest{};
};

}  // namespace

TEST_CASE("a policy's time never goes back, even if a client closes or sleeps", "[compute]") {
    manual_clock clock;
    manual_stream stream;
    bool goes_back = false;
    timed_policy policy;
    policy.goes_back = &goes_back;
    gpushare::compute_limiter<manual_stream, manual_clock, timed_policy> compute{{.depth = 1}, clock, policy};
    const auto c = compute.add({});
    clock.advance(1ms);
    for (int i = 0; i < 4; ++i) (void)compute.submit(c, stream, [](manual_stream& s) { s.enqueue(1ms); });
    SECTION("sleeps") { CHECK_FALSE(compute.sleep(c, instant::min())); }
    SECTION("closes") { CHECK_FALSE(compute.close(c, instant::min())); }
    CHECK_FALSE(goes_back);
    stream.reach_all();
    compute.poll();
}

TEST_CASE("a change of settings also holds for the submission that waits first", "[compute]") {
    setup t{{.depth = 1}};
    const auto a = t.compute.add({}), b = t.compute.add({.ceiling = {2}});
    manual_stream beside(t.stream, {});
    (void)t.submit(a, "runs");
    for (const char* name : {"urgent 1", "urgent 2"})
        (void)t.compute.submit(b, beside, t.logs(name), {.priority = {2}});
    CHECK(t.enqueued == names{"runs", "urgent 1"});
    CHECK(t.compute.change(b, {}) == errc::none);  // its ceiling is its own level from now on
    beside.reach_all();
    t.compute.poll();
    CHECK(t.enqueued == names{"runs", "urgent 1"});
    t.finish_one();
    CHECK(t.enqueued == names{"runs", "urgent 1", "urgent 2"});
}

TEST_CASE("a wait at the gate is measured by the bound that was published when it began", "[compute]") {
    setup t{{.depth = 1, .horizon = 0ms}};
    const auto low = t.compute.add({.longest = 1ms}), high = t.compute.add({.level = {1}, .longest = 1ms});
    t.compute.record(8);
    (void)t.submit(high, "before");
    t.stream.on_wait([&] {
        t.stream.on_wait({});
        CHECK(t.compute.change(low, {.longest = 9ms}) == errc::none);
        t.finish_all();
    });
    {
        auto p = t.compute.acquire(high).value();
        CHECK(p.bound() == 1ms);
        p.enqueue(t.stream, t.logs("waited"));
    }
    t.finish_all();
    CHECK(t.enqueued == names{"before", "waited"});
    std::array<gpushare::submission_record, 2> records;
    REQUIRE(t.compute.take_records(records) == 2);
    CHECK(records[1].bound == 1ms);
}

TEST_CASE("a permit that was moved from says what an unused one says", "[compute]") {
    setup t;
    const auto c = t.compute.add({});
    auto p = t.compute.acquire(c).value();
    p.enqueue(t.stream, t.logs("work"));
    const auto mine = std::move(p);
    CHECK_FALSE(p.done());
    CHECK_FALSE(p.poll());
    CHECK_FALSE(p.wait(instant::min()));
    t.finish_one();
    CHECK(mine.done());
    CHECK_FALSE(p.done());
}

TEST_CASE("a thread that gives up its wait at the gate makes way for others", "[compute]") {
    setup t{{.depth = 1}};
    const auto a = t.compute.add({}), b = t.compute.add({});
    manual_stream beside(t.stream, {});
    const gpushare::submit_options narrow{.width = gpushare::sm_width(0.25)};
    (void)t.compute.submit(b, t.stream, t.logs("runs"), narrow);
    t.stream.on_wait([&] {  // while a, which may fill the device, waits
        t.stream.on_wait({});
        (void)t.compute.submit(b, beside, t.logs("beside"), narrow);
        CHECK(t.enqueued == names{"runs"});
        t.clock.advance(2ms);
    });
    CHECK(t.compute.acquire(a, t.clock.now() + 1ms).code() == errc::deadline_exceeded);
    CHECK(t.enqueued == names{"runs", "beside"});
}

TEST_CASE("a waiting thread admits held work when its time has come", "[compute]") {
    setup t{{.depth = 2, .anticipation = 200us}};
    const auto low = t.compute.add({});
    const auto high = t.compute.add({.level = {1}});
    gpushare::request request(t.compute, high);
    (void)request.submit(t.stream, t.logs("chain"));
    const auto held = t.submit(low, "low");
    t.stream.on_wait([&] {
        t.stream.reach_all();
        t.clock.advance(50us);
    });
    t.finish_one();
    t.clock.advance(200us);
    CHECK(held.wait());
    auto p = request.acquire();
    CHECK(p);
}

namespace {

/// Two devices, a limiter each.
struct node_of_two {
    using stream = support::timed_device::stream;
    using limiter = gpushare::compute_limiter<stream, support::steady>;

    support::timed_device devices[2];
    limiter limiters[2] = {limiter{{.depth = 1}}, limiter{{.depth = 1}}};
    gpushare::detail::device_order_lock order{2};
};

}  // namespace

TEST_CASE("a gang is admitted on all devices or on none", "[compute]") {
    setup a, b;
    const auto on_a = a.compute.add({}), on_b = b.compute.add({});
    using gang = gpushare::gang_permit<limiter>;
    gpushare::detail::device_order_lock order{2};
    const std::array<manual_stream*, 2> streams{&a.stream, &b.stream};
    SECTION("on all, in the order of ranks that was asked for") {
        auto g = gang::acquire({{&b.compute, on_b, {1}}, {&a.compute, on_a, {0}}});
        REQUIRE(g);
        std::vector<std::pair<std::size_t, bool>> parts;
        const std::array<manual_stream*, 2> reversed{&b.stream, &a.stream};
        g->enqueue(order, std::span<manual_stream* const>(reversed), [&](std::size_t rank, manual_stream& s) {
            parts.emplace_back(rank, &s == reversed[rank]);
            s.enqueue(1ms);
        });
        CHECK(parts == std::vector<std::pair<std::size_t, bool>>{{1, true}, {0, true}});
        a.finish_one();
        b.finish_one();
        CHECK(a.compute.usage(on_a).device_time == 1ms);
        CHECK(b.compute.usage(on_b).device_time == 1ms);
    }
    SECTION("on none: one is busy until the deadline") {
        const auto held = b.compute.acquire(on_b).value();
        CHECK(gang::acquire({{&a.compute, on_a, {0}}, {&b.compute, on_b, {1}}}, instant::min()).code() ==
              errc::deadline_exceeded);
        CHECK(a.compute.usage(on_a).in_flight == 0);
        CHECK(a.compute.try_acquire(on_a));
    }
    SECTION("unused, it goes back") {
        { auto g = gang::acquire({{&a.compute, on_a, {0}}, {&b.compute, on_b, {1}}}); }
        CHECK(a.compute.usage(on_a).in_flight == 0);
        CHECK(b.compute.usage(on_b).in_flight == 0);
    }
    SECTION("a part that throws: later devices have got nothing, and everything is accounted for") {
        auto g = gang::acquire({{&a.compute, on_a, {0}}, {&b.compute, on_b, {1}}});
        CHECK_THROWS_AS(g->enqueue(order, std::span<manual_stream* const>(streams),
                                   [](std::size_t, manual_stream&) { throw std::runtime_error("mine"); }),
                        std::runtime_error);
        CHECK(b.compute.usage(on_b).in_flight == 0);
        a.finish_one();
        CHECK(a.compute.usage(on_a).failed == 1);
    }
    SECTION("nonsense is refused") {
        CHECK(gang::acquire({}).code() == errc::invalid_specification);
        CHECK(gang::acquire({{&a.compute, on_a, {0}}, {&b.compute, on_b, {0}}}).code() == errc::duplicate_device);
    }
}

TEST_CASE("a gang doesn't keep a device from others while another device is busy", "[compute][threads]") {
    using gang = gpushare::gang_permit<node_of_two::limiter>;
    node_of_two n;
    const auto on_0 = n.limiters[0].add({}), on_1 = n.limiters[1].add({}), other = n.limiters[0].add({});
    std::optional<node_of_two::limiter::permit> busy = n.limiters[1].acquire(n.limiters[1].add({})).value();
    std::atomic<bool> got = false;
    std::jthread waits([&] {
        auto g =
            gang::acquire({{&n.limiters[0], on_0, {0}}, {&n.limiters[1], on_1, {1}}}, support::steady::now() + 60s);
        got = g && g->size() == 2;
    });
    // It has the one, waits for the other, and lets go.
    while (n.limiters[0].usage(on_0).in_flight == 0 && n.limiters[1].usage(on_1).waiting == 0)
        std::this_thread::yield();
    for (int i = 0; i < 3; ++i) CHECK(n.limiters[0].acquire(other, support::steady::now() + 5min));
    CHECK_FALSE(got);
    busy.reset();
    waits.join();
    CHECK(got);
    CHECK(n.limiters[0].usage(on_0).in_flight == 0);
    CHECK(n.limiters[1].usage(on_1).in_flight == 0);
}

TEST_CASE("a gang is more patient each time, so it gets through even at the end of a long queue", "[compute]") {
    using line = gpushare::compute_limiter<manual_stream, manual_clock, gpushare::fifo>;
    using gang = gpushare::gang_permit<line>;
    bool over = false;
    std::function<void()> again;
    manual_clock clock;
    manual_stream stream;
    line idle{{.depth = 1}, clock}, busy{{.depth = 1}, clock};
    const auto on_idle = idle.add({}), on_busy = busy.add({}), others = busy.add({.longest = 1ms});
    again = [&] {
        const auto work = [](manual_stream& s) { s.enqueue(1ms); };
        if (!over) (void)busy.submit(others, stream, work, {}, [&](const completion&) { again(); });
    };
    for (int i = 0; i < 20; ++i) again();  // so many are always in front of who comes
    std::vector<int> kept{0};              // for how many milliseconds in a row it kept the idle device from others
    stream.on_wait([&] {
        if (idle.usage(on_idle).in_flight > 0)
            ++kept.back();
        else if (kept.back() > 0)
            kept.push_back(0);
        clock.advance(1ms);
        stream.reach_all();
    });
    clock.advance(1ms);
    const gang::member a{&idle, on_idle, {0}}, b{&busy, on_busy, {1}};
    SECTION("and others wait for it twice as long each time") {
        const auto g = gang::acquire({a, b}, instant{2s});
        REQUIRE(g);
        CHECK(g->size() == 2);
        CHECK(clock.now() < instant{500ms});
        REQUIRE(kept.size() > 2);
        for (std::size_t i = 1; i < kept.size(); ++i) CHECK(kept[i] <= 2 * kept[i - 1] + 1);
    }
    SECTION("until its deadline") {
        CHECK(gang::acquire({a, b}, instant{27ms}).code() == errc::deadline_exceeded);
        CHECK(clock.now() <= instant{28ms});
        CHECK(kept.size() == 2);
        CHECK(kept.back() > 0);  // it came while a permit was held
        CHECK(idle.usage(on_idle).in_flight == 0);
    }
    over = true;
}

TEST_CASE("gangs that name their devices in different orders don't wait for each other", "[compute][threads]") {
    using gang = gpushare::gang_permit<node_of_two::limiter>;
    node_of_two n;
    std::atomic<int> lost{0};
    std::array<std::vector<unsigned>, 2> seen;  // by device; under the gang order
    support::together(4, [&](unsigned who) {
        const auto on_0 = n.limiters[0].add({.weight = 25_pct}), on_1 = n.limiters[1].add({.weight = 25_pct});
        node_of_two::stream s0(n.devices[0]), s1(n.devices[1]);
        const bool reversed = who % 2 != 0;
        const gang::member m0{&n.limiters[0], on_0, {0}}, m1{&n.limiters[1], on_1, {1}};
        const std::array<gang::member, 2> members{reversed ? m1 : m0, reversed ? m0 : m1};
        const std::array<node_of_two::stream*, 2> streams{reversed ? &s1 : &s0, reversed ? &s0 : &s1};
        for (int i = 0; i < 50; ++i) {
            auto g = gang::acquire(members, support::steady::now() + 5min);
            if (!g) {
                ++lost;
                continue;
            }
            g->enqueue(n.order, std::span<node_of_two::stream* const>(streams),
                       [&](std::size_t rank, node_of_two::stream& s) {
                           seen[reversed ? 1 - rank : rank].push_back(who);
                           s.enqueue(5us);
                       });
        }
        if (!n.limiters[0].close(on_0, support::steady::now() + 5min)) ++lost;
        if (!n.limiters[1].close(on_1, support::steady::now() + 5min)) ++lost;
    });
    CHECK(lost == 0);
    CHECK(seen[0].size() == 200);
    CHECK(seen[0] == seen[1]);
}

}  // namespace limiter_shells_test
