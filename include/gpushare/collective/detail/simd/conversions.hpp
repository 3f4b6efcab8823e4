// SPDX-License-Identifier: Apache-2.0
// Conversions between floats and formats with fewer bits, for one number or for a register:
// bfloat16, float16, the 8-bit formats and int8_t. They round as stored_number does, to the bit.
//
//   using bfloat16_format = gpushare::detail::number_format<8, 7>;
//   // x: a float, or a simd of them
//   auto words = gpushare::detail::narrow_lanes<bfloat16_format>{}(x);
//   auto y = gpushare::detail::widen_lanes<bfloat16_format>{}(words);
//
// Conversions to integers round to nearest, ties to even. Values that are out of range become the
// largest or smallest integer, and NaN becomes 0.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A float as bits of the format, in a word for each number: number_format::narrow without
/// branches.
template <class Format>
struct narrow_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD words_of<R> operator()(const R& x) const noexcept {
        using words = words_of<R>;
        const words bits = bits_of(x), abs = bits & 0x7fff'ffff;
        constexpr int dropped = Format::dropped;
        constexpr std::int32_t below_half = (1 << (dropped - 1)) - 1;
        constexpr auto nan = static_cast<std::int32_t>(Format::nan);
        if constexpr (Format::is_upper_half) {
            // A NaN is replaced first, because rounding could carry into its sign. The last shift
            // copies the sign upwards, as signed packing requires.
            const words safe = select(abs > 0x7f80'0000, nan << dropped, bits);
            return (safe + below_half + ((safe >> dropped) & 1)) >> dropped;
        } else {
            // Below the smallest normal number, the addition leaves in the last bits a count of the
            // smallest positive number, rounded by the adder.
            constexpr int bias = Format::bias, mantissa = 23 - dropped;
            constexpr std::int32_t unit = (127 + 24 - bias - mantissa) << 23;
            const words small = bits_of(from_bits(abs) + __builtin_bit_cast(float, unit)) - unit;
            constexpr auto rebias = static_cast<std::int32_t>(Format::rebias);
            // A NaN would overflow here, but its value isn't used.
            const words sum = wrapping_sum(abs, wrapping_sum((abs >> dropped) & 1, words(below_half - rebias)));
            words to = select(abs < rebias + (1 << 23), small, sum >> dropped);
            constexpr auto largest = static_cast<std::int32_t>(Format::largest);
            constexpr auto beyond = static_cast<std::int32_t>(Format::saturates ? Format::largest : Format::infinity);
            to = select(to > largest, beyond, to);
            to = to | ((bits >> 31) << (Format::bits - 1));
            return select(abs > 0x7f80'0000, nan, to);
        }
    }
};

/// The exact conversion back to float: number_format::widen without branches. Bits of a word above
/// the format's width are ignored.
template <class Format>
struct widen_lanes {
    template <class Words>
    GPUSHARE_FLAT GPUSHARE_HD auto operator()(const Words& from) const noexcept {
        if constexpr (Format::is_upper_half) {
            return from_bits(from << 16);
        } else {
            constexpr auto magnitude = static_cast<std::int32_t>(Format::magnitude);
            constexpr int dropped = Format::dropped, mantissa = 23 - dropped;
            // A subnormal number is a multiple of the smallest positive number. The product is a
            // normal number, so flush-to-zero doesn't change it.
            constexpr auto smallest =
                __builtin_bit_cast(float, static_cast<std::int32_t>(128 - Format::bias - mantissa) << 23);
            const Words abs = from & magnitude, sign = (from & (magnitude + 1)) << (32 - Format::bits);
            const Words small = bits_of(as_floats(abs) * smallest);
            const Words normal = (abs << dropped) + static_cast<std::int32_t>(Format::rebias);
            Words to = select(abs < (1 << mantissa), small, normal);
            if constexpr (Format::has_infinity)
                to = select(abs < static_cast<std::int32_t>(Format::infinity), to, 0x7f80'0000);
            constexpr auto last = static_cast<std::int32_t>(Format::has_infinity ? Format::infinity : Format::largest);
            return from_bits(select(abs > last, 0x7fff'ffff, to | sign));
        }
    }
};

/// A float as an integer of 8 bits, in a word for each number.
struct integer_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD words_of<R> operator()(const R& x) const noexcept {
        constexpr float shift = 12582912.0F;  // 1.5 * 2^23: the adder rounds
        R y = select(x < -128.0F, -128.0F, x);
        y = select(y > 127.0F, 127.0F, y);
        return select(y == y, bits_of(y + shift) - bits_of(shift), 0);
    }
};
/// The conversion back to float, from a word that holds the integer with its sign.
struct whole_lanes {
    template <class Words>
    GPUSHARE_FLAT GPUSHARE_HD auto operator()(const Words& from) const noexcept {
        return as_floats(from);
    }
};

template <class T>
struct lanes_of_type;
template <int E, int M>
struct lanes_of_type<stored_number<E, M>> {
    using narrow = narrow_lanes<number_format<E, M>>;
    using widen = widen_lanes<number_format<E, M>>;
};
template <>
struct lanes_of_type<std::int8_t> {
    using narrow = integer_lanes;
    using widen = whole_lanes;
};

#ifndef __CUDA_ARCH__

using sixteen_bytes = typename vector_of<std::int8_t, 16>::type;
using eight_halves = typename vector_of<std::int16_t, 16>::type;
using four_words = typename vector_of<std::int32_t, 16>::type;

/// Packs words whose values fit into halves.
[[nodiscard]] GPUSHARE_FLAT inline eight_halves packed_words(const four_words& a, const four_words& b) noexcept {
#if defined(__x86_64__)
    return __builtin_bit_cast(eight_halves,
                              _mm_packs_epi32(__builtin_bit_cast(__m128i, a), __builtin_bit_cast(__m128i, b)));
#else
    eight_halves h{};
    for (int i = 0; i < 4; ++i) {
        h[i] = static_cast<std::int16_t>(a[i]);
        h[i + 4] = static_cast<std::int16_t>(b[i]);
    }
    return h;
#endif
}
[[nodiscard]] GPUSHARE_FLAT inline sixteen_bytes packed_halves(const eight_halves& a, const eight_halves& b) noexcept {
#if defined(__x86_64__)
    return __builtin_bit_cast(sixteen_bytes,
                              _mm_packs_epi16(__builtin_bit_cast(__m128i, a), __builtin_bit_cast(__m128i, b)));
#else
    sixteen_bytes s{};
    for (int i = 0; i < 8; ++i) {
        s[i] = static_cast<std::int8_t>(a[i]);
        s[i + 8] = static_cast<std::int8_t>(b[i]);
    }
    return s;
#endif
}

/// Packs eight words into eight halves.
[[nodiscard]] GPUSHARE_FLAT inline eight_halves packed_eight(const simd<std::int32_t, 4>& low,
                                                             const simd<std::int32_t, 4>& high) noexcept {
    return packed_words(low.raw, high.raw);
}
[[nodiscard]] GPUSHARE_FLAT inline eight_halves packed_eight(const simd<std::int32_t, 8>& all) noexcept {
    return packed_words(__builtin_shufflevector(all.raw, all.raw, 0, 1, 2, 3),
                        __builtin_shufflevector(all.raw, all.raw, 4, 5, 6, 7));
}

/// Loads W elements of 8 or 16 bits, each into a word. Signed elements are sign-extended, and other
/// elements are zero-extended.
template <class T, std::uint32_t W>
struct spread_elements {
    using element = std::conditional_t<std::same_as<T, std::int8_t>, std::int8_t,
                                       std::conditional_t<sizeof(T) == 1, std::uint8_t, std::uint16_t>>;
    using memory = typename in_memory<W * sizeof(T)>::type;
    using elements = typename vector_of<element, W * sizeof(T)>::type;
    using words = simd<std::int32_t, W>;

    [[gnu::always_inline]] static void load(const T* from, words& to) noexcept {
        const auto as_stored = __builtin_bit_cast(elements, *reinterpret_cast<const memory*>(from));
        to.raw = __builtin_convertvector(as_stored, typename words::raw_type);
    }
};

#if defined(__x86_64__)

// These functions use instructions for 32-byte registers. g++ has no builtin for them in a file
// that isn't compiled for them. The functions are inlined into functions that are compiled for
// them. Every processor with AVX2 converts float16.
template <class T>
[[gnu::target("avx2,f16c")]] inline void spread_by_avx2(const T* from, simd<std::int32_t, 8>& to) noexcept {
    using spread = spread_elements<T, 8>;
#if defined(__clang__)
    spread::load(from, to);
#else
    const typename spread::memory& as_stored =
        *reinterpret_cast<const typename spread::memory*>(from);  // auto would forget its alignment
    if constexpr (sizeof(T) == 2)
        asm("vpmovzxwd %1, %0" : "=x"(to.raw) : "xm"(as_stored));
    else if constexpr (std::same_as<T, std::int8_t>)
        asm("vpmovsxbd %1, %0" : "=x"(to.raw) : "m"(as_stored));
    else
        asm("vpmovzxbd %1, %0" : "=x"(to.raw) : "m"(as_stored));
#endif
}
[[gnu::target("avx2,f16c")]] inline void widen_float16s_by_f16c(const float16* from, simd<float, 8>& to) noexcept {
    eight_halves as_stored;
    __builtin_memcpy(&as_stored, from,
                     // a cast of the reference would lose its alignment without optimisation
                     sizeof as_stored);
#if defined(__clang__)  // clang 22 no longer has a builtin for the conversion
    using float16s = _Float16 __attribute__((vector_size(16)));
    const simd<float, 8> x(__builtin_convertvector(__builtin_bit_cast(float16s, as_stored), simd<float, 8>::raw_type));
#else
    const simd<float, 8> x(__builtin_ia32_vcvtph2ps256(as_stored));
#endif
    // All NaNs become the same NaN. The test uses the bits, because clang 16 would compare the
    // halves one by one.
    to = select((bits_of(x) & 0x7fff'ffff) > 0x7f80'0000, __builtin_bit_cast(float, 0x7fff'ffff), x);
}
[[gnu::target("avx2,f16c")]] inline void narrow_float16s_by_f16c(const simd<float, 8>& from,
                                                                 eight_halves& to) noexcept {
    // Every NaN becomes this float, whose upper bits the conversion keeps: they are the format's
    // single NaN.
    const simd<float, 8> safe = select(from == from, from, __builtin_bit_cast(float, 0x7fff'e000));
    to = __builtin_ia32_vcvtps2ph256(safe.raw, 0);
}

#endif
#endif

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
