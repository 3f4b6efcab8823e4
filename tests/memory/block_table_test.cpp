// SPDX-License-Identifier: Apache-2.0
// The table of blocks that are out: right frees pass, wrong ones change nothing, and what leaked is listed.
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <gpushare/memory/block_table.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

using namespace gpushare::literals;
using gpushare::block;
using gpushare::block_table;
using gpushare::errc;

TEST_CASE("a block is removed once, with the size and alignment that it was inserted with", "[memory][blocks]") {
    block_table table;
    int a = 0, b = 0;
    table.insert({&a, 4096_B, 256, "kv-cache"});
    CHECK(table.remove(&b, 4096_B, 256) == errc::unknown_block);
    CHECK(table.remove(nullptr, 4096_B, 256) == errc::unknown_block);
    CHECK(table.remove(&a, 4095_B, 256) == errc::wrong_size);
    CHECK(table.remove(&a, 4096_B, 512) == errc::wrong_size);
    CHECK(table.size() == 1);
    CHECK(table.remove(&a, 4096_B, 256) == errc::none);
    CHECK(table.remove(&a, 4096_B, 256) == errc::unknown_block);
    CHECK(table.size() == 0);
}

TEST_CASE("a pointer may come again after it was removed", "[memory][blocks]") {
    block_table table;
    int a = 0;
    table.insert({&a, 16_B, 8, "first"});
    REQUIRE(table.remove(&a, 16_B, 8) == errc::none);
    table.insert({&a, 32_B, 8, "second"});
    CHECK(table.remove(&a, 16_B, 8) == errc::wrong_size);
    CHECK(table.remove(&a, 32_B, 8) == errc::none);
}

TEST_CASE("what is still out can be taken, with size, alignment and label", "[memory][blocks]") {
    block_table table;
    std::array<int, 3> memory{};
    table.insert({&memory[0], 16_B, 8, "weights"});
    table.insert({&memory[1], 32_B, 16, "kv-cache"});
    table.insert({&memory[2], 64_B, 32, {}});
    REQUIRE(table.remove(&memory[0], 16_B, 8) == errc::none);
    auto left = table.take_all();
    REQUIRE(left.size() == 2);
    std::ranges::sort(left, {}, &block::size);
    CHECK(left[0].pointer == &memory[1]);
    CHECK(left[0].size == 32_B);
    CHECK(left[0].alignment == 16);
    CHECK(left[0].label == "kv-cache");
    CHECK(left[1].label.empty());
    CHECK(table.size() == 0);
    CHECK(table.take_all().empty());
    CHECK(table.remove(&memory[1], 32_B, 16) == errc::unknown_block);
}

TEST_CASE("of several threads that free the same block, one succeeds", "[memory][blocks]") {
    block_table table;
    std::vector<char> memory(2'000);
    for (auto& m : memory) table.insert({&m, 16_B, 8, {}});
    std::atomic<std::uint64_t> freed{0}, unknown{0};
    support::together(3, [&](unsigned) {
        for (auto& m : memory) (table.remove(&m, 16_B, 8) == errc::none ? freed : unknown).fetch_add(1);
    });
    CHECK(freed.load() == memory.size());
    CHECK(unknown.load() == 2 * memory.size());
}
