// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The purpose of each policy.
#include <array>
#include <chrono>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/units.hpp>

#include "policy/every_policy.hpp"
#include "support/catch.hpp"
#include "support/simulated_limiter.hpp"

namespace policies_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;

namespace {

constexpr instant start{};
constexpr client_id a{0, 1}, b{1, 1}, c{2, 1};

/// Tenants that always have work, of kernels of 200 us.
template <compute_policy Policy>
struct saturated {
    explicit saturated(Policy p = {}) : limiter(world, {0}, {.depth = 2}, std::move(p)) {}

    client_id add(const client_settings& s, bool begins = true) {
        const auto id = limiter.add(s);
        limiter.client(id).on_end = [this](const support::simulated_end& e) {
            if (limiter.client(e.client).backlogged) limiter.submit(e.client, {.length = 200us});
        };
        if (begins) begin(id);
        return id;
    }
    void begin(client_id id) {
        limiter.client(id).backlogged = true;
        for (int i = 0; i < 16; ++i) limiter.submit(id, {.length = 200us});  // many more than may be in flight
    }
    void stop(client_id id) { limiter.client(id).backlogged = false; }
    /// Parts of the device in the next second.
    std::vector<double> next_second(const std::vector<client_id>& of) {
        std::vector<double> parts;
        for (const auto id : of) parts.push_back(-seconds(id));
        world.run_until(world.now() + 1s);
        for (std::size_t i = 0; i < of.size(); ++i) parts[i] += seconds(of[i]);
        return parts;
    }
    double seconds(client_id id) { return std::chrono::duration<double>(limiter.client(id).device_time).count(); }

    sim::world world;
    support::simulated_limiter<Policy> limiter;
};

auto about(double part) { return Approx(part).margin(0.008); }

}  // namespace

TEST_CASE("fifo serves in the order of arrival", "[policy]") {
    fifo p;
    for (const auto id : {a, b, c}) p.add(id, {});
    p.wake(a, {.arrival = start + 3ms}, start + 3ms);
    p.wake(b, {.arrival = start + 1ms}, start + 3ms);
    p.wake(c, {.arrival = start + 2ms}, start + 3ms);
    CHECK(p.pick(start + 3ms) == b);
    p.serve(b, 1ms, start + 3ms);
    p.wake(b, {.arrival = start + 4ms}, start + 4ms);
    CHECK(p.pick(start + 4ms) == c);
    p.change(a, {.level = {1}});
    CHECK(p.pick(start + 4ms) == a);
}

TEST_CASE("fair divides by those present, whatever their weights", "[policy]") {
    saturated<fair> s;
    const auto x = s.add({.weight = 1_pct}), y = s.add({.weight = 90_pct}), z = s.add({.weight = 9_pct}, false);
    auto parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.5));
    CHECK(parts[1] == about(0.5));
    s.begin(z);
    parts = s.next_second({x, y, z});
    for (const auto part : parts) CHECK(part == about(1 / 3.0));
}

TEST_CASE("hard_share is a part of the device and never more", "[policy]") {
    saturated<hard_share> s;
    const auto x = s.add({.weight = 30_pct}), y = s.add({.weight = 0.5_pct});
    auto parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.3));
    CHECK(parts[1] == Approx(0.005).margin(0.001));
    s.stop(x);
    (void)s.next_second({});
    CHECK(s.next_second({y})[0] == Approx(0.005).margin(0.001));
}

TEST_CASE("hard shares that sum over the whole are refused, and leave nothing behind", "[policy]") {
    limiter_core<hard_share> core;
    const auto x = core.add({.weight = 70_pct}), y = core.add({.weight = 30_pct});
    const auto refused = [&](const client_settings& s) {
        try {
            (void)core.add(s);
            return false;
        } catch (const operation_error& e) {
            CHECK(e.figures().asked == s.weight.permille());
            CHECK(e.figures().left == 0);
            return e.code() == errc::share_exceeded;
        }
    };
    CHECK(refused({.weight = 0.1_pct}));
    CHECK_NOTHROW(core.remove(core.add({.weight = 100_pct, .level = {1}})));  // another level promises anew
    CHECK(core.change(x, {.weight = 70.1_pct}) == errc::share_exceeded);
    CHECK(core.settings(x).weight == 70_pct);
    CHECK(core.change(x, {.weight = 69.9_pct}) == errc::none);
    CHECK_NOTHROW(core.remove(core.add({.weight = 0.1_pct})));
    CHECK(core.change(y, {.weight = 30.1_pct}) == errc::none);
    CHECK(refused({.weight = 0.1_pct}));
    core.remove(x);
    CHECK_NOTHROW(core.add({.weight = 69.9_pct}));
}

TEST_CASE("equal_share is 1/N for N, alone or not, and the N+1st is refused", "[policy]") {
    saturated<equal_share> s(equal_share(4));
    const auto x = s.add({}), y = s.add({}, false), z = s.add({}, false);
    (void)s.add({}, false);
    CHECK(s.next_second({x})[0] == about(0.25));
    s.begin(y);
    s.begin(z);
    for (const auto part : s.next_second({x, y, z})) CHECK(part == about(0.25));
    CHECK_THROWS_AS(s.limiter.core().add({}), operation_error);
}

TEST_CASE("soft caps hold under contention, and only then", "[policy]") {
    saturated<soft_share> s;
    const auto x = s.add({.weight = 30_pct}), y = s.add({.weight = 70_pct}, false);
    CHECK(s.next_second({x})[0] == about(1.0));
    s.begin(y);
    const auto parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.3));  // what it borrowed isn't held against it
    CHECK(parts[1] == about(0.7));
    s.stop(y);
    (void)s.next_second({});
    CHECK(s.next_second({x})[0] == about(1.0));
}

namespace {

/// What `borrower` has of 100 ms in which another has work too, after it has had half a second of
/// the device alone. Each of its submissions is predicted to take 1 us, and takes 1 ms.
template <compute_policy Policy>
double part_after_borrowing(Policy policy, const client_settings& borrower, const client_settings& other) {
    limiter_core<Policy> core({.depth = 1}, std::move(policy));
    const std::array ids{core.add(borrower), core.add(other)};
    std::array<int, 2> served{};
    instant now{};
    const auto run = [&](std::size_t clients, ns length) {
        served = {};
        const auto arrive = [&](client_id who) { core.arrive(who, now, {.head = {.cost = 1us, .arrival = now}}); };
        for (std::size_t i = 0; i < 2 * clients; ++i) arrive(ids[i / 2]);  // one waits whenever one is served
        for (const auto end = now + length; now < end;) {
            const auto admitted = core.next(now);
            if (!admitted) {
                now = std::min(core.resume_at(), end);
                continue;
            }
            arrive(admitted->client);
            core.complete(*admitted, 1ms);
            now += 1ms;
            ++served[admitted->client == ids[0] ? 0 : 1];
        }
        for (std::size_t i = 0; i < 2 * clients; ++i) core.withdraw(ids[i / 2], now);
    };
    run(1, 500ms);
    CHECK(served[0] >= 499);  // lent to it
    run(2, 100ms);
    return served[0] / 100.0;
}

}  // namespace

TEST_CASE("lent time costs nothing, though the work takes longer than was predicted", "[policy][promises]") {
    const client_settings borrower{.weight = 30_pct, .level = {1}}, other{.weight = 70_pct, .level = {1}};
    const auto third = Approx(0.3).margin(0.03);
    CHECK(part_after_borrowing(soft_share{}, borrower, other) == third);
    CHECK(part_after_borrowing(any_policy(soft_share{}), borrower, other) == third);
    CHECK(part_after_borrowing(policy_tree<weighted_fair, soft_share>{}, borrower, other) == third);
    CHECK(part_after_borrowing(strict_priority<soft_share>(share::whole()), borrower, other) == third);
    CHECK(part_after_borrowing(strict_priority<>(80_pct), borrower, {}) == Approx(0.8).margin(0.07));
}

TEST_CASE("a cap over weights: hard and soft side by side", "[policy]") {
    saturated<capped<weighted_fair>> s;
    const auto hard = s.add({.weight = 50_pct, .cap = 20_pct}), easy = s.add({.cap = 10_pct, .soft_cap = true});
    auto parts = s.next_second({hard, easy});
    CHECK(parts[0] == about(0.2));
    CHECK(parts[1] == about(0.8));  // nobody else wants the rest
    const auto free = s.add({.weight = 50_pct});
    parts = s.next_second({hard, easy, free});
    CHECK(parts[0] == about(0.2));
    CHECK(parts[1] == about(0.1));
    CHECK(parts[2] == about(0.7));
}

TEST_CASE("a client that is raised from a small cap doesn't pay for its past", "[policy]") {
    saturated<hard_share> s;
    const auto x = s.add({.weight = 0.1_pct});
    (void)s.next_second({});
    REQUIRE(s.limiter.core().change(x, {.weight = 50_pct}) == errc::none);
    s.limiter.pump();
    CHECK(s.next_second({x})[0] == about(0.5));
}

TEST_CASE("strict priority: the high class first, up to its cap", "[policy]") {
    saturated<strict_priority<>> s(strict_priority<>(80_pct));
    const auto high = s.add({.weight = 10_pct, .level = {1}}), higher = s.add({.weight = 10_pct, .level = {2}}, false),
               low = s.add({.weight = 100_pct});
    auto parts = s.next_second({high, low});
    CHECK(parts[0] == about(0.8));
    CHECK(parts[1] == about(0.2));
    s.begin(higher);  // within the class, levels go on counting
    parts = s.next_second({higher, high, low});
    CHECK(parts[0] == about(0.8));
    CHECK(parts[2] == about(0.2));
    s.stop(low);
    (void)s.next_second({});
    CHECK(s.next_second({higher})[0] == about(1.0));  // nobody else wants the rest
    s.begin(low);
    CHECK(s.next_second({low})[0] == about(0.2));
    (void)s.limiter.core().change(low, {.level = {1}});  // joins the class
    s.stop(higher);
    (void)s.next_second({});
    CHECK(s.next_second({low})[0] > 0.5);
}

TEST_CASE("earliest deadline first, by objective and by the work's own deadline", "[policy]") {
    limiter_core<earliest_deadline> core{{.depth = 1}};
    const auto slow = core.add({.slo = 100ms}), quick = core.add({.slo = 10ms}), none = core.add({});
    core.arrive(none, start);
    core.arrive(slow, start);
    core.arrive(quick, start + 50ms);
    auto next = [&, now = start + 50ms]() mutable {
        const auto g = core.next(now).value();
        core.complete(g, 1ms);
        now += 1ms;
        return g.client;
    };
    CHECK(next() == quick);
    core.arrive(none, start + 51ms);  // behind one that is due after a second
    core.arrive(quick, start + 95ms);
    CHECK(next() == slow);
    core.arrive(slow, start + 95ms, {.head = {.arrival = start + 95ms, .deadline = start + 96ms}});
    CHECK(next() == slow);
    CHECK(next() == quick);
    CHECK(next() == none);
}

TEST_CASE("a tenant that floods its line loses its own deadlines, not its neighbours theirs", "[policy]") {
    saturated<earliest_deadline> s;
    const auto flood = s.add({.weight = 50_pct, .slo = 1ms}), calm = s.add({.weight = 50_pct, .slo = 5ms}, false);
    for (int i = 0; i < 5000; ++i) s.limiter.submit(flood, {.length = 200us});
    std::uint64_t late = 0, done = 0;
    s.limiter.client(calm).on_end = [&](const support::simulated_end& e) {
        ++done;
        if (e.end - e.arrival > 5ms) ++late;
    };
    for (int i = 0; i < 900; ++i)  // 36 % of the device
        s.world.at(start + 10ms + i * 1ms, [&] {
            s.limiter.submit(calm, {.length = 200us});
            s.limiter.submit(calm, {.length = 160us});
        });
    s.world.run_until(start + 1s);
    CHECK(done == 1800);
    CHECK(late == 0);
}

TEST_CASE("shortest remaining first, until somebody is too far behind", "[policy]") {
    shortest_remaining p(10ms);
    p.add(a, {.weight = 50_pct});
    p.add(b, {.weight = 50_pct});
    p.wake(a, {.remaining = 100ms}, start);
    p.wake(b, {.remaining = 2ms}, start);
    int in_a_row = 0;
    for (; p.pick(start) == b && in_a_row < 1000; ++in_a_row) {
        p.serve(b, 1ms, start);
        p.wake(b, {.remaining = 2ms}, start);
    }
    CHECK(in_a_row == 11);  // a should have had 5 of the 10 ms
    p.wake(a, {.remaining = 1ms}, start);
    CHECK(p.pick(start) == a);
}

TEST_CASE("a tree divides between classes, then within them", "[policy]") {
    using tree = policy_tree<weighted_fair, fair>;
    tree p;
    REQUIRE(p.set_class(0, {.weight = 70_pct}).code == errc::none);
    REQUIRE(p.set_class(1, {.weight = 30_pct}).code == errc::none);
    saturated<tree> s(std::move(p));
    const auto x = s.add({.group = 0}), y = s.add({.group = 1}), z = s.add({.group = 1});
    auto parts = s.next_second({x, y, z});
    CHECK(parts[0] == about(0.7));
    CHECK(parts[1] == about(0.15));
    CHECK(parts[2] == about(0.15));
    s.stop(y);
    (void)s.next_second({});
    parts = s.next_second({x, z});
    CHECK(parts[0] == about(0.7));  // the class's part stays in the class
    CHECK(parts[1] == about(0.3));
    (void)s.limiter.core().change(z, {.group = 0});
    parts = s.next_second({x, z});
    CHECK(parts[0] == about(0.5));
    CHECK(parts[1] == about(0.5));
}

TEST_CASE("a tree refuses a class beyond the last one, and stays as it was", "[policy]") {
    using tree = policy_tree<weighted_fair, fair>;
    tree p;
    const auto refused = [](const failure& why, std::uint32_t group) {
        return why.code == errc::invalid_specification && why.because == reason::count_limit &&
               why.asked == group + std::uint64_t{1} && why.limit == tree::most_classes;
    };
    REQUIRE(p.add(a, {.group = 1}).code == errc::none);
    for (const std::uint32_t group : {tree::most_classes, 0x8000'0000U, 0xffff'ffffU}) {
        CHECK(refused(p.set_class(group, {}), group));
        CHECK(refused(p.set_class(group, {}, fair{}), group));
        CHECK(refused(p.add(b, {.group = group}), group));
        CHECK(refused(p.change(a, {.group = group}), group));
    }
    CHECK(p.change(a, {.group = tree::most_classes - 1}).code == errc::none);
    p.wake(a, {}, start);
    CHECK(p.pick(start) == a);
}

TEST_CASE("a tree says who would go first: the class, or within one the client", "[policy]") {
    policy_tree<weighted_fair, weighted_fair> p;
    REQUIRE(p.set_class(0, {.weight = 70_pct}).code == errc::none);
    REQUIRE(p.set_class(1, {.weight = 30_pct}).code == errc::none);
    REQUIRE(p.add(a, {.group = 0}).code == errc::none);
    for (const auto of_1 : {b, c}) REQUIRE(p.add(of_1, {.group = 1}).code == errc::none);
    p.wake(b, {}, start);
    p.serve(b, 10ms, start);
    p.wake(b, {}, start);
    CHECK(p.before(a, b));
    CHECK(p.before(c, b));
    p.wake(a, {}, start);
    REQUIRE(p.pick(start) == a);
    p.serve(a, 100ms, start);
    p.sleep(a);
    CHECK_FALSE(p.before(a, b));
}

TEST_CASE("a tree gives its classes turns, and their clients, and the parts stay what they are", "[policy]") {
    using tree = policy_tree<weighted_fair, any_policy>;
    for (const bool turns : {false, true}) {
        CAPTURE(turns);
        tree p;
        REQUIRE(p.set_class(0, {.weight = 70_pct}, any_policy(weighted_fair{})).code == errc::none);
        if (turns) p.take_turns();
        REQUIRE(p.set_class(1, {.weight = 30_pct}, any_policy(fair{})).code == errc::none);  // opened later
        const std::array<client_id, 4> all{{{0, 1}, {1, 1}, {2, 1}, {3, 1}}};
        for (const auto who : all) REQUIRE(p.add(who, {.group = who.index / 2}).code == errc::none);
        for (const auto who : all) p.wake(who, {}, start);
        std::array<int, 4> served{};
        int changes = 0, classes = 0;
        client_id before = all[0];
        constexpr int kernels = 20'000;
        for (int i = 0; i < kernels; ++i) {
            const auto now = start + i * 10us;
            const choice next = p.pick(now);
            REQUIRE(next);
            p.serve(*next, 10us, now);
            p.wake(*next, {}, now);
            ++served[next->index];
            changes += *next == before ? 0 : 1;
            classes += next->index / 2 == before.index / 2 ? 0 : 1;
            before = *next;
        }
        // Turns of 100 us, ten kernels, of a class and of a client: one of a client may lie in two
        // of its class.
        CHECK((turns ? changes < kernels / 5 : changes > kernels / 2));
        CHECK((turns ? classes < kernels / 10 : classes > kernels / 2));
        for (const std::size_t n : {0U, 1U}) CHECK(served[n] == Approx(0.35 * kernels).margin(30));
        for (const std::size_t n : {2U, 3U}) CHECK(served[n] == Approx(0.15 * kernels).margin(30));
    }
}

TEMPLATE_LIST_TEST_CASE("a client that is held isn't picked before it wakes, whatever changes", "[policy]",
                        policies::all) {
    TestType p;
    p.add(a, {.weight = 10_pct});
    p.add(b, {.weight = 10_pct});
    p.wake(a, {}, start);
    detail::hold(p, a);
    CHECK_FALSE(p.pick(start));
    for (const int level : {5, -5}) {
        p.change(a, {.weight = 20_pct, .level = {level}, .group = 1});
        CHECK_FALSE(p.pick(start + 1s));
    }
    p.wake(a, {}, start + 1s);
    CHECK(p.pick(start + 1s) == a);
}

TEMPLATE_LIST_TEST_CASE("a client that sleeps after it was held isn't owed the time of its sleep", "[policy]",
                        policies::owing_nothing) {
    TestType p;
    for (const auto id : {a, b}) p.add(id, {.weight = 50_pct});
    instant now = start;
    const auto served = [&] {
        auto next = p.pick(now);
        for (; !next; next = p.pick(now)) now = next.ask_again();
        p.serve(*next, 1ms, now);
        now += 1ms;
        detail::ended(p, 1ms);
        p.wake(*next, {}, now);
        return *next;
    };
    p.wake(a, {}, now);
    detail::hold(p, a);
    p.sleep(a);  // its work was cancelled
    p.wake(b, {}, now);
    for (int i = 0; i < 1000; ++i) CHECK(served() == b);
    p.wake(a, {}, now);
    int of_a = 0;
    for (int i = 0; i < 200; ++i) of_a += served() == a ? 1 : 0;
    CHECK(of_a <= 150);
}

TEST_CASE("a class whose clients have had their caps leaves the device to the others, and comes back", "[policy]") {
    using tree = policy_tree<weighted_fair, any_policy>;
    tree p;
    REQUIRE(p.set_class(0, {.weight = 90_pct}, any_policy(hard_share{})).code == errc::none);
    REQUIRE(p.set_class(1, {.weight = 10_pct}, any_policy(fifo{})).code == errc::none);
    saturated<tree> s(std::move(p));
    const auto x = s.add({.weight = 20_pct, .group = 0}), y = s.add({.group = 1}, false);
    CHECK(s.next_second({x})[0] == about(0.2));
    s.begin(y);
    const auto parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.2));
    CHECK(parts[1] == about(0.8));
}

TEST_CASE("the outer policy of a tree may refuse a class", "[policy]") {
    policy_tree<hard_share, weighted_fair> p;
    CHECK(p.set_class(0, {.weight = 70_pct}).code == errc::none);
    CHECK(p.set_class(1, {.weight = 40_pct}).code == errc::share_exceeded);
    CHECK(p.set_class(1, {.weight = 30_pct}).code == errc::none);
    CHECK(p.add(a, {.group = 2}).code == errc::share_exceeded);  // its class was never set, and wants the whole
    CHECK(p.add(a, {.group = 1}).code == errc::none);
}

namespace {
/// Alone for a second beside a policy `p`, a client borrows beyond its soft cap, each time ten
/// times what was predicted. Then another one, within its cap, has work too: how long until the
/// first is within its cap again?
template <class P>
ns borrowed_is_repaid_after(P p) {
    CHECK(p.add(a, {.weight = 50_pct, .cap = 10_pct, .soft_cap = true}) == errc::none);
    instant now = start;
    const auto goes = [&](client_id who, ns predicted, ns took) {
        const auto lent = gpushare::detail::serve(p, who, predicted, now);
        now += took;
        gpushare::detail::correct(p, who, took - predicted, lent);
        p.wake(who, {.arrival = now}, now);
    };
    p.wake(a, {.arrival = now}, now);
    for (int i = 0; i < 100 && p.pick(now) == a; ++i) goes(a, 1ms, 10ms);
    CHECK(p.add(b, {.weight = 50_pct}) == errc::none);
    p.wake(b, {.arrival = now}, now);
    const auto from = now;
    while (now < from + 10s && p.pick(now) == b) goes(b, 1ms, 1ms);
    return now - from;
}
}  // namespace

TEST_CASE("lent time costs a soft cap nothing, however many trees are above it", "[policy]") {
    using soft = capped<weighted_fair>;
    using tree = policy_tree<weighted_fair, soft>;
    using twice = policy_tree<soft, tree>;
    const auto alone = borrowed_is_repaid_after(soft{});
    CHECK(alone <= 100ms);
    CHECK(borrowed_is_repaid_after(tree{}) == alone);
    CHECK(borrowed_is_repaid_after(policy_tree<weighted_fair, tree>{}) == alone);
    CHECK(borrowed_is_repaid_after(policy_tree<soft, twice>{}) == alone);
    CHECK(borrowed_is_repaid_after(policy_tree<strict_priority<soft>, twice>{}) == alone);
    policy_tree<any_policy, any_policy> any(any_policy(tree{}));
    CHECK(any.set_class(0, {}, any_policy(twice{})) == errc::none);
    CHECK(borrowed_is_repaid_after(std::move(any)) == alone);
    CHECK(borrowed_is_repaid_after(any_policy(policy_tree<tree, any_policy>{})) <= 100ms);
}

TEST_CASE("the policy itself is replaced while work waits and is in flight", "[policy]") {
    saturated<any_policy> s{any_policy(weighted_fair{})};
    const auto x = s.add({.weight = 30_pct}), y = s.add({.weight = 10_pct});
    auto parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.75));
    CHECK(parts[1] == about(0.25));
    const auto replace = [&](any_policy p) {
        const auto why = s.limiter.core().set_policy(p, s.world.now());
        s.limiter.pump();
        return why;
    };
    CHECK(replace(hard_share{}) == errc::none);
    parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.3));
    CHECK(parts[1] == about(0.1));
    CHECK(replace(equal_share{1}) == errc::share_exceeded);  // and hard_share goes on
    parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.3));
    CHECK(replace(fair{}) == errc::none);
    parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.5));
    CHECK(parts[1] == about(0.5));
    CHECK(replace(weighted_fair{}) == errc::none);
    parts = s.next_second({x, y});
    CHECK(parts[0] == about(0.75));
}

namespace {
/// A hard_share whose add() lacks memory for the clients of one tag.
struct forgetful : hard_share {
    failure add(client_id id, const client_settings& s) {
        if (s.tag == 13) throw std::bad_alloc();
        return hard_share::add(id, s);
    }
};
}  // namespace

TEST_CASE("a policy that refuses some client, or lacks memory for it, has none afterwards", "[policy]") {
    saturated<any_policy> s{any_policy(weighted_fair{})};
    const auto x = s.add({.weight = 60_pct}), y = s.add({.weight = 50_pct});
    any_policy p{forgetful{}};
    const auto replace = [&] { return s.limiter.core().set_policy(p, s.world.now()); };
    const auto old_one_goes_on = [&] {
        s.limiter.pump();
        const auto parts = s.next_second({x, y});
        CHECK(parts[0] + parts[1] == about(1));
        const auto weight = [&](client_id id) { return s.limiter.core().settings(id).weight.fraction(); };
        CHECK(parts[0] == about(weight(x) / (weight(x) + weight(y))));
    };
    CHECK(replace() == errc::share_exceeded);
    old_one_goes_on();
    CHECK(s.limiter.core().change(y, {.weight = 40_pct, .tag = 13}) == errc::none);
    CHECK_THROWS_AS(replace(), std::bad_alloc);
    old_one_goes_on();
    CHECK(s.limiter.core().change(y, {.weight = 40_pct}) == errc::none);
    CHECK(replace() == errc::none);  // all of `p` is free for the two
    s.stop(x);
    (void)s.next_second({});
    CHECK(s.next_second({y})[0] == about(0.4));
}

namespace {
/// Refuses clients of one tag, and lacks memory for those of another.
struct picky : weighted_fair {
    failure add(client_id id, const client_settings& s) {
        if (s.tag == 12) return {.code = errc::share_exceeded};
        if (s.tag == 13) throw std::bad_alloc();
        return weighted_fair::add(id, s);
    }
};
}  // namespace

TEST_CASE("a client that the policy of its class refuses opens no class", "[policy]") {
    policy_tree<hard_share, picky> p;  // the outer policy promises a new class the whole
    CHECK(p.add(a, {.group = 1, .tag = 12}).code == errc::share_exceeded);
    CHECK(p.set_class(0, {}).code == errc::none);
    policy_tree<hard_share, picky> other;
    CHECK_THROWS_AS(other.add(a, {.group = 1, .tag = 13}), std::bad_alloc);
    CHECK(other.set_class(0, {}).code == errc::none);
    other = {};
    CHECK(other.add(a, {.group = 1}).code == errc::none);
    CHECK(other.set_class(0, {.weight = 0.1_pct}).code == errc::share_exceeded);  // this client's class stays
}

TEST_CASE("a policy that says when to ask again is asked then", "[policy]") {
    limiter_core<hard_share> core;
    const auto x = core.add({.weight = 10_pct});
    core.arrive(x, start);
    core.arrive(x, start);
    const auto g = core.next(start).value();
    CHECK(core.resume_at() == never);
    CHECK_FALSE(core.next(start));
    CHECK(core.resume_at() == start + 10 * g.predicted);
    core.complete(g, 2 * g.predicted);
    CHECK_FALSE(core.next(start + 10 * g.predicted));
    CHECK(core.resume_at() == start + 20 * g.predicted);
    CHECK(core.next(start + 20 * g.predicted));
}

}  // namespace policies_test
