// SPDX-License-Identifier: Apache-2.0
// The figures of a pool: what it holds, what of that is in use, and how badly the rest is fragmented.
//
//   const gpushare::pool_usage u = pool.usage();
//   log(u.reserved, u.used, u.external_fragmentation());
#pragma once

#include <cstddef>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A reading of a pool. `requested` is exact while no call is under way, the rest always.
struct pool_usage {
    bytes reserved{};          ///< held from the upstream: what a quota below the pool counts
    bytes used{};              ///< in blocks that are out
    bytes requested{};         ///< what these were asked for: the rest of `used` is rounding
    bytes cached{};            ///< freed, with workers who may use it again
    bytes pending{};           ///< freed on streams that haven't got there
    bytes largest_free{};      ///< the largest block that can be had without emptying a cache or asking the upstream
    bytes peak_reserved{};     ///< the most that was ever held
    std::size_t segments = 0;  ///< ranges that are held

    /// In no block, no cache and on no stream.
    [[nodiscard]] constexpr bytes free() const noexcept { return reserved - used - cached - pending; }
    /// Part of what is used that nobody asked for, 0 to 1.
    [[nodiscard]] constexpr double internal_fragmentation() const noexcept { return missing(requested, used); }
    /// Part of what is free that the largest request can't have, 0 to 1.
    [[nodiscard]] constexpr double external_fragmentation() const noexcept { return missing(largest_free, free()); }

private:
    static constexpr double missing(bytes part, bytes whole) noexcept {
        return whole == bytes{} ? 0 : 1 - static_cast<double>(part.count()) / static_cast<double>(whole.count());
    }
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
