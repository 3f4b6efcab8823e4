// SPDX-License-Identifier: Apache-2.0
// Leave in advance: while a client alone uses the device and has a batch open, its next submissions enter that without the
// limiter's mutex, for one compare-and-swap each. A part of boarding.hpp.
//
//   leave.open({.client = c, .timeline = s.timeline(), .each = 8us, ...}, 30);           // under the mutex
//   if (leave.take(c, s.timeline(), key, now)) { ...enqueue...; leave.give_back(); }     // under no lock
//   const auto n = leave.recall();   ...   const auto done = leave.collect();            // under the mutex
//
// Whoever takes the mutex recalls it first (door.hpp), and finds in the books what would be there if each had come by
// itself. So nothing that anybody decides under the mutex can be wrong about it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// take() and give_back() from any thread, the rest under one mutex.
class lease {
public:
    struct terms {
        client_id client{};
        std::uint64_t timeline = 0;
        std::uint64_t key = 0;  // their kind
        ns each{};              // what each is predicted to take
        instant busy_until{};   // so is the device, with what went in before
        instant until = never;  // something else is to be done then
    };

    /// For `n` submissions, fewer than 65536. What was taken before has been given back and collected.
    void open(const terms& t, std::uint32_t n) noexcept {
        // Each a release, so that who sees one of these also sees that the lease before it was recalled: see take().
        client_.store(packed(t.client), std::memory_order_release);
        timeline_.store(t.timeline, std::memory_order_release);
        key_.store(t.key, std::memory_order_release);
        each_.store(t.each.count(), std::memory_order_release);
        busy_until_.store(since_epoch(t.busy_until), std::memory_order_release);
        until_.store(since_epoch(t.until), std::memory_order_release);
        late_.store(false, std::memory_order_release);
        given_ = n;
        state_.store(next_serial() | n, std::memory_order_release);
    }

    /// Whether one more may go in now, and has to be given back. `now`: from when on the device has it.
    [[nodiscard]] bool take(client_id c, std::uint64_t timeline, std::uint64_t key, instant now) noexcept {
        // Acquires what open() wrote. Should the lease be recalled and another opened while we look, then what we look at is
        // a mixture; but whoever has seen any of the new terms (acquire) knows that the old state is gone, and the exchange
        // below fails: a lease's serial number never comes again.
        auto state = state_.load(std::memory_order_acquire);
        do {
            if ((state & left) == 0 || since_epoch(now) >= until_.load(std::memory_order_acquire) ||
                timeline_.load(std::memory_order_acquire) != timeline ||
                client_.load(std::memory_order_acquire) != packed(c) || key_.load(std::memory_order_acquire) != key)
                return false;
        } while (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acquire, std::memory_order_acquire));
        // No other is opened until this one is given back: relaxed. Two that come at once may both build on the same end, and
        // then one of them, or a later one, may be thought late: it errs towards a doubt.
        const auto busy = busy_until();
        if (now > busy) late_.store(true, std::memory_order_relaxed);
        const auto then = saturating_add(std::max(now, busy), ns{each_.load(std::memory_order_relaxed)});
        busy_until_.store(since_epoch(then), std::memory_order_relaxed);
        return true;
    }

    /// It is enqueued. Releases that to collect(); seq_cst: see flight_slots::land().
    void give_back() noexcept { given_back_.fetch_add(1, std::memory_order_seq_cst); }

    [[nodiscard]] bool is_open() const noexcept { return given_ > 0; }

    /// Nobody takes any more, until it is opened again. Returns how many did.
    [[nodiscard]] std::uint32_t recall() noexcept {
        // Acquire and release: what is done next is done after whatever was taken, and before the next is opened.
        const auto was = state_.exchange(next_serial(), std::memory_order_acq_rel);
        const auto taken = given_ - static_cast<std::uint32_t>(was & left);
        given_ = 0;
        return taken;
    }

    /// How many were given back since it was last asked.
    [[nodiscard]] std::uint32_t collect() noexcept {
        const auto before = collected_;
        collected_ = given_back_.load(std::memory_order_seq_cst);
        return collected_ - before;
    }

    /// Of all that was given back: whether one came when the device may have had nothing more to do, and when it is predicted
    /// to be done with them.
    [[nodiscard]] bool any_late() const noexcept { return late_.load(std::memory_order_relaxed); }
    [[nodiscard]] instant busy_until() const noexcept {
        return instant{ns{busy_until_.load(std::memory_order_relaxed)}};
    }

private:
    static constexpr std::uint64_t left = 0xffff;

    [[nodiscard]] static std::uint64_t packed(client_id c) noexcept {
        return std::uint64_t{c.generation} << 32 | c.index;
    }
    [[nodiscard]] static ns::rep since_epoch(instant t) noexcept { return t.time_since_epoch().count(); }
    [[nodiscard]] std::uint64_t next_serial() noexcept { return ++serial_ * (left + 1); }

    std::atomic<std::uint64_t> state_{0};  // a serial number, and how many may still be taken
    std::atomic<ns::rep> until_{0}, busy_until_{0}, each_{0};
    std::atomic<std::uint64_t> timeline_{0}, client_{0}, key_{0};
    std::atomic<bool> late_{false};
    std::atomic<std::uint32_t> given_back_{0};  // ever, modulo 2^32
    // Under the mutex.
    std::uint32_t collected_ = 0;
    std::uint32_t given_ = 0;  // while it is open
    std::uint64_t serial_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
