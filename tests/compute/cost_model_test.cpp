// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

#include <gpushare/compute/detail/cost_model.hpp>
#include <gpushare/compute/limiter_core.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace cost_model_test {

using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::ns;
using gpushare::detail::cost_estimate;
using gpushare::detail::cost_model;

TEST_CASE("an estimate is the mean at first, then follows what comes", "[compute]") {
    cost_estimate e;
    e.learn(100us, 100us, false);
    CHECK(e.typical == 100us);
    e.learn(300us, 300us, false);
    CHECK(e.typical == 200us);
    CHECK(e.longest.get() == 300us);
    for (int i = 0; i < 100; ++i) e.learn(1ms, 1ms, false);
    CHECK(e.typical > 999us);
    CHECK(e.typical <= 1ms);
    for (int i = 0; i < 100; ++i) e.learn(10us, 10us, false);
    CHECK(e.typical < 11us);
    CHECK(e.longest.get() == 1ms);
}

TEST_CASE("a single long call is forgotten, and a call that is long now and then isn't", "[compute]") {
    gpushare::detail::recent_longest once, now_and_then;
    once.learn(2ms);
    for (int i = 0; i < 511; ++i) once.learn(100us);
    CHECK(once.get() == 2ms);
    for (int i = 0; i < 512; ++i) once.learn(100us);
    CHECK(once.get() == 100us);
    for (int i = 0; i < 5000; ++i) {
        now_and_then.learn(i % 500 == 0 ? ns{2ms} : ns{100us});
        REQUIRE(now_and_then.get() == 2ms);
    }
}

TEST_CASE("at most one in a hundred of the latest takes longer than is told", "[compute]") {
    support::random any(support::seed(0));
    gpushare::detail::recent_longest lately;
    std::vector<ns> all;
    lately.learn(9s, true);
    CHECK(lately.p99() == 0ns);
    for (int i = 0; i < 3000; ++i) {
        const ns took{static_cast<ns::rep>(any.one_in(20) ? any.below(50) * 1000 : any.below(1000))};  // some are equal
        lately.learn(took);
        all.push_back(took);
        REQUIRE(lately.seen() == (all.size() < 512 ? all.size() : 512 + all.size() % 512));
        const std::vector<ns> latest(all.end() - lately.seen(), all.end());
        const auto longer = std::ranges::count_if(latest, [&](ns t) { return t > lately.p99(); });
        const auto as_long = std::ranges::count(latest, lately.p99());
        REQUIRE(longer * 100 <= std::ssize(latest));
        // And it is no more than it must be: without those that last as long, it would be too
        // little.
        REQUIRE(longer + as_long > std::min<std::ptrdiff_t>(std::ssize(latest) / 100, 5));
    }
}

TEST_CASE("a first call that is cold is forgotten after sixteen others", "[compute]") {
    cost_model m;
    gpushare::limiter_core<> core;
    const auto low = core.add({}), high = core.add({.level = {1}});
    const auto call = [&](std::uint64_t key, ns took) {
        core.arrive(low, {}, {.head = {.key = key}});
        (void)core.complete(core.next({}).value(), took);
        m.learn(low, key, took);
    };
    call(1, 600ms);
    CHECK(core.bound_of(high) == 1200ms);
    for (int i = 0; i < 15; ++i) call(1, 25ms);
    CHECK(core.bound_of(high) == 1200ms);
    CHECK(m.find(low, 1).typical == 25ms);
    CHECK(m.find(low, 1).longest.get() == 600ms);
    call(1, 25ms);
    CHECK(core.bound_of(high) == 50ms);
    CHECK(m.find(low, 1).longest.get() == 25ms);
    SECTION("of each kind") {
        call(2, 600ms);
        CHECK(core.bound_of(high) == 1200ms);
        for (int i = 0; i < 16; ++i) call(i % 2 == 0 ? 1 : 2, 20ms);
        CHECK(core.bound_of(high) == 50ms);
    }
    SECTION("but one like it later counts") {
        call(1, 600ms);
        for (int i = 0; i < 100; ++i) call(1, 25ms);
        CHECK(core.bound_of(high) == 1200ms);
    }
}

TEST_CASE("only what ran alone tells what a kernel takes at least", "[compute]") {
    cost_estimate e;
    e.learn(50us, 50us, false);
    CHECK(e.shortest_alone == 0ns);
    e.learn(90us, 90us, true);
    e.learn(80us, 80us, true);
    e.learn(20us, 20us, false);
    e.learn(95us, 95us, true);
    e.learn(0us, 0us, true);  // shorter than can be measured: tells nothing
    CHECK(e.shortest_alone == 80us);
    CHECK(e.at_least(false) == 80us);
}

TEST_CASE("the few of a mixture that ran alone don't tell what the next takes at least", "[compute]") {
    cost_estimate e;
    for (int i = 0; i < 63; ++i) e.learn(900us, 900us, true);
    CHECK(e.at_least(false) == 900us);
    CHECK(e.at_least(true) == 0ns);
    e.learn(950us, 950us, true);
    CHECK(e.at_least(true) == 900us);
}

TEST_CASE("a few narrow ones in a row make a kind narrow, and not a mixture", "[compute]") {
    gpushare::detail::cost_estimate kind, mixture;
    const auto see = [&](double part) {
        kind.learn_width(gpushare::sm_width(part));
        mixture.learn_width(gpushare::sm_width(part), true);
    };
    see(0.5);
    CHECK(mixture.width.part() == 0.5);  // all that is known
    see(1);
    for (int i = 0; i < 8; ++i) see(0.5);
    CHECK(kind.width.part() < 0.7);
    CHECK(mixture.width.part() > 0.9);  // else others would be let in beside what fills the device
    for (int i = 0; i < 100; ++i) see(0.5);
    CHECK(mixture.width.part() < 0.62);
    see(1);
    CHECK(mixture.width.part() == 1);
}

TEST_CASE("kinds are told apart by key and by client, and a client that comes again starts anew", "[compute]") {
    cost_model m;
    const client_id a{0, 1}, b{1, 1}, again{0, 2};
    m.learn(a, 7, 10us);
    m.learn(a, 8, 20us);
    m.learn(b, 7, 30us);
    m.learn(a, 0, 1s);
    CHECK(m.find(a, 7).typical == 10us);
    CHECK(m.find(a, 8).typical == 20us);
    CHECK(m.find(b, 7).typical == 30us);
    CHECK(m.find(again, 7).seen == 0);
    CHECK(m.find(a, 0).seen == 0);
    CHECK(m.find(a, 9).seen == 0);
}

TEST_CASE("a key in use stays known however many keys go by, and keys are never mixed up", "[compute]") {
    const auto seed = support::seed(5);
    CAPTURE(seed);
    support::random any(seed);
    cost_model m;
    const client_id c{3, 1};
    std::map<std::uint64_t, ns> truth;
    m.learn(c, 42, 77us);
    std::uint64_t mixed_up = 0, forgotten = 0;
    for (int i = 0; i < 100'000; ++i) {
        const auto key = 1000 + any.below(any.one_in(2) ? 50 : 1'000'000'000);
        const ns took{1 + static_cast<std::int64_t>(key % 1'000'003)};  // each kind always takes the same
        if (const auto e = m.find(c, key); e.seen != 0 && e.typical != took) ++mixed_up;
        m.learn(c, key, took);
        if (m.find(c, key).typical != took) ++forgotten;
        if (i % 8 == 0) m.learn(c, 42, 77us);
    }
    CHECK(mixed_up == 0);
    CHECK(forgotten == 0);
    CHECK(m.find(c, 42).seen == 8);
}

}  // namespace cost_model_test
