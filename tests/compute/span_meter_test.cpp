// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bitset>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/compute/span_meter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using gpushare::errc;
using gpushare::instant;
using gpushare::ns;

namespace {

/// A moment of device time, in ns.
struct moment {
    std::int64_t at = 0;

    [[nodiscard]] static bool reached() noexcept { return true; }
    static bool wait(instant) noexcept { return true; }
    static bool wait_any(std::span<const moment>, instant) noexcept { return true; }
    [[nodiscard]] static errc status() noexcept { return errc::none; }
    friend ns elapsed(const moment& a, const moment& b) noexcept { return ns{b.at - a.at}; }
};
static_assert(gpushare::timeline_point<moment>);

struct span {
    std::int64_t begin, end;
};

std::vector<std::int64_t> charges(const std::vector<span>& spans) {
    gpushare::span_meter<moment> meter;
    std::vector<std::int64_t> result;
    for (const auto& s : spans) result.push_back(meter.charge({s.begin}, {s.end}).count());
    return result;
}

using charged = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("a span alone is charged whole, wherever it lies", "[compute]") {
    CHECK(charges({{0, 10}}) == charged{10});
    CHECK(charges({{1'000'000, 1'000'010}}) == charged{10});
    CHECK(charges({{-50, -20}}) == charged{30});
    CHECK(charges({{5, 5}}) == charged{0});
    CHECK(charges({{5, 3}}) == charged{0});
}

TEST_CASE("every instant is charged once, to the span that comes first", "[compute]") {
    SECTION("apart") { CHECK(charges({{0, 10}, {20, 30}, {30, 35}}) == charged{10, 10, 5}); }
    SECTION("overlapping, as kernels queued behind each other are") {
        CHECK(charges({{0, 10}, {2, 25}, {4, 30}}) == charged{10, 15, 5});
    }
    SECTION("one within another, the inner one done first: the outer pays for both sides") {
        CHECK(charges({{10, 20}, {0, 30}}) == charged{10, 20});
    }
    SECTION("one around several, with gaps between them") {
        CHECK(charges({{10, 20}, {30, 40}, {40, 50}, {60, 70}, {0, 80}}) == charged{10, 10, 10, 10, 40});
    }
    SECTION("one that began in a gap") { CHECK(charges({{0, 10}, {20, 30}, {15, 40}}) == charged{10, 10, 15}); }
    SECTION("the same span again is free") { CHECK(charges({{0, 10}, {0, 10}, {2, 8}}) == charged{10, 0, 0}); }
    SECTION("late: it ended before one that is charged already") {
        CHECK(charges({{20, 30}, {0, 10}, {12, 14}, {5, 25}, {0, 40}}) == charged{10, 10, 2, 8, 10});
    }
    SECTION("before all others") { CHECK(charges({{100, 110}, {0, 10}, {-20, 130}}) == charged{10, 10, 130}); }
}

TEST_CASE("the charges sum to the union of the spans, in whatever order they come", "[compute]") {
    for (std::uint64_t nth = 0; nth < 2000; ++nth) {
        const auto seed = support::seed(nth);
        support::random any(seed);
        const auto longest = 1 + any.below(100);
        const bool in_order = any.one_in(2);
        std::vector<span> spans(30);
        for (auto& s : spans) {
            s.begin = static_cast<std::int64_t>(any.below(1000));
            s.end = s.begin + static_cast<std::int64_t>(any.below(longest));
        }
        if (in_order) std::ranges::sort(spans, {}, &span::end);
        std::bitset<1100> busy;
        gpushare::span_meter<moment> meter;
        for (const auto& s : spans) {
            std::int64_t fresh = 0;
            for (auto t = static_cast<std::size_t>(s.begin); t < static_cast<std::size_t>(s.end); ++t)
                if (!busy.test(t)) {
                    busy.set(t);
                    ++fresh;
                }
            const auto charge = meter.charge({s.begin}, {s.end}).count();
            if (charge != fresh) {
                CAPTURE(seed, in_order, s.begin, s.end);
                REQUIRE(charge == fresh);
            }
        }
    }
    SUCCEED("2000 random sets of 30 spans");
}

TEST_CASE("a span that began before very many gaps is never charged for what others were", "[compute]") {
    gpushare::span_meter<moment> meter;
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < 1000; ++i) sum += meter.charge({10 + i * 10}, {13 + i * 10}).count();
    CHECK(sum == 3000);
    const auto outer = meter.charge({0}, {20'000}).count();
    // Exact would be 17,000. It isn't charged for gaps that are forgotten, and in full for the last 32 of them.
    CHECK(outer <= 17'000);
    CHECK(outer >= 20'000 - (13 + 9990) + 32 * 7);
}

TEST_CASE("a meter runs for centuries", "[compute]") {
    gpushare::span_meter<moment> meter;
    const std::int64_t year = 31'557'600'000'000'000;
    for (std::int64_t y = 0; y < 290; ++y) CHECK(meter.charge({y * year}, {y * year + year / 2}).count() == year / 2);
}
