// SPDX-License-Identifier: Apache-2.0
// What a chunk pool is made with, and what it says of itself.
//
//   gpushare::chunk_pool pool{memory, stream, {.capacity = 512}};
//   const gpushare::chunk_pool_usage u = pool.usage();      // u.mapped of u.made, of u.capacity
#pragma once

#include <cstddef>

#include <gpushare/config.hpp>
#include <gpushare/memory/scrub.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a chunk_pool.
struct chunk_pool_options {
    std::size_t capacity = 0;                         ///< chunks at the most
    std::size_t initial = 0;                          ///< of these, made at once; others are made when they are needed
    scrub_policy scrub = scrub_policy::on_hand_over;  ///< when a chunk is overwritten
    std::size_t window = 16;                          ///< chunks that are scrubbed at a time, 1 or more
};

/// A reading of a pool, in chunks; consistent.
struct chunk_pool_usage {
    std::size_t capacity = 0;   ///< the most there can be
    std::size_t made = 0;       ///< of the capacity
    std::size_t mapped = 0;     ///< of these, in arenas, with those that wait for a stream before they leave
    std::size_t leaving = 0;    ///< of the mapped ones, those that wait
    std::size_t clean = 0;      ///< free, and anybody's at once
    std::size_t dirty = 0;      ///< free, but to be scrubbed for all but the last owner, if that is still there
    std::size_t scrubbing = 0;  ///< free once that is done
};

/// What one tenant has of a chunk_pool, in chunks.
struct chunk_usage {
    std::size_t out = 0;   ///< taken and not given back
    std::size_t kept = 0;  ///< free, and to be had without scrubbing, by this tenant
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
