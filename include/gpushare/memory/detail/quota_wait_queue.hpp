// SPDX-License-Identifier: Apache-2.0
// The queue of waiters for bytes of a quota, first come first served. quota_wait.hpp is the public
// part.
//
// A waiter keeps its place: every later request, however small, is refused the bytes that the
// waiter waits for, so that small requests don't starve a big one. Only bytes that could serve the
// waiter are held back: bytes of its own quota and, if that quota isn't the obstacle, bytes that
// its parent lends, and so on up to the quota whose limit is the obstacle. Guaranteed bytes are
// never held back for others, and new guarantees go ahead of waiters. Every resize, release and end
// of a quota serves the waiters that it can, under the mutex of the tree, which it holds anyway.
//
// The effect is the same as this: all waiters are tried, the oldest first, and each refused one
// reserves the bytes that it may get, from its own quota up to the one that has refused it. A
// release needn't try them all, since only the first waiter of each quota can be next, and:
//   - a quota knows for whom it reserves its bytes (ahead_), and whom it has refused (stopped_here_),
//     by age;
//   - room in a quota changes nothing for waiters that get no bytes from there, so only waiters for
//     whom the bytes are reserved are tried, there and in the quotas it borrows from: one for each
//     level;
//   - where nothing is reserved any more, the oldest refused there is tried, then the next, until one
//     is refused again;
//   - a tried waiter takes bytes reserved for later ones, and these are tried after it.
// A waiter tried by these rules came later than the one that caused the try, and the oldest goes
// first (to_try_), so the result is as if all had been tried. While a waiter exists, an idle loan
// goes back with its release, so no thread has to look for loans either. A release costs the height
// of the tree, plus the logarithm of the number of waiters for each one served. After a change of
// limits all are tried.
//
// Why no wake-up is lost: a release is one compare-and-swap of a word, and the same word has the
// frozen bit, which sends a release to the mutex. A thread that joins the queue freezes all words
// that its bytes may come from, and then looks. A release before the freeze has changed the word
// that the thread looks at. A release after the freeze fails to swap, sees the bit, takes the mutex
// and serves the waiters. There is no second flag that the two could miss, and while no thread
// waits a release pays nothing.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_hooks.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// The wait queue of a tree: a state machine without a clock or a thread. All under the mutex of
/// the tree.
struct quota_wait_queue {
    /// Refuses the waiter immediately, without a queue, if it could never be served.
    static void join(quota_wait_entry& p) noexcept;

    /// While a top, such as a root, is pressed, bytes freed below go back to it immediately, as if
    /// a request waited, but no bytes are held back from any request, and no thread counts as
    /// waiting. Each press ends with a release_pressure.
    static void press(quota_node& top) noexcept;
    static void release_pressure(quota_node& top) noexcept;

    static void leave(quota_wait_entry& p) noexcept;

    /// Serves all waiters that it can, first come first served, after `where` and the quotas from
    /// which it borrows may have more bytes.
    static void serve(quota_node& where) noexcept;

private:
    static void try_all(quota_node& root) noexcept;

    // After a refusal: later requests get no bytes from the quotas that these bytes may come from.
    static void stop(quota_node& q, std::uint64_t n) noexcept;

    // Takes a quota out of the line; the waiters behind it may be served.
    static void withdraw(quota_node& q) noexcept;
    static void call_next(const quota_node& at) noexcept;
    static void lift(quota_node& q) noexcept;
    static void line_up(quota_node& q) noexcept;

    // After a change of limits: waiters that can't be served any more leave, and all others are
    // tried.
    static void start_over(quota_node& root) noexcept;

    static void end(quota_wait_entry& p, claim_state how) noexcept;
    static void remove(quota_wait_entry& p) noexcept;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE void quota_wait_queue::join(quota_wait_entry& p) noexcept {
    auto& q = *p.at;
    auto& root = *q.root_;
    p.why = q.hopeless(p.size);
    if (p.why != errc::none) {
        p.state = claim_state::refused;
        return;
    }
    auto& top = q.top();
    root.serve_ = &serve;
    p.ticket = ++root.tickets_;
    q.queue_.push(p);
    if (p.polls) root.threads_.push(p);
    ++root.waiting_;
    if (++top.waiting_here_ == 1) top.watch();  // before any waiter looks
    if (q.queue_.front() == &p) {
        root.waiting_quotas_.push(q);
        line_up(q);
        try_all(root);
    }
    if (p.state == claim_state::waiting && p.why == errc::none) p.why = q.behind_;
}

GPUSHARE_INLINE void quota_wait_queue::press(quota_node& top) noexcept {
    if (++top.waiting_here_ == 1) top.watch();
}

GPUSHARE_INLINE void quota_wait_queue::release_pressure(quota_node& top) noexcept {
    if (--top.waiting_here_ == 0) top.unwatch();
}

GPUSHARE_INLINE void quota_wait_queue::leave(quota_wait_entry& p) noexcept {
    auto& q = *p.at;
    // only the first waiter of a quota holds later requests back
    const bool first = q.queue_.front() == &p;
    if (first) withdraw(q);
    remove(p);
    if (first) line_up(q);
    try_all(*q.root_);
}

GPUSHARE_INLINE void quota_wait_queue::serve(quota_node& where) noexcept {
    auto& root = *where.root_;
    if (std::exchange(root.limits_changed_, false)) start_over(root);
    for (auto* q = &where; q != nullptr; q = q->may_borrow_ ? q->parent_ : nullptr)
        if (q->ahead_ != nullptr) lift(*q->ahead_);
    try_all(root);
}

GPUSHARE_INLINE void quota_wait_queue::try_all(quota_node& root) noexcept {
    while (auto* const turn = root.to_try_.first()) {
        root.to_try_.remove(*turn);
        auto& q = *turn->of;
        auto* const before = std::exchange(q.stopped_by_, nullptr);
        for (auto* on_way = &q; on_way != nullptr; on_way = on_way->may_borrow_ ? on_way->parent_ : nullptr)
            if (on_way->ahead_ != nullptr && turn->ticket < on_way->ahead_->turn_.ticket) lift(*on_way->ahead_);
        auto& p = *q.queue_.front();
        p.why = q.take(p.size, nullptr);
        if (p.why != errc::none) {
            stop(q, p.size);
        } else {
            end(p, claim_state::granted);
            line_up(q);
        }
        if (before != nullptr && before->ahead_ == nullptr) call_next(*before);
    }
}

GPUSHARE_INLINE void quota_wait_queue::stop(quota_node& q, std::uint64_t n) noexcept {
    auto* at = &q;
    for (; at->ahead_ == nullptr; at = at->parent_) {
        n -= std::min(n, at->cell_.now().available());
        const bool obstacle =
            at->parent_ == nullptr || at->borrowed_.load(std::memory_order_relaxed) + n > at->burst_.count();
        at->behind_ = obstacle ? errc::over_quota : errc::out_of_memory;
        at->ahead_ = &q;
        if (obstacle) break;
    }
    q.stopped_by_ = at;
    at->stopped_here_.push(q.turn_);
}

GPUSHARE_INLINE void quota_wait_queue::withdraw(quota_node& q) noexcept {
    q.stopped_by_->stopped_here_.remove(q.turn_);
    for (auto* at = &q; at != nullptr && at->ahead_ == &q; at = at->parent_) {
        at->ahead_ = nullptr;
        at->behind_ = errc::none;
        call_next(*at);
    }
}

GPUSHARE_INLINE void quota_wait_queue::call_next(const quota_node& at) noexcept {
    if (auto* const turn = at.stopped_here_.first()) lift(*turn->of);
}

GPUSHARE_INLINE void quota_wait_queue::lift(quota_node& q) noexcept {
    withdraw(q);
    line_up(q);
}

GPUSHARE_INLINE void quota_wait_queue::line_up(quota_node& q) noexcept {
    const auto* const first = q.queue_.front();
    if (first == nullptr) return;
    q.turn_.ticket = first->ticket;
    q.root_->to_try_.push(q.turn_);
}

GPUSHARE_INLINE void quota_wait_queue::start_over(quota_node& root) noexcept {
    for (auto* q = root.waiting_quotas_.front(); q != nullptr; q = q->in_line_.next) {
        std::exchange(q->stopped_by_, nullptr)->stopped_here_ = {};
        for (auto* at = q; at != nullptr && at->ahead_ != nullptr; at = at->parent_) {
            at->ahead_ = nullptr;
            at->behind_ = errc::none;
        }
    }
    for (quota_node *q = root.waiting_quotas_.front(), *after = nullptr; q != nullptr; q = after) {
        after = q->in_line_.next;
        q->turn_ = {.of = q};
        for (quota_wait_entry *p = q->queue_.front(), *next = nullptr; p != nullptr; p = next) {
            next = p->of_quota.next;
            if (const errc why = q->hopeless(p->size); why != errc::none) {
                p->why = why;
                end(*p, claim_state::refused);
            }
        }
        line_up(*q);
    }
}

GPUSHARE_INLINE void quota_wait_queue::end(quota_wait_entry& p, claim_state how) noexcept {
    p.state = how;
    remove(p);
    if (p.wake != nullptr) p.wake(p);
}

GPUSHARE_INLINE void quota_wait_queue::remove(quota_wait_entry& p) noexcept {
    auto& q = *p.at;
    auto& root = *q.root_;
    q.queue_.remove(p);
    if (q.queue_.front() == nullptr) root.waiting_quotas_.remove(q);
    if (p.polls) root.threads_.remove(p);
    --root.waiting_;
    auto& top = q.top();
    if (--top.waiting_here_ == 0) top.unwatch();
}

#endif  // GPUSHARE_BODIES

/// A thread that waits.
struct quota_waiter : quota_wait_entry {
    quota_waiter(quota& of, bytes n) noexcept {
        at = &of;
        size = n.count();
        wake = [](quota_wait_entry& p) noexcept { static_cast<quota_waiter&>(p).woken.notify_one(); };
    }

    /// errc::none once the bytes are charged; else why not.
    template <clock Clock>
    errc wait(const patience<Clock>& until) noexcept {
        auto& root = *at->root_;
        const std::stop_callback on_stop(until.stop, [&] {
            const std::lock_guard lock(root.mutex_);
            woken.notify_one();
        });
        std::unique_lock lock(root.mutex_);
        // Within a hook the thread calls no other hook.
        polls = !hook_registration::inside(root, std::this_thread::get_id());
        quota_wait_queue::join(*this);
        while (state == claim_state::waiting) {
            const auto now = until.time.now();
            if (until.stop.stop_requested()) return give_up(errc::stopped);
            if (now >= until.deadline) return give_up(errc::deadline_exceeded);
            const bool its_turn = polls && !root.polled_ && hook_registration::any_to_poll(root);
            const auto most = its_turn ? slice : longest_sleep;
            const auto look_again = std::min(until.deadline, saturating_add(now, most));
            if (its_turn) {
                root.polled_ = true;
                const bool waited = hook_registration::poll(root, lock, look_again);
                root.polled_ = false;
                if (waited || state != claim_state::waiting) continue;
            }
            woken.wait_for(lock, look_again - now);
        }
        pass_on();
        return state == claim_state::granted ? errc::none : why;
    }

private:
    // How long a thread waits for streams, or leaves them alone while it expects nothing from them,
    // before it looks at everything else again.
    static constexpr ns slice = std::chrono::milliseconds(1);

    errc give_up(errc code) noexcept {
        quota_wait_queue::leave(*this);
        pass_on();
        return code;
    }
    // Another thread takes over the streams.
    void pass_on() noexcept {
        auto& root = *at->root_;
        if (root.polled_) return;
        if (auto* const p = root.threads_.front(); p != nullptr) p->wake(*p);
    }

    std::condition_variable woken;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
