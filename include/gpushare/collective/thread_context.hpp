// SPDX-License-Identifier: Apache-2.0
// The context of a kernel body that a rank's own thread calls: one block of one thread, and a way of waiting that suits
// as many threads as there are ranks.
//
//   gpushare::thread_context ctx{200};    body(ctx);
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Belongs to the calling thread. What could run anywhere is marked so: nvcc looks at what a rank's thread calls in its device
/// pass, too.
class thread_context {
public:
    /// Looks `busy_turns` times before it gives its core away at each turn: 0 where ranks outnumber cores.
    constexpr explicit thread_context(std::uint32_t busy_turns = 0) noexcept : busy_turns_(busy_turns) {}

    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t block_rank() noexcept { return 0; }
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t num_blocks() noexcept { return 1; }
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t thread_rank() noexcept { return 0; }
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t num_threads() noexcept { return 1; }
    GPUSHARE_HD static constexpr void sync() noexcept {}
    template <class T, class Op>
    [[nodiscard]] GPUSHARE_HD static constexpr T reduce(T x, Op) noexcept {
        return x;
    }
    template <class T>
    [[nodiscard]] GPUSHARE_HD static constexpr T reduce_add(T x) noexcept {
        return x;
    }
    void backoff(std::uint32_t turn) const noexcept {
        if (turn >= busy_turns_) {
            std::this_thread::yield();
        } else {
            // A line that is looked at all the time comes later: who writes it has to take it away from the readers first.
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }

    /// Nanoseconds of the steady clock.
    [[nodiscard]] static std::int64_t now() noexcept {
        return std::chrono::duration_cast<ns>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

private:
    std::uint32_t busy_turns_;
};
static_assert(kernel_context<thread_context>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
