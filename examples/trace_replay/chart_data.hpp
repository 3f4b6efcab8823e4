// SPDX-License-Identifier: Apache-2.0
// A chart as data, which is written beside the picture. A reader sees which numbers the picture was
// drawn from, and can draw it again.
//
//   const std::string text = data_of(c);    std::ofstream("chart.svg") << to_svg(chart_of(text));
#pragma once

#include <string>
#include <string_view>

#include "trace_replay/chart.hpp"

namespace trace_replay {

/// A JSON string, with its quotation marks.
[[nodiscard]] std::string quoted(std::string_view text);
/// JSON with the text `head` first ("\"date\": \"2026-11-26\","; may be empty), followed by the
/// chart, with numbers of six digits.
[[nodiscard]] std::string data_of(const chart& c, std::string_view head = {});
/// The chart of such a text. Throws std::runtime_error if the text isn't a chart.
[[nodiscard]] chart chart_of(std::string_view json);

}  // namespace trace_replay
