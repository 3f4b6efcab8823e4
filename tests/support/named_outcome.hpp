// SPDX-License-Identifier: Apache-2.0
// The outcome of a call by Horovod's names, as a value that tests compare, and memory for results.
//
//   CHECK(support::outcome_of([&] { allreduce(x, "x", Sum, set); }) == support::named_outcome{errc::stopped, 1});
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <span>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/gradient/horovod.hpp>

namespace support {

/// The code, and the rank that the error names, or 0.
struct named_outcome {
    gpushare::errc code = gpushare::errc::none;
    std::uint64_t rank = 0;
    friend bool operator==(const named_outcome&, const named_outcome&) = default;
    friend std::ostream& operator<<(std::ostream& to, const named_outcome& o) {
        return to << gpushare::to_string(o.code) << " of " << o.rank;
    }
};
template <class F>
named_outcome outcome_of(const F& f) {
    try {
        f();
    } catch (const gpushare::error& e) {
        return {e.code(), e.figures().because == gpushare::reason::rank_failed ? e.figures().left : 0};
    }
    return {};
}

/// Gives out memory for a result.
template <class E>
gpushare::horovod::detail::device_call::placing into(std::vector<E>& to, std::vector<std::uint64_t>& rows,
                                                     std::size_t row) {
    return [&, row](std::span<const std::uint64_t> of) -> void* {
        rows.assign(of.begin(), of.end());
        to.assign(std::accumulate(of.begin(), of.end(), std::uint64_t{0}) * row, E{});
        return to.data();
    };
}

}  // namespace support
