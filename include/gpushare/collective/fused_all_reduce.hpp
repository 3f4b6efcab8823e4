// SPDX-License-Identifier: Apache-2.0
// All-reduce with epilogues, in one pass over memory: each rank combines some rows, runs the stages on them while they are
// at hand, and writes the finished rows to all ranks, or keeps them.
//
//   namespace gs = gpushare;
//   gs::run(me, gs::all_reduce(x, width) | gs::add(residual) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>(), out);
//   gs::run_sharded(me, ..., own_rows);            // rank r keeps the rows of gs::shard_of(rows, r, ranks)
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/bundle.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epoch.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/reduction.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// An all-reduce of `count` elements in rows of `width`, and what follows it. A value; points to what it works on.
template <class T, class Out, class Op, class... Stages>
struct pipeline {
    const T* in = nullptr;
    std::size_t count = 0;
    std::size_t width = 1;
    Op op{};
    detail::stage_list<Stages...> list{};

    /// Adds stages.
    template <class NewOut, class... More>
    [[nodiscard]] friend constexpr auto operator|(const pipeline& p,
                                                  const detail::added_stages<NewOut, More...>& more) {
        using next = std::conditional_t<std::same_as<NewOut, detail::unchanged>, Out, NewOut>;
        return pipeline<T, next, Op, Stages..., More...>{p.in, p.count, p.width, p.op, joined(p.list, more.list)};
    }

private:
    template <class L>
    [[nodiscard]] static constexpr L joined(const L& l, const detail::stage_list<>&) {
        return l;
    }
    template <class L, class First, class... Rest>
    [[nodiscard]] static constexpr auto joined(const L& l, const detail::stage_list<First, Rest...>& more) {
        return joined_rest(detail::appended(l, more.first), more.rest);
    }
    template <class L, class M>
    [[nodiscard]] static constexpr auto joined_rest(const L& l, const M& more) {
        return joined(l, more);
    }
};

/// The beginning of a pipeline. The elements are whole rows of `width`; without it, they are one row.
template <class R, class Op = sum>
requires requires(const R& r) { std::span(r); }
[[nodiscard]] constexpr auto all_reduce(const R& in, std::size_t width, Op op = {}) {
    using T = std::remove_cvref_t<decltype(*std::data(in))>;
    static_assert(reducible<T>);
    return pipeline<T, T, Op>{std::data(in), std::size(in), width, op, {}};
}

/// The rows that rank `rank` computes, and keeps where the result is sharded.
[[nodiscard]] GPUSHARE_HD constexpr element_range shard_of(std::size_t rows, std::uint32_t rank,
                                                           std::uint32_t ranks) noexcept {
    return part_of(rows, rank, ranks, 1);
}

namespace detail {

/// Stages and statistics of one row, by compile-time recursion. `pass` counts the row stages that are settled.
template <class List>
struct row_state {};
template <class First, class... Rest>
struct row_state<stage_list<First, Rest...>> {
    float statistic = 0;
    row_state<stage_list<Rest...>> rest;
};

/// Runs the stages behind the row stage number Skip on some values, with it unless Skip is 0, up to the next row stage, which
/// only gathers. Shared counts the stages that write arrays.
GPUSHARE_EXEC_CHECK_DISABLE
template <std::uint32_t Skip, std::uint32_t Shared = 0, class Values>
[[gnu::always_inline]] GPUSHARE_HD inline void run_stages(const stage_list<>&, const row_state<stage_list<>>&, Values&,
                                                          stage_place&, Values&) noexcept {}
GPUSHARE_EXEC_CHECK_DISABLE
template <std::uint32_t Skip, std::uint32_t Shared = 0, class Values, class First, class... Rest>
[[gnu::always_inline]] GPUSHARE_HD inline void run_stages(const stage_list<First, Rest...>& l,
                                                          const row_state<stage_list<First, Rest...>>& s, Values& x,
                                                          stage_place& at, Values& gathered) noexcept {
    constexpr std::uint32_t next = Shared + (sharing_stage<First> ? 1 : 0);
    at.shared = Shared;
    if constexpr (row_stage<First>) {
        if constexpr (Skip == 0) {
            x.keep(at.n);
            l.first.gather(gathered, x);
        } else {
            if constexpr (Skip == 1) l.first.apply(x, at, s.statistic);
            run_stages<Skip - 1, next>(l.rest, s.rest, x, at, gathered);
        }
    } else {
        if constexpr (Skip == 0) l.first.apply(x, at, 0.0F);
        run_stages<Skip, next>(l.rest, s.rest, x, at, gathered);
    }
}

/// Settles the row stage number Skip.
GPUSHARE_EXEC_CHECK_DISABLE
template <std::uint32_t Skip, std::uint32_t Shared = 0, class Context, class Values, class First, class... Rest>
GPUSHARE_HD void settle_stage(Context& ctx, const stage_list<First, Rest...>& l,
                              row_state<stage_list<First, Rest...>>& s, const Values& gathered, std::size_t width,
                              stage_place& at) noexcept {
    if constexpr (row_stage<First> && Skip == 0) {
        const typename First::merge merge{};
        at.shared = Shared;
        s.statistic = l.first.settle(ctx.reduce(gathered.folded(merge), merge), width, at);
    } else {
        settle_stage<row_stage<First> ? Skip - 1 : Skip, Shared + (sharing_stage<First> ? 1 : 0)>(ctx, l.rest, s.rest,
                                                                                                  gathered, width, at);
    }
}

template <class T, class Out, class Op, bool Sharded, class... Stages>
struct fused_body {
    pipeline<T, Out, Op, Stages...> what;
    Out* out;
    bool streaming;
    static constexpr auto kind = collective_kind::all_reduce;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        const std::uint32_t signature = call_signature(kind, type_id<T>() << 8 | sizeof(Out), op_id<Op>(), what.count,
                                                       lanes, static_cast<std::uint32_t>(what.width));
        static_assert(stage_types::sharing <= team<Context>::shared_pointers);
        void* others[team<Context>::shared_pointers] = {};
        what.list.collect(others);
        if (!t.meet(signature, what.in, out, others)) return t.fault();
        const std::size_t rows = what.count / what.width;
        const element_range own = shard_of(rows, t.rank(), t.ranks());
        const element_range mine = part_of(own.size(), t.lane(), lanes, 1);
        bool past = streaming && what.width * sizeof(Out) % 16 == 0;
        for (std::uint32_t r = 0; r < t.ranks(); ++r)
            past = past && reinterpret_cast<std::uintptr_t>(t.told_by(r).out) % 16 == 0;
        const bool whole = past ? run_rows<true>(t, own.begin, mine) : run_rows<false>(t, own.begin, mine);
        if (past) end_streaming();
        if (!t.agreed(whole)) {
            t.fail(errc::aborted, t.rank());
            return t.fault();
        }
        return t.part();
    }

private:
    using stage_types = stage_list<Stages...>;
    static constexpr std::uint32_t passes = stage_types::row_stages + 1;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <bool Streaming, class Context>
    GPUSHARE_HD bool run_rows(team<Context>& t, std::size_t first, element_range mine) const {
        for (std::size_t row = first + mine.begin; row < first + mine.end; ++row) {
            row_state<stage_types> state{};
            if (t.ranks() == 2)
                run_passes<0, Streaming, true>(t, row, first, state);
            else
                run_passes<0, Streaming, false>(t, row, first, state);
            if (!t.goes_on()) return false;
        }
        return true;
    }

    /// One row. `Pair`: there are two ranks, whose pointers fit into registers. What the loop needs is copied to locals,
    /// because the compiler must assume that stores change everything else.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <std::uint32_t Pass, bool Streaming, bool Pair, class Context>
    GPUSHARE_HD void run_passes(team<Context>& t, std::size_t row, std::size_t first,
                                row_state<stage_types>& row_statistics) const {
        constexpr std::uint32_t width = bundle_width<Context, T>();
        using values = bundle<float, width>;
        Context& ctx = t.context();
        const stage_types list = what.list;
        const row_state<stage_types> state = row_statistics;
        const Op op = what.op;
        const std::uint32_t ranks = Pair ? 2 : t.ranks();
        const std::size_t columns = what.width, kept = Sharded ? row - first : row;
        // Between passes a row lies in the rank's slot, which is local and stays in the first-level cache; one that doesn't fit
        // is combined anew.
        float* const scratch =
            columns * sizeof(float) <= t.view().slot ? reinterpret_cast<float*>(t.slot_of(t.rank())) : nullptr;
        const T* const in0 = static_cast<const T*>(t.told_by(0).in) + row * columns;
        const T* const in1 = static_cast<const T*>(t.told_by(Pair ? 1 : 0).in) + row * columns;
        Out* const out0 = Sharded ? out : static_cast<Out*>(t.told_by(0).out);
        Out* const out1 = Sharded ? nullptr : static_cast<Out*>(t.told_by(Pair ? 1 : 0).out);
        values gathered = values::filled(0.0F);
        stage_place at = place(t, kept);

        const auto step = [&](std::size_t c, std::uint32_t n) __attribute__((always_inline)) {
            at.column = c;
            at.index = kept * columns + c;
            at.n = n;
            values x;
            if (Pass == 0 || scratch == nullptr) {
                x = values::load_some(in0 + c, n);
                if constexpr (Pair) {
                    x.combine(op, values::load_some(in1 + c, n));
                } else {
                    for (std::uint32_t r = 1; r < ranks; ++r)
                        x.combine(op, values::load_some(static_cast<const T*>(t.told_by(r).in) + row * columns + c, n));
                }
                x.finish(op, ranks);
                run_up_to<Pass>(list, x, at, gathered, state);
            } else {
                x = values::load_some(scratch + c, n);
                run_stages<Pass>(list, state, x, at, gathered);
            }
            if constexpr (Pass + 1 < passes) {
                if (scratch != nullptr) x.store_some(scratch + c, n);
            } else {
                put<Streaming>(out0 + at.index, x, n);
                if constexpr (Pair && !Sharded) {
                    put<Streaming>(out1 + at.index, x, n);
                } else if constexpr (!Sharded) {
                    for (std::uint32_t r = 1; r < ranks; ++r)
                        put<Streaming>(static_cast<Out*>(t.told_by(r).out) + at.index, x, n);
                }
            }
        };
        const std::size_t whole = columns / width * width;
        for (std::size_t c = ctx.thread_rank() * width; c < whole; c += ctx.num_threads() * width) step(c, width);
        if (whole != columns && whole / width % ctx.num_threads() == ctx.thread_rank())
            step(whole, static_cast<std::uint32_t>(columns - whole));
        if constexpr (Pass + 1 < passes) {
            settle_stage<Pass>(ctx, list, row_statistics, gathered, columns, at);
            run_passes<Pass + 1, Streaming, Pair>(t, row, first, row_statistics);
        }
    }

    /// All but where in the row.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD stage_place place(const team<Context>& t, std::size_t row) const {
        stage_place at;
        at.row = row;
        at.first_thread = t.context().thread_rank() == 0;
        at.ranks = Sharded ? 0 : t.ranks();
        at.told = &t.told_by(0);
        return at;
    }

    /// All stages from the beginning on, for values that come from the inputs; what earlier row stages gather is dropped.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <std::uint32_t Pass, class Values>
    [[gnu::always_inline]] GPUSHARE_HD static void run_up_to(const stage_types& list, Values& x, stage_place& at,
                                                             Values& gathered, const row_state<stage_types>& state) {
        if constexpr (Pass != 0) {
            Values dropped = Values::filled(0.0F);
            const bool was = at.again;
            at.again = true;
            run_up_to<Pass - 1>(list, x, at, dropped, state);
            at.again = was;
        }
        run_stages<Pass>(list, state, x, at, gathered);
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <bool Streaming, class Values>
    [[gnu::always_inline]] GPUSHARE_HD static void put(Out* to, const Values& x, std::uint32_t n) noexcept {
        if (Streaming && n == Values::width)
            x.stream(to);
        else
            x.store_some(to, n);
    }
};

template <bool Sharded, class T, class Out, class Op, class... Stages>
[[nodiscard]] collective_fault run_pipeline(const member& me, const pipeline<T, Out, Op, Stages...>& p,
                                            std::span<Out> out, instant deadline) {
    static_assert(!std::integral<T> && !std::same_as<T, double>, "gpushare: epilogues compute in float");
    const std::size_t rows = p.width == 0 ? 0 : p.count / p.width;
    const std::size_t kept = Sharded ? shard_of(rows, me.rank(), me.size()).size() * p.width : p.count;
    if (p.width == 0 || rows * p.width != p.count || out.size() != kept)
        return {errc::mismatch, collective_kind::all_reduce, me.rank(), 0};
    const bool streaming = me.tuning().plan(me.size(), p.count * sizeof(T)).streaming;
    return call(me, fused_body<T, Out, Op, Sharded, Stages...>{p, out.data(), streaming}, deadline);
}

}  // namespace detail

/// Runs the pipeline; every rank gets the whole result. All ranks pass their own copies of what stages add, with equal
/// contents. As try_all_reduce in all else; `out` may be `in` where the types are the same.
template <class T, class Out, class Op, class... Stages>
[[nodiscard]] collective_fault try_run(const member& me, const pipeline<T, Out, Op, Stages...>& p,
                                       std::type_identity_t<std::span<Out>> out, instant deadline = never) {
    return detail::run_pipeline<false>(me, p, out, deadline);
}
template <class T, class Out, class Op, class... Stages>
void run(const member& me, const pipeline<T, Out, Op, Stages...>& p, std::type_identity_t<std::span<Out>> out,
         instant deadline = never) {
    raise_fault(try_run(me, p, out, deadline));
}

/// Each rank keeps its own rows (`shard_of`) of the result; stages that add arrays are given those of these rows.
template <class T, class Out, class Op, class... Stages>
[[nodiscard]] collective_fault try_run_sharded(const member& me, const pipeline<T, Out, Op, Stages...>& p,
                                               std::type_identity_t<std::span<Out>> out, instant deadline = never) {
    return detail::run_pipeline<true>(me, p, out, deadline);
}
template <class T, class Out, class Op, class... Stages>
void run_sharded(const member& me, const pipeline<T, Out, Op, Stages...>& p, std::type_identity_t<std::span<Out>> out,
                 instant deadline = never) {
    raise_fault(try_run_sharded(me, p, out, deadline));
}

}  // namespace gpushare::inline GPUSHARE_ABI
