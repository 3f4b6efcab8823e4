// SPDX-License-Identifier: Apache-2.0
// Which shelves a worker's cache has, and how many blocks lie on each.
//
//   using layout = gpushare::shelf_layout;
//   layout::of(granules);    layout::depth_of(shelf);    layout::places[shelf];
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/size_classes.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

struct shelf_sizes {
    using classes = size_classes<3>;  // a block is at most an eighth bigger than what was asked for
    static constexpr std::uint64_t largest = (8 << 20) / pool_granule;  // granules; bigger blocks aren't kept
    static constexpr std::uint32_t shelves = classes::of(largest) + 1;

    /// The shelf for a block of that many granules; `shelves` for those that aren't kept.
    [[nodiscard]] static constexpr std::uint32_t of(std::uint64_t granules) noexcept {
        return std::min(classes::of(granules), shelves);
    }

    /// Blocks on a shelf: 256 KiB, but 16 blocks at least and 256 at most. Programs free small blocks by the hundred, and
    /// what has no place here costs the lock of the pool, and to be cut out again.
    [[nodiscard]] static constexpr std::uint32_t depth_of(std::uint32_t shelf) noexcept {
        const auto size = std::max<std::uint64_t>(classes::smallest(shelf), 1) * pool_granule;
        return static_cast<std::uint32_t>(std::clamp<std::uint64_t>((256 << 10) / size, 16, 256));
    }
};

}  // namespace detail

struct shelf_layout : detail::shelf_sizes {
    /// Where each shelf begins, of places for blocks that lie side by side; the last entry is how many there are.
    static constexpr std::array<std::uint32_t, shelves + 1> places = [] {
        std::array<std::uint32_t, shelves + 1> begins{};
        for (std::uint32_t s = 0; s < shelves; ++s) begins[s + 1] = begins[s] + depth_of(s);
        return begins;
    }();
};
static_assert(shelf_layout::places.back() * sizeof(void*) <= (36 << 10), "what a worker costs the host");

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
