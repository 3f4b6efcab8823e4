// SPDX-License-Identifier: Apache-2.0
// A submission's life in a compute limiter, in the order of the functions below:
//
//   arrive and admit   admissions.hpp, limiter_core.hpp     whose submission goes next, and whether there is room
//   batch              batches.hpp                          which points are to be recorded around it
//   enqueue            submission.hpp, handles.hpp          under no lock: the callable, or the permit's holder
//   observe            observer.hpp                         which ends are reached, and when the work ran
//   charge             charging.hpp                         what each is charged
//   tell               callback_queue.hpp, sleepers.hpp     tickets, callbacks, threads that sleep
//
// The engine has no thread. drive() does all of that for all clients, on the calling thread; wait()
// sleeps or watches the device in between (device_watch.hpp). One mutex guards everything:
// functions that take a `lock` release it while they run the user's or the device's code; other
// functions hold it throughout.
#pragma once

#include <algorithm>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/admissions.hpp>
#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/callback_queue.hpp>
#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/detail/device_watch.hpp>
#include <gpushare/compute/detail/observer.hpp>
#include <gpushare/compute/detail/sleepers.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/detail/submission_log.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// How drive() looks at the device. `now`: even if no work is predicted to be done. Then drive()
/// also gives up stuck work and, if no end is recorded, has the ends of open batches recorded.
enum class look : bool { if_due, now };

/// The longest time for which a thread runs callables and callbacks of others beyond its own need.
/// A callable that is running at the end of that time is finished. If a callback is due and no
/// thread sleeps in the limiter, the thread calls at least one.
inline constexpr ns beyond_need{100'000};

/// A question that the caller answers: a callable, which outlives the question, or a constant
/// answer. It is no template argument, so that one engine is compiled for all callers.
class question {
public:
    /// A question that always has this answer.
    explicit constexpr question(bool answer) noexcept : ask_(answer ? &yes : &no) {}
    template <std::predicate F>
    explicit constexpr question(const F& asked) noexcept
        : of_(&asked), ask_([](const void* of) -> bool { return (*static_cast<const F*>(of))(); }) {}

    bool operator()() const { return ask_(of_); }

private:
    static bool yes(const void*) { return true; }
    static bool no(const void*) { return false; }

    const void* of_ = nullptr;
    bool (*ask_)(const void*);
};

/// The reason why a thread is here. It drives for others until the need is met, and after that for
/// at most `beyond`. It leaves the rest to a thread that sleeps in the limiter or, if there is
/// none, to the next thread that comes. So an endless supply of work keeps no thread. The need is
/// met when `done` is true, at the deadline, or by a stop request.
template <class Submission>
struct need {
    question done{true};
    // The thread's own submission, whose callable it always runs when its turn comes.
    const Submission* own = nullptr;
    instant deadline = never;
    const std::stop_token* stop = nullptr;
    duty<Submission>* duties = nullptr;
    ns beyond = beyond_need;
    // When the time beyond the need began: when the need was first found to be met or, if it was
    // met during a callable of another submission, when that callable began.
    instant since = never;
    bool called = false;  // it has called a callback
};

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
    [[nodiscard]] const std::shared_ptr<submission_pool<Stream>>& pool() const noexcept { return pool_; }

    /// Takes no mutex.
    [[nodiscard]] instant now() const { return clock_.now(); }
    /// The time for the policy, or instant{} if nothing needs the time: reading a clock costs as
    /// much as the rest of a permit.
    [[nodiscard]] instant policy_time() const noexcept {
        return !is_timeless<Policy> || core_.holds_back() || log_.on() || clients_.next_late() != never ? clock_.now()
                                                                                                        : instant{};
    }
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
    /// Lets a submission arrive at the gate, and admits it if it can go at once. Call only if
    /// no_entry() returns errc::none. Throws std::bad_alloc.
    [[nodiscard]] entry arrive_at_gate(client_id c, const submit_options& o, instant now) {
        auto& s = batches_.record_for_gate();
        // The rest of drive()'s work is done when the submission is placed in a batch, since the
        // clock is read only there.
        if (faulty_ || !told_.empty() || told_.any_above(core_.settings(c).level) || !batches_.has_slot()) {
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
    /// When to drive even if nothing happens and no thread waits: at once if a thread left work to
    /// others.
    [[nodiscard]] instant resume_at() const noexcept { return ready_left_ ? instant::min() : next_look(); }
    /// Notes which work has been on the device for longer than its longest expected time, for
    /// bounds and for the work behind it. Reads the clock if anything is in flight.
    void note_overdue() noexcept;
    /// When to look up even if nothing happens: work that is held back may go then, or a submission
    /// is late then.
    [[nodiscard]] instant next_look() const noexcept { return std::min(core_.resume_at(), clients_.next_late()); }
    /// Whether any enqueued work may be done by now.
    [[nodiscard]] bool any_due(instant now) noexcept { return batches_.any_due(now); }
    /// Whether `s` can run on `stream` without waiting for others' work.
    [[nodiscard]] bool fits_beside(const submission& s, const Stream& stream) const noexcept {
        return !batches<Stream>::turns || batches_.fits_beside(s.admitted, stream);
    }
    void place(submission& s, Stream& stream, instant now) noexcept;
    /// The same, some time after the admission. Takes the mutex.
    void place(submission& s, Stream& stream) noexcept;
    /// Makes `stream` wait for others' work, if `s` isn't to run beside it. Takes the mutex.
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

    /// Notes finished work and admits what can go, for a caller that came for nothing else.
    void drive(lock_type& lock, look how) noexcept;
    /// The same, for as long as `stay` says. One thread at a time enqueues the work of a level.
    /// That thread also takes other threads' submissions, which keeps the order of admission.
    void drive(lock_type& lock, look how, need& stay) noexcept {
        const presence here(*this);
        drive_once(lock, how, stay);
        while (!ready_left_ && told_.take_held_up()) drive_once(lock, look::if_due, stay);
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
            if (end_batches(lock, own, true)) continue;
            const auto step = next_step(me, now);
            bool reached = false;
            switch (step.what) {
                case wait_step::kind::drive: drive_on(); continue;
                case wait_step::kind::ask_again: continue;
                case wait_step::kind::sleep:
                    sleepers_.sleep(lock, own, now, std::min(deadline, step.again),
                                    std::min(step.resume, me.patient_until));
                    continue;
                case wait_step::kind::stand_still: return errc::stuck;
                case wait_step::kind::watch:
                    reached = watch_.look_at(lock, step.points, own, me.duties, step.until);
                    break;
                case wait_step::kind::look:
                    reached = watch_.look_at(lock, {&*step.end, 1}, own, me.duties, step.until);
                    break;
            }
            drive_on();
            if (step.what == wait_step::kind::watch) me.patient_until = never;
            if (watch_.stands_still(reached, step.until) && !done()) return errc::stuck;
        }
        keep_watch();  // another thread takes over the watch
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
    /// Until when the calling thread waits for work of `c` to end: not at all in a callable or in a
    /// permit's work of that client, which can't end meanwhile. So exit() in such code doesn't wait
    /// for as long as a close may take.
    [[nodiscard]] instant patience(client_id c, instant deadline) const noexcept {
        return batches_.is_in_permit(c) || pool_->is_in_callable(c) ? instant::min() : deadline;
    }
    /// Refuses further submissions of `c` and cancels the waiting ones.
    void close(lock_type& lock, client_id c) noexcept {
        core_.close(c);
        cancel_waiting(lock, clients_.queue(c), errc::closed);
    }
    /// Admits nothing of `c` until it wakes.
    void sleep(lock_type& lock, client_id c, while_asleep what_waits) noexcept {
        clients_.sleep(c, what_waits);
        if (what_waits == while_asleep::refuse) cancel_waiting(lock, clients_.queue(c), errc::asleep);
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

    // ---- the next step of a waiting thread

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
        std::optional<point> end{};       // the end of its own work, if recorded
        std::span<const point> points{};  // the points to watch
        look_end until{.at = never, .by_call = true};
    };
    // Decides the next step. If that is to watch or to look, `me` has its duties from then on.
    [[nodiscard]] wait_step next_step(waiter<submission>& me, instant now) noexcept {
        using kind = typename wait_step::kind;
        wait_step step{.resume = next_look()};
        if (ready_left_ || now >= step.resume) return step;
        if (batches_.any_open()) step.again = now + watch_.slice();
        const bool sliced = step.again != never || needs_slices();
        // The questions below see work enqueued before this call.
        if (!sliced) batches_.await_enqueued();
        step.end = observer_.end_of(batches_, me.own);
        if (is_to_watch(me, now)) {
            // The points include the end of its own work.
            step.what = kind::watch;
            step.points = watch_.begin();
            me.duties = {.looks_at = step.end ? me.own : nullptr, .watches = true};
            // If memory didn't suffice for all points, look up soon.
            step.until = look_until(me, step, now, sliced || observer_.any_unknown(batches_));
            return step;
        }
        if (step.end) {
            step.what = kind::look;
            me.duties = {.looks_at = me.own};
            // If threads that are expected to wait for other work don't come, this thread notices
            // the ends.
            const bool for_others = !watch_.is_watched() && watch_.any_unwatched(attendants(), true, me.own, me.thread);
            step.until = look_until(me, step, now, sliced || for_others);
            return step;
        }
        step.what = kind::stand_still;
        if constexpr (stepped_clock<Clock>) return step;  // no time passes while the thread sleeps
        batches_.await_enqueued();
        step.what = is_to_watch(me, now) ? kind::ask_again : kind::sleep;
        if (step.what == kind::sleep) me.grow_patient(now, !watch_.is_watched() && batches_.any_ended());
        return step;
    }
    [[nodiscard]] bool is_to_watch(const waiter<submission>& me, instant now) noexcept {
        return !watch_.is_watched() && watch_.any_unwatched(attendants(), now >= me.patient_until, me.own, me.thread);
    }
    // When the thread looks up. `soon`: at the end of a slice at the latest.
    [[nodiscard]] look_end look_until(const waiter<submission>& me, const wait_step& step, instant now,
                                      bool soon) const noexcept {
        const auto at_end = std::min(me.deadline, step.resume);
        if (stepped_clock<Clock> || !soon) return {at_end, true};
        return {std::min(at_end, now + watch_.slice()), false};
    }
    [[nodiscard]] bool needs_slices() const noexcept {
        return watch_.needs_slices() || core_.options().stuck_after > ns{0};
    }

    // ---- admission

    void drive_once(lock_type& lock, look how, need& stay) noexcept {
        ready_left_ = false;
        observe(lock, how);
        if (core_.any_unsettled()) settle_charges();
        if (how == look::now) give_up_stuck();
        if (faulty_) cancel_faulty(lock);
        drop_late(lock);
        if (core_.num_waiting() > 0 && batches_.any_ended()) note_overdue();
        admit_ready(lock, stay);
        // A thread that waits for room, or that must know now, needs a point to watch.
        if constexpr (shares_points) end_batches(lock, nullptr, how == look::now || core_.num_waiting() > 0);
        keep_watch();
        if (!told_.empty()) call_back(lock, stay);
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
                drop(lock, s);
                continue;
            }
            if (leaves(s, stay)) {
                ready_left_ = true;
                return;
            }
            told_.let_go(a.level);
            admit(s, a, now);
            if (!s.queued) continue;
            const bool is_own = &s == stay.own;
            const auto began = enqueue(lock, s, stay);
            if (!is_own) stay.since = std::min(stay.since, began);
            observe(lock, look::if_due);
            if (faulty_) cancel_faulty(lock);
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

    // Drops a late submission: it never runs.
    void drop(lock_type& lock, submission& s) noexcept {
        ++s.queue->dropped;
        dismiss(lock, s, errc::deadline_exceeded);
    }
    // Drops all late submissions, so that waiting threads learn at the deadline that they are late,
    // not at their turn.
    void drop_late(lock_type& lock) noexcept {
        while (clients_.next_late() != never) {
            submission* const s = clients_.late_at(clock_.now());
            if (s == nullptr) return;
            drop(lock, *s);
        }
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
    // Wakes threads that wait for the client's end: its work has ended, or a callback has returned.
    void tell_of_end(const client_queue<Stream>& client) noexcept {
        if (client.waits_for_end > 0) sleepers_.wake_all();
    }
    // Ends an admitted submission of which nothing was enqueued.
    void cancel(submission& s) noexcept {
        core_.cancel(s.admitted);
        tell_of_end(clients_.queue(s.admitted.client));
        batches_.release(s);
    }

    // ---- enqueue

    // Runs the callable of `s`. Returns when the callable began; `never` if it didn't begin.
    instant enqueue(lock_type& lock, submission& s, need& stay) noexcept {
        core_.set_enqueuing(s.admitted, true);
        auto& usual = s.queue->callables;
        if (!usual.are_short()) leave_watch(stay);
        keep_watch();  // another thread watches the work in flight: the callable may take long
        try {
            if constexpr (batches<Stream>::turns) await_turn(lock, s.admitted, *s.stream);
        } catch (...) {
            core_.set_enqueuing(s.admitted, false);
            s.error = std::current_exception();
            core_.count_cancelled(s.client, errc::submission_failed);
            cancel(s);
            finish(s, errc::submission_failed);
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
            core_.count_cancelled(s.client, s.status);
            cancel(s);
            finish(s, s.status);
        }
        return began;
    }

    void await_turn(lock_type& lock, const admission& a, Stream& stream) {
        batches_.mark_others(a, stream);
        if (batches_.fits_beside(a, stream)) return;
        end_batches(lock, nullptr, false);
        std::uint64_t after = 0;  // considers each batch once, even if other threads mark them, too
        while (auto* const b = turn_before<Stream>(batches_.all(), after, a, stream)) {
            after = b->order;
            // The end of that batch, if recorded. Otherwise a thread is enqueuing into the batch,
            // and a point is recorded now.
            std::optional<point> end;
            if (const auto* const ended = b->ended()) end = ended->end;
            typename batch<Stream>::handle_type open{};
            if (!end) open = b->not_ended()->handle;
            lock.unlock();
            try {
                if constexpr (shares_points)
                    if (!end) end = recorded(open);
                if (end) stream.wait(*end);
            } catch (...) {
                open = {};
                lock.lock();
                for (auto& other : batches_.all())
                    // The stream doesn't wait after all.
                    if (other.followed_on == &stream) other.followed_on = nullptr;
                throw;
            }
            open = {};  // may be the stream's last handle: destroyed under no lock
            lock.lock();
        }
    }
    // Returns no point if none can be recorded now, for example during a capture. A later thread
    // tries again.
    template <class Handle>
    [[nodiscard]] static std::optional<point> recorded(const Handle& open) noexcept {
        try {
            return open.record();
        } catch (...) {
            return std::nullopt;
        }
    }

    // Records the ends of batches that a thread wants. Returns whether any were recorded.
    bool end_batches(lock_type& lock, const submission* wanted, bool quiet) noexcept {
        bool any = false;
        if constexpr (shares_points) {
            const auto now = [this] { return clock_.now(); };
            for (auto i = batches_.next_to_end(wanted, quiet, now); i != batches_.none;
                 i = batches_.next_to_end(wanted, quiet, now)) {
                auto handle = batches_.handle(i);
                lock.unlock();
                auto end = recorded(handle);
                lock.lock();
                if (!end) {
                    batches_.not_ended(i);
                    return any;
                }
                batches_.ended(i, *std::move(end));
                any = true;
                lock.unlock();
                handle = {};  // may be the stream's last handle
                lock.lock();
            }
        }
        return any;
    }

    // ---- charge, tell

    // The facts that all members of a batch share when its end is reached.
    struct settling {
        const observation& seen;
        charges charged;
        point end;
        instant pending_at;  // when the end was last seen pending
        bool may_shrink;     // work in flight may have shared the time
        bool written_off;    // its members were reported as stuck already
        bool logged;
        const client_settings& owner;  // used only for the log
    };

    // Charges the members of `b`, whose end is reached, and wakes the threads that wait for them.
    void settle(batch<Stream>& b, const observation& seen) noexcept {
        auto& client = clients_.queue(b.client);
        // Reading the clock costs a good part of a permit. While no submission waits, nothing else
        // is in flight and one level is in use, the time of an earlier end serves. When others
        // come, work in flight looks longer by up to `some` ends and the pauses between them. So
        // the first bounds that the newcomers get may be too long, never too short.
        constexpr std::uint64_t some = 16;
        if (b.order % some == 1 || batches_.in_use().size() > 1 || core_.num_waiting() > 0 || core_.several_levels())
            last_end_ = clock_.now();
        static constexpr client_settings gone{};
        const auto give_back = [this](client_id c, ns shared) { core_.give_back(c, shared); };
        auto& ended = *b.ended();
        const bool logged = log_.on();
        // Built in place: a copy of the charges costs a tenth of a permit.
        settling of{.seen = seen,
                    .charged = charge_for(seen, meter_, client.enqueue_time, give_back),
                    .end = std::move(ended.end),
                    .pending_at = ended.pending_at,
                    .may_shrink = !seen.used && batches_.any_beside(b),
                    .written_off = ended.written_off,
                    .logged = logged,
                    .owner = logged && core_.contains(seen.client) ? core_.settings(seen.client) : gone};
        for (auto* next = batches_.take_members(b); next != nullptr;) {
            submission& s = *std::exchange(next, next->next_member);
            const auto part = of.charged.next(s.admitted.predicted, next == nullptr);
            const auto code = complete(s, part, of);
            const auto attendant = s.looked_at > 0 ? s.looker : std::thread::id{};
            if (!s.queued && !of.written_off) finish_permit(s, code, part.took);
            batches_.release(s);
            if (of.written_off) {
                if (s.queued) pool_->drop(s);
                continue;
            }
            client.attendant = attendant;
            if (s.queued) finish(s, code, part.took);
            tell_of_end(client);
        }
        settle_charges();
    }
    // Charges one member its part. Returns the status of its work.
    errc complete(submission& s, const charges::part& part, const settling& of) noexcept {
        const auto code = s.status != errc::none ? s.status : status_of(s.own, of.end);
        const bool asked_for = s.queued || (s.has_holder() && !s.told);
        if (asked_for && s.status == errc::none && code != errc::none) s.error = thrown_by(s.own, of.end);
        const auto now = of.logged || (!of.written_off && core_.needs_end_of(s.admitted)) ? clock_.now() : instant{};
        const auto from = of.charged.from();
        const bool timed = from == charge::source::own || from == charge::source::alone;
        ns beyond{};
        if (of.written_off) {
            core_.complete_late(s.admitted, part.took);
        } else {
            const bool failed = code != errc::none;
            beyond = core_.complete(s.admitted,
                                    {.took = part.took,
                                     .in_flight = timed ? part.span : ns{0},
                                     .noticed = noticed(s, of, now),
                                     .enqueuing = s.needs_end ? s.enqueue_ended - s.enqueue_began : ns{0},
                                     .failed = failed,
                                     .from = from,
                                     .times = s.times,
                                     .width = of.seen.used ? of.seen.used->width : s.fills.width,
                                     .opaque = s.fills.opaque,
                                     .may_shrink = of.may_shrink},
                                    now);
            if (failed) note_failure(of.seen.client, code);
        }
        if (of.logged) log_.completed(s, code, of.owner, part, beyond, of.end, now);
        return code;
    }
    // How late the end was noticed. If points don't say when they were reached, this is the longest
    // possible delay: since the end was last seen pending, or its work was enqueued. If the clock
    // isn't the device's, the delay is meaningless. It is cut to the length and so has no effect.
    [[nodiscard]] static ns noticed([[maybe_unused]] const submission& s, [[maybe_unused]] const settling& of,
                                    instant now) noexcept {
        if (now <= instant{}) return ns{0};
        if constexpr (dated_point<point>)
            return std::clamp(now - reached_at(of.end), ns{0}, of.seen.length);
        else if constexpr (looking_point<point>)
            return std::clamp(now - std::max(of.pending_at, s.enqueue_began), ns{0}, of.seen.length);
        else
            return ns{0};
    }
    // Charges made while other work was in flight may turn out to be shared with it, until all of
    // that work has ended.
    void settle_charges() noexcept {
        if (!core_.any_unsettled()) {
            settles_after_ = batches_.latest_order();
            return;
        }
        const auto oldest = batches_.oldest_order();
        if (oldest <= settles_after_) return;
        settles_after_ = batches_.latest_order();
        core_.settle(oldest > settles_after_);
    }
    void finish(submission& s, errc status, ns device_time = {}) noexcept {
        say_done(s, status, device_time);
        if (!s.error && !s.on_done) return pool_->drop(s);
        tell(s);
    }
    // The same for a permit, which is reported only while it has a holder.
    void finish_permit(submission& s, errc status, ns device_time) noexcept {
        if (s.error || s.has_holder()) say_done(s, status, device_time);
        if (s.error) tell(s);
    }
    void say_done(submission& s, errc status, ns device_time) noexcept {
        s.status = status;
        if (status != errc::none) s.failed_of = core_.settings(s.client).name;
        s.device_time = device_time;
        s.finished_at = clock_.now();
        s.at.store(submission_stage::done, std::memory_order_release);
        sleepers_.wake(s);
    }
    void tell(submission& s) noexcept {
        s.level = s.queue->own_level;
        if (s.queued) s.level = std::max(s.level, s.facts.head.level);
        ++s.queue->untold;
        told_.add(s);  // the callback or its destructor is user code: called under no lock
    }

    // Runs callbacks, in one thread at a time, so that a callback whose submission completes at
    // once isn't called from within itself. A thread that has stayed for long leaves the rest to a
    // sleeping thread or, after one callback, to the next thread that comes. Without that one
    // callback, no callback might ever run if each thread that comes has a long callable to run.
    void call_back(lock_type& lock, need& stay) noexcept {
        const typename callback_queue<Stream>::turn turn(told_);
        if (!turn) return;
        do {
            if (is_met(stay) && !is_short(stay) && (stay.called || !sleepers_.empty())) {
                ready_left_ = true;
                sleepers_.call_one(instant::min());
                break;
            }
            stay.called = true;
            submission& s = told_.next();
            const auto level = s.level;
            auto& client = *s.queue;
            if (stay.duties != nullptr && !client.callbacks.are_short()) {
                leave_watch(stay);
                keep_watch();
            }
            const auto began = stay.duties != nullptr ? clock_.now() : instant{};
            const bool calls = s.on_done && !s.deaf;
            lock.unlock();
            if (calls) s.on_done({s.status, s.device_time, s.finished_at, s.error, s.failed_of});
            s.on_done.reset();
            const bool of_gate = !s.queued && s.lose_owner();
            if (of_gate) s.error = nullptr;
            if (s.queued) pool_->drop(s);
            lock.lock();
            if (of_gate) batches_.give_back(s);
            if (stay.duties != nullptr) client.callbacks.learn(clock_.now() - began);
            --client.untold;
            tell_of_end(client);
            told_.was_called(level);
        } while (!told_.empty());
    }

    // ---- how long a thread stays

    [[nodiscard]] bool is_met(const need& stay) const noexcept {
        return stay.done() || (stay.stop != nullptr && stay.stop->stop_requested()) ||
               (stay.deadline != never && clock_.now() >= stay.deadline);
    }
    // Whether the calling thread leaves `next`, whose turn it is, to another thread.
    [[nodiscard]] bool leaves(const submission& next, need& stay) noexcept {
        if (!next.queued || &next == stay.own) return false;
        if (!is_met(stay)) {
            stay.since = never;
            return false;
        }
        // A callable that is known to take long is left to a thread that waits in the limiter, if
        // there is one.
        if (!sleepers_.empty() && next.queue->callables.are_long()) return true;
        return !is_short(stay);
    }
    [[nodiscard]] bool is_short(need& stay) const noexcept {
        if (stay.beyond <= ns{0}) return false;
        const auto now = clock_.now();
        stay.since = std::min(stay.since, now);
        return now - stay.since < stay.beyond;
    }

    // ---- watch: see device_watch.hpp

    // Hands the watch over, since this thread may stay in user code for long.
    void leave_watch(need& stay) noexcept {
        if (stay.duties == nullptr) return;
        if (const auto* const own = stay.duties->looks_at) own->queue->attendant = {};
        watch_.hand_over(*stay.duties);
    }
    [[nodiscard]] auto attendants() const noexcept {
        return [this](client_id c) noexcept { return clients_.queue(c).attendant; };
    }
    // Makes sure that a thread watches. A thread that leaves, or brings work, calls a sleeping
    // thread, unless one of these wakes up in time by itself.
    void keep_watch() noexcept {
        if (sleepers_.empty()) return;
        if (ready_left_) return sleepers_.call_one(instant::min());
        if (watch_.is_watched()) return watch_.call_watcher(next_look());
        if (watch_.any_unwatched(attendants(), false)) return sleepers_.call_one(instant::min());
        const auto resume = next_look();
        const auto by = core_.is_held_until(resume) ? saturating_add(resume, watch_slice::patience) : resume;
        sleepers_.call_one(watch_.any_unwatched(attendants(), true) ? std::min(by, clock_.now() + watch_slice::patience)
                                                                    : by);
    }

    // ---- faults, and other ways to end without having run
    //
    //   dismiss          a waiting submission that is late, or that its holder cancels
    //   cancel_waiting   all waiting submissions of a client that closes or is refused
    //   leave_queue      a waiting submission at the gate whose thread stops waiting
    //   turn_away        the end at the gate, where the thread gives the record back
    //   end_unrun        the end in the queue
    //   cancel           an admitted submission of which nothing was enqueued (above)

    void give_up_stuck() noexcept {
        if (core_.options().stuck_after <= ns{0}) return;
        observer_.find_stuck(batches_, clock_.now(), core_.options().stuck_after, [this](submission& s) {
            core_.write_off(s.admitted, s.times);
            faulty_ = true;
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
    void note_failure(client_id c, errc code) noexcept {
        faulty_ |= core_.quarantined(c);
        if (code != errc::device_lost) return;
        faulty_ = true;
        clients_.lose_device();
        clients_.tell_of_loss(c);
        for (const auto& b : batches_.all())
            if (b.num_members > 0) clients_.tell_of_loss(b.client);
    }
    // Cancels waiting submissions of clients whose work isn't admitted any more.
    void cancel_faulty(lock_type& lock) noexcept {
        faulty_ = false;
        auto& queues = clients_.queues();
        for (std::size_t i = 0; i < queues.size(); ++i)  // others may add queues during each call
            if (const submission* const first = clients_.any_waiting(queues[i]))
                if (const auto why = clients_.refusal(first->client); why != errc::none)
                    cancel_waiting(lock, queues[i], why);
    }
    void cancel_waiting(lock_type& lock, client_queue<Stream>& client, errc why) noexcept {
        if (client.waits_for_room > 0) sleepers_.wake_all();
        fifo<submission> cancelled;
        while (submission* const s = clients_.withdraw_first(client)) {
            core_.count_cancelled(s->client, why);
            if (s->queued) {
                // It waits no more.
                s->at.store(submission_stage::admitted, std::memory_order_relaxed);
                ++client.untold;  // until the submission has ended: a close waits for that
                cancelled.push(*s);
            } else {
                turn_away(*s, why);
            }
        }
        while (submission* const s = cancelled.pop()) end_unrun(lock, *s, why);
    }
    // Ends a submission at the gate. Its thread gives the record back.
    void turn_away(submission& s, errc why) noexcept {
        s.status = why;
        s.at.store(submission_stage::done, std::memory_order_release);
        sleepers_.wake(s);
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
    // Takes the submission out of the queue, and wakes threads that wait for room.
    void leave_queue(submission& s) noexcept {
        clients_.withdraw(s, policy_time());
        if (s.queue->waits_for_room > 0) sleepers_.wake_all();
    }
    // Ends a waiting submission, which never runs.
    void dismiss(lock_type& lock, submission& s, errc why) noexcept {
        core_.count_cancelled(s.client, why);
        leave_queue(s);
        if (!s.queued) return turn_away(s, why);
        s.at.store(submission_stage::admitted, std::memory_order_relaxed);  // it waits no more
        // As in cancel_waiting().
        ++s.queue->untold;
        end_unrun(lock, s, why);
    }

    mutable std::mutex mutex_;
    Clock clock_;
    limiter_core<Policy> core_;  // learns from `clients_` which submissions wait
    admissions<Stream, Policy> clients_;
    batches<Stream> batches_;
    observer<Stream> observer_;
    span_meter meter_;
    submission_log<Stream> log_;
    typename device_watch<Stream, Clock>::sleeping_threads sleepers_;
    device_watch<Stream, Clock> watch_{batches_, observer_, sleepers_};
    // When the latest end, or one shortly before it, was noticed; see settle().
    instant last_end_{};
    // The order of a batch: once all batches up to it have ended, earlier charges are settled.
    std::uint64_t settles_after_ = 0;
    std::uint32_t num_present_ = 0;  // threads that drive or wait
    bool asking_ = false;            // a thread is asking the device, for all threads
    std::condition_variable asked_, enqueued_;
    std::uint32_t num_abandoning_ = 0;  // threads that wait for a callable to return
    // A thread left a submission or a callback to another thread.
    bool ready_left_ = false;
    callback_queue<Stream> told_;
    bool faulty_ = false;  // submissions of a client whose work isn't admitted any more may wait
    std::shared_ptr<submission_pool<Stream>> pool_ = std::make_shared<submission_pool<Stream>>();
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
    for (auto& q : clients_.queues()) cancel_waiting(lock, q, errc::closed);
    for (auto& b : batches_.all())
        for (auto* s = b.first; s != nullptr; s = s->next_member)
            if (s->queued && !s->told) finish(*s, errc::closed);
    need stay{.done = question(false)};
    if (!told_.empty()) call_back(lock, stay);
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
        pool_->drop(s);
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
        leave_queue(s);
    } else {
        why = s.status;
    }
    if (why != errc::none) batches_.give_back(s);
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
        const auto since = a.width.part() < 1 ? b.first->enqueue_began : std::max(b.first->enqueue_began, last_end_);
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
        await_turn(lock, s.admitted, stream);
    }
}

template <timeline Stream, clock Clock, compute_policy Policy>
void limiter_engine<Stream, Clock, Policy>::enqueued_by_holder(submission& s, errc status) noexcept {
    s.status = status;
    if (shares_points && s.needs_end) s.enqueue_ended = batch_time();
    if (!batches_.announce_enqueued(s) && status != errc::device_lost) return;
    lock_type lock(mutex_);
    end_batches(lock, nullptr, !sleepers_.empty());  // a sleeping thread needs a point to watch
    if (status == errc::device_lost) drive(lock, look::now);
    keep_watch();
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
    cancel(s);
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
        for (batch<Stream>* done = nullptr;; settle(*done, observer_.seen())) {
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
        while (auto* const done = observer_.next_done(batches_, now, anyway, &ask)) settle(*done, observer_.seen());
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
        dismiss(lock, s, errc::stopped);
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
    dismiss(lock, s, errc::stopped);
    drive(lock, look::now);
    return true;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
