// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The strong types: which operations saturate, throw, or don't compile. The compiler checks most of
// this.
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include <gpushare/units.hpp>

#include "support/catch.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::byte_count;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::instant;
using gpushare::never;
using gpushare::ns;
using gpushare::priority;
using gpushare::saturating_add;
using gpushare::share;

// Literals.
static_assert((0_B).count() == 0);
static_assert((1_KiB).count() == 1024);
static_assert((512_MiB).count() == 512ULL << 20);
static_assert(1024_GiB == 1_TiB);
static_assert(17'000'000_TiB == bytes::max(), "a literal too big for 64 bits is too much, not nearly nothing");

// Bytes saturate at both ends.
static_assert(bytes::max() + 1_B == bytes::max());
static_assert(bytes::max() + bytes::max() == bytes::max());
static_assert(bytes::max() - 1_B + 1_B == bytes::max());
static_assert(1_B - 2_B == 0_B);
static_assert(2_B - 1_B == 1_B);
static_assert(bytes::max() * 2 == bytes::max());
static_assert(bytes::max() * 1 == bytes::max());
static_assert(bytes::max() * 0 == 0_B);
static_assert((1ULL << 32) * bytes{(1ULL << 32) - 1} == bytes{0xffff'ffff'0000'0000});
static_assert(bytes{1ULL << 32} * (1ULL << 32) == bytes::max());
static_assert(10_KiB / 4_KiB == 2);
static_assert(10_KiB / 4 == 2560_B);
static_assert(10_KiB % 4_KiB == 2_KiB);
static_assert(1_MiB < 1_GiB && 1024_KiB == 1_MiB);

// No number becomes a quantity by itself, and quantities don't mix.
static_assert(!std::convertible_to<int, bytes> && !std::convertible_to<std::uint64_t, bytes>);
static_assert(!std::convertible_to<bytes, std::uint64_t>);
static_assert(!std::constructible_from<share, int> && !std::constructible_from<share, double>);
static_assert(!std::convertible_to<int, priority> && !std::convertible_to<int, device_id>);
static_assert(!std::convertible_to<instant, ns> && !std::convertible_to<ns, instant>);

// A parameter of a size takes a number or an amount with its unit, without a warning.
constexpr std::size_t asked(byte_count size) noexcept { return size; }
static_assert(asked(4096) == 4096 && asked(4096U) == 4096 && asked(4096LL) == 4096);
static_assert(asked(sizeof(int) * 3) == 12 && asked(std::size_t{7}) == 7 && asked(std::uint64_t{7}) == 7);
static_assert(asked(4_MiB) == 4U << 20 && asked(bytes{}) == 0 && asked(1_KiB + 1_B) == 1025);
static_assert(asked({}) == 0 && asked({64}) == 64 && asked({4_KiB}) == 4096);
static_assert(asked(byte_count{5}) == 5 && bytes{byte_count{5}} == 5_B);
static_assert(asked(bytes::max()) == std::numeric_limits<std::size_t>::max(), "too much, not a small rest");
static_assert(noexcept(asked(1)) && noexcept(asked(bytes{1})) &&
              std::is_nothrow_convertible_v<byte_count, std::size_t>);
// It makes no amount of a number, and no size of other quantities.
static_assert(!std::convertible_to<byte_count, bytes> && !std::convertible_to<ns, byte_count>);
static_assert(!std::convertible_to<const char*, byte_count> && !std::convertible_to<std::nullptr_t, byte_count>);
template <class T>
concept is_size_in_braces = requires(T t) {
    byte_count{t};
};
static_assert(is_size_in_braces<bytes> && is_size_in_braces<std::size_t> && is_size_in_braces<unsigned>);
static_assert(!is_size_in_braces<double> && !is_size_in_braces<int>, "a narrowing, as of std::size_t");

// Shares come in steps of 0.1 %.
static_assert((30_pct).permille() == 300);
static_assert((100_pct) == share::whole());
static_assert((0_pct) == share{});
static_assert((0.5_pct).permille() == 5);
static_assert((0.1_pct).permille() == 1);
static_assert((99.9_pct).permille() == 999);
static_assert((33.3_pct).permille() == 333);
static_assert(share::of_permille(1000).fraction() == 1.0);
static_assert(2_pct < 30_pct);

// Instants don't overflow into the past.
static_assert(saturating_add(instant{}, 5ns) == instant{5ns});
static_assert(saturating_add(instant{5ns}, -5ns) == instant{});
static_assert(saturating_add(never, 1ns) == never);
static_assert(saturating_add(never, 0ns) == never);
static_assert(saturating_add(never - 1ns, 1ns) == never);
static_assert(saturating_add(never - 1ns, 2ns) == never);
static_assert(saturating_add(instant{1h}, ns::max()) == never);
static_assert(saturating_add(instant::min(), ns::max()) < never);
static_assert(saturating_add(instant::min(), -1ns) == instant::min());
static_assert(saturating_add(never, -1ns) == never - 1ns);
static_assert(gpushare::saturating_add(ns::max(), 1ns) == ns::max());
static_assert(gpushare::saturating_add(ns::max(), -1ns) == ns::max() - 1ns);
static_assert(gpushare::saturating_add(5ns, -7ns) == -2ns);
static_assert(gpushare::saturating_add(ns::min(), -1ns) == ns::min());
static_assert(gpushare::saturating_add(ns::min(), ns::max()) == -1ns);
static_assert(gpushare::saturating_add(-1ns, ns::min()) == ns::min());

static_assert(priority{2} > priority{} && device_id{0} < device_id{1});

TEST_CASE("the steady clock's times are instants, and whatever std::chrono has are lengths", "[units]") {
    using namespace std::chrono_literals;
    const auto due = std::chrono::steady_clock::now() + 5ms;
    const gpushare::instant same = due;
    CHECK(same.time_since_epoch() == due.time_since_epoch());
    const gpushare::ns length = std::chrono::minutes(2);
    CHECK(length.count() == 120'000'000'000);
    // A calendar's time isn't one, nor is what would lose something.
    STATIC_REQUIRE_FALSE(std::is_convertible_v<std::chrono::system_clock::time_point, gpushare::instant>);
    STATIC_REQUIRE_FALSE(std::is_convertible_v<std::chrono::duration<double>, gpushare::ns>);
}

TEST_CASE("a tenant's name is cut where errors cut it", "[units]") {
    const gpushare::tenant_name none, chat = "chat", cut = std::string(100, 'x');
    CHECK(none.empty());
    CHECK(chat.view() == "chat");
    CHECK(cut.view() == std::string(63, 'x'));
    CHECK_FALSE(cut == chat);
}

TEST_CASE("bytes accumulate with saturation", "[base][units]") {
    bytes sum;
    sum += 1_GiB;
    sum += bytes::max();
    CHECK(sum == bytes::max());
    sum -= bytes::max();
    sum -= 1_B;
    CHECK(sum == 0_B);
}

TEST_CASE("every tenth of a percent is a share, and more than a device is none", "[base][units]") {
    for (unsigned permille = 0; permille <= 1000; ++permille)
        REQUIRE(share::of_permille(permille).permille() == permille);
    CHECK_THROWS_AS(share::of_permille(1001), std::out_of_range);
    CHECK_THROWS_AS(share::of_permille(65536 + 10), std::out_of_range);
    CHECK_THROWS_AS(share::of_permille(std::numeric_limits<unsigned long long>::max()), std::out_of_range);
}
