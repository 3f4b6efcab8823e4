// SPDX-License-Identifier: Apache-2.0
// The ways to get bytes from a full quota: hooks make room, and callers that can wait do so, first
// come first served, until a deadline or a stop request.
//
//   const gpushare::patience until{node.get_clock(), node.get_clock().now() + 50ms, stop};
//   // throws memory_error: deadline_exceeded, stopped, ...
//   void* p = mine.allocate(512_MiB, 256, until);
//   if (try_charge(chat, 1_MiB, until).code == gpushare::errc::none) ...
//
// A waiting thread first calls the hooks of the tree, with the deadline. Then the thread joins the
// queue. One of the waiting threads collects frees as streams reach them; the library makes no
// thread for this purpose.
//
// A program without a thread that may wait makes a claim, which doesn't block:
//
//   gpushare::quota_claim claim{chat, 512_MiB};  // in the queue, unless the bytes are there now
//   // ... later: chat.release(512_MiB)
//   if (claim.state() == gpushare::claim_state::granted) claim.take();
//
// A quota_hook makes room before a request is refused: it spills to the host, drops a cache, or
// gives burst back to a neighbour.
//
//   // 10: its order, lower ones are asked first
//   gpushare::quota_hook spill{chat, 10, [&](const gpushare::reclaim_request& r) { return cache.evict(r.missing); }};
//
// The library chooses hooks by the quota that refuses the request. If the request's own quota
// refuses, the library calls the hooks of that quota, which free memory of the same tenant. If a
// quota above refuses, the library also calls the hooks on the way up, and the hooks of quotas that
// have borrowed from the refusing quota. A borrower's hook is asked for at most the borrowed bytes:
// in this way burst is recalled. Guaranteed bytes are never recalled.
//
// A hook learns how many bytes are missing and how long the request can wait. The hook frees
// memory, now or by then, and returns how much it has freed already. The library then tries the
// request again, and refuses it if that fails.
//
// The requesting thread calls the hooks in ascending order, under no lock. Several requesting
// threads may call several hooks at once. If a hook throws, it counts as having freed nothing. If a
// program allocates under one of its locks, a hook must use try_lock for that lock, since the
// thread that calls the hook may hold the lock.
//
// A hook may allocate, from any pool. A thread that lacks memory of a pool waits for memory that is
// on its way between the pool and its upstream, but not for a thread in a hook (quota::in_hook). So
// two hooks that allocate from each other's pools don't deadlock.
//
// An allocation inside a hook calls no hook of the same tree, whatever quota of the tree it uses.
// So no hook calls itself, even by way of another tree, and no hook runs inside another hook that
// may hold a lock. This guard works by tree and thread, because it protects a thread's stack and
// the locks that the thread holds. Other threads aren't guarded: if a hook waits for a thread that
// allocates, that thread calls the hooks once more, and the program must make sure that this
// recursion ends.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stop_token>
#include <string_view>
#include <thread>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_hooks.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/detail/quota_wait_queue.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A hook, registered as long as it lives. Neither copied nor moved; the quota must outlive it. The
/// destructor waits until no other thread is in a call of the hook; the hook must not destroy
/// itself.
class quota_hook {
public:
    /// At most 48 bytes of captures; capture a pointer to more. Returns the bytes that it has freed
    /// already.
    using free_function = detail::hook_registration::free_function;
    /// Waits until memory may have become free by itself, as when a stream reaches a point, or
    /// until the deadline. Returns false immediately if nothing will become free. A waiting thread
    /// calls this function, and `free`, again and again.
    using wait_function = detail::hook_registration::wait_function;

    /// Asked for requests of `of`; hooks with a lower `order` are asked first.
    quota_hook(quota& of, int order, free_function free, wait_function wait = {})
        : registration_(of, order, std::move(free), std::move(wait)) {}

    /// Registers at the root of the tree that `of` is in: the hook is asked whenever any request in
    /// the tree lacks bytes, of a quota or of the memory below. Such a hook may outlive the tree.
    enum class root_tag : bool {};
    static constexpr root_tag at_root{};  ///< see root_tag
    /// See root_tag.
    quota_hook(root_tag, const quota& of, int order, free_function free, wait_function wait = {})
        : registration_(*of.root_, order, std::move(free), std::move(wait), true) {}
    /// Whether the hook is asked for requests of the tree of `q`.
    [[nodiscard]] bool in_tree_of(const quota& q) const noexcept { return registration_.in_tree_of(*q.root_); }
    /// Whether the tree is gone.
    [[nodiscard]] bool orphaned() const noexcept { return registration_.orphaned(); }

private:
    detail::hook_registration registration_;
};

/// A hook that collects frees in stream order (deferred_frees.hpp) before any other hook is called,
/// and lets waiting threads wait for the streams. It serves neighbours' requests, too, since no
/// work uses a block whose point is reached.
template <class Frees>
[[nodiscard]] quota_hook collecting_hook(quota& of, Frees& frees) {
    return quota_hook(
        of, std::numeric_limits<int>::min(),
        [&frees](const reclaim_request&) {
            return bytes{frees.collect()};
        },  // only whether there are any blocks counts
        [&frees](instant deadline) { return frees.wait_any(deadline); });
}

/// The largest borrower from the quota that refuses `n` bytes to `asking`. Empty if `asking`'s own
/// limit refuses them.
[[nodiscard]] inline burst_holder holder_of_burst(const quota& asking, bytes n) noexcept {
    const detail::quota_node& q = asking;
    const std::lock_guard lock(q.root_->mutex_);
    burst_holder most;
    auto need = n.count();
    const detail::quota_node* from = &q;
    for (const detail::quota_node* level = &q; level != nullptr; from = level, level = level->parent_) {
        for (const detail::quota_node* c = level->children_; c != nullptr; c = c->next_) {
            const bytes borrowed{c->borrowed_.load(std::memory_order_relaxed)};
            if (c != from && borrowed > most.borrowed) most = {c->name_, borrowed};
        }
        need -= std::min(need, level->cell_.now().available());
        if (level->borrowed_.load(std::memory_order_relaxed) + need > level->burst_.count()) break;
    }
    return most;
}

/// A place in a quota's queue that blocks no thread. Neither copied nor moved; the quota must
/// outlive it. Used by one thread at a time, alongside any other use of the quota.
class quota_claim {
public:
    /// Charges the bytes if they are there now, else joins the queue.
    quota_claim(quota& of, bytes size) noexcept : of_(&of) {
        place_.at = &of;
        place_.size = size.count();
        const std::lock_guard lock(place_.at->root_->mutex_);
        detail::quota_wait_queue::join(place_);
    }
    quota_claim(const quota_claim&) = delete;
    quota_claim& operator=(const quota_claim&) = delete;
    /// Leaves the queue, or gives back the bytes that were granted and not taken.
    ~quota_claim() {
        if (leave() == claim_state::granted && !taken_) of_->release(size());
    }

    /// The current state.
    [[nodiscard]] claim_state state() const noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        return place_.state;
    }
    /// The same, after hooks with a wait function have freed the memory that is available by now,
    /// as they do for a waiting thread. Runs user code, under no lock. Within a hook of the tree it
    /// calls no hook.
    claim_state poll() noexcept {
        auto& root = *place_.at->root_;
        std::unique_lock lock(root.mutex_);
        if (place_.state == claim_state::waiting && !root.polled_ &&
            !detail::hook_registration::inside(root, std::this_thread::get_id())) {
            root.polled_ = true;
            (void)detail::hook_registration::poll(root, lock, instant::min());
            root.polled_ = false;
            // another thread polls on
            if (auto* const p = root.threads_.front(); p != nullptr) p->wake(*p);
        }
        return place_.state;
    }
    /// The refusal at the last try.
    [[nodiscard]] errc why() const noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        return place_.why;
    }
    /// Only if granted: from now on the caller must release the bytes.
    void take() noexcept { taken_ = true; }
    /// The size of the claim.
    [[nodiscard]] bytes size() const noexcept { return bytes{place_.size}; }

private:
    claim_state leave() noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        if (place_.state == claim_state::waiting) detail::quota_wait_queue::leave(place_);
        return place_.state;
    }

    quota* of_;
    detail::quota_wait_entry place_{};
    bool taken_ = false;
};

/// As long as it lives, no quota keeps bytes that the root of a tree has lent: bytes freed below go
/// back to the root immediately, as while a request waits. The pressure refuses no request, but
/// charges and releases take the mutex of the tree. Use it to read several roots at one moment,
/// when no bytes may be on their way between a free and the root. The root must outlive it.
class quota_pressure {
public:
    /// For the tree of `of`.
    explicit quota_pressure(quota& of) noexcept : root_(of.root_) {
        const std::lock_guard lock(root_->mutex_);
        detail::quota_wait_queue::press(*root_);
    }
    quota_pressure(const quota_pressure&) = delete;
    quota_pressure& operator=(const quota_pressure&) = delete;
    ~quota_pressure() {
        const std::lock_guard lock(root_->mutex_);
        detail::quota_wait_queue::release_pressure(*root_);
    }

private:
    detail::quota_node* root_;
};

/// As quota::try_charge, but asks hooks, and waits for the bytes, first come first served, until
/// the deadline or stop request of `until`. deadline_exceeded or stopped, with the figures of the
/// last refusal. over_quota or out_of_memory, immediately but after calling the hooks, if the bytes
/// could never fit alongside others' guarantees, whatever is released.
template <clock Clock>
[[nodiscard]] failure try_charge(quota& q, bytes n, const patience<Clock>& until) noexcept {
    errc why = q.try_charge(n);
    for (detail::hook_cursor asked{.until = until.deadline}; why != errc::none && q.ask_next(asked, n);)
        why = q.try_charge(n);
    if (why != errc::none) why = detail::quota_waiter(q, n).wait(until);
    return why == errc::none ? failure{} : q.explain(why, n);
}
/// The old name of try_charge with a patience. 0.3 removes it.
template <clock Clock>
[[deprecated("use try_charge with a patience")]] [[nodiscard]] failure charge_until(
    quota& q, bytes n, const patience<Clock>& until) noexcept {
    return try_charge(q, n, until);
}

/// Throws the memory_error for a wait that was given up. `why.asked` bytes were requested; the
/// error names the largest borrower of burst.
[[noreturn]] inline void raise_waited(const quota& q, const failure& why, std::string_view tenant) {
    if (is_memory_refusal(why.code)) raise(why, tenant, "allocate");
    detail::message m;
    m.of(tenant).add("allocate: ", why);
    if (const auto holder = holder_of_burst(q, bytes{why.asked}); holder.borrowed != bytes{}) {
        m.add("; ", holder.borrowed, " lent to ");
        holder.name.empty() ? m.add("another") : m.add("'", tenant_name{holder.name}, "'");
    }
    throw memory_error(why, tenant, m);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
