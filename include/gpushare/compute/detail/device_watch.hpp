// SPDX-License-Identifier: Apache-2.0
// Chooses which of the threads that wait in a limiter watches the device. Used under the limiter's
// mutex, which a look at the device releases.
//
//   detail::device_watch<stream, clock> watch(batches, observer, sleepers);
//   if (!watch.is_watched() && watch.any_unwatched(attendants, false)) {
//       duty<submission> mine{.watches = true};
//       watch.look_at(lock, watch.begin(), own, mine, until);      // then drive
//       watch.hand_over(mine);
//   }
//
// Waits without time slices rest on an invariant. Whenever the mutex is released, each batch whose
// end is recorded and not yet observed is in one of these states:
//   a thread that waits for it looks at its end (is_looked_at),
//   or the thread that watches for all has its end among its points (watched),
//   or some thread wakes up by a timer and drives: in a slice, or asleep in its patience,
//   or some thread that was called, or that drives, brings about one of these next, or leaves.
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
    Submission* looks_at = nullptr;  // its own submission, if it looks at the end of that one
    bool watches = false;            // it looks at all ends at which no other thread looks
    bool came = false;               // new work came while it looked
};

/// When a thread looks up from the device.
struct look_end {
    instant at;
    // Another thread calls it earlier if new work comes; false: `at` is soon, and no call is
    // needed.
    bool by_call;
};

/// A thread that waits in a limiter, for work of its own or for something else.
template <class Submission>
struct waiter {
    Submission* own;  // its submission; null: it waits for something else
    instant deadline;
    duty<Submission> duties{};  // kept until it has driven
    // From then on it also watches the ends that other threads were expected to watch.
    instant patient_until = never;
    std::thread::id thread = std::this_thread::get_id();

    /// The thread goes to sleep. If there are ends that other threads are expected to watch, its
    /// patience with them begins.
    void grow_patient(instant now, bool any_ends_left) noexcept {
        if (!any_ends_left)
            patient_until = never;
        else if (now >= patient_until || patient_until == never)
            patient_until = now + watch_slice::patience;
    }
};

/// Lets one thread at a time watch the device for all: it looks, until its deadline or a call, at
/// every end at which no waiting thread looks.
template <timeline Stream, clock Clock>
class device_watch {
public:
    using point = typename Stream::point;
    using submission = detail::submission<Stream>;
    using sleeping_threads = sleepers<submission, typename interrupt_of<point>::type>;

    /// The arguments must outlive this object.
    device_watch(batches<Stream>& all, observer<Stream>& device, sleeping_threads& asleep) noexcept
        : batches_(all), observer_(device), sleepers_(asleep) {}

    [[nodiscard]] bool is_watched() const noexcept { return watched_; }
    [[nodiscard]] ns slice() const noexcept { return slice_.length(); }

    /// Whether there is a point that no thread watches. `attendant(client)` is the thread that
    /// lately waited for the client's work. If it isn't in the limiter now, and isn't `me`, it is
    /// expected to come and wait again, and this work counts only with `all`. `mine` doesn't count.
    template <std::invocable<client_id> F>
    [[nodiscard]] bool any_unwatched(F attendant, bool all, const submission* mine = nullptr,
                                     std::thread::id me = {}) noexcept {
        return observer_.any_unwatched(batches_, mine, [&](client_id c) {
            const std::thread::id whose = attendant(c);
            return !all && whose != std::thread::id{} && whose != me && !sleepers_.contains(whose);
        });
    }
    /// Whether a thread that looks at the device has to look up now and then by itself. If not,
    /// other threads call it, as they call a sleeping thread.
    [[nodiscard]] bool needs_slices() const noexcept { return !interruptible_point<point> || !slice_.is_quiet(); }

    /// Makes the calling thread the watching thread until hand_over(). Returns the points to look
    /// at.
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
            } catch (...) {  // the device can't be asked now: try again after a slice
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
    /// Whether a wait in virtual time ended without an event, and no event can follow.
    [[nodiscard]] static bool stands_still(bool reached, look_end until) noexcept {
        return stepped_clock<Clock> && !reached && until.at == never;
    }

    /// Calls the watching thread if there is an end that it doesn't know, or if the limiter has
    /// something to do (at `next_look`) before that thread looks up by itself.
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
