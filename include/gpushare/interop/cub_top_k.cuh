// SPDX-License-Identifier: Apache-2.0
// Chooses the largest elements of a gradient on its device: top_k_feedback::select
// (gradient/wire.hpp) by CUB's stable radix sort. The choice is small; it is copied to the host
// and goes over a transport as with all_reduce_top_k.
//
//   gpushare::stream_resource ordered{tenant.memory(), stream};
//   const cudaError_t code = gpushare::select_top_k(ordered, stream, gradient, owed, n, k, indices, values);       // all on the device
//
// The same elements as the host's.
#pragma once

#ifndef __CUDACC__
#error "gpushare: cub_top_k.cuh needs nvcc: include it from .cu files only; gradient/wire.hpp is the host's"
#endif

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cub/device/device_for.cuh>
#include <cub/device/device_radix_sort.cuh>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/interop/cub.hpp>
#include <gpushare/interop/stream_resource.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Adds a gradient to what is owed, and makes keys whose order is that of absolute values: NaN is as large as infinity.
struct weigh_owed {
    const float* gradient;
    float* owed;
    std::uint32_t *keys, *places;
    __device__ void operator()(std::uint32_t i) const {
        owed[i] += gradient[i];
        const std::uint32_t magnitude = __float_as_uint(owed[i]) & 0x7fff'ffffU;
        keys[i] = magnitude < 0x7f80'0000U ? magnitude : 0x7f80'0000U;
        places[i] = i;
    }
};
/// Takes what was chosen out of what is owed.
struct take_owed {
    float* owed;
    const std::uint32_t* chosen;
    std::uint32_t* indices;
    float* values;
    __device__ void operator()(std::uint32_t j) const {
        const std::uint32_t i = chosen[j];
        indices[j] = i;
        values[j] = owed[i];
        owed[i] = 0;
    }
};

}  // namespace detail

/// Enqueues on `on`: adds `gradient` to `owed`, both of `n` floats, and moves the `k` largest of
/// the sums by absolute value, of equals the first, to `values`, with their places in `indices`;
/// the largest comes first. k is at most n. `from` frees in the order of that stream, and is asked
/// for 16 bytes an element and what CUB needs. Throws what `from` throws.
template <memory_resource Resource, timeline Stream>
[[nodiscard]] cudaError_t select_top_k(Resource& from, Stream& on, const float* gradient, float* owed, std::uint32_t n,
                                       std::uint32_t k, std::uint32_t* indices, float* values) {
    k = std::min(k, n);
    if (n == 0) return cudaSuccess;
    const scratch_memory<Resource> memory(from, std::size_t{n} * 4 * sizeof(std::uint32_t));
    auto* const keys = static_cast<std::uint32_t*>(memory.data());
    std::uint32_t *const sorted_keys = keys + n, *const places = sorted_keys + n, *const sorted = places + n;
    const cudaStream_t stream = on.native_handle();
    if (const auto code = cub::DeviceFor::Bulk(n, detail::weigh_owed{gradient, owed, keys, places}, stream);
        code != cudaSuccess)
        return code;
    const auto code = with_temporary_storage(from, [&](void* temporary, std::size_t& size) {
        return cub::DeviceRadixSort::SortPairsDescending(temporary, size, keys, sorted_keys, places, sorted, n, 0, 32,
                                                         stream);
    });
    if (code != cudaSuccess) return code;
    return cub::DeviceFor::Bulk(k, detail::take_owed{owed, sorted, indices, values}, stream);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
