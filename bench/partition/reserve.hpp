// SPDX-License-Identifier: Apache-2.0
// Measures reservations across devices: the cost of an uncontended reservation, and whether
// contended reservations lose anything.
//
//   bench::bench_reservations(report);        // partition.reserve_ns, partition.rollback_failures
#pragma once

#include "harness.hpp"

namespace bench {

/// Throws std::runtime_error if a reservation that must succeed fails.
void bench_reservations(report& r);

}  // namespace bench
