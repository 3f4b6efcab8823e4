// SPDX-License-Identifier: Apache-2.0
// Measures which algorithm is the fastest at which size, on this machine and with these ranks.
//
//   // every rank's thread:
//   auto table = gpushare::tune(me);
//   // then one of them, when all are done:
//   group.set_tuning(table);                      // and table.save() for the next run
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/exchange.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

struct tune_options {
    bytes smallest{64};
    bytes largest = 64_MiB;  // allocated twice by each rank
    ns per_plan{5'000'000};  // how long to measure one plan at one size, about
    instant deadline = never;
};

namespace detail {

/// Nanoseconds of one call: the median of samples that last a while each. Every rank returns the same.
template <class Call>
[[nodiscard]] std::int64_t measured_call(const member& me, ns length, const Call& call, instant deadline) {
    constexpr std::size_t samples = 7;
    std::array<std::int64_t, samples> took{};
    std::int64_t repeats = 1;
    for (std::size_t i = 0; i <= samples; ++i) {
        barrier(me, deadline);
        const std::int64_t begin = collective_now();
        for (std::int64_t n = 0; n < repeats; ++n) call();
        std::int64_t each = (collective_now() - begin) / repeats;
        // The first sample only tells how many calls the others take: as many on every rank.
        broadcast(me, std::span<std::int64_t>(&each, 1), 0, deadline);
        if (i == 0)
            repeats = std::clamp<std::int64_t>(
                length.count() / static_cast<std::int64_t>(samples) / std::max(each, std::int64_t{1}), 1, 10'000);
        else
            took[i - 1] = each;
    }
    std::nth_element(took.begin(), took.begin() + samples / 2, took.end());
    return took[samples / 2];
}

}  // namespace detail

/// A table for groups of this size, from sums of floats. Called by every rank; every rank gets the same. A size goes to a
/// plan other than that of the size below only where it gains 5 %: what differs by noise isn't a row. Throws std::bad_alloc,
/// and operation_error for what goes wrong in a collective.
[[nodiscard]] inline tuning_table tune(const member& me, const tune_options& options = {}) {
    constexpr std::array<collective_plan, 4> plans{{{algorithm::flag_in_data, false},
                                                    {algorithm::one_shot, false},
                                                    {algorithm::two_shot, false},
                                                    {algorithm::two_shot, true}}};
    std::vector<float> in(options.largest.count() / sizeof(float), 1.0F), out(in.size());
    std::vector<tuning_table::row> rows;
    for (std::uint64_t size = options.smallest.count(); size <= options.largest.count(); size *= 2) {
        const std::size_t n = size / sizeof(float);
        std::array<std::int64_t, plans.size()> took{};
        for (std::size_t i = 0; i < plans.size(); ++i) {
            // What doesn't fit would go another way, under a false name.
            const std::uint64_t room = me.view().slot;
            if ((plans[i].how == algorithm::one_shot && size > room) ||
                (plans[i].how == algorithm::flag_in_data && 2 * size + 256 > channel_view::words_bytes(room))) {
                took[i] = std::numeric_limits<std::int64_t>::max() / 64;
                continue;
            }
            const detail::all_reduce_body<float, sum> body{in.data(), out.data(), n, {}, plans[i]};
            took[i] = detail::measured_call(
                me, options.per_plan, [&] { raise_fault(detail::call(me, body, options.deadline)); }, options.deadline);
        }
        const auto best = static_cast<std::size_t>(std::min_element(took.begin(), took.end()) - took.begin());
        const tuning_table::row row{me.size(), size, plans[best]};
        if (!rows.empty()) {
            const auto last =
                static_cast<std::size_t>(std::find(plans.begin(), plans.end(), rows.back().plan) - plans.begin());
            if (took[last] * 20 <= took[best] * 21) {
                rows.back().bytes = size;
                continue;
            }
        }
        rows.push_back(row);
    }
    if (!rows.empty()) rows.back().bytes = tuning_table::any_bytes;
    return tuning_table(std::move(rows));
}

}  // namespace gpushare::inline GPUSHARE_ABI
