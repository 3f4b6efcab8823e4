// SPDX-License-Identifier: Apache-2.0
// Tenants while the host runs out of memory: an arena stack gives up no chunk while the chunk is
// mapped, no chunk is lost, and a free that has happened is never reported as failed. A tenant that
// is moved or parked has its data in one place or the other.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/detail/memory_source.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/sanitizers.hpp"
#include "support/this_heap.hpp"  // no_host_memory_test.cpp replaces operator new

#ifndef SUPPORT_SANITIZED

namespace memory_source_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;

namespace {

/// Chunks and addresses that are only counted. Asks the host for no memory.
class counted_memory {
public:
    static constexpr bool fresh_is_zero = true;
    static constexpr std::size_t unit = 4096, most = 64;

    class range {
    public:
        explicit range(void* at) noexcept : at_(at) {}
        [[nodiscard]] void* data() const noexcept { return at_; }

    private:
        void* at_;
    };
    class chunk {
    public:
        chunk(counted_memory& of, std::size_t number) noexcept : of_(&of), number_(number) { ++of.live; }
        chunk(chunk&& other) noexcept : of_(std::exchange(other.of_, nullptr)), number_(other.number_) {}
        chunk& operator=(chunk&& other) noexcept {
            std::swap(of_, other.of_);
            std::swap(number_, other.number_);
            return *this;
        }
        ~chunk() {
            if (of_ == nullptr) return;
            --of_->live;
            of_->wrong += of_->mapped_[number_] ? 1 : 0;
        }

    private:
        friend counted_memory;
        counted_memory* of_;
        std::size_t number_;
    };

    [[nodiscard]] static bytes granularity() noexcept { return bytes{unit}; }
    [[nodiscard]] gpushare::result<range> reserve(std::size_t size) noexcept {
        return range(reinterpret_cast<void*>(std::exchange(next_, next_ + size)));
    }
    [[nodiscard]] gpushare::result<chunk> create() noexcept {
        if (made_ == most) return errc::out_of_memory;
        return chunk(*this, made_++);
    }
    errc map(void* at, const chunk& c) noexcept {
        if (fail_map != 0 && --fail_map == 0) return errc::out_of_memory;
        wrong += std::exchange(mapped_[c.number_], true) ? 1 : 0;
        at_[c.number_] = at;
        return errc::none;
    }
    errc unmap(void* at, std::size_t size) noexcept {
        for (std::size_t offset = 0; offset < size; offset += unit) {
            const auto found = std::ranges::find(at_, static_cast<void*>(static_cast<std::byte*>(at) + offset));
            wrong += found == at_.end() ? 1 : 0;
            if (found == at_.end()) continue;
            *found = nullptr;
            mapped_[static_cast<std::size_t>(found - at_.begin())] = false;
        }
        return errc::none;
    }

    std::size_t live = 0, wrong = 0, fail_map = 0;

private:
    std::size_t made_ = 0;
    std::uintptr_t next_ = unit;
    std::array<bool, most> mapped_{};
    std::array<void*, most> at_{};
};
static_assert(gpushare::virtual_memory<counted_memory>);

}  // namespace

TEST_CASE("an arena stack loses no chunk where the host runs out of memory", "[tenant][arena]") {
    counted_memory memory;
    {
        gpushare::detail::arena_source source{memory};
        const std::size_t size = 3 * counted_memory::unit;
        bool through = false;
        for (std::size_t after = 0; !through; ++after) {
            REQUIRE(after < 20);
            failure why;
            support::this_heap = {.good = after, .recovers = true};
            void* const p = source.try_allocate(size, 256, why);
            const errc freed = p == nullptr ? errc::none : source.deallocate(p, size, 256);
            through = !std::exchange(support::this_heap, {}).failed;
            CHECK(memory.wrong == 0);
            CHECK(freed == errc::none);
            CHECK((p != nullptr || why.code == errc::out_of_memory));
            if (p != nullptr) CHECK(source.deallocate(p, size, 256) == errc::unknown_block);
        }
        memory.fail_map = 3;
        failure why;
        CHECK(source.try_allocate(size, 256, why) == nullptr);
        CHECK(why.code == errc::out_of_memory);
        CHECK(memory.wrong == 0);
        (void)source.trim();
        CHECK(memory.live == 0);
    }
    CHECK(memory.wrong == 0);
}

TEST_CASE("a tenant that moves or is parked loses nothing where the host runs out of memory", "[tenant][move]") {
    const bool parks = GENERATE(false, true);
    gpushare::host::node n{
        {.devices = 2, .memory = 4_MiB, .sms = 1, .timing = gpushare::host::timing::modelled, .stale = true}};
    gpushare::tenancy shared(n);
    auto& aside = *std::pmr::new_delete_resource();
    bool through = false;
    for (std::size_t after = 0; !through; ++after) {
        INFO("allocation " << after);
        REQUIRE(after < 1000);
        auto a = shared.admit({.name = "a", .memory = 1_MiB, .compute = 50_pct, .on = {{0}}});
        std::vector<gpushare::moving_block> blocks{{.at = a.memory().allocate(1000), .size = 1000}};
        std::memset(blocks[0].at, 7, 1000);
        const void* const was = blocks[0].at;
        std::vector<gpushare::device_id> to{{1}};
        try {
            support::this_heap = {.good = after, .recovers = true};
            if (parks) {
                auto parked = park_tenant(a, blocks, aside);
                through = !std::exchange(support::this_heap, {}).failed;
                CHECK(blocks[0].at == nullptr);
                CHECK((parked.closed().complete || a.close().complete));
                a = unpark_tenant(shared, parked, std::move(to), blocks);
            } else {
                auto moved = move_tenant(shared, a, std::move(to), blocks);
                through = !std::exchange(support::this_heap, {}).failed;
                CHECK(blocks[0].at != was);
                CHECK((moved.report.closed.complete || a.close().complete));
                a = std::move(moved.successor);
            }
        } catch (const std::exception&) {  // it is where it was
            support::this_heap = {};
            REQUIRE(blocks[0].at == was);
            REQUIRE_FALSE(a.closed());
        }
        CHECK(static_cast<const unsigned char*>(blocks[0].at)[999] == 7);
        CHECK(a.memory().deallocate(blocks[0].at, 1000) == errc::none);
        CHECK(a.submit([](auto&) {}).wait());
        CHECK(a.close().complete);
        CHECK(shared.unpromised({0}) == 100_pct);
        CHECK(shared.unpromised({1}) == 100_pct);
    }
}

}  // namespace memory_source_test

#endif
