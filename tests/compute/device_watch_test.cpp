// SPDX-License-Identifier: Apache-2.0
// Which thread watches the device for the others: a thread that waits for its own work leaves the
// others asleep, and no thread relies for long on a thread that doesn't come.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/timed_device.hpp"

namespace device_watch_test {

using namespace std::chrono_literals;
using gpushare::instant;
using gpushare::priority;
using support::becomes;
using support::in_good_time;
using support::steady;
using support::timed_device;

namespace {

/// Counts how often each thread asks.
struct counting_clock {
    static thread_local std::uint64_t asked;
    [[nodiscard]] static instant now() noexcept {
        ++asked;
        return steady::now();
    }
};
thread_local std::uint64_t counting_clock::asked = 0;
static_assert(gpushare::clock<counting_clock>);

using stream = timed_device::stream;
using limiter = gpushare::compute_limiter<stream, counting_clock>;

/// A client of a high level whose thread waits for each of its submissions, and one below whose
/// thread sleeps meanwhile.
struct neighbours {
    timed_device device;
    limiter compute;
    gpushare::client_id above = compute.add({.level = priority{1}}), below = compute.add({});
    stream s{device}, t{device};

    void run_above(int n, gpushare::ns length) {
        for (int i = 0; i < n; ++i) {
            const auto done = submit_above(length);
            if (!done.wait(in_good_time())) FAIL("submission " << i << " isn't seen to end");
        }
    }
    limiter::ticket submit_above(gpushare::ns length) {
        return compute.submit(above, s, [=](stream& to) { to.enqueue(length); }, {.of_request = true}).value();
    }
};

}  // namespace

TEST_CASE("a chain whose thread waits for it wakes nobody who sleeps", "[compute][threads]") {
    neighbours n;
    n.run_above(3, 50us);
    auto r = std::make_unique<gpushare::request<limiter>>(n.compute, n.above);
    const auto held = n.submit_above(50us);  // so that what follows isn't let in
    const auto waiting = n.compute.submit(n.below, n.t, [](stream& to) { to.enqueue(50us); }).value();
    std::atomic<bool> seen{false};
    std::atomic<std::uint64_t> asked{0};
    std::jthread sleeper([&] {
        seen = waiting.wait(in_good_time());
        asked = counting_clock::asked;
    });
    const auto began = steady::now();
    n.run_above(1000, 50us);
    r.reset();
    sleeper.join();
    const auto took = steady::now() - began;
    CHECK(seen);
    // It looks by itself now and then, and asks for the time once each time: 340 times in 0.18 s.
    // Woken when each kernel comes it is 1,700, and by each end 1,000.
    CHECK(asked < 200 + 2 * static_cast<std::uint64_t>(took / gpushare::detail::watch_slice::patience));
}

TEST_CASE("a sleeping thread doesn't rely for long on a thread that used to wait for its work", "[compute][threads]") {
    neighbours n;
    for (int round = 0; round < 5; ++round) {
        n.run_above(3, 50us);
        std::atomic<bool> told{false};
        const auto callback = [&told](const gpushare::completion&) { told = true; };
        auto unattended = n.compute.submit(
            n.above, n.s, [](stream& to) { to.enqueue(2ms); }, {.of_request = true}, callback);
        REQUIRE(unattended);
        // Nobody waits for the one above now; behind it, who waits for this one has to look.
        const auto below = n.compute.submit(n.below, n.t, [](stream& to) { to.enqueue(50us); });
        REQUIRE(below);
        CHECK(below->wait(in_good_time()));
        CHECK(told);
    }
}

TEST_CASE("a dispatcher that slept is there for a client that no longer waits for its work", "[compute][threads]") {
    neighbours n;
    std::jthread dispatcher([&](const std::stop_token& stop) { n.compute.run(stop); });
    for (int round = 0; round < 5; ++round) {
        n.run_above(3, 50us);
        std::this_thread::sleep_for(1ms);  // it has nothing to look at
        std::atomic<bool> told{false};
        const auto callback = [&told](const gpushare::completion&) { told = true; };
        REQUIRE(n.compute.submit(
            n.above, n.s, [](stream& to) { to.enqueue(50us); }, {}, callback));
        CHECK(becomes([&] { return told.load(); }));
    }
}

TEST_CASE("of two dispatchers that slept, one is there for work that isn't waited for after all",
          "[compute][threads]") {
    neighbours n;
    const auto dispatch = [&](const std::stop_token& stop) { n.compute.run(stop); };
    std::jthread first(dispatch), second(dispatch);
    for (int round = 0; round < 5; ++round) {
        n.run_above(3, 50us);
        std::this_thread::sleep_for(1ms);  // they have nothing to look at
        std::atomic<bool> told{false};
        const auto callback = [&told](const gpushare::completion&) { told = true; };
        REQUIRE(n.compute.submit(
            n.above, n.s, [](stream& to) { to.enqueue(2ms); }, {}, callback));
        const bool in_time = becomes([&] { return told.load(); });
        if (!in_time) n.run_above(1, 50us);  // before `told` goes
        REQUIRE(in_time);
    }
}

TEST_CASE("a request that pauses lets in what sleeps below it", "[compute][threads]") {
    neighbours n;
    const gpushare::request<limiter> r(n.compute, n.above);
    n.run_above(1, 50us);
    std::atomic<bool> seen{false};
    const auto below = n.compute.submit(n.below, n.t, [](stream& to) { to.enqueue(50us); }).value();
    std::jthread sleeper([&] { seen = below.wait(in_good_time()); });
    n.run_above(100, 300us);
    sleeper.join();  // the request goes on
    CHECK(seen);
}

TEST_CASE("work that nobody waits for is noticed while another thread watches longer work", "[compute][threads]") {
    namespace host = gpushare::host;
    host::node node{{.sms = 2, .timing = host::timing::modelled}};
    gpushare::compute_limiter<host::stream, host::steady_clock> compute;
    const auto a = compute.add({}), b = compute.add({});
    auto s = node.make_stream(gpushare::device_id{0}), t = node.make_stream(gpushare::device_id{0});
    const auto lasts = [](gpushare::ns length) {
        return [=](host::stream& on) { on.launch({.hold = length}, gpushare::detail::empty_kernel{}); };
    };
    const auto longest = compute.submit(a, s, lasts(4min)).value();
    std::jthread watcher([&](const std::stop_token& stop) { (void)longest.wait(gpushare::never, stop); });
    for (int i = 0; i < 20; ++i) {
        std::atomic<bool> told{false};
        REQUIRE(compute.submit(b, t, lasts(20us), {}, [&told](const gpushare::completion&) { told = true; }));
        while (!told && !longest.done()) std::this_thread::yield();
        CHECK(told);
    }
    CHECK_FALSE(longest.done());
    watcher.request_stop();
    watcher.join();
}

namespace {

/// A stream of the host whose points count how threads wait for them.
struct counted_stream {
    struct point : gpushare::host::point {
        static inline std::atomic<int> in_slices{0}, to_the_end{0};
        point() = default;
        explicit point(gpushare::host::point p) noexcept : gpushare::host::point(std::move(p)) {}
        static bool wait_any(std::span<const point> ps, instant deadline) {
            ++in_slices;
            return gpushare::host::point::wait_any(plain(ps), deadline);
        }
        static bool wait_any(std::span<const point> ps, instant deadline, interrupt& by) {
            ++to_the_end;
            return gpushare::host::point::wait_any(plain(ps), deadline, by);
        }
        static std::vector<gpushare::host::point> plain(std::span<const point> ps) { return {ps.begin(), ps.end()}; }
    };
    [[nodiscard]] point record() { return point(of.record()); }

    gpushare::host::stream of;
};
static_assert(gpushare::interruptible_point<counted_stream::point>);

/// Three streams of a device of three SMs.
struct three_streams {
    three_streams() { counted_stream::point::in_slices = counted_stream::point::to_the_end = 0; }
    [[nodiscard]] static auto lasting(gpushare::ns length) {
        return [length](counted_stream& to) { to.of.launch({.hold = length}, gpushare::detail::empty_kernel{}); };
    }

    gpushare::host::node node{{.sms = 3, .timing = gpushare::host::timing::modelled}};
    counted_stream s{node.make_stream(gpushare::device_id{0})}, t{node.make_stream(gpushare::device_id{0})},
        other{node.make_stream(gpushare::device_id{0})};
    gpushare::compute_limiter<counted_stream, gpushare::host::steady_clock> compute;
    gpushare::client_id a = compute.add({}), b = compute.add({}), c = compute.add({});
};

}  // namespace

TEST_CASE("a thread that waits for its work while nothing else comes doesn't look up before the end", "[compute]") {
    const bool by_deadline = GENERATE(false, true);
    three_streams d;
    for (int i = 0; i < 30; ++i)
        CHECK(d.compute.submit(d.a, d.s, d.lasting(100us))->wait(by_deadline ? in_good_time() : gpushare::never));
    CHECK(counted_stream::point::in_slices <= 8);
    CHECK(counted_stream::point::to_the_end > 0);
    CHECK_FALSE(d.compute.submit(d.a, d.s, d.lasting(60s))->wait(steady::now() + 2ms));
}

TEST_CASE("a thread that watches to the end is called for others' work, and by a stop", "[compute][threads]") {
    const bool watches_all = GENERATE(false, true);  // or its own work alone
    const auto deadline = GENERATE(false, true) ? steady::now() + 10min : gpushare::never;
    std::atomic<bool> told{false};
    three_streams d;
    d.compute.record(8);
    if (watches_all) (void)d.compute.submit(d.c, d.other, d.lasting(60s));
    const auto longest = d.compute.submit(d.a, d.s, d.lasting(60s)).value();
    std::jthread watcher([&](const std::stop_token& stop) { (void)longest.wait(deadline, stop); });
    const auto looks_anew = [&](int before) {
        return becomes([&] { return counted_stream::point::to_the_end > before; });
    };
    CHECK(looks_anew(0));
    const int before = counted_stream::point::to_the_end;
    CHECK(d.compute.submit(d.b, d.t, d.lasting(20us), {}, [&](const gpushare::completion&) { told = true; }));
    CHECK(becomes([&] { return told.load(); }));
    // Then it looks to the end again; or it still does, where this thread was slow and has seen the
    // end by itself.
    for (const auto end = steady::now() + 100ms; counted_stream::point::to_the_end == before && steady::now() < end;)
        std::this_thread::yield();
    CHECK(d.compute.enqueue(d.b, d.t, d.lasting(20us)) == gpushare::errc::none);
    std::array<gpushare::submission_record, 4> ended;
    std::size_t n = 0;  // nobody else looks
    CHECK(becomes([&] { return (n += d.compute.take_records(ended)) == 2; }));
    watcher.request_stop();
    watcher.join();
    CHECK_FALSE(longest.done());
}

namespace {

/// Waits for long work on another thread, to the end once nothing else comes.
struct long_wait {
    explicit long_wait(three_streams& d) : work(d.compute.submit(d.a, d.s, d.lasting(60s)).value()) {}
    void begin() {
        const int before = counted_stream::point::to_the_end;
        thread = std::jthread([this](const std::stop_token& stop) { (void)work.wait(gpushare::never, stop); });
        (void)becomes([&] { return counted_stream::point::to_the_end != before; });
    }
    ~long_wait() {
        thread.request_stop();
        if (thread.joinable()) thread.join();
    }

    decltype(std::declval<three_streams&>().compute)::ticket work;
    std::jthread thread;
};

/// Whether a callback came while the long work goes on.
bool comes(const std::atomic<bool>& told) {
    return becomes([&] { return told.load(); });
}

}  // namespace

TEST_CASE("a thread that watches its own work alone notices work that another one was expected to wait for",
          "[compute][threads]") {
    std::atomic<bool> told{false};
    three_streams d;
    CHECK(d.compute.submit(d.b, d.t, d.lasting(1ms))->wait());  // this thread is expected to wait for b's
    long_wait other(d);
    other.begin();
    CHECK(d.compute.submit(d.b, d.t, d.lasting(100ms), {}, [&](const gpushare::completion&) { told = true; }));
    CHECK(comes(told));
}

TEST_CASE("the thread that watches for all takes over the work of a thread that leaves", "[compute][threads]") {
    std::atomic<bool> told{false};
    three_streams d;
    (void)d.compute.submit(d.c, d.other, d.lasting(60s));
    long_wait watcher(d);
    watcher.begin();
    const auto mine =
        d.compute.submit(d.b, d.t, d.lasting(400ms), {}, [&](const gpushare::completion&) { told = true; }).value();
    std::jthread leaver([&](const std::stop_token& stop) { (void)mine.wait(gpushare::never, stop); });
    std::this_thread::sleep_for(50ms);
    (void)d.compute.submit(d.c, d.other, d.lasting(1ms));  // a new watch, without what the other looks at
    std::this_thread::sleep_for(50ms);
    leaver.request_stop();
    leaver.join();
    CHECK(comes(told));
}

TEST_CASE("the thread that watches for all is called for work that was being enqueued when it began",
          "[compute][threads]") {
    std::atomic<bool> told{false};
    three_streams d;
    (void)d.compute.submit(d.c, d.other, d.lasting(60s));
    long_wait watcher(d);
    const auto begin_and_launch = [&](counted_stream& on) {
        watcher.begin();
        d.lasting(50ms)(on);
    };
    CHECK(d.compute.submit(d.b, d.t, begin_and_launch, {}, [&](const gpushare::completion&) { told = true; }));
    CHECK(comes(told));
}

TEST_CASE("a thread that waits for several clients' work by turns expects nobody else to look for it", "[compute]") {
    gpushare::sim::world world;  // whose time stands still while its thread sleeps
    const gpushare::sim::clock_of clock{world};
    gpushare::compute_limiter<gpushare::sim::stream, gpushare::sim::clock_of> compute{{.depth = 1}, clock};
    gpushare::sim::stream s{world, {0}, {}, 1}, t{world, {0}, {}, 2};
    const auto a = compute.add({}), b = compute.add({});
    const auto work = [](auto& on) { on.enqueue(10us); };
    for (int i = 0; i < 10; ++i) {
        const auto first = compute.submit(a, s, work).value(), second = compute.submit(b, t, work).value();
        CHECK(second.wait());
        CHECK(first.wait());
        const auto third = compute.submit(a, s, work).value();
        CHECK(third.wait());
    }
}

TEST_CASE("a wait in virtual time that nothing will end says so", "[compute]") {
    namespace sim = gpushare::sim;
    using gpushare::errc;
    sim::world world;
    sim::stream s{world, {0}};
    const auto work = [](sim::stream& on) { on.enqueue(10us); };
    const auto stuck = [](const auto& wait) {
        try {
            (void)wait();
        } catch (const gpushare::operation_error& e) {
            return e.code() == errc::stuck;
        }
        return false;
    };
    SECTION("a stream that is held") {
        gpushare::compute_limiter<sim::stream, sim::clock_of> compute{{.depth = 1, .horizon = 1ns},
                                                                      sim::clock_of{world}};
        const auto c = compute.add({});
        s.hold();
        const auto first = compute.submit(c, s, work).value(), second = compute.submit(c, s, work).value();
        CHECK(stuck([&] { return first.wait(); }));
        CHECK(stuck([&] { return second.wait(); }));
        CHECK(compute.acquire(c).code() == errc::stuck);
        CHECK_FALSE(first.wait(world.now() + 1ms));  // time passes up to the deadline
        s.let_go();
        CHECK(second.wait());
        CHECK(first.done());
    }
    SECTION("a policy that waits for time to pass") {
        gpushare::compute_limiter<sim::stream, sim::clock_of, gpushare::hard_share> compute{{}, sim::clock_of{world}};
        const auto c = compute.add({.weight = gpushare::share::of_permille(10)});
        auto last = compute.submit(c, s, [](sim::stream& on) { on.enqueue(20ms); }).value();
        CHECK(last.wait());
        for (int i = 0; i < 3; ++i) last = compute.submit(c, s, work).value();
        CHECK(stuck([&] { return last.wait(); }));
        world.run_until(world.now() + 10s);
        CHECK(last.wait());
    }
}

}  // namespace device_watch_test
