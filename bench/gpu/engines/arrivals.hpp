// SPDX-License-Identifier: Apache-2.0
// Random arrivals of requests, and the times and rates of answers.
//
//   const auto at = arrivals(428, 2s, seed);         // since the beginning
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

namespace gpu_engines {

using steady = std::chrono::steady_clock;

/// Arrival times of a Poisson process since its start, in order. `burst` requests arrive together,
/// with correspondingly longer gaps.
[[nodiscard]] inline std::vector<std::chrono::nanoseconds> arrivals(double per_s, std::chrono::nanoseconds length,
                                                                    std::uint64_t seed, unsigned burst = 1) {
    std::vector<std::chrono::nanoseconds> all;
    if (per_s <= 0) return all;
    std::mt19937_64 random(seed);
    std::exponential_distribution<double> gap(per_s / burst);
    for (double at = gap(random);; at += gap(random)) {
        const std::chrono::nanoseconds since{static_cast<std::int64_t>(at * 1e9)};
        if (since >= length) return all;
        all.insert(all.end(), burst, since);
    }
}

/// Sleeps until 200 us before `t` and then spins, because threads wake up too late.
inline void wait_until(steady::time_point t) {
    std::this_thread::sleep_until(t - std::chrono::microseconds(200));
    while (steady::now() < t) {
    }
}

[[nodiscard]] inline double us_from(steady::time_point begin, steady::time_point end) noexcept {
    return std::chrono::duration<double, std::micro>(end - begin).count();
}

/// The events per second between `begin` and `end`, from the first such event to the last. With
/// fewer than three events, the gaps say nothing, and the number of events is divided by the whole
/// time.
[[nodiscard]] inline double rate_between(const std::vector<steady::time_point>& sorted, steady::time_point begin,
                                         steady::time_point end) {
    const auto first = std::ranges::lower_bound(sorted, begin), behind = std::ranges::lower_bound(sorted, end);
    const auto n = behind - first;
    if (n < 3) return static_cast<double>(n) / (us_from(begin, end) / 1e6);
    return static_cast<double>(n - 1) / (us_from(*first, *(behind - 1)) / 1e6);
}

}  // namespace gpu_engines
