// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/ledger.hpp>

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
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
    host::ledger book{2};
    for (std::uint32_t i = 0; i < 5; ++i) book.record(block(i, i, i + 1));
    auto page = book.take();
    CHECK(page.blocks == std::vector{block(0, 0, 1), block(1, 1, 2)});
    CHECK(page.dropped == 3);
    page = book.take();
    CHECK(page.blocks.empty());
    CHECK(page.dropped == 0);
    book.record(block(9, 0, 1));
    CHECK(book.take().blocks.size() == 1);
}

TEST_CASE("busy time is the union of a tag's blocks", "[host]") {
    const std::vector blocks{block(1, 0, 10, 0), block(1, 5, 15, 1), block(1, 15, 20, 0), block(1, 30, 40, 1)};
    CHECK(host::busy_union(blocks, at(0), at(100)) == ns{30});
    CHECK(host::busy_by_tag(blocks, at(0), at(100)) == std::vector<tag_time>{{1, ns{30}}});
}

TEST_CASE("where tags overlap they share equally, however many SMs each has", "[host]") {
    // 0..10 one alone; 10..20 both (tag 1 with three blocks); 20..40 two alone.
    const std::vector blocks{block(1, 0, 20, 0), block(1, 10, 20, 1), block(1, 12, 18, 2), block(2, 10, 40, 3)};
    CHECK(host::busy_by_tag(blocks, at(0), at(100)) == std::vector<tag_time>{{1, ns{15}}, {2, ns{25}}});
    CHECK(host::busy_union(blocks, at(0), at(100)) == ns{40});
}

TEST_CASE("busy time is cut to the window", "[host]") {
    const std::vector blocks{block(1, 0, 100), block(2, 50, 150), block(3, 200, 300), block(4, 60, 60)};
    CHECK(host::busy_by_tag(blocks, at(40), at(120)) == std::vector<tag_time>{{1, ns{35}}, {2, ns{45}}});
    CHECK(host::busy_union(blocks, at(40), at(120)) == ns{80});
    CHECK(host::busy_by_tag(blocks, at(150), at(200)).empty());
    CHECK(host::busy_by_tag({}, at(0), at(1)).empty());
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

        std::map<std::uint32_t, double> expected;
        std::int64_t expected_union = 0;
        for (auto t = from; t < to; ++t) {
            std::set<std::uint32_t> active;
            for (const auto& b : blocks)
                if (b.start <= at(t) && at(t) < b.end) active.insert(b.tag);
            for (const auto tag : active) expected[tag] += 1.0 / static_cast<double>(active.size());
            expected_union += active.empty() ? 0 : 1;
        }
        const auto times = host::busy_by_tag(blocks, at(from), at(to));
        bool same = times.size() == expected.size();
        for (const auto& [tag, busy] : times)
            same &= expected.contains(tag) && std::abs(static_cast<double>(busy.count()) - expected[tag]) <= 0.5 + 1e-6;
        REQUIRE(same);
        REQUIRE(host::busy_union(blocks, at(from), at(to)) == ns{expected_union});
    }
}
