// SPDX-License-Identifier: Apache-2.0
// The queue of waiters for bytes of a quota, first come first served. quota_wait.hpp is the public part.
//
// A waiter keeps its place: bytes that it waits for are refused to every later request, however small, so that small
// requests don't starve a big one. Only bytes that could serve the waiter are held back: those of its own quota and, if
// that isn't the obstacle, those that its parent lends, and so on up to the quota whose limit is the obstacle.
// Guaranteed bytes are never held back for others, and new guarantees go ahead of waiters. Every resize, release and
// end of a quota serves the waiters that it can, under the mutex of the tree, which it holds anyway.
//
// Why no wake-up is lost. A release is one compare-and-swap of a word, and the frozen bit, which sends a release to the
// mutex, lies in the same word. A thread that joins the queue freezes all words that its bytes may come from, and then
// looks. A release before the freeze is in the word that it looks at; a release after it fails to swap, sees the bit,
// takes the mutex and serves the waiters. There is no second flag that the two could miss, and while nobody waits a
// release pays nothing.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/patience.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_hook.hpp>
#include <gpushare/memory/quota_usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// The wait queue of a tree: a state machine without a clock or a thread. All under the mutex of the tree.
struct quota_wait_queue {
    /// Refused at once, and in no queue, if it could never be served.
    static void join(quota_wait_entry& p) noexcept {
        auto& root = *p.at->root_;
        p.why = p.at->unfit(p.size);
        if (p.why != errc::none) {
            p.state = claim_state::refused;
            return;
        }
        auto& top = p.at->top();
        root.serve_ = &serve;
        p.ticket = ++root.tickets_;
        if (p.at->queue_.front() == nullptr) insert(root, *p.at, p.ticket);
        p.at->queue_.push(p);
        if (p.wake != nullptr) root.threads_.push(p);
        ++root.waiting_;
        if (++top.waiting_here_ == 1) top.watch();  // before anybody looks
        serve(root);
        if (p.state == claim_state::waiting && p.why == errc::none) p.why = p.at->behind_;
    }

    /// While a root is pressed, what is freed below goes back to it at once, as if somebody waited; but nothing is held back from
    /// anybody. Each press ends with a release_pressure.
    static void press(quota_node& root) noexcept {
        root.serve_ = &serve;
        ++root.waiting_;
        if (++root.waiting_here_ == 1) root.watch();
    }
    static void release_pressure(quota_node& root) noexcept {
        --root.waiting_;
        if (--root.waiting_here_ == 0) root.unwatch();
    }

    static void leave(quota_wait_entry& p) noexcept {
        unmark(*p.at);
        remove(p);
        p.at->serve_waiters();
    }

    /// Serves everybody whom it can, first come first. Only the first of each quota is tried: while that one waits, what it
    /// may get bytes from is refused to the others there. So the steps don't grow with how many wait.
    static void serve(quota_node& root) noexcept {
        for (auto* q = root.waiting_quotas_; q != nullptr; q = q->next_waiting_) unmark(*q);
        if (std::exchange(root.limits_changed_, false)) refuse_hopeless(root);
        for (quota_node *q = root.waiting_quotas_, *next = nullptr; q != nullptr; q = next) {
            auto& p = *q->queue_.front();
            p.why = q->take(p.size, nullptr);
            if (p.why != errc::none) {
                mark(p);
                next = q->next_waiting_;
                continue;
            }
            // The next one of this quota came later: its place in the order is further on, or here.
            auto* const behind = q->next_waiting_;
            end(p, claim_state::granted);
            next = behind;
            if (auto* const then = q->queue_.front();
                then != nullptr && (behind == nullptr || comes_before(*q, *behind)))
                next = q;
        }
    }

private:
    // After a refusal: who comes later doesn't get bytes from where these may come from.
    static void mark(const quota_wait_entry& p) noexcept {
        auto n = p.size;
        for (auto* q = p.at; q->behind_ == errc::none; q = q->parent_) {
            n -= std::min(n, q->cell_.now().available());
            const bool obstacle =
                q->parent_ == nullptr || q->borrowed_.load(std::memory_order_relaxed) + n > q->burst_.count();
            q->behind_ = obstacle ? errc::over_quota : errc::out_of_memory;
            if (obstacle) break;
        }
    }
    static void unmark(quota_node& from) noexcept {
        for (auto* q = &from; q != nullptr; q = q->may_borrow_ ? q->parent_ : nullptr) q->behind_ = errc::none;
    }

    [[nodiscard]] static bool comes_before(const quota_node& a, const quota_node& b) noexcept {
        return a.queue_.front()->ticket < b.queue_.front()->ticket;
    }
    static void insert(quota_node& root, quota_node& q, std::uint64_t ticket) noexcept {
        quota_node** at = &root.waiting_quotas_;
        while (*at != nullptr && (*at)->queue_.front()->ticket < ticket) at = &(*at)->next_waiting_;
        q.next_waiting_ = std::exchange(*at, &q);
    }
    static void take_out(quota_node& root, quota_node& q) noexcept {
        quota_node** at = &root.waiting_quotas_;
        while (*at != &q) at = &(*at)->next_waiting_;
        *at = q.next_waiting_;
    }

    // After a change of limits: those that can't be served any more.
    static void refuse_hopeless(quota_node& root) noexcept {
        for (quota_node *q = root.waiting_quotas_, *after = nullptr; q != nullptr; q = after) {
            after = q->next_waiting_;
            for (quota_wait_entry *p = q->queue_.front(), *next = nullptr; p != nullptr; p = next) {
                next = p->of_quota.next;
                p->why = q->unfit(p->size);
                if (p->why != errc::none) end(*p, claim_state::refused);
            }
        }
    }

    static void end(quota_wait_entry& p, claim_state how) noexcept {
        p.state = how;
        remove(p);
        if (p.wake != nullptr) p.wake(p);
    }
    static void remove(quota_wait_entry& p) noexcept {
        auto& q = *p.at;
        auto& root = *q.root_;
        const bool first = q.queue_.front() == &p;
        if (first) take_out(root, q);
        q.queue_.remove(p);
        if (first && q.queue_.front() != nullptr) insert(root, q, q.queue_.front()->ticket);
        if (p.wake != nullptr) root.threads_.remove(p);
        --root.waiting_;
        auto& top = q.top();
        if (--top.waiting_here_ == 0) top.unwatch();
    }
};

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
        quota_wait_queue::join(*this);
        while (state == claim_state::waiting) {
            const auto now = until.time.now();
            if (until.stop.stop_requested()) return give_up(errc::stopped);
            if (now >= until.deadline) return give_up(errc::deadline_exceeded);
            const bool polls = !root.polled_ && hook_registration::any_to_poll(root);
            const auto most = polls ? ns{slice} : ns{std::chrono::minutes(1)};
            const auto look_again = std::min(until.deadline, saturating_add(now, most));
            if (polls) {
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
    // How long streams may be waited for, or left alone while there is nothing to come from them, before whoever does it
    // looks at the rest again.
    static constexpr ns slice = std::chrono::milliseconds(1);

    errc give_up(errc code) noexcept {
        quota_wait_queue::leave(*this);
        pass_on();
        return code;
    }
    // Somebody else looks after the streams.
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
