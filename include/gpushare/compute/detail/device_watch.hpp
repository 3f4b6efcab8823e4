// SPDX-License-Identifier: Apache-2.0
// Which of the threads that wait in a limiter watches the device. Used under the limiter's mutex;
// a look at the device releases that.
//
//   detail::device_watch<stream, clock> watch(batches, observer, sleepers);
//   if (!watch.is_watched() && watch.any_unwatched(attendants, false)) {
//       duty<submission> mine{.watches = true};
//       watch.look_at(lock, watch.begin(), own, mine, until);      // then drive
//       watch.hand_over(mine);
//   }
//
// Waits but for slices rest on this, whenever the mutex is released: each batch whose end is
// recorded and hasn't been seen is
//   among the points of a thread that waits for it (is_looked_at),
//   or among those of the thread that watches for all (watched),
//   or some thread looks up by a timer and drives: in a slice, or asleep in its patience,
//   or some thread was called, or drives, and does one of these, or leaves, next.
// Code that could break this invariant calls limiter_engine::keep_watch(): after recording a batch
// (drive, enqueued_by_holder), in a thread that leaves for whatever reason (wait), and in one that
// is about to run a long callable (enqueue). keep_watch() calls the watcher for points that it
// doesn't watch or, if there is no watcher, a sleeping thread, unless one has a timer. A holder
// that enqueues under no lock reports it, because await_enqueued() comes before the queries on
// which such a wait rests. wake_all() reports everything else that threads wait for (room, a client
// that closes or sleeps, a stop).
#pragma once

#include <algorithm>
#include <concepts>
#include <mutex>
#include <span>
#include <thread>

#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/observer.hpp>
#include <gpushare/compute/detail/sleepers.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A waiting thread's duty to the others: it looks at the device. Before it runs possibly long user
/// code, it gives this duty up, so that another thread takes it.
template <class Submission>
struct duty {
    Submission* looks_at = nullptr;  // its own, which it alone looks at
    bool watches = false;            // for all: what nobody else looks at
    bool came = false;               // something came during its look
};

/// When a thread looks up from the device.
struct look_end {
    instant at;
    bool by_call;  // or before, when something comes; else it looks up soon
};

/// A thread that waits in a limiter, for work of its own or for something else.
template <class Submission>
struct waiter {
    Submission* own;  // null: for something else
    instant deadline;
    duty<Submission> duties{};      // until it has driven
    instant patient_until = never;  // then it watches what others were expected to
    std::thread::id thread = std::this_thread::get_id();

    /// It goes to sleep, beside ends that others are expected to watch, if there are any such.
    void grow_patient(instant now, bool any_ends_left) noexcept {
        if (!any_ends_left)
            patient_until = never;
        else if (now >= patient_until || patient_until == never)
            patient_until = now + watch_slice::patience;
    }
};

/// Until its deadline or a call, one thread looks at all ends that no thread looks at which waits for them.
template <timeline Stream, clock Clock>
class device_watch {
public:
    using point = typename Stream::point;
    using submission = detail::submission<Stream>;
    using sleeping_threads = sleepers<submission, typename interrupt_of<point>::type>;

    /// All outlive this.
    device_watch(batches<Stream>& all, observer<Stream>& device, sleeping_threads& asleep) noexcept
        : batches_(all), observer_(device), sleepers_(asleep) {}

    [[nodiscard]] bool is_watched() const noexcept { return watched_; }
    [[nodiscard]] ns slice() const noexcept { return slice_.length(); }

    /// Whether there is a point that no thread watches. If the latest wait for a client's work was
    /// by a thread that isn't in here now (`attendant(client)`), the limiter expects that thread to
    /// come and wait again, unless it is `me`. `all`: counts that client's work, too. `mine`
    /// doesn't count.
    template <std::invocable<client_id> F>
    [[nodiscard]] bool any_unwatched(F attendant, bool all, const submission* mine = nullptr,
                                     std::thread::id me = {}) noexcept {
        return observer_.any_unwatched(batches_, mine, [&](client_id c) {
            const std::thread::id whose = attendant(c);
            return !all && whose != std::thread::id{} && whose != me && !sleepers_.contains(whose);
        });
    }
    /// Whether a thread that looks at the device has to look up now and then by itself. Otherwise
    /// other threads call it as they call a sleeping one.
    [[nodiscard]] bool needs_slices() const noexcept { return !interruptible_point<point> || !slice_.is_quiet(); }

    /// The calling thread watches for all from now on, until hand_over(): the points to look at.
    [[nodiscard]] std::span<const point> begin() noexcept {
        watched_ = true;
        return observer_.begin_watch(batches_);
    }
    /// Looks until one of the points is reached, until `until`, or until a thread calls this one,
    /// which waits for `own`. Returns whether a point was reached; observe() then sees it. The
    /// thread has its duties until hand_over(): no other thread is called for the ends that it sees
    /// next.
    [[nodiscard]] bool look_at(std::unique_lock<std::mutex>& lock, std::span<const point> points, const submission* own,
                               duty<submission>& mine, look_end until) noexcept {
        if (mine.looks_at != nullptr) {
            ++mine.looks_at->looked_at;
            mine.looks_at->looker = std::this_thread::get_id();
        }
        const auto newest = batches_.latest_order();
        bool reached = false;
        const auto look = [&](auto wait) {
            lock.unlock();
            try {
                reached = wait();
            } catch (...) {  // a device that can't be asked: again in a slice, its points may be reached then
                std::this_thread::sleep_for(watch_slice::shortest);
            }
            lock.lock();
        };
        if constexpr (interruptible_point<point>) {
            if (until.by_call) {
                typename sleeping_threads::at_points me(sleepers_, own, mine.watches, until.at);
                look([&] { return point::wait_any(points, until.at, me.interrupt()); });
            } else {
                look([&] { return point::wait_any(points, until.at); });
            }
        } else if constexpr (looking_point<point>) {
            instant pending_at{};
            look([&] { return point::wait_any(points, until.at, pending_at); });
            observer_.none_reached_at(batches_, mine.watches, mine.watches ? nullptr : mine.looks_at, pending_at);
        } else {
            look([&] { return point::wait_any(points, until.at); });
        }
        batches_.collect();
        mine.came = batches_.latest_order() != newest;
        return reached;
    }
    /// The thread stops looking at the device. A thread that goes on without the mutex reports this
    /// with keep_watch().
    void hand_over(duty<submission>& d) noexcept {
        if (d.looks_at == nullptr && !d.watches) return;
        if (d.looks_at != nullptr) --d.looks_at->looked_at;
        slice_.learn(d.watches && observer_.end_watch(), d.came);
        if (d.watches) watched_ = false;
        d = {};
    }
    /// A wait in virtual time that came to nothing: there is nothing left to happen.
    [[nodiscard]] static bool stands_still(bool reached, look_end until) noexcept {
        return stepped_clock<Clock> && !reached && until.at == never;
    }

    /// Calls the thread that watches for all, if there is an end that it doesn't know, or if the
    /// limiter has something to do (`next_look`) before that thread looks up by itself.
    void call_watcher(instant next_look) noexcept {
        const auto looks_up = sleepers_.watcher_until();
        if (looks_up == instant::min()) return;
        if (observer_.any_unknown(batches_) || next_look < looks_up) sleepers_.call_watcher();
    }

private:
    batches<Stream>& batches_;
    observer<Stream>& observer_;
    sleeping_threads& sleepers_;
    watch_slice slice_;
    bool watched_ = false;  // a thread looks at the device for all
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
