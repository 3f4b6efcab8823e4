// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Which tenants a request of a higher level may displace, and how.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement_policy.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace preemption_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;

namespace {

cluster nodes(int n = 1) {
    cluster c;
    for (int i = 0; i < n; ++i) c.add({.cpu_milli = 64'000, .memory = 256_GiB, .devices = 4, .device_memory = 80_GiB});
    return c;
}

placement_request devices(std::uint32_t n) { return {.devices = n, .each = 100_pct}; }

/// A cluster with tenants on it, each on devices of its own.
struct scene {
    explicit scene(int n = 1) : on(nodes(n)) {}

    std::size_t add(std::uint32_t node, device_set at, int level) {
        const placement p{devices(at.size()), {node}, at};
        on.apply(p);
        placed.push_back({p, {level}});
        return placed.size() - 1;
    }

    cluster on;
    std::vector<placed_tenant> placed{};
};

}  // namespace

TEST_CASE("nobody goes for what fits anyway, or for what wouldn't fit even then", "[placement][preemption]") {
    scene s;
    s.add(0, {device_id{0}, device_id{1}}, 0);
    CHECK_FALSE(plan_preemption(first_fit{}, s.on, s.placed, devices(2), priority{9}));
    CHECK_FALSE(plan_preemption(first_fit{}, s.on, s.placed, devices(5), priority{9}));
}

TEST_CASE("an equal or higher level is never displaced", "[placement][preemption]") {
    scene s;
    s.add(0, {device_id{0}, device_id{1}}, 1);
    s.add(0, {device_id{2}, device_id{3}}, 2);
    CHECK_FALSE(plan_preemption(first_fit{}, s.on, s.placed, devices(1), priority{1}));
    CHECK_FALSE(plan_preemption(first_fit{}, s.on, s.placed, devices(3), priority{2}));
    CHECK(plan_preemption(first_fit{}, s.on, s.placed, devices(4), priority{3}));
}

TEST_CASE("the lowest level goes, wherever it is, and no more of it than is needed", "[placement][preemption]") {
    scene s(2);
    s.add(0, {device_id{0}, device_id{1}, device_id{2}, device_id{3}}, 1);
    const auto a = s.add(1, {device_id{0}}, 0);
    const auto b = s.add(1, {device_id{1}, device_id{2}}, 0);
    s.add(1, {device_id{3}}, 1);
    const auto two = plan_preemption(first_fit{}, s.on, s.placed, devices(2), priority{2});
    REQUIRE(two);
    CHECK(two->victims == std::vector{b});
    const auto three = plan_preemption(first_fit{}, s.on, s.placed, devices(3), priority{2});
    REQUIRE(three);
    CHECK(three->victims == std::vector{a, b});
    CHECK(three->added.node == node_id{1});
    const auto one = plan_preemption(first_fit{}, s.on, s.placed, devices(1), priority{2});
    REQUIRE(one);
    CHECK(one->victims == std::vector{a});  // the one that loses least
}

TEST_CASE("tenants that are near one another or apart can be displaced in any order", "[placement][preemption]") {
    scene s;
    auto leader = devices(1), follower = devices(2);
    leader.group = follower.near = label{3};
    for (const auto& [request, on] :
         {std::pair{leader, device_set{device_id{0}}}, std::pair{follower, device_set{device_id{1}, device_id{2}}}}) {
        s.on.apply({request, {0}, on});
        s.placed.push_back({{request, {0}, on}, {0}});
    }
    const auto all = plan_preemption(first_fit{}, s.on, s.placed, devices(4), priority{1});
    REQUIRE(all);
    CHECK(all->victims.size() == 2);
    const auto one = plan_preemption(first_fit{}, s.on, s.placed, devices(2), priority{1});
    REQUIRE(one);
    CHECK(one->victims == std::vector<std::size_t>{0});  // the follower may stay where it is
}

TEST_CASE("a placement that a request wants to be near isn't displaced for it", "[placement][preemption]") {
    scene s;
    auto leader = devices(1), asked = devices(2);
    leader.group = asked.near = label{3};
    const placement at{leader, {0}, {device_id{0}}};
    s.on.apply(at);
    s.placed.push_back({at, {0}});
    const auto other = s.add(0, {device_id{1}, device_id{2}, device_id{3}}, 0);
    const auto plan = plan_preemption(first_fit{}, s.on, s.placed, asked, priority{1});
    REQUIRE(plan);
    CHECK(plan->victims == std::vector{other});
}

TEST_CASE("a preemption waits for its notice, or until everybody has gone", "[placement][preemption]") {
    scene s;
    const auto a = s.add(0, {device_id{0}, device_id{1}}, 0);
    const auto b = s.add(0, {device_id{2}, device_id{3}}, 0);
    auto plan = plan_preemption(first_fit{}, s.on, s.placed, devices(4), priority{1});
    REQUIRE(plan);
    constexpr instant now{1h};
    preemption p(*plan, now, 30s);
    CHECK(p.until() == now + 30s);
    CHECK_FALSE(p.ready(now + 29s));
    CHECK(p.remaining().size() == 2);

    CHECK(p.left(a));
    CHECK_FALSE(p.left(a));
    CHECK_FALSE(p.left(17));
    s.on.release(s.placed[a].where);
    CHECK(p.finish(s.on).missing == shortage::whole_devices);  // one is still there
    CHECK(p.ready(now + 30s));
    CHECK(std::ranges::equal(p.remaining(), std::vector{b}));
    CHECK(p.left(b));
    CHECK(p.ready(now));  // without waiting for the notice to run out
    s.on.release(s.placed[b].where);
    CHECK_FALSE(p.finish(s.on));
    CHECK(s.on.placed_permille() == 4000);
}

TEST_CASE("a notice without end is one", "[placement][preemption]") {
    const preemption p({.victims = {0}}, instant{1h}, ns::max());
    CHECK(p.until() == never);
    CHECK_FALSE(p.ready(never - 1ns));
}

// Against every set of victims of every node.
TEST_CASE("plans are enough, never of too high a level, and no victim is needless",
          "[placement][preemption][property]") {
    for (std::uint64_t run = 0; run < support::few(400U); ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        cluster c = nodes(2);
        std::vector<placed_tenant> placed;
        for (int i = 0; i < 12; ++i) {
            const placement_request r{
                .cpu_milli = any.below(20'000), .devices = 1, .each = share::of_permille(100 * (1 + any.below(10)))};
            if (const auto p = choose(best_fit{}, c, r)) {
                c.apply(*p);
                placed.push_back({*p, {static_cast<std::int32_t>(any.below(4))}});
            }
        }
        const auto asked = devices(1 + static_cast<std::uint32_t>(any.below(4)));
        const priority level{static_cast<std::int32_t>(1 + any.below(4))};
        const auto plan = plan_preemption(best_fit{}, c, placed, asked, level);

        // The lowest level to which somebody has to be displaced, by brute force.
        std::int32_t lowest = level.level;
        for (std::uint32_t set = 1; set < 1U << placed.size(); ++set) {
            cluster after = c;
            std::int32_t highest = -1;
            for (std::size_t i = 0; i < placed.size(); ++i) {
                if ((set >> i & 1) == 0) continue;
                highest = std::max(highest, placed[i].level.level);
                after.release(placed[i].where);
            }
            if (highest < lowest && choose(first_fit{}, after, asked)) lowest = highest;
        }
        if (choose(first_fit{}, c, asked) || lowest == level.level) {
            REQUIRE_FALSE(plan);
            continue;
        }
        REQUIRE(plan);
        std::int32_t highest = -1;
        cluster after = c;
        for (const auto v : plan->victims) {
            highest = std::max(highest, placed[v].level.level);
            after.release(placed[v].where);
        }
        CHECK(highest == lowest);
        for (const auto v : plan->victims) {  // with any of them back, it doesn't fit
            cluster with = after;
            with.apply(placed[v].where);
            CHECK_FALSE(with.fits(asked, plan->added.node));
        }
        CHECK_FALSE(after.try_apply(plan->added));
    }
}

TEST_CASE("a gang displaces victims on several nodes, of the lowest level that will do", "[placement][preemption]") {
    scene s(3);
    const auto low = s.add(0, {device_id{0}, device_id{1}, device_id{2}}, 0);
    const auto middle = s.add(1, {device_id{0}, device_id{1}, device_id{2}}, 1);
    const auto high = s.add(2, {device_id{0}, device_id{1}, device_id{2}}, 2);
    const std::vector<placement_request> pair{devices(4), devices(4)}, one{devices(4)}, small{devices(1), devices(1)};
    CHECK_FALSE(plan_preemption(best_fit{}, s.on, s.placed, small, priority{9}));  // fits anyway
    CHECK_FALSE(plan_preemption(best_fit{}, s.on, s.placed, pair, priority{1}));
    const auto plan = plan_preemption(best_fit{}, s.on, s.placed, pair, priority{9});
    REQUIRE(plan);
    CHECK(plan->victims == std::vector{low, middle});
    CHECK(plan->beside.size() == 1);
    CHECK(plan_preemption(best_fit{}, s.on, s.placed, one, priority{9})->victims == std::vector{low});
    preemption p(*plan, instant{}, 1s);
    const cluster before = s.on;
    CHECK(p.finish(s.on).missing != shortage::none);
    CHECK(s.on == before);  // all of it or nothing
    s.on.release(s.placed[low].where);
    CHECK(p.finish(s.on));
    s.on.release(s.placed[middle].where);
    CHECK_FALSE(p.finish(s.on));
    CHECK(s.on.placed_permille() == 11'000);
    CHECK(s.placed[high].level == priority{2});
}

TEST_CASE("a placement that a gang leaves room for doesn't go for it", "[placement][preemption]") {
    scene s(2);
    const auto two = s.add(0, {device_id{0}, device_id{1}}, 0);
    s.add(0, {device_id{2}}, 0);
    s.add(0, {device_id{3}}, 2);
    s.add(1, {device_id{0}, device_id{1}}, 0);
    s.add(1, {device_id{2}, device_id{3}}, 2);
    const std::vector<placement_request> pair{devices(2), devices(2)}, small{devices(1), devices(1)};
    const auto plan = plan_preemption(best_fit{}, s.on, s.placed, small, priority{1});
    REQUIRE(plan);
    CHECK(plan->victims.size() == 1);  // of the two that have two devices
    const auto larger = plan_preemption(best_fit{}, s.on, s.placed, pair, priority{1});
    REQUIRE(larger);
    CHECK(larger->victims == std::vector<std::size_t>{two, 3});
}

}  // namespace preemption_test
