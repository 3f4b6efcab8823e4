// SPDX-License-Identifier: Apache-2.0
// The state of a stream's captures: which of our captures is under way, and whether threads may
// begin new ones. A part of the stream's state.
//
//   const auto turn = watch.turn();                       // a thread that records a point
//   if (capture_watch::captures(turn)) refuse();
//   record();
//   // it may have gone into a capture that another thread began meanwhile
//   if (watch.turn() != turn) refuse();
//
// Any thread may record on a stream for a limiter, so a record takes no lock. If a point went into
// a capture by accident, the point can be dropped. Some calls would invalidate a capture, such as
// an allocation or a wait for a point from outside the capture. Such calls hold off captures
// instead.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <shared_mutex>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Safe from any thread.
class capture_watch {
public:
    /// A count that changes whenever one of our captures begins or ends.
    [[nodiscard]] std::uint64_t turn() const noexcept {
        // acquire: if the driver put a record into a capture, then by the driver's own lock the
        // record comes after the capture's beginning. This reading comes after the record, so it
        // sees what begin() wrote before the capture.
        return turn_.load(std::memory_order_acquire);
    }
    /// Whether a capture of ours is under way at that turn.
    [[nodiscard]] static constexpr bool captures(std::uint64_t turn) noexcept { return turn % 2 != 0; }
    /// Whether a capture of ours is under way now.
    [[nodiscard]] bool ours() const noexcept { return captures(turn()); }

    /// Call before the driver begins a capture. False if a capture is already under way. Waits for
    /// callers that hold off captures.
    [[nodiscard]] bool begin() noexcept {
        const std::lock_guard lock(mutex_);
        std::uint64_t now = turn_.load(std::memory_order_relaxed);
        return !captures(now) && turn_.compare_exchange_strong(now, now + 1, std::memory_order_acq_rel);
    }
    /// Call after the driver has ended the capture.
    void end() noexcept { turn_.fetch_add(1, std::memory_order_release); }

    /// No capture of ours begins while the returned lock exists. Any number of threads may hold
    /// captures off at once. None of them waits while another one is in a driver's call; only the
    /// beginning of a capture waits.
    [[nodiscard]] std::shared_lock<std::shared_mutex> hold_off() noexcept { return std::shared_lock(mutex_); }

    /// From now on other code has the native stream and may begin captures, of which only the
    /// driver knows.
    void hand_out() noexcept {
        // relaxed: a thread that gets the handle makes sure that its own work on the stream comes
        // later.
        if (!handed_out()) handed_out_.store(true, std::memory_order_relaxed);
    }
    [[nodiscard]] bool handed_out() const noexcept { return handed_out_.load(std::memory_order_relaxed); }

private:
    std::shared_mutex mutex_;
    std::atomic<std::uint64_t> turn_{0};
    std::atomic<bool> handed_out_{false};
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
