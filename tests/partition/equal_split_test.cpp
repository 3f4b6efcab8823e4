// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The equal split: N/M whole, M distinct devices of one node, room on each. Each broken rule has
// its own error, which says what would work.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <random>
#include <ranges>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace equal_split_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::device_room;
using gpushare::equal_split;
using gpushare::equal_split_over;
using gpushare::errc;
using gpushare::try_equal_split;
using gpushare::try_equal_split_over;

namespace {

using rooms = std::vector<device_room>;

device_room room(std::uint32_t device, bytes free, std::uint32_t node = 0) { return {device_id{device}, node, free}; }

std::vector<device_id> ids(std::initializer_list<std::uint32_t> indices) {
    std::vector<device_id> all;
    for (const auto i : indices) all.push_back({i});
    return all;
}

}  // namespace

TEST_CASE("N bytes over M devices are N/M on each", "[partition]") {
    const rooms node{room(0, 16_GiB), room(1, 12_GiB), room(2, 12_GiB), room(3, 16_GiB)};
    const auto p = equal_split(48_GiB, 4, node, 1_GiB);
    CHECK(p.per_device == 12_GiB);
    CHECK(p.devices == ids({0, 1, 2, 3}));
    CHECK(p.total() == 48_GiB);
}

TEST_CASE("the devices with the most room are chosen, ties by lowest id", "[partition]") {
    const rooms node{room(3, 5_GiB), room(2, 8_GiB), room(1, 5_GiB), room(0, 2_GiB), room(4, 8_GiB)};
    CHECK(equal_split(2_GiB, 1, node).devices == ids({2}));
    CHECK(equal_split(2_GiB, 2, node).devices == ids({2, 4}));
    CHECK(equal_split(3_GiB, 3, node).devices == ids({1, 2, 4}));
    CHECK(equal_split(4_GiB, 4, node).devices == ids({1, 2, 3, 4}));
}

TEST_CASE("of several nodes, the one whose M devices have the most room is chosen", "[partition]") {
    const rooms cluster{room(0, 90_GiB, 7), room(1, 1_GiB, 7), room(0, 10_GiB, 3), room(1, 10_GiB, 3),
                        room(2, 10_GiB, 3)};
    CHECK(equal_split(60_GiB, 1, cluster).devices == ids({0}));
    const auto p = equal_split(20_GiB, 2, cluster);
    CHECK(p.devices == ids({0, 1}));
    CHECK(p.per_device == 10_GiB);
    CHECK(try_equal_split(21_GiB, 3, cluster));
    CHECK(try_equal_split(40_GiB, 4, cluster).why().left == 3);
}

TEST_CASE("exactly the devices given are taken, in their order", "[partition]") {
    const rooms chosen{room(5, 4_GiB), room(1, 4_GiB)};
    const auto p = equal_split_over(8_GiB, chosen, 1_GiB);
    CHECK(p.devices == ids({5, 1}));
    CHECK(p.per_device == 4_GiB);
}

TEST_CASE("a request must divide into whole units", "[partition]") {
    const rooms node{room(0, 64_GiB), room(1, 64_GiB), room(2, 64_GiB), room(3, 64_GiB)};
    CHECK_THROWS_WITH(equal_split(10_GiB, 4, node, 1_GiB),
                      "split of 10 GiB over 4 devices: not whole in units of 1 GiB; 8 GiB or 12 GiB would be");
    CHECK_THROWS_WITH(equal_split(3_GiB, 4, node, 1_GiB),
                      "split of 3 GiB over 4 devices: not whole in units of 1 GiB; 4 GiB would be");
    CHECK_THROWS_WITH(equal_split(1025_MiB, 1, node, 1_GiB),
                      "split of 1025 MiB over 1 device: not whole in units of 1 GiB; 1 GiB or 2 GiB would be");
    CHECK_THROWS_WITH(equal_split(7_B, 2, node),
                      "split of 7 B over 2 devices: not whole in units of 1 B; 6 B or 8 B would be");
    CHECK(try_equal_split(10_GiB, 4, node, 512_MiB));
    CHECK(try_equal_split(10_GiB, 4, node));
    CHECK(try_equal_split(10_GiB, 4, node, 1_GiB).code() == errc::not_whole);
}

TEST_CASE("there must be enough devices on one node", "[partition]") {
    const rooms node{room(0, 64_GiB), room(1, 64_GiB), room(2, 64_GiB, 1)};
    CHECK_THROWS_WITH(equal_split(6_GiB, 3, node, 1_GiB), "split of 6 GiB over 3 devices: there are only 2");
    CHECK(try_equal_split(6_GiB, 3, node).code() == errc::too_few_devices);
    CHECK(try_equal_split(6_GiB, 1, rooms{}).code() == errc::too_few_devices);
}

TEST_CASE("a device can't be in a split twice", "[partition]") {
    const rooms twice{room(0, 64_GiB), room(4, 64_GiB), room(4, 64_GiB)};
    CHECK_THROWS_WITH(equal_split_over(6_GiB, twice, 1_GiB), "split of 6 GiB over 3 devices: device 4 is named twice");
    CHECK(try_equal_split_over(6_GiB, twice).code() == errc::duplicate_device);
    CHECK(try_equal_split_over(6_GiB, twice).why().asked == 4);
    CHECK(try_equal_split(6_GiB, 3, twice).code() == errc::duplicate_device);
}

TEST_CASE("the devices of a split are on one node", "[partition]") {
    const rooms apart{room(0, 64_GiB, 1), room(1, 64_GiB, 1), room(2, 64_GiB, 2)};
    CHECK_THROWS_WITH(equal_split_over(6_GiB, apart, 1_GiB),
                      "split of 6 GiB over 3 devices: device 2 is on another node than the first");
    CHECK(try_equal_split_over(6_GiB, apart).code() == errc::different_nodes);
    // Devices are counted from 0 on every node: this is not the same device twice.
    CHECK(try_equal_split_over(2_GiB, rooms{room(0, 64_GiB, 1), room(0, 64_GiB, 2)}).code() == errc::different_nodes);
}

TEST_CASE("there must be room on each device, and an error says how much there is", "[partition]") {
    const rooms node{room(0, 16_GiB), room(1, 5_GiB + 1_B), room(2, 9_GiB)};
    CHECK_THROWS_WITH(equal_split_over(18_GiB, node, 1_GiB),
                      "split of 18 GiB over 3 devices: needs 6 GiB on each, but only 5 GiB fits on each of 3; 15 GiB "
                      "in all would fit");
    const auto refused = try_equal_split_over(18_GiB, node, 1_GiB);
    CHECK(refused.code() == errc::no_room);
    CHECK(refused.why().asked == (6_GiB).count());
    CHECK(refused.why().left == (5_GiB).count());
    CHECK(try_equal_split_over(15_GiB, node, 1_GiB));
    CHECK(try_equal_split(18_GiB, 2, node, 1_GiB));
    CHECK(try_equal_split(20_GiB, 2, node, 1_GiB).why().left == (9_GiB).count());
}

TEST_CASE("a split needs devices, bytes and a unit", "[partition]") {
    const rooms node{room(0, 16_GiB)};
    CHECK_THROWS_WITH(equal_split(1_GiB, 0, node), "split of 1 GiB over 0 devices: needs at least one device");
    CHECK_THROWS_WITH(equal_split_over(1_GiB, rooms{}), "split of 1 GiB over 0 devices: needs at least one device");
    CHECK_THROWS_WITH(equal_split(0_B, 1, node), "split of 0 B over 1 device: needs at least one unit of at least 1 B");
    CHECK_THROWS_WITH(equal_split(1_GiB, 1, node, 0_B),
                      "split of 1 GiB over 1 device: needs at least one unit of at least 1 B");
    CHECK(try_equal_split(0_B, 0, rooms{}, 0_B).code() == errc::invalid_specification);
    CHECK_THROWS_AS(equal_split(0_B, 1, node), gpushare::operation_error);
}

TEST_CASE("sizes at the edge of 64 bits don't wrap", "[partition]") {
    const bytes most = bytes::max() - 1_B;  // even, but not whole in units of 2^63
    const rooms node{room(0, bytes::max()), room(1, bytes::max()), room(2, bytes::max())};
    CHECK(equal_split(most, 2, node).per_device == most / 2);
    CHECK(equal_split(bytes::max(), 3, node).per_device == bytes::max() / 3);
    CHECK(try_equal_split(bytes::max(), 2, node).code() == errc::not_whole);
    CHECK(try_equal_split(4_GiB, 2, node, bytes{1ULL << 63}).code() == errc::not_whole);
    CHECK(try_equal_split(most, 3, node, bytes::max()).code() == errc::not_whole);
    CHECK(try_equal_split(4_GiB, 4'000'000'000U, node).code() == errc::not_whole);
    // No advice where the next whole size has no representation.
    CHECK_THROWS_WITH(equal_split(bytes::max(), 2, node, 1_GiB),
                      Catch::EndsWith("not whole in units of 1 GiB; 17179869182 GiB would be"));
    CHECK_THROWS_WITH(equal_split(4_GiB, 2, node, bytes{1ULL << 63}),
                      Catch::EndsWith("not whole in units of 8589934592 GiB"));
    CHECK_THROWS_WITH(equal_split(bytes::max(), 2, node, bytes{1ULL << 63}),
                      Catch::EndsWith("not whole in units of 8589934592 GiB"));
}

TEST_CASE("a split is found exactly if there is one", "[partition][property]") {
    // Against brute force: every choice of devices of one node.
    for (std::uint64_t run = 0; run < 3'000; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        rooms all;
        const auto nodes = 1 + any.below(3);
        for (std::uint32_t node = 0; node < nodes; ++node)
            for (std::uint32_t d = 0; d < any.below(6); ++d) all.push_back(room(d, bytes{any.below(20)}, node));
        std::ranges::shuffle(all, std::minstd_rand(static_cast<unsigned>(seed + 1)));
        const bytes total{any.below(40)}, unit{any.below(4)};
        const auto count = static_cast<std::uint32_t>(any.below(5));
        CAPTURE(total.count(), unit.count(), count);

        errc expected = errc::none;
        bytes most;  // that fits on each of `count` devices of some node
        std::size_t biggest = 0;
        if (count == 0 || total == 0_B || unit == 0_B) {
            expected = errc::invalid_specification;
        } else if (total.count() % count != 0 || total.count() / count % unit.count() != 0) {
            expected = errc::not_whole;
        } else {
            for (std::uint32_t choice = 0; choice < 1U << all.size(); ++choice) {
                rooms chosen;
                for (std::size_t i = 0; i < all.size(); ++i)
                    if ((choice >> i & 1U) != 0) chosen.push_back(all[i]);
                if (chosen.empty() ||
                    std::ranges::adjacent_find(chosen, std::ranges::not_equal_to{}, &device_room::node) != chosen.end())
                    continue;
                biggest = std::max(biggest, chosen.size());
                if (chosen.size() == count)
                    most = std::max(most, std::ranges::min(chosen, {}, &device_room::free).free);
            }
            if (biggest < count) {
                expected = errc::too_few_devices;
            } else if (most < total / count) {
                expected = errc::no_room;
            }
        }

        const auto p = try_equal_split(total, count, all, unit);
        REQUIRE(p.code() == expected);
        if (expected == errc::no_room) REQUIRE(p.why().left == (most - most % unit).count());
        if (expected == errc::too_few_devices) REQUIRE(p.why().left == biggest);
        if (!p) continue;
        REQUIRE(p->devices.size() == count);
        REQUIRE(p->per_device * count == total);
        REQUIRE(std::ranges::is_sorted(p->devices));
        REQUIRE(std::ranges::adjacent_find(p->devices) == p->devices.end());
        // Some node has all of them, with the most room that could be had.
        REQUIRE(std::ranges::any_of(all, [&](const device_room& on) {
            return std::ranges::all_of(p->devices, [&](device_id id) {
                return std::ranges::any_of(
                    all, [&](const device_room& d) { return d.node == on.node && d.device == id && d.free >= most; });
            });
        }));
    }
}

TEST_CASE("a split names its node", "[partition]") {
    const rooms cluster{room(0, 1_GiB, 7), room(1, 1_GiB, 7), room(0, 4_GiB, 9), room(1, 4_GiB, 9)};
    CHECK(equal_split(4_GiB, 2, cluster).node == 9);
    CHECK(equal_split_over(2_GiB, rooms{room(0, 1_GiB, 7), room(1, 1_GiB, 7)}).node == 7);
}

TEST_CASE("the figures of a refused split are those of the fullest device", "[partition]") {
    const rooms node{{device_id{0}, 0, 30_GiB, 80_GiB}, {device_id{1}, 0, 5_GiB + 1_B, 40_GiB}};
    const auto refused = try_equal_split_over(20_GiB, node, 1_GiB).why();
    CHECK(refused.asked == (10_GiB).count());
    CHECK(refused.left == (5_GiB).count());
    CHECK(refused.limit == (40_GiB).count());
    try {
        (void)equal_split(20_GiB, 2, node, 1_GiB);
        FAIL("split");
    } catch (const gpushare::operation_error& e) {  // beside the text
        CHECK(e.code() == errc::no_room);
        CHECK(e.figures().left == (5_GiB).count());
    }
    // Where the description doesn't say what there is altogether, it is at least what is free.
    CHECK(try_equal_split_over(4_GiB, rooms{room(0, 3_GiB)}).why().limit == (3_GiB).count());
    const auto broken = try_equal_split_over(11_GiB, node, 1_GiB).why();
    CHECK(broken.code == errc::not_whole);
    CHECK(broken.left == (10_GiB).count());
    CHECK(broken.limit == (2_GiB).count());
}

TEST_CASE("SMs are split by the same rules", "[partition]") {
    using gpushare::sm_count;
    const std::vector<gpushare::sm_room> sms{
        {device_id{0}, 0, {132}, {132}}, {device_id{1}, 0, {66}, {132}}, {device_id{2}, 0, {100}, {132}}};
    const auto p = equal_split(sm_count{128}, 2, sms, sm_count{8});
    CHECK(p.per_device == sm_count{64});
    CHECK(p.devices == ids({0, 2}));
    CHECK(p.total() == sm_count{128});
    CHECK_THROWS_WITH(equal_split(sm_count{100}, 3, sms, sm_count{8}),
                      "split of 100 SMs over 3 devices: not whole in units of 8 SMs; 96 SMs or 120 SMs would be");
    CHECK_THROWS_WITH(equal_split(sm_count{240}, 3, sms, sm_count{8}),
                      "split of 240 SMs over 3 devices: needs 80 SMs on each, but only 64 SMs fits on each of 3; 192 "
                      "SMs in all would fit");
    CHECK(try_equal_split(sm_count{240}, 3, sms).code() == errc::too_few_sms);
    CHECK(try_equal_split(sm_count{240}, 3, sms).why().limit == 132);
    CHECK(try_equal_split(sm_count{4}, 4, sms).code() == errc::too_few_devices);
    CHECK_THROWS_WITH(equal_split(sm_count{0}, 1, sms),
                      "split of 0 SMs over 1 device: needs at least one unit of at least 1 SM");
}

TEST_CASE("shares of device time are split by the same rules", "[partition]") {
    using gpushare::share;
    const std::vector<gpushare::share_room> shares{
        {device_id{0}, 0, 100_pct, 100_pct}, {device_id{1}, 0, 55.5_pct, 100_pct}, {device_id{2}, 0, 80_pct, 100_pct}};
    const auto p = equal_split(60_pct * 2, 2, shares);
    CHECK(p.per_device == 60_pct);
    CHECK(p.devices == ids({0, 2}));
    CHECK(p.total() == gpushare::share_sum{1200});
    CHECK_THROWS_WITH(
        equal_split(60_pct * 3, 3, shares, 1_pct),
        "split of 180 % over 3 devices: needs 60 % on each, but only 55 % fits on each of 3; 165 % in all "
        "would fit");
    CHECK_THROWS_WITH(equal_split(gpushare::share_sum{1001}, 2, shares),
                      "split of 100.1 % over 2 devices: not whole in units of 0.1 %; 100 % or 100.2 % would be");
    CHECK(try_equal_split(gpushare::share_sum{2002}, 2, shares).code() == errc::share_exceeded);  // over a whole device
    CHECK(try_equal_split_over(share::whole() * 1, std::vector{shares[0], shares[0]}).code() == errc::duplicate_device);
}

TEST_CASE("devices may be described by a view that makes them up as it goes", "[partition]") {
    const std::vector<std::uint64_t> free{16, 5, 9};
    const auto as_room = [&](std::uint32_t i) { return room(i, bytes{free[i]} * (1_GiB).count()); };
    const auto node = std::views::iota(0U, 3U) | std::views::transform(as_room);
    const auto refused = try_equal_split_over(18_GiB, node, 1_GiB).why();
    CHECK(refused.code == errc::no_room);
    CHECK(refused.left == (5_GiB).count());
    CHECK(equal_split(18_GiB, 2, node, 1_GiB).devices == ids({0, 2}));
}

}  // namespace equal_split_test
