// SPDX-License-Identifier: Apache-2.0
// A compute limiter: shares one device's time among clients by holding submissions back and
// admitting them one by one, so that only a few are in flight. At the gate (enqueue, acquire) the
// calling thread waits and enqueues; the queue (submit) takes a callable and enqueues it when it is
// admitted.
//
//   // any backend's
//   using limiter_type = gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock>;
//   limiter_type limiter{{.depth = 3}, node.get_clock()};
//   auto chat = limiter.add({.weight = 70_pct, .level = {1}});
//   limiter.enqueue(chat, stream, [&](auto& s) { s.launch(shape, kernel); });  // the gate
//   // the queue
//   auto ticket = limiter.submit(chat, stream, [&](auto& s) { s.launch(shape, kernel); });
//
// The limiter has no thread: calling threads drive it, that is, they admit, enqueue and notice ends
// for all clients. A server whose threads wait (at the gate, for a ticket) needs nothing else. A
// server that only submits and never waits must let one of its threads call run(). In detail: a
// submitting thread admits all submissions for which there is room. One waiting thread at a time
// watches the device for all. Before that thread runs a callable or a callback that isn't known to
// take less than 100 us, another waiting thread takes over. Once a thread's own submission is
// enqueued, or its wait is over, the thread runs callables and callbacks of other clients for at
// most 100 us, plus the one in progress. The thread leaves the rest to a thread that waits in the
// limiter or, if there is none, to the next call.
//
// A thread that waits for each submission of its client doesn't wake the other waiting threads. If
// no thread waits for a piece of work, the limiter notices its end within a millisecond.
//
// The limiter charges a client the duration of its work, between the points (CUDA's events) around
// the work, times the work's width: the part of the SMs that it can fill (submit_options::width, or
// learnt); detail/charging.hpp says how. If points cost something, short submissions of a client
// that alone uses the device share a pair (detail/batches.hpp). Their tickets are done together
// when the batch ends, and a thread that waits or polls ends it. detail/limiter_engine.hpp shows
// the life of a submission.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/limiter_engine.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Shares one device's time among clients. Thread-safe; neither copied nor moved. Destroy it only
/// after every call, a permit's too, has returned; its tickets end with errc::closed then. Streams,
/// and everything submitted, must outlive their use. Callables run on the thread that drives, under
/// no lock. Callables of one level, and of one client, run one at a time in the order of admission.
/// Callables of different levels may run at once, so a stream that they share is used from several
/// threads. A callable must not wait for this limiter: it would never return.
///
/// Faults: a callable that throws and work that fails end their own ticket with that error (of
/// short submissions that are timed together, each of these). A client whose work fails
/// `quarantine_after` times in a row is refused until it is pardoned: errc::quarantined. Once the
/// device is lost, all work that is in flight, waits or comes later ends with errc::device_lost;
/// take_event() names the clients that had work in flight. To recover, make a limiter on another
/// node or in another process. close() and the destructor still return, and accounts can be read.
template <timeline Stream, clock Clock, compute_policy Policy = weighted_fair>
class compute_limiter {
public:
    using stream = Stream;                             ///< the stream that work is enqueued on
    using point = typename Stream::point;              ///< the point recorded around work
    using ticket = gpushare::ticket<compute_limiter>;  ///< the result of submit()
    using permit = gpushare::permit<compute_limiter>;  ///< the result of acquire()

    /// `time` is the clock of all instants that the limiter takes and returns.
    explicit compute_limiter(limiter_options options = {}, Clock time = {}, Policy policy = {});

    /// Adds a client. Throws operation_error if the policy refuses it, or for settings that make no
    /// sense (invalid_specification), and std::bad_alloc: then nothing has changed.
    [[nodiscard]] client_id add(const client_settings& s);

    /// Changes a client's settings while work is in flight, for submissions admitted from now on.
    /// errc::closed: no such client; share_exceeded: the policy refuses; invalid_specification;
    /// slo_unreachable (in ns: the latency goal, the time that others leave of it, the time
    /// needed). Then nothing has changed.
    failure change(client_id c, const client_settings& s);

    /// Replaces the policy while work is in flight. `p`, which has no clients yet, takes over all
    /// decisions. Under it, clients repay the time that they used beyond their caps and ahead of
    /// their shares, and work in flight is counted. share_exceeded: `p` refuses a client;
    /// invalid_specification: `p` doesn't support caps, or classes, and a client has one. After a
    /// refusal, or an exception of `p`, the old policy continues with all clients.
    errc set_policy(Policy p);

    /// Closes client `c`: takes no more of its submissions and cancels those that wait. Then waits
    /// until `deadline` for its submissions in flight, held permits included, and for their
    /// callbacks to return, and removes the client. A call from a callback doesn't wait for
    /// callbacks; a call within a callable or a permit's work of this client (say, by exit()) waits
    /// for nothing. `account`, if given, receives the client's usage. Returns false at the
    /// deadline: call again.
    bool close(client_id c, instant deadline = never, const std::stop_token& stop = {},
               client_usage* account = nullptr);

    /// Admits no more submissions of `c` until wake(), and waits until those in flight have ended
    /// and their callbacks were called. Waiting submissions keep their order and new ones queue
    /// behind them; with while_asleep::refuse, both are refused with errc::asleep. Returns false at
    /// the deadline, on a stop request, or if there is no such client: the client isn't asleep
    /// then, but refused submissions stay refused.
    bool sleep(client_id c, instant deadline = never, const std::stop_token& stop = {},
               while_asleep what_waits = while_asleep::keep);
    /// Ends sleep(); does nothing if the client isn't asleep.
    void wake(client_id c);

    /// Waits at the gate for a permit. Codes: deadline_exceeded, stopped, closed, queue_full,
    /// quarantined, asleep, device_lost; stuck on a stepped_clock, if no event will end the wait.
    /// Without contention: one mutex, no allocation, no system call. Throws std::bad_alloc only if
    /// more submissions wait and are in flight than ever before.
    [[nodiscard]] result<permit> acquire(client_id c, instant deadline = never, const std::stop_token& stop = {},
                                         const submit_options& o = no_options) {
        return acquire(c, deadline, stop, o, true);
    }

    /// A permit if there is one immediately, else deadline_exceeded.
    [[nodiscard]] result<permit> try_acquire(client_id c) { return acquire(c, instant::min()); }

    /// acquire(c)->enqueue(s, work) in one step: cheaper where streams share points. Exceptions of
    /// `work` pass through. Returns the codes of acquire; `work` wasn't called then.
    template <std::invocable<Stream&> F>
    errc enqueue(client_id c, Stream& s, F&& work, instant deadline = never, const std::stop_token& stop = {},
                 const submit_options& o = no_options) {
        if constexpr (!engine::shares_points) {
            auto p = acquire(c, deadline, stop, o, false);
            if (p) p->enqueue(s, work);
            return p.code();
        }
        const std::stop_callback on_stop(stop, [this] { engine_.wake_all(); });
        const auto now = engine_.batch_time();
        std::unique_lock lock(engine_.mutex());
        if (engine_.any_due(now)) engine_.observe(lock, look::if_due);
        bool waited = false;
        auto p = acquire(lock, c, now, deadline, stop, o, &waited);
        if (!p) return p.code();
        const bool at_once = !waited && engine_.fits_beside(*p->submission_, s);
        if (at_once) engine_.place(*p->submission_, s, now);
        lock.unlock();
        if (at_once)
            p->enqueue_in_batch(s, work);
        else
            p->enqueue(s, work);
        return errc::none;
    }

    /// Queues `work`, which enqueues onto `s` when it is admitted: in this call if that is now.
    /// `on_done`, if given, is called once the work is done, failed or was cancelled. Codes:
    /// closed, queue_full (after waiting until `room_by`), stopped, quarantined, asleep,
    /// device_lost, invalid_specification (no callable). Allocates, and may throw std::bad_alloc,
    /// only if more submissions wait and are in flight than ever before.
    [[nodiscard]] result<ticket> submit(client_id c, Stream& s, submission_work<Stream> work,
                                        const submit_options& o = no_options, submission_callback on_done = {},
                                        const std::stop_token& stop = {});

    /// Admits submissions that can go and observes completed ones, without waiting. Work that takes
    /// longer than 100 us is left to the next call; see resume_at().
    void poll();

    /// Drives the limiter until a stop is requested: the dispatcher, on a thread that the embedder
    /// supplies.
    void run(const std::stop_token& stop);

    /// The usage of `c`, as far as it is known. Returns `gone` for a client that doesn't exist.
    /// `gone` is read under the mutex under which close() sets its `account`, so a concurrent call
    /// is answered correctly by one of the two.
    [[nodiscard]] client_usage usage(client_id c, const client_usage& gone = {});

    /// When to call poll() even if nothing happens, if no thread waits or runs; see limiter_core.
    /// The least instant, if a call left callables or callbacks.
    [[nodiscard]] instant resume_at() const;
    /// The time on the limiter's clock.
    [[nodiscard]] instant now() const { return engine_.now(); }
    /// The bound on the wait of the highest level; see limiter_core.
    [[nodiscard]] ns wait_bound() const;
    /// The bound on the wait of a submission of `c` that arrives now; see limiter_core. Its ticket
    /// or permit has the bound, too. `key` and `width` describe the submission, as in
    /// submit_options. Zero for a client that doesn't exist, and if no length is known.
    [[nodiscard]] ns bound_of(client_id c, std::uint64_t key = 0, sm_width width = {}) const;

    /// The forecast for a submission of `c` of this kind that arrives now: when it would begin and
    /// end; see limiter_core. All zero for a client that doesn't exist.
    [[nodiscard]] submission_estimate estimate(client_id c, std::uint64_t key = 0) const;

    /// Takes the oldest event; the latest 64 are kept.
    std::optional<limiter_event> take_event();
    /// How many events were dropped for later ones.
    [[nodiscard]] std::uint64_t events_dropped() const;

    /// From now on keeps records of submissions that end, the latest `most` until they are taken;
    /// 0, the initial state: none. A record costs a few readings of the clock. Drops the existing
    /// records. Throws std::bad_alloc.
    void record(std::size_t most);
    /// Takes the oldest records that fit into `into`, in the order in which the device finished
    /// them. Returns how many.
    std::size_t take_records(std::span<submission_record> into) noexcept;
    /// How many records were dropped for later ones.
    [[nodiscard]] std::uint64_t records_lost() const noexcept;

    /// Ends a quarantine. errc::closed: no such client.
    errc pardon(client_id c);

    /// Begins a request of `c`; the class in handles.hpp calls it. `level` is the level of the
    /// request's submissions; each of them names it again. closed: no such client. Throws
    /// std::bad_alloc.
    errc begin_request(client_id c, priority level = no_priority);
    /// Ends a request that began with this `level`.
    void end_request(client_id c, priority level = no_priority) noexcept;

private:
    friend ticket;
    friend permit;
    using engine = detail::limiter_engine<Stream, Clock, Policy>;
    using look = detail::look;
    using lock_type = std::unique_lock<std::mutex>;

    // If kernels of these streams can't yield, bounds must not count on the client's promise to
    // yield.
    [[nodiscard]] static client_settings as_can_be(client_settings s) noexcept {
        if (!yielding_timeline<Stream>) s.yields_within = {};
        return s;
    }

    // `held`: a permit's holder may ask how the work went.
    [[nodiscard]] result<permit> acquire(client_id c, instant deadline, const std::stop_token& stop,
                                         const submit_options& o, bool held);
    // Sets `waited`, if given, to whether the thread had to wait.
    [[nodiscard]] result<permit> acquire(lock_type& lock, client_id c, instant now, instant deadline,
                                         const std::stop_token& stop, const submit_options& o, bool* waited = nullptr);

    engine engine_;
};

// Defined out of the class and without `inline`, so that an `extern template` keeps other
// translation units from instantiating them.

template <timeline Stream, clock Clock, compute_policy Policy>
compute_limiter<Stream, Clock, Policy>::compute_limiter(limiter_options options, Clock time, Policy policy)
    : engine_(options, std::move(time), std::move(policy)) {}

template <timeline Stream, clock Clock, compute_policy Policy>
client_id compute_limiter<Stream, Clock, Policy>::add(const client_settings& s) {
    const std::lock_guard lock(engine_.mutex());
    if (const auto why = engine_.core().ignores(s); why.code != errc::none) raise(why, s.name.view(), "limiter");
    return engine_.clients().add(as_can_be(s));
}

template <timeline Stream, clock Clock, compute_policy Policy>
failure compute_limiter<Stream, Clock, Policy>::change(client_id c, const client_settings& s) {
    std::unique_lock lock(engine_.mutex());
    if (const auto ignored = engine_.core().ignores(s); ignored.code != errc::none) return ignored;
    const auto why = engine_.clients().change(c, as_can_be(s));
    if (why != errc::closed) engine_.drive(lock, look::now);  // there may be room on another level
    return why;
}

template <timeline Stream, clock Clock, compute_policy Policy>
errc compute_limiter<Stream, Clock, Policy>::set_policy(Policy p) {
    std::unique_lock lock(engine_.mutex());
    const auto why = engine_.core().set_policy(p, engine_.now());
    engine_.drive(lock, look::now);
    return why;
}

template <timeline Stream, clock Clock, compute_policy Policy>
bool compute_limiter<Stream, Clock, Policy>::close(client_id c, instant deadline, const std::stop_token& stop,
                                                   client_usage* account) {
    const std::stop_callback on_stop(stop, [this] { engine_.wake_all(); });
    std::unique_lock lock(engine_.mutex());
    auto& core = engine_.core();
    if (!core.contains(c)) return true;
    engine_.close(lock, c);
    deadline = engine_.patience(c, deadline);
    engine_.drive(lock, look::now);
    const auto drained = [&] { return !core.contains(c) || engine_.is_over(c); };
    if (engine_.wait_for_end(lock, c, detail::question(drained), deadline, stop) != errc::none) return false;
    if (!core.contains(c)) return true;
    if (account != nullptr) {
        (void)core.final_usage(c);
        *account = engine_.clients().usage(c);
    }
    core.remove(c);
    return true;
}

template <timeline Stream, clock Clock, compute_policy Policy>
bool compute_limiter<Stream, Clock, Policy>::sleep(client_id c, instant deadline, const std::stop_token& stop,
                                                   while_asleep what_waits) {
    const std::stop_callback on_stop(stop, [this] { engine_.wake_all(); });
    std::unique_lock lock(engine_.mutex());
    auto& core = engine_.core();
    if (!core.contains(c)) return false;
    engine_.sleep(lock, c, what_waits);
    deadline = engine_.patience(c, deadline);
    engine_.drive(lock, look::now);
    const auto awake = [&] { return !core.contains(c) || !engine_.clients().queue(c).asleep; };
    const auto drained = [&] { return awake() || engine_.is_over(c); };
    const bool over = engine_.wait_for_end(lock, c, detail::question(drained), deadline, stop) == errc::none;
    if (over || awake()) return over && !awake();
    engine_.clients().wake(c, engine_.policy_time());
    engine_.drive(lock, look::now);
    return false;
}

template <timeline Stream, clock Clock, compute_policy Policy>
void compute_limiter<Stream, Clock, Policy>::wake(client_id c) {
    std::unique_lock lock(engine_.mutex());
    if (!engine_.core().contains(c)) return;
    engine_.clients().wake(c, engine_.policy_time());
    engine_.wake_all(lock);  // threads that wait in sleep()
    engine_.drive(lock, look::now);
}

template <timeline Stream, clock Clock, compute_policy Policy>
auto compute_limiter<Stream, Clock, Policy>::acquire(client_id c, instant deadline, const std::stop_token& stop,
                                                     const submit_options& o, bool held) -> result<permit> {
    const std::stop_callback on_stop(stop, [this] { engine_.wake_all(); });
    std::unique_lock lock(engine_.mutex());
    const auto now = engine_.policy_time();
    if constexpr (!engine::shares_points) engine_.observe(lock, look::if_due);
    auto p = acquire(lock, c, now, deadline, stop, o);
    if (p && held) p->keep();
    return p;
}

template <timeline Stream, clock Clock, compute_policy Policy>
auto compute_limiter<Stream, Clock, Policy>::submit(client_id c, Stream& s, submission_work<Stream> work,
                                                    const submit_options& o, submission_callback on_done,
                                                    const std::stop_token& stop) -> result<ticket> {
    if (!work) return failure{.code = errc::invalid_specification, .because = reason::empty_callable};
    const auto& pool = engine_.pool();
    auto& mine = pool->acquire();
    ticket t(engine_, pool, mine);
    mine.work = std::move(work);
    mine.on_done = std::move(on_done);
    mine.stream = &s;
    if (const auto why = engine_.submit(mine, c, o, stop); why != errc::none) return why;
    return result<ticket>(std::move(t));  // nvcc doesn't move a local into another type by itself
}

template <timeline Stream, clock Clock, compute_policy Policy>
void compute_limiter<Stream, Clock, Policy>::poll() {
    std::unique_lock lock(engine_.mutex());
    engine_.drive(lock, look::now);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void compute_limiter<Stream, Clock, Policy>::run(const std::stop_token& stop) {
    const std::stop_callback on_stop(stop, [this] { engine_.wake_all(); });
    std::unique_lock lock(engine_.mutex());
    typename engine::need stay{.done = detail::question(false), .stop = &stop};
    engine_.drive(lock, look::now, stay);
    engine_.wait(lock, stay.done, nullptr, never, stop);
}

template <timeline Stream, clock Clock, compute_policy Policy>
client_usage compute_limiter<Stream, Clock, Policy>::usage(client_id c, const client_usage& gone) {
    std::unique_lock lock(engine_.mutex());
    engine_.drive(lock, look::now);
    return engine_.core().contains(c) ? engine_.clients().usage(c) : gone;
}

template <timeline Stream, clock Clock, compute_policy Policy>
instant compute_limiter<Stream, Clock, Policy>::resume_at() const {
    const std::lock_guard lock(engine_.mutex());
    return engine_.resume_at();
}

template <timeline Stream, clock Clock, compute_policy Policy>
ns compute_limiter<Stream, Clock, Policy>::wait_bound() const {
    const std::lock_guard lock(engine_.mutex());
    return engine_.core().wait_bound();
}

template <timeline Stream, clock Clock, compute_policy Policy>
ns compute_limiter<Stream, Clock, Policy>::bound_of(client_id c, std::uint64_t key, sm_width width) const {
    const std::lock_guard lock(engine_.mutex());
    return engine_.core().contains(c) ? engine_.core().bound_of(c, key, width) : ns{0};
}

template <timeline Stream, clock Clock, compute_policy Policy>
submission_estimate compute_limiter<Stream, Clock, Policy>::estimate(client_id c, std::uint64_t key) const {
    const std::lock_guard lock(engine_.mutex());
    return engine_.core().contains(c) ? engine_.core().estimate(c, key) : submission_estimate{};
}

template <timeline Stream, clock Clock, compute_policy Policy>
std::optional<limiter_event> compute_limiter<Stream, Clock, Policy>::take_event() {
    const std::lock_guard lock(engine_.mutex());
    engine_.look_for_undriven();
    return engine_.core().events().take();
}

template <timeline Stream, clock Clock, compute_policy Policy>
std::uint64_t compute_limiter<Stream, Clock, Policy>::events_dropped() const {
    const std::lock_guard lock(engine_.mutex());
    return engine_.core().events().dropped();
}

template <timeline Stream, clock Clock, compute_policy Policy>
void compute_limiter<Stream, Clock, Policy>::record(std::size_t most) {
    const std::lock_guard lock(engine_.mutex());
    engine_.record(most);
}

template <timeline Stream, clock Clock, compute_policy Policy>
std::size_t compute_limiter<Stream, Clock, Policy>::take_records(std::span<submission_record> into) noexcept {
    const std::lock_guard lock(engine_.mutex());
    return engine_.log().take(into);
}

template <timeline Stream, clock Clock, compute_policy Policy>
std::uint64_t compute_limiter<Stream, Clock, Policy>::records_lost() const noexcept {
    const std::lock_guard lock(engine_.mutex());
    return engine_.log().lost();
}

template <timeline Stream, clock Clock, compute_policy Policy>
errc compute_limiter<Stream, Clock, Policy>::pardon(client_id c) {
    const std::lock_guard lock(engine_.mutex());
    if (!engine_.core().contains(c)) return errc::closed;
    engine_.core().pardon(c);
    return errc::none;
}

template <timeline Stream, clock Clock, compute_policy Policy>
errc compute_limiter<Stream, Clock, Policy>::begin_request(client_id c, priority level) {
    const std::lock_guard lock(engine_.mutex());
    return engine_.clients().begin_request(c, level);
}

template <timeline Stream, clock Clock, compute_policy Policy>
void compute_limiter<Stream, Clock, Policy>::end_request(client_id c, priority level) noexcept {
    std::unique_lock lock(engine_.mutex());
    if (!engine_.core().contains(c)) return;
    engine_.clients().end_request(c, level);
    engine_.drive(lock, look::now);
}

template <timeline Stream, clock Clock, compute_policy Policy>
auto compute_limiter<Stream, Clock, Policy>::acquire(lock_type& lock, client_id c, instant now, instant deadline,
                                                     const std::stop_token& stop, const submit_options& o, bool* waited)
    -> result<permit> {
    if (const auto why = engine_.clients().no_entry(c); why != errc::none) {
        engine_.core().count_refused(c, why);
        // Handles work whose end is due, for others.
        engine_.drive(lock, look::if_due);
        return why;
    }
    if (engine_.core().several_levels()) engine_.note_overdue();
    const auto [mine, admitted] = engine_.arrive_at_gate(c, o, now);
    if (admitted) return permit(engine_, mine, mine.admitted.bound);
    if (waited != nullptr) *waited = true;
    if (const auto why = engine_.wait_at_gate(lock, mine, deadline, stop); why != errc::none) return why;
    return permit(engine_, mine, mine.facts.bound);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
