// SPDX-License-Identifier: Apache-2.0
// Measures which algorithm is the fastest at which size, on this machine and with these ranks.
//
//   // every rank's thread:
//   auto table = gpushare::tune(me);
//   // then one of them, when all are done:
//   group.set_tuning(table);                      // and table.save() for the next run
//
// For what is submitted to streams, whoever submits and times it calls tune_submitted().
//
// A size is used in three ways: again and again in the same buffers (warm), in buffers that no cache holds (cold), and in place.
// It gets the plan that is never far behind the best one: whose worst ratio to the best, of the three, is the least.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/tuner.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A table for groups of this size, from sums of floats: takes some seconds. Called by every rank; every rank gets the same.
/// Throws std::bad_alloc, operation_error (errc::invalid_specification) if the smallest size is less than a float, and what goes
/// wrong in a collective.
[[nodiscard]] inline tuning_table tune(const member& me, const tune_options& options = {}) {
    detail::check_sizes(options);
    detail::tuner measuring(me, options);
    return detail::cheapest(me.size(), options, detail::tuner::plans,
                            [&](std::uint64_t size) { return detail::tuner::regrets(measuring.measure(size)); });
}

/// The same for collectives that are submitted: took(plan, bytes) says what one takes that is submitted by this plan, in any
/// unit, as seen by whoever times it (two points of a stream do), or infinity for a plan that can't be used. Of `options`, the
/// sizes alone count.
template <std::invocable<const all_reduce_plan&, bytes> Took>
[[nodiscard]] tuning_table tune_submitted(std::uint32_t ranks, const Took& took, const tune_options& options = {}) {
    detail::check_sizes(options);
    static constexpr std::array<all_reduce_plan, 4> plans{
        {{algorithm::one_shot}, {algorithm::two_shot}, {algorithm::two_shot, true}, {algorithm::ring}}};
    return detail::cheapest(ranks, options, plans, [&](std::uint64_t size) {
        std::array<double, plans.size()> cost{};
        for (std::size_t p = 0; p < plans.size(); ++p) cost[p] = static_cast<double>(took(plans[p], bytes{size}));
        return cost;
    });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
