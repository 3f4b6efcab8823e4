// SPDX-License-Identifier: Apache-2.0
// A tenant's memory from a pool of its own. An allocation is one operation of the pool, which also
// serves as the table of allocated blocks, and keeps the frees that wait for their stream. The
// quota counts the bytes that the pool holds. The pool gives unused memory back as soon as this
// tenant lacks memory, a neighbour lacks memory that it was guaranteed, or the quota has become
// smaller.
//
// After that the pool must hold only blocks in use. So only small blocks share a segment, and such
// a segment is small. Any other block has a segment of its own, of its size.
//
//   detail::pooled_memory<quota_resource<device>, point> blocks{resource, trace};
//   void* p = blocks.try_allocate(4096, 256, "weights", why);      blocks.deallocate(p, 4096, 256);
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/block_table.hpp>
#include <gpushare/memory/pool_resource.hpp>
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
class pooled_memory {
public:
    pooled_memory(Resource& resource, trace_function trace)
        : quota_(&resource.limit()),
          resource_(resource),
          pool_(resource_, options_over(resource)),
          cache_(pool_.make_cache()),
          gives_back_(
              *quota_, std::numeric_limits<int>::min(),
              [this](const reclaim_request& r) {
                  return pool_.give_back(quota_->wanted_back() ? bytes::max() : r.missing);
              },
              [this](instant deadline) { return pool_.wait_any(deadline); }) {
        if (trace != nullptr || clean().on_free()) traced_.emplace(trace);
    }

    /// Takes a block that was freed before, or returns null: then call try_allocate. A concurrent
    /// close either finds the block allocated or prevents the call.
    [[nodiscard]] void* try_allocate_kept(std::size_t size, std::size_t alignment, std::string_view label) noexcept {
        return traced_ || quota_->pressed() || lost() ? nullptr : cache_.try_allocate_kept(size, alignment, label);
    }
    /// Call after try_allocate_kept. If there is no memory, returns null, with the reason in `why`.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, std::string_view label,
                                     failure& why) noexcept {
        return ask(size, alignment, label, why, {});
    }

    /// The same, but waits: for blocks of the pool, and in the quota's queue for as many bytes as
    /// the block needs.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, const patience<Clock>& until,
                                     std::string_view label, failure& why) noexcept {
        void* p = try_allocate_kept(size, alignment, label);
        if (p != nullptr) return p;
        standing here(resource_, until.deadline);
        p = ask(size, alignment, label, why, {&here});
        if (p != nullptr || !lacks_memory(why.code)) return p;
        if (const auto never = refuses(size, alignment); never.code != errc::none) {
            why = never;
            return nullptr;
        }
        p = wait_for(here, size, alignment, until, label, why);
        if (p != nullptr) return traced(p, size, alignment, label, why);
        // Uses the figures of a request that is no longer in the queue.
        if (!is_memory_refusal(why.code)) why = quota_->explain(why.code, bytes{why.asked});
        return nullptr;
    }

    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        const errc wrong = traced_ ? deallocate_traced(p, size, alignment) : cache_.deallocate(p, size, alignment);
        if (quota_->pressed()) [[unlikely]]
            relieve();
        return wrong;
    }
    errc deallocate_after(const Point& point, void* p, std::size_t size, std::size_t alignment) noexcept {
        auto overwrites = overwriting();
        const errc wrong = strike(p, size, alignment, [&] {
            return clean().on_free() ? overwrite_and_free(&point, p, size, alignment)
                                     : pool_.deallocate_after(point, p, size, alignment);
        });
        if (overwrites) overwrites.unlock();
        if (quota_->pressed()) relieve();
        return wrong;
    }

    [[nodiscard]] std::optional<block> find(const void* p) const noexcept { return pool_.find(p); }
    void collect() noexcept {
        pool_.collect();
        if (quota_->pressed()) relieve();
    }
    void trim() noexcept { (void)pool_.give_back(bytes::max()); }
    bool drain(instant deadline) {
        const bool all = pool_.drain(deadline);
        if (closed()) (void)pool_.give_back(bytes::max());
        return all;
    }

    /// From now on no block is handed out, and freed memory goes to the device's other tenants.
    void close() noexcept {
        closed_.store(true, std::memory_order_release);
        quota_->stop();
        pool_.stop();
        (void)pool_.give_back(bytes::max());
    }
    [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    /// Takes back all allocated blocks, and enters them into `leaks`. See tenant_memory::take_back.
    template <clock Clock>
    bool take_back(std::vector<leak>& leaks, const patience<Clock>& until) {
        turns turn(until, quota_->in_hook(std::this_thread::get_id()));
        std::unique_lock alone(overwrites_, std::defer_lock);
        while (!alone.try_lock())
            if (!turn.again()) return false;
        // Blocks to be overwritten are freed in the order of their fills, as by the owner; drain()
        // waits for that.
        if (clean().on_free()) {
            leaks = traced_->all();
            erase_where(leaks, [&](const leak& l) {
                const auto& [p, size, alignment, label] = l.what;
                return stays_out(free_traced(p, static_cast<std::size_t>(size.count()), alignment));
            });
            if (traced_->size() != 0) return false;
        }
        const bool all = take_back_blocks(leaks, turn);
        if (traced_ && !leaks.empty()) traced_->take_traces(leaks);
        return all;
    }

    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return pool_.charged(size, alignment);
    }
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        return pool_.refuses(size, alignment);
    }
    /// Bytes of the quota that aren't in blocks. Over the limit: the part of the pool's own bytes
    /// that fits the limit alongside the blocks.
    [[nodiscard]] bytes free() const noexcept {
        if (closed()) return bytes{};
        const bytes left = quota_->free();
        return left == bytes{} && quota_->over() ? free_over() : left + idle();
    }
    /// Includes the bytes charged for empty segments, once the caches are empty.
    [[nodiscard]] bytes largest_free() const noexcept {
        (void)pool_.give_back({});
        if (closed()) return bytes{};
        const bytes held = pool_.usage().largest_free;
        return quota_->over() ? std::min(held, free_over()) : std::max(held, resource_.largest_free(pool_.empty()));
    }
    [[nodiscard]] bytes idle() const noexcept {
        const auto held = pool_.usage();
        return held.free() + held.cached;
    }
    [[nodiscard]] bytes pending() const noexcept { return pool_.pending(); }
    [[nodiscard]] allocation_counts counts() const noexcept {
        const auto all = pool_.usage();
        return {.total = all.allocated, .allocations = all.allocations, .frees = all.frees};
    }

private:
    // A shared segment is eight of the largest blocks that share one, and at most a sixteenth of
    // the bytes left to charge. Where memory comes in chunks, blocks smaller than a chunk share one
    // chunk at a time.
    static pool_options options_over(const Resource& resource) noexcept {
        const bytes least = resource.charged(1, pool_granule);
        if (least == bytes::max()) return {.segment = 128_KiB, .part = 16, .large = 16_KiB, .exact = true};
        return {
            .segment = least > 16_KiB ? least : 128_KiB, .part = 16, .large = std::max(least, 16_KiB), .exact = true};
    }

    // The resource from which the pool takes its segments. The tenant, not the quota, closes its
    // pool, in its own order. A request that stands in the queue takes the bytes granted to it.
    struct claiming_resource : Resource {
        explicit claiming_resource(const Resource& of) noexcept : Resource(of) {}
        [[nodiscard]] static close_token closing() noexcept { return {}; }

        [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, failure* why = nullptr,
                                         asker by = {}) noexcept {
            auto* const here = static_cast<standing*>(by.who);
            if (here == nullptr) return Resource::try_allocate(size, alignment, why);
            const bytes takes = this->charged(size, alignment);
            if (const bytes granted = here->take_granted(takes); granted != bytes{}) {
                (void)this->limit().release(granted - takes);
                return this->try_allocate_charged(size, alignment, why);
            }
            return Resource::try_allocate(size, alignment, why, here->until());
        }
        [[nodiscard]] bool nobody_waits() noexcept {
            const std::lock_guard lock(mutex);
            return standing_here == 0;
        }

        std::mutex mutex;
        std::size_t standing_here = 0;
    };

    // A request that may wait for the pool, and its place in the queue of the quota: from before
    // its first grant until it has nothing left of a grant, so that take_back() knows of it.
    class standing {
    public:
        standing(claiming_resource& in, instant until) noexcept : in_(&in), until_(until) {
            const std::lock_guard lock(in.mutex);
            ++in.standing_here;
        }
        standing(const standing&) = delete;
        standing& operator=(const standing&) = delete;
        ~standing() {
            const std::lock_guard lock(in_->mutex);
            --in_->standing_here;
        }
        void with(quota_claim& claim) noexcept { claim_ = &claim; }
        [[nodiscard]] instant until() const noexcept { return until_; }
        // The bytes granted to this request, if they are enough; they are charged.
        [[nodiscard]] bytes take_granted(bytes takes) noexcept {
            if (claim_ == nullptr || takes > claim_->size() || claim_->poll() != claim_state::granted) return {};
            auto& used = *std::exchange(claim_, nullptr);
            used.take();
            return used.size();
        }

    private:
        claiming_resource* in_;
        instant until_;
        quota_claim* claim_ = nullptr;  // until it is used
    };

    [[nodiscard]] void* ask(std::size_t size, std::size_t alignment, std::string_view label, failure& why,
                            asker by) noexcept {
        if (lost()) [[unlikely]] {
            why = {.code = errc::device_lost};
            return nullptr;
        }
        if (quota_->pressed() && still_over()) [[unlikely]]
            return try_allocate_over(size, alignment, label, why);
        if (!traced_ && !quota_->pressed()) [[likely]] {
            void* const p = cache_.try_allocate_anew(size, alignment, &why, label, by);
            return p != nullptr ? p : refused(size, alignment, why);
        }
        // Kept blocks come first: they weren't tried yet, since try_allocate_kept skips them while
        // a request waits.
        void* p = cache_.try_allocate_kept(size, alignment, label);
        if (p == nullptr) p = cache_.try_allocate_anew(size, alignment, &why, label, by);
        return p == nullptr ? refused(size, alignment, why) : traced(p, size, alignment, label, why);
    }

    template <clock Clock>
    void* wait_for(standing& here, std::size_t size, std::size_t alignment, const patience<Clock>& until,
                   std::string_view label, failure& why) noexcept {
        if (quota_->over()) {
            void* const p = wait_while_over(size, alignment, until, label, why);
            if (p != nullptr || why.code != errc::none) return p;
        }
        quota_claim claim(*quota_, resource_.charged(static_cast<std::size_t>(whole_granules(size)),
                                                     std::max(alignment, pool_granule)));
        here.with(claim);
        // Otherwise the pool would ask without this request's place, and no request would use the
        // grant.
        static_assert(tells_askers<claiming_resource>);
        return cache_.try_allocate(size, alignment, until, &why, label, {&here});
    }

    // Waits until the pool holds a block that fits the limit alongside the others. Null without a
    // reason: the quota is within its limit again. This wait can't use the quota's queue, because a
    // free of the tenant's own need not give the quota anything back.
    template <clock Clock>
    void* wait_while_over(std::size_t size, std::size_t alignment, const patience<Clock>& until, std::string_view label,
                          failure& why) noexcept {
        const bytes n = charged(size, alignment);
        for (hook_cursor asked{.until = until.deadline}; quota_->over() && quota_->ask_next(asked, n);) {
        }
        const auto limit = [&]() -> std::optional<bytes> {
            if (closed() || !still_over()) return std::nullopt;
            return quota_->usage().limit();
        };
        void* const p = pool_.try_allocate_within(limit, size, alignment, until, why, label);
        if (p == nullptr && closed()) why.code = errc::closed;
        why.asked = n.count();
        return p;
    }

    // Memory kept on a lost device can't be used, if the device tells.
    [[nodiscard]] bool lost() const noexcept { return resource_.upstream().lost(); }
    [[nodiscard]] auto& clean() const noexcept { return resource_.upstream(); }
    [[nodiscard]] bool still_over() noexcept {
        if (!quota_->over()) return false;
        (void)pool_.give_back(bytes::max());
        return quota_->over();
    }
    // While the quota is over its limit, it grants nothing. Memory that the pool can't give back is
    // used as far as it fits the limit.
    [[gnu::noinline]] void* try_allocate_over(std::size_t size, std::size_t alignment, std::string_view label,
                                              failure& why) noexcept {
        if (!closed())
            if (void* const p = pool_.try_allocate_within(quota_->usage().limit(), size, alignment, label))
                return traced(p, size, alignment, label, why);
        const bytes n = charged(size, alignment);
        why = {.code = closed() ? errc::closed : errc::over_quota,
               .asked = n.count(),
               .left = free().count(),
               .limit = quota_->usage().limit().count()};
        return refused(size, alignment, why);
    }
    [[nodiscard]] bytes free_over() const noexcept {
        const auto held = pool_.usage();
        const bytes in_blocks = held.used + held.pending;
        return std::min(quota_->usage().limit() - in_blocks, idle());
    }
    [[nodiscard]] static bool lacks_memory(errc why) noexcept {
        return why == errc::over_quota || why == errc::out_of_memory;
    }
    // Returns null, and sets `why` if the free bytes would suffice as one block, but are in pieces
    // between allocated blocks (fragmentation).
    [[gnu::noinline]] void* refused(std::size_t size, std::size_t alignment, failure& why) noexcept {
        if (why.code != errc::over_quota && why.code != errc::out_of_memory) return nullptr;
        const bytes n = charged(size, alignment), all = free();
        if (n <= all && (n > quota_->free() || quota_->over()))
            why = {.code = why.code,
                   .asked = n.count(),
                   .left = largest_free().count(),
                   .limit = all.count(),
                   .because = reason::largest_block};
        return nullptr;
    }
    [[nodiscard]] void* traced(void* p, std::size_t size, std::size_t alignment, std::string_view label,
                               failure& why) noexcept {
        return !traced_ || enter({p, bytes{size}, alignment, label}, why) ? p : nullptr;
    }
    void relieve() noexcept {
        if (quota_->wanted_back()) (void)pool_.give_back(bytes::max());
    }

    // False, with the reason, if the host has no memory to record the block, or the memory was
    // closed meanwhile; then the block is back.
    bool enter(const block& b, failure& refusal) noexcept {
        const auto overwrites = overwriting();
        // a close has already looked at the table
        errc why = overwrites && closed() ? errc::closed : errc::none;
        if (why == errc::none) try {
                traced_->insert(b);
                return true;
            } catch (...) {
                why = errc::out_of_memory;
            }
        refusal = why == errc::out_of_memory ? no_host_memory : failure{why};
        (void)cache_.deallocate(b.pointer, static_cast<std::size_t>(b.size.count()), b.alignment);
        return false;
    }
    // While a free overwrites its block, the pool still counts the block as out, so no close may
    // take it back: the block might then belong to another owner. Frees hold this lock if blocks
    // are overwritten as they are freed; otherwise no thread holds it.
    [[nodiscard]] std::shared_lock<std::shared_mutex> overwriting() noexcept {
        return clean().on_free() ? std::shared_lock(overwrites_) : std::shared_lock<std::shared_mutex>{};
    }
    // Blocks that are overwritten when freed are traced, too.
    [[gnu::noinline]] errc deallocate_traced(void* p, std::size_t size, std::size_t alignment) noexcept {
        const auto overwrites = overwriting();
        return free_traced(p, size, alignment);
    }
    [[nodiscard]] errc free_traced(void* p, std::size_t size, std::size_t alignment) noexcept {
        return strike(p, size, alignment, [&] {
            return clean().on_free() ? overwrite_and_free(nullptr, p, size, alignment)
                                     : cache_.deallocate(p, size, alignment);
        });
    }
    // Takes the block out of the table, if there is one, and calls `free`. Puts the block back if a
    // later free may succeed.
    template <std::invocable Free>
    [[nodiscard]] errc strike(void* p, std::size_t size, std::size_t alignment, Free free) noexcept {
        if (!traced_) return free();
        block_table::taken going;
        if (const errc wrong = traced_->take_out(p, bytes{size}, alignment, going); wrong != errc::none) return wrong;
        const errc why = free();
        stays_out(why) ? traced_->put_back(going) : traced_->forget(going);
        return why;
    }

    // Repeats until no overlapping call holds a block.
    template <clock Clock>
    bool take_back_blocks(std::vector<leak>& leaks, turns<Clock>& turn) {
        for (;;) {
            bool all = false;
            try {
                all = pool_.take_back(leaks);
                (void)pool_.give_back(bytes::max());
                // Another closing thread may still be giving the device a segment that it has
                // emptied. That segment is charged, and in no pool.
                const auto found = leaks.size();
                all = pool_.take_back(leaks) && all && leaks.size() == found && resource_.nobody_waits();
            } catch (...) {
                if (leaks.empty()) throw;
                return false;
            }
            if (all || !turn.again()) return all;
        }
    }
    // submission_failed: the point after which the block may be used is unknown.
    errc overwrite_and_free(const Point* after, void* p, std::size_t size, std::size_t alignment) noexcept {
        const auto done = clean().overwrite_after(after, p, size);
        return done ? pool_.deallocate_after(*done, p, size, alignment) : errc::submission_failed;
    }

    quota* quota_;
    claiming_resource resource_;
    mutable pool_resource<claiming_resource, Point> pool_;           // a reading empties the caches
    typename pool_resource<claiming_resource, Point>::cache cache_;  // of all threads
    std::shared_mutex overwrites_;                                   // see overwriting()
    std::optional<block_table> traced_;  // if traces are wanted, or a free must be checked first
    quota_hook gives_back_;
    std::atomic<bool> closed_{false};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
