// SPDX-License-Identifier: Apache-2.0
// The engine of a compute limiter. Each stage of a submission's life has a header of its own, and
// the engine calls them in this order:
//
//   arrive and admit   admissions.hpp, limiter_core.hpp   whose turn it is; is there room
//   batch              batches.hpp, late_points.hpp       which points to record around the work
//   enqueue            submission.hpp, handles.hpp        the callable, or the permit's holder
//   observe            observer.hpp                       which ends are reached, and when work ran
//   charge             settlement.hpp, charging.hpp       what each submission is charged
//   end                endings.hpp                        tickets, callbacks, threads that sleep
//
// The engine has no thread. drive() does all of that for all clients, on the calling thread. wait()
// sleeps or watches the device in between, as device_watch.hpp decides. One mutex guards
// everything: functions that take a `lock` release it while they run the user's or the device's
// code; other functions hold it throughout.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/admissions.hpp>
#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/callback_queue.hpp>
#include <gpushare/compute/detail/device_watch.hpp>
#include <gpushare/compute/detail/endings.hpp>
#include <gpushare/compute/detail/late_points.hpp>
#include <gpushare/compute/detail/need.hpp>
#include <gpushare/compute/detail/observer.hpp>
#include <gpushare/compute/detail/settlement.hpp>
#include <gpushare/compute/detail/sleepers.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/detail/submission_log.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// How drive() looks at the device. `now`: even if no work is predicted to be done. Then drive()
/// also gives up stuck work and, if no end is recorded, has the ends of open batches recorded.
enum class look : bool { if_due, now };

/// Not thread-safe: call under the mutex, except for functions that say that they take it.
template <timeline Stream, clock Clock, compute_policy Policy>
class limiter_engine {
public:
    using point = typename Stream::point;
    using submission = detail::submission<Stream>;
    using lock_type = std::unique_lock<std::mutex>;
    static constexpr bool shares_points = batch<Stream>::shares;

    limiter_engine(limiter_options options, Clock time, Policy policy);
    limiter_engine(const limiter_engine&) = delete;
    limiter_engine& operator=(const limiter_engine&) = delete;
    ~limiter_engine();

    [[nodiscard]] std::mutex& mutex() const noexcept { return mutex_; }
    [[nodiscard]] limiter_core<Policy>& core() noexcept { return core_; }
    [[nodiscard]] const limiter_core<Policy>& core() const noexcept { return core_; }
    [[nodiscard]] admissions<Stream, Policy>& clients() noexcept { return clients_; }
    [[nodiscard]] submission_log<Stream>& log() noexcept { return log_; }
    [[nodiscard]] const submission_log<Stream>& log() const noexcept { return log_; }
    [[nodiscard]] const std::shared_ptr<submission_pool<Stream>>& pool() const noexcept { return endings_.pool(); }

    /// Takes no mutex.
    [[nodiscard]] instant now() const { return clock_.now(); }
    /// See admissions::policy_time.
    [[nodiscard]] instant policy_time() const noexcept { return clients_.policy_time(clock_, log_.on()); }
    /// The time for place(); instant{} if streams share no points.
    [[nodiscard]] instant batch_time() const noexcept { return shares_points ? clock_.now() : instant{}; }

    // ---- the queue

    /// Queues `s`, which has its callable and its stream, for this client. If the queue is full,
    /// waits for room as the options say. A refused submission is owned by its ticket alone. Takes
    /// the mutex.
    errc submit(submission& s, client_id c, const submit_options& o, const std::stop_token& stop);

    // ---- the gate: the calling thread enqueues its own work

    /// The result of arrive_at_gate(): the record of the submission, which is admitted or else
    /// waits.
    struct entry {
        submission& what;
        bool admitted;
    };
    /// Lets a submission arrive at the gate, and admits it if it can go immediately. Call only if
    /// no_entry() returns errc::none. Throws std::bad_alloc.
    [[nodiscard]] entry arrive_at_gate(client_id c, const submit_options& o, instant now) {
        auto& s = batches_.record_for_gate();
        // The rest of drive()'s work is done when the submission is placed in a batch, since the
        // clock is read only there.
        if (endings_.any_refused() || !told_.empty() || told_.any_above(core_.settings(c).level) ||
            !batches_.has_slot()) {
            clients_.describe(s, c, o, now);
            clients_.arrive(s, now);
            return {s, false};
        }
        if (!clients_.arrive_and_pass(s, c, o, now)) return {s, false};
        core_.count_queued(c, ns{0});
        take_slot(s);
        return {s, true};
    }
    /// Waits at the gate until the submission is admitted. After an error the record is no longer
    /// valid.
    errc wait_at_gate(lock_type& lock, submission& s, instant deadline, const std::stop_token& stop);
    /// When to drive even if nothing happens and no thread waits: immediately if a thread left work
    /// to others.
    [[nodiscard]] instant resume_at() const noexcept { return rest_left_ ? instant::min() : watch_.next_look(); }
    /// Records which work has been on the device for longer than its longest expected time, for
    /// bounds and for the work behind it. Reads the clock if anything is in flight.
    void note_overdue() noexcept;
    /// Whether any enqueued work may be done by now.
    [[nodiscard]] bool any_due(instant now) noexcept { return batches_.any_due(now); }
    /// Whether `s` can run on `stream` without waiting for others' work.
    [[nodiscard]] bool fits_beside(const submission& s, const Stream& stream) const noexcept {
        return !batches<Stream>::turns || batches_.fits_beside(s.admitted, stream);
    }
    void place(submission& s, Stream& stream, instant now) noexcept;
    /// The same, some time after the admission. Takes the mutex.
    void place(submission& s, Stream& stream) noexcept;
    /// Makes `stream` wait for others' work, if `s` isn't to run alongside it. Takes the mutex.
    /// Exceptions are the stream's.
    void await_turn(const submission& s, Stream& stream);
    /// A permit's holder has enqueued `s`. Takes the mutex only if a thread waits for enqueued
    /// work.
    void enqueued_by_holder(submission& s, errc status) noexcept;
    /// The holder couldn't enqueue `s`, and may try again. Takes the mutex.
    void take_back(submission& s) noexcept;
    /// The permit wasn't used. Takes the mutex.
    void give_back(submission& s) noexcept;

    /// Keeps `s` for the permit's holder, which may ask how the work went until drop_permit(). Call
    /// under the mutex.
    void keep_for_holder(submission& s) noexcept {
        s.client = s.admitted.client;
        s.queue = &clients_.queue(s.client);
        batches_.keep_for_holder(s);
    }
    /// The permit's holder no longer asks how the work went. Takes the mutex only if the work is
    /// over.
    void drop_permit(submission& s) noexcept {
        if (!s.lose_owner()) return;
        s.error = nullptr;  // the user's object: destroyed under no lock
        const std::lock_guard lock(mutex_);
        batches_.give_back(s);
    }

    // ---- driving

    using need = detail::need<submission>;

    /// Records finished work and admits what can go, for a caller that came for nothing else.
    void drive(lock_type& lock, look how) noexcept;
    /// The same, for as long as `stay` says. One thread at a time enqueues the work of a level.
    /// That thread also takes other threads' submissions, which keeps the order of admission.
    void drive(lock_type& lock, look how, need& stay) noexcept {
        const presence here(*this);
        drive_once(lock, how, stay);
        while (!rest_left_ && told_.take_held_up()) drive_once(lock, look::if_due, stay);
    }

    /// Observes and charges the device's work. If asking the device is a driver call, the mutex is
    /// released meanwhile: the driver may be busy with a slow free, which must not delay threads at
    /// a gate. One thread at a time asks, for all. A thread that needs the answer now waits for
    /// that thread.
    void observe(lock_type& lock, look how) noexcept;

    /// Waits for `done`. Meanwhile drives, and watches the device if no other thread does. The
    /// thread wakes up for `own`, if that isn't null, and to take over the watch.
    /// errc::stuck: on a stepped clock, if no event will end the wait.
    errc wait(lock_type& lock, question done, submission* own, instant deadline, const std::stop_token& stop) {
        using kind = typename wait_step<point>::kind;
        const presence here(*this);
        const need stay{.done = done, .own = own, .deadline = deadline, .stop = &stop};
        waiter<submission> me{.own = own, .deadline = deadline};
        const auto drive_on = [&] {
            auto anew = stay;
            anew.duties = &me.duties;
            drive(lock, look::now, anew);
            watch_.hand_over(me.duties);
        };
        errc why = errc::none;
        while (!done()) {
            const auto now = clock_.now();
            why = now >= deadline ? errc::deadline_exceeded : stop.stop_requested() ? errc::stopped : errc::none;
            if (why != errc::none) break;
            if (points_.end_batches(lock, own, true)) continue;
            const auto step = watch_.next_step(me, now, rest_left_);
            bool reached = false;
            switch (step.what) {
                case kind::drive: drive_on(); continue;
                case kind::ask_again: continue;
                case kind::sleep:
                    sleepers_.sleep(lock, own, now, std::min(deadline, step.again),
                                    std::min(step.resume, me.patient_until));
                    continue;
                case kind::stand_still: return errc::stuck;
                case kind::watch: reached = watch_.look_at(lock, step.points, own, me.duties, step.until); break;
                case kind::look: reached = watch_.look_at(lock, {&*step.end, 1}, own, me.duties, step.until); break;
            }
            drive_on();
            if (step.what == kind::watch) me.patient_until = never;
            if (watch_.stands_still(reached, step.until) && !done()) return errc::stuck;
        }
        watch_.keep(rest_left_);  // another thread takes over the watch
        return why;
    }
    /// The same for a client that closes or is put to sleep: `done` may be true once none of its
    /// work is left.
    errc wait_for_end(lock_type& lock, client_id c, question done, instant deadline, const std::stop_token& stop) {
        auto& waiting = clients_.queue(c).waits_for_end;
        ++waiting;
        const auto why = wait(lock, done, nullptr, deadline, stop);
        --waiting;
        return why;
    }
    /// For the stop request of a waiting thread's stop token. Takes the mutex.
    void wake_all() noexcept;
    /// The same, under the mutex.
    void wake_all(const lock_type&) noexcept { sleepers_.wake_all(); }
    /// For a ticket: until `s` is done. Takes the mutex.
    bool wait_for(submission& s, instant deadline, const std::stop_token& stop);

    /// For a caller that waited by a callback and leaves. Afterwards the callback is never called,
    /// unless it is running now. The callable has returned or will never run, unless this is called
    /// from within that callable. Takes the mutex.
    void abandon(submission& s) noexcept;
    /// For a ticket: cancels `s` if it still waits. Returns whether it did. Takes the mutex.
    bool cancel_waiting(submission& s);

    // ---- faults and records

    /// Whether no work of `c` is in flight and all its callbacks have returned. Within a callback,
    /// callbacks don't count, since they would wait for this one.
    [[nodiscard]] bool is_over(client_id c) noexcept {
        return core_.usage(c).in_flight == 0 && (clients_.queue(c).untold == 0 || told_.is_called_here());
    }
    /// The time until which the calling thread waits for work of `c` to end: not at all in a
    /// callable or in a permit's work of that client, which can't end meanwhile. So exit() in such
    /// code doesn't wait for as long as a close may take.
    [[nodiscard]] instant patience(client_id c, instant deadline) const noexcept {
        return batches_.is_in_permit(c) || pool()->is_in_callable(c) ? instant::min() : deadline;
    }
    /// Refuses further submissions of `c` and cancels the waiting ones.
    void close(lock_type& lock, client_id c) noexcept {
        core_.close(c);
        endings_.cancel_waiting(lock, clients_.queue(c), errc::closed);
    }
    /// Admits nothing of `c` until it wakes.
    void sleep(lock_type& lock, client_id c, while_asleep what_waits) noexcept {
        clients_.sleep(c, what_waits);
        if (what_waits == while_asleep::refuse) endings_.cancel_waiting(lock, clients_.queue(c), errc::asleep);
    }
    void record(std::size_t most) {
        log_.start(most, clock_.now());
        batches_.keep_apart(log_.on());
    }

    /// Reports work that no thread drove, for callers that ask for events.
    void look_for_undriven() noexcept {
        if (!stepped_clock<Clock>) core_.look_for_undriven([this] { return clock_.now(); });
    }

private:
    // Waits until `c` can queue one more submission; errc::none then.
    errc wait_for_room(lock_type& lock, client_id c, instant deadline, const std::stop_token& stop);

    // Marks a thread that drives, or that waits in the limiter and so drives when needed. Under the
    // mutex. Not needed on a stepped clock, whose time passes only when the program moves it.
    class presence {
    public:
        explicit presence(limiter_engine& of) noexcept : of_(&of) {
            if (of_->num_present_++ == 0 && !stepped_clock<Clock>) of_->core_.attend([&] { return of_->clock_.now(); });
        }
        presence(const presence&) = delete;
        presence& operator=(const presence&) = delete;
        ~presence() {
            if (--of_->num_present_ == 0 && !stepped_clock<Clock>) of_->core_.leave([&] { return of_->clock_.now(); });
        }

    private:
        limiter_engine* of_;
    };

    // ---- admission

    void drive_once(lock_type& lock, look how, need& stay) noexcept {
        rest_left_ = false;
        observe(lock, how);
        if (core_.any_unsettled()) settlement_.settle_charges();
        if (how == look::now) endings_.give_up_stuck(observer_);
        endings_.cancel_due(lock);
        if (core_.num_waiting() > 0 && batches_.any_ended()) note_overdue();
        admit_ready(lock, stay);
        // A thread that waits for room, or that must know now, needs a point to watch.
        if constexpr (shares_points) points_.end_batches(lock, nullptr, how == look::now || core_.num_waiting() > 0);
        watch_.keep(rest_left_);
        if (!told_.empty()) endings_.call_back(lock, stay, rest_left_);
    }

    // Admits all submissions that can go, one by one, and enqueues them. At the gate the waiting
    // thread enqueues.
    void admit_ready(lock_type& lock, need& stay) noexcept {
        instant now{};
        const auto other_stream = [&](client_id c) { return clients_.bring_forward(c, now); };
        for (admission a; core_.num_waiting() > 0 && batches_.has_slot();) {
            now = policy_time();  // behind observe(), which has noticed the ends up to now
            if (!core_.is_ready(a, now, other_stream)) break;
            if (told_.holds(a.level)) return;
            submission& s = clients_.first_of(a.client);
            if (s.drop_at != never && clock_.now() >= s.drop_at) {
                endings_.drop(lock, s);
                continue;
            }
            if (leaves(s, stay)) {
                rest_left_ = true;
                return;
            }
            told_.let_go(a.level);
            admit(s, a, now);
            if (!s.queued) continue;
            const bool is_own = &s == stay.own;
            const auto began = enqueue(lock, s, stay);
            if (!is_own) stay.since = std::min(stay.since, began);
            observe(lock, look::if_due);
            endings_.cancel_refused(lock);
        }
        told_.hold_nobody();
    }
    void admit(submission& s, const admission& a, instant now) noexcept {
        clients_.admit(s, a, now);
        if (!s.queued) core_.count_queued(a.client, waited(s, clock_.now()));
        take_slot(s);
        if (s.queue->waits_for_room > 0) sleepers_.wake_all();
        s.at.store(submission_stage::admitted, std::memory_order_relaxed);
        if (!s.queued) sleepers_.wake(s);
    }

    // Gives the admitted submission a slot.
    void take_slot(submission& s) noexcept {
        batches_.take_slot();
        if (log_.on()) log_.admitted(s, clock_.now());
    }
    // How long `s` had waited by `until`.
    [[nodiscard]] static ns waited(const submission& s, instant until) noexcept {
        return s.waits_since < until ? until - s.waits_since : ns{0};
    }

    // ---- enqueue

    // Runs the callable of `s`. Returns when the callable began; `never` if it didn't begin.
    instant enqueue(lock_type& lock, submission& s, need& stay) noexcept {
        core_.set_enqueuing(s.admitted, true);
        auto& usual = s.queue->callables;
        if (!usual.are_short()) watch_.give_up(stay);
        watch_.keep(rest_left_);  // for the work in flight: the callable may take long
        try {
            if constexpr (batches<Stream>::turns) points_.await_turn(lock, s.admitted, *s.stream);
            if (s.deaf) s.status = errc::stopped;  // abandoned while the mutex was released
        } catch (...) {
            s.status = errc::submission_failed;
            s.error = std::current_exception();
        }
        if (s.status != errc::none) {
            core_.set_enqueuing(s.admitted, false);
            endings_.end_admitted(s, s.status);
            return never;
        }
        const auto began = s.enqueue_began = clock_.now();
        core_.count_queued(s.client, waited(s, began));
        batches_.collect();
        batches_.place(s, *s.stream, shares_points ? began : instant{});
        s.set_enqueuer(std::this_thread::get_id());
        lock.unlock();
        const auto so_far = s.enqueue();
        const auto ended = clock_.now();
        if (s.needs_end) s.enqueue_ended = ended;
        lock.lock();
        s.set_enqueuer({});
        if (num_abandoning_ > 0) enqueued_.notify_all();
        usual.learn(ended - began);
        core_.set_enqueuing(s.admitted, false);
        batches_.collect();
        if (so_far == enqueued_part::all || (so_far == enqueued_part::work && s.may_stay_open)) {
            batches_.enqueued(s);
        } else {
            batches_.take_back(s);
            endings_.end_admitted(s, s.status);
        }
        return began;
    }

    // ---- how long a thread stays

    // Whether the calling thread leaves `next`, whose turn it is, to another thread.
    [[nodiscard]] bool leaves(const submission& next, need& stay) noexcept {
        if (!next.queued || &next == stay.own) return false;
        if (!stay.is_met(clock_)) {
            stay.since = never;
            return false;
        }
        // A callable that is known to take long is left to a thread that waits in the limiter, if
        // there is one.
        if (!sleepers_.empty() && next.queue->callables.are_long()) return true;
        return !stay.is_short(clock_);
    }

    mutable std::mutex mutex_;
    Clock clock_;
    limiter_core<Policy> core_;  // learns from `clients_` which submissions wait
    admissions<Stream, Policy> clients_;
    batches<Stream> batches_;
    late_points<Stream, Clock> points_{clock_, batches_};
    observer<Stream> observer_;
    submission_log<Stream> log_;
    typename device_watch<Stream, Clock, Policy>::sleeping_threads sleepers_;
    device_watch<Stream, Clock, Policy> watch_{clock_, core_, clients_, batches_, observer_, sleepers_};
    callback_queue<Stream> told_;
    endings<Stream, Clock, Policy> endings_{clock_, core_, clients_, batches_, log_, told_, sleepers_, watch_};
    settlement<Stream, Clock, Policy> settlement_{clock_, core_, clients_, batches_, log_, endings_};
    std::uint32_t num_present_ = 0;  // threads that drive or wait
    bool asking_ = false;            // a thread is asking the device, for all threads
    bool rest_left_ = false;         // a thread left a submission or a callback to another thread
    std::condition_variable asked_, enqueued_;
    std::uint32_t num_abandoning_ = 0;  // threads that wait for a callable to return
};

// Defined out of the class and without `inline`, so that an `extern template` keeps other
// translation units from instantiating them.

template <timeline Stream, clock Clock, compute_policy Policy>
limiter_engine<Stream, Clock, Policy>::limiter_engine(limiter_options options, Clock time, Policy policy)
    : clock_(std::move(time)),
      core_(options, std::move(policy), batches<Stream>::turns),
      clients_(core_),
      batches_(core_.quantum()) {}

template <timeline Stream, clock Clock, compute_policy Policy>
limiter_engine<Stream, Clock, Policy>::~limiter_engine() {
    lock_type lock(mutex_);
    for (auto& q : clients_.queues()) endings_.cancel_waiting(lock, q, errc::closed);
    for (auto& b : batches_.all())
        for (auto* s = b.first; s != nullptr; s = s->next_member)
            if (s->queued && !s->told) endings_.finish(*s, errc::closed);
    need stay{.done = question(false)};
    if (!told_.empty()) endings_.call_back(lock, stay, rest_left_);
}

template <timeline Stream, clock Clock, compute_policy Policy>
errc limiter_engine<Stream, Clock, Policy>::submit(submission& s, client_id c, const submit_options& o,
                                                   const std::stop_token& stop) {
    const std::stop_callback on_stop(stop, [this] { wake_all(); });
    lock_type lock(mutex_);
    auto why = clients_.no_entry(c);
    if (why == errc::queue_full && o.room_by != instant::min()) why = wait_for_room(lock, c, o.room_by, stop);
    if (why != errc::none) {
        core_.count_refused(c, why);
        lock.unlock();
        pool()->drop(s);
        return why;
    }
    if (core_.several_levels()) note_overdue();
    const auto now = o.drop_if_late ? clock_.now() : policy_time();
    clients_.describe(s, c, o, now);
    clients_.arrive(s, now);
    need stay{.own = &s};
    drive(lock, look::if_due, stay);
    if (s.at.load(std::memory_order_relaxed) == submission_stage::waiting) s.waits_since = clock_.now();
    return errc::none;
}

template <timeline Stream, clock Clock, compute_policy Policy>
errc limiter_engine<Stream, Clock, Policy>::wait_for_room(lock_type& lock, client_id c, instant deadline,
                                                          const std::stop_token& stop) {
    auto why = errc::queue_full;
    const auto room = [&] { return (why = clients_.no_entry(c)) != errc::queue_full; };
    auto& waiting = clients_.queue(c).waits_for_room;
    ++waiting;
    const auto waited = wait(lock, question(room), nullptr, deadline, stop);
    --waiting;
    return waited == errc::stopped ? waited : why;
}

template <timeline Stream, clock Clock, compute_policy Policy>
errc limiter_engine<Stream, Clock, Policy>::wait_at_gate(lock_type& lock, submission& s, instant deadline,
                                                         const std::stop_token& stop) {
    const presence here(*this);
    const auto admitted = [&] { return s.at.load(std::memory_order_relaxed) != submission_stage::waiting; };
    need stay{.done = question(admitted), .own = &s, .deadline = deadline, .stop = &stop};
    s.waits_since = clock_.now();
    drive(lock, look::if_due, stay);
    auto why = wait(lock, stay.done, &s, deadline, stop);
    if (why != errc::none) {
        if (deadline == instant::min())
            core_.count_refused(s.client, unrun::no_room);
        else
            core_.count_cancelled(s.client, why);
        endings_.leave_queue(s);
    } else {
        why = s.status;
    }
    if (why == errc::none) return why;
    batches_.give_back(s);
    if (core_.num_waiting() > 0) drive(lock, look::if_due);  // others may have waited for its turn
    return why;
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::note_overdue() noexcept {
    const auto in_flight = batches_.in_use();
    if (in_flight.empty()) return;
    const auto now = clock_.now();
    for (const auto& b : in_flight)
        if (b.num_members > 0) core_.set_overdue(b.first->admitted.level_index, ns{0});
    for (const auto& b : in_flight) {
        if (b.num_members == 0 || b.is_written_off() || !batches_.is_oldest(b)) continue;
        const auto& a = b.first->admitted;
        // Work that fills the whole device may have started only when the work before it ended.
        const auto since =
            a.width.part() < 1 ? b.first->enqueue_began : std::max(b.first->enqueue_began, settlement_.last_end());
        if (since <= instant{} || a.longest <= ns{0} || a.yields_within > ns{0} || now - since <= a.longest) continue;
        core_.set_overdue(a.level_index, now - since - a.longest);
    }
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::place(submission& s, Stream& stream) noexcept {
    auto now = batch_time();
    lock_type lock(mutex_);
    if (batches_.any_due(now)) {
        need stay;
        stay.beyond = ns{0};  // the caller's own work comes first
        stay.called = true;
        drive(lock, look::if_due, stay);
        now = batch_time();
    }
    place(s, stream, now);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::place(submission& s, Stream& stream, instant now) noexcept {
    s.enqueue_began = now;
    batches_.collect();
    batches_.place(s, stream, now);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::await_turn(const submission& s, Stream& stream) {
    if constexpr (batches<Stream>::turns) {
        lock_type lock(mutex_);
        points_.await_turn(lock, s.admitted, stream);
    }
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::enqueued_by_holder(submission& s, errc status) noexcept {
    s.status = status;
    if (shares_points && s.needs_end) s.enqueue_ended = batch_time();
    if (!batches_.announce_enqueued(s) && status != errc::device_lost) return;
    lock_type lock(mutex_);
    // A sleeping thread needs a point to watch.
    points_.end_batches(lock, nullptr, !sleepers_.empty());
    if (status == errc::device_lost) drive(lock, look::now);
    watch_.keep(rest_left_);
    batches_.keep_awaiting(!sleepers_.empty());
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::take_back(submission& s) noexcept {
    const std::lock_guard lock(mutex_);
    s.set_enqueuer({});
    batches_.take_back(s);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::give_back(submission& s) noexcept {
    lock_type lock(mutex_);
    s.owners.store(1, std::memory_order_relaxed);  // relaxed: under the mutex
    endings_.cancel(s);
    drive(lock, look::now);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::drive(lock_type& lock, look how) noexcept {
    need stay;
    drive(lock, how, stay);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::observe(lock_type& lock, look how) noexcept {
    if (!batches_.any_ended()) return;
    const bool anyway = how == look::now;
    if constexpr (asks_unlocked<Stream>) {
        if (asking_ && !anyway) return;
        while (asking_) asked_.wait(lock);
        asking_ = true;
        // Work that others enqueue meanwhile is left to later callers, or this might never end.
        const auto newest = batches_.latest_order();
        for (batch<Stream>* done = nullptr;; settlement_.settle(*done, observer_.seen())) {
            const auto now = batch_time();
            if (observer_.choose(batches_, now, anyway, newest)) {
                lock.unlock();
                observer_.ask();
                lock.lock();
                observer_.note(batches_, now);
            }
            done = observer_.next_done(batches_, now, anyway, nullptr);
            if (done == nullptr) break;
        }
        asking_ = false;
        asked_.notify_all();
    } else {
        typename observer<Stream>::questions ask;
        const auto now = batch_time();
        while (auto* const done = observer_.next_done(batches_, now, anyway, &ask))
            settlement_.settle(*done, observer_.seen());
    }
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::wake_all() noexcept {
    const std::lock_guard lock(mutex_);
    sleepers_.wake_all();
}

template <timeline Stream, clock Clock, compute_policy Policy>
bool limiter_engine<Stream, Clock, Policy>::wait_for(submission& s, instant deadline, const std::stop_token& stop) {
    const std::stop_callback on_stop(stop, [this] { wake_all(); });
    lock_type lock(mutex_);
    const presence here(*this);
    const auto done = [&] { return s.at.load(std::memory_order_acquire) == submission_stage::done; };
    need stay{.done = question(done), .own = &s, .deadline = deadline, .stop = &stop};
    drive(lock, look::now, stay);
    const auto why = wait(lock, stay.done, &s, deadline, stop);
    if (why == errc::stuck) raise(failure{why}, {}, "waiting by a clock that doesn't advance meanwhile");
    return why == errc::none;
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::abandon(submission& s) noexcept {
    lock_type lock(mutex_);
    s.deaf = true;
    if (s.at.load(std::memory_order_relaxed) == submission_stage::waiting) {
        endings_.dismiss(lock, s, errc::stopped);
        drive(lock, look::now);
        return;
    }
    ++num_abandoning_;
    while (s.enqueuer.load(std::memory_order_relaxed) != std::thread::id{} && !s.is_enqueued_here())
        enqueued_.wait(lock);
    --num_abandoning_;
}

template <timeline Stream, clock Clock, compute_policy Policy>
bool limiter_engine<Stream, Clock, Policy>::cancel_waiting(submission& s) {
    lock_type lock(mutex_);
    if (s.at.load(std::memory_order_relaxed) != submission_stage::waiting) return false;
    endings_.dismiss(lock, s, errc::stopped);
    drive(lock, look::now);
    return true;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
