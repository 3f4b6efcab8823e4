// SPDX-License-Identifier: Apache-2.0
// The threads that sleep inside a compute limiter, each until its submission is done. If no thread watches the device,
// the one that has slept longest also wakes up when the limiter itself has something to do. A part of
// compute_limiter.hpp.
//
//   detail::sleepers<work> threads;
//   threads.sleep(lock, &work, now, deadline, resume_at);      // until woken, or one of the two times
//   threads.wake(work);      threads.wake_all();      threads.call_one(by);
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// How long the watching thread looks at the points it knew when it started, before it looks for new ones and for a stop
/// request. Its end costs a wake-up each time, and its timer much of one each time: so it grows while no work that it
/// didn't know came and ended meanwhile.
class watch_slice {
public:
    static constexpr ns shortest = std::chrono::microseconds(250), longest = 4 * shortest;
    /// How long who sleeps leaves the watch to a thread that isn't there yet, but came to wait for its client's work lately.
    static constexpr ns patience = 2 * shortest;

    [[nodiscard]] ns length() const noexcept { return length_; }
    /// A look is over. `missed`: some such work, that nobody else looked at either.
    void learn(bool missed) noexcept { length_ = missed ? shortest : std::min(2 * length_, longest); }

private:
    ns length_ = shortest;
};

/// Every call under one mutex.
template <class Work>
class sleepers {
public:
    /// Returns once it is woken, at the deadline, or, in the one that has slept longest, at `resume_at`; at times before.
    void sleep(std::unique_lock<std::mutex>& lock, const Work* waits_for, instant now, instant deadline,
               instant resume_at) {
        sleeper self{.waits_for = waits_for};
        threads_.push(self);
        self.until = std::min(deadline, saturating_add(now, std::chrono::minutes(1)));
        if (threads_.front() == &self) self.until = std::min(self.until, resume_at);
        self.woken.wait_for(lock, self.until - now);
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

    [[nodiscard]] bool contains(std::thread::id t) const noexcept {
        for (auto* s = threads_.front(); s != nullptr; s = s->next)
            if (s->thread == t) return true;
        return false;
    }

    /// Wakes the one that has slept longest, unless it wakes up by then by itself.
    void call_one(instant by) noexcept {
        auto* const first = threads_.front();
        if (first != nullptr && by < first->until) first->woken.notify_one();
    }

private:
    struct sleeper {
        sleeper* next = nullptr;
        const Work* waits_for = nullptr;
        std::thread::id thread = std::this_thread::get_id();
        instant until{};
        std::condition_variable woken{};
    };

    fifo<sleeper> threads_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
