// SPDX-License-Identifier: Apache-2.0
// Frees in stream order: a block freed while kernels may still use it goes back to its resource, and its bytes to the
// quota, once the stream has reached the point of the free, and not before.
//
//   gpushare::deferred_frees<stream::point, resource> frees{mine};
//   frees.add(stream.record(), p, 4096, 256);
//   frees.collect();      // before an allocation is refused, and whenever convenient: never blocks
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// Refers to `Resource`, which must outlive it. Thread-safe; the resource is called under no lock. Destroying it
/// frees nothing that is still pending: drain() first.
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
        for (entry e; take_reached(e); ++freed) resource_->deallocate(e.pointer, e.size, e.alignment);
        return freed;
    }

    /// Waits for every pending free until `deadline`. False if some are left.
    bool drain(instant deadline) {
        for (Point next; collect(), front(next);)
            if (!next.wait(deadline)) return false;
        return true;
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

    bool take_reached(entry& out) noexcept {
        const std::lock_guard lock(mutex_);
        for (auto& e : pending_) {
            if (!e.point.reached()) continue;
            out = std::move(e);
            if (&e != &pending_.back()) e = std::move(pending_.back());
            pending_.pop_back();
            bytes_ -= bytes{out.size};
            return true;
        }
        return false;
    }

    bool front(Point& out) const {
        const std::lock_guard lock(mutex_);
        if (pending_.empty()) return false;
        out = pending_.front().point;
        return true;
    }

    Resource* resource_;
    mutable std::mutex mutex_;
    std::vector<entry> pending_;
    bytes bytes_;
};

}  // namespace gpushare::inline GPUSHARE_ABI
