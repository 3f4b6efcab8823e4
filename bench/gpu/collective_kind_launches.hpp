// SPDX-License-Identifier: Apache-2.0
// Defines the functions of collective_kinds.hpp. The including file must be able to launch kernels
// on cuda::stream, and must include the launch headers first: nvcc's collective_kinds.cu, and the
// rehearsal over the stand-in.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>

#include "gpu/collective_kinds.hpp"

namespace bench {

namespace collective_kind_launches {

/// The start of each rank's part; a part has `of_rank` elements.
template <class T>
std::vector<T*> places(T* first, std::size_t of_rank, std::size_t ranks) {
    std::vector<T*> all;
    for (std::size_t r = 0; r < ranks; ++r) all.push_back(first + r * of_rank);
    return all;
}
template <class T>
std::vector<std::span<T>> rooms(T* first, std::size_t of_rank, std::size_t ranks) {
    std::vector<std::span<T>> all;
    for (std::size_t r = 0; r < ranks; ++r) all.emplace_back(first + r * of_rank, of_rank);
    return all;
}

inline gpushare::errc launch_equal(const rank_group& g, collective which, const collective_arrays& a,
                                   const gpushare::launch_options& shape) {
    namespace gs = gpushare;
    const std::size_t ranks = g.members.size(), whole = ranks * a.part;
    const auto ins = places(a.in, whole, ranks);
    const auto outs = places(a.out, whole, ranks);
    const auto root = static_cast<std::uint32_t>(ranks - 1);
    auto& gangs = g.node.gangs();
    switch (which) {
        case collective::reduce_scatter:
            return gs::submit_shared_reduce_scatter<float>(gangs, g.device, g.stream, g.members, ins, outs, a.part,
                                                           gs::sum{}, shape);
        case collective::all_gather:
            return gs::submit_shared_all_gather<float>(gangs, g.device, g.stream, g.members, ins, outs, a.part, shape);
        case collective::all_to_all:
            return gs::submit_shared_all_to_all<float>(gangs, g.device, g.stream, g.members, ins, outs, a.part, shape);
        case collective::broadcast:
            return gs::submit_shared_broadcast<float>(gangs, g.device, g.stream, g.members, outs, whole, root, shape);
        default:
            return gs::submit_shared_reduce<float>(gangs, g.device, g.stream, g.members, ins, outs, whole, root,
                                                   gs::sum{}, shape);
    }
}

}  // namespace collective_kind_launches

gpushare::errc launch_collective(const rank_group& g, collective which, const collective_arrays& a,
                                 const gpushare::launch_options& shape) {
    namespace gs = gpushare;
    using namespace collective_kind_launches;
    const std::size_t ranks = g.members.size(), whole = ranks * a.part;
    const auto ins = rooms(a.in, whole, ranks);
    const auto outs = rooms(a.out, whole, ranks);
    const auto lengths = places(a.lengths, 2 * ranks, ranks), by_pair = places(a.lengths + ranks, 2 * ranks, ranks);
    auto& gangs = g.node.gangs();
    switch (which) {
        case collective::all_gatherv:
            return gs::submit_shared_all_gatherv<float>(gangs, g.device, g.stream, g.members, ins, outs, lengths,
                                                        shape);
        case collective::reduce_scatterv:
            return gs::submit_shared_reduce_scatterv<float>(gangs, g.device, g.stream, g.members, ins, outs, lengths,
                                                            gs::sum{}, shape);
        case collective::all_to_allv:
            return gs::submit_shared_all_to_allv<float>(gangs, g.device, g.stream, g.members, ins, outs, by_pair,
                                                        by_pair, shape);
        default: return launch_equal(g, which, a, shape);
    }
}

gpushare::errc launch_quantised_all_reduce(const rank_group& g, const float* in, float* out, std::size_t n,
                                           const gpushare::launch_options& shape) {
    const auto ins = collective_kind_launches::places(in, n, g.members.size());
    const auto outs = collective_kind_launches::places(out, n, g.members.size());
    return gpushare::submit_shared_quantised_all_reduce<float>(g.node.gangs(), g.device, g.stream, g.members, ins, outs,
                                                               n, gpushare::sum{}, shape);
}

}  // namespace bench
