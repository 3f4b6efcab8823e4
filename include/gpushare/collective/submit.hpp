// SPDX-License-Identifier: Apache-2.0
// Collectives on the devices' streams: one cooperative launch per device, all of them or none, with the same body that
// rank threads call.
//
//   for (unsigned r = 0; r < group.size(); ++r) members.push_back(group.rank(r));     // of a device_communicator
//   auto code = gpushare::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, ins, outs, n);
//   streams[0].record().wait(gpushare::never);   auto fault = gpushare::fault_of(members[0]);
//
// The results have the bits that rank threads get, with two exceptions: the payloads of NaNs and,
// on a device, stages that add up rows, in the order of a block's threads (see row_sum).
//
// The launches wait for each other on the devices, so all blocks must be resident at once: a launch
// that a device can't hold is refused. A group that would fit alone, but not beside the groups
// submitted to its devices before, waits for them on the devices. The next collective of the same
// channel (a sequence of the group's collectives) on other streams waits likewise. (The node's gang
// order, detail/gang_residents.hpp, knows these groups. It doesn't know collectives in captured
// graphs that others launch.)
//
//  submit, submit_all_reduce, submit_run, submit_run_sharded            each rank on a stream of its own
//  submit_shared, submit_shared_all_reduce, submit_shared_run, ...      ranks that share a device, in one launch
//
// The `run` forms take pipelines (epilogue.hpp), one for each rank, which differ only in the memory that they point to:
//
//   std::vector<decltype(finish(0))> steps;     // finish(r): gs::reduced(x[r], width) | gs::rms_norm(weight[r], 1e-6F)
//   auto fused = gpushare::submit_run(node.gangs(), devices, std::span(streams), members,
//                                     std::span(std::as_const(steps)), outs);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/collectives.hpp>
#include <gpushare/collective/detail/submit.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Why the group's collectives fail, if they do: none until one has failed. Final once all ranks have returned.
[[nodiscard]] inline collective_fault fault_of(const member& me) noexcept { return me.fault(); }

/// Launches body[r] for rank r on streams[r], which is a stream of devices[r]: all of them, or none and an errc.
///   too_many_blocks         a device can't hold so many blocks at once
///   invalid_specification   the sizes of the spans differ, or more blocks than the communicator has
///   not_supported           the ranks' devices don't reach each other's memory, which this collective needs
///   duplicate_device        several ranks are on one device, whose launches may not run at once: see submit_shared
///   capturing               only some of the streams are being captured; if all are, the graph gets the collective
/// Throws what the streams throw; if that happens between two launches, the group is aborted, so that no rank hangs. Up
/// to 32 ranks, only the streams and the gang order allocate.
template <gang_order Gangs, launcher Stream, class Body>
[[nodiscard]] errc submit(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                          std::span<const member> members, std::span<const Body> bodies,
                          const launch_options& options = {}) {
    if (bodies.size() != members.size()) return errc::invalid_specification;
    return detail::submit_each(
        gangs, devices, streams, members, [&](std::size_t r) -> const Body& { return bodies[r]; }, options);
}

/// An all-reduce of `count` elements from ins[r] to outs[r] on every device. In all else as submit().
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_all_reduce(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     std::span<const member> members, std::span<const T* const> ins,
                                     std::span<T* const> outs, std::size_t count, Op op = {},
                                     const launch_options& options = {}) {
    return detail::submit_all_reduces(members, ins, outs, count, op, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_each(gangs, devices, streams, members, body_of, options, blocks);
    });
}

/// Launches bodies[r] for rank r, all on `stream` of `device`; `options.blocks` is of each rank.
/// Errors as submit(), and invalid_specification for more than max_shared_ranks.
template <gang_order Gangs, launcher Stream, class Body>
[[nodiscard]] errc submit_shared(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                 std::span<const Body> bodies, const launch_options& options = {}) {
    if (bodies.size() != members.size()) return errc::invalid_specification;
    return detail::submit_shared_each(
        gangs, device, stream, members, [&](std::size_t r) -> const Body& { return bodies[r]; }, options);
}

/// An all-reduce of `count` elements from ins[r] to outs[r]. In all else as submit_shared().
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_all_reduce(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count, Op op = {},
                                            const launch_options& options = {}) {
    return detail::submit_all_reduces(members, ins, outs, count, op, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_shared_each(gangs, device, stream, members, body_of, options, blocks);
    });
}

/// Launches steps[r] for rank r on streams[r], with the whole result to outs[r]. As submit() in all else, and besides:
///   invalid_specification   elements that aren't whole rows; a stage that needs whole rows, of more floats than fit into a slot
///                           of the communicator
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_run(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                              std::span<const member> members, std::span<const pipeline<T, Op, Stages...>> steps,
                              std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                              const launch_options& options = {}) {
    return detail::submit_pipelines<false>(members, steps, outs, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_each(gangs, devices, streams, members, body_of, options, blocks);
    });
}

/// The same where rank r keeps its own rows (`shard_of`) in outs[r].
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_run_sharded(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                      std::span<const member> members,
                                      std::span<const pipeline<T, Op, Stages...>> steps,
                                      std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                      const launch_options& options = {}) {
    return detail::submit_pipelines<true>(members, steps, outs, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_each(gangs, devices, streams, members, body_of, options, blocks);
    });
}

/// The same for ranks that share `device`: one launch on `stream` for all of them. As submit_shared() in all else.
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_shared_run(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                     std::span<const pipeline<T, Op, Stages...>> steps,
                                     std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                     const launch_options& options = {}) {
    return detail::submit_pipelines<false>(members, steps, outs, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_shared_each(gangs, device, stream, members, body_of, options, blocks);
    });
}

/// The same where rank r keeps its own rows (`shard_of`) in outs[r].
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_shared_run_sharded(Gangs& gangs, device_id device, Stream& stream,
                                             std::span<const member> members,
                                             std::span<const pipeline<T, Op, Stages...>> steps,
                                             std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                             const launch_options& options = {}) {
    return detail::submit_pipelines<true>(members, steps, outs, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_shared_each(gangs, device, stream, members, body_of, options, blocks);
    });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
