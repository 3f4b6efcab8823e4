// SPDX-License-Identifier: Apache-2.0
// Collectives of ranks that share one device, or one partition of it: one cooperative launch for all of them.
//
//   auto code = gpushare::submit_shared(node.gangs(), device, stream, members, std::span(bodies), {.blocks = 4});
//
// What the stream's SMs can't hold at once is refused with errc::too_many_blocks: it would hang.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// Ranks that one device can have: all bodies travel in the launch's arguments, so that a captured launch needs no memory.
inline constexpr std::uint32_t max_shared_ranks = 16;

namespace detail {

/// The blocks of rank r follow those of rank r - 1.
template <class Body>
struct shared_device_kernel {
    channel_view view;
    std::int64_t patience;  // ns
    Body bodies[max_shared_ranks];

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        const std::uint32_t lanes = ctx.num_blocks() / view.ranks;
        const std::uint32_t rank = ctx.block_rank() / lanes;
        team<C> t(ctx, view, rank, ctx.block_rank() % lanes, Body::kind, collective_now() + patience);
        if (t.enter()) (void)bodies[rank](t, lanes);
    }
};

}  // namespace detail

/// Launches bodies[r] for rank r, all on `stream` of `device`; `options.blocks` is of each rank. Errors as submit(), and
/// invalid_specification for more than max_shared_ranks.
template <gang_order Gangs, launcher Stream, class Body>
[[nodiscard]] errc submit_shared(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                 std::span<const Body> bodies, const launch_options& options = {}) {
    const std::size_t ranks = members.size();
    if (ranks == 0 || ranks > max_shared_ranks || bodies.size() != ranks || ranks != members[0].size() ||
        options.blocks == 0 || options.blocks > members[0].view().lanes)
        return errc::invalid_specification;
    if (!members[0].view().direct && !detail::works_through_slots<Body>) return errc::not_supported;
    const auto body = [&](std::size_t r) -> const Body& { return bodies[r < ranks ? r : 0]; };
    const detail::shared_device_kernel<Body> kernel{
        members[0].view(),
        options.patience.count(),
        {body(0), body(1), body(2), body(3), body(4), body(5), body(6), body(7), body(8), body(9), body(10), body(11),
         body(12), body(13), body(14), body(15)}};
    const auto blocks = static_cast<std::uint32_t>(ranks) * options.blocks;
    const std::uint64_t part =
        detail::device_parts::part_of(blocks, stream.max_cooperative_blocks(kernel, options.threads));
    if (part > detail::device_parts::whole_device) return errc::too_many_blocks;

    detail::gang_launch<Gangs, Stream> gang(gangs, std::span<const device_id>(&device, 1), members[0].channel());
    gang.make_room(device, part, stream);
    const errc code = stream.launch_cooperative({.blocks = blocks, .threads = options.threads, .hold = {}}, kernel);
    if (code == errc::none) gang.launched(device, part, stream);
    return code;
}

/// An all-reduce of ins[r] into outs[r].
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_all_reduce(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count, Op op = {},
                                            const launch_options& options = {}) {
    if (ins.size() != members.size() || outs.size() != members.size() || members.empty())
        return errc::invalid_specification;
    const collective_plan plan = members[0].tuning().plan(members[0].size(), count * sizeof(T));
    std::vector<detail::all_reduce_body<T, Op>> bodies;
    bodies.reserve(members.size());
    for (std::size_t r = 0; r < members.size(); ++r) bodies.push_back({ins[r], outs[r], count, op, plan});
    return submit_shared(gangs, device, stream, members, std::span<const detail::all_reduce_body<T, Op>>(bodies),
                         options);
}

}  // namespace gpushare::inline GPUSHARE_ABI
