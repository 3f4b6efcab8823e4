// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Several requests, all or none.
#include <cstdint>
#include <vector>

#include <gpushare/placement/placement_policy.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::literals;

namespace {

cluster two_nodes() {
    cluster c;
    for (int i = 0; i < 2; ++i) c.add({.cpu_milli = 32'000, .memory = 128_GiB, .devices = 4, .device_memory = 80_GiB});
    return c;
}

placement_request whole(std::uint32_t devices) { return {.cpu_milli = 1000, .devices = devices, .each = 100_pct}; }

}  // namespace

TEST_CASE("a gang's plan changes nothing until it is applied, and then everything", "[placement][gang]") {
    cluster c = two_nodes();
    const cluster before = c;
    const std::vector gang{whole(1), whole(4), whole(3)};
    const auto plan = plan_gang(first_fit{}, c, gang);
    REQUIRE(plan);
    CHECK(c == before);
    for (std::size_t i = 0; i < gang.size(); ++i) CHECK((*plan.placements)[i].request == gang[i]);
    apply_gang(c, *plan.placements);
    CHECK(c.placed_permille() == c.capacity_permille());
    for (const auto& p : *plan.placements) c.release(p);
    CHECK(c == before);
}

TEST_CASE("a gang that doesn't fit names the member and what it lacks", "[placement][gang]") {
    const cluster c = two_nodes();
    const std::vector gang{whole(3), whole(3), whole(2)};
    const auto plan = plan_gang(first_fit{}, c, gang);
    CHECK_FALSE(plan);
    CHECK(plan.member == 2);
    CHECK(plan.why.missing == shortage::whole_devices);
    CHECK(plan.why.asked == 2);
    CHECK(plan.why.left == 1);
}

TEST_CASE("large members are placed before small ones can break up their nodes", "[placement][gang]") {
    const cluster c = two_nodes();
    // In the order given, the single devices would take one of each node.
    const std::vector gang{whole(1), whole(1), whole(1), whole(1), whole(4)};
    CHECK(plan_gang(spreading{}, c, gang));
}

TEST_CASE("members that want to be apart, or near, are", "[placement][gang]") {
    const cluster c = two_nodes();
    auto replica = whole(1);
    replica.group = replica.apart = label{7};
    const auto apart = plan_gang(first_fit{}, c, std::vector{replica, replica});
    REQUIRE(apart);
    CHECK((*apart.placements)[0].node != (*apart.placements)[1].node);
    const auto third = plan_gang(first_fit{}, c, std::vector{replica, replica, replica});
    CHECK_FALSE(third);
    CHECK(third.why.missing == shortage::affinity);

    auto worker = whole(1);
    worker.group = worker.near = label{8};
    const auto near = plan_gang(spreading{}, c, std::vector{worker, worker, worker, worker});
    REQUIRE(near);
    for (const auto& p : *near.placements) CHECK(p.node == near.placements->front().node);
    CHECK_FALSE(plan_gang(spreading{}, c, std::vector(5, worker)));
}

TEST_CASE("a large member that wants to be near a small one is placed behind it", "[placement][gang]") {
    const cluster c = two_nodes();
    auto leader = whole(1), follower = whole(3);
    leader.group = follower.near = label{9};
    const auto plan = plan_gang(spreading{}, c, std::vector{follower, leader});
    REQUIRE(plan);
    CHECK((*plan.placements)[0].node == (*plan.placements)[1].node);
}

TEST_CASE("a member that wants to be near another one may stand before it in the list", "[placement][gang]") {
    cluster c;
    for (int i = 0; i < 2; ++i) c.add({.devices = 2});
    const placement_request follower{.devices = 1, .each = 100_pct, .near = {4}},
        leader{.devices = 1, .each = 100_pct, .group = {4}};
    const std::vector<placement_request> members{follower, leader};
    const auto plan = plan_gang(gpushare::spreading{}, c, members);
    REQUIRE(plan);
    CHECK_FALSE(try_apply_gang(c, *plan.placements));
    CHECK(plan.placements->at(0).node == plan.placements->at(1).node);
    CHECK(c.placed_permille() == 2000);
}

TEST_CASE("a gang whose plan is out of date is refused whole", "[placement][gang]") {
    cluster c = two_nodes();
    const auto plan = plan_gang(first_fit{}, c, std::vector{whole(4), whole(4)});
    REQUIRE(plan);
    c.apply({whole(1), {1}, {device_id{0}}});
    const cluster before = c;
    CHECK(try_apply_gang(c, *plan.placements));
    CHECK(c == before);
    CHECK_THROWS_AS(apply_gang(c, *plan.placements), operation_error);
    CHECK(c == before);
}

TEST_CASE("random gangs are placed whole or leave no trace", "[placement][gang][property]") {
    for (std::uint64_t run = 0; run < 200; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        cluster c = two_nodes();
        std::vector<placement> placed;
        for (int step = 0; step < 50; ++step) {
            std::vector<placement_request> gang(1 + any.below(4));
            for (auto& r : gang)
                r = any.one_in(3) ? whole(1 + static_cast<std::uint32_t>(any.below(4)))
                                  : placement_request{.cpu_milli = any.below(9000),
                                                      .devices = 1,
                                                      .each = share::of_permille(1 + any.below(999)),
                                                      .device_memory = bytes{any.below(40)} * (1_GiB).count()};
            const auto before = c;
            const auto plan = plan_gang(best_fit{}, c, gang);
            REQUIRE(c == before);
            if (plan) {
                REQUIRE_FALSE(try_apply_gang(c, *plan.placements));
                placed.insert(placed.end(), plan.placements->begin(), plan.placements->end());
            } else {
                REQUIRE(plan.why);
                REQUIRE(plan.member < gang.size());
            }
            while (!placed.empty() && any.one_in(2)) {
                c.release(placed.back());
                placed.pop_back();
            }
        }
        for (const auto& p : placed) c.release(p);
        CHECK(c == two_nodes());
    }
}
