// SPDX-License-Identifier: Apache-2.0
// The contract of every device memory. A backend is a default-constructible type with
// `auto& memory()`, a model that no other code uses meanwhile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include <gpushare/concepts.hpp>
#include "support/catch.hpp"

namespace conformance {

template <class Backend>
void check_memory() {
    using namespace gpushare;
    Backend backend;
    memory auto& m = backend.memory();
    constexpr std::size_t no_size = std::numeric_limits<std::size_t>::max();

    SECTION("charges cover the request and are never less than those of a smaller one") {
        bytes last{};
        for (std::size_t size = 0; size < 10000; size += 37) {
            const bytes charge = m.charged(size, 256);
            REQUIRE(charge >= bytes{std::max<std::size_t>(size, 1)});
            REQUIRE(charge >= last);
            last = charge;
        }
        CHECK(m.charged(no_size, 256) == bytes::max());
        CHECK(m.charged(1, 0) == bytes::max());
        CHECK(m.charged(1, 3) == bytes::max());
    }
    SECTION("what can't be had is refused both ways") {
        const auto too_much = static_cast<std::size_t>(m.capacity().count()) + 1;
        for (const std::size_t size : {too_much, no_size}) {
            CHECK(m.try_allocate(size, 256) == nullptr);
            CHECK_THROWS_AS(m.allocate(size, 256), std::bad_alloc);
        }
        CHECK(m.try_allocate(1, 3) == nullptr);
        CHECK_THROWS_AS(m.allocate(1, 0), std::bad_alloc);
    }
    SECTION("the capacity can be had in equal parts, to the last one, again and again") {
        const bytes available = m.capacity() - m.taken_by_others();
        const auto part = static_cast<std::size_t>((available / 64).count());
        const auto parts = static_cast<std::size_t>(available / m.charged(part, 256));
        for (int round = 0; round < 3; ++round) {
            std::vector<void*> blocks;
            while (void* const p = m.try_allocate(part, 256)) blocks.push_back(p);
            CHECK(blocks.size() == parts);
            for (void* const p : blocks) m.deallocate(p, part, 256);
        }
    }
    SECTION("blocks are aligned and don't overlap") {
        struct block {
            std::uintptr_t begin;
            std::size_t size, alignment;
        };
        std::vector<block> blocks;
        for (std::size_t i = 0; i < 60; ++i) {
            const std::size_t size = i * i * i, alignment = std::size_t{1} << (i % 13);
            const auto at = reinterpret_cast<std::uintptr_t>(m.allocate(size, alignment));
            CHECK(at % alignment == 0);
            blocks.push_back({at, size, alignment});
        }
        std::ranges::sort(blocks, {}, &block::begin);
        for (std::size_t i = 1; i < blocks.size(); ++i)
            REQUIRE(blocks[i - 1].begin + std::max<std::size_t>(blocks[i - 1].size, 1) <= blocks[i].begin);
        for (const block& b : blocks) m.deallocate(reinterpret_cast<void*>(b.begin), b.size, b.alignment);
    }
}

}  // namespace conformance
