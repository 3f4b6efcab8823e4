// SPDX-License-Identifier: Apache-2.0
// All-reduce with epilogues, in one pass over memory: each rank combines some rows, runs the stages on them while they are
// at hand, and writes the finished rows to all ranks, or keeps them.
//
//   namespace gs = gpushare;
//   gs::run(me, gs::reduced(x, width) | gs::add(residual) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>(), out);
//   gs::run_sharded(me, ..., own_rows);            // rank r keeps the rows of gs::shard_of(rows, r, ranks)
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <type_traits>

#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_apply.hpp>
#include <gpushare/collective/epilogue_norms.hpp>
#include <gpushare/collective/epilogue_quantise.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/epoch.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// What the last stage that says so makes of the elements; else T.
template <class T, class... Stages>
struct result_of_stages {
    using type = T;
};
template <class T, class First, class... Rest>
struct result_of_stages<T, First, Rest...> : result_of_stages<T, Rest...> {};
template <class T, class First, class... Rest>
requires requires { typename First::result_type; }
struct result_of_stages<T, First, Rest...> : result_of_stages<typename First::result_type, Rest...> {};

}  // namespace detail

/// An all-reduce of `count` elements in rows of `width`, and what follows it. A value; points to what it works on. `out_type`
/// is that of the result: as the last cast() or quantise() says, else T.
template <class T, class Op, class... Stages>
struct pipeline {
    using out_type = typename detail::result_of_stages<T, Stages...>::type;

    const T* in = nullptr;
    std::size_t count = 0;
    std::size_t width = 1;
    Op op{};
    epilogue<Stages...> list{};

    /// Adds stages.
    template <detail::epilogue_part S>
    [[nodiscard]] friend constexpr auto operator|(const pipeline& p, const S& more) {
        return p.with(detail::joined(p.list, detail::as_epilogue(more)));
    }

private:
    template <class... All>
    [[nodiscard]] constexpr pipeline<T, Op, All...> with(const epilogue<All...>& all) const {
        return {in, count, width, op, all};
    }
};

/// The sum of what all ranks pass, or what `op` makes of it, as the beginning of a pipeline: nothing runs yet. The elements are whole
/// rows of `width`.
template <class R, class Op = sum>
requires requires(const R& r) { std::span(r); }
[[nodiscard]] constexpr auto reduced(const R& in, std::size_t width, Op op = {}) {
    using T = std::remove_cvref_t<decltype(*std::data(in))>;
    static_assert(reducible<T>);
    return pipeline<T, Op>{std::data(in), std::size(in), width, op, {}};
}

/// The rows that rank `rank` computes, and keeps where the result is sharded.
[[nodiscard]] GPUSHARE_HD constexpr element_range shard_of(std::size_t rows, std::uint32_t rank,
                                                           std::uint32_t ranks) noexcept {
    return part_of(rows, rank, ranks, 1);
}

namespace detail {

/// Reads and combines what all ranks brought, rank by rank from 0 on.
template <class T, class Op>
struct combined_rows {
    const flag_line* told;
    const T* first;   // rank 0's
    const T* second;  // rank 1's, kept here since two ranks are what there is most often
    std::uint32_t ranks;
    std::size_t row;  // of the inputs, for row 0 of the result
    Op op;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load(const place& at) const noexcept {
        const std::size_t i = (at.row + row) * at.width + at.column;
        V x = load_floats<V>(first + i, at.count);
        if (ranks > 1) x = V::combined(op, x, load_floats<V>(second + i, at.count));
        for (std::uint32_t r = 2; r < ranks; ++r)
            x = V::combined(op, x, load_floats<V>(static_cast<const T*>(told[r].in) + i, at.count));
        if constexpr (requires { op.finish(float{}, float{}); }) x = x.finished(op, static_cast<float>(ranks));
        return x;
    }
};

/// The arrays that ranks have told of; the result is the last.
struct told_outputs {
    const flag_line* told;
    std::uint32_t of_ranks;
    std::uint32_t result;

    [[nodiscard]] GPUSHARE_HD std::uint32_t ranks() const noexcept { return of_ranks; }
    [[nodiscard]] GPUSHARE_HD void* of(std::uint32_t rank, std::uint32_t k) const noexcept {
        return k == result ? told[rank].out : told[rank].other[k];
    }
};

template <class T, class Op, bool Sharded, class... Stages>
struct fused_body {
    using steps = pipeline<T, Op, Stages...>;
    using out_type = typename steps::out_type;

    steps what;
    out_type* out;
    fused_plan plan;
    float* spare = nullptr;  // for a row, where slots are too small for one
    static constexpr auto kind = collective_kind::all_reduce;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(team<Context>& t, std::uint32_t lanes) const {
        const std::uint32_t signature = call_signature(kind, type_id<T>() << 8 | sizeof(out_type), op_id<Op>(),
                                                       what.count, lanes, static_cast<std::uint32_t>(what.width));
        constexpr std::uint32_t sharing = decltype(what.list)::sharing;
        static_assert(sharing <= team<Context>::shared_pointers, "gpushare: too many stages that write to all ranks");
        void* others[team<Context>::shared_pointers] = {};
        what.list.collect(others);
        if (!t.meet(signature, what.in, out, others)) return t.fault();
        const std::size_t rows = what.count / what.width;
        const element_range own = shard_of(rows, t.rank(), t.ranks());
        const element_range mine = part_of(own.size(), t.lane(), lanes, 1);
        // A row lies in the rank's slot between passes: it is local, and stays in the first-level cache.
        float* const scratch =
            what.width * sizeof(float) <= t.view().slot ? reinterpret_cast<float*>(t.slot_of(t.rank())) : spare;
        const flag_line* const told = &t.told_by(0);
        const T* const second = t.ranks() > 1 ? static_cast<const T*>(told[1].in) : nullptr;
        const combined_rows<T, Op> from{told,      static_cast<const T*>(told[0].in), second,
                                        t.ranks(), Sharded ? own.begin : 0,           what.op};
        const matrix<out_type, false> result{out, 0};
        const auto all = joined(what.list, as_epilogue(storing<matrix<out_type, false>>{result}));
        // Some rows at a time, and then a look at whether the group was aborted.
        const std::size_t step = 1 + look_every / (what.width * sizeof(T));
        const std::size_t to_kept = Sharded ? 0 : own.begin;
        bool whole = true;
        for (std::size_t row = mine.begin; row < mine.end && whole; row += step) {
            const std::size_t n = mine.end - row < step ? mine.end - row : step;
            const row_range range{row + to_kept, n, what.width, to_kept, plan.streaming};
            if constexpr (Sharded)
                apply_rows(t.context(), all, range, from, scratch);
            else
                apply_rows(t.context(), all, range, from, scratch, told_outputs{told, t.ranks(), sharing});
            whole = t.goes_on();
        }
        if (!t.agreed(whole)) {
            t.fail(errc::aborted, t.rank());
            return t.fault();
        }
        return t.part();
    }
};

template <bool Sharded, class T, class Op, class... Stages>
[[nodiscard]] collective_fault run_pipeline(const member& me, const pipeline<T, Op, Stages...>& p,
                                            std::span<typename pipeline<T, Op, Stages...>::out_type> out,
                                            instant deadline) {
    static_assert(!std::integral<T> && !std::same_as<T, double>, "gpushare: epilogues compute in float");
    const std::size_t rows = p.width == 0 ? 0 : p.count / p.width;
    const std::size_t kept = Sharded ? shard_of(rows, me.rank(), me.size()).size() * p.width : p.count;
    if (p.width == 0 || rows * p.width != p.count || out.size() != kept)
        return {errc::mismatch, collective_kind::all_reduce, me.rank(), 0};
    const fused_plan plan = me.tuning().fused(me.size(), p.count * sizeof(T));
    std::unique_ptr<float[]> spare;
    if (epilogue<Stages...>::whole_rows && p.width * sizeof(float) > me.view().slot) spare.reset(new float[p.width]);
    return call(me, fused_body<T, Op, Sharded, Stages...>{p, out.data(), plan, spare.get()}, deadline);
}

}  // namespace detail

/// Runs the pipeline; every rank gets the whole result. All ranks pass their own copies of what stages add, with equal
/// contents. As try_all_reduce in all else; `out` may be `in` where the types are the same. Rows that are larger than a slot
/// of the communicator take memory of the heap if a stage needs whole ones, and throw std::bad_alloc without it.
template <class T, class Op, class... Stages>
[[nodiscard]] collective_fault try_run(const member& me, const pipeline<T, Op, Stages...>& p,
                                       std::span<typename pipeline<T, Op, Stages...>::out_type> out,
                                       instant deadline = never) {
    return detail::run_pipeline<false>(me, p, out, deadline);
}
template <class T, class Op, class... Stages>
void run(const member& me, const pipeline<T, Op, Stages...>& p,
         std::span<typename pipeline<T, Op, Stages...>::out_type> out, instant deadline = never) {
    raise_fault(try_run(me, p, out, deadline));
}

/// Each rank keeps its own rows (`shard_of`) of the result; arrays of stages are those of these rows.
template <class T, class Op, class... Stages>
[[nodiscard]] collective_fault try_run_sharded(const member& me, const pipeline<T, Op, Stages...>& p,
                                               std::span<typename pipeline<T, Op, Stages...>::out_type> out,
                                               instant deadline = never) {
    return detail::run_pipeline<true>(me, p, out, deadline);
}
template <class T, class Op, class... Stages>
void run_sharded(const member& me, const pipeline<T, Op, Stages...>& p,
                 std::span<typename pipeline<T, Op, Stages...>::out_type> out, instant deadline = never) {
    raise_fault(try_run_sharded(me, p, out, deadline));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
