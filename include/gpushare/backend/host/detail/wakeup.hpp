// SPDX-License-Identifier: Apache-2.0
// Lets a thread that holds a lock wake another thread only after releasing the lock. A thread that
// is woken under the lock would block on it immediately, and both cores would switch threads twice
// for nothing.
//
//   wakeup w;  // on the waiting thread's stack, known to others under the lock
//   lock.unlock();  w.wait(deadline);           // true: a thread raised it
//
//   wake_list woken;                            // of the thread that has the lock
//   woken.add(w);  lock.unlock();  woken.wake_all();
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {
namespace detail {

/// A wake-up for one waiting thread. May be destroyed as soon as it is raised: the waking thread
/// needs only its address.
class wakeup {
public:
    wakeup() = default;
    wakeup(const wakeup&) = delete;
    wakeup& operator=(const wakeup&) = delete;

    /// Sleeps until the wake-up is raised or interrupted, or the deadline on steady_clock is over.
    /// Returns whether the wake-up was raised.
    bool wait(instant deadline) noexcept {
        const auto left = deadline.time_since_epoch();
        const timespec at{.tv_sec = static_cast<time_t>(left.count() / nanoseconds_per_second),
                          .tv_nsec = static_cast<long>(left.count() % nanoseconds_per_second)};
        while (raised_.load(std::memory_order_acquire) == 0) {
            // The deadline is absolute, on CLOCK_MONOTONIC. The call may return for a signal, or
            // for a thread that slept at this address before.
            const long result = ::syscall(SYS_futex, &raised_, FUTEX_WAIT_BITSET_PRIVATE, 0,
                                          deadline == never ? nullptr : &at, nullptr, FUTEX_BITSET_MATCH_ANY);
            if (result != 0 && errno != EAGAIN && errno != EINTR) break;
        }
        return raised();
    }
    /// Ends the sleep without raising the wake-up. Call without the lock under which wake-ups are
    /// raised, and keep the wake-up alive meanwhile.
    void interrupt() noexcept {
        std::uint32_t neither = 0;  // release: pairs with wait()
        if (raised_.compare_exchange_strong(neither, interrupted, std::memory_order_release, std::memory_order_relaxed))
            ::syscall(SYS_futex, &raised_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
    /// Prepares for the next wait. Call under the lock.
    // Relaxed: the lock orders it.
    void lower() noexcept { raised_.store(0, std::memory_order_relaxed); }

    // acquire: a thread that sees the wake-up raised sees all that was done before.
    [[nodiscard]] bool raised() const noexcept { return raised_.load(std::memory_order_acquire) == 1; }

private:
    friend class wake_list;
    static constexpr std::int64_t nanoseconds_per_second = 1'000'000'000;
    static constexpr std::uint32_t interrupted = 2;

    std::atomic<std::uint32_t> raised_{0};  // 1: raised; see interrupt()
};

/// Threads to wake once the lock is released. The list has room for a few; further threads are
/// woken immediately.
class wake_list {
public:
    /// Adds a thread. Call under the lock. `w` may be gone afterwards.
    void add(wakeup& w) noexcept {
        if (size_ == sleeping_.size()) wake_all();
        sleeping_[size_++] = &w.raised_;
        w.raised_.store(1, std::memory_order_release);  // pairs with raised()
    }
    /// Call under no lock. If no thread sleeps at an address any more, the system call wakes none,
    /// or a thread that then checks its condition again.
    void wake_all() noexcept {
        while (size_ > 0) ::syscall(SYS_futex, sleeping_[--size_], FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }

private:
    std::array<const void*, 16> sleeping_;
    std::size_t size_ = 0;
};

}  // namespace detail
}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
