// SPDX-License-Identifier: Apache-2.0
// A quota bounds the bytes that are in use at once, exactly to the byte under any concurrency.
// Quotas form a tree. A new child sets aside its guaranteed bytes in its parent; the parent lends
// the child's burst while it has the bytes free. A quota only counts; quota_resource ties it to an
// allocator.
//
//   gpushare::quota device{80_GiB};
//   // 20 GiB whatever others do, 4 more while they are free
//   gpushare::quota chat{device, 20_GiB, 4_GiB};
//   if (chat.try_charge(512_MiB) == gpushare::errc::none) { ...; chat.release(512_MiB); }
//
// Why a quota is exact: one atomic word holds the bytes that are still free, not the bytes in use.
// So a single compare-and-swap decides a charge, even during a resize. Only when the word holds too
// few bytes does a charge take the mutex of the tree, freeze the word (mark it, so that other
// charges and releases take the mutex, too) and ask the parent for the difference.
//
// Why a quota is fast at any depth: a loan stays with the child when its bytes are released, so the
// next charge there is again one compare-and-swap, however many levels are above. Before a quota
// refuses a charge or raises its peak, it freezes all quotas below it at one moment and takes back
// the loans that they don't use. So an idle loan never makes a charge fail, and no figure counts it
// as used.
//
// quota_change.hpp charges and resizes several quotas at once. quota_wait.hpp waits for bytes.
// While a request waits, the words that its bytes may come from stay frozen, which sends every
// later charge to the mutex and the queue. A quota that is over its limit, after a resize below its
// charges, stays frozen in the same way, and so do quotas that borrow from it, so that released
// bytes go back.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <thread>

#include <gpushare/closing.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_cell.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A quota that holds bytes beyond its guarantee, and the number of these bytes.
struct burst_holder {
    std::string_view name{};  ///< as quota::name() has it
    bytes borrowed{};         ///< beyond its guarantee
};

namespace detail {
struct quota_waiter;
class quota_change;
}  // namespace detail

/// A limit on bytes in use, in a tree of such limits; see the top of the file. All members are safe
/// from any thread. Only the constructors allocate. The parent must outlive the quota.
class quota : private detail::quota_node {
public:
    /// The largest quota: 256 TiB less one byte.
    [[nodiscard]] static constexpr bytes max_limit() noexcept { return bytes{detail::quota_word::mask}; }

    /// A root. Throws operation_error (invalid_specification) above max_limit().
    explicit quota(bytes limit) : quota(nullptr, limit, bytes{}) {}

    /// A child with `guaranteed` bytes taken from `parent` now, and up to `burst` more that the
    /// parent lends while it has them. Throws operation_error: no_room if the parent can't
    /// guarantee them, closed if it is closed, invalid_specification above max_limit().
    quota(quota& parent, bytes guaranteed, bytes burst = {}) : quota(&parent, guaranteed, burst) {}

    quota(const quota&) = delete;
    quota& operator=(const quota&) = delete;

    /// Gives the uncharged bytes back to the parent. Bytes that are still charged here stay charged
    /// to the parent.
    ~quota();

    /// Charges `n` bytes or none. over_quota: beyond this quota's own limit; out_of_memory: the
    /// parent doesn't have the burst bytes free now; size_overflow: more than any quota can hold;
    /// closed. Takes no lock unless it must borrow, or refuses while something is lent.
    [[nodiscard]] errc try_charge(bytes n) noexcept;

    /// Returns `n` bytes. False, and nothing changes, if fewer bytes are charged: no charge of that
    /// size was made here.
    bool release(bytes n) noexcept;
    /// Whether at least `n` bytes are charged, so that release() would return them.
    [[nodiscard]] bool has_charged(bytes n) const noexcept;

    /// Changes guarantee and burst, all or nothing. A value below the charged bytes takes nothing
    /// away: requests are refused until the charges fit, and bytes released meanwhile go to the
    /// parent. Growing fails with no_room if the parent doesn't have the bytes; with
    /// invalid_specification above max_limit() or for a root's burst; with closed if this quota, or
    /// one that the bytes would come from, is closed.
    [[nodiscard]] errc resize(bytes guaranteed, bytes burst) noexcept;

    /// Adds `charged` bytes to the guarantee. The parent has been charged for them already, as by a
    /// reservation. From now on they belong to this quota. Fails with invalid_specification above
    /// max_limit() or on a root, and with closed once the quota is closed.
    [[nodiscard]] errc adopt(bytes charged, bytes burst) noexcept;

    /// Whether the fast path is barred: wanted_back() is true, or a change is under way. The call
    /// is one load. Layers that keep charged memory can check it when they hand out or take back a
    /// part of that memory.
    [[nodiscard]] bool pressed() const noexcept { return cell_.now().frozen(); }
    /// Whether charged but unused memory should be released now: a request waits for bytes that may
    /// come from here, or this quota, or one that it borrows from, is over its limit. Takes the
    /// mutex of the tree.
    [[nodiscard]] bool wanted_back() const noexcept;
    /// Whether more is charged than the limit allows, after a resize. Nothing is granted until the
    /// charges fit.
    [[nodiscard]] bool over() const noexcept;

    /// A reading; see quota_usage. Takes the mutex of the tree, as the readings below do: not for a
    /// hot path.
    [[nodiscard]] quota_usage usage() const noexcept;

    /// The largest charge that would succeed now: the free memory as the owner sees it. Bytes for
    /// which a request waits don't count.
    [[nodiscard]] bytes free() const noexcept;

    /// How much could be guaranteed to quotas below if all bytes lent to them came back: the part
    /// of this quota's guarantee that is neither guaranteed below nor charged here.
    [[nodiscard]] bytes promisable() const noexcept;
    /// The largest guarantee that resize() would grant now.
    [[nodiscard]] bytes guarantee_room() const noexcept;

    /// The most that could be charged here if all charges anywhere in the tree were released;
    /// others' guarantees stay. A request that waits for more is refused immediately. Takes the
    /// mutex of the tree.
    [[nodiscard]] bytes attainable() const noexcept;
    /// Why `n` bytes could never be charged here, whatever is released: over_quota, out_of_memory
    /// (a quota above is too small), size_overflow, closed, with the figures. errc::none if they
    /// could. Only the limits count: others' guarantees can change, for example in a hook (see
    /// attainable()).
    [[nodiscard]] failure refuses(bytes n) const noexcept;

    /// From now on every charge, resize and waiter is refused with errc::closed, and released bytes
    /// go to the parent. Calls no close_callback: the first half of close().
    void stop() noexcept;
    /// Ends the quota: stop(), and then resources that registered with closing() give back the
    /// memory they keep. True once all of it is back. False if some of it is still in use at the
    /// deadline: call again. Bytes that stay charged after that belong to allocated blocks, and to
    /// granted claims (quota_wait.hpp) that still exist.
    bool close(instant deadline) noexcept;
    /// Whether stop() or close() has been called.
    [[nodiscard]] bool closed() const noexcept { return stopped(); }
    /// The token with which resources that keep memory charged here learn that the quota closes.
    /// See closing.hpp.
    [[nodiscard]] close_token closing() const noexcept { return closing_.token(); }

    /// Whether charges here also count in `other`, because `other` is this quota or one above it.
    [[nodiscard]] bool counts_in(const quota& other) const noexcept;

    /// Names the owner, for messages. The text must outlive the quota.
    void name(std::string_view owner) noexcept;
    /// The owner's name.
    [[nodiscard]] std::string_view name() const noexcept;

    /// After a refusal of `n` bytes: asks hooks (quota_wait.hpp), from `asked` on, until one has
    /// freed some. True: try the charge again. False: all have been asked. `below`: the quota had
    /// the bytes, but the memory below it didn't. Runs user code, under no lock. Each request
    /// begins with a new cursor.
    [[nodiscard]] bool ask_next(detail::hook_cursor& asked, bytes n, bool below = false) noexcept;

    /// Whether that thread is in a call of one of the tree's hooks. Such a thread doesn't have its
    /// requested memory yet, and may wait for anything: a lock, another thread. So a thread that
    /// waits for calls that may run hooks must not wait for such a thread.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept;

    /// The figures of a refusal of `n` bytes, for error messages.
    [[nodiscard]] failure explain(errc code, bytes n) const noexcept;

private:
    friend class detail::quota_change;
    friend class quota_claim;
    friend class quota_hook;
    friend class quota_pressure;
    friend struct detail::quota_waiter;
    friend burst_holder holder_of_burst(const quota&, bytes) noexcept;

    quota(quota* parent, bytes guaranteed, bytes burst);

    [[gnu::noinline]] void raise_peak(std::uint64_t current) noexcept {
        if (idle_below_.load(std::memory_order_relaxed)) {  // unused loans don't count as a peak
            const std::lock_guard lock(root_->mutex_);
            freeze();
            const auto word = gather(nullptr);
            thaw(word);
            current = cell_.held() - word.available();
        }
        cell_.raise_peak(current);
    }
    errc charge_slowly(std::uint64_t n) noexcept;

    // Kept out of line: inlined, it makes every release a fifth slower.
    [[gnu::noinline]] bool release_slowly(std::uint64_t n) noexcept {
        const std::lock_guard lock(root_->mutex_);
        freeze();
        const auto word = cell_.now();
        const bool charged = n <= cell_.held() - word.available();
        give_back(charged ? cell_.released(word, n) : word);
        serve_waiters();
        return charged;
    }

    close_source closing_;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE quota::~quota() {
    if (parent_ != nullptr)
        parent_->detach(*this);
    else if (orphan_hooks_ != nullptr)
        orphan_hooks_(*this);
}

GPUSHARE_INLINE errc quota::try_charge(bytes n) noexcept {
    for (;;) {
        auto [word, total] = cell_.read();
        if (word.frozen()) break;
        if (word.available() < n.count()) {
            if (!total.closed()) break;
            return refuse(n > max_limit() ? errc::size_overflow : errc::over_quota);
        }
        const auto charged = word.charged(n.count());
        // Acquire: the bytes charged here may be those that another thread released, and all
        // its uses of them happened before. No release order: the swap continues the release
        // sequences of the releases before it.
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

GPUSHARE_INLINE bool quota::release(bytes n) noexcept {
    for (;;) {
        auto [word, total] = cell_.read();
        if (word.frozen()) [[unlikely]]
            return release_slowly(n.count());
        if (n.count() > total.held() - word.available()) return false;
        const auto released = word.released(n.count());
        // Release: the caller's uses of the bytes happen before the next charge of them. Acquire:
        // for tell_parents(), see there.
        if (cell_.word.compare_exchange_weak(word.bits, released.bits, std::memory_order_acq_rel,
                                             std::memory_order_relaxed)) {
            cell_.count_release(released);
            break;
        }
    }
    // Relaxed suffices: a loan taken before this release was stored before a thaw that it saw; one
    // taken after it has used up the released bytes, and none of it is idle.
    if (borrowed_.load(std::memory_order_relaxed) != 0) tell_parents();
    return true;
}

GPUSHARE_INLINE bool quota::has_charged(bytes n) const noexcept {
    if (const auto [word, total] = cell_.read(); !word.frozen()) [[likely]]
        return n.count() <= total.held() - word.available();
    const std::lock_guard lock(root_->mutex_);
    return n.count() <= cell_.held() - cell_.now().available();
}

GPUSHARE_INLINE errc quota::resize(bytes guaranteed, bytes burst) noexcept {
    if (guaranteed + burst > max_limit() || (parent_ == nullptr && burst != bytes{}))
        return errc::invalid_specification;
    const std::lock_guard lock(root_->mutex_);
    if (stopped()) return errc::closed;
    const errc why = change(guaranteed, burst);
    serve_waiters();
    return why;
}

GPUSHARE_INLINE errc quota::adopt(bytes charged, bytes burst) noexcept {
    if (parent_ == nullptr) return errc::invalid_specification;
    const std::lock_guard lock(root_->mutex_);
    if (stopped()) return errc::closed;
    if (guaranteed_ + charged + burst > max_limit()) return errc::invalid_specification;
    set_limits(guaranteed_ + charged, burst, borrowed_.load(std::memory_order_relaxed), charged.count());
    serve_waiters();
    return errc::none;
}

GPUSHARE_INLINE bool quota::wanted_back() const noexcept {
    const std::lock_guard lock(root_->mutex_);
    settle();
    return over_limit() || watched();
}

GPUSHARE_INLINE bool quota::over() const noexcept {
    const std::lock_guard lock(root_->mutex_);
    settle();
    return over_limit();
}

GPUSHARE_INLINE auto quota::usage() const noexcept -> quota_usage {
    const std::lock_guard lock(root_->mutex_);
    settle();
    const auto word = cell_.now();
    const auto current = cell_.held() - word.available();
    return {.guaranteed = guaranteed_,
            .burst = burst_,
            .current = bytes{current},
            // The thread that charged the current bytes may not have raised the peak yet.
            .peak = bytes{std::max(current, cell_.peak.load(std::memory_order_relaxed))},
            .borrowed = bytes{borrowed_.load(std::memory_order_relaxed)},
            .charges = cell_.charges.load(std::memory_order_relaxed) + word.charges(),
            .releases = cell_.releases.load(std::memory_order_relaxed) + word.releases(),
            .refusals = refusals_.load(std::memory_order_relaxed),
            .waiting = static_cast<std::uint32_t>(root_->waiting_)};
}

GPUSHARE_INLINE bytes quota::free() const noexcept {
    const std::lock_guard lock(root_->mutex_);
    return free_now();
}

GPUSHARE_INLINE bytes quota::promisable() const noexcept {
    const std::lock_guard lock(root_->mutex_);
    settle();
    bytes lent{};
    for (const quota_node* c = children_; c != nullptr; c = c->next_)
        lent += bytes{c->borrowed_.load(std::memory_order_relaxed)};
    return guaranteed_ - (bytes{cell_.held() - cell_.now().available()} - lent);
}

GPUSHARE_INLINE bytes quota::guarantee_room() const noexcept {
    if (parent_ == nullptr) return max_limit();
    const std::lock_guard lock(root_->mutex_);
    return guaranteed_ + bytes{borrowed_.load(std::memory_order_relaxed)} +
           parent_->free_now(this, detail::precedence::before_waiters);
}

GPUSHARE_INLINE bytes quota::attainable() const noexcept {
    const std::lock_guard lock(root_->mutex_);
    return stopped() ? bytes{} : quota_node::attainable();
}

GPUSHARE_INLINE failure quota::refuses(bytes n) const noexcept {
    const errc why = [&] {
        const std::lock_guard lock(root_->mutex_);
        return unfit(n.count());
    }();
    return why == errc::none ? failure{} : explain(why, n);
}

GPUSHARE_INLINE void quota::stop() noexcept {
    const std::lock_guard lock(root_->mutex_);
    detail::quota_node::stop();
    serve_waiters();
}

GPUSHARE_INLINE bool quota::close(instant deadline) noexcept {
    stop();
    return closing_.close(deadline);
}

GPUSHARE_INLINE bool quota::counts_in(const quota& other) const noexcept {
    const detail::quota_node* at = this;
    while (at != nullptr && at != &other) at = at->parent_;
    return at != nullptr;
}

GPUSHARE_INLINE void quota::name(std::string_view owner) noexcept {
    const std::lock_guard lock(root_->mutex_);
    name_ = owner;
}

GPUSHARE_INLINE std::string_view quota::name() const noexcept {
    const std::lock_guard lock(root_->mutex_);
    return name_;
}

GPUSHARE_INLINE bool quota::ask_next(detail::hook_cursor& asked, bytes n, bool below) noexcept {
    // acquire: sees everything that the maker of the hook has written
    const auto ask = root_->ask_next_.load(std::memory_order_acquire);
    return ask != nullptr && ask(*this, asked, n.count(), below);
}

GPUSHARE_INLINE bool quota::in_hook(std::thread::id thread) const noexcept {
    const std::lock_guard lock(root_->mutex_);
    return root_->in_hook_ != nullptr && root_->in_hook_(*root_, thread);
}

GPUSHARE_INLINE failure quota::explain(errc code, bytes n) const noexcept {
    const std::lock_guard lock(root_->mutex_);  // once, so that all figures are of one moment
    const bytes limit = guaranteed_ + burst_;
    if (is_memory_refusal(code) && n <= limit && !stopped())
        if (const bytes most = quota_node::attainable(); n > most)
            return {code, n.count(), most.count(), limit.count(), reason::guaranteed_to_others};
    return detail::quota_refusal(code, n.count(), free_now().count(), limit.count());
}

GPUSHARE_INLINE quota::quota(quota* parent, bytes guaranteed, bytes burst) : quota_node(parent, guaranteed, burst) {
    if (guaranteed + burst > max_limit())
        raise({errc::invalid_specification, (guaranteed + burst).count(), 0, max_limit().count(), reason::size_limit},
              {}, "quota");
    hold(guaranteed.count());
    cell_.publish({guaranteed.count()});
    if (parent != nullptr && !parent->attach(*this))
        raise(parent->explain(parent->closed() ? errc::closed : errc::no_room, guaranteed), {}, "guarantee of a quota");
}

GPUSHARE_INLINE errc quota::charge_slowly(std::uint64_t n) noexcept {
    if (bytes{n} > max_limit()) return refuse(errc::size_overflow);
    const std::lock_guard lock(root_->mutex_);
    return take(n, nullptr);
}

#endif  // GPUSHARE_BODIES

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
