// SPDX-License-Identifier: Apache-2.0
// Cooperative launches, whose blocks may wait for each other: all blocks are resident at once, or
// the launch is refused.
//
//   if (stream.launch_cooperative({.blocks = stream.max_cooperative_blocks(k, 256), .threads = 256}, k) != gpushare::errc::none) ...
//
// Not in launch.cuh because <cooperative_groups.h> takes long to compile.
#pragma once

#ifndef __CUDACC__
#error "gpushare: cooperative.cuh needs nvcc: include it from .cu files only; stream.hpp is for the others"
#endif

#include <cooperative_groups.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include <gpushare/backend/cuda/launch.cuh>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

__device__ inline bool device_context::grid_sync() noexcept {
    const auto grid = cooperative_groups::this_grid();
    if (!grid.is_valid()) {
        if (num_blocks() != 1) return false;
        sync();
        return true;
    }
    grid.sync();
    return true;
}

template <class K>
std::uint32_t stream::max_cooperative_blocks(const K&, std::uint32_t threads) const noexcept {
    return detail::cooperative_blocks(state(), detail::entry_of<K>(), threads);
}

template <class K>
errc stream::launch_cooperative(grid g, const K& kernel) {
    detail::check_kernel<K>();
    if (g.blocks == 0) return errc::none;
    if (g.blocks > max_cooperative_blocks(kernel, g.threads)) return errc::too_many_blocks;
    errc refused = errc::none;
    enqueued_on_device(
        [&] {
            const cudaError_t code = detail::launch_on(state().native, g, kernel, true);
            if (code != cudaErrorCooperativeLaunchTooLarge) return code;
            refused = errc::too_many_blocks;
            (void)detail::handled(code);
            return cudaSuccess;
        },
        "launching a cooperative kernel");
    return refused;
}

static_assert(launcher<stream>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
