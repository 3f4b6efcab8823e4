// SPDX-License-Identifier: Apache-2.0
// The collectives besides all-reduce on the devices' streams: one cooperative launch per device, or one for all ranks
// that share a device. Launches, groups, graphs, aborts and errors are those of submit.hpp.
//
//   // ins and outs: a pointer of each rank, to memory of its device
//   auto code = gpushare::submit_reduce_scatter<float>(node.gangs(), devices, std::span(streams), members, ins, outs, n);
//   code = gpushare::submit_shared_all_to_all<float>(node.gangs(), devices[0], streams[0], members, ins, outs, n);
//
//  collective        a rank brings                     a rank gets                    in place
//  reduce_scatter    size() * count elements           part r of all, combined        outs[r] is part r of ins[r]
//  all_gather        count elements                    all ranks' elements            ins[r] is part r of outs[r]
//  all_to_all        a part of `count` for each rank   the part that each has for it  outs[r] is ins[r], on all ranks
//  broadcast         count elements, the root's        the root's                     always
//  reduce            count elements                    the root: all, combined        outs[root] is ins[root]
//
// Elements are combined in the order of ranks, so the results have the bits of rank threads (collectives.hpp). Devices
// must reach each other's memory, which all but an all-reduce needs: else errc::not_supported.
//
// **Unequal parts**: submit_all_gatherv, submit_reduce_scatterv and submit_all_to_allv. Each rank reads the lengths from
// its own memory when it runs, and they stay as they are until it has run. So kernels may compute them (where tokens go,
// say), and a captured graph takes those of the moment. A part may be empty. Lengths that don't fit into an array end
// the collective before anything is written. Ranks that disagree end it as well; what their outputs hold then is
// undefined. All ranks get errc::mismatch, which names one that is wrong.
//
//   const std::uint64_t* counts[] = {counts_on_0, counts_on_1};      // as many numbers as ranks, on each rank's device
//   code = gpushare::submit_all_gatherv<float>(node.gangs(), devices, std::span(streams), members, parts, wholes, counts);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/stream_calls.hpp>
#include <gpushare/collective/detail/submit.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Types that devices move in whole vectors of 16 bytes: trivially copyable, of 1, 2, 4, 8 or 16
/// bytes.
template <class T>
concept movable_on_devices = std::is_trivially_copyable_v<T> && 16 % sizeof(T) == 0;

/// Rank r gets in outs[r] the combination of part r of all inputs, `count` elements. Errors as submit(), and
/// errc::invalid_specification for spans that aren't as long as `members`.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_reduce_scatter(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                         std::span<const member> members, std::span<const T* const> ins,
                                         std::span<T* const> outs, std::size_t count, Op op = {},
                                         const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::reduce_scatter_call<T, Op>{{ins, outs, count}, op}, options);
}

/// submit_reduce_scatter of ranks that share `device`, in one launch. Errors as submit_shared().
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_reduce_scatter(Gangs& gangs, device_id device, Stream& stream,
                                                std::span<const member> members, std::span<const T* const> ins,
                                                std::span<T* const> outs, std::size_t count, Op op = {},
                                                const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members,
                                   detail::reduce_scatter_call<T, Op>{{ins, outs, count}, op}, options);
}

/// Every rank gets the `count` elements of each rank, in the order of ranks. Errors as submit_reduce_scatter.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_gather(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     std::span<const member> members, std::span<const T* const> ins,
                                     std::span<T* const> outs, std::size_t count, const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::all_gather_call<T>{{ins, outs, count}},
                                options);
}

/// submit_all_gather of ranks that share `device`, in one launch. Errors as submit_shared().
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_all_gather(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count,
                                            const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::all_gather_call<T>{{ins, outs, count}},
                                   options);
}

/// Part q of ins[r] becomes part r of outs[q]; each part has `count` elements. In place on all ranks or on none. Errors
/// as submit_reduce_scatter, and errc::invalid_specification where only some are in place.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_to_all(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     std::span<const member> members, std::span<const T* const> ins,
                                     std::span<T* const> outs, std::size_t count, const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::all_to_all_call<T>{{ins, outs, count}},
                                options);
}

/// submit_all_to_all of ranks that share `device`, in one launch. Errors as submit_shared() besides.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_all_to_all(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count,
                                            const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::all_to_all_call<T>{{ins, outs, count}},
                                   options);
}

/// Every rank gets the `count` elements of data[root]. Fails as submit_reduce_scatter does, and
/// with errc::invalid_specification if `root` isn't a rank.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_broadcast(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                    std::span<const member> members, std::span<T* const> data, std::size_t count,
                                    std::uint32_t root, const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::broadcast_call<T>{data, count, root},
                                options);
}

/// submit_broadcast of ranks that share `device`, in one launch. Errors as submit_shared() besides.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_broadcast(Gangs& gangs, device_id device, Stream& stream,
                                           std::span<const member> members, std::span<T* const> data, std::size_t count,
                                           std::uint32_t root, const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::broadcast_call<T>{data, count, root},
                                   options);
}

/// outs[root] gets the combination of all inputs, `count` elements; the other ranks' outputs aren't used. Errors as
/// submit_broadcast.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_reduce(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                 std::span<const member> members, std::span<const T* const> ins,
                                 std::span<T* const> outs, std::size_t count, std::uint32_t root, Op op = {},
                                 const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::reduce_call<T, Op>{{ins, outs, count}, op, root}, options);
}

/// submit_reduce of ranks that share `device`, in one launch. Errors as submit_shared() besides.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_reduce(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                        std::span<const T* const> ins, std::span<T* const> outs, std::size_t count,
                                        std::uint32_t root, Op op = {}, const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members,
                                   detail::reduce_call<T, Op>{{ins, outs, count}, op, root}, options);
}

/// Every rank gets the elements of each rank, in the order of ranks. counts[r] are the lengths of
/// all ranks' inputs, the same numbers on every rank, in memory that rank r's device reads. ins[r]
/// and outs[r] are at least as long as their elements need. Errors as submit_reduce_scatter, and
/// errc::invalid_specification for counts at null. The fault of a collective that ran is
/// errc::mismatch if lengths don't fit or differ between ranks.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_gatherv(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                      std::span<const member> members, std::span<const std::span<const T>> ins,
                                      std::span<const std::span<T>> outs, std::span<const std::uint64_t* const> counts,
                                      const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::all_gatherv_call<T>{{ins, outs, counts}},
                                options);
}

/// submit_all_gatherv of ranks that share `device`, in one launch. Errors as submit_shared() besides.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_all_gatherv(Gangs& gangs, device_id device, Stream& stream,
                                             std::span<const member> members, std::span<const std::span<const T>> ins,
                                             std::span<const std::span<T>> outs,
                                             std::span<const std::uint64_t* const> counts,
                                             const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::all_gatherv_call<T>{{ins, outs, counts}},
                                   options);
}

/// Rank r gets in outs[r] the combination of part r of all inputs. counts[r] are the lengths of all parts. In all else as
/// submit_all_gatherv.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_reduce_scatterv(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                          std::span<const member> members, std::span<const std::span<const T>> ins,
                                          std::span<const std::span<T>> outs,
                                          std::span<const std::uint64_t* const> counts, Op op = {},
                                          const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::reduce_scatterv_call<T, Op>{{ins, outs, counts}, op}, options);
}

/// submit_reduce_scatterv of ranks that share `device`, in one launch. Errors as submit_shared() besides.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_reduce_scatterv(Gangs& gangs, device_id device, Stream& stream,
                                                 std::span<const member> members,
                                                 std::span<const std::span<const T>> ins,
                                                 std::span<const std::span<T>> outs,
                                                 std::span<const std::uint64_t* const> counts, Op op = {},
                                                 const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members,
                                   detail::reduce_scatterv_call<T, Op>{{ins, outs, counts}, op}, options);
}

/// Rank r brings one part for each rank, one after the other, and gets the parts that the ranks
/// have for it, in their order. sends[r][q] elements go from r to q; receives[q][r] is the number
/// that q expects of them. Not in place. Otherwise as submit_all_gatherv. A program that knows only
/// its sends learns the rest by a submit_all_to_all of these counts before.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_to_allv(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                      std::span<const member> members, std::span<const std::span<const T>> ins,
                                      std::span<const std::span<T>> outs, std::span<const std::uint64_t* const> sends,
                                      std::span<const std::uint64_t* const> receives,
                                      const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::all_to_allv_call<T>{{ins, outs, sends}, receives}, options);
}

/// submit_all_to_allv of ranks that share `device`, in one launch. Errors as submit_shared() besides.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_all_to_allv(Gangs& gangs, device_id device, Stream& stream,
                                             std::span<const member> members, std::span<const std::span<const T>> ins,
                                             std::span<const std::span<T>> outs,
                                             std::span<const std::uint64_t* const> sends,
                                             std::span<const std::uint64_t* const> receives,
                                             const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members,
                                   detail::all_to_allv_call<T>{{ins, outs, sends}, receives}, options);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
