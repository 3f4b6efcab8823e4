// SPDX-License-Identifier: Apache-2.0
// An allocator with a quota in front: the bytes that the upstream really takes for a block are
// charged before the block is asked for and credited after it is back. The tenant sees the quota as
// its device: `capacity()` and `free()` are the quota's.
//
//   // chat: a gpushare::quota
//   gpushare::quota_resource mine{chat, node.memory(gpushare::device_id{0})};
//   void* p = mine.allocate(1_MiB, 256);  // throws memory_error, a std::bad_alloc
//   mine.deallocate(p, 1_MiB, 256);
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string_view>
#include <thread>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {
/// Whether an allocation there is charged to a quota in which charges of `q` count, as far as
/// resources tell their quotas.
template <class Resource>
[[nodiscard]] bool charges_beside(Resource& r, const quota& q) noexcept {
    if constexpr (requires { q.counts_in(r.limit()); })
        return q.counts_in(r.limit());
    else if constexpr (requires { r.upstream().allocate(1, 1); })
        return charges_beside(r.upstream(), q);
    else
        return false;
}
}  // namespace detail

/// An allocator that charges a quota. Refers to a quota and an upstream, both of which must outlive
/// it; copies share them. Thread-safe if the upstream is. Models `memory`, whatever the upstream
/// models.
template <memory_resource Upstream>
class quota_resource {
public:
    /// `owner` names the tenant in error messages; the text must outlive the resource. Throws
    /// operation_error (invalid_specification) if the upstream itself charges the quota, or one
    /// above it: each byte would be charged twice. For a limit on a part of a tenant's memory, use
    /// a quota of its own, as tenant_memory::child_quota() makes it.
    quota_resource(quota& limit, Upstream& upstream, std::string_view owner = {})
        : quota_(&limit), upstream_(upstream), owner_(owner) {
        if (detail::charges_beside(upstream, limit))
            raise({errc::invalid_specification}, owner,
                  "a limit over memory that charges the same quota: child_quota() of that memory makes one that is "
                  "charged once");
    }

    /// `size` bytes at a multiple of `alignment` (a power of two). Throws memory_error: over_quota,
    /// out_of_memory (upstream or burst), size_overflow, bad_alignment, device_lost (upstream).
    /// Exceptions of the upstream pass through, and nothing is charged.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t)) {
        answer r;
        if (void* const p = obtain(size, alignment, r)) return p;
        if (r.thrown) std::rethrow_exception(r.thrown);
        throw memory_error(r.why, owner_, "allocate");
    }

    /// As allocate, but null instead of an exception; `why`, if given, gets the reason with its
    /// figures. Hooks learn that the request can wait until `until`; otherwise it doesn't wait.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr, instant until = instant::min()) noexcept {
        answer r;
        r.explained = why != nullptr;
        void* const p = obtain(size, alignment, r, until);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }

    /// As allocate, but waits for bytes of the quota, first come first served, until the deadline
    /// or stop request of `until`, a patience (include quota_wait.hpp). Then it throws memory_error
    /// with deadline_exceeded or stopped, which names the largest borrower of burst.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until) {
        answer r;
        if (void* const p = obtain(size, alignment, until, r)) return p;
        if (r.thrown) std::rethrow_exception(r.thrown);
        raise_waited(*quota_, r.why, owner_);
    }
    /// The same, null instead of an exception; `why`, if given, gets the reason.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr) noexcept {
        answer r;
        void* const p = obtain(size, alignment, until, r);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }

    /// As try_allocate, for bytes that are charged already: charged(size, alignment) of them, as by
    /// a quota_claim. The block takes the bytes over. If the result is null, they are released.
    [[nodiscard]] void* try_allocate_charged(byte_count size, std::size_t alignment, failure* why = nullptr) noexcept {
        answer r;
        void* const p = charged_from_upstream(size, alignment, charged(size, alignment), r);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }

    /// Gives the block back to the upstream, and then credits the quota, so that no request is
    /// granted bytes that the upstream still holds. wrong_size, and the block stays allocated, if
    /// fewer bytes are charged. Null is ignored. Over a deferring_upstream the quota is credited
    /// once that upstream has the block back. If the upstream doesn't notice wrong frees, the
    /// caller must avoid them, or check with a block_table as a direct tenant_memory does.
    errc deallocate(void* p, byte_count size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        if (p == nullptr) return errc::none;  // null was never charged
        const bytes takes = charged(size, alignment);
        if (!quota_->has_charged(takes)) return errc::wrong_size;
        if constexpr (deferring_upstream<Upstream>) {
            const when_back credit{[](void* to, bytes n) noexcept { (void)static_cast<quota*>(to)->release(n); },
                                   quota_, takes};
            return upstream_.resource().deallocate_then(p, size, alignment, credit);
        } else {
            const errc why = upstream_.deallocate(p, size, alignment);
            if (why == errc::none) (void)quota_->release(takes);
            return why;
        }
    }

    /// The bytes that the upstream really takes for such a request; bytes::max() if it can't be
    /// granted.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept {
        return upstream_.charged(size, alignment);
    }
    /// Why the quota or the upstream can never grant such a request; errc::none if they could.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        answer r;
        const bytes takes = takes_for(size, alignment, r);
        if (takes == bytes::max()) return r.why;
        const failure why = closer(quota_->refuses(takes), size, alignment);
        return why.code != errc::none ? why : upstream_.refuses(size, alignment);
    }
    /// The upstream's token if the upstream can close, otherwise the quota's.
    [[nodiscard]] close_token closing() const noexcept {
        const close_token below = upstream_.closing();
        return below ? below : quota_->closing();
    }
    /// As quota::in_hook, for the tree of its quota and for the upstream's quotas.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept {
        return quota_->in_hook(thread) || upstream_.in_hook(thread);
    }
    /// The quota's limit.
    [[nodiscard]] bytes capacity() const noexcept { return quota_->usage().limit(); }
    /// The largest charge that the quota would grant now.
    [[nodiscard]] bytes free() const noexcept { return quota_->free(); }
    /// The largest block at a multiple of 256 bytes that could be allocated now if `idle` charged
    /// bytes were released first. Considers the quota, the upstream's rounding and, if the upstream
    /// tells, the upstream's own free blocks.
    [[nodiscard]] bytes largest_free(bytes idle = {}) const noexcept {
        const bytes most = std::min(free() + idle, upstream_.largest_free());
        // found by halving: charges may be in steps of any size
        std::uint64_t fits = 0, beyond = most.count() + 1;
        while (beyond - fits > 1) {
            const auto n = fits + (beyond - fits) / 2;
            (charged(static_cast<std::size_t>(n), 256) <= most ? fits : beyond) = n;
        }
        return bytes{fits};
    }
    /// The part of capacity() that is neither free nor charged here: burst that others use now.
    [[nodiscard]] bytes taken_by_others() const noexcept {
        const auto usage = quota_->usage();
        return usage.limit() - usage.current - quota_->free();
    }
    /// The quota that is charged.
    [[nodiscard]] quota& limit() const noexcept { return *quota_; }
    /// The owner's name, as given to the constructor.
    [[nodiscard]] std::string_view owner() const noexcept { return owner_; }
    /// The upstream.
    [[nodiscard]] Upstream& upstream() const noexcept { return upstream_.resource(); }

    /// Whether both share quota and upstream, so that either can free the other's blocks.
    friend bool operator==(const quota_resource& a, const quota_resource& b) noexcept {
        return a.quota_ == b.quota_ && &a.upstream() == &b.upstream();
    }

private:
    // Gives the charge back unless the memory was obtained.
    struct charge {
        quota* from;
        bytes size;
        ~charge() {
            if (from != nullptr) from->release(size);
        }
    };

    struct answer : upstream_refusal {
        bool explained = true;  // whether the caller wants the figures
    };

    // If the block is above the quota's limit only because of the alignment: that refusal.
    // Otherwise errc::none.
    [[nodiscard]] failure too_aligned(std::size_t size, std::size_t alignment, bytes limit) const noexcept {
        return detail::too_aligned(alignment, limit, [&](std::size_t a) { return charged(size, a); });
    }
    // The quota's refusal of such a block, or that of the alignment if only the alignment is to
    // blame.
    [[nodiscard]] failure closer(const failure& why, std::size_t size, std::size_t alignment) const noexcept {
        if (!is_memory_refusal(why.code)) return why;
        const failure aligned = too_aligned(size, alignment, bytes{why.limit});
        return aligned.code != errc::none ? aligned : why;
    }
    void* refuse(errc code, std::size_t size, std::size_t alignment, bytes takes, answer& r) const noexcept {
        r.thrown = nullptr;  // of an earlier try, before a hook made room
        if (!r.explained) return nullptr;
        r.why = closer(quota_->explain(code, takes), size, alignment);
        return nullptr;
    }
    // The bytes that a request takes; bytes::max(), with the reason, if it can never be granted.
    bytes takes_for(std::size_t size, std::size_t alignment, answer& r) const noexcept {
        const bool aligned = std::has_single_bit(alignment);
        const bytes takes = aligned ? charged(size, alignment) : bytes::max();
        if (takes != bytes::max() || !r.explained) return takes;
        if (aligned) r.why = too_aligned(size, alignment, quota_->usage().limit());
        if (r.why.code == errc::none) r.why = detail::impossible_block(size, alignment);
        return takes;
    }

    void* obtain(std::size_t size, std::size_t alignment, answer& r, instant until = instant::min()) noexcept {
        const bytes takes = takes_for(size, alignment, r);
        if (takes == bytes::max()) return nullptr;
        auto seen = returned();
        for (detail::hook_cursor asked{.until = until};;) {
            if (const errc code = quota_->try_charge(takes); code != errc::none) {
                if (settle(seen) || quota_->ask_next(asked, takes)) continue;
                // A hook may have taken long.
                return refuse(quota_->closed() ? errc::closed : code, size, alignment, takes, r);
            }
            if (void* const p = charged_from_upstream(size, alignment, takes, r)) return p;
            if (r.final || !quota_->ask_next(asked, takes, true)) return nullptr;
        }
    }

    // Waits for bytes of the quota. If the upstream lacks memory, a waiter can only ask again: by
    // hooks, and by another quota's queue.
    template <clock Clock>
    void* obtain(std::size_t size, std::size_t alignment, const patience<Clock>& until, answer& r) noexcept {
        const bytes takes = takes_for(size, alignment, r);
        if (takes == bytes::max()) return nullptr;
        // During the wait, collects the blocks that the upstream still has to report.
        const auto collects = [&] {
            if constexpr (deferring_upstream<Upstream>)
                return collecting_hook(*quota_, upstream_.resource());
            else
                return 0;
        }();
        (void)collects;
        for (detail::hook_cursor asked{.until = until.deadline};;) {
            r.thrown = nullptr;
            r.why = closer(try_charge(*quota_, takes, until), size, alignment);
            if (r.why.code != errc::none) return nullptr;
            if (void* const p = charged_from_upstream(size, alignment, takes, r)) return p;
            if (r.final || !quota_->ask_next(asked, takes, true)) return nullptr;
        }
    }

    // For an upstream that gets blocks back later: a count that tells whether some have come since.
    [[nodiscard]] std::uint64_t returned() const noexcept {
        if constexpr (deferring_upstream<Upstream>) return upstream_.resource().returned();
        return 0;
    }
    [[nodiscard]] bool settle(std::uint64_t& seen) const noexcept {
        if constexpr (deferring_upstream<Upstream>) return upstream_.resource().settle(seen);
        return false;
    }

    // The charge is returned before anybody is asked for memory.
    void* charged_from_upstream(std::size_t size, std::size_t alignment, bytes takes, answer& r) noexcept {
        charge taken{quota_, takes};
        r.why = {.code = errc::out_of_memory, .asked = takes.count()};
        void* const p = upstream_.ask(size, alignment, r);
        if (p != nullptr)
            taken.from = nullptr;
        else if (r.why.code == errc::device_lost)
            r.final = true;  // no release helps
        // the figures are the upstream's own, since the quota has room
        else if (r.why.code != errc::closed)
            r.why.code = errc::out_of_memory;
        return p;
    }

    quota* quota_;
    upstream_ref<Upstream> upstream_;
    std::string_view owner_;
};

static_assert(memory<quota_resource<detail::plain_resource>>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
