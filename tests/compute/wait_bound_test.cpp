// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The bound on a wait, as each submission learns it, and the consequences of a broken bound.
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"

namespace wait_bound_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::admission;
using gpushare::instant;
using gpushare::limiter_core;
using gpushare::limiter_event;
using gpushare::ns;
using support::manual_clock;
using support::manual_stream;
using kind = limiter_event::kind;

namespace {

constexpr instant start{};

/// One client below, whose kernels take 1 ms, and one above.
struct two_levels {
    explicit two_levels(std::uint32_t depth = 2) : core({.depth = depth, .horizon = 0ms}) {}

    limiter_core<> core;
    gpushare::client_id low = core.add({.weight = 50_pct, .longest = 1ms, .tag = 1});
    gpushare::client_id high = core.add({.weight = 50_pct, .level = {1}, .longest = 100us, .tag = 2});

    admission let_in(gpushare::client_id c, instant at = start) {
        core.arrive(c, at);
        return core.next(at).value();
    }
};

}  // namespace

TEST_CASE("each client's bound is what the levels below it may have in flight", "[compute]") {
    limiter_core core{{.depth = 3}};
    const auto low = core.add({.longest = 2ms});
    CHECK(core.bound_of(low) == 6ms);  // of its own level: none is below
    const auto middle = core.add({.level = {1}});
    const auto high = core.add({.level = {2}});
    CHECK(core.bound_of(low) == 4ms);
    CHECK(core.bound_of(middle) == 4ms);
    CHECK(core.bound_of(high) == 8ms);
    CHECK(core.bound_of(high) == core.wait_bound());
    core.remove(low);
    CHECK(core.bound_of(high) == 0ns);  // nobody left declared or showed anything
    core.change(middle, {.level = {1}, .longest = 1ms});
    CHECK(core.bound_of(high) == 2ms);
    core.change(middle, {.level = {1}, .longest = 500us});
    CHECK(core.bound_of(high) == 1ms);
}

TEST_CASE("a wait for yielding work lasts to its next yield, and on its own level to its end", "[compute]") {
    limiter_core core{{.depth = 3}};
    const auto low = core.add({.longest = 100ms, .yields_within = 5ms}), high = core.add({.level = {1}});
    CHECK(core.bound_of(high) == 5ms);
    CHECK(core.bound_of(low) == 200ms);
    CHECK(core.estimate(high).bound_p99 == 5ms);
    SECTION("beside what doesn't") {
        const auto opaque = core.add({.longest = 20ms});
        CHECK(core.bound_of(high) == 45ms);
        core.remove(opaque);
        CHECK(core.bound_of(high) == 5ms);
    }
    SECTION("though it is not known yet how long it takes, or it takes no longer than that") {
        CHECK(core.change(low, {.yields_within = 7ms}) == gpushare::errc::none);
        CHECK(core.bound_of(high) == 7ms);
        CHECK(core.change(low, {.longest = 2ms, .yields_within = 7ms}) == gpushare::errc::none);
        CHECK(core.bound_of(high) == 2ms);
        CHECK(core.change(low, {.longest = 100ms}) == gpushare::errc::none);
        CHECK(core.bound_of(high) == 200ms);
    }
    SECTION("beside what doesn't, of unknown length: nothing is promised until somebody shows one") {
        CHECK(core.change(low, {.yields_within = 5ms}) == gpushare::errc::none);
        CHECK(core.bound_of(low) == 0ns);  // how often it yields doesn't tell its own level how long it takes
        const auto opaque = core.add({});
        CHECK(core.bound_of(high) == 0ns);
        core.arrive(opaque, start);
        CHECK(core.complete(core.next(start).value(), {.took = 300ms}) == 0ns);
        CHECK(core.bound_of(high) == 605ms);
        core.remove(opaque);
        CHECK(core.bound_of(high) == 5ms);
        CHECK(core.change(low, {.longest = 100ms, .yields_within = 5ms}) == gpushare::errc::none);
        (void)core.add({});
        CHECK(core.bound_of(high) == 205ms);  // as long as the longest of all
    }
    SECTION("and a call of it that takes its time breaks no bound, but a long stretch does") {
        for (const ns waited : {5ms, 6ms}) {
            core.arrive(low, start);
            const auto below = core.next(start).value();
            core.arrive(high, start);
            CHECK(core.complete(core.next(start).value(), {.took = 1ms, .in_flight = 1ms + waited}) == waited - 5ms);
            CHECK(core.complete(below, {.took = 100ms, .in_flight = 100ms}) == 0ns);
        }
        // Of the first one above no length was known.
        CHECK(core.events().take()->what == kind::waited_beyond_bound);
        CHECK_FALSE(core.events().take());
    }
}

TEST_CASE("a wait within the bound is no event", "[compute]") {
    two_levels t;
    const auto a = t.let_in(t.low), b = t.let_in(t.low), g = t.let_in(t.high);
    CHECK(g.bound == 2ms);
    CHECK(t.core.complete(a, {.took = 1ms, .in_flight = 1ms}) == 0ns);
    CHECK(t.core.complete(b, {.took = 1ms, .in_flight = 2ms}) == 0ns);
    CHECK(t.core.complete(g, {.took = 100us, .in_flight = 2100us}) == 0ns);
    CHECK_FALSE(t.core.events().take());
}

TEST_CASE("a client that declares the longest time there is is never known to wait", "[compute]") {
    two_levels t(4);
    REQUIRE(t.core.change(t.high, {.level = {1}, .longest = ns::max()}) == gpushare::errc::none);
    (void)t.let_in(t.low);
    for (const auto& g : {t.let_in(t.high), t.let_in(t.high), t.let_in(t.high)})  // side by side
        CHECK(t.core.complete(g, {.took = 100us, .in_flight = 100us}) == 0ns);
    CHECK_FALSE(t.core.events().take());
}

TEST_CASE("a wait beyond the bound raises an event with figures", "[compute]") {
    two_levels t;
    (void)t.let_in(t.low);
    t.core.arrive(t.high, start, {.head = {.arrival = start, .key = 7}});
    const auto g = t.core.next(start).value();
    CHECK(t.core.complete(g, {.took = 100us, .in_flight = 2600us}) == 500us);
    const auto e = t.core.events().take();
    REQUIRE(e);
    CHECK(e->what == kind::waited_beyond_bound);
    CHECK(e->client == t.high);
    CHECK(e->took == 2500us);
    CHECK(e->bound == 2ms);
    CHECK(e->key == 7);
    CHECK(to_string(e->what) == "waited beyond bound");
    CHECK_FALSE(t.core.events().take());
}

TEST_CASE("a wait is judged by the bound that was published when the submission came", "[compute]") {
    two_levels t;
    t.core.arrive(t.high, start, {.head = {.arrival = start}, .bound = t.core.bound_of(t.high)});
    t.core.change(t.low, {.weight = 50_pct, .longest = 5ms});  // 10 ms for who comes from now on
    CHECK(t.core.bound_of(t.high) == 10ms);
    CHECK(t.core.complete(t.core.next(start).value(), {.took = 100us, .in_flight = 3100us}) == 1ms);
    CHECK(t.core.complete(t.let_in(t.high), {.took = 100us, .in_flight = 3100us}) == 0ns);
}

TEST_CASE("waiting for its own level and for those above breaks no promise", "[compute]") {
    two_levels t{3};
    const auto above = t.core.add({.level = {2}, .longest = 10ms});
    const auto over = t.let_in(above), second = t.let_in(t.high);
    CHECK(t.core.complete(over, {.took = 9200us, .in_flight = 9200us}) == 0ns);
    // 9.2 ms of the other, 100 us of its own, and what is to be expected at most.
    const auto bound = second.bound;
    CHECK(t.core.complete(second, {.took = 100us, .in_flight = 9300us + bound}) == 0ns);
    const auto third = t.let_in(t.high);
    CHECK(t.core.complete(third, {.took = 100us, .in_flight = 9300us + bound}) > 0ns);
}

TEST_CASE("of what isn't known nothing is said", "[compute]") {
    limiter_core core;
    const auto c = core.add({});
    core.arrive(c, start);
    CHECK(core.complete(core.next(start).value(), {.took = 1ms, .in_flight = 1s}) == 0ns);  // no length is known yet
    core.arrive(c, start);
    CHECK(core.complete(core.next(start).value(), {.took = 1ms}) == 0ns);  // not measured
    CHECK_FALSE(core.events().take());
    core.arrive(c, start);
    CHECK(core.complete(core.next(start).value(), {.took = 1ms, .in_flight = 1s}) > 0ns);
}

TEST_CASE("tickets and permits say their bound, and a device that breaks it is told on", "[compute]") {
    manual_clock clock;
    manual_stream quick{gpushare::priority{1}}, slow{quick, gpushare::priority{0}};
    gpushare::compute_limiter<manual_stream, manual_clock> limiter{{.depth = 2, .horizon = 0ms}, clock};
    const auto low = limiter.add({.weight = 50_pct, .longest = 1ms});
    const auto high = limiter.add({.weight = 50_pct, .level = {1}, .longest = 100us});
    CHECK(limiter.bound_of(high) == 2ms);
    CHECK(limiter.bound_of(low) == 2ms);
    CHECK(limiter.bound_of({99, 1}) == 0ns);
    CHECK(limiter.acquire(high)->bound() == 2ms);

    const auto first = limiter.submit(high, quick, [](manual_stream& s) { s.enqueue(100us); }).value();
    CHECK(first.bound() == 2ms);
    quick.reach_next_at(start);
    quick.reach_next_at(start + 100us);
    limiter.poll();
    CHECK(first.done());
    CHECK_FALSE(limiter.take_event());

    const auto blocker = limiter.submit(low, slow, [](manual_stream& s) { s.enqueue(1ms); }).value();
    const auto second = limiter.submit(high, quick, [](manual_stream& s) { s.enqueue(100us); }).value();
    quick.reach_next_at(start + 3ms);
    slow.reach_next_at(start + 3ms);
    slow.reach_next_at(start + 6ms);  // longer than its client declared
    quick.reach_next_at(start + 6100us);
    limiter.poll();
    CHECK(second.done());
    std::optional<limiter_event> waited;
    bool overran = false;
    while (const auto e = limiter.take_event()) {
        if (e->what == kind::waited_beyond_bound) waited = e;
        overran |= e->what == kind::overran && e->client == low;
    }
    CHECK(overran);
    REQUIRE(waited);
    CHECK(waited->client == high);
    CHECK(waited->bound == 2ms);
    CHECK(waited->took == 3ms);
    CHECK(blocker.done());
}

}  // namespace wait_bound_test
