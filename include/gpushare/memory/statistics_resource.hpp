// SPDX-License-Identifier: Apache-2.0
// An allocator that counts. It has statistics of the whole and of each scope, notices wrong frees,
// and reports leaks with their labels, scopes and, if wanted, stack traces.
//
//   gpushare::statistics_resource mine{upstream};
//   {
//       gpushare::memory_scope prefill{mine, "prefill"};  // an allocator, too; scopes nest
//       void* p = prefill.allocate(4_KiB, 256, "kv-cache");
//       prefill.deallocate(p, 4_KiB, 256);  // or mine.deallocate: any of them
//       log(prefill.statistics().peak);
//   }
//   for (const auto& l : mine.leaks()) log(l.scope, l.what.label, l.what.size);
//
// A scope is an object that is passed along, not a property of a thread. So work that moves between
// threads keeps its scope.
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <string>
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
#include <gpushare/memory/detail/scoped_statistics.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a statistics_resource.
struct statistics_options {
    /// capture_stack, from stack_trace.hpp: traces of allocations
    trace_function trace = nullptr;
    /// called by the destructor for each block that is still allocated
    std::function<void(const leak&)> on_leak{};
};

/// An allocator that counts. Refers to `Upstream`, which must outlive it. Thread-safe if the
/// upstream is; neither copied nor moved.
template <memory_resource Upstream>
class statistics_resource {
public:
    /// Over `upstream`.
    explicit statistics_resource(Upstream& upstream, statistics_options options = {})
        : upstream_(upstream), on_leak_(std::move(options.on_leak)), statistics_(options.trace) {}
    statistics_resource(const statistics_resource&) = delete;
    statistics_resource& operator=(const statistics_resource&) = delete;
    /// Reports the allocated blocks. Doesn't free them, since work may still use them. To free
    /// them, call take_back() first.
    ~statistics_resource() {
        if (!on_leak_) return;
        try {
            for (const auto& l : statistics_.leaks()) on_leak_(l);
        } catch (...) {  // there is nobody to catch it
        }
    }

    /// As the upstream's; std::bad_alloc too if the host has no memory for the entry. `label` must
    /// outlive the block.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                 std::string_view label = {}) {
        return allocate_in(detail::scoped_statistics::whole, size, alignment, label);
    }
    /// Returns null where allocate() would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        return try_allocate_in(detail::scoped_statistics::whole, size, alignment, why, label);
    }
    /// As allocate(), but waits as the upstream does, if the upstream can wait.
    template <clock Clock>
    requires requires(Upstream& u, const patience<Clock>& until) { u.allocate(1, 1, until); }
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                 std::string_view label = {}) {
        return allocate_in(detail::scoped_statistics::whole, size, alignment, label, until);
    }
    /// As try_allocate(), but waits as the upstream does, if the upstream can wait.
    template <clock Clock>
    requires requires(Upstream& u, const patience<Clock>& until) { u.try_allocate(1, 1, until); }
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        return try_allocate_in(detail::scoped_statistics::whole, size, alignment, until, why, label);
    }
    /// As deallocate, but for a block that work before `used` may still use, over memory that is
    /// freed in stream order.
    template <timeline_point Point>
    requires requires(Upstream& u, const Point& used, void* p) { u.deallocate_after(used, p, 1, 1); }
    errc deallocate_after(const Point& used, void* p, byte_count size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        if (p == nullptr) return errc::none;
        return struck(p, size, alignment,
                      [&] { return upstream_.resource().deallocate_after(used, p, size, alignment); });
    }
    /// Gives a block of any scope back to the upstream and returns the upstream's answer. If a
    /// later free may succeed (concepts.hpp), the block stays allocated. A wrong free changes
    /// nothing and returns unknown_block or wrong_size. Null is ignored.
    errc deallocate(void* p, byte_count size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        if (p == nullptr) return errc::none;
        return struck(p, size, alignment, [&] { return upstream_.deallocate(p, size, alignment); });
    }

    /// The figures. `largest_free` is the largest block that the upstream could give now;
    /// bytes::max() where it doesn't say.
    [[nodiscard]] memory_statistics statistics() const noexcept {
        return statistics_of(detail::scoped_statistics::whole);
    }
    /// The allocated blocks, the largest first. Throws std::bad_alloc.
    [[nodiscard]] std::vector<leak> leaks() const { return statistics_.leaks(); }
    /// Frees every allocated block, and returns a record of each. Nothing may use them any more.
    /// Blocks that the upstream doesn't take back now stay allocated, and have no record.
    std::vector<leak> take_back() {
        auto all = statistics_.leaks();
        detail::erase_where(all, [&](const leak& l) {
            return detail::stays_out(
                deallocate(l.what.pointer, static_cast<std::size_t>(l.what.size.count()), l.what.alignment));
        });
        return all;
    }
    /// The resource below.
    [[nodiscard]] Upstream& upstream() const noexcept { return upstream_.resource(); }

    /// The upstream's answers; see concepts.hpp. Blocks that are allocated at its close stay in
    /// leaks().
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept {
        return upstream_.charged(size, alignment);
    }
    /// As the upstream's.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        return upstream_.refuses(size, alignment);
    }
    /// As the upstream's.
    [[nodiscard]] bytes largest_free() const noexcept { return upstream_.largest_free(); }
    /// As the upstream's.
    [[nodiscard]] std::string_view owner() const noexcept { return upstream_.owner(); }
    /// As the upstream's.
    [[nodiscard]] close_token closing() const noexcept { return upstream_.closing(); }
    /// As the upstream's; see quota::in_hook.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept { return upstream_.in_hook(thread); }

private:
    template <memory_resource>
    friend class memory_scope;

    // `until`: a patience, or none.
    template <class... Until>
    void* allocate_in(detail::scope_id s, std::size_t size, std::size_t alignment, std::string_view label,
                      const Until&... until) {
        return entered(s, size, alignment, label,
                       [&] { return upstream_.resource().allocate(size, alignment, until...); });
    }
    template <clock Clock>
    void* try_allocate_in(detail::scope_id s, std::size_t size, std::size_t alignment, const patience<Clock>& until,
                          failure* why, std::string_view label) noexcept {
        return entered_if(s, size, alignment, why, label,
                          upstream_.resource().try_allocate(size, alignment, until, why));
    }
    // Enters the block that `allocate` returns.
    template <std::invocable F>
    void* entered(detail::scope_id s, std::size_t size, std::size_t alignment, std::string_view label, F allocate) {
        void* p = nullptr;
        try {
            p = allocate();
            if (p != nullptr) statistics_.enter(s, {p, bytes{size}, alignment, label});
        } catch (...) {
            if (p != nullptr) (void)upstream_.deallocate(p, size, alignment);
            statistics_.fail(s);
            throw;
        }
        if (p == nullptr) statistics_.fail(s);
        return p;
    }

    void* try_allocate_in(detail::scope_id s, std::size_t size, std::size_t alignment, failure* why,
                          std::string_view label) noexcept {
        return entered_if(s, size, alignment, why, label, upstream_.try_allocate(size, alignment, why));
    }
    // Unless `p` is null.
    void* entered_if(detail::scope_id s, std::size_t size, std::size_t alignment, failure* why, std::string_view label,
                     void* p) noexcept {
        if (p != nullptr) try {
                statistics_.enter(s, {p, bytes{size}, alignment, label});
                return p;
            } catch (...) {  // the host has no memory for the entry
                (void)upstream_.deallocate(p, size, alignment);
                if (why != nullptr) *why = detail::no_host_memory;
            }
        statistics_.fail(s);
        return nullptr;
    }

    // Removes the entry first: once the upstream has the block, another thread may enter it again.
    template <std::invocable F>
    errc struck(void* p, std::size_t size, std::size_t alignment, F free) noexcept {
        detail::scoped_statistics::struck going;
        if (const errc why = statistics_.strike(p, bytes{size}, alignment, going); why != errc::none) return why;
        const errc why = free();
        detail::stays_out(why) ? statistics_.put_back(going) : statistics_.forget(going);
        return why;
    }

    memory_statistics statistics_of(detail::scope_id s) const noexcept {
        auto f = statistics_.figures(s);
        f.largest_free = upstream_.largest_free();
        return f;
    }

    upstream_ref<Upstream> upstream_;
    std::function<void(const leak&)> on_leak_;
    detail::scoped_statistics statistics_;
};

/// A part of a statistics_resource with figures of its own, which also count in the scopes around
/// it. The scope is an allocator, too, and a block of one scope can be freed through another.
/// Thread-safe, neither copied nor moved. The resource or scope around it must outlive it; its
/// blocks may outlive it.
template <memory_resource Upstream>
class memory_scope {
public:
    /// A part of the whole. Throws std::bad_alloc.
    memory_scope(statistics_resource<Upstream>& in, std::string name)
        : in_(&in), id_(in.statistics_.open(detail::scoped_statistics::whole, std::move(name))) {}
    /// A part of another one. Throws std::bad_alloc.
    memory_scope(memory_scope& in, std::string name)
        : in_(in.in_), id_(in_->statistics_.open(in.id_, std::move(name))) {}
    memory_scope(const memory_scope&) = delete;
    memory_scope& operator=(const memory_scope&) = delete;
    ~memory_scope() { in_->statistics_.close(id_); }

    /// Allocates from the whole, and counts the block here, too.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                 std::string_view label = {}) {
        return in_->allocate_in(id_, size, alignment, label);
    }
    /// Frees a block of any scope; see statistics_resource::deallocate.
    errc deallocate(void* p, byte_count size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return in_->deallocate(p, size, alignment);
    }
    /// Returns null where allocate() would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        return in_->try_allocate_in(id_, size, alignment, why, label);
    }
    /// As allocate(), but waits as the upstream does, if the upstream can wait.
    template <clock Clock>
    requires requires(Upstream& u, const patience<Clock>& until) { u.allocate(1, 1, until); }
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                 std::string_view label = {}) {
        return in_->allocate_in(id_, size, alignment, label, until);
    }
    /// As try_allocate(), but waits as the upstream does, if the upstream can wait.
    template <clock Clock>
    requires requires(Upstream& u, const patience<Clock>& until) { u.try_allocate(1, 1, until); }
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr, std::string_view label = {}) noexcept {
        return in_->try_allocate_in(id_, size, alignment, until, why, label);
    }
    /// The resource's answer; see concepts.hpp.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept {
        return in_->charged(size, alignment);
    }
    /// As the whole resource's.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        return in_->refuses(size, alignment);
    }
    /// As of the whole.
    [[nodiscard]] bytes largest_free() const noexcept { return in_->largest_free(); }
    /// As of the whole.
    [[nodiscard]] std::string_view owner() const noexcept { return in_->owner(); }
    /// As of the whole.
    [[nodiscard]] close_token closing() const noexcept { return in_->closing(); }
    /// `largest_free` is that of the memory that all scopes share.
    [[nodiscard]] memory_statistics statistics() const noexcept { return in_->statistics_of(id_); }

private:
    statistics_resource<Upstream>* in_;
    detail::scope_id id_;
};

static_assert(upstream<statistics_resource<detail::plain_resource>>);
static_assert(upstream<memory_scope<detail::plain_resource>>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
