// SPDX-License-Identifier: Apache-2.0
// Measures the cost of handing memory from one tenant to another: through arenas, and through free
// and allocate.
//
//   bench::arena(report);
#pragma once

#include "harness.hpp"

namespace bench {

/// Adds the figures memory.arena_*.
void arena(report& r);

}  // namespace bench
