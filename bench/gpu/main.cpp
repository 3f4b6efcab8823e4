// SPDX-License-Identifier: Apache-2.0
// Runs the experiments that need a device. Each experiment is a process, and run.sh runs them all.
//
//   gpu_figures --list                  names, and the seconds that each may take
//   gpu_figures --device [JSON]         which device, driver and runtime
//   gpu_figures EXPERIMENT [JSON] [--small]
//
// --small is for running the experiments on a machine without a device. Exit codes:
//  - 1: the experiment failed;
//  - 2: the experiment doesn't exist;
//  - 3: there is no device or driver;
//  - 4: the device or driver doesn't support the experiment.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "describe.hpp"
#include "experiments.hpp"

namespace {

struct asked {
    asked(int argc, char** argv) {
        if (argc > 2 && argv[argc - 1] == std::string_view("--small")) {
            bench::small_form = true;
            --argc;
        }
        if (argc > 1) what = argv[1];
        if (argc > 2) json = argv[2];
        if (what == "--list" || what == "--device") return;
        chosen = std::ranges::find(bench::experiments, what, &bench::experiment::name);
        if (chosen == bench::experiments.end())
            throw std::invalid_argument("no experiment '" + std::string(what) + "'; gpu_figures --list names them");
    }
    std::string_view what;
    const char* json = nullptr;
    decltype(bench::experiments)::const_iterator chosen = bench::experiments.end();
};

int run(const asked& a) {
    if (a.what == "--list") {
        for (const auto& e : bench::experiments) std::printf("%s %d\n", e.name, e.limit_s);
        return 0;
    }
    const bool measures = a.chosen != bench::experiments.end();
    // The driver reads this variable only once, so the variable must be set before the first call
    // of the driver.
    if (measures && a.chosen->connections != nullptr) setenv("CUDA_DEVICE_MAX_CONNECTIONS", a.chosen->connections, 1);
    bench::report r(bench::describe_device());
    if (measures) {
        bench::start_a_second_thread();
        try {
            a.chosen->run(r);
        } catch (...) {
            r.write(a.json);  // the figures that were measured before the error
            throw;
        }
    }
    r.write(a.json);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    // With lazy loading, a kernel's first launch would wait for running kernels.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    const auto read = [&] { return asked(argc, argv); };
    return bench::run_program("gpu_figures", read, run);
}
