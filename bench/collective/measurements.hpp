// SPDX-License-Identifier: Apache-2.0
// The measurements of the collective benchmark that need no peer.
#pragma once

#include "harness.hpp"

namespace bench::collective {

/// Large data against a copy of as many bytes, the smallest against the flags and copies that no
/// two-shot does without, and the fixed order of ranks against any order.
void floors(report& r);
/// The pipeline of a transformer's layer against its steps one after the other.
void fused_gains(report& r);
/// All-reduces of other elements, and other pipelines, against those of floats.
void types(report& r);

}  // namespace bench::collective
