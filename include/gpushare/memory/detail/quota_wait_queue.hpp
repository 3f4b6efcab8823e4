// SPDX-License-Identifier: Apache-2.0
// Who waits for bytes of a quota, first come first served. quota_wait.hpp is what users see.
//
// Who waits keeps its place in the queue: bytes that it waits for are refused to whoever comes later, however little that asks
// for, so a big claim isn't starved by small ones. Only bytes that it could be served from are held back: its own
// quota's, and if that isn't the obstacle, what its parent lends, and so on up to the quota whose limit is the obstacle.
// Guarantees stay untouched: nobody's guaranteed bytes are held back for others, and new guarantees go ahead of
// those who wait. Every resize, release and end of a quota looks whom it serves, under the mutex of the tree that it has anyway.
//
// How no wake-up is lost. A release is one compare-and-swap of a word, and so is what asks for the mutex instead: the
// frozen bit of the same word. Whoever joins the queue freezes all words that its bytes may come from, and then looks.
// A release before the freeze is in the word that it looks at; one after it fails to swap, sees the bit, comes to
// the mutex and serves those who wait. There is no second flag that the two could miss each other by, and while nobody
// waits a release pays nothing.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>

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

/// Somebody who waits. All under the mutex of the tree.
struct quota_wait_entry {
    quota_wait_entry* next = nullptr;
    quota_node* at = nullptr;
    std::uint64_t size = 0;
    claim_state state = claim_state::waiting;
    errc why = errc::none;                               // of the last refusal
    void (*wake)(quota_wait_entry&) noexcept = nullptr;  // once it waits no more; under the mutex
};

/// The wait queue of a tree: a state machine without a clock or a thread. All under the mutex of the tree.
struct quota_wait_queue {
    static void join(quota_wait_entry& p) noexcept {
        auto& root = *p.at->root_;
        auto& top = p.at->top();
        root.serve_ = &serve;
        root.waiters_.push(p);
        ++root.waiting_;
        if (++top.waiting_here_ == 1) top.watch();  // before anybody looks
        serve(root);
    }

    static void leave(quota_wait_entry& p) noexcept {
        unmark(p);
        remove(p);
        p.at->serve_waiters();
    }

    /// Serves everybody whom it can, first come first.
    static void serve(quota_node& root) noexcept {
        for (const auto* p = root.waiters_.front(); p != nullptr; p = p->next) unmark(*p);
        for (quota_wait_entry *p = root.waiters_.front(), *next = nullptr; p != nullptr; p = next) {
            next = p->next;
            p->why = p->at->unfit(p->size);
            const bool hopeless = p->why != errc::none;
            if (!hopeless) p->why = p->at->take(p->size, nullptr);
            if (!hopeless && p->why != errc::none) {
                mark(*p);
                continue;
            }
            p->state = hopeless ? claim_state::refused : claim_state::granted;
            remove(*p);
            if (p->wake != nullptr) p->wake(*p);
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
    static void unmark(const quota_wait_entry& p) noexcept {
        for (auto* q = p.at; q != nullptr; q = q->may_borrow_ ? q->parent_ : nullptr) q->behind_ = errc::none;
    }

    static void remove(quota_wait_entry& p) noexcept {
        auto& top = p.at->top();
        p.at->root_->waiters_.remove(p);
        --p.at->root_->waiting_;
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
        for (auto* p = root.waiters_.front(); p != nullptr; p = p->next) {
            if (p->wake == nullptr) continue;  // no thread waits there
            p->wake(*p);
            break;
        }
    }

    std::condition_variable woken;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
