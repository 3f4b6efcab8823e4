// SPDX-License-Identifier: Apache-2.0
// Computes which part of a stream's SMs the launches of one submission can fill: their blocks
// against the blocks that can be resident at once in the stream's partition. A part of the stream's
// state.
//
//   if (s.widths.begin()) { work(stream);  const auto filled = s.widths.end(); }         // 0.25: a quarter of the SMs
//   s.widths.note(kernel, {.blocks = 64, .threads = 256}, [&] { return ...; });          // by the launch
//   s.widths.note({.width = sm_width(0.5)});                                             // by a graph of such
//   s.widths.note_opaque();                                                              // by a copy, ...
//
// The width counts only launches through the stream object. A caller that has got the native handle
// may launch past the object, so from then on all of the stream's work is opaque.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstdint>
#include <thread>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Safe from any thread. Notes what one thread enqueues at a time; what others enqueue meanwhile makes it opaque.
class launch_widths {
public:
    /// From now on, what the calling thread enqueues. False where another submission is just being noted.
    [[nodiscard]] bool begin() noexcept {
        std::thread::id nobody{};
        // acquire: the noting thread finds its state as the thread before left it.
        if (!by_.compare_exchange_strong(nobody, std::this_thread::get_id(), std::memory_order_acquire,
                                         std::memory_order_relaxed))
            return false;
        widest_ = 0;
        return true;
    }
    /// After begin(), by the same thread.
    [[nodiscard]] sm_fill end() noexcept {
        const bool opaque =
            opaque_.exchange(false, std::memory_order_relaxed) || by_handle_.load(std::memory_order_relaxed);
        const sm_fill filled{opaque ? sm_width{} : sm_width(widest_), opaque};
        by_.store({}, std::memory_order_release);
        return filled;
    }

    /// Call before a launch. `resident()` gives the number of blocks that fit at once, or 0 if that
    /// isn't known. It is called whenever the kernel differs from the last one.
    template <std::invocable F>
    void note(const void* entry, grid g, F resident) noexcept {
        // relaxed: only the calling thread writes its own number.
        const auto by = by_.load(std::memory_order_relaxed);
        if (by == std::thread::id{}) return;
        if (by != std::this_thread::get_id()) return note_opaque();
        if (entry != entry_ || g.threads != threads_) {
            entry_ = entry;
            threads_ = g.threads;
            resident_ = resident();
        }
        if (resident_ == 0) return note_opaque();
        widest_ = std::max(widest_, std::min(static_cast<double>(g.blocks) / resident_, 1.0));
    }
    /// Before several launches at once that can fill this.
    void note(sm_fill all) noexcept {
        if (all.opaque || by_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return note_opaque();
        if (all.width.known()) widest_ = std::max(widest_, all.width.part());
    }
    /// Before anything else that runs on the device.
    void note_opaque() noexcept {
        // relaxed: a submission ends after its threads have enqueued, and their synchronisation
        // with it orders this store before that end. A store from another submission's thread may
        // reach the next submission instead, which then counts as opaque without need.
        if (by_.load(std::memory_order_relaxed) != std::thread::id{}) opaque_.store(true, std::memory_order_relaxed);
    }
    /// Somebody has the native handle.
    void give_up() noexcept {
        if (!by_handle_.load(std::memory_order_relaxed)) by_handle_.store(true, std::memory_order_relaxed);
    }

private:
    std::atomic<std::thread::id> by_{};
    std::atomic<bool> opaque_{false}, by_handle_{false};
    // State of the thread that notes.
    double widest_ = 0;
    const void* entry_ = nullptr;  // the last kernel
    std::uint32_t threads_ = 0, resident_ = 0;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
