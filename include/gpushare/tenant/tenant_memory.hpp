// SPDX-License-Identifier: Apache-2.0
// A tenant's memory on one device: a quota, an allocator that keeps to it, the table of allocated
// blocks, and the frees that wait for their stream. It models the concept gpushare::memory, so that
// containers and other resources can use it. tenant_spec::stack chooses the layers below
// (memory_stack): a pool of the tenant's own (the default), single blocks of the device, chunks
// that tenants pass on, or a pool of the device.
//
//   void* p = chat.memory().allocate(1_MiB, 256);        // throws memory_error, naming the tenant
//   // on errc::wrong_size or unknown_block nothing happened
//   chat.memory().deallocate(p, 1_MiB, 256);
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/tenant/detail/clean_memory.hpp>
#include <gpushare/tenant/detail/direct_memory.hpp>
#include <gpushare/tenant/detail/memory_source.hpp>
#include <gpushare/tenant/detail/pooled_memory.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a tenant_memory is made.
template <timeline_point Point>
struct tenant_memory_options {
    memory_stack stack = memory_stack::pool;  ///< the layers of the memory
    /// when memory is overwritten, if there is a `fill`
    scrub_policy scrub = scrub_policy::on_hand_over;
    /// how long allocate() waits for bytes before it refuses, by `now`
    ns wait{};
    trace_function trace = nullptr;  ///< stack traces of allocations, for reports of leaks
    /// Enqueues overwriting `size` bytes at `p` with zeros, behind `after` unless that is null, and
    /// returns the point after it. Without a `fill` nothing is overwritten.
    std::function<Point(const Point* after, void* p, std::size_t size)> fill{};
    std::function<instant()> now{};           ///< the time, if there may be a `wait`
    detail::memory_source* source = nullptr;  ///< its source, for arena and stream_ordered
    /// called if the device refuses: whether it has given memory back
    std::function<bool()> make_room{};
    /// true: others who had the device's memory mind that it is read, whatever `scrub` says
    const std::atomic<bool>* minded = nullptr;
};

/// A tenant's allocator on one device. Thread-safe; neither copied nor moved. Sizes and alignments
/// are in bytes; alignments are powers of two.
template <memory Upstream, timeline_point Point>
class tenant_memory {
public:
    /// As cudaMalloc's.
    static constexpr std::size_t default_alignment = 256;

    /// Takes `guaranteed` bytes from `device` at once. Throws operation_error (no_room) if they
    /// aren't there. All arguments by reference, the sink too, must outlive it. Throws
    /// std::bad_alloc.
    tenant_memory(quota& device, Upstream& upstream, std::string_view tenant, device_id id, bytes guaranteed,
                  bytes burst, const event_sink& sink, tenant_memory_options<Point> o = {});
    tenant_memory(const tenant_memory&) = delete;
    tenant_memory& operator=(const tenant_memory&) = delete;

    /// As quota_resource::allocate, but first collects frees that streams have reached, neighbours'
    /// too, and waits if the tenant's memory waits (tenant_spec::wait). Throws memory_error, with
    /// errc::closed once the tenant is closed. `label` must outlive the block.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = default_alignment,
                                 std::string_view label = {});
    /// Null where allocate would throw, without waiting; `why`, if given, gets the reason with its
    /// figures.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = default_alignment, failure* why = nullptr,
                                     std::string_view label = {}) noexcept;

    /// As allocate, but waits for bytes, first come first served, until the deadline or stop
    /// request of `until`, a patience (include memory/quota_wait.hpp). Then throws memory_error
    /// with deadline_exceeded or stopped, which names the largest borrower of burst. Throws
    /// immediately if the tenant's limit or others' guarantees leave no room, whatever is freed.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                 std::string_view label = {}) {
        failure why;
        if (void* const p = try_allocate(size, alignment, until, &why, label)) return p;
        raise_waited(quota_, why, tenant_);
    }
    /// With default_alignment.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, const patience<Clock>& until) {
        return allocate(size, default_alignment, until);
    }
    /// The same, null instead of an exception; `why`, if given, gets the reason with its figures.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        failure refusal;
        if (!closed())
            if (void* const p = stack([&](auto& s) { return s.try_allocate(size, alignment, until, label, refusal); }))
                return p;
        if (why != nullptr) *why = closed() ? failure{.code = errc::closed, .asked = size} : refusal;
        return refused();
    }
    /// The old name of allocate() with a patience. 0.3 removes it.
    template <class... Args>
    requires(detail::is_patience<Args> || ...)
        [[deprecated("use allocate with a patience")]] [[nodiscard]] void* allocate_until(const Args&... args) {
        return allocate(args...);
    }
    /// The old name of try_allocate() with a patience. 0.3 removes it.
    template <class... Args>
    requires(detail::is_patience<Args> || ...)
        [[deprecated("use try_allocate with a patience")]] [[nodiscard]] void* try_allocate_until(
            const Args&... args) noexcept {
        return try_allocate(args...);
    }

    /// Frees a block that no work uses any more. If the block isn't allocated, or has another size:
    /// unknown_block or wrong_size, an event, and nothing is freed. closed, without an event, once
    /// the tenant is closed. After any other code the block stays allocated, and a later free may
    /// succeed. submission_failed: the block must be overwritten, and the device doesn't tell when
    /// that is done. Null is ignored.
    errc deallocate(void* p, byte_count size, std::size_t alignment = default_alignment) noexcept;

    /// As deallocate, but work before `point` may still use the block: its bytes are credited once
    /// the point is reached.
    errc deallocate_after(const Point& point, void* p, byte_count size,
                          std::size_t alignment = default_alignment) noexcept;

    /// The allocated block at `p`, as it was asked for. For adaptors of libraries that free by
    /// address: not for a hot path.
    [[nodiscard]] std::optional<block> find(const void* p) const noexcept;

    /// Gives back the empty memory that the pool keeps for the next allocation.
    void trim() noexcept;
    /// Collects the frees that streams have reached by now.
    void collect() noexcept;
    /// Waits until streams have reached all frees. False at the deadline.
    bool drain(instant deadline);

    /// From now on every allocation is refused with errc::closed, and freed bytes go to the
    /// device's other tenants. Allocated blocks stay valid until take_back(). To close the
    /// resources built on it, call limit().close(deadline), under no lock.
    void close() noexcept;
    /// Whether close() was called. Acquire: a thread that sees it closed sees what was done before.
    [[nodiscard]] bool closed() const noexcept;

    /// After close(): frees every allocated block, with an event each. No work may use the blocks
    /// any more. Returns true if no overlapping call is still on its way to the device, so that
    /// only frees in stream order are left to drain. Returns false if one still is, for example in
    /// a hook or a slow driver, at the deadline or stop request of `until`, or soon if this thread
    /// is in a hook of its device and might wait for itself. Then call it again. If this throws
    /// std::bad_alloc, nothing was taken back.
    template <clock Clock>
    bool take_back(close_report& report, const patience<Clock>& until) {
        std::vector<leak> leaks;
        const bool all = stack([&](auto& s) { return s.take_back(leaks, until); });
        for (const auto& [b, scope, trace] : leaks) {
            ++report.leaked_blocks;
            report.leaked += b.size;
            detail::tell(
                *sink_,
                {tenant_event::kind::leak, tenant_, id_, errc::none, b.size, b.label, {trace.data(), trace.size()}});
        }
        return all;
    }

    /// The bytes that an allocation takes of the quota; bytes::max() if it can't be granted.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept;
    /// Why such a request can never be granted, whatever is freed; errc::none if it could be.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept;
    /// For resources that keep memory of the tenant: tells them when it closes. See closing.hpp.
    [[nodiscard]] close_token closing() const noexcept { return quota_.closing(); }
    /// As quota::in_hook.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept { return quota_.in_hook(thread); }
    /// How long allocate() waits for bytes before it refuses.
    [[nodiscard]] ns waits() const noexcept { return ns{wait_.load(std::memory_order_relaxed)}; }
    /// Sets how long allocate() waits from now on, by the `now` of its options. Relaxed: calls
    /// under way needn't see the figure.
    void wait_for(ns longest) noexcept { wait_.store(longest.count(), std::memory_order_relaxed); }
    /// The layers of the memory.
    [[nodiscard]] memory_stack made_of() const noexcept { return stack_; }
    /// The quota's limit, which the tenant sees as its device's size.
    [[nodiscard]] bytes capacity() const noexcept { return resource_.capacity(); }
    /// The bytes that the tenant may still allocate.
    [[nodiscard]] bytes free() const noexcept;
    /// The part of the limit that is burst in use by others.
    [[nodiscard]] bytes taken_by_others() const noexcept { return resource_.taken_by_others(); }
    /// The largest block that the tenant could allocate now; see quota_resource::largest_free.
    /// Empties a pool's caches, so keep this call off hot paths.
    [[nodiscard]] bytes largest_free() const noexcept;
    /// Charged bytes that are in no block. The pool keeps them for the next allocation, and gives
    /// them back as soon as another request lacks memory.
    [[nodiscard]] bytes idle() const noexcept;
    /// Bytes overwritten so far before or after this tenant had them. Memory that comes as zeros
    /// isn't counted.
    [[nodiscard]] bytes scrubbed() const noexcept { return clean_.scrubbed(); }
    /// The tenant's name.
    [[nodiscard]] std::string_view owner() const noexcept { return tenant_; }
    /// Bytes that were freed in stream order and are still charged.
    [[nodiscard]] bytes pending() const noexcept;
    /// Totals and counts. The quota counts more refusals, since it is asked again after frees were
    /// collected.
    [[nodiscard]] allocation_counts counts() const noexcept;
    /// A limit for a part of this memory. Put a quota_resource with this limit over the memory; the
    /// tenant is charged for the allocations as always:
    ///   quota most = tenant.memory().child_quota(1_GiB);    quota_resource part{most, tenant.memory(), "cache"};
    /// A child of limit() is charged for memory that comes from elsewhere; a quota_resource over
    /// this memory refuses it.
    [[nodiscard]] static quota child_quota(bytes most) { return quota(most); }
    /// The quota that is charged for this memory. Bytes of an arena or a workspace can be charged
    /// to it, too.
    [[nodiscard]] quota& limit() noexcept { return quota_; }

private:
    // After a look at the blocks that the pool keeps.
    [[nodiscard]] void* obtain(std::size_t size, std::size_t alignment, failure* why, std::string_view label) noexcept;

    using resource = quota_resource<detail::clean_memory<Upstream, Point>>;

    // Calls `f` with the resource in use.
    template <class F>
    decltype(auto) stack(F f) {
        return pool_ ? f(*pool_) : f(*direct_);
    }
    template <class F>
    decltype(auto) stack(F f) const {
        return pool_ ? f(*pool_) : f(*direct_);
    }

    void* refused() noexcept;
    // Raises an event, under no lock. After the close, blocks are taken back, so a caller that
    // frees one then has done nothing wrong.
    [[gnu::noinline]] errc wrong_free(errc wrong, std::size_t size) noexcept;

    std::string tenant_;
    device_id id_;
    const event_sink* sink_;
    quota quota_;
    std::atomic<ns::rep> wait_;
    std::function<instant()> now_;
    memory_stack stack_;
    detail::clean_memory<Upstream, Point> clean_;
    resource resource_;
    std::optional<detail::pooled_memory<resource, Point>> pool_;
    std::optional<detail::direct_memory<resource, Point>> direct_;  // if there is no pool
    std::atomic<std::uint64_t> refused_{0};
};

// Out of the class, and so without `inline`: an `extern template` then stops compilers from
// instantiating the members.

template <memory Upstream, timeline_point Point>
tenant_memory<Upstream, Point>::tenant_memory(quota& device, Upstream& upstream, std::string_view tenant, device_id id,
                                              bytes guaranteed, bytes burst, const event_sink& sink,
                                              tenant_memory_options<Point> o)
    : tenant_(detail::printable(tenant)),
      id_(id),
      sink_(&sink),
      quota_(device, guaranteed, burst),
      wait_(o.wait.count()),
      now_(std::move(o.now)),
      stack_(o.stack),
      clean_(upstream, o.scrub, std::move(o.fill), o.source, std::move(o.make_room), o.minded),
      resource_(quota_, clean_, tenant_) {
    if (o.stack == memory_stack::pool || o.stack == memory_stack::arena)
        pool_.emplace(resource_, o.trace);
    else
        direct_.emplace(resource_, o.trace);
    quota_.name(tenant_);
}

template <memory Upstream, timeline_point Point>
void* tenant_memory<Upstream, Point>::allocate(byte_count size, std::size_t alignment, std::string_view label) {
    if (pool_) [[likely]]
        if (void* const kept = pool_->try_allocate_kept(size, alignment, label)) return kept;
    if (const ns wait = waits(); wait != ns{})
        return allocate(size, alignment, patience{detail::clock_of(now_), saturating_add(now_(), wait)}, label);
    failure why;
    if (void* const p = obtain(size, alignment, &why, label)) return p;
    throw memory_error(why, tenant_, "allocate");
}

template <memory Upstream, timeline_point Point>
void* tenant_memory<Upstream, Point>::try_allocate(byte_count size, std::size_t alignment, failure* why,
                                                   std::string_view label) noexcept {
    if (pool_) [[likely]]
        if (void* const kept = pool_->try_allocate_kept(size, alignment, label)) return kept;
    return obtain(size, alignment, why, label);
}

template <memory Upstream, timeline_point Point>
errc tenant_memory<Upstream, Point>::deallocate(void* p, byte_count size, std::size_t alignment) noexcept {
    if (p == nullptr) return errc::none;
    const errc wrong = pool_ ? pool_->deallocate(p, size, alignment) : direct_->deallocate(p, size, alignment);
    return wrong == errc::none ? wrong : wrong_free(wrong, size);
}

template <memory Upstream, timeline_point Point>
errc tenant_memory<Upstream, Point>::deallocate_after(const Point& point, void* p, byte_count size,
                                                      std::size_t alignment) noexcept {
    if (p == nullptr) return errc::none;
    const errc wrong = stack([&](auto& s) { return s.deallocate_after(point, p, size, alignment); });
    return wrong == errc::none ? wrong : wrong_free(wrong, size);
}

template <memory Upstream, timeline_point Point>
std::optional<block> tenant_memory<Upstream, Point>::find(const void* p) const noexcept {
    return stack([&](const auto& s) { return s.find(p); });
}

template <memory Upstream, timeline_point Point>
void tenant_memory<Upstream, Point>::trim() noexcept {
    if (pool_) pool_->trim();
}

template <memory Upstream, timeline_point Point>
void tenant_memory<Upstream, Point>::collect() noexcept {
    stack([](auto& s) { s.collect(); });
}

template <memory Upstream, timeline_point Point>
bool tenant_memory<Upstream, Point>::drain(instant deadline) {
    return stack([&](auto& s) { return s.drain(deadline); });
}

template <memory Upstream, timeline_point Point>
void tenant_memory<Upstream, Point>::close() noexcept {
    stack([](auto& s) { s.close(); });
}

template <memory Upstream, timeline_point Point>
bool tenant_memory<Upstream, Point>::closed() const noexcept {
    return stack([](const auto& s) { return s.closed(); });
}

template <memory Upstream, timeline_point Point>
bytes tenant_memory<Upstream, Point>::charged(byte_count size, std::size_t alignment) const noexcept {
    return stack([&](const auto& s) { return s.charged(size, alignment); });
}

template <memory Upstream, timeline_point Point>
failure tenant_memory<Upstream, Point>::refuses(byte_count size, std::size_t alignment) const noexcept {
    return stack([&](const auto& s) { return s.refuses(size, alignment); });
}

template <memory Upstream, timeline_point Point>
bytes tenant_memory<Upstream, Point>::free() const noexcept {
    return stack([](const auto& s) { return s.free(); });
}

template <memory Upstream, timeline_point Point>
bytes tenant_memory<Upstream, Point>::largest_free() const noexcept {
    return stack([](const auto& s) { return s.largest_free(); });
}

template <memory Upstream, timeline_point Point>
bytes tenant_memory<Upstream, Point>::idle() const noexcept {
    return stack([](const auto& s) { return s.idle(); });
}

template <memory Upstream, timeline_point Point>
bytes tenant_memory<Upstream, Point>::pending() const noexcept {
    return stack([](const auto& s) { return s.pending(); });
}

template <memory Upstream, timeline_point Point>
allocation_counts tenant_memory<Upstream, Point>::counts() const noexcept {
    auto all = stack([](const auto& s) { return s.counts(); });
    all.refused = refused_.load(std::memory_order_relaxed);
    return all;
}

template <memory Upstream, timeline_point Point>
void* tenant_memory<Upstream, Point>::obtain(std::size_t size, std::size_t alignment, failure* why,
                                             std::string_view label) noexcept {
    failure refusal;
    void* const p = pool_ ? pool_->try_allocate(size, alignment, label, refusal)
                          : direct_->try_allocate(size, alignment, label, refusal);
    if (p != nullptr) [[likely]]
        return p;
    if (why != nullptr) *why = closed() ? failure{.code = errc::closed} : refusal;
    return refused();
}

template <memory Upstream, timeline_point Point>
void* tenant_memory<Upstream, Point>::refused() noexcept {
    refused_.fetch_add(1, std::memory_order_relaxed);  // a count and no more, as the others
    return nullptr;
}

template <memory Upstream, timeline_point Point>
errc tenant_memory<Upstream, Point>::wrong_free(errc wrong, std::size_t size) noexcept {
    if (detail::stays_out(wrong)) return wrong;
    if (closed()) return errc::closed;
    detail::tell(*sink_, {tenant_event::kind::wrong_free, tenant_, id_, wrong, bytes{size}, {}, {}});
    return wrong;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
