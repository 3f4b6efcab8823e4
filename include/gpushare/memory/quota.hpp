// SPDX-License-Identifier: Apache-2.0
// A quota: how many bytes may be in use at once, exact to the byte under any concurrency. Quotas form a tree: a
// child's guaranteed bytes are set aside in its parent when it is made, its burst is taken from the parent only
// while it is used. It counts bytes and knows no memory; quota_resource ties it to an allocator.
//
//   gpushare::quota device{80_GiB};
//   gpushare::quota chat{device, 20_GiB, 4_GiB};        // 20 GiB whatever others do, 4 more while they are free
//   if (chat.try_charge(512_MiB) == gpushare::errc::none) { ...; chat.release(512_MiB); }
//
// How it is exact. What is still free, not what is used, lies in one atomic word, so a single compare-and-swap
// decides a charge, even beside a resize. Only when the word holds too little does a charge take the quota's
// mutex, freeze the word and ask the parent for the difference: the parent sees granted charges only, so an
// attempt that fails never makes another one fail. While a quota is over its limit, after a resize below what is
// charged, its word stays frozen: what is released must go back before anybody charges it again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// A reading of a quota. Bytes are consistent with each other; counts are exact while no call is under way and
/// may lag by some dozens otherwise.
struct quota_usage {
    bytes guaranteed{}, burst{};
    bytes current{};   // charged now; above guaranteed + burst only after a resize below it
    bytes peak{};      // the most that was ever charged
    bytes borrowed{};  // held from the parent beyond the guarantee
    std::uint64_t charges = 0, releases = 0, refusals = 0;  // calls; children's loans and returns count too

    [[nodiscard]] constexpr bytes limit() const noexcept { return guaranteed + burst; }
};

/// See the top of the file. All members are safe from any thread; none allocates. The parent must outlive it.
class alignas(64) quota {
public:
    /// The largest quota: 256 TiB less one byte.
    [[nodiscard]] static constexpr bytes max_limit() noexcept { return bytes{available_mask}; }

    /// A root. Throws operation_error (invalid_specification) above max_limit().
    explicit quota(bytes limit) : quota(nullptr, limit, bytes{}) {}

    /// A child with `guaranteed` bytes taken from `parent` now and up to `burst` more while it uses them.
    /// Throws operation_error: no_room if the parent can't guarantee them, invalid_specification above max_limit().
    quota(quota& parent, bytes guaranteed, bytes burst = {}) : quota(&parent, guaranteed, burst) {}

    quota(const quota&) = delete;
    quota& operator=(const quota&) = delete;

    /// Gives back to the parent what isn't charged. Bytes still charged stay charged there: they are in use.
    ~quota() {
        if (parent_ != nullptr) parent_->release(bytes{available(word_.load(std::memory_order_acquire))});
    }

    /// Charges `n` bytes or none. over_quota: beyond this quota's own limit; out_of_memory: burst that the parent
    /// doesn't have now; size_overflow: more than any quota can hold. One compare-and-swap unless it must borrow.
    [[nodiscard]] errc try_charge(bytes n) noexcept {
        for (;;) {
            auto [word, total] = read();
            if (frozen(word) || available(word) < n.count()) break;
            const auto charged = charge_word(word, n.count());
            // Acquire: the bytes charged here may be those that another thread released, and whatever it did with
            // them happened before. No release of its own: it carries on those of the releases before it.
            if (word_.compare_exchange_weak(word, charged, std::memory_order_acquire, std::memory_order_relaxed)) {
                count_charge(charged, total);
                return errc::none;
            }
        }
        return charge_slowly(n.count());
    }

    /// Returns `n` bytes. False, and nothing changes, if fewer are charged: a size that was never charged here.
    bool release(bytes n) noexcept {
        for (;;) {
            auto [word, total] = read();
            if (frozen(word)) [[unlikely]]
                return release_slowly(n.count());
            if (n.count() > total - available(word)) return false;
            const auto released = release_word(word, n.count());
            // Release: what the caller did with the bytes happens before whoever charges them next.
            if (word_.compare_exchange_weak(word, released, std::memory_order_acq_rel, std::memory_order_relaxed)) {
                count_release(released);
                break;
            }
        }
        // Relaxed suffices: a loan taken before this release was stored before a thaw that it saw; one taken after it
        // has used up the released bytes, and leaves nothing to return.
        if (borrowed_.load(std::memory_order_relaxed) != 0) return_loans();
        return true;
    }

    /// Changes guarantee and burst, all or nothing. Going below what is charged takes nothing away: requests are
    /// refused until it fits, and what is released meanwhile goes to the parent. Growing fails with no_room if
    /// the parent hasn't the bytes, with invalid_specification above max_limit() or for a root's burst.
    [[nodiscard]] errc resize(bytes guaranteed, bytes burst) noexcept {
        if (guaranteed + burst > max_limit() || (parent_ == nullptr && burst != bytes{}))
            return errc::invalid_specification;
        const std::lock_guard lock(mutex_);
        const auto borrowed = borrowed_.load(std::memory_order_relaxed);
        const auto grow = (guaranteed - guaranteed_).count(), shrink = (guaranteed_ - guaranteed).count();
        const auto held = std::min(grow, borrowed);  // what was borrowed is charged at the parent already
        if (parent_ != nullptr && parent_->try_charge(bytes{grow - held}) != errc::none) return errc::no_room;
        borrowed_.store(borrowed - held + shrink, std::memory_order_relaxed);
        guaranteed_ = guaranteed;
        burst_ = burst;
        settle(grow - held);
        return errc::none;
    }

    [[nodiscard]] quota_usage usage() const noexcept {
        const std::lock_guard lock(mutex_);  // total_ stands still
        const auto word = word_.load(std::memory_order_acquire);
        const auto current = total() - available(word);
        return {.guaranteed = guaranteed_,
                .burst = burst_,
                .current = bytes{current},
                // Whoever charged what is current now may not have got to the peak yet.
                .peak = bytes{std::max(current, peak_.load(std::memory_order_relaxed))},
                .borrowed = bytes{borrowed_.load(std::memory_order_relaxed)},
                .charges = charges_.load(std::memory_order_relaxed) + charge_field(word) % spill,
                .releases = releases_.load(std::memory_order_relaxed) + release_field(word) % spill,
                .refusals = refusals_.load(std::memory_order_relaxed)};
    }

    /// The largest charge that would succeed now: what the owner sees as free memory.
    [[nodiscard]] bytes free() const noexcept {
        bytes left, borrowable;
        {
            const std::lock_guard lock(mutex_);
            left = bytes{available(word_.load(std::memory_order_acquire))};
            borrowable = burst_ - bytes{borrowed_.load(std::memory_order_relaxed)};
        }
        return parent_ == nullptr ? left : left + std::min(borrowable, parent_->free());
    }

    /// The largest guarantee that resize() would grant now.
    [[nodiscard]] bytes guarantee_room() const noexcept {
        if (parent_ == nullptr) return max_limit();
        const std::lock_guard lock(mutex_);  // what is borrowed stands still
        return guaranteed_ + bytes{borrowed_.load(std::memory_order_relaxed)} + parent_->free();
    }

    /// The figures of a refusal of `n` bytes, for error messages.
    [[nodiscard]] failure explain(errc code, bytes n) const noexcept {
        return {.code = code, .asked = n.count(), .left = free().count(), .limit = usage().limit().count()};
    }

private:
    // The word: bytes available in the low 48 bits, then 7 bits each of how many charges and releases there were,
    // then the frozen bit. The counts ride along in the compare-and-swap that is paid anyway; every 64th call moves
    // 64 of them to a counter of their own.
    static constexpr unsigned charge_shift = 48, release_shift = 55;
    static constexpr std::uint64_t available_mask = (std::uint64_t{1} << charge_shift) - 1;
    static constexpr std::uint64_t count_mask = 0x7f, spill = 64;
    static constexpr std::uint64_t frozen_bit = std::uint64_t{1} << 63;

    static constexpr std::uint64_t available(std::uint64_t word) noexcept { return word & available_mask; }
    static constexpr std::uint64_t charge_field(std::uint64_t word) noexcept {
        return word >> charge_shift & count_mask;
    }
    static constexpr std::uint64_t release_field(std::uint64_t word) noexcept {
        return word >> release_shift & count_mask;
    }
    static constexpr bool frozen(std::uint64_t word) noexcept { return (word & frozen_bit) != 0; }
    // One more charge or release, modulo 128: the carry must not reach the field above.
    static constexpr std::uint64_t charge_word(std::uint64_t word, std::uint64_t n) noexcept {
        if (charge_field(word) == count_mask) [[unlikely]]
            word -= (count_mask + 1) << charge_shift;
        return word - n + (std::uint64_t{1} << charge_shift);
    }
    static constexpr std::uint64_t release_word(std::uint64_t word, std::uint64_t n) noexcept {
        if (release_field(word) == count_mask) [[unlikely]]
            word -= (count_mask + 1) << release_shift;
        return word + n + (std::uint64_t{1} << release_shift);
    }

    struct reading {
        std::uint64_t word, total;
    };

    // A word and the total_ that belonged to it. The word may come back to what it was while total_ has been something
    // else in between (a resize down and up), so total_ must be the same before and after. Acquire: a changed total_ is
    // seen together with the freeze before it, and a thawed word together with the total_ before it.
    [[nodiscard]] reading read() const noexcept {
        for (auto before = total_.load(std::memory_order_acquire);;) {
            const auto word = word_.load(std::memory_order_acquire);
            const auto after = total_.load(std::memory_order_acquire);
            if (before == after) return {word, before & available_mask};
            before = after;
        }
    }

    // Both under mutex_; set_total in a freeze, with release for read().
    [[nodiscard]] std::uint64_t total() const noexcept {
        return total_.load(std::memory_order_relaxed) & available_mask;
    }
    void set_total(std::uint64_t total) noexcept {
        const auto changes = (total_.load(std::memory_order_relaxed) & ~available_mask) + available_mask + 1;
        total_.store(changes | total, std::memory_order_release);
    }

    quota(quota* parent, bytes guaranteed, bytes burst)
        : total_(guaranteed.count()), parent_(parent), guaranteed_(guaranteed), burst_(burst) {
        if (guaranteed + burst > max_limit())
            raise({errc::invalid_specification, (guaranteed + burst).count(), 0, max_limit().count()}, {}, "quota");
        if (parent_ != nullptr && parent_->try_charge(guaranteed) != errc::none)
            raise(parent_->explain(errc::no_room, guaranteed), {}, "guarantee of a quota");
        word_.store(guaranteed.count(), std::memory_order_release);
    }

    void count_charge(std::uint64_t word, std::uint64_t total) noexcept {
        if (charge_field(word) % spill == 0) charges_.fetch_add(spill, std::memory_order_relaxed);
        const auto current = total - available(word);
        auto peak = peak_.load(std::memory_order_relaxed);
        while (current > peak && !peak_.compare_exchange_weak(peak, current, std::memory_order_relaxed)) {
        }
    }

    void count_release(std::uint64_t word) noexcept {
        if (release_field(word) % spill == 0) releases_.fetch_add(spill, std::memory_order_relaxed);
    }

    // While the word is frozen, charges and releases take the mutex: its holder alone changes the word then, and total_
    // with it.
    void freeze() noexcept { word_.fetch_or(frozen_bit, std::memory_order_acq_rel); }

    // Stores the word, frozen still if the quota is over its limit. Release: who sees the thawed word sees total_ as it
    // was stored before.
    void thaw(std::uint64_t word) noexcept {
        const bool over = borrowed_.load(std::memory_order_relaxed) > burst_.count();
        word_.store(over ? word | frozen_bit : word & ~frozen_bit, std::memory_order_release);
    }

    errc charge_slowly(std::uint64_t n) noexcept {
        if (n > available_mask) return refuse(errc::size_overflow);
        const std::lock_guard lock(mutex_);
        freeze();
        const auto word = word_.load(std::memory_order_relaxed);
        const auto need = n - std::min(n, available(word));
        if (const auto why = need == 0 ? errc::none : borrow(need); why != errc::none) {
            thaw(word);
            return refuse(why);
        }
        set_total(total() + need);
        const auto charged = charge_word(word + need, n);
        thaw(charged);
        count_charge(charged, total());
        return errc::none;
    }

    // This one and the next are kept out of line: inlined, they make every release a fifth slower.
    [[gnu::noinline]] bool release_slowly(std::uint64_t n) noexcept {
        const std::lock_guard lock(mutex_);
        freeze();
        const auto word = word_.load(std::memory_order_relaxed);
        const bool charged = n <= total() - available(word);
        if (charged) {
            const auto released = release_word(word, n);
            word_.store(released, std::memory_order_relaxed);  // still frozen: settle() publishes it
            count_release(released);
        }
        settle();
        return charged;
    }

    [[gnu::noinline]] void return_loans() noexcept {
        const std::lock_guard lock(mutex_);
        settle();
    }

    errc borrow(std::uint64_t need) noexcept {
        const auto borrowed = borrowed_.load(std::memory_order_relaxed);
        if (parent_ == nullptr || borrowed + need > burst_.count()) return errc::over_quota;
        if (parent_->try_charge(bytes{need}) != errc::none) return errc::out_of_memory;
        borrowed_.store(borrowed + need, std::memory_order_relaxed);
        return errc::none;
    }

    errc refuse(errc why) noexcept {
        refusals_.fetch_add(1, std::memory_order_relaxed);
        return why;
    }

    // Under mutex_: takes in `fresh` bytes that the parent was charged, and returns loans that nobody uses.
    void settle(std::uint64_t fresh = 0) noexcept {
        freeze();
        const auto word = word_.load(std::memory_order_relaxed) + fresh;
        const auto borrowed = borrowed_.load(std::memory_order_relaxed);
        const auto back = std::min(borrowed, available(word));
        set_total(total() + fresh - back);
        borrowed_.store(borrowed - back, std::memory_order_relaxed);
        thaw(word - back);
        if (parent_ != nullptr && back != 0) parent_->release(bytes{back});
    }

    std::atomic<std::uint64_t> word_{0};
    // guaranteed + borrowed, in the low 48 bits, and above them how often it changed. Written under mutex_ in a freeze.
    std::atomic<std::uint64_t> total_;
    std::atomic<std::uint64_t> borrowed_{0};  // written only under mutex_
    std::atomic<std::uint64_t> peak_{0};
    std::atomic<std::uint64_t> charges_{0}, releases_{0}, refusals_{0};
    quota* const parent_;
    mutable std::mutex mutex_;  // taken child before parent
    bytes guaranteed_, burst_;  // under mutex_
};

}  // namespace gpushare::inline GPUSHARE_ABI
