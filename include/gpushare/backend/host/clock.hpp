// SPDX-License-Identifier: Apache-2.0
// The host's clocks: real time, the CPU time of a thread, and a clock that is advanced by hand.
//
//   gpushare::host::steady_clock clock;    const gpushare::instant deadline = clock.now() + 5ms;
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/steady_clock.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// Real time that never goes back. The clock of every host node, and of every wait for a host
/// point.
using steady_clock = gpushare::detail::steady_clock;

/// CPU time that the calling thread has used. Instants of different threads can't be compared.
struct thread_cpu_clock {
    /// The CPU time of the calling thread so far.
    [[nodiscard]] static instant now() noexcept {
        timespec t{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return instant{std::chrono::seconds{t.tv_sec} + ns{t.tv_nsec}};
    }
};
static_assert(clock<thread_cpu_clock>);

/// A clock for tests, which moves only when its program moves it. Safe from any thread.
class manual_clock {
public:
    manual_clock() noexcept = default;
    /// A clock that shows `start`.
    explicit manual_clock(instant start) noexcept : now_(start.time_since_epoch().count()) {}

    // Acquire and release: a thread that sees the new time also sees everything that was done
    // before the clock was moved.
    /// The time to which the clock was moved last.
    [[nodiscard]] instant now() const noexcept { return instant{ns{now_.load(std::memory_order_acquire)}}; }

    /// Moves forward by `step`; a negative step does nothing.
    void advance(ns step) noexcept {
        if (step.count() > 0) now_.fetch_add(step.count(), std::memory_order_acq_rel);
    }

private:
    std::atomic<ns::rep> now_{0};
};
static_assert(clock<manual_clock>);

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
