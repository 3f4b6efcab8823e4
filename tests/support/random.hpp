// SPDX-License-Identifier: Apache-2.0
// Random numbers for property tests, the same on every run unless Catch is told otherwise
// (--rng-seed time). CAPTURE makes a failing test print its seed.
//
//   const auto seed = support::seed(1);  CAPTURE(seed);  support::random any(seed);  auto n = any.below(10);
#pragma once

#include <concepts>
#include <cstdint>
#include <random>

#include "support/catch.hpp"

namespace support {

/// A seed for the `nth` run of a test. It depends only on Catch's seed.
[[nodiscard]] inline std::uint64_t seed(std::uint64_t nth) { return (std::uint64_t{Catch::rngSeed()} << 32) + nth; }

/// Not thread-safe: use one for each thread.
class random {
public:
    explicit random(std::uint64_t seed) : engine_(seed) {}

    /// 0 to n-1; n > 0. The slight bias of the remainder doesn't matter here, and every platform
    /// gives the same.
    [[nodiscard]] std::uint64_t below(std::uint64_t n) { return engine_() % n; }
    [[nodiscard]] bool one_in(std::uint64_t n) { return below(n) == 0; }
    /// An element of a range that isn't empty.
    template <class Range>
    [[nodiscard]] auto& of(Range& range) {
        return range[below(range.size())];
    }

private:
    std::mt19937_64 engine_;
};

}  // namespace support
