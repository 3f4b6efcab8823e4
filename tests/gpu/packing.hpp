// SPDX-License-Identifier: Apache-2.0
// Packing of gradients (gradient/detail/packing.hpp) as compiled, against a copy by the host.
//
//   CHECK(jobs::trouble_of_packing(seed) == "");
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/numbers.hpp>

namespace jobs {

/// Packs arrays into `flat`, or unpacks them from there, by the kernels in jobs.cu.
void pack_on_device(gpushare::cuda::stream& s, std::span<const std::pair<float*, std::size_t>> arrays, float* flat,
                    bool back);
void pack_on_device(gpushare::cuda::stream& s, std::span<const std::pair<float*, std::size_t>> arrays,
                    gpushare::bfloat16* flat, bool back);

/// What is wrong with random arrays that are packed and unpacked: other bytes than expected, and
/// what the executor finds.
[[nodiscard]] std::string trouble_of_packing(std::uint64_t seed);

/// Bytes of global memory that packing and unpacking read and write, over the least there is: each
/// element read and written once. Floats as they are, and as bfloat16.
struct packing_cost {
    double as_is = 0, as_bfloats = 0;
};
[[nodiscard]] packing_cost cost_of_packing();

}  // namespace jobs
