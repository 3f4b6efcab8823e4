// SPDX-License-Identifier: Apache-2.0
// A launch as the driver sees it, read from a callback of CUPTI: a kernel, a graph, a copy or a
// fill.
//
//   for (const CUpti_CallbackId id : code_ids) cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, id);
//   if (const auto call = read_launch(id, *data)) ...           // inside the callback, where the data is valid
#pragma once

#include <cuda.h>
#include <cupti.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// The work for which a call of the driver waits.
enum class wait_reach : std::uint8_t {
    none,
    stream,  ///< one stream
    event,   ///< the work before an event
    legacy,  ///< the legacy default stream, and the streams that it waits for
    all,     ///< possibly all work of the device
};

/// The facts of one launch.
struct launch_call {
    CUstream stream = nullptr;    // never null: CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
    CUcontext context = nullptr;  // the current context
    std::uint64_t key = 0;        // equal for launches that are expected to take equally long
    std::uint32_t blocks = 0;     // the blocks of a kernel; 0: unknown
    bool copies = false;          // a copy, which needs almost no SMs
    bool graph = false;
    // A host function: not a launch, but it runs in the stream's order.
    bool host = false;
    ns guess{20'000};            // the prediction before anything is measured
    const void* code = nullptr;  // the function or executable graph; null for copies and fills
    // The work for which the driver may wait inside the call. A synchronous copy waits for its
    // stream, and the launch of code that isn't loaded yet may wait for all work.
    wait_reach waits = wait_reach::none;
    // The thread whose per-thread default stream this is; 0: another stream.
    std::uint64_t thread = 0;
    // The addresses of a copy, which may be host memory. For a batch of copies, plain ones or in
    // three dimensions, the addresses are in the spans below. Valid only inside the callback.
    std::array<CUdeviceptr, 2> ends{};
    std::array<std::span<const CUdeviceptr>, 2> lists{};
    std::span<const CUDA_MEMCPY3D_BATCH_OP> operations{};

    /// Whether the stream is the per-thread default stream, which differs for each thread.
    [[nodiscard]] bool of_thread() const noexcept { return stream == CU_STREAM_PER_THREAD; }
    /// Whether the stream is the legacy default stream, which waits for other streams.
    [[nodiscard]] bool of_legacy() const noexcept { return stream == CU_STREAM_LEGACY; }
    /// Whether the call is a synchronous copy or fill, which counts as over when the call returns.
    [[nodiscard]] bool is_synchronous() const noexcept {
        return waits == wait_reach::stream || waits == wait_reach::legacy;
    }
    /// Whether f(address) is true for any address that the launch copies from or to.
    template <class F>
    [[nodiscard]] bool any_address(F f) const noexcept {
        const auto is = [&](CUdeviceptr p) { return p != 0 && f(p); };
        const auto is_end = [&](const CUmemcpy3DOperand& o) {
            return o.type == CU_MEMCPY_OPERAND_TYPE_POINTER && is(o.op.ptr.ptr);
        };
        return std::ranges::any_of(ends, is) || std::ranges::any_of(lists[0], is) ||
               std::ranges::any_of(lists[1], is) ||
               std::ranges::any_of(operations, [&](const auto& o) { return is_end(o.src) || is_end(o.dst); });
    }
};

/// A number of the calling thread, which no other thread ever has.
[[nodiscard]] inline std::uint64_t number_of_thread() noexcept {
    constinit static std::atomic<std::uint64_t> last{0};
    constinit thread_local std::uint64_t mine = 0;
    if (mine == 0) mine = last.fetch_add(1, std::memory_order_relaxed) + 1;
    return mine;
}

/// The driver's functions that launch a kernel or a graph: for each, its form for the legacy
/// default stream and the form for the per-thread one. See also launches::asynchronous and
/// launches::synchronous.
inline constexpr CUpti_CallbackId code_ids[] = {
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch,
    CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz,
};
/// Older ones, which don't exist for the per-thread default stream.
inline constexpr CUpti_CallbackId old_launch_ids[] = {
    CUPTI_DRIVER_TRACE_CBID_cuLaunch,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchGrid,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchGridAsync,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernelMultiDevice,
};
/// Whether the function launches a kernel or a graph.
[[nodiscard]] constexpr bool launches_code(CUpti_CallbackId id) noexcept {
    return std::find(std::begin(code_ids), std::end(code_ids), id) != std::end(code_ids) ||
           std::find(std::begin(old_launch_ids), std::end(old_launch_ids), id) != std::end(old_launch_ids);
}
/// The functions that enqueue a host function.
inline constexpr CUpti_CallbackId host_ids[] = {
    CUPTI_DRIVER_TRACE_CBID_cuLaunchHostFunc,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchHostFunc_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuStreamAddCallback,
    CUPTI_DRIVER_TRACE_CBID_cuStreamAddCallback_ptsz,
};
/// The function that destroys a stream.
inline constexpr CUpti_CallbackId stream_end_id = CUPTI_DRIVER_TRACE_CBID_cuStreamDestroy_v2;

namespace launches {

// FNV-1a over whole words (Fowler, Noll, Vo): enough for a table that mixes once more.
template <class... Words>
[[nodiscard]] std::uint64_t key_of(Words... words) noexcept {
    std::uint64_t h = 0xcbf29ce484222325U;
    ((h = (h ^ static_cast<std::uint64_t>(words)) * 0x100000001b3U), ...);
    return h;
}
[[nodiscard]] inline std::uint64_t number(const void* p) noexcept { return reinterpret_cast<std::uintptr_t>(p); }

// A kernel launch. The parameters and the launch configuration name the dimensions alike.
template <class Dimensions>
[[nodiscard]] launch_call kernel(CUfunction f, const Dimensions& d) noexcept {
    launch_call c;
    c.stream = d.hStream;
    c.code = f;
    c.key = key_of(number(f), d.gridDimX, d.gridDimY, d.gridDimZ, d.blockDimX, d.blockDimY, d.blockDimZ);
    const std::uint64_t blocks = std::uint64_t{d.gridDimX} * d.gridDimY * d.gridDimZ;
    c.blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(blocks, 0xffff'ffffU));
    return c;
}

// A copy or fill of `bytes` bytes. Its key rounds the size up to a power of 2, and its guess takes
// 25 GB/s, the speed of PCIe. A size that no device has counts as 1 PiB.
[[nodiscard]] inline launch_call transfer(CUstream s, CUpti_CallbackId id, std::uint64_t bytes) noexcept {
    launch_call c;
    std::uint64_t size = 1;
    while (size < bytes && size < (std::uint64_t{1} << 50)) size *= 2;
    c.stream = s;
    c.key = key_of(id, size);
    c.copies = true;
    c.guess = ns{2000 + static_cast<std::int64_t>(size / 25)};
    return c;
}
// The functions on the thread's own default stream have parameters of the same layout.
template <class P, class OfThread>
[[nodiscard]] const P& as(const void* p) noexcept {
    static_assert(sizeof(P) == sizeof(OfThread));
    return *static_cast<const P*>(p);
}

[[nodiscard]] inline std::optional<launch_call> read_kernel(CUpti_CallbackId id, const void* p) noexcept {
    switch (id) {
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel:
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz: {
            const auto& k = as<cuLaunchKernel_params, cuLaunchKernel_ptsz_params>(p);
            return kernel(k.f, k);
        }
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx:
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz: {
            const auto& k = as<cuLaunchKernelEx_params, cuLaunchKernelEx_ptsz_params>(p);
            if (k.config == nullptr) return std::nullopt;
            return kernel(k.f, *k.config);
        }
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel:
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz: {
            const auto& k = as<cuLaunchCooperativeKernel_params, cuLaunchCooperativeKernel_ptsz_params>(p);
            return kernel(k.f, k);
        }
        case CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch:
        case CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz: {
            const auto& g = as<cuGraphLaunch_params, cuGraphLaunch_ptsz_params>(p);
            return launch_call{.stream = g.hStream,
                               .key = key_of(id, number(g.hGraph)),
                               .graph = true,
                               .guess = ns{500'000},
                               .code = g.hGraph};
        }
        default: return std::nullopt;
    }
}

// Kernels of older functions. Block and shared memory are set beforehand, so the block isn't known.
[[nodiscard]] inline launch_call old_kernel(CUfunction f, int width, int height, CUstream s) noexcept {
    launch_call c;
    c.stream = s;
    c.code = f;
    c.key = key_of(number(f), width, height);
    c.blocks = static_cast<std::uint32_t>(width) * static_cast<std::uint32_t>(height);
    return c;
}
[[nodiscard]] inline std::optional<launch_call> read_old_kernel(CUpti_CallbackId id, const void* p) noexcept {
    switch (id) {
        case CUPTI_DRIVER_TRACE_CBID_cuLaunch:
            return old_kernel(static_cast<const cuLaunch_params*>(p)->f, 1, 1, nullptr);
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchGrid: {
            const auto& k = *static_cast<const cuLaunchGrid_params*>(p);
            return old_kernel(k.f, k.grid_width, k.grid_height, nullptr);
        }
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchGridAsync: {
            const auto& k = *static_cast<const cuLaunchGridAsync_params*>(p);
            return old_kernel(k.f, k.grid_width, k.grid_height, k.hStream);
        }
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernelMultiDevice: {
            // A kernel for each device, of which the first one counts.
            const auto& all = *static_cast<const cuLaunchCooperativeKernelMultiDevice_params*>(p);
            if (all.numDevices == 0 || all.launchParamsList == nullptr) return std::nullopt;
            return kernel(all.launchParamsList->function, *all.launchParamsList);
        }
        default: return std::nullopt;
    }
}

// Whether an argument that the gate reads is null. The driver refuses such a call.
template <class P>
[[nodiscard]] bool lacks_argument(const P& c) noexcept {
    if constexpr (requires { c.pCopy; })
        return c.pCopy == nullptr;
    else if constexpr (requires { c.opList; })
        return c.numOps != 0 && c.opList == nullptr;
    else if constexpr (requires { c.paramsArray; })
        return c.count != 0 && c.paramsArray == nullptr;
    else if constexpr (requires { c.dsts; })
        return c.count != 0 && (c.dsts == nullptr || c.srcs == nullptr || c.sizes == nullptr);
    else if constexpr (requires { c.sizes; })
        return c.count != 0 && c.sizes == nullptr;
    else
        return false;
}
// The number of elements of a copy, whose elements are bytes, or of a fill.
template <class P>
[[nodiscard]] std::uint64_t elements_of(const P& c) noexcept {
    std::uint64_t sum = 0;
    if constexpr (requires { c.ByteCount; })
        return c.ByteCount;
    else if constexpr (requires { c.opList; })
        for (const auto& o : std::span(c.opList, c.numOps)) sum += o.extent.width * o.extent.height * o.extent.depth;
    else if constexpr (requires { c.sizes; })
        for (const std::size_t size : std::span(c.sizes, c.count)) sum += size;
    else if constexpr (requires { c.paramsArray; })
        for (const auto& o : std::span(c.paramsArray, c.count)) sum += std::max(o.srcNumBytes, o.dstNumBytes);
    else if constexpr (requires { c.count; })
        return c.count;
    else if constexpr (requires { c.N; })
        return c.N;
    else if constexpr (requires { c.Width; })
        return c.Width * c.Height;
    else if constexpr (requires { c.pCopy->Depth; })
        return c.pCopy->WidthInBytes * c.pCopy->Height * c.pCopy->Depth;
    else
        return c.pCopy->WidthInBytes * c.pCopy->Height;
    return sum;
}
// The address at which a copy of rows begins; 0 for an array.
[[nodiscard]] inline CUdeviceptr end_of(CUmemorytype kind, const void* host, CUdeviceptr device) noexcept {
    if (kind == CU_MEMORYTYPE_HOST) return reinterpret_cast<CUdeviceptr>(host);
    return kind == CU_MEMORYTYPE_UNIFIED ? device : 0;
}
// The addresses that may be the host's pageable memory. A prefetch and a fill have none.
template <class P>
void find_ends(launch_call& to, const P& c) noexcept {
    if constexpr (requires { c.pCopy; })
        to.ends = {end_of(c.pCopy->srcMemoryType, c.pCopy->srcHost, c.pCopy->srcDevice),
                   end_of(c.pCopy->dstMemoryType, c.pCopy->dstHost, c.pCopy->dstDevice)};
    if constexpr (requires {
                      c.dst;
                      c.src;
                  })
        to.ends = {c.dst, c.src};
    if constexpr (requires { c.srcHost; }) to.ends[0] = reinterpret_cast<CUdeviceptr>(c.srcHost);
    if constexpr (requires { c.dstHost; }) to.ends[0] = reinterpret_cast<CUdeviceptr>(c.dstHost);
    if constexpr (requires { c.dsts; }) to.lists = {std::span(c.dsts, c.count), std::span(c.srcs, c.count)};
    if constexpr (requires { c.opList; }) to.operations = std::span(c.opList, c.numOps);
}
template <class P, class OfThread, std::uint64_t element = 1>
[[nodiscard]] std::optional<launch_call> moved(CUpti_CallbackId id, const void* p) noexcept {
    const auto& c = as<P, OfThread>(p);
    if (lacks_argument(c)) return std::nullopt;
    CUstream s = nullptr;
    if constexpr (requires { c.hStream; })
        s = c.hStream;
    else
        s = c.stream;
    launch_call call = transfer(s, id, elements_of(c) * element);
    find_ends(call, c);
    return call;
}

// The driver may decompress by a kernel.
template <class P, class OfThread>
[[nodiscard]] std::optional<launch_call> decompressed(CUpti_CallbackId id, const void* p) noexcept {
    auto call = moved<P, OfThread>(id, p);
    if (call) call->copies = false;
    return call;
}
template <class P, class OfThread, std::uint64_t element = 1>
[[nodiscard]] std::optional<launch_call> moved_now(CUpti_CallbackId id, const void* p) noexcept {
    const auto& c = as<P, OfThread>(p);
    if (lacks_argument(c)) return std::nullopt;
    return transfer(nullptr, id, elements_of(c) * element);
}
// A copy or fill: the functions for the two default streams, and how to read them.
struct transfer_function {
    CUpti_CallbackId id, of_thread;
    std::optional<launch_call> (*read)(CUpti_CallbackId id, const void* parameters) noexcept;

    [[nodiscard]] constexpr bool is(CUpti_CallbackId one) const noexcept { return id == one || of_thread == one; }
};
// Copies, prefetches, fills, and memory that is discarded or decompressed: in a stream.
inline constexpr transfer_function asynchronous[] = {
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyAsync, CUPTI_DRIVER_TRACE_CBID_cuMemcpyAsync_ptsz,
     &moved<cuMemcpyAsync_params, cuMemcpyAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyPeerAsync, CUPTI_DRIVER_TRACE_CBID_cuMemcpyPeerAsync_ptsz,
     &moved<cuMemcpyPeerAsync_params, cuMemcpyPeerAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2_ptsz,
     &moved<cuMemcpyHtoDAsync_v2_params, cuMemcpyHtoDAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoHAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoHAsync_v2_ptsz,
     &moved<cuMemcpyDtoHAsync_v2_params, cuMemcpyDtoHAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoDAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoDAsync_v2_ptsz,
     &moved<cuMemcpyDtoDAsync_v2_params, cuMemcpyDtoDAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DAsync_v2_ptsz,
     &moved<cuMemcpy2DAsync_v2_params, cuMemcpy2DAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DAsync_v2_ptsz,
     &moved<cuMemcpy3DAsync_v2_params, cuMemcpy3DAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DPeerAsync, CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DPeerAsync_ptsz,
     &moved<cuMemcpy3DPeerAsync_params, cuMemcpy3DPeerAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync, CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync_ptsz,
     &moved<cuMemcpyBatchAsync_params, cuMemcpyBatchAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync_v2_ptsz,
     &moved<cuMemcpyBatchAsync_v2_params, cuMemcpyBatchAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DBatchAsync, CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DBatchAsync_ptsz,
     &moved<cuMemcpy3DBatchAsync_params, cuMemcpy3DBatchAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DBatchAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DBatchAsync_v2_ptsz,
     &moved<cuMemcpy3DBatchAsync_v2_params, cuMemcpy3DBatchAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoAAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoAAsync_v2_ptsz,
     &moved<cuMemcpyHtoAAsync_v2_params, cuMemcpyHtoAAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoHAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoHAsync_v2_ptsz,
     &moved<cuMemcpyAtoHAsync_v2_params, cuMemcpyAtoHAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchAsync, CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchAsync_ptsz,
     &moved<cuMemPrefetchAsync_params, cuMemPrefetchAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchAsync_v2_ptsz,
     &moved<cuMemPrefetchAsync_v2_params, cuMemPrefetchAsync_v2_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchBatchAsync, CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchBatchAsync_ptsz,
     &moved<cuMemPrefetchBatchAsync_params, cuMemPrefetchBatchAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemDiscardBatchAsync, CUPTI_DRIVER_TRACE_CBID_cuMemDiscardBatchAsync_ptsz,
     &moved<cuMemDiscardBatchAsync_params, cuMemDiscardBatchAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemDiscardAndPrefetchBatchAsync,
     CUPTI_DRIVER_TRACE_CBID_cuMemDiscardAndPrefetchBatchAsync_ptsz,
     &moved<cuMemDiscardAndPrefetchBatchAsync_params, cuMemDiscardAndPrefetchBatchAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemBatchDecompressAsync, CUPTI_DRIVER_TRACE_CBID_cuMemBatchDecompressAsync_ptsz,
     &decompressed<cuMemBatchDecompressAsync_params, cuMemBatchDecompressAsync_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD8Async, CUPTI_DRIVER_TRACE_CBID_cuMemsetD8Async_ptsz,
     &moved<cuMemsetD8Async_params, cuMemsetD8Async_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD16Async, CUPTI_DRIVER_TRACE_CBID_cuMemsetD16Async_ptsz,
     &moved<cuMemsetD16Async_params, cuMemsetD16Async_ptsz_params, 2>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD32Async, CUPTI_DRIVER_TRACE_CBID_cuMemsetD32Async_ptsz,
     &moved<cuMemsetD32Async_params, cuMemsetD32Async_ptsz_params, 4>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D8Async, CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D8Async_ptsz,
     &moved<cuMemsetD2D8Async_params, cuMemsetD2D8Async_ptsz_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D16Async, CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D16Async_ptsz,
     &moved<cuMemsetD2D16Async_params, cuMemsetD2D16Async_ptsz_params, 2>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D32Async, CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D32Async_ptsz,
     &moved<cuMemsetD2D32Async_params, cuMemsetD2D32Async_ptsz_params, 4>},
};
// Synchronous copies and fills, which go into the default stream. (Programming Guide, "Default
// Stream"; Driver API, "API synchronization behavior".)
inline constexpr transfer_function synchronous[] = {
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy, CUPTI_DRIVER_TRACE_CBID_cuMemcpy_ptds,
     &moved_now<cuMemcpy_params, cuMemcpy_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyPeer, CUPTI_DRIVER_TRACE_CBID_cuMemcpyPeer_ptds,
     &moved_now<cuMemcpyPeer_params, cuMemcpyPeer_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2_ptds,
     &moved_now<cuMemcpyHtoD_v2_params, cuMemcpyHtoD_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoH_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoH_v2_ptds,
     &moved_now<cuMemcpyDtoH_v2_params, cuMemcpyDtoH_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoD_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoD_v2_ptds,
     &moved_now<cuMemcpyDtoD_v2_params, cuMemcpyDtoD_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoA_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoA_v2_ptds,
     &moved_now<cuMemcpyDtoA_v2_params, cuMemcpyDtoA_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoD_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoD_v2_ptds,
     &moved_now<cuMemcpyAtoD_v2_params, cuMemcpyAtoD_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoA_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoA_v2_ptds,
     &moved_now<cuMemcpyHtoA_v2_params, cuMemcpyHtoA_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoH_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoH_v2_ptds,
     &moved_now<cuMemcpyAtoH_v2_params, cuMemcpyAtoH_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoA_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoA_v2_ptds,
     &moved_now<cuMemcpyAtoA_v2_params, cuMemcpyAtoA_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy2D_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpy2D_v2_ptds,
     &moved_now<cuMemcpy2D_v2_params, cuMemcpy2D_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DUnaligned_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DUnaligned_v2_ptds,
     &moved_now<cuMemcpy2DUnaligned_v2_params, cuMemcpy2DUnaligned_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy3D_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpy3D_v2_ptds,
     &moved_now<cuMemcpy3D_v2_params, cuMemcpy3D_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DPeer, CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DPeer_ptds,
     &moved_now<cuMemcpy3DPeer_params, cuMemcpy3DPeer_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD8_v2, CUPTI_DRIVER_TRACE_CBID_cuMemsetD8_v2_ptds,
     &moved_now<cuMemsetD8_v2_params, cuMemsetD8_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD16_v2, CUPTI_DRIVER_TRACE_CBID_cuMemsetD16_v2_ptds,
     &moved_now<cuMemsetD16_v2_params, cuMemsetD16_v2_ptds_params, 2>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD32_v2, CUPTI_DRIVER_TRACE_CBID_cuMemsetD32_v2_ptds,
     &moved_now<cuMemsetD32_v2_params, cuMemsetD32_v2_ptds_params, 4>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D8_v2, CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D8_v2_ptds,
     &moved_now<cuMemsetD2D8_v2_params, cuMemsetD2D8_v2_ptds_params>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D16_v2, CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D16_v2_ptds,
     &moved_now<cuMemsetD2D16_v2_params, cuMemsetD2D16_v2_ptds_params, 2>},
    {CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D32_v2, CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D32_v2_ptds,
     &moved_now<cuMemsetD2D32_v2_params, cuMemsetD2D32_v2_ptds_params, 4>},
};

[[nodiscard]] inline std::optional<launch_call> read_asynchronous(CUpti_CallbackId id, const void* p) noexcept {
    for (const transfer_function& f : asynchronous)
        if (f.is(id)) return f.read(id, p);
    return std::nullopt;
}
[[nodiscard]] constexpr bool is_synchronous(CUpti_CallbackId id) noexcept {
    return std::ranges::any_of(synchronous, [=](const transfer_function& f) { return f.is(id); });
}
[[nodiscard]] inline std::optional<launch_call> read_synchronous(CUpti_CallbackId id, const void* p) noexcept {
    for (const transfer_function& c : synchronous) {
        if (!c.is(id)) continue;
        auto call = c.read(c.id, p);
        if (!call) return call;
        call->stream = c.id == id ? CU_STREAM_LEGACY : CU_STREAM_PER_THREAD;
        call->waits = c.id == id ? wait_reach::legacy : wait_reach::stream;
        return call;
    }
    return std::nullopt;
}

[[nodiscard]] inline std::optional<launch_call> read_host_function(CUpti_CallbackId id, const void* p) noexcept {
    switch (id) {
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchHostFunc:
        case CUPTI_DRIVER_TRACE_CBID_cuLaunchHostFunc_ptsz:
            return launch_call{.stream = as<cuLaunchHostFunc_params, cuLaunchHostFunc_ptsz_params>(p).hStream,
                               .host = true};
        case CUPTI_DRIVER_TRACE_CBID_cuStreamAddCallback:
        case CUPTI_DRIVER_TRACE_CBID_cuStreamAddCallback_ptsz:
            return launch_call{.stream = as<cuStreamAddCallback_params, cuStreamAddCallback_ptsz_params>(p).hStream,
                               .host = true};
        default: return std::nullopt;
    }
}

// Whether the null stream means the per-thread default stream.
[[nodiscard]] constexpr bool on_stream_of_thread(CUpti_CallbackId id) noexcept {
    for (std::size_t i = 1; i < std::size(code_ids); i += 2)
        if (code_ids[i] == id) return true;
    return id == host_ids[1] || id == host_ids[3] ||
           std::ranges::any_of(asynchronous, [=](const transfer_function& f) { return f.of_thread == id; });
}

}  // namespace launches

/// Reads a launch; none if the function launches nothing, or lacks an argument and so fails. Call
/// inside the callback.
[[nodiscard]] inline std::optional<launch_call> read_launch(CUpti_CallbackId id,
                                                            const CUpti_CallbackData& data) noexcept {
    auto call = launches::read_kernel(id, data.functionParams);
    if (!call) call = launches::read_asynchronous(id, data.functionParams);
    if (!call) call = launches::read_synchronous(id, data.functionParams);
    if (!call) call = launches::read_old_kernel(id, data.functionParams);
    if (!call) call = launches::read_host_function(id, data.functionParams);
    if (!call) return call;
    if (call->stream == nullptr)
        call->stream = launches::on_stream_of_thread(id) ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    call->context = data.context;
    if (call->of_thread()) call->thread = number_of_thread();
    return call;
}

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
