// SPDX-License-Identifier: Apache-2.0
// Figures of quotas, pools and resources about memory: plain values, each of one moment.
//
//   const gpushare::quota_usage q{.current = 3_GiB, .peak = 5_GiB};  // usage() of a quota
//   const gpushare::pool_usage p{.reserved = 64_MiB, .used = 40_MiB};  // of a pool_resource
//   log(p.reserved, p.used, p.external_fragmentation());
//   // of a chunk_pool
//   const gpushare::chunk_pool_usage c{.capacity = 512, .made = 100, .mapped = 80};
//   // statistics() of a resource
//   const gpushare::memory_statistics s{.current = 4096_B, .peak = 1_MiB};
//   // an allocation: find() of a block_table
//   const gpushare::block kept{at, 4096_B, 256, "kv-cache"};
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A reading of a quota. Bytes are consistent with each other; counts are exact while no call is
/// under way and may lag by a few dozen otherwise.
struct quota_usage {
    bytes guaranteed{};  ///< set aside
    bytes burst{};       ///< lent by the parent, at most
    /// charged now; above guaranteed + burst only after a resize below it
    bytes current{};
    bytes peak{};                ///< the most that was ever charged
    bytes borrowed{};            ///< held from the parent beyond the guarantee
    std::uint64_t charges = 0;   ///< calls; children's loans count too
    std::uint64_t releases = 0;  ///< calls; children's returns count too
    std::uint64_t refusals = 0;  ///< refused charges, new tries for waiters included
    std::uint32_t waiting = 0;   ///< requests that wait, in the whole tree

    /// The most that may be charged.
    [[nodiscard]] constexpr bytes limit() const noexcept { return guaranteed + burst; }
};

/// The request that a quota_hook gets.
struct reclaim_request {
    /// how many bytes to free at most; for a borrower, at most the bytes that it has borrowed
    bytes missing{};
    instant until = instant::min();  ///< the request's deadline, of its own clock; min(): no wait
    /// a request of its own quota or one below; false: a neighbour's
    bool own = true;
    bool below = false;  ///< the quota has the bytes, but the memory below it doesn't
};

/// How a wait for bytes of a quota stands.
enum class claim_state : std::uint8_t {
    waiting,  ///< in the queue
    granted,  ///< the bytes are charged
    refused   ///< no release could make it fit: its quota, or one above, is too small
};

/// A reading of a pool. `requested` and the counts are exact while no call is under way; the other
/// figures always are.
struct pool_usage {
    bytes reserved{};   ///< held from the upstream: what a quota below the pool counts
    bytes used{};       ///< in allocated blocks
    bytes requested{};  ///< of these, what the callers asked for; the rest is rounding
    bytes cached{};     ///< freed, and kept in caches
    bytes pending{};    ///< freed on streams that haven't reached the free
    /// the largest block available without emptying a cache or asking the upstream
    bytes largest_free{};
    bytes peak_reserved{};     ///< the most that was ever held
    std::size_t segments = 0;  ///< ranges that are held

    bytes allocated{};              ///< bytes of all allocations so far, as requested
    std::uint64_t allocations = 0;  ///< allocations so far
    std::uint64_t frees = 0;        ///< frees so far

    /// Bytes held that are in no block, in no cache, and not waiting for a stream.
    [[nodiscard]] constexpr bytes free() const noexcept { return reserved - used - cached - pending; }
    /// The part of `used` that is rounding, 0 to 1.
    [[nodiscard]] constexpr double internal_fragmentation() const noexcept { return missing(requested, used); }
    /// Fragmentation: bytes held for each requested byte that is allocated, at least 1. The
    /// overhead is rounding, caches, idle segments, and gaps between small blocks. As in any
    /// allocator that moves nothing, no bound holds for every sequence of requests. There are no
    /// gaps if all blocks have one size, or once all are back and trim() was called; large blocks
    /// never make any. A test keeps the value below 1.5 in this setting: 256 long-lived blocks of 1
    /// to 32 MiB are mixed with 64 short-lived blocks of 256 B to 1 MiB (sizes log-uniform, one
    /// cache, default options). One long-lived block is replaced for each ten short-lived blocks.
    /// The first quarter of the run isn't counted. `memory.pool_fragmentation_max`
    /// (bench/README.md) measures it with such mixes. trim() gives back idle memory.
    [[nodiscard]] constexpr double held_over_live() const noexcept {
        return requested == bytes{} ? 1
                                    : static_cast<double>(reserved.count()) / static_cast<double>(requested.count());
    }
    /// The part of free() that is outside the largest free block, 0 to 1.
    [[nodiscard]] constexpr double external_fragmentation() const noexcept { return missing(largest_free, free()); }

private:
    static constexpr double missing(bytes part, bytes whole) noexcept {
        return whole == bytes{} ? 0 : 1 - static_cast<double>(part.count()) / static_cast<double>(whole.count());
    }
};

/// Statistics of an allocator or of a scope. The figures are consistent with each other. Those of a
/// scope include the scopes in it.
struct memory_statistics {
    bytes current{};                ///< allocated and not freed
    bytes peak{};                   ///< the most that was allocated at once
    bytes total{};                  ///< bytes of all allocations so far
    bytes largest{};                ///< the largest of them
    std::uint64_t allocations = 0;  ///< granted so far
    std::uint64_t frees = 0;        ///< frees so far
    std::uint64_t failures = 0;     ///< allocations that were refused
    /// the largest block that the upstream could give now; see statistics_resource::statistics
    bytes largest_free{};
};

/// A reading of a pool, in chunks; consistent.
struct chunk_pool_usage {
    std::size_t capacity = 0;   ///< the most there can be
    std::size_t made = 0;       ///< chunks that exist now
    std::size_t mapped = 0;     ///< of these, the chunks in arenas, including the leaving ones
    std::size_t leaving = 0;    ///< of the mapped ones, those given up that a stream may still use
    std::size_t clean = 0;      ///< free, for any tenant immediately
    std::size_t dirty = 0;      ///< free, but scrubbed first for any tenant but the last owner
    std::size_t scrubbing = 0;  ///< being overwritten; free after that
};

/// One tenant's usage of a chunk_pool, in chunks.
struct chunk_usage {
    std::size_t out = 0;   ///< taken and not given back
    std::size_t kept = 0;  ///< free, and this tenant can have them without scrubbing
};

/// Writes the return addresses of its callers, the nearest first, and returns how many.
using trace_function = std::size_t (*)(std::span<void*>) noexcept;

/// One allocation. The label is the caller's text and must outlive the block (a literal, usually).
struct block {
    void* pointer = nullptr;    ///< where it begins
    bytes size{};               ///< as requested
    std::size_t alignment = 0;  ///< as requested, in bytes
    std::string_view label{};   ///< what the block is for
};

/// A block that hasn't been freed, and where it came from.
struct leak {
    block what{};  ///< the block
    /// "engine/prefill": empty for the whole, and where there are no scopes
    std::string scope{};
    std::vector<void*> trace{};  ///< return addresses, if requested
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
