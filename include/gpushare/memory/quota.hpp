// SPDX-License-Identifier: Apache-2.0
// A quota: how many bytes may be in use at once, exact to the byte under any concurrency. Quotas form a tree: a
// child's guaranteed bytes are set aside in its parent when it is made, its burst is lent by the parent while it is
// needed. It counts bytes and knows no memory; quota_resource ties it to an allocator.
//
//   gpushare::quota device{80_GiB};
//   gpushare::quota chat{device, 20_GiB, 4_GiB};        // 20 GiB whatever others do, 4 more while they are free
//   if (chat.try_charge(512_MiB) == gpushare::errc::none) { ...; chat.release(512_MiB); }
//
// How it is exact. What is still free, not what is used, lies in one atomic word, so a single compare-and-swap
// decides a charge, even beside a resize. Only when the word holds too little does a charge take the mutex of the tree,
// freeze the word and ask the parent for the difference.
//
// How it is fast at any depth. A loan stays with the child when its bytes are released, so the next charge there is
// one compare-and-swap again, however many levels lie above. Before anybody is refused or a peak is raised, loans that
// nobody uses are gathered: all quotas below are frozen at one moment, and what each has idle goes back. So an idle
// loan never makes a charge fail, and no figure counts it as used.
//
// Charges and resizes of several quotas at once are in quota_change.hpp.
//
// While a quota is over its limit, after a resize below what is charged, its word stays frozen: what is released must
// go back before anybody charges it again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_cell.hpp>
#include <gpushare/memory/quota_usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// See the top of the file. All members are safe from any thread; none allocates. The parent must outlive it.
class alignas(64) quota {
public:
    /// The largest quota: 256 TiB less one byte.
    [[nodiscard]] static constexpr bytes max_limit() noexcept { return bytes{detail::quota_word::mask}; }

    /// A root. Throws operation_error (invalid_specification) above max_limit().
    explicit quota(bytes limit) : quota(nullptr, limit, bytes{}) {}

    /// A child with `guaranteed` bytes taken from `parent` now and up to `burst` more while it uses them.
    /// Throws operation_error: no_room if the parent can't guarantee them, invalid_specification above max_limit().
    quota(quota& parent, bytes guaranteed, bytes burst = {}) : quota(&parent, guaranteed, burst) {}

    quota(const quota&) = delete;
    quota& operator=(const quota&) = delete;

    /// Gives back to the parent what isn't charged. Bytes still charged stay charged there: they are in use.
    ~quota() {
        if (parent_ != nullptr) parent_->detach(*this);
    }

    /// Charges `n` bytes or none. over_quota: beyond this quota's own limit; out_of_memory: burst that the parent
    /// doesn't have now; size_overflow: more than any quota can hold. One compare-and-swap unless it must borrow, and no
    /// lock for a refusal either where nothing is lent.
    [[nodiscard]] errc try_charge(bytes n) noexcept {
        for (;;) {
            auto [word, total] = cell_.read();
            if (word.frozen()) break;
            if (word.available() < n.count()) {
                if (!total.closed()) break;
                return refuse(n > max_limit() ? errc::size_overflow : errc::over_quota);
            }
            const auto charged = word.charged(n.count());
            // Acquire: the bytes charged here may be those that another thread released, and whatever it did with
            // them happened before. No release of its own: it carries on those of the releases before it.
            if (cell_.word.compare_exchange_weak(word.bits, charged.bits, std::memory_order_acquire,
                                                 std::memory_order_relaxed)) {
                cell_.count_charge(charged);
                if (const auto current = total.held() - charged.available();
                    current > cell_.peak.load(std::memory_order_relaxed)) [[unlikely]]
                    raise_peak(current);
                return errc::none;
            }
        }
        return charge_slowly(n.count());
    }

    /// Returns `n` bytes. False, and nothing changes, if fewer are charged: a size that was never charged here.
    bool release(bytes n) noexcept {
        for (;;) {
            auto [word, total] = cell_.read();
            if (word.frozen()) [[unlikely]]
                return release_slowly(n.count());
            if (n.count() > total.held() - word.available()) return false;
            const auto released = word.released(n.count());
            // Release: what the caller did with the bytes happens before whoever charges them next. Acquire: for
            // tell_parents(), see there.
            if (cell_.word.compare_exchange_weak(word.bits, released.bits, std::memory_order_acq_rel,
                                                 std::memory_order_relaxed)) {
                cell_.count_release(released);
                break;
            }
        }
        // Relaxed suffices: a loan taken before this release was stored before a thaw that it saw; one taken after it
        // has used up the released bytes, and none of it is idle.
        if (borrowed_.load(std::memory_order_relaxed) != 0) tell_parents();
        return true;
    }

    /// Changes guarantee and burst, all or nothing. Going below what is charged takes nothing away: requests are
    /// refused until it fits, and what is released meanwhile goes to the parent. Growing fails with no_room if
    /// the parent hasn't the bytes, with invalid_specification above max_limit() or for a root's burst.
    [[nodiscard]] errc resize(bytes guaranteed, bytes burst) noexcept {
        if (guaranteed + burst > max_limit() || (parent_ == nullptr && burst != bytes{}))
            return errc::invalid_specification;
        const std::lock_guard lock(root_->mutex_);
        return change(guaranteed, burst);
    }

    /// Adds `charged` bytes to the guarantee that the parent has been charged for already, as by a reservation: they
    /// are this quota's from now on. Fails with invalid_specification above max_limit() or on a root.
    [[nodiscard]] errc adopt(bytes charged, bytes burst) noexcept {
        if (parent_ == nullptr) return errc::invalid_specification;
        const std::lock_guard lock(root_->mutex_);
        if (guaranteed_ + charged + burst > max_limit()) return errc::invalid_specification;
        freeze();
        guaranteed_ += charged;
        burst_ = burst;
        settle(charged.count());
        parent_->note_borrower(*this);
        return errc::none;
    }

    /// Takes the mutex of the tree, as the other readings do: not for a hot path.
    [[nodiscard]] quota_usage usage() const noexcept {
        const std::lock_guard lock(root_->mutex_);
        settle();
        const auto word = cell_.now();
        const auto current = cell_.held() - word.available();
        return {.guaranteed = guaranteed_,
                .burst = burst_,
                .current = bytes{current},
                // Whoever charged what is current now may not have got to the peak yet.
                .peak = bytes{std::max(current, cell_.peak.load(std::memory_order_relaxed))},
                .borrowed = bytes{borrowed_.load(std::memory_order_relaxed)},
                .charges = cell_.charges.load(std::memory_order_relaxed) + word.charges(),
                .releases = cell_.releases.load(std::memory_order_relaxed) + word.releases(),
                .refusals = refusals_.load(std::memory_order_relaxed)};
    }

    /// The largest charge that would succeed now: what the owner sees as free memory.
    [[nodiscard]] bytes free() const noexcept {
        const std::lock_guard lock(root_->mutex_);
        return free_now();
    }

    /// The largest guarantee that resize() would grant now.
    [[nodiscard]] bytes guarantee_room() const noexcept {
        if (parent_ == nullptr) return max_limit();
        const std::lock_guard lock(root_->mutex_);
        return guaranteed_ + bytes{borrowed_.load(std::memory_order_relaxed)} + parent_->free_now(this);
    }

    /// The figures of a refusal of `n` bytes, for error messages.
    [[nodiscard]] failure explain(errc code, bytes n) const noexcept {
        return {.code = code, .asked = n.count(), .left = free().count(), .limit = usage().limit().count()};
    }

private:
    friend class quota_change;

    quota(quota* parent, bytes guaranteed, bytes burst)
        : parent_(parent), root_(parent == nullptr ? this : parent->root_), guaranteed_(guaranteed), burst_(burst) {
        if (guaranteed + burst > max_limit())
            raise({errc::invalid_specification, (guaranteed + burst).count(), 0, max_limit().count()}, {}, "quota");
        hold(guaranteed.count());
        cell_.publish({guaranteed.count()});
        if (parent_ != nullptr && !parent_->attach(*this))
            raise(parent_->explain(errc::no_room, guaranteed), {}, "guarantee of a quota");
    }

    bool attach(quota& child) noexcept {
        const std::lock_guard lock(root_->mutex_);
        if (take(child.guaranteed_.count(), nullptr) != errc::none) return false;
        child.next_ = std::exchange(children_, &child);
        note_borrower(child);
        return true;
    }

    void detach(quota& child) noexcept {
        const std::lock_guard lock(root_->mutex_);
        for (quota** link = &children_; *link != nullptr; link = &(*link)->next_) {
            if (*link != &child) continue;
            *link = child.next_;
            break;
        }
        if (child.may_borrow_) --borrowers_;
        put(child.cell_.now().available());
    }

    [[gnu::noinline]] void raise_peak(std::uint64_t current) noexcept {
        if (idle_below_.load(std::memory_order_relaxed)) {  // loans that nobody uses are no peak
            const std::lock_guard lock(root_->mutex_);
            freeze();
            const auto word = gather(nullptr);
            thaw(word);
            current = cell_.held() - word.available();
        }
        cell_.raise_peak(current);
    }
    errc refuse(errc why) noexcept {
        refusals_.fetch_add(1, std::memory_order_relaxed);
        return why;
    }

    errc charge_slowly(std::uint64_t n) noexcept {
        if (bytes{n} > max_limit()) return refuse(errc::size_overflow);
        const std::lock_guard lock(root_->mutex_);
        return take(n, nullptr);
    }

    // Kept out of line: inlined, it makes every release a fifth slower.
    [[gnu::noinline]] bool release_slowly(std::uint64_t n) noexcept {
        const std::lock_guard lock(root_->mutex_);
        freeze();
        const auto word = cell_.now();
        const bool charged = n <= cell_.held() - word.available();
        give_back(charged ? cell_.released(word, n) : word);
        return charged;
    }

    // Tells those above that there may be idle loans below, after the release that made them. Relaxed suffices: whoever
    // gathers clears the flag and then freezes. A freeze after our release finds the bytes. One before it was thawed
    // before it, and having seen the thaw, we see the flag cleared and set it again. And a charge that doesn't see the
    // flag yet is beside our call, and may take these bytes for charged still.
    [[gnu::noinline]] void tell_parents() const noexcept {
        for (const quota* q = parent_; q != nullptr; q = q->parent_)
            if (!q->idle_below_.load(std::memory_order_relaxed)) q->idle_below_.store(true, std::memory_order_relaxed);
    }

    // ---- The rest runs under the mutex of the tree.

    // While the word is frozen, charges and releases take the mutex: its holder alone changes the word then, and what is
    // held and borrowed with it. A quota over its limit stays frozen.
    void freeze() const noexcept { cell_.freeze(); }
    void thaw(detail::quota_word word) const noexcept { cell_.publish(word.frozen_if(over_limit())); }
    void hold(std::uint64_t held) const noexcept { cell_.hold(held, burst_ == bytes{} && borrowers_ == 0); }
    [[nodiscard]] bool over_limit() const noexcept {
        return borrowed_.load(std::memory_order_relaxed) > burst_.count();
    }

    // A child counts as a borrower from the first burst, or debt after a resize, to its end.
    void note_borrower(quota& child) noexcept {
        const bool borrows = child.burst_ != bytes{} || child.over_limit();
        if (!borrows || std::exchange(child.may_borrow_, true)) return;
        ++borrowers_;
        freeze();
        hold(cell_.held());
        thaw(cell_.now());
    }

    // Charges `n` bytes. `asking`, a child on whose behalf that is, has nothing idle to gather.
    errc take(std::uint64_t n, const quota* asking) noexcept {
        freeze();
        auto word = cell_.now();
        if (n > word.available() || cell_.held() - word.available() + n > cell_.peak.load(std::memory_order_relaxed))
            word = gather(asking);
        const auto need = n - std::min(n, word.available());
        if (const errc why = need == 0 ? errc::none : borrow(need); why != errc::none) {
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

    errc borrow(std::uint64_t need) noexcept {
        const auto borrowed = borrowed_.load(std::memory_order_relaxed);
        if (parent_ == nullptr || borrowed + need > burst_.count()) return errc::over_quota;
        if (parent_->take(need, this) != errc::none) return errc::out_of_memory;
        borrowed_.store(borrowed + need, std::memory_order_relaxed);
        return errc::none;
    }

    // Bytes that the parent must be charged for such a guarantee. What was borrowed is charged there already.
    [[nodiscard]] std::uint64_t growth(bytes guaranteed) const noexcept {
        const auto grow = (guaranteed - guaranteed_).count();
        return grow - std::min(grow, borrowed_.load(std::memory_order_relaxed));
    }

    // Nothing idle goes back before: between that and taking it again, somebody else could.
    errc change(bytes guaranteed, bytes burst) noexcept {
        const auto grow = (guaranteed - guaranteed_).count(), fresh = growth(guaranteed);
        if (parent_ != nullptr && parent_->take(fresh, this) != errc::none) {
            tell_parents();  // what is idle here, the parent has passed over
            return errc::no_room;
        }
        freeze();
        const auto shrink = (guaranteed_ - guaranteed).count();
        borrowed_.store(borrowed_.load(std::memory_order_relaxed) - (grow - fresh) + shrink, std::memory_order_relaxed);
        guaranteed_ = guaranteed;
        burst_ = burst;
        settle(fresh);
        if (parent_ != nullptr) parent_->note_borrower(*this);
        return errc::none;
    }

    // Takes back `n` bytes that a child was lent.
    void put(std::uint64_t n) const noexcept {
        if (n == 0) return;
        freeze();
        give_back(cell_.released(cell_.now(), n));
    }

    // Publishes the word of a frozen quota that may have more left than before. Over the limit, nothing stays here.
    void give_back(detail::quota_word word) const noexcept {
        if (over_limit()) {
            cell_.publish(word);  // frozen still
            settle();
        } else {
            thaw(word);
            if (borrowed_.load(std::memory_order_relaxed) != 0) tell_parents();
        }
    }

    // Takes in `fresh` bytes that the parent was charged, and returns to it what is borrowed and idle, here or below.
    void settle(std::uint64_t fresh = 0) const noexcept {
        freeze();
        const auto word = gather(nullptr).plus(fresh);
        hold(cell_.held() + fresh);
        const auto back = thaw_without_idle(word);
        if (parent_ != nullptr) parent_->put(back);
    }

    // Brings idle loans of the quotas below to this one, which is frozen, and returns its word. All are frozen at one
    // moment, for which the answer is exact. Children that never borrow have nothing that is this quota's.
    detail::quota_word gather(const quota* asking) const noexcept {
        auto word = cell_.now();
        if (!idle_below_.load(std::memory_order_relaxed)) return word;
        freeze_below(asking);
        word = cell_.released(word, collect_below(asking));
        cell_.publish(word);  // frozen still
        return word;
    }
    void freeze_below(const quota* asking) const noexcept {
        idle_below_.store(false, std::memory_order_relaxed);  // before the freeze, for tell_parents()
        for (const quota* c = children_; c != nullptr; c = c->next_) {
            if (c == asking || !c->may_borrow_) continue;
            c->freeze();
            c->freeze_below(nullptr);
        }
    }
    std::uint64_t collect_below(const quota* asking) const noexcept {
        std::uint64_t idle = 0;
        for (const quota* c = children_; c != nullptr; c = c->next_) {
            if (c == asking || !c->may_borrow_) continue;
            const auto from_below = c->collect_below(nullptr);
            idle += c->thaw_without_idle(c->cell_.released(c->cell_.now(), from_below));
        }
        return idle;
    }

    // Thaws the word without what is borrowed and idle, and returns how much that was.
    std::uint64_t thaw_without_idle(detail::quota_word word) const noexcept {
        const auto borrowed = borrowed_.load(std::memory_order_relaxed);
        const auto idle = std::min(borrowed, word.available());
        hold(cell_.held() - idle);
        borrowed_.store(borrowed - idle, std::memory_order_relaxed);
        thaw(word.minus(idle));
        return idle;
    }

    // What could be charged at one moment, here and as far up as it is frozen.
    [[nodiscard]] bytes free_now(const quota* asking = nullptr) const noexcept {
        freeze();
        const auto word = gather(asking);
        bytes more{};
        if (const bytes room = burst_ - bytes{borrowed_.load(std::memory_order_relaxed)}; parent_ != nullptr)
            more = std::min(room, parent_->free_now(this));
        give_back(word);
        return bytes{word.available()} + more;
    }

    // What charges and releases touch lies on one cache line. Mutable: a reading takes idle loans back.
    mutable detail::quota_cell cell_;
    mutable std::atomic<std::uint64_t> borrowed_{0};  // changes in a freeze
    quota* const parent_;
    quota* const root_;
    alignas(64) mutable std::atomic<bool> idle_below_{false};  // a quota below may hold a loan that it doesn't use
    std::atomic<std::uint64_t> refusals_{0};
    mutable std::mutex mutex_;  // of the whole tree, in its root; what follows is under it
    bytes guaranteed_, burst_;
    quota *children_ = nullptr, *next_ = nullptr;
    int borrowers_ = 0;  // children that may_borrow_
    bool may_borrow_ = false;
};

}  // namespace gpushare::inline GPUSHARE_ABI
