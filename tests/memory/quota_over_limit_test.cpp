// SPDX-License-Identifier: Apache-2.0
// Quotas in edge cases: over their limit after a resize while threads charge and release, and the
// amount that a resize could still grant.
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::quota;
using gpushare::quota_claim;

namespace {

/// `q` is charged with 100,000 bytes and over its limit. Threads give back all but `left` one by
/// one, others charge whatever is free: none of it may be, because what is charged stays over the
/// limit all the time.
void check_over_limit(quota& q, std::uint64_t left) {
    std::atomic<std::uint64_t> granted{0}, lost{0};
    {
        support::background greedy(1, [&](unsigned) {
            if (q.try_charge(1_B) == errc::none) granted.fetch_add(1);
        });
        support::together(2, [&](unsigned) {
            for (std::uint64_t i = 0; i < (100'000 - left) / 2; ++i)
                if (!q.release(1_B)) lost.fetch_add(1);
        });
    }
    CHECK(granted.load() == 0);
    CHECK(lost.load() == 0);
    CHECK(q.usage().current == gpushare::bytes{left});
}

}  // namespace

TEST_CASE("nothing is granted while a quota is over its limit, whatever is released", "[memory][quota][attack]") {
    quota device{200'000_B};
    SECTION("a root") {
        REQUIRE(device.try_charge(100'000_B) == errc::none);
        REQUIRE(device.resize(100_B, 0_B) == errc::none);
        check_over_limit(device, 100);
        CHECK(device.release(1_B));
        CHECK(device.try_charge(2_B) == errc::over_quota);
        CHECK(device.try_charge(1_B) == errc::none);
        CHECK(device.resize(200_B, 0_B) == errc::none);
        CHECK(device.try_charge(100_B) == errc::none);
    }
    SECTION("a child whose guarantee shrinks, with burst left to it") {
        quota child{device, 90'000_B, 10'000_B};
        REQUIRE(child.try_charge(100'000_B) == errc::none);
        REQUIRE(child.resize(50_B, 50_B) == errc::none);
        check_over_limit(child, 100);
        CHECK(device.usage().current == 100_B);
        CHECK(child.release(60_B));
        CHECK(device.usage().current == 50_B);
        CHECK(child.try_charge(60_B) == errc::none);
        CHECK(child.usage().borrowed == 50_B);
        CHECK(child.release(100_B));
        CHECK(child.usage().borrowed == 0_B);
    }
    SECTION("a resize up ends it at once") {
        quota child{device, 100'000_B};
        REQUIRE(child.try_charge(100'000_B) == errc::none);
        REQUIRE(child.resize(50_B, 50_B) == errc::none);
        REQUIRE(child.resize(50_B, 100'000_B) == errc::none);
        CHECK(child.try_charge(50_B) == errc::none);
        CHECK(child.try_charge(1_B) == errc::over_quota);
        CHECK(child.release(100'050_B));
        CHECK(device.usage().current == 50_B);
    }
}

TEST_CASE("a refusal by quotas over their limits counts nothing twice", "[memory][quota]") {
    // Whoever passes on what is idle below it mustn't take it from the quota that is asking just
    // now.
    quota device{100_B};
    quota outer{device, 0_B, 100_B};
    quota inner{outer, 0_B, 100_B};
    quota a{inner, 0_B, 100_B}, b{inner, 0_B, 100_B};
    REQUIRE(a.try_charge(10_B) == errc::none);
    REQUIRE(b.try_charge(20_B) == errc::none);
    REQUIRE(inner.resize(0_B, 5_B) == errc::none);
    REQUIRE(outer.resize(0_B, 5_B) == errc::none);
    CHECK(a.release(3_B));
    CHECK(b.release(5_B));
    CHECK(a.try_charge(10_B) == errc::out_of_memory);
    CHECK(a.usage().current == 7_B);
    CHECK(inner.usage().current == 22_B);
    CHECK(device.usage().current == 22_B);
    CHECK(a.release(7_B));
    CHECK(b.release(15_B));
    CHECK(device.usage().current == 0_B);
}

TEST_CASE("bytes released below a quota over its limit can't be had again", "[memory][quota]") {
    quota device{100_B};
    quota outer{device, 10_B, 90_B};
    quota a{outer, 0_B, 100_B}, b{outer, 10_B, 0_B};
    REQUIRE(a.try_charge(60_B) == errc::none);
    REQUIRE(outer.resize(10_B, 40_B) == errc::none);
    CHECK(a.pressed());
    CHECK(a.release(15_B));
    CHECK(a.try_charge(1_B) == errc::out_of_memory);
    CHECK(b.try_charge(10_B) == errc::none);  // a guarantee is there as before
    CHECK(a.pressed());
    CHECK(a.release(10_B));
    CHECK_FALSE(a.pressed());
    CHECK(a.try_charge(6_B) == errc::out_of_memory);
    CHECK(a.try_charge(5_B) == errc::none);
    CHECK(device.usage().current == 50_B);
    CHECK(a.release(40_B));
    CHECK(b.release(10_B));
    CHECK(device.usage().current == 10_B);
}

TEST_CASE("a quota of guaranteed bytes borrows nothing by a resize that fits", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 50_B}, b{device, 0_B, 60_B}, c{device, 0_B, 60_B};
    REQUIRE(a.resize(40_B, 0_B) == errc::none);
    REQUIRE(b.try_charge(60_B) == errc::none);
    {
        const quota_claim waits{c, 10_B};
        CHECK(b.pressed());
        CHECK_FALSE(a.pressed());  // nothing that it has could serve the claim
    }
    REQUIRE(a.try_charge(40_B) == errc::none);
    REQUIRE(a.resize(30_B, 0_B) == errc::none);  // now it owes ten
    CHECK(a.pressed());
    CHECK(a.release(10_B));
    CHECK_FALSE(a.pressed());
    CHECK(c.try_charge(10_B) == errc::none);
    CHECK(a.release(30_B));
    CHECK(b.release(60_B));
    CHECK(c.release(10_B));
}

TEST_CASE("below a root over its limit borrowers are pressed until it fits", "[memory][quota]") {
    quota device{100_B};
    quota guaranteed{device, 20_B}, a{device, 10_B, 90_B};
    REQUIRE(guaranteed.try_charge(20_B) == errc::none);
    REQUIRE(a.try_charge(80_B) == errc::none);
    REQUIRE(device.resize(70_B, 0_B) == errc::none);
    CHECK(a.wanted_back());
    CHECK_FALSE(guaranteed.wanted_back());
    CHECK(a.release(29_B));
    CHECK(a.wanted_back());
    CHECK(a.release(1_B));
    CHECK_FALSE(a.wanted_back());
    CHECK_FALSE(a.pressed());
    CHECK(a.release(50_B));
    CHECK(guaranteed.release(20_B));
}

TEST_CASE("figures stay exact over the limit", "[memory][quota]") {
    quota q{1'000_B};
    for (int i = 0; i < 1'000; ++i) REQUIRE(q.try_charge(1_B) == errc::none);
    REQUIRE(q.resize(10_B, 0_B) == errc::none);
    CHECK_FALSE(q.release(1'001_B));
    for (int i = 0; i < 1'000; ++i) {
        CHECK(q.usage().current.count() == 1'000U - static_cast<unsigned>(i));
        REQUIRE(q.release(1_B));
    }
    CHECK_FALSE(q.release(1_B));
    CHECK(q.usage().charges == 1'000);
    CHECK(q.usage().releases == 1'000);
    CHECK(q.usage().peak == 1'000_B);
    CHECK(q.free() == 10_B);
}

TEST_CASE("a quota knows the largest guarantee that it could grow to", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 20_B, 30_B}, b{device, 40_B};
    CHECK(a.guarantee_room() == 60_B);
    REQUIRE(a.try_charge(35_B) == errc::none);  // 15 of them borrowed
    CHECK(a.guarantee_room() == 60_B);
    CHECK(b.guarantee_room() == 65_B);
    CHECK(b.resize(66_B, 0_B) == errc::no_room);
    CHECK(b.resize(65_B, 0_B) == errc::none);
    CHECK(a.guarantee_room() == 35_B);
    CHECK(a.resize(36_B, 0_B) == errc::no_room);
    CHECK(a.resize(35_B, 0_B) == errc::none);
    CHECK(device.guarantee_room() == quota::max_limit());
    CHECK(a.release(35_B));
}

TEST_CASE("quotas of one root exchange what they have, all or none", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 40_B}, b{device, 60_B}, small{b, 10_B};
    const auto exchange = [&](std::vector<gpushare::quota_limits> wanted) {
        gpushare::quota_exchange change(device, std::move(wanted));
        const auto why = change.prepare();
        if (why.code == errc::none) change.commit();
        return std::pair(why, change.refused());
    };
    CHECK(exchange({{&a, 60_B, {}}, {&b, 40_B, {}}}).first.code == errc::none);
    CHECK(a.free() == 60_B);
    CHECK(b.free() == 30_B);
    CHECK(device.free() == 0_B);
    const auto [why, which] = exchange({{&a, 20_B, {}}, {&b, 81_B, {}}});
    CHECK(why.code == errc::no_room);
    CHECK(why.left == 80);
    CHECK(which == 1);
    CHECK(a.usage().guaranteed == 60_B);
    CHECK(b.usage().guaranteed == 40_B);
    REQUIRE(a.try_charge(50_B) == errc::none);
    CHECK(exchange({{&a, 20_B, {}}, {&b, 80_B, {}}}).first.code == errc::no_room);  // it uses them
    CHECK(a.free() == 10_B);
    CHECK(a.release(50_B));
    CHECK(exchange({{&small, 10_B, {}}}).first.code == errc::invalid_specification);  // not right below the root
    gpushare::quota_exchange prepared(device, {{&a, 10_B, {}}, {&b, 90_B, {}}});
    REQUIRE(prepared.prepare().code == errc::none);
    prepared.abandon();
    CHECK(a.free() == 60_B);
    prepared.want(1, {&b, 91_B, {}});
    CHECK(prepared.prepare().code == errc::no_room);
    CHECK(prepared.refused() == 1);
    CHECK(device.free() == 0_B);
    CHECK(device.promisable() == 0_B);
    b.stop();
    CHECK(exchange({{&a, 50_B, {}}, {&b, 50_B, {}}}).first.code == errc::closed);
    CHECK(a.usage().guaranteed == 60_B);
}

TEST_CASE("exchanged bytes are lent to no other quota in between", "[memory][quota][attack]") {
    quota device{100'000_B};
    quota a{device, 30'000_B}, b{device, 70'000_B}, burst{device, 0_B, 100'000_B};
    std::atomic<std::uint64_t> granted{0}, refused{0};
    {
        support::background greedy(2, [&](unsigned) {
            if (burst.try_charge(1'000_B) == errc::none) granted.fetch_add(1), (void)burst.release(1'000_B);
        });
        for (int i = 0; i < 2'000; ++i) {
            const bool there = i % 2 == 0;
            gpushare::quota_exchange change(
                device, {{&a, there ? 70'000_B : 30'000_B, {}}, {&b, there ? 30'000_B : 70'000_B, {}}});
            if (change.prepare().code == errc::none)
                change.commit();
            else
                refused.fetch_add(1);
        }
    }
    CHECK(granted.load() == 0);
    CHECK(refused.load() == 0);
    CHECK(a.usage().guaranteed + b.usage().guaranteed == 100'000_B);
}

TEST_CASE("a refused exchange changes nothing below a root that is over its limit", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 50_B}, b{device, 50_B};
    REQUIRE(device.resize(80_B, {}) == errc::none);
    gpushare::quota_exchange change(device, {{&a, 30_B, {}}, {&b, 75_B, {}}});
    const auto why = change.prepare();
    CHECK(why.code == errc::no_room);
    CHECK(why.left == 50);  // the root has to pay its 20 bytes first
    CHECK(a.usage().guaranteed == 50_B);
    CHECK(a.free() == 50_B);
    CHECK(b.usage().guaranteed == 50_B);
    CHECK(device.usage().current == 100_B);
    CHECK(device.usage().borrowed == 20_B);
    gpushare::quota_exchange fits(device, {{&a, 20_B, {}}, {&b, 60_B, {}}});
    REQUIRE(fits.prepare().code == errc::none);
    fits.commit();
    CHECK(b.free() == 60_B);
    CHECK_FALSE(device.over());
}

TEST_CASE("an exchange that is abandoned is invisible to those that it would have shrunk", "[memory][quota][attack]") {
    for (int round = 0; round < 20; ++round) {
        quota device{100_B};
        quota a{device, 50_B}, b{device, 50_B};
        gpushare::quota_exchange change(device, {{&a, 10_B, {}}, {&b, 90_B, {}}});
        REQUIRE(change.prepare().code == errc::none);
        std::atomic<bool> there{false};
        errc charged = errc::none;
        {
            const std::jthread owner([&] {
                there = true;
                charged = a.try_charge(50_B);
            });
            while (!there) std::this_thread::yield();
            support::spin(10'000);
            change.abandon();
        }
        CHECK(charged == errc::none);
        CHECK(b.free() == 50_B);
    }
}

TEST_CASE("a transfer of more than is charged moves nothing", "[memory][quota]") {
    quota device{100_B}, other{100_B};
    quota from{device, 40_B, 60_B}, beside{device, 40_B, 20_B}, elsewhere{other, 100_B};
    REQUIRE(from.try_charge(10_B) == errc::none);
    for (quota* const to : {&beside, &elsewhere, &from}) {
        const auto before = to->usage().current;
        const auto moved = gpushare::try_transfer(from, *to, 11_B);
        CHECK(moved.why == errc::wrong_size);
        CHECK(moved.kept);
        CHECK(to->usage().current == before);
        CHECK(from.usage().current == 10_B);
    }
    CHECK(gpushare::try_transfer(from, beside, 10_B).why == errc::none);
    CHECK(beside.usage().current == 10_B);
    CHECK(from.usage().current == 0_B);
}

TEST_CASE("a transfer that is refused leaves the charge where it was", "[memory][quota]") {
    quota device{100_B};
    quota from{device, 0_B, 100_B};
    const auto stays = [&](quota& to, gpushare::bytes n) {
        const auto before = from.usage().current, above = device.usage().current;
        const auto moved = gpushare::try_transfer(from, to, n);
        CHECK(moved.why == errc::out_of_memory);
        CHECK(moved.kept);
        CHECK(from.usage().current == before);
        CHECK(device.usage().current == above);
        CHECK(from.pressed() == from.wanted_back());
    };
    SECTION("where that is over its limit") {
        quota between{device, 20_B};
        quota to{between, 0_B, 50_B};
        REQUIRE(from.try_charge(50_B) == errc::none);
        REQUIRE(from.resize(0_B, 30_B) == errc::none);
        stays(to, 30_B);
        CHECK(from.over());
    }
    SECTION("where the root is over its limit") {
        quota to{device, 0_B, 100_B};
        REQUIRE(from.try_charge(100_B) == errc::none);
        REQUIRE(device.resize(80_B, {}) == errc::none);
        stays(to, 10_B);
        CHECK(device.usage().borrowed == 20_B);
    }
    SECTION("where others wait for the bytes") {
        quota to{device, 0_B, 100_B}, third{device, 0_B, 100_B};
        REQUIRE(from.try_charge(100_B) == errc::none);
        const quota_claim waits(third, 10_B);
        stays(to, 10_B);
        CHECK(waits.state() == gpushare::claim_state::waiting);
    }
    CHECK(from.release(from.usage().current));
}
