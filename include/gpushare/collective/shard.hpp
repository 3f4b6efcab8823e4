// SPDX-License-Identifier: Apache-2.0
// How ranks, and the blocks of a rank, divide elements or rows among themselves.
//
//   const auto mine = gpushare::shard_of(rows, me.rank(), me.size());     // rows [mine.begin, mine.end)
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Elements or rows [begin, end).
struct element_range {
    std::size_t begin = 0;  ///< the first
    std::size_t end = 0;    ///< behind the last
    /// How many there are.
    [[nodiscard]] GPUSHARE_HD constexpr std::size_t size() const noexcept { return end - begin; }
};

/// What number `index` of `shards` gets of `count` elements or rows: consecutive ones, cut at multiples of `grain`. All shards are of
/// one size, or a grain apart; the last may be empty. Where a result is sharded among ranks, rank r keeps shard r of its rows.
[[nodiscard]] GPUSHARE_HD constexpr element_range shard_of(std::size_t count, std::uint32_t index, std::uint32_t shards,
                                                           std::size_t grain = 1) noexcept {
    const std::size_t grains = count / grain + (count % grain != 0 ? 1 : 0);
    const std::size_t each = grains / shards, rest = grains % shards;
    const std::size_t first = index * each + (index < rest ? index : rest);
    const std::size_t begin = first * grain;
    const std::size_t end = begin + (each + (index < rest ? 1 : 0)) * grain;
    return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
