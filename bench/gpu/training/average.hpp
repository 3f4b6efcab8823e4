// SPDX-License-Identifier: Apache-2.0
// Averages the two ranks' gradients, with an interface in plain C++. average.cu defines the
// function for devices, and the rehearsal over the stand-in also defines it.
//
//   const auto combine = [&](auto& gradients) { return launch_average(ranks, gradients, shape); };
//   gpushare::torch_device_ranks both(node, std::span(&stream, 1), 2, combine);
#pragma once

#include <gpushare/collective/submit.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/device_buckets.hpp>

#include "gpu/collective_kernels.hpp"

namespace gpu_training {

/// Enqueues an average for each bucket that is ready on all ranks. A rank's gradients must lie in
/// one piece.
[[nodiscard]] gpushare::errc launch_average(const bench::rank_group& ranks, gpushare::device_buckets<float>& gradients,
                                            const gpushare::launch_options& shape);

}  // namespace gpu_training
