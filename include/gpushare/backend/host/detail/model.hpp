// SPDX-License-Identifier: Apache-2.0
// The model of a host node: streams, devices, the blocks that occupy their SMs, and when each event
// happens. The model has no thread, lock or clock: its driver passes the time and asks for blocks
// to run.
//
// Every block has a start and an end on its device's timeline. Ends are processed in the order of
// their times. If an end lets other work start, that work begins at the time of the end, even if
// the driving thread is late. So delays of the operating system don't add up, and opaque work
// behaves as in a simulation with real submission times. Real time enters only through submissions,
// and through kernels that compute for longer than their hold.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <gpushare/backend/host/detail/work.hpp>
#include <gpushare/backend/host/memory.hpp>
#include <gpushare/backend/host/point.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/detail/stable_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {
namespace detail {

/// Objects whose destructors run user code: collected under the lock, emptied without it.
struct leavings {
    gpushare::detail::fifo<operation> operations;
    gpushare::detail::fifo<point_state> points;
    gpushare::detail::fifo<outcome_state> outcomes;

    [[nodiscard]] bool empty() const noexcept { return operations.empty() && points.empty() && outcomes.empty(); }
};

/// Times passed in never go back. After a change, call `settle`, which starts and ends all work
/// that can start or end now.
class model {
public:
    model(const node_options& options, point_hub& hub);
    model(const model&) = delete;
    model& operator=(const model&) = delete;

    [[nodiscard]] gpushare::detail::stable_list<device_state>& devices() noexcept { return devices_; }

    // --- time

    /// Processes all ends up to `now`. At one instant, ends come before starts.
    void advance(instant now) noexcept;

    void settle(instant now) noexcept;
    /// The next known end of a block; `never` if there is none.
    [[nodiscard]] instant next_event() const noexcept { return events_.next(); }

    /// Collects the waiters to wake for reached points. Call before the lock is released:
    /// afterwards the waiters may be gone.
    void wake_waiters(wake_list& woken) noexcept;

    // --- blocks to run

    [[nodiscard]] bool has_claimed() const noexcept { return !claimed_.empty(); }
    /// An SM whose blocks the caller must run before it calls `finish`; null if there is none.
    [[nodiscard]] sm_state* take_claimed() noexcept { return claimed_.pop(); }

    /// The blocks of `sm` have been computed, and its edges say from when to when they occupy it.
    void finish(sm_state& sm, std::exception_ptr& thrown, instant now) noexcept;

    /// Pauses an SM whose one block is running, to run a waiting block of a higher level there.
    /// Call finish_nested() afterwards. Once no such block is left, the state of `sm` is as before,
    /// except for the time.
    [[nodiscard]] bool pause(sm_state& sm, const operation& paused, instant now) noexcept;
    void finish_nested(sm_state& sm, std::exception_ptr& thrown) noexcept;

    // --- streams

    [[nodiscard]] stream_state& open_stream(std::uint32_t device, priority level, std::uint32_t tag,
                                            std::uint32_t part = 0);

    /// Removes the stream once its queue is empty. Returns the failure, which no thread will read.
    std::exception_ptr close_stream(stream_state& s) noexcept;

    /// Queues `op` behind all work of the stream. `by`: the thread that owns the work.
    void submit(stream_state& s, operation& op, instant now, std::thread::id by = {}) noexcept;

    /// Records `p`, which is reached when all present work of the stream is done. Takes over one
    /// reference.
    void record(stream_state& s, point_state& p, instant now, std::thread::id by = {}) noexcept;

    // --- the owners of work

    /// Work that thread `by` enqueues from now on reports its failures to `o`.
    static void begin_work(stream_state& s, outcome_state& o, std::thread::id by) noexcept;
    /// Ends begin_work().
    void end_work(stream_state& s, outcome_state& o) noexcept;

    // --- partitions

    /// Sets SMs apart; at least this many must be in no partition. The caller must call
    /// leave_partition in the end.
    [[nodiscard]] std::uint32_t open_partition(std::uint32_t device, std::uint32_t sms);
    /// Removes a user. When the last one leaves, the SMs are in no partition again.
    void leave_partition(device_state& d, std::uint32_t part) noexcept;
    [[nodiscard]] const std::vector<std::unique_ptr<stream_state>>& streams() const noexcept { return streams_; }

    // --- faults

    /// Keeps the head of `s` from starting, unless it has started.
    void stall(stream_state& s) noexcept;
    void resume(stream_state& s, instant now) noexcept;
    /// Fails all work of `d`, started or not. SMs are held no longer.
    void lose(device_state& d, instant now) noexcept;

    // --- pools

    [[nodiscard]] gpushare::detail::pool<operation>& operations() noexcept { return operations_; }
    /// Objects left for the caller to destroy without the lock.
    [[nodiscard]] leavings& left() noexcept { return left_; }

private:
    /// Gives free SMs the next work of their devices.
    void assign(instant at) noexcept;

    /// The blocks of an SM have ended.
    void retire(sm_state& sm) noexcept;
    /// Accounts the time of the SM's blocks; the last one ran until `end`.
    static void account(sm_state& sm, instant end) noexcept;
    void ended(operation& op, std::uint32_t blocks, instant at) noexcept;
    static void share(outcome_state& o) noexcept;
    /// The owner of the thread's work, with a reference. For a thread without work of its own
    /// there, such as a helper of another thread, the owner that began last.
    [[nodiscard]] static outcome_state* owner_on(const stream_state& s, std::thread::id by) noexcept;
    /// Records the failure of `op` at its owner, and at the pieces of work that contain it; if the
    /// owner is uncertain, at all candidates. The stream records every failure, for points outside
    /// every own_work. Afterwards `op` holds the objects to destroy without the lock.
    static void note_end(operation& op) noexcept;

    static void keep(operation& op, std::exception_ptr& thrown) noexcept;
    // relaxed: a block that sees the value late yields later, and acts under the lock.
    static void tell_who_waits(device_state& d) noexcept;

    /// Starts the head of `s` if it may start, and then work of other streams that can start
    /// because of that. `s` may be gone afterwards.
    void start(stream_state& s) noexcept;
    void start_all() noexcept;

    void start_head(stream_state& s) noexcept;

    /// Completes `op`, the head of its stream, at the time `at`.
    void complete(operation& op, instant at) noexcept;

    void reach(stream_state& s, point_state& p, instant at) noexcept;

    /// Gives up the head of `s`: blocks that have started end, and the others never start.
    void give_up_head(stream_state& s) noexcept;

    /// The same as `drop`, under the lock.
    void drop_locked(point_state& p) noexcept;
    void drop_locked(outcome_state& o) noexcept;

    gpushare::detail::pool<point_state>& points_;
    gpushare::detail::pool<outcome_state>& outcomes_;
    gpushare::detail::pool<operation> operations_;
    gpushare::detail::stable_list<device_state> devices_;
    std::vector<std::unique_ptr<stream_state>> streams_;
    gpushare::detail::fifo<stream_state> startable_;  // empty between calls
    gpushare::detail::fifo<sm_state> claimed_;        // SMs whose blocks wait to be run
    gpushare::detail::fifo<waiter> woken_;            // waiters whose points were reached
    event_queue events_;
    leavings left_;
    std::uint64_t claims_ = 0;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE model::model(const node_options& options, point_hub& hub)
    : points_(hub.points), outcomes_(hub.outcomes), events_(std::size_t{options.devices} * options.sms) {
    for (std::uint32_t i = 0; i < options.devices; ++i) devices_.emplace_back(options);
}

GPUSHARE_INLINE void model::advance(instant now) noexcept {
    while (events_.next() <= now) {
        const instant at = events_.next();
        do retire(events_.pop());
        while (events_.next() == at);
        assign(at);
    }
}

GPUSHARE_INLINE void model::settle(instant now) noexcept {
    assign(now);
    advance(now);
}

GPUSHARE_INLINE void model::wake_waiters(wake_list& woken) noexcept {
    while (waiter* const w = woken_.pop()) woken.add(w->woken);
}

GPUSHARE_INLINE void model::finish(sm_state& sm, std::exception_ptr& thrown, instant now) noexcept {
    keep(*sm.work, thrown);
    events_.push(sm);
    if (sm.device->lost.load(std::memory_order_relaxed)) events_.cut(*sm.device, now);
}

GPUSHARE_INLINE bool model::pause(sm_state& sm, const operation& paused, instant now) noexcept {
    const auto claim = sm.device->order.next_above(paused.stream->level, sm.index);
    if (!claim) return false;
    if (sm.work == &paused) account(sm, now);
    sm.work = claim->work;
    sm.first = claim->first;
    sm.count = claim->count;
    sm.edges[0] = now;
    claim->work->claimed += claim->count;
    tell_who_waits(*sm.device);
    return true;
}

GPUSHARE_INLINE void model::finish_nested(sm_state& sm, std::exception_ptr& thrown) noexcept {
    operation& op = *sm.work;
    keep(op, thrown);
    account(sm, sm.end());
    ended(op, sm.count, sm.end());
}

GPUSHARE_INLINE auto model::open_stream(std::uint32_t device, priority level, std::uint32_t tag, std::uint32_t part)
    -> stream_state& {
    device_state& d = devices_[device];
    d.order.reserve(streams_.size() + 1);
    streams_.push_back(std::make_unique<stream_state>());
    stream_state& s = *streams_.back();
    s.device = &d;
    s.level = level;
    s.tag = tag;
    s.part = part;
    s.sms = part == 0 ? d.order.sms() : d.order.size_of(part);
    if (part != 0) ++d.users[part];
    s.index = streams_.size() - 1;
    return s;
}

GPUSHARE_INLINE std::exception_ptr model::close_stream(stream_state& s) noexcept {
    std::exception_ptr unread = std::exchange(s.exception, nullptr);
    s.closed = true;
    start(s);
    return unread;
}

GPUSHARE_INLINE void model::submit(stream_state& s, operation& op, instant now, std::thread::id by) noexcept {
    op.stream = &s;
    op.owner = owner_on(s, by);
    op.for_another = op.owner != nullptr && op.owner->by != by;
    op.not_before = now;
    op.wanted = op.blocks;
    op.claimed = op.ended = 0;
    op.ready = op.start = op.end = instant{};
    op.status = errc::none;
    op.unexecuted.store(op.blocks, std::memory_order_relaxed);  // relaxed: published by the lock
    if (op.cooperative) op.barrier.reset(op.blocks);
    s.queue.push(op);
    start(s);
}

GPUSHARE_INLINE void model::record(stream_state& s, point_state& p, instant now, std::thread::id by) noexcept {
    p.recorded = now;
    p.within = owner_on(s, by);
    if (operation* const last = s.queue.back()) {
        last->points.push(p);
        return;
    }
    reach(s, p, now);
    start_all();  // streams that waited for a point of prepare()
}

GPUSHARE_INLINE void model::begin_work(stream_state& s, outcome_state& o, std::thread::id by) noexcept {
    o.by = by;
    o.status = errc::none;
    o.beside = s.latest;
    if (o.beside != nullptr) share(*o.beside);
    s.latest = &o;
}

GPUSHARE_INLINE void model::end_work(stream_state& s, outcome_state& o) noexcept {
    if (s.latest == &o) {
        s.latest = o.beside;
        return;
    }
    outcome_state* later = s.latest;  // another thread's work
    while (later->beside != &o) later = later->beside;
    later->beside = o.beside;
    if (o.beside != nullptr) share(*o.beside);
    drop_locked(o);  // not the last reference: the thread that ends the work has one
}

GPUSHARE_INLINE std::uint32_t model::open_partition(std::uint32_t device, std::uint32_t sms) {
    device_state& d = devices_[device];
    d.users.reserve(d.users.size() + 2);
    const std::uint32_t part = d.order.set_apart(sms);
    if (d.users.size() <= part) d.users.resize(part + std::size_t{1});
    d.users[part] = 1;
    return part;
}

GPUSHARE_INLINE void model::leave_partition(device_state& d, std::uint32_t part) noexcept {
    if (part != 0 && --d.users[part] == 0) d.order.put_back(part);
}

GPUSHARE_INLINE void model::stall(stream_state& s) noexcept {
    s.stalled = true;
    operation* const head = s.queue.front();
    if (s.busy && head->awaited == nullptr && head->claimed == 0) {
        s.device->order.withdraw(head);
        s.busy = false;
    }
}

GPUSHARE_INLINE void model::resume(stream_state& s, instant now) noexcept {
    s.stalled = false;
    if (operation* const head = s.queue.front(); head != nullptr && !s.busy) head->not_before = now;
    start(s);
}

GPUSHARE_INLINE void model::lose(device_state& d, instant now) noexcept {
    // Release: pairs with the kernels' acquire.
    if (d.lost.exchange(true, std::memory_order_release)) return;
    d.lost_since = now;
    d.memory.lose();
    events_.cut(d, now);
    for (const auto& s : streams_)
        if (s->device == &d && s->busy) give_up_head(*s);
    // Done last, because this completes work, and streams of this device may wait for each other.
    for (const auto& s : streams_)
        if (s->device == &d && !s->busy) startable_.push(*s);
    start_all();
}

GPUSHARE_INLINE void model::assign(instant at) noexcept {
    for (device_state& d : devices_) {
        while (const auto claim = d.order.next()) {
            operation& op = *claim->work;
            sm_state& sm = d.sms[claim->sm];
            if (op.cooperative && claim->first == 0) op.start = d.all_free_since(op.stream->part);
            sm.work = &op;
            sm.first = claim->first;
            sm.count = claim->count;
            sm.order = ++claims_;
            op.claimed += claim->count;
            sm.edges[0] = std::max({at, op.ready, op.start, sm.free_since});
            for (std::uint32_t i = 0; i < sm.count; ++i) sm.edges[i + 1] = saturating_add(sm.edges[i], op.hold);
            if (op.body)
                claimed_.push(sm);
            else
                events_.push(sm);
        }
        tell_who_waits(d);
    }
}

GPUSHARE_INLINE void model::retire(sm_state& sm) noexcept {
    account(sm, sm.end());
    operation& op = *std::exchange(sm.work, nullptr);
    sm.free_since = sm.end();
    sm.device->order.release(sm.index);
    ended(op, sm.count, sm.end());
}

GPUSHARE_INLINE void model::account(sm_state& sm, instant end) noexcept {
    sm.edges[sm.count] = end;
    stream_state& s = *sm.work->stream;
    for (std::uint32_t i = 0; i < sm.count; ++i)
        sm.device->ledger.record({s.tag, sm.index, sm.edges[i], sm.edges[i + 1]});
    const ns used = end - sm.edges[0];
    s.used += used;
    s.wide += static_cast<double>(used.count()) * std::min(sm.work->blocks, s.sms) / s.sms;
}

GPUSHARE_INLINE void model::ended(operation& op, std::uint32_t blocks, instant at) noexcept {
    op.ended += blocks;
    op.end = std::max(op.end, at);
    if (op.ended != op.wanted) return;
    stream_state& s = *op.stream;
    complete(op, op.end);
    start(s);
}

GPUSHARE_INLINE void model::share(outcome_state& o) noexcept {
    // Relaxed: the caller has a reference or the lock.
    o.references.fetch_add(1, std::memory_order_relaxed);
}

GPUSHARE_INLINE auto model::owner_on(const stream_state& s, std::thread::id by) noexcept -> outcome_state* {
    outcome_state* owner = s.latest;
    while (owner != nullptr && owner->by != by) owner = owner->beside;
    if (owner == nullptr) owner = s.latest;
    if (owner != nullptr) share(*owner);
    return owner;
}

GPUSHARE_INLINE void model::note_end(operation& op) noexcept {
    stream_state& s = *op.stream;
    const bool failed = op.status != errc::none;
    std::exception_ptr stale;
    if ((failed || op.blocks != 0) && std::exchange(s.told, false)) {
        s.status = errc::none;
        stale = std::exchange(s.exception, nullptr);
    }
    if (failed) {
        for (outcome_state* o = op.owner; o != nullptr; o = o->beside) {
            if (o->status != errc::none || (o->by != op.owner->by && !op.for_another)) continue;
            o->status = op.status;
            o->exception = op.exception;
        }
        if (s.status == errc::none) {
            s.status = op.status;
            if (!s.closed) s.exception = op.exception;
        }
    }
    if (stale != nullptr) op.exception = std::move(stale);  // the old exception is in `s` as well
}

GPUSHARE_INLINE void model::keep(operation& op, std::exception_ptr& thrown) noexcept {
    if (thrown == nullptr || op.status != errc::none) return;
    op.status = errc::kernel_failed;
    op.exception = std::move(thrown);
}

GPUSHARE_INLINE void model::tell_who_waits(device_state& d) noexcept {
    d.waiting.store(d.order.highest_waiting(), std::memory_order_relaxed);
}

GPUSHARE_INLINE void model::start(stream_state& s) noexcept {
    if (s.busy) return;
    startable_.push(s);
    start_all();
}

GPUSHARE_INLINE void model::start_all() noexcept {
    while (stream_state* const next = startable_.pop()) start_head(*next);
}

GPUSHARE_INLINE void model::start_head(stream_state& s) noexcept {
    while (operation* const op = s.queue.front()) {
        op->ready = std::max({s.last_end, op->not_before, op->end});
        if (s.device->lost) {
            if (op->status == errc::none) op->status = errc::device_lost;
            complete(*op, std::max(op->ready, s.device->lost_since));
        } else if (s.stalled) {
            return;
        } else if (op->awaited != nullptr) {
            // Relaxed: written under the lock.
            if (!op->awaited->reached.load(std::memory_order_relaxed)) {
                s.busy = true;
                op->awaited->streams.push(s);
                return;
            }
            complete(*op, std::max(op->ready, op->awaited->when));
        } else if (op->blocks == 0) {
            complete(*op, op->ready);
        } else {
            s.busy = true;
            s.device->order.offer(op, s.level, op->blocks, op->cooperative, s.part);
            return;
        }
    }
    if (s.closed) {
        leave_partition(*s.device, s.part);
        const std::size_t at = s.index;  // `s` is destroyed here
        std::swap(streams_[at], streams_.back());
        streams_[at]->index = at;
        streams_.pop_back();
    }
}

GPUSHARE_INLINE void model::complete(operation& op, instant at) noexcept {
    stream_state& s = *op.stream;
    s.queue.pop();
    s.busy = false;
    s.last_end = std::max(s.last_end, at);
    note_end(op);
    while (point_state* const p = op.points.pop()) reach(s, *p, at);
    if (op.awaited != nullptr) drop_locked(*std::exchange(op.awaited, nullptr));
    if (op.owner != nullptr) drop_locked(*std::exchange(op.owner, nullptr));
    if (op.body || op.exception != nullptr)
        left_.operations.push(op);
    else
        operations_.release(op);
}

GPUSHARE_INLINE void model::reach(stream_state& s, point_state& p, instant at) noexcept {
    p.when = std::max(at, p.recorded);
    p.used = s.used / static_cast<ns::rep>(s.sms);
    p.wide = s.wide / s.sms;
    if (p.within != nullptr) {
        p.status = p.within->status;
        p.exception = p.within->exception;
        drop_locked(*std::exchange(p.within, nullptr));
    } else {
        p.status = s.status;
        p.exception = s.exception;
        s.told = true;
    }
    // release: pairs with the acquire in point::reached.
    p.reached.store(true, std::memory_order_release);
    while (waiter_link* const link = p.waiters.pop()) {
        waiter& w = *link->thread;
        w.leave();
        woken_.push(w);
    }
    while (stream_state* const waiting = p.streams.pop()) {
        waiting->busy = false;
        startable_.push(*waiting);
    }
    drop_locked(p);
}

GPUSHARE_INLINE void model::give_up_head(stream_state& s) noexcept {
    operation& op = *s.queue.front();
    if (op.awaited != nullptr) {
        op.awaited->streams.remove(s);
        s.busy = false;
        return;
    }
    if (op.status == errc::none) op.status = errc::device_lost;
    if (!s.device->order.withdraw(&op)) return;
    // The last worker destroys the kernel. If all workers have ended already, `complete` finds the
    // kernel, and leaves it to be destroyed without the lock.
    op.unexecuted.fetch_sub(op.blocks - op.claimed, std::memory_order_acq_rel);
    op.wanted = op.claimed;
    if (op.ended == op.wanted) s.busy = false;
}

GPUSHARE_INLINE void model::drop_locked(point_state& p) noexcept {
    // acq_rel: as in `drop`.
    if (p.references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    p.hub.reset();  // not the last reference: the driver of the model has one
    if (p.exception != nullptr)
        left_.points.push(p);
    else
        points_.release(p);
}

GPUSHARE_INLINE void model::drop_locked(outcome_state& o) noexcept {
    for (outcome_state* last = &o; last != nullptr;) {
        if (last->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        last->hub.reset();
        outcome_state& gone = *std::exchange(last, std::exchange(last->beside, nullptr));
        if (gone.exception != nullptr)
            left_.outcomes.push(gone);
        else
            outcomes_.release(gone);
    }
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
