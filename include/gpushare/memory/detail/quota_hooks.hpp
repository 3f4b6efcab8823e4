// SPDX-License-Identifier: Apache-2.0
// The hooks of a tree of quotas (memory/quota_wait.hpp): their list, the waiters that each can
// help, and the calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A hook in its tree's list, and the threads inside it. All under the mutex of the tree, except
/// for the calls.
class hook_registration {
public:
    using free_function = inplace_function<bytes(const reclaim_request&), 48>;
    using wait_function = inplace_function<bool(instant), 48>;

    hook_registration(quota_node& of, int order, free_function free, wait_function wait, bool for_all = false)
        : root_(of.root_), of_(&of), order_(order), for_all_(for_all), free_(std::move(free)), wait_(std::move(wait)) {
        auto& root = *of.root_;
        const std::lock_guard lock(root.mutex_);
        number_ = ++root.hooks_made_;
        hook_registration** at = &root.hooks_;
        while (*at != nullptr && (*at)->order_ <= order_) at = &(*at)->next_;
        next_ = std::exchange(*at, this);
        // Release: a thread that sees the function sees this header's data initialised.
        root.ask_next_.store(&ask_next, std::memory_order_release);
        root.in_hook_ = &inside;
        root.orphan_hooks_ = [](quota_node& gone) noexcept {
            // Release: another thread may destroy the hook as soon as it sees null.
            for (auto* h = gone.hooks_; h != nullptr;)
                std::exchange(h, h->next_)->of_.store(nullptr, std::memory_order_release);
        };
    }
    hook_registration(const hook_registration&) = delete;
    hook_registration& operator=(const hook_registration&) = delete;
    ~hook_registration() {
        if (orphaned()) return;
        std::condition_variable left;
        std::unique_lock lock(root_->mutex_);
        left_ = &left;  // not called any more, but still in the list, since threads may be in it
        left.wait(lock, [&] { return calls_.empty(); });
        hook_registration** at = &root_->hooks_;
        while (*at != this) at = &(*at)->next_;
        *at = next_;
    }

    /// See quota::ask_next.
    static bool ask_next(quota_node& q, hook_cursor& asked, std::uint64_t n, bool below) noexcept {
        std::unique_lock lock(q.root_->mutex_);
        if (q.unfit(n) != errc::none || inside(*q.root_, std::this_thread::get_id())) return false;
        const auto [level, missing] = below ? shortage{q.root_, n} : shortage_of(q, n, false);
        for (hook_registration* h = q.root_->hooks_; h != nullptr;) {
            reclaim_request request{.missing = bytes{missing}, .until = asked.until, .below = below};
            if (!h->is_after(asked) || !h->concerned(q, *level, request)) {
                h = h->next_;
                continue;
            }
            if (h->order_ > asked.last) return false;
            asked.order = h->order_;
            asked.number = h->number_;
            bytes freed{};
            h->call(lock, [&] { freed = h->free_(request); });
            if (freed != bytes{}) return true;
            h = q.root_->hooks_;  // the list may have changed; the cursor still holds
        }
        return false;
    }

    /// Calls every hook that has a wait function and could help a waiter, so that it frees what it
    /// can. The first hook that expects more bytes then waits for them, at most until `until`.
    /// False if no hook expects any. `lock` holds the mutex of the tree, except during the calls.
    static bool poll(quota_node& root, std::unique_lock<std::mutex>& lock, instant until) noexcept {
        bool waited = false;
        hook_cursor at;
        for (hook_registration* h = root.hooks_; h != nullptr;) {
            reclaim_request request{.until = until};
            if (!h->wait_ || !h->is_after(at) || !h->wanted(root, request)) {
                h = h->next_;
                continue;
            }
            at.order = h->order_;
            at.number = h->number_;
            h->call(lock, [&] {
                (void)h->free_(request);
                if (!waited) waited = h->wait_(until);
            });
            h = root.hooks_;
        }
        return waited;
    }
    /// Whether the root of the tree is gone.
    [[nodiscard]] bool orphaned() const noexcept { return of_.load(std::memory_order_acquire) == nullptr; }
    /// Whether the hook is in the tree of this root, which exists. Doesn't look at the hook's own
    /// root, which another thread may be destroying if it is another one.
    [[nodiscard]] bool in_tree_of(const quota_node& root) const noexcept { return !orphaned() && root_ == &root; }
    /// True if there is a hook that has a wait function and could help a waiter.
    static bool any_to_poll(const quota_node& root) noexcept {
        reclaim_request unused;
        for (const hook_registration* h = root.hooks_; h != nullptr; h = h->next_)
            if (h->wait_ && h->wanted(root, unused)) return true;
        return false;
    }

    /// Whether that thread is in a hook of the tree.
    static bool inside(const quota_node& root, std::thread::id thread) noexcept {
        for (const hook_registration* h = root.hooks_; h != nullptr; h = h->next_)
            for (const call_frame* c = h->calls_.front(); c != nullptr; c = c->next)
                if (c->thread == thread) return true;
        return false;
    }

private:
    struct call_frame {
        call_frame* next = nullptr;
        std::thread::id thread = std::this_thread::get_id();
    };
    struct shortage {
        const quota_node* level;
        std::uint64_t missing;
    };

    template <class Call>
    void call(std::unique_lock<std::mutex>& lock, Call body) noexcept {
        call_frame frame;
        calls_.push(frame);
        lock.unlock();
        try {
            body();
        } catch (...) {  // a hook that throws counts as one that freed nothing
        }
        lock.lock();
        calls_.remove(frame);
        if (left_ != nullptr && calls_.empty()) left_->notify_one();
    }

    [[nodiscard]] bool is_after(const hook_cursor& at) const noexcept {
        return order_ != at.order ? order_ > at.order : number_ > at.number;
    }

    // The quota that refuses `n` bytes for q, and the number of bytes that are missing there.
    // `served`: for a waiter, from which no bytes are held back.
    static shortage shortage_of(const quota_node& q, std::uint64_t n, bool served) noexcept {
        const quota_node* level = &q;
        for (auto need = n;; level = level->parent_) {
            const bool held_back = !served && level->behind_ != errc::none;
            if (!held_back) need -= std::min(need, level->cell_.now().available());
            const auto burst = level->burst_ - bytes{level->borrowed_.load(std::memory_order_relaxed)};
            const bool obstacle = level->parent_ == nullptr || bytes{need} > burst;
            if (need == 0) return {level, n};  // the request would fit by now
            if (obstacle || held_back)
                return {level,
                        level->parent_ == nullptr ? need : std::max((bytes{need} - burst).count(), std::uint64_t{1})};
        }
    }

    // Whether the hook can help a waiter. Only the first waiter of each quota counts, since the
    // others come after it. `request` gets the bytes that the oldest of these lacks.
    [[nodiscard]] bool wanted(const quota_node& root, reclaim_request& request) const noexcept {
        const quota_wait_entry* oldest = nullptr;
        for (const quota_node* q = root.waiting_quotas_.front(); q != nullptr; q = q->in_line_.next) {
            const auto* const first = q->queue_.front();
            if (oldest != nullptr && oldest->ticket < first->ticket) continue;
            const auto [level, missing] = shortage_of(*q, first->size, true);
            reclaim_request of_first = request;
            of_first.missing = bytes{missing};
            of_first.own = true;
            if (!concerned(*q, *level, of_first)) continue;
            oldest = first;
            request = of_first;
        }
        return oldest != nullptr;
    }

    // Whether the hook can do something for q, which `level` refuses. `request` has the bytes that
    // are missing at `level`.
    [[nodiscard]] bool concerned(const quota_node& q, const quota_node& level,
                                 reclaim_request& request) const noexcept {
        if (left_ != nullptr) return false;
        if (for_all_) return request.missing != bytes{};
        for (const quota_node* b = of_.load(std::memory_order_relaxed); b != nullptr; b = b->parent_) {
            if (between(b, q, level)) return request.missing != bytes{};
            request.own = false;
            request.missing = std::min(request.missing, bytes{b->borrowed_.load(std::memory_order_relaxed)});
        }
        return false;
    }
    static bool between(const quota_node* b, const quota_node& q, const quota_node& level) noexcept {
        for (const quota_node* on_way = &q;; on_way = on_way->parent_) {
            if (on_way == b) return true;
            if (on_way == &level) return false;
        }
    }

    quota_node* const root_;
    std::atomic<quota_node*> of_;  // null once the root is gone
    int order_;
    bool for_all_;  // for all of the tree's quotas
    std::uint64_t number_ = 0;
    free_function free_;
    wait_function wait_;
    hook_registration* next_ = nullptr;
    fifo<call_frame> calls_;
    std::condition_variable* left_ = nullptr;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
