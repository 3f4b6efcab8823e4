// SPDX-License-Identifier: Apache-2.0
// A cache line of elements in the widest vectors that the processor has, whatever flags the file is compiled with: loaded,
// combined with other lines, stored. What line_sums.hpp goes through arrays by.
//
//   line<float, 32> x;    x.load(a);    x.combine<sum>(b);    x.store<line_stores::cached>(out);      // in an AVX2 function
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/bundle.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/simd.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

inline constexpr std::size_t cache_line = 64;

/// How results are stored. Past the caches is for what nobody reads soon, and needs lines that all begin at multiples of 64;
/// finish_streaming() before the next release.
enum class line_stores : std::uint8_t { cached, past_caches };

/// The least that combining by lines takes: older processors go by elements, in vectors of 16 bytes.
inline constexpr vector_width least_for_lines = vector_width::avx2;

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)

/// What lines of T are computed in: as accumulator_t says; or in integers as small as T, where the same bits come out.
template <class T, class Op>
struct lane {
    using type = accumulator_t<T, Op>;
};
template <std::integral T, class Op>
requires(sizeof(T) < 4 && (wrapping_op<Op> || selecting_op<Op>)) struct lane<T, Op> {
    using type =
        std::conditional_t<std::is_unsigned_v<T> || wrapping_op<Op>, std::make_unsigned_t<T>, std::make_signed_t<T>>;
};
template <class T, class Op>
using lane_t = typename lane<T, Op>::type;

/// Whether Op can work on vectors where they lie: one that is passed or returned by value would need the whole file compiled
/// for its width.
template <class A, class Op>
concept works_in_place = requires(A& a, const A& b) {
    Op::into(a, b);
}
&&(!requires(const Op& op, A a) { op.finish(a, a); } ||
   (std::floating_point<A> && requires(A & a) { Op::finish_into(a, a); }));

/// Elements that are computed in their own type, or in one with the same bits; and small floats.
template <class T, class Op>
inline constexpr bool combines_lines = works_in_place<lane_t<T, Op>, Op> &&
                                       (std::same_as<T, lane_t<T, Op>> || is_stored_number<T> ||
                                        (std::integral<T> && sizeof(T) == sizeof(lane_t<T, Op>)));

/// The most that pays. Vectors of 64 bytes have no operations on small integers before AVX-512BW, g++ 12 takes comparisons of
/// floats in them apart, element by element, and what float_moves.hpp converts is in vectors of 32.
template <class T, class Op>
inline constexpr vector_width most_for_lines = sizeof(lane_t<T, Op>) < 4 || is_fp8<T> ||
                                                       (selecting_op<Op> && std::floating_point<lane_t<T, Op>>)
                                                   ? vector_width::avx2
                                                   : vector_width::avx512;

/// Stores a vector to a multiple of its size. Not by intrinsics: their header takes longer to compile than all of this library's.
template <std::size_t Bytes, class Vector>
[[gnu::always_inline]] inline void store_past_caches(const Vector& v, std::byte* to) noexcept {
    Vector& at = *reinterpret_cast<Vector*>(to);
#if defined(__clang__)
    __builtin_nontemporal_store(v, &at);
#else
    if constexpr (Bytes == 16)
        asm("movntdq %1, %0" : "=m"(at) : "x"(v));
    else
        asm("vmovntdq %1, %0" : "=m"(at) : "v"(v));
#endif
}

/// A line in registers of so many bytes. Its functions take and return no vectors, and are inlined into one that may use them.
template <class A, std::size_t Bytes>
struct line {
    using memory = typename in_memory<Bytes>::type;
    using vector [[gnu::vector_size(Bytes)]] = A;
    static constexpr std::uint32_t vectors = cache_line / Bytes;

    [[gnu::always_inline]] void load(const std::byte* from) noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            part[i] = __builtin_bit_cast(vector, reinterpret_cast<const memory*>(from)[i]);
        });
    }
    template <class Op>
    [[gnu::always_inline]] void combine(const std::byte* from) noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            const vector more = __builtin_bit_cast(vector, reinterpret_cast<const memory*>(from)[i]);
            Op::into(part[i], more);
        });
    }
    template <class Op>
    [[gnu::always_inline]] void finish([[maybe_unused]] std::uint32_t ranks) noexcept {
        if constexpr (requires(A a) { Op::finish_into(a, a); })
            unrolled<vectors>([&](std::uint32_t i)
                                  __attribute__((always_inline)) { Op::finish_into(part[i], static_cast<A>(ranks)); });
    }
    template <line_stores Stores>
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            if constexpr (Stores == line_stores::cached) {
                reinterpret_cast<memory*>(to)[i] = __builtin_bit_cast(memory, part[i]);
            } else {
                store_past_caches<Bytes>(part[i], to + i * Bytes);
            }
        });
    }

    vector part[vectors];
};

/// A line of halves, widened in registers of so many bytes. Rounds as number_format::narrow: to nearest even, every NaN the same.
template <class T, std::size_t Bytes>
struct line_of_halves {
    using memory = typename in_memory<Bytes / 2>::type;
    using wide = typename vector_of<float, Bytes>::type;
    using words = typename vector_of<std::uint32_t, Bytes>::type;
    using halves = typename vector_of<std::uint16_t, Bytes / 2>::type;
#if defined(__clang__)
    using float16s = typename vector_of<_Float16, Bytes / 2>::type;
#endif
    static constexpr std::uint32_t vectors = 2 * cache_line / Bytes;

    [[gnu::always_inline]] void load(const std::byte* from) noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) { widen(from, i, part[i]); });
    }
    template <class Op>
    [[gnu::always_inline]] void combine(const std::byte* from) noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            wide more;
            widen(from, i, more);
            Op::into(part[i], more);
        });
    }
    template <class Op>
    [[gnu::always_inline]] void finish([[maybe_unused]] std::uint32_t ranks) noexcept {
        if constexpr (requires(float a) { Op::finish_into(a, a); })
            unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
                Op::finish_into(part[i], static_cast<float>(ranks));
            });
    }
    template <line_stores Stores>
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            halves h;
            narrow(part[i], h);
            if constexpr (Stores == line_stores::cached)
                reinterpret_cast<memory*>(to)[i] = __builtin_bit_cast(memory, h);
            else
                store_past_caches<Bytes / 2>(h, to + i * (Bytes / 2));
        });
    }

    wide part[vectors];

private:
    // The conversions of float16 are in every processor with AVX2, and in AVX-512. g++ has no word for any of these in a file that
    // isn't compiled for them, and takes several instructions for what one does.
    [[gnu::always_inline]] static void widen(const std::byte* from, std::uint32_t i, wide& to) noexcept {
        const halves h = __builtin_bit_cast(halves, reinterpret_cast<const memory*>(from)[i]);
        if constexpr (std::same_as<T, bfloat16>) {
            words upper;
#if defined(__clang__)
            upper = __builtin_convertvector(h, words);
#else
            asm("vpmovzxwd %1, %0" : "=v"(upper) : "vm"(h));
#endif
            to = __builtin_bit_cast(wide, upper << 16);
        } else {
#if defined(__clang__)
            to = __builtin_convertvector(__builtin_bit_cast(float16s, h), wide);
#else
            asm("vcvtph2ps %1, %0" : "=v"(to) : "vm"(h));
#endif
        }
    }
    [[gnu::always_inline]] static void narrow(const wide& from, halves& to) noexcept {
        const words bits = __builtin_bit_cast(words, from);
        const auto is_nan = from != from;
        if constexpr (std::same_as<T, bfloat16>) {
            const words rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
            const words upper = is_nan ? words{} + 0x7fffU : rounded >> 16;
#if !defined(__clang__)
            if constexpr (Bytes == 64)
                asm("vpmovdw %1, %0" : "=v"(to) : "v"(upper));
            else
#endif
                to = __builtin_convertvector(upper, halves);
        } else {
            // The one NaN, which keeps the upper ten bits of this one's.
            const words safe = is_nan ? words{} + 0x7fff'e000U : bits;
#if defined(__clang__)
            to = __builtin_bit_cast(halves, __builtin_convertvector(__builtin_bit_cast(wide, safe), float16s));
#else
            asm("vcvtps2ph $0, %1, %0" : "=v"(to) : "v"(safe));
#endif
        }
    }
};

template <class T, class A, std::size_t Bytes>
using line_of = std::conditional_t<is_half<T>, line_of_halves<T, Bytes>, line<A, Bytes>>;

/// As many lines as take a quarter of the registers, or half of them.
template <class Line>
inline constexpr std::uint32_t lines_at_once = 8 / Line::vectors;

#else

template <class T, class Op>
inline constexpr bool combines_lines = false;

#endif

}  // namespace gpushare::inline GPUSHARE_ABI::detail
