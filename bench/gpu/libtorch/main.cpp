// SPDX-License-Identifier: Apache-2.0
// torch_figures: tests what libtorch does for tenants. engine_figures measures the speed.
//
//   torch_figures decoder|slices [JSON] [--small]
//
// --small is for machines without a device. Exit codes:
//  - 1: the run failed, a token differs, or the planted fault wasn't found;
//  - 2: the command line was wrong;
//  - 3: there is no device or driver;
//  - 4: the device or driver doesn't support the run.
#include <stdexcept>
#include <string_view>

#include <torch/headeronly/version.h>

#include "../describe.hpp"
#include "experiments.hpp"
#include "operators.hpp"

namespace {

struct asked {
    asked(int argc, char** argv) {
        for (int i = 1; i < argc; ++i) {
            const std::string_view a = argv[i];
            if (a == "--small")
                small = true;
            else if (a.starts_with('-') || json != nullptr)
                wrong();
            else if (what.empty())
                what = a;
            else
                json = argv[i];
        }
        if (what != "decoder" && what != "slices") wrong();
    }
    [[noreturn]] static void wrong() {
        throw std::invalid_argument("usage: torch_figures decoder|slices [JSON] [--small]");
    }
    std::string_view what;
    const char* json = nullptr;
    bool small = false;
};

int run(const asked& a) {
    bench::report out(bench::describe_device());
    out.setting("libtorch", TORCH_VERSION);
    bench::start_a_second_thread();
    gpu_torch::start_operators();
    bool passed = true;
    if (a.what == "decoder")
        passed = gpu_torch::decoder(out, a.small);
    else
        gpu_torch::slices(out, a.small);
    out.write(a.json);
    return passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    const auto read = [&] { return asked(argc, argv); };
    return bench::run_program("torch_figures", read, run);
}
