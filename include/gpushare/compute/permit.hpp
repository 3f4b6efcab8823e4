// SPDX-License-Identifier: Apache-2.0
// A permit: the right to enqueue one submission, taken at a limiter's gate. The work is in flight until the device has
// done it.
//
//   auto p = limiter.acquire(chat, deadline);            // result<permit>
//   if (p) p->enqueue(stream, [&](auto& s) { s.launch(shape, kernel); });
#pragma once

#include <concepts>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {
/// Whether the stream knows that its device is lost, of a backend whose streams can tell without asking the device.
template <class Stream>
[[nodiscard]] bool known_lost(const Stream& s) noexcept {
    if constexpr (requires { static_cast<bool>(s.lost()); })
        return s.lost();
    else
        return false;
}

/// Runs a submission's `work`. Throws what that throws, and operation_error if a launch past the stream (<<<>>>)
/// failed, on a backend whose streams can tell. The error can still be read from the backend.
template <timeline Stream, std::invocable<Stream&> F>
void run_work(Stream& s, F& work) {
    if constexpr (requires { typename Stream::launch_errors; }) {
        const typename Stream::launch_errors launches;
        work(s);
        if (const errc why = launches.found(); why != errc::none)
            raise(failure{why}, {}, "a launch within a submission");
    } else {
        work(s);
    }
}
}  // namespace detail

/// The right to enqueue one submission. Movable; one owner, one thread at a time. The destructor gives an unused permit
/// back. Must not outlive its limiter.
template <class Limiter>
class permit {
public:
    using stream = typename Limiter::stream;  ///< what the work is enqueued on

    /// `other` is empty afterwards.
    permit(permit&& other) noexcept
        : engine_(std::exchange(other.engine_, nullptr)), submission_(other.submission_), bound_(other.bound_) {}
    permit& operator=(permit&&) = delete;
    ~permit() {
        if (engine_ != nullptr) engine_->give_back(*submission_);
    }

    /// Calls `enqueue_work(s)`, which enqueues onto `s`. Once only. What it throws passes through; what it had enqueued
    /// until then is charged. Throws operation_error if a <<<>>> launch in it fails.
    template <std::invocable<stream&> F>
    void enqueue(stream& s, F&& enqueue_work) {
        engine_->await_turn(*submission_, s);
        if constexpr (engine::shares_points) {
            engine_->place(*submission_, s);
            enqueue_in_batch(s, enqueue_work);
        } else {
            enqueue_between_points(s, enqueue_work);
        }
    }

    /// The bound on its work's wait for lower levels, as known when the permit was asked for; see
    /// compute_limiter::bound_of.
    [[nodiscard]] ns bound() const noexcept { return bound_; }

private:
    friend Limiter;
    using engine = typename Limiter::engine;
    permit(engine& e, typename engine::submission& s, ns bound) noexcept
        : engine_(&e), submission_(&s), bound_(bound) {}

    // Where points cost nothing, its batch is chosen later.
    template <class F>
    void enqueue_between_points(stream& s, F& enqueue_work) {
        submission_->stream = &s;
        submission_->begin = s.record();
        try {
            detail::run_work(s, enqueue_work);
        } catch (...) {
            submission_->end = s.record();
            used()->enqueued_by_holder(*submission_, errc::submission_failed);
            throw;
        }
        submission_->end = s.record();
        used()->enqueued_by_holder(*submission_, errc::none);
    }

    // With the points that its batch asks for.
    template <class F>
    void enqueue_in_batch(stream& s, F& enqueue_work) {
        bool enqueued = false;
        try {
            if (submission_->needs_begin) submission_->begin = s.record();
            enqueued = submission_->may_stay_open;
            try {
                detail::run_work(s, enqueue_work);
            } catch (...) {
                if (submission_->needs_end) submission_->end = s.record();
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

    engine* used() noexcept { return std::exchange(engine_, nullptr); }

    engine* engine_;
    typename engine::submission* submission_;
    ns bound_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
