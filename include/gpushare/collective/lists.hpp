// SPDX-License-Identifier: Apache-2.0
// Collectives of many arrays at once, in place and without packing them: ranks tell each other
// where their lists are, and each works on its part of them. One call combines a thousand small
// gradients.
//
//   std::vector<std::span<float>> mine{weights, bias};                 // the same sizes on every rank
//   gpushare::all_reduce_list<float>(me, mine, gpushare::average{});
//
// Each element is combined as all_reduce does it, in the order of ranks: how arrays are put into
// lists never changes a bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/list_bodies.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/shard.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Combines the arrays of all ranks' lists into those of every rank. A rank's arrays don't overlap
/// each other. Else as try_all_reduce; errc::mismatch where the lists' sizes differ. `finite`, if
/// given, becomes whether no combined element is infinite or NaN: the same on all ranks, and given
/// by all or none.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_all_reduce_list(const member& me, std::span<const std::span<T>> list, Op op = {},
                                                   instant deadline = never, bool* finite = nullptr) {
    return detail::run_in_thread(me, detail::combine_list_body<collective_kind::all_reduce, T, Op>(list, op, finite),
                                 deadline);
}

/// The same where rank r gets its shard of each array (shard_of) alone, in its own arrays; other
/// elements stay as they are.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce_scatter_list(const member& me, std::span<const std::span<T>> list, Op op = {},
                                                       instant deadline = never, bool* finite = nullptr) {
    return detail::run_in_thread(
        me, detail::combine_list_body<collective_kind::reduce_scatter, T, Op>(list, op, finite), deadline);
}

/// The way back: every rank gets each rank's shards from that rank.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_gather_list(const member& me, std::span<const std::span<T>> list,
                                                   instant deadline = never) {
    return detail::run_in_thread(me, detail::all_gather_list_body<T>(list), deadline);
}

/// try_all_reduce_list, but throws operation_error.
template <reducible T, class Op = sum>
void all_reduce_list(const member& me, std::span<const std::span<T>> list, Op op = {}, instant deadline = never) {
    raise_fault(try_all_reduce_list<T>(me, list, op, deadline));
}
/// try_reduce_scatter_list, but throws operation_error.
template <reducible T, class Op = sum>
void reduce_scatter_list(const member& me, std::span<const std::span<T>> list, Op op = {}, instant deadline = never) {
    raise_fault(try_reduce_scatter_list<T>(me, list, op, deadline));
}
/// try_all_gather_list, but throws operation_error.
template <class T>
void all_gather_list(const member& me, std::span<const std::span<T>> list, instant deadline = never) {
    raise_fault(try_all_gather_list<T>(me, list, deadline));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
