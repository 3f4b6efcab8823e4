// SPDX-License-Identifier: Apache-2.0
// What every compute policy owes its limiter, whatever it is after: it serves who waits and nobody else, and it never
// leaves the device idle while somebody waits.
//
//   TEMPLATE_TEST_CASE("policies keep the contract", "[compute]", gpushare::weighted_fair) {
//       conformance::compute_policy_suite<TestType>();
//   }
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace conformance {

namespace detail {

/// Random calls in any order that the contract allows, against the set of who waits.
template <gpushare::compute_policy Policy>
void random_calls(std::uint64_t seed, int steps) {
    using namespace std::chrono_literals;
    struct client {
        gpushare::client_id id;
        bool present = false;
    };
    support::random any(seed);
    Policy policy;
    std::vector<client> clients;
    std::set<std::uint32_t> waiting;
    for (std::uint32_t i = 0; i < 12; ++i) clients.push_back({.id = {i, 0}});
    gpushare::instant now{};
    const auto settings = [&] {
        return gpushare::client_settings{.weight = gpushare::share::of_permille(any.below(1001)),
                                         .level = {static_cast<std::int32_t>(any.below(3)) - 1}};
    };
    // At the first wrong answer this returns, so that a hundred thousand steps are a handful of assertions.
    for (int step = 0; step < steps; ++step) {
        CAPTURE(step);
        auto& c = any.of(clients);
        now += 1us;
        if (!c.present) {
            ++c.id.generation;
            policy.add(c.id, settings());
            c.present = true;
        } else if (any.one_in(20)) {
            policy.remove(c.id);
            waiting.erase(c.id.index);
            c.present = false;
        } else if (any.one_in(5)) {
            policy.change(c.id, settings());
        } else if (any.one_in(4)) {
            policy.sleep(c.id);
            waiting.erase(c.id.index);
        } else {
            policy.wake(c.id, {.cost = gpushare::ns{1}, .arrival = now}, now);
            waiting.insert(c.id.index);
        }
        const auto picked = policy.pick(now);
        if (static_cast<bool>(picked) == waiting.empty()) FAIL("idle beside waiting clients, or the reverse");
        if (!picked) continue;
        if (!waiting.contains(picked->index)) FAIL("picked one that doesn't wait");
        if (!(*picked == clients[picked->index].id)) FAIL("picked a former owner of the index");
        if (policy.pick(now) != picked) FAIL("pick changed something");
        const gpushare::ns predicted{static_cast<std::int64_t>(any.below(1'000'000))};
        policy.serve(*picked, predicted, now);
        policy.correct(*picked, gpushare::ns{static_cast<std::int64_t>(any.below(1'000'000))} - predicted);
    }
}

}  // namespace detail

template <gpushare::compute_policy Policy>
void compute_policy_suite() {
    using namespace std::chrono_literals;
    using gpushare::client_id;
    constexpr gpushare::instant now{};
    constexpr client_id a{0, 1}, b{1, 1};
    Policy policy;
    policy.add(a, {});
    policy.add(b, {});

    SECTION("nobody waits, nobody is picked") { CHECK_FALSE(policy.pick(now)); }
    SECTION("who waits is picked until it sleeps") {
        policy.wake(b, {}, now);
        CHECK(policy.pick(now) == b);
        policy.serve(b, 1ms, now);
        CHECK(policy.pick(now) == b);
        policy.sleep(b);
        CHECK_FALSE(policy.pick(now));
    }
    SECTION("to wake or sleep twice is to do it once") {
        policy.wake(a, {}, now);
        policy.wake(a, {}, now);
        policy.sleep(a);
        CHECK_FALSE(policy.pick(now));
        policy.sleep(a);
        policy.wake(a, {}, now);
        CHECK(policy.pick(now) == a);
    }
    SECTION("who is removed while it waits is gone") {
        policy.wake(a, {}, now);
        policy.wake(b, {}, now);
        policy.remove(a);
        CHECK(policy.pick(now) == b);
        policy.remove(b);
        CHECK_FALSE(policy.pick(now));
    }
    SECTION("an index used again belongs to its new owner, who doesn't wait yet") {
        policy.wake(a, {}, now);
        policy.remove(a);
        constexpr client_id again{0, 2};
        policy.add(again, {});
        CHECK_FALSE(policy.pick(now));
        policy.wake(again, {}, now);
        CHECK(policy.pick(now) == again);
    }
    SECTION("a change of settings leaves who waits waiting, and who sleeps asleep") {
        policy.wake(a, {}, now);
        policy.change(a, {.weight = gpushare::share::of_permille(1), .level = {-3}});
        policy.change(b, {.level = {7}});
        CHECK(policy.pick(now) == a);
    }
    SECTION("a correction that comes late, to one who sleeps, is fine") {
        policy.wake(a, {}, now);
        policy.serve(a, 1ms, now);
        policy.sleep(a);
        policy.correct(a, -1ms);
        policy.correct(a, 5ms);
        policy.wake(a, {}, now);
        CHECK(policy.pick(now) == a);
    }
    SECTION("a share of nothing is served where nobody else wants the device") {
        policy.change(a, {.weight = gpushare::share::of_permille(0)});
        policy.wake(a, {}, now);
        CHECK(policy.pick(now) == a);
        policy.serve(a, 1h, now);
        CHECK(policy.pick(now) == a);
    }
    SECTION("any order of calls: served is who waits, and somebody is while anybody does") {
        for (std::uint64_t nth = 0; nth < 10; ++nth) {
            const auto seed = support::seed(nth);
            CAPTURE(seed);
            detail::random_calls<Policy>(seed, 10'000);
        }
        SUCCEED("100,000 random calls");
    }
}

}  // namespace conformance
