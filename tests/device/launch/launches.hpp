// SPDX-License-Identifier: Apache-2.0
// Launches compiled by nvcc, which tests compiled by g++ call, and records of the calls that reach
// the CUDA runtime.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/concepts.hpp>

namespace launches {

/// A kernel that does nothing, with arguments that can be recognised.
struct payload {
    std::uint32_t words[5];

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C&) const {}
};

void launch(gpushare::cuda::stream& s, gpushare::grid g, const payload& kernel);
[[nodiscard]] gpushare::errc launch_cooperative(gpushare::cuda::stream& s, gpushare::grid g, const payload& kernel);
[[nodiscard]] std::uint32_t max_cooperative_blocks(const gpushare::cuda::stream& s, std::uint32_t threads);
void enqueue(gpushare::cuda::stream& s, std::chrono::duration<double, std::micro> length);

/// A launch that the runtime was asked for.
struct request {
    const void* kernel = nullptr;
    cudaStream_t stream = nullptr;
    std::uint32_t blocks = 0, threads = 0;
    std::size_t shared_memory = 0;
    bool cooperative = false;
    payload arguments{};  // garbage where the kernel is another one
    int device = -1;      // that was current
};

/// What the fake runtime answers, and what it was asked.
struct fake {
    std::vector<request> requests{};
    cudaError_t answer = cudaSuccess;
    int blocks_per_sm = 2;
};
[[nodiscard]] fake& runtime();

}  // namespace launches
