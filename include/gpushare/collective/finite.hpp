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
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// A number's bits as a word, and the place of its exponent. A number that isn't finite has an
/// exponent of ones: adding one at its lowest place carries into the sign's bit.
template <class Word, Word Exponent>
struct exponent_in {
    using word = Word;
    static constexpr Word mask = Exponent, least = Exponent & (~Exponent + 1), over = static_cast<Word>(mask + least);
};
template <class T>
struct exponent_of;
template <>
struct exponent_of<float> : exponent_in<std::uint32_t, 0x7f80'0000U> {};
template <>
struct exponent_of<float16> : exponent_in<std::uint16_t, 0x7c00U> {};
template <>
struct exponent_of<bfloat16> : exponent_in<std::uint16_t, 0x7f80U> {};
template <class T>
concept has_exponent = requires {
    exponent_of<T>::mask;
};

template <has_exponent T>
[[nodiscard]] bool all_finite_one_by_one(std::span<const T> x) noexcept {
    using in = exponent_of<T>;
    typename in::word over = 0;
    for (const T& v : x) {
        typename in::word word = 0;
        std::memcpy(&word, &v, sizeof word);
        over = static_cast<typename in::word>(over | ((word & in::mask) + in::least));
    }
    return (over & in::over) == 0;
}

inline constexpr std::size_t finite_line = 64;  // bytes

/// Checks whole lines, by registers of so many bytes. Two sums, so that no addition waits for the
/// one before. Inlined into a function that is compiled for such registers.
template <std::size_t Bytes, has_exponent T>
[[nodiscard, gnu::always_inline]] inline bool all_finite_lines(const T* x, std::size_t lines) noexcept {
    using in = exponent_of<T>;
    using word = typename in::word;
    using words = typename vector_of<word, Bytes>::type;
    using memory = typename in_memory<Bytes>::type;
    const memory* at = reinterpret_cast<const memory*>(x);  // auto would forget its alignment
    words a{}, b{};
    for (const memory* const end = at + finite_line / Bytes * lines; at != end; at += 2) {
        a |= (__builtin_bit_cast(words, at[0]) & in::mask) + in::least;
        b |= (__builtin_bit_cast(words, at[1]) & in::mask) + in::least;
    }
    a |= b;
    word over = 0;
    for (std::size_t k = 0; k < Bytes / sizeof(word); ++k) over = static_cast<word>(over | a[k]);
    return (over & in::over) == 0;
}
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
template <has_exponent T>
[[nodiscard, gnu::target("avx2"), gnu::noinline]] bool all_finite_lines_by_avx2(const T* x,
                                                                                std::size_t lines) noexcept {
    return all_finite_lines<32>(x, lines);
}
#endif

template <has_exponent T>
[[nodiscard]] bool all_finite_words(std::span<const T> x) noexcept {
    constexpr std::size_t line = finite_line / sizeof(T);
    const std::size_t lines = x.size() / line;
    const auto rest = x.subspan(lines * line);
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if (widest_vectors() != vector_width::narrow)
        return all_finite_lines_by_avx2(x.data(), lines) && all_finite_one_by_one(rest);
#endif
    return all_finite_lines<16>(x.data(), lines) && all_finite_one_by_one(rest);
}

}  // namespace detail

/// Whether no element is infinite or NaN. A sum of ranks isn't finite where one rank's element
/// isn't, so a look at what an all-reduce gave is a look at all ranks', with the same answer on
/// each.
[[nodiscard]] inline bool all_finite(std::span<const float> x) noexcept { return detail::all_finite_words(x); }
/// The same of other types; whole numbers are finite.
template <class T>
requires(!std::same_as<T, float>) [[nodiscard]] bool all_finite(std::span<const T> x) noexcept {
    if constexpr (std::integral<T>)
        return true;
    else if constexpr (detail::has_exponent<T>)
        return detail::all_finite_words(x);
    else if constexpr (std::same_as<T, double>)
        return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
    else
        return std::all_of(x.begin(), x.end(), [](const T& v) { return std::isfinite(static_cast<float>(v)); });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
