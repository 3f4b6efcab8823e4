// SPDX-License-Identifier: Apache-2.0
// A tenant's memory at addresses that never change: a range is reserved once, and physical chunks come and go under
// it. Growing moves no pointer; what is given up goes to another tenant without a copy and without fragmentation.
//
//   gpushare::chunk_pool pool{memory, stream, {.capacity = 512}};      // one per device
//   gpushare::virtual_arena cache{pool, chat_quota, tenant_tag{1}, 64_GiB, "chat"};
//   cache.commit(0_B, 256_MiB);                                        // cache.data() is good for 256 MiB now
//   cache.decommit(128_MiB, 128_MiB, std::array{stream.record()}, deadline);
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
#include <gpushare/memory/chunk_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/tenant_tag.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Offsets and sizes are multiples of the pool's chunk_size(). What is committed is charged to the quota, chunk by
/// chunk, until it is unmapped; addresses that are only reserved cost nothing.
///
/// All calls are safe from any thread. The `try_` ones tell why they failed, with errc::none for success, and never
/// throw; the others throw what gpushare::raise throws for it. Besides what they say: not_whole for offsets and sizes
/// that aren't whole chunks, size_overflow beyond the range, out_of_memory if the host has none for the bookkeeping.
template <virtual_memory Memory, scrubber Stream>
class virtual_arena {
public:
    using pool_type = chunk_pool<Memory, Stream>;  ///< what its chunks come from
    using point = typename pool_type::point;       ///< of the streams that use it

    /// Reserves `reserve` bytes of addresses. The pool must outlive the arena, the quota all that is charged to it (see
    /// close()); `owner` names the tenant in error messages and must outlive the arena.
    /// Throws what Memory::reserve answers: operation_error (not_whole), memory_error.
    virtual_arena(pool_type& pool, quota& limit, tenant_tag tenant, bytes reserve, std::string_view owner = {})
        : pool_(&pool), owner_(owner), space_(pool.chunks_.open(tenant, limit, checked(pool, reserve))) {}
    virtual_arena(virtual_arena&&) noexcept = default;
    /// What this one had is closed.
    virtual_arena& operator=(virtual_arena&& other) noexcept {
        virtual_arena mine(std::move(other));
        std::swap(pool_, mine.pool_);
        std::swap(owner_, mine.owner_);
        std::swap(space_, mine.space_);
        return *this;
    }
    /// As close(), with no points: nothing may use the arena any more but what waits for the points of decommit_after()
    /// or close().
    ~virtual_arena() {
        if (space_ != nullptr) (void)pool_->chunks_.close(space_, {});
    }

    /// The first address, the same for life.
    [[nodiscard]] void* data() const noexcept { return space_->addresses.data(); }
    /// Bytes of addresses.
    [[nodiscard]] bytes reserved() const noexcept { return chunks(space_->slots.size()); }
    /// Bytes that can be used.
    [[nodiscard]] bytes committed() const noexcept { return chunks(pool_->chunks_.mapped(*space_)); }
    /// Bytes that were given up, are still mapped and charged, and must not be used.
    [[nodiscard]] bytes leaving() const noexcept { return chunks(pool_->chunks_.leaving(*space_)); }

    /// Puts memory behind [offset, offset + size): all that is missing, or nothing. What is there stays as it is, also
    /// what was about to leave. New memory holds what this tenant once left there, or zeros, or anything where nothing
    /// is scrubbed: never what another tenant wrote.
    /// If memory is being scrubbed or about to leave, waits for it until `deadline`; by default it doesn't.
    /// over_quota, out_of_memory (the pool, the device, or burst of the quota); deadline_exceeded (enough is free, but
    /// not scrubbed yet: goes on meanwhile, ask again); closed; kernel_failed, device_lost or submission_failed (the
    /// scrubbing).
    failure try_commit(bytes offset, bytes size, instant deadline = {}) noexcept {
        return within(offset, size, [&](std::size_t first, std::size_t count) {
            return pool_->chunks_.commit(space_, first, count, deadline);
        });
    }
    /// Throws where try_commit() answers.
    void commit(bytes offset, bytes size, instant deadline = {}) {
        check(try_commit(offset, size, deadline), "commit");
    }

    /// Takes the memory away from [offset, offset + size), once every point is reached: those of all streams that use
    /// it. deadline_exceeded, and nothing has happened, if they aren't by the deadline; unknown_block if not all of it
    /// is committed; device_lost and the like where it can't be unmapped.
    failure try_decommit(bytes offset, bytes size, std::span<const point> points, instant deadline = never) noexcept {
        return within(offset, size, [&](std::size_t first, std::size_t count) {
            return pool_->chunks_.decommit(*space_, first, count, points, deadline);
        });
    }
    /// Throws where try_decommit() answers.
    void decommit(bytes offset, bytes size, std::span<const point> points, instant deadline = never) {
        check(try_decommit(offset, size, points, deadline), "decommit");
    }

    /// The same without waiting: nothing but the work before the points may use it any more. It leaves, and is credited,
    /// when the points are reached and somebody commits, or calls collect() of the pool.
    failure try_decommit_after(bytes offset, bytes size, std::span<const point> points) noexcept {
        return within(offset, size, [&](std::size_t first, std::size_t count) {
            return pool_->chunks_.decommit_after(space_, first, count, points);
        });
    }
    /// Throws where try_decommit_after() answers.
    void decommit_after(bytes offset, bytes size, std::span<const point> points) {
        check(try_decommit_after(offset, size, points), "decommit");
    }

    /// Gives `size` bytes at `offset` to another arena of the same pool, to stand at `to_offset`: waits for the points,
    /// has them scrubbed if they change hands (by the pool's policy), and maps them there. Contents arrive where
    /// nothing is scrubbed: between arenas of one tenant, or under scrub_policy::off.
    /// deadline_exceeded before the points are reached, unknown_block, the refusals of the other's quota, and
    /// invalid_specification if something is at its place already, or for another pool: nothing has happened. If it
    /// fails later (the deadline comes while it is scrubbed; closed; a lost device; somebody else takes burst that was
    /// to change hands), the bytes are free in the pool.
    failure try_hand_over(bytes offset, bytes size, virtual_arena& to, bytes to_offset, std::span<const point> points,
                          instant deadline = never) noexcept {
        if (to.pool_ != pool_) return {errc::invalid_specification};
        return within(offset, size, [&](std::size_t first, std::size_t count) {
            return to.within(to_offset, size, [&](std::size_t to_first, std::size_t) {
                return pool_->chunks_.hand_over(*space_, first, to.space_, to_first, count, points, deadline);
            });
        });
    }
    /// Throws where try_hand_over() answers.
    void hand_over(bytes offset, bytes size, virtual_arena& to, bytes to_offset, std::span<const point> points,
                   instant deadline = never) {
        check(try_hand_over(offset, size, to, to_offset, points, deadline), "hand over");
    }

    /// Gives everything up once the points are reached, for good; never blocks. errc::closed from the second time on.
    /// The quota may go when leaving() and committed() are zero. An arena closes by itself when its quota does.
    failure close(std::span<const point> points = {}) noexcept {
        try {
            return {pool_->chunks_.close(space_, {points.begin(), points.end()})};
        } catch (const std::bad_alloc&) {
            return {errc::out_of_memory};
        }
    }

private:
    static std::size_t checked(const pool_type& pool, bytes size) {
        if (size == bytes{} || size % pool.chunk_size() != bytes{})
            raise({.code = errc::not_whole, .asked = size.count(), .limit = pool.chunk_size().count()}, {},
                  "reserving addresses");
        return static_cast<std::size_t>(size / pool.chunk_size());
    }

    template <class F>
    failure within(bytes offset, bytes size, F f) noexcept {
        const bytes unit = pool_->chunk_size();
        if (offset % unit != bytes{} || size % unit != bytes{})
            return {.code = errc::not_whole, .asked = size.count(), .limit = unit.count()};
        if (size > reserved() || offset > reserved() - size)
            return {.code = errc::size_overflow,
                    .asked = size.count(),
                    .left = (reserved() - offset).count(),
                    .limit = reserved().count()};
        if (size == bytes{}) return {};
        try {
            return f(static_cast<std::size_t>(offset / unit), static_cast<std::size_t>(size / unit));
        } catch (const error& e) {  // points of several nodes
            return e.figures();
        } catch (...) {
            return {.code = errc::out_of_memory, .asked = size.count()};
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
