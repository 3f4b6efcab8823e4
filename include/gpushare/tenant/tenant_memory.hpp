// SPDX-License-Identifier: Apache-2.0
// A tenant's memory on one device: a quota, an allocator that keeps to it, the blocks that are out, and the frees that
// wait for their stream. Models `memory`, so containers and other resources can stand on it.
//
//   void* p = tenant.memory().allocate(1 << 20, 256);      // throws memory_error, naming the tenant
//   tenant.memory().deallocate(p, 1 << 20, 256);           // errc::wrong_size, unknown_block: nothing happened
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/block_table.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_hook.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How often a tenant's memory was asked, since the admission.
struct allocation_counts {
    bytes total{};                  ///< of all allocations together, as asked for
    std::uint64_t allocations = 0;  ///< that succeeded
    std::uint64_t frees = 0;        ///< those at a close too
    std::uint64_t refused = 0;      ///< allocations that were refused
};

/// Thread-safe; neither copied nor moved. Sizes and alignments are in bytes; alignments are powers of two; 256 is what
/// device allocators give.
template <memory Upstream, timeline_point Point>
class tenant_memory {
public:
    /// As of cudaMalloc.
    static constexpr std::size_t default_alignment = 256;

    /// Takes `guaranteed` bytes from `device` at once; throws operation_error (no_room) if they aren't there. All that
    /// is referred to, the sink too, must outlive it. With `trace`, leaks are reported with who allocated them.
    tenant_memory(quota& device, Upstream& upstream, std::string tenant, device_id id, bytes guaranteed, bytes burst,
                  const event_sink& sink, trace_function trace = nullptr)
        : tenant_(std::move(tenant)),
          id_(id),
          sink_(&sink),
          quota_(device, guaranteed, burst),
          resource_(quota_, upstream, tenant_),
          blocks_(trace),
          frees_(resource_),
          collects_(collecting_hook(quota_, frees_)) {
        quota_.name(tenant_);
    }
    tenant_memory(const tenant_memory&) = delete;
    tenant_memory& operator=(const tenant_memory&) = delete;

    /// As quota_resource::allocate, after frees that were reached have been collected, neighbours' too. Throws memory_error,
    /// with errc::closed once the tenant is closed. `label` must outlive the block.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment = default_alignment,
                                 std::string_view label = {}) {
        failure why;
        void* p = try_allocate(size, alignment, label, &why);
        if (p == nullptr) throw memory_error(why, tenant_, "allocate");
        return p;
    }
    /// Null where allocate would throw; `why`, if given, gets the reason with its figures.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment = default_alignment,
                                     std::string_view label = {}, failure* why = nullptr) noexcept {
        const visit inside(underway_);
        failure refusal;
        if (!closed()) {
            auto seen = frees_.returned();
            void* p = resource_.try_allocate(size, alignment, why);
            while (p == nullptr && frees_.settle(seen)) p = resource_.try_allocate(size, alignment, why);
            if (p == nullptr && !closed()) return refused();
            if (p != nullptr && enter({p, bytes{size}, alignment, label}, refusal)) return p;
        }
        if (closed()) refusal = {.code = errc::closed};
        if (why != nullptr) *why = refusal;
        return refused();
    }

    /// The same without a label.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, failure* why) noexcept {
        return try_allocate(size, alignment, std::string_view{}, why);
    }

    /// As allocate, but waits as long as `until` has it, a patience (memory/quota_wait.hpp): first come first served,
    /// for streams to reach frees as well. Throws memory_error with deadline_exceeded or stopped, too.
    template <class Patience>
    [[nodiscard]] void* allocate_until(std::size_t size, const Patience& until,
                                       std::size_t alignment = default_alignment, std::string_view label = {}) {
        failure refusal{.code = errc::closed};
        try {
            if (!closed()) {
                void* const p = resource_.allocate_until(size, alignment, until);
                const visit inside(underway_);
                if (enter({p, bytes{size}, alignment, label}, refusal)) return p;
            }
        } catch (...) {
            (void)refused();
            if (!closed()) throw;
            refusal = {.code = errc::closed};
        }
        (void)refused();
        throw memory_error(refusal, tenant_, "allocate");
    }

    /// No work may use the block any more. unknown_block or wrong_size, an event, and nothing else, if it isn't out.
    /// Null is ignored.
    errc deallocate(void* p, std::size_t size, std::size_t alignment = default_alignment) noexcept {
        if (p == nullptr) return errc::none;
        return strike(p, size, alignment, [&] { return resource_.deallocate(p, size, alignment); });
    }

    /// As deallocate, but for a block that work before `point` may still use: credited once the point is reached.
    errc deallocate_after(const Point& point, void* p, std::size_t size,
                          std::size_t alignment = default_alignment) noexcept {
        if (p == nullptr) return errc::none;
        return strike(p, size, alignment, [&] {
            frees_.add(point, p, size, alignment);
            return errc::none;
        });
    }

    /// Frees what was freed in stream order and is reached by now.
    void collect() noexcept { frees_.collect(); }
    /// Waits for all of it. False at the deadline.
    bool drain(instant deadline) { return frees_.drain(deadline); }

    /// From now on every allocation is refused with errc::closed, and what is freed goes to the device's other tenants. What
    /// is out stays valid until take_back(). What stands on it is told by limit().close(deadline), under no lock.
    void close() noexcept {
        closed_.store(true, std::memory_order_release);
        (void)quota_.resize({}, {});
    }
    /// Acquire: who sees it closed sees what was done before.
    [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    /// After close(): takes back every block that is out, with an event each. Nothing may use the blocks any more. True: no
    /// call that overlaps is left between the books and the device, so that only frees in stream order are still to be
    /// drained; false: one is held up, in a hook for example; what it frees is seen by another take_back(). Throws
    /// std::bad_alloc, and then nothing was taken back.
    bool take_back(close_report& report) {
        (void)settle();  // so that allocations which began before the close are in the books, or were refused
        std::vector<leak> leaks;
        {
            const visit inside(underway_);
            leaks = blocks_.take_all();
            for (const auto& l : leaks) give_back(l.what);
        }
        for (const auto& [b, scope, trace] : leaks) {
            ++report.leaked_blocks;
            report.leaked += b.size;
            detail::tell(
                *sink_,
                {tenant_event::kind::leak, tenant_, id_, errc::none, b.size, b.label, {trace.data(), trace.size()}});
        }
        return settle();  // frees that found their block before it was taken back
    }

    /// What an allocation takes of the quota; bytes::max() if none can have it.
    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return resource_.charged(size, alignment);
    }
    /// Why such a block can never be had, whatever is freed; errc::none if it could be.
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        return resource_.refuses(size, alignment);
    }
    /// For what keeps memory of the tenant: told when it closes. See closing.hpp.
    [[nodiscard]] close_token closing() const noexcept { return quota_.closing(); }
    /// The tenant's device: its limit.
    [[nodiscard]] bytes capacity() const noexcept { return resource_.capacity(); }
    /// What it may still allocate.
    [[nodiscard]] bytes free() const noexcept { return resource_.free(); }
    /// Of the limit, what others hold now.
    [[nodiscard]] bytes taken_by_others() const noexcept { return resource_.taken_by_others(); }
    /// The largest block that it could have now; see quota_resource::largest_free.
    [[nodiscard]] bytes largest_free() const noexcept { return resource_.largest_free(); }
    /// The tenant's name.
    [[nodiscard]] std::string_view owner() const noexcept { return tenant_; }
    /// Freed in stream order, and still charged.
    [[nodiscard]] bytes pending() const noexcept { return frees_.pending(); }
    /// Totals and counts. The quota counts more refusals: it is asked again after frees were collected.
    [[nodiscard]] allocation_counts counts() const noexcept {
        return {.total = bytes{total_.load(std::memory_order_relaxed)},
                .allocations = allocations_.load(std::memory_order_relaxed),
                .frees = frees_count_.load(std::memory_order_relaxed),
                .refused = refused_.load(std::memory_order_relaxed)};
    }
    /// The quota that everything here is charged to; what is charged past it, for an arena or a workspace, too.
    [[nodiscard]] quota& limit() noexcept { return quota_; }

private:
    // A call between the books and the device. Acquire and release: settle() reads the count by a read-modify-write, so a
    // call that it doesn't see comes after it, and sees the memory closed and the quota without a limit to charge.
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
    // Hooks of the embedder's run within a visit, and may take long: then it gives up.
    bool settle() noexcept {
        for (int yields = 0; underway_.fetch_add(0, std::memory_order_acq_rel) != 0; ++yields) {
            if (yields == 100'000) return false;  // tens of milliseconds
            std::this_thread::yield();
        }
        return true;
    }

    void give_back(const block& b) noexcept {
        frees_count_.fetch_add(1, std::memory_order_relaxed);
        (void)resource_.deallocate(b.pointer, static_cast<std::size_t>(b.size.count()), b.alignment);
    }

    void* refused() noexcept {
        refused_.fetch_add(1, std::memory_order_relaxed);  // a count and no more, as the others
        return nullptr;
    }

    // False, with the reason, and the memory is back: the host has none for the entry, or the tenant was closed meanwhile.
    bool enter(const block& b, failure& refusal) noexcept {
        try {
            blocks_.insert(b);
        } catch (...) {
            refusal = {.code = errc::out_of_memory, .asked = b.size.count()};
            resource_.deallocate(b.pointer, static_cast<std::size_t>(b.size.count()), b.alignment);
            return false;
        }
        allocations_.fetch_add(1, std::memory_order_relaxed);
        total_.fetch_add(b.size.count(), std::memory_order_relaxed);
        if (!closed()) return true;
        // Whoever closes takes what it finds in the books, and this what it doesn't.
        if (blocks_.remove(b.pointer, b.size, b.alignment) == errc::none) give_back(b);
        refusal = {.code = errc::closed};
        return false;
    }

    // Out of the books, then `free`; or an event, under no lock and in no visit.
    template <class Free>
    errc strike(void* p, std::size_t size, std::size_t alignment, Free free) noexcept {
        errc wrong = errc::none;
        {
            const visit inside(underway_);
            wrong = blocks_.remove(p, bytes{size}, alignment);
            if (wrong == errc::none) {
                frees_count_.fetch_add(1, std::memory_order_relaxed);
                return free();
            }
        }
        detail::tell(*sink_, {tenant_event::kind::wrong_free, tenant_, id_, wrong, bytes{size}, {}, {}});
        return wrong;
    }

    std::string tenant_;
    device_id id_;
    const event_sink* sink_;
    quota quota_;
    quota_resource<Upstream> resource_;
    block_table blocks_;
    deferred_frees<Point, quota_resource<Upstream>> frees_;
    quota_hook collects_;
    std::atomic<bool> closed_{false};
    std::atomic<std::uint32_t> underway_{0};
    std::atomic<std::uint64_t> total_{0}, allocations_{0}, frees_count_{0}, refused_{0};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
