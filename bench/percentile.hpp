// SPDX-License-Identifier: Apache-2.0
// A percentile of sorted measurements.
//
//   std::ranges::sort(latencies);
//   bench::percentile(latencies, 0.99);
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace bench {

/// `p` lies between 0 and 1. Returns 0 for an empty list.
[[nodiscard]] inline double percentile(const std::vector<double>& sorted, double p) noexcept {
    return sorted.empty()
               ? 0
               : sorted[std::min(sorted.size() - 1, static_cast<std::size_t>(p * static_cast<double>(sorted.size())))];
}

}  // namespace bench
