// SPDX-License-Identifier: Apache-2.0
// The properties of a device, and a guard that makes a device current and restores the previous one.
//
//   const gpushare::cuda::device_properties p = gpushare::cuda::query_properties(driver, 0);  // p.name, p.sms, p.memory
//   const gpushare::cuda::primary_context context{driver, 0};
//   { const gpushare::cuda::device_guard on{context};  cudaMalloc(&q, n); }
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

/// A device's properties; they never change.
struct device_properties {
    std::array<char, 256> name{};         ///< as CUDA calls it
    std::array<char, 16> pci_bus_id{};    ///< "0000:3b:00.0", as the operating system spells it
    int ordinal = 0;                      ///< CUDA's number, which CUDA_VISIBLE_DEVICES changes
    std::uint32_t capability = 0;         ///< compute capability: 90 for 9.0
    std::uint32_t sms = 0;                ///< streaming multiprocessors
    std::uint32_t threads_per_sm = 0;     ///< resident at once
    std::uint32_t threads_per_block = 0;  ///< at most
    std::uint32_t copy_engines = 0;       ///< copies that run beside kernels
    bytes memory{};                       ///< as the device reports it; see device_memory::capacity
    bytes l2_cache{};                     ///< second-level cache
    std::int32_t host_numa_node = -1;     ///< the nearest; -1 where the system has none
    int least_priority = 0;               ///< CUDA's range, which counts down: 0 ...
    int greatest_priority = 0;            ///< ... to -5
    bool cooperative_launch = false;      ///< all blocks of a launch can wait for each other
    bool memory_pools = false;            ///< stream-ordered allocation
    bool integrated = false;              ///< its memory is the host's

    /// CUDA's priority for `wanted`, clamped to its range. Ours counts up from 0, which is CUDA's lowest.
    [[nodiscard]] constexpr int native_priority(priority wanted) const noexcept {
        const std::int64_t native = std::int64_t{least_priority} - wanted.level;
        return static_cast<int>(std::clamp<std::int64_t>(native, greatest_priority, least_priority));
    }
    /// Ours for one of CUDA's.
    [[nodiscard]] constexpr priority level_of(int native) const noexcept { return {least_priority - native}; }
};

/// A device's primary context, which the runtime, the embedder and its libraries use as well; here
/// for as long as this is.
class primary_context {
public:
    /// Makes it where there is none yet. Throws operation_error: no_device, no_driver, device_lost; memory_error.
    /// `beside_device_0`: that of CUDA's device 0 is used by the same node.
    primary_context(const driver& api, int ordinal, bool beside_device_0 = false)
        : api_(&api), ordinal_(ordinal), beside_device_0_(beside_device_0 || ordinal == 0) {
        check(api.device_get(&device_, ordinal), "making a device's context");
        check(api.primary_ctx_retain(&native_, device_), "making a device's context");
        (void)api.ctx_get_id(native_, &id_);
    }
    primary_context(const primary_context&) = delete;
    primary_context& operator=(const primary_context&) = delete;
    ~primary_context() { (void)api_->primary_ctx_release(device_); }  // harmless after the driver is unloaded

    /// The functions that it was made with.
    [[nodiscard]] const driver& api() const noexcept { return *api_; }
    /// CUDA's number of the device.
    [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
    /// The driver's handle of the device.
    [[nodiscard]] CUdevice device() const noexcept { return device_; }
    /// Whether it does no harm when the runtime makes the context of device 0 current, as it does
    /// for threads that have none.
    [[nodiscard]] bool beside_device_0() const noexcept { return beside_device_0_; }
    /// The context.
    [[nodiscard]] CUcontext native_handle() const noexcept { return native_; }
    /// Unique over the life of the program; 0 where the driver doesn't say.
    [[nodiscard]] unsigned long long id() const noexcept { return id_; }
    /// Whether it is the one that was made. It isn't after cudaDeviceReset or
    /// cuDevicePrimaryCtxReset, which destroy what it had: the handle may be that of another one
    /// then. (Driver API, cuCtxGetId: unique over the life of the program.)
    [[nodiscard]] bool is_as_made() const noexcept {
        unsigned long long now = 0;
        return !api_->ctx_get_id || (api_->ctx_get_id(native_, &now) == CUDA_SUCCESS && now == id_);
    }

private:
    const driver* api_;
    int ordinal_;
    bool beside_device_0_;
    CUdevice device_ = 0;
    CUcontext native_ = nullptr;
    unsigned long long id_ = 0;
};

/// Makes a device current for this thread, by its primary context, and when it ends, whatever was
/// current before, be it no context at all. Costs one call where that is current already.
///
/// Another context of the device that is current isn't kept: what is allocated in one of
/// cuCtxCreate's goes with it, peers are those of a context, and a launch needs the context of its
/// stream. (Driver API, cuCtxDestroy, cuCtxEnablePeerAccess, cuLaunchKernel.) The streams of green
/// contexts take launches while the primary one is current.
///
/// By pushing and popping a context, not by cudaSetDevice: that would also choose the device of a
/// thread that has no context yet, and couldn't be taken back without making one. (Runtime API,
/// "Interactions with the CUDA Driver API".)
class device_guard {
public:
    /// Throws operation_error: no_device, no_driver, device_lost.
    explicit device_guard(const primary_context& of) : of_(of) { check(enter(), "making a device current"); }
    /// For functions that must not throw: says in `code` how it went.
    device_guard(const primary_context& of, cudaError_t& code) noexcept : of_(of) { code = to_runtime(enter()); }
    device_guard(const device_guard&) = delete;
    device_guard& operator=(const device_guard&) = delete;
    ~device_guard() {
        CUcontext ours = nullptr;
        if (entered_) (void)of_.api().ctx_pop_current(&ours);
    }

private:
    CUresult enter() noexcept {
        if (!of_.api().ctx_pop_current) return CUDA_ERROR_NOT_FOUND;  // what can't be taken back isn't begun
        CUcontext now = nullptr;
        if (const auto code = of_.api().ctx_get_current(&now); code != CUDA_SUCCESS) return code;
        if (now == of_.native_handle()) return CUDA_SUCCESS;
        const CUresult code = of_.api().ctx_push_current(of_.native_handle());
        entered_ = code == CUDA_SUCCESS;
        return code;
    }

    const primary_context& of_;
    bool entered_ = false;
};

namespace detail {

/// Gives a thread that has no context this one, for calls that name a stream, an event or a pool,
/// and so don't mind which context is current: the runtime would make that of device 0, which takes
/// hundreds of MiB and may be somebody else's.
class context_guard {
public:
    /// Costs nothing where device 0 is of the same node.
    explicit context_guard(const primary_context& of) noexcept {
        if (of.beside_device_0() || !of.api().ctx_pop_current) return;
        CUcontext now = nullptr;
        if (of.api().ctx_get_current(&now) == CUDA_SUCCESS && now == nullptr)
            if (of.api().ctx_push_current(of.native_handle()) == CUDA_SUCCESS) entered_ = &of;
    }
    context_guard(const context_guard&) = delete;
    context_guard& operator=(const context_guard&) = delete;
    ~context_guard() {
        CUcontext ours = nullptr;
        if (entered_ != nullptr) (void)entered_->api().ctx_pop_current(&ours);
    }

private:
    const primary_context* entered_ = nullptr;
};

/// This thread's calls don't end captures that other threads have under way: asking an event and allocating are
/// forbidden beside a capture unless the thread says that it knows what it does.
class relaxed_capture {
public:
    explicit relaxed_capture(const driver& api) noexcept { begin(api); }
    /// Begins later, or never.
    relaxed_capture() noexcept = default;
    relaxed_capture(const relaxed_capture&) = delete;
    relaxed_capture& operator=(const relaxed_capture&) = delete;
    ~relaxed_capture() {
        if (api_ != nullptr) (void)api_->exchange_capture_mode(&mode_);
    }
    /// Does nothing the second time.
    void begin(const driver& api) noexcept {
        if (api_ != nullptr) return;
        api_ = &api;
        (void)api.exchange_capture_mode(&mode_);
    }

private:
    const driver* api_ = nullptr;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // then, what it was before
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

/// Makes the device's context, if there is none. Throws operation_error: no_device, no_driver.
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
    const primary_context context(api, ordinal);
    const device_guard on(context);
    check(cudaDeviceGetStreamPriorityRange(&p.least_priority, &p.greatest_priority),
          "asking a device for its stream priorities");
    return p;
}

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
