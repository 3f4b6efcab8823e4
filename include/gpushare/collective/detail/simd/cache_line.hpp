// SPDX-License-Identifier: Apache-2.0
// Loads a cache line of elements, combines the line with those of the other ranks, and stores the
// result, in the widest vectors that the processor has, whatever flags the file is compiled with.
// This is the inner loop of an all-reduce on a CPU.
//
//   line_ends ends{.signals = &s.signal_from(0), .ranks = 2, .in = first * sizeof(float), .out = first * sizeof(float)};
//   combine_lines<float>(widest_vectors(), sum{}, ends, lines, line_stores::cached);
//
// One vector of 64 bytes has two advantages over four vectors of 16 bytes: second-level caches
// transfer twice as much, and a store past the caches holds a buffer for one instruction instead of
// four.
//
// The loop takes several lines of one array, then as many lines of the next array. Most large
// arrays begin at the same place of a page. With a line of each array in turn, such arrays take two
// to three times as long on some processors (AMD's, whose first-level caches guess a line's place
// from a few bits of its address).
//
// There are no lambdas, because nvcc drops `always_inline` from them in the host code of .cu files.
// Code for wide vectors must be inlined into a function that is compiled for such vectors;
// otherwise it doesn't compile.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/collective/detail/workspace.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

inline constexpr std::size_t cache_line_bytes = 64;

/// How results are stored. Stores past the caches are for results that no thread reads soon, and
/// all lines must begin at multiples of 64. Call finish_streaming() before the next release.
enum class line_stores : std::uint8_t { cached, past_caches };

/// The vectors that combining by lines needs at least. Older processors combine element by element,
/// in vectors of 16 bytes.
inline constexpr vector_width least_for_lines = vector_width::avx2;

/// The addresses of lines: `in` and `out` bytes after the addresses that each rank signals. `ahead`
/// and `places` are those of all_reduce_plan. If `only` isn't null, results go to `out` bytes after
/// `only`, and not to all ranks.
struct line_ends {
    const peer_signal* signals;
    std::uint32_t ranks;
    std::size_t in, out;
    std::size_t ahead = 0;
    std::size_t places = 1;
    void* only = nullptr;

    [[nodiscard, gnu::always_inline]] std::uint32_t outputs() const noexcept { return only != nullptr ? 1 : ranks; }
    [[nodiscard, gnu::always_inline]] void* output(std::uint32_t r) const noexcept {
        return only != nullptr ? only : signals[r].out;
    }
};

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)

/// The type in which lines of T are computed: accumulator_t, or integers as small as T if the
/// result has the same bits.
template <class T, class Op>
struct line_number {
    using type = accumulator_t<T, Op>;
};
template <std::integral T, class Op>
requires(sizeof(T) < 4 && (wrapping_op<Op> || selecting_op<Op>)) struct line_number<T, Op> {
    using type =
        std::conditional_t<std::is_unsigned_v<T> || wrapping_op<Op>, std::make_unsigned_t<T>, std::make_signed_t<T>>;
};
template <class T, class Op>
using line_number_t = typename line_number<T, Op>::type;

/// Whether Op can work on vectors in place. To pass or return a vector by value, the whole file
/// would have to be compiled for the vector's width.
template <class A, class Op>
concept works_in_place = requires(A& a, const A& b) {
    Op::into(a, b);
}
&&(!requires(const Op& op, A a) { op.finish(a, a); } ||
   (std::floating_point<A> && requires(A & a) { Op::finish_into(a, a); }));

template <class T, class Op>
inline constexpr bool averages_integers = std::same_as<Op, average>&& std::integral<T> && sizeof(T) <= 4;

/// The elements that can be combined by lines: elements that are computed in their own type, or in
/// a type with the same bits; small floats; and averages of integers.
template <class T, class Op>
inline constexpr bool combines_lines = averages_integers<T, Op> ||
                                       (works_in_place<line_number_t<T, Op>, Op> &&
                                        (std::same_as<T, line_number_t<T, Op>> || is_stored_number<T> ||
                                         (std::integral<T> && sizeof(T) == sizeof(line_number_t<T, Op>))));

/// The most ranks that lines support. Integer sums must be exact in the type of the computation.
template <class T, class Op>
inline constexpr std::uint32_t most_ranks_for_lines = averages_integers<T, Op> ? 256 : ~0U;

/// The widest vectors that pay off. Vectors of 64 bytes have no operations on small integers before
/// AVX-512BW, and g++ 12 splits comparisons of floats in such vectors, element by element.
template <class T, class Op>
inline constexpr vector_width most_for_lines = sizeof(line_number_t<T, Op>) < 4 || averages_integers<T, Op> ||
                                                       (selecting_op<Op> && std::floating_point<line_number_t<T, Op>>)
                                                   ? vector_width::avx2
                                                   : vector_width::avx512;

/// Stores a vector to a multiple of its size. Doesn't use intrinsics, because their header takes
/// longer to compile than all of this library's headers.
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

/// Numbers that are computed in their memory format, in registers of `Bytes` bytes. The class is a
/// model of the `Moves` of a cache_line: `wide`, a vector of `number`, is for the computation;
/// `narrow` is the same vector in memory; and functions convert between the two.
template <class A, std::size_t Bytes>
struct plain_moves {
    using number = A;
    using wide = typename vector_of<A, Bytes>::type;
    using narrow = wide;

    [[gnu::always_inline]] static void load(const std::byte* from, wide& to) noexcept {
        to = __builtin_bit_cast(wide, *reinterpret_cast<const typename in_memory<Bytes>::type*>(from));
    }
    [[gnu::always_inline]] static void store(const wide& from, narrow& to) noexcept { to = from; }
};

/// Floats of 16 bits in registers of `Bytes` bytes. Rounds as number_format::narrow does: to
/// nearest even, with one pattern for every NaN.
///
/// Every processor with AVX2 or AVX-512 can convert float16. g++ has no builtin for these
/// conversions in a file that isn't compiled for them, and would take several instructions instead
/// of one.
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
            // Every NaN becomes this float, whose upper bits the conversion keeps: they are the
            // format's single NaN.
            const words safe = is_nan ? words{} + 0x7fff'e000U : bits;
#if defined(__clang__)
            to = __builtin_bit_cast(narrow, __builtin_convertvector(__builtin_bit_cast(wide, safe), float16s));
#else
            asm("vcvtps2ph $0, %1, %0" : "=v"(to) : "v"(safe));
#endif
        }
    }
};

/// 8-bit floats in registers of `Bytes` bytes. They are converted by way of float16, whose
/// exponents include theirs. So one instruction converts a number after it has been shifted to its
/// place. Before a store, an addition rounds the number: the addend is so much larger than the
/// number that its last bit is at the place of the format's last bit, and the adder rounds to even.
template <class T, std::size_t Bytes>
struct small_float_moves {
    using number = float;
    using wide = typename vector_of<float, Bytes>::type;
    using words = typename vector_of<std::uint32_t, Bytes>::type;
    using halves = typename vector_of<std::uint16_t, Bytes / 2>::type;
    using signed_halves = typename vector_of<std::int16_t, Bytes / 2>::type;
    using narrow = typename vector_of<std::uint8_t, Bytes / 4>::type;
#if defined(__clang__)
    using float16s = typename vector_of<_Float16, Bytes / 2>::type;
    using signed_narrow = typename vector_of<std::int8_t, Bytes / 4>::type;
#endif
    // an e5m2 is the upper half of a float16
    static constexpr bool is_e5m2 = std::same_as<T, fp8_e5m2>;
    static constexpr float largest = is_e5m2 ? 57344.0F : 448.0F, smallest_normal = is_e5m2 ? 0x1p-14F : 0x1p-6F;
    static constexpr float to_float16 = is_e5m2 ? 1.0F : 0x1p-8F;
    // Added to the bits of a power of two, this constant gives the bits of a number whose last bit
    // is 3 or 2 powers below that power. The constant's 0x40'0000 keeps the sum with a negative
    // number from falling below a power of two.
    static constexpr std::uint32_t adder = ((is_e5m2 ? 21U : 20U) << 23) + 0x40'0000U;

    [[gnu::always_inline]] static void load(const std::byte* from, wide& to) noexcept {
        using memory = typename in_memory<Bytes / 4>::type;
        const memory& n = *reinterpret_cast<const memory*>(from);
        signed_halves h;  // each with the sign in its upper bits
#if defined(__clang__)
        h = __builtin_convertvector(__builtin_bit_cast(signed_narrow, n), signed_halves);
#else
        asm("vpmovsxbw %1, %0" : "=x"(h) : "m"(n));
#endif
        if constexpr (is_e5m2) {
            h = h << 8;
        } else {
            h = (h << 7) & static_cast<std::int16_t>(0xbf80);
            h |= (h & 0x3f80) == 0x3f80;  // the format's NaN
        }
#if defined(__clang__)
        to = __builtin_convertvector(__builtin_bit_cast(float16s, h), wide);
#else
        asm("vcvtph2ps %1, %0" : "=v"(to) : "x"(h));
#endif
        if constexpr (!is_e5m2) to = to * (1.0F / to_float16);
    }
    [[gnu::always_inline]] static void store(const wide& from, narrow& to) noexcept {
        const auto is_nan = from != from;
        wide x;
        clamp(from, x);
        const words bits = __builtin_bit_cast(words, x);
        wide power;  // the largest power of two that isn't above |x|, or the smallest normal number
        larger(__builtin_bit_cast(wide, bits & 0x7f80'0000U), wide{} + smallest_normal, power);
        const wide rounding = __builtin_bit_cast(wide, __builtin_bit_cast(words, power) + adder);
        wide rounded = (x + rounding) - rounding;
        if constexpr (!is_e5m2) rounded = rounded * to_float16;
        const words with_sign = __builtin_bit_cast(words, rounded) | (bits & 0x8000'0000U);
        const words safe = is_nan ? words{} + 0x7fff'e000U : with_sign;
        halves h;
#if defined(__clang__)
        h = __builtin_bit_cast(halves, __builtin_convertvector(__builtin_bit_cast(wide, safe), float16s));
#else
        asm("vcvtps2ph $0, %1, %0" : "=x"(h) : "v"(safe));
#endif
        if constexpr (is_e5m2)
            h = h >> 8;
        else
            h = ((h >> 7) & 0x7f) | ((h >> 8) & 0x80);
#if defined(__clang__)
        to = __builtin_convertvector(h, narrow);
#else
        // holds the result, in all of it or in its first eight bytes
        typename vector_of<std::int64_t, 16>::type all;
        if constexpr (Bytes == 64) {
            asm("vextracti128 $1, %1, %0\n\tvpackuswb %0, %x1, %0" : "=&x"(all) : "x"(h));
            to = __builtin_bit_cast(narrow, all);
        } else {
            asm("vpackuswb %1, %1, %0" : "=x"(all) : "x"(h));
            to = __builtin_bit_cast(narrow, all[0]);
        }
#endif
    }

private:
    // Calls the instructions by name, because g++ 12 turns `<` and `?:` into a comparison and a
    // selection.
    [[gnu::always_inline]] static void clamp(const wide& from, wide& to) noexcept {
#if defined(__clang__)
        to = __builtin_elementwise_max(__builtin_elementwise_min(from, wide{} + largest), wide{} - largest);
#else
        asm("vminps %1, %2, %0" : "=v"(to) : "v"(from), "v"(wide{} + largest));
        asm("vmaxps %1, %2, %0" : "=v"(to) : "v"(to), "v"(wide{} - largest));
#endif
    }
    [[gnu::always_inline]] static void larger(const wide& a, const wide& b, wide& to) noexcept {
#if defined(__clang__)
        to = __builtin_elementwise_max(a, b);
#else
        asm("vmaxps %1, %2, %0" : "=v"(to) : "v"(a), "v"(b));
#endif
    }
};

/// Integers of up to 32 bits as floats or doubles, which hold the sum of most_ranks_for_lines
/// integers exactly. Truncating the rounded quotient gives the average rounded towards zero: a
/// quotient that isn't whole is further from the next whole number than rounding moves it.
template <class T>
struct integer_moves {
    static constexpr bool of_words = sizeof(T) == 4;
    using number = std::conditional_t<of_words, double, float>;
    static constexpr std::size_t count = 32 / sizeof(number);
    using wide = typename vector_of<number, 32>::type;
    using words = typename vector_of<std::int32_t, count * 4>::type;
    using narrow = typename vector_of<T, count * sizeof(T)>::type;
    // Only signed words can be converted.
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
            // The difference may be below zero, so it is rounded down, which rounds the unshifted
            // number towards zero.
            wide least = from - shift;
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
                // the first eight bytes are the result
                typename vector_of<std::int64_t, 16>::type all;
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

/// A line in registers. Its functions take and return no vectors, and are inlined into functions
/// that may use vectors.
template <class Moves>
class cache_line {
    using narrow = typename Moves::narrow;
    using number = typename Moves::number;
    static constexpr std::size_t step = sizeof(narrow);
    using memory = typename in_memory<step>::type;

public:
    using wide = typename Moves::wide;
    static constexpr std::uint32_t vectors = cache_line_bytes / step;

    [[gnu::always_inline]] void load(const std::byte* from) noexcept { load_parts(from, all{}); }
    template <class Op>
    [[gnu::always_inline]] void combine(const std::byte* from) noexcept {
        combine_parts<Op>(from, all{});
    }
    template <class Op>
    [[gnu::always_inline]] void finish([[maybe_unused]] std::uint32_t ranks) noexcept {
        if constexpr (requires(number a) { Op::finish_into(a, a); })
            finish_parts<Op>(static_cast<number>(ranks), all{});
    }
    template <line_stores Stores>
    [[gnu::always_inline]] void store(std::byte* to) const noexcept {
        store_parts<Stores>(to, all{});
    }
    /// A value that isn't finite leaves a NaN in `seen`: its product with 0 is NaN, and so is every
    /// sum with that product.
    [[gnu::always_inline]] void show(wide (&seen)[vectors]) const noexcept { show_parts(seen, all{}); }

private:
    // Constants and not loops index the array, because otherwise the array would leave the
    // registers.
    using all = std::make_index_sequence<vectors>;

    template <std::size_t... I>
    [[gnu::always_inline]] void load_parts(const std::byte* from, std::index_sequence<I...>) noexcept {
        (Moves::load(from + I * step, part_[I]), ...);
    }
    template <class Op, std::size_t... I>
    [[gnu::always_inline]] void combine_parts(const std::byte* from, std::index_sequence<I...>) noexcept {
        (combine_part<Op>(from + I * step, part_[I]), ...);
    }
    template <class Op>
    [[gnu::always_inline]] static void combine_part(const std::byte* from, wide& part) noexcept {
        wide more;
        Moves::load(from, more);
        Op::into(part, more);
    }
    template <class Op, std::size_t... I>
    [[gnu::always_inline]] void finish_parts(number ranks, std::index_sequence<I...>) noexcept {
        (Op::finish_into(part_[I], ranks), ...);
    }
    template <line_stores Stores, std::size_t... I>
    [[gnu::always_inline]] void store_parts(std::byte* to, std::index_sequence<I...>) const noexcept {
        (store_part<Stores>(part_[I], to + I * step), ...);
    }
    template <std::size_t... I>
    [[gnu::always_inline]] void show_parts(wide (&seen)[vectors], std::index_sequence<I...>) const noexcept {
        ((seen[I] += part_[I] * number{0}), ...);
    }
    template <line_stores Stores>
    [[gnu::always_inline]] static void store_part(const wide& part, std::byte* to) noexcept {
        narrow n;
        Moves::store(part, n);
        // there is no store of 8 bytes past the caches
        if constexpr (Stores == line_stores::cached || step < 16)
            *reinterpret_cast<memory*>(to) = __builtin_bit_cast(memory, n);
        else
            store_past_caches<step>(n, to);
    }

    wide part_[vectors];
};

template <class T, class Op, std::size_t Bytes>
struct line_type {
    using type = cache_line<plain_moves<line_number_t<T, Op>, Bytes>>;
};
template <class T, class Op, std::size_t Bytes>
requires is_half<T>
struct line_type<T, Op, Bytes> {
    using type = cache_line<half_moves<T, Bytes>>;
};
template <class T, class Op, std::size_t Bytes>
requires is_fp8<T>
struct line_type<T, Op, Bytes> {
    using type = cache_line<small_float_moves<T, Bytes>>;
};
template <class T, class Op>
requires averages_integers<T, Op>
struct line_type<T, Op, 32> {
    using type = cache_line<integer_moves<T>>;
};
template <class T, class Op, std::size_t Bytes>
using line_of = typename line_type<T, Op, Bytes>::type;

/// A look sees each result while it is in registers. This look checks nothing.
struct no_look {
    template <class Line>
    [[gnu::always_inline]] void at(const Line&) noexcept {}
};
template <class Line>
class look_for_infinities {
public:
    [[gnu::always_inline]] void at(const Line& x) noexcept { x.show(seen_); }
    [[nodiscard, gnu::always_inline]] bool all_finite() const noexcept {
        bool all = true;
        for (const auto& v : seen_)
            for (std::size_t k = 0; k < sizeof v / sizeof v[0]; ++k) all = all && v[k] == 0;
        return all;
    }

private:
    typename Line::wide seen_[Line::vectors]{};
};

/// The number of lines that take a quarter of the registers, or half of them.
template <class Line>
inline constexpr std::uint32_t lines_at_once = 8 / Line::vectors;

/// The addresses of the lines: of two ranks, kept in registers, or of any number of ranks.
struct ends_of_two {
    static constexpr bool is_two = true;
    const std::byte *in0, *in1;
    std::byte *out0, *out1;
    [[gnu::always_inline]] explicit ends_of_two(const line_ends& e) noexcept
        : in0(static_cast<const std::byte*>(e.signals[0].in) + e.in),
          in1(static_cast<const std::byte*>(e.signals[1].in) + e.in),
          out0(static_cast<std::byte*>(e.signals[0].out) + e.out),
          out1(static_cast<std::byte*>(e.signals[1].out) + e.out) {}
    [[gnu::always_inline]] static constexpr std::uint32_t ranks() noexcept { return 2; }
    [[gnu::always_inline]] static constexpr std::uint32_t outputs() noexcept { return 2; }
    [[gnu::always_inline]] const std::byte* in(std::uint32_t r) const noexcept { return r == 0 ? in0 : in1; }
    [[gnu::always_inline]] std::byte* out(std::uint32_t r) const noexcept { return r == 0 ? out0 : out1; }
};
struct ends_of_all {
    static constexpr bool is_two = false;
    line_ends e;
    [[gnu::always_inline]] explicit ends_of_all(const line_ends& ends) noexcept : e(ends) {}
    [[gnu::always_inline]] std::uint32_t ranks() const noexcept { return e.ranks; }
    [[gnu::always_inline]] std::uint32_t outputs() const noexcept { return e.outputs(); }
    [[gnu::always_inline]] const std::byte* in(std::uint32_t r) const noexcept {
        return static_cast<const std::byte*>(e.signals[r].in) + e.in;
    }
    [[gnu::always_inline]] std::byte* out(std::uint32_t r) const noexcept {
        return static_cast<std::byte*>(e.output(r)) + e.out;
    }
};

/// Combines as many lines as there are indices I, from `at` bytes past the first line.
template <class Line, class Op, line_stores Stores, class Ends, class Look, std::size_t... I>
[[gnu::always_inline]] inline void combine_at(std::size_t at, const Ends& ends, Look& look,
                                              std::index_sequence<I...>) noexcept {
    Line x[sizeof...(I)];
    (x[I].load(ends.in(0) + at + I * cache_line_bytes), ...);
    if constexpr (Ends::is_two) {
        (x[I].template combine<Op>(ends.in(1) + at + I * cache_line_bytes), ...);
    } else {
        for (std::uint32_t r = 1; r < ends.ranks(); ++r)
            (x[I].template combine<Op>(ends.in(r) + at + I * cache_line_bytes), ...);
    }
    (x[I].template finish<Op>(ends.ranks()), ...);
    (look.at(x[I]), ...);
    if constexpr (Ends::is_two) {
        (x[I].template store<Stores>(ends.out(0) + at + I * cache_line_bytes), ...);
        (x[I].template store<Stores>(ends.out(1) + at + I * cache_line_bytes), ...);
    } else {
        for (std::uint32_t r = 0; r < ends.outputs(); ++r)
            (x[I].template store<Stores>(ends.out(r) + at + I * cache_line_bytes), ...);
    }
}
template <class Line, class Op, line_stores Stores, std::uint32_t N, class Ends, class Look>
[[gnu::always_inline]] inline void combine_at(std::size_t at, const Ends& ends, Look& look) noexcept {
    combine_at<Line, Op, Stores>(at, ends, look, std::make_index_sequence<N>{});
}

/// Combines from one place on, or alternately from both halves.
template <class Line, class Op, class Ends>
[[gnu::always_inline]] inline void combine_past_caches(const Ends& ends, std::size_t lines, bool by_halves) noexcept {
    constexpr auto stores = line_stores::past_caches;
    no_look none;
    const std::size_t half = by_halves ? lines / 2 * cache_line_bytes : 0;
    for (std::size_t at = 0; at < half; at += cache_line_bytes) {
        combine_at<Line, Op, stores, 1>(at, ends, none);
        combine_at<Line, Op, stores, 1>(half + at, ends, none);
    }
    for (std::size_t at = 2 * half; at < lines * cache_line_bytes; at += cache_line_bytes)
        combine_at<Line, Op, stores, 1>(at, ends, none);
}

/// Prefetches the lines from `from` to `to`, within the first `end` bytes, because another rank
/// writes past them.
template <class Ends>
[[gnu::always_inline]] inline void prefetch(const Ends& ends, std::size_t from, std::size_t to,
                                            std::size_t end) noexcept {
    for (std::size_t at = from; at < to && at < end; at += cache_line_bytes) {
        if constexpr (Ends::is_two) {
            __builtin_prefetch(ends.in0 + at);
            __builtin_prefetch(ends.in1 + at);
            __builtin_prefetch(ends.out0 + at, 1);
            __builtin_prefetch(ends.out1 + at, 1);
        } else {
            for (std::uint32_t r = 0; r < ends.ranks(); ++r) __builtin_prefetch(ends.in(r) + at);
            for (std::uint32_t r = 0; r < ends.outputs(); ++r) __builtin_prefetch(ends.out(r) + at, 1);
        }
    }
}

template <class Line, class Op, class Ends, class Look>
[[gnu::always_inline]] inline void combine_cached(const Ends& ends, std::size_t lines, std::size_t ahead,
                                                  Look& look) noexcept {
    constexpr std::size_t step = lines_at_once<Line> * cache_line_bytes;
    const std::size_t end = lines * cache_line_bytes;
    prefetch(ends, 0, ahead * cache_line_bytes, end);
    std::size_t at = 0;
    for (; at + step <= end; at += step) {
        if (ahead != 0) prefetch(ends, at + ahead * cache_line_bytes, at + ahead * cache_line_bytes + step, end);
        combine_at<Line, Op, line_stores::cached, lines_at_once<Line>>(at, ends, look);
    }
    for (; at < end; at += cache_line_bytes) combine_at<Line, Op, line_stores::cached, 1>(at, ends, look);
}

template <class Line, class Op, class Ends>
[[gnu::always_inline]] inline void combine_in_lines(const Ends& where, const line_ends& ends, std::size_t lines,
                                                    line_stores stores) noexcept {
    no_look none;
    if (stores == line_stores::cached)
        combine_cached<Line, Op>(where, lines, ends.ahead, none);
    else
        combine_past_caches<Line, Op>(where, lines, ends.places > 1);
}
template <class Line, class Op>
[[gnu::always_inline]] inline void combine_in_lines(const line_ends& ends, std::size_t lines,
                                                    line_stores stores) noexcept {
    if (ends.ranks == 2 && ends.only == nullptr)
        combine_in_lines<Line, Op>(ends_of_two(ends), ends, lines, stores);
    else
        combine_in_lines<Line, Op>(ends_of_all(ends), ends, lines, stores);
}
template <class Line, class Op>
[[nodiscard, gnu::always_inline]] inline bool combine_and_look(const line_ends& ends, std::size_t lines) noexcept {
    look_for_infinities<Line> look;
    if (ends.ranks == 2 && ends.only == nullptr)
        combine_cached<Line, Op>(ends_of_two(ends), lines, ends.ahead, look);
    else
        combine_cached<Line, Op>(ends_of_all(ends), lines, ends.ahead, look);
    return look.all_finite();
}

// Instantiated for lines and not for elements, because signed and unsigned elements share most
// lines.
template <class Line, class Op>
[[gnu::target("avx512f,prfchw"), gnu::noinline]] void combine_by_avx512(const line_ends& ends, std::size_t lines,
                                                                        line_stores stores) noexcept {
    combine_in_lines<Line, Op>(ends, lines, stores);
}
template <class Line, class Op>
[[gnu::target("avx2,f16c,prfchw"), gnu::noinline]] void combine_by_avx2(const line_ends& ends, std::size_t lines,
                                                                        line_stores stores) noexcept {
    combine_in_lines<Line, Op>(ends, lines, stores);
}
template <class Line, class Op>
[[nodiscard, gnu::target("avx512f,prfchw"), gnu::noinline]] bool combine_and_look_by_avx512(
    const line_ends& ends, std::size_t lines) noexcept {
    return combine_and_look<Line, Op>(ends, lines);
}
template <class Line, class Op>
[[nodiscard, gnu::target("avx2,f16c,prfchw"), gnu::noinline]] bool combine_and_look_by_avx2(
    const line_ends& ends, std::size_t lines) noexcept {
    return combine_and_look<Line, Op>(ends, lines);
}
/// Combines `count` lines of T, rank by rank from 0 on. `by` must be at least least_for_lines.
template <class T, class Op>
void combine_lines(vector_width by, const Op&, const line_ends& ends, std::size_t lines, line_stores stores) noexcept {
    if constexpr (most_for_lines<T, Op> == vector_width::avx512)
        if (by == vector_width::avx512) return combine_by_avx512<line_of<T, Op, 64>, Op>(ends, lines, stores);
    combine_by_avx2<line_of<T, Op, 32>, Op>(ends, lines, stores);
}
/// Combines lines through the caches. Returns whether no result is infinite or NaN.
template <std::floating_point T, class Op>
[[nodiscard]] bool combine_finite_lines(vector_width by, const Op&, const line_ends& ends, std::size_t lines) noexcept {
    if constexpr (most_for_lines<T, Op> == vector_width::avx512)
        if (by == vector_width::avx512) return combine_and_look_by_avx512<line_of<T, Op, 64>, Op>(ends, lines);
    return combine_and_look_by_avx2<line_of<T, Op, 32>, Op>(ends, lines);
}

#else

template <class T, class Op>
inline constexpr bool combines_lines = false;

#endif

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
