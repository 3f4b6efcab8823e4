// SPDX-License-Identifier: Apache-2.0
// Launches the kernels behind the figures of collectives, with an interface in plain C++.
// collective_kernels.cu defines the functions for devices. All ranks share one device, and an array
// holds the ranks' parts one after another.
//
//   const rank_group ranks{node, device, s, members};
//   launch_all_reduce(ranks, in, out, n, {.blocks = 16});     // in and out: n floats of each rank
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/numbers.hpp>

namespace bench {

struct rank_group {
    gpushare::cuda::node& node;
    gpushare::device_id device;
    gpushare::cuda::stream& stream;
    std::span<const gpushare::member> members;
};

/// An all-reduce, a residual, a norm and a cast over `tokens` rows of `width` elements. Separately
/// launched steps pass their results through `summed`, `added` and `normed`.
struct transformer_step {
    static constexpr std::size_t width = 4096;

    std::size_t tokens = 0;
    const float *x = nullptr, *residual = nullptr, *weight = nullptr;  // all ranks share the weight
    float *summed = nullptr, *added = nullptr, *normed = nullptr;
    gpushare::bfloat16* out = nullptr;
    float* scratch = nullptr;  // a row for each block

    [[nodiscard]] std::size_t of_rank() const noexcept { return tokens * width; }
};

/// The maximum number of blocks of `threads` threads that each rank can use in the launches below.
[[nodiscard]] std::uint32_t most_blocks(const rank_group& ranks, std::uint32_t threads);

/// Runs an all-reduce with the plan from the group's table.
[[nodiscard]] gpushare::errc launch_all_reduce(const rank_group& ranks, const float* in, float* out, std::size_t n,
                                               const gpushare::launch_options& shape);

/// Sums all gradients of a training step in buckets. `staging` has an array for each rank.
[[nodiscard]] gpushare::errc launch_buckets(const rank_group& ranks, gpushare::device_buckets<float>& gradients,
                                            std::span<float* const> staging, const gpushare::launch_options& shape);

/// Runs the whole step in one launch, from `x` to `out`.
[[nodiscard]] gpushare::errc launch_fused(const rank_group& ranks, const transformer_step& step,
                                          const gpushare::launch_options& shape);

/// Run the part of the step after the all-reduce, starting from `summed`: launch_passes() with a
/// launch for each of three passes over memory, launch_one_pass() with a single launch.
void launch_passes(const rank_group& ranks, const transformer_step& step, const gpushare::launch_options& shape);
void launch_one_pass(const rank_group& ranks, const transformer_step& step, const gpushare::launch_options& shape);

}  // namespace bench
