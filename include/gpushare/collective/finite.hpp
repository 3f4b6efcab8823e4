// SPDX-License-Identifier: Apache-2.0
// A look for infinities and NaN.
//
//   if (!gpushare::all_finite(std::span<const float>(gradient))) skip_this_step();       // on all ranks alike: they have the same bits
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Whether no element is infinite or NaN. A sum of ranks isn't finite where one rank's element isn't, so a look at what an all-reduce
/// gave is a look at all ranks', with the same answer on each.
[[nodiscard]] inline bool all_finite(std::span<const float> x) noexcept {
    using words [[gnu::vector_size(64)]] = std::uint32_t;
    constexpr std::size_t lanes = sizeof(words) / sizeof(float);
    // What isn't finite has an exponent of ones: with one more it runs over into the sign's bit.
    constexpr std::uint32_t exponent = 0x7f80'0000U, one = 0x0080'0000U;
    words over{};
    std::size_t i = 0;
    for (; i + lanes <= x.size(); i += lanes) {
        words w;
        std::memcpy(&w, x.data() + i, sizeof w);
        over |= (w & exponent) + one;
    }
    std::uint32_t any = 0;
    for (std::size_t k = 0; k < lanes; ++k) any |= over[k];
    for (; i < x.size(); ++i) {
        std::uint32_t word = 0;
        std::memcpy(&word, &x[i], sizeof word);
        any |= (word & exponent) + one;
    }
    return (any & 0x8000'0000U) == 0;
}
/// The same of other types; whole numbers are finite.
template <class T>
requires(!std::same_as<T, float>) [[nodiscard]] bool all_finite(std::span<const T> x) noexcept {
    if constexpr (std::integral<T>)
        return true;
    else if constexpr (std::same_as<T, double>)
        return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
    else
        return std::all_of(x.begin(), x.end(), [](const T& v) { return std::isfinite(static_cast<float>(v)); });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
