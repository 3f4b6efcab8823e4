// SPDX-License-Identifier: Apache-2.0
// An all-reduce that is fused with an epilogue, in one pass over memory. Each rank combines some of
// the rows and runs the stages on these rows while they are in the caches. Then the rank writes the
// finished rows to all ranks, or keeps them.
//
//   namespace gs = gpushare;
//   const auto p = gs::reduced(x, width) | gs::add(residual) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>();
//   gs::run(me, p, out);
//   gs::run_sharded(me, p, own_rows);  // rank r keeps the rows of gs::shard_of(rows, r, ranks)
//
// add() only reads the residual; add_to() stores the sum in it as well.
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <span>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/fused_body.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

template <bool Sharded, class T, class Op, class... Stages>
[[nodiscard]] collective_fault run_pipeline(const member& me, const pipeline<T, Op, Stages...>& p,
                                            std::span<typename pipeline<T, Op, Stages...>::out_type> out,
                                            instant deadline) {
    static_assert(!std::integral<T> && !std::same_as<T, double>, "gpushare: epilogues compute in float");
    const std::size_t rows = p.width == 0 ? 0 : p.count / p.width;
    const std::size_t kept = Sharded ? shard_of(rows, me.rank(), me.size()).size() * p.width : p.count;
    constexpr std::size_t columns = columns_in<typename pipeline<T, Op, Stages...>::out_type>;
    constexpr std::size_t unit = columns == 2 ? 2 : row_unit<Stages...>;
    if (p.width == 0 || p.width % unit != 0 || rows * p.width != p.count || out.size() != kept / columns)
        return {errc::mismatch, collective_kind::all_reduce, me.rank(), 0};
    const fused_plan plan = me.tuning().fused(me.size(), p.count * sizeof(T));
    std::unique_ptr<float[]> spare;
    if (epilogue<Stages...>::whole_rows && p.width * sizeof(float) > me.view().slot) spare.reset(new float[p.width]);
    return run_in_thread(me, fused_body<T, Op, Sharded, Stages...>{p, out.data(), plan, spare.get()}, deadline);
}

}  // namespace detail

/// Runs the pipeline; every rank gets the whole result. Each rank passes its own copy of the arrays
/// that stages read, with equal contents. `out` may be the input if the types are the same.
/// Otherwise works as try_all_reduce. If a stage needs whole rows and a row doesn't fit into a slot
/// of the communicator, try_run allocates memory for a row and may throw std::bad_alloc.
template <class T, class Op, class... Stages>
[[nodiscard]] collective_fault try_run(const member& me, const pipeline<T, Op, Stages...>& p,
                                       std::span<typename pipeline<T, Op, Stages...>::out_type> out,
                                       instant deadline = never) {
    return detail::run_pipeline<false>(me, p, out, deadline);
}
/// try_run, but throws operation_error with the fault.
template <class T, class Op, class... Stages>
void run(const member& me, const pipeline<T, Op, Stages...>& p,
         std::span<typename pipeline<T, Op, Stages...>::out_type> out, instant deadline = never) {
    raise_fault(try_run(me, p, out, deadline));
}

/// Like try_run, but each rank keeps its own rows of the result (`shard_of`), and the arrays of its
/// stages have only these rows.
template <class T, class Op, class... Stages>
[[nodiscard]] collective_fault try_run_sharded(const member& me, const pipeline<T, Op, Stages...>& p,
                                               std::span<typename pipeline<T, Op, Stages...>::out_type> out,
                                               instant deadline = never) {
    return detail::run_pipeline<true>(me, p, out, deadline);
}
/// try_run_sharded, but throws operation_error with the fault.
template <class T, class Op, class... Stages>
void run_sharded(const member& me, const pipeline<T, Op, Stages...>& p,
                 std::span<typename pipeline<T, Op, Stages...>::out_type> out, instant deadline = never) {
    raise_fault(try_run_sharded(me, p, out, deadline));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
