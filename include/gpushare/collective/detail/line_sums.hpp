// SPDX-License-Identifier: Apache-2.0
// Whole cache lines of all ranks combined with the widest vectors that the processor has, whatever flags the file is compiled
// with: what is left of an all-reduce of floats, doubles, integers and halves once the ranks have met.
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

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/detail/bundle.hpp>
#include <gpushare/collective/detail/lines.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Where lines are: `in` and `out` bytes behind what each rank told. `ahead` and `places` as in a all_reduce_plan. `only`: where
/// results go if not to all ranks, `out` bytes behind it.
struct line_ends {
    const flag_line* told;
    std::uint32_t ranks;
    std::size_t in, out;
    std::size_t ahead = 0;
    std::size_t places = 1;
    void* only = nullptr;

    [[nodiscard, gnu::always_inline]] std::uint32_t outputs() const noexcept { return only != nullptr ? 1 : ranks; }
    [[nodiscard, gnu::always_inline]] void* output(std::uint32_t r) const noexcept {
        return only != nullptr ? only : told[r].out;
    }
};

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)

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
        for (std::uint32_t r = 0; r < e.outputs(); ++r) f(static_cast<std::byte*>(e.output(r)) + e.out);
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
    if (ends.ranks == 2 && ends.only == nullptr)
        run(ends_of_two(ends));
    else
        run(ends_of_all(ends));
}

// Of lines and not of elements: signed and unsigned ones mostly share them.
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
/// Of 8-bit floats, whose conversions take longer than memory does. In plain loops: g++ 12 makes narrow vectors of wide ones where it
/// inlines before it flattens.
template <class T, class Op>
[[gnu::target("avx2,f16c"), gnu::noinline, gnu::flatten]] void combine_small_floats(const line_ends& ends,
                                                                                    std::size_t lines,
                                                                                    line_stores stores) noexcept {
    using values = floats<16, 8>;
    const auto in = [&](std::uint32_t r) { return static_cast<const T*>(ends.told[r].in) + ends.in; };
    for (std::size_t i = 0; i < lines * cache_line; i += values::lanes) {
        values x = load_floats<values>(in(0) + i);
        for (std::uint32_t r = 1; r < ends.ranks; ++r) x = values::combined(Op{}, x, load_floats<values>(in(r) + i));
        if constexpr (requires(const Op& op, float a) { op.finish(a, a); })
            x = x.finished(Op{}, static_cast<float>(ends.ranks));
        for (std::uint32_t r = 0; r < ends.outputs(); ++r) {
            T* const out = static_cast<T*>(ends.output(r)) + ends.out + i;
            if (stores == line_stores::past_caches)
                stream_floats(out, x);
            else
                store_floats(out, x);
        }
    }
}

/// Combines so many lines of T, rank by rank from 0 on. `by`: at least least_for_lines.
template <class T, class Op>
void combine_lines(vector_width by, const Op&, const line_ends& ends, std::size_t lines, line_stores stores) noexcept {
    if constexpr (is_fp8<T>) {
        combine_small_floats<T, Op>(ends, lines, stores);
    } else {
        if constexpr (most_for_lines<T, Op> == vector_width::avx512)
            if (by == vector_width::avx512) return combine_by_avx512<line_of<T, Op, 64>, Op>(ends, lines, stores);
        combine_by_avx2<line_of<T, Op, 32>, Op>(ends, lines, stores);
    }
}

#endif

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
