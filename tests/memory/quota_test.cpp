// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// A quota by itself, one thread: grants, refusals, borrowing, returning and counting.
// quota_model_test.cpp compares random sequences with a model; quota_threads_test.cpp has the
// threads.
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::quota;

static_assert(!std::is_copy_constructible_v<quota> && !std::is_move_constructible_v<quota>);
static_assert(!std::is_constructible_v<quota, int>, "a number without its unit is no limit");

TEST_CASE("a quota grants to the last byte and not one more", "[memory][quota]") {
    quota q{100_B};
    CHECK(q.try_charge(99_B) == errc::none);
    CHECK(q.try_charge(2_B) == errc::over_quota);
    CHECK(q.free() == 1_B);
    CHECK(q.try_charge(1_B) == errc::none);
    CHECK(q.try_charge(1_B) == errc::over_quota);
    CHECK(q.release(100_B));
    CHECK(q.try_charge(100_B) == errc::none);
    CHECK(q.release(100_B));
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("zero bytes are always granted and change nothing", "[memory][quota]") {
    quota q{10_B};
    quota nothing{0_B};
    REQUIRE(q.try_charge(10_B) == errc::none);
    CHECK(q.try_charge(0_B) == errc::none);
    CHECK(nothing.try_charge(0_B) == errc::none);
    CHECK(nothing.try_charge(1_B) == errc::over_quota);
    CHECK(q.release(0_B));
    CHECK(q.usage().current == 10_B);
    CHECK(q.release(10_B));
}

TEST_CASE("sizes near SIZE_MAX don't wrap to something small", "[memory][quota]") {
    quota q{1_GiB};
    REQUIRE(q.try_charge(1_MiB) == errc::none);
    for (std::uint64_t less = 0; less < 600; ++less) {
        REQUIRE(q.try_charge(bytes{std::numeric_limits<std::uint64_t>::max() - less}) == errc::size_overflow);
        REQUIRE_FALSE(q.release(bytes{std::numeric_limits<std::uint64_t>::max() - less}));
    }
    CHECK(q.try_charge(quota::max_limit() + 1_B) == errc::size_overflow);
    CHECK(q.try_charge(quota::max_limit()) == errc::over_quota);
    CHECK(q.usage().current == 1_MiB);
    CHECK(q.usage().peak == 1_MiB);
    CHECK(q.usage().refusals == 602);
    CHECK(q.release(1_MiB));
}

TEST_CASE("the largest quota works to its last byte", "[memory][quota]") {
    quota q{quota::max_limit()};
    CHECK(q.try_charge(quota::max_limit()) == errc::none);
    CHECK(q.try_charge(1_B) == errc::over_quota);
    CHECK(q.usage().current == quota::max_limit());
    CHECK(q.release(1_B));
    CHECK(q.try_charge(1_B) == errc::none);
    CHECK(q.release(quota::max_limit()));
    quota all{q, quota::max_limit() - 1_B, 1_B};
    CHECK(all.try_charge(quota::max_limit()) == errc::none);
    CHECK(all.release(quota::max_limit()));

    const auto too_big = Catch::Predicate<gpushare::operation_error>(
        [](const auto& e) { return e.code() == errc::invalid_specification; }, "invalid_specification");
    CHECK_THROWS_MATCHES(quota{quota::max_limit() + 1_B}, gpushare::operation_error, too_big);
    CHECK_THROWS_MATCHES(quota{bytes::max()}, gpushare::operation_error, too_big);
    CHECK_THROWS_MATCHES((quota{q, 1_B, quota::max_limit()}), gpushare::operation_error, too_big);
    CHECK_THROWS_MATCHES((quota{q, bytes::max(), bytes::max()}), gpushare::operation_error, too_big);
    CHECK(q.resize(quota::max_limit() + 1_B, 0_B) == errc::invalid_specification);
    CHECK(q.resize(bytes::max(), bytes::max()) == errc::invalid_specification);
}

TEST_CASE("a free of more than is charged changes nothing", "[memory][quota]") {
    quota q{100_B};
    CHECK_FALSE(q.release(1_B));
    REQUIRE(q.try_charge(40_B) == errc::none);
    CHECK_FALSE(q.release(41_B));
    CHECK_FALSE(q.release(bytes::max()));
    CHECK(q.usage().current == 40_B);
    CHECK(q.usage().releases == 0);
    CHECK(q.free() == 60_B);
    CHECK(q.release(40_B));
    CHECK(q.try_charge(100_B) == errc::none);
    CHECK(q.release(100_B));
}

TEST_CASE("usage counts calls, peaks and refusals exactly", "[memory][quota]") {
    quota q{1000_B};
    for (unsigned i = 0; i < 1000; ++i) {
        REQUIRE(q.try_charge(bytes{i}) == errc::none);
        if (i % 3 == 0) REQUIRE(q.try_charge(1001_B) == errc::over_quota);
        REQUIRE(q.usage().charges == i + 1);
        REQUIRE(q.usage().releases == i);
        REQUIRE(q.release(bytes{i}));
    }
    CHECK(q.usage().refusals == 334);
    CHECK(q.usage().peak == 999_B);
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("a guarantee is set aside in the parent, whether it is used or not", "[memory][quota]") {
    quota device{100_B};
    {
        quota a{device, 60_B};
        CHECK(device.usage().current == 60_B);
        CHECK(device.try_charge(41_B) == errc::over_quota);
        CHECK_THROWS_AS((quota{device, 41_B}), gpushare::operation_error);
        CHECK(device.usage().current == 60_B);

        quota b{device, 40_B};
        CHECK(device.free() == 0_B);
        CHECK(a.try_charge(60_B) == errc::none);
        CHECK(b.try_charge(40_B) == errc::none);
        CHECK(a.try_charge(1_B) == errc::over_quota);
        CHECK(device.usage().current == 100_B);
        CHECK(a.release(60_B));
        CHECK(device.usage().current == 100_B);
        CHECK(b.release(40_B));
    }
    CHECK(device.usage().current == 0_B);
}

TEST_CASE("a guarantee that the parent can't give says how much it could", "[memory][quota]") {
    quota device{100_MiB};
    quota a{device, 60_MiB};
    try {
        quota b{device, 64_MiB};
        FAIL("granted");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::no_room);
        CHECK(e.figures().asked == (64_MiB).count());
        CHECK(e.figures().left == (40_MiB).count());
        CHECK(e.figures().limit == (100_MiB).count());
    }
}

TEST_CASE("burst is taken from the parent while it is used, and goes back at once", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 40_B, 30_B};
    quota b{device, 10_B, 90_B};
    CHECK(a.free() == 70_B);
    CHECK(b.free() == 60_B);

    CHECK(a.try_charge(70_B) == errc::none);
    CHECK(a.try_charge(1_B) == errc::over_quota);
    CHECK(a.usage().borrowed == 30_B);
    CHECK(device.usage().current == 80_B);
    CHECK(b.free() == 30_B);

    CHECK(b.try_charge(31_B) == errc::out_of_memory);
    CHECK(b.try_charge(30_B) == errc::none);
    CHECK(device.free() == 0_B);

    CHECK(a.release(20_B));
    CHECK(a.usage().borrowed == 10_B);
    CHECK(b.try_charge(20_B) == errc::none);
    CHECK(a.try_charge(20_B) == errc::out_of_memory);
    CHECK(a.free() == 0_B);

    CHECK(b.release(50_B));
    CHECK(a.release(50_B));
    CHECK(a.usage().borrowed == 0_B);
    CHECK(b.usage().borrowed == 0_B);
    CHECK(device.usage().current == 50_B);
}

TEST_CASE("burst reaches through several levels and comes back through them", "[memory][quota]") {
    quota node{100_B};
    quota device{node, 10_B, 80_B};
    quota tenant{device, 5_B, 95_B};
    CHECK(tenant.free() == 90_B);
    CHECK(tenant.try_charge(91_B) == errc::out_of_memory);
    CHECK(tenant.try_charge(90_B) == errc::none);
    CHECK(device.usage().borrowed == 80_B);
    CHECK(node.usage().current == 90_B);
    CHECK(tenant.release(87_B));
    CHECK(device.usage().borrowed == 0_B);
    CHECK(node.usage().current == 10_B);
    CHECK(tenant.release(3_B));
}

TEST_CASE("a quota that ends gives back what isn't charged, and keeps what is in use", "[memory][quota]") {
    quota device{100_B};
    {
        quota a{device, 40_B, 20_B};
        REQUIRE(a.try_charge(50_B) == errc::none);
        REQUIRE(a.release(45_B));
    }
    CHECK(device.usage().current == 5_B);
    CHECK(device.release(5_B));
    {
        quota a{device, 40_B, 20_B};
        REQUIRE(a.try_charge(55_B) == errc::none);
    }
    CHECK(device.usage().current == 55_B);
}

TEST_CASE("a quota is adjustable while it is used (rmm's limiter)", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 20_B};
    quota b{device, 30_B};
    REQUIRE(a.try_charge(20_B) == errc::none);

    SECTION("growing takes effect at once") {
        CHECK(a.resize(70_B, 0_B) == errc::none);
        CHECK(device.free() == 0_B);
        CHECK(a.try_charge(50_B) == errc::none);
        CHECK(a.release(50_B));
    }
    SECTION("growing beyond what the parent has changes nothing") {
        CHECK(a.resize(71_B, 5_B) == errc::no_room);
        CHECK(a.usage().limit() == 20_B);
        CHECK(a.try_charge(1_B) == errc::over_quota);
        CHECK(device.usage().current == 50_B);
    }
    SECTION("shrinking gives back at once what isn't charged") {
        CHECK(b.resize(10_B, 0_B) == errc::none);
        CHECK(device.usage().current == 30_B);
        CHECK(b.try_charge(11_B) == errc::over_quota);
        CHECK(b.try_charge(10_B) == errc::none);
        CHECK(b.release(10_B));
    }
    SECTION("shrinking below what is charged takes nothing away, and refuses until it fits") {
        CHECK(a.resize(5_B, 0_B) == errc::none);
        CHECK(a.usage().current == 20_B);
        CHECK(a.usage().limit() == 5_B);
        CHECK(a.free() == 0_B);
        CHECK(device.usage().current == 50_B);
        CHECK(a.try_charge(1_B) == errc::over_quota);
        CHECK(a.release(10_B));
        CHECK(device.usage().current == 40_B);
        CHECK(a.try_charge(1_B) == errc::over_quota);
        CHECK(a.release(8_B));
        CHECK(a.try_charge(4_B) == errc::over_quota);
        CHECK(a.try_charge(3_B) == errc::none);
        CHECK(a.release(3_B));
        CHECK(a.try_charge(2_B) == errc::none);
        CHECK(device.usage().current == 35_B);
        CHECK(a.release(2_B));
        CHECK(a.try_charge(18_B) == errc::over_quota);
        CHECK(a.resize(20_B, 0_B) == errc::none);
        CHECK(a.try_charge(18_B) == errc::none);
    }
    SECTION("growing back over what is still charged asks the parent for the difference only") {
        REQUIRE(a.resize(5_B, 0_B) == errc::none);
        REQUIRE(device.try_charge(50_B) == errc::none);
        CHECK(a.resize(20_B, 0_B) == errc::none);
        CHECK(a.resize(21_B, 0_B) == errc::no_room);
        CHECK(device.release(50_B));
    }
    SECTION("burst is adjustable too") {
        CHECK(a.resize(20_B, 50_B) == errc::none);
        CHECK(a.try_charge(50_B) == errc::none);
        CHECK(a.resize(20_B, 10_B) == errc::none);
        CHECK(a.usage().current == 70_B);
        CHECK(a.release(30_B));
        CHECK(a.try_charge(1_B) == errc::over_quota);
        CHECK(a.release(20_B));
        CHECK(a.try_charge(10_B) == errc::none);
        CHECK(a.release(10_B));
    }
    CHECK(a.release(20_B));
    CHECK(a.usage().current == 0_B);
    CHECK(device.usage().current == a.usage().guaranteed + b.usage().guaranteed);
}

TEST_CASE("a root is adjustable, below what is charged as well", "[memory][quota]") {
    quota q{100_B};
    REQUIRE(q.try_charge(80_B) == errc::none);
    CHECK(q.resize(50_B, 0_B) == errc::none);
    CHECK(q.usage().current == 80_B);
    CHECK(q.usage().limit() == 50_B);
    CHECK(q.try_charge(1_B) == errc::over_quota);
    CHECK(q.release(40_B));
    CHECK(q.free() == 10_B);
    CHECK(q.try_charge(11_B) == errc::over_quota);
    CHECK(q.resize(200_B, 0_B) == errc::none);
    CHECK(q.try_charge(160_B) == errc::none);
    CHECK(q.release(200_B));
    CHECK(q.free() == 200_B);
}

TEST_CASE("a root has nobody to borrow from: burst is refused", "[memory][quota]") {
    quota q{100_B};
    CHECK(q.resize(100_B, 1_B) == errc::invalid_specification);
    CHECK(q.usage().limit() == 100_B);
}

TEST_CASE("growth from a parent that has stopped is refused as closed", "[memory][quota]") {
    quota device{100_B};
    quota team{device, 60_B}, chat{team, 20_B};
    team.stop();
    CHECK(chat.resize(30_B, 0_B) == errc::closed);
    gpushare::quota_resize later{chat, 30_B, 0_B};
    CHECK(later.prepare().code == errc::closed);
    CHECK(chat.resize(10_B, 0_B) == errc::none);
    CHECK(device.try_charge(90_B) == errc::none);  // and nothing is held by what was refused
    CHECK(device.release(90_B));
}

TEST_CASE("a refusal can be explained in figures", "[memory][quota]") {
    quota device{100_B};
    quota a{device, 40_B, 30_B};
    REQUIRE(a.try_charge(45_B) == errc::none);
    const auto why = a.explain(a.try_charge(26_B), 26_B);
    CHECK(why.code == errc::over_quota);
    CHECK(why.asked == 26);
    CHECK(why.left == 25);
    CHECK(why.limit == 70);
    CHECK(a.release(45_B));
}
