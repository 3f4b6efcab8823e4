// SPDX-License-Identifier: Apache-2.0
// One turn of a thread that polls, and waits for another thread which may need its core.
//
//   while (flag.load(std::memory_order_acquire) == 0) detail::let_others_run();
//
// If few threads are ready to run, a yield is short, and the thread sees the flag at once. If many
// threads are ready, the scheduler runs all of them before a thread that has yielded: each yield
// then lasts for many milliseconds. A thread that has slept, by contrast, runs again at once. So
// threads sleep in their next turns once a yield has lasted long.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include <gpushare/config.hpp>
#include <gpushare/detail/steady_clock.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Decides whether the next turn of a polling thread is a yield or a sleep. All threads share the
/// decision, since they share the cores. relaxed: the numbers order nothing, and a turn that
/// follows an old number does no harm.
class polling_pace {
public:
    [[nodiscard]] bool sleeps(instant now) const noexcept {
        return now.time_since_epoch().count() < yields_at_.load(std::memory_order_relaxed);
    }
    /// A thread yielded at `from` and ran again at `to`. If that was long, threads sleep for a
    /// while, and longer each time, before they try another yield.
    void yielded(instant from, instant to) noexcept {
        const auto next = next_.load(std::memory_order_relaxed);
        if (to - from >= long_yield) {
            yields_at_.store(to.time_since_epoch().count() + next, std::memory_order_relaxed);
            next_.store(std::min(2 * next, longest.count()), std::memory_order_relaxed);
        } else if (next != shortest.count()) {
            next_.store(shortest.count(), std::memory_order_relaxed);
        }
    }

private:
    static constexpr ns long_yield = std::chrono::milliseconds(1);
    static constexpr ns shortest = std::chrono::milliseconds(20), longest = std::chrono::seconds(1);

    std::atomic<ns::rep> yields_at_{0};            // until then threads sleep
    std::atomic<ns::rep> next_{shortest.count()};  // how long, after the next long yield
};
/// The pace of this program's threads.
inline constinit polling_pace polling;

/// Whether yields have lasted long lately.
[[nodiscard]] inline bool cores_are_busy() noexcept { return polling.sleeps(steady_clock::now()); }

/// Yields the core, or sleeps for 50 us.
inline void let_others_run() noexcept {
    const instant now = steady_clock::now();
    if (polling.sleeps(now)) return std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::this_thread::yield();
    polling.yielded(now, steady_clock::now());
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
