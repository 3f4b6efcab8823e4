// SPDX-License-Identifier: Apache-2.0
// Runs: what was found out about one submission of a client that is alone is used for the next ones. Nobody must be able to
// tell, but by the clock.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <catch2/catch.hpp>

#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/weighted_fair.hpp>

#include "support/random.hpp"

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::client_settings;
using gpushare::grant;
using gpushare::instant;
using gpushare::ns;
using gpushare::outcome;

/// Has no short way of its own, and so no runs.
struct every_step : gpushare::weighted_fair {};

using with_runs = gpushare::limiter_core<gpushare::weighted_fair>;
using without = gpushare::limiter_core<every_step>;

/// Lets in what comes now, or leaves nothing behind.
template <class Core>
[[nodiscard]] bool pass(Core& core, grant& g, client_id c, instant now) {
    if (core.pass(g, c, now, nullptr)) return true;
    core.withdraw(c, now);
    return false;
}

/// The same by way of the line.
template <class Core>
[[nodiscard]] bool queue(Core& core, grant& g, client_id c, instant now) {
    core.arrive(c, now);
    if (const auto next = core.next(now)) {
        g = *next;
        return true;
    }
    core.withdraw(c, now);
    return false;
}

void check_same(const grant& a, const grant& b) {
    CHECK(a.client == b.client);
    CHECK(a.level == b.level);
    CHECK(a.predicted == b.predicted);
    CHECK(a.longest == b.longest);
    CHECK(a.at_least == b.at_least);
    CHECK(a.bound == b.bound);
    CHECK(a.served_before == b.served_before);
    CHECK(a.key == b.key);
    CHECK(a.level_index == b.level_index);
    CHECK(a.policy == b.policy);
    CHECK(a.known == b.known);
    CHECK(a.may_share == b.may_share);
    CHECK(a.of_request == b.of_request);
}

struct flying {
    grant in_one, in_other;
};

/// One client of a core, all of whose submissions take `length`, and which knows that by now.
struct one_client {
    explicit one_client(ns length = 10us, gpushare::limiter_options options = {}) : core(options), took(length) {
        for (int i = 0; i < 16; ++i) {
            grant g;
            REQUIRE(core.pass(g, client, now, nullptr));
            core.complete(g, {.took = took, .from = i % 4 < 3 ? outcome::source::alone : outcome::source::shared});
        }
    }
    [[nodiscard]] bool pass(grant& g) { return ::pass(core, g, client, now); }

    with_runs core;
    ns took;
    instant now{1s};
    client_id client = core.add({.weight = 50_pct});
};

}  // namespace

TEST_CASE("runs or none: the same is let in, and the same is known of it", "[compute]") {
    for (std::uint64_t nth = 0; nth < 60; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        const gpushare::limiter_options options{.depth = static_cast<std::uint32_t>(1 + any.below(4)),
                                                .horizon = 100us * static_cast<ns::rep>(1 + any.below(30))};
        with_runs one(options);
        without other(options);
        struct tenant {
            client_id id;
            ns length;
        };
        std::vector<tenant> tenants;
        const auto micros = [&](std::uint64_t most) { return ns{1us} * static_cast<ns::rep>(1 + any.below(most)); };
        const auto settings = [&] {
            return client_settings{.weight = gpushare::share::of_permille(100 + any.below(200)),
                                   .level = {static_cast<std::int32_t>(any.one_in(8) ? 1 : 0)},
                                   .longest = any.one_in(3) ? micros(200) : ns{}};
        };
        const auto add = [&] {
            const auto s = settings();
            const auto c = one.add(s);
            REQUIRE(c == other.add(s));
            tenants.push_back({c, micros(60)});
        };
        add();
        add();
        std::vector<flying> out;
        instant now{1s};
        std::size_t at = 0;
        std::size_t let_in = 0;
        for (int step = 0; step < 3000; ++step) {
            now += 1us;
            if (any.one_in(40)) at = any.below(tenants.size());
            if (any.one_in(300) && tenants.size() < 5) add();
            if (any.one_in(150)) {
                const auto s = settings();
                REQUIRE(one.change(tenants[at].id, s) == other.change(tenants[at].id, s));
            }
            if (any.one_in(400)) {
                gpushare::weighted_fair fresh;
                every_step as_fresh;
                REQUIRE(one.set_policy(fresh, now) == gpushare::errc::none);
                REQUIRE(other.set_policy(as_fresh, now) == gpushare::errc::none);
            }
            flying f;
            const bool queued = any.one_in(4);
            const bool passed = (queued ? queue<with_runs> : pass<with_runs>)(one, f.in_one, tenants[at].id, now);
            REQUIRE(passed == (queued ? queue<without> : pass<without>)(other, f.in_other, tenants[at].id, now));
            if (passed) {
                check_same(f.in_one, f.in_other);
                out.push_back(f);
                ++let_in;
            }
            while (!out.empty() && (!passed || any.one_in(2) || out.size() > 80)) {
                const auto i = any.one_in(4) ? any.below(out.size()) : 0;
                auto& length = std::ranges::find(tenants, out[i].in_one.client, &tenant::id)->length;
                if (any.one_in(100)) length = micros(60);
                constexpr std::array sources{outcome::source::own, outcome::source::alone, outcome::source::shared};
                const outcome o{.took = length, .failed = any.one_in(50), .from = any.of(sources)};
                one.complete(out[i].in_one, o, now);
                other.complete(out[i].in_other, o, now);
                out.erase(out.begin() + static_cast<std::ptrdiff_t>(i));
                if (passed) break;
            }
            REQUIRE(one.wait_bound() == other.wait_bound());
        }
        for (const auto& t : tenants) {
            CHECK(one.usage(t.id).device_time == other.usage(t.id).device_time);
            CHECK(one.usage(t.id).in_flight == other.usage(t.id).in_flight);
        }
        CHECK(let_in > 500);
    }
}

TEST_CASE("a run ends where there is no more room", "[compute]") {
    one_client t{10us, {.depth = 3, .horizon = 1ms}};
    grant g;
    std::uint32_t n = 0;
    while (t.pass(g)) ++n;
    CHECK(n == 100);  // as many as take no longer than the horizon
    t.core.complete(g, {.took = t.took, .from = outcome::source::shared});
    CHECK(t.pass(g));
    CHECK_FALSE(t.pass(g));
}

TEST_CASE("what its own client has let in from its queue takes the room of a run", "[compute]") {
    one_client t{10us, {.depth = 3, .horizon = 1ms}};
    grant g;
    for (int i = 0; i < 3; ++i) REQUIRE(t.pass(g));
    std::uint32_t n = 3;
    for (t.core.arrive(t.client, t.now); t.core.next(t.now); t.core.arrive(t.client, t.now)) ++n;
    t.core.withdraw(t.client, t.now);
    while (t.pass(g)) ++n;
    CHECK(n == 100);
}

TEST_CASE("a run doesn't go on beside others", "[compute]") {
    one_client t{10us, {.depth = 3, .horizon = 1ms}};
    grant g;
    for (int i = 0; i < 20; ++i) REQUIRE(t.pass(g));
    const auto other = t.core.add({.weight = 50_pct});
    grant theirs;
    CHECK_FALSE(pass(t.core, theirs, other, t.now));  // no room for two, as nothing is known of it
    CHECK(t.pass(g));
    t.core.arrive(other, t.now);
    CHECK_FALSE(t.pass(g));  // somebody waits
    for (int i = 0; i < 19; ++i) t.core.complete(g, {.took = t.took, .from = outcome::source::shared});
    REQUIRE(t.core.next(t.now));  // and is let in
    std::uint32_t n = 0;
    while (t.pass(g)) ++n;
    CHECK(n == 0);  // nothing is known of how long that takes: no more than the depth
}

TEST_CASE("the bound that a run publishes is the one in force", "[compute]") {
    one_client t;
    grant g;
    for (int i = 0; i < 5; ++i) REQUIRE(t.pass(g));
    const auto before = g.bound;
    SECTION("one took longer") { t.core.complete(g, {.took = 400us, .from = outcome::source::alone}); }
    SECTION("another was added that does") { (void)t.core.add({.weight = 1_pct, .longest = 400us}); }
    SECTION("its own terms say so") {
        REQUIRE(t.core.change(t.client, {.weight = 50_pct, .longest = 400us}) == gpushare::errc::none);
    }
    REQUIRE(t.pass(g));
    CHECK(g.bound > before);
    CHECK(g.bound == t.core.bound_of(t.client));
}

TEST_CASE("in a run, too, one of so many is timed by itself", "[compute]") {
    one_client t{1us};
    std::uint32_t apart = 0;
    for (int i = 0; i < 640; ++i) {
        grant first, second;
        REQUIRE(t.pass(first));
        REQUIRE(t.pass(second));
        apart += (first.may_share ? 0 : 1) + (second.may_share ? 0 : 1);
        for (const auto& g : {first, second}) t.core.complete(g, {.took = t.took, .from = outcome::source::shared});
    }
    CHECK(apart == 20);
}
