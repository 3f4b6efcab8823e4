// SPDX-License-Identifier: Apache-2.0
// The figures of compute limiters: how well shares hold, what a high-priority tenant waits, what it costs. The truth about
// device time is the host device's own ledger.
#include <cstdio>
#include <exception>
#include <string_view>

#include "compute/measurements.hpp"
#include "compute/rig.hpp"
#include "harness.hpp"

int main(int argc, char** argv) {
    try {
        bench::start_a_second_thread();
        bench::report r(bench::compute::configuration_text);
        const std::string_view part = argc > 2 ? argv[2] : "";  // one of these alone
        bench::compute::machine_noise(r);
        if (part.empty() || part == "decisions") bench::compute::decisions(r);
        if (part.empty() || part == "shares") bench::compute::shares(r);
        if (part.empty() || part == "latency") bench::compute::latency(r);
        r.write(argc > 1 ? argv[1] : nullptr);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_compute: %s\n", e.what());
        return 1;
    }
}
