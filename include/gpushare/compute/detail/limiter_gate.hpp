// SPDX-License-Identifier: Apache-2.0
// The gate of a compute limiter from within: what happens between leave to enqueue and its end, for a permit. The part of compute_limiter.hpp that permit.hpp calls.
//
//   board(*slot, s);   ...the points that it asks for, and the work, under no lock...   land(*slot, errc::none);
#pragma once

#include <concepts>
#include <mutex>

#include <gpushare/compute/detail/limiter_engine.hpp>
#include <gpushare/compute/permit.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Takes the mutex where it says nothing else.
template <timeline Stream, clock Clock, compute_policy Policy>
class limiter_gate : public limiter_engine<Stream, Clock, Policy> {
    using base = limiter_engine<Stream, Clock, Policy>;

protected:
    using base::base;
    using typename base::flight;
    using typename base::hold;
    using typename base::look;

    using base::core_;
    using base::flights_;
    using base::mutex_;
    using base::sleepers_;

    static constexpr bool shares_points = base::flight_list::batch::shares;

    // Whoever comes to a gate at which nobody waits goes through where there is room: into this slot, or null, and then it
    // waits. All else that advance() would do is done when it boards, by the one reading of the clock that it takes then.
    [[nodiscard]] flight* pass(client_id c, instant now, const submit_options& o) noexcept {
        if (&o == &no_options) return pass(c, now, nullptr);
        const auto facts = head_of_line(o, now, core_.bound_of(c));
        return pass(c, now, &facts);
    }
    [[nodiscard]] flight* pass(client_id c, instant now, const queue_head* head) noexcept {
        flight* const slot = this->faulty_ || !this->left_.empty() ? nullptr : flights_.free_slot();
        if (slot == nullptr) core_.arrive(c, now, head);
        if (slot == nullptr || !core_.pass(slot->what, c, now, head)) return nullptr;
        flights_.take(*slot);
        if (this->log_.on()) this->log_.let_in(slot->number, now, this->clock_.now());
        return slot;
    }

    void await_turn(const flight& f, Stream& s) {
        if constexpr (joining_timeline<Stream>) {
            if (!core_.options().take_turns) return;  // never changes
            hold lock(mutex_);
            base::await_turn(lock, f, s);
        }
    }

    void board(flight& f, Stream& s) noexcept {
        auto now = this->batch_time();
        hold lock(mutex_);
        if (flights_.any_due(now)) {
            this->advance(lock, this->policy_time(), look::if_due);
            now = this->batch_time();
        }
        f.boarded = now;
        flights_.board(f, s, now);
    }
    void unboard(flight& f) noexcept {
        const hold lock(mutex_);
        flights_.unboard(f);
    }
    void land(flight& f, errc code) noexcept {
        if (shares_points && f.needs_end) f.landed = this->batch_time();
        if (flights_.land(f, code) || code == errc::device_lost) landed(code);
    }
    void give_back(flight& f) noexcept {
        hold lock(mutex_);
        this->leave(f);
        this->advance(lock, this->policy_time(), look::now);
    }

private:
    void landed(errc code) noexcept {
        hold lock(mutex_);
        this->end_batches(lock, nullptr, !sleepers_.empty());  // who sleeps needs a point to watch
        if (code == errc::device_lost) this->advance(lock, this->policy_time(), look::now);
        this->keep_watch();
        flights_.keep_awaiting(!sleepers_.empty());
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
