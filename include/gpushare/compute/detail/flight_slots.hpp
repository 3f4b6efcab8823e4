// SPDX-License-Identifier: Apache-2.0
// What is known of each submission that was let in, in slots that are used again. A permit's slot comes back without the
// limiter's mutex: whoever enqueued says so in the slot, and the next who holds the mutex finds it there. A part of
// flights.hpp.
//
//   flight<stream>* f = slots.free();   f->what = grant;   slots.take(*f);                          // under the mutex
//   f->end = s.record();   if (slots.land(*f, errc::none)) { ...somebody waits: lock, gather... }    // under no lock
//   slots.gather([](flight<stream>& f) { ... });                                                     // under the mutex
//
// Those that have landed are a list to which anybody adds at its head, and of which all is taken at once (Treiber, IBM RJ
// 5118, 1986): nothing is taken out of its middle, so it doesn't matter that slots are used again.
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include <gpushare/compute/detail/in_flight.hpp>
#include <gpushare/compute/grant.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <timeline Stream>
struct submission;

/// Under the limiter's mutex, but for what a permit's holder writes until it lands. Stays where it is.
template <timeline Stream>
struct flight {
    static constexpr std::size_t none = static_cast<std::size_t>(-1);
    using point = typename Stream::point;

    explicit flight(std::size_t nth) noexcept : number(nth) {}

    grant what{};                         // of several that are alike, with the sum of what was predicted
    flight* next = nullptr;               // of the free ones, of those that landed, or in its batch
    submission<Stream>* owner = nullptr;  // null: a permit
    std::uint32_t times = 1;              // so many were alike
    const std::size_t number;             // among the slots
    std::size_t in = none, ends = none;   // its batch; and the one that `begin` is the end of, too
    // Set for its holder when it boards: the points to be recorded around the work, and whether an end that can't be recorded
    // now may be later.
    bool needs_begin = false, needs_end = false, may_stay_open = false;
    ns in_front{};  // what the device is predicted to have to do before it gets there
    // Of work between points of its own, where somebody looks at the clock: when its submitter began, and had it enqueued.
    instant boarded{};
    // The holder's until it lands.
    errc code = errc::none;
    instant landed{};
    Stream* stream = nullptr;  // where it has no batch yet
    std::optional<point> begin{}, end{};
};

/// Thread-safe in `land`; the rest under one mutex. Allocates while more are taken than ever before.
template <timeline Stream>
class flight_slots {
public:
    using flight = detail::flight<Stream>;
    static constexpr std::size_t usual = most_in_flight;

    /// Throws std::bad_alloc.
    flight_slots() {
        while (all_.size() < usual) grow();
    }

    /// The one that is taken next; null where all are taken.
    [[nodiscard]] flight* free() noexcept { return free_; }
    /// One more. Throws std::bad_alloc.
    void grow() {
        const auto number = all_.size();
        release(all_.emplace_back(number));
    }
    void take(flight& f) noexcept { free_ = std::exchange(f.next, nullptr); }
    /// The latest one back is the next to go: it is still in the cache.
    void release(flight& f) noexcept {
        f.owner = nullptr;
        f.times = 1;
        f.in = f.ends = flight::none;
        f.code = errc::none;
        f.boarded = f.landed = {};
        f.next = std::exchange(free_, &f);
    }

    /// It is enqueued, and no longer the caller's. True if somebody waits for that and is to be told under the mutex.
    [[nodiscard]] bool land(flight& f, errc code) noexcept {
        f.code = code;
        f.next = landed_.load(std::memory_order_relaxed);
        // Releases what the holder wrote. seq_cst: either who lands sees that somebody waits, or who is about to wait, having
        // said so, sees what landed.
        while (!landed_.compare_exchange_weak(f.next, &f, std::memory_order_seq_cst, std::memory_order_relaxed)) {
        }
        return awaited();
    }

    /// Calls `f(flight)` for what has landed since, in the order in which it did.
    template <std::invocable<flight&> F>
    void gather(F f) noexcept {
        if (landed_.load(std::memory_order_seq_cst) == nullptr) return;
        flight* latest = landed_.exchange(nullptr, std::memory_order_acquire);
        flight* first = nullptr;
        while (latest != nullptr) {  // turned round
            flight* const before = std::exchange(latest->next, first);
            first = std::exchange(latest, before);
        }
        while (first != nullptr) f(*std::exchange(first, first->next));
    }

    /// Whether who lands from now on is to tell. What landed before is there to be gathered.
    void await(bool on) noexcept { awaited_.store(on, std::memory_order_seq_cst); }
    [[nodiscard]] bool awaited() const noexcept { return awaited_.load(std::memory_order_seq_cst); }

    [[nodiscard]] std::size_t size() const noexcept { return all_.size(); }
    [[nodiscard]] std::deque<flight>& all() noexcept { return all_; }

private:
    std::deque<flight> all_;
    flight* free_ = nullptr;
    std::atomic<flight*> landed_{nullptr};  // the latest first
    std::atomic<bool> awaited_{false};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
