// SPDX-License-Identifier: Apache-2.0
// Options and figures of a chunk pool.
//
//   const gpushare::chunk_pool_options half{.capacity = 512};                      // 1 GiB of 2 MiB chunks
//   const gpushare::chunk_pool_usage u{.capacity = 512, .made = 100, .mapped = 80};   // usage() of a chunk_pool returns one
#pragma once

#include <cstddef>

#include <gpushare/config.hpp>
#include <gpushare/memory/scrub.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a chunk_pool.
struct chunk_pool_options {
    std::size_t capacity = 0;                         ///< chunks at the most
    std::size_t initial = 0;                          ///< of these, made by the constructor, not on demand
    scrub_policy scrub = scrub_policy::on_hand_over;  ///< when a chunk is overwritten
    std::size_t window = 16;                          ///< chunks that are scrubbed at a time, 1 or more
};

/// A reading of a pool, in chunks; consistent.
struct chunk_pool_usage {
    std::size_t capacity = 0;   ///< the most there can be
    std::size_t made = 0;       ///< of the capacity
    std::size_t mapped = 0;     ///< of these, in arenas, the leaving ones included
    std::size_t leaving = 0;    ///< of the mapped ones: given up, but a stream may still use them
    std::size_t clean = 0;      ///< free, for any tenant at once
    std::size_t dirty = 0;      ///< free, but scrubbed first for any tenant but the last owner
    std::size_t scrubbing = 0;  ///< being overwritten; free after that
};

/// One tenant's usage of a chunk_pool, in chunks.
struct chunk_usage {
    std::size_t out = 0;   ///< taken and not given back
    std::size_t kept = 0;  ///< free, and this tenant can have them without scrubbing
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
