// SPDX-License-Identifier: Apache-2.0
// Quantised all-reduces on the devices' streams: launched as the exact ones are (submit.hpp), with
// the bits that rank threads get (quantised_all_reduce.hpp).
//
//   auto code = gpushare::submit_quantised_all_reduce<float>(node.gangs(), devices,
//                                                            std::span(streams), members, ins, outs, n);
//   streams[0].record().wait(gpushare::never);   auto fault = gpushare::fault_of(members[0]);
//
// All elements go through the communicator's slots, chunk by chunk, with two waits a chunk that
// mostly are over when they begin. A slot of 32 KiB holds three chunks of some 7000 elements
// between two ranks; larger slots make for fewer chunks. Ranks needn't reach each other's buffers:
// `workspaces::on_host` does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/quantised.hpp>
#include <gpushare/collective/detail/submit.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Hands `submit` a function that makes each rank's body, and the table's number of blocks.
template <std::uint32_t Block, class T, class Op, class Submit>
[[nodiscard]] errc submit_quantised(std::span<const member> members, std::span<const T* const> ins,
                                    std::span<T* const> outs, std::size_t count, Op op, const Submit& submit) {
    if (members.empty() || ins.size() != members.size() || outs.size() != members.size())
        return errc::invalid_specification;
    const auto ranks = static_cast<std::uint32_t>(members.size());
    if (members[0].view().slot < chunk_layout::least_slot(ranks, Block)) return errc::invalid_specification;
    const std::uint32_t blocks = members[0].tuning().plan(ranks, count * sizeof(T)).blocks;
    return submit([&](std::size_t r) { return quantised_body<T, Op, Block>{ins[r], outs[r], count, op}; }, blocks);
}

}  // namespace detail

/// A quantised all-reduce of `count` elements from ins[r] to outs[r] on every device, with a scale
/// for each `Block` elements. In all else as submit(), and besides:
///   invalid_specification   a slot of the communicator is smaller than a block for each rank and
///                           one more
template <quantisable T, std::uint32_t Block = 128, gang_order Gangs, launcher Stream, quantised_operator Op = sum>
requires quantised_block<Block>
[[nodiscard]] errc submit_quantised_all_reduce(Gangs& gangs, std::span<const device_id> devices,
                                               std::span<Stream> streams, std::span<const member> members,
                                               std::span<const T* const> ins, std::span<T* const> outs,
                                               std::size_t count, Op op = {}, const launch_options& options = {}) {
    return detail::submit_quantised<Block>(
        members, ins, outs, count, op, [&](const auto& body_of, std::uint32_t blocks) {
            return detail::submit_each(gangs, devices, streams, members, body_of, options, blocks);
        });
}

/// The same of ranks that share `device`, in one launch on `stream`. In all else as
/// submit_shared().
template <quantisable T, std::uint32_t Block = 128, gang_order Gangs, launcher Stream, quantised_operator Op = sum>
requires quantised_block<Block>
[[nodiscard]] errc submit_shared_quantised_all_reduce(Gangs& gangs, device_id device, Stream& stream,
                                                      std::span<const member> members, std::span<const T* const> ins,
                                                      std::span<T* const> outs, std::size_t count, Op op = {},
                                                      const launch_options& options = {}) {
    return detail::submit_quantised<Block>(
        members, ins, outs, count, op, [&](const auto& body_of, std::uint32_t blocks) {
            return detail::submit_shared_each(gangs, device, stream, members, body_of, options, blocks);
        });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
