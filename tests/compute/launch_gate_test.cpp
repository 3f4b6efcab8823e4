// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace launch_gate_tests {
using namespace gpushare;
using namespace std::chrono_literals;

const instant begin = instant{} + 1s;

TEST_CASE("a launch waits while a higher client is present, and for the linger behind it", "[launch_gate]") {
    launch_gate gate{{.linger = 10us}};
    const auto batch = gate.add({}), urgent = gate.add({.level = 1});
    CHECK(gate.ask(batch, 20us, begin).goes);
    gate.arrived(urgent, begin);
    gate.arrived(urgent, begin);
    const auto held = gate.ask(batch, 20us, begin);
    CHECK_FALSE(held.goes);
    CHECK(held.held_by == urgent);
    CHECK(held.again == never);
    CHECK(gate.ask(urgent, 20us, begin).goes);

    gate.left(urgent, begin + 1ms);
    CHECK_FALSE(gate.ask(batch, 20us, begin + 2ms).goes);  // one of two requests is there
    gate.left(urgent, begin + 3ms);
    CHECK(gate.ask(batch, 20us, begin + 3ms + 9us).again == begin + 3ms + 10us);
    CHECK(gate.ask(batch, 20us, begin + 3ms + 10us).goes);
}

TEST_CASE("a client whose streams wait runs ahead, by so much", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us, .longest_hold = 1s, .queued = 1ms}};
    const auto batch = gate.add({.in_stream = true}), urgent = gate.add({.level = 1, .in_stream = true});
    gate.arrived(urgent, begin);
    CHECK_FALSE(gate.closed(batch, begin).goes);
    for (int i = 0; i < 10; ++i) {
        REQUIRE(gate.ask(batch, 100us, begin).goes);
        gate.launched(batch, 100us, begin);
    }
    CHECK(gate.bound(urgent) == 200us);  // a piece
    const auto held = gate.ask(batch, 100us, begin);
    CHECK_FALSE(held.goes);
    CHECK(held.own);
    gate.finished(batch, 100us, 100us, begin);
    CHECK(gate.ask(batch, 100us, begin).goes);
}

TEST_CASE("a launch that is timed alone doesn't wait for what waits for its request", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 1s}};
    const bool in_stream = GENERATE(true, false);
    const auto batch = gate.add({.in_stream = in_stream}), urgent = gate.add({.level = 1, .in_stream = in_stream});
    gate.launched(batch, 100us, begin);
    CHECK_FALSE(gate.ask(urgent, 10us, begin, begin, true).goes);
    gate.arrived(urgent, begin);
    CHECK(gate.ask(urgent, 10us, begin, begin, true).goes == in_stream);
}

TEST_CASE("waits that are closed for too long are overdue, and name for whom", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 20ms}};
    const auto batch = gate.add({.in_stream = true}), urgent = gate.add({.level = 1, .in_stream = true});
    CHECK_FALSE(gate.overdue(batch, begin + 1h));
    gate.arrived(urgent, begin);
    CHECK_FALSE(gate.overdue(batch, begin + 19ms));
    CHECK_FALSE(gate.overdue(urgent, begin + 1h));
    const auto late = gate.overdue(batch, begin + 20ms);
    REQUIRE(late);
    CHECK(late->held_by == urgent);
    CHECK(late->held == 20ms);
    gate.left(urgent, begin + 20ms);
    CHECK_FALSE(gate.overdue(batch, begin + 1h));
    gate.arrived(urgent, begin + 1h);
    CHECK_FALSE(gate.overdue(batch, begin + 1h + 19ms));
}

TEST_CASE("a thread that waits for the device has waits opened: for a request at once, else after the longest hold",
          "[launch_gate]") {
    launch_gate gate{{.longest_hold = 20ms}};
    const auto batch = gate.add({.in_stream = true}), urgent = gate.add({.level = 1, .in_stream = true});
    gate.arrived(urgent, begin);
    const instant since = begin + 5ms;
    REQUIRE(gate.awaited(urgent, true, since, since));
    CHECK(gate.awaited(urgent, true, since, since)->held == ns{0});
    CHECK_FALSE(gate.awaited(urgent, false, since + 19ms, since));
    CHECK(gate.awaited(urgent, false, since + 20ms, since)->held == 20ms);
    CHECK_FALSE(gate.awaited(std::nullopt, true, since + 19ms, since));
    CHECK(gate.awaited(std::nullopt, true, since + 20ms, since)->held_by == urgent);
    CHECK_FALSE(gate.awaited(batch, true, begin + 19ms, since));
    CHECK(gate.awaited(batch, true, begin + 20ms, since)->held_by == urgent);

    const auto higher = gate.add({.level = 2});
    gate.arrived(higher, since);
    CHECK_FALSE(gate.awaited(urgent, true, since + 19ms, since + 1ms));
    CHECK(gate.awaited(urgent, true, since + 20ms, since + 1ms)->held_by == higher);
}

TEST_CASE("while waits are kept open, a client whose streams wait is held instead, and counts in full",
          "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us, .longest_hold = 20ms}};
    const auto batch = gate.add({.in_stream = true}), urgent = gate.add({.level = 1, .in_stream = true});
    gate.launched(batch, 200us, begin);
    gate.launched(batch, 2ms, begin);
    gate.took(batch, 200us);
    gate.arrived(urgent, begin);
    const ns closed = gate.bound(urgent);
    gate.keep_open();
    CHECK(gate.bound(urgent) == 2200us);
    CHECK(gate.ask(batch, 10us, begin).held_by == urgent);
    CHECK_FALSE(gate.ask(batch, 10us, begin).goes);
    CHECK(gate.ask(batch, 10us, begin + 20ms, begin).forced);
    gate.let_close();
    CHECK(gate.ask(batch, 10us, begin).goes);
    CHECK(gate.bound(urgent) == closed);
}

TEST_CASE("below a higher client little is in flight, and without one as much as anybody likes", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto batch = gate.add({});
    for (int i = 0; i < 100; ++i) {
        REQUIRE(gate.ask(batch, 100us, begin).goes);
        gate.launched(batch, 100us, begin);
    }
    CHECK(gate.in_flight(batch) == 10ms);
    const auto urgent = gate.add({.level = 1});
    CHECK(gate.bound(urgent) == 10ms);  // what is in flight already counts
    CHECK_FALSE(gate.ask(batch, 1us, begin).goes);
    for (int i = 0; i < 100; ++i) gate.finished(batch, 100us, 100us, begin);
    CHECK(gate.ask(batch, 600us, begin).goes);  // longer than the limit, and alone
    gate.launched(batch, 600us, begin);
    CHECK_FALSE(gate.ask(batch, 1us, begin).goes);
    CHECK(gate.bound(urgent) == 600us);
    CHECK(gate.bound(batch) == 0us);
}

TEST_CASE("a launch that is held for too long goes, and says whom it was held for", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 100ms}};
    const auto batch = gate.add({}), urgent = gate.add({.level = 1});
    gate.arrived(urgent, begin);
    CHECK_FALSE(gate.ask(batch, 1us, begin + 99ms, begin).goes);
    const auto a = gate.ask(batch, 1us, begin + 100ms, begin);
    CHECK(a.goes);
    CHECK(a.forced);
    CHECK(a.held_by == urgent);
    CHECK_FALSE(gate.ask(batch, 1us, begin + 100ms).goes);  // the next launch is held anew
}

TEST_CASE("a removed client holds nobody, and its index is used again", "[launch_gate]") {
    launch_gate gate;
    const auto batch = gate.add({}), urgent = gate.add({.level = 1});
    gate.arrived(urgent, begin);
    gate.remove(urgent);
    CHECK(gate.ask(batch, 1us, begin).goes);
    CHECK(gate.add({.level = 2}) == urgent);
    CHECK(gate.ask(batch, 1us, begin).goes);
}

TEST_CASE("a client that was idle has saved up nothing", "[launch_gate]") {
    launch_gate gate{{.ahead = 100us}};
    const auto a = gate.add({.weight = 1}), b = gate.add({.weight = 1});
    for (int i = 0; i < 1000; ++i) {
        gate.launched(a, 100us, begin);
        gate.finished(a, 100us, 100us, begin);
    }
    const instant later = begin + 1ms;
    gate.arrived(b, later);
    CHECK(gate.ask(a, 100us, later).goes);  // b came a moment ago and isn't owed 100 ms
    int launches = 0;
    for (gate.launched(a, 100us, later); launches < 20; ++launches) {
        (void)gate.ask(a, 100us, later);  // and waits for its turn
        if (launches == 0) gate.finished(a, 100us, 100us, later);
        if (!gate.ask(b, 100us, later + 50us).goes) break;
        gate.launched(b, 100us, later + 50us);
        gate.finished(b, 100us, 100us, later + 50us);
    }
    CHECK(launches == 3);  // until it is 100 us ahead of a, which had 100 us meanwhile
}

/// A device that runs one launch at a time, and clients that always have the next one.
struct saturated {
    launch_gate gate{};
    struct tenant {
        launch_gate::client id;
        ns predicted, takes;
        ns used{0};
    };
    std::vector<tenant> tenants{};

    void add(std::uint32_t weight, ns predicted, ns takes) {
        tenants.push_back({gate.add({.weight = weight}), predicted, takes});
        gate.arrived(tenants.back().id, begin);
    }
    void run(ns length) {
        instant now = begin;
        std::deque<tenant*> queue;
        while (now < begin + length) {
            for (bool any = true; any;) {
                any = false;
                for (tenant& t : tenants)
                    if (gate.in_flight(t.id) < 500us && gate.ask(t.id, t.predicted, now).goes) {
                        gate.launched(t.id, t.predicted, now);
                        queue.push_back(&t);
                        any = true;
                    }
            }
            REQUIRE_FALSE(queue.empty());  // work-conserving: whoever is least ahead may go
            tenant& t = *queue.front();
            queue.pop_front();
            now += t.takes;
            t.used += t.takes;
            gate.finished(t.id, t.predicted, t.takes, now);
        }
    }
};

TEST_CASE("device time is divided by weight, however wrong predictions are", "[launch_gate]") {
    saturated s;
    s.add(30, 20us, 60us);   // three times as long as predicted
    s.add(60, 100us, 40us);  // less than half
    s.add(10, 5us, 300us);
    s.run(5s);
    for (const auto& [tenant, share] : {std::pair{0, 0.3}, {1, 0.6}, {2, 0.1}}) {
        CAPTURE(tenant);
        const auto& t = s.tenants[static_cast<std::size_t>(tenant)];
        CHECK(static_cast<double>(t.used.count()) / 5e9 == Approx(share).margin(0.002));
        CHECK(s.gate.charged(t.id) == t.used);
    }
}

TEST_CASE("a client whose host is slow gets its share", "[launch_gate]") {
    // It launches 10 us of work each 15 us, in steps: the other one always has work.
    launch_gate gate;
    const auto slow = gate.add({.weight = 70}), fast = gate.add({.weight = 30});
    instant now = begin, next = begin;
    std::deque<launch_gate::client> device;
    instant ends = never;
    while (now < begin + 1s) {
        if (now >= next && gate.ask(slow, 10us, now).goes) {
            gate.launched(slow, 10us, now);
            device.push_back(slow);
            next = now + 15us;
        }
        if (gate.in_flight(fast) < 500us && gate.ask(fast, 20us, now).goes) {
            gate.launched(fast, 20us, now);
            device.push_back(fast);
        }
        REQUIRE((device.empty() || std::ranges::all_of(device, [&](auto c) { return c == device.front(); })));
        if (ends == never && !device.empty()) ends = now + (device.front() == slow ? 10us : 20us);
        now += 1us;
        if (now < ends) continue;
        const ns took = device.front() == slow ? 10us : 20us;
        gate.finished(device.front(), took, took, now);
        device.pop_front();
        ends = never;
    }
    const auto had = [&](auto c) { return static_cast<double>(gate.charged(c).count()); };
    CHECK(had(slow) / (had(slow) + had(fast)) == Approx(0.7).margin(0.005));
}

TEST_CASE("a client gets its cap and no more, alone and beside others, however wrong predictions are",
          "[launch_gate]") {
    const bool beside = GENERATE(false, true);
    launch_gate gate;
    const auto capped = gate.add({.weight = 1, .cap = share::of_permille(200)});
    const auto other = gate.add({.weight = 1});
    constexpr ns predicted{20'000}, takes{60'000}, length{2'000'000'000};
    instant now = begin, ends = never;
    std::deque<launch_gate::client> device;
    const auto had = [&](auto c) { return static_cast<double>(gate.charged(c).count()) / 1e9; };
    while (now < begin + length) {
        for (const auto c : {capped, other})
            while ((c == capped || beside) && gate.in_flight(c) < 100us && gate.ask(c, predicted, now).goes) {
                gate.launched(c, predicted, now);
                device.push_back(c);
            }
        if (ends == never && !device.empty()) ends = now + takes;
        now += 5us;
        if (now < ends) continue;
        gate.finished(device.front(), predicted, takes, now);
        device.pop_front();
        ends = never;
        REQUIRE(had(capped) <= 0.2 * (in_seconds(now - begin) + 0.005) + 6e-4);  // and what was in flight
    }
    CHECK(had(capped) == Approx(0.4).margin(0.005));
    if (beside) CHECK(had(other) > 1.5);  // the device isn't kept idle for the one that waits for its cap
}

TEST_CASE("a higher client that waits for its cap is in nobody's way", "[launch_gate]") {
    launch_gate gate;
    const auto urgent = gate.add({.level = 1, .cap = share::of_permille(100)}), batch = gate.add({});
    gate.arrived(urgent, begin);
    gate.launched(urgent, 1ms, begin);
    CHECK_FALSE(gate.ask(batch, 10us, begin).goes);
    gate.finished(urgent, 1ms, 1ms, begin + 1ms);
    const auto held = gate.ask(urgent, 10us, begin + 1ms);
    CHECK_FALSE(held.goes);
    CHECK(held.again == begin + 5ms);  // 5 ms were kept for it
    CHECK(gate.ask(batch, 10us, begin + 1ms).goes);
    CHECK(gate.ask(urgent, 10us, held.again).goes);
    CHECK_FALSE(gate.ask(batch, 10us, held.again).goes);
}

TEST_CASE("clients without weights run side by side", "[launch_gate]") {
    launch_gate gate{{.ahead = 100us}};
    const auto a = gate.add({}), b = gate.add({});
    for (int i = 0; i < 100; ++i) {
        REQUIRE(gate.ask(a, 100us, begin).goes);
        gate.launched(a, 100us, begin);
        REQUIRE(gate.ask(b, 10us, begin).goes);
        gate.launched(b, 10us, begin);
    }
    const auto shared = gate.add({.weight = 5});  // from now on in turns
    CHECK_FALSE(gate.ask(b, 10us, begin).goes);
    CHECK(gate.ask(shared, 10us, begin).held_by == a);
}

TEST_CASE("a client keeps its turn for a pause, and no longer", "[launch_gate]") {
    launch_gate gate{{.pause = 50us}};
    const auto a = gate.add({.weight = 1}), b = gate.add({.weight = 1});
    gate.launched(a, 10us, begin);
    CHECK(gate.ask(b, 10us, begin + 5us).again == never);  // it is asked again when that is over
    gate.finished(a, 10us, 10us, begin + 10us);
    CHECK(gate.ask(b, 10us, begin + 10us).again == begin + 60us);
    CHECK(gate.ask(a, 10us, begin + 59us).goes);
    CHECK(gate.ask(b, 10us, begin + 60us).goes);
}

TEST_CASE("no higher request waits longer than its bound, whichever client launches when", "[launch_gate]") {
    const std::uint64_t seed = support::seed(1);
    CAPTURE(seed);
    sim::random any(seed);
    launch_gate gate{{.in_flight = 200us, .linger = 10us}};
    const auto urgent = gate.add({.level = 2});
    const launch_gate::client lower[] = {gate.add({}), gate.add({.level = 1}), gate.add({})};
    struct flight {
        launch_gate::client of;
        ns takes;
    };
    std::deque<flight> device;  // one at a time, in order
    instant now = begin, front_ends = never;
    std::uint32_t present = 0;
    for (int step = 0; step < 200'000; ++step) {
        const auto c = lower[any.below(3)];
        const ns takes = any.between(1us, any.below(10) == 0 ? 500us : 60us);
        if (any.below(3) != 0 && gate.ask(c, takes, now).goes) {
            REQUIRE(present == 0);
            gate.launched(c, takes, now);
            if (device.empty()) front_ends = now + takes;
            device.push_back({c, takes});
        }
        if (any.below(50) == 0) {
            const ns expected = gate.bound(urgent);
            const bool first = present++ == 0;
            gate.arrived(urgent, now);
            const ns told = gate.bound(urgent);
            ns whole{0};
            for (const flight& f : device) whole += f.takes;
            REQUIRE(whole - (device.empty() ? ns{0} : device.front().takes - (front_ends - now)) <= told);
            REQUIRE(told == whole);  // no more than was launched and isn't known to be over
            if (first) REQUIRE(told <= expected);
        } else if (present != 0 && any.below(10) == 0) {
            gate.left(urgent, now);
            --present;
        }
        now += any.between(0us, 40us);
        while (!device.empty() && front_ends <= now) {
            gate.finished(device.front().of, device.front().takes, device.front().takes, front_ends);
            device.pop_front();
            front_ends = device.empty() ? never : front_ends + device.front().takes;
        }
    }
}

TEST_CASE("a request's bound includes the work that no wait in a stream can stop any more", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto batch = gate.add({.in_stream = true});
    gate.launched(batch, 900us, begin);  // nobody is above, so that no wait is in front of it
    const auto urgent = gate.add({.level = 1});
    gate.launched(batch, 250us, begin);
    gate.launched(batch, 2ms, begin);
    gate.took(batch, 2ms);
    gate.arrived(urgent, begin);
    CHECK(gate.bound(urgent) == 2ms);  // the longest piece, as the rest waits
    gate.finished(batch, 900us, 900us, begin);
    gate.spread(batch, 2);
    CHECK(gate.bound(urgent) == 250us + 2ms);  // a piece of each stream
    gate.finished(batch, 250us, 250us, begin);
    gate.finished(batch, 2ms, 2ms, begin);
    CHECK(gate.bound(urgent) == ns{0});
    gate.left(urgent, begin);
    CHECK(gate.bound(urgent) == 4ms);  // until the next request comes, as much may be launched
}

TEST_CASE("short launches share a piece with a long one, and a request is told as much", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto batch = gate.add({.in_stream = true}), urgent = gate.add({.level = 1});
    CHECK(gate.piece(batch, 200us) == 200us);
    for (const ns takes : {ns{60us}, ns{330us}, ns{5ms}}) {
        gate.launched(batch, takes, begin);
        gate.finished(batch, takes, takes, begin);
        CHECK(gate.bound(urgent) >= gate.piece(batch, 200us));
        CHECK(gate.piece(batch, 200us) == std::clamp(takes, ns{200us}, ns{400us}));
    }
    CHECK(gate.piece(batch, ns{0}) == ns{0});  // a piece for each launch
}

TEST_CASE("launches from before a higher client came have no waits, and count in full", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto batch = gate.add({.in_stream = true});
    for (int i = 0; i < 10; ++i) gate.launched(batch, 100us, begin);
    const auto urgent = gate.add({.level = 1});
    gate.arrived(urgent, begin);
    CHECK(gate.bound(urgent) == 1ms);
    for (int i = 0; i < 9; ++i) gate.finished(batch, 100us, 100us, begin);
    for (int i = 0; i < 10; ++i) gate.launched(batch, 100us, begin);
    gate.finished(batch, 100us, 100us, begin);
    CHECK(gate.bound(urgent) == 200us);
}

TEST_CASE("a bound trusts predictions as far as they were right", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto urgent = gate.add({.level = 1}), batch = gate.add({});
    gate.arrived(urgent, begin);
    gate.launched(batch, 100us, begin);
    gate.finished(batch, 100us, 164us, begin);
    gate.launched(batch, 100us, begin);
    CHECK(gate.bound(urgent) == 164us);
    gate.finished(batch, 100us, 90us, begin);
    gate.launched(batch, 100us, begin);
    CHECK(gate.bound(urgent) == 163us);  // and forgets
    gate.finished(batch, 100us, 100us, begin);

    gate.launched(batch, {.time = 20us, .charge = 20us, .sure = false}, begin);
    CHECK(gate.bound(urgent) == 20us + 200us + 100us);  // nobody has timed it: the limit, and the longest launch
    gate.finished(batch, 20us, 460us, begin);
    gate.took(batch, 460us);
    gate.launched(batch, 20us, begin);
    CHECK(gate.bound(urgent) < 82us);  // a launch that is timed for the first time says nothing of the others
}

TEST_CASE("a synchronous copy that is over early says nothing about the client's other launches", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto urgent = gate.add({.level = 1}), batch = gate.add({}), neighbour = gate.add({});
    gate.launched(batch, {.time = 20us, .charge = 20us, .sure = false}, begin, true);
    gate.launched(batch, {.time = 30us, .charge = {}}, begin);  // the copy
    gate.overtook(batch, {.time = 30us, .charge = {}}, {.time = 30us, .charge = {}}, begin);
    gate.arrived(urgent, begin);
    CHECK(gate.bound(urgent) == 20us + 200us + 30us);  // the kernel may still take any time
    gate.left(urgent, begin);
    CHECK_FALSE(gate.ask(neighbour, 10us, begin + 1ms).goes);  // and still runs alone
    gate.finished(batch, 20us, 25us, begin);
    CHECK(gate.ask(neighbour, 10us, begin + 1ms).goes);
}

TEST_CASE("a bound forgets a long launch that hasn't come again", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto urgent = gate.add({.level = 1}), batch = gate.add({});
    const auto launches = [&](ns takes, instant now) {
        gate.launched(batch, takes, now);
        gate.finished(batch, takes, takes, now);
    };
    gate.took(batch, 250us);  // pieces of work
    launches(40ms, begin);    // the copy of a model's weights
    for (int i = 1; i <= 9; ++i) launches(100us, begin + i * 1s);
    CHECK(gate.bound(urgent) == 40ms);
    launches(2ms, begin + 11s);
    CHECK(gate.bound(urgent) == 40ms);
    launches(100us, begin + 22s);
    CHECK(gate.bound(urgent) == 2ms);
    launches(100us, begin + 33s);
    CHECK(gate.bound(urgent) == 250us);
}

TEST_CASE("options and times without a limit don't overflow", "[launch_gate]") {
    launch_gate gate{{.in_flight = ns::max(),
                      .linger = ns::max(),
                      .ahead = ns::max(),
                      .pause = ns::max(),
                      .longest_hold = ns::max(),
                      .queued = ns::max(),
                      .patience = ns::max()}};
    const auto a = gate.add({.weight = 1}), b = gate.add({.weight = 1}), urgent = gate.add({.level = 1});
    const auto waits = gate.add({.in_stream = true});
    gate.took(waits, ns::max());
    gate.spread(waits, 3);
    CHECK(gate.bound(urgent) >= 1h);
    REQUIRE(gate.ask(a, 1ms, begin).goes);
    gate.launched(a, 1ms, begin);
    CHECK_FALSE(gate.ask(b, 1ms, begin).goes);
    gate.finished(a, 1ms, 1ms, begin + 1ms);
    CHECK(gate.ask(a, 1ms, begin + 1ms).goes);  // it is never too far ahead
    const auto turn = gate.ask(b, 1ms, begin + 1ms);
    CHECK_FALSE(turn.goes);
    CHECK(turn.again == never);
    gate.arrived(urgent, begin + 2ms);
    gate.left(urgent, begin + 3ms);
    const auto held = gate.ask(a, 1ms, begin + 4ms);
    CHECK_FALSE(held.goes);
    CHECK(held.again == never);
}

TEST_CASE("a request whose thread computes is in nobody's way on its level", "[launch_gate]") {
    launch_gate gate{{.ahead = 100us}};
    const auto a = gate.add({.weight = 1}), b = gate.add({.weight = 1});
    gate.arrived(b, begin);  // and launches nothing for now
    for (int i = 0; i < 100; ++i) {
        REQUIRE(gate.ask(a, 100us, begin).goes);
        gate.launched(a, 100us, begin);
        gate.finished(a, 100us, 100us, begin);
    }
    // It has saved up what a client may be ahead, and no more.
    const instant later = begin + 3ms;
    REQUIRE(gate.ask(b, 50us, later).goes);
    gate.launched(b, 50us, later);
    CHECK_FALSE(gate.ask(a, 100us, later).goes);
    gate.finished(b, 50us, 50us, later);
    for (int i = 0; i < 2; ++i) {
        REQUIRE(gate.ask(b, 100us, later).goes);
        gate.launched(b, 100us, later);
        gate.finished(b, 100us, 100us, later);
    }
    CHECK_FALSE(gate.ask(b, 100us, later).goes);
    CHECK(gate.ask(a, 100us, later).goes);
}

TEST_CASE("a launch that is timed alone waits for the launches of others, and others of its level for it",
          "[launch_gate]") {
    launch_gate gate{{.ahead = 1ms}};
    const auto a = gate.add({}), b = gate.add({}), above = gate.add({.level = 1});
    gate.launched(b, 50us, begin);
    CHECK(gate.has_neighbours(a));
    CHECK(gate.ask(a, 20us, begin).goes);  // with others, it goes at once
    CHECK(gate.ask(a, 20us, begin, begin, true).held_by == b);
    CHECK(gate.ask(b, 20us, begin).held_by == a);
    CHECK(gate.ask(b, 20us, begin, begin, true).held_by == a);  // the first of two
    gate.finished(b, 50us, 50us, begin);
    REQUIRE(gate.ask(a, 20us, begin, begin, true).goes);
    gate.launched(a, {20us, 20us}, begin, true);
    gate.launched(a, 30us, begin);  // behind it
    CHECK_FALSE(gate.ask(b, 20us, begin).goes);
    CHECK(gate.ask(above, 20us, begin).goes);  // which a lower client doesn't hold back
    gate.finished(a, 20us, 25us, begin);
    CHECK(gate.ask(b, 20us, begin).goes);
}

TEST_CASE("a client that is ahead of its share keeps nobody waiting for what it would time alone", "[launch_gate]") {
    launch_gate gate{{.ahead = 100us}};
    const auto a = gate.add({.weight = 1}), b = gate.add({.weight = 1});
    gate.launched(b, 50us, begin);
    REQUIRE_FALSE(gate.ask(a, 20us, begin, begin, true).goes);
    SECTION("though it asked before it was") {
        gate.launched(a, 200us, begin);
        REQUIRE_FALSE(gate.ask(a, 20us, begin, begin, true).goes);
        gate.finished(a, 200us, 900us, begin);
        gate.finished(b, 50us, 50us, begin);
        CHECK(gate.ask(b, 20us, begin, begin, true).goes);
    }
    SECTION("nor does one that was removed") {
        gate.remove(a);
        CHECK(gate.ask(b, 20us, begin).goes);
    }
}

/// What the rules say, written down once more: from all that happened, without virtual time.
struct rules {
    struct client {
        bool used = false, has_turn = false;
        int level = 0;
        std::uint32_t requests = 0;
        instant seen{}, waits_since = never;
        std::deque<ns> flight{};
        ns in_flight{0}, charged{0};
        ns predicted{0};  // of the launch that it would make

        [[nodiscard]] bool busy() const { return waits_since != never || in_flight != ns{0}; }
    };
    launch_gate_options options;
    std::vector<client> clients;

    [[nodiscard]] bool higher_is_there(const client& c, instant now) const {
        return std::ranges::any_of(clients, [&](const client& o) {
            return o.used && o.level > c.level &&
                   (o.requests != 0 || (o.seen != instant{} && now - o.seen < options.linger));
        });
    }
    [[nodiscard]] bool has_higher(const client& c) const {
        return std::ranges::any_of(clients, [&](const client& o) { return o.used && o.level > c.level; });
    }
    [[nodiscard]] bool enough_in_flight(const client& c) const {
        if (c.in_flight == ns{0}) return false;
        const ns all = c.in_flight + c.predicted;
        const bool has_peer =
            std::ranges::any_of(clients, [&](const client& o) { return &o != &c && o.used && o.level == c.level; });
        return (has_higher(c) && all > options.in_flight) || (has_peer && all > options.queued);
    }
    [[nodiscard]] bool keeps_turn(const client& o, instant now) const {
        return o.has_turn && o.waits_since == never && now - o.seen < options.pause;
    }
    [[nodiscard]] bool has_rival(const client& c, instant now) const {
        return std::ranges::any_of(clients, [&](const client& o) {
            return &o != &c && o.used && o.level == c.level && (o.busy() || keeps_turn(o, now));
        });
    }
    // Turns: nobody's launches run beside another one's of the level.
    [[nodiscard]] bool neighbour_runs(const client& c) const {
        return std::ranges::any_of(
            clients, [&](const client& o) { return &o != &c && o.used && o.level == c.level && o.in_flight != ns{0}; });
    }
};

/// Clients that come, ask, launch and go as dice fall, on a device that ends launches as dice fall.
struct interleaving {
    sim::random any;
    rules model{{.linger = 10us, .ahead = 300us, .pause = 20us, .longest_hold = 3ms, .queued = 1ms},
                std::vector<rules::client>(6)};
    launch_gate gate{model.options};
    instant now = begin;
    std::uint64_t launches = 0, forced = 0, held = 0;

    void come(std::uint32_t number) {
        auto& c = model.clients[number];
        c = {.used = true, .level = static_cast<int>(any.below(3))};
        REQUIRE(gate.add({.level = c.level, .weight = static_cast<std::uint32_t>(1 + any.below(9))}) == number);
    }
    void ask(std::uint32_t number) {
        auto& c = model.clients[number];
        if (c.waits_since == never) c.predicted = any.between(1us, any.below(10) == 0 ? 700us : 60us);
        const instant since = c.waits_since == never ? now : c.waits_since;
        const bool rival = model.has_rival(c, now);
        const bool must_wait = model.higher_is_there(c, now) || model.enough_in_flight(c) || model.neighbour_runs(c);
        const launch_answer a = gate.ask(number, c.predicted, now, since);
        if (a.forced) REQUIRE(now - since >= model.options.longest_hold);
        if (now - since >= model.options.longest_hold) REQUIRE(a.goes);
        if (must_wait) REQUIRE((!a.goes || a.forced));
        if (!must_wait && !rival) REQUIRE((a.goes && !a.forced));
        forced += a.forced;
        held += !a.goes;
        c.waits_since = a.goes ? never : since;
        if (a.goes) launch(number);
    }
    void launch(std::uint32_t number) {
        auto& c = model.clients[number];
        gate.launched(number, c.predicted, now);
        for (auto& o : model.clients)
            if (o.level == c.level) o.has_turn = &o == &c;
        c.flight.push_back(c.predicted);
        c.in_flight += c.predicted;
        c.seen = now;
        ++launches;
    }
    void finish(std::uint32_t number) {
        auto& c = model.clients[number];
        if (c.flight.empty()) return;
        const ns predicted = c.flight.front(), measured = any.between(1us, 2 * predicted + 1us);
        c.flight.pop_front();
        c.in_flight -= predicted;
        c.charged += measured;
        c.seen = now;
        gate.finished(number, predicted, measured, now);
        REQUIRE(gate.in_flight(number) == c.in_flight);
        REQUIRE(gate.charged(number) == c.charged);
    }
    void request(std::uint32_t number, bool comes) {
        auto& c = model.clients[number];
        if (!comes && c.requests == 0) return;
        comes ? gate.arrived(number, now) : gate.left(number, now);
        comes ? ++c.requests : --c.requests;
        c.seen = now;
    }
    // Of the clients of a level that wait for each other, one may always go.
    void check_that_one_goes() {
        const auto& all = model.clients;
        for (std::uint32_t n = 0; n < all.size(); ++n) {
            if (all[n].waits_since == never || model.higher_is_there(all[n], now) || model.enough_in_flight(all[n]))
                continue;
            bool others_run = false, one = false;
            for (std::uint32_t o = 0; o < all.size(); ++o) {
                if (!all[o].used || all[o].level != all[n].level) continue;
                others_run |= all[o].in_flight != ns{0} || model.keeps_turn(all[o], now);
                one |= all[o].waits_since != never && launch_gate(gate).ask(o, all[o].predicted, now, now).goes;
            }
            REQUIRE((one || others_run));
        }
    }
    void step() {
        const auto n = static_cast<std::uint32_t>(any.below(model.clients.size()));
        now += any.between(0us, 30us);
        if (!model.clients[n].used) return come_first();
        switch (any.below(40)) {
            case 0: return request(n, true);
            case 1:
            case 2:
            case 3: return request(n, false);
            case 4:
                if (any.below(50) != 0) return;
                gate.remove(n);
                model.clients[n] = {};
                return;
            case 5: return check_that_one_goes();
            default: any.below(2) == 0 ? finish(n) : ask(n);
        }
    }
    void come_first() {
        for (std::uint32_t n = 0; n < model.clients.size(); ++n)
            if (!model.clients[n].used) return come(n);
    }
};

TEST_CASE("a million launches, interleaved at random, keep every rule", "[launch_gate][sweep]") {
    const std::uint64_t seed = support::seed(1);
    CAPTURE(seed);
    interleaving all{sim::random(seed)};
    while (all.launches < 1'000'000) all.step();
    CHECK(all.held > 100'000);  // the rules were asked for something
    CHECK(all.forced > 100);
}

}  // namespace launch_gate_tests
