// SPDX-License-Identifier: Apache-2.0
// The duties of every compute policy to its limiter, whatever its aim: it serves only waiting
// clients, and never leaves the device idle while a client waits, unless it says until when.
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
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

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
    const auto some_share = [&] {
        return gpushare::share::of_permille(any.one_in(3) ? any.below(1001) : any.below(200));
    };
    const auto settings = [&] {
        return gpushare::client_settings{.weight = some_share(),
                                         .level = {static_cast<std::int32_t>(any.below(3)) - 1},
                                         .cap = some_share(),
                                         .soft_cap = any.one_in(2),
                                         .group = static_cast<std::uint32_t>(any.below(3))};
    };
    const auto head = [&] {
        const gpushare::ns cost{static_cast<std::int64_t>(any.below(1'000'000))};
        return gpushare::queue_head{.cost = cost,
                                    .remaining = cost * static_cast<std::int64_t>(1 + any.below(9)),
                                    .arrival = now,
                                    .deadline = any.one_in(2) ? gpushare::never : now + 10 * cost};
    };
    // At the first wrong answer this returns, so that a hundred thousand steps are a handful of
    // assertions.
    for (int step = 0; step < steps; ++step) {
        CAPTURE(step);
        auto& c = any.of(clients);
        now += 1us;
        if (!c.present) {
            ++c.id.generation;
            const auto why = policy.add(c.id, settings());
            if (why.code != gpushare::errc::none && why.code != gpushare::errc::share_exceeded) FAIL("a wrong refusal");
            c.present = why.code == gpushare::errc::none;
            if (!c.present) continue;
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
            policy.wake(c.id, head(), now);
            waiting.insert(c.id.index);
        }
        auto picked = policy.pick(now);
        for (int asked = 0; !picked && picked.ask_again() != gpushare::never; ++asked) {
            if (picked.ask_again() <= now) FAIL("asks for a time that is over");
            if (asked == 1000) FAIL("never has anybody to serve");
            if (any.one_in(2)) break;  // or something else happens first
            now = picked.ask_again();
            picked = policy.pick(now);
        }
        if (!picked && picked.ask_again() != gpushare::never) {
            if (waiting.empty()) FAIL("waits for a time while nobody waits");
            continue;
        }
        if (static_cast<bool>(picked) == waiting.empty()) FAIL("idle beside waiting clients, or the reverse");
        if (!picked) continue;
        if (!waiting.contains(picked->index)) FAIL("picked one that doesn't wait");
        if (!(*picked == clients[picked->index].id)) FAIL("picked a former owner of the index");
        if (!(policy.pick(now) == picked)) FAIL("pick changed something");
        const gpushare::ns predicted{static_cast<std::int64_t>(any.below(1'000'000))};
        const auto served = *picked;
        policy.serve(served, predicted, now);
        if (any.one_in(3)) {
            policy.sleep(served);
            waiting.erase(served.index);
        } else {
            policy.wake(served, head(), now);
        }
        policy.correct(served, gpushare::ns{static_cast<std::int64_t>(any.below(1'000'000))} - predicted);
    }
}

/// The answer once the policy has one.
template <gpushare::compute_policy Policy>
gpushare::choice later(Policy& policy, gpushare::instant now) {
    auto c = policy.pick(now);
    for (int i = 0; i < 100 && !c && c.ask_again() != gpushare::never; ++i) c = policy.pick(c.ask_again());
    return c;
}

}  // namespace detail

template <gpushare::compute_policy Policy>
void compute_policy_suite() {
    using detail::later;
    using gpushare::ns;
    using namespace std::chrono_literals;
    using gpushare::client_id;
    constexpr gpushare::instant now{};
    constexpr client_id a{0, 1}, b{1, 1};
    constexpr auto part = gpushare::share::of_permille(100);  // so that policies which promise can promise it
    Policy policy;
    policy.add(a, {.weight = part});
    policy.add(b, {.weight = part});

    SECTION("nobody waits, nobody is picked") { CHECK_FALSE(policy.pick(now)); }
    SECTION("who waits is picked until it sleeps") {
        policy.wake(b, {}, now);
        CHECK(policy.pick(now) == b);
        policy.serve(b, 1ms, now);
        policy.wake(b, {}, now);
        CHECK(later(policy, now) == b);
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
        policy.add(again, {.weight = part});
        CHECK_FALSE(policy.pick(now));
        policy.wake(again, {}, now);
        CHECK(policy.pick(now) == again);
    }
    SECTION("a change of settings leaves who waits waiting, and who sleeps asleep") {
        policy.wake(a, {}, now);
        policy.change(a, {.weight = gpushare::share::of_permille(1), .level = {-3}});
        policy.change(b, {.weight = part, .level = {7}});
        CHECK(policy.pick(now) == a);
    }
    SECTION("a correction that comes late, to one who sleeps, is fine") {
        policy.wake(a, {}, now);
        policy.serve(a, 1ms, now);
        policy.sleep(a);
        policy.correct(a, -1ms);
        policy.correct(a, 5ms);
        policy.wake(a, {}, now);
        CHECK(later(policy, now) == a);
    }
    SECTION("a share of nothing is served where nobody else wants the device") {
        policy.change(a, {.weight = gpushare::share::of_permille(0)});
        policy.wake(a, {}, now);
        CHECK(policy.pick(now) == a);
        policy.serve(a, 1h, now);
        policy.wake(a, {}, now);
        CHECK(later(policy, now) == a);
    }
    SECTION("a wild measurement overflows nothing") {
        policy.wake(a, {}, now);
        policy.wake(b, {}, now);
        for (int i = 0; i < 20; ++i) {
            const auto c = later(policy, now);
            REQUIRE(c);
            policy.serve(*c, ns::max(), now);
            policy.correct(*c, ns::max());
            policy.correct(*c, ns::min());
            policy.wake(*c, {.remaining = ns::max(), .arrival = gpushare::never, .deadline = gpushare::instant::min()},
                        now);
        }
        policy.sleep(b);
        CHECK(later(policy, now) == a);
    }
    SECTION("any order of calls: served is who waits, and somebody is while anybody does") {
        for (std::uint64_t nth = 0; nth < support::few(10U); ++nth) {
            const auto seed = support::seed(nth);
            CAPTURE(seed);
            detail::random_calls<Policy>(seed, 10'000);
        }
        SUCCEED("10,000 random calls of each seed");
    }
}

}  // namespace conformance
