// SPDX-License-Identifier: Apache-2.0
// Copies and fills of rows and boxes, batches of copies, prefetches, and host functions in a
// stream. Texture arrays aren't modelled: a copy from or to one is invalid.
#include <algorithm>
#include <cstring>
#include <span>

#include "cupti.hpp"
#include "machine.hpp"

namespace standin {

using namespace detail;

namespace {

/// The extent of a box: bytes in a row, rows in a slice, and slices.
struct box {
    std::size_t width = 0, height = 1, depth = 1;
};
/// The distances from one row to the next, and from one slice to the next.
struct layout {
    const void* at = nullptr;
    std::size_t pitch = 0, slice = 0;
};

bool is_within_reach(const machine& m, const void* p, const stream& on) {
    return p != nullptr && m.reaches(on.in->device, m.place_of(p));
}

/// A copy of a box, row by row.
operation copying_box(const layout& to, const layout& from, const box& size) {
    return {.effect = [=] {
        for (std::size_t z = 0; z < size.depth; ++z)
            for (std::size_t y = 0; y < size.height; ++y) {
                auto* const target = static_cast<char*>(const_cast<void*>(to.at)) + z * to.slice + y * to.pitch;
                const auto* const source = static_cast<const char*>(from.at) + z * from.slice + y * from.pitch;
                std::memmove(target, source, size.width);
            }
    }};
}

cudaError_t copy_box(machine& m, stream& on, const layout& to, const layout& from, const box& size) {
    if (size.width * size.height * size.depth == 0) return cudaSuccess;
    if (!is_within_reach(m, to.at, on) || !is_within_reach(m, from.at, on)) return cudaErrorInvalidValue;
    m.enqueue(on, copying_box(to, from, size));
    return cudaSuccess;
}

CUdeviceptr address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }
layout layout_of(const cudaPitchedPtr& p, const cudaPos& at) {
    const std::size_t slice = p.pitch * p.ysize;
    return {static_cast<const char*>(p.ptr) + at.z * slice + at.y * p.pitch + at.x, p.pitch, slice};
}
/// The copy's addresses in the driver's form, in which they may be of any kind of memory.
template <class Told>
Told told_3d(const layout& to, const layout& from, const box& size) {
    Told t{};
    t.srcMemoryType = t.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    t.srcDevice = address(from.at);
    t.dstDevice = address(to.at);
    t.srcPitch = from.pitch;
    t.dstPitch = to.pitch;
    t.WidthInBytes = size.width;
    t.Height = size.height;
    if constexpr (requires { t.Depth; }) t.Depth = size.depth;
    return t;
}
/// One copy of a batch, in bytes.
layout layout_of(const cudaMemcpy3DOperand& o, const cudaExtent& size) {
    if (o.type != cudaMemcpyOperandTypePointer) return {};
    const std::size_t row = o.op.ptr.rowLength != 0 ? o.op.ptr.rowLength : size.width;
    return {o.op.ptr.ptr, row, row * (o.op.ptr.layerHeight != 0 ? o.op.ptr.layerHeight : size.height)};
}
CUmemcpy3DOperand told_of(const layout& l) {
    CUmemcpy3DOperand o{};
    o.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    o.op.ptr.ptr = address(l.at);
    return o;
}

cudaError_t host_function(const char* name, cudaStream_t handle, std::function<void()> f) {
    return on_stream({name}, handle, [&](machine& m, stream& on) {
        m.enqueue(on, {.effect = std::move(f)});
        return cudaSuccess;
    });
}

}  // namespace

extern "C" {

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t handle) {
    const layout target{to, to_pitch, 0}, source{from, from_pitch, 0};
    const box size{width, height, 1};
    const auto rows = told_3d<CUDA_MEMCPY2D>(target, source, size);
    const cuMemcpy2DAsync_v2_params told{&rows, handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DAsync_v2, "cuMemcpy2DAsync_v2", told, [&] {
        return on_stream({"cudaMemcpy2DAsync"}, handle,
                         [&](machine& m, stream& on) { return copy_box(m, on, target, source, size); });
    });
}

cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* p, cudaStream_t handle) {
    const layout target = layout_of(p->dstPtr, p->dstPos), source = layout_of(p->srcPtr, p->srcPos);
    const box size{p->extent.width, p->extent.height, p->extent.depth};
    const auto whole = told_3d<CUDA_MEMCPY3D>(target, source, size);
    const cuMemcpy3DAsync_v2_params told{&whole, handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DAsync_v2, "cuMemcpy3DAsync_v2", told, [&] {
        return on_stream({"cudaMemcpy3DAsync"}, handle,
                         [&](machine& m, stream& on) { return copy_box(m, on, target, source, size); });
    });
}

cudaError_t cudaMemcpy3DPeerAsync(const cudaMemcpy3DPeerParms* p, cudaStream_t handle) {
    const layout target = layout_of(p->dstPtr, p->dstPos), source = layout_of(p->srcPtr, p->srcPos);
    const box size{p->extent.width, p->extent.height, p->extent.depth};
    const auto whole = told_3d<CUDA_MEMCPY3D_PEER>(target, source, size);
    const cuMemcpy3DPeerAsync_params told{&whole, handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DPeerAsync, "cuMemcpy3DPeerAsync", told, [&] {
        return on_stream({"cudaMemcpy3DPeerAsync"}, handle, [&](machine& m, stream& on) {
            if (!m.has_device(p->srcDevice) || !m.has_device(p->dstDevice)) return cudaErrorInvalidDevice;
            m.enqueue(on, copying_box(target, source, size));
            return cudaSuccess;
        });
    });
}

cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* sizes, std::size_t n,
                                 cudaMemcpyAttributes*, std::size_t*, std::size_t, cudaStream_t handle) {
    std::vector<CUdeviceptr> targets, sources;
    for (std::size_t i = 0; i < n; ++i) {
        targets.push_back(address(to[i]));
        sources.push_back(address(from[i]));
    }
    cuMemcpyBatchAsync_v2_params told{};
    told.dsts = targets.data();
    told.srcs = sources.data();
    told.sizes = const_cast<std::size_t*>(sizes);
    told.count = n;
    told.hStream = handle;
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync_v2, "cuMemcpyBatchAsync_v2", told, [&] {
        return on_stream({"cudaMemcpyBatchAsync"}, handle, [&](machine& m, stream& on) {
            for (std::size_t i = 0; i < n; ++i)
                if (const auto code = copy_box(m, on, {to[i]}, {from[i]}, {sizes[i]}); code != cudaSuccess) return code;
            return cudaSuccess;
        });
    });
}

cudaError_t cudaMemcpy3DBatchAsync(std::size_t n, cudaMemcpy3DBatchOp* all, unsigned long long flags,
                                   cudaStream_t handle) {
    std::vector<CUDA_MEMCPY3D_BATCH_OP> operations(n);
    for (std::size_t i = 0; i < n; ++i) {
        operations[i].src = told_of(layout_of(all[i].src, all[i].extent));
        operations[i].dst = told_of(layout_of(all[i].dst, all[i].extent));
        operations[i].extent = {all[i].extent.width, all[i].extent.height, all[i].extent.depth};
    }
    const cuMemcpy3DBatchAsync_v2_params told{n, operations.data(), flags, handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DBatchAsync_v2, "cuMemcpy3DBatchAsync_v2", told, [&] {
        return on_stream({"cudaMemcpy3DBatchAsync"}, handle, [&](machine& m, stream& on) {
            for (const auto& o : std::span(all, n)) {
                const box size{o.extent.width, o.extent.height, o.extent.depth};
                const auto code = copy_box(m, on, layout_of(o.dst, o.extent), layout_of(o.src, o.extent), size);
                if (code != cudaSuccess) return code;
            }
            return cudaSuccess;
        });
    });
}

// Moves nothing, since all memory is host memory here. (Driver API, cuMemPrefetchAsync: memory of
// cudaMallocManaged, or host memory if devices reach all of it.)
cudaError_t cudaMemPrefetchAsync(const void* p, std::size_t size, cudaMemLocation, unsigned flags,
                                 cudaStream_t handle) {
    cuMemPrefetchAsync_v2_params told{};
    told.devPtr = address(p);
    told.count = size;
    told.flags = flags;
    told.hStream = handle;
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchAsync_v2, "cuMemPrefetchAsync_v2", told, [&] {
        return on_stream({"cudaMemPrefetchAsync"}, handle, [&](machine& m, stream& on) {
            if (p == nullptr || size == 0 || flags != 0) return cudaErrorInvalidValue;
            m.enqueue(on, {});
            return cudaSuccess;
        });
    });
}

cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t handle) {
    const cuMemsetD2D8Async_params told{address(to), pitch, static_cast<unsigned char>(value), width, height, handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D8Async, "cuMemsetD2D8Async", told, [&] {
        return on_stream({"cudaMemset2DAsync"}, handle, [&](machine& m, stream& on) {
            if (width * height == 0) return cudaSuccess;
            if (!is_within_reach(m, to, on)) return cudaErrorInvalidValue;
            m.enqueue(on, {.effect = [=] {
                          for (std::size_t y = 0; y < height; ++y)
                              std::memset(static_cast<char*>(to) + y * pitch, value, width);
                      }});
            return cudaSuccess;
        });
    });
}

// Host functions run when the stream reaches them, and must not call CUDA. (Runtime API,
// cudaLaunchHostFunc.)

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t f, void* argument) {
    const cuLaunchHostFunc_params told{handle, f, argument};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuLaunchHostFunc, "cuLaunchHostFunc", told,
                       [&] { return host_function("cudaLaunchHostFunc", handle, [=] { f(argument); }); });
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t f, void* argument, unsigned flags) {
    cuStreamAddCallback_params told{};
    told.hStream = handle;
    told.userData = argument;
    told.flags = flags;
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuStreamAddCallback, "cuStreamAddCallback", told, [&] {
        return host_function("cudaStreamAddCallback", handle, [=] { f(handle, cudaSuccess, argument); });
    });
}

}  // extern "C"

}  // namespace standin
