// SPDX-License-Identifier: Apache-2.0
// Kernel launches on CUDA streams: the members that cuda::stream declares and only nvcc can compile.
//
//   #include <gpushare/backend/cuda/launch.cuh>
//   stream.launch({.blocks = 64, .threads = 256}, scale{x, n});
#pragma once

#ifndef __CUDACC__
#error "gpushare: launch.cuh needs nvcc: include it from .cu files only; stream.hpp is for the others"
#endif

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/backend/cuda/kernel_context.cuh>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

namespace detail {

/// Bytes of arguments that a kernel can have: 32,764 with every driver that CUDA 13 runs on. Older ones had 4,096.
inline constexpr std::size_t largest_kernel = 32'764;

/// The one kernel there is. A constant of the grid: no thread makes a copy of `kernel`.
template <class K>
__global__ void run(const __grid_constant__ K kernel) {
    device_context context;
    kernel(context);
}

template <class K>
constexpr void check_kernel() {
    static_assert(kernel_for<K, device_context>,
                  "gpushare: a kernel is called with a context: operator()(C& ctx) const");
    static_assert(std::is_trivially_copyable_v<K>,
                  "gpushare: a kernel travels to the device byte by byte: hold pointers, not containers");
    static_assert(sizeof(K) <= largest_kernel,
                  "gpushare: a kernel's arguments are limited to 32,764 bytes: put more into device memory");
}

template <class K>
[[nodiscard]] const void* entry_of() noexcept {
    check_kernel<K>();
    return reinterpret_cast<const void*>(&run<K>);
}

/// The launch itself, on a device that is current. `g.blocks` isn't 0.
template <class K>
cudaError_t launch_on(cudaStream_t native, grid g, const K& kernel, bool cooperative) noexcept {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(g.blocks);
    config.blockDim = dim3(g.threads);
    config.stream = native;
    config.attrs = &attribute;
    config.numAttrs = cooperative ? 1 : 0;
    void* arguments[] = {const_cast<K*>(&kernel)};  // the runtime only reads them
    return cudaLaunchKernelExC(&config, entry_of<K>(), arguments);
}

/// Takes `length` of the device's clock.
struct spin {
    std::uint64_t length;  // ns

    __device__ void operator()(device_context&) const noexcept {
        // The clock may stand still for up to 1 us: from one step to another at least `length` passes.
        const std::uint64_t before = now();
        std::uint64_t begin = now();
        while (begin == before) begin = now();
        while (now() - begin < length) {
        }
    }

private:
    [[nodiscard]] __device__ static std::uint64_t now() noexcept {
        std::uint64_t t = 0;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t;
    }
};

}  // namespace detail

template <class K>
void stream::launch(grid g, const K& kernel) {
    detail::check_kernel<K>();
    if (g.blocks == 0) return;
    launched(detail::entry_of<K>(), g, [&] { return detail::launch_on(state().native, g, kernel, false); });
}

template <class Rep, class Period>
void stream::enqueue(std::chrono::duration<Rep, Period> length) {
    const ns whole = std::chrono::ceil<ns>(length);
    if (whole <= ns{0}) return;
    const detail::spin kernel{static_cast<std::uint64_t>(whole.count())};
    enqueued_on_device([&] { return detail::launch_on(state().native, {}, kernel, false); }, "launching a kernel");
}

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
