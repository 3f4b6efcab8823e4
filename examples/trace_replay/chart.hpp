// SPDX-License-Identifier: Apache-2.0
// Draws time series of several runs side by side as an SVG picture of 1600 x 900: a column per run,
// a row per quantity, equal axes along each row, one colour per name. Pure functions from numbers
// to text.
//
//   chart c{.title = "Three tenants, one device", .x_label = "seconds", .dx = 0.5};
//   c.columns.push_back({.title = "fair shares", .panels = {{.title = "share, %", .lines = {{"chat", {33, 34}}}}}});
//   std::ofstream("chart.svg") << to_svg(c);
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace trace_replay {

inline constexpr double no_value = std::numeric_limits<double>::quiet_NaN();

/// One value per time bin. A value that isn't finite is a gap. On a logarithmic axis, so is one
/// that isn't positive.
struct series {
    std::string name{};  // series of one name have one colour throughout the chart
    std::vector<double> y{};
    double level = no_value;  // configured value, drawn as a dashed guide
};

struct panel {
    std::string title{};
    std::string y_label{};  // shown at the first column only
    std::vector<series> lines{};
    // as areas on top of each other, from the first up; levels add up likewise
    bool stacked = false;
    bool log_y = false;  // not together with stacked
    std::optional<double> y_max{};
};

/// One run.
struct column {
    std::string title{};
    std::string note{};  // a few words under the title
    std::vector<panel> panels{};
};

struct chart {
    std::string title{}, subtitle{}, x_label{};
    double x0 = 0, dx = 1;  // where the first bin starts, and the width of each
    std::vector<column> columns{};
};

/// The picture. Never throws for the sake of its numbers: without any, it says "no data".
[[nodiscard]] std::string to_svg(const chart& c);

}  // namespace trace_replay
