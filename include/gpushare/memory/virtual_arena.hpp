// SPDX-License-Identifier: Apache-2.0
// A tenant's memory at addresses that never change. An arena reserves an address range once, and
// then maps physical chunks into it and unmaps them. Growing moves no pointer, and chunks that an
// arena gives up go to another tenant without a copy.
//
//   // one per device: 1 GiB of 2 MiB chunks
//   gpushare::chunk_pool pool{memory, stream, {.capacity = 512}};
//   gpushare::virtual_arena cache{pool, chat_quota, gpushare::tenant_tag{1}, 64_GiB, "chat"};
//   cache.commit(0_B, 256_MiB);  // 256 MiB at cache.data() can be used
//   cache.decommit(128_MiB, 128_MiB, std::array{stream.record()}, deadline);
//   pool.collect();  // whenever convenient: never blocks
//   const auto chunks = pool.usage();  // chunks that are mapped, free, leaving
//
// The arenas of a device share its chunks. There is no fragmentation, since any chunk fits any
// place. The pool hands a chunk to another tenant only when no stream uses the chunk any more and
// its data has been scrubbed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/arena_chunks.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
template <virtual_memory Memory, scrubber Stream>
class virtual_arena;

/// The chunks that the arenas of a device share. Thread-safe: no lock of the pool is held while the
/// driver maps or unmaps chunks of an arena, nor while a thread waits for a stream. Calls for the
/// same arena wait for each other. A call for another arena waits for them only if it finds memory
/// of the first arena to take back, or is about to be refused. `stream` scrubs, and has the same
/// type of points as the streams that use the arenas. Memory and stream must outlive the pool, and
/// the pool the arenas. A quota must live until all bytes that were charged to it are back, or
/// until it is closed (quota::close). Free chunks are charged to no quota. If the device lacks
/// memory for a request that its quota allows, and that quota is in the tree of an arena's quota,
/// free chunks go back to the device.
template <virtual_memory Memory, scrubber Stream>
class chunk_pool {
public:
    /// The point that `Stream` records.
    using point = typename Stream::point;

    /// Throws memory_error (out_of_memory) if the device doesn't have `options.initial` chunks,
    /// operation_error (invalid_specification) for options that contradict each other.
    chunk_pool(Memory& memory, Stream& stream, const chunk_pool_options& options) : chunks_(memory, stream, options) {}
    chunk_pool(const chunk_pool&) = delete;
    chunk_pool& operator=(const chunk_pool&) = delete;
    /// Waits without limit for chunks that a stream still uses, because giving chunks back under a
    /// running kernel would be worse. Call drain() first to bound the wait.
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
    /// Waits for all chunks that are leaving or being scrubbed. False if some are left at the
    /// deadline or can't be unmapped (a lost device).
    bool drain(instant deadline) { return chunks_.drain(deadline); }
    /// Begins to scrub up to `most` free chunks before a tenant requests them, as many as `window`
    /// has room for. Returns how many. Call it when the device is idle, and collect() later.
    std::size_t scrub_ahead(std::size_t most) noexcept { return chunks_.scrub_ahead(most); }
    /// Gives free chunks back to the device until `keep` are left free. Returns how many.
    std::size_t trim(std::size_t keep) noexcept { return chunks_.trim(keep); }

private:
    friend virtual_arena<Memory, Stream>;

    detail::arena_chunks<Memory, Stream> chunks_;
};

/// A part of an arena.
struct arena_range {
    bytes offset{};  ///< from the first address of the arena
    bytes size{};    ///< the length of the part
};

/// A tenant's reserved address range, with chunks mapped into parts of it. Offsets and sizes are
/// multiples of the pool's chunk_size(). Committed chunks are charged to the quota one by one until
/// they are unmapped; addresses that are only reserved cost nothing.
///
/// All calls are safe from any thread. The `try_` calls never throw: they return the failure, or
/// errc::none for success. The other calls throw that failure with gpushare::raise. Besides the
/// errors listed at each: not_whole for offsets and sizes that aren't whole chunks, size_overflow
/// beyond the range, out_of_memory if the host has no memory for the bookkeeping.
template <virtual_memory Memory, scrubber Stream>
class virtual_arena {
public:
    using pool_type = chunk_pool<Memory, Stream>;  ///< the pool of its chunks
    using point = typename pool_type::point;       ///< the point of the streams that use the arena

    /// Reserves `reserve` bytes of addresses. The pool must outlive the arena, and the quota
    /// everything that is charged to it (see close()). `owner` names the tenant in error messages
    /// and must outlive the arena. Throws what Memory::reserve answers: operation_error
    /// (not_whole), memory_error.
    virtual_arena(pool_type& pool, quota& limit, tenant_tag tenant, bytes reserve, std::string_view owner = {})
        : pool_(&pool), owner_(owner), space_(pool.chunks_.open(tenant, limit, checked(pool, reserve))) {}
    virtual_arena(virtual_arena&&) noexcept = default;
    /// Closes its own arena, and takes over the other's.
    virtual_arena& operator=(virtual_arena&& other) noexcept {
        virtual_arena mine(std::move(other));
        std::swap(pool_, mine.pool_);
        std::swap(owner_, mine.owner_);
        std::swap(space_, mine.space_);
        return *this;
    }
    /// Works as close() without points. Only work before the points given to decommit_after() or
    /// close() may still use the arena.
    ~virtual_arena() {
        if (space_ != nullptr) (void)pool_->chunks_.close(space_, {});
    }

    /// The first address, which never changes.
    [[nodiscard]] void* data() const noexcept { return space_->addresses.data(); }
    /// Bytes of addresses.
    [[nodiscard]] bytes reserved() const noexcept { return chunks(space_->slots.size()); }
    /// Bytes that can be used.
    [[nodiscard]] bytes committed() const noexcept { return chunks(pool_->chunks_.mapped(*space_)); }
    /// Bytes that were given up and must not be used, but are still mapped and charged.
    [[nodiscard]] bytes leaving() const noexcept { return chunks(pool_->chunks_.leaving(*space_)); }

    /// Maps memory to [offset, offset + size): everything that is missing, or nothing. Mapped
    /// chunks stay, and so do leaving ones. New memory holds zeros or data that this tenant once
    /// wrote to it, and never data of another tenant unless scrubbing is off. If the quota or the
    /// device lacks bytes, hooks are called (quota_wait.hpp). Waits until `deadline` for memory
    /// that is being scrubbed or leaving; by default it doesn't wait. Fails with over_quota;
    /// out_of_memory (the pool, the device, or burst of the quota); deadline_exceeded (enough is
    /// free, but not scrubbed yet: the scrubbing continues, try again); closed; kernel_failed,
    /// device_lost or submission_failed (the scrubbing).
    failure try_commit(bytes offset, bytes size, instant deadline = {}) noexcept {
        const arena_range one{offset, size};
        return try_commit(std::span(&one, 1), deadline);
    }
    /// Throws what try_commit() returns.
    void commit(bytes offset, bytes size, instant deadline = {}) {
        check(try_commit(offset, size, deadline), "commit");
    }

    /// As try_commit, but waits in the queue for bytes of the quota until the deadline or stop
    /// request of `until`, a patience (include memory/quota_wait.hpp). deadline_exceeded or
    /// stopped, with the figures of the last refusal.
    template <clock Clock>
    failure try_commit(bytes offset, bytes size, const patience<Clock>& until) noexcept {
        const arena_range one{offset, size};
        return try_commit(std::span(&one, 1), until);
    }
    /// Throws what try_commit() returns.
    template <clock Clock>
    void commit(bytes offset, bytes size, const patience<Clock>& until) {
        check(try_commit(offset, size, until), "commit");
    }
    /// The old name of commit() with a patience. 0.3 removes it.
    template <class... Args>
    requires(detail::is_patience<Args> || ...)
        [[deprecated("use commit with a patience")]] void commit_until(const Args&... args) {
        commit(args...);
    }

    /// As try_commit, for several ranges: maps everything that is missing in all of them, or
    /// nothing. So the lanes of a cache grow together. invalid_specification if the ranges overlap,
    /// or aren't in ascending order.
    failure try_commit(std::span<const arena_range> ranges, instant deadline = {}) noexcept {
        return within(ranges, [&](auto runs) { return pool_->chunks_.commit(space_, runs, deadline); });
    }
    /// Throws what try_commit() returns.
    void commit(std::span<const arena_range> ranges, instant deadline = {}) {
        check(try_commit(ranges, deadline), "commit");
    }
    /// As try_commit of several ranges, but waits in the queue as try_commit of one range does.
    template <clock Clock>
    failure try_commit(std::span<const arena_range> ranges, const patience<Clock>& until) noexcept {
        return within(ranges, [&](auto runs) { return pool_->chunks_.commit(space_, runs, until); });
    }

    /// Unmaps [offset, offset + size) once all `points` are reached, one for each stream that uses
    /// it. deadline_exceeded if they aren't reached by the deadline, and then nothing has happened;
    /// unknown_block if not all of it is committed; device_lost and the like if it can't be
    /// unmapped.
    failure try_decommit(bytes offset, bytes size, std::span<const point> points, instant deadline = never) noexcept {
        return within(offset, size, [&](std::size_t first, std::size_t count) {
            return pool_->chunks_.decommit(*space_, first, count, points, deadline);
        });
    }
    /// Throws what try_decommit() returns.
    void decommit(bytes offset, bytes size, std::span<const point> points, instant deadline = never) {
        check(try_decommit(offset, size, points, deadline), "decommit");
    }

    /// As try_decommit(), without waiting: only work before the points may still use the memory.
    /// The pool unmaps and credits the memory when the points are reached and a thread commits or
    /// calls the pool's collect().
    failure try_decommit_after(bytes offset, bytes size, std::span<const point> points) noexcept {
        return within(offset, size, [&](std::size_t first, std::size_t count) {
            return pool_->chunks_.decommit_after(space_, first, count, points);
        });
    }
    /// Throws what try_decommit_after() returns.
    void decommit_after(bytes offset, bytes size, std::span<const point> points) {
        check(try_decommit_after(offset, size, points), "decommit");
    }

    /// Moves `size` bytes at `offset` to `to_offset` of another arena of the same pool: waits for
    /// the points, scrubs the chunks if the tenant changes (by the pool's policy), and maps them
    /// there. Contents are kept between arenas of one tenant, or under scrub_policy::off. Nothing
    /// has happened on deadline_exceeded before the points are reached, on unknown_block, on
    /// refusals of the other arena's quota, and on invalid_specification (memory is mapped there
    /// already, or another pool). If it fails later (the deadline comes during scrubbing; closed; a
    /// lost device; another tenant borrows the burst meanwhile), the chunks are free in the pool.
    failure try_hand_over(bytes offset, bytes size, virtual_arena& to, bytes to_offset, std::span<const point> points,
                          instant deadline = never) noexcept {
        if (to.pool_ != pool_) return {.code = errc::invalid_specification, .because = reason::other_pool};
        return within(offset, size, [&](std::size_t first, std::size_t count) {
            return to.within(to_offset, size, [&](std::size_t to_first, std::size_t) {
                return pool_->chunks_.hand_over(*space_, first, to.space_, to_first, count, points, deadline);
            });
        });
    }
    /// Throws what try_hand_over() returns.
    void hand_over(bytes offset, bytes size, virtual_arena& to, bytes to_offset, std::span<const point> points,
                   instant deadline = never) {
        check(try_hand_over(offset, size, to, to_offset, points, deadline), "hand over");
    }

    /// Gives up all memory for good once the points are reached. Never blocks. errc::closed from
    /// the second call on. The quota may be destroyed when leaving() and committed() are zero. An
    /// arena closes by itself when its quota closes.
    failure close(std::span<const point> points = {}) noexcept {
        try {
            return {pool_->chunks_.close(space_, {points.begin(), points.end()})};
        } catch (const std::bad_alloc&) {
            return detail::no_host_memory;
        }
    }

private:
    static std::size_t checked(const pool_type& pool, bytes size) {
        if (size == bytes{} || size % pool.chunk_size() != bytes{})
            raise({.code = errc::not_whole,
                   .asked = size.count(),
                   .limit = pool.chunk_size().count(),
                   .because = reason::whole_sizes},
                  {}, "reserving addresses");
        return static_cast<std::size_t>(size / pool.chunk_size());
    }

    template <class F>
    failure within(bytes offset, bytes size, F f) noexcept {
        const bytes unit = pool_->chunk_size();
        if (offset % unit != bytes{} || size % unit != bytes{})
            return {.code = errc::not_whole,
                    .asked = (offset % unit != bytes{} ? offset : size).count(),
                    .limit = unit.count(),
                    .because = reason::whole_sizes};
        if (size > reserved() || offset > reserved() - size)
            return {.code = errc::size_overflow,
                    .asked = size.count(),
                    .left = (reserved() - offset).count(),
                    .limit = reserved().count(),
                    .because = reason::beyond_arena};
        if (size == bytes{}) return {};
        try {
            return f(static_cast<std::size_t>(offset / unit), static_cast<std::size_t>(size / unit));
        } catch (const error& e) {  // points of several nodes
            return e.figures();
        } catch (...) {
            return detail::no_host_memory;
        }
    }

    template <class F>
    failure within(std::span<const arena_range> ranges, F f) noexcept {
        try {
            std::vector<detail::slot_run> runs;
            runs.reserve(ranges.size());
            for (const auto& r : ranges) {
                failure why = within(r.offset, r.size, [&](std::size_t first, std::size_t count) -> failure {
                    if (!runs.empty() && first < runs.back().end())
                        return {.code = errc::invalid_specification, .because = reason::occupied};
                    runs.push_back({first, count});
                    return {};
                });
                if (why.code != errc::none) return why;
            }
            return runs.empty() ? failure{} : f(std::span<const detail::slot_run>(runs));
        } catch (const error& e) {  // points of several nodes
            return e.figures();
        } catch (...) {
            return detail::no_host_memory;
        }
    }

    void check(const failure& why, std::string_view what) const {
        if (why.code != errc::none) raise(why, owner_, what);
    }
    [[nodiscard]] bytes chunks(std::size_t n) const noexcept { return pool_->chunk_size() * n; }

    pool_type* pool_;
    std::string_view owner_;
    std::shared_ptr<typename detail::arena_chunks<Memory, Stream>::space> space_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
