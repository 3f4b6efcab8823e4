// SPDX-License-Identifier: Apache-2.0
// Reports three runs of a workload: a table for each, one sentence, one chart.
//
//   std::cout << trace_replay::to_table(w, outcome) << trace_replay::verdict(w, outcomes) << '\n';
#pragma once

#include <span>
#include <string>
#include <vector>

#include "trace_replay/chart.hpp"
#include "trace_replay/replay.hpp"
#include "trace_replay/workload.hpp"

namespace trace_replay {

/// The smallest value that at least a fraction `q` of `values` doesn't exceed; NaN if there are no
/// values.
[[nodiscard]] double quantile(std::vector<double> values, double q);

[[nodiscard]] std::string to_table(const workload& w, const outcome& o);

/// The number of jobs that two or more runs finished with different bits.
[[nodiscard]] std::size_t differing_results(std::span<const outcome> runs);

/// The effect of sharing. `runs`: unlimited, fair, weighted.
[[nodiscard]] std::string verdict(const workload& w, std::span<const outcome> runs);

[[nodiscard]] chart to_chart(const workload& w, std::span<const outcome> runs);

}  // namespace trace_replay
