// SPDX-License-Identifier: Apache-2.0
// The numbers of elements that each rank has for each rank. For a call whose parts differ in length
// from pair to pair, mpi.hpp sends these numbers to all ranks.
//
//   mpi_pairs pairs(sends, receives);        // this rank's numbers
//   ... every rank's mine() goes to all(), in the order of ranks ...
//   if (auto odd = pairs.odd_one()) ...      // a rank that sends more or fewer than expected
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class mpi_pairs {
public:
    mpi_pairs(std::span<const std::uint64_t> sends, std::span<const std::uint64_t> receives)
        : ranks_(sends.size()), all_(2 * ranks_ * ranks_), mine_(sends.begin(), sends.end()) {
        mine_.insert(mine_.end(), receives.begin(), receives.end());
    }

    [[nodiscard]] std::span<const std::uint64_t> mine() const noexcept { return mine_; }
    [[nodiscard]] std::span<std::uint64_t> all() noexcept { return all_; }
    [[nodiscard]] std::span<const std::uint64_t> sends(std::size_t rank) const noexcept { return row(2 * rank); }
    [[nodiscard]] std::span<const std::uint64_t> receives(std::size_t rank) const noexcept { return row(2 * rank + 1); }

    /// The first rank that sends a different number of elements than the receiver expects.
    [[nodiscard]] std::optional<std::uint32_t> odd_one() const noexcept {
        for (std::uint32_t from = 0; from < ranks_; ++from)
            for (std::size_t to = 0; to < ranks_; ++to)
                if (sends(from)[to] != receives(to)[from]) return from;
        return std::nullopt;
    }
    /// The elements of the longest part.
    [[nodiscard]] std::size_t largest() const noexcept {
        std::uint64_t most = 0;
        for (std::size_t r = 0; r < ranks_; ++r)
            for (const std::uint64_t n : sends(r)) most = std::max(most, n);
        return most;
    }
    /// The bytes of the elements [at, at + length) of each of these parts. The parts are contiguous
    /// and counted in elements of `unit` bytes.
    [[nodiscard]] static std::vector<element_range> slice(std::span<const std::uint64_t> counts, std::size_t at,
                                                          std::size_t length, std::size_t unit) {
        std::vector<element_range> parts;
        std::size_t begin = 0;
        for (const std::uint64_t n : counts) {
            parts.push_back({(begin + std::min<std::size_t>(at, n)) * unit,
                             (begin + std::min<std::size_t>(at + length, n)) * unit});
            begin += n;
        }
        return parts;
    }
    /// Copies the elements that a rank has for itself.
    void copy_own(std::size_t rank, const std::byte* in, std::byte* out, std::size_t unit) const {
        const element_range from = slice(sends(rank), 0, sends(rank)[rank], unit)[rank];
        const element_range to = slice(receives(rank), 0, receives(rank)[rank], unit)[rank];
        if (from.size() != 0) std::memcpy(out + to.begin, in + from.begin, from.size());
    }

private:
    [[nodiscard]] std::span<const std::uint64_t> row(std::size_t r) const noexcept {
        return std::span(all_).subspan(r * ranks_, ranks_);
    }

    std::size_t ranks_;
    std::vector<std::uint64_t> all_, mine_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
