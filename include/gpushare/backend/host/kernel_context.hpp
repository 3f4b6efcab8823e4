// SPDX-License-Identifier: Apache-2.0
// A kernel's view of the host device: its place in the grid, with one thread per block, and the
// barrier over the blocks of a cooperative launch.
//
//   struct scale {
//       float* x;  std::size_t n;
//       void operator()(auto& ctx) const {
//           for (std::size_t i = ctx.block_rank(); i < n; i += ctx.num_blocks()) x[i] *= 2;
//       }
//   };
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include <gpushare/concepts.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

namespace detail {

/// One turn of waiting for another block: a few pauses, then the rest of the time slice, then a
/// short sleep, because the awaited block may need this core.
inline void back_off(std::uint32_t turn) noexcept {
    if (turn < 16) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    } else if (turn < 256) {
        std::this_thread::yield();
    } else {
        std::this_thread::sleep_for(std::chrono::microseconds{50});
    }
}

/// The barrier of one cooperative launch. The barrier gives up, instead of hanging, once a block
/// can't arrive any more.
class grid_barrier {
public:
    void reset(std::uint32_t blocks) noexcept {
        blocks_ = blocks;
        // Relaxed: published to the blocks by the node's lock.
        arrived_.store(0, std::memory_order_relaxed);
        left_.store(false, std::memory_order_relaxed);
    }

    /// True once all blocks are here; false if a block has ended or the device is lost.
    [[nodiscard]] bool arrive_and_wait(const std::atomic<bool>& lost) noexcept {
        const std::uint32_t phase = phase_.load(std::memory_order_acquire);
        // acq_rel: the last to arrive has seen what all others wrote, and its release below passes
        // that on.
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == blocks_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return true;
        }
        for (std::uint32_t turn = 0; phase_.load(std::memory_order_acquire) == phase; ++turn) {
            // A block that has ended may have ended after this phase was complete: look at the
            // phase again.
            if (left_.load(std::memory_order_acquire) || lost.load(std::memory_order_acquire))
                return phase_.load(std::memory_order_acquire) != phase;
            back_off(turn);
        }
        return true;
    }

    /// A block has ended: no later phase can complete.
    void leave() noexcept { left_.store(true, std::memory_order_release); }

private:
    std::uint32_t blocks_ = 1;
    std::atomic<std::uint32_t> arrived_{0};
    std::atomic<std::uint32_t> phase_{0};
    std::atomic<bool> left_{false};
};

inline constinit const std::atomic<bool> never_lost{false};

class engine;
struct sm_state;

/// How a block lets more urgent ones have its SM.
struct yielding {
    const std::atomic<std::int32_t>& waiting;  // the highest level that waits for an SM
    std::int32_t level;                        // the block's own
    engine& owner;
    sm_state& sm;
    bool (*run)(yielding&) noexcept;
};

}  // namespace detail

/// The first argument of a kernel. A default-constructed context is a grid of one block, for
/// calling a kernel directly. Belongs to the thread that runs the block.
class kernel_context {
public:
    constexpr kernel_context() noexcept = default;
    /// Called by the engine.
    constexpr kernel_context(std::uint32_t block, std::uint32_t blocks, std::uint32_t sm, detail::grid_barrier* barrier,
                             const std::atomic<bool>& lost, detail::yielding* yielding = nullptr) noexcept
        : block_(block), blocks_(blocks), sm_(sm), barrier_(barrier), lost_(&lost), yielding_(yielding) {}

    /// The block's index in its grid, from 0.
    [[nodiscard]] constexpr std::uint32_t block_rank() const noexcept { return block_; }
    /// The number of blocks of the grid.
    [[nodiscard]] constexpr std::uint32_t num_blocks() const noexcept { return blocks_; }
    /// Always 0: a block has one thread.
    [[nodiscard]] static constexpr std::uint32_t thread_rank() noexcept { return 0; }
    /// Always 1.
    [[nodiscard]] static constexpr std::uint32_t num_threads() noexcept { return 1; }
    /// The SM that runs the block.
    [[nodiscard]] constexpr std::uint32_t sm() const noexcept { return sm_; }

    /// Does nothing: a block has one thread.
    constexpr void sync() noexcept {}

    /// Combines `x` of all threads of the block by `op`: returns `x`, since a block has one thread.
    template <class T, class Op>
    [[nodiscard]] constexpr T reduce(T x, Op) noexcept {
        return x;
    }
    /// The sum of `x` over the threads of the block.
    template <class T>
    [[nodiscard]] constexpr T reduce_add(T x) noexcept {
        return x;
    }

    /// Waits for all blocks of a cooperative launch, and makes their writes visible. False if not
    /// all blocks can arrive: a block has ended or thrown, the device is lost, or the launch isn't
    /// cooperative.
    [[nodiscard]] bool grid_sync() noexcept {
        if (barrier_ == nullptr) return blocks_ == 1;
        return barrier_->arrive_and_wait(*lost_);
    }

    /// Lets waiting blocks of higher levels have the SM, one after the other, until there are none.
    /// Returns whether there were any. They run on the calling thread, on top of this block, which
    /// uses no SM meanwhile. So this block must hold nothing for which they might wait, such as a
    /// lock. If no block waits, the call costs a load. Works in real time, for the block of an
    /// ordinary launch of one block. In a larger launch it may do nothing; in modelled time and in
    /// a cooperative launch it does nothing.
    bool yield() noexcept {
        // relaxed: no other data depends on the value, and the next call sees a late change.
        if (yielding_ == nullptr || yielding_->waiting.load(std::memory_order_relaxed) <= yielding_->level)
            return false;
        return yielding_->run(*yielding_);
    }

    /// Call in a loop that waits for another block. `turn`: the number of earlier calls.
    void backoff(std::uint32_t turn) noexcept { detail::back_off(turn); }

    /// Nanoseconds of the steady clock.
    [[nodiscard]] static std::int64_t now() noexcept {
        return std::chrono::duration_cast<ns>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    /// True once the device is lost: a block that waits for another one should return.
    [[nodiscard]] bool device_lost() const noexcept { return lost_->load(std::memory_order_acquire); }

private:
    std::uint32_t block_ = 0, blocks_ = 1, sm_ = 0;
    detail::grid_barrier* barrier_ = nullptr;
    const std::atomic<bool>* lost_ = &detail::never_lost;
    detail::yielding* yielding_ = nullptr;
};
static_assert(gpushare::kernel_context<kernel_context>);
static_assert(kernel_for<gpushare::detail::empty_kernel, kernel_context>);

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
