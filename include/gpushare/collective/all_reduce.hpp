// SPDX-License-Identifier: Apache-2.0
// All-reduce: every rank gets the combination of all ranks' elements. The bits are the same on every rank, at every
// run, by every algorithm, because each element's values are always combined in the order of the ranks: floats in float or
// wider, integers in integers.
//
//   const std::span<float> x(array);       // `me` is this rank: see communicator.hpp
//   gpushare::all_reduce(me, x, std::span(out));                                // a sum, out of place
//   gpushare::all_reduce(me, x, x, gpushare::average{}, deadline);              // in place
//
// One thread per rank calls it. Any length, any alignment that T allows, any number of ranks from 1.
#pragma once

#include <span>
#include <type_traits>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/all_reduce.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Combines the `in` of all ranks into the `out` of every rank. All have the same size on all ranks; a rank's `in` and
/// `out` are the same memory or don't overlap. Waits for the other ranks until `deadline` (of the steady clock).
/// Returns the fault, if any, which is the same on every rank that was in the collective; the contents of `out` are
/// unspecified then. Returns errc::mismatch at once if the spans differ in size.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_all_reduce(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, Op op = {}, instant deadline = never) {
    if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, me.rank(), 0};
    const all_reduce_plan plan = me.tuning().plan(me.size(), in.size_bytes());
    return detail::run_in_thread(me, detail::all_reduce_body<T, Op>{in.data(), out.data(), in.size(), op, plan},
                                 deadline);
}

/// The same, but throws operation_error with the fault's code: `asked` is the epoch, `left` the rank.
template <reducible T, class Op = sum>
void all_reduce(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, Op op = {},
                instant deadline = never) {
    raise_fault(try_all_reduce(me, in, out, op, deadline));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
