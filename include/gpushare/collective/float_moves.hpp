// SPDX-License-Identifier: Apache-2.0
// Moves a few floats from and to memory, converting from and to what is stored there: float, bfloat16, float16, the 8-bit
// formats and int8_t. Rounds as stored_number does, to the bit, many at a time.
//
//   auto x = gpushare::load_floats<16>(bf16_pointer);    gpushare::store_floats(int8_pointer, x);
//
// To integers: to the nearest, ties to even; what is too large becomes the largest or smallest; NaN becomes 0.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare::inline GPUSHARE_ABI {

namespace detail {

template <class T>
inline constexpr bool is_small_float = false;
template <int E, int M>
inline constexpr bool is_small_float<stored_number<E, M>> = true;

/// Sums of words that may overflow.
template <class Raw>
[[nodiscard]] GPUSHARE_HD words_of<Raw> wrapping_sum(const words_of<Raw>& a, const words_of<Raw>& b) noexcept {
    using wrapping = typename bits_as<Raw>::wrapping;
    return __builtin_bit_cast(words_of<Raw>, __builtin_bit_cast(wrapping, a) + __builtin_bit_cast(wrapping, b));
}

/// One float, or four, as bits of the format, in a word each: number_format::narrow without branches.
template <class Format>
struct narrow_lanes {
    template <class R>
    GPUSHARE_HD words_of<R> operator()(const R& x) const noexcept {
        using words = words_of<R>;
        const words bits = bits_of(x), abs = bits & 0x7fff'ffff;
        constexpr int dropped = Format::dropped;
        constexpr std::int32_t below_half = (1 << (dropped - 1)) - 1;
        const words nan = words{} + static_cast<std::int32_t>(Format::nan);
        if constexpr (Format::is_upper_half) {
            // A NaN goes first: it could carry into the sign. Shifts copy the sign above, as signed packing wants it.
            const words safe = abs > 0x7f80'0000 ? nan << dropped : bits;
            return (safe + below_half + ((safe >> dropped) & 1)) >> dropped;
        } else {
            // Below the smallest normal number, an addition leaves a count of the smallest positive one in the last bits,
            // which the adder has rounded.
            constexpr int bias = Format::bias, mantissa = 23 - dropped;
            constexpr std::int32_t unit = (127 + 24 - bias - mantissa) << 23;
            const words small = bits_of(from_bits(abs) + __builtin_bit_cast(float, unit)) - unit;
            constexpr auto rebias = static_cast<std::int32_t>(Format::rebias);
            // A NaN would overflow; what becomes of it here doesn't matter.
            const words sum =
                wrapping_sum<R>(abs, wrapping_sum<R>((abs >> dropped) & 1, words{} + (below_half - rebias)));
            const words normal = sum >> dropped;
            words to = abs < rebias + (1 << 23) ? small : normal;
            constexpr auto largest = static_cast<std::int32_t>(Format::largest);
            constexpr auto beyond = static_cast<std::int32_t>(Format::saturates ? Format::largest : Format::infinity);
            to = to > largest ? words{} + beyond : to;
            to = to | ((bits >> 31) << (Format::bits - 1));
            return abs > 0x7f80'0000 ? nan : to;
        }
    }
};

/// To an integer of 8 bits, in a word each.
struct integer_lanes {
    template <class R>
    GPUSHARE_HD words_of<R> operator()(const R& x) const noexcept {
        R y = x < -128.0F ? R{} - 128.0F : x;
        y = y > 127.0F ? R{} + 127.0F : y;
        const words_of<R> n = bits_of(y + 12582912.0F) - bits_of(R{} + 12582912.0F);  // 1.5 * 2^23: the adder rounds
        return y == y ? n : words_of<R>{};
    }
};

template <class T>
struct lanes_to;
template <int E, int M>
struct lanes_to<stored_number<E, M>> {
    using type = narrow_lanes<number_format<E, M>>;
};
template <>
struct lanes_to<std::int8_t> {
    using type = integer_lanes;
};

#ifdef __CUDA_ARCH__
template <class T>
[[nodiscard]] __device__ T narrow_lane(float x) noexcept {
    if constexpr (std::same_as<T, std::int8_t>)
        return static_cast<T>(integer_lanes{}(x));
    else
        return T{x};
}
#else
using eight_halves [[gnu::vector_size(16)]] = std::int16_t;
using sixteen_bytes [[gnu::vector_size(16)]] = std::int8_t;
using four_halves [[gnu::vector_size(8)]] = std::uint16_t;

// As they lie in memory, at any address. Through these and not by memcpy, which g++ 12 takes for a move of an integer of 128
// bits: in two halves, through general registers.
using floats_in_memory [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = float;
using bytes_in_memory [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = std::int8_t;
using halves_in_memory [[gnu::vector_size(8), gnu::aligned(1), gnu::may_alias]] = std::uint16_t;

/// Words that fit, in half the space.
[[nodiscard]] inline eight_halves packed_words(const four_words& a, const four_words& b) noexcept {
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
[[nodiscard]] inline sixteen_bytes packed_halves(const eight_halves& a, const eight_halves& b) noexcept {
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

/// As many floats as become 16 bytes of T.
template <class T, std::uint32_t N>
[[nodiscard]] inline auto packed_floats(const floats<N>& x) noexcept {
    static_assert(N * sizeof(T) == 16);
    if constexpr (std::same_as<T, float>) {
        return x.vector();
    } else {
        const typename lanes_to<T>::type to;
        if constexpr (sizeof(T) == 2) {
            return packed_words(to(x.low().vector()), to(x.high().vector()));
        } else {
            return packed_halves(packed_words(to(x.low().low().vector()), to(x.low().high().vector())),
                                 packed_words(to(x.high().low().vector()), to(x.high().high().vector())));
        }
    }
}
#endif

/// Four elements of T as they lie in memory, in one access where the address allows it.
template <class T>
struct alignas(4 * sizeof(T)) four_elements {
    T lane[4];
};

}  // namespace detail

/// What an epilogue reads and writes.
template <class T>
concept movable_number = std::same_as<T, float> || std::same_as<T, std::int8_t> || detail::is_small_float<T>;

/// The N elements from `from` on, which needs T's own alignment only.
template <std::uint32_t N, movable_number T>
[[nodiscard]] GPUSHARE_HD floats<N> load_floats(const T* from) noexcept {
    if constexpr (N > 4) {
        return {load_floats<N / 2>(from), load_floats<N / 2>(from + N / 2)};
    } else {
#ifdef __CUDA_ARCH__
        detail::four_elements<T> t;
        if (reinterpret_cast<std::uintptr_t>(from) % sizeof t == 0)
            t = *reinterpret_cast<const detail::four_elements<T>*>(from);
        else
            for (int i = 0; i < 4; ++i) t.lane[i] = from[i];
        return {static_cast<float>(t.lane[0]), static_cast<float>(t.lane[1]), static_cast<float>(t.lane[2]),
                static_cast<float>(t.lane[3])};
#else
        if constexpr (std::same_as<T, float>) {
            const detail::four_floats v = *reinterpret_cast<const detail::floats_in_memory*>(from);
            return floats<N>(v);
        } else if constexpr (std::same_as<T, bfloat16>) {
            const detail::four_halves h = *reinterpret_cast<const detail::halves_in_memory*>(from);
            return floats<N>(detail::from_bits(__builtin_convertvector(h, detail::four_words) << 16));
        } else {
            return {static_cast<float>(from[0]), static_cast<float>(from[1]), static_cast<float>(from[2]),
                    static_cast<float>(from[3])};
        }
#endif
    }
}

namespace detail {

// The last few elements of a row go one by one. No array is indexed by a variable: on a device it would be in memory.
template <std::uint32_t N, class T>
GPUSHARE_RARE GPUSHARE_HD floats<N> load_some(const T* from, std::uint32_t n) noexcept {
    if constexpr (N > 4) {
        if (n >= N / 2) return {load_floats<N / 2>(from), load_some<N / 2>(from + N / 2, n - N / 2)};
        return {load_some<N / 2>(from, n), floats<N / 2>(0)};
    } else {
        return {n > 0 ? static_cast<float>(from[0]) : 0, n > 1 ? static_cast<float>(from[1]) : 0,
                n > 2 ? static_cast<float>(from[2]) : 0, n > 3 ? static_cast<float>(from[3]) : 0};
    }
}

}  // namespace detail

/// The first `n` of N elements, and zeros.
template <std::uint32_t N, movable_number T>
[[nodiscard]] GPUSHARE_HD floats<N> load_floats(const T* from, std::uint32_t n) noexcept {
    if (n >= N) [[likely]]
        return load_floats<N>(from);
    return detail::load_some<N>(from, n);
}

/// To N elements from `to` on, which needs T's own alignment only.
template <movable_number T, std::uint32_t N>
GPUSHARE_HD void store_floats(T* to, const floats<N>& x) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (N > 4) {
        store_floats(to, x.low());
        store_floats(to + N / 2, x.high());
    } else {
        detail::four_elements<T> t;
        for (std::uint32_t i = 0; i < 4; ++i) t.lane[i] = detail::narrow_lane<T>(x[i]);
        if (reinterpret_cast<std::uintptr_t>(to) % sizeof t == 0)
            *reinterpret_cast<detail::four_elements<T>*>(to) = t;
        else
            for (int i = 0; i < 4; ++i) to[i] = t.lane[i];
    }
#else
    if constexpr (N * sizeof(T) > 16) {
        store_floats(to, x.low());
        store_floats(to + N / 2, x.high());
    } else if constexpr (N * sizeof(T) == 16) {
        *reinterpret_cast<detail::bytes_in_memory*>(to) =
            __builtin_bit_cast(detail::sixteen_bytes, detail::packed_floats<T>(x));
    } else {
        T more[2 * N];
        store_floats(more, floats<2 * N>{x, x});
        std::memcpy(static_cast<void*>(to), more, N * sizeof(T));
    }
#endif
}

namespace detail {
template <class T, std::uint32_t N>
GPUSHARE_RARE GPUSHARE_HD void store_some(T* to, floats<N> x, std::uint32_t n) noexcept {
#ifdef __CUDA_ARCH__
    static_assert(N == 4);
    if (n > 0) to[0] = narrow_lane<T>(x[0]);
    if (n > 1) to[1] = narrow_lane<T>(x[1]);
    if (n > 2) to[2] = narrow_lane<T>(x[2]);
    if (n > 3) to[3] = narrow_lane<T>(x[3]);
#else
    T all[N];
    store_floats(all, x);
    for (std::uint32_t i = 0; i < N && i < n; ++i) to[i] = all[i];
#endif
}
}  // namespace detail

/// To the first `n` of N elements.
template <movable_number T, std::uint32_t N>
GPUSHARE_HD void store_floats(T* to, const floats<N>& x, std::uint32_t n) noexcept {
    if (n >= N) [[likely]]
        return store_floats(to, x);
    detail::store_some(to, x, n);
}

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
namespace detail {
template <class T, std::uint32_t N>
void stream_aligned(T* to, const floats<N>& x) noexcept {
    if constexpr (N * sizeof(T) > 16) {
        stream_aligned(to, x.low());
        stream_aligned(to + N / 2, x.high());
    } else {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), __builtin_bit_cast(__m128i, packed_floats<T>(x)));
    }
}
}  // namespace detail
#endif

/// The same past the caches, where `to` is a multiple of 16 and the machine can: for what nobody reads soon. A later release
/// doesn't order it: finish_streaming() first.
template <movable_number T, std::uint32_t N>
GPUSHARE_HD void stream_floats(T* to, const floats<N>& x) noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if constexpr (N * sizeof(T) >= 16) {
        if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) [[likely]]
            return detail::stream_aligned(to, x);
    }
#endif
    store_floats(to, x);
}

/// Before the releasing store that tells others of what was streamed.
GPUSHARE_HD inline void finish_streaming() noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    _mm_sfence();
#endif
}

/// Rounded to T, and back.
template <movable_number T, std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> rounded_to(const floats<N>& x) noexcept {
    if constexpr (std::same_as<T, float>) {
        return x;
    } else {
        alignas(16) T t[N];
        store_floats(t, x);
        return load_floats<N>(static_cast<const T*>(t));
    }
}

}  // namespace gpushare::inline GPUSHARE_ABI
