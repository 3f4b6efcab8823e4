// SPDX-License-Identifier: Apache-2.0
// The parts of the compute benchmark.
#pragma once

#include "harness.hpp"

namespace bench::compute {

/// From now on, this thread and the threads that it starts run before the threads of other programs
/// and take turns with each other (SCHED_RR). Other programs then don't affect the figures, and the
/// threads that act as a device aren't delayed more than a device would be. Returns false if the
/// system doesn't permit this.
[[nodiscard]] bool go_before_other_programs() noexcept;
/// Measures how late a sleeping thread wakes up, as a 99th percentile. A client that wakes up after
/// the work in flight has finished leaves the device idle. Beyond some 200 us, the other figures
/// describe the machine and not the limiter.
void machine_noise(report& r);
/// Measures shares against the device's ledger, metering, lent time, convergence and the cost in
/// throughput.
void shares(report& r);
/// Measures metering on a device that reveals only when points were reached.
void metering_by_points(report& r);
/// Measures opaque calls of engines: shares, metering, SMs that idle while a tenant waits, and how
/// long a thread is kept for other threads' calls.
void engines(report& r);
/// Measures requests beside best-effort work, and the published bound.
void latency(report& r);
/// Measures the cost of a decision, and the simulator's speed.
void decisions(report& r);

}  // namespace bench::compute
