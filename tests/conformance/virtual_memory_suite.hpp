// SPDX-License-Identifier: Apache-2.0
// The contract of every virtual memory. A backend is a default-constructible type with
// `auto& virtual_memory()`, of at least 8 chunks that no other code uses meanwhile, and with
// read(at, to, n) and write(at, from, n), which copy from and to mapped memory and return when the
// copy is done.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include "support/catch.hpp"

namespace conformance {

template <class Backend>
void check_virtual_memory() {
    using namespace gpushare;
    Backend backend;
    virtual_memory auto& m = backend.virtual_memory();
    const auto unit = static_cast<std::size_t>(m.granularity().count());
    const auto at = [unit](const auto& range, std::size_t i) {
        return static_cast<void*>(static_cast<std::byte*>(range.data()) + i * unit);
    };
    // Writes to, and reads from, the first and last bytes of a chunk.
    const auto mark = [&](void* p, std::byte value) {
        for (const std::size_t offset : {std::size_t{0}, unit - 1})
            backend.write(static_cast<std::byte*>(p) + offset, &value, 1);
    };
    const auto marked = [&](void* p, std::byte value) {
        bool all = true;
        for (const std::size_t offset : {std::size_t{0}, unit - 1}) {
            std::byte read{};
            backend.read(static_cast<std::byte*>(p) + offset, &read, 1);
            all = all && read == value;
        }
        return all;
    };

    SECTION("ranges are aligned to the granularity and don't overlap") {
        std::vector<typename std::remove_reference_t<decltype(m)>::range> ranges;
        for (std::size_t chunks = 1; chunks < 20; ++chunks) {
            auto r = m.reserve(chunks * unit);
            REQUIRE(r);
            CHECK(reinterpret_cast<std::uintptr_t>(r->data()) % unit == 0);
            ranges.push_back(*std::move(r));
        }
        for (std::size_t i = 0; i < ranges.size(); ++i)
            for (std::size_t j = 0; j < i; ++j)
                CHECK((at(ranges[i], i + 1) <= ranges[j].data() || at(ranges[j], j + 1) <= ranges[i].data()));
    }
    SECTION("sizes that can't be are refused") {
        CHECK(m.reserve(0).code() == errc::not_whole);
        CHECK(m.reserve(unit + 1).code() == errc::not_whole);
        CHECK_FALSE(m.reserve(std::size_t{0} - unit));
    }
    SECTION("a range may be far bigger than the device") { CHECK(m.reserve(std::size_t{1} << 40)); }
    SECTION("a chunk keeps what it holds when it is mapped elsewhere") {
        auto range = m.reserve(8 * unit);
        auto first = m.create(), second = m.create();
        REQUIRE((range && first && second));
        REQUIRE(m.map(at(*range, 0), *first) == errc::none);
        REQUIRE(m.map(at(*range, 1), *second) == errc::none);
        mark(at(*range, 0), std::byte{1});
        mark(at(*range, 1), std::byte{2});
        REQUIRE(m.unmap(at(*range, 0), 2 * unit) == errc::none);  // two at once
        REQUIRE(m.map(at(*range, 7), *first) == errc::none);
        REQUIRE(m.map(at(*range, 3), *second) == errc::none);
        CHECK(marked(at(*range, 7), std::byte{1}));
        CHECK(marked(at(*range, 3), std::byte{2}));
        CHECK(m.unmap(at(*range, 7), unit) == errc::none);
        CHECK(m.unmap(at(*range, 3), unit) == errc::none);
    }
    SECTION("chunks come back to be had again, cleared if the memory says so") {
        auto range = m.reserve(unit);
        REQUIRE(range);
        for (int round = 0; round < 3; ++round) {
            std::vector<typename std::remove_reference_t<decltype(m)>::chunk> all;
            while (auto c = m.create()) {
                all.push_back(*std::move(c));
                REQUIRE(all.size() < 10'000);
            }
            CHECK(all.size() >= 8);
            CHECK(m.create().code() == errc::out_of_memory);
            for (auto& c : {std::ref(all.front()), std::ref(all.back())}) {
                REQUIRE(m.map(range->data(), c.get()) == errc::none);
                if constexpr (std::remove_reference_t<decltype(m)>::fresh_is_zero)
                    CHECK(marked(range->data(), std::byte{0}));
                mark(range->data(), std::byte{0xff});
                REQUIRE(m.unmap(range->data(), unit) == errc::none);
            }
        }
    }
    SECTION("handles move") {
        auto range = m.reserve(unit);
        auto chunk = m.create();
        REQUIRE((range && chunk));
        auto moved_range = *std::move(range);
        auto moved_chunk = *std::move(chunk);
        REQUIRE(m.map(moved_range.data(), moved_chunk) == errc::none);
        mark(moved_range.data(), std::byte{3});
        auto other = m.create();
        REQUIRE(other);
        *other = std::move(moved_chunk);  // the other one goes back
        CHECK(marked(moved_range.data(), std::byte{3}));
        CHECK(m.unmap(moved_range.data(), unit) == errc::none);
    }
}

}  // namespace conformance
