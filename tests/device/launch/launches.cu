// SPDX-License-Identifier: Apache-2.0
#include "launches.hpp"

#include <gpushare/backend/cuda/cooperative.cuh>

void launches::launch(gpushare::cuda::stream& s, gpushare::grid g, const payload& kernel) { s.launch(g, kernel); }

gpushare::errc launches::launch_cooperative(gpushare::cuda::stream& s, gpushare::grid g, const payload& kernel) {
    return s.launch_cooperative(g, kernel);
}

std::uint32_t launches::max_cooperative_blocks(const gpushare::cuda::stream& s, std::uint32_t threads) {
    return s.max_cooperative_blocks(payload{}, threads);
}

void launches::enqueue(gpushare::cuda::stream& s, std::chrono::duration<double, std::micro> length) {
    s.enqueue(length);
}
