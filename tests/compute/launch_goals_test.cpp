// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Latency goals, quotas of time and soft caps at the launch gate, alone and beside levels, shares
// and caps.
#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace launch_goals_tests {
using namespace gpushare;
using namespace std::chrono_literals;

const instant begin = instant{} + 1s;

// ---- goals

TEST_CASE("among a level's clients, the one whose request is due first launches first", "[launch_gate]") {
    launch_gate gate{{.in_flight = 200us}};
    const auto batch = gate.add({}), slow = gate.add({.slo = 50ms}), fast = gate.add({.slo = 5ms});
    gate.launched(batch, 100us, begin);
    CHECK_FALSE(gate.ask(batch, 150us, begin).goes);  // beside a goal, little is in flight
    gate.arrived(slow, begin);
    CHECK_FALSE(gate.ask(slow, 10us, begin).goes);
    gate.arrived(fast, begin + 1ms);
    CHECK_FALSE(gate.ask(fast, 10us, begin + 1ms).goes);
    gate.finished(batch, 100us, 100us, begin + 1ms);
    CHECK(gate.ask(batch, 10us, begin + 1ms).held_by == slow);
    CHECK(gate.ask(slow, 10us, begin + 1ms).held_by == fast);
    CHECK(gate.ask(fast, 10us, begin + 1ms).goes);
    gate.launched(fast, 10us, begin + 1ms);
    gate.finished(fast, 10us, 10us, begin + 1ms);
    CHECK(gate.ask(slow, 10us, begin + 1ms).again == begin + 1ms + 50us);  // its turn, for a pause
    CHECK(gate.ask(slow, 10us, begin + 1050us).goes);
}

TEST_CASE("a goal counts from its request's arrival, whatever leaves first", "[launch_gate]") {
    launch_gate gate;
    const auto a = gate.add({.slo = 10ms}), b = gate.add({.slo = 8ms});
    gate.arrived(a, begin);
    gate.arrived(a, begin + 3ms);
    gate.arrived(b, begin + 3ms);  // due a millisecond behind the first of `a`, and two before the second
    const auto first_of_both = [&] {
        (void)gate.ask(a, 10us, begin + 4ms);
        return gate.ask(b, 10us, begin + 4ms).goes ? b : a;
    };
    SECTION("the second") {
        gate.left(a, begin + 4ms, begin + 3ms);
        gate.launched(a, 10us, begin + 4ms);  // and asks anew
        (void)gate.ask(b, 10us, begin + 4ms);
        gate.finished(a, 10us, 10us, begin + 4ms);
        CHECK(first_of_both() == a);
    }
    SECTION("the first") {
        gate.left(a, begin + 4ms, begin);
        CHECK(first_of_both() == b);
    }
    SECTION("the launches in flight are no request") {
        gate.left(a, begin + 4ms);
        gate.occupied(a, begin);
        CHECK(first_of_both() == b);
    }
}

TEST_CASE("a goal that changes counts at once", "[launch_gate]") {
    launch_gate gate;
    const auto a = gate.add({.slo = 10ms}), b = gate.add({.slo = 8ms});
    gate.launched(a, 10us, begin);
    CHECK_FALSE(gate.ask(b, 10us, begin).goes);
    CHECK(gate.ask(a, 10us, begin).held_by == b);
    gate.change(b, {}, begin);
    CHECK(gate.ask(a, 10us, begin).goes);
    gate.change(a, {}, begin);  // nobody has a goal any more, nor a share: side by side
    CHECK(gate.ask(b, 10us, begin).goes);
}

/// A device that runs one launch at a time, in order, and clients with work.
struct device_rig {
    struct client {
        launch_gate::client id;
        ns takes{};
        ns asked{};           // of work, so far
        instant due = never;  // of the request that is there
        ns left{};            // of it, not launched yet
        instant waits_since = never;
        ns used{};
    };
    launch_gate gate{{.longest_hold = 1h}};
    std::vector<client> clients{};
    std::deque<std::size_t> flight{};
    instant now = begin, ends = never;
    ns latest{ns::min()};  // by which a request was over behind its due time

    void add(const launch_client_options& o, ns takes) { clients.push_back({.id = gate.add(o), .takes = takes}); }
    void request(std::size_t n, ns work, ns slo) {
        client& c = clients[n];
        gate.arrived(c.id, now);
        c.due = now + slo;
        c.left = work;
    }
    /// Clients ask, and the device goes on by a step.
    void step() {
        for (std::size_t n = 0; n < clients.size(); ++n) {
            client& c = clients[n];
            while (c.left > ns{0}) {
                if (c.waits_since == never) c.waits_since = now;
                if (!gate.ask(c.id, c.takes, now, c.waits_since).goes) break;
                c.waits_since = never;
                gate.launched(c.id, c.takes, now);
                flight.push_back(n);
                c.left -= c.takes;
            }
        }
        if (ends == never && !flight.empty()) ends = now + clients[flight.front()].takes;
        now += 5us;
        if (now < ends) return;
        client& c = clients[flight.front()];
        flight.pop_front();
        ends = never;
        c.used += c.takes;
        gate.finished(c.id, c.takes, c.takes, now);
        if (c.left > ns{0} || gate.in_flight(c.id) != ns{0} || c.due == never) return;
        gate.left(c.id, now);
        latest = std::max(latest, now - c.due);
        c.due = never;
    }
};

TEST_CASE("requests are over by their goals beside clients that always have work", "[launch_gate]") {
    const std::uint64_t seed = support::seed(1);
    CAPTURE(seed);
    const bool with_shares = GENERATE(false, true);
    sim::random any(seed);
    device_rig r;
    const auto weight = [&](std::uint32_t w) { return with_shares ? w : 0U; };
    r.add({.weight = weight(40), .slo = 20ms}, 50us);
    r.add({.weight = weight(30), .slo = 6ms}, 20us);
    r.add({.weight = weight(30)}, 100us);  // always has work
    r.clients[2].left = 1h;
    std::array<instant, 2> next{begin, begin};
    int requests = 0;
    while (r.now < begin + 4s) {
        for (const std::size_t n : {0U, 1U}) {
            if (r.clients[n].due != never || r.now < next[n]) continue;
            // Within its share, with room for what is in flight and for turns.
            const ns work = any.between(100us, n == 0 ? 5000us : 1000us);
            next[n] = r.now + work * 5;
            r.request(n, work, n == 0 ? 20ms : 6ms);
            ++requests;
        }
        r.step();
    }
    CHECK(requests > 800);
    CHECK(r.latest <= ns{0});
    CHECK(r.clients[2].used > 1s);  // which has what they leave
}

TEST_CASE("a client that floods its queue misses its own goal, not its neighbour's", "[launch_gate]") {
    device_rig r;
    r.add({.weight = 30, .slo = 1ms}, 50us);
    r.add({.weight = 70, .slo = 20ms}, 50us);
    r.request(0, 1h, 1ms);  // far more than its share
    int requests = 0;
    for (instant next = begin; r.now < begin + 4s;) {
        if (r.clients[1].due == never && r.now >= next) {
            next = r.now + 10ms;
            r.request(1, 5ms, 20ms);
            ++requests;
        }
        r.step();
    }
    CHECK(requests > 350);
    CHECK(r.latest <= ns{0});
}

TEST_CASE("beside a goal, clients that always have work get their shares in the long run", "[launch_gate]") {
    device_rig r;
    r.add({.weight = 30, .slo = 5ms}, 50us);
    r.add({.weight = 60}, 20us);
    r.add({.weight = 10}, 100us);
    for (std::size_t n = 0; n < 3; ++n) r.request(n, 1h, 5ms);
    while (r.now < begin + 3s) r.step();  // a client without a goal has a second's patience
    const std::array<ns, 3> then{r.clients[0].used, r.clients[1].used, r.clients[2].used};
    while (r.now < begin + 8s) r.step();
    const auto part = [&](std::size_t n) { return in_seconds(r.clients[n].used - then[n]) / 5; };
    CHECK(part(0) == Approx(0.3).margin(0.005));
    CHECK(part(1) == Approx(0.6).margin(0.005));
    CHECK(part(2) == Approx(0.1).margin(0.005));
}

// ---- quotas and soft caps

TEST_CASE("a spent quota holds its client until the quota refills", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 1h}};
    const auto a = gate.add({.quota = {.time = 2ms, .each = 100ms}});
    gate.launched(a, 2ms, begin);
    CHECK(gate.ask(a, 10us, begin).goes);  // spent to the last, and not beyond
    gate.launched(a, 1ms, begin);
    const auto held = gate.ask(a, 10us, begin + 3ms);
    CHECK_FALSE(held.goes);
    CHECK(held.own);
    CHECK(held.again == begin + 50ms);
    gate.finished(a, 2ms, 2ms, begin + 3ms);
    gate.finished(a, 1ms, 500us, begin + 3ms);  // less than predicted
    CHECK(gate.ask(a, 10us, begin + 3ms).again == begin + 25ms);
    CHECK_FALSE(gate.ask(a, 10us, begin + 25ms - 1ns).goes);
    CHECK(gate.ask(a, 10us, begin + 25ms).goes);

    const instant later = begin + 10s;  // it has saved up its quota, and no more
    gate.launched(a, 2ms + 1us, later);
    CHECK_FALSE(gate.ask(a, 10us, later).goes);
    gate.finished(a, 2ms + 1us, 2ms + 1us, later);
    const auto above = gate.add({.level = 1});
    gate.arrived(above, later);
    CHECK(gate.ask(above, 10us, later).goes);
    CHECK(gate.ask(a, 10us, later + 1ms).held_by == above);  // has some of its quota again, and waits for its level
}

TEST_CASE("a launch that only time can let go says so, and when to ask again", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 20ms}};
    const auto a = gate.add({.quota = {1ms, 10ms}});
    gate.launched(a, 5ms, begin);
    const auto held = gate.ask(a, 10us, begin + 30ms, begin + 25ms);
    CHECK(held.by_time);
    CHECK(held.again == begin + 40ms);
    const auto longest = gate.ask(a, 10us, begin + 1ms, begin + 1ms);
    CHECK(longest.by_time);
    CHECK(longest.again == begin + 21ms);
    CHECK(gate.ask(a, 10us, longest.again, begin + 1ms).forced);

    const auto hard = gate.add({.level = 1, .cap = share::of_permille(100)});
    const auto soft = gate.add({.level = 1, .cap = share::of_permille(100), .soft_cap = true});
    const auto other = gate.add({.level = 1});
    for (const auto c : {hard, soft, other}) gate.launched(c, 10ms, begin);
    CHECK(gate.ask(hard, 10us, begin).by_time);
    CHECK_FALSE(gate.ask(soft, 10us, begin).goes);
    CHECK_FALSE(gate.ask(soft, 10us, begin).by_time);  // the end of the other one's launches lets it go
    const auto below = gate.ask(a, 10us, begin + 50ms);
    CHECK_FALSE(below.goes);
    CHECK_FALSE(below.by_time);
}

TEST_CASE("beside a soft cap, a client that has spent its quota, too, goes on only after a time", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 1h}};
    const auto a = gate.add({.cap = share::of_permille(10), .soft_cap = true, .quota = {1ms, 10ms}});
    const auto other = gate.add({});
    gate.launched(a, 11ms, begin);
    gate.launched(other, 10us, begin);
    const auto held = gate.ask(a, 10us, begin);
    CHECK_FALSE(held.goes);
    CHECK(held.by_time);
    CHECK(held.again == begin + 100ms);  // when it has quota again
    gate.launched(a, 1ms, begin + 100ms);
    gate.finished(a, 12ms, 12ms, begin + 100ms);
    const auto later = gate.ask(a, 10us, begin + 110ms);
    CHECK_FALSE(later.goes);
    CHECK_FALSE(later.by_time);  // the end of the other one's launches lets it go
    gate.finished(other, 10us, 10us, begin + 110ms);
    CHECK(gate.ask(a, 10us, begin + 110ms).goes);
}

TEST_CASE("quotas far below and above a millionth of the time are kept", "[launch_gate]") {
    struct row {
        launch_quota quota;
        ns least, most;  // in ten hours of launches of a millisecond
    };
    for (const auto& [quota, least, most] :
         {row{{1ms, 1h}, 10ms, 12ms}, row{{7ms, 1h}, 75ms, 78ms}, row{{0ms, 1s}, 1ms, 1ms}}) {
        launch_gate gate({.longest_hold = 1000h});
        const auto a = gate.add({.quota = quota});
        ns used{};
        for (instant now = begin; now < begin + 10h;) {
            const auto answer = gate.ask(a, 1ms, now);
            if (!answer.goes) {
                now = std::max(answer.again, now + 1ms);
                continue;
            }
            gate.launched(a, 1ms, now);
            now += 1ms;
            gate.finished(a, 1ms, 1ms, now);
            used += 1ms;
        }
        CAPTURE(quota.time.count(), used.count());
        CHECK(used >= least);
        CHECK(used <= most);
    }
}

TEST_CASE("a launch that goes since it was held for long is charged beyond a soft cap, too", "[launch_gate]") {
    launch_gate gate({.longest_hold = 100ms});
    const auto a = gate.add({.cap = share::of_permille(100), .soft_cap = true}), other = gate.add({});
    gate.launched(a, 100ms, begin);  // a second's worth
    gate.finished(a, 100ms, 100ms, begin);
    gate.launched(other, 20us, begin);
    const auto then = begin + 100ms;
    REQUIRE_FALSE(gate.ask(a, 10ms, then, begin + 1ms).goes);
    REQUIRE(gate.ask(a, 10ms, then, begin).forced);
    gate.launched(a, 10ms, then);
    gate.finished(a, 10ms, 10ms, then);
    CHECK(gate.ask(a, 10ms, then).again == begin + 1095ms);  // less the 5 ms that it may have at once
}

TEST_CASE("a client above that has spent its quota is in nobody's way", "[launch_gate]") {
    launch_gate gate;
    const auto above = gate.add({.level = 1, .quota = {1ms, 10ms}}), batch = gate.add({.weight = 1});
    gate.arrived(above, begin);
    gate.launched(above, 2ms, begin);
    CHECK(gate.ask(batch, 10us, begin).held_by == above);  // that is in flight
    gate.finished(above, 2ms, 2ms, begin + 2ms);
    CHECK(gate.ask(batch, 10us, begin + 2ms).goes);
    CHECK(gate.ask(batch, 10us, begin + 10ms).held_by == above);  // which begins again
}

TEST_CASE("another quota is in force at once, and what was overdrawn is made up for", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 1h}};
    const auto a = gate.add({.quota = {1ms, 10ms}});
    gate.launched(a, 3ms, begin);
    CHECK(gate.ask(a, 10us, begin).again == begin + 20ms);
    gate.change(a, {.quota = {1ms, 100ms}}, begin);
    CHECK(gate.ask(a, 10us, begin).again == begin + 200ms);
    gate.change(a, {.quota = {10ms, 10ms}}, begin);
    CHECK(gate.ask(a, 10us, begin).again == begin + 2ms);
    gate.change(a, {}, begin);
    CHECK(gate.ask(a, 10us, begin).goes);
}

TEST_CASE("a soft cap holds while others want the device, and lends otherwise", "[launch_gate]") {
    launch_gate gate{{.longest_hold = 1h}};
    const auto a = gate.add({.cap = share::of_permille(100), .soft_cap = true}), b = gate.add({});
    gate.launched(a, 1ms, begin);
    gate.finished(a, 1ms, 1ms, begin + 1ms);
    REQUIRE(gate.ask(a, 10us, begin + 1ms).goes);  // beyond its cap: nobody else is there
    gate.launched(a, 100ms, begin + 1ms);
    gate.finished(a, 100ms, 50ms, begin + 2ms);
    gate.launched(b, 20us, begin + 2ms);
    CHECK(gate.ask(a, 10us, begin + 2ms).again == begin + 5ms);  // what was lent isn't charged
    gate.finished(b, 20us, 20us, begin + 2ms);
    CHECK(gate.ask(a, 10us, begin + 2ms).goes);
    gate.launched(b, 20us, begin + 2ms);
    CHECK(gate.ask(a, 10us, begin + 5ms).goes);  // within its cap
}

TEST_CASE("a changed level counts at once", "[launch_gate]") {
    launch_gate gate;
    const auto a = gate.add({.weight = 1}), b = gate.add({.level = 1, .weight = 1});
    gate.arrived(b, begin);
    CHECK(gate.ask(a, 10us, begin).held_by == b);
    for (int i = 0; i < 100; ++i) {
        gate.launched(b, 1ms, begin);
        gate.finished(b, 1ms, 1ms, begin);
    }
    gate.change(b, {.weight = 1}, begin);
    CHECK(gate.ask(a, 10us, begin).goes);
    CHECK(gate.ask(b, 10us, begin).goes);  // what it had at the other level isn't held against it
    gate.change(a, {.level = 1}, begin);
    CHECK(gate.ask(a, 10us, begin).goes);
    gate.arrived(a, begin);
    CHECK_FALSE(gate.ask(b, 10us, begin).goes);
}

// ---- all rules together

/// Device time that a client may have, as a bucket that runs full: what quotas and caps are,
/// written down once more.
struct bucket {
    double time = 0, each = 0;  // in ns; none if `each` is 0
    double has = 0;
    instant seen = begin;

    void run(instant now) {
        if (each > 0) has += static_cast<double>((now - seen).count()) * time / each;
        seen = now;
    }
    void take(ns cost) { has = std::min(has, time) - static_cast<double>(cost.count()); }
    void correct(ns delta) { has -= static_cast<double>(delta.count()); }
    [[nodiscard]] bool surely_spent() const { return each > 0 && has < -16; }
    [[nodiscard]] bool surely_left() const { return each <= 0 || has > 16; }
};

/// Clients with any mixture of level, weight, cap, quota and goal, which ask, launch, change and go
/// as dice fall.
struct mixture {
    struct client {
        bool used = false;
        launch_client_options how{};
        bucket quota{}, cap{};
        std::deque<instant> requests{};
        instant seen{}, waits_since = never;
        bool waits = false;  // for others, when it asked last
        instant from{};      // no earlier is its work due
        instant due{};       // when it asked last
        bool paced = true;
        bool told = false;  // it asked while a client of its level had a goal
        ns predicted{}, in_flight{};
        std::deque<ns> flight{};
    };
    static constexpr launch_gate_options options{.linger = 10us, .ahead = 300us, .pause = 20us, .longest_hold = 50ms};
    sim::random any;
    launch_gate gate{options};
    std::array<client, 6> clients{};
    instant now = begin;
    std::uint64_t launches = 0, by_quota = 0, by_due = 0, forced = 0;

    [[nodiscard]] launch_client_options some_options() {
        static constexpr std::array caps{1000U, 1000U, 500U, 250U};
        static constexpr std::array quotas{launch_quota{}, launch_quota{}, launch_quota{2ms, 10ms},
                                           launch_quota{1ms, 4ms}};
        static constexpr std::array goals{ns{0}, ns{0}, ns{4'000'000}, ns{20'000'000}};
        launch_client_options o{.level = static_cast<int>(any.below(2))};
        o.weight = static_cast<std::uint32_t>(any.below(2) * any.below(9));
        o.cap = share::of_permille(caps[any.below(4)]);
        o.soft_cap = any.below(3) == 0;
        o.quota = quotas[any.below(4)];
        o.slo = goals[any.below(4)];
        return o;
    }
    void come(std::uint32_t n) {
        client& c = clients[n];
        c = {.used = true, .how = some_options()};
        REQUIRE(gate.add(c.how) == n);
        limit(c);
        forget_pace(c.how.level);
        forget_dues();
    }
    // What is owed stays, and what is saved up is worth the new rate.
    void become(bucket& b, ns time, ns each) const {
        const bucket before = b;
        const auto whole = static_cast<double>(time.count()), span = static_cast<double>(each.count());
        b = {.time = whole, .each = span, .has = 1e15, .seen = now};  // more than it keeps
        if (before.each <= 0 || each == ns{0}) return;
        b.has = before.has < 0 ? before.has : before.has / before.time * before.each * whole / span;
    }
    void limit(client& c) const {
        const bool capped = c.how.cap < share::whole();
        become(c.quota, c.how.quota.time, c.how.quota.each);
        become(c.cap, ns{5ms} * c.how.cap.permille() / 1000, capped ? ns{5ms} : ns{0});
    }

    [[nodiscard]] bool is_higher_there(const client& c) const {
        return std::ranges::any_of(clients, [&](const client& o) {
            const bool can = o.in_flight != ns{0} || (o.quota.surely_left() && o.cap.surely_left());
            return o.used && o.how.level > c.how.level && can &&
                   (!o.requests.empty() || (o.seen != instant{} && now - o.seen < options.linger));
        });
    }
    [[nodiscard]] instant due(const client& c) const {
        if (c.how.slo == ns{0}) return c.waits_since + options.patience;
        return (c.requests.empty() ? c.waits_since : c.requests.front()) + c.how.slo;
    }
    [[nodiscard]] bool has_goals(int level) const {
        return std::ranges::any_of(
            clients, [&](const client& o) { return o.used && o.how.level == level && o.how.slo != ns{0}; });
    }
    // Another client of the level waits whose work counts as due before.
    [[nodiscard]] bool is_due_later(const client& c) const {
        const instant at = std::max(due(c), c.from);
        return c.paced && has_goals(c.how.level) && std::ranges::any_of(clients, [&](const client& o) {
                   return &o != &c && o.used && o.how.level == c.how.level && o.waits && o.told && o.paced &&
                          std::max(o.due, o.from) < at;
               });
    }
    void forget_dues() {
        for (client& o : clients) o.told = o.told && has_goals(o.how.level);
    }
    // Of levels that never had shares the pace of clients is known: that of the device.
    void forget_pace(int level) {
        const auto on = [&](const client& o) { return o.used && o.how.level == level; };
        if (std::ranges::none_of(clients, [&](const client& o) { return on(o) && o.how.weight != 0; })) return;
        for (client& o : clients)
            if (on(o)) o.paced = false;
    }
    void ask(std::uint32_t n) {
        client& c = clients[n];
        if (c.waits_since == never) {
            c.predicted = any.between(1us, any.below(10) == 0 ? 700us : 60us);
            c.waits_since = now;
        }
        const bool soft = c.how.soft_cap && c.cap.each > 0;
        const bool spent = c.quota.surely_spent() || (!soft && c.cap.surely_spent());
        if (has_goals(c.how.level) && !c.waits && c.in_flight == ns{0}) c.from = std::max(c.from, now);
        const bool later = is_due_later(c);
        const launch_answer a = gate.ask(n, c.predicted, now, c.waits_since);
        if (spent || later || is_higher_there(c)) REQUIRE((!a.goes || a.forced));
        if (!a.goes && a.own && a.held_by == n) {
            REQUIRE_FALSE((c.quota.surely_left() && c.cap.surely_left()));
            REQUIRE(a.again > now);
        }
        c.told = has_goals(c.how.level);
        c.due = due(c);
        c.waits = !a.goes && c.quota.surely_left() && c.cap.surely_left();
        by_quota += !a.goes && c.quota.surely_spent();
        by_due += later;
        forced += a.forced;
        if (a.goes) launch(n);
    }
    void launch(std::uint32_t n) {
        client& c = clients[n];
        const bool lends = c.how.soft_cap && c.cap.each > 0 && c.cap.has < 0;
        gate.launched(n, c.predicted, now);
        c.quota.take(c.predicted);
        if (!lends) c.cap.take(c.predicted);
        if (has_goals(c.how.level)) c.from = std::max(c.from, now - 5ms) + c.predicted;
        c.flight.push_back(c.predicted);
        c.in_flight += c.predicted;
        c.waits_since = never;
        c.waits = false;
        c.seen = now;
        ++launches;
    }
    void finish(std::uint32_t n) {
        client& c = clients[n];
        if (c.flight.empty()) return;
        const ns predicted = c.flight.front();
        // Beside a soft cap predictions are right: what is lent of a mixture isn't told apart.
        const ns measured = c.how.soft_cap ? predicted : any.between(1us, 2 * predicted + 1us);
        c.flight.pop_front();
        c.in_flight -= predicted;
        c.seen = now;
        gate.finished(n, predicted, measured, now);
        c.quota.correct(measured - predicted);
        c.cap.correct(measured - predicted);
        if (has_goals(c.how.level)) c.from += measured - predicted;
    }
    void request(std::uint32_t n) {
        client& c = clients[n];
        const bool comes = any.below(3) == 0 && c.requests.size() < 8;
        if (!comes && c.requests.empty()) return;
        c.seen = now;
        if (comes) {
            gate.arrived(n, now);
            return c.requests.push_back(now);
        }
        const auto which = c.requests.begin() + static_cast<std::ptrdiff_t>(any.below(c.requests.size()));
        gate.left(n, now, *which);
        c.requests.erase(which);
    }
    // Only while nothing is open: else a goal's arrivals from before it had one would count for the
    // test alone.
    void change(std::uint32_t n) {
        client& c = clients[n];
        if (!c.requests.empty() || c.waits_since != never || c.in_flight != ns{0}) return;
        c.how = some_options();
        gate.change(n, c.how, now);
        limit(c);
        forget_pace(c.how.level);
        forget_dues();
    }
    void step() {
        now += any.between(0us, 20us);
        for (client& c : clients) {
            c.quota.run(now);
            c.cap.run(now);
        }
        const auto n = static_cast<std::uint32_t>(any.below(clients.size()));
        if (!clients[n].used) {
            const auto unused = std::ranges::find(clients, false, &client::used);
            return come(static_cast<std::uint32_t>(unused - clients.begin()));
        }
        switch (any.below(40)) {
            case 0:
            case 1: return request(n);
            case 2: return change(n);
            case 3:
                if (any.below(20) != 0) return;
                gate.remove(n);
                clients[n] = {};
                return forget_dues();
            default: any.below(2) == 0 ? finish(n) : ask(n);
        }
    }
};

TEST_CASE("goals, quotas, caps, shares and levels, mixed at random, keep every rule", "[launch_gate][sweep]") {
    const std::uint64_t seed = support::seed(1);
    CAPTURE(seed);
    mixture all{sim::random(seed)};
    while (all.launches < 300'000) all.step();
    CHECK(all.by_quota > 1000);  // each rule was asked for something
    CHECK(all.by_due > 1000);
    CHECK(all.forced < all.launches / 10);
}

}  // namespace launch_goals_tests
