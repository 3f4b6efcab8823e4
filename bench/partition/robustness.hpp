// SPDX-License-Identifier: Apache-2.0
// Tests value_descent on lists and options for which it wasn't designed: an unseen half of the
// list, changed lists, prices from another list, and other constants.
//
//   bench::bench_other_lists(report, trace, seeds);
#pragma once

#include <cstdint>

#include "harness.hpp"
#include "partition/trace.hpp"

namespace bench {

/// Reports partition.*_half, partition.perturbed_*, partition.stale_* and partition.relearnt_*.
void bench_other_lists(report& r, const placement_trace& trace, std::uint64_t seeds);

/// Prints how each constant affects the allocation on the list, on halves of the list and on
/// changed lists. Reports no figures.
void sweep_constants(const placement_trace& trace, std::uint64_t seeds);

}  // namespace bench
