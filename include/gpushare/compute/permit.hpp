// SPDX-License-Identifier: Apache-2.0
// A permit: leave to enqueue one submission, taken at a limiter's gate. The work holds it until the device is done.
//
//   auto p = limiter.acquire(chat, deadline);            // result<permit>
//   if (p) p->enqueue(stream, [&](auto& s) { s.launch(shape, kernel); });
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// Movable; one owner. Unused, it is given back when it is destroyed. Must not outlive its limiter.
template <class Limiter>
class permit {
public:
    using stream = typename Limiter::stream;

    permit(permit&& other) noexcept : limiter_(std::exchange(other.limiter_, nullptr)), slot_(other.slot_) {}
    permit& operator=(permit&&) = delete;
    ~permit() {
        if (limiter_ != nullptr) limiter_->give_back(slot_);
    }

    /// Runs `enqueue_work(s)`, which enqueues onto `s`. Once only. What it throws passes through, after what it had
    /// enqueued until then is accounted for.
    template <std::invocable<stream&> F>
    void enqueue(stream& s, F&& enqueue_work) {
        auto begin = s.record();
        try {
            std::forward<F>(enqueue_work)(s);
        } catch (...) {
            auto end = s.record();
            std::exchange(limiter_, nullptr)
                ->land_permit(slot_, s, std::move(begin), std::move(end), errc::submission_failed);
            throw;
        }
        auto end = s.record();
        std::exchange(limiter_, nullptr)->land_permit(slot_, s, std::move(begin), std::move(end), errc::none);
    }

private:
    friend Limiter;
    permit(Limiter& limiter, std::size_t slot) noexcept : limiter_(&limiter), slot_(slot) {}

    Limiter* limiter_;
    std::size_t slot_;
};

}  // namespace gpushare::inline GPUSHARE_ABI
