// SPDX-License-Identifier: Apache-2.0
// Allocation statistics of a resource: bytes out now, at the peak and in total, and counts of
// calls.
//
//   const gpushare::memory_statistics s{.current = 4096_B, .peak = 1_MiB};      // statistics() of a resource returns one
#pragma once

#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The figures are consistent with each other. Those of a scope include the scopes in it.
struct memory_statistics {
    bytes current{};                ///< allocated and not freed
    bytes peak{};                   ///< the most that was out at once
    bytes total{};                  ///< of all allocations so far
    bytes largest{};                ///< the largest of them
    std::uint64_t allocations = 0;  ///< granted so far
    std::uint64_t frees = 0;        ///< so far
    std::uint64_t failures = 0;     ///< allocations that were refused
    bytes largest_free{};           ///< what the upstream could give now; see statistics_resource::statistics
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
