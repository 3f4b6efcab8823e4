// SPDX-License-Identifier: Apache-2.0
// Frees in stream order: a block freed while kernels may still use it goes back to its resource, and its bytes to the
// quota, once the stream has reached the point of the free, and not before.
//
//   gpushare::deferred_frees<stream::point, resource> frees{mine};
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
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Refers to `Resource`, which must outlive it. Thread-safe; the resource is called, and points are destroyed, under no
/// lock. Destroying it frees nothing that is still pending: drain() first.
template <timeline_point Point, memory_resource Resource>
class deferred_frees {
public:
    explicit deferred_frees(Resource& resource) noexcept : resource_(&resource) {}

    /// Frees the block once `point` is reached. If the host has no memory to remember it, waits for the point instead.
    void add(const Point& point, void* p, std::size_t size, std::size_t alignment) noexcept {
        if (!point.reached()) {
            try {
                const std::lock_guard lock(mutex_);
                pending_.push_back({point, p, size, alignment});
                bytes_ += bytes{size};
                return;
            } catch (...) {
                point.wait(never);
            }
        }
        resource_->deallocate(p, size, alignment);
    }

    /// Frees what has been reached, and returns how many blocks that were. Never blocks on a stream.
    std::size_t collect() noexcept {
        std::size_t freed = 0;
        for (; const auto e = take_reached(); ++freed) {
            resource_->deallocate(e->pointer, e->size, e->alignment);
            returned_.fetch_add(1, std::memory_order_release);  // who sees the count sees the block back
        }
        return freed;
    }

    /// How many blocks collecting has given back so far.
    [[nodiscard]] std::uint64_t returned() const noexcept { return returned_.load(std::memory_order_acquire); }

    /// Collects, and if nothing has come back since `returned()` was `seen`, waits for a block that another thread has
    /// taken and not given back yet. True, and `seen` is up to date, if something has: worth another try. False: all
    /// that is reached is back. Not to be called from within the resource.
    bool settle(std::uint64_t& seen) noexcept {
        collect();
        while (returned() == seen) {
            if (taken_.load(std::memory_order_relaxed) == seen) return false;  // the lock in collect() has ordered it
            std::this_thread::yield();
        }
        seen = returned();
        return true;
    }

    /// Waits for every pending free until `deadline`. False if some are left.
    bool drain(instant deadline) {
        for (auto seen = returned();;) {
            while (settle(seen)) {
            }
            const auto next = front();
            if (!next) return true;
            if (!next->wait(deadline)) return false;
        }
    }

    /// Waits for the oldest pending free until `deadline`; collects nothing. False, at once, if none is pending.
    bool wait_oldest(instant deadline) const {
        const auto next = front();
        if (next) (void)next->wait(deadline);
        return next.has_value();
    }

    [[nodiscard]] bytes pending() const noexcept {
        const std::lock_guard lock(mutex_);
        return bytes_;
    }

private:
    struct entry {
        Point point;
        void* pointer = nullptr;
        std::size_t size = 0, alignment = 0;
    };

    std::optional<entry> take_reached() noexcept {
        const std::lock_guard lock(mutex_);
        for (auto& e : pending_) {
            if (!e.point.reached()) continue;
            std::optional taken(std::move(e));
            if (&e != &pending_.back()) e = std::move(pending_.back());
            pending_.pop_back();
            bytes_ -= bytes{taken->size};
            taken_.fetch_add(1, std::memory_order_relaxed);
            return taken;
        }
        return std::nullopt;
    }

    std::optional<Point> front() const {
        const std::lock_guard lock(mutex_);
        return pending_.empty() ? std::nullopt : std::optional(pending_.front().point);
    }

    Resource* resource_;
    mutable std::mutex mutex_;
    std::vector<entry> pending_;
    bytes bytes_;
    std::atomic<std::uint64_t> taken_{0};     // by collectors; written under the mutex
    std::atomic<std::uint64_t> returned_{0};  // of these, back in the resource
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
