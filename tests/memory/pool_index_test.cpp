// SPDX-License-Identifier: Apache-2.0
// Lookups of blocks while other blocks come and go, and frees that race for one block.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <thread>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_index.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace pool_index_test {

using gpushare::errc;
using gpushare::detail::pool_block;
using gpushare::detail::pool_granule;
using gpushare::detail::pool_index;
using gpushare::detail::pool_tag;

namespace {

std::byte* address(std::uint64_t n) { return reinterpret_cast<std::byte*>(n); }

/// An index and the blocks that it refers to.
struct entries {
    pool_index index;
    std::deque<pool_block> blocks;

    pool_block& add(std::uint64_t at, std::uint64_t size = 100, std::size_t alignment = 256) {
        auto& b = blocks.emplace_back();
        b.begin = address(at);
        b.tag = pool_tag::live(b.begin, size, alignment);
        index.reserve(1);
        index.insert(b);
        return b;
    }
};

}  // namespace

TEST_CASE("a tag tells sizes, alignments and where the block begins apart", "[memory][pool]") {
    auto* const p = address(0x7f00'1234'5600);
    for (unsigned bit = 0; bit < pool_tag::size_bits; ++bit)
        for (unsigned log = 0; log < 49; ++log) {
            const auto size = (std::uint64_t{1} << bit) - 1;
            const auto tag = pool_tag::live(p, size, std::size_t{1} << log);
            REQUIRE(tag != 0);
            REQUIRE(tag != pool_tag::live(p, size + 1, std::size_t{1} << log));
            REQUIRE(tag != pool_tag::live(p, size, std::size_t{2} << log));
            REQUIRE(tag != pool_tag::live(p + pool_granule, size, std::size_t{1} << log));
        }
    CHECK(pool_tag::check(pool_tag::size_limit / 2 - 1, 1) == errc::none);
    CHECK(pool_tag::check(pool_tag::size_limit / 2, 1) == errc::size_overflow);
    CHECK(pool_tag::check(std::numeric_limits<std::size_t>::max(), 1) == errc::size_overflow);
    CHECK(pool_tag::check(1, std::size_t{1} << 63) == errc::size_overflow);
    CHECK(pool_tag::check(1, 0) == errc::bad_alignment);
    CHECK(pool_tag::check(1, 48) == errc::bad_alignment);
}

TEST_CASE("a pointer that isn't a block's is unknown, wherever it points", "[memory][pool]") {
    entries b;
    (void)b.add(1 << 20);
    for (const std::uint64_t at :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{pool_granule}, std::uint64_t{1} << 20 | 1,
          (std::uint64_t{1} << 20) + pool_granule, ~std::uint64_t{0}, std::uint64_t{1} << 63})
        CHECK(b.index.claim(address(at), 100, 256).why == errc::unknown_block);
    CHECK(b.index.claim(address(1 << 20), 101, 256).why == errc::wrong_size);
    CHECK(b.index.claim(address(1 << 20), 100, 512).why == errc::wrong_size);
    // What no request can be, but might wrap round to the right tag.
    for (const std::size_t alignment : {std::size_t{0}, std::size_t{3}, std::size_t{257}})
        CHECK(b.index.claim(address(1 << 20), 100, alignment).why == errc::wrong_size);
    for (const std::uint64_t more : {pool_tag::size_limit, std::uint64_t{1} << 63, ~std::uint64_t{99}})
        CHECK(b.index.claim(address(1 << 20), 100 + more, 256).why == errc::wrong_size);
    const auto claimed = b.index.claim(address(1 << 20), 100, 256);
    CHECK(claimed.why == errc::none);
    CHECK(claimed.block == &b.blocks.front());
    CHECK(b.index.claim(address(1 << 20), 100, 256).why == errc::unknown_block);
}

TEST_CASE("random blocks come and go, and the index knows just those that are there", "[memory][pool][property]") {
    for (std::uint64_t run = 0; run < 10; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        entries b;
        std::map<std::uint64_t, pool_block*> in;
        std::vector<std::uint64_t> places(10 + any.below(5'000));  // all over, so that some share their slots
        for (auto& place : places) place = (1 + any.below(std::uint64_t{1} << 40)) * pool_granule;
        for (int step = 0; step < 20'000; ++step) {
            const auto at = any.of(places);
            const auto found = in.find(at);
            REQUIRE(b.index.find(address(at)) == (found == in.end() ? nullptr : found->second));
            if (found != in.end()) {
                b.index.erase(*found->second);
                in.erase(found);
            } else if (any.below(places.size()) >= in.size()) {
                in.emplace(at, &b.add(at));
            }
            if (any.one_in(100)) b.index.drop_retired();
        }
        for (const auto& [at, block] : in) REQUIRE(b.index.find(address(at)) == block);
    }
}

TEST_CASE("readers find what they know while others come and go, and tables are renewed under them",
          "[memory][pool][threads]") {
    entries b;
    constexpr std::uint64_t known = 64;
    for (std::uint64_t i = 1; i <= known; ++i) (void)b.add(i << 30);
    std::atomic<std::uint64_t> lost{0};
    {
        support::background readers(2, [&](unsigned) {
            for (std::uint64_t i = 1; i <= known; ++i) {
                const auto* const found = b.index.find(address(i << 30));
                if (found == nullptr || found->begin != address(i << 30)) lost.fetch_add(1);
                if (b.index.claim(address((i << 30) + 1), 1, 1).why != errc::unknown_block) lost.fetch_add(1);
            }
        });
        for (std::uint64_t i = 0; i < 200; ++i) {
            std::deque<pool_block*> passing;
            for (std::uint64_t j = 1; j <= 64 + i; ++j) passing.push_back(&b.add((known + 1) << 30 | j * pool_granule));
            for (auto* p : passing) b.index.erase(*p);
        }
    }
    CHECK(lost.load() == 0);
    CHECK(b.index.has_retired());
    b.index.drop_retired();
    CHECK_FALSE(b.index.has_retired());
}

TEST_CASE("of frees that race for one block one succeeds", "[memory][pool][threads]") {
    entries b;
    // For a while: on cores that others use, two threads seldom run at once, and every meeting
    // takes its time.
    constexpr std::uint64_t most = 20'000;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    auto& block = b.add(1 << 20);
    const auto tag = block.tag.load();
    std::atomic<std::uint64_t> freed{0}, arrived{0}, rounds{0};
    std::atomic<bool> over{false};
    support::together(2, [&](unsigned rank) {
        std::uint64_t meetings = 0;
        const auto meet = [&] {  // as closely in step as two threads can be
            arrived.fetch_add(1);
            ++meetings;
            for (unsigned spins = 0; arrived.load() < 2 * meetings; ++spins)
                if (spins > 1'000) std::this_thread::yield();
        };
        for (;;) {
            if (rank == 0) {
                block.tag = tag;
                over = ++rounds == most || std::chrono::steady_clock::now() > end;
            }
            meet();
            if (b.index.claim(address(1 << 20), 100, 256).why == errc::none) freed.fetch_add(1);
            if (over) return;
            meet();
        }
    });
    CHECK(freed.load() == rounds.load());
}

}  // namespace pool_index_test
