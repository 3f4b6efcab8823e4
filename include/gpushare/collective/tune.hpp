// SPDX-License-Identifier: Apache-2.0
// Measures which algorithm is fastest for each size, on this machine and with these ranks.
//
//   // every rank's thread:
//   auto table = gpushare::tune(me);
//   // then one of them, when all are done:
//   group.set_tuning(table);                      // and table.save() for the next run
//
// For collectives on streams, write a function that times a collective and pass the function to
// tune_submitted().
//
// Each size is measured in three ways: repeatedly in the same buffers (warm), in buffers that no
// cache holds (cold), and in place. In each of the three ways, a plan's loss is its time relative
// to the fastest plan's. The table gets the plan whose largest loss is smallest.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/tuner.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Measures sums of floats and returns a table for groups of this size. Measuring takes some
/// seconds. Every rank calls tune(), and gets the same table. Throws std::bad_alloc,
/// operation_error (errc::invalid_specification) if the smallest size is less than a float, and the
/// faults of the measured collectives.
[[nodiscard]] inline tuning_table tune(const member& me, const tune_options& options = {}) {
    detail::check_sizes(options);
    detail::tuner measuring(me, options);
    return detail::merged(me.size(), options, [&](std::uint64_t size, const all_reduce_plan* below) {
        return std::optional(measuring.best(size, below));
    });
}

/// tune() for submitted collectives. took(plan, bytes) submits a collective by this plan and
/// returns its time in any unit, for example between two points of the stream, or infinity if the
/// plan can't be used. Of `options`, only the sizes and `most_blocks` are used. With `most_blocks`,
/// plans have numbers of blocks.
template <std::invocable<const all_reduce_plan&, bytes> Took>
[[nodiscard]] tuning_table tune_submitted(std::uint32_t ranks, const Took& took, const tune_options& options = {}) {
    detail::check_sizes(options);
    std::vector<all_reduce_plan> plans;
    const auto most = static_cast<std::uint16_t>(std::min<std::uint32_t>(options.most_blocks, 65'535));
    for (std::uint32_t blocks = std::min<std::uint32_t>(most, 1); blocks <= most;
         blocks = detail::next_count(blocks, most))
        for (const all_reduce_plan& p : std::array<all_reduce_plan, 4>{
                 {{algorithm::one_shot}, {algorithm::two_shot}, {algorithm::two_shot, true}, {algorithm::ring}}}) {
            plans.push_back(p);
            plans.back().blocks = static_cast<std::uint16_t>(blocks);
        }
    return detail::merged(ranks, options, [&](std::uint64_t size, const all_reduce_plan* below) {
        std::vector<double> cost;
        for (const auto& p : plans) cost.push_back(static_cast<double>(took(p, bytes{size})));
        const std::size_t best = detail::cheapest(plans, cost, below);
        return cost[best] < std::numeric_limits<double>::infinity() ? std::optional(plans[best]) : std::nullopt;
    });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
