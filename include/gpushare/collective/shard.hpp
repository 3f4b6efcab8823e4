// SPDX-License-Identifier: Apache-2.0
// Divides elements or rows among ranks, and among the blocks of a rank.
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

/// Shard `index` of `shards` consecutive parts of `count` elements or rows, cut at multiples of
/// `grain`. Sizes differ by a grain at most, and the last shard may be smaller still or empty. Rank
/// r keeps shard r of the rows of a sharded result.
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
