// SPDX-License-Identifier: Apache-2.0
// Catch2 with a setting that has to be made before CUDA starts, and one answer instead of many
// where there is no device: exit code 3.
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/error.hpp>

#include <cstdio>
#include <cstdlib>

#include "support/run_catch.hpp"

int main(int argc, char** argv) {
    // Loading a kernel at its first launch would wait for the kernel that waits for us.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    try {
        (void)gpushare::cuda::driver::load();
        (void)gpushare::cuda::count_devices();
    } catch (const gpushare::operation_error& e) {
        std::fprintf(stderr, "test_gpu: %s\n", e.what());
        return 3;
    }
    return support::run_catch(argc, argv);
}
