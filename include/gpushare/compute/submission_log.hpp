// SPDX-License-Identifier: Apache-2.0
// What a limiter remembers of each submission once it is over, if it is asked to: when it came, was let in, ran and was
// seen to be done. Off until then; bounded memory; the latest are kept until somebody takes them.
//
//   limiter.record(4096);                                                     // from now on; 0: no longer
//   std::array<gpushare::submission_record, 256> some;
//   for (const auto& r : std::span(some).first(limiter.take_records(some))) print(r.client, r.let_in - r.arrived);
//
// observe/limiter_trace.hpp draws them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include <gpushare/compute/detail/in_flight.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A submission that ran. Times are on the limiter's clock; `ended` is where the point behind its work lies there, as near
/// as can be told: never before it was let in, and late by no more than the limiter once took to notice an end. From
/// `began` on is what it was charged; of short submissions that were timed together each has its part of the whole.
struct submission_record {
    client_id client{};
    std::uint32_t tag = 0;  // client_settings::tag
    std::uint64_t key = 0;  // its kind
    instant arrived{}, let_in{}, began{}, ended{}, noticed{};
    ns device_time{};      // as charged
    ns bound{}, beyond{};  // on its wait once it is let in, and by how much that was longer; see limiter_core::bound_of
    errc status = errc::none;
};

namespace detail {

/// Where the points of one device lie on the host's clock. A point is seen to be reached some time after it is, so the
/// least such delay so far gives the offset between the two, and every later point is as exact. Clocks drift apart:
/// a point never lies after it was seen nor before its work was let in. A value.
template <timeline_point Point>
class point_clock {
public:
    /// `p`, which is reached, of work that was let in at `let_in`. Points that follow each other give the best result.
    [[nodiscard]] instant place(const Point& p, instant let_in, instant seen) {
        const auto at = known_ ? std::min(at_ + elapsed(latest_, p), seen) : seen;
        latest_ = p;
        known_ = true;
        return at_ = std::max(at, let_in);
    }

private:
    Point latest_{};
    instant at_{};
    bool known_ = false;
};

/// Under its limiter's mutex. Costs a load while it is off.
template <timeline_point Point>
class submission_log {
public:
    /// Forgets what is there. Throws std::bad_alloc, and then is as before.
    void start(std::size_t records, instant now) {
        std::vector<submission_record> ring(records);
        std::vector<times> slots(records == 0 ? 0 : usual);
        ring_.swap(ring);
        slots_.swap(slots);
        first_ = size_ = 0;
        lost_ = 0;
        since_ = now;
        clock_ = {};
    }
    [[nodiscard]] bool on() const noexcept { return !ring_.empty(); }

    /// `arrived`: when it came, unless the log was off.
    void let_in(std::size_t slot, instant arrived, instant now) noexcept {
        if (slot >= slots_.size()) try {
                slots_.resize(slot * 2);
            } catch (const std::bad_alloc&) {  // then there is no record of it
                return;
            }
        slots_[slot] = {std::max(arrived, since_), now, true};
    }
    void leave(std::size_t slot) noexcept {
        if (slot < slots_.size()) slots_[slot].known = false;
    }

    /// It ended, `f` as flights::finished describes it: completes what is known of it and keeps it, if it was let in while
    /// the log was on.
    template <class Finished>
    void finish(const Finished& f, submission_record r, instant now) noexcept {
        if (f.slot >= slots_.size() || !slots_[f.slot].known) return;
        r.key = f.what.key;
        r.device_time = f.cost;
        r.bound = f.what.bound;
        r.status = f.code;
        r.arrived = slots_[f.slot].arrived;
        r.let_in = slots_[f.slot].let_in;
        r.noticed = now;
        leave(f.slot);
        try {
            r.ended = std::max(clock_.place(f.end, r.let_in, now) - f.after, r.let_in);
        } catch (...) {  // copying a point may need memory
            r.ended = now;
        }
        // A stream that was idle reaches the point before the work at once: what it was charged says when the device came.
        r.began = std::max(r.ended - (r.device_time > ns{0} ? std::min(r.device_time, f.span) : f.span), r.let_in);
        push(r);
    }

    [[nodiscard]] std::size_t take(std::span<submission_record> into) noexcept {
        const auto n = std::min(into.size(), size_);
        for (std::size_t i = 0; i < n; ++i) into[i] = ring_[(first_ + i) % ring_.size()];
        size_ -= n;
        if (n != 0) first_ = (first_ + n) % ring_.size();
        return n;
    }
    [[nodiscard]] std::uint64_t lost() const noexcept { return lost_; }

private:
    static constexpr std::size_t usual = detail::most_in_flight;
    struct times {
        instant arrived{}, let_in{};
        bool known = false;
    };

    void push(const submission_record& r) noexcept {
        ring_[(first_ + size_) % ring_.size()] = r;
        if (size_ < ring_.size()) {
            ++size_;
        } else {
            first_ = (first_ + 1) % ring_.size();
            ++lost_;
        }
    }

    std::vector<submission_record> ring_;  // empty: off
    std::vector<times> slots_;             // of what is in flight
    std::size_t first_ = 0, size_ = 0;
    std::uint64_t lost_ = 0;
    instant since_{};
    point_clock<Point> clock_;
};

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
