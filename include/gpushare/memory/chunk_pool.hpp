// SPDX-License-Identifier: Apache-2.0
// The physical memory of a device that virtual arenas share: chunks go from tenant to tenant without a copy and without
// fragmentation, since any chunk fits any place. A chunk is handed to another tenant only when no stream uses it any
// more and its data has been scrubbed.
//
//   gpushare::chunk_pool pool{memory, stream, {.capacity = 512}};        // 1 GiB of 2 MiB chunks
//   pool.collect();                                                      // whenever convenient: never blocks
//   const auto chunks = pool.usage();                                    // chunks that are mapped, free, leaving
#pragma once

#include <cstddef>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/memory/chunk_usage.hpp>
#include <gpushare/memory/detail/arena_chunks.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/tenant_tag.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
template <virtual_memory Memory, scrubber Stream>
class virtual_arena;

/// The chunks that the arenas of a device share. Thread-safe: no lock of the pool's is held while
/// the driver maps or unmaps chunks of an arena, nor while a thread waits for a stream. Calls for
/// the same arena wait for each other; one for another arena waits for them only where it finds
/// that something of that arena is to be taken back, or is about to be refused. `stream` scrubs;
/// its points are those of the streams that use the arenas. Memory and stream must outlive the
/// pool, and the pool the arenas; a quota must live until all that was charged to it is back, or
/// until it is closed (quota::close). Free chunks are charged to nobody. They go back to the device
/// when it lacks memory for a request that its quota allows, if that quota is in the tree of an
/// arena's quota.
template <virtual_memory Memory, scrubber Stream>
class chunk_pool {
public:
    /// The point that `Stream` records.
    using point = typename Stream::point;

    /// Throws memory_error (out_of_memory) if the device hasn't `options.initial` chunks, operation_error
    /// (invalid_specification) for options that contradict each other.
    chunk_pool(Memory& memory, Stream& stream, const chunk_pool_options& options) : chunks_(memory, stream, options) {}
    chunk_pool(const chunk_pool&) = delete;
    chunk_pool& operator=(const chunk_pool&) = delete;
    /// Waits without limit for chunks that a stream still uses, since giving them back under a running kernel would be
    /// worse. Call drain() first to bound the wait.
    ~chunk_pool() = default;

    /// Bytes of a chunk.
    [[nodiscard]] bytes chunk_size() const noexcept { return chunks_.chunk_size(); }
    /// A reading, in chunks.
    [[nodiscard]] chunk_pool_usage usage() const noexcept { return chunks_.usage(); }
    /// One tenant's usage of the pool.
    [[nodiscard]] chunk_usage usage(tenant_tag tenant) const noexcept { return chunks_.usage(tenant); }

    /// Takes back chunks that arenas gave up and whose points are reached, and scrubbed chunks.
    /// True if there were any. Never blocks on a stream.
    bool collect() noexcept { return chunks_.collect(); }
    /// Waits for all chunks that are leaving or being scrubbed. False if some are left at the deadline or can't be
    /// unmapped (a lost device).
    bool drain(instant deadline) { return chunks_.drain(deadline); }
    /// Begins to scrub up to `most` free chunks before anybody asks for them, as many as `window` has room for. Returns
    /// how many. Call it when the device is idle, and collect() later.
    std::size_t scrub_ahead(std::size_t most) noexcept { return chunks_.scrub_ahead(most); }
    /// Gives free chunks back to the device until `keep` are left free. Returns how many.
    std::size_t trim(std::size_t keep) noexcept { return chunks_.trim(keep); }

private:
    friend virtual_arena<Memory, Stream>;

    detail::arena_chunks<Memory, Stream> chunks_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
