// SPDX-License-Identifier: Apache-2.0
// Kernel launches on CUDA streams, and a kernel's view of the device. Needs nvcc.
//
//   struct scale {
//       float* x;  std::size_t n;
//       template <gpushare::kernel_context C> GPUSHARE_HD void operator()(C& ctx) const {
//           for (std::size_t i = ctx.thread_rank(); i < n; i += ctx.num_threads()) x[i] *= 2;
//       }
//   };
//   stream.launch({.blocks = 64, .threads = 256}, scale{x, n});
//
// The context has the thread's place in the grid, its block's barrier and reductions. The same
// functor runs on the host backend, where host::kernel_context has the same members.
#pragma once

#ifndef __CUDACC__
#error "gpushare: launch.cuh needs nvcc: include it from .cu files only; stream.hpp is for the others"
#endif

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

namespace detail {

inline constexpr std::uint32_t warp_size = 32;

/// The value of the lane that is `offset` above, for any type. All lanes of `mask` must call this
/// function.
template <class T>
__device__ T shuffle_down(std::uint32_t mask, T x, std::uint32_t offset) noexcept {
    constexpr std::size_t words = (sizeof(T) + 3) / 4;
    std::uint32_t buffer[words] = {};
    memcpy(buffer, &x, sizeof x);
    for (std::uint32_t& word : buffer) word = __shfl_down_sync(mask, word, offset);
    memcpy(&x, buffer, sizeof x);
    return x;
}

}  // namespace detail

/// The first argument of a kernel, made by the launch for each thread. Grids and blocks have one
/// dimension.
class device_context {
public:
    /// The rank of the thread's block in the grid.
    [[nodiscard]] __device__ std::uint32_t block_rank() const noexcept { return blockIdx.x; }
    /// The number of blocks of the grid.
    [[nodiscard]] __device__ std::uint32_t num_blocks() const noexcept { return gridDim.x; }
    /// The rank of the thread in its block.
    [[nodiscard]] __device__ std::uint32_t thread_rank() const noexcept { return threadIdx.x; }
    /// The number of threads of the block.
    [[nodiscard]] __device__ std::uint32_t num_threads() const noexcept { return blockDim.x; }
    /// The SM that runs the block.
    [[nodiscard]] __device__ std::uint32_t sm() const noexcept {
        std::uint32_t id = 0;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
        return id;
    }

    /// Waits for all threads of the block, all of which must call it, and makes their writes
    /// visible to each other.
    __device__ void sync() noexcept { __syncthreads(); }

    /// Combines x of all threads of the block by `op`, and returns the result in each of them. All
    /// threads must call it. A tree combines each 32 threads; their results are then combined one
    /// after the other. This order depends on num_threads() alone, so the same launch has the same
    /// bits.
    template <class T, class Op>
    requires(std::is_trivially_copyable_v<T> && sizeof(T) <= 64) [[nodiscard]] __device__ T
        reduce(T x, Op op) noexcept {
        using detail::warp_size;
        // Raw bytes, so that T needs no default constructor. Each T and Op has one buffer, which
        // every call reuses.
        __shared__ alignas(T) std::byte storage[warp_size * sizeof(T)];
        T* const of_warp = reinterpret_cast<T*>(storage);

        const std::uint32_t lane = thread_rank() % warp_size, warp = thread_rank() / warp_size;
        const std::uint32_t warps = (num_threads() + warp_size - 1) / warp_size;
        const std::uint32_t lanes = warp + 1 < warps ? warp_size : num_threads() - warp * warp_size;
        const std::uint32_t mask = lanes == warp_size ? ~0U : (1U << lanes) - 1;
        for (std::uint32_t offset = warp_size / 2; offset != 0; offset /= 2) {
            const T other = detail::shuffle_down(mask, x, offset);
            if (lane + offset < lanes) x = op(x, other);
        }
        if (lane == 0) of_warp[warp] = x;
        sync();
        x = of_warp[0];
        for (std::uint32_t w = 1; w < warps; ++w) x = op(x, of_warp[w]);
        sync();  // so that the next call may write
        return x;
    }
    /// The sum; see reduce().
    template <class T>
    [[nodiscard]] __device__ T reduce_add(T x) noexcept {
        return reduce(x, [](T a, T b) { return a + b; });
    }

    /// Waits for all threads of all blocks of a cooperative launch, and makes their writes visible.
    /// False if the launch isn't cooperative and has several blocks. Defined in cooperative.cuh,
    /// which takes a second to compile in each file. All threads must call it equally often: if a
    /// block returns early, the other blocks wait for ever, unlike on the host.
    [[nodiscard]] __device__ inline bool grid_sync() noexcept;

    /// Call in a loop that waits for another block. `turn`: the number of earlier calls. The first
    /// calls return immediately, since ranks that begin together arrive within microseconds (a turn
    /// takes 0.5 us or more), and a sleep may last twice as long as requested. Later calls sleep
    /// for about 50 to 500 ns. (PTX ISA, nanosleep.)
    __device__ void backoff(std::uint32_t turn) noexcept {
        if (turn >= 16) __nanosleep(turn < 64 ? 50 : 500);
    }

    /// Nanoseconds of the device's global timer, which all its kernels share; its zero is not the
    /// host's.
    [[nodiscard]] __device__ std::int64_t now() const noexcept {
        std::int64_t t = 0;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t;
    }

    /// Always false: when a device is lost, its kernels end.
    [[nodiscard]] __device__ bool device_lost() const noexcept { return false; }
};
static_assert(gpushare::kernel_context<device_context>);
static_assert(kernel_for<gpushare::detail::empty_kernel, device_context>);

namespace detail {

/// The most bytes of arguments of a kernel: 32,764 with every driver that supports CUDA 13, and
/// 4,096 with older ones.
inline constexpr std::size_t largest_kernel = 32'764;

/// The library's only __global__ function. `kernel` is a constant of the grid: no thread copies it.
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

/// Launches the kernel on the current device. `g.blocks` isn't 0.
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

/// A kernel that runs for `length` by the device's clock.
struct spin {
    std::uint64_t length;  // ns

    __device__ void operator()(device_context&) const noexcept {
        // The clock advances in steps of up to 1 us. Counting from one step to another, at least
        // `length` passes.
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
