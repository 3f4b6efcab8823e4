// SPDX-License-Identifier: Apache-2.0
// Thrust's vectors and algorithms and CUB's algorithms on a tenant's memory, compiled for devices:
// Thrust's CUDA system, which nothing but nvcc compiles.
#include <gpushare/interop/cub.cuh>
#include <gpushare/interop/cublas.hpp>
#include <gpushare/interop/pmr.hpp>
#include <gpushare/interop/pytorch.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/interop/tensorrt.hpp>
#include <gpushare/interop/thrust.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/sort.h>
#include <thrust/system/cuda/execution_policy.h>
#include <cub/device/device_reduce.cuh>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/tenant/tenancy.hpp>

namespace {

using node = gpushare::cuda::node;
using memory = gpushare::tenant_memory<node::memory_type, node::stream::point>;
using ordered = gpushare::stream_resource<memory, node::stream>;
template <class T>
using allocator = gpushare::thrust_allocator<T, ordered>;

}  // namespace

/// The sum of n values, greatest first, in the tenant's memory alone.
cudaError_t sort_and_sum(gpushare::tenant<node>& chat, float* sum, std::size_t n) {
    auto& stream = chat.work_stream();
    ordered mine{chat.memory(), stream};
    const allocator<float> of_floats{mine};
    auto policy = thrust::cuda::par_nosync(allocator<char>{mine}).on(stream.native_handle());

    // docs/recipes.md has some of these lines.
    thrust::device_vector<float, allocator<float>> v(n, 1.0F, of_floats), w(of_floats);
    thrust::sort(policy, v.begin(), v.end());  // 2

    w = v;
    w.swap(v);
    w = std::move(v);
    const float* const in = thrust::raw_pointer_cast(w.data());

    return gpushare::with_temporary_storage(chat.memory(), stream, [&](void* temporary, std::size_t& size) {
        return cub::DeviceReduce::Sum(temporary, size, in, sum, static_cast<int>(n), stream.native_handle());
    });
}

/// The k largest of a gradient, and the rest later.
cudaError_t choose(gpushare::tenant<node>& chat, const float* gradient, float* owed, std::uint32_t n, std::uint32_t k,
                   std::uint32_t* indices, float* values) {
    auto& stream = chat.work_stream();
    ordered mine{chat.memory(), stream};
    return gpushare::select_top_k(mine, stream, gradient, owed, n, k, indices, values);
}

/// Packs arrays into `flat`, or unpacks them from there, by CUB's batched copy.
void pack_by_cub(gpushare::tenant<node>& chat, std::span<const std::pair<float*, std::size_t>> arrays, float* flat,
                 bool back) {
    auto& stream = chat.work_stream();
    ordered mine{chat.memory(), stream};
    const gpushare::cub_packing packing{[at = &mine](node::stream&) -> ordered& { return *at; }};
    if (back)
        packing.unpack(stream, arrays, flat);
    else
        packing.pack(stream, arrays, flat);
}

/// The same by what device_top_k is given.
void choose_by_cub(gpushare::tenant<node>& chat, const float* gradient, float* owed, std::size_t n, std::size_t k,
                   std::uint32_t* places, float* values) {
    auto& stream = chat.work_stream();
    ordered mine{chat.memory(), stream};
    const gpushare::cub_choice choose{[at = &mine](node::stream&) -> ordered& { return *at; }};
    choose(stream, gradient, owed, n, k, places, values);
}
