// SPDX-License-Identifier: Apache-2.0
// Measures compute limiters: how exactly they divide the device, how long a high-priority tenant
// waits, and what a limiter costs. The host device's own ledger says how much device time each
// tenant really used.
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "arguments.hpp"
#include "compute/measurements.hpp"
#include "compute/rig.hpp"
#include "harness.hpp"

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv, {"decisions", "shares", "points", "engines", "latency"},
                                     {"--privileged", "threads go before those of other programs: figures end in it"});
        const bool privileged = asked.has_option();
        if (privileged && !bench::compute::go_before_other_programs())
            throw std::runtime_error("not permitted to go before other programs");
        bench::start_a_second_thread();
        bench::report r(bench::compute::configuration_text, privileged ? "_privileged" : "");
        bench::compute::machine_noise(r);
        if (asked.wants("decisions")) bench::compute::decisions(r);
        if (asked.wants("shares")) bench::compute::shares(r);
        if (asked.wants("points")) bench::compute::metering_by_points(r);
        if (asked.wants("engines")) bench::compute::engines(r);
        if (asked.wants("latency")) bench::compute::latency(r);
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_compute: %s\n", e.what());
        return 1;
    }
}
