// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Capacity promised ahead of time.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/placement_policy.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;

namespace {

constexpr instant at(std::chrono::hours h) { return instant{h}; }

cluster nodes(int n = 1) {
    cluster c;
    for (int i = 0; i < n; ++i) c.add({.cpu_milli = 8000, .memory = 64_GiB, .devices = 2, .device_memory = 80_GiB});
    return c;
}

constexpr placement_request one{.cpu_milli = 2000, .memory = 8_GiB, .devices = 1, .each = 100_pct};

}  // namespace

TEST_CASE("bookings that don't overlap share the same device", "[placement][calendar]") {
    capacity_calendar days(nodes());
    const placement_request both{.devices = 2, .each = 100_pct};
    REQUIRE(days.try_book(first_fit{}, both, at(1h), at(2h)));
    REQUIRE(days.try_book(first_fit{}, both, at(2h), at(3h)));  // one ends as the other begins
    const auto refused = days.try_book(first_fit{}, one, at(1h), at(3h));
    CHECK(refused.code() == errc::too_few_devices);
    CHECK(days.why_not(one, at(2h), at(3h)).missing == shortage::whole_devices);
    CHECK_FALSE(days.why_not(one, at(3h), never));
    CHECK_FALSE(days.why_not(one, at(0h), at(1h)));
}

TEST_CASE("a booking must fit all the time, not on average", "[placement][calendar]") {
    capacity_calendar days(nodes());
    // Each device is free at some moment, none all the time.
    REQUIRE(days.try_book_at({one, {0}, {device_id{0}}}, at(1h), at(2h)));
    REQUIRE(days.try_book_at({one, {0}, {device_id{1}}}, at(2h), at(3h)));
    CHECK(days.why_not(one, at(1h), at(3h)));
    CHECK_FALSE(days.why_not(one, at(1h), at(2h)));
}

TEST_CASE("uses of different hours don't add up", "[placement][calendar]") {
    capacity_calendar days(nodes());
    placement_request cores{.cpu_milli = 5000};
    REQUIRE(days.try_book(first_fit{}, cores, at(1h), at(2h)));
    REQUIRE(days.try_book(first_fit{}, cores, at(3h), at(4h)));
    cores.cpu_milli = 3000;
    CHECK(days.try_book(first_fit{}, cores, at(0h), at(9h)));
    CHECK(days.why_not({.cpu_milli = 1}, at(1h), at(2h)).missing == shortage::cpu);
    CHECK_FALSE(days.why_not({.cpu_milli = 5000}, at(2h), at(3h)));
}

TEST_CASE("an empty time can't be booked", "[placement][calendar]") {
    capacity_calendar days(nodes());
    CHECK(days.try_book(first_fit{}, one, at(2h), at(2h)).code() == errc::invalid_specification);
    CHECK(days.try_book(first_fit{}, one, at(2h), at(1h)).code() == errc::invalid_specification);
    CHECK(days.bookings().empty());
}

TEST_CASE("the earliest time is where enough bookings have ended", "[placement][calendar]") {
    capacity_calendar days(nodes());
    const placement_request both{.devices = 2, .each = 100_pct};
    REQUIRE(days.try_book(first_fit{}, one, at(0h), at(5h)));
    REQUIRE(days.try_book(first_fit{}, one, at(0h), at(3h)));
    REQUIRE(days.try_book(first_fit{}, one, at(4h), at(6h)));
    CHECK(days.earliest(one, at(0h), 1h) == at(3h));
    CHECK(days.earliest(one, at(0h), 2h) == at(5h));
    CHECK(days.earliest(both, at(0h), 1h) == at(6h));
    CHECK(days.earliest({.devices = 3, .each = 100_pct}, at(0h), 1h) == never);
}

TEST_CASE("bookings end early, are extended where nothing is in the way, and expire", "[placement][calendar]") {
    capacity_calendar days(nodes());
    const placement_request both{.devices = 2, .each = 100_pct};
    const auto first = days.try_book(first_fit{}, both, at(1h), at(2h));
    const auto second = days.try_book(first_fit{}, both, at(3h), at(4h));
    CHECK(days.try_extend(first->id, at(3h)));
    CHECK_FALSE(days.try_extend(first->id, at(3h) + 1ns));
    CHECK(days.bookings().front().end == at(3h));
    CHECK(days.try_extend(first->id, at(2h)));
    CHECK_FALSE(days.try_extend(first->id, at(1h)));
    CHECK(days.expire(at(2h)) == 1);
    CHECK_FALSE(days.try_extend(first->id, at(9h)));
    CHECK(days.cancel(second->id));
    CHECK_FALSE(days.cancel(second->id));
    CHECK(days.free_during(at(0h), never) == nodes());
}

TEST_CASE("a request that wants to be apart from a booking is, for the time of both", "[placement][calendar]") {
    capacity_calendar days(nodes(2));
    auto loud = one, quiet = one;
    loud.group = label{1};
    quiet.apart = label{1};
    REQUIRE(days.try_book(first_fit{}, loud, at(1h), at(2h)));
    CHECK(days.try_book(first_fit{}, quiet, at(1h), at(2h))->where.node == node_id{1});
    CHECK(days.try_book(first_fit{}, quiet, at(2h), at(3h))->where.node == node_id{0});
}

TEST_CASE("those who stay apart may have the same node at different times, and all of it stays bookable",
          "[placement][calendar]") {
    capacity_calendar days(nodes());
    auto loud = one, quiet = one, replica = one;
    loud.group = label{1};
    quiet.apart = label{1};
    replica.group = replica.apart = label{2};
    REQUIRE(days.try_book(first_fit{}, loud, at(1h), at(2h)));
    REQUIRE(days.try_book(first_fit{}, quiet, at(2h), at(3h)));
    REQUIRE(days.try_book(first_fit{}, replica, at(3h), at(4h)));
    REQUIRE(days.try_book(first_fit{}, replica, at(4h), at(5h)));
    CHECK(days.try_book(first_fit{}, one, at(0h), at(9h)));
    CHECK(days.why_not(loud, at(2h), at(3h)).missing == shortage::affinity);
    CHECK(days.why_not(replica, at(0h), at(4h)).missing == shortage::affinity);
}

TEST_CASE("a booking of a certain place is one like others: with an id, and not for an empty time",
          "[placement][calendar]") {
    capacity_calendar days(nodes());
    const placement first{one, {0}, {device_id{0}}};
    CHECK(days.try_book_at(first, at(2h), at(1h)).code() == errc::invalid_specification);
    CHECK(days.try_book_at(first, at(2h), at(2h)).code() == errc::invalid_specification);
    CHECK(days.bookings().empty());
    const auto booked = days.try_book_at(first, at(1h), at(2h));
    REQUIRE(booked);
    CHECK(days.try_book_at(first, at(1h), at(2h)).code() == errc::share_exceeded);
    CHECK(days.cancel(booked->id));
}

TEST_CASE("a request that wants to be near a booking has to come while it is there", "[placement][calendar]") {
    capacity_calendar days(nodes());
    auto leader = one, follower = one;
    leader.group = follower.near = label{4};
    REQUIRE(days.try_book(first_fit{}, leader, at(5h), at(7h)));
    CHECK(days.try_book(first_fit{}, follower, at(1h), at(2h)).code() == errc::no_device);
    CHECK(days.earliest(follower, at(0h), 1h) == at(5h));
}

TEST_CASE("nodes come and go under bookings, which stay and are told of", "[placement][calendar]") {
    capacity_calendar days(nodes());
    const placement_request whole{.devices = 1, .each = 100_pct};
    const auto first = days.try_book_at({whole, {0}, {device_id{0}}}, at(1h), at(3h));
    const auto second = days.try_book_at({whole, {0}, {device_id{1}}}, at(1h), never);
    REQUIRE((first && second));
    CHECK(days.try_book(first_fit{}, whole, at(2h), at(4h)).code() == errc::too_few_devices);
    CHECK(days.unkept(at(0h)).empty());
    days.change_nodes([](cluster& c) {
        c.add({.devices = 1, .device_memory = 80_GiB});
        c.drain({0}, {0});
        CHECK(c.placed_permille() == 0);
        c.apply({{.devices = 1}, {1}, {{0}}});  // is of no effect
    });
    CHECK(days.nodes().devices() == 3);
    const auto third = days.try_book(first_fit{}, whole, at(2h), at(4h));
    REQUIRE(third);
    CHECK(third->where.node.index == 1);
    CHECK(days.why_not(whole, at(3h), at(4h)));  // the first has ended, and the device takes nothing new
    CHECK(days.unkept(at(0h)) == std::vector{*first});
    CHECK(days.unkept(at(3h)).empty());
    days.change_nodes([](cluster& c) {
        c.resume({0}, {0});
        c.resize({0}, {1}, 1_GiB);
    });
    CHECK(days.unkept(at(0h)).empty());
    CHECK_FALSE(days.why_not(whole, at(3h), at(4h)));
    days.change_nodes([](cluster& c) { c.remove({0}); });
    CHECK(days.unkept(at(0h)) == std::vector{*first, *second});
    CHECK(days.earliest(whole, at(0h), 1h) == at(0h));
    CHECK(days.earliest(whole, at(2h), 3h) == at(4h));
    CHECK(days.cancel(second->id));
    CHECK_THROWS_AS(days.change_nodes([](cluster& c) { c.drain({9}); }), operation_error);
    CHECK(days.nodes().devices() == 1);
}

// Hour by hour, what is booked must fit on the nodes together; and what was refused fits in no
// place.
TEST_CASE("random bookings never exceed a node at any hour", "[placement][calendar][property]") {
    for (std::uint64_t run = 0; run < 60; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        capacity_calendar days(nodes(2));
        const auto fits_every_hour = [&](const placement& p, int from, int to) {
            for (int h = from; h < to; ++h) {
                cluster c = nodes(2);
                for (const auto& b : days.bookings())
                    if (b.begin <= at(std::chrono::hours(h)) && b.end > at(std::chrono::hours(h)))
                        if (c.try_apply(b.where)) return false;
                if (c.try_apply(p)) return false;
            }
            return true;
        };
        for (int step = 0; step < 40; ++step) {
            const int from = static_cast<int>(any.below(20)), to = from + 1 + static_cast<int>(any.below(6));
            const placement_request r{.cpu_milli = any.below(5000),
                                      .devices = 1,
                                      .each = share::of_permille(1 + any.below(1000)),
                                      .device_memory = bytes{any.below(80)} * (1_GiB).count()};
            const auto booked = days.try_book(best_fit{}, r, at(std::chrono::hours(from)), at(std::chrono::hours(to)));
            if (booked) {
                const auto where = booked->where;
                REQUIRE(days.cancel(booked->id));
                REQUIRE(fits_every_hour(where, from, to));
                REQUIRE(days.try_book_at(where, at(std::chrono::hours(from)), at(std::chrono::hours(to))));
            } else {
                for (std::uint32_t n = 0; n < 2; ++n)
                    for (std::uint32_t d = 0; d < 2; ++d)
                        REQUIRE_FALSE(fits_every_hour({r, {n}, {device_id{d}}}, from, to));
            }
            if (any.one_in(5) && !days.bookings().empty()) days.cancel(any.of(days.bookings()).id);
        }
    }
}
