// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <gpushare/sm_split.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "support/catch.hpp"
#include "support/code_of.hpp"

using namespace gpushare;
using support::code_of;

TEST_CASE("SMs are shared out in whole units", "[sm_split]") {
    using sms = std::vector<std::uint32_t>;
    constexpr sm_split h100{.sms = 132, .unit = 8, .units = 16};
    CHECK(equal_sms(h100, 1) == sms{128});
    CHECK(equal_sms(h100, 3) == sms{40, 40, 40});
    CHECK(equal_sms(h100, 16) == sms(16, 8));
    CHECK(code_of([&] { (void)equal_sms(h100, 17); }) == errc::too_few_sms);
    CHECK(code_of([&] { (void)equal_sms(h100, 0); }) == errc::invalid_specification);
    CHECK(code_of([&] { (void)equal_sms({}, 1); }) == errc::too_few_sms);

    CHECK(weighted_sms(h100, std::array{3U, 1U}) == sms{96, 32});
    CHECK(weighted_sms(h100, std::array{1U, 1U, 1U}) == sms{48, 40, 40});
    CHECK(weighted_sms(h100, std::array{1000000U, 1U}) == sms{120, 8});
    CHECK(weighted_sms(h100, std::array{0xffffffffU, 0xffffffffU}) == sms{64, 64});
    CHECK(code_of([&] { (void)weighted_sms(h100, std::array{1U, 0U}); }) == errc::invalid_specification);
    CHECK(code_of([&] { (void)weighted_sms(h100, {}); }) == errc::invalid_specification);

    // Every small case: all given out, nobody without, nobody off by a unit unless the minimum is
    // in the way.
    for (std::uint32_t units = 1; units <= 12; ++units)
        for (std::uint32_t a = 1; a <= 9; ++a)
            for (std::uint32_t b = 1; b <= 9; ++b)
                for (std::uint32_t c = 1; c <= 9; ++c) {
                    if (units < 3) continue;
                    const std::array weights{a, b, c};
                    const auto got = weighted_sms({.sms = units * 2, .unit = 2, .units = units}, weights);
                    REQUIRE(std::accumulate(got.begin(), got.end(), 0U) == units * 2);
                    bool forced = false;
                    for (const auto w : weights) forced |= units * w < a + b + c;
                    for (std::size_t i = 0; i < 3; ++i) {
                        REQUIRE(got[i] >= 2);
                        const double due = 2.0 * units * weights[i] / (a + b + c);
                        if (!forced) REQUIRE(std::abs(got[i] - due) < 2.0);
                    }
                }

    CHECK(code_of([&] { check_sms(h100, std::array{12U}); }) == errc::not_whole);
    CHECK(code_of([&] { check_sms(h100, std::array{0U}); }) == errc::not_whole);
    CHECK(code_of([&] { check_sms(h100, std::array{64U, 72U}); }) == errc::too_few_sms);
    CHECK(code_of([&] { check_sms(h100, std::array{64U, 64U}); }) == errc::none);
}

TEST_CASE("weighted splits are those of the largest remainder", "[sm_split]") {
    const auto seed = std::random_device{}();
    CAPTURE(seed);
    std::mt19937 random{seed};
    for (int round = 0; round < 2000; ++round) {
        const std::uint32_t units = 1 + static_cast<std::uint32_t>(random() % 64),
                            unit = 1 + static_cast<std::uint32_t>(random() % 8);
        std::vector<std::uint32_t> weights(1 + random() % 6);
        for (auto& w : weights) w = 1 + static_cast<std::uint32_t>(random() % 1000);
        const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
        if (std::ranges::any_of(weights, [&](std::uint64_t w) { return w * units < total; })) continue;

        // Hamilton's method as it is written down: everybody's whole units, then the largest
        // remainders.
        std::vector<std::uint32_t> expected;
        std::vector<std::size_t> order(weights.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        for (const std::uint64_t w : weights) expected.push_back(static_cast<std::uint32_t>(w * units / total));
        std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
            return std::uint64_t{weights[a]} * units % total > std::uint64_t{weights[b]} * units % total;
        });
        const std::uint32_t given = std::accumulate(expected.begin(), expected.end(), 0U);
        for (std::uint32_t i = 0; i < units - given; ++i) ++expected[order[i]];
        for (auto& n : expected) n *= unit;
        CAPTURE(round, units, unit, weights);
        CHECK(weighted_sms({.sms = units * unit, .unit = unit, .units = units}, weights) == expected);
    }
}

TEST_CASE("a check refuses SMs that others have", "[sm_split]") {
    constexpr sm_split h100{.sms = 132, .unit = 8, .units = 16};
    CHECK(code_of([&] { check_sms(h100, std::array{64U}, 8); }) == errc::none);
    CHECK(code_of([&] { check_sms(h100, std::array{72U}, 8); }) == errc::too_few_sms);
}
