// SPDX-License-Identifier: Apache-2.0
// Whole cache lines of all ranks combined with the widest vectors that the processor has, whatever flags the file is compiled
// with: what is left of an all-reduce of floats, doubles, larger integers and halves once the ranks have met.
//
//   line_ends ends{.told = &t.told_by(0), .ranks = 2, .in = first * sizeof(float), .out = first * sizeof(float)};
//   combine_lines<float>(widest_vectors(), sum{}, ends, lines, line_stores::cached);
//
// A vector of a line's 64 bytes wins in two ways over four of 16: second-level caches give and take twice as much, and a
// store past the caches holds a buffer for one instruction, not for four.
//
// Several lines of one array, then as many of the next: large arrays mostly begin at the same place of a page, and a line of
// each in turn makes some processors (AMD's, whose first-level caches guess a line's place from a few bits of its address) take
// two to three times as long.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/bundle.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

inline constexpr std::size_t cache_line = 64;

/// How results are stored. Past the caches is for what nobody reads soon, and needs lines that all begin at multiples of 64;
/// finish_streaming() before the next release.
enum class line_stores : std::uint8_t { cached, past_caches };

/// Where lines are: `in` and `out` bytes behind what each rank told. `ahead` and `places` as in a collective_plan. `only`: where
/// results go if not to all ranks, `out` bytes behind it; cached then.
struct line_ends {
    const flag_line* told;
    std::uint32_t ranks;
    std::size_t in, out;
    std::size_t ahead = 0;
    std::size_t places = 1;
    void* only = nullptr;
};

enum class vector_width : std::uint8_t { narrow, avx2, avx512 };

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)

/// What this processor has. A few instructions.
[[nodiscard]] inline vector_width widest_vectors() noexcept {
    if (__builtin_cpu_supports("avx512f")) return vector_width::avx512;
    return __builtin_cpu_supports("avx2") ? vector_width::avx2 : vector_width::narrow;
}

/// Whether Op can work on vectors where they lie: one that is passed or returned by value would need the whole file compiled
/// for its width.
template <class A, class Op>
concept works_in_place = requires(A& a, const A& b) {
    Op::into(a, b);
}
&&(!requires(const Op& op, A a) { op.finish(a, a); } ||
   (std::floating_point<A> && requires(A & a) { Op::finish_into(a, a); }));

/// What is computed in float, and needs vectors of 32 bytes at least: to put words into half the space, those of 16 do by lines
/// no better than without.
template <class T>
inline constexpr bool is_half = std::same_as<T, bfloat16> || std::same_as<T, float16>;

/// Elements that are computed in their own type, or in one with the same bits; and halves.
template <class T, class Op>
inline constexpr bool combines_lines = works_in_place<accumulator_t<T, Op>, Op> &&
                                       (std::same_as<T, accumulator_t<T, Op>> || is_half<T> ||
                                        (std::integral<T> && sizeof(T) == sizeof(accumulator_t<T, Op>)));

/// The least that combining lines of T takes.
template <class T>
inline constexpr vector_width least_for_lines = is_half<T> ? vector_width::avx2 : vector_width::narrow;

/// Bytes as they lie in memory, at any address, whatever they are.
template <std::size_t Bytes>
struct in_memory;
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

/// Where the lines of two ranks are, which is known in registers; or of any number of them.
struct ends_of_two {
    const std::byte *in0, *in1;
    std::byte *out0, *out1;
    [[gnu::always_inline]] explicit ends_of_two(const line_ends& e) noexcept
        : in0(static_cast<const std::byte*>(e.told[0].in) + e.in),
          in1(static_cast<const std::byte*>(e.told[1].in) + e.in),
          out0(static_cast<std::byte*>(e.told[0].out) + e.out),
          out1(static_cast<std::byte*>(e.told[1].out) + e.out) {}
    [[gnu::always_inline]] static constexpr std::uint32_t ranks() noexcept { return 2; }
    [[gnu::always_inline]] const std::byte* first() const noexcept { return in0; }
    template <class F>
    [[gnu::always_inline]] void each_other(const F& f) const noexcept {
        f(in1);
    }
    template <class F>
    [[gnu::always_inline]] void each_output(const F& f) const noexcept {
        f(out0);
        f(out1);
    }
};
struct ends_of_all {
    line_ends e;
    [[gnu::always_inline]] explicit ends_of_all(const line_ends& ends) noexcept : e(ends) {}
    [[gnu::always_inline]] std::uint32_t ranks() const noexcept { return e.ranks; }
    [[gnu::always_inline]] const std::byte* of(std::uint32_t r) const noexcept {
        return static_cast<const std::byte*>(e.told[r].in) + e.in;
    }
    [[gnu::always_inline]] const std::byte* first() const noexcept { return of(0); }
    template <class F>
    [[gnu::always_inline]] void each_other(const F& f) const noexcept {
        for (std::uint32_t r = 1; r < e.ranks; ++r) f(of(r));
    }
    template <class F>
    [[gnu::always_inline]] void each_output(const F& f) const noexcept {
        for (std::uint32_t r = 0; r < e.ranks; ++r) f(static_cast<std::byte*>(e.told[r].out) + e.out);
    }
};

struct ends_to_one : ends_of_all {
    using ends_of_all::ends_of_all;
    template <class F>
    [[gnu::always_inline]] void each_output(const F& f) const noexcept {
        f(static_cast<std::byte*>(e.only) + e.out);
    }
};

/// N lines, `at` bytes behind the first.
template <class Line, class Op, line_stores Stores, std::uint32_t N, class Ends>
[[gnu::always_inline]] inline void combine_at(std::size_t at, const Ends& ends) noexcept {
    Line x[N];
    const auto each = [&](const auto& f) __attribute__((always_inline)) {
        unrolled<N>([&](std::uint32_t i) __attribute__((always_inline)) { f(x[i], at + i * cache_line); });
    };
    each([&](Line & y, std::size_t i) __attribute__((always_inline)) { y.load(ends.first() + i); });
    ends.each_other([&](const std::byte* in) __attribute__((always_inline)) {
        each([&](Line & y, std::size_t i) __attribute__((always_inline)) { y.template combine<Op>(in + i); });
    });
    each([&](Line & y, std::size_t) __attribute__((always_inline)) { y.template finish<Op>(ends.ranks()); });
    ends.each_output([&](std::byte * out) __attribute__((always_inline)) {
        each([&](const Line& y, std::size_t i) __attribute__((always_inline)) { y.template store<Stores>(out + i); });
    });
}

/// From one place, or from both halves by turns.
template <class Line, class Op, class Ends>
[[gnu::always_inline]] inline void combine_past_caches(const Ends& ends, std::size_t lines, bool by_halves) noexcept {
    const auto one = [&](std::size_t at) __attribute__((always_inline)) {
        combine_at<Line, Op, line_stores::past_caches, 1>(at, ends);
    };
    const std::size_t half = by_halves ? lines / 2 * cache_line : 0;
    for (std::size_t at = 0; at < half; at += cache_line) {
        one(at);
        one(half + at);
    }
    for (std::size_t at = 2 * half; at < lines * cache_line; at += cache_line) one(at);
}

/// Lines are asked for within the part only, because another rank writes behind it.
template <class Line, class Op, class Ends>
[[gnu::always_inline]] inline void combine_cached(const Ends& ends, std::size_t lines, std::size_t ahead) noexcept {
    constexpr std::size_t step = lines_at_once<Line> * cache_line;
    const std::size_t end = lines * cache_line;
    const auto fetch = [&](std::size_t from, std::size_t to) __attribute__((always_inline)) {
        for (std::size_t at = from; at < to && at < end; at += cache_line) {
            __builtin_prefetch(ends.first() + at);
            ends.each_other([&](const std::byte* in) __attribute__((always_inline)) { __builtin_prefetch(in + at); });
            ends.each_output([&](std::byte * out) __attribute__((always_inline)) { __builtin_prefetch(out + at, 1); });
        }
    };
    fetch(0, ahead * cache_line);
    std::size_t at = 0;
    for (; at + step <= end; at += step) {
        if (ahead != 0) fetch(at + ahead * cache_line, at + ahead * cache_line + step);
        combine_at<Line, Op, line_stores::cached, lines_at_once<Line>>(at, ends);
    }
    for (; at < end; at += cache_line) combine_at<Line, Op, line_stores::cached, 1>(at, ends);
}

template <class Line, class Op>
[[gnu::always_inline]] inline void combine_in_lines(const line_ends& ends, std::size_t lines,
                                                    line_stores stores) noexcept {
    const auto run = [&](const auto& where) __attribute__((always_inline)) {
        if (stores == line_stores::cached)
            combine_cached<Line, Op>(where, lines, ends.ahead);
        else
            combine_past_caches<Line, Op>(where, lines, ends.places > 1);
    };
    if (ends.only != nullptr)
        combine_cached<Line, Op>(ends_to_one(ends), lines, ends.ahead);
    else if (ends.ranks == 2)
        run(ends_of_two(ends));
    else
        run(ends_of_all(ends));
}

template <class T, class A, class Op>
[[gnu::target("avx512f,prfchw"), gnu::noinline]] void combine_by_avx512(const line_ends& ends, std::size_t lines,
                                                                        line_stores stores) noexcept {
    combine_in_lines<line_of<T, A, 64>, Op>(ends, lines, stores);
}
template <class T, class A, class Op>
[[gnu::target("avx2,f16c,prfchw"), gnu::noinline]] void combine_by_avx2(const line_ends& ends, std::size_t lines,
                                                                        line_stores stores) noexcept {
    combine_in_lines<line_of<T, A, 32>, Op>(ends, lines, stores);
}

/// Combines so many lines of T, rank by rank from 0 on. `by`: at least least_for_lines<T>.
template <class T, class Op>
void combine_lines(vector_width by, const Op&, const line_ends& ends, std::size_t lines, line_stores stores) noexcept {
    using A = accumulator_t<T, Op>;
    switch (by) {
        case vector_width::avx512: return combine_by_avx512<T, A, Op>(ends, lines, stores);
        case vector_width::avx2: return combine_by_avx2<T, A, Op>(ends, lines, stores);
        case vector_width::narrow:
            if constexpr (least_for_lines<T> == vector_width::narrow)
                return combine_in_lines<line<A, 16>, Op>(ends, lines, stores);
    }
}

#else

[[nodiscard]] GPUSHARE_HD inline vector_width widest_vectors() noexcept { return vector_width::narrow; }
template <class T, class Op>
inline constexpr bool combines_lines = false;
template <class T>
inline constexpr vector_width least_for_lines = vector_width::narrow;

#endif

}  // namespace gpushare::inline GPUSHARE_ABI::detail
