// SPDX-License-Identifier: Apache-2.0
// Packs gradients on devices, and selects their largest elements, by CUB's kernels. cub_packing
// packs gradients by a batched copy in place of device_buckets' own kernel. It suits buckets with
// very many gradients, or with gradients at odd addresses. Elements aren't converted.
//
//   gpushare::stream_resource ordered{tenant.memory(), stream};
//   // always(stream): the memory for CUB's scratch there
//   gpushare::cub_packing packing{always{&ordered}};
//   gpushare::device_buckets<float, float, decltype(packing)> mine(1, gpushare::bytes{1 << 20}, packing);
//
// select_top_k chooses the largest elements of a gradient on its device by CUB's stable radix sort.
// They are the same elements that top_k_feedback::select (gradient/wire.hpp) chooses on the host.
// The choice is small: the host gets a copy, which goes over a transport as with all_reduce_top_k.
//
//   const cudaError_t code = gpushare::select_top_k(ordered, stream, gradient, owed, n, k, indices, values);
//
// For buckets on devices, the choices go over streams:
//
//   gpushare::device_top_k top(ranks, elements, 0.01, gpushare::cub_choice{always{&ordered}});
#pragma once

#ifndef __CUDACC__
#error "gpushare: cub.cuh needs nvcc: include it from .cu files only; on the host: gradient/{device_buckets,wire}.hpp"
#endif

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_for.cuh>
#include <cub/device/device_memcpy.cuh>
#include <cub/device/device_radix_sort.cuh>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/stream_resource.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Arrays, and their places in a flat array. The list is short, because a launch takes it three
/// times and a kernel has 4 KiB of arguments.
template <class T>
struct listed_arrays {
    static constexpr std::uint32_t most = 32;
    T* data[most];
    std::size_t first[most + 1];
    T* flat;
};
template <class T, bool Packs>
struct copied_from {
    listed_arrays<T> list;
    __host__ __device__ const void* operator()(std::int64_t i) const {
        return Packs ? list.data[i] : list.flat + list.first[i];
    }
};
template <class T, bool Packs>
struct copied_to {
    listed_arrays<T> list;
    __host__ __device__ void* operator()(std::int64_t i) const {
        return Packs ? list.flat + list.first[i] : list.data[i];
    }
};
template <class T>
struct copied_bytes {
    listed_arrays<T> list;
    __host__ __device__ std::size_t operator()(std::int64_t i) const {
        return (list.first[i + 1] - list.first[i]) * sizeof(T);
    }
};

/// Adds a gradient to the residuals, and makes keys in order of magnitude. NaN counts as infinity.
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
/// Takes the chosen elements out of the residuals.
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

/// Packs for device_buckets by cub::DeviceMemcpy::Batched, 32 arrays in a call. For a stream,
/// `MemoryOf` returns the memory for CUB's temporary storage, which frees in the order of that
/// stream: a stream_resource. Throws that memory's errors, and operation_error
/// (errc::submission_failed) if CUB fails.
template <class MemoryOf>
struct cub_packing {
    MemoryOf memory_of;  ///< the memory of a stream

    /// Enqueues the copy of all pieces to `flat`, one after the other.
    template <timeline Stream, class T>
    void pack(Stream& on, std::span<const std::pair<T*, std::size_t>> pieces, T* flat) const {
        run<true>(on, pieces, flat);
    }
    /// Enqueues the copy back.
    template <timeline Stream, class T>
    void unpack(Stream& on, std::span<const std::pair<T*, std::size_t>> pieces, T* flat) const {
        run<false>(on, pieces, flat);
    }

private:
    template <bool Packs, class Stream, class T>
    void run(Stream& on, std::span<const std::pair<T*, std::size_t>> pieces, T* flat) const {
        while (!pieces.empty()) {
            detail::listed_arrays<T> list{};
            list.flat = flat;
            std::uint32_t n = 0;
            for (; n < list.most && n < pieces.size(); ++n) {
                list.data[n] = pieces[n].first;
                list.first[n + 1] = list.first[n] + pieces[n].second;
            }
            copy<Packs>(on, list, n);
            flat += list.first[n];
            pieces = pieces.subspan(n);
        }
    }
    template <bool Packs, class Stream, class T>
    void copy(Stream& on, const detail::listed_arrays<T>& list, std::uint32_t n) const {
        const auto of = [](auto f) {
            return thrust::make_transform_iterator(thrust::counting_iterator<std::int64_t>(0), f);
        };
        const auto from = of(detail::copied_from<T, Packs>{list});
        const auto to = of(detail::copied_to<T, Packs>{list});
        const auto sizes = of(detail::copied_bytes<T>{list});
        const auto code = with_temporary_storage(memory_of(on), [&](void* temporary, std::size_t& size) {
            return cub::DeviceMemcpy::Batched(temporary, size, from, to, sizes, std::int64_t{n}, on.native_handle());
        });
        if (code != cudaSuccess) raise({.code = errc::submission_failed}, {}, "packing gradients by CUB");
    }
};
/// Deduces the type from the function.
template <class MemoryOf>
cub_packing(MemoryOf) -> cub_packing<MemoryOf>;

/// Enqueues on `on`: adds `gradient` to `owed`, both of `n` floats, and moves the `k` sums of the
/// largest magnitude to `values`, and their places to `indices`, the largest first. Among equal
/// magnitudes, the first places are chosen. A larger `k` counts as `n`. `from` must free in the
/// order of that stream. It provides 16 bytes for each element, and CUB's own scratch. Throws the
/// errors of `from`.
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

/// The choice of a device_top_k (gradient/device_buckets.hpp) by select_top_k. memory_of(stream)
/// returns memory that frees in the order of that stream. Throws operation_error
/// (errc::submission_failed) if CUB fails.
template <class MemoryOf>
struct cub_choice {
    MemoryOf memory_of;  ///< the memory of a stream

    /// Enqueues the choice.
    template <timeline Stream>
    void operator()(Stream& on, const float* gradient, float* owed, std::size_t n, std::size_t k, std::uint32_t* places,
                    float* values) const {
        if (n > 0xffff'ffffU)
            raise({errc::size_overflow, n, 0, 0xffff'ffff, reason::count_limit}, {},
                  "choosing the largest elements of a gradient");
        const auto code = select_top_k(memory_of(on), on, gradient, owed, static_cast<std::uint32_t>(n),
                                       static_cast<std::uint32_t>(k), places, values);
        if (code != cudaSuccess)
            raise({.code = errc::submission_failed}, {}, "choosing the largest elements of a gradient by CUB");
    }
};
/// Deduces the type from the function.
template <class MemoryOf>
cub_choice(MemoryOf) -> cub_choice<MemoryOf>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
