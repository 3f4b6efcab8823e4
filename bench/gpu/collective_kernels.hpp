// SPDX-License-Identifier: Apache-2.0
// The kernels of the figures about collectives, as functions for plain C++: collective_kernels.cu
// has them for devices. All ranks are on one device, and arrays hold what they have one rank after
// the other.
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

/// An all-reduce, a residual, a norm and a cast, for `tokens` rows of `width`. What lies between
/// steps that are launched one by one has arrays of its own.
struct transformer_step {
    static constexpr std::size_t width = 4096;

    std::size_t tokens = 0;
    const float *x = nullptr, *residual = nullptr, *weight = nullptr;  // the weight is everybody's
    float *summed = nullptr, *added = nullptr, *normed = nullptr;
    gpushare::bfloat16* out = nullptr;
    float* scratch = nullptr;  // a row for each block

    [[nodiscard]] std::size_t of_rank() const noexcept { return tokens * width; }
};

/// How many blocks of so many threads each rank can have in the launches below.
[[nodiscard]] std::uint32_t most_blocks(const rank_group& ranks, std::uint32_t threads);

/// By the plan of the group's table.
[[nodiscard]] gpushare::errc launch_all_reduce(const rank_group& ranks, const float* in, float* out, std::size_t n,
                                               const gpushare::launch_options& shape);

/// All gradients of a step, in buckets. `staging`: an array of each rank.
[[nodiscard]] gpushare::errc launch_buckets(const rank_group& ranks, gpushare::device_buckets<float>& gradients,
                                            std::span<float* const> staging, const gpushare::launch_options& shape);

/// The whole step in one launch, from `x` to `out`.
[[nodiscard]] gpushare::errc launch_fused(const rank_group& ranks, const transformer_step& step,
                                          const gpushare::launch_options& shape);

/// What follows the all-reduce, from `summed` on: a launch for each pass over memory, or one for
/// all three.
void launch_passes(const rank_group& ranks, const transformer_step& step, const gpushare::launch_options& shape);
void launch_one_pass(const rank_group& ranks, const transformer_step& step, const gpushare::launch_options& shape);

}  // namespace bench
