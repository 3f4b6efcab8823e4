// SPDX-License-Identifier: Apache-2.0
// Decides what a thread that waits in a limiter does next: drive, watch the device for all, look at
// the end of its own work, or sleep. Used under the limiter's mutex, which a look at the device
// releases.
//
//   detail::device_watch<stream, clock, policy> watch(time, core, clients, batches, observer, asleep);
//   waiter<submission> me{.own = &s, .deadline = deadline};
//   const auto step = watch.next_step(me, now, false);
//   if (step.what == decltype(step)::kind::watch)
//       watch.look_at(lock, step.points, me.own, me.duties, step.until);  // then drive
//   watch.hand_over(me.duties);
//
// Waits without time slices rest on an invariant. Whenever the mutex is released, each batch whose
// end is recorded and not yet observed is in one of these states:
//   a thread that waits for it looks at its end (is_looked_at),
//   or the thread that watches for all has its end among its points (watched),
//   or some thread wakes up by a timer and drives: in a slice, or asleep in its patience,
//   or some thread that was called, or that drives, brings about one of these next, or leaves.
// Code that could break this invariant calls keep(): after recording a batch (drive,
// enqueued_by_holder), in a thread that leaves for whatever reason (wait), and in one that is about
// to run a long callable (enqueue) or callback (call_back). If there are points that the watcher
// doesn't watch, keep() calls the watcher. If there is no watcher, and no thread sleeps with a
// timer, keep() calls a sleeping thread. A holder that enqueues under no lock reports it, because
// await_enqueued() comes before the queries on which such a wait rests. wake_all() reports
// everything else that threads wait for (room, a client that closes or sleeps, a stop).
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include <gpushare/compute/detail/admissions.hpp>
#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/need.hpp>
#include <gpushare/compute/detail/observer.hpp>
#include <gpushare/compute/detail/sleepers.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// When a thread looks up from the device.
struct look_end {
    instant at;
    // Another thread calls it earlier if new work comes; false: `at` is soon, and no call is
    // needed.
    bool by_call;
};

/// The next step of a waiting thread.
template <timeline_point Point>
struct wait_step {
    enum class kind : std::uint8_t {
        drive,       // work was left, or the time to drive has come
        watch,       // watches `points` for all, until `until`
        look,        // looks at `end` of its own work, until `until`
        ask_again,   // work was just enqueued: decide again
        sleep,       // sleeps until a call, `again`, `resume`, or the end of its patience
        stand_still  // no event will come: only the program steps its clock
    };
    kind what = kind::drive;
    instant resume = never;           // when the limiter has something to do by itself
    instant again = never;            // when to try again to record the end of an open batch
    std::optional<Point> end{};       // the end of its own work, if recorded
    std::span<const Point> points{};  // the points to watch
    look_end until{.at = never, .by_call = true};
};

/// Lets one thread at a time watch the device for all: it looks, until its deadline or a call, at
/// every end at which no waiting thread looks.
template <timeline Stream, clock Clock, compute_policy Policy>
class device_watch {
public:
    using point = typename Stream::point;
    using submission = detail::submission<Stream>;
    using step_type = wait_step<point>;
    using sleeping_threads = sleepers<submission, typename interrupt_of<point>::type>;

    /// The arguments must outlive this object.
    device_watch(const Clock& time, const limiter_core<Policy>& core, admissions<Stream, Policy>& clients,
                 batches<Stream>& all, observer<Stream>& device, sleeping_threads& asleep) noexcept
        : clock_(time), core_(core), clients_(clients), batches_(all), observer_(device), sleepers_(asleep) {}

    /// When to drive even if nothing happens: work that is held back may go then, or a submission
    /// is late then.
    [[nodiscard]] instant next_look() const noexcept { return std::min(core_.resume_at(), clients_.next_late()); }

    /// Decides the next step of a waiting thread. If that is to watch or to look, `me` has its
    /// duties from then on. `rest_left`: a thread left a submission or a callback to others.
    [[nodiscard]] step_type next_step(waiter<submission>& me, instant now, bool rest_left) noexcept;

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
    /// The thread stops looking at the device. A thread that continues without the mutex reports
    /// this with keep().
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

    /// A thread that may stay in user code for long hands its duties over.
    void give_up(need<submission>& stay) noexcept {
        if (stay.duties == nullptr) return;
        if (const auto* const own = stay.duties->looks_at) own->queue->attendant = {};
        hand_over(*stay.duties);
    }
    /// Makes sure that a thread watches. A thread that leaves, or brings work, calls a sleeping
    /// thread, unless one of these wakes up in time by itself.
    void keep(bool rest_left) noexcept;

private:
    // Whether there is a point that no thread watches. A client's attendant is the thread that
    // lately waited for the client's work. If the attendant isn't in the limiter now, and isn't
    // `me`, it is expected to come and wait again, and this work counts only with `all`. `mine`
    // doesn't count.
    [[nodiscard]] bool any_unwatched(bool all, const submission* mine = nullptr, std::thread::id me = {}) noexcept {
        return observer_.any_unwatched(batches_, mine, [&](client_id c) {
            const std::thread::id whose = clients_.queue(c).attendant;
            return !all && whose != std::thread::id{} && whose != me && !sleepers_.contains(whose);
        });
    }
    [[nodiscard]] bool is_to_watch(const waiter<submission>& me, instant now) noexcept {
        return !watched_ && any_unwatched(now >= me.patient_until, me.own, me.thread);
    }
    // Makes the calling thread the watching thread until hand_over(). Returns the points to look
    // at.
    [[nodiscard]] std::span<const point> begin() noexcept {
        watched_ = true;
        return observer_.begin_watch(batches_);
    }
    // When the thread looks up. `soon`: at the end of a slice at the latest.
    [[nodiscard]] look_end look_until(const waiter<submission>& me, const step_type& step, instant now,
                                      bool soon) const noexcept {
        const auto at_end = std::min(me.deadline, step.resume);
        if (stepped_clock<Clock> || !soon) return {at_end, true};
        return {std::min(at_end, now + slice_.length()), false};
    }
    // Whether a thread that looks at the device has to look up now and then by itself. If not,
    // other threads call it, as they call a sleeping thread.
    [[nodiscard]] bool needs_slices() const noexcept {
        return !interruptible_point<point> || !slice_.is_quiet() || core_.options().stuck_after > ns{0};
    }
    // Calls the watching thread if there is an end that it doesn't know, or if the limiter has
    // something to do before that thread looks up by itself.
    void call_watcher() noexcept {
        const auto looks_up = sleepers_.watcher_until();
        if (looks_up == instant::min()) return;
        if (observer_.any_unknown(batches_) || next_look() < looks_up) sleepers_.call_watcher();
    }

    const Clock& clock_;
    const limiter_core<Policy>& core_;
    admissions<Stream, Policy>& clients_;
    batches<Stream>& batches_;
    observer<Stream>& observer_;
    sleeping_threads& sleepers_;
    watch_slice slice_;
    bool watched_ = false;  // a thread looks at the device for all
};

// Defined out of the class and without `inline`, so that an `extern template` keeps other
// translation units from instantiating them.

template <timeline Stream, clock Clock, compute_policy Policy>
auto device_watch<Stream, Clock, Policy>::next_step(waiter<submission>& me, instant now, bool rest_left) noexcept
    -> step_type {
    using kind = typename step_type::kind;
    step_type step{.resume = next_look()};
    if (rest_left || now >= step.resume) return step;
    if (batches_.any_open()) step.again = now + slice_.length();
    const bool sliced = step.again != never || needs_slices();
    // The questions below see work enqueued before this call.
    if (!sliced) batches_.await_enqueued();
    step.end = observer_.end_of(batches_, me.own);
    if (is_to_watch(me, now)) {
        // The points include the end of its own work.
        step.what = kind::watch;
        step.points = begin();
        me.duties = {.looks_at = step.end ? me.own : nullptr, .watches = true};
        // If memory didn't suffice for all points, look up soon.
        step.until = look_until(me, step, now, sliced || observer_.any_unknown(batches_));
        return step;
    }
    if (step.end) {
        step.what = kind::look;
        me.duties = {.looks_at = me.own};
        // If threads that are expected to wait for other work don't come, this thread notices the
        // ends.
        const bool for_others = !watched_ && any_unwatched(true, me.own, me.thread);
        step.until = look_until(me, step, now, sliced || for_others);
        return step;
    }
    step.what = kind::stand_still;
    if constexpr (stepped_clock<Clock>) return step;  // no time passes while the thread sleeps
    batches_.await_enqueued();
    step.what = is_to_watch(me, now) ? kind::ask_again : kind::sleep;
    if (step.what == kind::sleep) me.grow_patient(now, !watched_ && batches_.any_ended());
    return step;
}

template <timeline Stream, clock Clock, compute_policy Policy>
void device_watch<Stream, Clock, Policy>::keep(bool rest_left) noexcept {
    if (sleepers_.empty()) return;
    if (rest_left) return sleepers_.call_one(instant::min());
    if (watched_) return call_watcher();
    if (any_unwatched(false)) return sleepers_.call_one(instant::min());
    const auto resume = next_look();
    const auto by = core_.is_held_until(resume) ? saturating_add(resume, watch_slice::patience) : resume;
    sleepers_.call_one(any_unwatched(true) ? std::min(by, clock_.now() + watch_slice::patience) : by);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
