// SPDX-License-Identifier: Apache-2.0
// Batching by iteration in modelled time. Compares tokens per second with static batches, and
// checks texts, pages and shares.
#pragma once

#include "harness.hpp"

namespace bench::serving {

/// Reports all these figures. Takes a few seconds and needs no engine.
void iteration(report& r);

}  // namespace bench::serving
