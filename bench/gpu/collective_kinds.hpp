// SPDX-License-Identifier: Apache-2.0
// The collectives besides the exact all-reduce, as functions for plain C++: collective_kinds.cu has
// their kernels for devices. All ranks are on one device, and arrays hold what they have one rank
// after the other.
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

/// The last rank is the root of those that have one.
enum class collective : std::uint8_t {
    reduce_scatter,
    all_gather,
    all_to_all,
    broadcast,  // from `out` to `out`
    reduce,
    all_gatherv,
    reduce_scatterv,
    all_to_allv
};
inline constexpr std::array collectives{collective::reduce_scatter,  collective::all_gather, collective::all_to_all,
                                        collective::broadcast,       collective::reduce,     collective::all_gatherv,
                                        collective::reduce_scatterv, collective::all_to_allv};

struct collective_arrays {
    const float* in = nullptr;  // of each rank, as many parts as there are ranks
    float* out = nullptr;       // the same
    std::size_t part = 0;       // elements of it, at most
    // Of each rank two rows, a number for each rank: the lengths of parts; what goes to each rank
    // and comes from it.
    const std::uint64_t* lengths = nullptr;
};

[[nodiscard]] gpushare::errc launch_collective(const rank_group& ranks, collective which, const collective_arrays& a,
                                               const gpushare::launch_options& shape);

/// A sum, with a scale for 128 elements.
[[nodiscard]] gpushare::errc launch_quantised_all_reduce(const rank_group& ranks, const float* in, float* out,
                                                         std::size_t n, const gpushare::launch_options& shape);

}  // namespace bench
