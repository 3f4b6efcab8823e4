// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// A pool's promises to one thread: distinct blocks, correct figures, memory that goes back, no
// avoidable refusal, and none of the known defects of other pools.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "support/capped_pool.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/random.hpp"
#include "support/refusing_memory.hpp"
#include "support/upstream_answers.hpp"

namespace pool_resource_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::pool_resource;
using gpushare::pool_usage;
using gpushare::quota;
using support::fault_resource;

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

using capped = support::capped_pool<>;

bool same(const pool_usage& a, const pool_usage& b) {
    return a.reserved == b.reserved && a.used == b.used && a.requested == b.requested && a.cached == b.cached &&
           a.pending == b.pending && a.segments == b.segments;
}

/// Addresses that nothing stands behind.
struct addresses {
    std::uintptr_t next = std::uintptr_t{1} << 40;
    void* allocate(std::size_t size, std::size_t) {
        return reinterpret_cast<void*>(std::exchange(next, next + (size + 2 * MiB) / (2 * MiB) * (2 * MiB)));
    }
    void deallocate(void*, std::size_t, std::size_t) {}
};

bool clean(const pool_usage& u) { return u.used == 0_B && u.requested == 0_B && u.cached == 0_B && u.pending == 0_B; }

}  // namespace

TEST_CASE("with long-lived blocks among short-lived ones a pool holds little more than the live bytes",
          "[memory][pool]") {
    const auto seed = support::seed(28);
    CAPTURE(seed);
    support::random any(seed);
    addresses upstream;
    pool_resource pool(upstream);
    auto cache = pool.make_cache();
    const auto size = [&](unsigned least, unsigned most) {  // log-uniform, nearly
        const auto power = std::size_t{1} << (least + any.below(most - least));
        return power + any.below(power);
    };
    std::vector<std::pair<void*, std::size_t>> longs(256), shorts(64);
    const auto replace = [&](auto& b, std::size_t n) {
        if (b.first != nullptr) REQUIRE(cache.deallocate(b.first, b.second, 256) == errc::none);
        b = {cache.allocate(n, 256), n};
    };
    for (auto& b : longs) replace(b, size(20, 25));
    double most = 0;
    for (std::size_t i = 0; i < 20'000; ++i) {
        replace(any.of(shorts), size(8, 20));
        if (i % 10 != 0) continue;
        replace(any.of(longs), size(20, 25));
        if (i > 5'000) most = std::max(most, pool.usage().held_over_live());
    }
    CHECK(most < 1.5);
    for (auto* all : {&longs, &shorts})
        for (const auto& [p, n] : *all) (void)cache.deallocate(p, n, 256);
    CHECK(pool.trim({}) == 0_B);
}

TEST_CASE("held and used memory are counted apart, and the quota below counts held memory", "[memory][pool]") {
    capped c(64_MiB, {.segment = 4_MiB});
    void* const p = c.pool.allocate(1000, 256);
    auto u = c.pool.usage();
    CHECK(u.reserved == 4_MiB);
    CHECK(c.limit.usage().current == 4_MiB);
    CHECK(u.used == 1_KiB);
    CHECK(u.requested == bytes{1000});
    CHECK(u.free() == 4_MiB - 1_KiB);
    CHECK(u.largest_free == u.free());
    CHECK(u.external_fragmentation() == 0);
    CHECK(u.internal_fragmentation() == Approx(24 / 1024.));
    CHECK(u.segments == 1);

    CHECK(c.pool.deallocate(p, 1000, 256) == errc::none);
    u = c.pool.usage();
    CHECK(clean(u));
    CHECK(u.reserved == 4_MiB);
    CHECK(u.largest_free == 4_MiB);
    CHECK(c.pool.trim(0_B) == 0_B);
    CHECK(c.limit.usage().current == 0_B);
    CHECK(c.upstream.blocks() == 0);
    CHECK(c.pool.usage().peak_reserved == 4_MiB);
}

TEST_CASE("large blocks share the segments of large ones, and small blocks stay out of them", "[memory][pool]") {
    fault_resource memory;
    pool_resource<fault_resource> pool(memory, {.segment = 32_MiB});
    pool.deallocate(pool.allocate(48 * MiB, 256), 48 * MiB, 256);
    const auto one = pool.usage().segments;
    REQUIRE(one == 1);
    std::vector<void*> parts;
    for (int i = 0; i < 3; ++i) parts.push_back(pool.allocate(15 * MiB, 256));
    CHECK(pool.usage().segments == one);
    void* const small = pool.allocate(300 * KiB, 256);
    CHECK(pool.usage().segments == one + 1);  // though 3 MiB are left of the large one
    for (void* const p : parts) pool.deallocate(p, 15 * MiB, 256);
    (void)pool.trim(0_B);
    CHECK(pool.usage().segments == 1);  // the parts were one again, and went back
    pool.deallocate(small, 300 * KiB, 256);

    // An exact pool never cuts one: its next block of another size is another segment.
    pool_resource<fault_resource> exact(memory, {.segment = 32_MiB, .exact = true});
    exact.deallocate(exact.allocate(48 * MiB, 256), 48 * MiB, 256);
    void* const p = exact.allocate(15 * MiB, 256);
    CHECK(exact.usage().segments == 2);
    exact.deallocate(p, 15 * MiB, 256);
}

TEST_CASE("trim stops at its target and spares segments in use (rmm 571, 1664)", "[memory][pool]") {
    capped c(64_MiB, {.segment = 1_MiB});
    std::vector<void*> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(c.pool.allocate(MiB, 256));
    CHECK(c.pool.trim(0_B) == 8_MiB);
    for (int i = 1; i < 8; ++i) CHECK(c.pool.deallocate(blocks[static_cast<std::size_t>(i)], MiB, 256) == errc::none);
    CHECK(c.pool.trim(5_MiB) == 5_MiB);
    CHECK(c.pool.trim(0_B) == 1_MiB);
    CHECK(c.pool.deallocate(blocks[0], MiB, 256) == errc::none);
    CHECK(c.pool.trim(0_B) == 0_B);
    CHECK(c.upstream.wrong_frees() == 0);
}

TEST_CASE("a wrong free is named and changes nothing", "[memory][pool]") {
    capped c(64_MiB);
    auto cache = c.pool.make_cache();
    void* const p = c.pool.allocate(1000, 256);
    void* const q = cache.allocate(5000, 512);
    const auto before = c.pool.usage();
    int foreign = 0;
    const auto check_all = [&](auto& resource) {
        CHECK(resource.deallocate(p, 999, 256) == errc::wrong_size);
        CHECK(resource.deallocate(p, 1024, 256) == errc::wrong_size);
        CHECK(resource.deallocate(p, 1000, 128) == errc::wrong_size);
        CHECK(resource.deallocate(p, 1000, 0) == errc::wrong_size);
        CHECK(resource.deallocate(p, std::numeric_limits<std::size_t>::max(), 256) == errc::wrong_size);
        CHECK(resource.deallocate(q, 5120, 512) == errc::wrong_size);
        CHECK(resource.deallocate(&foreign, 1000, 256) == errc::unknown_block);
        CHECK(resource.deallocate(static_cast<std::byte*>(p) + 256, 1000, 256) == errc::unknown_block);
        CHECK(resource.deallocate(static_cast<std::byte*>(p) + 1, 1000, 256) == errc::unknown_block);
        CHECK(resource.deallocate(nullptr, 1000, 256) == errc::none);
        CHECK(same(c.pool.usage(), before));
    };
    check_all(c.pool);
    check_all(cache);
    CHECK(cache.deallocate(p, 1000, 256) == errc::none);
    CHECK(c.pool.deallocate(q, 5000, 512) == errc::none);
    const auto after = c.pool.usage();
    for (auto* freed : {p, q}) {
        CHECK(cache.deallocate(freed, freed == p ? 1000 : 5000, freed == p ? 256 : 512) == errc::unknown_block);
        CHECK(c.pool.deallocate(freed, freed == p ? 1000 : 5000, freed == p ? 256 : 512) == errc::unknown_block);
    }
    CHECK(same(c.pool.usage(), after));
}

TEST_CASE("a size or alignment that no device has is refused with its reason", "[memory][pool]") {
    capped c(64_MiB);
    auto cache = c.pool.make_cache();
    constexpr auto most = std::numeric_limits<std::size_t>::max();
    gpushare::failure why;
    for (const std::size_t size : {most, most - 255, most / 2, std::size_t{1} << 50, std::size_t{1} << 49}) {
        CHECK(c.pool.try_allocate(size, 256, &why) == nullptr);
        CHECK(why.code == errc::size_overflow);
        CHECK(cache.try_allocate(size, 256, &why) == nullptr);
        CHECK(why.code == errc::size_overflow);
        CHECK_THROWS_AS((void)c.pool.allocate(size, 256), gpushare::memory_error);
        CHECK_THROWS_AS((void)cache.allocate(size, 256), std::bad_alloc);
        CHECK(c.pool.charged(size, 256) == bytes::max());
    }
    for (const std::size_t alignment : {std::size_t{0}, std::size_t{3}, std::size_t{768}, most}) {
        CHECK(c.pool.try_allocate(1, alignment, &why) == nullptr);
        CHECK(why.code == errc::bad_alignment);
        CHECK(cache.try_allocate(1, alignment, &why) == nullptr);
        CHECK(why.code == errc::bad_alignment);
    }
    CHECK(c.pool.try_allocate(1, std::size_t{1} << 63, &why) == nullptr);
    CHECK(why.code == errc::bad_alignment);
    // Of the quota's 64 MiB a block at such a multiple would take more: that is no matter of what
    // is left.
    CHECK(c.pool.try_allocate(1, std::size_t{1} << 40, &why) == nullptr);
    CHECK(why.code == errc::bad_alignment);
    CHECK(why.limit == std::uint64_t{64} << 20);
    CHECK(c.pool.try_allocate(std::size_t{1} << 46, 256, &why) == nullptr);
    CHECK(why.code == errc::over_quota);  // the upstream's own reason
    CHECK(c.pool.try_allocate_held(most, 256) == nullptr);
    CHECK(c.pool.usage().reserved == 0_B);
}

TEST_CASE("zero bytes have an address of their own and can be freed (rmm 2312)", "[memory][pool]") {
    capped c(64_MiB);
    auto cache = c.pool.make_cache();
    void* const p = c.pool.allocate(0, 256);
    void* const q = c.pool.allocate(0, 256);
    void* const r = cache.allocate(0, 1);
    CHECK((p != nullptr && q != nullptr && r != nullptr && p != q && q != r && p != r));
    CHECK(c.pool.deallocate(p, 1, 256) == errc::wrong_size);
    CHECK(c.pool.deallocate(p, 0, 256) == errc::none);
    CHECK(cache.deallocate(q, 0, 256) == errc::none);
    CHECK(cache.deallocate(q, 0, 256) == errc::unknown_block);
    CHECK(cache.deallocate(r, 0, 1) == errc::none);
    cache.flush();
    CHECK(clean(c.pool.usage()));
}

TEST_CASE("every alignment is kept, by the pool, by caches and of blocks used again (rmm 2336)", "[memory][pool]") {
    capped c(256_MiB, {.segment = 1_MiB});
    auto cache = c.pool.make_cache();
    for (std::size_t alignment = 1; alignment <= 8 * MiB; alignment *= 2)
        for (int round = 0; round < 3; ++round) {
            std::array<void*, 3> mine{}, kept{};
            for (auto& p : mine) p = c.pool.allocate(300 * KiB + alignment / 3, alignment);
            for (auto& p : kept) p = cache.allocate(3000, alignment);
            for (auto* p : mine) REQUIRE(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
            for (auto* p : kept) REQUIRE(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
            for (auto* p : mine) REQUIRE(c.pool.deallocate(p, 300 * KiB + alignment / 3, alignment) == errc::none);
            for (auto* p : kept) REQUIRE(cache.deallocate(p, 3000, alignment) == errc::none);
        }
    CHECK(c.pool.trim(0_B) == 0_B);
    CHECK(c.upstream.wrong_frees() == 0);
}

TEST_CASE("freed while the entries still know it, used by another: no list keeps a block that is out (rmm 1966)",
          "[memory][pool]") {
    capped c(64_MiB, {.segment = 1_MiB});
    auto cache = c.pool.make_cache();
    // A block that lies in a cache is taken out of it, joined with its neighbours, handed out as
    // part of a bigger one and given back to the upstream: the cache must not give it out again.
    std::vector<void*> small;
    for (int i = 0; i < 8; ++i) small.push_back(cache.allocate(128 * KiB, 256));
    for (auto* p : small) CHECK(cache.deallocate(p, 128 * KiB, 256) == errc::none);
    CHECK(c.pool.usage().cached == 1_MiB);
    CHECK(c.pool.trim(0_B) == 0_B);
    CHECK(c.upstream.blocks() == 0);
    void* const big = c.pool.allocate(MiB, 256);
    void* const p = cache.allocate(128 * KiB, 256);
    CHECK((p < big || p >= static_cast<std::byte*>(big) + MiB));
    for (auto* stale : small)
        if (stale != p)
            CHECK(cache.deallocate(stale, 128 * KiB, 256) == (stale == big ? errc::wrong_size : errc::unknown_block));
    CHECK(cache.deallocate(p, 128 * KiB, 256) == errc::none);
    CHECK(c.pool.deallocate(big, MiB, 256) == errc::none);
}

TEST_CASE("a free of what isn't tracked never reaches the upstream (rmm 2404)", "[memory][pool]") {
    fault_resource upstream;
    {
        pool_resource pool(upstream);
        auto cache = pool.make_cache();
        void* const foreign = upstream.allocate(4096, 256);
        CHECK(pool.deallocate(foreign, 4096, 256) == errc::unknown_block);
        CHECK(cache.deallocate(foreign, 4096, 256) == errc::unknown_block);
        CHECK(upstream.blocks() == 1);
        upstream.deallocate(foreign, 4096, 256);
    }
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE(
    "a model of many sizes takes no more than it needs: growth is by segments, never by a factor (BFC arena, "
    "onnxruntime 15983)",
    "[memory][pool]") {
    // Weights of 16 GB took 32 GB where every region was twice as big as the last one.
    capped c(1_GiB, {.segment = 16_MiB});
    std::vector<std::pair<void*, std::size_t>> weights;
    std::uint64_t total = 0;
    for (std::size_t i = 0; total < 600 * MiB; ++i) {
        const std::size_t size = i % 7 == 0 ? 24 * MiB + i * 4096 : 100 * KiB * (1 + i % 30);
        weights.emplace_back(c.pool.allocate(size, 256), size);
        total += size;
    }
    const auto u = c.pool.usage();
    CHECK(u.requested == bytes{total});
    CHECK(u.reserved <= bytes{total + total / 20} + 16_MiB);
    for (const auto& [p, size] : weights) CHECK(c.pool.deallocate(p, size, 256) == errc::none);
    CHECK(c.pool.trim(0_B) == 0_B);
}

TEST_CASE("before a refusal the pool empties other workers' caches, also of sleeping workers", "[memory][pool]") {
    capped c(8_MiB, {.segment = 8_MiB});
    auto sleeper = c.pool.make_cache();
    std::vector<void*> blocks;
    while (void* const p = sleeper.try_allocate(64 * KiB, 256)) blocks.push_back(p);
    REQUIRE(blocks.size() == 128);
    for (auto* p : blocks) CHECK(sleeper.deallocate(p, 64 * KiB, 256) == errc::none);
    CHECK(c.pool.usage().cached > 0_B);
    void* const all = c.pool.try_allocate(8 * MiB, 256);
    CHECK(all != nullptr);
    CHECK(c.pool.deallocate(all, 8 * MiB, 256) == errc::none);
    CHECK(c.pool.usage().cached == 0_B);
}

TEST_CASE("a pool's options say what it asks of its upstream, and when", "[memory][pool]") {
    const auto first_block_takes = [](bytes quota_of, const gpushare::pool_options& o) {
        capped c(quota_of, o);
        (void)c.pool.allocate(1_B, 256);
        return c.pool.usage().reserved;
    };
    SECTION("segment, and part of what the upstream has left") {
        CHECK(first_block_takes(1_GiB, {}) == gpushare::pool_options::usual_segment);
        CHECK(first_block_takes(64_MiB, {}) == 4_MiB);  // what is asked for otherwise, of a small quota
        CHECK(first_block_takes(64_MiB, {.part = 32}) == 2_MiB);
        CHECK(first_block_takes(8_MiB, {.segment = 1_MiB}) == 1_MiB);
        CHECK(first_block_takes(8_MiB, {.segment = 4_MiB, .part = 8}) == 1_MiB);
        capped c(64_MiB);
        (void)c.pool.allocate(1_B, 256);
        CHECK(c.limit.try_charge(60_MiB) == errc::none);  // others of the quota aren't refused
        CHECK(c.limit.release(60_MiB));
    }
    SECTION("large: a segment of its own") {
        capped c(64_MiB, {.segment = 1_MiB, .large = 64_KiB});
        (void)c.pool.allocate(64_KiB, 256);
        CHECK(c.pool.usage().reserved == 64_KiB);
        (void)c.pool.allocate(32_KiB, 256);
        CHECK(c.pool.usage().reserved == 64_KiB + 1_MiB);
        capped by_default(64_MiB);
        (void)by_default.pool.allocate(1_MiB, 256);
        CHECK(by_default.pool.usage().reserved == 1_MiB);
    }
    SECTION("exact: no larger than the block") {
        for (const bool exact : {false, true}) {
            capped c(64_MiB, {.segment = 1_MiB, .exact = exact});
            auto cache = c.pool.make_cache();
            void* const p = cache.allocate(1100_KiB, 256);
            CHECK(c.pool.usage().reserved == (exact ? 1100_KiB : 1152_KiB));
            CHECK(cache.deallocate(p, 1100_KiB, 256) == errc::none);
        }
    }
    SECTION("kept: as much stays in a cache while the pool can grow") {
        for (const bytes kept : {0_B, 1_MiB}) {
            capped c(64_MiB, {.segment = 1_MiB, .kept = kept, .large = 8_MiB});
            auto cache = c.pool.make_cache();
            void* const p = cache.allocate(512_KiB, 256);
            CHECK(cache.deallocate(p, 512_KiB, 256) == errc::none);
            (void)c.pool.allocate(768_KiB, 256);
            CHECK(c.pool.usage().reserved == (kept == 0_B ? 1_MiB : 2_MiB));
        }
    }
}

TEST_CASE("over an upstream without a limit, too, a block a little too large is used again", "[memory][pool]") {
    fault_resource upstream;
    pool_resource pool(upstream, {.segment = 1_MiB, .kept = 256_MiB, .exact = true});
    void* const first = pool.allocate(64 * MiB, 256);
    CHECK(pool.deallocate(first, 64 * MiB, 256) == errc::none);
    void* const p = pool.allocate(60 * MiB, 256);
    CHECK(p == first);
    CHECK(upstream.calls() == 1);
    CHECK(pool.deallocate(p, 60 * MiB, 256) == errc::none);
}

TEST_CASE("sizes with a unit and plain ones are the same", "[memory][pool]") {
    capped c(64_MiB, {.segment = 1_MiB});
    auto cache = c.pool.make_cache();
    const auto both = [](auto& from) {
        void* const p = from.allocate(4_KiB, 256);
        void* const q = from.try_allocate(4_KiB, 256);
        REQUIRE(p != nullptr);
        REQUIRE(q != nullptr);
        CHECK(from.deallocate(p, 4 * KiB, 256) == errc::none);
        CHECK(from.deallocate(q, 4_KiB, 256) == errc::none);
        CHECK(from.charged(4_KiB, 256) == from.charged(4 * KiB, 256));
        CHECK(from.refuses(65_MiB, 256).code == from.refuses(65 * MiB, 256).code);
        CHECK(from.charged(bytes::max(), 256) == bytes::max());
        gpushare::failure why;
        CHECK(from.try_allocate(bytes::max(), 256, &why) == nullptr);
        CHECK(why.code == errc::size_overflow);
    };
    both(c.mine);
    both(c.pool);
    both(cache);
    CHECK(c.pool.usage().used == 0_B);
}

TEST_CASE("before a refusal empty segments go back, and the upstream is asked for exactly the needed bytes",
          "[memory][pool]") {
    capped c(8_MiB, {.segment = 1_MiB});
    std::vector<void*> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(c.pool.allocate(MiB, 256));
    for (auto* p : blocks) CHECK(c.pool.deallocate(p, MiB, 256) == errc::none);
    void* const p = c.pool.try_allocate(5 * MiB + 1, 256);  // in no segment, and not beside them
    REQUIRE(p != nullptr);
    CHECK(c.pool.usage().reserved == 7_MiB + 256_B);  // six went back: as many as it takes
    void* const rest = c.pool.try_allocate(3 * MiB - 256, 256);
    CHECK(rest != nullptr);
    CHECK(c.pool.usage().reserved == 8_MiB);
    gpushare::failure why;
    CHECK(c.pool.try_allocate(1, 256, &why) == nullptr);
    CHECK(why.code == errc::over_quota);
    CHECK(why.limit == (8_MiB).count());
    CHECK_THROWS_WITH((void)c.pool.allocate(1, 256), Catch::Contains("over the quota"));
    CHECK(c.pool.deallocate(p, 5 * MiB + 1, 256) == errc::none);
    CHECK(c.pool.deallocate(rest, 3 * MiB - 256, 256) == errc::none);
}

TEST_CASE("a size that a cache would round up is granted as it is when there is no more", "[memory][pool]") {
    capped c(1100_KiB, {.segment = 4_MiB});
    auto cache = c.pool.make_cache();
    void* const p = cache.try_allocate(1100 * KiB, 256);  // its class is 1152 KiB
    REQUIRE(p != nullptr);
    CHECK(c.pool.usage().reserved == 1100_KiB);
    CHECK(cache.deallocate(p, 1100 * KiB, 256) == errc::none);
    void* const again = cache.try_allocate(1100 * KiB, 256);
    CHECK(again == p);
    CHECK(cache.deallocate(again, 1100 * KiB, 256) == errc::none);
}

TEST_CASE("a cached block is used again without asking the pool, and wastes less than half of a request",
          "[memory][pool]") {
    capped c(64_MiB);
    auto cache = c.pool.make_cache();
    for (std::size_t size = 1; size <= 8 * MiB; size += 1 + size / 3) {
        void* const p = cache.allocate(size, 256);
        const auto used = c.pool.usage().used.count();
        CAPTURE(size);
        CHECK(used >= size);
        CHECK(used <= size + std::max<std::size_t>(size / 8, 256) + 255);
        CHECK(cache.deallocate(p, size, 256) == errc::none);
        void* const q = cache.allocate(size, 256);
        CHECK(q == p);
        CHECK(cache.deallocate(q, size, 256) == errc::none);
        cache.flush();
    }
    void* const big = cache.allocate(10 * KiB, 256);
    CHECK(cache.deallocate(big, 10 * KiB, 256) == errc::none);
    void* const smaller = cache.allocate(4 * KiB, 256);
    CHECK(smaller != big);
    CHECK(cache.deallocate(smaller, 4 * KiB, 256) == errc::none);
}

TEST_CASE("a request that is nearly large gets no large block out of a cache", "[memory][pool]") {
    const bool exact = GENERATE(true, false);
    CAPTURE(exact);
    fault_resource memory;
    pool_resource<fault_resource> pool(memory, {.segment = 128_KiB, .large = 16_KiB, .exact = exact});
    auto cache = pool.make_cache();
    for (std::size_t size = 8 * KiB; size < 16 * KiB; size += 256) {
        void* const large = cache.allocate(16 * KiB, 256);
        CHECK(cache.deallocate(large, 16 * KiB, 256) == errc::none);
        CAPTURE(size);
        void* const small = cache.allocate(size, 256);
        CHECK(small != large);
        CHECK(cache.deallocate(small, size, 256) == errc::none);
        CHECK(cache.allocate(size, 256) == small);  // but what is small serves it again
        CHECK(cache.deallocate(small, size, 256) == errc::none);
        cache.flush();
    }
}

TEST_CASE("blocks of large segments aren't handed on to others' small requests", "[memory][pool]") {
    fault_resource memory;
    constexpr std::size_t of_large = 62 * 256, of_small = 60 * 256;  // of one bin
    pool_resource<fault_resource> pool(memory, {.segment = 1_MiB, .large = bytes{of_large}});
    auto cache = pool.make_cache(), other = pool.make_cache();
    std::vector<void*> large, small;
    for (int i = 0; i < 10; ++i) large.push_back(pool.allocate(of_large, 256));
    for (int i = 0; i < 40; ++i) small.push_back(cache.allocate(of_small, 256));
    for (void* const p : large) CHECK(cache.deallocate(p, of_large, 256) == errc::none);
    for (void* const p : small) CHECK(cache.deallocate(p, of_small, 256) == errc::none);  // more than the bin keeps
    for (int i = 0; i < 40; ++i) {
        void* const p = other.allocate(56 * 256, 256);
        CHECK(std::ranges::find(large, p) == large.end());
    }
}

TEST_CASE("a cache that overflows gives back, and what is too big for it goes straight", "[memory][pool]") {
    capped c(512_MiB);
    auto cache = c.pool.make_cache();
    std::vector<void*> blocks;
    const auto size = GENERATE(std::size_t{1}, 4 * KiB, 100 * KiB);
    CAPTURE(size);
    for (int i = 0; i < 600; ++i) blocks.push_back(cache.allocate(size, 256));
    const auto each = c.pool.usage().used / 600;
    for (auto* p : blocks) CHECK(cache.deallocate(p, size, 256) == errc::none);
    const auto u = c.pool.usage();
    CHECK(u.used == 0_B);
    const auto depth = gpushare::detail::bin_layout::depth_of(gpushare::detail::bin_layout::of(each.count() / 256));
    CHECK(u.cached <= 2 * each * depth);  // here, and where others may find it
    CHECK(u.cached >= each * depth / 2);
    CHECK(depth == (size == 1 ? 256U : size == 4 * KiB ? 64U : 16U));
    void* const big = cache.allocate(20 * MiB, 256);
    CHECK(c.pool.usage().used == 20_MiB);  // not rounded
    CHECK(cache.deallocate(big, 20 * MiB, 256) == errc::none);
    CHECK(c.pool.usage().cached == u.cached);
}

TEST_CASE("a cache can be moved, and one that ends gives back all", "[memory][pool]") {
    capped c(64_MiB);
    void* p = nullptr;
    {
        auto first = c.pool.make_cache();
        p = first.allocate(4096, 256);
        auto second = std::move(first);
        CHECK(second.deallocate(p, 4096, 256) == errc::none);
        auto third = c.pool.make_cache();
        third = std::move(second);
        CHECK(third.allocate(4096, 256) == p);
        CHECK(third.deallocate(p, 4096, 256) == errc::none);
        CHECK(c.pool.usage().cached == 4_KiB);
    }
    CHECK(clean(c.pool.usage()));
    CHECK(c.pool.trim(0_B) == 0_B);
}

TEST_CASE("a pool that ends gives back what is still out", "[memory][pool]") {
    fault_resource upstream;
    {
        pool_resource pool(upstream, {.segment = 1_MiB});
        (void)pool.allocate(1000, 256);
        (void)pool.allocate(3 * MiB, 4096);
        CHECK(upstream.blocks() == 2);
    }
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE("an exception of the upstream passes through, and nothing is lost by it", "[memory][pool]") {
    fault_resource upstream;
    pool_resource pool(upstream, {.segment = 1_MiB});
    auto cache = pool.make_cache();
    upstream.fail_next([] { throw std::runtime_error("device lost"); });
    void* const p = pool.allocate(1000, 256);  // a smaller request succeeded
    CHECK(pool.usage().reserved == 1_KiB);
    CHECK(pool.deallocate(p, 1000, 256) == errc::none);
    CHECK(pool.trim(0_B) == 0_B);

    upstream.fail_next([] { throw std::runtime_error("device lost"); });
    CHECK_THROWS_WITH((void)pool.allocate(2 * MiB, 256), "device lost");
    upstream.fail_next([] { throw 42; });
    CHECK_THROWS_AS((void)cache.allocate(2 * MiB, 256), int);
    upstream.fail_next();
    CHECK(cache.try_allocate(2 * MiB, 256) == nullptr);
    upstream.null_next();
    gpushare::failure why;
    CHECK(pool.try_allocate(2 * MiB, 256, &why) == nullptr);
    CHECK(why.code == errc::out_of_memory);
    CHECK(why.asked == 2 * MiB);
    upstream.null_next();
    CHECK_THROWS_AS((void)pool.allocate(2 * MiB, 256), gpushare::memory_error);
    CHECK(pool.usage().reserved == 0_B);
    CHECK(upstream.blocks() == 0);
}

TEST_CASE("an upstream may free and trim while it is asked", "[memory][pool]") {
    capped c(4_MiB, {.segment = 1_MiB});
    void* const p = c.pool.allocate(MiB, 256);
    // As a spill hook does: makes room when the upstream runs out.
    c.upstream.fail_next([&] {
        CHECK(c.pool.deallocate(p, MiB, 256) == errc::none);
        CHECK(c.pool.trim(0_B) == 0_B);
        throw std::bad_alloc();
    });
    void* const q = c.pool.try_allocate(2 * MiB, 256);
    CHECK(q != nullptr);
    CHECK(c.pool.deallocate(q, 2 * MiB, 256) == errc::none);
}

TEST_CASE("only what is held is had without asking the upstream", "[memory][pool]") {
    capped c(64_MiB, {.segment = 1_MiB});
    CHECK(c.pool.try_allocate_held(4096, 256) == nullptr);
    CHECK(c.upstream.calls() == 0);
    CHECK(c.pool.deallocate(c.pool.allocate(4096, 256), 4096, 256) == errc::none);
    void* const p = c.pool.try_allocate_held(4096, 4096);
    REQUIRE(p != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 4096 == 0);
    CHECK(c.pool.try_allocate_held(2 * MiB, 256) == nullptr);
    CHECK(c.upstream.calls() == 1);
    CHECK(c.pool.deallocate(p, 4096, 4096) == errc::none);
}

TEST_CASE("of a large segment that is held, a smaller request gets a part", "[memory][pool]") {
    const bool exact = GENERATE(true, false);
    CAPTURE(exact);
    capped c(64_MiB, {.segment = 1_MiB, .exact = exact});
    CHECK(c.pool.deallocate(c.pool.allocate(32 * MiB, 256), 32 * MiB, 256) == errc::none);
    void* const p = c.pool.try_allocate_held(2 * MiB, 256);
    REQUIRE(p != nullptr);
    CHECK(c.pool.usage().used == 2_MiB);
    void* const q = c.pool.try_allocate_held(30 * MiB, 256);
    CHECK(q != nullptr);
    CHECK(c.pool.deallocate(p, 2 * MiB, 256) == errc::none);
    CHECK(c.pool.deallocate(q, 30 * MiB, 256) == errc::none);
    CHECK(c.upstream.calls() == 1);
    void* const whole = c.pool.try_allocate_held(32 * MiB - 1, 256);  // the parts are one again
    CHECK(whole != nullptr);
    CHECK(c.pool.deallocate(whole, 32 * MiB - 1, 256) == errc::none);
    CHECK(c.pool.trim(0_B) == 0_B);
}

namespace {

/// Gives memory one granule behind where it has to begin.
struct misaligned : fault_resource {
    void* allocate(std::size_t size, std::size_t alignment) {
        return static_cast<std::byte*>(fault_resource::allocate(size + 4096, 4096)) + shift * (alignment / 2);
    }
    void deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        auto* const begin = static_cast<std::byte*>(p) - shift * (alignment / 2);
        fault_resource::deallocate(begin, size + 4096, 4096);
    }
    std::size_t shift = 1;
};

}  // namespace

TEST_CASE("memory that doesn't begin where it has to goes back, and the request is refused", "[memory][pool]") {
    misaligned upstream;
    pool_resource<misaligned> pool(upstream, {.segment = 64_KiB});
    for (const std::size_t size : {std::size_t{256}, 64 * KiB}) {
        CAPTURE(size);
        gpushare::failure why;
        CHECK(pool.try_allocate(size, 1024, &why) == nullptr);
        CHECK(why == errc::bad_alignment);
        CHECK(why.asked == 1024);
        CHECK(why.limit == 512);
        CHECK_THROWS_AS((void)pool.allocate(size, 256), gpushare::memory_error);
        CHECK(upstream.blocks() == 0);
        CHECK(pool.usage().reserved == 0_B);
    }
    upstream.shift = 0;
    CHECK(pool.deallocate(pool.allocate(256, 1024), 256, 1024) == errc::none);
    CHECK(pool.trim(0_B) == 0_B);
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE("a pool that may keep any amount keeps its idle segments", "[memory][pool]") {
    const bytes kept = GENERATE(bytes::max(), bytes{std::uint64_t{1} << 63});
    fault_resource upstream;
    pool_resource<fault_resource> pool(upstream, {.kept = kept});
    void* const small = pool.allocate(16 * MiB, 256);
    CHECK(pool.deallocate(small, 16 * MiB, 256) == errc::none);
    void* const large = pool.allocate(24 * MiB, 256);
    CHECK(pool.deallocate(large, 24 * MiB, 256) == errc::none);
    CHECK(pool.usage().reserved == 40_MiB);
    CHECK(pool.trim(0_B) == 0_B);
}

namespace {

/// Charges the room for an alignment, as cudaMalloc's memory does.
struct padding : support::upstream_answers, fault_resource {
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, gpushare::failure*) noexcept {
        return allocate(size, alignment);
    }
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        fault_resource::deallocate(p, size, alignment);
        return errc::none;
    }
    [[nodiscard]] static gpushare::bytes charged(std::size_t size, std::size_t alignment) noexcept {
        return gpushare::bytes{size} + gpushare::bytes{std::max<std::size_t>(alignment, 256) - 256};
    }
};

}  // namespace

TEST_CASE("the room for an alignment is charged once", "[memory][pool]") {
    padding upstream;
    quota limit(8_MiB);
    gpushare::quota_resource mine(limit, upstream);
    pool_resource pool(mine);
    REQUIRE(pool.refuses(7 * MiB, MiB).code == errc::none);
    gpushare::failure why;
    void* const p = pool.try_allocate(7 * MiB, MiB, &why);
    CAPTURE(to_string(why.code), why.asked, why.left);
    REQUIRE(p != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % MiB == 0);
    CHECK(limit.usage().current == 8_MiB - 256_B);
    CHECK(pool.deallocate(p, 7 * MiB, MiB) == errc::none);
    CHECK(pool.try_allocate(7 * MiB, MiB) == p);  // the same range serves it again
    CHECK(upstream.calls() == 1);
    CHECK(pool.deallocate(p, 7 * MiB, MiB) == errc::none);
    CHECK(pool.trim(0_B) == 0_B);
    CHECK(limit.usage().current == 0_B);
    CHECK(upstream.wrong_frees() == 0);
}

namespace {

/// Random calls through a pool and two caches over an upstream that fails now and then, against a
/// map of what is out.
void compare(std::uint64_t runs, std::uint64_t steps) {
    for (std::uint64_t run = 0; run < runs; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        capped c(bytes{(4 + any.below(60)) * MiB},
                 {.segment = bytes{(1 + any.below(8)) * MiB}, .kept = bytes{any.below(4) * MiB}});
        std::optional first(c.pool.make_cache()), second(c.pool.make_cache());
        struct block {
            std::size_t size, alignment;
        };
        std::map<std::byte*, block> out;
        std::uint64_t requested = 0;
        const auto with = [&](auto call) {
            switch (any.below(3)) {
                case 0: return call(*first);
                case 1: return call(*second);
                default: return call(c.pool);
            }
        };
        for (std::uint64_t step = 0; step < steps; ++step) {
            if (any.one_in(50)) c.upstream.fail_next();
            if (any.one_in(200)) (void)c.pool.trim(bytes{any.below(32) * MiB});
            if (any.one_in(200)) first.emplace(c.pool.make_cache());
            if (any.one_in(100)) second->flush();
            if (!out.empty() && any.one_in(2)) {
                auto at = out.lower_bound(reinterpret_cast<std::byte*>(any.below(~std::uint64_t{0})));
                if (at == out.end()) at = out.begin();
                const auto [p, b] = *at;
                REQUIRE(with([&](auto& r) { return r.deallocate(p, b.size + 1, b.alignment); }) == errc::wrong_size);
                REQUIRE(with([&](auto& r) { return r.deallocate(p, b.size, b.alignment); }) == errc::none);
                REQUIRE(with([&](auto& r) { return r.deallocate(p, b.size, b.alignment); }) == errc::unknown_block);
                requested -= b.size;
                out.erase(at);
                continue;
            }
            const auto size = static_cast<std::size_t>(any.below(std::uint64_t{1} << any.below(23)));
            const auto alignment = std::size_t{1} << any.below(any.one_in(10) ? 20 : 9);
            auto* const p = static_cast<std::byte*>(with([&](auto& r) { return r.try_allocate(size, alignment); }));
            if (p == nullptr) continue;
            REQUIRE(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
            const auto [at, fresh] = out.emplace(p, block{size, alignment});
            REQUIRE(fresh);
            if (at != out.begin()) REQUIRE(std::prev(at)->first + std::prev(at)->second.size <= p);
            if (std::next(at) != out.end()) REQUIRE(p + size <= std::next(at)->first);
            requested += size;
            const auto u = c.pool.usage();
            REQUIRE(u.requested == bytes{requested});
            REQUIRE(u.used >= u.requested);
            REQUIRE(u.used + u.cached + u.free() == u.reserved);
            REQUIRE(u.reserved == c.limit.usage().current);
        }
        for (const auto& [p, b] : out) REQUIRE(c.pool.deallocate(p, b.size, b.alignment) == errc::none);
        REQUIRE(c.pool.trim(0_B) == 0_B);
        REQUIRE(clean(c.pool.usage()));
        REQUIRE(c.limit.usage().current == 0_B);
        REQUIRE(c.upstream.blocks() == 0);
        REQUIRE(c.upstream.wrong_frees() == 0);
    }
}

}  // namespace

TEST_CASE("a segment that the upstream doesn't take back now is the pool's, and usable", "[memory][pool]") {
    quota limit{16_MiB};
    support::refusing_memory upstream;
    gpushare::quota_resource charged{limit, upstream};
    pool_resource pool{charged, {.segment = 1_MiB}};
    const bool large = GENERATE(false, true);
    const std::size_t size = large ? 2 * MiB : 4 * KiB;
    void* const p = pool.allocate(size, 256);
    CHECK(pool.deallocate(p, size, 256) == errc::none);
    const bytes held = pool.usage().reserved;
    upstream.refuse(errc::submission_failed);
    CHECK(pool.trim(0_B) == held);
    CHECK(pool.give_back(bytes::max()) == 0_B);
    CHECK(limit.usage().current == held);
    CHECK(pool.allocate(size, 256) == p);
    CHECK(upstream.calls() == 1);
    CHECK(pool.deallocate(p, size, 256) == errc::none);
    SECTION("later it goes back") {
        upstream.refuse(errc::none);
        CHECK(pool.trim(0_B) == 0_B);
    }
    SECTION("or when the pool closes again") {
        CHECK_FALSE(pool.close(gpushare::never));
        upstream.refuse(errc::none);
        CHECK(pool.close(gpushare::never));
    }
    CHECK(clean(pool.usage()));
    CHECK(limit.usage().current == 0_B);
    CHECK(upstream.blocks() == 0);
}

TEST_CASE("random calls never overlap, every figure is right, and all comes back", "[memory][pool][property]") {
    compare(20, 1'000);
}

TEST_CASE("random calls never overlap, for millions of steps", "[.long]") { compare(500, 5'000); }

}  // namespace pool_resource_test
