// SPDX-License-Identifier: Apache-2.0
// Hooks that make room before a request is refused: they spill to the host, drop a cache, or give burst back to a
// neighbour.
//
//   // 10: its order, lower ones are asked first
//   gpushare::quota_hook spill{chat, 10, [&](const gpushare::reclaim_request& r) { return cache.evict(r.missing); }};
//
// Which hooks are asked. If a request's own quota refuses it, the hooks of that quota are asked, to free memory of
// their own tenant. If a quota above refuses it, the hooks on the way up are asked as well, and those of quotas that
// have borrowed from there, each for at most what it has borrowed: burst is lent, and this is how it is called back.
// Guaranteed bytes are never asked for. A hook is told how many bytes are missing and until when the request can wait.
// It frees what it can, now or until then, and returns how much it has freed already. The request is then tried again,
// and refused if that fails.
//
// Hooks are called in ascending order by the thread that asks, under no lock, several at once where several threads
// ask. An exception counts as nothing freed. A lock of the program's that a hook takes it must only try, where somebody
// allocates under it: that thread may be the one that asks. A hook may allocate, from any pool: who
// lacks memory of a pool waits for what is on its way between that and its upstream, but not for a
// thread that is in a hook (quota::in_hook), so two hooks that allocate from each other's pool
// don't wait for each other.
//
// An allocation inside a hook asks no hook of that tree, by whatever quota of it: so no hook calls itself, round about
// another tree either, and none is called below another one that may hold a lock. The guard is by tree and thread,
// because what it guards, the stack and the locks that are held, is a thread's. Another thread
// isn't guarded: if a hook waits for one that allocates, that one asks the hooks once more, and it
// is the program's to see that this ends.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The request that a hook gets.
struct reclaim_request {
    bytes missing{};                 ///< how many to free at most; for a borrower, at most what it has borrowed
    instant until = instant::min();  ///< the request's deadline, of its own clock; min(): now or not at all
    bool own = true;                 ///< a request of its own quota or one below; false: a neighbour's
    bool below = false;              ///< the quota has the bytes, but the memory below it hasn't
};

namespace detail {

/// A hook in its tree's list, and the threads inside it. All under the mutex of the tree, except for the calls.
class hook_registration {
public:
    using free_function = inplace_function<bytes(const reclaim_request&), 48>;
    using wait_function = inplace_function<bool(instant), 48>;

    hook_registration(quota_node& of, int order, free_function free, wait_function wait, bool for_all = false)
        : of_(&of), order_(order), for_all_(for_all), free_(std::move(free)), wait_(std::move(wait)) {
        auto& root = *of.root_;
        const std::lock_guard lock(root.mutex_);
        number_ = ++root.hooks_made_;
        hook_registration** at = &root.hooks_;
        while (*at != nullptr && (*at)->order_ <= order_) at = &(*at)->next_;
        next_ = std::exchange(*at, this);
        // Release: who sees the function sees this header's data initialised.
        root.ask_next_.store(&ask_next, std::memory_order_release);
        root.in_hook_ = &inside;
        root.orphan_hooks_ = [](quota_node& gone) noexcept {
            for (auto* h = gone.hooks_; h != nullptr; h = h->next_) h->of_ = nullptr;
        };
    }
    hook_registration(const hook_registration&) = delete;
    hook_registration& operator=(const hook_registration&) = delete;
    ~hook_registration() {
        if (of_ == nullptr) return;
        std::condition_variable left;
        std::unique_lock lock(of_->root_->mutex_);
        hook_registration** at = &of_->root_->hooks_;
        while (*at != this) at = &(*at)->next_;
        *at = next_;
        left_ = &left;
        left.wait(lock, [&] { return calls_.empty(); });
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
            h = q.root_->hooks_;  // the list may be another one by now; the cursor tells where we are
        }
        return false;
    }

    /// Calls every hook that has a wait function and could help a waiter, so that it frees what it can; then waits in
    /// the first one that has more to come, or until `until`. False if none has. `lock` holds the mutex of the tree,
    /// except during the calls.
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
    /// The quota that it belongs to; null once the root of the tree is gone.
    [[nodiscard]] const quota_node* of() const noexcept { return of_; }
    /// True if there is a hook that has a wait function and could help a waiter.
    static bool any_to_poll(const quota_node& root) noexcept {
        reclaim_request unused;
        for (const hook_registration* h = root.hooks_; h != nullptr; h = h->next_)
            if (h->wait_ && h->wanted(root, unused)) return true;
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
        } catch (...) {  // nobody's business but the hook's: nothing was freed
        }
        lock.lock();
        calls_.remove(frame);
        if (left_ != nullptr && calls_.empty()) left_->notify_one();
    }

    [[nodiscard]] bool is_after(const hook_cursor& at) const noexcept {
        return order_ != at.order ? order_ > at.order : number_ > at.number;
    }

    // Whether that thread is in a hook of the tree.
    static bool inside(const quota_node& root, std::thread::id thread) noexcept {
        for (const hook_registration* h = root.hooks_; h != nullptr; h = h->next_)
            for (const call_frame* c = h->calls_.front(); c != nullptr; c = c->next)
                if (c->thread == thread) return true;
        return false;
    }

    // The quota that refuses `n` bytes for q, and how many are missing there. `served`: for
    // somebody who waits, from whom nothing is held back.
    static shortage shortage_of(const quota_node& q, std::uint64_t n, bool served) noexcept {
        const quota_node* level = &q;
        for (auto need = n;; level = level->parent_) {
            const bool held_back = !served && level->behind_ != errc::none;
            if (!held_back) need -= std::min(need, level->cell_.now().available());
            const auto burst = level->burst_ - bytes{level->borrowed_.load(std::memory_order_relaxed)};
            const bool obstacle = level->parent_ == nullptr || bytes{need} > burst;
            if (need == 0) return {level, n};  // it would fit by now
            if (obstacle || held_back)
                return {level,
                        level->parent_ == nullptr ? need : std::max((bytes{need} - burst).count(), std::uint64_t{1})};
        }
    }

    // Whether it can do something for somebody who waits: the first of each quota, since the others
    // come after. `request` is what the oldest of these misses.
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

    // Whether it can do something for q, which `level` refuses; `request` has what is missing there.
    [[nodiscard]] bool concerned(const quota_node& q, const quota_node& level,
                                 reclaim_request& request) const noexcept {
        if (for_all_) return request.missing != bytes{};
        for (const quota_node* b = of_; b != nullptr; b = b->parent_) {
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

    quota_node* of_;
    int order_;
    bool for_all_;  // of the tree's quotas
    std::uint64_t number_ = 0;
    free_function free_;
    wait_function wait_;
    hook_registration* next_ = nullptr;
    fifo<call_frame> calls_;
    std::condition_variable* left_ = nullptr;
};

}  // namespace detail

/// A hook, registered as long as it lives. Neither copied nor moved; the quota must outlive it. The destructor waits
/// until no other thread is in a call of it; the hook must not destroy itself.
class quota_hook {
public:
    /// At most 48 bytes of captures; capture a pointer to more. Returns the bytes that it has freed already.
    using free_function = detail::hook_registration::free_function;
    /// Waits until something may have become free by itself, as when a stream reaches a point, or until the deadline.
    /// False, at once, if nothing will. A thread that waits for bytes calls it, and `free`, again and again.
    using wait_function = detail::hook_registration::wait_function;

    /// Asked for requests of `of`; hooks with a lower `order` are asked first.
    quota_hook(quota& of, int order, free_function free, wait_function wait = {})
        : registration_(of, order, std::move(free), std::move(wait)) {}

    /// Registers at the root of the tree that `of` is in: asked whenever any request in the tree lacks bytes, of a
    /// quota or of the memory below. Such a hook may outlive the tree.
    enum class root_tag : bool {};
    static constexpr root_tag at_root{};  ///< see root_tag
    /// See root_tag.
    quota_hook(root_tag, const quota& of, int order, free_function free, wait_function wait = {})
        : registration_(*of.root_, order, std::move(free), std::move(wait), true) {}
    /// Whether it is asked for requests of the tree of `q`.
    [[nodiscard]] bool in_tree_of(const quota& q) const noexcept {
        return registration_.of() != nullptr && registration_.of()->root_ == q.root_;
    }
    /// Whether the tree is gone.
    [[nodiscard]] bool orphaned() const noexcept { return registration_.of() == nullptr; }

private:
    detail::hook_registration registration_;
};

/// A hook that collects frees in stream order (deferred_frees.hpp) before any other hook is asked, and lets threads
/// that wait for bytes wait for the streams. It serves neighbours' requests too, since a block whose point is reached
/// is in nobody's use.
template <class Frees>
[[nodiscard]] quota_hook collecting_hook(quota& of, Frees& frees) {
    return quota_hook(
        of, std::numeric_limits<int>::min(),
        [&frees](const reclaim_request&) {
            return bytes{frees.collect()};
        },  // blocks: that there are any is what counts
        [&frees](instant deadline) { return frees.wait_any(deadline); });
}

/// The largest borrower from the quota that refuses `n` bytes to `asking`. Empty if `asking`'s own limit refuses them.
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

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
