// SPDX-License-Identifier: Apache-2.0
// A call of the driver that may wait for work on the device, or that polls for the end of work,
// read from a callback of CUPTI.
//
//   // inside the callback
//   if (reach_of(id) != wait_reach::none) const sync_call call = read_sync(id, *data);
//   if (is_poll(id)) const sync_call call = read_poll(id, *data);
#pragma once

#include <cuda.h>
#include <cupti.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/loaded_code.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// The functions that query whether work is over, without waiting.
inline constexpr CUpti_CallbackId poll_ids[] = {
    CUPTI_DRIVER_TRACE_CBID_cuStreamQuery,
    CUPTI_DRIVER_TRACE_CBID_cuStreamQuery_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuEventQuery,
};
[[nodiscard]] constexpr bool is_poll(CUpti_CallbackId id) noexcept {
    return id == poll_ids[0] || id == poll_ids[1] || id == poll_ids[2];
}

/// A call in which the driver may wait for work.
struct sync_call {
    wait_reach reach = wait_reach::none;
    CUstream stream = nullptr;  // never null
    CUevent event = nullptr;
    CUcontext context = nullptr;  // the current context
    bool is_here = false;         // the call waits for work in that context
    bool drains = false;          // the call certainly waits, for all work enqueued by then
    // The code that the call may have to load. Without it, the call waits each time; otherwise,
    // only the first such call does.
    code_use loads{};

    /// The stream or event for which the call waits, if it is one.
    [[nodiscard]] const void* awaited() const noexcept {
        return event != nullptr ? static_cast<const void*>(event) : stream;
    }
};

namespace launches {

// Functions that free or allocate memory, load or unload code, or end a context: each may wait for
// all of the device. (Programming Guide, "Implicit Synchronization" and "Lazy Loading"; Driver API,
// at these functions.)
inline constexpr CUpti_CallbackId all_ids[] = {
    CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize,
    CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemFree,
    CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemFreeHost,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostUnregister,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostRegister,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostRegister_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemUnmap,
    CUPTI_DRIVER_TRACE_CBID_cuMemRelease,
    CUPTI_DRIVER_TRACE_CBID_cuMemPoolTrimTo,
    CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocPitch_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocManaged,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocHost_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc_v2,
    CUPTI_DRIVER_TRACE_CBID_cuArrayCreate_v2,
    CUPTI_DRIVER_TRACE_CBID_cuArray3DCreate_v2,
    CUPTI_DRIVER_TRACE_CBID_cuArrayDestroy,
    CUPTI_DRIVER_TRACE_CBID_cuMipmappedArrayCreate,
    CUPTI_DRIVER_TRACE_CBID_cuMipmappedArrayDestroy,
    CUPTI_DRIVER_TRACE_CBID_cuModuleLoad,
    CUPTI_DRIVER_TRACE_CBID_cuModuleLoadData,
    CUPTI_DRIVER_TRACE_CBID_cuModuleLoadDataEx,
    CUPTI_DRIVER_TRACE_CBID_cuModuleLoadFatBinary,
    CUPTI_DRIVER_TRACE_CBID_cuModuleUnload,
    CUPTI_DRIVER_TRACE_CBID_cuLibraryLoadData,
    CUPTI_DRIVER_TRACE_CBID_cuLibraryLoadFromFile,
    CUPTI_DRIVER_TRACE_CBID_cuLibraryUnload,
    CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiate,
    CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiate_v2,
    CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithFlags,
    CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithParams,
    CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithParams_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy,
    CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy_v2,
    CUPTI_DRIVER_TRACE_CBID_cuGreenCtxDestroy,
    CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease_v2,
    CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxReset_v2,
};
// Functions that use code, by a handle or by name. The first of them for each piece of code may
// load it. (Programming Guide, "Lazy Loading", "Loading Kernels Explicitly".)
template <class P>
[[nodiscard]] code_use used(const void* parameters) noexcept {
    const auto& p = *static_cast<const P*>(parameters);
    code_use use{.how = code_use::way::look_up};
    if constexpr (requires { p.nodeParams; }) {
        if (p.nodeParams == nullptr) return use;
        // The driver takes a kernel in place of a function.
        use.what = p.nodeParams->func;
        if constexpr (requires { p.nodeParams->kern; })
            if (use.what == nullptr) use.what = p.nodeParams->kern;
        use.how = code_use::way::record;
    } else if constexpr (requires { p.hGraphExec; }) {
        use = code_use{.what = p.hGraphExec, .how = code_use::way::change_graph, .graph = true};
    } else if constexpr (requires { p.hGraph; }) {
        use = code_use{.what = p.hGraph, .how = code_use::way::change_graph, .graph = true};
    } else if constexpr (requires { p.hmod; }) {
        use.what = p.hmod;
    } else if constexpr (requires { p.library; }) {
        use.what = p.library;
    } else if constexpr (requires { p.kernel; }) {
        use.what = p.kernel;
    } else if constexpr (requires { p.function; }) {
        use.what = p.function;
    } else if constexpr (requires { p.hfunc; }) {
        use.what = p.hfunc;
    } else {
        use.what = p.func;
    }
    if constexpr (requires { p.name; }) use.name = p.name;
    if constexpr (requires { p.symbol; }) use.name = p.symbol;
    return use;
}
struct code_user {
    CUpti_CallbackId id;
    code_use (*read)(const void* parameters) noexcept;
};
inline constexpr code_user code_users[] = {
    {CUPTI_DRIVER_TRACE_CBID_cuModuleGetFunction, &used<cuModuleGetFunction_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuModuleGetGlobal_v2, &used<cuModuleGetGlobal_v2_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuModuleGetTexRef, &used<cuModuleGetTexRef_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuModuleGetSurfRef, &used<cuModuleGetSurfRef_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuLibraryGetKernel, &used<cuLibraryGetKernel_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuLibraryGetModule, &used<cuLibraryGetModule_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuLibraryGetGlobal, &used<cuLibraryGetGlobal_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuLibraryGetManaged, &used<cuLibraryGetManaged_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuLibraryGetUnifiedFunction, &used<cuLibraryGetUnifiedFunction_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuKernelGetFunction, &used<cuKernelGetFunction_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuKernelGetAttribute, &used<cuKernelGetAttribute_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuKernelSetAttribute, &used<cuKernelSetAttribute_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuKernelSetCacheConfig, &used<cuKernelSetCacheConfig_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuFuncLoad, &used<cuFuncLoad_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuFuncGetAttribute, &used<cuFuncGetAttribute_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuFuncSetAttribute, &used<cuFuncSetAttribute_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuFuncSetCacheConfig, &used<cuFuncSetCacheConfig_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuOccupancyMaxActiveBlocksPerMultiprocessor,
     &used<cuOccupancyMaxActiveBlocksPerMultiprocessor_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
     &used<cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuOccupancyMaxPotentialBlockSize, &used<cuOccupancyMaxPotentialBlockSize_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuOccupancyMaxPotentialBlockSizeWithFlags,
     &used<cuOccupancyMaxPotentialBlockSizeWithFlags_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuOccupancyAvailableDynamicSMemPerBlock,
     &used<cuOccupancyAvailableDynamicSMemPerBlock_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuOccupancyMaxPotentialClusterSize, &used<cuOccupancyMaxPotentialClusterSize_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuOccupancyMaxActiveClusters, &used<cuOccupancyMaxActiveClusters_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphAddKernelNode, &used<cuGraphAddKernelNode_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphAddKernelNode_v2, &used<cuGraphAddKernelNode_v2_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphKernelNodeSetParams, &used<cuGraphKernelNodeSetParams_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphKernelNodeSetParams_v2, &used<cuGraphKernelNodeSetParams_v2_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphExecKernelNodeSetParams, &used<cuGraphExecKernelNodeSetParams_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphExecKernelNodeSetParams_v2, &used<cuGraphExecKernelNodeSetParams_v2_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphExecUpdate, &used<cuGraphExecUpdate_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphExecUpdate_v2, &used<cuGraphExecUpdate_v2_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphUpload, &used<cuGraphUpload_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuGraphUpload_ptsz, &used<cuGraphUpload_ptsz_params>},
};
using code_reader = decltype(code_user::read);
[[nodiscard]] consteval std::array<code_reader, CUPTI_DRIVER_TRACE_CBID_SIZE> code_readers() noexcept {
    std::array<code_reader, CUPTI_DRIVER_TRACE_CBID_SIZE> of{};
    for (const code_user& u : code_users) of[u.id] = u.read;
    return of;
}
inline constexpr auto code_reader_of_id = code_readers();

[[nodiscard]] consteval std::array<wait_reach, CUPTI_DRIVER_TRACE_CBID_SIZE> reaches() noexcept {
    std::array<wait_reach, CUPTI_DRIVER_TRACE_CBID_SIZE> of{};
    for (const CUpti_CallbackId id : all_ids) of[id] = wait_reach::all;
    for (const code_user& user : code_users) of[user.id] = wait_reach::all;
    for (const auto& copy : synchronous) {
        of[copy.id] = wait_reach::legacy;
        of[copy.of_thread] = wait_reach::stream;
    }
    of[CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize] = wait_reach::stream;
    of[CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize_ptsz] = wait_reach::stream;
    of[CUPTI_DRIVER_TRACE_CBID_cuEventSynchronize] = wait_reach::event;
    return of;
}
inline constexpr auto reach_of_id = reaches();

}  // namespace launches

/// The work for which the function waits. Most functions wait for nothing.
[[nodiscard]] constexpr wait_reach reach_of(CUpti_CallbackId id) noexcept {
    return id < launches::reach_of_id.size() ? launches::reach_of_id[id] : wait_reach::none;
}

/// Whether the function may take code away, so that another function may get the same handle.
[[nodiscard]] constexpr bool unloads(CUpti_CallbackId id) noexcept {
    return id == CUPTI_DRIVER_TRACE_CBID_cuModuleUnload || id == CUPTI_DRIVER_TRACE_CBID_cuLibraryUnload ||
           id == CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy || id == CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy_v2 ||
           id == CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease_v2 ||
           id == CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxReset_v2;
}
/// The executable graph that the function has made; null if it makes none, or at its entry.
[[nodiscard]] inline const void* made_graph(CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
    if (data.callbackSite != CUPTI_API_EXIT) return nullptr;
    const auto made = [](const auto& p) { return p.phGraphExec != nullptr ? *p.phGraphExec : nullptr; };
    const void* const p = data.functionParams;
    switch (id) {
        case CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiate: return made(*static_cast<const cuGraphInstantiate_params*>(p));
        case CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiate_v2:
            return made(*static_cast<const cuGraphInstantiate_v2_params*>(p));
        case CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithFlags:
            return made(*static_cast<const cuGraphInstantiateWithFlags_params*>(p));
        case CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithParams:
        case CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithParams_ptsz:
            return made(*static_cast<const cuGraphInstantiateWithParams_params*>(p));
        default: return nullptr;
    }
}

/// A launch that may wait, as a call that waits.
[[nodiscard]] inline sync_call sync_of(const launch_call& call) noexcept {
    return {.reach = call.waits,
            .stream = call.waits == wait_reach::stream ? call.stream : nullptr,
            .context = call.context,
            .is_here = true,
            .drains = call.is_synchronous()};
}

/// Reads a call of a polling function, as if the function waited. Call inside the callback.
[[nodiscard]] inline sync_call read_poll(CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
    sync_call call{.reach = wait_reach::event, .context = data.context, .drains = true};
    if (id == CUPTI_DRIVER_TRACE_CBID_cuEventQuery) {
        call.event = static_cast<const cuEventQuery_params*>(data.functionParams)->hEvent;
    } else {
        call.stream = launches::as<cuStreamQuery_params, cuStreamQuery_ptsz_params>(data.functionParams).hStream;
        if (call.stream == nullptr)
            call.stream = id == CUPTI_DRIVER_TRACE_CBID_cuStreamQuery ? CU_STREAM_LEGACY : CU_STREAM_PER_THREAD;
        call.reach = call.stream == CU_STREAM_LEGACY ? wait_reach::legacy : wait_reach::stream;
    }
    call.is_here = call.reach != wait_reach::stream || call.stream == CU_STREAM_PER_THREAD;
    return call;
}

/// Reads a call of a waiting function. Call inside the callback.
[[nodiscard]] inline sync_call read_sync(CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
    sync_call call{.reach = reach_of(id), .context = data.context};
    if (id == CUPTI_DRIVER_TRACE_CBID_cuEventSynchronize) {
        call.event = static_cast<const cuEventSynchronize_params*>(data.functionParams)->hEvent;
    } else if (id == CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize) {
        call.stream = static_cast<const cuStreamSynchronize_params*>(data.functionParams)->hStream;
        if (call.stream == nullptr) call.stream = CU_STREAM_LEGACY;
        if (call.stream == CU_STREAM_LEGACY) call.reach = wait_reach::legacy;
    } else if (id == CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize_ptsz) {
        call.stream = static_cast<const cuStreamSynchronize_ptsz_params*>(data.functionParams)->hStream;
        if (call.stream == nullptr) call.stream = CU_STREAM_PER_THREAD;
        if (call.stream == CU_STREAM_LEGACY) call.reach = wait_reach::legacy;
    } else if (call.reach == wait_reach::stream) {
        call.stream = CU_STREAM_PER_THREAD;
    }
    if (const auto read = launches::code_reader_of_id[id]) {
        call.loads = read(data.functionParams);
        call.loads.context = data.context;
    }
    call.is_here = call.loads.what != nullptr || call.reach == wait_reach::legacy || call.reach == wait_reach::event ||
                   call.stream == CU_STREAM_PER_THREAD || id == CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize;
    call.drains = call.reach != wait_reach::all || id == CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize ||
                  id == CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize_v2 || id == CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2;
    return call;
}

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
