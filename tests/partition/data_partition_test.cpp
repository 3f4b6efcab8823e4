// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Data partitions: every element is on exactly one rank, boundaries are where they were requested,
// and nothing overflows at the edge of 64 bits. Small partitions exhaustively, the others at
// random.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/partition/data_partition.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"

namespace data_partition_test {

using gpushare::block_cyclic_partition;
using gpushare::contiguous_partition;
using gpushare::data_partition;
using gpushare::run_partition;
using gpushare::weighted_partition;

namespace {

constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

// Arguments of kernels: copied as they are.
static_assert(std::is_trivially_copyable_v<contiguous_partition>);
static_assert(std::is_trivially_copyable_v<block_cyclic_partition>);
static_assert(std::is_trivially_copyable_v<weighted_partition<>>);

static_assert(contiguous_partition{10, 4}.extent(0) == 3);
static_assert(contiguous_partition{10, 4}.rank_of(9) == 3);
static_assert(block_cyclic_partition{10, 2, 3}.global_index(1, 3) == 9);
constexpr std::array<std::uint64_t, 2> one_to_three{1, 3};
static_assert(weighted_partition<>{8, one_to_three}.begin(1) == 2);

/// Element by element: each has a place, no two share one, and the places are those of the runs.
template <data_partition P>
void check_everything(const P& p) {
    std::vector<std::vector<std::uint64_t>> held(p.ranks());
    for (std::uint64_t i = 0; i < p.size(); ++i) {
        const auto rank = p.rank_of(i);
        REQUIRE(rank < p.ranks());
        REQUIRE(p.local_index(i) == held[rank].size());  // ascending, without gaps
        REQUIRE(p.global_index(rank, p.local_index(i)) == i);
        held[rank].push_back(i);
    }
    for (std::uint32_t rank = 0; rank < p.ranks(); ++rank) {
        REQUIRE(p.extent(rank) == held[rank].size());
        std::vector<std::uint64_t> from_runs;
        for_each_run(p, rank, [&](std::uint64_t global, std::uint64_t local, std::uint64_t count) {
            REQUIRE(count > 0);
            REQUIRE(local == from_runs.size());
            for (std::uint64_t k = 0; k < count; ++k) from_runs.push_back(global + k);
        });
        REQUIRE(from_runs == held[rank]);
    }
}

/// What holds at the ends of every rank, however many elements there are.
template <data_partition P>
void check_ends(const P& p) {
    std::uint64_t sum = 0;
    for (std::uint32_t rank = 0; rank < p.ranks(); ++rank) {
        const auto extent = p.extent(rank);
        sum += extent;
        if (extent == 0) continue;
        for (const auto j : {std::uint64_t{0}, extent / 2, extent - 1}) {
            const auto i = p.global_index(rank, j);
            REQUIRE(i < p.size());
            REQUIRE(p.rank_of(i) == rank);
            REQUIRE(p.local_index(i) == j);
            REQUIRE(p.run(rank, j) <= extent - j);
            REQUIRE(p.run(rank, j) > 0);
        }
    }
    REQUIRE(sum == p.size());
}

template <run_partition P>
void check_boundaries(const P& p, std::uint64_t align) {
    REQUIRE(p.begin(0) == 0);
    REQUIRE(p.begin(p.ranks()) == p.size());
    for (std::uint32_t rank = 0; rank < p.ranks(); ++rank) {
        REQUIRE(p.begin(rank) <= p.begin(rank + 1));
        REQUIRE((p.begin(rank) % align == 0 || p.begin(rank) == p.size()));
    }
}

using support::code_of;

}  // namespace

TEST_CASE("contiguous partitions: all up to 64 elements, 9 ranks, every alignment", "[partition][data]") {
    for (std::uint64_t n = 0; n <= 64; ++n)
        for (std::uint32_t m = 1; m <= 9; ++m)
            for (const std::uint64_t align : {1U, 2U, 3U, 4U, 7U, 8U, 16U, 64U, 100U}) {
                CAPTURE(n, m, align);
                const contiguous_partition p{n, m, align};
                check_everything(p);
                check_boundaries(p, align);
                for (std::uint32_t r = 1; r < m; ++r) {
                    REQUIRE(p.extent(r) <= p.extent(r - 1));
                    REQUIRE(p.extent(0) - p.extent(r) < 2 * align);
                    if (n % align == 0) REQUIRE(p.extent(0) - p.extent(r) <= align);
                }
            }
}

TEST_CASE("block-cyclic partitions: all up to 64 elements, 9 ranks, every block", "[partition][data]") {
    for (std::uint64_t n = 0; n <= 64; ++n)
        for (std::uint32_t m = 1; m <= 9; ++m)
            for (const std::uint64_t block : {1U, 2U, 3U, 4U, 7U, 8U, 16U, 64U, 100U}) {
                CAPTURE(n, m, block);
                const block_cyclic_partition p{n, m, block};
                check_everything(p);
                for (std::uint64_t i = 0; i < n; ++i) REQUIRE(p.rank_of(i) == i / block % m);
                for (std::uint32_t r = 1; r < m; ++r) REQUIRE(p.extent(0) - p.extent(r) <= block);
            }
}

TEST_CASE("weighted partitions: all weights up to 3 of 4 ranks", "[partition][data]") {
    for (std::uint64_t n = 0; n <= 24; ++n)
        for (const std::uint64_t align : {1U, 2U, 5U, 32U})
            for (std::uint64_t code = 1; code < 256; ++code) {
                const std::array weights{code % 4, code / 4 % 4, code / 16 % 4, code / 64};
                CAPTURE(n, align, weights);
                const weighted_partition<4> p{n, weights, align};
                check_everything(p);
                check_boundaries(p, align);
                for (std::uint32_t r = 0; r < 4; ++r)
                    if (weights[r] == 0) REQUIRE(p.extent(r) == 0);
            }
}

TEST_CASE("equal weights give equal parts", "[partition][data]") {
    const std::array<std::uint64_t, 3> equal{5, 5, 5};
    const weighted_partition<> p{3'000, equal, 10};
    for (std::uint32_t r = 0; r < 3; ++r) CHECK(p.extent(r) == 1'000);
}

TEST_CASE("extents of weighted partitions are less than one alignment off their share", "[partition][data][property]") {
    for (std::uint64_t run = 0; run < 20'000; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        std::vector<std::uint64_t> weights(1 + any.below(16));
        for (auto& w : weights) w = any.one_in(4) ? 0 : any.below(std::uint64_t{1} << any.below(57));
        weights[any.below(weights.size())] += 1;
        const auto align = 1 + any.below(std::uint64_t{1} << any.below(20));
        const auto n = any.below(std::uint64_t{1} << any.below(60));
        const weighted_partition<> p{n, weights, align};
        check_boundaries(p, align);
        check_ends(p);
        long double sum = 0;
        for (const auto w : weights) sum += static_cast<long double>(w);
        for (std::uint32_t r = 0; r < p.ranks(); ++r) {
            const auto exact = static_cast<long double>(n) * static_cast<long double>(weights[r]) / sum;
            const auto off = static_cast<long double>(p.extent(r)) - exact;
            const auto bound = static_cast<long double>(align) * 1.000001L;
            REQUIRE((off < bound && -off < bound));
            if (weights[r] == 0) REQUIRE(p.extent(r) == 0);
        }
    }
}

TEST_CASE("random partitions keep their ends", "[partition][data][property]") {
    for (std::uint64_t run = 0; run < 20'000; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        const auto n = any.below(std::uint64_t{1} << any.below(64));
        const auto block = 1 + any.below(std::uint64_t{1} << any.below(64));
        const auto m = static_cast<std::uint32_t>(1 + any.below(std::uint64_t{1} << any.below(10)));
        const contiguous_partition runs{n, m, block};
        check_ends(runs);
        check_boundaries(runs, block);
        check_ends(block_cyclic_partition{n, m, block});
    }
}

TEST_CASE("partitions of nearly 2^64 elements don't wrap", "[partition][data]") {
    for (const std::uint64_t n : {most, most - 1, most - 63, most / 2 + 1})
        for (const std::uint64_t block : {std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{1} << 63, most - 1, most})
            for (const std::uint32_t m : {1U, 2U, 7U, 1024U, 4'000'000'000U}) {
                CAPTURE(n, block, m);
                const contiguous_partition runs{n, m, block};
                CHECK(runs.begin(m) == n);
                CHECK(runs.rank_of(0) == 0);
                CHECK(runs.global_index(runs.rank_of(n - 1), runs.local_index(n - 1)) == n - 1);
                const block_cyclic_partition dealt{n, m, block};
                CHECK(dealt.global_index(dealt.rank_of(n - 1), dealt.local_index(n - 1)) == n - 1);
                CHECK(dealt.local_index(n - 1) < dealt.extent(dealt.rank_of(n - 1)));
            }
    const std::array<std::uint64_t, 3> weights{most / 2, 1, most / 2};
    const weighted_partition<3> p{most, weights, 64};
    check_ends(p);
    check_boundaries(p, 64);
}

TEST_CASE("partitions that can't be are refused", "[partition][data]") {
    using gpushare::errc;
    CHECK(code_of([] { (void)contiguous_partition(10, 0); }) == errc::invalid_specification);
    CHECK(code_of([] { (void)contiguous_partition(10, 1, 0); }) == errc::invalid_specification);
    CHECK(code_of([] { (void)block_cyclic_partition(10, 2, 0); }) == errc::invalid_specification);
    const std::array<std::uint64_t, 2> nothing{0, 0}, too_much{most, 1};
    CHECK(code_of([&] { (void)weighted_partition<>(10, nothing); }) == errc::invalid_specification);
    CHECK(code_of([&] { (void)weighted_partition<>(10, too_much); }) == errc::invalid_specification);
    CHECK(code_of([] { (void)weighted_partition<>(10, {}); }) == errc::invalid_specification);
    CHECK(code_of([&] { (void)weighted_partition<1>(10, one_to_three); }) == errc::invalid_specification);
}

}  // namespace data_partition_test
