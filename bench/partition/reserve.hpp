// SPDX-License-Identifier: Apache-2.0
// Figures of reservations across devices: what an uncontended one costs, and that contended ones
// lose nothing.
//
//   bench::bench_reservations(report);        // partition.reserve_ns, partition.rollback_failures
#pragma once

#include "harness.hpp"

namespace bench {

/// Throws std::runtime_error if a reservation that must succeed doesn't.
void bench_reservations(report& r);

}  // namespace bench
