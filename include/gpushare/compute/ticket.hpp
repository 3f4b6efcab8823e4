// SPDX-License-Identifier: Apache-2.0
// A ticket: the handle of a queued submission. It tells when the work is done and whether it failed, and can be waited
// for. Destroying it doesn't affect the work.
//
//   auto t = limiter.submit(chat, stream, [&](auto& s) { s.launch(shape, kernel); });
//   t->wait();  if (t->status() != gpushare::errc::none) t->rethrow();
#pragma once

#include <atomic>
#include <memory>
#include <stop_token>
#include <utility>

#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The handle of a queued submission. Movable; one owner. Safe from any thread; only const members from several at
/// once.
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
    /// exist unless done().
    bool wait(instant deadline = never, const std::stop_token& stop = {}) const {
        return done() || engine_->wait_for(*submission_, deadline, stop);
    }

    /// If it waits still, it never runs, and is done with errc::stopped: its callback is called, too. False if it was admitted
    /// or is done. The limiter must still exist unless done().
    bool cancel() const { return !done() && engine_->cancel_waiting(*submission_); }

    /// The bound on its wait for work of lower levels, as known when it came; see compute_limiter::bound_of.
    [[nodiscard]] ns bound() const noexcept { return submission_->facts.bound; }

    /// Once done: errc::none, submission_failed (the callable threw), kernel_failed, device_lost, stuck; or,
    /// where it never ran: closed, quarantined, stopped (by cancel()), deadline_exceeded (dropped).
    [[nodiscard]] errc status() const noexcept { return submission_->status; }

    /// Once done and failed: throws what the callable or the kernel threw, with its tenant's name and text; without any
    /// such, an operation_error with status(). See completion::rethrow.
    [[noreturn]] void rethrow() const { detail::rethrow(status(), submission_->failed_of, submission_->error); }

    /// Once done: when the limiter noticed, on its clock.
    [[nodiscard]] instant finished_at() const noexcept { return submission_->finished_at; }
    /// Once done: the device time that the client was charged.
    [[nodiscard]] ns device_time() const noexcept { return submission_->device_time; }

private:
    friend Limiter;
    using engine = typename Limiter::engine;
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
