// SPDX-License-Identifier: Apache-2.0
// The threads that wait inside a compute limiter: each for one submission, and one of them, if nobody is at it yet, for
// what the limiter itself has to look after. A part of compute_limiter.hpp.
//
//   detail::sleepers<work> threads;
//   threads.sleep(mutex, &work, now, deadline, resume_at);      // until woken, or one of the two times
//   threads.wake(work);      threads.wake_all();      threads.call_one(device_is_busy, resume_at);
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>

#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

/// How long the watching thread looks at the points it knew when it started, before it looks for new ones and for a stop
/// request. Costs a wake-up each, while there is work in flight.
inline constexpr ns watch_slice = std::chrono::microseconds(250);

/// Every call under one mutex, a door.
template <class Work>
class sleepers {
public:
    /// Returns once it is woken, at the deadline, or, in the one that has slept longest, at `resume_at`; at times before.
    template <class Mutex>
    void sleep(Mutex& mutex, const Work* waits_for, instant now, instant deadline, instant resume_at) {
        sleeper self{.waits_for = waits_for};
        threads_.push(self);
        self.until = std::min(deadline, saturating_add(now, std::chrono::minutes(1)));
        if (threads_.front() == &self) self.until = std::min(self.until, resume_at);
        mutex.wait_for(self.woken, self.until - now);
        threads_.remove(self);
    }

    void wake(const Work& w) noexcept {
        for (auto* s = threads_.front(); s != nullptr; s = s->next)
            if (s->waits_for == &w) s->woken.notify_one();
    }

    void wake_all() noexcept {
        for (auto* s = threads_.front(); s != nullptr; s = s->next) s->woken.notify_one();
    }

    [[nodiscard]] bool empty() const noexcept { return threads_.empty(); }

    /// Wakes one if there is something to watch, or if there will be before any of them wakes up by itself.
    void call_one(bool now, instant resume_at) noexcept {
        auto* const first = threads_.front();
        if (first != nullptr && (now || resume_at < first->until)) first->woken.notify_one();
    }

private:
    struct sleeper {
        sleeper* next = nullptr;
        const Work* waits_for = nullptr;
        instant until{};
        std::condition_variable woken{};
    };

    fifo<sleeper> threads_;
};

}  // namespace gpushare::inline GPUSHARE_ABI::detail
