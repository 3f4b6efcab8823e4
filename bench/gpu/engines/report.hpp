// SPDX-License-Identifier: Apache-2.0
// The figures of all rounds, medians, and the controls of those with bars.
#pragma once

#include <vector>

#include "harness.hpp"
#include "rounds.hpp"

namespace gpu_engines {

/// Measures the controls as well. `rounds` isn't empty.
void report(bench::report& out, cast& all, const std::vector<round_of>& rounds);

}  // namespace gpu_engines
