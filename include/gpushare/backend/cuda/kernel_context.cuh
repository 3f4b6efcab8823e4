// SPDX-License-Identifier: Apache-2.0
// A kernel's view of a CUDA device: its place in the grid, its block's barrier and reductions.
//
//   struct scale {
//       float* x;  std::size_t n;
//       template <gpushare::kernel_context C> GPUSHARE_HD void operator()(C& ctx) const {
//           for (std::size_t i = ctx.thread_rank(); i < n; i += ctx.num_threads()) x[i] *= 2;
//       }
//   };
//
// The same functor runs on the host backend: host::kernel_context offers the same.
#pragma once

#ifndef __CUDACC__
#error "gpushare: kernel_context.cuh needs nvcc: include it from .cu files only"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

namespace detail {

inline constexpr std::uint32_t warp_size = 32;

/// The value that the lane `offset` above has, whatever its type. All lanes of `mask` call it.
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

/// The first argument of a kernel, made by the launch; belongs to its thread. Grids and blocks have one dimension.
class device_context {
public:
    /// Its block's, in the grid.
    [[nodiscard]] __device__ std::uint32_t block_rank() const noexcept { return blockIdx.x; }
    /// The number of blocks of the grid.
    [[nodiscard]] __device__ std::uint32_t num_blocks() const noexcept { return gridDim.x; }
    /// In its block.
    [[nodiscard]] __device__ std::uint32_t thread_rank() const noexcept { return threadIdx.x; }
    /// The number of threads of its block.
    [[nodiscard]] __device__ std::uint32_t num_threads() const noexcept { return blockDim.x; }
    /// The SM that runs the block.
    [[nodiscard]] __device__ std::uint32_t sm() const noexcept {
        std::uint32_t id = 0;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
        return id;
    }

    /// Waits for the threads of the block, all of which must come, and makes their writes visible to each other.
    __device__ void sync() noexcept { __syncthreads(); }

    /// x of all threads of the block combined by `op`, for all of them. All threads must come. The order is a tree over
    /// each 32 threads and then these in turn: it depends on num_threads() alone, so the same launch has the same bits.
    template <class T, class Op>
    requires(std::is_trivially_copyable_v<T> && sizeof(T) <= 64) [[nodiscard]] __device__ T
        reduce(T x, Op op) noexcept {
        using detail::warp_size;
        // Bytes, so that T needs no default constructor. One buffer for each T and Op, reused by every call.
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
        sync();  // before the next call writes
        return x;
    }
    /// The sum; see reduce().
    template <class T>
    [[nodiscard]] __device__ T reduce_add(T x) noexcept {
        return reduce(x, [](T a, T b) { return a + b; });
    }

    /// Waits for all threads of all blocks of a cooperative launch, and makes their writes visible. False if the launch
    /// isn't cooperative and has several blocks. Defined in cooperative.cuh, which costs a second a file to compile.
    /// All threads must come, equally often: unlike on the host, a block that has returned is waited for in vain.
    [[nodiscard]] __device__ inline bool grid_sync() noexcept;

    /// Call it while waiting for another block, with the number of calls before. At first it
    /// returns at once: ranks that begin together are there within microseconds, of which a turn
    /// takes half a one or more, and a sleep may last twice as long as requested. Later it sleeps
    /// for some 50 to 500 ns. (PTX ISA, nanosleep.)
    __device__ void backoff(std::uint32_t turn) noexcept {
        if (turn >= 16) __nanosleep(turn < 64 ? 50 : 500);
    }

    /// Nanoseconds of the device's global timer, which all its kernels share; its zero is not the host's.
    [[nodiscard]] __device__ std::int64_t now() const noexcept {
        std::int64_t t = 0;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t;
    }

    /// False: the kernels of a device that is lost are ended, and can't ask.
    [[nodiscard]] __device__ bool device_lost() const noexcept { return false; }
};
static_assert(gpushare::kernel_context<device_context>);
static_assert(kernel_for<gpushare::detail::empty_kernel, device_context>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
