// SPDX-License-Identifier: Apache-2.0
// Frees in stream order: while kernels may still use a freed block, the block stays charged and
// isn't reused. The block goes back to its resource once the stream has reached the point that was
// recorded for the free.
//
//   gpushare::deferred_frees<gpushare::host::point, resource> frees{mine};      // mine: a resource
//   frees.add(stream.record(), p, 4096, 256);
//   frees.collect();      // before an allocation is refused, and whenever convenient: never blocks
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Frees that wait for streams. Refers to `Resource`, which must outlive it. Thread-safe; the
/// resource is called, and points are destroyed, under no lock. The destructor doesn't free pending
/// blocks: drain() first.
template <timeline_point Point, memory_resource Resource>
class deferred_frees {
public:
    /// Frees into `resource`.
    explicit deferred_frees(Resource& resource) noexcept : resource_(&resource) {}

    /// Frees the block once `point` is reached, and then calls `note`. If the host has no memory to
    /// remember the block, waits for the point instead. Returns false, and nothing has happened, if
    /// that wait fails, or if the point is reached and the resource doesn't take the block back
    /// now. Try again later.
    bool add(const Point& point, void* p, std::size_t size, std::size_t alignment,
             const when_back& note = {}) noexcept {
        if (!point.reached()) {
            try {
                const std::lock_guard lock(mutex_);
                entry& e = made_.acquire();
                e.point = point;
                e.pointer = p;
                e.size = size;
                e.alignment = alignment;
                e.note = note;
                e.refused = false;
                pending_.push(e);
                bytes_ += bytes{size};
                return true;
            } catch (...) {
            }
            if (!detail::await(point)) return false;
        }
        return give_back(p, size, alignment, note);
    }

    /// Frees the blocks whose points are reached, and returns how many. Never blocks on a stream.
    /// Asks every pending point once, however many are reached. A block that the resource doesn't
    /// take back now stays pending: the next call tries again.
    std::size_t collect() noexcept {
        detail::fifo<entry> reached = take_reached(), gone, refused;
        if (reached.empty()) return 0;
        std::size_t count = 0;
        while (entry* const e = reached.pop()) {
            if (!give_back(e->pointer, e->size, e->alignment, e->note)) {
                refused.push(*e);
                continue;
            }
            e->point = Point{};
            gone.push(*e);
            ++count;
            // release: a thread that sees the count sees the block back
            returned_.fetch_add(1, std::memory_order_release);
        }
        const std::lock_guard lock(mutex_);
        while (entry* const e = gone.pop()) made_.release(*e);
        while (entry* const e = refused.pop()) {
            e->refused = true;
            bytes_ += bytes{e->size};
            pending_.push(*e);
            taken_.fetch_sub(1, std::memory_order_relaxed);
        }
        return count;
    }

    /// How many blocks have been given back so far.
    [[nodiscard]] std::uint64_t returned() const noexcept { return returned_.load(std::memory_order_acquire); }

    /// Call this after the resource has refused an allocation, from outside the resource. `seen` is
    /// what returned() gave before the allocation. Frees the blocks whose points are reached. If
    /// none has gone back since `seen`, waits for a block that another thread is freeing just now.
    /// Returns true if a block has gone back since `seen`, and sets `seen` to returned(): the
    /// allocation may succeed now. Returns false if there is no such block.
    bool settle(std::uint64_t& seen) noexcept {
        collect();
        while (returned() == seen) {
            // relaxed: the lock in collect() orders the load
            if (taken_.load(std::memory_order_relaxed) == seen) return false;
            std::this_thread::yield();
        }
        seen = returned();
        return true;
    }

    /// Waits for every pending free until `deadline`. Returns false if some frees are left, and at
    /// once if only blocks are left that the resource doesn't take back now, or whose points are
    /// lost.
    bool drain(instant deadline) {
        for (auto seen = returned();;) {
            while (settle(seen)) {
            }
            if (const auto next = awaited()) {
                if (!next->wait(deadline) && !is_lost(*next)) return false;
                continue;
            }
            const std::lock_guard lock(mutex_);
            if (!pending_.empty()) return false;
            // else one is on its way back
            if (taken_.load(std::memory_order_relaxed) == returned()) return true;
        }
    }

    /// Waits until the point of a pending free is reached, or until `deadline`; collects nothing.
    /// Returns false immediately if no free is pending, or if no pending block can come back any
    /// more: the resource has refused it, or its point is lost. Throws std::bad_alloc, and what
    /// waiting for the points throws.
    bool wait_any(instant deadline) const {
        std::vector<Point> open;
        {
            const std::lock_guard lock(mutex_);
            for (const entry* e = pending_.front(); e != nullptr && open.size() < most_awaited; e = e->next)
                if (may_come(*e)) open.push_back(e->point);
        }
        if (open.empty()) return false;
        (void)Point::wait_any(open, deadline);
        return true;
    }

    /// Bytes of freed blocks that wait for their points, for collect(), or for the resource to take
    /// them back.
    [[nodiscard]] bytes pending() const noexcept {
        const std::lock_guard lock(mutex_);
        return bytes_;
    }

private:
    static constexpr std::size_t most_awaited = 64;  // at a time: a waiting thread comes back

    struct entry {
        entry* next = nullptr;
        Point point{};
        void* pointer = nullptr;
        std::size_t size = 0, alignment = 0;
        when_back note{};
        bool refused = false;  // whether the resource refused it at the last try
    };

    // The entries whose points are reached; they aren't pending any more.
    detail::fifo<entry> take_reached() noexcept {
        detail::fifo<entry> reached;
        const std::lock_guard lock(mutex_);
        detail::fifo<entry> open(std::move(pending_));
        while (entry* const e = open.pop()) {
            if (!e->point.reached()) {
                pending_.push(*e);
                continue;
            }
            bytes_ -= bytes{e->size};
            reached.push(*e);
            taken_.fetch_add(1, std::memory_order_relaxed);
        }
        return reached;
    }

    // False: the block is still allocated, and a later free may succeed.
    bool give_back(void* p, std::size_t size, std::size_t alignment, const when_back& note) noexcept {
        if (detail::stays_out(as_upstream(*resource_).deallocate(p, size, alignment))) return false;
        if (note.tell != nullptr) note.tell(note.to, note.size);
        return true;
    }

    // Whether the point is never reached any more.
    [[nodiscard]] static bool is_lost(const Point& p) noexcept {
        if constexpr (requires { p.is_lost(); }) return p.is_lost();
        return false;
    }
    // Whether a wait for the point can bring the block back.
    [[nodiscard]] static bool may_come(const entry& e) noexcept { return !e.refused && !is_lost(e.point); }
    // The oldest point of a block that may come back.
    std::optional<Point> awaited() const {
        const std::lock_guard lock(mutex_);
        for (const entry* e = pending_.front(); e != nullptr; e = e->next)
            if (may_come(*e)) return e->point;
        return std::nullopt;
    }

    Resource* resource_;
    mutable std::mutex mutex_;
    detail::pool<entry> made_;
    detail::fifo<entry> pending_;
    bytes bytes_;
    std::atomic<std::uint64_t> taken_{0};     // by collectors; written under the mutex
    std::atomic<std::uint64_t> returned_{0};  // of these, back in the resource
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
