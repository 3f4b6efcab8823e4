// SPDX-License-Identifier: Apache-2.0
// The properties of a device, and a guard that makes a device current and restores the previous
// one.
//
//   // p.name, p.sms, p.memory
//   const gpushare::cuda::device_properties p = gpushare::cuda::query_properties(driver, 0);
//   const gpushare::cuda::primary_context context{driver, 0};
//   { const gpushare::cuda::device_guard on{context};  cudaMalloc(&q, n); }
//
// `driver` is a table of driver functions: those without an equivalent in the runtime, and some
// frequent queries. Each function is looked up in the installed driver: libcuda is never linked,
// and a function that an older driver lacks returns CUDA_ERROR_NOT_SUPPORTED.
//
//   const gpushare::cuda::driver installed = gpushare::cuda::driver::load();
//   gpushare::cuda::check(installed.mem_unmap(at, size), "unmapping");
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// A driver function that may be missing.
template <class Signature>
class entry_point;

/// A driver function with these parameters.
template <class... Args>
class entry_point<CUresult(Args...)> {
public:
    /// Looks up the function `name` as of CUDA `version` (12040 for 12.4).
    entry_point(const char* name, unsigned version) noexcept {
        void* found = nullptr;
        auto status = cudaDriverEntryPointSymbolNotFound;
        // Explicit, because the default depends on how the file is compiled.
        const auto code =
            detail::handled(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableLegacyStream, &status));
        if (code == cudaSuccess && status == cudaDriverEntryPointSuccess)
            function_ = reinterpret_cast<CUresult(CUDAAPI*)(Args...)>(found);
    }

    /// Whether the driver has the function.
    [[nodiscard]] explicit operator bool() const noexcept { return function_ != nullptr; }
    /// Calls the function; CUDA_ERROR_NOT_SUPPORTED if the driver lacks it.
    CUresult operator()(Args... args) const noexcept {
        return function_ != nullptr ? function_(args...) : CUDA_ERROR_NOT_SUPPORTED;
    }

private:
    CUresult(CUDAAPI* function_)(Args...) = nullptr;
};

/// The driver's functions, grouped by purpose. Each is named as in the driver's manual, without the
/// prefix. Immutable; safe from any thread.
class driver {
public:
    /// Looks up all functions. Throws operation_error: errc::no_driver if there is no driver.
    [[nodiscard]] static driver load() {
        int driver_version = 0;
        check(cudaDriverGetVersion(&driver_version), "looking for a CUDA driver");
        if (driver_version == 0) fail(cudaErrorInsufficientDriver, "looking for a CUDA driver");
        return driver(driver_version);
    }

    /// The newest CUDA version that the driver supports: 13000 for 13.0.
    int served_version;

    // devices and contexts
    /// cuDeviceGet.
    entry_point<decltype(::cuDeviceGet)> device_get{"cuDeviceGet", 2000};
    /// cuCtxGetCurrent.
    entry_point<decltype(::cuCtxGetCurrent)> ctx_get_current{"cuCtxGetCurrent", 4000};
    /// cuDeviceGetAttribute.
    entry_point<decltype(::cuDeviceGetAttribute)> device_get_attribute{"cuDeviceGetAttribute", 2000};
    /// cuCtxGetId.
    entry_point<decltype(::cuCtxGetId)> ctx_get_id{"cuCtxGetId", 12000};
    /// cuCtxGetDevice.
    entry_point<decltype(::cuCtxGetDevice)> ctx_get_device{"cuCtxGetDevice", 2000};
    /// cuCtxPushCurrent.
    entry_point<decltype(::cuCtxPushCurrent)> ctx_push_current{"cuCtxPushCurrent", 4000};
    /// cuCtxPopCurrent.
    entry_point<decltype(::cuCtxPopCurrent)> ctx_pop_current{"cuCtxPopCurrent", 4000};
    /// cuDevicePrimaryCtxRetain.
    entry_point<decltype(::cuDevicePrimaryCtxRetain)> primary_ctx_retain{"cuDevicePrimaryCtxRetain", 7000};
    /// cuDevicePrimaryCtxRelease.
    entry_point<decltype(::cuDevicePrimaryCtxRelease)> primary_ctx_release{"cuDevicePrimaryCtxRelease", 11000};

    // Frequent queries. The runtime has equivalents, but the driver's functions leave
    // cudaGetLastError() alone and need no context: for a thread without a context, the manual
    // (Driver API, Event Management and Stream Management) names no error for them, while the
    // runtime would give the thread the context of device 0.
    /// cuEventElapsedTime; as an exception, this one may return CUDA_ERROR_INVALID_CONTEXT.
    entry_point<decltype(::cuEventElapsedTime)> event_elapsed_time{"cuEventElapsedTime", 2000};
    /// cuEventQuery.
    entry_point<decltype(::cuEventQuery)> event_query{"cuEventQuery", 2000};
    /// cuEventRecord; here for the same reason, to leave the embedder's cudaGetLastError() alone.
    entry_point<decltype(::cuEventRecord)> event_record{"cuEventRecord", 2000};
    /// cuStreamQuery.
    entry_point<decltype(::cuStreamQuery)> stream_query{"cuStreamQuery", 2000};
    /// cuStreamIsCapturing.
    entry_point<decltype(::cuStreamIsCapturing)> stream_is_capturing{"cuStreamIsCapturing", 10000};
    /// cuThreadExchangeStreamCaptureMode.
    entry_point<decltype(::cuThreadExchangeStreamCaptureMode)> exchange_capture_mode{
        "cuThreadExchangeStreamCaptureMode", 10010};

    // streams that wait for a word in memory, or write one
    /// cuStreamWaitValue64, in the version of CUDA 12.
    entry_point<decltype(::cuStreamWaitValue64)> stream_wait_value{"cuStreamWaitValue64", 12000};
    /// cuStreamWriteValue32, in the version of CUDA 12.
    entry_point<decltype(::cuStreamWriteValue32)> stream_write_value{"cuStreamWriteValue32", 12000};

    /// cuPointerGetAttribute.
    entry_point<decltype(::cuPointerGetAttribute)> pointer_get_attribute{"cuPointerGetAttribute", 4000};

    // virtual memory
    /// cuMemGetAllocationGranularity.
    entry_point<decltype(::cuMemGetAllocationGranularity)> mem_get_granularity{"cuMemGetAllocationGranularity", 10020};
    /// cuMemAddressReserve.
    entry_point<decltype(::cuMemAddressReserve)> mem_address_reserve{"cuMemAddressReserve", 10020};
    /// cuMemAddressFree.
    entry_point<decltype(::cuMemAddressFree)> mem_address_free{"cuMemAddressFree", 10020};
    /// cuMemCreate.
    entry_point<decltype(::cuMemCreate)> mem_create{"cuMemCreate", 10020};
    /// cuMemRelease.
    entry_point<decltype(::cuMemRelease)> mem_release{"cuMemRelease", 10020};
    /// cuMemMap.
    entry_point<decltype(::cuMemMap)> mem_map{"cuMemMap", 10020};
    /// cuMemUnmap.
    entry_point<decltype(::cuMemUnmap)> mem_unmap{"cuMemUnmap", 10020};
    /// cuMemSetAccess.
    entry_point<decltype(::cuMemSetAccess)> mem_set_access{"cuMemSetAccess", 10020};

    // green contexts
    /// cuDeviceGetDevResource.
    entry_point<decltype(::cuDeviceGetDevResource)> device_get_resource{"cuDeviceGetDevResource", 12040};
    /// cuDevSmResourceSplitByCount.
    entry_point<decltype(::cuDevSmResourceSplitByCount)> sm_resource_split{"cuDevSmResourceSplitByCount", 12040};
    /// cuDevResourceGenerateDesc.
    entry_point<decltype(::cuDevResourceGenerateDesc)> resource_describe{"cuDevResourceGenerateDesc", 12040};
    /// cuGreenCtxCreate.
    entry_point<decltype(::cuGreenCtxCreate)> green_create{"cuGreenCtxCreate", 12040};
    /// cuGreenCtxDestroy.
    entry_point<decltype(::cuGreenCtxDestroy)> green_destroy{"cuGreenCtxDestroy", 12040};
    /// cuGreenCtxGetDevResource.
    entry_point<decltype(::cuGreenCtxGetDevResource)> green_get_resource{"cuGreenCtxGetDevResource", 12040};
    /// cuGreenCtxStreamCreate.
    entry_point<decltype(::cuGreenCtxStreamCreate)> green_stream_create{"cuGreenCtxStreamCreate", 12050};
    /// cuStreamGetGreenCtx.
    entry_point<decltype(::cuStreamGetGreenCtx)> stream_get_green{"cuStreamGetGreenCtx", 12040};

    /// Whether the driver has all functions of virtual memory. If one is missing, such as one that
    /// frees, the library doesn't use the feature at all.
    [[nodiscard]] bool has_virtual_memory() const noexcept {
        return mem_get_granularity && mem_address_reserve && mem_address_free && mem_create && mem_release && mem_map &&
               mem_unmap && mem_set_access;
    }
    /// The same for green contexts.
    [[nodiscard]] bool has_green_contexts() const noexcept {
        return device_get && device_get_resource && sm_resource_split && resource_describe && green_create &&
               green_destroy && green_get_resource && green_stream_create;
    }

private:
    explicit driver(int version_of_driver) noexcept : served_version(version_of_driver) {}
};

/// A device's properties; they never change.
struct device_properties {
    std::array<char, 256> name{};       ///< CUDA's name for the device
    std::array<char, 16> pci_bus_id{};  ///< "0000:3b:00.0", as the operating system spells it
    /// CUDA's number of the device, which depends on CUDA_VISIBLE_DEVICES.
    int ordinal = 0;
    std::uint32_t capability = 0;         ///< compute capability: 90 for 9.0
    std::uint32_t sms = 0;                ///< streaming multiprocessors
    std::uint32_t threads_per_sm = 0;     ///< the most resident threads of an SM
    std::uint32_t threads_per_block = 0;  ///< the most threads of a block
    std::uint32_t copy_engines = 0;       ///< how many copies can run alongside kernels
    bytes memory{};                       ///< as the device reports it; see device_memory::capacity
    bytes l2_cache{};                     ///< second-level cache
    /// The nearest NUMA node of the host; -1 if the system has none.
    std::int32_t host_numa_node = -1;
    int least_priority = 0;           ///< the lowest stream priority, as CUDA numbers it: 0
    int greatest_priority = 0;        ///< the highest, such as -5: CUDA counts down
    bool cooperative_launch = false;  ///< whether all blocks of a launch can wait for each other
    bool memory_pools = false;        ///< whether the device has stream-ordered allocation
    bool integrated = false;          ///< whether its memory is the host's

    /// CUDA's priority for `wanted`, clamped to CUDA's range. The library's levels count up from 0,
    /// which is CUDA's lowest priority.
    [[nodiscard]] constexpr int native_priority(priority wanted) const noexcept {
        const std::int64_t native = std::int64_t{least_priority} - wanted.level;
        return static_cast<int>(std::clamp<std::int64_t>(native, greatest_priority, least_priority));
    }
    /// The library's level for a priority of CUDA.
    [[nodiscard]] constexpr priority level_of(int native) const noexcept { return {least_priority - native}; }
};

/// A device's primary context, which the runtime, the embedder and the embedder's libraries use as
/// well. The context lives at least as long as this object.
class primary_context {
public:
    /// Makes the context if there is none yet. Throws operation_error (no_device, no_driver,
    /// device_lost) and memory_error. `beside_device_0`: the same node also uses the primary
    /// context of CUDA's device 0.
    primary_context(const driver& api, int ordinal, bool beside_device_0 = false)
        : api_(&api), ordinal_(ordinal), beside_device_0_(beside_device_0 || ordinal == 0) {
        check(api.device_get(&device_, ordinal), "making a device's context");
        check(api.primary_ctx_retain(&native_, device_), "making a device's context");
        (void)api.ctx_get_id(native_, &id_);
    }
    primary_context(const primary_context&) = delete;
    primary_context& operator=(const primary_context&) = delete;
    // Harmless after the driver is unloaded.
    ~primary_context() { (void)api_->primary_ctx_release(device_); }

    /// The driver's functions with which the context was made.
    [[nodiscard]] const driver& api() const noexcept { return *api_; }
    /// CUDA's number of the device.
    [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
    /// The driver's handle of the device.
    [[nodiscard]] CUdevice device() const noexcept { return device_; }
    /// Whether the runtime may make the context of device 0 current, as it does for threads without
    /// a context: the node uses that context anyway.
    [[nodiscard]] bool beside_device_0() const noexcept { return beside_device_0_; }
    /// The context.
    [[nodiscard]] CUcontext native_handle() const noexcept { return native_; }
    /// The context's id, unique over the life of the program; 0 if the driver doesn't tell.
    [[nodiscard]] unsigned long long id() const noexcept { return id_; }
    /// Whether the context is still the original one. After cudaDeviceReset or
    /// cuDevicePrimaryCtxReset, which destroy its contents, another context may have the handle.
    /// (Driver API, cuCtxGetId: unique over the life of the program.)
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

/// Makes a device current for this thread, by its primary context. The destructor restores the
/// context that was current before, or no context if there was none. Costs one call if the primary
/// context is current already.
///
/// The primary context replaces any other context, even one of the same device. Three things belong
/// to a context: an allocation ends with its context, peer access holds for a context, and a launch
/// needs the context of its stream. (Driver API, cuCtxDestroy, cuCtxEnablePeerAccess,
/// cuLaunchKernel.) The streams of green contexts take launches while the primary one is current.
///
/// The guard pushes and pops a context in place of cudaSetDevice, which would also choose the
/// device of a thread without a context, and couldn't be undone without making one. (Runtime API,
/// "Interactions with the CUDA Driver API".)
class device_guard {
public:
    /// Throws operation_error: no_device, no_driver, device_lost.
    explicit device_guard(const primary_context& of) : of_(of) { check(enter(), "making a device current"); }
    /// For functions that must not throw: sets `code` to the outcome.
    device_guard(const primary_context& of, cudaError_t& code) noexcept : of_(of) { code = to_runtime(enter()); }
    device_guard(const device_guard&) = delete;
    device_guard& operator=(const device_guard&) = delete;
    ~device_guard() {
        CUcontext ours = nullptr;
        if (entered_) (void)of_.api().ctx_pop_current(&ours);
    }

private:
    CUresult enter() noexcept {
        // Don't push a context that couldn't be popped.
        if (!of_.api().ctx_pop_current) return CUDA_ERROR_NOT_FOUND;
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

/// Gives this context to a thread without one, for calls that name a stream, an event or a pool,
/// and so work with any current context. The runtime would make the context of device 0, which
/// takes hundreds of MiB and may be another owner's device.
class context_guard {
public:
    /// Costs nothing if device 0 belongs to the same node.
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

/// The result of a call of the runtime with this device current, or the reason why the device can't
/// be made current.
template <class Call>
[[nodiscard]] cudaError_t call_in(const primary_context& of, Call&& call) {
    cudaError_t code = cudaSuccess;
    const device_guard on(of, code);
    return code == cudaSuccess ? call() : code;
}

/// Calls a driver function that may need some context. If the thread has none, the function is
/// called in this one.
template <class Call>
[[nodiscard]] CUresult in_some_context(const primary_context& of, Call call) noexcept {
    const CUresult code = call();
    if (code != CUDA_ERROR_INVALID_CONTEXT) return code;
    auto entered = cudaSuccess;
    const device_guard on(of, entered);
    return entered == cudaSuccess ? call() : code;
}

/// Keeps this thread's calls from ending captures of other threads. CUDA forbids event queries and
/// allocations during a capture unless the thread declares that it knows the consequences.
class relaxed_capture {
public:
    explicit relaxed_capture(const driver& api) noexcept { begin(api); }
    /// Does nothing until begin().
    relaxed_capture() noexcept = default;
    relaxed_capture(const relaxed_capture&) = delete;
    relaxed_capture& operator=(const relaxed_capture&) = delete;
    ~relaxed_capture() {
        if (api_ != nullptr) (void)api_->exchange_capture_mode(&mode_);
    }
    /// Begins the relaxed mode. Further calls do nothing.
    void begin(const driver& api) noexcept {
        if (api_ != nullptr) return;
        api_ = &api;
        (void)api.exchange_capture_mode(&mode_);
    }

private:
    const driver* api_ = nullptr;
    // After begin(), the mode before it.
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace detail

/// The number of devices that CUDA shows to this process. Throws operation_error: errc::no_driver,
/// or errc::no_device if there are none.
[[nodiscard]] inline std::uint32_t count_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "looking for CUDA devices");
    if (count <= 0) fail(cudaErrorNoDevice, "looking for CUDA devices");
    return static_cast<std::uint32_t>(count);
}

/// The properties of a device. Makes the device's context, if there is none. Throws
/// operation_error: no_device, no_driver.
[[nodiscard]] inline device_properties query_properties(const driver& api, int ordinal) {
    cudaDeviceProp native{};
    check(cudaGetDeviceProperties(&native, ordinal), "querying a device's properties");

    device_properties p;
    std::string_view{native.name}.copy(p.name.data(), p.name.size() - 1);
    check(cudaDeviceGetPCIBusId(p.pci_bus_id.data(), static_cast<int>(p.pci_bus_id.size()), ordinal),
          "querying a device's bus id");
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
          "querying a device's stream priorities");
    return p;
}

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
