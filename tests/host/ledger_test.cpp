// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/ledger.hpp>

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "support/catch.hpp"

using namespace gpushare;
using host::block_record;
using host::tag_time;

namespace {
constexpr instant at(std::int64_t t) { return instant{ns{t}}; }
constexpr block_record block(std::uint32_t tag, std::int64_t start, std::int64_t end, std::uint32_t sm = 0) {
    return {tag, sm, at(start), at(end)};
}
}  // namespace

TEST_CASE("a ledger gives a page at a time and counts what it dropped", "[host]") {
    host::ledger ledger{2};
    for (std::uint32_t i = 0; i < 5; ++i) ledger.record(block(i, i, i + 1));
    auto page = ledger.take();
    CHECK(page.blocks == std::vector{block(0, 0, 1), block(1, 1, 2)});
    CHECK(page.dropped == 3);
    page = ledger.take();
    CHECK(page.blocks.empty());
    CHECK(page.dropped == 0);
    ledger.record(block(9, 0, 1));
    CHECK(ledger.take().blocks.size() == 1);
}

TEST_CASE("busy time is the union of a tag's blocks", "[host]") {
    const std::vector blocks{block(1, 0, 10, 0), block(1, 5, 15, 1), block(1, 15, 20, 0), block(1, 30, 40, 1)};
    CHECK(host::busy_union(blocks, at(0), at(100)) == ns{30});
    CHECK(host::sm_time_by_tag(blocks, at(0), at(100), 1) == std::vector<tag_time>{{1, ns{35}}});
    CHECK(host::sm_time_by_tag(blocks, at(0), at(100), 2) == std::vector<tag_time>{{1, ns{17}}});
}

TEST_CASE("a tag's time counts each of its SMs, whoever is beside it", "[host]") {
    const std::vector blocks{block(1, 0, 20, 0), block(1, 10, 20, 1), block(1, 12, 18, 2), block(2, 10, 40, 3)};
    CHECK(host::sm_time_by_tag(blocks, at(0), at(100), 4) == std::vector<tag_time>{{1, ns{9}}, {2, ns{7}}});
    CHECK(host::busy_union(blocks, at(0), at(100)) == ns{40});
}

TEST_CASE("busy time is cut to the window", "[host]") {
    const std::vector blocks{block(1, 0, 100), block(2, 50, 150), block(3, 200, 300), block(4, 60, 60)};
    CHECK(host::sm_time_by_tag(blocks, at(40), at(120), 2) == std::vector<tag_time>{{1, ns{30}}, {2, ns{35}}});
    CHECK(host::busy_union(blocks, at(40), at(120)) == ns{80});
    CHECK(host::sm_time_by_tag(blocks, at(150), at(200), 1).empty());
    CHECK(host::sm_time_by_tag({}, at(0), at(1), 1).empty());
    CHECK(host::busy_union({}, at(0), at(1)) == ns{0});
}

TEST_CASE("busy time equals a count instant by instant", "[host]") {
    const auto seed = std::random_device{}();
    CAPTURE(seed);
    std::mt19937 random{seed};
    for (int round = 0; round < 200; ++round) {
        std::vector<block_record> blocks;
        const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random()) % n; };
        for (auto n = below(40); n > 0; --n) {
            const auto start = below(100);
            blocks.push_back(block(static_cast<std::uint32_t>(below(5)), start, start + below(30)));
        }
        const auto from = below(60), to = from + below(80);

        std::map<std::uint32_t, std::int64_t> expected;
        std::int64_t expected_union = 0;
        for (auto t = from; t < to; ++t) {
            bool any = false;
            for (const auto& b : blocks) {
                if (b.start > at(t) || at(t) >= b.end) continue;
                ++expected[b.tag];
                any = true;
            }
            expected_union += any ? 1 : 0;
        }
        std::vector<tag_time> same;
        for (const auto& [tag, time] : expected) same.push_back({tag, ns{time / 3}});
        REQUIRE(host::sm_time_by_tag(blocks, at(from), at(to), 3) == same);
        REQUIRE(host::busy_union(blocks, at(from), at(to)) == ns{expected_union});
    }
}
