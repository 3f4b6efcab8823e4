// SPDX-License-Identifier: Apache-2.0
// The queues of waiting submissions, one per client. They tell every change to the core, which
// decides what is admitted next. Used under the limiter's mutex.
//
//   detail::admissions<stream, policy> queues(core);
//   queues.describe(submission, c, options, now);   queues.arrive(submission, now);
//   if (admission a; core.is_ready(a, now)) queues.admit(queues.first_of(a.client), a, now);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <thread>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/detail/stable_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// How long a client's callables or callbacks take the thread that runs them. A value.
class time_in_code {
public:
    static constexpr ns short_time{100'000};

    void learn(ns took) noexcept {
        took = std::max(took, ns{1});
        usual_ += usual_ == ns{0} ? took : (took - usual_) / 8;
        longest_ = std::max(took, longest_ - longest_ / 16);
    }
    /// Whether none of the last dozens was longer than `short_time`. A long callable that is taken
    /// for short makes other threads wait; a short one that is taken for long costs only a wake-up.
    [[nodiscard]] bool are_short() const noexcept { return longest_ > ns{0} && longest_ <= short_time; }
    [[nodiscard]] bool are_long() const noexcept { return usual_ > short_time; }

private:
    ns usual_{}, longest_{};  // the smoothed mean, and the longest, which fades; 0: none was seen
};

/// One client's waiting submissions in order of arrival, and the state of this queue that the
/// limiter's threads share.
template <timeline Stream>
struct client_queue {
    fifo<submission<Stream>> waiting;
    // While the client sleeps: all its waiting submissions, of which the core knows none.
    fifo<submission<Stream>> held;
    std::uint32_t num_held = 0;
    bool asleep = false, refuses = false;  // `refuses`: while asleep, new submissions are refused
    std::uint64_t dropped = 0;             // submissions that were too late
    usual_enqueue_time enqueue_time;
    time_in_code callables, callbacks;
    // The thread that waited for the client's latest completed submission and watched its end, if
    // one did.
    std::thread::id attendant{};
    std::uint32_t waits_for_room = 0;  // threads
    // Threads that wait until all work of the client has ended, to close it or to put it to sleep.
    std::uint32_t waits_for_end = 0;
    std::uint32_t untold = 0;  // callbacks that are due or running
    priority own_level{};
    // The levels of its open requests. no_priority: the request has no level of its own.
    plain_list<priority> requests{};
    bool told_of_loss = false;

    /// Resets the queue for a new client with this index.
    void begin(priority level) noexcept {
        enqueue_time = {};
        callables = callbacks = {};
        attendant = {};
        own_level = level;
        requests.clear();
        told_of_loss = asleep = refuses = false;
        dropped = 0;
    }
    /// Queues `s` behind the submissions of its level and above. Returns whether `s` now comes
    /// before others that were already waiting.
    [[nodiscard]] bool insert(submission<Stream>& s) noexcept {
        const auto* const first = waiting.front();
        const auto level_of = [&](const auto& one) { return one.level != no_priority ? one.level : own_level; };
        waiting.insert(s, [&, own = level_of(s)](const auto& other) { return level_of(other) < own; });
        return first != nullptr && waiting.front() == &s;
    }
};

/// Waiting submissions that are dropped when they are late, the most urgent first. So the limiter
/// reports each of them at its deadline, not at its turn. A binary heap by `drop_at`. Each
/// submission knows its place, from 1 on, in `in_deadlines`; 0: the submission isn't in the heap.
/// Allocates only if more submissions wait than ever before.
template <class Submission>
class waiting_deadlines {
public:
    /// Does nothing if the submission is in the heap already. If memory runs out, the submission
    /// learns only at its turn that it is late.
    void add(Submission& s) noexcept {
        if (s.in_deadlines != 0) return;
        try {
            heap_.push_back(&s);
        } catch (const std::bad_alloc&) {
            return;
        }
        settle(heap_.size() - 1, s);
    }
    /// Does nothing if the submission isn't in the heap.
    void drop(Submission& s) noexcept {
        if (s.in_deadlines == 0) return;
        const auto at = std::exchange(s.in_deadlines, 0) - 1;
        Submission& last = *heap_.back();
        heap_.pop_back();
        if (&last != &s) settle(at, last);
    }
    /// The earliest `drop_at`; `never` if the heap is empty.
    [[nodiscard]] instant next() const noexcept { return heap_.empty() ? never : heap_.front()->drop_at; }
    /// A submission that is late by now; null if there is none.
    [[nodiscard]] Submission* first_at(instant now) const noexcept { return next() <= now ? heap_.front() : nullptr; }

private:
    void set(std::size_t at, Submission& s) noexcept {
        heap_[at] = &s;
        s.in_deadlines = at + 1;
    }
    // Fills the hole at `at`: moves it to the place of `s`, and puts `s` there.
    void settle(std::size_t at, Submission& s) noexcept {
        while (at > 0 && s.drop_at < heap_[(at - 1) / 2]->drop_at) {
            set(at, *heap_[(at - 1) / 2]);
            at = (at - 1) / 2;
        }
        for (auto child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
            if (child + 1 < heap_.size() && heap_[child + 1]->drop_at < heap_[child]->drop_at) ++child;
            if (s.drop_at <= heap_[child]->drop_at) break;
            set(at, *heap_[child]);
            at = child;
        }
        set(at, s);
    }

    plain_list<Submission*> heap_;
};

template <timeline Stream, compute_policy Policy>
class admissions {
public:
    using submission = detail::submission<Stream>;

    /// `core` makes the decisions and must outlive this object. The owner of both calls `core`
    /// directly for anything that changes no queue.
    explicit admissions(limiter_core<Policy>& core) noexcept : core_(core) {}

    [[nodiscard]] client_queue<Stream>& queue(client_id c) noexcept { return queues_[c.index]; }
    [[nodiscard]] const client_queue<Stream>& queue(client_id c) const noexcept { return queues_[c.index]; }
    /// All queues, by the client's index. References stay valid while the mutex is released,
    /// although queues may be added then.
    [[nodiscard]] stable_list<client_queue<Stream>>& queues() noexcept { return queues_; }

    // ---- clients and their levels

    [[nodiscard]] client_id add(const client_settings& s) {
        while (queues_.size() <= core_.num_indices()) queues_.emplace_back();
        const auto c = core_.add(s);
        queue(c).begin(s.level);
        return c;
    }
    failure change(client_id c, const client_settings& s) {
        if (!core_.contains(c)) return {errc::closed};
        const auto why = core_.change(c, s);
        if (why != errc::none) return why;
        queue(c).own_level = s.level;
        // The core has counted the first one by the earlier settings.
        if (const auto* const first = queue(c).waiting.front()) core_.set_first(c, {}, &first->facts);
        return why;
    }
    /// Begins a request at `level`, or at none of its own. Throws std::bad_alloc.
    errc begin_request(client_id c, priority level) {
        if (!core_.contains(c)) return errc::closed;
        queue(c).requests.push_back(level);
        return errc::none;
    }
    void end_request(client_id c, priority level) noexcept {
        auto& open = queue(c).requests;
        const auto found = std::ranges::find(open, level);
        if (found != open.end()) open.erase(found);
        if (open.empty())
            core_.end_request(c);
        else if (!has_request(c, core_.request_level(c, level)))
            core_.end_request(c, level);
    }
    /// Whether a request of `c` is open whose submissions go at this level.
    [[nodiscard]] bool has_request(client_id c, priority at) const noexcept {
        return any_where(queue(c).requests, [&](priority level) { return core_.request_level(c, level) == at; });
    }

    // ---- sleep

    /// Admits nothing of `c` until wake(). Waiting submissions stay; new ones queue behind them or
    /// are refused, as `what_waits` says.
    void sleep(client_id c, while_asleep what_waits) noexcept {
        auto& q = queue(c);
        q.refuses = what_waits == while_asleep::refuse;
        if (std::exchange(q.asleep, true)) return;
        for (auto* s = leave_first(q); s != nullptr; s = leave_first(q)) hold(*s);
    }
    void wake(client_id c, instant now) noexcept {
        auto& q = queue(c);
        q.asleep = q.refuses = false;
        q.num_held = 0;
        while (submission* const s = q.held.pop()) arrive(*s, now);
    }

    // ---- arrival

    /// The reason why nothing of `c` is admitted; errc::none if there is none.
    [[nodiscard]] errc refusal(client_id c) const noexcept {
        const auto why = core_.refusal(c);
        if (why == errc::closed) return why;
        if (lost_) return errc::device_lost;
        return queue(c).refuses ? errc::asleep : why;
    }
    /// The reason why `c` can't queue one more submission; errc::none if there is none.
    [[nodiscard]] errc no_entry(client_id c) const noexcept {
        if (const auto why = refusal(c); why != errc::none) return why;
        return core_.is_full(c, queue(c).num_held) ? errc::queue_full : errc::none;
    }
    /// Sets the client of `s` and the facts about it.
    void describe(submission& s, client_id c, const submit_options& o, instant now) noexcept {
        s.client = c;
        s.queue = &queue(c);
        const priority at = level_of(c, o);
        s.level = at == no_priority ? at : o.priority;  // the order within its client's queue
        s.drop_at = o.drop_if_late ? o.deadline : never;
        s.facts = {.head = {.cost = o.cost,
                            .remaining = o.remaining,
                            .arrival = now,
                            .deadline = o.deadline,
                            .key = o.key,
                            .level = at},
                   .bound = core_.bound_of(c, o.key, o.width, at),
                   .late_at = s.drop_at,
                   .width = o.width,
                   .timeline = s.queued ? timeline_of(*s.stream) : 0,
                   .of_request = o.of_request};
    }
    /// Queues `s` by its level among its client's submissions. Call after describe(), and only if
    /// no_entry() returns errc::none.
    void arrive(submission& s, instant now) noexcept {
        auto& q = *s.queue;
        if (s.drop_at != never) late_.add(s);
        if (q.asleep) return hold(s);
        core_.arrive(s.client, now, &s.facts);
        if (q.insert(s)) core_.set_first(s.client, now, &s.facts);
    }
    /// describe() and arrive() for a thread at the gate. Call only if no_entry() returns
    /// errc::none. Returns true if no other submission waits and there is room: then the submission
    /// is admitted.
    [[nodiscard]] bool arrive_and_pass(submission& s, client_id c, const submit_options& o, instant now) noexcept {
        const bool plain = &o == &no_options;
        if (!plain) describe(s, c, o, now);
        if (queue(c).asleep || (!plain && (o.priority != no_priority || o.drop_if_late))) {
            if (plain) describe(s, c, o, now);
            arrive(s, now);
            return false;
        }
        if (core_.pass(s.admitted, c, now, plain ? nullptr : &s.facts)) {
            if (plain) s.facts.head.arrival = now;
            return true;
        }
        if (plain) describe(s, c, o, now);
        (void)s.queue->insert(s);
        // The core doesn't know these facts yet, such as the bound.
        if (s.queue->waiting.front() == &s) core_.set_first(c, now, &s.facts);
        return false;
    }
    /// Takes `s` out of its queue: it was not admitted.
    void withdraw(submission& s, instant now) noexcept {
        auto& q = *s.queue;
        late_.drop(s);
        if (q.asleep) {
            q.held.remove(s);
            --q.num_held;
            return;
        }
        q.waiting.remove(s);
        core_.withdraw(s.client, now, first_facts());
    }
    /// Withdraws the first waiting submission of this client; null if none is left.
    [[nodiscard]] submission* withdraw_first(client_queue<Stream>& q) noexcept {
        submission* const s = q.asleep ? q.held.pop() : leave_first(q);
        if (s == nullptr) return nullptr;
        if (q.asleep) --q.num_held;
        late_.drop(*s);
        return s;
    }
    /// The first waiting submission; null if none waits.
    [[nodiscard]] const submission* any_waiting(const client_queue<Stream>& q) const noexcept {
        return q.asleep ? q.held.front() : q.waiting.front();
    }
    /// The account of `c`.
    [[nodiscard]] client_usage usage(client_id c) const noexcept {
        auto all = core_.usage(c);
        all.waiting += queue(c).num_held;
        all.dropped = queue(c).dropped;
        return all;
    }

    /// The earliest time at which a waiting submission is dropped as late; `never` if there is
    /// none.
    [[nodiscard]] instant next_late() const noexcept { return late_.next(); }
    /// A waiting submission that is to be dropped as late by now; null if there is none.
    [[nodiscard]] submission* late_at(instant now) const noexcept { return late_.first_at(now); }

    /// The time for calls that take a `now`, or instant{} if nothing needs the time: reading a
    /// clock costs as much as the rest of a permit. `logged`: the log needs it.
    template <clock Clock>
    [[nodiscard]] instant policy_time(const Clock& time, bool logged) const noexcept {
        return !is_timeless<Policy> || core_.holds_back() || logged || next_late() != never ? time.now() : instant{};
    }

    // ---- admission

    [[nodiscard]] submission& first_of(client_id c) noexcept { return *queue(c).waiting.front(); }
    /// Among the waiting submissions of `c`, moves the first one for an idle stream (nothing in
    /// flight) ahead of the others, which keep their order, so each stream's order is unchanged.
    /// Looks at the first 64 only; false if none of them qualifies.
    bool bring_forward(client_id c, instant now) noexcept {
        constexpr int most = 64;
        auto& waiting = queue(c).waiting;
        submission* const first = waiting.front();
        submission* s = first->next;
        for (int i = 0; s != nullptr && i < most; s = s->next, ++i) {
            if (s->facts.timeline == first->facts.timeline || !core_.is_idle(s->facts.timeline, c)) continue;
            waiting.remove(*s);
            waiting.push_front(*s);
            core_.set_first(c, now, &s->facts);
            return true;
        }
        return false;
    }
    /// Admits `s`, the first waiting submission of its client. `a`: the core's description of it.
    void admit(submission& s, const admission& a, instant now) noexcept {
        (void)s.queue->waiting.pop();
        late_.drop(s);
        s.admitted = a;
        core_.admit(s.admitted, now, first_facts());
    }

    // ---- faults

    /// From now on nothing is admitted.
    void lose_device() noexcept { lost_ = true; }
    /// Reports each client that had work in flight when the device was lost, once. It doesn't
    /// report a client that has left this work behind, since another client may have its index.
    void tell_of_loss(client_id c) noexcept {
        if (!core_.contains(c)) return;
        if (!std::exchange(queue(c).told_of_loss, true))
            core_.report({.what = limiter_event::kind::device_lost, .client = c});
    }

private:
    // The level of a submission, at most its client's ceiling, which no submission may exceed. If a
    // request's level is below its client's level, the client's level counts.
    [[nodiscard]] priority level_of(client_id c, const submit_options& o) const noexcept {
        const auto& its = core_.settings(c);
        if (o.of_request && o.priority < its.level) return no_priority;
        return std::min(o.priority, std::max(its.level, its.ceiling));
    }
    void hold(submission& s) noexcept {
        s.queue->held.push(s);
        ++s.queue->num_held;
    }
    [[nodiscard]] submission* leave_first(client_queue<Stream>& q) noexcept {
        submission* const s = q.waiting.pop();
        if (s == nullptr) return nullptr;
        core_.withdraw(s->client);
        return s;
    }

    [[nodiscard]] auto first_facts() noexcept {
        return [this](client_id c) noexcept { return first_of(c).facts; };
    }

    limiter_core<Policy>& core_;
    stable_list<client_queue<Stream>> queues_;
    waiting_deadlines<submission> late_;
    bool lost_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
