// SPDX-License-Identifier: Apache-2.0
// Loans that a quota keeps after their bytes were released: they make the next burst fast, and
// never delay another quota.
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/threads.hpp"

namespace quota_loans_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::quota;

namespace {

/// Borrows `n` and releases it again: what is left is idle.
void leave_idle(quota& q, bytes n) {
    REQUIRE(q.try_charge(n) == errc::none);
    REQUIRE(q.release(n));
}

}  // namespace

TEST_CASE("an idle loan is there for siblings, parents and the root", "[memory][quota]") {
    quota node{100_B};
    quota device{node, 0_B, 100_B};
    quota a{device, 0_B, 100_B}, b{device, 10_B, 90_B};
    quota below{a, 0_B, 100_B};
    leave_idle(below, 90_B);

    SECTION("a sibling of its parent") { CHECK(b.try_charge(100_B) == errc::none); }
    SECTION("its parent") { CHECK(a.try_charge(90_B) == errc::none); }
    SECTION("the level above") { CHECK(device.try_charge(90_B) == errc::none); }
    SECTION("the root") { CHECK(node.try_charge(90_B) == errc::none); }
    SECTION("a guarantee") { CHECK(b.resize(100_B, 0_B) == errc::none); }
    SECTION("a new child") { CHECK_NOTHROW(quota{node, 90_B}); }
    SECTION("not a byte more") {
        CHECK(b.try_charge(101_B) == errc::over_quota);
        CHECK(a.try_charge(91_B) == errc::out_of_memory);
        CHECK(node.try_charge(91_B) == errc::over_quota);
        CHECK(below.try_charge(90_B) == errc::none);
    }
}

TEST_CASE("several idle loans are gathered for one charge", "[memory][quota]") {
    quota device{100_B};
    std::vector<std::unique_ptr<quota>> some;
    for (int i = 0; i < 10; ++i) some.push_back(std::make_unique<quota>(device, 0_B, 10_B));
    for (auto& q : some) REQUIRE(q->try_charge(10_B) == errc::none);
    for (auto& q : some) REQUIRE(q->release(9_B));
    CHECK(device.try_charge(91_B) == errc::over_quota);
    CHECK(device.try_charge(90_B) == errc::none);
    CHECK(some.front()->try_charge(1_B) == errc::out_of_memory);
}

TEST_CASE("no figure counts an idle loan as used", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 10_B, 60_B}, b{device, 10_B, 60_B};
    leave_idle(a, 60_B);
    CHECK(b.free() == 70_B);
    leave_idle(b, 60_B);
    CHECK(a.usage().borrowed == 0_B);
    CHECK(device.usage().current == 20_B);
    CHECK(device.usage().peak == 70_B);  // never both at once
    CHECK(device.free() == 80_B);
    CHECK(b.guarantee_room() == 90_B);
}

TEST_CASE("a loan that is idle when its burst is taken away goes back", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 0_B, 100_B};
    quota below{a, 0_B, 100_B};
    leave_idle(below, 50_B);
    CHECK(a.resize(0_B, 0_B) == errc::none);
    CHECK(device.try_charge(100_B) == errc::none);
    CHECK(below.try_charge(1_B) == errc::out_of_memory);
}

TEST_CASE("a child that is over its limit passes on what its own children leave idle", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 50_B, 0_B};
    quota below{a, 0_B, 50_B};
    REQUIRE(below.try_charge(50_B) == errc::none);
    REQUIRE(a.resize(10_B, 0_B) == errc::none);
    CHECK(device.try_charge(60_B) == errc::over_quota);
    CHECK(below.release(40_B));
    CHECK(device.try_charge(90_B) == errc::none);
    CHECK(device.try_charge(1_B) == errc::over_quota);
    CHECK(below.release(10_B));
}

// What one thread holds moves between two children, each of which keeps a loan for it. Unless all
// are frozen at one moment, whoever gathers finds the one in use, then the other, and refuses what
// has fitted all the time.
TEST_CASE("bytes that move between siblings are not counted twice by who gathers", "[memory][attack]") {
#ifdef SUPPORT_SANITIZED  // each takes a hundred times as long, and it looks for races, not for luck
    constexpr std::uint64_t rounds = 50'000;
#else
    constexpr std::uint64_t rounds = 2'000'000;
#endif
    quota device{90_MiB};
    quota a{device, 0_B, 90_MiB};
    std::vector<std::unique_ptr<quota>> between;  // gathering takes its time
    for (int i = 0; i < 64; ++i) between.push_back(std::make_unique<quota>(device, 0_B, 1_MiB));
    quota b{device, 0_B, 90_MiB}, c{device, 0_B, 90_MiB};
    std::atomic<std::uint64_t> refused{0};
    {
        support::background moving(1, [&](unsigned) {
            for (quota* q : {&b, &a})
                if (q->try_charge(45_MiB) != errc::none || !q->release(45_MiB)) ++refused;
        });
        for (std::uint64_t i = 0; i < rounds || moving.rounds() < rounds; ++i)
            if (c.try_charge(45_MiB) != errc::none || !c.release(45_MiB)) ++refused;
    }
    CHECK(refused.load() == 0);
    CHECK(device.usage().current == 0_B);
    CHECK(device.usage().peak <= 90_MiB);
}

TEST_CASE("tenants that live from burst alone are never refused what fits beside the others", "[memory][attack]") {
    constexpr std::uint64_t rounds = 60'000;
    quota device{90_MiB};
    quota a{device, 0_B, 90_MiB}, b{device, 0_B, 90_MiB}, c{device, 0_B, 90_MiB};
    quota below{c, 0_B, 90_MiB};
    const std::vector<quota*> tenants{&a, &b, &below};
    std::atomic<std::uint64_t> refused{0}, lost{0};
    {
        support::background doomed(1, [&](unsigned) {
            if (a.try_charge(91_MiB) == errc::none) a.release(91_MiB);
        });
        support::together(3, [&](unsigned rank) {
            auto& q = *tenants[rank];
            support::random any(support::seed(rank));
            for (std::uint64_t i = 0; i < rounds; ++i) {
                const bytes first{1 + any.below((30_MiB).count() - 1)}, second = 30_MiB - first;
                if (q.try_charge(first) != errc::none || q.try_charge(second) != errc::none) ++refused;
                if (!q.release(any.one_in(2) ? first : second)) ++lost;
                if (!q.release(bytes{q.usage().current})) ++lost;
            }
        });
    }
    CHECK(refused.load() == 0);
    CHECK(lost.load() == 0);
    CHECK(device.usage().current == 0_B);
    CHECK(device.usage().peak <= 90_MiB);
}

}  // namespace quota_loans_test
