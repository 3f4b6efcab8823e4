// SPDX-License-Identifier: Apache-2.0
// Reports the medians of all rounds, with controls for the figures that have bars.
#pragma once

#include <vector>

#include "harness.hpp"
#include "rounds.hpp"

namespace gpu_engines {

/// Also measures the controls. `rounds` must not be empty.
void report(bench::report& out, cast& all, const std::vector<round_of>& rounds);

}  // namespace gpu_engines
