// SPDX-License-Identifier: Apache-2.0
// A permit: leave to enqueue one submission, taken at a limiter's gate. The work holds it until the device is done.
//
//   auto p = limiter.acquire(chat, deadline);            // result<permit>
//   if (p) p->enqueue(stream, [&](auto& s) { s.launch(shape, kernel); });
#pragma once

#include <concepts>
#include <cstddef>
#include <optional>
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

/// Movable; one owner. Unused, it is given back when it is destroyed. Must not outlive its limiter.
template <class Limiter>
class permit {
public:
    using stream = typename Limiter::stream;

    permit(permit&& other) noexcept
        : limiter_(std::exchange(other.limiter_, nullptr)), slot_(other.slot_), bound_(other.bound_) {}
    permit& operator=(permit&&) = delete;
    ~permit() {
        if (limiter_ != nullptr) limiter_->give_back(*slot_);
    }

    /// Runs `enqueue_work(s)`, which enqueues onto `s`. Once only. What it throws passes through, after what it had
    /// enqueued until then is accounted for.
    template <std::invocable<stream&> F>
    void enqueue(stream& s, F&& enqueue_work) {
        limiter_->await_turn(*slot_, s);
        if constexpr (Limiter::shares_points) {
            limiter_->board(*slot_, s);
            enqueue_boarded(s, enqueue_work);
        } else {
            enqueue_between_points(s, enqueue_work);
        }
    }

    /// The longest that its work waits for work of lower levels, as known when it was asked for; see compute_limiter::bound_of.
    [[nodiscard]] ns bound() const noexcept { return bound_; }

private:
    friend Limiter;
    permit(Limiter& limiter, typename Limiter::flight& slot, ns bound) noexcept
        : limiter_(&limiter), slot_(&slot), bound_(bound) {}

    template <class F>
    void enqueue_between_points(stream& s, F& enqueue_work) {
        slot_->stream = &s;
        slot_->begin = s.record();
        try {
            enqueue_work(s);
        } catch (...) {
            slot_->end = s.record();
            used()->land(*slot_, errc::submission_failed);
            throw;
        }
        slot_->end = s.record();
        used()->land(*slot_, errc::none);
    }

    template <class F>
    void enqueue_boarded(stream& s, F& enqueue_work) {
        bool enqueued = false;
        try {
            if (slot_->needs_begin) slot_->begin = s.record();
            enqueued = slot_->may_stay_open;
            try {
                enqueue_work(s);
            } catch (...) {
                if (slot_->needs_end) slot_->end = s.record();
                used()->land(*slot_, errc::submission_failed);
                throw;
            }
            if (slot_->needs_end) slot_->end = s.record();
        } catch (...) {
            if (limiter_ == nullptr) throw;  // accounted for
            if (enqueued)
                used()->land(*slot_, errc::submission_failed);
            else
                limiter_->unboard(*slot_);
            throw;
        }
        // Its work may share a point that is recorded dozens of launches later.
        used()->land(*slot_, detail::known_lost(s) ? errc::device_lost : errc::none);
    }

    Limiter* used() noexcept { return std::exchange(limiter_, nullptr); }

    Limiter* limiter_;
    typename Limiter::flight* slot_;
    ns bound_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
