// SPDX-License-Identifier: Apache-2.0
// The properties of a device, and a guard that makes a device current and restores the previous one.
//
//   const gpushare::cuda::device_properties p = gpushare::cuda::query_properties(driver, 0);  // p.name, p.sms, p.memory
//   const gpushare::cuda::primary_context context{driver, 0};
//   { const gpushare::cuda::device_guard on{context};  cudaMalloc(&q, n); }
//
// The table also has the driver functions without an equivalent in the runtime. Each is looked up
// in the installed driver: libcuda is never linked, and a function that an older driver lacks
// returns CUDA_ERROR_NOT_SUPPORTED.
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

/// One that takes Args.
template <class... Args>
class entry_point<CUresult(Args...)> {
public:
    /// Looks up what `name` meant in CUDA `version` (12040 for 12.4).
    entry_point(const char* name, unsigned version) noexcept {
        void* found = nullptr;
        auto status = cudaDriverEntryPointSymbolNotFound;
        // Said explicitly, because the default depends on how the file is compiled.
        const auto code =
            detail::handled(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableLegacyStream, &status));
        if (code == cudaSuccess && status == cudaDriverEntryPointSuccess)
            function_ = reinterpret_cast<CUresult(CUDAAPI*)(Args...)>(found);
    }

    /// Whether the driver has it.
    [[nodiscard]] explicit operator bool() const noexcept { return function_ != nullptr; }
    /// CUDA_ERROR_NOT_SUPPORTED where it hasn't.
    CUresult operator()(Args... args) const noexcept {
        return function_ != nullptr ? function_(args...) : CUDA_ERROR_NOT_SUPPORTED;
    }

private:
    CUresult(CUDAAPI* function_)(Args...) = nullptr;
};

/// The functions by purpose; each is named as in the driver's manual, without its prefix. Immutable; safe from any thread.
class driver {
public:
    /// Throws operation_error: errc::no_driver where there is none.
    [[nodiscard]] static driver load() {
        int driver_version = 0;
        check(cudaDriverGetVersion(&driver_version), "looking for a CUDA driver");
        if (driver_version == 0) fail(cudaErrorInsufficientDriver, "looking for a CUDA driver");
        return driver(driver_version);
    }

    /// 13000 for 13.0: the newest CUDA that the driver serves.
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

    // These are queries that are called often. The runtime has equivalents, but the driver's leave
    // cudaGetLastError() alone and need no context: for a thread without one, the manual (Driver
    // API, Event Management and Stream Management) names no error for these, and the runtime would
    // give the thread the context of device 0.
    /// cuEventElapsedTime; the exception, which may answer CUDA_ERROR_INVALID_CONTEXT.
    entry_point<decltype(::cuEventElapsedTime)> event_elapsed_time{"cuEventElapsedTime", 2000};
    /// cuEventQuery.
    entry_point<decltype(::cuEventQuery)> event_query{"cuEventQuery", 2000};
    /// cuEventRecord; as questions, so that what the embedder finds in cudaGetLastError() stays.
    entry_point<decltype(::cuEventRecord)> event_record{"cuEventRecord", 2000};
    /// cuStreamQuery.
    entry_point<decltype(::cuStreamQuery)> stream_query{"cuStreamQuery", 2000};
    /// cuStreamIsCapturing.
    entry_point<decltype(::cuStreamIsCapturing)> stream_is_capturing{"cuStreamIsCapturing", 10000};
    /// cuThreadExchangeStreamCaptureMode.
    entry_point<decltype(::cuThreadExchangeStreamCaptureMode)> exchange_capture_mode{
        "cuThreadExchangeStreamCaptureMode", 10010};

    // a stream that waits for a word in memory, or writes one
    /// cuStreamWaitValue64, as CUDA 12 has it.
    entry_point<decltype(::cuStreamWaitValue64)> stream_wait_value{"cuStreamWaitValue64", 12000};
    /// cuStreamWriteValue32, as CUDA 12 has it.
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

    /// Whole features: with one function missing, above all one that gives things back, none of it is begun.
    [[nodiscard]] bool has_virtual_memory() const noexcept {
        return mem_get_granularity && mem_address_reserve && mem_address_free && mem_create && mem_release && mem_map &&
               mem_unmap && mem_set_access;
    }
    /// As above, of green contexts.
    [[nodiscard]] bool has_green_contexts() const noexcept {
        return device_get && device_get_resource && sm_resource_split && resource_describe && green_create &&
               green_destroy && green_get_resource && green_stream_create;
    }

private:
    explicit driver(int version_of_driver) noexcept : served_version(version_of_driver) {}
};

}  // namespace cuda
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
    ~primary_context() { (void)api_->primary_ctx_release(device_); }  // harmless after the driver is unloaded

    /// The driver's functions with which the context was made.
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
    /// Whether the context is still the one that was made. It isn't after cudaDeviceReset or
    /// cuDevicePrimaryCtxReset, which destroy its contents: another context may then have the
    /// handle. (Driver API, cuCtxGetId: unique over the life of the program.)
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
/// The primary context replaces any other one, even one of the same device. An allocation in a
/// context of cuCtxCreate's goes with that context, peers are those of a context, and a launch
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

/// Gives this context to a thread without one, for calls that name a stream, an event or a pool,
/// and so work with any current context. The runtime would make the context of device 0, which
/// takes hundreds of MiB and may be another owner's device.
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

/// The answer of a driver function that may want any context. Where the thread has none, the
/// function is called in this one.
template <class Call>
[[nodiscard]] CUresult in_some_context(const primary_context& of, Call call) noexcept {
    const CUresult code = call();
    if (code != CUDA_ERROR_INVALID_CONTEXT) return code;
    auto entered = cudaSuccess;
    const device_guard on(of, entered);
    return entered == cudaSuccess ? call() : code;
}

/// Keeps this thread's calls from ending captures of other threads. CUDA forbids event queries and
/// allocations beside a capture unless the thread declares that it knows the consequences.
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
