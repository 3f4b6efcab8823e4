// SPDX-License-Identifier: Apache-2.0
// How the elements [0, n) lie on M ranks: contiguous, block-cyclic, or by weight. Every element is on exactly one rank.
// Index arithmetic only, in 64 bits, for host and device code.
//
//   constexpr gpushare::contiguous_partition rows{1'000'000, 8, 64};       // boundaries at multiples of 64
//   const auto r = rows.rank_of(i);     const auto j = rows.local_index(i);     i == rows.global_index(r, j);
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

// Version 14 would break the compound requirements apart:
// clang-format off

/// A partition of [0, size()) over ranks 0 to ranks()-1. Indices must be in range: nothing is checked but construction.
///   extent(rank)           elements of the rank, numbered from 0: its local indices
///   rank_of(i)             the rank that has element i
///   local_index(i)         its number there
///   global_index(rank, j)  the element with that number
///   run(rank, j)           how many elements from there on are contiguous, on the rank and in the whole; 0 at the end
template <class P>
concept data_partition = std::copyable<P> && requires(const P& p, std::uint32_t rank, std::uint64_t i) {
    { p.size() } noexcept -> std::same_as<std::uint64_t>;
    { p.ranks() } noexcept -> std::same_as<std::uint32_t>;
    { p.extent(rank) } noexcept -> std::same_as<std::uint64_t>;
    { p.rank_of(i) } noexcept -> std::same_as<std::uint32_t>;
    { p.local_index(i) } noexcept -> std::same_as<std::uint64_t>;
    { p.global_index(rank, i) } noexcept -> std::same_as<std::uint64_t>;
    { p.run(rank, i) } noexcept -> std::same_as<std::uint64_t>;
};

/// A partition in which each rank has one contiguous run, [begin(rank), begin(rank + 1)), in rank order.
template <class P>
concept run_partition = data_partition<P> && requires(const P& p, std::uint32_t rank) {
    { p.begin(rank) } noexcept -> std::same_as<std::uint64_t>;  // rank <= ranks()
};

// clang-format on

namespace detail {

struct partition_shape {
    std::uint64_t size = 0, block = 1;
    std::uint32_t ranks = 1;

    /// Throws operation_error (invalid_specification) without ranks or with blocks of nothing.
    constexpr partition_shape(std::uint64_t n, std::uint32_t m, std::uint64_t b) : size(n), block(b), ranks(m) {
        if (m == 0 || b == 0)
            throw operation_error(errc::invalid_specification, {},
                                  "a data partition needs ranks, and blocks of elements");
    }

    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t blocks() const noexcept {
        return size / block + (size % block != 0 ? 1 : 0);
    }
    /// Where block `k` <= blocks() begins; the last one may be cut short.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t begin_of(std::uint64_t k) const noexcept {
        return k > size / block ? size : k * block;
    }
};

/// Arithmetic that follows from the boundaries alone.
template <class Derived>
class run_arithmetic {
public:
    /// How many elements the rank has.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t extent(std::uint32_t rank) const noexcept {
        return self().begin(rank + 1) - self().begin(rank);
    }
    /// The number of element `i` on its rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t local_index(std::uint64_t i) const noexcept {
        return i - self().begin(self().rank_of(i));
    }
    /// The element that is number `j` of the rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t global_index(std::uint32_t rank, std::uint64_t j) const noexcept {
        return self().begin(rank) + j;
    }
    /// How many elements from there on are neighbours, on the rank and in the whole.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t run(std::uint32_t rank, std::uint64_t j) const noexcept {
        return extent(rank) - j;
    }

private:
    [[nodiscard]] GPUSHARE_HD constexpr const Derived& self() const noexcept {
        return static_cast<const Derived&>(*this);
    }
};

}  // namespace detail

/// One contiguous run per rank, as equal as possible in blocks of `align` elements. The numbers of blocks differ by at
/// most one, lower ranks have more, and the last block may be cut short. Boundaries are multiples of `align`, or the
/// end.
class contiguous_partition : public detail::run_arithmetic<contiguous_partition> {
public:
    /// `align`: each boundary is a multiple of it. Throws operation_error (invalid_specification)
    /// for no ranks or an `align` of 0.
    constexpr contiguous_partition(std::uint64_t size, std::uint32_t ranks, std::uint64_t align = 1)
        : shape_(size, ranks, align), each_(shape_.blocks() / ranks), more_(shape_.blocks() % ranks) {}

    /// Elements in all.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t size() const noexcept { return shape_.size; }
    /// How many ranks.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t ranks() const noexcept { return shape_.ranks; }
    /// The first element of the rank; of ranks(): size().
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t begin(std::uint32_t rank) const noexcept {
        return shape_.begin_of(rank * each_ + (rank < more_ ? rank : more_));
    }
    /// The rank that owns element `i`.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t rank_of(std::uint64_t i) const noexcept {
        const auto block = i / shape_.block, of_more = more_ * (each_ + 1);
        return static_cast<std::uint32_t>(block < of_more ? block / (each_ + 1) : more_ + (block - of_more) / each_);
    }

private:
    detail::partition_shape shape_;
    std::uint64_t each_, more_;  // blocks of every rank; the first `more_` ranks have one more
};
static_assert(run_partition<contiguous_partition>);

/// Block-cyclic: block k of `block` elements is on rank k % M. The last block may be cut short.
class block_cyclic_partition {
public:
    /// `block` elements go to each rank in turn. Throws operation_error (invalid_specification) for
    /// no ranks or a `block` of 0.
    constexpr block_cyclic_partition(std::uint64_t size, std::uint32_t ranks, std::uint64_t block)
        : shape_(size, ranks, block) {}

    /// Elements in all.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t size() const noexcept { return shape_.size; }
    /// How many ranks.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t ranks() const noexcept { return shape_.ranks; }
    /// Elements dealt out at once.
    [[nodiscard]] constexpr std::uint64_t block() const noexcept { return shape_.block; }
    /// How many elements the rank has.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t extent(std::uint32_t rank) const noexcept {
        const auto full = shape_.size / shape_.block;  // blocks that aren't cut short
        const auto mine = full / shape_.ranks + (rank < full % shape_.ranks ? 1 : 0);
        return mine * shape_.block + (rank == full % shape_.ranks ? shape_.size % shape_.block : 0);
    }
    /// The rank that owns element `i`.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t rank_of(std::uint64_t i) const noexcept {
        return static_cast<std::uint32_t>(i / shape_.block % shape_.ranks);
    }
    /// The number of element `i` on its rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t local_index(std::uint64_t i) const noexcept {
        return i / shape_.block / shape_.ranks * shape_.block + i % shape_.block;
    }
    /// The element that is number `j` of the rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t global_index(std::uint32_t rank, std::uint64_t j) const noexcept {
        return (j / shape_.block * shape_.ranks + rank) * shape_.block + j % shape_.block;
    }
    /// How many elements from there on are neighbours, on the rank and in the whole.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t run(std::uint32_t rank, std::uint64_t j) const noexcept {
        const auto rest_of_block = shape_.block - j % shape_.block, rest = extent(rank) - j;
        return rest < rest_of_block ? rest : rest_of_block;
    }

private:
    detail::partition_shape shape_;
};
static_assert(data_partition<block_cyclic_partition>);

/// One contiguous run per rank, in proportion to weights. Every boundary is less than one `align` below its exact
/// place, so an extent is less than one `align` off its share. Boundaries are multiples of `align`, or the end. A rank
/// of weight 0 has nothing. It holds its boundaries, at most MaxRanks + 1, by value, so that it can be passed to a
/// kernel.
template <std::uint32_t MaxRanks = 16>
class weighted_partition : public detail::run_arithmetic<weighted_partition<MaxRanks>> {
public:
    /// Throws operation_error (invalid_specification): no weight at all, weights that sum over 64
    /// bits, or more ranks than MaxRanks.
    constexpr weighted_partition(std::uint64_t size, std::span<const std::uint64_t> weights, std::uint64_t align = 1)
        : ranks_(static_cast<std::uint32_t>(weights.size())) {
        (void)detail::partition_shape(size, ranks_, align);  // checks
        if (weights.size() > MaxRanks)
            throw operation_error(errc::invalid_specification, {},
                                  "a weighted partition has no place for so many ranks");
        std::uint64_t sum = 0;
        for (const auto w : weights) {
            if (sum + w < sum)
                throw operation_error(errc::invalid_specification, {}, "the weights of a partition sum over 64 bits");
            sum += w;
        }
        if (sum == 0) throw operation_error(errc::invalid_specification, {}, "a partition needs some weight");
        std::uint64_t before = 0;
        for (std::uint32_t r = 0; r < ranks_; ++r) {
            const auto exact = share_of(size, before, sum);
            begins_[r] = exact == size ? size : exact - exact % align;
            before += weights[r];
        }
        begins_[ranks_] = size;
    }

    /// Elements in all.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t size() const noexcept { return begins_[ranks_]; }
    /// How many ranks.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t ranks() const noexcept { return ranks_; }
    /// The first element of the rank; of ranks(): size().
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t begin(std::uint32_t rank) const noexcept { return begins_[rank]; }
    /// The rank that owns element `i`.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t rank_of(std::uint64_t i) const noexcept {
        std::uint32_t low = 0, high = ranks_;  // begins_[low] <= i < begins_[high]
        while (high - low > 1) {
            const auto middle = low + (high - low) / 2;
            (begins_[middle] <= i ? low : high) = middle;
        }
        return low;
    }

private:
    // a * b / c, rounded down, for b <= c.
    static constexpr std::uint64_t share_of(std::uint64_t a, std::uint64_t b, std::uint64_t c) noexcept {
        __extension__ using wide = unsigned __int128;
        return static_cast<std::uint64_t>(static_cast<wide>(a) * b / c);
    }

    std::uint64_t begins_[MaxRanks + 1] = {};  // not std::array, whose operator[] device code can't call
    std::uint32_t ranks_;
};
static_assert(run_partition<weighted_partition<>>);

/// Calls `f(global, local, count)` for each contiguous run of `rank`, in ascending order.
template <data_partition P, std::invocable<std::uint64_t, std::uint64_t, std::uint64_t> F>
constexpr void for_each_run(const P& p, std::uint32_t rank, F f) {
    for (std::uint64_t j = 0, n = 0; (n = p.run(rank, j)) != 0; j += n) f(p.global_index(rank, j), j, n);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
