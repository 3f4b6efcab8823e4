// SPDX-License-Identifier: Apache-2.0
// Draws allocation against arrived demand, one line per policy, as SVG.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace bench {

struct chart_line {
    std::string label;
    std::vector<double> percent;  // by level, from `first` on
    std::string colour;
    double thickness = 1.5;
    std::string dashes{};  // as SVG has them; empty: solid
};

/// Levels `first`, `first` + 1, ... on the horizontal axis; labels at the right end, moved apart where they would overlap.
[[nodiscard]] std::string draw_chart(const std::string& title, const std::string& subtitle, int first,
                                     std::span<const chart_line> lines);

}  // namespace bench
