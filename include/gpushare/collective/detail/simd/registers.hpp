// SPDX-License-Identifier: Apache-2.0
// `simd`: 4 or 8 floats or integers in one vector register of the host. Code for a simd reads like
// code for a single number, so a device, whose threads have one number each, runs the same code.
//
//   // float or simd
//   template <class R> R operator()(const R& x) const { return gpushare::select(x < 0.0F, x * 0.1F, x); }
//
// The usable width is known only when the program runs. Code for wide registers is inlined into
// functions that are compiled for such registers (see epilogue_stages.hpp). In a build without
// optimisation, code that isn't inlined works on narrow registers.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
#include <cpuid.h>
#endif

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

template <class T, std::size_t Bytes>
struct vector_of {
    using type [[gnu::vector_size(Bytes)]] = T;
};

/// Bytes as they are in memory, at any address and of any type. The code accesses memory through
/// these types and not through memcpy. g++ 12 takes memcpy for a move of a 128-bit integer, in two
/// halves through general registers.
template <std::size_t Bytes>
struct in_memory;
template <>
struct in_memory<4> {
    using type [[gnu::aligned(1), gnu::may_alias]] = std::uint32_t;
};
template <>
struct in_memory<8> {
    using type [[gnu::vector_size(8), gnu::aligned(1), gnu::may_alias]] = std::uint32_t;
};
template <>
struct in_memory<16> {
    using type [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = std::uint32_t;
};
template <>
struct in_memory<32> {
    using type [[gnu::vector_size(32), gnu::aligned(1), gnu::may_alias]] = std::uint32_t;
};
template <>
struct in_memory<64> {
    using type [[gnu::vector_size(64), gnu::aligned(1), gnu::may_alias]] = std::uint32_t;
};

enum class vector_width : std::uint8_t { narrow, avx2, avx512 };

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
/// The widest vectors of this processor. The call takes a few instructions. AVX2 and AVX-512 count
/// only with f16c, because the code for both uses f16c to convert 16-bit floats, and a virtual
/// machine may hide f16c.
[[nodiscard]] inline vector_width widest_vectors() noexcept {
    static const bool halves = [] {  // clang has no name for f16c
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    }();
    if (!halves) return vector_width::narrow;
    if (__builtin_cpu_supports("avx512f")) return vector_width::avx512;
    return __builtin_cpu_supports("avx2") ? vector_width::avx2 : vector_width::narrow;
}
#else
[[nodiscard]] GPUSHARE_HD inline vector_width widest_vectors() noexcept { return vector_width::narrow; }
#endif

#ifndef __CUDA_ARCH__  // device code must not even name a vector

/// A separate function. In a function that isn't compiled for such vectors, g++ 12 builds a vector
/// number by number, and keeps that code when it inlines the function into a function that is
/// compiled for them.
template <class T, class Raw>
#if defined(__x86_64__) && !defined(__clang__)
[[gnu::target("avx2,f16c")]]
#endif
inline void
spread_over_eight(T x, Raw& to) noexcept {
    to = Raw{x, x, x, x, x, x, x, x};
}

/// W numbers of type float or std::int32_t. Integers wrap, shifts to the right copy the sign, and
/// comparisons give a mask for select(). The copy constructor isn't trivial, so a simd is never
/// passed in registers: the calling convention would depend on the flags of the file.
template <class T, std::uint32_t W>
class simd {
    static_assert((std::same_as<T, float> || std::same_as<T, std::int32_t>)&&(W == 4 || W == 8));
    using wrapping = typename vector_of<std::uint32_t, W * 4>::type;

public:
    using raw_type = typename vector_of<T, W * 4>::type;
    using mask = simd<std::int32_t, W>;
    static constexpr std::uint32_t width = W;

    simd() = default;
    [[gnu::always_inline]] simd(T all) noexcept {
        if constexpr (W == 4)  // spelt out: g++ 12 takes 0 + all for as many instructions
            raw = raw_type{all, all, all, all};
        else
            spread_over_eight(all, raw);
    }
    [[gnu::always_inline]] explicit simd(const raw_type& r) noexcept : raw(r) {}
    [[gnu::always_inline]] simd(const simd& other) noexcept : raw(other.raw) {}
    [[gnu::always_inline]] simd& operator=(const simd& other) noexcept {
        raw = other.raw;
        return *this;
    }

    [[gnu::always_inline]] friend simd operator+(const simd& a, const simd& b) noexcept {
        if constexpr (std::same_as<T, float>)
            return simd(a.raw + b.raw);
        else
            return simd(__builtin_bit_cast(raw_type,
                                           __builtin_bit_cast(wrapping, a.raw) + __builtin_bit_cast(wrapping, b.raw)));
    }
    [[gnu::always_inline]] friend simd operator-(const simd& a, const simd& b) noexcept {
        if constexpr (std::same_as<T, float>)
            return simd(a.raw - b.raw);
        else
            return simd(__builtin_bit_cast(raw_type,
                                           __builtin_bit_cast(wrapping, a.raw) - __builtin_bit_cast(wrapping, b.raw)));
    }
    [[gnu::always_inline]] friend simd operator*(const simd& a, const simd& b) noexcept { return simd(a.raw * b.raw); }
    [[gnu::always_inline]] friend simd operator/(const simd& a, const simd& b) noexcept { return simd(a.raw / b.raw); }
    [[gnu::always_inline]] friend mask operator<(const simd& a, const simd& b) noexcept { return mask(a.raw < b.raw); }
    [[gnu::always_inline]] friend mask operator>(const simd& a, const simd& b) noexcept { return mask(a.raw > b.raw); }
    [[gnu::always_inline]] friend mask operator<=(const simd& a, const simd& b) noexcept {
        return mask(a.raw <= b.raw);
    }
    [[gnu::always_inline]] friend mask operator>=(const simd& a, const simd& b) noexcept {
        return mask(a.raw >= b.raw);
    }
    [[gnu::always_inline]] friend mask operator==(const simd& a, const simd& b) noexcept {
        return mask(a.raw == b.raw);
    }
    [[gnu::always_inline]] friend mask operator!=(const simd& a, const simd& b) noexcept {
        return mask(a.raw != b.raw);
    }

    [[gnu::always_inline]] friend simd operator&(const simd& a, const simd& b) noexcept { return simd(a.raw & b.raw); }
    [[gnu::always_inline]] friend simd operator|(const simd& a, const simd& b) noexcept { return simd(a.raw | b.raw); }
    [[gnu::always_inline]] friend simd operator<<(const simd& a, int bits) noexcept {
        return simd(__builtin_bit_cast(raw_type, __builtin_bit_cast(wrapping, a.raw) << bits));
    }
    [[gnu::always_inline]] friend simd operator>>(const simd& a, int bits) noexcept { return simd(a.raw >> bits); }

    raw_type raw;
};

#endif

/// A simd of as many integers as R has floats.
template <class R>
struct words_for {
    using type = std::int32_t;
};
#ifndef __CUDA_ARCH__
template <class T, std::uint32_t W>
struct words_for<simd<T, W>> {
    using type = simd<std::int32_t, W>;
};
#endif
template <class R>
using words_of = typename words_for<R>::type;

[[nodiscard]] GPUSHARE_HD inline std::int32_t bits_of(float x) noexcept { return __builtin_bit_cast(std::int32_t, x); }
[[nodiscard]] GPUSHARE_HD inline float from_bits(std::int32_t w) noexcept { return __builtin_bit_cast(float, w); }
/// Converts integers to floats.
[[nodiscard]] GPUSHARE_HD inline float as_floats(std::int32_t w) noexcept { return static_cast<float>(w); }
[[nodiscard]] GPUSHARE_HD inline std::int32_t wrapping_sum(std::int32_t a, std::int32_t b) noexcept {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
}
/// Prevents the compiler from contracting this product with an addition, for one float or several:
/// the compiler no longer knows that the value is a product.
template <class V>
[[gnu::always_inline]] inline void keep_apart([[maybe_unused]] V& product) noexcept {
#if defined(__FMA__) || defined(__FMA4__) || defined(__AVX512F__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
}
/// A product that the compiler never contracts with an addition.
[[nodiscard]] GPUSHARE_HD inline float product_of(float a, float b) noexcept {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    float p = a * b;
    keep_apart(p);
    return p;
#endif
}
[[nodiscard]] GPUSHARE_HD inline float quotient_of(float a, float b) noexcept {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

#ifndef __CUDA_ARCH__
template <std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline simd<std::int32_t, W> bits_of(const simd<float, W>& x) noexcept {
    using words = simd<std::int32_t, W>;
    return words(__builtin_bit_cast(typename words::raw_type, x.raw));
}
template <std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline simd<float, W> from_bits(const simd<std::int32_t, W>& w) noexcept {
    using floats = simd<float, W>;
    return floats(__builtin_bit_cast(typename floats::raw_type, w.raw));
}
template <std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline simd<float, W> as_floats(const simd<std::int32_t, W>& w) noexcept {
    using floats = simd<float, W>;
    return floats(__builtin_convertvector(w.raw, typename floats::raw_type));
}
template <std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline simd<std::int32_t, W> wrapping_sum(const simd<std::int32_t, W>& a,
                                                                            const simd<std::int32_t, W>& b) noexcept {
    return a + b;
}
template <std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline simd<float, W> product_of(const simd<float, W>& a,
                                                                   const simd<float, W>& b) noexcept {
    simd<float, W> p = a * b;
    keep_apart(p.raw);
    return p;
}
template <std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline simd<float, W> quotient_of(const simd<float, W>& a,
                                                                    const simd<float, W>& b) noexcept {
    return a / b;
}
#endif

}  // namespace detail

/// `a` where the mask is set, else `b`. The mask is the result of a comparison of numbers or of
/// registers.
[[nodiscard]] GPUSHARE_HD inline float select(bool mask, float a, float b) noexcept { return mask ? a : b; }
[[nodiscard]] GPUSHARE_HD inline std::int32_t select(bool mask, std::int32_t a, std::int32_t b) noexcept {
    return mask ? a : b;
}
#ifndef __CUDA_ARCH__
template <class T, std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline detail::simd<T, W> select(const detail::simd<std::int32_t, W>& mask,
                                                                   const std::type_identity_t<detail::simd<T, W>>& a,
                                                                   const detail::simd<T, W>& b) noexcept {
    return detail::simd<T, W>(mask.raw ? a.raw : b.raw);
}
template <class T, std::uint32_t W>
[[nodiscard, gnu::always_inline]] inline detail::simd<T, W> select(const detail::simd<std::int32_t, W>& mask,
                                                                   const detail::simd<T, W>& a, T b) noexcept {
    return detail::simd<T, W>(mask.raw ? a.raw : detail::simd<T, W>(b).raw);
}
#endif

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
