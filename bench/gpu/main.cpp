// SPDX-License-Identifier: Apache-2.0
// The figures that need a device, one experiment a process; run.sh runs them all.
//
//   gpu_figures --list                  names, and the seconds that each may take
//   gpu_figures --device [JSON]         which device, driver and runtime
//   gpu_figures EXPERIMENT [JSON] [--small]
//
// --small is for programs that run the experiments where no device is there.
// Exit code 1: it failed; 2: no such experiment; 3: no device or driver; 4: the device or driver can't do that.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/error.hpp>

#include "experiments.hpp"

namespace {

using gpushare::errc;
namespace cu = gpushare::cuda;

std::string version_name(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// The first device, the one that is measured.
std::string describe_device() {
    const auto driver = cu::driver::load();
    const auto count = cu::count_devices();
    const auto p = cu::query_properties(driver, 0);
    int runtime = 0;
    cu::check(cudaRuntimeGetVersion(&runtime), "asking for the version of the runtime");
    return std::string(p.name.data()) + ", compute capability " + std::to_string(p.capability / 10) + "." +
           std::to_string(p.capability % 10) + ", " + std::to_string(p.sms) + " SMs, " +
           std::to_string(p.memory.count() >> 20) + " MiB, driver for CUDA " + version_name(driver.served_version) +
           ", runtime " + version_name(runtime) + ", 1 of " + std::to_string(count) + " devices";
}

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
    bench::report r(describe_device());
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

int exit_code(errc why) {
    switch (why) {
        case errc::no_driver:
        case errc::no_device: return 3;
        case errc::not_supported: return 4;
        default: return 1;
    }
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
        return exit_code(e.code());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "gpu_figures: %s\n", e.what());
        return 1;
    }
}
