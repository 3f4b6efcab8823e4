// SPDX-License-Identifier: Apache-2.0
// A device: what it is like, and making it current for a call and putting back what was current before.
//
//   const cuda::device_properties p = cuda::query_properties(0);      // p.name, p.sms, p.memory
//   { const cuda::device_guard on{driver, 0};  cudaMalloc(&q, n); }
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <gpushare/backend/cuda/driver.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// What a device is like; never changes.
struct device_properties {
    std::array<char, 256> name{};
    std::array<char, 16> pci_bus_id{};    // "0000:3b:00.0", as the operating system spells it
    int ordinal = 0;                      // CUDA's number, which CUDA_VISIBLE_DEVICES changes
    std::uint32_t capability = 0;         // compute capability: 90 for 9.0
    std::uint32_t sms = 0;                // streaming multiprocessors
    std::uint32_t threads_per_sm = 0;     // resident at once
    std::uint32_t threads_per_block = 0;  // at most
    std::uint32_t copy_engines = 0;       // copies that run beside kernels
    bytes memory{};                       // as the device reports it; see device_memory::capacity
    bytes l2_cache{};                     // second-level cache
    std::int32_t host_numa_node = -1;     // the nearest; -1 where the system has none
    int least_priority = 0;               // CUDA's range, which counts down: 0 ...
    int greatest_priority = 0;            // ... to -5
    bool cooperative_launch = false;      // all blocks of a launch can wait for each other
    bool memory_pools = false;            // stream-ordered allocation
    bool integrated = false;              // its memory is the host's

    /// CUDA's priority for `wanted`, clamped to its range. Ours counts up from 0, which is CUDA's lowest.
    [[nodiscard]] constexpr int native_priority(priority wanted) const noexcept {
        const std::int64_t native = std::int64_t{least_priority} - wanted.level;
        return static_cast<int>(std::clamp<std::int64_t>(native, greatest_priority, least_priority));
    }
    /// Ours for one of CUDA's.
    [[nodiscard]] constexpr priority level_of(int native) const noexcept { return {least_priority - native}; }
};

/// Makes a device current for this thread and, when it ends, whatever was current before. Costs one call where it is
/// current already.
class device_guard {
public:
    /// any: some context of the device, such as a green one that the thread has made current; primary: that one.
    enum class context : bool { any, primary };

    /// Throws operation_error: no_device, no_driver, device_lost.
    device_guard(const driver& api, int ordinal, context wanted = context::any) : api_(api) {
        check(enter(ordinal, wanted), "making a device current");
    }
    /// For functions that must not throw: says in `code` how it went.
    device_guard(const driver& api, int ordinal, context wanted, cudaError_t& code) noexcept : api_(api) {
        code = detail::handled(enter(ordinal, wanted));
    }
    device_guard(const device_guard&) = delete;
    device_guard& operator=(const device_guard&) = delete;
    ~device_guard() {
        if (!entered_) return;
        // A thread that had no context gets none: that of its device would take hundreds of MiB.
        if (context_ != nullptr || !active(device_))
            (void)api_.ctx_set_current(context_);
        else
            (void)detail::handled(cudaSetDevice(device_));
    }

private:
    cudaError_t enter(int ordinal, context wanted) noexcept {
        if (const auto code = cudaGetDevice(&device_); code != cudaSuccess) return code;
        if (device_ == ordinal && wanted == context::any) return cudaSuccess;
        if (api_.ctx_get_current(&context_) != CUDA_SUCCESS) context_ = nullptr;
        const auto code = cudaSetDevice(ordinal);
        entered_ = code == cudaSuccess && (device_ != ordinal || context_ != nullptr);
        return code;
    }

    [[nodiscard]] bool active(int ordinal) const noexcept {
        CUdevice device = 0;
        unsigned flags = 0;
        int is_active = 0;
        return api_.device_get(&device, ordinal) == CUDA_SUCCESS &&
               api_.primary_ctx_get_state(device, &flags, &is_active) == CUDA_SUCCESS && is_active != 0;
    }

    const driver& api_;
    CUcontext context_ = nullptr;
    int device_ = 0;
    bool entered_ = false;
};

namespace detail {

/// This thread's calls don't end captures that other threads have under way: asking an event and allocating are
/// forbidden beside a capture unless the thread says that it knows what it does.
class relaxed_capture {
public:
    enum class from : bool { now, later };

    explicit relaxed_capture(from when = from::now) noexcept {
        if (when == from::now) begin();
    }
    relaxed_capture(const relaxed_capture&) = delete;
    relaxed_capture& operator=(const relaxed_capture&) = delete;
    ~relaxed_capture() {
        if (begun_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    }
    /// Does nothing the second time.
    void begin() noexcept {
        if (begun_) return;
        (void)cudaThreadExchangeStreamCaptureMode(&mode_);
        begun_ = true;
    }

private:
    bool begun_ = false;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then, what it was before
};

}  // namespace detail

/// How many devices CUDA shows to this process. Throws operation_error: errc::no_driver, or errc::no_device if there
/// are none.
[[nodiscard]] inline std::uint32_t count_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "looking for CUDA devices");
    if (count <= 0) fail(cudaErrorNoDevice, "looking for CUDA devices");
    return static_cast<std::uint32_t>(count);
}

/// `driver` is only for making the device current. Throws operation_error: no_device, no_driver.
[[nodiscard]] inline device_properties query_properties(const driver& api, int ordinal) {
    cudaDeviceProp native{};
    check(cudaGetDeviceProperties(&native, ordinal), "asking a device for its properties");

    device_properties p;
    std::string_view{native.name}.copy(p.name.data(), p.name.size() - 1);
    check(cudaDeviceGetPCIBusId(p.pci_bus_id.data(), static_cast<int>(p.pci_bus_id.size()), ordinal),
          "asking a device for its bus id");
    const auto count = [](int n) { return static_cast<std::uint32_t>(std::max(n, 0)); };
    p.ordinal = ordinal;
    p.capability = count(native.major * 10 + native.minor);
    p.sms = count(native.multiProcessorCount);
    p.threads_per_sm = count(native.maxThreadsPerMultiProcessor);
    p.threads_per_block = count(native.maxThreadsPerBlock);
    p.copy_engines = count(native.asyncEngineCount);
    p.memory = bytes{native.totalGlobalMem};
    p.l2_cache = bytes{count(native.l2CacheSize)};
    p.host_numa_node = native.hostNumaId;
    p.cooperative_launch = native.cooperativeLaunch != 0;
    p.memory_pools = native.memoryPoolsSupported != 0;
    p.integrated = native.integrated != 0;
    const device_guard on(api, ordinal);
    check(cudaDeviceGetStreamPriorityRange(&p.least_priority, &p.greatest_priority),
          "asking a device for its stream priorities");
    return p;
}

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
