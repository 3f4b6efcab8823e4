// SPDX-License-Identifier: Apache-2.0
// Says which memory goes with a tenant that is moved (move.hpp) or parked (park.hpp).
//
//   std::vector<gpushare::moving_block> blocks{{.at = weights, .size = 1 << 30}, {.part = 1, .at = cache, .size = 1 << 28}};
#pragma once

#include <cstddef>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A block of a tenant's memory that goes with it.
struct moving_block {
    std::size_t part = 0;         ///< which of the tenant's devices, from 0
    void* at = nullptr;           ///< where it is; once the tenant is elsewhere, where it is from now on
    std::size_t size = 0;         ///< as it was allocated, bytes
    std::size_t alignment = 256;  ///< likewise
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
