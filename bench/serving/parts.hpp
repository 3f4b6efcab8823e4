// SPDX-License-Identifier: Apache-2.0
// What the parts of a server do without one: pages of KV caches under bursts, sleep and waking,
// bills.
#pragma once

#include "harness.hpp"

namespace bench::serving {

/// No engine runs; the first and the last are in virtual and modelled time.
void parts(report& r);

}  // namespace bench::serving
