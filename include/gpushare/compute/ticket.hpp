// SPDX-License-Identifier: Apache-2.0
// A ticket: what a client holds of a submission that it queued. It tells when the work is done and whether it failed,
// and can be waited for. Dropping it changes nothing about the work.
//
//   auto t = limiter.submit(chat, stream, [&](auto& s) { s.launch(shape, kernel); });
//   t->wait();  if (t->status() != gpushare::errc::none) t->rethrow();
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <utility>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// What enqueues the work of one submission. Stored in place: a callable of up to 128 bytes.
template <timeline Stream>
using submission_work = detail::inplace_function<void(Stream&), 128>;

namespace detail {

enum class phase : std::uint8_t { waiting, let_in, done };

/// One submission. Under its limiter's mutex, but for what `at` publishes.
template <timeline Stream>
struct submission {
    submission* next = nullptr;
    submission_work<Stream> work;  // empty: a thread waits at the gate and enqueues for itself
    Stream* stream = nullptr;
    client_id client;
    line_head facts{};
    std::size_t slot = 0;  // of the permit, once a thread at the gate is let in
    // done is stored with release after the fields below are final, and loaded with acquire before they are read.
    std::atomic<phase> at{phase::waiting};
    errc code = errc::none;
    std::exception_ptr error;
    instant finished_at{};
    ns device_time{};
    std::atomic<int> owners{0};  // limiter and ticket; acq_rel when it falls, so that the last one sees all

    /// Enqueues the work between two points, of which the first may be known already. False if they couldn't both be recorded: it can't be charged. Sets `code`
    /// and `error` if something threw. Runs code of the user's: under no lock.
    bool run(std::optional<typename Stream::point>& begin, typename Stream::point& end) noexcept {
        const auto failed = [this] {
            code = errc::submission_failed;
            error = std::current_exception();
        };
        bool recorded = false;
        try {
            if (!begin) begin = stream->record();
            try {
                work(*stream);
            } catch (...) {  // what it had enqueued before it threw is charged like the rest
                failed();
            }
            end = stream->record();
            recorded = true;
        } catch (...) {
            failed();
        }
        work.reset();
        return recorded;
    }
};

/// What waits of one client, in the order in which it came.
template <timeline Stream>
struct client_queue {
    fifo<submission<Stream>> waiting;
    bool closing = false;

    /// What is known of the first, or of the one behind it; it must be there.
    [[nodiscard]] line_head head(bool second) const noexcept {
        return (second ? waiting.front()->next : waiting.front())->facts;
    }
};

/// Submissions outlive their limiter where somebody still holds a ticket.
template <timeline Stream>
class submission_pool {
public:
    [[nodiscard]] submission<Stream>& acquire() {
        const std::lock_guard lock(mutex_);
        auto& s = pool_.acquire();
        s.at.store(phase::waiting, std::memory_order_relaxed);
        s.owners.store(2, std::memory_order_relaxed);
        s.code = errc::none;
        return s;
    }

    void drop(submission<Stream>& s) noexcept {
        if (s.owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        s.work.reset();
        s.error = nullptr;
        const std::lock_guard lock(mutex_);
        pool_.release(s);
    }

private:
    std::mutex mutex_;
    pool<submission<Stream>> pool_;
};

}  // namespace detail

/// Movable; one owner. Safe from any thread, but not from two at once.
template <class Limiter>
class ticket {
public:
    using stream = typename Limiter::stream;

    ticket(Limiter& limiter, std::shared_ptr<detail::submission_pool<stream>> pool,
           detail::submission<stream>& submission) noexcept
        : limiter_(&limiter), pool_(std::move(pool)), submission_(&submission) {}
    ticket(ticket&& other) noexcept
        : limiter_(other.limiter_),
          pool_(std::move(other.pool_)),
          submission_(std::exchange(other.submission_, nullptr)) {}
    ticket& operator=(ticket&& other) noexcept {
        ticket(std::move(other)).swap(*this);
        return *this;
    }
    ~ticket() {
        if (submission_ != nullptr) pool_->drop(*submission_);
    }

    /// True once the limiter has seen the work finish, fail or be cancelled. Never blocks and drives nothing.
    [[nodiscard]] bool done() const noexcept {
        return submission_->at.load(std::memory_order_acquire) == detail::phase::done;
    }

    /// Waits, and drives the limiter meanwhile. False at the deadline or on a stop request. The limiter must still
    /// exist unless done().
    bool wait(instant deadline = never, const std::stop_token& stop = {}) const {
        return done() || limiter_->wait_for(*submission_, deadline, stop);
    }

    /// Once done: errc::none, submission_failed (the callable threw), kernel_failed, device_lost, or closed (it was
    /// cancelled before it was let in).
    [[nodiscard]] errc status() const noexcept { return submission_->code; }

    /// Once done and failed: throws what the callable threw, else operation_error with status().
    [[noreturn]] void rethrow() const {
        if (submission_->error) std::rethrow_exception(submission_->error);
        raise(failure{status()}, {}, "submission");
    }

    /// Once done: when the limiter noticed, on its clock.
    [[nodiscard]] instant finished_at() const noexcept { return submission_->finished_at; }
    /// Once done: the device time that the client was charged.
    [[nodiscard]] ns device_time() const noexcept { return submission_->device_time; }

private:
    void swap(ticket& other) noexcept {
        std::swap(limiter_, other.limiter_);
        std::swap(pool_, other.pool_);
        std::swap(submission_, other.submission_);
    }

    Limiter* limiter_;
    std::shared_ptr<detail::submission_pool<stream>> pool_;
    detail::submission<stream>* submission_;
};

}  // namespace gpushare::inline GPUSHARE_ABI
