// SPDX-License-Identifier: Apache-2.0
// The measurements of the compute benchmark.
#pragma once

#include "harness.hpp"

namespace bench::compute {

/// How late a sleeping thread wakes up, 99th percentile. A client that wakes up later than what is in flight lasts leaves
/// the device idle: beyond some 200 us the figures below are those of the machine.
void machine_noise(report& r);
/// Shares against the device's ledger, metering, lent time, convergence, cost of throughput.
void shares(report& r);
/// Requests beside best-effort work, and the published bound.
void latency(report& r);
/// What a decision costs, and the simulator.
void decisions(report& r);

}  // namespace bench::compute
