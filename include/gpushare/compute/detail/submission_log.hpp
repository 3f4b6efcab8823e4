// SPDX-License-Identifier: Apache-2.0
// Records of completed submissions: when each submission arrived, was admitted, ran and was seen to
// be done. The log is off at first. Memory is bounded: only the latest records are kept until they
// are taken.
//
//   log.start(4096, now);   log.admitted(submission, now);   log.completed(submission, ...);   log.take(into);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/compute/detail/charging.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Where the points of one device fall on the host's clock. A point is seen to be reached some time
/// after it is, so the least such delay so far gives the offset between the two clocks, and every
/// later point is as exact. Clocks drift apart: a point is never placed after it was seen nor
/// before its work was admitted. A value.
template <timeline_point Point>
class point_clock {
public:
    /// The host time of `p`, which is reached, for work that was admitted at `admitted`. Passing
    /// points in order gives the best result.
    [[nodiscard]] instant place(const Point& p, instant admitted, instant seen) {
        const auto at = known_ ? std::min(at_ + elapsed(latest_, p), seen) : seen;
        latest_ = p;
        known_ = true;
        return at_ = std::max(at, admitted);
    }

private:
    Point latest_{};
    instant at_{};
    bool known_ = false;
};

/// Used under its limiter's mutex. Costs one load while the log is off.
template <timeline Stream>
class submission_log {
public:
    using submission = detail::submission<Stream>;

    /// Restarts the log and drops existing records. Throws std::bad_alloc; then nothing has
    /// changed.
    void start(std::size_t records, instant now) {
        plain_list<submission_record> ring(records);
        ring_.swap(ring);
        first_ = size_ = 0;
        lost_ = 0;
        since_ = now;
        clock_ = {};
        ++number_;  // admissions before this have no known time
    }
    [[nodiscard]] bool on() const noexcept { return !ring_.empty(); }

    void admitted(submission& s, instant now) noexcept {
        s.log_number = number_;
        s.admitted_at = now;
    }

    /// Logs a completed submission that was admitted while this log was on. `arrived`: when it
    /// came, unless the log was off. `end`: its batch's end; `part`: its own part of that batch.
    void completed(const submission& s, errc status, const client_settings& owner, const charges::part& part, ns beyond,
                   const typename Stream::point& end, instant now) noexcept {
        if (s.log_number != number_) return;
        submission_record r{.client = s.admitted.client,
                            .tag = owner.tag,
                            .name = owner.name,
                            .key = s.admitted.key,
                            .arrived = std::max(s.facts.head.arrival, since_),
                            .let_in = s.admitted_at,
                            .noticed = now,
                            .device_time = part.took,
                            .bound = s.admitted.bound,
                            .beyond = beyond,
                            .status = status};
        try {
            r.ended = std::max(clock_.place(end, r.let_in, now) - part.after, r.let_in);
        } catch (...) {  // copying a point needed memory: the time of the observation stands in
            r.ended = now;
        }
        // An idle stream reaches the point before the work immediately, so the charged time says
        // when the device began.
        r.began = std::max(r.ended - (part.took > ns{0} ? std::min(part.took, part.span) : part.span), r.let_in);
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
    void push(const submission_record& r) noexcept {
        ring_[(first_ + size_) % ring_.size()] = r;
        if (size_ < ring_.size()) {
            ++size_;
        } else {
            first_ = (first_ + 1) % ring_.size();
            ++lost_;
        }
    }

    plain_list<submission_record> ring_;  // empty: off
    std::size_t first_ = 0, size_ = 0;
    std::uint64_t lost_ = 0;
    std::uint32_t number_ = 0;
    instant since_{};
    point_clock<typename Stream::point> clock_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
