// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Requests with their own priority: the highest level that they reach, the submissions that they
// raise, and the client that is charged.
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/policies/any_policy.hpp>
#include <gpushare/compute/policies/by_order.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/policy_tree.hpp>
#include <gpushare/compute/policies/strict_priority.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"

namespace request_level_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::priority;
using support::manual_clock;
using support::manual_stream;

namespace {

using limiter = gpushare::compute_limiter<manual_stream, manual_clock, gpushare::any_policy>;
using sim_limiter = gpushare::compute_limiter<gpushare::sim::stream, gpushare::sim::clock_of, gpushare::any_policy>;
using request = gpushare::request<limiter>;
using names = std::vector<std::string>;

struct setup {
    void submit(client_id c, std::string name) {
        (void)compute.submit(c, stream, [this, name = std::move(name)](manual_stream& s) {
            s.enqueue(1ms);
            enqueued.push_back(name);
        });
    }
    void submit(request& r, std::string name) {
        (void)r.submit(stream, [this, name = std::move(name)](manual_stream& s) {
            s.enqueue(1ms);
            enqueued.push_back(name);
        });
    }
    void finish_all() {
        for (compute.poll(); stream.open() != 0; compute.poll()) {
            stream.reach_next();
            clock.advance(1ms);
        }
    }
    /// Each tells its name when it is let in, though the room of its level is free.
    names order() {
        finish_all();
        return std::exchange(enqueued, {});
    }

    manual_clock clock;
    manual_stream stream;
    limiter compute{{.depth = 1, .horizon = 0ms, .anticipation = 0ms}, clock};
    client_id a = compute.add({.weight = 50_pct});
    client_id b = compute.add({.weight = 50_pct, .ceiling = priority{3}});
    names enqueued;
};

}  // namespace

TEST_CASE("a request's submissions go at its own level, and no others of its client", "[compute]") {
    setup t;
    t.submit(t.a, "a0");
    for (const auto* name : {"a1", "a2"}) t.submit(t.a, name);
    t.submit(t.b, "b0");
    {
        request empty(t.compute, t.b, {.level = priority{1}});
        CHECK(t.enqueued == names{"a0"});
        request r(t.compute, t.b, {.level = priority{1}});
        t.submit(r, "r1");
        CHECK(t.enqueued == names{"a0", "r1"});  // at once: the level has room of its own
        t.submit(r, "r2");
        const auto all = t.order();
        CHECK(names(all.begin(), all.begin() + 3) == names{"a0", "r1", "r2"});
        CHECK(names(all.begin() + 3, all.end()) == names{"a1", "a2", "b0"});  // b had its share, by r1 and r2
        // Nor one that comes while the request is under way.
        t.submit(t.a, "a3");
        t.submit(t.b, "b1");
        t.submit(r, "r3");
        CHECK(t.enqueued == names{"a3", "r3"});
        CHECK(t.order() == names{"a3", "r3", "b1"});
    }
    SECTION("and what comes after it is of its client's level") {
        t.submit(t.a, "a4");
        t.submit(t.b, "b3");
        CHECK(t.enqueued == names{"a4"});
        CHECK(t.order() == names{"a4", "b3"});
    }
}

TEST_CASE("the rest of a request is its cost, less the declared times of its submissions", "[compute]") {
    setup t;
    CHECK(t.compute.set_policy(gpushare::any_policy{gpushare::shortest_remaining{}}) == errc::none);
    t.submit(t.a, "a0");
    request longer(t.compute, t.b, {.cost = 10ms}), shorter(t.compute, t.a, {.cost = 2ms});
    t.submit(longer, "long");
    t.submit(shorter, "short");
    CHECK(t.order() == names{"a0", "short", "long"});
    // Of the longer one 9 ms are told to be done. A negative cost says nothing.
    for (const gpushare::ns cost : {gpushare::ns{9ms}, gpushare::ns{-5ms}})
        (void)longer.submit(t.stream, [](manual_stream& s) { s.enqueue(1ms); }, {.cost = cost});
    t.finish_all();
    t.submit(t.a, "a1");
    request middle(t.compute, t.a, {.cost = 3ms});
    t.submit(longer, "last");
    t.submit(middle, "middle");
    CHECK(t.order() == names{"a1", "last", "middle"});
}

TEST_CASE("a declared width below the narrowest is charged as the narrowest", "[compute][width]") {
    for (const double narrowest : {0.0, 1.0}) {
        setup t;
        const auto c = t.compute.add({.narrowest = gpushare::sm_width(narrowest)});
        (void)t.compute.submit(c, t.stream, [](manual_stream& s) { s.enqueue(1ms); },
                               {.width = gpushare::sm_width(0.25)});
        t.finish_all();
        CHECK(t.compute.usage(c).device_time == (narrowest == 0 ? gpushare::ns{250us} : gpushare::ns{1ms}));
    }
}

TEST_CASE("a request goes no higher than its client's ceiling, which is its own level unless it is told", "[compute]") {
    setup t;
    t.compute.change(t.b, {.weight = 50_pct, .level = {1}, .ceiling = {2}, .longest = 1ms});
    const auto c = t.compute.add({.level = {3}, .longest = 1ms});
    t.submit(t.b, "b0");
    t.submit(c, "c0");
    t.submit(t.a, "a0");
    request above(t.compute, t.a, {.level = priority{9}});
    t.submit(above, "a1");
    request high(t.compute, t.b, {.level = priority{9}});
    t.submit(high, "b1");
    t.submit(c, "c1");
    t.submit(t.b, "b2");
    // a1 goes at a's level, though before a's others, as it asked to.
    CHECK(t.order() == names{"b0", "c0", "c1", "b1", "b2", "a1", "a0"});
    SECTION("a lower one doesn't lower its client") {
        request low(t.compute, t.b, {.level = priority{0}});
        t.submit(t.b, "b3");
        t.submit(t.a, "a3");
        t.submit(low, "b4");
        CHECK(t.order() == names{"b3", "b4", "a3"});
    }
}

TEMPLATE_TEST_CASE("a request's time above its client's level is charged to the client's share", "[compute]",
                   gpushare::weighted_fair, gpushare::fair, gpushare::capped<gpushare::weighted_fair>,
                   gpushare::shortest_remaining, gpushare::strict_priority<>,
                   (gpushare::policy_tree<gpushare::weighted_fair, gpushare::weighted_fair>)) {
    gpushare::sim::world world;
    gpushare::sim::stream one(world, {0}), other(world, {0});
    sim_limiter compute({}, gpushare::sim::clock_of(world), gpushare::any_policy(TestType{}));
    const auto a = compute.add({.weight = 50_pct, .ceiling = priority{1}}), b = compute.add({.weight = 50_pct});
    for (int i = 0; i < 400; ++i) {
        (void)compute.submit(a, one, [](auto& s) { s.enqueue(1ms); });
        (void)compute.submit(b, other, [](auto& s) { s.enqueue(1ms); });
    }
    // A quarter of the device goes to a's requests: so it has a quarter otherwise, and half in all.
    gpushare::request<sim_limiter> urgent(compute, a, {.level = priority{1}});
    for (int ms = 0; ms < 400; ++ms) {
        world.run_until(world.now() + 1ms);
        compute.poll();
        if (ms % 4 == 0) (void)urgent.submit(one, [](auto& s) { s.enqueue(1ms); });
    }
    const auto had = compute.usage(a).device_time, all = had + compute.usage(b).device_time;
    CHECK(all > 300ms);
    CHECK(static_cast<double>(had.count()) / static_cast<double>(all.count()) == Approx(0.5).margin(0.16));
    CHECK(compute.usage(b).device_time > 130ms);
}

TEST_CASE("time that is held back for a request above its client's level is charged to the client's share",
          "[compute]") {
    gpushare::sim::world world;
    gpushare::sim::stream one(world, {0}), other(world, {0});
    sim_limiter compute({.anticipation = 1ms}, gpushare::sim::clock_of(world));
    const auto a = compute.add({.weight = 50_pct, .ceiling = priority{1}}), b = compute.add({.weight = 50_pct});
    for (int i = 0; i < 800; ++i) {
        (void)compute.submit(a, one, [](auto& s) { s.enqueue(500us); });
        (void)compute.submit(b, other, [](auto& s) { s.enqueue(500us); });
    }
    // Of each 2 ms, 1 ms is kept for a's request, which does next to nothing: that is a's share,
    // and the rest b's.
    gpushare::request<sim_limiter> urgent(compute, a, {.level = priority{1}});
    for (int step = 0; step < 4000; ++step) {
        world.run_until(world.now() + 100us);
        compute.poll();
        if (step % 20 == 0) (void)urgent.submit(one, [](auto& s) { s.enqueue(10us); });
    }
    CHECK(compute.usage(b).device_time > 3 * compute.usage(a).device_time);
}

}  // namespace request_level_test
