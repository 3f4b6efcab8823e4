// SPDX-License-Identifier: Apache-2.0
// The measurements of the compute benchmark.
#pragma once

#include "harness.hpp"

namespace bench::compute {

/// From now on this thread, and those that it starts, go before the threads of other programs and
/// take turns among each other (SCHED_RR): what another program does is no part of the figures, and
/// the threads that stand for a device are no more held up by it than a device would be. False
/// where the machine doesn't permit that.
[[nodiscard]] bool go_before_other_programs() noexcept;
/// How late a sleeping thread wakes up, 99th percentile. A client that wakes up later than what is
/// in flight lasts leaves the device idle: beyond some 200 us the figures below are those of the
/// machine.
void machine_noise(report& r);
/// Shares against the device's ledger, metering, lent time, convergence, cost of throughput.
void shares(report& r);
/// Metering where only points say what was used.
void metering_by_points(report& r);
/// Opaque calls of engines: shares, metering, idle SMs while somebody waits; how long a thread is
/// kept for others' calls.
void engines(report& r);
/// Requests beside best-effort work, and the published bound.
void latency(report& r);
/// What a decision costs, and the simulator.
void decisions(report& r);

}  // namespace bench::compute
