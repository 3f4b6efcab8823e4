// SPDX-License-Identifier: Apache-2.0
// A charge or a resize of a quota in two steps: it is prepared, then committed or abandoned. So the
// quotas of several devices are charged together or not at all; partition/reservation.hpp does so
// for any number of quotas.
//
//   #include <gpushare/partition/reservation.hpp>      // for several at once
//   std::array both{gpushare::quota_charge{first, 1_GiB}, gpushare::quota_charge{second, 1_GiB}};
//   if (const auto why = gpushare::try_commit_together(both); why.code == gpushare::errc::none) ...;
//
// Between the steps the mutex of the quota's tree is held. The words of the quota, and of the
// parents that it borrows from, are frozen. So another charge waits meanwhile, and is never refused
// for lack of bytes that come back a moment later.
//
// Moving a charge from one quota to another, even if the device is full:
//
//   // now charged to `batch`
//   if (gpushare::try_transfer(chat, batch, 2_MiB).why == gpushare::errc::none) ...;
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_wait_queue.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// The common part of all changes. Two changes of quotas under one root can't be prepared at once,
/// because the second would wait for the first. Prepare changes under several roots in the order of
/// their `resource()`, as partition/reservation.hpp does.
class quota_change {
public:
    /// The root above the quota.
    [[nodiscard]] const void* resource() const noexcept { return of_->root_; }

    /// The quota that the change is for.
    [[nodiscard]] quota& of() const noexcept { return *of_; }

    /// Moves a charge between quotas of one tree. The bytes that `from` gives back may be the bytes
    /// that `to` lacks, and no other quota gets them in between. After a refusal everything is as
    /// before.
    static errc move_charge(quota& from, quota& to, std::uint64_t n) noexcept {
        const std::lock_guard lock(from.root_->mutex_);
        quota_node& top = from.quota_node::top();
        quota_wait_queue::press(top);
        from.freeze();
        const auto word = from.cell_.now();
        errc why = errc::wrong_size;
        if (n <= from.cell_.held() - word.available()) {
            from.quota_node::give_back(from.cell_.released(word, n));
            why = to.take(n, nullptr);
            if (why != errc::none) from.take_again(n);
        } else {
            from.quota_node::give_back(word);
        }
        quota_wait_queue::release_pressure(top);
        from.serve_waiters();
        return why;
    }
    [[nodiscard]] static bool of_one_tree(const quota& a, const quota& b) noexcept { return a.root_ == b.root_; }

protected:
    explicit quota_change(quota& of) noexcept : of_(&of) {}

    // Takes the mutex of the tree and freezes the quotas that such a charge would come from; or
    // does nothing, and returns how much would fit.
    static failure hold(quota& q, std::uint64_t n) noexcept {
        q.root_->mutex_.lock();
        const errc code = n > quota::max_limit().count() ? errc::size_overflow
                                                         : freeze_for(q, n, nullptr, detail::precedence::after_waiters);
        if (code == errc::none) return {};
        const failure why =
            detail::quota_refusal(q.refuse(code), n, q.free_now().count(), (q.guaranteed_ + q.burst_).count());
        q.root_->mutex_.unlock();
        return why;
    }

    static void charge_held(quota& q, std::uint64_t n) noexcept {
        (void)q.take(n, nullptr, detail::precedence::before_waiters);
        let_go(q);
    }

    static void let_go(quota& q) noexcept {
        for (detail::quota_node* frozen = &q; frozen != nullptr; frozen = frozen->parent_)
            if (const auto word = frozen->cell_.now(); word.frozen()) frozen->give_back(word);
        q.serve_waiters();
        q.root_->mutex_.unlock();
    }

    static failure hold_resize(quota& q, bytes guaranteed, bytes burst) noexcept {
        if (guaranteed + burst > quota::max_limit())
            return {errc::invalid_specification, (guaranteed + burst).count(), 0, quota::max_limit().count(),
                    reason::size_limit};
        if (q.parent_ == nullptr && burst != bytes{})
            return {.code = errc::invalid_specification, .asked = burst.count(), .because = reason::no_lender};
        q.root_->mutex_.lock();
        if (q.stopped()) {
            q.root_->mutex_.unlock();
            return {.code = errc::closed, .asked = guaranteed.count()};
        }
        const auto fresh = q.growth(guaranteed);
        const errc why = q.parent_ == nullptr || fresh == 0
                             ? errc::none
                             : freeze_for(*q.parent_, fresh, &q, detail::precedence::before_waiters);
        if (why == errc::none) return {};
        q.tell_parents();  // the parent has passed over idle bytes here
        if (why == errc::closed) {
            q.root_->mutex_.unlock();
            return {.code = errc::closed, .asked = guaranteed.count()};
        }
        const auto fits =
            guaranteed.count() - fresh + q.parent_->free_now(&q, detail::precedence::before_waiters).count();
        const auto limit = (q.parent_->guaranteed_ + q.parent_->burst_).count();
        q.root_->mutex_.unlock();
        return {errc::no_room, guaranteed.count(), fits, limit};
    }

    static void resize_held(quota& q, bytes guaranteed, bytes burst) noexcept {
        (void)q.change(guaranteed, burst);
        let_go(q);
    }

    // While an exchange is under way, nobody else gets the bytes that its quotas give to the root.
    static void begin_exchange(quota& root) noexcept {
        root.mutex_.lock();
        detail::quota_wait_queue::press(root);
    }
    static void end_exchange(quota& root) noexcept {
        detail::quota_wait_queue::release_pressure(root);
        root.serve_waiters();
        root.mutex_.unlock();
    }
    [[nodiscard]] static bool is_below(const quota& q, const quota& root) noexcept { return q.parent_ == &root; }
    [[nodiscard]] static bool has_ended(const quota& q) noexcept { return q.stopped(); }
    [[nodiscard]] static bytes guaranteed(const quota& q) noexcept { return q.guaranteed_; }
    [[nodiscard]] static bytes growth(const quota& q, bytes to) noexcept { return bytes{q.growth(to)}; }
    [[nodiscard]] static bytes left_of(const quota& root) noexcept { return bytes{root.cell_.now().available()}; }
    static void set(quota& q, bytes guaranteed, bytes burst) noexcept { (void)q.change(guaranteed, burst); }

    // Freezes a quota and everything below it. They stay frozen until gather_held() and then
    // give_back() or set().
    static void hold_with_below(const quota& q) noexcept {
        q.freeze();
        q.freeze_below(nullptr);
    }
    static void hold_all(quota& root) noexcept {
        root.mutex_.lock();
        hold_with_below(root);
    }
    // The bytes that a quota held like this has left, unused loans included.
    static bytes held_left(const quota& root) noexcept {
        return bytes{root.cell_.now().available() + idle_below(root)};
    }
    // The bytes that are lent as burst and in use.
    static bytes held_lent(const quota& root) noexcept {
        bytes lent{};
        for (const detail::quota_node* c = root.children_; c != nullptr; c = c->next_)
            lent += bytes{c->borrowed_.load(std::memory_order_relaxed)};
        return lent - bytes{idle_below(root)};
    }
    // The bytes that the root would get at once if the quota, which is held, got this guarantee.
    static bytes given_up(const quota& q, bytes guaranteed) noexcept {
        const bytes lent = bytes{q.borrowed_.load(std::memory_order_relaxed)} + (q.guaranteed_ - guaranteed);
        return std::min(lent, bytes{q.cell_.now().available() + idle_below(q)});
    }
    // The bytes that the root has charged beyond its limit: bytes that come back pay for them
    // first.
    static bytes debt_of(const quota& root) noexcept { return bytes{root.borrowed_.load(std::memory_order_relaxed)}; }
    // Thaws everything below, and brings those loans to the quota, which stays frozen.
    static void gather_held(quota& q) noexcept {
        const auto idle = q.collect_below(nullptr);
        q.cell_.publish(q.cell_.released(q.cell_.now(), idle));
    }
    static void give_back(const quota& q) noexcept { q.quota_node::give_back(q.cell_.now()); }

private:
    static std::uint64_t idle_below(const detail::quota_node& q) noexcept {
        std::uint64_t idle = 0;
        for (const detail::quota_node* c = q.children_; c != nullptr; c = c->next_)
            if (c->may_borrow_)
                idle +=
                    std::min(c->borrowed_.load(std::memory_order_relaxed), c->cell_.now().available() + idle_below(*c));
        return idle;
    }

    // Freezes q and, as far as it would have to borrow, the quotas above. Nothing stays frozen
    // after a refusal.
    static errc freeze_for(detail::quota_node& q, std::uint64_t n, const detail::quota_node* asking,
                           detail::precedence when) noexcept {
        if (q.stopped() && n != 0) return errc::closed;
        if (q.behind_ != errc::none && n != 0 && when == detail::precedence::after_waiters) return q.behind_;
        q.freeze();
        const auto word = q.gather(asking);
        const auto need = n - std::min(n, word.available());
        errc why = errc::none;
        if (q.parent_ == nullptr || q.borrowed_.load(std::memory_order_relaxed) + need > q.burst_.count())
            why = need == 0 ? errc::none : errc::over_quota;
        else if (need != 0)
            why = q.from_above(freeze_for(*q.parent_, need, &q, when));
        if (why != errc::none) q.give_back(word);
        return why;
    }

    quota* of_;
};

}  // namespace detail

/// A charge of `size` bytes to a quota, which must outlive it.
class quota_charge : public detail::quota_change {
public:
    /// Not prepared yet.
    quota_charge(quota& from, bytes size) noexcept : detail::quota_change(from), size_(size) {}

    /// over_quota, out_of_memory, size_overflow or closed; `left` is the largest charge that would
    /// have been granted.
    [[nodiscard]] failure prepare() noexcept { return hold(of(), size_.count()); }
    /// Only after prepare(): makes the change.
    void commit() noexcept { charge_held(of(), size_.count()); }
    /// Only after prepare(): nothing has happened.
    void abandon() noexcept { let_go(of()); }
    /// After a commit. False if the bytes aren't charged any more.
    bool undo() noexcept { return of().release(size_); }

    /// The bytes that it was made for.
    [[nodiscard]] bytes size() const noexcept { return size_; }

private:
    bytes size_;
};
static_assert(prepared_change<quota_charge>);

/// A charge to a root whose size is decided between prepare() and commit(). Once several draws are
/// prepared, their left() are all as of one moment and don't change until they commit. Charges
/// below the root wait meanwhile.
class quota_draw : public detail::quota_change {
public:
    /// `from` must be a root.
    explicit quota_draw(quota& from) noexcept : detail::quota_change(from) {}

    /// Holds the root and all below it; always errc::none.
    [[nodiscard]] failure prepare() noexcept {
        hold_all(of());
        return {};
    }
    /// Only while prepared: how many bytes can be charged.
    [[nodiscard]] bytes left() const noexcept { return held_left(of()); }
    /// Only while prepared: how many bytes are lent as burst, and used.
    [[nodiscard]] bytes lent() const noexcept { return held_lent(of()); }
    /// Only while prepared: commit() will charge `n` bytes, at most left(). Without a call it
    /// charges nothing.
    void take(bytes n) noexcept { size_ = n; }
    /// Only after prepare(): makes the change.
    void commit() noexcept {
        gather_held(of());
        if (size_ == bytes{})
            let_go(of());
        else
            charge_held(of(), size_.count());
    }
    /// Only after prepare(): nothing has happened.
    void abandon() noexcept {
        gather_held(of());
        let_go(of());
    }
    /// After a commit. False if the bytes aren't charged any more.
    bool undo() noexcept { return size_ == bytes{} || of().release(size_); }

private:
    bytes size_{};
};
static_assert(prepared_change<quota_draw>);

/// A change of a quota's guarantee and burst; see quota::resize. The quota must outlive it.
class quota_resize : public detail::quota_change {
public:
    /// Not prepared yet.
    quota_resize(quota& of, bytes guaranteed, bytes burst) noexcept
        : detail::quota_change(of), guaranteed_(guaranteed), burst_(burst) {}

    /// no_room (`left` is the largest guarantee that would have been granted, `limit` the
    /// parent's), invalid_specification, or closed.
    [[nodiscard]] failure prepare() noexcept { return hold_resize(of(), guaranteed_, burst_); }
    /// Only after prepare(): makes the change.
    void commit() noexcept { resize_held(of(), guaranteed_, burst_); }
    /// Only after prepare(): nothing has happened.
    void abandon() noexcept { let_go(of()); }

private:
    bytes guaranteed_, burst_;
};
static_assert(prepared_change<quota_resize>);

/// The new limits of a quota.
struct quota_limits {
    quota* of = nullptr;  ///< must outlive the exchange
    bytes guaranteed{};   ///< its guarantee
    bytes burst{};        ///< its burst
};

/// New guarantees and bursts for several quotas right below one root, as one change. Bytes that
/// some of them give up are there for the others, and no other request gets these bytes in between.
/// Meanwhile only quotas below the root may charge the root.
class quota_exchange : public detail::quota_change {
public:
    /// Not prepared yet. `wanted`: each quota once.
    quota_exchange(quota& root, std::vector<quota_limits> wanted)
        : detail::quota_change(root), wanted_(std::move(wanted)) {}

    /// Only while not prepared: the limits wanted for the quota with this index in `wanted`. Needs
    /// no memory.
    void want(std::size_t index, const quota_limits& limits) noexcept { wanted_[index] = limits; }

    /// Holds all of the quotas. no_room if the root's free bytes, and the bytes that quotas give
    /// up, don't suffice for all quotas that grow. `left` is then the largest guarantee of the
    /// first quota for which they don't suffice, alongside the quotas before it. Also
    /// invalid_specification, or closed. After an error nothing has changed.
    [[nodiscard]] failure prepare() noexcept {
        for (refused_ = 0; refused_ < wanted_.size(); ++refused_)
            if (const auto& w = wanted_[refused_]; w.guaranteed + w.burst > quota::max_limit())
                return {errc::invalid_specification, (w.guaranteed + w.burst).count(), 0, quota::max_limit().count(),
                        reason::size_limit};
            else if (!is_below(*w.of, of()))
                return {.code = errc::invalid_specification, .because = reason::other_tree};
        begin_exchange(of());
        for (refused_ = 0; refused_ < wanted_.size(); ++refused_)
            if (const auto& w = wanted_[refused_]; has_ended(*w.of)) {
                end_exchange(of());
                return {.code = errc::closed, .asked = w.guaranteed.count()};
            }
        for (const auto& w : wanted_) hold_with_below(*w.of);
        const failure why = lacks();
        if (why.code != errc::none) abandon();
        return why;
    }
    /// After prepare() failed: the index in `wanted` of the refused quota.
    [[nodiscard]] std::size_t refused() const noexcept { return refused_; }
    /// Only after prepare(): makes the change, and shrinks quotas first.
    void commit() noexcept {
        for (const auto& w : wanted_) gather_held(*w.of);
        for (const auto& w : wanted_) set(*w.of, std::min(w.guaranteed, guaranteed(*w.of)), w.burst);
        for (const auto& w : wanted_) set(*w.of, w.guaranteed, w.burst);
        end_exchange(of());
    }
    /// Only after prepare(): nothing has happened.
    void abandon() noexcept {
        for (const auto& w : wanted_) gather_held(*w.of), give_back(*w.of);
        end_exchange(of());
    }

private:
    // The failure of the first quota that grows by more bytes than are left.
    failure lacks() noexcept {
        bytes left = left_of(of());
        for (const auto& w : wanted_) left += given_up(*w.of, w.guaranteed);
        left -= debt_of(of());
        for (refused_ = 0; refused_ < wanted_.size(); ++refused_) {
            const auto& w = wanted_[refused_];
            const bytes fresh = growth(*w.of, w.guaranteed);
            if (fresh > left)
                return {errc::no_room, w.guaranteed.count(), (w.guaranteed - fresh + left).count(),
                        guaranteed(of()).count(), reason::size_left};
            left -= fresh;
        }
        return {};
    }

    std::vector<quota_limits> wanted_;
    std::size_t refused_ = 0;
};
static_assert(prepared_change<quota_exchange>);

/// The outcome of a transfer.
struct transfer_result {
    errc why = errc::none;  ///< errc::none: done
    bool kept = false;      ///< after a refusal: `from` is charged as before
};

/// Moves a charge of `n` bytes from `from` to `to`. over_quota: beyond `to`'s own limit; closed.
/// out_of_memory: `to` needs burst that isn't there, even with the bytes that `from` gives back.
/// wrong_size: fewer bytes are charged to `from`. After a refusal `from` is charged as before.
[[nodiscard]] inline transfer_result try_transfer(quota& from, quota& to, bytes n) noexcept {
    if (&from == &to) return from.has_charged(n) ? transfer_result{} : transfer_result{errc::wrong_size, true};
    errc why = to.try_charge(n);
    if (why == errc::none) {
        if (from.release(n)) return {};
        (void)to.release(n);
        why = errc::wrong_size;
    } else if (why == errc::out_of_memory && detail::quota_change::of_one_tree(from, to)) {
        why = detail::quota_change::move_charge(from, to, n.count());
    }
    return {.why = why, .kept = why != errc::none};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
