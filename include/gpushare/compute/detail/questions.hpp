// SPDX-License-Identifier: Apache-2.0
// Asks several points in one go whether they are reached. Where a backend has a cheaper way to do that than point by
// point, its point names it: `questions`, with the same member. A part of flights.hpp.
#pragma once

#include <optional>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <timeline_point Point>
struct one_by_one {
    /// The device time between the two if `end` is reached. `begin` comes before it on the same device.
    [[nodiscard]] static auto span(const Point& begin, const Point& end) noexcept
        -> std::optional<decltype(elapsed(begin, end))> {
        if (!end.reached()) return std::nullopt;
        return elapsed(begin, end);
    }
    /// The device time from one to the other, both reached; negative if `b` comes first.
    [[nodiscard]] static ns between(const Point& a, const Point& b) noexcept { return elapsed(a, b); }
};

template <timeline_point Point>
struct questions_of {
    using type = one_by_one<Point>;
};
template <timeline_point Point>
requires requires { typename Point::questions; }
struct questions_of<Point> {
    using type = typename Point::questions;
};
template <timeline_point Point>
using questions = typename questions_of<Point>::type;

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
