// SPDX-License-Identifier: Apache-2.0
// The handles that a compute limiter gives. At the gate a thread gets a permit, the right to
// enqueue one submission by itself. For a callable that it queues it gets a ticket. Both report
// when the work is done and whether it failed.
//
//   auto p = limiter.acquire(chat, deadline);            // result<permit>
//   if (p) p->enqueue(stream, [&](auto& s) { s.launch(shape, kernel); });
//   if (p) p->wait();                                    // or p->poll(), now and then
//
//   // result<ticket>
//   auto t = limiter.submit(chat, stream, [&](auto& s) { s.launch(shape, kernel); });
//   t->wait();  if (t->status() != gpushare::errc::none) t->rethrow();
//
// A coroutine waits for a submission without keeping a thread. It resumes on the thread that drives
// the limiter: the dispatcher, or a thread that waits or polls. A coroutine may be destroyed while
// it waits: its waiting submission never runs then, and its work on the device continues without
// it.
//
//   auto done = co_await gpushare::async_submit(limiter, chat, stream, [&](auto& s) { s.launch(shape, kernel); });
//   if (done.status != gpushare::errc::none) ...
//
// A request is for submissions of one client that belong together, one after the other, such as the
// layers of an inference, with a deadline and a priority. While the request has work in flight, and
// for a bounded time between two of its submissions, the limiter holds back work of lower levels.
// So a chain of kernels waits for a neighbour's work once, not once per kernel.
//
//   gpushare::request r(limiter, chat, {.deadline = clock.now() + 50ms, .level = gpushare::priority{1}});
//   for (auto& layer : layers) r.submit(stream, [&](auto& s) { s.launch(shape, layer); })->wait();
//
// A gang_permit has permits on several devices, on all or on none, for work whose ranks wait for
// each other, such as a collective.
//
//   auto g = gpushare::gang_permit<limiter_type>::acquire({{&on_0, a, {0}}, {&on_1, b, {1}}}, deadline);
//   const std::array streams{&stream_0, &stream_1};
//   if (g) g->enqueue(node.gangs(), streams, [&](std::size_t rank, auto& s) { s.launch(shape, part[rank]); });
//   // or, for a call that enters the gang order by itself, such as submit_all_reduce:
//   if (g) g->enqueue(streams, [&] { return all_reduce_on(streams); });
//
// No two gangs wait for each other for ever: all permits are taken before any work is enqueued, in
// the order of the devices (ordered resources, Havender 1968), and the work is enqueued within the
// node's gang order.
//
// A gang holds its first permits while it waits for the others, and so keeps other clients off
// those devices. It waits for each further device for 2 * bound_of(client) there plus
// gang_patience. If that permit hasn't come by then, the gang gives its permits back, waits without
// any until its turn has come on the device that was late, and starts over. The gang isn't charged
// for unused time, so its turns come soon. If they still don't come in time, as behind a long queue
// in the order of arrival, the gang doubles its patience each time.
//
// Other clients of a device may wait longer than their own bound says, by the gang's patience for
// each further device. After a gang came too late n times, its patience is 2^n times as long. n has
// no limit, since otherwise a gang behind a long queue would never get its permits. The gang's
// deadline bounds the wait: at the deadline it holds nothing. If you share a device with other
// people's gangs, require a deadline of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <coroutine>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

template <class Limiter>
class async_submission;

namespace detail {
/// Whether the stream knows that its device is lost. False on backends whose streams can't tell
/// without asking the device.
template <class Stream>
[[nodiscard]] bool known_lost(const Stream& s) noexcept {
    if constexpr (requires { static_cast<bool>(s.lost()); })
        return s.lost();
    else
        return false;
}
}  // namespace detail

/// The right to enqueue one submission, whose work is in flight until the device has done it. A
/// used permit says when its work is done, as a ticket does. Movable; one owner, one thread at a
/// time; only const members from several threads at once. The destructor gives an unused permit
/// back, and doesn't wait for work. Must not outlive its limiter.
///
/// Order: done() means that all work enqueued through the permit is over, and all earlier work on
/// its stream. It doesn't cover work enqueued on the stream later, or on other streams. To make
/// another stream wait for the work on the device, record a point on the permit's stream after
/// enqueue().
template <class Limiter>
class permit {
public:
    using stream = typename Limiter::stream;  ///< the stream that work is enqueued on

    /// `other` is empty afterwards.
    permit(permit&& other) noexcept
        : engine_(std::exchange(other.engine_, nullptr)),
          submission_(other.submission_),
          bound_(other.bound_),
          stream_(other.stream_),
          enqueued_(std::exchange(other.enqueued_, false)),
          held_(other.held_) {}
    permit& operator=(permit&&) = delete;
    ~permit() {
        if (engine_ == nullptr) return;
        if (!enqueued_)
            engine_->give_back(*submission_);
        else if (held_)
            engine_->drop_permit(*submission_);
    }

    /// Calls `enqueue_work(s)`, which enqueues onto `s`. Call once. Exceptions pass through; work
    /// enqueued until then is charged. Throws operation_error if a <<<>>> launch in it fails.
    template <std::invocable<stream&> F>
    void enqueue(stream& s, F&& enqueue_work) {
        stream_ = &s;
        engine_->await_turn(*submission_, s);
        if constexpr (engine::shares_points) {
            engine_->place(*submission_, s);
            enqueue_in_batch(s, enqueue_work);
        } else {
            enqueue_between_points(s, enqueue_work);
        }
    }

    /// Lets higher levels have the SM. Call it from within the permit's work, on the thread that
    /// runs the work; see yield_point(). Until that work is done the permit must be neither moved
    /// nor destroyed.
    bool yield() noexcept {
        if constexpr (requires(stream & s) { s.yield(); })
            return stream_ != nullptr && stream_->yield();
        else
            return false;
    }

    /// The bound on the work's wait for lower levels, as it was when the permit was requested; see
    /// compute_limiter::bound_of.
    [[nodiscard]] ns bound() const noexcept { return bound_; }

    /// True once the limiter has seen the work end or fail. Never blocks and drives nothing: a
    /// thread that asks in a loop calls poll(). False for an unused permit.
    [[nodiscard]] bool done() const noexcept {
        return enqueued_ && submission_->at.load(std::memory_order_acquire) == detail::submission_stage::done;
    }
    /// done(), after a look at the device. This call also admits waiting work of others. It never
    /// waits for the device. With it, a server keeps two or three iterations in flight.
    bool poll() const { return wait(instant::min()); }
    /// Waits until done(), and drives the limiter meanwhile. False at the deadline, on a stop
    /// request, or immediately for an unused permit. Throws operation_error (stuck) as ticket::wait
    /// does.
    bool wait(instant deadline = never, const std::stop_token& stop = {}) const {
        return done() || (enqueued_ && engine_->wait_for(*submission_, deadline, stop));
    }
    /// Once done: errc::none, submission_failed (enqueue() threw), kernel_failed, device_lost,
    /// stuck.
    [[nodiscard]] errc status() const noexcept { return submission_->status; }
    /// Once done: as ticket::rethrow. Exceptions of the callable came out of enqueue() already.
    void rethrow() const { detail::rethrow(status(), submission_->failed_of, submission_->error); }
    /// Once done: when the limiter noticed the end, by its clock.
    [[nodiscard]] instant finished_at() const noexcept { return submission_->finished_at; }
    /// Once done: the device time that the client was charged.
    [[nodiscard]] ns device_time() const noexcept { return submission_->device_time; }

private:
    friend Limiter;
    using engine = typename Limiter::engine;
    using own_work = typename detail::own_work_of<stream>::type;
    permit(engine& e, typename engine::submission& s, ns bound) noexcept
        : engine_(&e), submission_(&s), bound_(bound) {}
    // From now on the permit's holder may ask how the work went. Call under the mutex.
    void keep() noexcept {
        held_ = true;
        engine_->keep_for_holder(*submission_);
    }

    // For backends whose points cost nothing: the batch is chosen later.
    template <class F>
    void enqueue_between_points(stream& s, F& enqueue_work) {
        submission_->stream = &s;
        std::optional<own_work> mine(s);
        submission_->own = mine->how_it_went();
        std::optional<typename stream::point> end;
        if constexpr (preparing_timeline<stream>) end = s.prepare();
        // Must not fail once the work runs, or the work would be given back as unused.
        const auto record_end = [&] {
            if constexpr (preparing_timeline<stream>)
                s.record(*end);
            else
                end = s.record();
            submission_->end = std::move(end);
            mine.reset();  // work enqueued from here on may be others'
        };
        submission_->begin = s.record();
        submission_->set_enqueuer(std::this_thread::get_id());
        try {
            submission_->fills = detail::run_work(s, enqueue_work);
        } catch (...) {
            record_end();
            used()->enqueued_by_holder(*submission_, errc::submission_failed);
            throw;
        }
        record_end();
        used()->enqueued_by_holder(*submission_, errc::none);
    }

    // For other backends: with the points that the batch asks for.
    template <class F>
    void enqueue_in_batch(stream& s, F& enqueue_work) {
        bool enqueued = false;
        try {
            std::optional<own_work> mine(s);
            submission_->own = mine->how_it_went();
            if (submission_->needs_begin) submission_->begin = s.record();
            submission_->set_enqueuer(std::this_thread::get_id());
            enqueued = submission_->may_stay_open;
            try {
                submission_->fills = detail::run_work(s, enqueue_work);
            } catch (...) {
                if (submission_->needs_end) submission_->end = s.record();
                mine.reset();
                used()->enqueued_by_holder(*submission_, errc::submission_failed);
                throw;
            }
            if (submission_->needs_end) submission_->end = s.record();
        } catch (...) {
            if (enqueued_) throw;  // the work is accounted for already
            if (enqueued)
                used()->enqueued_by_holder(*submission_, errc::submission_failed);
            else
                engine_->take_back(*submission_);
            throw;
        }
        // The work may share a point that is recorded dozens of launches later.
        used()->enqueued_by_holder(*submission_, detail::known_lost(s) ? errc::device_lost : errc::none);
    }

    engine* used() noexcept {
        submission_->set_enqueuer({});
        enqueued_ = true;
        return engine_;
    }

    engine* engine_;  // null after a move
    typename engine::submission* submission_;
    ns bound_;
    stream* stream_ = nullptr;  // the stream of its work; never changes once the work is enqueued
    bool enqueued_ = false;
    bool held_ = false;  // the record is kept until the permit is gone
};

/// The handle of a queued submission. Movable; one owner. Safe from any thread; only const members
/// from several at once. Destroying it doesn't affect the work.
template <class Limiter>
class ticket {
public:
    using stream = typename Limiter::stream;  ///< the stream that work is enqueued on

    /// `other` is empty afterwards, and can only be assigned to or destroyed.
    ticket(ticket&& other) noexcept
        : engine_(other.engine_),
          pool_(std::move(other.pool_)),
          submission_(std::exchange(other.submission_, nullptr)) {}
    /// As the constructor.
    ticket& operator=(ticket&& other) noexcept {
        ticket(std::move(other)).swap(*this);
        return *this;
    }
    ~ticket() {
        if (submission_ != nullptr) pool_->drop(*submission_);
    }

    /// True once the limiter has seen the work finish, fail or be cancelled. Never blocks and
    /// drives nothing.
    [[nodiscard]] bool done() const noexcept {
        return submission_->at.load(std::memory_order_acquire) == detail::submission_stage::done;
    }

    /// Waits, and drives the limiter meanwhile. False at the deadline or on a stop request. The
    /// limiter must still exist unless done(). Throws operation_error (stuck) if the limiter's
    /// clock only passes as its program steps it, and no event is left that would end the wait.
    bool wait(instant deadline = never, const std::stop_token& stop = {}) const {
        return done() || engine_->wait_for(*submission_, deadline, stop);
    }

    /// Cancels a submission that still waits: it never runs, and is done with errc::stopped; its
    /// callback is called, too. False if it was admitted or is done. The limiter must still exist
    /// unless done().
    bool cancel() const { return !done() && engine_->cancel_waiting(*submission_); }

    /// The bound on its wait for work of lower levels, as known when it came; see
    /// compute_limiter::bound_of. The bound holds while each call in flight below takes no longer
    /// than it declared, or than its kind was seen to take. No limiter can know how long the first
    /// call of a kind takes, unless that is declared: a call that takes longer breaks the bound,
    /// and raises an event, as the longer wait does.
    [[nodiscard]] ns bound() const noexcept { return submission_->facts.bound; }

    /// Once done: errc::none, submission_failed (the callable threw), kernel_failed, device_lost,
    /// stuck; or, if it never ran: closed, quarantined, stopped (by cancel()), deadline_exceeded
    /// (dropped).
    [[nodiscard]] errc status() const noexcept { return submission_->status; }

    /// Once done: does nothing if it went well. Otherwise throws the exception of the callable or
    /// the kernel, with its tenant's name and text; without an exception, an operation_error with
    /// status(). See completion::rethrow.
    void rethrow() const { detail::rethrow(status(), submission_->failed_of, submission_->error); }

    /// Once done: when the limiter noticed the end, by its clock.
    [[nodiscard]] instant finished_at() const noexcept { return submission_->finished_at; }
    /// Once done: the device time that the client was charged.
    [[nodiscard]] ns device_time() const noexcept { return submission_->device_time; }

private:
    friend Limiter;
    friend async_submission<Limiter>;
    using engine = typename Limiter::engine;

    // The receiver of the callback is gone, or is being destroyed.
    void abandon() const noexcept {
        if (!done()) engine_->abandon(*submission_);
    }
    ticket(engine& e, std::shared_ptr<detail::submission_pool<stream>> pool,
           detail::submission<stream>& submission) noexcept
        : engine_(&e), pool_(std::move(pool)), submission_(&submission) {}

    void swap(ticket& other) noexcept {
        std::swap(engine_, other.engine_);
        std::swap(pool_, other.pool_);
        std::swap(submission_, other.submission_);
    }

    engine* engine_;
    std::shared_ptr<detail::submission_pool<stream>> pool_;
    detail::submission<stream>* submission_;
};

/// The awaitable that async_submit returns. Await it once, in the expression that made it. The
/// limiter and the stream must outlive the wait.
///
/// Destroying the coroutine while it waits, from any thread but one that may resume it at that
/// moment, ends the wait. A callable that hasn't begun never runs. If it has begun on another
/// thread, the destructor waits for it, so the callable may use the coroutine's variables. Work
/// that it has enqueued continues, and must not outlive the data it uses.
template <class Limiter>
class [[nodiscard]] async_submission {
public:
    using stream = typename Limiter::stream;  ///< The stream that work is enqueued on.

    /// Called by async_submit.
    async_submission(Limiter& limiter, client_id c, stream& s, submission_work<stream> work,
                     const submit_options& options) noexcept
        : limiter_(limiter), client_(c), stream_(s), work_(std::move(work)), options_(options) {}
    async_submission(const async_submission&) = delete;             ///< Not copied.
    async_submission& operator=(const async_submission&) = delete;  ///< Not copied.
    /// Ends the wait, if the coroutine is waiting.
    ~async_submission() {
        if (ticket_) ticket_->abandon();
    }

    /// Never: the work isn't queued yet.
    [[nodiscard]] static bool await_ready() noexcept { return false; }

    /// Queues the work. False, and the coroutine continues immediately, if the work was done or
    /// refused within the call. Throws std::bad_alloc.
    bool await_suspend(std::coroutine_handle<> waiting) {
        auto ticket = limiter_.submit(client_, stream_, std::move(work_), options_, [this, waiting](const auto& c) {
            completion_ = c;
            if (arrived()) waiting.resume();
        });
        if (!ticket) {
            completion_.status = ticket.code();
            return false;
        }
        ticket_.emplace(*std::move(ticket));
        return !arrived();
    }

    /// How the work went; `error` has the exception of the callable. If the submission was refused,
    /// the status is the code of submit.
    [[nodiscard]] completion await_resume() noexcept {
        ticket_.reset();
        return std::move(completion_);
    }

private:
    // Called twice: by the call that hands the work over, and by the call that reports its end. The
    // second one resumes the coroutine. acq_rel: the second sees what the first has written.
    [[nodiscard]] bool arrived() noexcept { return first_has_come_.exchange(true, std::memory_order_acq_rel); }

    Limiter& limiter_;
    client_id client_;
    stream& stream_;
    submission_work<stream> work_;
    submit_options options_;
    completion completion_;
    std::optional<typename Limiter::ticket> ticket_;
    std::atomic<bool> first_has_come_{false};
};

/// Returns an awaitable that queues `work` for client `c` as limiter.submit does. Awaiting it gives
/// the completion.
template <class Limiter>
async_submission<Limiter> async_submit(Limiter& limiter, client_id c, typename Limiter::stream& s,
                                       submission_work<typename Limiter::stream> work,
                                       const submit_options& options = {}) {
    return {limiter, c, s, std::move(work), options};
}

/// The facts that the caller knows of a request beforehand.
struct request_options {
    instant deadline = never;  ///< when the request is due, for policies that use deadlines
    /// Device time of the whole request, if known, for policies that use the remaining time.
    ns cost{};
    /// Its own level, if above its client's; at most client_settings::ceiling.
    priority level = no_priority;
};

/// Submissions of a client that belong together. While one of them is in flight, and for
/// limiter_options::anticipation after the end of the latest was seen, no work of lower levels is
/// admitted. This ends with the request. A request's own level is the level of its submissions
/// only: they go before waiting submissions of its client of a lower level, whatever their streams.
/// Their time, and time held back for them, is charged to the client's share. A request above its
/// client's ceiling goes at the ceiling. A request doesn't change the priority of a stream: use a
/// stream of the request's level. Neither copied nor moved; for one thread at a time, though others
/// may wait for its tickets. Must not outlive its limiter.
template <class Limiter>
class [[nodiscard]] request {
public:
    using stream = typename Limiter::stream;  ///< The stream that its submissions are enqueued on.

    /// Begins the request. Throws std::bad_alloc.
    request(Limiter& limiter, client_id client, request_options options = {})
        : limiter_(limiter), client_(client), options_(options) {
        const auto why = limiter_.begin_request(client_, options_.level);
        if (why != errc::none && why != errc::closed) raise(failure{why}, {}, "request");
    }
    request(const request&) = delete;             ///< Not copied.
    request& operator=(const request&) = delete;  ///< Not copied.
    /// Ends the request. Its submissions continue.
    ~request() { limiter_.end_request(client_, options_.level); }

    /// As limiter.submit, with the request's remaining time, and with the earlier of the request's
    /// deadline and that of `o`.
    [[nodiscard]] result<typename Limiter::ticket> submit(stream& s, submission_work<stream> work,
                                                          const submit_options& o = {},
                                                          submission_callback on_done = {}) {
        return limiter_.submit(client_, s, std::move(work), describe(o), std::move(on_done));
    }
    /// As limiter.acquire; waits until the deadline of the request.
    [[nodiscard]] result<typename Limiter::permit> acquire(const submit_options& o = {},
                                                           const std::stop_token& stop = {}) {
        return limiter_.acquire(client_, options_.deadline, stop, describe(o));
    }

    /// When the request is due.
    [[nodiscard]] instant deadline() const noexcept { return options_.deadline; }

private:
    [[nodiscard]] submit_options describe(submit_options o) noexcept {
        o.remaining = options_.cost;
        o.deadline = std::min(o.deadline, options_.deadline);
        o.of_request = true;
        o.priority = std::max(o.priority, options_.level);
        const ns cost = std::max(o.cost, ns{0});  // a negative cost counts as unknown
        options_.cost = options_.cost > cost ? options_.cost - cost : ns{0};
        return o;
    }

    Limiter& limiter_;
    client_id client_;
    request_options options_;
};

/// How long a gang that holds permits waits for another one, in addition to twice the bound that
/// the other device published to it. The patience doubles after each failure.
inline constexpr ns gang_patience{1'000'000};

/// The permits of a gang: one for each member, or none. Movable; one owner; for one thread at a
/// time. The destructor gives unused permits back.
template <class Limiter>
class [[nodiscard]] gang_permit {
public:
    using stream = typename Limiter::stream;  ///< The stream that members enqueue on.
    using permit = typename Limiter::permit;  ///< The permit of each limiter.

    /// One rank: a client of the limiter of one device.
    struct member {
        Limiter* limiter = nullptr;  ///< the device's limiter; must outlive the permit
        client_id client{};          ///< the client of that limiter
        device_id device{};          ///< the device, which no other member has
    };

    /// Waits for a permit of every member, as described above, at most until `deadline`; without
    /// all of them it holds none. The codes of Limiter::acquire, duplicate_device,
    /// invalid_specification (no member). A thread that holds a permit of one of these limiters
    /// must not call it, since the thread might wait for itself for ever.
    [[nodiscard]] static result<gang_permit> acquire(std::span<const member> members, instant deadline = never,
                                                     const std::stop_token& stop = {}, const submit_options& o = {}) {
        if (members.empty()) return failure{.code = errc::invalid_specification, .because = reason::no_members};
        std::vector<std::size_t> order(members.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return members[a].device < members[b].device; });
        for (std::size_t i = 1; i < order.size(); ++i)
            if (members[order[i - 1]].device == members[order[i]].device)
                return failure{.code = errc::duplicate_device,
                               .asked = members[order[i]].device.index,
                               .because = reason::device_twice};
        gang_permit g;
        g.parts_.reserve(members.size());
        int times_late = 0;
        for (std::size_t next = 0; next < order.size();) {
            const member& m = members[order[next]];
            const instant until = next == 0 ? deadline : std::min(deadline, patience_of(m, times_late));
            auto p = m.limiter->acquire(m.client, until, stop, o);
            if (p) {
                g.parts_.push_back({order[next++], m.device, *std::move(p)});
            } else {
                g.parts_.clear();  // gives the permits back
                if (p.code() != errc::deadline_exceeded || until == deadline) return p.why();
                if (auto turn = m.limiter->acquire(m.client, deadline, stop, o); !turn) return turn.why();
                ++times_late;
                next = 0;
            }
        }
        return g;
    }
    /// The same for a list of members.
    [[nodiscard]] static result<gang_permit> acquire(std::initializer_list<member> members, instant deadline = never,
                                                     const std::stop_token& stop = {}, const submit_options& o = {}) {
        return acquire(std::span<const member>(members.begin(), members.size()), deadline, stop, o);
    }

    /// Calls `enqueue_part(rank, *streams[rank])` for each member, in the order of the devices, and
    /// no other gang enqueues in between. Call once. Exceptions pass through. Later devices
    /// received no work then, so a part that was enqueued must not wait for theirs without a
    /// deadline.
    template <gang_order Order, std::invocable<std::size_t, stream&> F>
    void enqueue(Order& order, std::span<stream* const> streams, F enqueue_part) {
        std::vector<device_id> devices;
        devices.reserve(parts_.size());
        for (const auto& p : parts_) devices.push_back(p.device);
        auto parts = std::move(parts_);
        const auto guard = order.enter(devices);
        for (auto& p : parts) p.taken.enqueue(*streams[p.rank], [&](stream& s) { enqueue_part(p.rank, s); });
    }

    /// Calls `enqueue_all()` once, which enqueues on all the streams and enters the node's gang
    /// order itself, as submitted collectives do. Each member is charged what its stream takes.
    /// Returns what `enqueue_all` returns. Call once. Exceptions pass through, after the work
    /// enqueued until then is accounted for.
    template <std::invocable<> F>
    std::invoke_result_t<F&> enqueue(std::span<stream* const> streams, F enqueue_all) {
        auto parts = std::move(parts_);
        return nest(std::span(parts), streams, enqueue_all);
    }

    /// How many members' permits haven't been used yet.
    [[nodiscard]] std::size_t size() const noexcept { return parts_.size(); }

private:
    struct part;

    // The time until which the permits already held wait for the permit of `m`.
    [[nodiscard]] static instant patience_of(const member& m, int times_late) {
        const ns bound = m.limiter->bound_of(m.client);
        ns patience = saturating_add(saturating_add(bound, bound), gang_patience);
        while (times_late-- > 0) patience = saturating_add(patience, patience);
        return saturating_add(m.limiter->now(), patience);
    }

    // Enqueues each part within the part before it, so that the points of one part are around those
    // of the next.
    template <class F>
    static std::invoke_result_t<F&> nest(std::span<part> parts, std::span<stream* const> streams, F& enqueue_all) {
        if (parts.empty()) return enqueue_all();
        auto& outer = parts.front();
        const auto inner = [&] { return nest(parts.subspan(1), streams, enqueue_all); };
        if constexpr (std::is_void_v<std::invoke_result_t<F&>>) {
            outer.taken.enqueue(*streams[outer.rank], [&](stream&) { inner(); });
        } else {
            std::optional<std::invoke_result_t<F&>> came;
            outer.taken.enqueue(*streams[outer.rank], [&](stream&) { came.emplace(inner()); });
            return *std::move(came);
        }
    }

    struct part {
        std::size_t rank;
        device_id device;
        permit taken;
    };

    gang_permit() = default;
    std::vector<part> parts_;
};

/// Enqueues long work over several devices in pieces, for example a collective as one call per
/// range of its elements. Calls `enqueue_piece(i)` for i from 0, each in a gang of its own. Higher
/// levels run between two pieces. Either all ranks yield or none does, since a piece is admitted on
/// all devices before it is enqueued on any. `deadline` is the deadline of all pieces together.
/// Returns the first error of acquiring a gang or of a piece, and enqueues no further piece then.
template <class Limiter, class F>
requires std::is_invocable_r_v<errc, F&, std::size_t> errc
enqueue_in_pieces(std::span<const typename gang_permit<Limiter>::member> members,
                  std::span<typename Limiter::stream* const> streams, std::size_t pieces, F enqueue_piece,
                  instant deadline = never, const std::stop_token& stop = {}, const submit_options& o = {}) {
    for (std::size_t i = 0; i < pieces; ++i) {
        auto gang = gang_permit<Limiter>::acquire(members, deadline, stop, o);
        if (!gang) return gang.code();
        if (const errc why = gang->enqueue(streams, [&] { return enqueue_piece(i); }); why != errc::none) return why;
    }
    return errc::none;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
