// SPDX-License-Identifier: Apache-2.0
// The floats that decide how rounding to a number type works.
//
//   support::for_each_decisive_float<gpushare::float16>([](float f) { ... });
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace support {

/// The largest bit pattern of a finite number that isn't negative. The patterns from 0 to this one
/// are in ascending order of their values.
template <class Number>
constexpr std::uint32_t largest_pattern = Number::max().bits();

template <class Number>
[[nodiscard]] float value_of(std::uint32_t pattern) {
    return static_cast<float>(Number::from_bits(static_cast<typename Number::bits_type>(pattern)));
}

/// Calls the function for every number of the type, every midpoint of two neighbours, and the
/// floats on both sides of each; the same at the overflow threshold; and infinity. All with both
/// signs.
template <class Number, class Function>
void for_each_decisive_float(Function f) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto around = [&](float x) {
        for (const float y : {std::nextafterf(x, -infinity), x, std::nextafterf(x, infinity)}) {
            f(y);
            f(-y);
        }
    };
    for (std::uint32_t p = 0; p <= largest_pattern<Number>; ++p) {
        const float low = value_of<Number>(p);
        // Treat the largest number as if it had a neighbour above, at the same distance as the one
        // below.
        const float high =
            p < largest_pattern<Number> ? value_of<Number>(p + 1) : low + (low - value_of<Number>(p - 1));
        around(low);
        if (high < infinity) around(low + (high - low) / 2);
        if (p == largest_pattern<Number> && high < infinity) around(high);
    }
    around(std::numeric_limits<float>::max());
    f(infinity);
    f(-infinity);
}

}  // namespace support
