// SPDX-License-Identifier: Apache-2.0
// Memory for a captured graph. A capturing stream must not ask the device for memory, and the
// graph's memory must stay its own as long as the graph may be launched. So the memory is set aside
// before the capture, and goes back after the graph is destroyed.
//
//   gpushare::private_pool graph_memory{pool, 64_MiB};
//   {
//       // if the captured stream has a cache: pool.make_cache(stream)
//       decltype(cache)::pause quiet{cache};
//       begin_capture(stream);
//       void* p = graph_memory.allocate(4_KiB, 256);      ...
//       graph_memory.deallocate(p, 4_KiB, 256);                             // reused inside
//       end_capture(stream);
//   }
//   ...                                                 // launch; destroy the graph, then graph_memory
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string_view>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/pool_fit.hpp>
#include <gpushare/memory/detail/pool_store.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A pool with try_allocate_held(), which asks neither an upstream nor a stream.
template <class P>
concept holding_resource = upstream<P> && requires(P& p, std::size_t size, std::size_t alignment) {
    // clang-format off
    { p.try_allocate_held(size, alignment) } noexcept -> std::same_as<void*>;
    // clang-format on
};

/// Memory of a pool that is set aside for a captured graph. Refers to `Pool`, which must outlive
/// it. Thread-safe. Frees are in the order of the captured work: the next allocation here may
/// return a freed block.
template <holding_resource Pool>
class private_pool {
public:
    /// Sets `reserve` aside, rounded up to 256 bytes, before the capture. Throws what the pool
    /// throws.
    private_pool(Pool& pool, bytes reserve) : pool_(&pool) {
        set_aside(reserve, [&](std::size_t size) { return pool.allocate(size, detail::pool_granule); });
    }
    /// The same, but waits as the pool does. Throws what the pool throws then.
    template <clock Clock>
    private_pool(Pool& pool, bytes reserve, const patience<Clock>& until) : pool_(&pool) {
        set_aside(reserve, [&](std::size_t size) { return pool.allocate(size, detail::pool_granule, until); });
    }
    private_pool(const private_pool&) = delete;
    private_pool& operator=(const private_pool&) = delete;
    /// Gives everything back to the pool, allocated blocks included. The graph must be gone.
    ~private_pool() {
        closes_.reset();
        close();
    }

    /// Throws memory_error: out_of_memory if neither the memory set aside nor that held by the pool
    /// suffices, or others wait; size_overflow, bad_alignment.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t)) {
        failure why;
        void* const p = try_allocate(size, alignment, &why);
        if (p == nullptr) throw memory_error(why, {}, "allocate for a captured graph");
        return p;
    }
    /// Null where `allocate` would throw. Asks neither the device nor a stream.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr) noexcept {
        const std::lock_guard lock(mutex_);
        failure unused;
        return take(size, alignment, why != nullptr ? *why : unused, waiters_.size() == 0);
    }
    /// As allocate, but waits, first come first served, until the deadline or stop request of
    /// `until`: for a block that comes back here and, every two milliseconds, for memory that the
    /// pool holds. Calls neither the device nor a stream. Throws memory_error: deadline_exceeded or
    /// stopped; immediately for a request that the pool could never grant.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until) {
        failure why;
        void* const p = try_allocate(size, alignment, until, &why);
        if (p == nullptr) throw memory_error(why, {}, "allocate for a captured graph");
        return p;
    }
    /// The same, null instead of an exception; `why`, if given, gets the reason.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr) noexcept {
        detail::pool_wait_entry place;
        const std::stop_callback on_stop(until.stop, [&] {
            const std::lock_guard lock(mutex_);
            place.woken.notify_one();
        });
        std::unique_lock lock(mutex_);
        failure refused;
        void* p = take(size, alignment, refused, waiters_.size() == 0);
        if (p == nullptr && refused.code == errc::out_of_memory)
            if (const failure never_fits = pool_->refuses(size, alignment); never_fits.code != errc::none)
                refused = never_fits;
        if (p == nullptr && refused.code == errc::out_of_memory) {
            waiters_.join(place);
            do {
                const auto now = until.time.now();
                if (until.stop.stop_requested()) {
                    refused.code = errc::stopped;
                } else if (now >= until.deadline) {
                    refused.code = errc::deadline_exceeded;
                } else {
                    const ns longest = waiters_.first(place) ? detail::look_slice : detail::longest_sleep;
                    place.woken.wait_for(lock, std::min(until.deadline, saturating_add(now, longest)) - now);
                    if (waiters_.first(place)) p = take(size, alignment, refused, true);
                }
            } while (p == nullptr && refused.code == errc::out_of_memory);
            waiters_.leave(place);
        }
        if (p == nullptr && why != nullptr) *why = refused;
        return p;
    }
    /// As pool_resource::deallocate: unknown_block or wrong_size changes nothing. Null is ignored.
    errc deallocate(void* p, byte_count size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        if (p == nullptr) return errc::none;
        const std::lock_guard lock(mutex_);
        if (closed_) return errc::closed;
        const auto freed = fit_.index().claim(p, size, alignment);
        if (freed.why != errc::none) return freed.why;
        fit_.give(*freed.block);
        waiters_.tell();
        return errc::none;
    }

    /// From now on everything is refused with errc::closed. All memory goes back to the pool,
    /// allocated blocks included, so no graph that uses them may be launched any more. Called when
    /// the pool closes.
    void close() noexcept {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        give_back();
        ranges_.clear();
        waiters_.tell_all();
    }

    /// The pool's answers; see pool_resource.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept {
        return pool_->charged(size, alignment);
    }
    /// See pool_resource::refuses.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        return pool_->refuses(size, alignment);
    }
    /// See pool_resource.
    [[nodiscard]] std::string_view owner() const noexcept { return pool_->owner(); }
    /// The pool's.
    [[nodiscard]] close_token closing() const noexcept { return pool_->closing(); }

    /// Bytes that are set aside, used or not.
    [[nodiscard]] bytes reserved() const noexcept {
        const std::lock_guard lock(mutex_);
        return closed_ ? bytes{} : bytes{reserved_};
    }
    /// Bytes in allocated blocks.
    [[nodiscard]] bytes used() const noexcept {
        const std::lock_guard lock(mutex_);
        return closed_ ? bytes{} : bytes{reserved_ - fit_.free_bytes()};
    }
    /// How many threads wait for memory.
    [[nodiscard]] std::size_t waiting() const noexcept { return waiters_.size(); }
    /// The largest free block, at a multiple of 256 bytes, of the memory that was set aside.
    [[nodiscard]] bytes largest_free() const noexcept {
        const std::lock_guard lock(mutex_);
        return closed_ ? bytes{} : bytes{fit_.largest_free()};
    }

private:
    struct range {
        void* begin = nullptr;
        std::size_t size = 0, alignment = 0;
    };

    template <class F>
    void set_aside(bytes reserve, F allocate) {
        if (detail::pool_tag::check(reserve.count(), 1) != errc::none)
            raise(detail::pool_tag::why(reserve.count(), 1), {}, "set aside memory for a captured graph");
        const auto size = static_cast<std::size_t>(detail::whole_granules(reserve.count()));
        add(allocate(size), size, detail::pool_granule);
        closes_.emplace(pool_->closing(), [this](instant) {
            close();
            return true;
        });
    }
    // Null, with the reason. If it isn't this thread's turn, as if there were no memory.
    [[nodiscard]] void* take(std::size_t size, std::size_t alignment, failure& why, bool its_turn) noexcept {
        fit_.index().drop_retired();  // no thread reads the index without the lock
        const errc code = closed_ ? errc::closed : detail::pool_tag::check(size, alignment);
        detail::pool_block* const b =
            code == errc::none && its_turn ? obtain(detail::whole_granules(size), alignment) : nullptr;
        if (b != nullptr) return b->hand_out(size, alignment, {});
        why = {code == errc::none ? errc::out_of_memory : code, size, fit_.free_bytes(), reserved_};
        return nullptr;
    }
    [[nodiscard]] detail::pool_block* obtain(std::uint64_t size, std::size_t alignment) noexcept {
        try {
            if (detail::pool_block* const b = fit_.take(size, alignment)) return b;
            if (detail::pool_block* const b = fit_.take_any(size, alignment)) return b;
            const auto unit = std::max(alignment, detail::pool_granule);
            void* const p = pool_->try_allocate_held(size, unit);
            if (p == nullptr) return nullptr;
            add(p, size, unit);
            return fit_.take_any(size, alignment);
        } catch (...) {  // the host has no memory for the bookkeeping
            return nullptr;
        }
    }
    void give_back() noexcept {
        for (const auto& r : ranges_) (void)pool_->deallocate(r.begin, r.size, r.alignment);
    }
    void add(void* p, std::size_t size, std::size_t alignment) {
        try {
            ranges_.reserve(ranges_.size() + 1);
            (void)fit_.add(static_cast<std::byte*>(p), size);
        } catch (...) {
            pool_->deallocate(p, size, alignment);
            throw;
        }
        ranges_.push_back({p, size, alignment});
        reserved_ += size;
    }

    Pool* pool_;
    mutable std::mutex mutex_;
    detail::pool_fit fit_;
    std::vector<range> ranges_;
    std::uint64_t reserved_ = 0;
    detail::pool_wait_queue waiters_;
    bool closed_ = false;
    std::optional<close_callback> closes_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
