// SPDX-License-Identifier: Apache-2.0
// Batching by iteration, in modelled time: tokens a second against static batches, and whether
// texts, pages and shares are right.
#pragma once

#include "harness.hpp"

namespace bench::serving {

/// All figures of it. Takes some seconds, and no engine.
void iteration(report& r);

}  // namespace bench::serving
