// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
#include <chrono>
#include <cstdint>
#include <deque>
#include <tuple>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/units.hpp>

#include "conformance/clock_suite.hpp"
#include "conformance/timeline_suite.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;

namespace {

constexpr instant start{};

/// For the conformance suites.
struct backend {
    using stream = sim::stream;
    stream make_stream(priority p) { return stream(world, {0}, p); }
    static void hold(stream& s) { s.hold(); }
    static void let_go(stream& s) { s.let_go(); }
    [[nodiscard]] instant now() const { return world.now(); }

    sim::world world;
};

}  // namespace

TEST_CASE("a simulated stream is a timeline", "[sim][conformance]") { conformance::check_timeline<backend>(); }

TEST_CASE("a simulated stream is a queue", "[sim][conformance]") { conformance::check_queue<backend>(); }

TEST_CASE("a simulated clock is a clock", "[sim][conformance]") {
    sim::world world;
    conformance::check_clock(sim::clock_of(world), false);
}

TEST_CASE("events happen in order of time, and of coming where times are equal", "[sim]") {
    sim::world world;
    std::vector<int> order;
    for (int i = 0; i < 100; ++i) world.at(start + (i % 3) * 1ms, [&order, i] { order.push_back(i % 3 * 1000 + i); });
    world.run_until(start + 1ms);
    CHECK(order.size() == 67);
    CHECK(world.now() == start + 1ms);
    world.run();
    CHECK(std::ranges::is_sorted(order));
    CHECK(order.size() == 100);
    bool late = false;
    world.at(start, [&] { late = true; });  // over: happens next, and time doesn't go back
    world.run();
    CHECK(late);
    CHECK(world.now() == start + 2ms);
}

TEST_CASE("a device runs one kernel at a time, the highest ready one first", "[sim]") {
    sim::world world{{.devices = 2}};
    std::vector<sim::kernel_span> ran;
    world.on_kernel([&](const sim::kernel_span& k) { ran.push_back(k); });
    sim::stream low(world, {0}, {0}, 1), high(world, {0}, {5}, 2), other(world, {1}, {0}, 3);
    low.enqueue(1ms);
    low.enqueue(1ms);
    low.enqueue(1ms);
    other.enqueue(500us);
    world.at(start + 200us, [&] { high.enqueue(2ms); });
    world.run();
    std::vector<std::tuple<std::uint32_t, instant, instant>> got;
    for (const auto& k : ran) got.emplace_back(k.tag, k.begin, k.end);
    CHECK(got == decltype(got){{3, start, start + 500us},
                               {1, start, start + 1ms},  // once started, to its end
                               {2, start + 1ms, start + 3ms},
                               {1, start + 3ms, start + 4ms},
                               {1, start + 4ms, start + 5ms}});
    CHECK(world.device_time({0}) == 5ms);
    CHECK(world.device_time({1}) == 500us);
}

TEST_CASE("calls come when what is before them is done, and may enqueue more", "[sim]") {
    sim::world world;
    sim::stream s(world, {0});
    int rounds = 0;
    instant last{};
    struct again {
        sim::stream& s;
        sim::world& w;
        int& rounds;
        instant& last;
        void operator()() const {
            last = w.now();
            if (++rounds == 10) return;
            s.enqueue(100us);
            s.call(*this);
        }
    };
    s.enqueue(100us);
    s.call(again{s, world, rounds, last});
    world.run();
    CHECK(rounds == 10);
    CHECK(last == start + 1ms);
}

TEST_CASE("a wait that nothing will end is over", "[sim]") {
    sim::world world;
    sim::stream s(world, {0});
    s.hold();
    s.enqueue(1us);
    const auto p = s.record();
    CHECK_FALSE(p.wait(never));
    CHECK_FALSE(p.wait(start + 1s));
    CHECK(world.now() == start + 1s);
    s.let_go();
    CHECK(p.wait(never));
}

TEST_CASE("the same seed is the same run", "[sim]") {
    const auto run = [](std::uint64_t seed) {
        sim::world world{{.devices = 100}};
        std::vector<std::tuple<std::uint32_t, std::uint32_t, instant>> ends;
        world.on_kernel([&](const sim::kernel_span& k) { ends.emplace_back(k.device.index, k.tag, k.end); });
        sim::random any(seed);
        std::deque<sim::stream> streams;
        for (std::uint32_t i = 0; i < 500; ++i)
            streams.emplace_back(world, device_id{i % 100}, priority{static_cast<std::int32_t>(any.below(3))}, i);
        for (int i = 0; i < 5000; ++i) {
            const auto which = any.below(500);
            const auto length = any.between(10us, 100us);
            world.at(start + any.exponential(5ms), [&streams, which, length] { streams[which].enqueue(length); });
        }
        world.run();
        return ends;
    };
    CHECK(run(1).size() == 5000);
    CHECK(run(1) == run(1));
    CHECK(run(1) != run(2));
}

TEST_CASE("a compute_limiter runs in virtual time as it is", "[sim]") {
    sim::world world;
    sim::stream a(world, {0}), b(world, {0});
    compute_limiter<sim::stream, sim::clock_of> limiter{{.depth = 2}, sim::clock_of(world)};
    const auto x = limiter.add({.weight = 75_pct}), y = limiter.add({.weight = 25_pct});
    std::deque<compute_limiter<sim::stream, sim::clock_of>::ticket> tickets;
    for (int i = 0; i < 400; ++i) {
        tickets.push_back(limiter.submit(x, a, [](auto& s) { s.enqueue(1ms); }).value());
        tickets.push_back(limiter.submit(y, b, [](auto& s) { s.enqueue(1ms); }).value());
    }
    CHECK_FALSE(tickets.back().wait(start + 400ms));
    CHECK(limiter.usage(x).device_time / 1ms == Approx(300).margin(3));
    CHECK(limiter.usage(y).device_time / 1ms == Approx(100).margin(3));
    CHECK(tickets.back().wait());
    CHECK(world.now() == start + 800ms);
    CHECK(limiter.usage(x).device_time == 400ms);
}

TEST_CASE("a limiter with hard caps is polled when it asks to be", "[sim]") {
    sim::world world;
    sim::stream s(world, {0});
    compute_limiter<sim::stream, sim::clock_of, hard_share> limiter{{.depth = 2}, sim::clock_of(world)};
    const auto x = limiter.add({.weight = 10_pct, .longest = 1ms});
    std::deque<compute_limiter<sim::stream, sim::clock_of, hard_share>::ticket> tickets;
    for (int i = 0; i < 50; ++i) tickets.push_back(limiter.submit(x, s, [](auto& q) { q.enqueue(1ms); }).value());
    while (!tickets.back().done()) {
        limiter.poll();
        if (limiter.resume_at() == never && !world.step()) break;
        if (limiter.resume_at() != never) world.run_until(limiter.resume_at());
    }
    CHECK(tickets.back().done());
    CHECK((world.now() - start) / 1ms == Approx(491).margin(12));
}
