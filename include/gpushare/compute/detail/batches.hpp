// SPDX-License-Identifier: Apache-2.0
// Puts each admitted submission in a batch, and says which points are to be recorded around it.
//
//   detail::batches<stream> batches(quantum);
//   if (batches.has_slot()) batches.take_slot();
//   // then, under no lock, the points that it asks for, and the work
//   batches.place(submission, s, now);
//   batches.enqueued(submission);  // or, by a permit's holder, under no lock: announce_enqueued()
//
// A point costs as much as a short kernel does. So short submissions of one client on one stream
// share a batch, which ends at one point. The batch ends when it is predicted to take as long as
// the limiter's quantum, when a thread waits for a member, or when other work follows on its
// stream. Members with equal facts are one record with a count, so admission costs something for
// each member, and completion only once for the batch. The device may have idled within a batch
// that ends later than predicted, or that was joined after its predicted end. Then its span is
// doubtful.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/detail/in_flight_budget.hpp>
#include <gpushare/compute/detail/limiter_clients.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The handle by which the end of a batch is recorded: empty where streams don't share their
/// timelines.
template <timeline Stream>
struct timeline_handle {
    struct type {
        [[nodiscard]] explicit operator bool() const noexcept { return false; }
    };
};
template <shared_timeline Stream>
struct timeline_handle<Stream> {
    using type = typename Stream::handle;
};

/// Consecutive submissions of one client on one stream, which share one point at their end. `phase`
/// says how far the batch has come, and has the data of that phase. The data members below `phase`
/// are valid from begin_with() on.
template <timeline Stream>
struct batch {
    static constexpr bool shares = shared_timeline<Stream>;
    static constexpr std::uint32_t most_members = 63;
    using submission = detail::submission<Stream>;
    using handle_type = typename timeline_handle<Stream>::type;
    using point = typename Stream::point;

    /// Members are enqueued, and no thread has recorded the end yet.
    struct open_phase {
        /// The next event of an open batch.
        enum class until : std::uint8_t {
            another_joins,  // more submissions may join
            // Nothing joins, since a member failed to be enqueued; the end is recorded once a
            // thread wants it.
            somebody_asks,
            end_wanted,  // nothing joins; the next thread that can do so records the end
            // Nothing joins; the thread that enqueues the latest submission records the end.
            latest_ends,
            latest_ends_wanted  // as latest_ends; if that thread fails, `end_wanted`
        };
        until next = until::latest_ends;
        std::uint32_t entering = 1;  // submissions that are being enqueued
        // Empty if only the thread that enqueues the latest submission can record the end.
        handle_type handle{};

        [[nodiscard]] bool is_left_to_latest() const noexcept { return next >= until::latest_ends; }
        [[nodiscard]] bool is_end_wanted() const noexcept {
            return next == until::end_wanted || next == until::latest_ends_wanted;
        }
        void want_end() noexcept { next = is_left_to_latest() ? until::latest_ends_wanted : until::end_wanted; }
        void member_failed() noexcept {
            if (next == until::another_joins) next = until::somebody_asks;
        }
        /// The thread that was to record the end left without doing so.
        void latest_left() noexcept {
            if (next == until::latest_ends) next = until::another_joins;
            if (next == until::latest_ends_wanted) next = until::end_wanted;
        }
    };
    /// A thread is recording the end, under no lock. If recording fails, the batch is open again.
    struct ending_phase {
        open_phase before;
    };
    /// The end is recorded.
    struct ended_phase {
        point end;
        bool watched = false;  // the watching thread has the end among its points
        // The end wasn't reached in time: the members were reported as stuck.
        bool written_off = false;
        // When the batch was first seen to be first on its stream, for write_off().
        instant head_since = never;
        instant pending_at{};  // when the end was last seen not reached
    };
    /// How much is known about the time of the batch's work. Each state includes the states before
    /// it.
    enum class timing : std::uint8_t {
        unknown,
        begun,   // the point `begin`
        placed,  // the time of that point: `when.begin`
        found    // the time of the end: `when.end`
    };

    // The first alternative: this record is free.
    std::variant<std::monostate, open_phase, ending_phase, ended_phase> phase{};
    bool known = false;          // the batch's duration can be predicted
    bool doubtful = false;       // its span may have gaps
    bool contended = false;      // something was in flight on another stream meanwhile
    bool beside_others = false;  // work of another client was in flight from the begin on
    // Another batch began behind this one before its end was recorded, so the span includes that
    // one's work.
    bool overtaken = false;
    timing timed = timing::unknown;
    client_id client{};
    priority level{};
    sm_width width{};
    std::uint64_t timeline = 0;
    // This stream waits for the batch's end, on behalf of `follower`.
    const Stream* followed_on = nullptr;
    client_id follower{};
    std::uint64_t order = 0;
    std::uint32_t num_members = 0;                 // members that are enqueued
    submission *first = nullptr, *last = nullptr;  // members
    ns predicted{};                                // the sum over the members
    // The predicted end, by the batch's own work alone.
    instant busy_until{};
    // How much later the batch ends because others' work runs alongside it.
    ns more{};
    point begin{};
    interval when{};

    [[nodiscard]] bool is_free() const noexcept { return phase.index() == 0; }
    [[nodiscard]] open_phase* open() noexcept { return std::get_if<open_phase>(&phase); }
    [[nodiscard]] const open_phase* open() const noexcept { return std::get_if<open_phase>(&phase); }
    [[nodiscard]] ended_phase* ended() noexcept { return std::get_if<ended_phase>(&phase); }
    [[nodiscard]] const ended_phase* ended() const noexcept { return std::get_if<ended_phase>(&phase); }
    /// The data of the open phase, also while a thread is recording the end.
    [[nodiscard]] open_phase* not_ended() noexcept {
        if (auto* const now = std::get_if<ending_phase>(&phase)) return &now->before;
        return open();
    }
    [[nodiscard]] bool is_written_off() const noexcept {
        const auto* const e = ended();
        return e != nullptr && e->written_off;
    }

    void begin_with(const admission& a, const Stream& s, std::uint64_t nth) noexcept {
        phase.template emplace<open_phase>();
        known = shares && a.known;
        client = a.client;
        level = a.level;
        width = a.width;
        timeline = timeline_of(s);
        followed_on = nullptr;
        order = nth;
        predicted = a.predicted;
    }

    /// Lets other submissions join, and any thread record the end. Returns false if the stream
    /// can't give a handle for that.
    [[nodiscard]] bool stay_open(const Stream& s) noexcept {
        if constexpr (shares) {
            open()->handle = s.share();
            if (open()->handle) open()->next = open_phase::until::another_joins;
        }
        return static_cast<bool>(open()->handle);
    }
    /// A thread is about to record the end of this open batch. After the predicted end the device
    /// may have idled, so the span is doubtful then.
    void begin_ending(instant now) noexcept {
        doubtful |= now > busy_until;
        open_phase before = std::move(*open());
        phase.template emplace<ending_phase>(std::move(before));
    }
    /// The thread couldn't record the end: the batch is open again.
    void reopen() noexcept {
        open_phase before = std::move(*not_ended());
        phase.template emplace<open_phase>(std::move(before));
    }
    void end_at(point end) noexcept { phase.template emplace<ended_phase>(std::move(end)); }

    [[nodiscard]] bool is_on(const Stream& s) const noexcept { return timeline == timeline_of(s); }

    [[nodiscard]] bool takes(const admission& a, ns quantum) const noexcept {
        const auto* const o = open();
        return o != nullptr && o->next == open_phase::until::another_joins && client == a.client && level == a.level &&
               width == a.width && num_members + o->entering < most_members && predicted + a.predicted <= quantum;
    }

    /// Lets `a` join. Returns whether the thread of `a` has to record the end: the batch has no
    /// room for another such submission, and no other thread is enqueuing into it.
    [[nodiscard]] bool enter(const admission& a, instant now, ns quantum) noexcept {
        auto& o = *open();
        ++o.entering;
        doubtful |= now > busy_until;
        predicted += a.predicted;
        busy_until = saturating_add(std::max(now, busy_until), a.length);
        const bool full = num_members + o.entering >= most_members || predicted + a.predicted > quantum;
        if (o.entering != 1 || !full) return false;
        o.next = open_phase::until::latest_ends;
        return true;
    }

    /// Whether the batch may be done by now, by its prediction.
    [[nodiscard]] bool is_due(instant now) const noexcept { return !known || now >= saturating_add(busy_until, more); }

    /// Whether the device hasn't reached the recorded end yet. On a backend where a query costs as
    /// much as another point, the answer comes from earlier queries and the prediction alone.
    [[nodiscard]] bool is_to_come(instant now) const noexcept {
        if constexpr (shares)
            return !known || now < busy_until;
        else
            return !ended()->end.reached();
    }

    /// Whether a thread that isn't enqueuing into the batch can record the end.
    [[nodiscard]] bool can_end() const noexcept {
        const auto* const o = open();
        return o != nullptr && static_cast<bool>(o->handle) && o->entering == 0 && num_members > 0;
    }

    /// The part of the SMs that the widest member can fill.
    [[nodiscard]] double filled() const noexcept {
        double most = 0;
        for (const auto* m = first; m != nullptr; m = m->next_member) most = std::max(most, m->filled());
        return most;
    }
    [[nodiscard]] bool holds(const submission* s) const noexcept {
        for (const auto* m = first; m != nullptr; m = m->next_member)
            if (m == s) return true;
        return false;
    }
    /// Whether a thread that waits for one of the members looks at the end.
    [[nodiscard]] bool is_looked_at() const noexcept {
        for (const auto* m = first; m != nullptr; m = m->next_member)
            if (m->looked_at > 0) return true;
        return false;
    }

    void clear() noexcept {
        phase.template emplace<std::monostate>();
        known = doubtful = contended = beside_others = overtaken = false;
        timed = timing::unknown;
        num_members = 0;
        first = last = nullptr;
        begin = {};
    }
};

/// The submissions that holders of permits have enqueued. Any thread may add one, under no lock.
/// The thread that holds the limiter's mutex takes all at once (Treiber, IBM RJ 5118, 1986). No
/// thread takes from the middle, so records can be used again.
template <timeline Stream>
class enqueued_list {
public:
    using submission = detail::submission<Stream>;

    /// Returns true if a thread waits for enqueued work: the caller then takes the mutex and
    /// reports it.
    [[nodiscard]] bool push(submission& s) noexcept {
        s.next = latest_.load(std::memory_order_relaxed);
        // release: publishes what the holder wrote. seq_cst: either the thread that enqueued sees
        // that a thread waits, or the thread that is about to wait, having said so, sees the
        // enqueued submission.
        while (!latest_.compare_exchange_weak(s.next, &s, std::memory_order_seq_cst, std::memory_order_relaxed)) {
        }
        return is_awaited();
    }

    /// Calls `f(submission)` for each submission added since the last call, in the order of
    /// enqueuing.
    template <std::invocable<submission&> F>
    void take_all(F f) noexcept {
        if (latest_.load(std::memory_order_seq_cst) == nullptr) return;
        submission* latest = latest_.exchange(nullptr, std::memory_order_acquire);
        submission* first = nullptr;
        while (latest != nullptr) {  // reverses the list
            submission* const before = std::exchange(latest->next, first);
            first = std::exchange(latest, before);
        }
        while (first != nullptr) f(*std::exchange(first, first->next));
    }

    /// Says whether threads that add submissions from now on must report them. Submissions added
    /// earlier can be taken immediately.
    void await(bool on) noexcept { awaited_.store(on, std::memory_order_seq_cst); }
    [[nodiscard]] bool is_awaited() const noexcept { return awaited_.load(std::memory_order_seq_cst); }

private:
    std::atomic<submission*> latest_{nullptr};  // the head of a list, latest first
    std::atomic<bool> awaited_{false};
};

/// The submissions in flight, in batches. All functions but announce_enqueued() are called under
/// the limiter's mutex. Allocates only if more submissions are in flight than ever before.
template <timeline Stream>
class batches {
public:
    using point = typename Stream::point;
    using batch = detail::batch<Stream>;
    using submission = detail::submission<Stream>;
    static constexpr std::size_t none = submission::no_batch;

    /// Whether streams of different clients wait for each other if their work doesn't fit side by
    /// side. Without such waits, spans would overlap and say nothing about each client's use. A
    /// device that reports the use of each client needs no such waits.
    static constexpr bool turns = joining_timeline<Stream> && !sm_timeline<Stream>;

    /// `quantum`: how long a batch may be predicted to take.
    explicit batches(ns quantum) : quantum_(quantum) {
        // With room for at least one batch, lack of memory delays waiting work but never strands
        // it. With room for this many, nothing is allocated later unless there are many levels.
        batches_.reserve(most_in_flight);
    }

    // ---- slots: each submission in flight has one, for a batch of its own

    /// Returns false only if memory runs out while other submissions are in flight.
    [[nodiscard]] bool has_slot() noexcept {
        if (slots_taken_ == batches_.capacity()) try {
                batches_.reserve(slots_taken_ * 2);
            } catch (const std::bad_alloc&) {
            }
        return slots_taken_ < batches_.capacity();
    }
    void take_slot() noexcept { ++slots_taken_; }

    /// A record for a submission at the gate, for give_back(). Throws std::bad_alloc.
    [[nodiscard]] submission& record_for_gate() {
        auto& s = at_gate_.acquire();
        s.reset(false);
        s.owners.store(1, std::memory_order_relaxed);  // relaxed: under the mutex
        return s;
    }
    /// The permit on `s` has a holder, which may ask how the work went. Call under the mutex.
    void keep_for_holder(submission& s) noexcept { s.owners.store(2, std::memory_order_relaxed); }
    /// Returns the record: its submission wasn't admitted, or its last owner has dropped it.
    void give_back(submission& s) noexcept {
        s.set_enqueuer({});
        at_gate_.release(s);
    }
    /// Whether the calling thread is in the work of a permit of `c`.
    [[nodiscard]] bool is_in_permit(client_id c) const noexcept {
        return at_gate_.any_of([=](const auto& s) { return s.is_enqueued_here() && s.admitted.client == c; });
    }
    /// Ends the time of `s` in flight. A record of the gate is free afterwards, unless a permit's
    /// holder may ask how the work went, or an exception is left to be destroyed under no lock.
    void release(submission& s) noexcept {
        --slots_taken_;
        s.begin.reset();
        s.own = {};
        if (!s.queued && !s.error && s.lose_owner()) give_back(s);
    }

    // ---- batch: which one

    /// Chooses the batch of `s`, which is about to be enqueued on `stream`. Afterwards `s` says
    /// which points to record around the work. Call after collect().
    void place(submission& s, Stream& stream, instant now) noexcept {
        const admission& a = s.admitted;
        // The usual case: another member for the batch that was joined last. A batch takes no more
        // members once another batch begins after it on its stream, or another client's batch
        // begins elsewhere.
        if (batch::shares && latest_ != none && a.may_share && batches_[latest_].is_on(stream) &&
            batches_[latest_].takes(a, quantum_))
            return join(s, latest_, now);
        const auto n = look_around(a, stream, now);
        const bool share = batch::shares && a.may_share && !n.beside;
        if (n.last != none && share && batches_[n.last].takes(a, quantum_)) {
            latest_ = n.last;
            return join(s, n.last, now);
        }
        s.batch = free_batch();
        batch& b = batches_[s.batch];
        b.begin_with(a, stream, ++order_);
        b.contended = n.elsewhere;
        b.beside_others = n.beside;
        b.more = n.beside ? stretched(a.length) - a.length : ns{0};
        const auto from = std::max(now, n.busy_until);
        b.busy_until = saturating_add(from, a.length);
        s.in_front = n.in_front;
        s.needs_begin = true;
        s.may_stay_open = share && b.stay_open(stream);
        s.needs_end = !s.may_stay_open;
        if (n.last != none) begin_behind(batches_[n.last], n.last, s, now, from);
    }
    /// Before `a` is enqueued on `s`: marks work on other streams as contended, and asks for the
    /// ends of other clients' open batches. Batches of two clients on two streams would overlap,
    /// and their points would say nothing of either. So while other clients' work is in flight
    /// elsewhere, every submission has points of its own. If clients take turns, a batch ends with
    /// the turn.
    void mark_others(const admission& a, const Stream& s) noexcept {
        collect();
        (void)look_around(a, s, instant::min());
    }
    /// Whether `a` on this stream fits side by side with all work of its level in flight on other
    /// streams.
    [[nodiscard]] bool fits_beside(const admission& a, const Stream& s) const noexcept {
        double beside = a.width.part();
        for (std::size_t i = 0; i < in_use_; ++i) {
            const batch& b = batches_[i];
            // Each stream counts once: its work runs one after the other.
            if (b.is_free() || b.level != a.level || b.is_on(s)) continue;
            const bool again = any_where(std::span(batches_).first(i),
                                         [&](const batch& o) { return !o.is_free() && o.timeline == b.timeline; });
            if (!again) beside += b.width.part();
        }
        return beside <= 1 + ratios::width_error;
    }
    /// Sets whether alike members of a batch stay apart from now on, because a thread looks at each
    /// of them.
    void keep_apart(bool each) noexcept { apart_ = each; }

    // ---- enqueue: how that went

    /// Records that `s` is on its stream. `s` becomes a member of its batch, or merges with the
    /// latest member if nothing tells the two apart. Call after collect().
    void enqueued(submission& s) noexcept {
        batch& b = batches_[s.batch];
        auto& open = *b.open();
        --open.entering;
        if (s.status != errc::none) open.member_failed();
        if (s.status == errc::device_lost) {
            open.want_end();
            want_ends();
        }
        if (s.begin) {
            if (s.ends != none) ended(s.ends, *s.begin);
            b.begin = *std::move(s.begin);
            b.timed = batch::timing::begun;
            s.begin.reset();
        }
        if (s.end) {
            ended(s.batch, *std::move(s.end));
            s.end.reset();
        } else if (s.needs_end) {  // its thread recorded none: another must, whatever came behind
            open.next = batch::open_phase::until::end_wanted;
            want_ends();
        }
        s.next_member = nullptr;
        submission* const last = b.last;
        if (b.num_members++ != 0 && !apart_ && are_alike(*last, s)) {
            last->admitted.predicted += s.admitted.predicted;
            last->admitted.length += s.admitted.length;
            ++last->times;
            return release(s);
        }
        (last == nullptr ? b.first : last->next_member) = &s;
        b.last = &s;
    }
    /// Records what the holders of permits have enqueued.
    void collect() noexcept {
        enqueued_.take_all([this](submission& s) {
            if (s.batch == none) place(s, *s.stream, {});
            enqueued(s);
        });
    }
    /// The same for a permit, called by its holder's thread under no lock. Returns true if a thread
    /// waits for it: then take the mutex and report it. keep_awaiting() says when no thread waits
    /// any longer.
    [[nodiscard]] bool announce_enqueued(submission& s) noexcept { return enqueued_.push(s); }
    /// Threads that enqueue from now on are asked to announce it; the next query sees work enqueued
    /// before.
    void await_enqueued() noexcept { enqueued_.await(true); }
    /// Unless `wanted`, no thread waits any more for announcements of enqueued work.
    void keep_awaiting(bool wanted) noexcept { enqueued_.await(wanted || ends_wanted_); }

    /// The work of `s` won't be enqueued. `s` keeps its slot.
    void take_back(submission& s) noexcept {
        batch& b = batches_[s.batch];
        if (s.ends != none) s.begin ? ended(s.ends, *std::move(s.begin)) : not_ended(s.ends);
        s.ends = none;
        s.begin.reset();
        auto& open = *b.open();
        if (s.needs_end) open.latest_left();
        b.predicted -= s.admitted.predicted;
        if (--open.entering == 0 && b.num_members == 0) b.clear();
    }

    // ---- ends: which points are still to be recorded

    /// Finds open batches whose end is wanted: the batch of `wanted`; every batch if `quiet` and
    /// there is nothing else to watch; and marked batches. The caller records a point on
    /// `handle(i)` under no lock and reports it with ended() or not_ended(). `now()` is called only
    /// if there is such a batch.
    template <std::invocable F>
    [[nodiscard]] std::size_t next_to_end(const submission* wanted, bool quiet, F now) noexcept {
        collect();
        if constexpr (batch::shares) {
            quiet = quiet && num_ended_ == 0;
            if (!quiet && wanted == nullptr && !std::exchange(ends_wanted_, false)) return none;
            for (std::size_t i = 0; i < in_use_; ++i) {
                batch& b = batches_[i];
                auto* const open = b.open();
                if (open == nullptr) continue;
                if (quiet || (wanted != nullptr && b.holds(wanted))) open->want_end();
                if (!open->is_end_wanted()) continue;
                want_ends();  // also the ends of batches behind this one
                if (!b.can_end()) continue;
                b.begin_ending(now());
                return i;
            }
        }
        return none;
    }
    [[nodiscard]] const typename batch::handle_type& handle(std::size_t i) noexcept {
        return batches_[i].not_ended()->handle;
    }
    /// A point was recorded behind the members of this batch; not_ended(): it couldn't be recorded.
    void ended(std::size_t i, point end) noexcept {
        batches_[i].end_at(std::move(end));
        // The stream waits only for members that were enqueued when it came, so it isn't counted as
        // waiting for this end.
        batches_[i].followed_on = nullptr;
        ++num_ended_;
    }
    void not_ended(std::size_t i) noexcept {
        batches_[i].reopen();
        if (batches_[i].open()->is_end_wanted()) want_ends();
    }

    // ---- for threads that observe and wait

    /// All batches in flight, and perhaps some free records.
    [[nodiscard]] std::span<batch> all() noexcept {
        collect();
        return in_use();
    }
    /// The same, without submissions that permit holders have enqueued since.
    [[nodiscard]] std::span<batch> in_use() noexcept { return {batches_.data(), in_use_}; }
    /// Whether there is a point to look at.
    [[nodiscard]] bool any_ended() noexcept {
        collect();
        return num_ended_ > 0;
    }
    /// Whether any recorded end may be reached by now.
    [[nodiscard]] bool any_due(instant now) noexcept {
        if (!any_ended()) return false;
        const auto due = [now](const batch& b) { return b.ended() != nullptr && b.is_due(now); };
        return any_where(in_use(), due);
    }
    /// Whether any open batch has enqueued members.
    [[nodiscard]] bool any_open() noexcept {
        const auto open = [](const batch& b) { return b.open() != nullptr && b.num_members > 0; };
        return any_where(all(), open);
    }
    /// Whether `b` is the oldest batch on its stream. `but_written_off`: ignores written-off
    /// batches.
    [[nodiscard]] bool is_oldest(const batch& b, bool but_written_off = false) noexcept {
        return in_use_ == 1 || !any_where(in_use(), [&](const batch& other) {
                   return other.num_members > 0 && other.timeline == b.timeline && other.order < b.order &&
                          !(but_written_off && other.is_written_off());
               });
    }
    /// The first batch that began behind `b` on its stream; null if there is none.
    [[nodiscard]] const batch* next_on_stream(const batch& b) noexcept {
        const batch* next = nullptr;
        for (const auto& other : in_use())
            if (!other.is_free() && other.timeline == b.timeline && other.order > b.order &&
                (next == nullptr || other.order < next->order))
                next = &other;
        return next;
    }
    /// Whether anything is in flight on a stream other than `b`'s that will end.
    [[nodiscard]] bool any_beside(const batch& b) noexcept {
        return in_use_ > 1 && any_where(in_use(), [&](const batch& other) {
                   return !other.is_free() && !other.is_written_off() && other.timeline != b.timeline;
               });
    }
    /// The lowest order of the batches in flight that will end; one more than the latest order if
    /// there are none.
    [[nodiscard]] std::uint64_t oldest_order() noexcept {
        std::uint64_t oldest = order_ + 1;
        for (const auto& b : in_use())
            if (!b.is_free() && !b.is_written_off()) oldest = std::min(oldest, b.order);
        return oldest;
    }
    /// The number of batches so far, which is the order of the latest batch.
    [[nodiscard]] std::uint64_t latest_order() const noexcept { return order_; }

    // ---- completion

    /// Frees `b`, whose end was observed, and returns its members. The caller passes each of them
    /// to release().
    [[nodiscard]] submission* take_members(batch& b) noexcept {
        submission* const first = b.first;
        b.clear();
        --num_ended_;
        while (in_use_ > 0 && batches_[in_use_ - 1].is_free()) --in_use_;
        return first;
    }

    /// The end of `b` wasn't reached at `now`. If it was due, the query came too early. Predictions
    /// err, and each one rests on the prediction before it. So a query that comes too early delays
    /// later queries by much, and a query in time, perhaps late, makes later ones earlier by
    /// little. Few queries then come too early, which matters because each costs as much as a
    /// launch.
    void end_was_asked_for(const batch& b, instant now) noexcept {
        if (b.known && b.is_due(now))
            shift_ends(b, now - b.busy_until + lasting(b.predicted, b.width) / too_early_part);
    }
    void end_was_seen(const batch& b, instant now) noexcept {
        if constexpr (batch::shares) {  // other backends don't predict ends
            if (turns && now < b.busy_until)
                shift_ends(b, now - b.busy_until);  // the device is free earlier than predicted
            else if (b.known)
                shift_ends(b, -lasting(b.predicted, b.width) / in_time_part);
        }
        // Alongside others' work, work of a certain cost lasts longer: they take turns, or share
        // the device. The limiter learns by how much, so that few queries for ends come too early.
        if (!b.beside_others || b.predicted <= ns{0}) return;
        const auto seen =
            static_cast<double>(b.when.length().count()) / static_cast<double>(lasting(b.predicted, b.width).count());
        stretch_ += (std::clamp(seen, 1.0, most_stretch) - stretch_) / ratios::smoothing;
    }

private:
    // The steps by which predicted ends move, as parts of a batch's length: later after a query
    // that came too early, earlier after one in time. With these, about one query in thirty comes
    // too early.
    static constexpr ns::rep too_early_part = 2, in_time_part = 64;
    // The most that one batch alongside others' work can show: one slow batch isn't believed.
    static constexpr double most_stretch = 16;

    // Marks that the end of an open batch is wanted. The end may have to wait for threads that
    // enqueue into the batch.
    void want_ends() noexcept {
        if constexpr (batch::shares)
            if (!std::exchange(ends_wanted_, true)) enqueued_.await(true);
    }

    [[nodiscard]] ns stretched(ns cost) const noexcept {
        constexpr double almost_for_ever = 9e18;
        return ns{static_cast<ns::rep>(std::min(static_cast<double>(cost.count()) * stretch_, almost_for_ever))};
    }

    void shift_ends(const batch& from, ns by) noexcept {
        for (auto& b : in_use())
            if (!b.is_free() && b.order >= from.order &&
                (b.timeline == from.timeline || (turns && b.level == from.level)))
                b.busy_until = saturating_add(b.busy_until, by);
    }

    // The work in flight on other streams, and the last batch on this one.
    struct surroundings {
        std::size_t last = none;
        bool elsewhere = false;
        bool beside = false;  // work of other clients runs alongside it, not in turn
        ns in_front{};        // the predicted time of all work that runs before it
        // When others' work in turn is predicted to end, at most a quantum from now.
        instant busy_until = instant::min();
    };
    surroundings look_around(const admission& a, const Stream& s, instant now) noexcept {
        surroundings n;
        const bool in_turn = turns && !fits_beside(a, s);
        std::uint64_t order = 0;
        for (std::size_t i = 0; batch & b : in_use()) {
            const auto at = i++;
            if (b.is_free()) continue;
            if (b.is_on(s)) {
                n.in_front = saturating_add(n.in_front, b.predicted);
                if (b.order > order) n.last = at;
                order = std::max(order, b.order);
                continue;
            }
            n.elsewhere = b.contended = true;
            if (b.client == a.client) continue;
            if (in_turn && b.level == a.level) {
                n.in_front = saturating_add(n.in_front, b.predicted);
                n.busy_until = std::max(n.busy_until, std::min(b.busy_until, saturating_add(now, quantum_)));
            } else {
                n.beside = true;
            }
            if (auto* const open = b.not_ended()) {
                open->want_end();
                want_ends();
            }
        }
        return n;
    }

    // The point at its begin may be the end of the batch before it.
    void begin_behind(batch& before, std::size_t index, submission& s, instant now, instant from) noexcept {
        batch& b = batches_[s.batch];
        if (const auto* const e = before.ended(); e != nullptr && before.is_to_come(now)) {
            b.begin = e->end;  // as good a begin as a point of its own
            b.timed = batch::timing::begun;
            s.needs_begin = false;
        } else if (before.can_end()) {
            before.begin_ending(now);
            s.ends = index;
        } else if (auto* const open = before.open(); open != nullptr && !open->is_left_to_latest()) {
            // A thread is enqueuing into that batch, so its end can only be recorded later.
            open->want_end();
            before.overtaken = true;
            want_ends();
        }
        b.busy_until = saturating_add(std::max(from, before.busy_until), s.admitted.length);
    }

    void join(submission& s, std::size_t into, instant now) noexcept {
        batch& b = batches_[into];
        s.needs_end = b.enter(s.admitted, now, quantum_);
        s.batch = into;
        s.needs_begin = false;
        s.may_stay_open = true;
    }

    // Whether two submissions at the gate can be one record: equal facts, no error, and no holder
    // that may ask how the work went.
    [[nodiscard]] static bool are_alike(const submission& a, const submission& b) noexcept {
        // Such a device reports failures for each submission.
        if (telling_timeline<Stream>) return false;
        const auto is_plain = [](const submission& s) {
            return !s.queued && s.status == errc::none && !s.has_holder();
        };
        return is_plain(a) && is_plain(b) && a.admitted.key == b.admitted.key &&
               a.admitted.longest == b.admitted.longest && a.admitted.policy == b.admitted.policy &&
               a.admitted.lent == b.admitted.lent && a.admitted.timeline == b.admitted.timeline &&
               a.admitted.width == b.admitted.width && a.admitted.of_request == b.admitted.of_request &&
               a.fills == b.fills;
    }

    [[nodiscard]] std::size_t free_batch() noexcept {
        for (std::size_t i = 0; i < in_use_; ++i)
            if (batches_[i].is_free()) return i;
        // Within the memory that has_slot() reserved.
        if (in_use_ == batches_.size()) batches_.emplace_back();
        return in_use_++;
    }

    std::vector<batch> batches_;
    std::size_t in_use_ = 0;     // the first records of `batches_`
    std::size_t num_ended_ = 0;  // batches whose end is recorded
    std::size_t slots_taken_ = 0;
    std::size_t latest_ = none;  // the batch that was joined last
    bool ends_wanted_ = false;   // an open batch may be marked
    bool apart_ = false;
    std::uint64_t order_ = 0;
    double stretch_ = 1;  // length against cost of a batch alongside others' work
    ns quantum_;
    enqueued_list<Stream> enqueued_;
    pool<submission> at_gate_;
};

/// Finds the first batch numbered above `after` whose end `s` has to await before `a` is enqueued
/// there (batches::turns). The batch counts as awaited from then on; an open one counts so until it
/// ends. Batches that another thread is about to enqueue aren't considered, nor are written-off
/// ones. If each client has one stream, one wait for each change of clients is enough, and the
/// previous client's wait needn't be repeated.
template <timeline Stream>
[[nodiscard]] batch<Stream>* turn_before(std::span<batch<Stream>> in_flight, std::uint64_t after, const admission& a,
                                         const Stream& s) noexcept {
    batch<Stream>* first = nullptr;
    for (auto& b : in_flight) {
        if (b.is_free()) continue;
        const auto* const open = b.not_ended();
        if (open != nullptr && (b.num_members == 0 || !static_cast<bool>(open->handle) || b.is_on(s))) continue;
        if (b.order <= after || b.client == a.client || b.level != a.level || b.is_written_off()) continue;
        // This stream waits for that batch already; or another client's stream does, for which this
        // stream waits.
        if (b.followed_on != nullptr && (b.followed_on == &s || b.follower != a.client)) continue;
        if (first == nullptr || b.order < first->order) first = &b;
    }
    if (first == nullptr) return nullptr;
    first->followed_on = &s;
    first->follower = a.client;
    return first;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
