// SPDX-License-Identifier: Apache-2.0
// The driver functions that have no equivalent in the runtime. They are looked up one by one in the driver that is
// installed: libcuda is never linked, and a function that an older driver lacks returns CUDA_ERROR_NOT_SUPPORTED.
//
//   const gpushare::cuda::driver driver = gpushare::cuda::driver::load();
//   gpushare::cuda::check(driver.mem_unmap(at, size), "unmapping");
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/config.hpp>

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

    // questions, asked often. The runtime has equals, but these leave alone what cudaGetLastError() says, and need no context:
    // of these the manual (Driver API, Event Management and Stream Management) names no error for a thread without one, and
    // the runtime would give it that of device 0.
    /// cuEventElapsedTime; the exception, which may answer CUDA_ERROR_INVALID_CONTEXT.
    entry_point<decltype(::cuEventElapsedTime)> event_elapsed_time{"cuEventElapsedTime", 2000};
    /// cuEventQuery.
    entry_point<decltype(::cuEventQuery)> event_query{"cuEventQuery", 2000};
    /// cuEventRecord; as questions, so that what the embedder finds in cudaGetLastError() stays.
    entry_point<decltype(::cuEventRecord)> event_record{"cuEventRecord", 2000};
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
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
