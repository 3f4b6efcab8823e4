// SPDX-License-Identifier: Apache-2.0
// The threads that sleep inside a compute limiter, each until its submission is done. When the
// limiter itself has something to do, one of the threads wakes up by a timer. A part of
// compute_limiter.hpp.
//
//   detail::sleepers<work, interrupt> threads;
//   threads.sleep(lock, &work, now, deadline, resume_at);  // until woken, or one of the two times
//   threads.wake(work);      threads.wake_all();      threads.call_one(by);
//
// A thread that looks at points of the device without a time limit sleeps in that wait. An
// interrupt of the wait wakes it:
//
//   decltype(threads)::at_points me(threads, &work, true, deadline);
//   lock.unlock();    point::wait_any(points, deadline, me.interrupt());
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A time slice of the watching thread: how long it looks at the points that it knows, before it
/// looks for new points and for a stop request. The end of each slice costs a wake-up, and its
/// timer nearly as much. So the slice grows as long as no unknown work comes and ends during a
/// slice.
class watch_slice {
public:
    static constexpr ns shortest = std::chrono::microseconds(250), longest = 4 * shortest;
    /// How long a sleeping thread leaves the watch to an absent thread that lately came to wait for
    /// its client's work.
    static constexpr ns patience = 2 * shortest;

    [[nodiscard]] ns length() const noexcept { return length_; }
    /// Call after a look. `missed`: unknown work came and ended, and no other thread looked at it
    /// either. `came`: unknown work came, whether or not a thread looked at it.
    void learn(bool missed, bool came) noexcept {
        length_ = missed ? shortest : std::min(2 * length_, longest);
        quiet_ = came ? 0 : std::min(quiet_ + 1, looks);
    }
    /// Whether no work came during the latest looks. Then a look needs no time limit, provided that
    /// an arrival wakes the thread.
    [[nodiscard]] bool is_quiet() const noexcept { return quiet_ == looks; }

private:
    static constexpr int looks = 4;

    ns length_ = shortest;
    int quiet_ = 0;
};

/// For points whose waits can't be interrupted.
struct no_interrupt {
    void raise() noexcept {}
};
template <class Point>
struct interrupt_of {
    using type = no_interrupt;
};
template <interruptible_point Point>
struct interrupt_of<Point> {
    using type = typename Point::interrupt;
};

/// Every call is made under one mutex.
template <class Work, class Interrupt>
class sleepers {
    struct sleeper {
        sleeper* next = nullptr;
        const Work* waits_for = nullptr;
        std::thread::id thread = std::this_thread::get_id();
        instant until = never;
        Interrupt* points = nullptr;  // interrupts its wait, if it looks at points
        std::condition_variable woken{};

        void wake() noexcept {
            if (points != nullptr)
                points->raise();
            else
                woken.notify_one();
        }
    };

public:
    /// Registers the calling thread while it looks at points, until `until` at the latest.
    /// `watches`: it watches for all.
    class at_points {
    public:
        at_points(sleepers& all, const Work* waits_for, bool watches, instant until) noexcept : all_(&all) {
            self_.waits_for = waits_for;
            self_.until = until;
            self_.points = &interrupt_;
            all_->threads_.push(self_);
            if (watches) all_->watcher_ = &self_;
        }
        at_points(const at_points&) = delete;
        at_points& operator=(const at_points&) = delete;
        ~at_points() {
            all_->threads_.remove(self_);
            if (all_->watcher_ == &self_) all_->watcher_ = nullptr;
        }

        [[nodiscard]] Interrupt& interrupt() noexcept { return interrupt_; }

    private:
        sleepers* all_;
        Interrupt interrupt_{};
        sleeper self_{};
    };

    /// Returns once the thread is woken or at the deadline, and in one of the sleeping threads at
    /// `resume_at`. May return early.
    void sleep(std::unique_lock<std::mutex>& lock, const Work* waits_for, instant now, instant deadline,
               instant resume_at) {
        sleeper self;
        self.waits_for = waits_for;
        self.until = std::min(deadline, saturating_add(now, longest_sleep));
        // The place in the row doesn't tell whether this thread needs the timer: a thread that is
        // called and sleeps again is the last, and the threads before it may have no timer.
        if (!any_wakes_by(resume_at)) self.until = std::min(self.until, resume_at);
        threads_.push(self);
        self.woken.wait_for(lock, self.until - now);
        threads_.remove(self);
    }

    void wake(const Work& w) noexcept {
        for (auto* s = threads_.front(); s != nullptr; s = s->next)
            if (s->waits_for == &w) s->wake();
    }

    void wake_all() noexcept {
        for (auto* s = threads_.front(); s != nullptr; s = s->next) s->wake();
    }

    [[nodiscard]] bool empty() const noexcept { return threads_.empty(); }

    [[nodiscard]] bool contains(std::thread::id t) const noexcept {
        for (auto* s = threads_.front(); s != nullptr; s = s->next)
            if (s->thread == t) return true;
        return false;
    }

    /// Wakes the thread that has slept longest, unless a thread wakes up by itself at `by` or
    /// earlier.
    void call_one(instant by) noexcept {
        auto* const first = threads_.front();
        if (first != nullptr && !any_wakes_by(by)) first->wake();
    }

    /// When the watching thread looks up by itself; the least instant if it works in slices.
    [[nodiscard]] instant watcher_until() const noexcept {
        return watcher_ != nullptr ? watcher_->until : instant::min();
    }
    void call_watcher() noexcept { watcher_->wake(); }

private:
    [[nodiscard]] bool any_wakes_by(instant by) const noexcept {
        for (auto* s = threads_.front(); s != nullptr; s = s->next)
            if (s->until <= by) return true;
        return false;
    }

    fifo<sleeper> threads_;
    sleeper* watcher_ = nullptr;  // the watching thread, if it is registered
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
