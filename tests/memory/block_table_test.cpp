// SPDX-License-Identifier: Apache-2.0
// The table of live blocks: correct frees pass, wrong frees change nothing, and leaks are listed.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <gpushare/memory/block_table.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

using namespace gpushare::literals;
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

TEST_CASE("blocks that are still out can be taken, with size, alignment and label", "[memory][blocks]") {
    block_table table;
    std::array<int, 3> memory{};
    table.insert({&memory[0], 16_B, 8, "weights"});
    table.insert({&memory[1], 32_B, 16, "kv-cache"});
    table.insert({&memory[2], 64_B, 32, {}});
    REQUIRE(table.remove(&memory[0], 16_B, 8) == errc::none);
    auto left = table.take_all();
    REQUIRE(left.size() == 2);
    std::ranges::sort(left, {}, [](const gpushare::leak& l) { return l.what.size; });
    CHECK(left[0].what.pointer == &memory[1]);
    CHECK(left[0].what.size == 32_B);
    CHECK(left[0].what.alignment == 16);
    CHECK(left[0].what.label == "kv-cache");
    CHECK(left[0].trace.empty());  // nobody asked for one
    CHECK(left[1].what.label.empty());
    CHECK(table.size() == 0);
    CHECK(table.take_all().empty());
    CHECK(table.remove(&memory[1], 32_B, 16) == errc::unknown_block);
}

namespace {

// Who allocates, as far as the next test goes.
std::atomic<std::uintptr_t> place{0};
std::size_t capture_place(std::span<void*> callers) noexcept {
    const auto depth = place.load() % 4;
    std::fill_n(callers.begin(), depth, reinterpret_cast<void*>(place.load()));
    return depth;
}

}  // namespace

TEST_CASE("each block's trace is its own, however blocks come and go", "[memory][blocks]") {
    block_table table{&capture_place};
    const auto seed = support::seed(5);
    CAPTURE(seed);
    support::random any{seed};
    std::map<void*, std::uintptr_t> out;
    std::vector<char> memory(50);
    for (int i = 0; i < 2'000; ++i) {
        void* const p = &any.of(memory);
        if (out.erase(p) != 0) {
            REQUIRE(table.remove(p, 16_B, 8) == errc::none);
            continue;
        }
        place = any.below(1'000);
        out.emplace(p, place.load());
        table.insert({p, 16_B, 8, {}});
    }
    const auto left = table.take_all();
    CHECK(left.size() == out.size());
    for (const auto& l : left)
        CHECK(l.trace == std::vector(out.at(l.what.pointer) % 4, reinterpret_cast<void*>(out.at(l.what.pointer))));
    place = 3;
    table.insert({&memory[0], 16_B, 8, {}});
    CHECK(table.take_all().front().trace.size() == 3);
}

TEST_CASE("traces are given to the leaks of their blocks, and the table is empty then", "[memory][blocks]") {
    block_table table{&capture_place};
    std::vector<char> memory(4);
    for (auto& m : memory) {
        place = static_cast<std::uintptr_t>(&m - memory.data());
        table.insert({&m, 16_B, 8, {}});
    }
    REQUIRE(table.remove(&memory[2], 16_B, 8) == errc::none);
    std::vector<gpushare::leak> found{{{&memory[3], 8_B, 8, {}}, {}, {}}, {{&memory[2], 16_B, 8, {}}, {}, {}}};
    table.take_traces(found);
    CHECK(found[0].trace == std::vector(3, reinterpret_cast<void*>(std::uintptr_t{3})));
    CHECK(found[0].what.size == 8_B);
    CHECK(found[1].trace.empty());  // of a block that was freed
    CHECK(table.size() == 0);
    place = 1;
    table.insert({&memory[0], 16_B, 8, {}});
    CHECK(table.take_all().front().trace.size() == 1);
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

TEST_CASE("a block that couldn't be freed is in the table again, with its label and trace", "[memory][blocks]") {
    block_table table{&capture_place};
    std::vector<char> memory(1'000);
    place = 3;
    table.insert({&memory[0], 16_B, 8, "weights"});
    place = 2;
    block_table::taken entry;
    CHECK(table.take_out(&memory[1], 16_B, 8, entry) == errc::unknown_block);
    CHECK(table.take_out(&memory[0], 8_B, 8, entry) == errc::wrong_size);
    REQUIRE(table.take_out(&memory[0], 16_B, 8, entry) == errc::none);
    CHECK(table.take_out(&memory[0], 16_B, 8, entry) == errc::unknown_block);
    CHECK(table.size() == 0);
    CHECK_FALSE(table.find(&memory[0]));
    SECTION("whatever comes meanwhile") {
        for (std::size_t i = 1; i < memory.size(); ++i) table.insert({&memory[i], 8_B, 8, {}});
    }
    SECTION("or goes") { CHECK(table.take_all().empty()); }
    table.put_back(entry);
    REQUIRE(table.find(&memory[0]));
    CHECK(table.find(&memory[0])->label == "weights");
    const auto all = table.all();
    CHECK(all.size() == table.size());
    const auto at =
        std::ranges::find(all, static_cast<void*>(&memory[0]), [](const auto& l) { return l.what.pointer; });
    REQUIRE(at != all.end());
    CHECK(at->trace.size() == 3);
    REQUIRE(table.take_out(&memory[0], 16_B, 8, entry) == errc::none);
    table.forget(entry);
    CHECK(table.remove(&memory[0], 16_B, 8) == errc::unknown_block);
}
