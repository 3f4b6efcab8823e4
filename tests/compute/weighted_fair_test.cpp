// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policies/any_policy.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/policy_tree.hpp>
#include <gpushare/compute/policies/strict_priority.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/units.hpp>

#include "conformance/compute_policy_suite.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace weighted_fair_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::instant;
using gpushare::ns;
using gpushare::share;
using gpushare::weighted_fair;

TEMPLATE_TEST_CASE("a compute policy serves who waits, and nobody else", "[compute][conformance]", weighted_fair) {
    conformance::compute_policy_suite<TestType>();
}

namespace {

constexpr instant now{};

client_id id(std::size_t index) { return {static_cast<std::uint32_t>(index), 1}; }

/// Clients that always have work, on a device that runs one kernel at a time.
struct saturated {
    explicit saturated(const std::vector<unsigned>& permille, ns turn = weighted_fair::usual_turn) : policy(turn) {
        for (const auto p : permille) add(p);
    }
    void add(unsigned permille, int level = 0) {
        const auto c = id(served.size());
        policy.add(c, {.weight = share::of_permille(permille), .level = {level}});
        policy.wake(c, {}, now);
        weights.push_back(permille);
        served.emplace_back(0);
    }
    /// Who was served.
    std::size_t step(ns cost) {
        const auto c = *policy.pick(now);
        policy.serve(c, cost, now);
        policy.wake(c, {}, now);  // there is more
        served[c.index] += cost;
        return c.index;
    }
    /// Virtual service of a client: device time over weight, ns.
    double virtual_service(std::size_t i) const { return static_cast<double>(served[i].count()) * 1000 / weights[i]; }
    double achieved(std::size_t i) const {
        ns total{};
        for (const auto s : served) total += s;
        return static_cast<double>(served[i].count()) / static_cast<double>(total.count());
    }
    void forget_service() { std::ranges::fill(served, ns{0}); }

    weighted_fair policy;
    std::vector<unsigned> weights;
    std::vector<ns> served;
};

}  // namespace

TEST_CASE("shares are exact within one turn and one kernel, at every moment", "[compute]") {
    const auto weights =
        GENERATE(std::vector<unsigned>{300, 700}, std::vector<unsigned>{100, 900}, std::vector<unsigned>{750, 250},
                 std::vector<unsigned>{20, 980}, std::vector<unsigned>{500, 300, 200});
    // Kernels of 100 us to 1 ms, and clients that differ in which they send.
    const ns longest = 1ms;
    const auto kernels = GENERATE(0, 1, 2);
    const ns turn = GENERATE(ns{0}, weighted_fair::usual_turn);
    const auto seed = support::seed(static_cast<std::uint64_t>(kernels));
    CAPTURE(weights, kernels, turn.count(), seed);
    support::random any(seed);
    saturated s(weights, turn);
    double worst_excess = -1e300;
    std::size_t steps = 0;
    for (; steps < 20'000; ++steps) {
        const auto next = s.policy.pick(now)->index;
        const ns cost = kernels == 0   ? ns{1ms}
                        : kernels == 1 ? (next == 0 ? ns{1ms} : ns{100us})
                                       : ns{100us} * static_cast<int>(1 + any.below(10));
        s.step(cost);
        // A client's turn begins while its virtual service is the smallest, so it is never ahead of
        // the smallest by more than a turn and its own longest kernel, over its weight. 1 ns a step
        // is lost in rounding tags down.
        double smallest = 1e300;
        for (std::size_t i = 0; i < weights.size(); ++i) smallest = std::min(smallest, s.virtual_service(i));
        for (std::size_t i = 0; i < weights.size(); ++i) {
            const auto bound =
                static_cast<double>((longest + turn).count()) * 1000 / weights[i] + static_cast<double>(steps + 1);
            worst_excess = std::max(worst_excess, s.virtual_service(i) - smallest - bound);
        }
    }
    CHECK(worst_excess <= 0);
    // Summed over the clients: each is within (number of clients) x (longest kernel) of its share
    // of the total.
    ns total{};
    for (const auto t : s.served) total += t;
    const auto bound = static_cast<double>(weights.size()) * static_cast<double>(longest.count()) /
                           static_cast<double>(total.count()) +
                       1e-6;
    for (std::size_t i = 0; i < weights.size(); ++i) CHECK(s.achieved(i) == Approx(weights[i] / 1000.0).margin(bound));
}

TEST_CASE("short kernels go several at a time, long ones and those without a turn one by one", "[compute]") {
    const auto runs_of = [](ns turn, ns kernel) {  // each as long as it lasts, of one client after the other
        saturated s({500, 500}, turn);
        std::vector<int> runs;
        std::size_t before = 2;
        for (int i = 0; i < 1000; ++i) {
            const auto next = s.step(kernel);
            if (std::exchange(before, next) == next)
                ++runs.back();
            else
                runs.push_back(1);
        }
        runs.pop_back();  // cut off
        return runs;
    };
    CHECK(std::ranges::all_of(runs_of(50us, 10us), [](int n) { return n == 5; }));
    CHECK(std::ranges::all_of(runs_of(ns{-1}, 10us), [](int n) { return n == 1; }));  // not said
    CHECK(std::ranges::all_of(runs_of(50us, 20us), [](int n) { return n == 3; }));
    CHECK(std::ranges::all_of(runs_of(50us, 50us), [](int n) { return n == 1; }));
    CHECK(std::ranges::all_of(runs_of(50us, 100us), [](int n) { return n == 1; }));
    const auto tiny = runs_of(50us, 1ns);
    CHECK(tiny.size() > 10);
    CHECK(std::ranges::all_of(tiny, [](int n) { return n <= 50; }));
    CHECK(std::ranges::all_of(runs_of(0us, 10us), [](int n) { return n == 1; }));
}

TEMPLATE_TEST_CASE("if clients take turns on the device, the policy gives them turns, and so does one that takes over",
                   "[compute]", weighted_fair, gpushare::fair, gpushare::capped<weighted_fair>,
                   gpushare::strict_priority<>, gpushare::any_policy,
                   (gpushare::policy_tree<weighted_fair, weighted_fair>)) {
    for (const bool turns : {false, true}) {
        gpushare::limiter_core<TestType> core({.depth = 1}, {}, turns);
        const auto a = core.add({}), b = core.add({});
        instant at{};
        for (int policy = 0; policy < 2; ++policy) {
            CAPTURE(turns, policy);
            int changes = 0;
            auto before = a;
            for (int i = 0; i < 200; ++i) {
                for (const auto c : {a, b})
                    if (core.usage(c).waiting == 0) core.arrive(c, at);
                const auto g = core.next(at);
                REQUIRE(g);
                core.complete(*g, 10us);
                at += 10us;
                changes += std::exchange(before, g->client) != g->client ? 1 : 0;
            }
            CHECK((turns ? changes < 30 : changes > 180));
            TestType next;
            REQUIRE(core.set_policy(next, at) == gpushare::errc::none);
        }
    }
}

TEST_CASE("a turn counts what its kernels took, not what was said of them", "[compute]") {
    gpushare::limiter_core<> core({.depth = 1}, {}, true);
    const auto a = core.add({}), b = core.add({});
    const gpushare::submission_facts said{.head = {.cost = 1ns}};
    int longest = 0, run = 0;
    auto before = a;
    for (int i = 0; i < 200; ++i) {
        for (const auto c : {a, b})
            if (core.usage(c).waiting == 0) core.arrive(c, now, said);
        const auto g = core.next(now);
        REQUIRE(g);
        core.complete(*g, 1ms);
        run = std::exchange(before, g->client) == g->client ? run + 1 : 1;
        longest = std::max(longest, run);
    }
    CHECK(longest <= 2);
}

TEST_CASE("a turn ends for a higher level, and with what its client has to do", "[compute]") {
    saturated s({500, 500}, 1ms);
    const auto first = s.step(10us);
    CHECK(s.step(10us) == first);
    s.add(100, 1);
    CHECK(s.step(10us) == 2);
    s.policy.sleep(id(2));
    CHECK(s.step(10us) == 1 - first);  // which is furthest behind: the turn was over
    s.policy.sleep(id(1 - first));
    CHECK(s.step(10us) == first);
}

TEST_CASE("weights count relative to each other: they need not sum to the device", "[compute]") {
    saturated s({100, 300});
    for (int i = 0; i < 4000; ++i) s.step(1ms);
    CHECK(s.achieved(0) == Approx(0.25).margin(2.0 / 4000));
}

TEST_CASE("a higher level goes first, always", "[compute]") {
    saturated s({1000});
    s.add(1, 1);
    s.add(1, 2);
    for (int i = 0; i < 100; ++i) CHECK(s.step(1h) == 2);
    s.policy.sleep(id(2));
    for (int i = 0; i < 100; ++i) CHECK(s.step(1h) == 1);
    s.policy.wake(id(2), {}, now);
    CHECK(s.step(1h) == 2);
    s.policy.sleep(id(2));
    s.policy.sleep(id(1));
    CHECK(s.step(1h) == 0);
}

TEST_CASE("levels share among themselves: what one did on another's time costs its level nothing", "[compute]") {
    saturated s({500, 500});
    s.add(500, 1);
    s.add(500, 1);
    for (int i = 0; i < 1000; ++i) s.step(1ms);
    CHECK(s.served[2] == 500ms);
    CHECK(s.served[3] == 500ms);
    s.policy.sleep(id(2));
    s.policy.sleep(id(3));
    for (int i = 0; i < 1000; ++i) s.step(1ms);
    CHECK(s.served[0] == 500ms);
    CHECK(s.served[1] == 500ms);
}

TEST_CASE("a client that wakes up isn't owed the past, and doesn't pay for it", "[compute]") {
    saturated s({500, 500});
    s.policy.sleep(id(1));
    for (int i = 0; i < 10'000; ++i) CHECK(s.step(1ms) == 0);
    s.policy.wake(id(1), {}, now);
    s.forget_service();
    // At no moment is the sleeper ahead, or behind, by more than a kernel of each.
    for (int i = 0; i < 1000; ++i) {
        s.step(1ms);
        CHECK(std::abs((s.served[0] - s.served[1]).count()) <= ns{2ms}.count());
    }
}

TEST_CASE("a nap between two submissions earns nothing and costs nothing", "[compute]") {
    saturated s({500, 500});
    for (int i = 0; i < 2000; ++i)
        if (s.step(1ms) == 1) {  // asks again once it was served, as a client with one submission at a time does
            s.policy.sleep(id(1));
            s.policy.wake(id(1), {}, now);
        }
    CHECK(s.served[0] == s.served[1]);
}

TEST_CASE("a live change of weight takes effect at once", "[compute]") {
    const auto before = GENERATE(1U, 100U, 500U, 999U);
    const auto after = GENERATE(1U, 100U, 500U, 999U);
    CAPTURE(before, after);
    saturated s({before, 1000 - before});
    for (int i = 0; i < 1234; ++i) s.step(ns{100us} * (1 + i % 10));
    s.policy.change(id(0), {.weight = share::of_permille(after)});
    s.policy.change(id(1), {.weight = share::of_permille(1000 - after)});
    s.weights = {after, 1000 - after};
    s.forget_service();
    // From the very change, each is within (number of clients) x (longest kernel) of its new share
    // as in any interval, and as much again for who was ahead when it began.
    ns total{};
    double worst = 0;
    for (int i = 0; i < 5000; ++i) {
        const ns cost = ns{100us} * (1 + i % 10);
        s.step(cost);
        total += cost;
        worst = std::max(worst, std::abs(static_cast<double>(s.served[0].count()) -
                                         static_cast<double>(total.count()) * after / 1000.0));
    }
    CHECK(worst <= 4.0 * ns{1ms}.count());
}

TEST_CASE("a change of level takes effect at once, and keeps who is ahead of whom", "[compute]") {
    saturated s({500, 500, 500});
    for (int i = 0; i < 3; ++i) s.step(1ms);
    s.policy.change(id(2), {.weight = 50_pct, .level = {1}});
    for (int i = 0; i < 50; ++i) CHECK(s.step(1ms) == 2);
    s.policy.change(id(2), {.weight = 50_pct, .level = {}});
    s.forget_service();
    for (int i = 0; i < 300; ++i) s.step(1ms);
    // Its time above costs it nothing but the lead of its last kernel there.
    for (const auto t : s.served) CHECK(std::abs((t - 100ms).count()) <= ns{1ms}.count());
}

TEST_CASE("predictions are corrected: shares follow the truth", "[compute]") {
    // The policy believes 1 ms of everyone; in truth one takes 100 us and the other 1 ms.
    weighted_fair policy;
    policy.add(id(0), {.weight = 50_pct});
    policy.add(id(1), {.weight = 50_pct});
    policy.wake(id(0), {}, now);
    policy.wake(id(1), {}, now);
    std::vector<ns> truth(2);
    for (int i = 0; i < 11'000; ++i) {
        const auto c = *policy.pick(now);
        const ns cost = c.index == 0 ? ns{100us} : ns{1ms};
        policy.serve(c, 1ms, now);
        policy.wake(c, {}, now);
        policy.correct(c, cost - 1ms);
        truth[c.index] += cost;
    }
    CHECK(std::abs((truth[0] - truth[1]).count()) <= ns{1ms}.count());
}

TEST_CASE("a new client starts level with the others, whoever had the index before", "[compute]") {
    saturated s({500, 500});
    for (int i = 0; i < 1000; ++i) s.step(1ms);
    s.policy.remove(id(1));
    for (int i = 0; i < 1000; ++i) s.step(1ms);
    constexpr client_id again{1, 2};
    s.policy.add(again, {.weight = 50_pct});
    s.policy.wake(again, {}, now);
    s.forget_service();
    for (int i = 0; i < 100; ++i) s.step(1ms);
    CHECK(std::abs((s.served[0] - s.served[1]).count()) <= ns{2ms}.count());
    CHECK(s.policy.pick(now));
}

TEST_CASE("tags never overflow: only their differences count", "[compute]") {
    SECTION("wild costs, in both directions") {
        weighted_fair policy;
        policy.add(id(0), {.weight = share::of_permille(1)});
        policy.add(id(1), {.weight = share::of_permille(1)});
        policy.wake(id(0), {}, now);
        policy.wake(id(1), {}, now);
        for (int i = 0; i < 10'000; ++i) {
            const auto c = *policy.pick(now);
            policy.serve(c, ns::max(), now);
            policy.wake(c, {}, now);
            if (i % 3 == 0) policy.correct(c, ns::min());
        }
        for (int i = 0; i < 100; ++i) policy.correct(id(0), ns::min());
        for (int i = 0; i < 100; ++i) policy.correct(id(1), ns::max());
        CHECK(policy.pick(now) == id(0));
    }
    SECTION("shares hold across years at the smallest share") {
        saturated s({1, 1});
        for (int i = 0; i < 20'000; ++i) s.step(i % 2 == 0 ? 24h : 12h);  // 41 years, a tag of 2^61 many times over
        CHECK(std::abs((s.served[0] - s.served[1]).count()) <= ns{24h}.count());
    }
    SECTION("a sleeper from before comes back level") {
        saturated s({1, 1});
        s.policy.sleep(id(1));
        for (int i = 0; i < 20'000; ++i) s.step(24h);
        s.policy.wake(id(1), {}, now);
        s.forget_service();
        for (int i = 0; i < 100; ++i) s.step(24h);
        CHECK(std::abs((s.served[0] - s.served[1]).count()) <= 2 * ns{24h}.count());
    }
}

TEST_CASE("tags that are moved back keep the order of clients, whatever indices are in use", "[compute]") {
    weighted_fair policy(ns{0});
    for (const std::size_t i : {0U, 2U, 3U}) {  // index 1 was never used
        policy.add(id(i), {.weight = share::of_permille(1)});
        policy.wake(id(i), {}, now);
    }
    policy.serve(id(0), 1s, now);
    policy.wake(id(0), {}, now);
    for (int i = 0; i < 4; ++i) policy.correct(id(2), ns::max());
    CHECK(policy.pick(now) == id(3));
    policy.sleep(id(3));
    CHECK(policy.pick(now) == id(0));
}

TEST_CASE("a client whose waiting submission goes above its level shares that level with others", "[compute]") {
    weighted_fair policy(ns{0});
    policy.add(id(0), {.weight = 50_pct, .level = {1}});
    policy.add(id(1), {.weight = 50_pct, .ceiling = {1}});
    const gpushare::queue_head raised{.level = {1}};
    policy.wake(id(1), {}, now);  // waits at its own level
    policy.wake(id(0), {}, now);
    const auto step = [&] {
        const auto c = *policy.pick(now);
        policy.serve(c, 1ms, now);
        policy.wake(c, c == id(0) ? gpushare::queue_head{} : raised, now);
        return c;
    };
    for (int i = 0; i < 100; ++i) CHECK(step() == id(0));
    policy.wake(id(1), raised, now);
    int raised_first = 0;
    for (int i = 0; i < 100; ++i) raised_first += step() == id(1) ? 1 : 0;
    CHECK(raised_first == 50);
}

TEST_CASE("ten thousand clients get what they are due", "[compute]") {
    const std::size_t clients = 10'000;
    saturated s({});
    for (std::size_t i = 0; i < clients; ++i) s.add(i % 2 == 0 ? 100 : 200);
    for (std::size_t i = 0; i < clients * 30; ++i) s.step(1ms);
    // 20 kernels for one, 40 for two, give or take the one that each may be ahead.
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < clients; ++i)
        if (std::abs((s.served[i] - (i % 2 == 0 ? 20ms : 40ms)).count()) > ns{1ms}.count()) ++wrong;
    CHECK(wrong == 0);
}

TEST_CASE("random clients, weights, naps and kernels: no client starves or lags by more than the kernels between",
          "[compute]") {
    for (std::uint64_t nth = 0; nth < 10; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        const ns longest = 1ms, turn = nth % 2 == 0 ? ns{0} : weighted_fair::usual_turn;
        saturated s({}, turn);
        const auto clients = 2 + any.below(20);
        for (std::size_t i = 0; i < clients; ++i) s.add(static_cast<unsigned>(1 + any.below(1000)));
        std::vector<bool> awake(clients, true);
        // Between two clients that both waited all along, normalised service differs by at most one
        // kernel of each (theorem 1 of the paper), and a turn. `since` is each one's virtual
        // service when the pair's common wait began.
        std::vector<std::vector<double>> since(clients, std::vector<double>(clients, 0.0));
        double worst_excess = -1e300;
        for (int step = 0; step < 10'000; ++step) {
            const auto who = any.below(clients);
            if (any.one_in(10)) {
                awake[who] ? s.policy.sleep(id(who)) : s.policy.wake(id(who), {}, now);
                awake[who] = !awake[who];
                for (std::size_t i = 0; i < clients; ++i)
                    since[who][i] = since[i][who] = s.virtual_service(who) - s.virtual_service(i);
                for (std::size_t i = 0; i < clients; ++i) since[i][who] = -since[who][i];
            }
            const auto picked = s.policy.pick(now);
            const bool any_awake = std::ranges::find(awake, true) != awake.end();
            if (static_cast<bool>(picked) != any_awake) FAIL("idle beside waiting clients, or the reverse");
            if (!picked) continue;
            s.step(ns{static_cast<std::int64_t>(1 + any.below(static_cast<std::uint64_t>(longest.count())))});
            for (std::size_t i = 0; i < clients; ++i) {
                if (!awake[i] || i == picked->index) continue;
                const auto lead = s.virtual_service(picked->index) - s.virtual_service(i) - since[picked->index][i];
                const auto bound = static_cast<double>((longest + turn).count()) *
                                       (1000.0 / s.weights[picked->index] + 1000.0 / s.weights[i]) +
                                   step + 1;
                worst_excess = std::max(worst_excess, lead - bound);
            }
        }
        CHECK(worst_excess <= 0);
    }
}

}  // namespace weighted_fair_test
