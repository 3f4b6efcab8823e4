// SPDX-License-Identifier: Apache-2.0
// Measures cases that the rounds don't cover: a neighbour that is a graph with waits, an urgent
// model that decodes, other loads, bursts, and two urgent tenants. Each case has one run and a
// control.
//
//   report_further(out, all, end);
#pragma once

#include "arrivals.hpp"
#include "harness.hpp"
#include "rounds.hpp"

namespace gpu_engines {

/// Starts with the most important case. Skips a case that may still run at `end`.
void report_further(bench::report& out, cast& all, steady::time_point end);

}  // namespace gpu_engines
