// SPDX-License-Identifier: Apache-2.0
// A softmax over sharded classes (device_partial_softmax), compiled by nvcc, against the host
// backend.
//
//   CHECK(jobs::trouble_of_softmax(seed) == "");
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <type_traits>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/group_operators.hpp>

#include "gpu/jobs.hpp"

namespace jobs {

/// The result of a collective over the ranks' arrays, all on one stream: the largest numbers or the
/// sums, all of them on each rank, or `scattered` sums.
enum class combination : std::uint8_t { largest, sums, scattered };
using combines = std::function<void(std::span<const float* const>, std::span<float* const>, std::size_t, combination)>;

/// A step by the kernels in jobs.cu, of ranks that share a stream.
[[nodiscard]] gpushare::errc softmax_on_device(gpushare::cuda::stream& s, gpushare::device_partial_softmax& layer,
                                               std::span<const gpushare::device_softmax_rank> ranks,
                                               const combines& combine);

/// A step of any stream, with collectives of its own.
template <class Stream>
[[nodiscard]] gpushare::errc softmax_step(Stream& s, gpushare::device_partial_softmax& layer,
                                          std::span<const gpushare::device_softmax_rank> ranks,
                                          const combines& combine) {
    const auto gather = [&]<class T>(std::span<const T* const> ins, std::span<T* const> outs, std::size_t n) {
        for (T* const out : outs)
            for (std::size_t r = 0; r < ins.size(); ++r) s.copy(out + r * n, ins[r], n * sizeof(T));
        return gpushare::errc::none;
    };
    const auto all = [&]<class Op>(std::span<const float* const> ins, std::span<float* const> outs, std::size_t n, Op) {
        combine(ins, outs, n, std::is_same_v<Op, gpushare::sum> ? combination::sums : combination::largest);
        return gpushare::errc::none;
    };
    const auto scatter = [&](std::span<const float* const> ins, std::span<float* const> outs, std::size_t n,
                             gpushare::sum) {
        combine(ins, outs, n, combination::scattered);
        return gpushare::errc::none;
    };
    return layer.submit_step(std::span(&s, 1), ranks, gather, all, scatter);
}

/// Runs a step of random sizes, and says what is wrong with its results; empty if nothing is. With
/// the numbers of every other seed only the loss is rounded: there the results must have the host's
/// bits. Elsewhere the results are near the host's, since a block's threads add up in another
/// order, a product and a sum are rounded once, and the exponential is another one.
[[nodiscard]] std::string trouble_of_softmax(std::uint64_t seed);

/// What a step costs for each feature of each sample and class.
[[nodiscard]] cost cost_of_softmax();

}  // namespace jobs
