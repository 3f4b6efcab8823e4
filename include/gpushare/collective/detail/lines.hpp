// SPDX-License-Identifier: Apache-2.0
// A cache line of elements in the widest vectors that the processor has, whatever flags the file is compiled with: loaded,
// combined with other lines, stored. What line_sums.hpp goes through arrays by.
//
//   line<float, 32> x;    x.load(a);    x.combine<sum>(b);    x.store<line_stores::cached>(out);      // in an AVX2 function
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <gpushare/collective/detail/bundle.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/simd.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

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

template <class T, class Op>
inline constexpr bool averages_integers = std::same_as<Op, average>&& std::integral<T> && sizeof(T) <= 4;

/// Elements that are computed in their own type, or in one with the same bits; small floats; and averages of integers.
template <class T, class Op>
inline constexpr bool combines_lines = averages_integers<T, Op> ||
                                       (works_in_place<lane_t<T, Op>, Op> &&
                                        (std::same_as<T, lane_t<T, Op>> || is_stored_number<T> ||
                                         (std::integral<T> && sizeof(T) == sizeof(lane_t<T, Op>))));

/// Of how many ranks at most: of integers, sums must be exact in what they are computed in.
template <class T, class Op>
inline constexpr std::uint32_t most_ranks_for_lines = averages_integers<T, Op> ? 256 : ~0U;

/// The most that pays. Vectors of 64 bytes have no operations on small integers before AVX-512BW, g++ 12 takes comparisons of
/// floats in them apart, element by element, and what float_moves.hpp converts is in vectors of 32.
template <class T, class Op>
inline constexpr vector_width most_for_lines = sizeof(lane_t<T, Op>) < 4 || is_fp8<T> || averages_integers<T, Op> ||
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

/// A line of numbers that are computed in others, by `moves`: `wide`, which is a vector of `number`, `narrow`, as it lies in memory,
/// and what makes one of the other.
template <class Moves>
struct line_of_widened {
    using wide = typename Moves::wide;
    using narrow = typename Moves::narrow;
    static constexpr std::size_t step = sizeof(narrow);
    static constexpr std::uint32_t vectors = cache_line / step;
    using memory = typename in_memory<step>::type;

    [[gnu::always_inline]] void load(const std::byte* from) noexcept {
        unrolled<vectors>([&](std::uint32_t i)
                              __attribute__((always_inline)) { Moves::load(from + i * step, part[i]); });
    }
    template <class Op>
    [[gnu::always_inline]] void combine(const std::byte* from) noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            wide more;
            Moves::load(from + i * step, more);
            Op::into(part[i], more);
        });
    }
    template <class Op>
    [[gnu::always_inline]] void finish([[maybe_unused]] std::uint32_t ranks) noexcept {
        using number = typename Moves::number;
        if constexpr (requires(number a) { Op::finish_into(a, a); })
            unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
                Op::finish_into(part[i], static_cast<number>(ranks));
            });
    }
    template <line_stores Stores>
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        unrolled<vectors>([&](std::uint32_t i) __attribute__((always_inline)) {
            narrow n;
            Moves::store(part[i], n);
            if constexpr (Stores == line_stores::cached || step < 16)  // no store of 8 bytes goes past them
                reinterpret_cast<memory*>(to)[i] = __builtin_bit_cast(memory, n);
            else
                store_past_caches<step>(n, to + i * step);
        });
    }

    wide part[vectors];
};

/// Halves in registers of so many bytes. Rounds as number_format::narrow: to nearest even, every NaN the same.
///
/// The conversions of float16 are in every processor with AVX2, and in AVX-512. g++ has no word for any of these in a file that
/// isn't compiled for them, and takes several instructions for what one does.
template <class T, std::size_t Bytes>
struct half_moves {
    using number = float;
    using wide = typename vector_of<float, Bytes>::type;
    using narrow = typename vector_of<std::uint16_t, Bytes / 2>::type;
    using words = typename vector_of<std::uint32_t, Bytes>::type;
#if defined(__clang__)
    using float16s = typename vector_of<_Float16, Bytes / 2>::type;
#endif

    [[gnu::always_inline]] static void load(const std::byte* from, wide& to) noexcept {
        const narrow h = __builtin_bit_cast(narrow, *reinterpret_cast<const in_memory<Bytes / 2>::type*>(from));
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
    [[gnu::always_inline]] static void store(const wide& from, narrow& to) noexcept {
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
                to = __builtin_convertvector(upper, narrow);
        } else {
            // The one NaN, which keeps the upper ten bits of this one's.
            const words safe = is_nan ? words{} + 0x7fff'e000U : bits;
#if defined(__clang__)
            to = __builtin_bit_cast(narrow, __builtin_convertvector(__builtin_bit_cast(wide, safe), float16s));
#else
            asm("vcvtps2ph $0, %1, %0" : "=v"(to) : "v"(safe));
#endif
        }
    }
};

/// Integers of up to 32 bits as floats, or doubles, that hold the sum of most_ranks_for_lines of them exactly. Their average rounded
/// towards zero is the quotient without what follows the point: one that isn't whole is further from the next whole number than
/// rounding moves it.
template <class T>
struct integer_moves {
    static constexpr bool of_words = sizeof(T) == 4;
    using number = std::conditional_t<of_words, double, float>;
    static constexpr std::size_t count = 32 / sizeof(number);
    using wide = typename vector_of<number, 32>::type;
    using words = typename vector_of<std::int32_t, count * 4>::type;
    using narrow = typename vector_of<T, count * sizeof(T)>::type;
    // Conversions are of signed words only.
    static constexpr number shift = of_words && std::is_unsigned_v<T> ? 0x1p31F : 0;

    [[gnu::always_inline]] static void load(const std::byte* from, wide& to) noexcept {
        using memory = typename in_memory<sizeof(narrow)>::type;
        const memory& n = *reinterpret_cast<const memory*>(from);
        words w;
#if defined(__clang__)
        w = __builtin_convertvector(__builtin_bit_cast(narrow, n), words);
#else
        if constexpr (of_words)
            w = __builtin_bit_cast(words, n);
        else if constexpr (sizeof(T) == 2 && std::is_signed_v<T>)
            asm("vpmovsxwd %1, %0" : "=x"(w) : "m"(n));
        else if constexpr (sizeof(T) == 2)
            asm("vpmovzxwd %1, %0" : "=x"(w) : "m"(n));
        else if constexpr (std::is_signed_v<T>)
            asm("vpmovsxbd %1, %0" : "=x"(w) : "m"(n));
        else
            asm("vpmovzxbd %1, %0" : "=x"(w) : "m"(n));
#endif
        if constexpr (shift != 0) w ^= std::numeric_limits<std::int32_t>::min();
        to = __builtin_convertvector(w, wide);
        if constexpr (shift != 0) to = to + shift;
    }
    [[gnu::always_inline]] static void store(const wide& from, narrow& to) noexcept {
        if constexpr (shift != 0) {
            wide least = from - shift;  // which may be below zero: down is towards zero for what was shifted
#if defined(__clang__)
            least = __builtin_elementwise_floor(least);
#else
            asm("vroundpd $1, %0, %0" : "+x"(least));
#endif
            const words w = __builtin_convertvector(least, words);
            to = __builtin_bit_cast(narrow, w ^ std::numeric_limits<std::int32_t>::min());
        } else if constexpr (of_words) {
            to = __builtin_bit_cast(narrow, __builtin_convertvector(from, words));
        } else {
            const words w = __builtin_convertvector(from, words);
#if defined(__clang__)
            to = __builtin_convertvector(w, narrow);
#else
            if constexpr (sizeof(T) == 2) {
                to = __builtin_convertvector(w, narrow);
            } else {
                typename vector_of<std::int64_t, 16>::type all;  // the first eight bytes are the result
                asm("vextracti128 $1, %1, %0\n\tvpackssdw %0, %x1, %0" : "=&x"(all) : "x"(w));
                if constexpr (std::is_signed_v<T>)
                    asm("vpacksswb %0, %0, %0" : "+x"(all));
                else
                    asm("vpackuswb %0, %0, %0" : "+x"(all));
                to = __builtin_bit_cast(narrow, all[0]);
            }
#endif
        }
    }
};

template <class T, class Op, std::size_t Bytes>
struct line_type {
    using type = line<lane_t<T, Op>, Bytes>;
};
template <class T, class Op, std::size_t Bytes>
requires is_half<T>
struct line_type<T, Op, Bytes> {
    using type = line_of_widened<half_moves<T, Bytes>>;
};
template <class T, class Op>
requires averages_integers<T, Op>
struct line_type<T, Op, 32> {
    using type = line_of_widened<integer_moves<T>>;
};
template <class T, class Op, std::size_t Bytes>
using line_of = typename line_type<T, Op, Bytes>::type;

/// As many lines as take a quarter of the registers, or half of them.
template <class Line>
inline constexpr std::uint32_t lines_at_once = 8 / Line::vectors;

#else

template <class T, class Op>
inline constexpr bool combines_lines = false;

#endif

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
