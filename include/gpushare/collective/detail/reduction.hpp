// SPDX-License-Identifier: Apache-2.0
// The inner loops of the reducing collectives. They combine each element of all ranks, in the order
// of ranks, and hand the result to a sink that stores it. The header also has copies, and
// call_signature(), by which ranks notice that their calls don't match.
//
//   reduce_elements<T>(ctx, op, ranks, {0, n}, [&](std::uint32_t r) { return input_of(r); }, single_output<T>{out});
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/detail/simd/cache_line.hpp>
#include <gpushare/collective/detail/values.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A hash of everything on which ranks must agree, computed mostly at compile time. All ranks that
/// make the same call get the same hash.
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t call_signature(collective_kind kind, std::uint32_t type,
                                                                 std::uint32_t op, std::size_t count,
                                                                 std::uint32_t blocks,
                                                                 std::uint32_t root = 0) noexcept {
    // from the golden ratio: spreads differences over all bits
    constexpr std::uint64_t odd = 0x9e37'79b9'7f4a'7c15U;
    // spreads roots, too, so that another root doesn't make up for another count
    constexpr std::uint64_t of_root = 0xc2b2'ae3d'27d4'eb4fU;
    const std::uint64_t call = static_cast<std::uint64_t>(kind) << 40 | std::uint64_t{type} << 16 | op;
    const std::uint64_t mix = (count ^ call * odd ^ std::uint64_t{blocks} << 48 ^ root * of_root) * odd;
    return static_cast<std::uint32_t>(mix >> 32);
}

/// Bytes between two looks at whether the group was aborted.
inline constexpr std::size_t look_every = std::size_t{1} << 20;

/// Blocks are cut at multiples of this many elements, so that no two blocks write to one cache line
/// and vectors stay whole.
inline constexpr std::size_t vector_grain = 64;

/// A shard of an array whose element 0 is `lead` elements past a possible cut. If ranks write to
/// each other's buffers, cuts must be at the beginning of cache lines, and few buffers begin there.
[[nodiscard]] GPUSHARE_HD constexpr element_range shard_of_shifted(std::size_t count, std::size_t lead,
                                                                   std::uint32_t index, std::uint32_t shards,
                                                                   std::size_t grain) noexcept {
    const element_range r = shard_of(count + lead, index, shards, grain);
    return {r.begin > lead ? r.begin - lead : 0, r.end > lead ? r.end - lead : 0};
}

/// An array of each of R ranks. R is known at compile time, so loops over the arrays are unrolled
/// and a device's thread has the addresses in registers.
template <class T, std::uint32_t R>
struct held_arrays {
    T* of[R];

    /// Whether the 16 bytes from element i on can be moved at once, in each array.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool aligned(std::size_t i) const noexcept {
        std::uintptr_t all = 0;
        for (std::uint32_t r = 0; r < R; ++r) all |= reinterpret_cast<std::uintptr_t>(of[r] + i);
        return all % 16 == 0;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void put(std::size_t i, const packed<T>& x) const noexcept {
        for (std::uint32_t r = 0; r < R; ++r) store_aligned(of[r] + i, x);
    }
};

/// The destination of one rank's results.
template <class T>
struct single_output {
    T* out;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <std::uint32_t>
    [[nodiscard]] GPUSHARE_HD held_arrays<T, 1> held() const noexcept {
        return {{out}};
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    GPUSHARE_HD void put(std::size_t i, const Values& v) const noexcept {
        v.store(out + i);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void put_one(std::size_t i, const T& x) const noexcept { out[i] = x; }
};

/// The threads of the context copy n elements; a single thread calls memcpy. A device's thread has
/// `AtOnce` loads in flight. Loads from another device need several, since that memory is a
/// microsecond away. Each load takes eight registers.
GPUSHARE_EXEC_CHECK_DISABLE
template <std::uint32_t AtOnce = 1, class Context, class T>
GPUSHARE_HD void copy_elements(Context& ctx, T* to, const T* from, std::size_t n) noexcept {
    if (to == from || n == 0) return;
    if constexpr (is_one_thread<Context>) {
        std::memcpy(static_cast<void*>(to), from, n * sizeof(T));
    } else {
        constexpr std::size_t width = packed<T>::width;
        const std::size_t whole = n / width * width, step = ctx.num_threads() * width;
        std::size_t i = ctx.thread_rank() * width;
        if (AtOnce > 1 && is_packed(to) && is_packed(from))
            for (; i + (AtOnce - 1) * step < whole; i += AtOnce * step) {
                packed<T> some[AtOnce];
                for (std::uint32_t k = 0; k < AtOnce; ++k) some[k] = load_aligned(from + i + k * step);
                for (std::uint32_t k = 0; k < AtOnce; ++k) store_aligned(to + i + k * step, some[k]);
            }
        for (; i < whole; i += step) store_packed(to + i, load_packed(from + i));
        for (i = whole + ctx.thread_rank(); i < n; i += ctx.num_threads()) to[i] = from[i];
    }
}

/// Combines the elements of `range`, rank by rank from 0 on. `from(r)` is the address of rank r's
/// first element, and `sink` takes the results. `Ranks` is the number of ranks if the compiler
/// knows it, otherwise 0.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, std::uint32_t Ranks, class Context, class Op, class From, class Sink>
GPUSHARE_HD void reduce_known(Context& ctx, const Op& op, std::uint32_t ranks, element_range range, const From& from,
                              const Sink& sink) noexcept {
    using A = accumulator_t<T, Op>;
    using values = values_of<Context, T, Op>;
    constexpr std::size_t width = values::width;
    const std::uint32_t n = Ranks != 0 ? Ranks : ranks;
    const std::size_t whole = range.begin + range.size() / width * width;
    for (std::size_t i = range.begin + ctx.thread_rank() * width; i < whole; i += ctx.num_threads() * width) {
        values x = values::load(from(0) + i);
        for (std::uint32_t r = 1; r < n; ++r) x.combine(op, values::load(from(r) + i));
        x.finish(op, n);
        sink.put(i, x);
    }
    for (std::size_t i = whole + ctx.thread_rank(); i < range.end; i += ctx.num_threads()) {
        A x = widened<A>(from(0)[i]);
        for (std::uint32_t r = 1; r < n; ++r) x = op(x, widened<A>(from(r)[i]));
        if constexpr (requires { op.finish(x, x); }) x = op.finish(x, static_cast<A>(n));
        sink.put_one(i, narrowed<T>(x));
    }
}

/// Combines element i of the arrays, and the elements of P places in all, at distances of `step`.
/// All elements are loaded before any is combined.
GPUSHARE_EXEC_CHECK_DISABLE
template <class Values, std::uint32_t P, class T, std::uint32_t R, class Op, class To>
GPUSHARE_HD void combine_held(const Op& op, const held_arrays<const T, R>& in, std::size_t i, std::size_t step,
                              const To& to) noexcept {
    packed<T> had[P][R];
    for (std::uint32_t p = 0; p < P; ++p)
        for (std::uint32_t r = 0; r < R; ++r) had[p][r] = load_aligned(in.of[r] + i + p * step);
    for (std::uint32_t p = 0; p < P; ++p) {
        Values x = Values::of(had[p][0]);
        for (std::uint32_t r = 1; r < R; ++r) x.combine(op, Values::of(had[p][r]));
        x.finish(op, R);
        to.put(i + p * step, x.template as<T>());
    }
}

/// Like reduce_known, but for a device's block and R ranks whose arrays all begin at multiples of
/// 16. The addresses are in registers, and no load waits for another load. Returns the elements
/// that are left: less than 16 bytes of them, or all of them if an array isn't aligned.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, std::uint32_t R, class Context, class Op, class From, class To>
[[nodiscard]] GPUSHARE_HD element_range reduce_held(Context& ctx, const Op& op, element_range range, const From& from,
                                                    const To& to) noexcept {
    using values = values_of<Context, T, Op>;
    constexpr std::size_t width = values::width;
    held_arrays<const T, R> in{};
    for (std::uint32_t r = 0; r < R; ++r) in.of[r] = from(r);
    if (!in.aligned(range.begin) || !to.aligned(range.begin)) return range;
    const std::size_t step = ctx.num_threads() * width, whole = range.begin + range.size() / width * width;
    std::size_t i = range.begin + ctx.thread_rank() * width;
    // With two places instead of four, two ranks took a fifth longer when there were few blocks.
    // Small elements are widened, and there aren't enough registers for four places of them.
    constexpr std::uint32_t places = sizeof(T) < 4 ? 2 : 4;
    if constexpr (R < 4)  // with more ranks there are enough loads
        for (; i + (places - 1) * step < whole; i += places * step) combine_held<values, places>(op, in, i, step, to);
    for (; i < whole; i += step) combine_held<values, 1>(op, in, i, step, to);
    return {whole, range.end};
}

GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context, class Op, class From, class Sink>
GPUSHARE_HD void reduce_elements(Context& ctx, const Op& op, std::uint32_t ranks, element_range range, const From& from,
                                 const Sink& sink) noexcept {
    if constexpr (!is_one_thread<Context>) {
        if (ranks == 2)
            range = reduce_held<T, 2>(ctx, op, range, from, sink.template held<2>());
        else if (ranks == 4)
            range = reduce_held<T, 4>(ctx, op, range, from, sink.template held<4>());
        else if (ranks == 8)
            range = reduce_held<T, 8>(ctx, op, range, from, sink.template held<8>());
        reduce_known<T, 0>(ctx, op, ranks, range, from, sink);
    } else if (ranks == 2) {
        const T* const first = from(0);
        const T* const second = from(1);
        reduce_known<T, 2>(
            ctx, op, ranks, range, [=](std::uint32_t r) { return r == 0 ? first : second; }, sink);
    } else {
        reduce_known<T, 0>(ctx, op, ranks, range, from, sink);
    }
}

/// A sink that stores to every rank's output, by the pointers that `meet` brought.
template <class T, class Context, bool Streaming>
struct all_outputs {
    const session<Context>& t;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <std::uint32_t R>
    [[nodiscard]] GPUSHARE_HD held_arrays<T, R> held() const noexcept {
        held_arrays<T, R> all{};
        for (std::uint32_t r = 0; r < R; ++r) all.of[r] = static_cast<T*>(t.signal_from(r).out);
        return all;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    GPUSHARE_HD void put(std::size_t i, const Values& v) const noexcept {
        for (std::uint32_t r = 0; r < t.ranks(); ++r) {
            if constexpr (Streaming)
                v.stream(static_cast<T*>(t.signal_from(r).out) + i);
            else
                v.store(static_cast<T*>(t.signal_from(r).out) + i);
        }
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void put_one(std::size_t i, const T& x) const noexcept {
        for (std::uint32_t r = 0; r < t.ranks(); ++r) static_cast<T*>(t.signal_from(r).out)[i] = x;
    }
};

/// all_outputs for two ranks, in registers.
template <class T, bool Streaming>
struct two_outputs {
    T* first;
    T* second;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Values>
    GPUSHARE_HD void put(std::size_t i, const Values& v) const noexcept {
        if constexpr (Streaming) {
            v.stream(first + i);
            v.stream(second + i);
        } else {
            v.store(first + i);
            v.store(second + i);
        }
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void put_one(std::size_t i, const T& x) const noexcept { first[i] = second[i] = x; }
};

/// Combines `range` of all inputs into all outputs. If results go past the caches, the outputs
/// begin at multiples of 16.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context, class Op>
GPUSHARE_HD void reduce_from_told(session<Context>& t, const Op& op, element_range range, bool streaming) noexcept {
    const auto from = [&](std::uint32_t r) { return static_cast<const T*>(t.signal_from(r).in); };
    const auto to = [&](const auto& sink) { reduce_elements<T>(t.context(), op, t.ranks(), range, from, sink); };
    if constexpr (!is_one_thread<Context>) {
        to(all_outputs<T, Context, false>{t});  // devices have one way of storing results
    } else if (t.ranks() == 2) {
        T* const first = static_cast<T*>(t.signal_from(0).out);
        T* const second = static_cast<T*>(t.signal_from(1).out);
        if (streaming)
            to(two_outputs<T, true>{first, second});
        else
            to(two_outputs<T, false>{first, second});
    } else if (streaming) {
        to(all_outputs<T, Context, true>{t});
    } else {
        to(all_outputs<T, Context, false>{t});
    }
}

/// The part of `range` that is whole cache lines of an array that begins at `first`. The part is
/// empty if there is no whole line.
template <class T>
[[nodiscard]] element_range whole_lines(const T* first, element_range range) noexcept {
    const std::size_t misplaced = reinterpret_cast<std::uintptr_t>(first + range.begin) % cache_line_bytes;
    const std::size_t head = misplaced == 0 ? 0 : (cache_line_bytes - misplaced) / sizeof(T);
    if (range.size() < head) return {range.end, range.end};
    constexpr std::size_t of_line = cache_line_bytes / sizeof(T);
    const std::size_t begin = range.begin + head;
    return {begin, begin + (range.end - begin) / of_line * of_line};
}

template <class T, class Op>
[[nodiscard]] bool lines_pay(std::uint32_t ranks) noexcept {
    return widest_vectors() >= least_for_lines && ranks <= most_ranks_for_lines<T, Op>;
}

/// Combines `range` by whole lines of the first rank's output, as far as there are whole lines.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context, class Op>
GPUSHARE_HD void reduce_by_lines(session<Context>& t, const Op& op, element_range range,
                                 const all_reduce_plan& plan) noexcept {
    const bool streaming = plan.streaming;
    if constexpr (is_one_thread<Context> && combines_lines<T, Op>) {
        const peer_signal* const signals = &t.signal_from(0);
        const element_range lines = whole_lines(static_cast<const T*>(signals[0].out), range);
        bool whole = true;
        for (std::uint32_t r = 0; r < t.ranks(); ++r)
            whole = whole && reinterpret_cast<std::uintptr_t>(static_cast<const T*>(signals[r].out) + lines.begin) %
                                     cache_line_bytes ==
                                 0;
        if (lines.size() != 0 && (whole || !streaming) && lines_pay<T, Op>(t.ranks())) {
            if (range.begin != lines.begin) reduce_from_told<T>(t, op, {range.begin, lines.begin}, false);
            const std::size_t first = lines.begin * sizeof(T);
            combine_lines<T>(widest_vectors(), op, line_ends{signals, t.ranks(), first, first, plan.ahead, plan.places},
                             lines.size() * sizeof(T) / cache_line_bytes,
                             streaming ? line_stores::past_caches : line_stores::cached);
            if (lines.end != range.end) reduce_from_told<T>(t, op, {lines.end, range.end}, false);
            return;
        }
    }
    reduce_from_told<T>(t, op, range, streaming);
}

/// Combines whole lines of the arrays in the signals into lines of `out`. The lines begin `first`
/// elements after the beginnings of the arrays.
template <class T, class Op>
void combine_lines_to_one(const Op& op, const peer_signal* signals, std::uint32_t ranks, std::size_t first,
                          element_range lines, T* out) noexcept {
    line_ends ends{signals, ranks, (first + lines.begin) * sizeof(T), lines.begin * sizeof(T)};
    ends.only = out;
    combine_lines<T>(widest_vectors(), op, ends, lines.size() * sizeof(T) / cache_line_bytes, line_stores::cached);
}

/// After `meet`: combines `range` of all inputs into `out`. The range begins `first` elements after
/// the addresses that ranks have signalled.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context, class Op>
GPUSHARE_HD void reduce_to_one(session<Context>& t, Op op, std::size_t first, element_range range, T* out) noexcept {
    const auto one_by_one = [&](element_range some) {
        reduce_elements<T>(
            t.context(), op, t.ranks(), some,
            [&](std::uint32_t r) { return static_cast<const T*>(t.signal_from(r).in) + first; }, single_output<T>{out});
    };
    if constexpr (is_one_thread<Context> && combines_lines<T, Op>) {
        const element_range lines = whole_lines<T>(out, range);
        if (lines.size() != 0 && lines_pay<T, Op>(t.ranks())) {
            one_by_one({range.begin, lines.begin});
            combine_lines_to_one<T>(op, &t.signal_from(0), t.ranks(), first, lines, out);
            return one_by_one({lines.end, range.end});
        }
    }
    one_by_one(range);
}

/// After `meet`: combines `range` of all inputs into all outputs. The ranks then leave.
GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context, class Op>
GPUSHARE_HD collective_fault reduce_to_all(session<Context>& t, const Op& op, element_range range,
                                           all_reduce_plan plan) noexcept {
    // In place, a written line was just read and is in the cache already: stores past the caches
    // would save nothing.
    for (std::uint32_t r = 0; r < t.ranks(); ++r)
        plan.streaming = plan.streaming && reinterpret_cast<std::uintptr_t>(t.signal_from(r).out) % 16 == 0 &&
                         t.signal_from(r).in != t.signal_from(r).out;
    constexpr std::size_t step = look_every / sizeof(T);
    bool whole = true;
    for (std::size_t begin = range.begin; begin < range.end && whole; begin += step) {
        reduce_by_lines<T>(t, op, {begin, range.end - begin < step ? range.end : begin + step}, plan);
        whole = range.end - begin <= step || t.still_open();  // a rank that is done needn't check
    }
    if (plan.streaming) finish_streaming();
    return t.finish_if(whole);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
