// SPDX-License-Identifier: Apache-2.0
// A few elements that a thread works on at once, held in the type they are computed in: vector registers on a CPU, whatever
// the compiler's flags, and the registers of a thread on a device.
//
//   using values = gpushare::detail::bundle<float, 16>;
//   auto x = values::load(a + i);    x.combine(gpushare::sum{}, values::load(b + i));    x.store(out + i);
//
// Vectors of 16 bytes are what every x86-64 and AArch64 has. Wider ones, for whole cache lines, are in cache_line.hpp.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <gpushare/collective/detail/simd/conversions.hpp>
#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/packed.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Calls f(0) to f(N - 1) without a loop: what is indexed by a constant stays in registers.
template <std::uint32_t N, class F>
[[gnu::always_inline]] inline void unrolled(const F& f) noexcept {
    [&]<std::uint32_t... I>(std::integer_sequence<std::uint32_t, I...>) __attribute__((always_inline)) { (f(I), ...); }
    (std::make_integer_sequence<std::uint32_t, N>{});
}

/// One element as it is computed with, and back, rounded once.
template <class A, class T>
[[nodiscard]] GPUSHARE_HD constexpr A widened(const T& x) noexcept {
    return static_cast<A>(x);
}
template <class T, class A>
[[nodiscard]] GPUSHARE_HD constexpr T narrowed(const A& x) noexcept {
    return static_cast<T>(x);
}

#ifndef __CUDA_ARCH__
/// Of four or two elements.
template <class A, class T>
struct vector_cast {
    static constexpr std::uint32_t width = 16 / sizeof(A);
    using wide = typename vector_of<A, 16>::type;
    using bits_type = std::conditional_t<sizeof(T) == 1, std::uint8_t, std::uint16_t>;

    [[gnu::always_inline]] static wide load(const T* from) noexcept {
        if constexpr (is_stored_number<T>) {
            simd<float, 4> x;
            load_register(from, x);
            return x.raw;
        } else {
            typename vector_of<T, width * sizeof(T)>::type v;
            std::memcpy(&v, from, sizeof v);
            return __builtin_convertvector(v, wide);
        }
    }

    [[gnu::always_inline]] static void store(T* to, const wide& v) noexcept {
        if constexpr (is_stored_number<T>) {
            const auto n =
                __builtin_convertvector(narrow(v).raw, typename vector_of<bits_type, width * sizeof(T)>::type);
            std::memcpy(static_cast<void*>(to), &n, sizeof n);
        } else {
            const auto n = __builtin_convertvector(v, typename vector_of<T, width * sizeof(T)>::type);
            std::memcpy(static_cast<void*>(to), &n, sizeof n);
        }
    }

    /// The bits of numbers stored in 8 or 16, in a word each.
    [[gnu::always_inline]] static simd<std::int32_t, 4> narrow(const wide& v) noexcept {
        return typename lanes_of_type<T>::narrow{}(simd<float, 4>(v));
    }
};
#endif

/// N numbers of type A, loaded from and stored as elements of other types. Lives in registers: never stored itself, never
/// passed between host and device.
template <class A, std::uint32_t N>
class bundle {
public:
    static constexpr std::uint32_t width = N;

#ifdef __CUDA_ARCH__
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    [[nodiscard]] GPUSHARE_HD static bundle load(const T* from) noexcept {
        bundle b;
        constexpr std::uint32_t step = packed<T>::width < N ? packed<T>::width : N;
        for (std::uint32_t j = 0; j < N; j += step) {
            if constexpr (step == packed<T>::width) {
                const packed<T> p = load_packed(from + j);
                for (std::uint32_t i = 0; i < step; ++i) b.lane_[j + i] = widened<A>(p[i]);
            } else {
                for (std::uint32_t i = 0; i < step; ++i) b.lane_[j + i] = widened<A>(from[j + i]);
            }
        }
        return b;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    GPUSHARE_HD void store(T* to) const noexcept {
        constexpr std::uint32_t step = packed<T>::width < N ? packed<T>::width : N;
        for (std::uint32_t j = 0; j < N; j += step) {
            if constexpr (step == packed<T>::width) {
                packed<T> p;
                for (std::uint32_t i = 0; i < step; ++i) p[i] = narrowed<T>(lane_[j + i]);
                store_packed(to + j, p);
            } else {
                for (std::uint32_t i = 0; i < step; ++i) to[j + i] = narrowed<T>(lane_[j + i]);
            }
        }
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    GPUSHARE_HD void stream(T* to) const noexcept {
        store(to);
    }

    /// Calls f on each element.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class F>
    GPUSHARE_HD void each(const F& f) noexcept {
        for (std::uint32_t i = 0; i < N; ++i) lane_[i] = f(lane_[i], i);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Op>
    GPUSHARE_HD void combine(const Op& op, const bundle& other) noexcept {
        for (std::uint32_t i = 0; i < N; ++i) lane_[i] = op(lane_[i], other.lane_[i]);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Op>
    GPUSHARE_HD void finish(const Op& op, std::uint32_t ranks) noexcept {
        if constexpr (requires { op.finish(A{}, A{}); })
            for (std::uint32_t i = 0; i < N; ++i) lane_[i] = op.finish(lane_[i], static_cast<A>(ranks));
    }

private:
    A lane_[N];
#else
    template <class T>
    [[nodiscard, gnu::always_inline]] static bundle load(const T* from) noexcept {
        bundle b;
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            b.part_[i] = vector_cast<A, T>::load(from + i * width_of_vector);
        });
        return b;
    }
    template <class T>
    [[gnu::always_inline]] void store(T* to) const noexcept {
#if defined(__x86_64__)
        if constexpr (is_half<T> && vectors % 2 == 0) {
            unrolled<vectors / 2>([&](std::uint32_t i) __attribute__((always_inline)) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, packed_halves<T>(i));
            });
            return;
        }
#endif
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            vector_cast<A, T>::store(to + i * width_of_vector, part_[i]);
        });
    }
    /// Past the caches: for what nobody reads soon. `to` at a multiple of 16 bytes, N elements a multiple of 16 bytes. Not
    /// ordered by a later release: finish_streaming() first.
    template <class T>
    [[gnu::always_inline]] void stream(T* to) const noexcept {
#if defined(__x86_64__)
        static_assert(N * sizeof(T) % 16 == 0);
        __m128i* const at = reinterpret_cast<__m128i*>(to);
        constexpr std::uint32_t pieces = N * sizeof(T) / 16;
        if constexpr (std::same_as<T, A>) {
            unrolled<pieces>([&](std::uint32_t i) __attribute__((always_inline)) {
                _mm_stream_si128(at + i, __builtin_bit_cast(__m128i, part_[i]));
            });
        } else if constexpr (is_half<T>) {
            unrolled<pieces>([&](std::uint32_t i)
                                 __attribute__((always_inline)) { _mm_stream_si128(at + i, packed_halves<T>(i)); });
        } else {
            alignas(16) T narrow[N];
            store(narrow);
            unrolled<pieces>([&](std::uint32_t i) __attribute__((always_inline)) {
                _mm_stream_si128(at + i, reinterpret_cast<const __m128i*>(narrow)[i]);
            });
        }
#else
        store(to);
#endif
    }

    template <class F>
    [[gnu::always_inline]] void each(const F& f) noexcept {
        for (std::uint32_t i = 0; i < N; ++i) {
            auto& lane = part_[i / width_of_vector];
            lane[i % width_of_vector] = f(static_cast<A>(lane[i % width_of_vector]), i);
        }
    }
    template <class Op>
    [[gnu::always_inline]] void combine(const Op& op, const bundle& other) noexcept {
        if constexpr (elementwise_op<Op>) {
            unrolled<vectors>([&](std::uint32_t i)
                                  __attribute__((always_inline)) { part_[i] = op(part_[i], other.part_[i]); });
        } else {
            for (std::uint32_t i = 0; i < vectors; ++i)
                for (std::uint32_t j = 0; j < width_of_vector; ++j)
                    part_[i][j] = op(static_cast<A>(part_[i][j]), static_cast<A>(other.part_[i][j]));
        }
    }
    template <class Op>
    [[gnu::always_inline]] void finish(const Op& op, std::uint32_t ranks) noexcept {
        if constexpr (requires { op.finish(A{}, A{}); })
            unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
                part_[i] = op.finish(part_[i], static_cast<A>(ranks));
            });
    }

private:
    using wide = typename vector_of<A, 16>::type;
    static constexpr std::uint32_t width_of_vector = 16 / sizeof(A);
    static constexpr std::uint32_t vectors = N / width_of_vector;

#if defined(__x86_64__)
    /// The parts 2i and 2i + 1.
    template <class T>
    [[gnu::always_inline]] __m128i packed_halves(std::uint32_t i) const noexcept {
        using cast = vector_cast<A, T>;
        return __builtin_bit_cast(__m128i, packed_eight(cast::narrow(part_[2 * i]), cast::narrow(part_[2 * i + 1])));
    }
#endif

    wide part_[vectors];
#endif
};

/// Elements that a thread of such a context takes at once: 64 bytes or more where it is alone, else what one instruction
/// moves, so that neighbouring threads read neighbouring bytes.
template <class Context, class T>
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t bundle_width() noexcept {
    if constexpr (requires { typename std::bool_constant<Context::num_threads() == 1>; })
        return 16;
    else
        return 16 / sizeof(T);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
