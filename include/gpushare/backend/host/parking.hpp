// SPDX-License-Identifier: Apache-2.0
// Where the workers of a node sleep, arranged for few wake-ups: one of them, the lookout, sleeps until the next
// event of the model; the others until they are called, one at a time, the last to lie down first.
//
//   parking.call(work_is_waiting, next_event);     // whoever made work
//   parking.park(lock, self, next_event);          // a worker that found none
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI::host::detail {

/// Every member is called with the node's lock held.
class parking {
public:
    class worker {
    public:
        worker() = default;

    private:
        friend parking;
        std::condition_variable wake_;
        bool called_ = false;
    };

    explicit parking(std::size_t workers) { idle_.reserve(workers); }

    /// Makes sure that somebody looks at work that waits, and is there at `next_event` (`never`: there is none).
    /// Wakes at most one worker, and none while one is on its way: it looks at everything, and calls for more hands
    /// if there is more than it can do.
    void call(bool work_waits, instant next_event) noexcept {
        if (on_their_way_ != 0) return;
        if (next_event < lookout_until_ && lookout_ != nullptr)
            wake(*lookout_);  // it would sleep too long
        else if (work_waits || next_event < lookout_until_)
            wake_one();
    }

    /// Sleeps until called, or until `next_event` if nobody else looks out for it. May return early.
    void park(std::unique_lock<std::mutex>& lock, worker& self, instant next_event) {
        const auto called = [&] { return self.called_; };
        if (next_event != never && lookout_ == nullptr) {
            lookout_ = &self;
            lookout_until_ = next_event;
            self.wake_.wait_until(lock, to_steady(next_event), called);
            if (lookout_ == &self) dismiss_lookout();
        } else {
            if (next_event < lookout_until_ && lookout_ != nullptr) wake(*lookout_);
            idle_.push_back(&self);
            self.wake_.wait(lock, called);
        }
        if (std::exchange(self.called_, false)) --on_their_way_;
    }

    void call_all() noexcept {
        if (lookout_ != nullptr) wake(*lookout_);
        while (!idle_.empty()) wake_one();
    }

private:
    void wake_one() noexcept {
        if (!idle_.empty()) {
            worker& w = *idle_.back();
            idle_.pop_back();
            wake(w);
        } else if (lookout_ != nullptr) {
            wake(*lookout_);
        }
        // else: all are awake, and look for work before they sleep
    }

    void wake(worker& w) noexcept {
        if (lookout_ == &w) dismiss_lookout();
        w.called_ = true;
        ++on_their_way_;
        w.wake_.notify_one();
    }

    void dismiss_lookout() noexcept {
        lookout_ = nullptr;
        lookout_until_ = never;
    }

    std::vector<worker*> idle_;
    worker* lookout_ = nullptr;
    instant lookout_until_ = never;
    std::size_t on_their_way_ = 0;  // called, but not running yet
};

}  // namespace gpushare::inline GPUSHARE_ABI::host::detail
