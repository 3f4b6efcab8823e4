// SPDX-License-Identifier: Apache-2.0
// Launches the collectives other than the exact all-reduce, with an interface in plain C++.
// collective_kinds.cu has their kernels for devices. All ranks share one device, and an array holds
// the ranks' parts one after another.
//
//   launch_collective(ranks, collective::all_to_all, {in, out, n, lengths}, {.blocks = 4});
//   launch_quantised_all_reduce(ranks, in, out, n, {});     // in and out: n floats of each rank
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <gpushare/collective/submit.hpp>
#include <gpushare/error.hpp>

#include "gpu/collective_kernels.hpp"

namespace bench {

/// In collectives with a root, the last rank is the root.
enum class collective : std::uint8_t {
    reduce_scatter,
    all_gather,
    all_to_all,
    broadcast,  // in place, in `out`
    reduce,
    all_gatherv,
    reduce_scatterv,
    all_to_allv
};
inline constexpr std::array collectives{collective::reduce_scatter,  collective::all_gather, collective::all_to_all,
                                        collective::broadcast,       collective::reduce,     collective::all_gatherv,
                                        collective::reduce_scatterv, collective::all_to_allv};

struct collective_arrays {
    const float* in = nullptr;  // for each rank, as many parts as there are ranks
    float* out = nullptr;       // the same for the output
    std::size_t part = 0;       // largest number of elements in a part
    // Two rows for each rank, with a number for each other rank: the lengths of the parts, and the
    // lengths that go to and come from each rank.
    const std::uint64_t* lengths = nullptr;
};

[[nodiscard]] gpushare::errc launch_collective(const rank_group& ranks, collective which, const collective_arrays& a,
                                               const gpushare::launch_options& shape);

/// Sums with a scale for each 128 elements.
[[nodiscard]] gpushare::errc launch_quantised_all_reduce(const rank_group& ranks, const float* in, float* out,
                                                         std::size_t n, const gpushare::launch_options& shape);

}  // namespace bench
