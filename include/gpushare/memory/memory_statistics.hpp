// SPDX-License-Identifier: Apache-2.0
// What a resource did for those who asked it: bytes that are out, their peak and total, counts.
//
//   const gpushare::memory_statistics s = resource.statistics();      // see statistics_resource.hpp
#pragma once

#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Consistent with each other. A scope's count those of the scopes in it.
struct memory_statistics {
    bytes current{};                ///< out now
    bytes peak{};                   ///< the most that was out at once
    bytes total{};                  ///< of all allocations so far
    bytes largest{};                ///< the largest of them
    std::uint64_t allocations = 0;  ///< granted so far
    std::uint64_t frees = 0;        ///< so far
    std::uint64_t failures = 0;     ///< allocations that were refused
    bytes largest_free{};           ///< filled in by who knows the memory: see statistics_resource::statistics
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
