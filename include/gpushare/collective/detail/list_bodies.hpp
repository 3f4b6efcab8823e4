// SPDX-License-Identifier: Apache-2.0
// The bodies of the list collectives in collectives.hpp: a rank's part, once the rank knows where
// all ranks' lists are. Only for threads, since devices would need the lists in memory that all of
// them reach.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/detail/simd/cache_line.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Groups of more ranks combine lists element by element and not by lines, because the places of
/// each rank's lines are on the stack.
inline constexpr std::uint32_t most_ranks_of_list_lines = 16;

template <class T, class F>
void each_piece(const std::span<T>* arrays, std::size_t count, element_range range, const F& f) {
    std::size_t first = 0;  // the position of the array's first element among all elements
    for (std::size_t a = 0; a < count && first < range.end; first += arrays[a].size(), ++a) {
        const std::size_t behind = first + arrays[a].size();
        const std::size_t begin = std::max(first, range.begin), end = std::min(behind, range.end);
        if (begin < end) f(a, element_range{begin - first, end - first});
    }
}

/// Facts about this rank's list that all list collectives use.
template <class T>
struct list_facts {
    const std::span<T>* arrays;
    std::size_t count;
    std::size_t elements = 0;
    std::size_t layout = 0;  // a hash that differs if the sizes differ

    explicit list_facts(std::span<const std::span<T>> list) noexcept : arrays(list.data()), count(list.size()) {
        for (const auto& array : list) {
            elements += array.size();
            layout = (layout ^ array.size()) * 0x9e37'79b9'7f4a'7c15U;
            layout ^= layout >> 29;
        }
        layout ^= count;
    }
    /// The list of a rank, at the address that the rank has signalled.
    template <class Context>
    [[nodiscard]] static const std::span<T>* of(const session<Context>& t, std::uint32_t rank) noexcept {
        return static_cast<const std::span<T>*>(t.signal_from(rank).in);
    }
};

/// Calls `f(array, range)` for the elements that a rank keeps: the rank's shard of each array.
template <class T, class F>
void each_kept(const list_facts<T>& list, std::uint32_t rank, std::uint32_t ranks, const F& f) {
    for (std::size_t a = 0; a < list.count; ++a)
        if (const element_range own = shard_of(list.arrays[a].size(), rank, ranks); own.size() != 0) f(a, own);
}

/// Stores the results of a list: to every rank's array, or only to this rank's.
template <class T>
struct list_outputs {
    T* const* outs;
    std::uint32_t count;
    template <class Values>
    void put(std::size_t i, const Values& v) const noexcept {
        for (std::uint32_t r = 0; r < count; ++r) v.store(outs[r] + i);
    }
    void put_one(std::size_t i, const T& x) const noexcept {
        for (std::uint32_t r = 0; r < count; ++r) outs[r][i] = x;
    }
};

/// The same for any number of ranks.
template <class T>
struct all_lists {
    const session<thread_context>& t;
    std::size_t array;
    template <class Values>
    void put(std::size_t i, const Values& v) const noexcept {
        for (std::uint32_t r = 0; r < t.ranks(); ++r) v.store(list_facts<T>::of(t, r)[array].data() + i);
    }
    void put_one(std::size_t i, const T& x) const noexcept {
        for (std::uint32_t r = 0; r < t.ranks(); ++r) list_facts<T>::of(t, r)[array].data()[i] = x;
    }
};

/// Calls `f(array, range)` for the pieces of this rank's part of all elements. If arrays begin with
/// cache lines, pieces are whole lines, so two ranks seldom write to the same line. Arrays that are
/// contiguous on every rank form one piece; `range` then continues after the array.
template <class T, class F>
void each_run(const session<thread_context>& t, const list_facts<T>& list, const F& f) {
    constexpr std::size_t line = sizeof(T) < cache_line_bytes ? cache_line_bytes / sizeof(T) : 1;
    std::size_t first = 0, last = 0;
    element_range run;
    each_piece(list.arrays, list.count, shard_of(list.elements, t.rank(), t.ranks(), line),
               [&](std::size_t a, element_range range) {
                   bool adjoins = run.size() != 0;
                   for (std::uint32_t r = 0; r < t.ranks() && adjoins; ++r) {
                       const std::span<T>* const arrays = list_facts<T>::of(t, r);
                       adjoins = arrays[a].data() == arrays[last].data() + arrays[last].size();
                   }
                   last = a;
                   if (adjoins) {
                       run.end += range.size();
                       return;
                   }
                   if (run.size() != 0) f(first, run);
                   first = a;
                   run = range;
               });
    if (run.size() != 0) f(first, run);
}

/// Combines `range`, counted from the beginning of array `a`, in whole lines as far as possible. If
/// `looks` is set, returns whether all of the results are finite.
template <class T, class Op>
[[nodiscard]] bool combine_piece(session<thread_context>& t, const Op& op, std::size_t a, element_range range,
                                 bool to_all, bool looks) noexcept {
    const auto from = [&](std::uint32_t r) { return list_facts<T>::of(t, r)[a].data(); };
    T* const own = from(t.rank());
    const auto finite = [&](element_range some) {
        return !looks || all_finite(std::span<const T>(own + some.begin, some.size()));
    };
    std::array<T*, most_ranks_of_list_lines> outs{};
    if (t.ranks() > outs.size()) {
        if (to_all)
            reduce_elements<T>(t.context(), op, t.ranks(), range, from, all_lists<T>{t, a});
        else
            reduce_elements<T>(t.context(), op, t.ranks(), range, from, single_output<T>{own});
        return finite(range);
    }
    for (std::uint32_t r = 0; r < t.ranks(); ++r) outs[r] = from(r);
    const list_outputs<T> sink =
        to_all ? list_outputs<T>{outs.data(), t.ranks()} : list_outputs<T>{outs.data() + t.rank(), 1};
    const auto one_by_one = [&](element_range some) {
        reduce_elements<T>(
            t.context(), op, t.ranks(), some, [&](std::uint32_t r) { return outs[r]; }, sink);
        return finite(some);
    };
    if constexpr (combines_lines<T, Op>) {
        const element_range lines = whole_lines<T>(own, range);
        if (lines.size() != 0 && lines_pay<T, Op>(t.ranks())) {
            // uninitialised on purpose: only two words of each signal are used
            std::array<peer_signal, most_ranks_of_list_lines> ends;
            for (std::uint32_t r = 0; r < t.ranks(); ++r) ends[r].in = ends[r].out = outs[r];
            line_ends where{ends.data(), t.ranks(), lines.begin * sizeof(T), lines.begin * sizeof(T)};
            if (!to_all) where.only = own;
            const std::size_t n = lines.size() * sizeof(T) / cache_line_bytes;
            bool good = one_by_one({range.begin, lines.begin});
            if constexpr (std::floating_point<T>) {
                if (looks) {
                    good = combine_finite_lines<T>(widest_vectors(), op, where, n) && good;
                    return one_by_one({lines.end, range.end}) && good;
                }
            }
            combine_lines<T>(widest_vectors(), op, where, n, line_stores::cached);
            good = finite(lines) && good;
            return one_by_one({lines.end, range.end}) && good;
        }
    }
    return one_by_one(range);
}

/// Combines this rank's part, and checks now and then whether the group has been closed. If
/// `finite` isn't null, `*finite` becomes whether the elements of all ranks' parts are finite: each
/// rank checks its own part while the elements are at hand.
template <class T, class Op>
[[nodiscard]] collective_fault combine_list(session<thread_context>& t, const list_facts<T>& list, const Op& op,
                                            bool to_all, bool* finite) {
    bool whole = true, good = true;
    std::size_t since = 0;
    const auto part = [&](std::size_t a, element_range range) {
        constexpr std::size_t step = look_every / sizeof(T);
        for (std::size_t begin = range.begin; begin < range.end && whole; begin += step) {
            const element_range some{begin, std::min(range.end, begin + step)};
            good = combine_piece<T>(t, op, a, some, to_all, finite != nullptr) && good;
            if ((since += some.size()) < step) continue;
            since = 0;
            whole = t.still_open();
        }
    };
    if (to_all)
        each_run(t, list, part);
    else
        each_kept(list, t.rank(), t.ranks(), part);
    if (finite == nullptr) return t.finish_if(whole);
    t.remark(good ? 1 : 0);
    const collective_fault fault = t.finish_if(whole);
    for (std::uint32_t r = 0; r < t.ranks() && !fault; ++r) good = good && t.signal_from(r).remark != 0;
    *finite = good;
    return fault;
}

/// Kind is all_reduce, with results for all ranks, or reduce_scatter, with each rank's own shards.
template <collective_kind Kind, class T, class Op>
struct combine_list_body {
    list_facts<T> list;
    Op op;
    bool* finite;
    static constexpr auto kind = Kind;

    combine_list_body(std::span<const std::span<T>> arrays, const Op& by, bool* finite_all = nullptr) noexcept
        : list(arrays), op(by), finite(finite_all) {}
    collective_fault operator()(session<thread_context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>() | 128U, op_id<Op>(), list.layout, blocks, finite != nullptr),
                    list.arrays))
            return t.fault();
        return combine_list(t, list, op, kind == collective_kind::all_reduce, finite);
    }
};

template <class T>
struct all_gather_list_body {
    list_facts<T> list;
    static constexpr auto kind = collective_kind::all_gather;

    explicit all_gather_list_body(std::span<const std::span<T>> arrays) noexcept : list(arrays) {}
    collective_fault operator()(session<thread_context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>() | 128U, 0, list.layout, blocks), list.arrays)) return t.fault();
        for (std::uint32_t i = 1; i < t.ranks(); ++i) {
            // each rank begins at a different rank
            const std::uint32_t r = (t.rank() + i) % t.ranks();
            each_kept(list, r, t.ranks(), [&](std::size_t a, element_range range) {
                copy_elements(t.context(), list.arrays[a].data() + range.begin,
                              list_facts<T>::of(t, r)[a].data() + range.begin, range.size());
            });
        }
        return t.finish();
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
