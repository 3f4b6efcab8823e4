// SPDX-License-Identifier: Apache-2.0
// The driver functions that the runtime has no equal for. They are looked up in whatever driver there is, one by one:
// libcuda is never linked, and what an older driver lacks answers CUDA_ERROR_NOT_SUPPORTED.
//
//   const cuda::driver driver = cuda::driver::load();
//   cuda::check(driver.mem_unmap(at, size), "unmapping");
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

    [[nodiscard]] explicit operator bool() const noexcept { return function_ != nullptr; }
    CUresult operator()(Args... args) const noexcept {
        return function_ != nullptr ? function_(args...) : CUDA_ERROR_NOT_SUPPORTED;
    }

private:
    CUresult(CUDAAPI* function_)(Args...) = nullptr;
};

/// Immutable; safe from any thread.
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
    entry_point<decltype(::cuDeviceGet)> device_get{"cuDeviceGet", 2000};
    entry_point<decltype(::cuCtxGetCurrent)> ctx_get_current{"cuCtxGetCurrent", 4000};
    entry_point<decltype(::cuCtxSetCurrent)> ctx_set_current{"cuCtxSetCurrent", 4000};
    entry_point<decltype(::cuDevicePrimaryCtxGetState)> primary_ctx_get_state{"cuDevicePrimaryCtxGetState", 7000};

    // virtual memory
    entry_point<decltype(::cuMemGetAllocationGranularity)> mem_get_granularity{"cuMemGetAllocationGranularity", 10020};
    entry_point<decltype(::cuMemAddressReserve)> mem_address_reserve{"cuMemAddressReserve", 10020};
    entry_point<decltype(::cuMemAddressFree)> mem_address_free{"cuMemAddressFree", 10020};
    entry_point<decltype(::cuMemCreate)> mem_create{"cuMemCreate", 10020};
    entry_point<decltype(::cuMemRelease)> mem_release{"cuMemRelease", 10020};
    entry_point<decltype(::cuMemMap)> mem_map{"cuMemMap", 10020};
    entry_point<decltype(::cuMemUnmap)> mem_unmap{"cuMemUnmap", 10020};
    entry_point<decltype(::cuMemSetAccess)> mem_set_access{"cuMemSetAccess", 10020};

    // green contexts
    entry_point<decltype(::cuDeviceGetDevResource)> device_get_resource{"cuDeviceGetDevResource", 12040};
    entry_point<decltype(::cuDevSmResourceSplitByCount)> sm_resource_split{"cuDevSmResourceSplitByCount", 12040};
    entry_point<decltype(::cuDevResourceGenerateDesc)> resource_describe{"cuDevResourceGenerateDesc", 12040};
    entry_point<decltype(::cuGreenCtxCreate)> green_create{"cuGreenCtxCreate", 12040};
    entry_point<decltype(::cuGreenCtxDestroy)> green_destroy{"cuGreenCtxDestroy", 12040};
    entry_point<decltype(::cuGreenCtxGetDevResource)> green_get_resource{"cuGreenCtxGetDevResource", 12040};
    entry_point<decltype(::cuGreenCtxStreamCreate)> green_stream_create{"cuGreenCtxStreamCreate", 12050};
    entry_point<decltype(::cuStreamGetGreenCtx)> stream_get_green{"cuStreamGetGreenCtx", 12040};

    /// Whole features: with one function missing, above all one that gives things back, none of it is begun.
    [[nodiscard]] bool has_virtual_memory() const noexcept {
        return mem_get_granularity && mem_address_reserve && mem_address_free && mem_create && mem_release && mem_map &&
               mem_unmap && mem_set_access;
    }
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
