// SPDX-License-Identifier: Apache-2.0
// Collectives on the devices' streams: one cooperative launch per device, submitted together or not at all, with the same
// body that rank threads call.
//
//   auto code = gpushare::submit_all_reduce(node.gangs(), devices, streams, members, ins, outs, gpushare::sum{}, {.blocks = 2});
//   streams[0].record().wait(never);   auto fault = gpushare::fault_of(members[0]);
//
// Lane i is block i of each rank. The launches wait for each other on the devices, so all must become resident: what a
// device can't hold at once is refused. The gang order makes two groups enqueue in the same order on every device. It doesn't
// make devices start them in that order: groups that use the same devices at the same time must fit there together, or be
// submitted one after the other (by gang_permit, say), or else they wait for each other until their patience is over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/atomic_ref.hpp>
#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/exchange.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/team.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

struct launch_options {
    std::uint32_t blocks = 1;                // of each rank, at most the communicator's lanes
    std::uint32_t threads = 256;             // of a block, where a device has more than one
    ns patience = std::chrono::seconds{10};  // how long a rank waits for the others once it runs
};

namespace detail {

/// A rank's kernel: each block is a lane.
template <class Body>
struct rank_kernel {
    channel_view view;
    std::uint32_t rank;
    std::int64_t patience;  // ns
    Body body;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        team<C> t(ctx, view, rank, ctx.block_rank(), Body::kind, collective_now() + patience);
        if (t.enter()) (void)body(t, ctx.num_blocks());  // a fault stays in the channel: see fault_of
    }
};

/// Several ranks on one device, in one launch: the blocks of rank r follow those of rank r - 1.
template <class Body>
struct shared_device_kernel {
    channel_view view;
    const Body* bodies;  // one per rank, where the device can read them
    std::int64_t patience;

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

/// Why the group's collectives fail, if they do: none until one has failed, then the same for ever.
[[nodiscard]] inline collective_fault fault_of(const member& me) noexcept {
    return collective_fault::unpacked(atomic_ref{me.view().own(me.rank(), 0).verdict}.load_acquire());
}

/// Launches body[r] for rank r on streams[r], which is a stream of devices[r]: all of them, or none and an errc.
///   too_many_blocks         a device can't hold so many blocks at once
///   invalid_specification   the sizes of the spans differ, or more blocks than the communicator has lanes
/// Throws what the streams throw; if that happens between two launches, the group is aborted, so nobody hangs.
template <gang_order Gangs, launcher Stream, class Body>
[[nodiscard]] errc submit(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                          std::span<const member> members, std::span<const Body> bodies,
                          const launch_options& options = {}) {
    const std::size_t ranks = members.size();
    if (ranks == 0 || devices.size() != ranks || streams.size() != ranks || bodies.size() != ranks ||
        ranks != members[0].size() || options.blocks == 0 || options.blocks > members[0].view().lanes)
        return errc::invalid_specification;
    const auto kernel = [&](std::size_t r) {
        return detail::rank_kernel<Body>{members[r].view(), members[r].rank(), options.patience.count(), bodies[r]};
    };
    for (std::size_t r = 0; r < ranks; ++r)
        if (options.blocks > streams[r].max_cooperative_blocks(kernel(r), options.threads))
            return errc::too_many_blocks;

    const auto entered = gangs.enter(devices);
    const grid g{.blocks = options.blocks, .threads = options.threads, .hold = {}};
    const auto give_up = [&](errc why) {
        team<thread_context>::close(members[0].view(), {why, Body::kind, 0, 0});
        return why;
    };
    try {
        for (std::size_t r = 0; r < ranks; ++r) {
            const errc code = streams[r].launch_cooperative(g, kernel(r));
            if (code != errc::none) return r == 0 ? code : give_up(code);
        }
    } catch (...) {
        (void)give_up(errc::submission_failed);
        throw;
    }
    return errc::none;
}

/// An all-reduce of ins[r] into outs[r] on every device.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_all_reduce(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     std::span<const member> members, std::span<const T* const> ins,
                                     std::span<T* const> outs, std::size_t count, Op op = {},
                                     const launch_options& options = {}) {
    if (ins.size() != members.size() || outs.size() != members.size() || members.empty())
        return errc::invalid_specification;
    const collective_plan plan = members[0].tuning().plan(members[0].size(), count * sizeof(T));
    std::vector<detail::all_reduce_body<T, Op>> bodies;
    bodies.reserve(members.size());
    for (std::size_t r = 0; r < members.size(); ++r) bodies.push_back({ins[r], outs[r], count, op, plan});
    return submit(gangs, devices, streams, members, std::span<const detail::all_reduce_body<T, Op>>(bodies), options);
}

}  // namespace gpushare::inline GPUSHARE_ABI
