// SPDX-License-Identifier: Apache-2.0
// Lets a node's worker threads sleep, with few wake-ups. One worker, the lookout, sleeps until the
// next event of the model. The others sleep until they are called, one at a time, the latest
// sleeper first.
//
//   // by a thread that made work; woken: a wake_list
//   parking.call(work_is_waiting, next_event, woken);
//   parking.park(lock, self, next_event, woken);          // by a worker that found none
#pragma once

#include <mutex>

#include <gpushare/backend/host/detail/wakeup.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {
namespace detail {

/// Call every member with the node's lock held.
class parking {
public:
    class worker {
    public:
        worker() = default;

    private:
        friend parking;
        wakeup called_;
    };

    explicit parking(std::size_t workers) { idle_.reserve(workers); }

    /// Makes sure that a worker handles waiting work, and that a worker is awake at `next_event`
    /// (`never`: there is none). Wakes at most one worker, and none while a called worker isn't
    /// running yet: that worker looks at all work, and calls others if there is more than it can
    /// do.
    void call(bool work_waits, instant next_event, wake_list& woken) noexcept;

    /// Sleeps until called, or until `next_event` if there is no other lookout. May return early.
    void park(std::unique_lock<std::mutex>& lock, worker& self, instant next_event, wake_list& woken);

    void call_all(wake_list& woken) noexcept;

private:
    void wake_one(wake_list& woken) noexcept;

    void wake(worker& w, wake_list& woken) noexcept;

    void dismiss_lookout() noexcept;

    gpushare::detail::plain_list<worker*> idle_;
    worker* lookout_ = nullptr;
    instant lookout_until_ = never;
    std::size_t on_their_way_ = 0;  // workers that were called and aren't running yet
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE void parking::call(bool work_waits, instant next_event, wake_list& woken) noexcept {
    if (on_their_way_ != 0) return;
    if (next_event < lookout_until_ && lookout_ != nullptr)
        wake(*lookout_, woken);  // the lookout would sleep too long
    else if (work_waits || next_event < lookout_until_)
        wake_one(woken);
}

GPUSHARE_INLINE void parking::park(std::unique_lock<std::mutex>& lock, worker& self, instant next_event,
                                   wake_list& woken) {
    const bool looks_out = next_event != never && lookout_ == nullptr;
    if (looks_out) {
        lookout_ = &self;
        lookout_until_ = next_event;
    } else {
        if (next_event < lookout_until_ && lookout_ != nullptr) wake(*lookout_, woken);
        idle_.push_back(&self);
    }
    lock.unlock();
    woken.wake_all();
    self.called_.wait(looks_out ? next_event : never);
    lock.lock();
    if (lookout_ == &self) dismiss_lookout();
    if (!self.called_.raised()) return;
    self.called_.lower();
    --on_their_way_;
}

GPUSHARE_INLINE void parking::call_all(wake_list& woken) noexcept {
    if (lookout_ != nullptr) wake(*lookout_, woken);
    while (!idle_.empty()) wake_one(woken);
}

GPUSHARE_INLINE void parking::wake_one(wake_list& woken) noexcept {
    if (!idle_.empty()) {
        worker& w = *idle_.back();
        idle_.pop_back();
        wake(w, woken);
    } else if (lookout_ != nullptr) {
        wake(*lookout_, woken);
    }
    // otherwise all workers are awake, and look for work before they sleep
}

GPUSHARE_INLINE void parking::wake(worker& w, wake_list& woken) noexcept {
    if (lookout_ == &w) dismiss_lookout();
    ++on_their_way_;
    woken.add(w.called_);
}

GPUSHARE_INLINE void parking::dismiss_lookout() noexcept {
    lookout_ = nullptr;
    lookout_until_ = never;
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
