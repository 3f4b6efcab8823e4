// SPDX-License-Identifier: Apache-2.0
// The figures of a pool: what it holds, what of that is in use, and how badly the rest is fragmented.
//
//   const gpushare::pool_usage u{.reserved = 64_MiB, .used = 40_MiB};      // usage() of a pool returns one
//   log(u.reserved, u.used, u.external_fragmentation());
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A reading of a pool. `requested` and the counts are exact while no call is under way, the rest always.
struct pool_usage {
    bytes reserved{};          ///< held from the upstream: what a quota below the pool counts
    bytes used{};              ///< in blocks that are out
    bytes requested{};         ///< of these, what the callers asked for; the rest is rounding
    bytes cached{};            ///< freed, and kept in caches
    bytes pending{};           ///< freed on streams that haven't reached the free
    bytes largest_free{};      ///< the largest block that can be had without emptying a cache or asking the upstream
    bytes peak_reserved{};     ///< the most that was ever held
    std::size_t segments = 0;  ///< ranges that are held

    bytes allocated{};              ///< of all allocations so far, as asked for
    std::uint64_t allocations = 0;  ///< so far
    std::uint64_t frees = 0;        ///< so far

    /// Held, but in no block, in no cache, and not waiting for a stream.
    [[nodiscard]] constexpr bytes free() const noexcept { return reserved - used - cached - pending; }
    /// The part of `used` that is rounding, 0 to 1.
    [[nodiscard]] constexpr double internal_fragmentation() const noexcept { return missing(requested, used); }
    /// Fragmentation: bytes held for each requested byte that is out, at least 1. The overhead is
    /// rounding, caches, idle segments, and gaps between small blocks. As in any allocator that
    /// moves nothing, no bound holds for every sequence of requests. There are no gaps if all
    /// blocks have one size, or once all are back and trim() was called; large blocks never make
    /// any. A test keeps the value below 1.5 in this setting: 256 long-lived blocks of 1 to 32 MiB
    /// are out among 64 short-lived ones of 256 B to 1 MiB (sizes log-uniform, one cache, default
    /// options), one of the former is replaced for each ten of the latter, and the first quarter of
    /// the run isn't counted. `memory.pool_fragmentation_max` (bench/README.md) measures it with
    /// such mixes. trim() gives back idle memory.
    [[nodiscard]] constexpr double held_over_live() const noexcept {
        return requested == bytes{} ? 1
                                    : static_cast<double>(reserved.count()) / static_cast<double>(requested.count());
    }
    /// The part of free() that lies outside of the largest free block, 0 to 1.
    [[nodiscard]] constexpr double external_fragmentation() const noexcept { return missing(largest_free, free()); }

private:
    static constexpr double missing(bytes part, bytes whole) noexcept {
        return whole == bytes{} ? 0 : 1 - static_cast<double>(part.count()) / static_cast<double>(whole.count());
    }
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
