// SPDX-License-Identifier: Apache-2.0
// Whole cache lines of all ranks combined with the widest vectors that the processor has, whatever flags the file is compiled
// with: what is left of an all-reduce of floats, doubles and larger integers once the ranks have met.
//
//   line_ends ends{.told = &t.told_by(0), .ranks = 2, .in = first * sizeof(float), .out = first * sizeof(float)};
//   combine_lines<float>(widest_vectors(), sum{}, ends, lines, line_stores::cached);
//
// A vector of a line's 64 bytes wins in two ways over four of 16: second-level caches give and take twice as much, and a
// store past the caches holds a buffer for one instruction, not for four.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/bundle.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare::inline GPUSHARE_ABI::detail {

inline constexpr std::size_t cache_line = 64;

/// How results are stored. Past the caches is for what nobody reads soon, and needs lines that all begin at multiples of 64;
/// finish_streaming() before the next release.
enum class line_stores : std::uint8_t { cached, past_caches };

/// Where lines are: `in` and `out` bytes behind what each rank told.
struct line_ends {
    const flag_line* told;
    std::uint32_t ranks;
    std::size_t in, out;
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

/// Elements that are computed in their own type, or in one with the same bits.
template <class T, class Op>
inline constexpr bool combines_lines = works_in_place<accumulator_t<T, Op>, Op> &&
                                       (std::same_as<T, accumulator_t<T, Op>> ||
                                        (std::integral<T> && sizeof(T) == sizeof(accumulator_t<T, Op>)));

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
                vector& at = reinterpret_cast<vector*>(to)[i];
                // Not by intrinsics: their header takes longer to compile than all of this library's.
#if defined(__clang__)
                __builtin_nontemporal_store(part[i], &at);
#else
                if constexpr (Bytes == 16)
                    asm("movntdq %1, %0" : "=m"(at) : "x"(part[i]));
                else
                    asm("vmovntdq %1, %0" : "=m"(at) : "v"(part[i]));
#endif
            }
        });
    }

    vector part[vectors];
};

/// How many lines ahead of its work a rank asks for those that it reads and writes. Without, the stores wait for their lines
/// one after the other.
inline constexpr std::size_t lines_ahead = 16;

/// Two ranks: all that is known is in registers. Lines are asked for within the part only, because another rank writes
/// behind it.
template <class Line, class Op, line_stores Stores>
[[gnu::always_inline]] inline void combine_two(const std::byte* a, const std::byte* b, std::byte* c, std::byte* d,
                                               std::size_t lines) noexcept {
    constexpr bool cached = Stores == line_stores::cached;
    constexpr std::size_t ahead = lines_ahead * cache_line;
    const std::size_t end = lines * cache_line;
    const auto fetch = [&](std::size_t at) __attribute__((always_inline)) {
        __builtin_prefetch(a + at);
        __builtin_prefetch(b + at);
        __builtin_prefetch(c + at, 1);
        __builtin_prefetch(d + at, 1);
    };
    const auto combine = [&](std::size_t at) __attribute__((always_inline)) {
        Line x;
        x.load(a + at);
        x.template combine<Op>(b + at);
        x.template finish<Op>(2);
        x.template store<Stores>(c + at);
        x.template store<Stores>(d + at);
    };
    if constexpr (cached) {
        for (std::size_t at = 0; at < ahead && at < end; at += cache_line) fetch(at);
        for (std::size_t at = 0; at < end; at += cache_line) {
            if (at + ahead < end) fetch(at + ahead);
            combine(at);
        }
    } else {
        // Two places at once keep more of memory busy than one.
        const std::size_t half = lines / 2 * cache_line;
        for (std::size_t at = 0; at < half; at += cache_line) {
            combine(at);
            combine(half + at);
        }
        if (lines % 2 != 0) combine(2 * half);
    }
}

template <class Line, class Op, line_stores Stores>
[[gnu::always_inline]] inline void combine_all(const line_ends& ends, std::size_t lines) noexcept {
    constexpr bool cached = Stores == line_stores::cached;
    constexpr std::size_t ahead = lines_ahead * cache_line;
    const std::size_t end = lines * cache_line;
    const std::uint32_t ranks = ends.ranks;
    const auto in = [&](std::uint32_t r) __attribute__((always_inline)) {
        return static_cast<const std::byte*>(ends.told[r].in) + ends.in;
    };
    const auto out = [&](std::uint32_t r) __attribute__((always_inline)) {
        return static_cast<std::byte*>(ends.told[r].out) + ends.out;
    };
    if (ranks == 2) return combine_two<Line, Op, Stores>(in(0), in(1), out(0), out(1), lines);
    for (std::size_t at = 0; at < end; at += cache_line) {
        if (cached && at + ahead < end) {
            for (std::uint32_t r = 0; r < ranks; ++r) __builtin_prefetch(in(r) + at + ahead);
            for (std::uint32_t r = 0; r < ranks; ++r) __builtin_prefetch(out(r) + at + ahead, 1);
        }
        Line x;
        x.load(in(0) + at);
        for (std::uint32_t r = 1; r < ranks; ++r) x.template combine<Op>(in(r) + at);
        x.template finish<Op>(ranks);
        for (std::uint32_t r = 0; r < ranks; ++r) x.template store<Stores>(out(r) + at);
    }
}

template <class Line, class Op>
[[gnu::always_inline]] inline void combine_in_lines(const line_ends& ends, std::size_t lines,
                                                    line_stores stores) noexcept {
    if (stores == line_stores::cached)
        combine_all<Line, Op, line_stores::cached>(ends, lines);
    else
        combine_all<Line, Op, line_stores::past_caches>(ends, lines);
}

template <class A, class Op>
[[gnu::target("avx512f,prfchw"), gnu::noinline]] void combine_by_avx512(const line_ends& ends, std::size_t lines,
                                                                        line_stores stores) noexcept {
    combine_in_lines<line<A, 64>, Op>(ends, lines, stores);
}
template <class A, class Op>
[[gnu::target("avx2,prfchw"), gnu::noinline]] void combine_by_avx2(const line_ends& ends, std::size_t lines,
                                                                   line_stores stores) noexcept {
    combine_in_lines<line<A, 32>, Op>(ends, lines, stores);
}

/// Combines so many lines of T, rank by rank from 0 on.
template <class T, class Op>
void combine_lines(vector_width by, const Op&, const line_ends& ends, std::size_t lines, line_stores stores) noexcept {
    using A = accumulator_t<T, Op>;
    switch (by) {
        case vector_width::avx512: return combine_by_avx512<A, Op>(ends, lines, stores);
        case vector_width::avx2: return combine_by_avx2<A, Op>(ends, lines, stores);
        case vector_width::narrow: return combine_in_lines<line<A, 16>, Op>(ends, lines, stores);
    }
}

#else

[[nodiscard]] GPUSHARE_HD inline vector_width widest_vectors() noexcept { return vector_width::narrow; }
template <class T, class Op>
inline constexpr bool combines_lines = false;

#endif

}  // namespace gpushare::inline GPUSHARE_ABI::detail
