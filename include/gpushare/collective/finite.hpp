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

/// Of lines of 16 floats, by registers of so many bytes. Two sums, so that no addition waits for the one before. Inlined into a function
/// that is compiled for such registers.
template <std::size_t Bytes>
[[nodiscard, gnu::always_inline]] inline bool all_finite_lines(const float* x, std::size_t lines) noexcept {
    using words = typename vector_of<std::uint32_t, Bytes>::type;
    using memory = typename in_memory<Bytes>::type;
    const memory* at = reinterpret_cast<const memory*>(x);  // auto would forget its alignment
    words a{}, b{};
    for (const memory* const end = at + 16 * sizeof(float) / Bytes * lines; at != end; at += 2) {
        a |= (at[0] & float_exponent) + least_exponent;
        b |= (at[1] & float_exponent) + least_exponent;
    }
    a |= b;
    std::uint32_t over = 0;
    for (std::size_t k = 0; k < Bytes / sizeof(float); ++k) over |= a[k];
    return over >> 31 == 0;
}
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
[[nodiscard, gnu::target("avx2"), gnu::noinline]] inline bool all_finite_lines_by_avx2(const float* x,
                                                                                       std::size_t lines) noexcept {
    return all_finite_lines<32>(x, lines);
}
#endif

}  // namespace detail

/// Whether no element is infinite or NaN. A sum of ranks isn't finite where one rank's element isn't, so a look at what an all-reduce
/// gave is a look at all ranks', with the same answer on each.
[[nodiscard]] inline bool all_finite(std::span<const float> x) noexcept {
    constexpr std::size_t line = 16;
    const std::size_t lines = x.size() / line;
    const auto rest = x.subspan(lines * line);
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if (detail::widest_vectors() != detail::vector_width::narrow)
        return detail::all_finite_lines_by_avx2(x.data(), lines) && detail::all_finite_one_by_one(rest);
#endif
    return detail::all_finite_lines<16>(x.data(), lines) && detail::all_finite_one_by_one(rest);
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
