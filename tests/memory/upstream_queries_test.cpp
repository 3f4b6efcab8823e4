// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Queries through the layers on a tenant's memory: its owner, and the largest block that could be
// allocated.
#include <cstddef>
#include <cstdint>

#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/units.hpp>

#include "support/capped_pool.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_timeline.hpp"
#include "support/upstream_answers.hpp"

namespace upstream_queries_test {

using namespace gpushare::literals;
using gpushare::as_upstream;
using gpushare::bytes;
using gpushare::errc;
using gpushare::pool_resource;
using gpushare::quota;
using gpushare::quota_resource;
using gpushare::statistics_resource;
using support::fault_resource;

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/// Takes memory in steps, as a driver does.
struct granular : support::upstream_answers {
    void* allocate(std::size_t size, std::size_t alignment) { return below.allocate(size, alignment); }
    void* try_allocate(std::size_t size, std::size_t alignment, gpushare::failure* /*why*/) noexcept {
        return below.allocate(size, alignment);
    }
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        below.deallocate(p, size, alignment);
        return errc::none;
    }
    [[nodiscard]] gpushare::bytes charged(std::size_t size, std::size_t) const noexcept {
        return gpushare::bytes{(size + step - 1) / step * step};
    }
    std::size_t step = 2 * MiB;
    fault_resource below;
};

}  // namespace

TEST_CASE("a pool's refusal names the tenant below it, with the figures of its quota and the pool's own",
          "[memory][pool][owner]") {
    support::capped_pool<> c(8_MiB, {.segment = 1_MiB}, "chat");
    auto& pool = c.pool;
    void* const p = pool.allocate(7 * MiB, 256);
    void* const q = pool.allocate(128 * KiB, 256);  // small ones share a segment
    void* const r = pool.allocate(64 * KiB, 256);
    CHECK(pool.deallocate(q, 128 * KiB, 256) == errc::none);
    const auto* const text =
        "tenant 'chat': allocate from a pool: asked for 1 MiB, 0 B of 8 MiB left (over the quota); the pool holds 8 "
        "MiB, "
        "of "
        "which 960 KiB are free, 832 KiB in one block";
    CHECK_THROWS_WITH((void)pool.allocate(MiB, 256), text);
    auto cache = pool.make_cache();
    CHECK_THROWS_WITH((void)cache.allocate(MiB, 256), text);
    try {
        (void)pool.allocate(MiB, 256);
    } catch (const gpushare::memory_error& e) {
        CHECK(e.tenant() == "chat");
        CHECK(e.code() == errc::over_quota);
        CHECK(e.figures().asked == MiB);
        CHECK(e.figures().limit == 8 * MiB);
    }
    CHECK(pool.deallocate(p, 7 * MiB, 256) == errc::none);
    CHECK(pool.deallocate(r, 64 * KiB, 256) == errc::none);
}

TEST_CASE("the owner of memory is known through what stands on it", "[memory][owner]") {
    fault_resource upstream;
    quota limit{8_MiB};
    quota_resource mine{limit, upstream, "chat"};
    statistics_resource counted{mine};
    pool_resource pool{counted};
    CHECK(as_upstream(mine).owner() == "chat");
    CHECK(as_upstream(pool).owner() == "chat");
    CHECK(as_upstream(upstream).owner().empty());
    CHECK(pool_resource{upstream}.owner().empty());
}

TEST_CASE("the largest block that a quota leaves is one that can be had, and no more", "[memory][owner]") {
    granular upstream;
    upstream.step = GENERATE(std::size_t{1}, 256, 2 * MiB, 3 * 256);
    CAPTURE(upstream.step);
    quota limit{bytes{5 * MiB + 1000}};
    quota_resource mine{limit, upstream};
    const auto largest = static_cast<std::size_t>(mine.largest_free().count());
    CHECK(mine.try_allocate(largest + 1, 256) == nullptr);
    void* const p = mine.try_allocate(largest, 256);
    REQUIRE(p != nullptr);
    CHECK(mine.largest_free() < bytes{upstream.step});
    CHECK(mine.deallocate(p, largest, 256) == errc::none);
    CHECK(as_upstream(upstream).largest_free() == bytes::max());  // doesn't say
}

TEST_CASE("a pool that holds more than it may hands out no block beyond its bound", "[memory][pool][owner]") {
    granular upstream;
    pool_resource pool{upstream, {.segment = 1_MiB, .large = 256_KiB, .exact = GENERATE(false, true)}};
    void* const p = pool.allocate(2 * MiB - 64 * KiB, 256);
    void* const kept = pool.allocate(2 * MiB, 256);
    REQUIRE(pool.usage().reserved == 4_MiB);
    REQUIRE(pool.deallocate(p, 2 * MiB - 64 * KiB, 256) == errc::none);
    const auto out_within = [&](bytes most) {  // the bytes of all blocks then; 0: there is none
        void* const q = pool.try_allocate_within(most, 2 * MiB - 64 * KiB, 256);
        const bytes out = q == nullptr ? bytes{} : pool.usage().used;
        CHECK(pool.deallocate(q, 2 * MiB - 64 * KiB, 256) == errc::none);
        return out;
    };
    CHECK(out_within(2_MiB) == 0_B);
    CHECK(out_within(bytes{4 * MiB - 64 * KiB - 1}) == 0_B);
    CHECK(out_within(bytes{4 * MiB - 64 * KiB}) <= bytes{4 * MiB - 64 * KiB});  // the free block has 2 MiB
    CHECK(out_within(bytes{4 * MiB - 1}) <= bytes{4 * MiB - 1});
    CHECK(out_within(4_MiB) != 0_B);
    CHECK(out_within(4_MiB) <= 4_MiB);
    CHECK(pool.deallocate(kept, 2 * MiB, 256) == errc::none);
}

TEST_CASE("the largest block of a pool is free there, or with its upstream", "[memory][pool][owner]") {
    support::capped_pool<> c(8_MiB, {.segment = 4_MiB});
    auto& pool = c.pool;
    statistics_resource counted{pool};
    gpushare::memory_scope scope{counted, "prefill"};
    CHECK(pool.largest_free() == 8_MiB);
    void* const p = scope.allocate(3 * MiB, 256);
    CHECK(pool.largest_free() == 5_MiB);  // of the quota
    void* const q = scope.allocate(4 * MiB, 256);
    CHECK(pool.largest_free() == 1_MiB);
    CHECK(counted.statistics().largest_free == 1_MiB);
    CHECK(scope.statistics().largest_free == 1_MiB);
    CHECK(counted.deallocate(p, 3 * MiB, 256) == errc::none);
    CHECK(scope.statistics().largest_free == 3_MiB);
    {
        gpushare::private_pool graph{pool, 1_MiB};
        CHECK(graph.largest_free() == 1_MiB);
        CHECK(scope.statistics().largest_free == 2_MiB);  // of the segment that was free
    }
    CHECK(counted.deallocate(q, 4 * MiB, 256) == errc::none);
    CHECK(statistics_resource{c.upstream}.statistics().largest_free == bytes::max());
}

TEST_CASE("statistics over a pool free in stream order, too", "[memory][pool][statistics]") {
    fault_resource upstream;
    pool_resource<fault_resource, support::manual_point> pool{upstream};
    statistics_resource counted{pool};
    support::manual_stream stream;
    void* const p = counted.allocate(4096, 256);
    const auto used = stream.record();
    CHECK(counted.deallocate_after(used, p, 4097, 256) == errc::wrong_size);
    CHECK(counted.deallocate_after(used, p, 4096, 256) == errc::none);
    CHECK(counted.deallocate_after(used, p, 4096, 256) == errc::unknown_block);
    CHECK(counted.deallocate_after(used, nullptr, 4096, 256) == errc::none);
    CHECK(counted.statistics().current == 0_B);
    CHECK(pool.usage().pending == 4_KiB);
    auto cache = pool.make_cache();
    void* const q = cache.allocate(4096, 256);
    CHECK(cache.deallocate_after(used, q, 4096, 256) == errc::none);  // a point of the caller's, not of the cache
    CHECK(pool.usage().pending == 8_KiB);
    stream.reach_all();
    CHECK(pool.trim(0_B) == 0_B);
}

}  // namespace upstream_queries_test
