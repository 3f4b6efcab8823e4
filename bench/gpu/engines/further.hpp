// SPDX-License-Identifier: Apache-2.0
// What the rounds leave out: a graph with waits in it as the neighbour, a decoding as the urgent
// model, other loads, bursts, and two urgent tenants. A run each, with its control.
//
//   report_further(out, all, end);
#pragma once

#include "arrivals.hpp"
#include "harness.hpp"
#include "rounds.hpp"

namespace gpu_engines {

/// The most important first. None begins that may be under way at `end`.
void report_further(bench::report& out, cast& all, steady::time_point end);

}  // namespace gpu_engines
