// SPDX-License-Identifier: Apache-2.0
// The parts of the collective benchmark that need no peer library.
#pragma once

#include "harness.hpp"

namespace bench::collective {

/// Compares large data with a copy of the same bytes, the smallest data with the unavoidable flags
/// and copies, and the fixed order of ranks with any order.
void floors(report& r);
/// Compares the fused step of a transformer layer with its parts in sequence.
void fused_gains(report& r);
/// Compares all-reduces and pipelines of other element types with float.
void types(report& r);

}  // namespace bench::collective
