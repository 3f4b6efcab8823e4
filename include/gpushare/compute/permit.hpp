// SPDX-License-Identifier: Apache-2.0
// A permit: the right to enqueue one submission, taken at a limiter's gate. Its work is in flight until the device is done.
//
//   auto p = limiter.acquire(chat, deadline);            // result<permit>
//   if (p) p->enqueue(stream, [&](auto& s) { s.launch(shape, kernel); });
#pragma once

#include <concepts>
#include <utility>

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
}  // namespace detail

/// Movable; one owner, one thread at a time. Unused, it is given back when it is destroyed. Must not outlive its limiter.
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

    /// Runs `enqueue_work(s)`, which enqueues onto `s`. Once only. What it throws passes through, after what it had
    /// enqueued until then is accounted for.
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

    /// The longest that its work waits for work of lower levels, as known when it was asked for; see compute_limiter::bound_of.
    [[nodiscard]] ns bound() const noexcept { return bound_; }

private:
    friend Limiter;
    using engine = typename Limiter::engine;
    permit(engine& e, typename engine::submission& s, ns bound) noexcept
        : engine_(&e), submission_(&s), bound_(bound) {}

    // Where points cost nothing: which batch it is in is seen to later.
    template <class F>
    void enqueue_between_points(stream& s, F& enqueue_work) {
        submission_->stream = &s;
        submission_->begin = s.record();
        try {
            enqueue_work(s);
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
                enqueue_work(s);
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
