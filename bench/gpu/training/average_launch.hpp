// SPDX-License-Identifier: Apache-2.0
// Defines the function of average.hpp. The including file must be able to launch kernels on
// cuda::stream, and must include the launch headers first: nvcc's average.cu, and the rehearsal
// over the stand-in.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <gpushare/collective/reduce_ops.hpp>

#include "gpu/training/average.hpp"

namespace gpu_training {

gpushare::errc launch_average(const bench::rank_group& g, gpushare::device_buckets<float>& gradients,
                              const gpushare::launch_options& shape) {
    const auto engine = [&](auto ins, auto outs, std::size_t n, gpushare::average op) {
        return gpushare::submit_shared_all_reduce<float>(g.node.gangs(), g.device, g.stream, g.members, ins, outs, n,
                                                         op, shape);
    };
    const std::vector<float*> no_staging(g.members.size());
    return gradients.advance(std::span(&g.stream, 1), no_staging, engine);
}

}  // namespace gpu_training
