// SPDX-License-Identifier: Apache-2.0
// The figures that need a device, one experiment a process; run.sh runs them all.
//
//   gpu_figures --list                  names, and the seconds that each may take
//   gpu_figures --device [JSON]         which device, driver and runtime
//   gpu_figures EXPERIMENT [JSON] [--small]
//
// --small is for programs that run the experiments where no device is there. Exit code 1: it
// failed; 2: no such experiment; 3: no device or driver; 4: the device or driver can't do that.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

#include <gpushare/error.hpp>

#include "describe.hpp"
#include "experiments.hpp"

namespace {

int run(std::string_view what, const char* json) {
    if (what == "--list") {
        for (const auto& e : bench::experiments) std::printf("%s %d\n", e.name, e.limit_s);
        return 0;
    }
    const auto e = std::ranges::find(bench::experiments, what, &bench::experiment::name);
    if (e == bench::experiments.end() && what != "--device") {
        std::fprintf(stderr, "gpu_figures: no experiment '%s'; gpu_figures --list names them\n",
                     std::string(what).c_str());
        return 2;
    }
    bench::report r(bench::describe_device());
    if (e != bench::experiments.end()) {
        bench::start_a_second_thread();
        try {
            e->run(r);
        } catch (...) {
            r.write(json);  // what was measured until then
            throw;
        }
    }
    r.write(json);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    // Loading a kernel at its first launch would wait for the kernels that run.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    if (argc > 2 && argv[argc - 1] == std::string_view("--small")) {
        bench::small_form = true;
        --argc;
    }
    try {
        return run(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : nullptr);
    } catch (const gpushare::operation_error& e) {
        std::fprintf(stderr, "gpu_figures: %s\n", e.what());
        return bench::exit_code(e.code());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "gpu_figures: %s\n", e.what());
        return 1;
    }
}
