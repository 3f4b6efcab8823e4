// SPDX-License-Identifier: Apache-2.0
// Loads and stores a few floats at once, and converts them from and to the type in memory: float,
// bfloat16, float16, the 8-bit formats or int8_t. Results have the same bits as conversions of
// single numbers (stored_number).
//
//   using V = gpushare::floats<4>;
//   const V y = gpushare::load_floats<V>(bf16_pointer);
//   gpushare::store_floats(int8_pointer, x + y);                // x of type V
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

#include <gpushare/collective/detail/simd/conversions.hpp>
#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/packed.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

template <class V>
inline constexpr bool is_floats = false;
template <std::uint32_t N, std::uint32_t W>
inline constexpr bool is_floats<floats<N, W>> = true;

template <class T>
[[nodiscard]] GPUSHARE_HD T narrow_lane(float x) noexcept {
    if constexpr (std::same_as<T, std::int8_t>)
        return static_cast<T>(integer_lanes{}(x));
    else
        return T{x};
}

/// Four elements of T as they lie in memory, in one access where the address allows it.
template <class T>
struct alignas(4 * sizeof(T)) four_elements {
    T lane[4];
};

#ifdef __CUDA_ARCH__

/// The values that one access has loaded, as floats.
template <class V, class T>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V widened_four(const four_elements<T>& t) noexcept {
    return {static_cast<float>(t.lane[0]), static_cast<float>(t.lane[1]), static_cast<float>(t.lane[2]),
            static_cast<float>(t.lane[3])};
}

#else

/// A register of floats.
template <std::uint32_t W, class T>
[[gnu::always_inline]] inline void load_register(const T* from, simd<float, W>& to) noexcept {
    if constexpr (std::same_as<T, float>) {
        to.raw = __builtin_bit_cast(typename simd<float, W>::raw_type,
                                    *reinterpret_cast<const typename in_memory<4 * W>::type*>(from));
    } else {
        simd<std::int32_t, W> words;
#if defined(__x86_64__)
        if constexpr (W == 8 && std::same_as<T, float16>) return widen_float16s_by_f16c(from, to);
        if constexpr (W == 8)
            spread_by_avx2(from, words);
        else
#endif
            spread_elements<T, W>::load(from, words);
        to = typename lanes_of_type<T>::widen{}(words);
    }
}

/// Eight floats as eight elements of 16 bits.
template <class T, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT inline eight_halves as_halves(const floats<8, W>& x) noexcept {
    const typename lanes_of_type<T>::narrow to;
    if constexpr (W == 4) {
        return packed_eight(to(x.low().in_register()), to(x.high().in_register()));
    } else {
#if defined(__x86_64__)
        if constexpr (std::same_as<T, float16>) {
            eight_halves h;
            narrow_float16s_by_f16c(x.in_register(), h);
            return h;
        }
#endif
        return packed_eight(to(x.in_register()));
    }
}

/// As many floats as become 16 bytes of T.
template <class T, std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT inline sixteen_bytes as_stored(const floats<N, W>& x) noexcept {
    static_assert(N * sizeof(T) == 16);
    if constexpr (std::same_as<T, float>)
        return __builtin_bit_cast(sixteen_bytes, x.in_register().raw);
    else if constexpr (sizeof(T) == 2)
        return __builtin_bit_cast(sixteen_bytes, as_halves<T>(x));
    else
        return packed_halves(as_halves<T>(x.low()), as_halves<T>(x.high()));
}

#endif

}  // namespace detail

/// The numbers that an epilogue reads and writes.
template <class T>
concept movable_number = std::same_as<T, float> || std::same_as<T, std::int8_t> || detail::is_stored_number<T>;

/// The elements from `from` on, which needs T's own alignment only. V: of which type floats<N, W>.
template <class V, movable_number T>
requires detail::is_floats<V>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load_floats(const T* from) noexcept {
    if constexpr (V::lanes > V::width) {
        using half = floats<V::lanes / 2, V::width>;
        return {load_floats<half>(from), load_floats<half>(from + V::lanes / 2)};
    } else {
#ifdef __CUDA_ARCH__
        detail::four_elements<T> t;
        if (reinterpret_cast<std::uintptr_t>(from) % sizeof t == 0)
            t = *reinterpret_cast<const detail::four_elements<T>*>(from);
        else
            for (int i = 0; i < 4; ++i) t.lane[i] = from[i];
        return detail::widened_four<V>(t);
#else
        detail::simd<float, V::width> x;
        detail::load_register(from, x);
        return V(x);
#endif
    }
}
/// The same by their number.
template <std::uint32_t N, movable_number T>
[[nodiscard]] GPUSHARE_HD floats<N> load_floats(const T* from) noexcept {
    return load_floats<floats<N>>(from);
}

namespace detail {

// The last few elements of a row go one by one. On a device no array is indexed by a variable: it would be in memory.
template <class V, class T>
GPUSHARE_RARE GPUSHARE_HD V load_some(const T* from, std::uint32_t n) noexcept {
#ifdef __CUDA_ARCH__
    // More than 4 only where nvcc looks at what the host's threads run.
    if constexpr (V::lanes > 4) {
        using half = floats<V::lanes / 2, V::width>;
        constexpr std::uint32_t in_half = V::lanes / 2;
        return {load_some<half>(from, n), load_some<half>(from + in_half, n > in_half ? n - in_half : 0)};
    } else
        return {n > 0 ? static_cast<float>(from[0]) : 0, n > 1 ? static_cast<float>(from[1]) : 0,
                n > 2 ? static_cast<float>(from[2]) : 0, n > 3 ? static_cast<float>(from[3]) : 0};
#else
    float all[V::lanes] = {};
    for (std::uint32_t i = 0; i < V::lanes && i < n; ++i) all[i] = static_cast<float>(from[i]);
    return load_floats<V>(static_cast<const float*>(all));
#endif
}

}  // namespace detail

/// The first `n` of them, and zeros.
template <class V, movable_number T>
requires detail::is_floats<V>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load_floats(const T* from, std::uint32_t n) noexcept {
    if (n >= V::lanes) [[likely]]
        return load_floats<V>(from);
    return detail::load_some<V>(from, n);
}
/// The same by their number.
template <std::uint32_t N, movable_number T>
[[nodiscard]] GPUSHARE_HD floats<N> load_floats(const T* from, std::uint32_t n) noexcept {
    return load_floats<floats<N>>(from, n);
}

/// To N elements from `to` on, which needs T's own alignment only.
template <movable_number T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT GPUSHARE_HD void store_floats(T* to, const floats<N, W>& x) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (N > 4) {
        store_floats(to, x.low());
        store_floats(to + N / 2, x.high());
    } else {
        detail::four_elements<T> t;
        for (std::uint32_t i = 0; i < 4; ++i) t.lane[i] = detail::narrow_lane<T>(x[i]);
        if (reinterpret_cast<std::uintptr_t>(to) % sizeof t == 0)
            detail::store_at_once(to, t);
        else
            for (int i = 0; i < 4; ++i) to[i] = t.lane[i];
    }
#else
    if constexpr (std::same_as<T, float> && N == W) {
        using memory = typename detail::in_memory<4 * W>::type;
        *reinterpret_cast<memory*>(to) = __builtin_bit_cast(memory, x.in_register().raw);
    } else if constexpr (N * sizeof(T) > 16) {
        store_floats(to, x.low());
        store_floats(to + N / 2, x.high());
    } else if constexpr (N * sizeof(T) == 16) {
        using memory = typename detail::in_memory<16>::type;
        *reinterpret_cast<memory*>(to) = __builtin_bit_cast(memory, detail::as_stored<T>(x));
    } else {
        T more[2 * N];
        store_floats(more, floats<2 * N, W>{x, x});
        std::memcpy(static_cast<void*>(to), more, N * sizeof(T));
    }
#endif
}

namespace detail {
template <class T, std::uint32_t N, std::uint32_t W>
GPUSHARE_RARE GPUSHARE_HD void store_some(T* to, floats<N, W> x, std::uint32_t n) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (N > 4) {
        store_some(to, x.low(), n);
        store_some(to + N / 2, x.high(), n > N / 2 ? n - N / 2 : 0);
    } else {
        if (n > 0) to[0] = narrow_lane<T>(x[0]);
        if (n > 1) to[1] = narrow_lane<T>(x[1]);
        if (n > 2) to[2] = narrow_lane<T>(x[2]);
        if (n > 3) to[3] = narrow_lane<T>(x[3]);
    }
#else
    float all[N];
    store_floats(all, x);
    for (std::uint32_t i = 0; i < N && i < n; ++i) to[i] = narrow_lane<T>(all[i]);
#endif
}
}  // namespace detail

/// To the first `n` of N elements.
template <movable_number T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT GPUSHARE_HD void store_floats(T* to, const floats<N, W>& x, std::uint32_t n) noexcept {
    if (n >= N) [[likely]]
        return store_floats(to, x);
    detail::store_some(to, x, n);
}

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
namespace detail {
template <class T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT void stream_aligned(T* to, const floats<N, W>& x) noexcept {
    const auto stream = [](void* at, const sixteen_bytes& s) {
        _mm_stream_si128(static_cast<__m128i*>(at), __builtin_bit_cast(__m128i, s));
    };
    if constexpr (std::same_as<T, float> && N == 8 && W == 8) {
        using bytes = typename vector_of<std::int8_t, 32>::type;
        const auto all = __builtin_bit_cast(typename vector_of<std::int64_t, 32>::type, x.in_register().raw);
        static_assert(sizeof(bytes) == sizeof all);
        stream(to, __builtin_bit_cast(sixteen_bytes, __builtin_shufflevector(all, all, 0, 1)));
        stream(to + 4, __builtin_bit_cast(sixteen_bytes, __builtin_shufflevector(all, all, 2, 3)));
    } else if constexpr (N * sizeof(T) > 16) {
        stream_aligned(to, x.low());
        stream_aligned(to + N / 2, x.high());
    } else {
        stream(to, as_stored<T>(x));
    }
}
}  // namespace detail
#endif

/// The same past the caches, where `to` is a multiple of 16 and the machine can: for what nobody
/// reads soon. A later release doesn't order it: finish_streaming() first.
template <movable_number T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT GPUSHARE_HD void stream_floats(T* to, const floats<N, W>& x) noexcept {
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
template <movable_number T, std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> rounded_to(const floats<N, W>& x) noexcept {
    if constexpr (std::same_as<T, float>) {
        return x;
    } else {
        return floats<N, W>::map(
            [](const auto& lane) {
                const typename detail::lanes_of_type<T>::narrow to;
                const typename detail::lanes_of_type<T>::widen from;
                return from(to(lane));
            },
            x);
    }
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
