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
#include <utility>

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

/// Thread-safe; neither copied nor moved. Alignments are powers of two; 256 is what device allocators give.
template <memory Upstream, timeline_point Point>
class tenant_memory {
public:
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

    /// As quota_resource::allocate, after frees that were reached have been collected, neighbours' too. `label` must outlive the block.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment = default_alignment,
                                 std::string_view label = {}) {
        failure why;
        void* p = try_allocate(size, alignment, label, &why);
        if (p == nullptr) raise(why, tenant_, "allocate");
        return p;
    }

    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment = default_alignment,
                                     std::string_view label = {}, failure* why = nullptr) noexcept {
        auto seen = frees_.returned();
        void* p = resource_.try_allocate(size, alignment, why);
        while (p == nullptr && frees_.settle(seen)) p = resource_.try_allocate(size, alignment, why);
        if (p != nullptr) {
            try {
                return enter({p, bytes{size}, alignment, label});
            } catch (...) {  // the host has no memory for the entry
                if (why != nullptr) *why = {.code = errc::out_of_memory, .asked = size};
            }
        }
        refused_.fetch_add(1, std::memory_order_relaxed);  // a count and no more
        return nullptr;
    }

    /// As allocate, but waits as long as `until` has it, a patience (memory/quota_wait.hpp): first come first served,
    /// for streams to reach frees as well. Throws memory_error with deadline_exceeded or stopped, too.
    template <class Patience>
    [[nodiscard]] void* allocate_until(std::size_t size, const Patience& until,
                                       std::size_t alignment = default_alignment, std::string_view label = {}) {
        try {
            void* const p = resource_.allocate_until(size, alignment, until);
            return enter({p, bytes{size}, alignment, label});
        } catch (...) {
            refused_.fetch_add(1, std::memory_order_relaxed);
            throw;
        }
    }

    /// No work may use the block any more. unknown_block or wrong_size, an event, and nothing else, if it isn't out.
    /// Null is ignored.
    errc deallocate(void* p, std::size_t size, std::size_t alignment = default_alignment) noexcept {
        if (p == nullptr) return errc::none;
        const errc wrong = forget(p, size, alignment);
        return wrong != errc::none ? wrong : resource_.deallocate(p, size, alignment);
    }

    /// As deallocate, but for a block that work before `point` may still use: credited once the point is reached.
    errc deallocate_after(const Point& point, void* p, std::size_t size,
                          std::size_t alignment = default_alignment) noexcept {
        if (p == nullptr) return errc::none;
        const errc wrong = forget(p, size, alignment);
        if (wrong == errc::none) frees_.add(point, p, size, alignment);
        return wrong;
    }

    /// Frees what was freed in stream order and is reached by now.
    void collect() noexcept { frees_.collect(); }
    /// Waits for all of it. False at the deadline.
    bool drain(instant deadline) { return frees_.drain(deadline); }

    /// Takes back every block that is out, with an event each. Nothing may use them any more.
    void take_back(close_report& report) {
        for (const auto& [b, scope, trace] : blocks_.take_all()) {
            ++report.leaked_blocks;
            report.leaked += b.size;
            detail::tell(
                *sink_,
                {tenant_event::kind::leak, tenant_, id_, errc::none, b.size, b.label, {trace.data(), trace.size()}});
            resource_.deallocate(b.pointer, static_cast<std::size_t>(b.size.count()), b.alignment);
        }
    }

    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return resource_.charged(size, alignment);
    }
    /// The tenant's device: its limit, what it may still allocate, and of the limit, what others hold now.
    [[nodiscard]] bytes capacity() const noexcept { return resource_.capacity(); }
    [[nodiscard]] bytes free() const noexcept { return resource_.free(); }
    [[nodiscard]] bytes taken_by_others() const noexcept { return resource_.taken_by_others(); }
    /// The largest block that it could have now; see quota_resource::largest_free.
    [[nodiscard]] bytes largest_free() const noexcept { return resource_.largest_free(); }
    /// The tenant's name.
    [[nodiscard]] std::string_view owner() const noexcept { return tenant_; }
    [[nodiscard]] bytes pending() const noexcept { return frees_.pending(); }
    /// Allocations that were refused. The quota counts more: it is asked again after frees were collected.
    [[nodiscard]] std::uint64_t refused() const noexcept { return refused_.load(std::memory_order_relaxed); }
    [[nodiscard]] quota& limit() noexcept { return quota_; }

private:
    void* enter(const block& b) {
        try {
            blocks_.insert(b);
        } catch (...) {
            resource_.deallocate(b.pointer, static_cast<std::size_t>(b.size.count()), b.alignment);
            throw;
        }
        return b.pointer;
    }

    errc forget(void* p, std::size_t size, std::size_t alignment) noexcept {
        const errc wrong = blocks_.remove(p, bytes{size}, alignment);
        if (wrong != errc::none)
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
    std::atomic<std::uint64_t> refused_{0};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
