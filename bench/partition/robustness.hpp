// SPDX-License-Identifier: Apache-2.0
// How value_descent fares where it wasn't made: on a half of the list that it hasn't seen, on
// changed lists, with prices of another list, and with other constants.
//
//   bench::bench_other_lists(report, trace, seeds);
#pragma once

#include <cstdint>

#include "harness.hpp"
#include "partition/trace.hpp"

namespace bench {

/// partition.*_half, partition.perturbed_*, partition.stale_*, partition.relearnt_*.
void bench_other_lists(report& r, const placement_trace& trace, std::uint64_t seeds);

/// Prints what each constant is worth on the list, on halves of it and on changed lists. No
/// figures.
void sweep_constants(const placement_trace& trace, std::uint64_t seeds);

}  // namespace bench
