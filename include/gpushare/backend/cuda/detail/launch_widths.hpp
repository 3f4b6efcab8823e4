// SPDX-License-Identifier: Apache-2.0
// Computes which part of a stream's SMs the launches of one submission can fill: the ratio of their
// blocks to the blocks that can be resident at once in the stream's partition. A part of the
// stream's state.
//
//   // 0.25: a quarter of the SMs
//   if (s.widths.begin()) { work(stream);  const auto filled = s.widths.end(); }
//   s.widths.note(kernel, {.blocks = 64, .threads = 256}, [&] { return ...; });  // by the launch
//   s.widths.note({.width = sm_width(0.5)});  // by a graph of such
//   s.widths.note_opaque();  // by a copy, ...
//
// Only launches through the stream object are counted. A caller with the native handle may launch
// past the object, so once the handle was given out, all of the stream's work is opaque.
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

/// Safe from any thread. Records the work that one thread at a time enqueues. Work that other
/// threads enqueue meanwhile makes the result opaque.
class launch_widths {
public:
    /// Begins to note the calling thread's work. Returns false if another submission is being
    /// noted.
    [[nodiscard]] bool begin() noexcept {
        std::thread::id nobody{};
        // acquire: a thread that records a launch sees what the previous such thread wrote.
        if (!by_.compare_exchange_strong(nobody, std::this_thread::get_id(), std::memory_order_acquire,
                                         std::memory_order_relaxed))
            return false;
        widest_ = 0;
        return true;
    }
    /// Ends noting, in the thread that called begin(). Returns the part that the work can fill.
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
    /// Call before several launches at once, such as a graph, that can fill this part.
    void note(sm_fill all) noexcept {
        if (all.opaque || by_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return note_opaque();
        if (all.width.known()) widest_ = std::max(widest_, all.width.part());
    }
    /// Call before any other work on the device.
    void note_opaque() noexcept {
        // relaxed: a submission ends after its threads have enqueued, and their synchronisation
        // with it orders this store before that end. A store from another submission's thread may
        // reach the next submission instead, which then counts as opaque without need.
        if (by_.load(std::memory_order_relaxed) != std::thread::id{}) opaque_.store(true, std::memory_order_relaxed);
    }
    /// The native handle was given out.
    void give_up() noexcept {
        if (!by_handle_.load(std::memory_order_relaxed)) by_handle_.store(true, std::memory_order_relaxed);
    }

private:
    std::atomic<std::thread::id> by_{};
    std::atomic<bool> opaque_{false}, by_handle_{false};
    // State of the noting thread.
    double widest_ = 0;
    const void* entry_ = nullptr;  // the latest kernel
    std::uint32_t threads_ = 0, resident_ = 0;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
