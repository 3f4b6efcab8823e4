// SPDX-License-Identifier: Apache-2.0
// Error feedback of fp8 blocks. Codes can't carry all of a rank's elements; the rank adds the
// missing part to its next elements.
//
//   const owing_blocks<128> k{from, to, owed, left, count};
//   stream.launch(k.shape(), k);  // to = from + owed; left = to - what codes of `to` stand for
//
// The blocks begin at the first element, as those of a quantised all-reduce do.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/detail/block_team.hpp>
#include <gpushare/collective/detail/fp8_blocks.hpp>
#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <std::uint32_t Block>
struct owing_blocks {
    const float* from;
    float* to;  // may be `from`
    const float* owed;
    float* left;  // may be `owed`
    std::size_t count;

    [[nodiscard]] grid shape() const noexcept {
        constexpr std::size_t of_block = 8192, most = 256;  // elements; blocks of threads
        const std::size_t blocks = count / of_block;
        return {.blocks = static_cast<std::uint32_t>(blocks < 1      ? 1
                                                     : blocks > most ? most
                                                                     : blocks),
                .threads = 256,
                .hold = {}};
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C& ctx) const noexcept {
        const element_range mine = shard_of(count, ctx.block_rank(), ctx.num_blocks(), Block);
        const block_team team = block_team::of<Block / coded_floats::lanes>(ctx);
        team.each((mine.size() + Block - 1) / Block, [&](std::size_t b) {
            const std::size_t begin = mine.begin + b * Block, behind = begin + Block;
            code(team, begin, behind < mine.end ? behind : mine.end);
        });
    }

private:
    /// Later, a thread only reads sums that it wrote itself.
    GPUSHARE_HD void code(const block_team& team, std::size_t begin, std::size_t end) const noexcept {
        float most = 0;
        for (std::size_t i = begin + team.lane(); i < end; i += team.lanes()) {
            to[i] = from[i] + owed[i];
            most = larger_lanes{}(most, finite_magnitude_lanes{}(to[i]));
        }
        const std::uint8_t scale = scale_byte(team.largest(most));
        const coding_lanes coding{inverse_scale(scale), largest_code(scale)};
        for (std::size_t i = begin + team.lane(); i < end; i += team.lanes()) {
            const float rest = to[i] - product_of(static_cast<float>(fp8_e4m3(coding(to[i]))), scale_of(scale));
            left[i] = (bits_of(rest) & 0x7fff'ffff) > 0x7f7f'ffff ? 0.0F : rest;
        }
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
