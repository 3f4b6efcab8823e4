// SPDX-License-Identifier: Apache-2.0
// Who waits for memory of a pool, first come first served: a state machine without a lock or a clock. pool_waiters.hpp
// has the wait.
//
//   gpushare::pool_line line;
//   gpushare::pool_place mine;
//   line.join(mine);                                 // under the lock of the pool, and so all that follows
//   if (std::exchange(mine.told, false)) ...;        // its turn, and something may have come: worth a try
//   line.leave(mine);
//
// Only the first in line tries. Whoever frees tells it, and whoever leaves tells the next one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>

#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Somebody in line. Under the lock of the pool.
struct pool_place {
    pool_place* next = nullptr;
    bool told = false;              // since it tried last
    std::condition_variable woken;  // with the lock of the pool
};

/// Under the lock of the pool, but for size().
class pool_line {
public:
    [[nodiscard]] bool first(const pool_place& p) const noexcept { return line_.front() == &p; }

    /// Relaxed: a hint for those who come later. Who hasn't seen a place in line came before it.
    [[nodiscard]] std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

    /// At the end of the line. True if there was none before.
    bool join(pool_place& p) noexcept {
        const bool first = line_.empty();
        line_.push(p);
        size_.fetch_add(1, std::memory_order_relaxed);
        if (first) tell();
        return first;
    }
    /// True if the line is empty now.
    bool leave(pool_place& p) noexcept {
        const bool was_first = first(p);
        line_.remove(p);
        size_.fetch_sub(1, std::memory_order_relaxed);
        if (was_first) tell();
        return line_.empty();
    }

    /// Memory has come, or may come of somebody's waiting for it.
    void tell() noexcept {
        if (line_.empty()) return;
        line_.front()->told = true;
        line_.front()->woken.notify_one();
    }

private:
    detail::fifo<pool_place> line_;
    std::atomic<std::size_t> size_{0};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
