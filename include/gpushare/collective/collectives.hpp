// SPDX-License-Identifier: Apache-2.0
// The other collectives: reduce_scatter, all_gather, broadcast, reduce, all_to_all, barrier. Data goes once, straight
// from the senders' buffers to the receivers': all ranks meet, each does its part, all finish.
//
//   // in, out and data are spans
//   gpushare::reduce_scatter(me, in, out);         // in: size() * out.size() elements; rank r gets part r
//   gpushare::all_gather(me, in, out);             // out: size() * in.size() elements
//   gpushare::broadcast(me, data, 0);
//
// All take a deadline, return the fault (`try_` calls) or throw it, and combine in rank order as all_reduce does.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/collectives.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

[[nodiscard]] inline collective_fault wrong_sizes(const member& me, collective_kind what) noexcept {
    return {errc::mismatch, what, me.rank(), 0};
}

}  // namespace detail

/// Returns when all ranks have called it.
[[nodiscard]] inline collective_fault try_barrier(const member& me, instant deadline = never) {
    return detail::run_in_thread(me, detail::barrier_body{}, deadline);
}

/// Rank r gets the combination of part r of all inputs. `out` may be that part of `in`.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce_scatter(const member& me, std::span<const std::type_identity_t<T>> in,
                                                  std::span<T> out, Op op = {}, instant deadline = never) {
    if (in.size() != out.size() * me.size()) return detail::wrong_sizes(me, collective_kind::reduce_scatter);
    return detail::run_in_thread(me, detail::reduce_scatter_body<T, Op>{in.data(), out.data(), out.size(), op},
                                 deadline);
}

/// Every rank gets all inputs, in the order of the ranks. `in` may be this rank's part of `out`.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_gather(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, instant deadline = never) {
    if (out.size() != in.size() * me.size()) return detail::wrong_sizes(me, collective_kind::all_gather);
    return detail::run_in_thread(me, detail::all_gather_body<T>{in.data(), out.data(), in.size()}, deadline);
}

/// Every rank gets what `root` has.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_broadcast(const member& me, std::span<T> data, std::uint32_t root,
                                             instant deadline = never) {
    if (root >= me.size()) return detail::wrong_sizes(me, collective_kind::broadcast);
    return detail::run_in_thread(me, detail::broadcast_body<T>{data.data(), data.size(), root}, deadline);
}

/// `root` gets the combination of all inputs in its `out`, which may be its `in`; the other ranks' `out` isn't used.
template <reducible T, class Op = sum>
[[nodiscard]] collective_fault try_reduce(const member& me, std::span<const std::type_identity_t<T>> in,
                                          std::span<T> out, std::uint32_t root, Op op = {}, instant deadline = never) {
    if (root >= me.size() || (me.rank() == root && in.size() != out.size()))
        return detail::wrong_sizes(me, collective_kind::reduce);
    return detail::run_in_thread(me, detail::reduce_body<T, Op>{in.data(), out.data(), in.size(), op, root}, deadline);
}

/// Part q of rank r's input becomes part r of rank q's output. Not in place.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_all_to_all(const member& me, std::span<const std::type_identity_t<T>> in,
                                              std::span<T> out, instant deadline = never) {
    if (in.size() != out.size() || in.size() % me.size() != 0 || (in.data() == out.data() && !in.empty()))
        return detail::wrong_sizes(me, collective_kind::all_to_all);
    return detail::run_in_thread(me, detail::all_to_all_body<T>{in.data(), out.data(), in.size() / me.size()},
                                 deadline);
}

/// try_barrier, but throws operation_error.
inline void barrier(const member& me, instant deadline = never) { raise_fault(try_barrier(me, deadline)); }

/// try_reduce_scatter, but throws operation_error.
template <reducible T, class Op = sum>
void reduce_scatter(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, Op op = {},
                    instant deadline = never) {
    raise_fault(try_reduce_scatter(me, in, out, op, deadline));
}
/// try_all_gather, but throws operation_error.
template <class T>
void all_gather(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                instant deadline = never) {
    raise_fault(try_all_gather(me, in, out, deadline));
}
/// try_broadcast, but throws operation_error.
template <class T>
void broadcast(const member& me, std::span<T> data, std::uint32_t root, instant deadline = never) {
    raise_fault(try_broadcast(me, data, root, deadline));
}
/// try_reduce, but throws operation_error.
template <reducible T, class Op = sum>
void reduce(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out, std::uint32_t root,
            Op op = {}, instant deadline = never) {
    raise_fault(try_reduce(me, in, out, root, op, deadline));
}
/// try_all_to_all, but throws operation_error.
template <class T>
void all_to_all(const member& me, std::span<const std::type_identity_t<T>> in, std::span<T> out,
                instant deadline = never) {
    raise_fault(try_all_to_all(me, in, out, deadline));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
