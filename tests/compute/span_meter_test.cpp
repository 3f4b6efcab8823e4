// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <algorithm>
#include <array>
#include <bitset>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/detail/observer.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace span_meter_test {

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

/// Charges spans between points, placed as an observer places them.
struct point_meter {
    ns charge(moment begin, moment end) {
        return charge(begin, end, {}, ns{0}, [](gpushare::client_id, ns) {});
    }
    template <class F>
    ns charge(moment begin, moment end, gpushare::client_id who, ns at_least, F give_back) {
        const gpushare::detail::one_by_one<moment> ask;
        const auto when = axis.place(begin, end, elapsed(begin, end), ask);
        axis.follow(when, end);
        return meter.charge(when, who, at_least, give_back);
    }
    gpushare::detail::device_axis<moment> axis;
    gpushare::detail::span_meter meter;
};

std::vector<std::int64_t> charges(const std::vector<span>& spans) {
    point_meter meter;
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
        point_meter meter;
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

TEST_CASE("at each instant widths are charged up to the whole device, and split in proportion beyond",
          "[compute][width]") {
    constexpr std::size_t clients = 6;
    constexpr std::int64_t end = 10'000;
    for (std::uint64_t nth = 0; nth < 300; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        struct part {
            span when{};
            double width = 1, charged = 0, due = 0;
        };
        std::array<part, clients> all;
        for (auto& p : all) {
            p.when.begin = static_cast<std::int64_t>(any.below(end));
            p.when.end = p.when.begin + 1 + static_cast<std::int64_t>(any.below(end / 2));
            p.width = 1.0 / static_cast<double>(1U << any.below(4));
        }
        for (std::int64_t t = 0; t < 2 * end; ++t) {
            double sum = 0;
            for (const auto& p : all) sum += p.when.begin <= t && t < p.when.end ? p.width : 0;
            for (auto& p : all)
                if (p.when.begin <= t && t < p.when.end) p.due += p.width / std::max(sum, 1.0);
        }
        gpushare::detail::span_meter meter;
        for (std::uint32_t i = 0; i < clients; ++i) {
            auto& p = all[i];
            const ns length{p.when.end - p.when.begin};  // all of it is known to have run
            p.charged += static_cast<double>(
                meter
                    .charge(
                        {p.when.begin, p.when.end}, {i, 1}, length,
                        [&](gpushare::client_id c, ns t) { all[c.index].charged -= static_cast<double>(t.count()); },
                        p.width)
                    .count());
        }
        bool same = true;
        for (const auto& p : all) same &= std::abs(p.charged - p.due) <= 100;  // each stretch rounds
        CHECK(same);
    }
}

TEST_CASE("a span that began before very many gaps is never charged for what others were", "[compute]") {
    point_meter meter;
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < 1000; ++i) sum += meter.charge({10 + i * 10}, {13 + i * 10}).count();
    CHECK(sum == 3000);
    const auto outer = meter.charge({0}, {20'000}).count();
    // Exact would be 17,000. It isn't charged for gaps that are forgotten, and in full for the last
    // 32 of them.
    CHECK(outer <= 17'000);
    CHECK(outer >= 20'000 - (13 + 9990) + 32 * 7);
}

namespace {

using gpushare::client_id;

/// A meter, and what each of its clients was charged in the end.
struct account {
    void run(std::uint32_t who, span s, std::int64_t at_least) {
        const auto cost = meter.charge({s.begin}, {s.end}, {who, 1}, ns{at_least},
                                       [&](client_id c, ns t) { of[c.index] -= t.count(); });
        of[who] += cost.count();
    }
    point_meter meter;
    std::array<std::int64_t, 8> of{};
};

}  // namespace

TEST_CASE("time of work that is proven to have run at once is split equally", "[compute]") {
    account a;
    SECTION("two, one inside the other") {
        a.run(0, {100, 200}, 100);
        a.run(1, {0, 300}, 300);
        CHECK(a.of[0] == 50);
        CHECK(a.of[1] == 250);
    }
    SECTION("kernels that fill the device wait for each other: nothing is proven, who ends first pays") {
        a.run(0, {0, 100}, 100);
        a.run(1, {0, 300}, 200);
        CHECK(a.of[0] == 100);
        CHECK(a.of[1] == 200);
    }
    SECTION("a part of the overlap is waiting") {
        a.run(0, {0, 100}, 100);
        a.run(1, {0, 300}, 240);
        CHECK(a.of[0] == 100 - 20);
        CHECK(a.of[1] == 200 + 20);
    }
    SECTION("three at once, and a fourth that nothing is known of") {
        a.run(0, {0, 60}, 60);
        a.run(1, {0, 60}, 60);
        a.run(2, {0, 60}, 60);
        a.run(3, {0, 60}, 0);
        CHECK(a.of[0] == 20);
        CHECK(a.of[1] == 20);
        CHECK(a.of[2] == 20);
        CHECK(a.of[3] == 0);
    }
    SECTION("with oneself nothing is shared") {
        a.run(0, {0, 60}, 60);
        a.run(0, {0, 90}, 90);
        CHECK(a.of[0] == 90);
    }
    SECTION("one long kernel beside many short ones") {
        for (int i = 0; i < 10; ++i) a.run(0, {i * 100, i * 100 + 100}, 100);
        a.run(1, {0, 1000}, 1000);
        CHECK(a.of[0] == 500);
        CHECK(a.of[1] == 500);
    }
}

TEST_CASE("shared or not, the charges less what was given back sum to the union of the spans", "[compute]") {
    for (std::uint64_t nth = 0; nth < 1000; ++nth) {
        const auto seed = support::seed(nth);
        support::random any(seed);
        account a;
        std::bitset<1200> busy;
        std::array<std::bitset<1200>, 8> by;
        std::vector<std::pair<std::uint32_t, span>> spans(20);
        for (auto& [who, s] : spans) {
            who = static_cast<std::uint32_t>(any.below(4));
            s.begin = static_cast<std::int64_t>(any.below(1000)) / 12 * 12;  // so that quarters and thirds are whole
            s.end = s.begin + 12 + static_cast<std::int64_t>(any.below(100)) / 12 * 12;
        }
        std::ranges::sort(spans, {}, [](const auto& s) { return s.second.end; });
        for (const auto& [who, s] : spans) {
            a.run(who, s, s.end - s.begin);
            for (auto t = static_cast<std::size_t>(s.begin); t < static_cast<std::size_t>(s.end); ++t) {
                busy.set(t);
                by[who].set(t);
            }
        }
        std::array<double, 8> truth{};
        for (std::size_t t = 0; t < busy.size(); ++t) {
            const auto active = std::ranges::count_if(by, [&](const auto& b) { return b.test(t); });
            for (std::size_t who = 0; who < 4; ++who)
                if (by[who].test(t)) truth[who] += 1.0 / static_cast<double>(active);
        }
        std::int64_t sum = 0;
        double worst = 0;
        for (std::size_t who = 0; who < 4; ++who) {
            sum += a.of[who];
            worst = std::max(worst, std::abs(truth[who] - static_cast<double>(a.of[who])));
        }
        if (sum != static_cast<std::int64_t>(busy.count()) || worst > 0.01) {
            CAPTURE(seed, worst);
            REQUIRE(sum == static_cast<std::int64_t>(busy.count()));
            REQUIRE(worst < 0.01);
        }
    }
    SUCCEED("1000 random sets of 20 spans of 4 clients");
}

TEST_CASE("a meter runs for centuries", "[compute]") {
    point_meter meter;
    const std::int64_t year = 31'557'600'000'000'000;
    for (std::int64_t y = 0; y < 290; ++y) CHECK(meter.charge({y * year}, {y * year + year / 2}).count() == year / 2);
}

}  // namespace span_meter_test
