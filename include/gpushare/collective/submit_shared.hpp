// SPDX-License-Identifier: Apache-2.0
// Collectives of ranks that share one device, or one partition of it: one cooperative launch for all of them.
//
//   auto code = gpushare::submit_shared(node.gangs(), device, stream, members, std::span(bodies), {.blocks = 4});
//
// What the stream's SMs can't hold at once is refused with errc::too_many_blocks: it would hang.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Ranks that one device can have: all bodies travel in the launch's arguments, so that a captured launch needs no memory.
inline constexpr std::uint32_t max_shared_ranks = 16;

namespace detail {

/// The blocks of rank r follow those of rank r - 1.
template <class Body>
struct shared_device_kernel {
    channel_view view;
    std::int64_t patience;  // ns
    std::uint64_t aborted;  // as in a rank_kernel
    Body bodies[max_shared_ranks];

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        const std::uint32_t lanes = ctx.num_blocks() / view.ranks;
        const std::uint32_t rank = ctx.block_rank() / lanes;
        team<C> t(ctx, view, rank, ctx.block_rank() % lanes, Body::kind, ctx.now() + patience);
        t.heed(aborted);
        if (t.enter()) (void)bodies[rank](t, lanes);
    }
};

}  // namespace detail

namespace detail {

/// As submit_shared() below, with `body_of(r)` for the body of rank r.
template <gang_order Gangs, launcher Stream, class BodyOf>
requires std::invocable<const BodyOf&, std::size_t>
[[nodiscard]] errc submit_shared_each(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                      const BodyOf& body_of, const launch_options& options) {
    using body = std::remove_cvref_t<std::invoke_result_t<const BodyOf&, std::size_t>>;
    const std::size_t ranks = members.size();
    if (ranks == 0 || ranks > max_shared_ranks || ranks != members[0].size() || options.blocks == 0 ||
        options.blocks > members[0].view().lanes)
        return errc::invalid_specification;
    if (!members[0].view().direct && !works_through_slots<body>) return errc::not_supported;
    const auto some = [&](std::size_t r) -> decltype(auto) { return body_of(r < ranks ? r : 0); };
    const shared_device_kernel<body> kernel{
        members[0].view(),
        bounded(options.patience),
        members[0].asked(),
        {some(0), some(1), some(2), some(3), some(4), some(5), some(6), some(7), some(8), some(9), some(10), some(11),
         some(12), some(13), some(14), some(15)}};
    const auto blocks = static_cast<std::uint32_t>(ranks) * options.blocks;
    const std::uint64_t part = device_parts::part_of(blocks, stream.max_cooperative_blocks(kernel, options.threads));
    if (part > device_parts::whole_device) return errc::too_many_blocks;

    gang_launch<Gangs, Stream> gang(gangs, std::span<const device_id>(&device, 1), members[0].channel());
    if (const errc why = gang.prepare(std::span<Stream>(&stream, 1)); why != errc::none) return why;
    gang.make_room(device, part, stream);
    const errc code = stream.launch_cooperative({.blocks = blocks, .threads = options.threads, .hold = {}}, kernel);
    if (code == errc::none) gang.launched(device, part, 0, stream);
    return code;
}

}  // namespace detail

/// Launches bodies[r] for rank r, all on `stream` of `device`; `options.blocks` is of each rank. Errors as submit(), and
/// invalid_specification for more than max_shared_ranks.
template <gang_order Gangs, launcher Stream, class Body>
[[nodiscard]] errc submit_shared(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                 std::span<const Body> bodies, const launch_options& options = {}) {
    if (bodies.size() != members.size()) return errc::invalid_specification;
    return detail::submit_shared_each(
        gangs, device, stream, members, [&](std::size_t r) -> const Body& { return bodies[r]; }, options);
}

/// An all-reduce of ins[r] into outs[r].
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_all_reduce(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count, Op op = {},
                                            const launch_options& options = {}) {
    if (ins.size() != members.size() || outs.size() != members.size() || members.empty())
        return errc::invalid_specification;
    const all_reduce_plan plan = members[0].tuning().plan(members[0].size(), count * sizeof(T));
    const auto body_of = [&](std::size_t r) {
        return detail::all_reduce_body<T, Op>{ins[r], outs[r], count, op, plan};
    };
    return detail::submit_shared_each(gangs, device, stream, members, body_of, options);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
