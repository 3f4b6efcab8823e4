// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over ranks (gradient/group_operators.hpp), compiled by nvcc, against its
// definition.
//
//   CHECK(jobs::trouble_of_batch_norm(seed) == "");
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/group_operators.hpp>

#include "gpu/jobs.hpp"

namespace jobs {

using gathers =
    std::function<gpushare::errc(std::span<const std::uint64_t* const>, std::span<std::uint64_t* const>, std::size_t)>;
using adds =
    std::function<gpushare::errc(std::span<const float* const>, std::span<float* const>, std::size_t, gpushare::sum)>;

/// There and back by the kernels in jobs.cu, of ranks that share a stream.
[[nodiscard]] gpushare::errc batch_norm_on_device(gpushare::cuda::stream& s,
                                                  std::span<const gpushare::device_batch> batches, float epsilon,
                                                  const gathers& gather, const adds& all_reduce);

/// What is wrong with batches of random sizes: numbers that aren't near those of the definition,
/// and what the executor finds.
[[nodiscard]] std::string trouble_of_batch_norm(std::uint64_t seed);

/// What there and back cost for each element.
[[nodiscard]] cost cost_of_batch_norm();

}  // namespace jobs
