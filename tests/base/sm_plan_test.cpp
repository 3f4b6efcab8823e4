// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <gpushare/compute/partitioned_limiter.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace sm_plan_test {

using namespace gpushare;
using support::code_of;
using counts = std::vector<std::uint32_t>;
using place = sm_plan::place;

namespace {

constexpr sm_split units(std::uint32_t n, std::uint32_t unit = 8) {
    return {.sms = n * unit, .unit = unit, .units = n};
}

}  // namespace

TEST_CASE("shares that are due a unit or more get SMs of their own", "[sm_plan]") {
    const auto p = plan_sms(units(16), std::array{75_pct, 25_pct});
    CHECK(p.sms == counts{96, 32});
    CHECK(p.clients == std::vector<place>{{.partition = 0}, {.partition = 1}});
    CHECK(plan_sms(units(4, 1), std::array{30_pct, 30_pct, 30_pct}).sms == counts{2, 1, 1});  // ties: the earlier one
    CHECK(plan_sms(units(10, 1), std::array{30_pct, 20_pct}).sms == counts{6, 4});            // in proportion
}

TEST_CASE("shares that are due less than a unit share a part, by time", "[sm_plan]") {
    const auto p = plan_sms(units(8, 1), std::array{60_pct, 35_pct, 5_pct});
    CHECK(p.sms == counts{5, 3});
    CHECK(p.clients == std::vector<place>{{.partition = 0, .weight = share::whole(), .alone = true},
                                          {.partition = 1, .weight = 87.5_pct, .alone = false},
                                          {.partition = 1, .weight = 12.5_pct, .alone = false}});
    // Together they are due a unit: nobody else has to share.
    const auto small = plan_sms(units(4, 2), std::array{10_pct, 65_pct, 10_pct, 15_pct});
    CHECK(small.sms == counts{2, 6});
    CHECK(small.clients[0].partition == small.clients[3].partition);
    CHECK(small.clients[1].alone);
}

TEST_CASE("if no client would be alone, the device is one part", "[sm_plan]") {
    for (const auto& can : {units(16), units(1), sm_split{}, sm_split{.sms = 4}}) {
        const auto p = plan_sms(can, std::array{98_pct, 2_pct});
        CHECK_FALSE(p.partitioned());
        CHECK(p.num_partitions() == 1);
        CHECK(p.clients == std::vector<place>{{.partition = 0, .weight = 98_pct, .alone = false},
                                              {.partition = 0, .weight = 2_pct, .alone = false}});
    }
    CHECK_FALSE(plan_sms(units(16), std::array{50_pct}).partitioned());
}

TEST_CASE("equal splits: the same for all, or by time", "[sm_plan]") {
    CHECK(plan_equal_sms(units(16), 3).sms == counts{40, 40, 40});
    const auto by_time = plan_equal_sms(units(3), 4);
    CHECK_FALSE(by_time.partitioned());
    for (const auto& c : by_time.clients) CHECK(c == place{.partition = 0, .weight = 25_pct, .alone = false});
    CHECK_FALSE(plan_equal_sms(units(3), 1).partitioned());
    CHECK_FALSE(plan_equal_sms({}, 2).partitioned());
}

TEST_CASE("an impossible plan is refused", "[sm_plan]") {
    CHECK(code_of([] { (void)plan_sms(units(4), {}); }) == errc::invalid_specification);
    CHECK(code_of([] { (void)plan_sms(units(4), std::array{50_pct, 0_pct}); }) == errc::invalid_specification);
    CHECK(code_of([] { (void)plan_sms(units(4), std::array{50_pct, 50.1_pct}); }) == errc::share_exceeded);
    CHECK(code_of([] { (void)plan_equal_sms(units(4), 0); }) == errc::invalid_specification);
    CHECK(code_of([] { (void)plan_equal_sms(units(4), 1001); }) == errc::invalid_specification);
}

TEST_CASE("random shares: all SMs given out, parts off by less than a unit, shares of time right within a part",
          "[sm_plan]") {
    const auto seed = std::random_device{}();
    CAPTURE(seed);
    std::mt19937 random{seed};
    const auto pick = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
    for (int round = 0; round < 2000; ++round) {
        const auto can = units(1 + pick(32), 1 + pick(8));
        std::vector<share> shares;
        std::uint32_t total = 0;
        for (const std::uint32_t n = 1 + pick(12); shares.size() < n && total < 1000;) {
            const std::uint32_t s = 1 + pick(std::min(1000 - total, pick(2) == 0 ? 30U : 400U));
            shares.push_back(share::of_permille(s));
            total += s;
        }
        const auto p = plan_sms(can, shares);
        CAPTURE(round, can.units, can.unit, p.sms);
        REQUIRE(p.clients.size() == shares.size());
        std::vector<std::uint32_t> sums(p.num_partitions()), clients(p.num_partitions());
        for (std::size_t i = 0; i < shares.size(); ++i) {
            REQUIRE(p.clients[i].partition < p.num_partitions());
            sums[p.clients[i].partition] += shares[i].permille();
            ++clients[p.clients[i].partition];
        }
        bool right = true;
        for (std::size_t i = 0; i < shares.size(); ++i) {
            const auto& c = p.clients[i];
            right &= c.alone == (clients[c.partition] == 1);
            if (!p.partitioned()) {
                right &= c.weight == shares[i];
            } else {
                right &= std::abs(c.weight.fraction() - 1.0 * shares[i].permille() / sums[c.partition]) <= 0.001;
                // Whoever is due a unit or more is alone, but for one who takes in the smallest.
                right &= shares[i].permille() * can.units >= total || !c.alone;
            }
        }
        CHECK(right);
        if (!p.partitioned()) continue;
        REQUIRE(p.sms.size() >= 2);
        CHECK(std::accumulate(p.sms.begin(), p.sms.end(), 0U) == can.units * can.unit);
        std::size_t taken_in = 0;
        for (std::size_t part = 0; part < p.sms.size(); ++part) {
            CHECK(p.sms[part] % can.unit == 0);
            const double due = 1.0 * can.units * can.unit * sums[part] / total;
            CHECK(std::abs(p.sms[part] - due) < can.unit);
            std::size_t big = 0;
            for (std::size_t i = 0; i < shares.size(); ++i)
                big += p.clients[i].partition == part && clients[part] > 1 && shares[i].permille() * can.units >= total;
            taken_in += big;
        }
        CHECK(taken_in <= 1);
    }
}

}  // namespace sm_plan_test
