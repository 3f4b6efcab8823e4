// SPDX-License-Identifier: Apache-2.0
// Waiting for bytes of a quota: first come first served, until a deadline or a stop request.
//
//   const gpushare::patience until{node.get_clock(), node.get_clock().now() + 50ms, stop};
//   void* p = mine.allocate_until(512_MiB, 256, until);      // throws memory_error: deadline_exceeded, stopped, ...
//   if (gpushare::charge_until(chat, 1_MiB, until).code == gpushare::errc::none) ...
//
// A waiting thread first asks the hooks of the tree (quota_hook.hpp), telling them the deadline, and then joins the
// queue. One of the waiting threads collects frees as streams reach them; no other thread is made for it.
//
// A program that has no thread to wait with takes a claim, which doesn't block:
//
//   gpushare::quota_claim claim{chat, 512_MiB};            // in the queue, unless the bytes are there now
//   if (claim.state() == gpushare::claim_state::granted) claim.take();        // ... later: chat.release(512_MiB)
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <string_view>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/detail/quota_wait_queue.hpp>
#include <gpushare/memory/patience.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_hook.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A place in a quota's queue that blocks no thread. Neither copied nor moved; the quota must outlive it. Used by one
/// thread at a time, beside any other use of the quota.
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
    /// Leaves the queue, or gives back what was granted and not taken.
    ~quota_claim() {
        if (leave() == claim_state::granted && !taken_) of_->release(size());
    }

    /// As it is now.
    [[nodiscard]] claim_state state() const noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        return place_.state;
    }
    /// The same, after hooks that can be waited for (quota_hook.hpp) have freed what has come by
    /// now: what a thread that waits has done for it. Runs user code, under no lock.
    claim_state poll() noexcept {
        auto& root = *place_.at->root_;
        std::unique_lock lock(root.mutex_);
        if (place_.state == claim_state::waiting && !root.polled_) {
            root.polled_ = true;
            (void)detail::hook_registration::poll(root, lock, instant::min());
            root.polled_ = false;
            if (auto* const p = root.threads_.front(); p != nullptr) p->wake(*p);  // who sleeps goes on with that
        }
        return place_.state;
    }
    /// Why it wasn't granted when somebody last looked.
    [[nodiscard]] errc why() const noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        return place_.why;
    }
    /// Only if granted: from now on the bytes are the caller's to release.
    void take() noexcept { taken_ = true; }
    /// As it was made for.
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

/// As long as it lives, nobody keeps bytes that the root of a tree has lent: what is freed below
/// goes back to it at once, as while somebody waits. Nothing is refused because of it; charges and
/// releases take the mutex of the tree. For whoever looks at several roots at one moment: no bytes
/// are on their way between a free and the root then. The root must outlive it.
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

/// Charges `n` bytes, or waits for them. deadline_exceeded or stopped, with the figures of the last
/// refusal; over_quota or out_of_memory, at once, where no release could ever make it fit beside
/// what others are guaranteed (hooks are asked before);
/// size_overflow. Throws nothing.
template <clock Clock>
[[nodiscard]] failure charge_until(quota& q, bytes n, const patience<Clock>& until) noexcept {
    errc why = q.try_charge(n);
    for (detail::hook_cursor asked{.until = until.deadline}; why != errc::none && q.ask_next(asked, n);)
        why = q.try_charge(n);
    if (why != errc::none) why = detail::quota_waiter(q, n).wait(until);
    return why == errc::none ? failure{} : q.explain(why, n);
}

/// Throws the memory_error for a wait for `why.asked` bytes that was given up; it names the largest borrower of burst.
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
