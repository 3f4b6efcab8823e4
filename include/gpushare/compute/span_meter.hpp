// SPDX-License-Identifier: Apache-2.0
// Turns the spans of work on one device into device time, so that every instant is charged once. A span alone says too
// much: the point before a kernel is reached while the device is still busy with somebody else's.
//
//   gpushare::span_meter<stream::point> meter;
//   ns cost = meter.charge(begin, end);      // spans in the order in which they ended
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// A value; not thread-safe. The sum of all charges is the union of the spans, in whatever order they come. An instant
/// in which two spans overlap goes to the one charged first, which should be the one that ended first: exact where
/// kernels fill the device and so run one after the other.
/// Remembers the latest 32 gaps between spans; a span that began before that many isn't charged for the older ones.
template <timeline_point Point>
class span_meter {
public:
    /// Device time of the work between `begin` and `end`, both reached: what no earlier charge covers.
    [[nodiscard]] ns charge(const Point& begin, const Point& end) {
        const ns::rep length = elapsed(begin, end).count();
        if (length <= 0) return ns{0};
        const interval span = place(end, length);
        ns::rep cost = fill(span);
        if (span.end > charged_to_) {
            cost += span.end - std::max(span.begin, charged_to_);
            remember({charged_to_, span.begin});
            latest_ = end;
            charged_to_ = span.end;
        }
        return ns{cost};
    }

private:
    static constexpr std::size_t most_gaps = 32;
    static constexpr ns::rep long_ago = std::numeric_limits<ns::rep>::min();

    struct interval {  // on the meter's own time, which begins with the first span
        ns::rep begin = 0, end = 0;
    };

    [[nodiscard]] interval place(const Point& end, ns::rep length) const noexcept {
        if (charged_to_ == long_ago) return {0, length};
        const auto at = charged_to_ + elapsed(latest_, end).count();
        return {at - length, at};
    }

    void remember(const interval& gap) noexcept {
        if (gap.begin >= gap.end) return;
        if (num_gaps_ == most_gaps) {
            std::ranges::rotate(gaps_, gaps_.begin() + 1);
            --num_gaps_;
        }
        gaps_[num_gaps_++] = gap;
    }

    // Takes `span` out of the gaps. Usually it began after the latest of them.
    [[nodiscard]] ns::rep fill(const interval& span) noexcept {
        if (num_gaps_ == 0 || gaps_[num_gaps_ - 1].end <= span.begin) return 0;
        ns::rep filled = 0;
        const auto before = gaps_;
        const auto num_before = std::exchange(num_gaps_, std::size_t{0});
        for (const auto& gap : std::span(before).first(num_before)) {
            const interval common{std::max(gap.begin, span.begin), std::min(gap.end, span.end)};
            if (common.begin >= common.end) {
                remember(gap);
            } else {
                filled += common.end - common.begin;
                remember({gap.begin, common.begin});
                remember({common.end, gap.end});
            }
        }
        return filled;
    }

    Point latest_{};                          // the end that charged_to_ is the place of
    ns::rep charged_to_ = long_ago;           // the latest end so far
    std::array<interval, most_gaps> gaps_{};  // in order of time
    std::size_t num_gaps_ = 0;
};

}  // namespace gpushare::inline GPUSHARE_ABI
