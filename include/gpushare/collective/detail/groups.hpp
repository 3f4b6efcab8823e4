// SPDX-License-Identifier: Apache-2.0
// Selects the ranks of a new group when a communicator is split or shrinks, for threads and for
// devices.
//
//   for (const auto& ranks : detail::ranks_by_colour(colours)) groups.push_back(subgroup(ranks));
//   subgroup(detail::ranks_without(dead, size()));
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The ranks of each colour, in the order of colours. Throws std::bad_alloc.
[[nodiscard]] inline std::vector<std::vector<std::uint32_t>> ranks_by_colour(std::span<const std::uint32_t> colours) {
    std::vector<std::uint32_t> order(colours.begin(), colours.end());
    std::ranges::sort(order);
    order.erase(std::unique(order.begin(), order.end()), order.end());
    std::vector<std::vector<std::uint32_t>> groups(order.size());
    for (std::uint32_t r = 0; r < colours.size(); ++r)
        groups[static_cast<std::size_t>(std::ranges::lower_bound(order, colours[r]) - order.begin())].push_back(r);
    return groups;
}

/// Ranks below `size` that aren't in `dead`. Throws std::bad_alloc.
[[nodiscard]] inline std::vector<std::uint32_t> ranks_without(std::span<const std::uint32_t> dead, std::uint32_t size) {
    std::vector<std::uint32_t> live;
    for (std::uint32_t r = 0; r < size; ++r)
        if (std::ranges::find(dead, r) == dead.end()) live.push_back(r);
    return live;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
