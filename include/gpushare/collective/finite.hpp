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

#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

// What isn't finite has an exponent of ones: with one more it runs over into the sign's bit.
inline constexpr std::uint32_t float_exponent = 0x7f80'0000U, least_exponent = 0x0080'0000U;

[[nodiscard]] inline bool all_finite_one_by_one(std::span<const float> x) noexcept {
    std::uint32_t over = 0;
    for (const float& v : x) {
        std::uint32_t word = 0;
        std::memcpy(&word, &v, sizeof word);
        over |= (word & float_exponent) + least_exponent;
    }
    return over >> 31 == 0;
}

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
/// Lines are of 64 bytes. Four sums, so that no addition waits for the one before.
[[nodiscard]] inline bool all_finite_lines(const float* x, std::size_t lines) noexcept {
    using words [[gnu::vector_size(16)]] = std::uint32_t;
    using memory = in_memory<16>::type;
    const memory* at = reinterpret_cast<const memory*>(x);  // auto would forget its alignment
    words a{}, b{}, c{}, d{};
    for (const memory* const end = at + 4 * lines; at != end; at += 4) {
        a |= (at[0] & float_exponent) + least_exponent;
        b |= (at[1] & float_exponent) + least_exponent;
        c |= (at[2] & float_exponent) + least_exponent;
        d |= (at[3] & float_exponent) + least_exponent;
    }
    a |= b | c | d;
    return (a[0] | a[1] | a[2] | a[3]) >> 31 == 0;
}
[[nodiscard, gnu::target("avx2"), gnu::noinline]] inline bool all_finite_lines_by_avx2(const float* x,
                                                                                       std::size_t lines) noexcept {
    using words [[gnu::vector_size(32)]] = std::uint32_t;
    using memory = in_memory<32>::type;
    const memory* at = reinterpret_cast<const memory*>(x);  // auto would forget its alignment
    words a{}, b{};
    for (const memory* const end = at + 2 * lines; at != end; at += 2) {
        a |= (at[0] & float_exponent) + least_exponent;
        b |= (at[1] & float_exponent) + least_exponent;
    }
    a |= b;
    return (a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7]) >> 31 == 0;
}
#endif

}  // namespace detail

/// Whether no element is infinite or NaN. A sum of ranks isn't finite where one rank's element isn't, so a look at what an all-reduce
/// gave is a look at all ranks', with the same answer on each.
[[nodiscard]] inline bool all_finite(std::span<const float> x) noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    constexpr std::size_t line = 16;
    const std::size_t lines = x.size() / line;
    const bool good = detail::widest_vectors() == detail::vector_width::narrow
                          ? detail::all_finite_lines(x.data(), lines)
                          : detail::all_finite_lines_by_avx2(x.data(), lines);
    return good && detail::all_finite_one_by_one(x.subspan(lines * line));
#else
    return detail::all_finite_one_by_one(x);
#endif
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
