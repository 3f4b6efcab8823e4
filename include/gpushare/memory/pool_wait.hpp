// SPDX-License-Identifier: Apache-2.0
// Waiting for memory of a pool: first come first served, until a deadline or a stop request.
//
//   const gpushare::patience until{node.get_clock(), node.get_clock().now() + 50ms, stop};
//   void* p = pool.allocate_until(512_MiB, 256, until);       // throws memory_error: deadline_exceeded, stopped, ...
//   gpushare::failure why;    void* q = cache.try_allocate_until(4_KiB, 256, until, &why);
//
// While a thread waits, caches keep nothing, every free wakes the first of the queue, and a later request that doesn't wait
// is refused. So small requests don't starve a big one. The first also waits for the streams on which blocks
// were freed, and asks the upstream again every two milliseconds, because an upstream doesn't tell when it has memory
// again. Each time counts as a refusal there, and asks the hooks of a quota below (quota_hook.hpp). The pool's waiters
// have no place in the quota's own queue. No thread is made for any of this.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/pool_store.hpp>
#include <gpushare/memory/patience.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A thread that waits for memory of a pool.
template <timeline_point Point>
struct pool_waiter {
    explicit pool_waiter(detail::pool_store<Point>& of) noexcept : store(of) { store.join(place); }
    pool_waiter(const pool_waiter&) = delete;
    pool_waiter& operator=(const pool_waiter&) = delete;
    ~pool_waiter() { store.leave(place); }

    /// errc::none: it is this one's turn, and worth a try. deadline_exceeded; stopped.
    template <clock Clock>
    [[nodiscard]] errc wait(const patience<Clock>& until) noexcept {
        const std::stop_callback on_stop(until.stop, [&] {
            const auto lock = store.locked();
            place.woken.notify_one();
        });
        auto lock = store.locked();
        const auto look_again = std::min(until.deadline, saturating_add(until.time.now(), slice));
        for (;;) {
            if (until.stop.stop_requested()) return errc::stopped;
            const auto now = until.time.now();
            if (now >= until.deadline) return errc::deadline_exceeded;
            if (std::exchange(place.told, false)) return errc::none;
            const bool first = store.waiters_.first(place);
            if (first && now >= look_again) return errc::none;
            if (first && !store.pending_.empty()) {
                if (wait_for_stream(lock, look_again)) return errc::none;
                continue;
            }
            const auto most = saturating_add(now, std::chrono::minutes(1));
            place.woken.wait_for(lock, std::min(first ? look_again : until.deadline, most) - now);
        }
    }

private:
    static constexpr ns slice = std::chrono::milliseconds(2);

    // For the free that is oldest. False if it isn't reached by then.
    bool wait_for_stream(std::unique_lock<std::mutex>& lock, instant by) noexcept {
        bool reached = false;
        try {
            const Point next = store.pending_.first();
            lock.unlock();
            reached = next.wait(by);
        } catch (...) {  // it can't be waited for: it is looked at again, but not all the time
            if (lock) lock.unlock();
            std::this_thread::sleep_for(slice);
        }
        lock.lock();
        return reached;
    }

    detail::pool_store<Point>& store;
    detail::pool_wait_entry place;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
