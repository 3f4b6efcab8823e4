// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The hash table behind the tables of blocks, against std::unordered_map.
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <gpushare/detail/pointer_table.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using gpushare::detail::pointer_table;

namespace {

void* address(std::uint64_t n) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(n)); }

}  // namespace

TEST_CASE("an empty table finds nothing and forgets nothing", "[base][pointer_table]") {
    pointer_table<int> table;
    CHECK(table.find(address(64)) == nullptr);
    CHECK(table.find(nullptr) == nullptr);
    table.erase(address(64));
    table.erase(nullptr);
    CHECK(table.size() == 0);
}

TEST_CASE("a null pointer isn't found in a table that has keys", "[base][pointer_table]") {
    pointer_table<int> table;
    table.insert(address(64), 1);
    CHECK(table.find(nullptr) == nullptr);
    table.erase(nullptr);
    CHECK(table.size() == 1);
}

TEST_CASE("a key that comes again has its new value, once", "[base][pointer_table]") {
    pointer_table<int> table;
    table.insert(address(64), 1);
    table.insert(address(64), 2);
    CHECK(table.size() == 1);
    REQUIRE(table.find(address(64)) != nullptr);
    CHECK(*table.find(address(64)) == 2);
}

TEST_CASE("a cleared table is as good as new", "[base][pointer_table]") {
    pointer_table<int> table;
    for (std::uint64_t i = 1; i <= 100; ++i) table.insert(address(i * 256), static_cast<int>(i));
    table.clear();
    CHECK(table.size() == 0);
    CHECK(table.find(address(256)) == nullptr);
    table.insert(address(256), 7);
    CHECK(*table.find(address(256)) == 7);
}

TEST_CASE("there is room for a key that was taken out, whatever comes meanwhile", "[base][pointer_table]") {
    pointer_table<int> table;
    for (std::uint64_t i = 1; i <= 8; ++i) table.insert(address(i * 256), static_cast<int>(i));
    table.take_out(address(256));
    table.take_out(address(512));
    CHECK(table.size() == 6);
    CHECK(table.find(address(256)) == nullptr);
    const bool cleared = GENERATE(false, true);
    if (cleared) table.clear();
    for (std::uint64_t i = 10; i <= 18; ++i) table.insert(address(i * 256), static_cast<int>(i));
    table.put_back(address(256), 1);
    table.forget();
    CHECK(table.size() == (cleared ? 10 : 16));
    for (std::uint64_t i = 1; i <= 18; ++i) {
        const bool there = i == 1 || i >= 10 || (!cleared && i >= 3 && i <= 8);
        const int* const found = table.find(address(i * 256));
        CHECK((found != nullptr) == there);
        if (found != nullptr) CHECK(*found == static_cast<int>(i));
    }
}

TEST_CASE("a pointer table does what an unordered map does", "[base][pointer_table]") {
    for (std::uint64_t run = 0; run < 40; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        // Few keys, so that they collide and come again; steps as of device allocators, and up to
        // the top of the range.
        const std::uint64_t step = std::uint64_t{1} << any.below(40), keys = 1 + any.below(200);
        const std::uint64_t first = any.one_in(2) ? step : ~std::uint64_t{0} - keys * step + 1;
        pointer_table<std::uint64_t> table;
        std::unordered_map<void*, std::uint64_t> model;
        for (std::uint64_t i = 0; i < 3'000; ++i) {
            void* const key = address(first + any.below(keys) * step);
            if (any.one_in(2)) {
                table.insert(key, i);
                model[key] = i;
            } else {
                table.erase(key);
                model.erase(key);
            }
            REQUIRE(table.size() == model.size());
            void* const other = address(first + any.below(keys) * step);
            const auto expected = model.find(other);
            const std::uint64_t* const found = table.find(other);
            REQUIRE((found != nullptr) == (expected != model.end()));
            if (found != nullptr) REQUIRE(*found == expected->second);
        }
        std::uint64_t sum = 0, count = 0, expected_sum = 0;
        table.for_each([&](std::uint64_t v) { sum += v, ++count; });
        for (const auto& [key, v] : model) expected_sum += v;
        CHECK(count == model.size());
        CHECK(sum == expected_sum);
    }
}
