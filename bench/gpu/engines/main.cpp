// SPDX-License-Identifier: Apache-2.0
// engine_figures: runs real models of libtorch beside each other on one device, with plain threads,
// with native priorities and behind a launch gate. bench/engines.cpp does the same in virtual time.
//
//   engine_figures [JSON] [--device cpu|cuda] [--seconds N] [--small] [--more]
//
// The program repeats rounds while another round fits into the given seconds. --more measures other
// loads, graphs and a decoding model instead of rounds, and needs a device. --small uses small
// models and one short round; the figures then mean nothing. `--device cpu` is like --small without
// a device, with plain threads. Exit codes:
//  - 1: the run failed;
//  - 2: the command line was wrong;
//  - 3: there is no device or driver;
//  - 4: the device or driver doesn't support the run.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../describe.hpp"
#include "arrivals.hpp"
#include "further.hpp"
#include "harness.hpp"
#include "report.hpp"
#include "rounds.hpp"

namespace {

using namespace gpu_engines;

struct asked {
    asked(int argc, char** argv) {
        for (int i = 1; i < argc; ++i) {
            const std::string_view a = argv[i];
            if (a == "--device" && i + 1 < argc)
                on = device(argv[++i]);
            else if (a == "--small")
                small = true;
            else if (a == "--more")
                more = true;
            else if (a == "--seconds" && i + 1 < argc)
                seconds = std::stod(argv[++i]);
            else if (a.starts_with('-') || json != nullptr)
                throw std::invalid_argument(
                    "usage: engine_figures [JSON] [--device cpu|cuda] [--seconds N] [--small] [--more]");
            else
                json = argv[i];
        }
        if (more && on == place::cpu) throw std::invalid_argument("--more needs a device");
    }
    static place device(std::string_view name) {
        if (name != "cpu" && name != "cuda") throw std::invalid_argument("--device is cpu or cuda");
        return name == "cuda" ? place::cuda : place::cpu;
    }

    const char* json = nullptr;
    place on = place::cuda;
    bool small = false, more = false;
    double seconds = 220;
};

/// Starts another round if a round that takes as long as the longest round so far would end in
/// time.
std::vector<round_of> measure_rounds(cast& all, bool one, steady::time_point end) {
    std::vector<round_of> rounds;
    steady::duration longest{};
    do {
        const auto begin = steady::now();
        rounds.push_back(measure(all, rounds.size() + 1));
        longest = std::max(longest, steady::now() - begin);
        std::printf("# round %zu: %.0f s\n", rounds.size(), us_from(begin, steady::now()) / 1e6);
        std::fflush(stdout);
    } while (!one && steady::now() + longest < end);
    return rounds;
}

int run(const asked& a) {
    const auto begin = steady::now();
    start_libtorch(a.on);
    bench::report out(a.on == place::cuda ? bench::describe_device() : "no device: a trial of the program");
    out.setting("libtorch", libtorch_version());
    bench::start_a_second_thread();
    const bool small = a.small || a.on == place::cpu;
    cast all(a.on, small);
    constexpr std::chrono::seconds controls{35};
    if (a.on == place::cuda)
        out.setting("gated", can_wait_in_streams() ? "by waits in streams"
                                                   : "the driver has no waits in streams, so threads were held");
    const auto end = begin + std::chrono::duration_cast<steady::duration>(std::chrono::duration<double>(a.seconds));
    try {
        if (a.more)
            report_further(out, all, end);
        else
            report(out, all, measure_rounds(all, small, end - controls));
    } catch (...) {
        out.write(a.json);  // the figures that were measured before the error
        throw;
    }
    out.write(a.json);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const auto read = [&] { return asked(argc, argv); };
    return bench::run_program("engine_figures", read, run);
}
