// SPDX-License-Identifier: Apache-2.0
// Ends submissions, and tells their tickets and permits, their callbacks, and the threads that
// sleep until an end. Used under the limiter's mutex. Functions that take a `lock` release it while
// they run the user's code.
//
//   finish, finish_permit   the work has ended, as settlement.hpp found
//   end_admitted            an admitted submission whose callable enqueued nothing
//   cancel                  the same, if no thread is to learn of it
//   dismiss                 a waiting submission that is late, or that its holder cancels
//   cancel_waiting          all waiting submissions of a client that closes or is refused
//   leave_queue             a waiting submission at the gate whose thread stops waiting
//
//   detail::endings<stream, clock, policy> ends(time, core, clients, batches, log, told, asleep, watch);
//   ends.finish(submission, errc::none, device_time);
//   if (!told.empty()) ends.call_back(lock, stay, rest_left);
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include <gpushare/compute/detail/admissions.hpp>
#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/callback_queue.hpp>
#include <gpushare/compute/detail/device_watch.hpp>
#include <gpushare/compute/detail/need.hpp>
#include <gpushare/compute/detail/observer.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/detail/submission_log.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <timeline Stream, clock Clock, compute_policy Policy>
class endings {
public:
    using submission = detail::submission<Stream>;
    using need = detail::need<submission>;
    using watch_type = device_watch<Stream, Clock, Policy>;
    using lock_type = std::unique_lock<std::mutex>;

    /// The arguments must outlive this object.
    endings(const Clock& time, limiter_core<Policy>& core, admissions<Stream, Policy>& clients, batches<Stream>& all,
            const submission_log<Stream>& log, callback_queue<Stream>& told,
            typename watch_type::sleeping_threads& asleep, watch_type& watch) noexcept
        : clock_(time),
          core_(core),
          clients_(clients),
          batches_(all),
          log_(log),
          told_(told),
          sleepers_(asleep),
          watch_(watch) {}

    [[nodiscard]] const std::shared_ptr<submission_pool<Stream>>& pool() const noexcept { return pool_; }

    // ---- the work has ended

    /// Ends a queued submission. Its record may be gone afterwards.
    void finish(submission& s, errc status, ns device_time = {}) noexcept {
        say_done(s, status, device_time);
        if (!s.error && !s.on_done) return pool_->drop(s);
        tell(s);
    }
    /// Ends a permit's work, which is reported only while the permit has a holder.
    void finish_permit(submission& s, errc status, ns device_time) noexcept {
        if (s.error || s.has_holder()) say_done(s, status, device_time);
        if (s.error) tell(s);
    }
    /// Wakes threads that wait for the client's end: its work has ended, or a callback has
    /// returned.
    void tell_of_end(const client_queue<Stream>& client) noexcept {
        if (client.waits_for_end > 0) sleepers_.wake_all();
    }

    // ---- nothing was enqueued

    /// Ends an admitted submission.
    void end_admitted(submission& s, errc why) noexcept {
        core_.count_cancelled(s.client, why);
        cancel(s);
        finish(s, why);
    }
    /// The same, and no thread learns of it: for a permit that its holder didn't use.
    void cancel(submission& s) noexcept {
        core_.cancel(s.admitted);
        tell_of_end(clients_.queue(s.admitted.client));
        batches_.release(s);
    }
    /// Takes a waiting submission out of the queue, and wakes threads that wait for room.
    void leave_queue(submission& s) noexcept {
        clients_.withdraw(s, clients_.policy_time(clock_, log_.on()));
        if (s.queue->waits_for_room > 0) sleepers_.wake_all();
    }
    /// Ends a waiting submission.
    void dismiss(lock_type& lock, submission& s, errc why) noexcept {
        core_.count_cancelled(s.client, why);
        leave_queue(s);
        if (!s.queued) return turn_away(s, why);
        begin_unrun_end(s);
        end_unrun(lock, s, why);
    }
    /// Ends all waiting submissions of a client.
    void cancel_waiting(lock_type& lock, client_queue<Stream>& client, errc why) noexcept {
        if (client.waits_for_room > 0) sleepers_.wake_all();
        fifo<submission> cancelled;
        while (submission* const s = clients_.withdraw_first(client)) {
            core_.count_cancelled(s->client, why);
            if (s->queued) {
                begin_unrun_end(*s);
                cancelled.push(*s);
            } else {
                turn_away(*s, why);
            }
        }
        while (submission* const s = cancelled.pop()) end_unrun(lock, *s, why);
    }
    /// Drops a late submission.
    void drop(lock_type& lock, submission& s) noexcept {
        ++s.queue->dropped;
        dismiss(lock, s, errc::deadline_exceeded);
    }
    /// Cancels the refused submissions, and drops all late ones, so that waiting threads learn at
    /// the deadline that they are late, not at their turn.
    void cancel_due(lock_type& lock) noexcept {
        cancel_refused(lock);
        while (clients_.next_late() != never) {
            submission* const s = clients_.late_at(clock_.now());
            if (s == nullptr) return;
            drop(lock, *s);
        }
    }

    // ---- faults

    /// Whether submissions of a client whose work isn't admitted any more may wait.
    [[nodiscard]] bool any_refused() const noexcept { return any_refused_; }
    /// Cancels these submissions.
    void cancel_refused(lock_type& lock) noexcept {
        if (any_refused_) cancel_all_refused(lock);
    }
    /// Work of `c` has failed.
    void note_failure(client_id c, errc code) noexcept;
    /// Reports work that has been first on its stream for longer than the options allow. The charge
    /// follows at its end.
    void give_up_stuck(observer<Stream>& device) noexcept;

    // ---- callbacks

    /// Runs callbacks, in one thread at a time, so that a callback whose submission completes
    /// immediately isn't called from within itself. A thread that has stayed for long leaves the
    /// rest to a sleeping thread or, after one callback, to the next thread that comes. Without
    /// that one callback, no callback might ever run if each thread that comes has a long callable
    /// to run. `rest_left` is set if callbacks are left. Other threads may change it meanwhile.
    void call_back(lock_type& lock, need& stay, bool& rest_left) noexcept;

private:
    void cancel_all_refused(lock_type& lock) noexcept;
    void say_done(submission& s, errc status, ns device_time) noexcept {
        s.status = status;
        if (status != errc::none) s.failed_of = core_.settings(s.client).name;
        s.device_time = device_time;
        s.finished_at = clock_.now();
        s.at.store(submission_stage::done, std::memory_order_release);
        sleepers_.wake(s);
    }
    // The callback or its destructor is user code: called under no lock.
    void tell(submission& s) noexcept {
        s.level = s.queue->own_level;
        if (s.queued) s.level = std::max(s.level, s.facts.head.level);
        ++s.queue->untold;
        told_.add(s);
    }
    // Calls one callback, and gives its submission back.
    void call_one(lock_type& lock, submission& s) noexcept {
        const bool calls = s.on_done && !s.deaf;
        lock.unlock();
        if (calls) s.on_done({s.status, s.device_time, s.finished_at, s.error, s.failed_of});
        s.on_done.reset();
        const bool of_gate = !s.queued && s.lose_owner();
        if (of_gate) s.error = nullptr;
        if (s.queued) pool_->drop(s);
        lock.lock();
        if (of_gate) batches_.give_back(s);
    }

    // The submission waits no more. A close waits until it has ended.
    static void begin_unrun_end(submission& s) noexcept {
        s.at.store(submission_stage::admitted, std::memory_order_relaxed);
        ++s.queue->untold;
    }
    void end_unrun(lock_type& lock, submission& s, errc why) noexcept {
        lock.unlock();  // the destructor of the callable is user code
        s.work.reset();
        lock.lock();
        auto& client = *s.queue;  // read before finish(), which may give the record back
        finish(s, why);
        --client.untold;
        tell_of_end(client);
    }
    // The same at the gate, where the thread gives the record back.
    void turn_away(submission& s, errc why) noexcept {
        s.status = why;
        s.at.store(submission_stage::done, std::memory_order_release);
        sleepers_.wake(s);
    }

    const Clock& clock_;
    limiter_core<Policy>& core_;
    admissions<Stream, Policy>& clients_;
    batches<Stream>& batches_;
    const submission_log<Stream>& log_;
    callback_queue<Stream>& told_;
    typename watch_type::sleeping_threads& sleepers_;
    watch_type& watch_;
    bool any_refused_ = false;
    std::shared_ptr<submission_pool<Stream>> pool_ = std::make_shared<submission_pool<Stream>>();
};

// Defined out of the class and without `inline`, so that an `extern template` keeps other
// translation units from instantiating them.

template <timeline Stream, clock Clock, compute_policy Policy>
void endings<Stream, Clock, Policy>::cancel_all_refused(lock_type& lock) noexcept {
    any_refused_ = false;
    auto& queues = clients_.queues();
    for (std::size_t i = 0; i < queues.size(); ++i)  // others may add queues during each call
        if (const submission* const first = clients_.any_waiting(queues[i]))
            if (const auto why = clients_.refusal(first->client); why != errc::none)
                cancel_waiting(lock, queues[i], why);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void endings<Stream, Clock, Policy>::note_failure(client_id c, errc code) noexcept {
    any_refused_ |= core_.quarantined(c);
    if (code != errc::device_lost) return;
    any_refused_ = true;
    clients_.lose_device();
    clients_.tell_of_loss(c);
    for (const auto& b : batches_.all())
        if (b.num_members > 0) clients_.tell_of_loss(b.client);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void endings<Stream, Clock, Policy>::give_up_stuck(observer<Stream>& device) noexcept {
    if (core_.options().stuck_after <= ns{0}) return;
    device.find_stuck(batches_, clock_.now(), core_.options().stuck_after, [this](submission& s) {
        core_.write_off(s.admitted, s.times);
        any_refused_ = true;
        if (s.queued) {
            s.told = true;
            // An owner for its batch; relaxed: the limiter is an owner too, so no other thread
            // drops the last one.
            s.owners.fetch_add(1, std::memory_order_relaxed);
            finish(s, errc::stuck);
        } else if (s.has_holder()) {
            s.told = true;
            say_done(s, errc::stuck, ns{0});
        }
        tell_of_end(clients_.queue(s.admitted.client));
    });
}

template <timeline Stream, clock Clock, compute_policy Policy>
void endings<Stream, Clock, Policy>::call_back(lock_type& lock, need& stay, bool& rest_left) noexcept {
    const typename callback_queue<Stream>::turn turn(told_);
    if (!turn) return;
    do {
        if (stay.is_met(clock_) && !stay.is_short(clock_) && (stay.called || !sleepers_.empty())) {
            rest_left = true;
            sleepers_.call_one(instant::min());
            break;
        }
        stay.called = true;
        submission& s = told_.next();
        const auto level = s.level;
        auto& client = *s.queue;
        if (stay.duties != nullptr && !client.callbacks.are_short()) {
            watch_.give_up(stay);
            watch_.keep(rest_left);
        }
        const auto began = stay.duties != nullptr ? clock_.now() : instant{};
        call_one(lock, s);
        if (stay.duties != nullptr) client.callbacks.learn(clock_.now() - began);
        --client.untold;
        tell_of_end(client);
        told_.was_called(level);
    } while (!told_.empty());
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
