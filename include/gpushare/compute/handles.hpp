// SPDX-License-Identifier: Apache-2.0
// The two handles that a compute limiter gives. At the gate a thread gets a permit, the right to
// enqueue one submission by itself. For a callable that it queues it gets a ticket, which tells
// when the work is done and whether it failed.
//
//   auto p = limiter.acquire(chat, deadline);            // result<permit>
//   if (p) p->enqueue(stream, [&](auto& s) { s.launch(shape, kernel); });
//
//   auto t = limiter.submit(chat, stream, [&](auto& s) { s.launch(shape, kernel); });      // result<ticket>
//   t->wait();  if (t->status() != gpushare::errc::none) t->rethrow();
#pragma once

#include <atomic>
#include <concepts>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

template <class Limiter>
class async_submission;

namespace detail {
/// Whether the stream knows that its device is lost, of a backend whose streams can tell without asking the device.
template <class Stream>
[[nodiscard]] bool known_lost(const Stream& s) noexcept {
    if constexpr (requires { static_cast<bool>(s.lost()); })
        return s.lost();
    else
        return false;
}
}  // namespace detail

/// The right to enqueue one submission, whose work is in flight until the device has done it. Movable; one owner, one
/// thread at a time. The destructor gives an unused permit back. Must not outlive its limiter.
template <class Limiter>
class permit {
public:
    using stream = typename Limiter::stream;  ///< what the work is enqueued on

    /// `other` is empty afterwards.
    permit(permit&& other) noexcept
        : engine_(std::exchange(other.engine_, nullptr)),
          submission_(other.submission_),
          bound_(other.bound_),
          stream_(other.stream_) {}
    permit& operator=(permit&&) = delete;
    ~permit() {
        if (engine_ != nullptr) engine_->give_back(*submission_);
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

    /// From within the work that it was used for, on the thread that this runs on: lets higher
    /// levels have the SM. See yield_point(). Until that work is done the permit is neither moved
    /// nor destroyed.
    bool yield() noexcept {
        if constexpr (requires(stream & s) { s.yield(); })
            return stream_ != nullptr && stream_->yield();
        else
            return false;
    }

    /// The bound on its work's wait for lower levels, as known when the permit was asked for; see
    /// compute_limiter::bound_of.
    [[nodiscard]] ns bound() const noexcept { return bound_; }

private:
    friend Limiter;
    using engine = typename Limiter::engine;
    using own_work = typename detail::own_work_of<stream>::type;
    permit(engine& e, typename engine::submission& s, ns bound) noexcept
        : engine_(&e), submission_(&s), bound_(bound) {}

    // Where points cost nothing, its batch is chosen later.
    template <class F>
    void enqueue_between_points(stream& s, F& enqueue_work) {
        submission_->stream = &s;
        std::optional<own_work> mine(s);
        submission_->own = mine->how_it_went();
        submission_->begin = s.record();
        submission_->set_enqueuer(std::this_thread::get_id());
        try {
            submission_->fills = detail::run_work(s, enqueue_work);
        } catch (...) {
            submission_->end = s.record();
            mine.reset();  // what is done from here on may be others'
            used()->enqueued_by_holder(*submission_, errc::submission_failed);
            throw;
        }
        submission_->end = s.record();
        mine.reset();
        used()->enqueued_by_holder(*submission_, errc::none);
    }

    // With the points that its batch asks for.
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
            if (engine_ == nullptr) throw;  // accounted for
            if (enqueued)
                used()->enqueued_by_holder(*submission_, errc::submission_failed);
            else
                engine_->take_back(*submission_);
            throw;
        }
        // Its work may share a point that is recorded dozens of launches later.
        used()->enqueued_by_holder(*submission_, detail::known_lost(s) ? errc::device_lost : errc::none);
    }

    engine* used() noexcept {
        submission_->set_enqueuer({});
        return std::exchange(engine_, nullptr);
    }

    engine* engine_;
    typename engine::submission* submission_;
    ns bound_;
    stream* stream_ = nullptr;  // of its work; never changes once that is enqueued
};

/// The handle of a queued submission. Movable; one owner. Safe from any thread; only const members from several at
/// once. Destroying it doesn't affect the work.
template <class Limiter>
class ticket {
public:
    using stream = typename Limiter::stream;  ///< what the work is enqueued on

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

    /// True once the limiter has seen the work finish, fail or be cancelled. Never blocks and drives nothing.
    [[nodiscard]] bool done() const noexcept {
        return submission_->at.load(std::memory_order_acquire) == detail::submission_stage::done;
    }

    /// Waits, and drives the limiter meanwhile. False at the deadline or on a stop request. The limiter must still
    /// exist unless done(). Throws operation_error (stuck) where the limiter's clock only passes as
    /// its program steps it, and nothing is left to happen that would end the wait.
    bool wait(instant deadline = never, const std::stop_token& stop = {}) const {
        return done() || engine_->wait_for(*submission_, deadline, stop);
    }

    /// If it waits still, it never runs, and is done with errc::stopped: its callback is called,
    /// too. False if it was admitted or is done. The limiter must still exist unless done().
    bool cancel() const { return !done() && engine_->cancel_waiting(*submission_); }

    /// The bound on its wait for work of lower levels, as known when it came; see compute_limiter::bound_of. The bound holds while each
    /// call in flight below takes no longer than it declared, or than its kind was seen to take. No limiter can know how long the first
    /// call of a kind takes that nobody declared: one that takes longer breaks the bound, and is an event, as is the wait.
    [[nodiscard]] ns bound() const noexcept { return submission_->facts.bound; }

    /// Once done: errc::none, submission_failed (the callable threw), kernel_failed, device_lost, stuck; or,
    /// where it never ran: closed, quarantined, stopped (by cancel()), deadline_exceeded (dropped).
    [[nodiscard]] errc status() const noexcept { return submission_->status; }

    /// Once done: nothing where it went well. Else throws what the callable or the kernel threw,
    /// with its tenant's name and text; without any such, an operation_error with status(). See
    /// completion::rethrow.
    void rethrow() const { detail::rethrow(status(), submission_->failed_of, submission_->error); }

    /// Once done: when the limiter noticed, on its clock.
    [[nodiscard]] instant finished_at() const noexcept { return submission_->finished_at; }
    /// Once done: the device time that the client was charged.
    [[nodiscard]] ns device_time() const noexcept { return submission_->device_time; }

private:
    friend Limiter;
    friend async_submission<Limiter>;
    using engine = typename Limiter::engine;

    // The callback that waits for it is gone, or goes now.
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

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
