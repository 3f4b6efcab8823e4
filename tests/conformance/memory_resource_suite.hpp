// SPDX-License-Identifier: Apache-2.0
// The contract of every memory_resource, whatever is behind it. The suite doesn't write to blocks,
// since the host may not be able to write device memory.
//
//   TEST_CASE("...") { conformance::check_memory_resource(resource); }
//   // models gpushare::memory as well
//   TEST_CASE("...") { conformance::check_memory_view(memory); }
//   TEST_CASE("...") { conformance::check_refused_free(resource, memory, [&] { ... }); }
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/refusing_memory.hpp"
#include "support/threads.hpp"

namespace conformance {

struct span_of_bytes {
    void* pointer;
    std::size_t size, alignment;

    [[nodiscard]] std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(pointer); }
    [[nodiscard]] std::uintptr_t end() const { return begin() + size; }
};

/// Needs 1 MiB of the resource, all of which comes back. Leave it unused by others meanwhile.
template <gpushare::memory_resource Resource>
void check_memory_resource(Resource& resource) {
    const auto seed = support::seed(11);
    CAPTURE(seed);

    SECTION("blocks are aligned and do not overlap") {
        std::vector<span_of_bytes> out;
        for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2)
            for (const std::size_t size : {std::size_t{1}, alignment, alignment + 1, std::size_t{3000}})
                out.push_back({resource.allocate(size, alignment), size, alignment});
        for (const auto& b : out) {
            CHECK(b.pointer != nullptr);
            CHECK(b.begin() % b.alignment == 0);
        }
        std::ranges::sort(out, {}, &span_of_bytes::begin);
        CHECK(std::ranges::adjacent_find(out, [](const auto& a, const auto& b) { return a.end() > b.begin(); }) ==
              out.end());
        for (const auto& b : out) resource.deallocate(b.pointer, b.size, b.alignment);
    }
    SECTION("what is freed can be had again, any number of times") {
        support::random any{seed};
        std::array<span_of_bytes, 16> slots{};
        for (int i = 0; i < 5'000; ++i) {
            auto& slot = any.of(slots);
            if (slot.pointer != nullptr) resource.deallocate(slot.pointer, slot.size, slot.alignment);
            const std::size_t size = 1 + any.below(32'000), alignment = std::size_t{1} << any.below(9);
            slot = {resource.allocate(size, alignment), size, alignment};
        }
        for (const auto& slot : slots)
            if (slot.pointer != nullptr) resource.deallocate(slot.pointer, slot.size, slot.alignment);
    }
    SECTION("threads may use it at once") {
        std::atomic<int> wrong{0};
        support::together(3, [&](unsigned rank) {
            for (int i = 0; i < 1'000; ++i) {
                const std::size_t size = 1 + 997 * rank + static_cast<std::size_t>(i);
                void* p = resource.allocate(size, 64);
                if (p == nullptr || reinterpret_cast<std::uintptr_t>(p) % 64 != 0) wrong.fetch_add(1);
                resource.deallocate(p, size, 64);
            }
        });
        CHECK(wrong.load() == 0);
    }
}

/// What an upstream does while the memory that it stands on takes no block back: it passes the
/// answer on, and the block is out as before; or it keeps the block, and gives it back later.
/// `settle()` gives back what it keeps. Nothing else is out.
template <gpushare::upstream Resource, std::invocable F>
void check_refused_free(Resource& resource, support::refusing_memory& below, F settle) {
    using gpushare::errc;
    for (const errc refusal : {errc::submission_failed, errc::capturing, errc::device_lost, errc::backend_failed}) {
        CAPTURE(gpushare::to_string(refusal));
        void* const p = resource.allocate(64, 64);
        below.refuse(refusal);
        bool kept = false;
        for (int i = 0; i < 3; ++i) {
            const errc why = kept ? errc::none : resource.deallocate(p, 64, 64);
            kept = why == errc::none;
            CHECK((kept || why == refusal));
            settle();
            CHECK(below.blocks() != 0);
        }
        below.refuse(errc::none);
        if (!kept) CHECK(resource.deallocate(p, 64, 64) == errc::none);
        settle();
        CHECK(below.blocks() == 0);
        CHECK(below.wrong_frees() == 0);
    }
}

/// `memory` on top: at least 1 MiB and at most 64 MiB of capacity, nothing of it in use.
template <gpushare::memory Memory>
void check_memory_view(Memory& memory) {
    using gpushare::bytes;
    const auto capacity = static_cast<std::size_t>(memory.capacity().count());

    SECTION("charges are never less than the size, and never wrap") {
        for (std::size_t size = 0; size < 5'000; ++size) REQUIRE(memory.charged(size, 256) >= bytes{size});
        for (std::size_t size = 1; size != 0; size *= 2) REQUIRE(memory.charged(size - 1, 1) >= bytes{size - 1});
        CHECK(memory.charged(std::numeric_limits<std::size_t>::max(), 256) == bytes::max());
    }
    SECTION("more than the capacity is refused, and nothing is lost by it") {
        CHECK(memory.try_allocate(capacity + 1, 256) == nullptr);
        CHECK(memory.try_allocate(std::numeric_limits<std::size_t>::max(), 256) == nullptr);
        CHECK(memory.try_allocate(std::numeric_limits<std::size_t>::max() - 255, 256) == nullptr);
        CHECK_THROWS_AS((void)memory.allocate(capacity + 1, 256), std::bad_alloc);
        CHECK_THROWS_AS((void)memory.allocate(std::numeric_limits<std::size_t>::max(), 256), std::bad_alloc);
        CHECK(memory.taken_by_others() == bytes{});
    }
    SECTION("an alignment that can't be had is refused as that") {
        using gpushare::errc;
        for (const std::size_t alignment : {std::size_t{0}, std::size_t{3}, std::size_t{768}, capacity * 6 + 1}) {
            gpushare::failure why;
            CHECK(memory.try_allocate(1, alignment, &why) == nullptr);
            CHECK(why == errc::bad_alignment);
            CHECK(memory.refuses(1, alignment) == errc::bad_alignment);
        }
        for (std::size_t alignment = std::bit_ceil(2 * capacity); alignment != 0; alignment *= 2) {
            CAPTURE(alignment);
            gpushare::failure why;
            void* const p = memory.try_allocate(1, alignment, &why);
            if (p != nullptr) {  // of what a pool holds, by chance
                CHECK(alignment < std::size_t{1} << 48);
                CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
                memory.deallocate(p, 1, alignment);
                continue;
            }
            CHECK(why == errc::bad_alignment);
            CHECK(why.asked == alignment);
            CHECK(why.limit < alignment);
            CHECK(why.because == gpushare::reason::alignment_too_large);
            CHECK(memory.refuses(1, alignment) == errc::bad_alignment);
        }
        CHECK(memory.try_allocate(capacity + 1, 4 * capacity, nullptr) == nullptr);
        CHECK(memory.taken_by_others() == bytes{});
    }
    SECTION("the capacity can be filled to the last charge, again and again") {
        for (int i = 0; i < 3; ++i) {
            std::vector<void*> out;
            bytes charged;
            while (void* p = memory.try_allocate(10'000, 256)) {
                out.push_back(p);
                charged += memory.charged(10'000, 256);
            }
            CHECK(charged <= memory.capacity());
            CHECK(charged + memory.charged(10'000, 256) > memory.capacity());
            for (void* p : out) memory.deallocate(p, 10'000, 256);
        }
        CHECK(memory.taken_by_others() == bytes{});
    }
}

}  // namespace conformance
