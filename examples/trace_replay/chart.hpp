// SPDX-License-Identifier: Apache-2.0
// Draws time series of several runs side by side as an SVG picture of 1600 x 900. There is a column
// for each run, a row for each quantity with equal axes along the row, and one colour for each
// name. Pure functions from numbers to text.
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

/// One value for each time bin. A value that isn't finite is a gap. On a logarithmic axis, a value
/// that isn't positive is a gap, too.
struct series {
    std::string name{};  // series of the same name have the same colour throughout the chart
    std::vector<double> y{};
    double level = no_value;  // the configured value, drawn as a dashed guide
};

struct panel {
    std::string title{};
    std::string y_label{};  // shown only at the first column
    std::vector<series> lines{};
    // Draws the series as areas on top of each other, from the first series up. The levels of the
    // series add up as well.
    bool stacked = false;
    bool log_y = false;  // not allowed together with stacked
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
    double x0 = 0, dx = 1;  // the start of the first bin, and the width of each bin
    std::vector<column> columns{};
};

/// The picture. Doesn't throw because of its numbers; without any numbers, the picture says "no
/// data".
[[nodiscard]] std::string to_svg(const chart& c);

}  // namespace trace_replay
