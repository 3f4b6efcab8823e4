// SPDX-License-Identifier: Apache-2.0
// Packing of gradients (gradient/detail/packing.hpp) and related kernels, compiled by nvcc, against
// the host's results.
//
//   CHECK(jobs::trouble_of_packing(seed) == "");
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/gradient/detail/packing.hpp>
#include <gpushare/numbers.hpp>

#include "gpu/jobs.hpp"

namespace jobs {

/// Packs arrays into `flat`, or unpacks them from there, by the kernels in jobs.cu.
void pack_on_device(gpushare::cuda::stream& s, std::span<const std::pair<float*, std::size_t>> arrays, float* flat,
                    bool back);
void pack_on_device(gpushare::cuda::stream& s, std::span<const std::pair<float*, std::size_t>> arrays,
                    gpushare::bfloat16* flat, bool back);

/// With error feedback.
void pack_owing_on_device(gpushare::cuda::stream& s,
                          std::span<const gpushare::detail::packing_owing<gpushare::bfloat16>::piece> arrays,
                          gpushare::bfloat16* flat, std::ptrdiff_t next);
/// Error feedback of fp8 blocks of 128 or 32 elements.
void feed_back_fp8_on_device(gpushare::cuda::stream& s, std::uint32_t block, const float* from, float* to,
                             const float* owed, float* left, std::size_t count);
/// The elements that a rank has chosen.
struct chosen {
    const std::uint32_t* places;
    const float* values;
    std::size_t count;
};
/// The mean of what all ranks have chosen; `flag` becomes 1 if it isn't finite.
void add_chosen_on_device(gpushare::cuda::stream& s, float* data, std::size_t count, std::span<const chosen> ranks,
                          std::uint32_t* flag);

/// `out` becomes the weighted sum of arrays of `count` floats, as device_gossip launches it.
void gossip_on_device(gpushare::cuda::stream& s, float* out, std::size_t count,
                      std::span<const std::pair<const float*, float>> arrays);

/// What is wrong with two steps of error feedback, beside to_wire on the host, with that of fp8
/// blocks, with the mean of what two ranks have chosen, and with the weighted sum of neighbours.
[[nodiscard]] std::string trouble_of_feedback(std::uint64_t seed);

/// What is wrong with random arrays that are packed and unpacked: other bytes than expected, and
/// what the executor finds.
[[nodiscard]] std::string trouble_of_packing(std::uint64_t seed);

/// Bytes of global memory that packing and unpacking read and write, over the least there is: each
/// element read and written once. Floats as they are, and as bfloat16.
struct packing_cost {
    double as_is = 0, as_bfloats = 0;
};
[[nodiscard]] packing_cost cost_of_packing();

/// What these kernels cost for each element.
[[nodiscard]] std::vector<cost> costs_of_packing();

}  // namespace jobs
