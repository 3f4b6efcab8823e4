// SPDX-License-Identifier: Apache-2.0
// The state of a quota, and what it does under the mutex of its tree: lending, gathering idle
// loans, changing. quota.hpp is the public part, with the calls that need no mutex;
// quota_wait_queue.hpp is the queue of waiters.
//
//   // required by all members but tell_parents() and refuse()
//   const std::lock_guard lock(q.root_->mutex_);
//   if (q.take(4096, nullptr) == errc::none) ...;
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_cell.hpp>
#include <gpushare/memory/detail/turn_heap.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A refusal of `n` bytes by a quota that has `left` of `limit`.
[[nodiscard]] constexpr failure quota_refusal(errc code, std::uint64_t n, std::uint64_t left,
                                              std::uint64_t limit) noexcept {
    const auto because = code == errc::out_of_memory   ? reason::quota_above
                         : code == errc::size_overflow ? reason::size
                         : code == errc::closed        ? reason::unsaid
                                                       : reason::size_left;
    return {code, n, left, limit, because};
}

struct quota_node;
class hook_registration;

/// How far one request has come in asking the hooks of a tree; see quota_wait.hpp.
struct hook_cursor {
    instant until = instant::min();                                 // when it will be refused
    std::int64_t order = std::numeric_limits<std::int64_t>::min();  // of the hook asked last
    std::uint64_t number = 0;
    // the highest order of hooks that may be asked
    std::int64_t last = std::numeric_limits<std::int64_t>::max();
};
using ask_function = bool (*)(quota_node&, hook_cursor&, std::uint64_t, bool) noexcept;

/// Whether a charge queues behind waiters for the same bytes. Guarantees don't queue: burst is the
/// bytes that they leave.
enum class precedence : bool { after_waiters, before_waiters };

/// Where something is in one of its lists.
template <class T>
struct list_link {
    T *previous = nullptr, *next = nullptr;
};

/// First in, first out; any entry leaves from anywhere at once.
template <class T, list_link<T> T::*Link>
class linked_list {
public:
    [[nodiscard]] T* front() const noexcept { return first_; }
    void push(T& e) noexcept {
        e.*Link = {.previous = last_};
        (last_ != nullptr ? (last_->*Link).next : first_) = &e;
        last_ = &e;
    }
    void remove(T& e) noexcept {
        const list_link<T> at = e.*Link;
        (at.previous != nullptr ? (at.previous->*Link).next : first_) = at.next;
        (at.next != nullptr ? (at.next->*Link).previous : last_) = at.previous;
    }

private:
    T *first_ = nullptr, *last_ = nullptr;
};

/// A waiter. All members are under the mutex of the tree.
struct quota_wait_entry {
    list_link<quota_wait_entry> of_quota{}, of_threads{};
    quota_node* at = nullptr;
    std::uint64_t size = 0;
    std::uint64_t ticket = 0;  // an earlier waiter has a smaller ticket
    claim_state state = claim_state::waiting;
    errc why = errc::none;  // of the last refusal
    // a thread that may call hooks for all waiters
    bool polls = false;
    // called for a thread that waits no more; under the mutex
    void (*wake)(quota_wait_entry&) noexcept = nullptr;
};

/// A quota, as its tree sees it. Nothing here is for users.
struct alignas(64) quota_node {
    quota_node(quota_node* parent, bytes guaranteed, bytes burst) noexcept
        : parent_(parent), root_(parent == nullptr ? this : parent->root_), guaranteed_(guaranteed), burst_(burst) {}

    errc refuse(errc why) noexcept {
        refusals_.fetch_add(1, std::memory_order_relaxed);
        return why;
    }

    // Tells the quotas above, after the release, that there may be idle loans below. Relaxed
    // suffices: a thread that gathers clears the flag and then freezes. A freeze after our release
    // finds the bytes. An earlier freeze was thawed before our release; having seen the thaw, we
    // see the cleared flag and set it again. A charge that doesn't see the flag yet is concurrent
    // with our call, and may still count these bytes as charged.
    [[gnu::noinline]] void tell_parents() const noexcept {
        for (const quota_node* q = parent_; q != nullptr; q = q->parent_)
            if (!q->idle_below_.load(std::memory_order_relaxed)) q->idle_below_.store(true, std::memory_order_relaxed);
    }

    bool attach(quota_node& child) noexcept {
        const std::lock_guard lock(root_->mutex_);
        if (take(child.guaranteed_.count(), nullptr, precedence::before_waiters) != errc::none) return false;
        child.next_ = std::exchange(children_, &child);
        promised_ += child.guaranteed_;
        // others may wait for the promised bytes
        if (child.guaranteed_ != bytes{}) root_->limits_changed_ = true;
        note_borrower(child);
        // a waiter that can get less now may be refused further down, and let others pass
        serve_waiters();
        return true;
    }

    void detach(quota_node& child) noexcept {
        const std::lock_guard lock(root_->mutex_);
        for (quota_node** link = &children_; *link != nullptr; link = &(*link)->next_) {
            if (*link != &child) continue;
            *link = child.next_;
            break;
        }
        if (child.may_borrow_) --borrowers_;
        promised_ = promised_ - child.guaranteed_;
        put(child.cell_.now().available());
        serve_waiters();
    }

    // While the word is frozen, charges and releases take the mutex: only the mutex's holder
    // changes the word then, and the held and borrowed bytes with it. A quota over its limit stays
    // frozen.
    void freeze() const noexcept { cell_.freeze(); }
    void thaw(quota_word word) const noexcept { cell_.publish(word.frozen_if(over_limit() || watched())); }
    // Refusals by a stopped quota come to the mutex, so that they say errc::closed.
    void hold(std::uint64_t held) const noexcept {
        cell_.hold(held, burst_ == bytes{} && borrowers_ == 0 && !stopped());
    }
    // Written under the mutex. Acquire: a thread that sees the stop sees what happened before it.
    [[nodiscard]] bool stopped() const noexcept { return stopped_.load(std::memory_order_acquire); }
    [[nodiscard]] bool over_limit() const noexcept {
        return borrowed_.load(std::memory_order_relaxed) > burst_.count();
    }

    // A child counts as a borrower from the first burst, or debt after a resize, to its end.
    void note_borrower(quota_node& child) noexcept {
        const bool borrows = child.burst_ != bytes{} || child.over_limit();
        if (!borrows || std::exchange(child.may_borrow_, true)) return;
        ++borrowers_;
        freeze();
        hold(cell_.held());
        thaw(cell_.now());
        auto& waiting = top().waiting_here_;
        waiting += child.waiting_here_;
        child.waiting_here_ = 0;
        if (child.watched()) top().watch();
    }

    // Charges `n` bytes. `asking` is the child on whose behalf, if any: it has no idle bytes to
    // gather.
    errc take(std::uint64_t n, const quota_node* asking, precedence when = precedence::after_waiters) noexcept {
        if (stopped() && n != 0) return refuse(errc::closed);
        if (behind_ != errc::none && n != 0 && when == precedence::after_waiters) return refuse(behind_);
        freeze();
        auto word = cell_.now();
        if (n > word.available() || cell_.held() - word.available() + n > cell_.peak.load(std::memory_order_relaxed))
            word = gather(asking);
        const auto need = n - std::min(n, word.available());
        if (const errc why = need == 0 ? errc::none : borrow(need, when); why != errc::none) {
            give_back(word);
            return refuse(why);
        }
        hold(cell_.held() + need);
        word = word.plus(need).charged(n);
        cell_.count_charge(word);
        cell_.raise_peak(cell_.held() - word.available());
        thaw(word);
        return errc::none;
    }

    errc borrow(std::uint64_t need, precedence when) noexcept {
        const auto borrowed = borrowed_.load(std::memory_order_relaxed);
        if (parent_ == nullptr || borrowed + need > burst_.count()) return errc::over_quota;
        if (const errc why = parent_->take(need, this, when); why != errc::none) return from_above(why);
        borrowed_.store(borrowed + need, std::memory_order_relaxed);
        return errc::none;
    }

    // Translates the parent's reason for refusing a loan for the requester.
    [[nodiscard]] static constexpr errc from_above(errc why) noexcept {
        return why == errc::none || why == errc::closed ? why : errc::out_of_memory;
    }

    // The bytes that the parent must be charged for such a guarantee. The parent is charged for
    // borrowed bytes already.
    [[nodiscard]] std::uint64_t growth(bytes guaranteed) const noexcept {
        const auto grow = (guaranteed - guaranteed_).count();
        return grow - std::min(grow, borrowed_.load(std::memory_order_relaxed));
    }

    // Gives no idle bytes back beforehand: another quota could take them before this one does.
    errc change(bytes guaranteed, bytes burst) noexcept {
        const auto grow = (guaranteed - guaranteed_).count(), fresh = growth(guaranteed);
        if (const errc why = parent_ != nullptr ? parent_->take(fresh, this, precedence::before_waiters) : errc::none;
            why != errc::none) {
            tell_parents();  // the parent has passed over idle bytes here
            return why == errc::closed ? why : errc::no_room;
        }
        const auto shrink = (guaranteed_ - guaranteed).count();
        set_limits(guaranteed, burst, borrowed_.load(std::memory_order_relaxed) - (grow - fresh) + shrink, fresh);
        return errc::none;
    }

    // `fresh`: bytes that become the quota's own and weren't before.
    void set_limits(bytes guaranteed, bytes burst, std::uint64_t borrowed, std::uint64_t fresh) noexcept {
        const bool was_over = over_limit();
        freeze();
        if (parent_ != nullptr) parent_->promised_ = parent_->promised_ + guaranteed - guaranteed_;
        guaranteed_ = guaranteed;
        burst_ = burst;
        borrowed_.store(borrowed, std::memory_order_relaxed);
        root_->limits_changed_ = true;
        settle(fresh);
        if (over_limit()) {  // still, without its own idle bytes
            watch();
            settle();
        }
        if (was_over && !over_limit()) unwatch();
        if (parent_ != nullptr) parent_->note_borrower(*this);
    }

    // Nothing is granted any more, and released bytes go to the parent.
    void stop() noexcept {
        stopped_.store(true, std::memory_order_release);
        (void)change({}, {});
    }

    // Takes back `n` bytes that a child was lent.
    void put(std::uint64_t n) const noexcept {
        if (n == 0) return;
        freeze();
        give_back(cell_.released(cell_.now(), n));
    }

    // Publishes the word of a frozen quota that may have more bytes left than before. If the quota
    // is over its limit, or a request waits, no loan stays here. Doesn't look for idle loans below,
    // since a quota there may just be requesting bytes from this one.
    void give_back(quota_word word) const noexcept {
        if (over_limit() || watched()) {
            const auto back = thaw_without_idle(word);
            if (parent_ != nullptr) parent_->put(back);
        } else {
            thaw(word);
            if (borrowed_.load(std::memory_order_relaxed) != 0) tell_parents();
        }
    }

    // Adds `fresh` bytes that the parent was charged. Returns to the parent the borrowed bytes that
    // are idle, here or below.
    void settle(std::uint64_t fresh = 0) const noexcept {
        freeze();
        const auto word = gather(nullptr).plus(fresh);
        hold(cell_.held() + fresh);
        const auto back = thaw_without_idle(word);
        if (parent_ != nullptr) parent_->put(back);
    }

    // Brings idle loans of the quotas below to this one, which is frozen, and returns its word. All
    // quotas are frozen at one moment, and the answer is exact for that moment. Children that never
    // borrow hold none of this quota's bytes. Below a quota that is watched, or over its limit, no
    // loan is idle.
    quota_word gather(const quota_node* asking) const noexcept {
        auto word = cell_.now();
        if (!idle_below_.load(std::memory_order_relaxed) || over_limit() || watched()) return word;
        freeze_below(asking);
        word = cell_.released(word, collect_below(asking));
        cell_.publish(word);  // frozen still
        return word;
    }
    void freeze_below(const quota_node* asking) const noexcept {
        // before the freeze, for tell_parents()
        idle_below_.store(false, std::memory_order_relaxed);
        for (const quota_node* c = children_; c != nullptr; c = c->next_) {
            if (c == asking || !c->may_borrow_) continue;
            c->freeze();
            c->freeze_below(nullptr);
        }
    }
    std::uint64_t collect_below(const quota_node* asking) const noexcept {
        std::uint64_t idle = 0;
        for (const quota_node* c = children_; c != nullptr; c = c->next_) {
            if (c == asking || !c->may_borrow_) continue;
            const auto from_below = c->collect_below(nullptr);
            idle += c->thaw_without_idle(c->cell_.released(c->cell_.now(), from_below));
        }
        return idle;
    }

    // Thaws the word without the bytes that are borrowed and idle, and returns their number.
    std::uint64_t thaw_without_idle(quota_word word) const noexcept {
        const bool was_over = over_limit();
        const auto borrowed = borrowed_.load(std::memory_order_relaxed);
        const auto idle = std::min(borrowed, word.available());
        hold(cell_.held() - idle);
        borrowed_.store(borrowed - idle, std::memory_order_relaxed);
        thaw(word.minus(idle));
        if (was_over && !over_limit()) unwatch();
        return idle;
    }

    // Charges `n` bytes again that were just released here, whatever the limits are by now. The top
    // is watched, so nobody else has got these bytes; debts that they have paid are owed again.
    void take_again(std::uint64_t n) noexcept {
        freeze();
        const auto need = n - std::min(n, cell_.now().available());
        if (need != 0) {
            if (parent_ != nullptr) parent_->take_again(need);
            borrowed_.store(borrowed_.load(std::memory_order_relaxed) + need, std::memory_order_relaxed);
            hold(cell_.held() + need);
        }
        const auto word = cell_.now().plus(need).charged(n);
        cell_.count_charge(word);
        thaw(word);
    }

    // The bytes that could be charged at one moment, here and in the frozen quotas above.
    [[nodiscard]] bytes free_now(const quota_node* asking = nullptr,
                                 precedence when = precedence::after_waiters) const noexcept {
        if (behind_ != errc::none && when == precedence::after_waiters) return bytes{};
        freeze();
        const auto word = gather(asking);
        bytes more{};
        if (const bytes room = burst_ - bytes{borrowed_.load(std::memory_order_relaxed)}; parent_ != nullptr)
            more = std::min(room, parent_->free_now(this, when));
        give_back(word);
        return bytes{word.available()} + more;
    }

    // Why `n` bytes can never be charged here, or errc::none.
    [[nodiscard]] errc unfit(std::uint64_t n) const noexcept {
        if (stopped() && n != 0) return errc::closed;
        if (bytes{n} > guaranteed_ + burst_) return n > quota_word::mask ? errc::size_overflow : errc::over_quota;
        const bytes more = bytes{n} - guaranteed_;
        return more == bytes{} ? errc::none : from_above(parent_->unfit(more.count()));
    }
    // The most that could be charged here if all charges anywhere were released and all guarantees
    // stayed.
    [[nodiscard]] bytes attainable() const noexcept {
        const bytes lent = parent_ != nullptr ? std::min(burst_, parent_->attainable()) : bytes{};
        return guaranteed_ + lent - promised_;
    }
    // Why a waiter for `n` bytes would wait for ever, or errc::none.
    [[nodiscard]] errc hopeless(std::uint64_t n) const noexcept {
        if (const errc why = unfit(n); why != errc::none) return why;
        if (bytes{n} <= attainable()) return errc::none;
        return bytes{n} + promised_ > guaranteed_ + burst_ ? errc::over_quota : errc::out_of_memory;
    }

    // ---- Waiters. Bytes come from a quota's top, the last quota that it can borrow from, and from
    // all quotas that borrow there.

    [[nodiscard]] quota_node& top() noexcept { return const_cast<quota_node&>(std::as_const(*this).top()); }
    [[nodiscard]] const quota_node& top() const noexcept {
        const quota_node* q = this;
        while (q->may_borrow_) q = q->parent_;
        return *q;
    }
    // Whether idle bytes here go back immediately: a request waits, or a quota that lent them is
    // over its limit.
    [[nodiscard]] bool watched() const noexcept {
        const quota_node* q = this;
        for (; q->may_borrow_; q = q->parent_)
            if (q->parent_->over_limit()) return true;
        return q->waiting_here_ != 0;
    }

    // Freezes all quotas that bytes may come from, and brings idle loans here. From now on each
    // loan comes back with its release. An earlier release may not have reported yet that it left a
    // loan idle, so this looks for loans whatever the flags say.
    void watch() const noexcept {
        freeze();
        freeze_below(nullptr);
        thaw(cell_.released(cell_.now(), collect_below(nullptr)));
    }
    // Thaws the quotas that aren't watched any more.
    void unwatch() const noexcept {
        for (const quota_node* c = children_; c != nullptr; c = c->next_)
            if (c->may_borrow_) c->unwatch();
        if (const auto word = cell_.now(); word.frozen()) thaw(word);
    }
    // Call after any change that may leave more for waiters here, or in quotas that this one
    // borrows from.
    void serve_waiters() noexcept {
        if (root_->waiting_ != 0) root_->serve_(*this);
    }

    // The data that charges and releases touch is on one cache line. Mutable: a read takes idle
    // loans back.
    mutable quota_cell cell_;
    mutable std::atomic<std::uint64_t> borrowed_{0};  // changes in a freeze
    quota_node* const parent_;
    quota_node* const root_;
    // a quota below may hold a loan that it doesn't use
    alignas(64) mutable std::atomic<bool> idle_below_{false};
    std::atomic<std::uint64_t> refusals_{0};
    std::atomic<bool> stopped_{false};
    mutable std::mutex mutex_;  // of the whole tree, in its root; it guards the members below
    bytes guaranteed_, burst_;
    bytes promised_{};  // guaranteed to its children
    quota_node *children_ = nullptr, *next_ = nullptr;
    int borrowers_ = 0;  // children that may_borrow_
    bool may_borrow_ = false;
    errc behind_ = errc::none;  // the refusal of charges while a request waits for bytes from here
    // waiters for bytes of this quota
    linked_list<quota_wait_entry, &quota_wait_entry::of_quota> queue_;
    // how many waiters have this quota as their top
    int waiting_here_ = 0;
    // The state of the queue; see quota_wait_queue.hpp.
    quota_turn turn_{.of = this};       // while there is a queue
    quota_node* stopped_by_ = nullptr;  // the quota that has refused its first waiter
    // the quota whose first waiter gets the bytes left here, if any
    quota_node* ahead_ = nullptr;
    turn_heap stopped_here_;           // quotas that this one has refused
    list_link<quota_node> in_line_{};  // in waiting_quotas_
    std::string_view name_{};          // the owner
    // In the root only.
    int waiting_ = 0;                                                // how many wait
    linked_list<quota_node, &quota_node::in_line_> waiting_quotas_;  // quotas with a queue
    // those that may be served now
    turn_heap to_try_;
    linked_list<quota_wait_entry, &quota_wait_entry::of_threads> threads_;  // threads that poll
    std::uint64_t tickets_ = 0;
    // since the last search of the queues for hopeless waiters
    bool limits_changed_ = false;
    // set by the first waiter: programs that never wait don't pay
    void (*serve_)(quota_node&) noexcept = nullptr;
    hook_registration* hooks_ = nullptr;  // in the order in which they are asked
    std::uint64_t hooks_made_ = 0;
    // set by the first hook, for the end of the tree
    void (*orphan_hooks_)(quota_node&) noexcept = nullptr;
    // set by the first hook
    std::atomic<ask_function> ask_next_{nullptr};
    bool (*in_hook_)(const quota_node&, std::thread::id) noexcept = nullptr;  // likewise
    bool polled_ = false;  // a waiter polls the hooks that have a wait function
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
