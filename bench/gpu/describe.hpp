// SPDX-License-Identifier: Apache-2.0
// Shared parts of the programs that measure on a device: the description of the device, and the
// exit code.
//
//   bench::report r(bench::describe_device());
//   return bench::run_program("figures", read_arguments, run);  // in main
#pragma once

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>

#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/error.hpp>

namespace bench {

[[nodiscard]] inline std::string version_name(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Describes the first device, on which all programs measure.
[[nodiscard]] inline std::string describe_device() {
    namespace cu = gpushare::cuda;
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

/// 3: no device or driver; 4: the device or driver doesn't support the request; 1: any other error.
[[nodiscard]] inline int exit_code(gpushare::errc why) noexcept {
    switch (why) {
        case gpushare::errc::no_driver:
        case gpushare::errc::no_device: return 3;
        case gpushare::errc::not_supported: return 4;
        default: return 1;
    }
}

/// Reads the arguments, runs the program and returns its exit code: the result of `run`,
/// exit_code() if `run` throws, or 2 if `read` throws std::invalid_argument because of a wrong
/// command line.
template <std::invocable Read, std::invocable<std::invoke_result_t<Read>> Run>
[[nodiscard]] int run_program(const char* name, Read read, Run run) {
    const auto end_with = [name](int code, const std::exception& why) {
        std::fprintf(stderr, "%s: %s\n", name, why.what());
        return code;
    };
    bool reading = true;
    try {
        const auto asked = read();
        reading = false;
        return run(asked);
    } catch (const gpushare::operation_error& e) {
        return end_with(exit_code(e.code()), e);
    } catch (const std::invalid_argument& e) {
        return end_with(reading ? 2 : 1, e);
    } catch (const std::exception& e) {
        return end_with(1, e);
    }
}

}  // namespace bench
