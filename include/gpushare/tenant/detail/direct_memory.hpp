// SPDX-License-Identifier: Apache-2.0
// A tenant's memory in which every block is a separate allocation from the device: a table of the
// allocated blocks, and the frees that wait for their stream. tenant_memory uses it or
// pooled_memory.
//
//   detail::direct_memory<quota_resource<device>, point> blocks{resource, trace};
//   void* p = blocks.try_allocate(4096, 256, "weights", why);      blocks.deallocate(p, 4096, 256);
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/block_table.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/tenant/detail/turns.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Thread-safe. `Resource` is a quota_resource of clean_memory, which must outlive it.
template <class Resource, timeline_point Point>
class direct_memory {
public:
    direct_memory(Resource& resource, trace_function trace)
        : resource_(&resource),
          blocks_(trace),
          frees_(resource),
          collects_(collecting_hook(resource.limit(), frees_)) {}

    /// Null, with the reason in `why`.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, std::string_view label,
                                     failure& why) noexcept {
        const visit inside(underway_);
        if (!closed()) {
            auto seen = frees_.returned();
            void* p = resource_->try_allocate(size, alignment, &why);
            while (p == nullptr && frees_.settle(seen)) p = resource_->try_allocate(size, alignment, &why);
            if (p == nullptr && !closed()) return nullptr;
            if (p != nullptr && enter({p, bytes{size}, alignment, label}, why)) return p;
        }
        if (closed()) why = {.code = errc::closed};
        return nullptr;
    }

    /// The same, but waits for bytes of the quota.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, const patience<Clock>& until,
                                     std::string_view label, failure& why) noexcept {
        const visit inside(underway_);  // a close wakes the waiters, and they leave
        void* const p = resource_->try_allocate(size, alignment, until, &why);
        return p != nullptr && enter({p, bytes{size}, alignment, label}, why) ? p : nullptr;
    }

    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        return strike(p, size, alignment, [&] { return hand_back(p, size, alignment); });
    }
    errc deallocate_after(const Point& point, void* p, std::size_t size, std::size_t alignment) noexcept {
        return strike(p, size, alignment, [&] {
            if (resource_->upstream().on_free()) return overwrite_and_free(&point, p, size, alignment);
            return frees_.add(point, p, size, alignment) ? errc::none : errc::submission_failed;
        });
    }

    [[nodiscard]] std::optional<block> find(const void* p) const noexcept { return blocks_.find(p); }
    void collect() noexcept { frees_.collect(); }
    bool drain(instant deadline) { return frees_.drain(deadline); }

    /// From now on no block is allocated, since the quota refuses every charge.
    void close() noexcept {
        closed_.store(true, std::memory_order_release);
        resource_->limit().stop();
    }
    [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    /// Takes back the allocated blocks, and enters them into `leaks`. See tenant_memory::take_back.
    template <clock Clock>
    bool take_back(std::vector<leak>& leaks, const patience<Clock>& until) {
        turns turn(until, resource_->in_hook(std::this_thread::get_id()));
        // so that allocations which began before the close are in the table, or were refused
        (void)settle(turn);
        {
            const visit inside(underway_);
            leaks = blocks_.all();
            erase_where(leaks, [&](const leak& l) { return !give_back(l.what); });
        }
        // frees that found their block before it was taken back
        return settle(turn) && blocks_.size() == 0;
    }

    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return resource_->charged(size, alignment);
    }
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        return resource_->refuses(size, alignment);
    }
    [[nodiscard]] bytes free() const noexcept { return resource_->free(); }
    [[nodiscard]] bytes largest_free() const noexcept { return resource_->largest_free(); }
    [[nodiscard]] bytes idle() const noexcept { return {}; }
    [[nodiscard]] bytes pending() const noexcept { return frees_.pending(); }
    [[nodiscard]] allocation_counts counts() const noexcept {
        return {.total = bytes{total_.load(std::memory_order_relaxed)},
                .allocations = allocations_.load(std::memory_order_relaxed),
                .frees = frees_count_.load(std::memory_order_relaxed)};
    }

private:
    // A call between the table and the device. Acquire and release: settle() reads the count by a
    // read-modify-write. So a call that settle() doesn't see comes after it, and sees the memory
    // closed and the quota without a limit to charge.
    class visit {
    public:
        explicit visit(std::atomic<std::uint32_t>& count) noexcept : count_(&count) {
            count.fetch_add(1, std::memory_order_acquire);
        }
        visit(const visit&) = delete;
        visit& operator=(const visit&) = delete;
        ~visit() { count_->fetch_sub(1, std::memory_order_release); }

    private:
        std::atomic<std::uint32_t>* count_;
    };
    // Waits for visits, in which the embedder's hooks may run and take any time.
    template <clock Clock>
    bool settle(turns<Clock>& turn) {
        while (underway_.fetch_add(0, std::memory_order_acq_rel) != 0)
            if (!turn.again()) return false;
        return true;
    }

    // False: the block is still in the table, or another thread has freed it.
    bool give_back(const block& b) noexcept {
        bool gone = false;
        const auto size = static_cast<std::size_t>(b.size.count());
        (void)strike(b.pointer, size, b.alignment, [&] {
            const errc why = hand_back(b.pointer, size, b.alignment);
            gone = !stays_out(why);
            return why;
        });
        return gone;
    }
    // Gives the block to the device, immediately or once it is overwritten.
    errc hand_back(void* p, std::size_t size, std::size_t alignment) noexcept {
        return resource_->upstream().on_free() ? overwrite_and_free(nullptr, p, size, alignment)
                                               : resource_->deallocate(p, size, alignment);
    }
    errc overwrite_and_free(const Point* after, void* p, std::size_t size, std::size_t alignment) noexcept {
        const auto done = resource_->upstream().overwrite_after(after, p, size);
        return done && frees_.add(*done, p, size, alignment) ? errc::none : errc::submission_failed;
    }

    // Returns false, with the reason, after giving the memory back: the host has no memory for the
    // entry, or the memory was closed meanwhile.
    bool enter(const block& b, failure& refusal) noexcept {
        try {
            blocks_.insert(b);
        } catch (...) {
            refusal = no_host_memory;
            resource_->deallocate(b.pointer, static_cast<std::size_t>(b.size.count()), b.alignment);
            return false;
        }
        allocations_.fetch_add(1, std::memory_order_relaxed);
        total_.fetch_add(b.size.count(), std::memory_order_relaxed);
        if (!closed()) return true;
        // A close takes the blocks that it finds in the table; this thread takes its own block if
        // the close doesn't.
        (void)give_back(b);
        refusal = {.code = errc::closed};
        return false;
    }

    // Takes the block out of the table and calls `free`. Puts it back into the table if a later
    // free may succeed.
    template <class Free>
    errc strike(void* p, std::size_t size, std::size_t alignment, Free free) noexcept {
        const visit inside(underway_);
        block_table::taken going;
        const errc wrong = blocks_.take_out(p, bytes{size}, alignment, going);
        if (wrong != errc::none) return wrong;
        frees_count_.fetch_add(1, std::memory_order_relaxed);
        const errc why = free();
        if (stays_out(why)) {
            frees_count_.fetch_sub(1, std::memory_order_relaxed);
            blocks_.put_back(going);
        } else {
            blocks_.forget(going);
        }
        return why;
    }

    Resource* resource_;
    block_table blocks_;
    deferred_frees<Point, Resource> frees_;
    quota_hook collects_;
    std::atomic<bool> closed_{false};
    std::atomic<std::uint32_t> underway_{0};
    std::atomic<std::uint64_t> total_{0}, allocations_{0}, frees_count_{0};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
