// SPDX-License-Identifier: Apache-2.0
// The kernels of submitted collectives and their launch. Either each rank has a cooperative launch,
// and all launches happen or none; or all ranks that share a device have one launch. submit.hpp is
// the public part.
//
//   submit_each(gangs, devices, streams, members, [&](std::size_t r) { return body_of_rank(r); }, options)
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/fused_body.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/detail/stream_calls.hpp>
#include <gpushare/collective/detail/workspace.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/code_thrown.hpp>
#include <gpushare/detail/device_work.hpp>
#include <gpushare/detail/gang_residents.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How to launch a rank's kernel, and how long the kernel waits.
struct launch_options {
    /// The number of blocks of each rank, at most as many as the communicator has. 0 takes the
    /// number from the tuning table, or less if not as many blocks exist or fit side by side. The
    /// table is asked for an all-reduce of as many bytes as a rank's larger array has. With 0, a
    /// body that is submitted directly has one block.
    std::uint32_t blocks = 0;
    /// Threads of a block, on devices that allow more than one.
    std::uint32_t threads = 512;
    ns patience = std::chrono::seconds{10};  ///< how long a rank waits for the others once it runs
};

/// The most ranks of one device. All bodies travel in the launch's arguments, so that a captured
/// launch needs no memory.
inline constexpr std::uint32_t max_shared_ranks = 16;

namespace detail {

/// The patience in nanoseconds, limited so that adding it to a device's clock doesn't overflow.
[[nodiscard]] constexpr std::int64_t bounded(ns patience) noexcept {
    constexpr ns century = ns::max() / 2;
    return (patience < century ? patience : century).count();
}

/// The kernel of one rank.
template <class Body>
struct rank_kernel {
    workspace_view view;
    std::uint32_t rank;
    std::int64_t patience;  // ns
    // the fault that the host has requested so far, so the kernel needn't fetch it before it begins
    std::uint64_t aborted;
    Body body;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        session<C> s(ctx, view, rank, ctx.block_rank(), Body::kind, ctx.now() + patience);
        s.abort_if(aborted);
        // a fault stays in the workspace, where fault_of finds it
        if (s.enter()) (void)body(s, ctx.num_blocks());
    }
};

/// Whether a collective works if ranks only reach each other's workspaces.
template <class Body>
inline constexpr bool works_through_slots = requires {
    requires Body::through_slots;
};

/// Whether separate cooperative launches of a backend always run side by side on a device if they
/// fit.
template <class Stream>
inline constexpr bool launches_run_together = !requires {
    requires !Stream::launches_run_together;
};

/// Whether work that is enqueued now is captured into a graph.
template <class Stream>
[[nodiscard]] bool is_captured(const Stream& stream) {
    if constexpr (requires { stream.captured(); })
        return stream.captured();
    else
        return false;
}

/// A launch of collectives on some devices, all or none. The object keeps the order in which
/// launches are enqueued, and makes room for them.
template <class Gangs, class Stream>
class gang_launch {
public:
    gang_launch(Gangs& gangs, std::span<const device_id> devices, const void* channel)
        : entered_(gangs.enter(devices)), channel_(channel) {}

    /// Call this before the first launch. Does all work that may fail, or wait for the device, and
    /// that can be done before the launches. Returns errc::capturing if only some of the streams
    /// are being captured, by any thread: some ranks would then wait until the graph is launched.
    [[nodiscard]] errc prepare(std::span<Stream> streams) {
        std::size_t captured = 0;
        for (const Stream& s : streams) captured += is_captured(s) ? 1 : 0;
        captured_ = captured != 0;
        if (captured_) return captured == streams.size() ? errc::none : errc::capturing;
        if constexpr (room_making_order<Gangs, Stream>) points_.reserve(streams);
        return errc::none;
    }
    /// Whether the launch is captured. Captured work runs when its graph is launched, so nothing
    /// here can wait for it.
    [[nodiscard]] bool captured() const noexcept { return captured_; }

    /// Makes room for blocks of this gang that together take `part` of a device.
    void make_room(device_id d, std::uint64_t part, Stream& stream) {
        if constexpr (room_making_order<Gangs, Stream>)
            if (!captured_) entered_.make_room(d, part, channel_, stream);
    }
    /// Call this after the launch of blocks that take `part` of device `d`, on `stream`, which has
    /// number `r`.
    void launched(device_id d, std::uint64_t part, std::size_t r, Stream& stream) {
        if constexpr (room_making_order<Gangs, Stream>)
            if (!captured_) entered_.add(d, part, channel_, points_.record(r, stream));
    }

private:
    decltype(std::declval<Gangs&>().enter(std::span<const device_id>{})) entered_;
    const void* channel_;
    bool captured_ = false;
    [[no_unique_address]] point_reserve<Stream> points_;
};

using device_parts = gang_residents<immediate_point>;  // for the arithmetic of parts

/// Checks that both forms of submitting need. Refuses members that aren't a whole group, more
/// blocks than the group has, and memory that the group's devices can't reach.
template <class Body>
[[nodiscard]] errc check_members(std::span<const member> members, const launch_options& options) noexcept {
    if (members.empty() || members.size() != members[0].size() || options.blocks > members[0].view().blocks)
        return errc::invalid_specification;
    return members[0].view().direct || works_through_slots<Body> ? errc::none : errc::not_supported;
}

/// The number of blocks of each rank. If the caller left the number open, this is `planned`,
/// limited by the communicator's blocks and by each rank's `room`.
[[nodiscard]] inline std::uint32_t blocks_of(const member& of, const launch_options& options, std::uint32_t planned,
                                             std::uint64_t room) noexcept {
    if (options.blocks != 0) return options.blocks;
    const auto there = std::min<std::uint64_t>({std::max(planned, 1U), of.view().blocks, room});
    return static_cast<std::uint32_t>(std::max<std::uint64_t>(there, 1));
}

/// Each rank's part of its device, in device_parts. The parts are on the stack if there are few
/// ranks.
class rank_parts {
public:
    explicit rank_parts(std::size_t ranks) : ranks_(ranks), many_(ranks > few_.size() ? ranks : 0) {}

    [[nodiscard]] std::span<std::uint64_t> all() noexcept {
        return many_.empty() ? std::span(few_).first(ranks_) : std::span(many_);
    }
    [[nodiscard]] std::uint64_t operator[](std::size_t r) noexcept { return all()[r]; }
    /// The sum of the parts of all ranks on the device of `rank`.
    [[nodiscard]] std::uint64_t on_device_of(std::size_t rank, std::span<const device_id> devices) noexcept {
        std::uint64_t sum = 0;
        for (std::size_t r = 0; r < ranks_; ++r) sum += devices[r] == devices[rank] ? all()[r] : 0;
        return sum;
    }

private:
    std::size_t ranks_;
    std::array<std::uint64_t, ranks_in_place> few_{};
    std::vector<std::uint64_t> many_;
};

/// Returns the number of blocks of each rank, and fills in each rank's part of its device. Fails
/// with errc::too_many_blocks if a device can't hold the blocks of all its ranks, and with
/// errc::duplicate_device if launches of one device don't run together. `kernel(r)` is the kernel
/// of rank r.
template <launcher Stream, class KernelOf>
[[nodiscard]] result<std::uint32_t> divide_devices(std::span<const device_id> devices, std::span<Stream> streams,
                                                   const member& first, const launch_options& options,
                                                   std::uint32_t planned, const KernelOf& kernel, rank_parts& parts) {
    const std::size_t ranks = devices.size();
    if constexpr (!launches_run_together<Stream>)
        for (std::size_t r = 1; r < ranks; ++r)
            if (std::ranges::find(devices.first(r), devices[r]) != devices.begin() + static_cast<std::ptrdiff_t>(r))
                return errc::duplicate_device;
    // First finds how many blocks fit if they are alone on the device, then the part of the device
    // that they take.
    std::uint64_t least_room = std::numeric_limits<std::uint64_t>::max();
    for (std::size_t r = 0; r < ranks; ++r) {
        parts.all()[r] = streams[r].max_cooperative_blocks(kernel(r), options.threads);
        const auto beside = static_cast<std::uint64_t>(std::ranges::count(devices, devices[r]));
        least_room = std::min(least_room, parts[r] / beside);
    }
    const std::uint32_t blocks = blocks_of(first, options, planned, least_room);
    for (std::uint64_t& p : parts.all()) p = device_parts::part_of(blocks, static_cast<std::uint32_t>(p));
    for (std::size_t r = 0; r < ranks; ++r)
        if (parts.on_device_of(r, devices) > device_parts::whole_device) return errc::too_many_blocks;
    return blocks;
}

/// Works as submit() in the public header, with `body_of(r)` for the body of rank r. The body is
/// made at its launch and not kept. `planned` is the number of blocks if `options` leaves the
/// number open.
template <gang_order Gangs, launcher Stream, class BodyOf>
requires std::invocable<const BodyOf&, std::size_t>
[[nodiscard]] errc submit_each(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                               std::span<const member> members, const BodyOf& body_of, const launch_options& options,
                               std::uint32_t planned = 1) {
    using body = std::remove_cvref_t<std::invoke_result_t<const BodyOf&, std::size_t>>;
    const std::size_t ranks = members.size();
    if (devices.size() != ranks || streams.size() != ranks) return errc::invalid_specification;
    if (const errc why = check_members<body>(members, options); why != errc::none) return why;
    const auto kernel = [&](std::size_t r) {
        return rank_kernel<body>{members[r].view(), members[r].rank(), bounded(options.patience), members[r].asked(),
                                 body_of(r)};
    };
    rank_parts parts(ranks);
    const auto blocks = divide_devices(devices, streams, members[0], options, planned, kernel, parts);
    if (!blocks) return blocks.code();

    gang_launch<Gangs, Stream> gang(gangs, devices, members[0].channel());
    if (const errc why = gang.prepare(streams); why != errc::none) return why;
    for (std::size_t r = 0; r < ranks; ++r) gang.make_room(devices[r], parts.on_device_of(r, devices), streams[r]);
    const grid g{.blocks = *blocks, .threads = options.threads, .hold = {}};
    std::size_t r = 0;
    bool any = false;  // whether a launch already runs, and waits for the other ranks
    const auto give_up = [&](errc why) {
        if (any) members[0].close({why, body::kind, static_cast<std::uint32_t>(r), 0});
        return why;
    };
    try {
        for (; r < ranks; ++r) {
            const errc code = streams[r].launch_cooperative(g, kernel(r));
            if (code != errc::none) return give_up(code);
            any = !gang.captured();
            gang.launched(devices[r], parts[r], r, streams[r]);
        }
    } catch (...) {
        (void)give_up(code_thrown(errc::submission_failed));
        throw;
    }
    return errc::none;
}

/// One kernel for all ranks. The blocks of rank r follow those of rank r - 1.
template <class Body>
struct shared_device_kernel {
    workspace_view view;
    std::int64_t patience;  // ns
    std::uint64_t aborted;  // as in rank_kernel
    Body bodies[max_shared_ranks];

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        const std::uint32_t blocks = ctx.num_blocks() / view.ranks;
        const std::uint32_t rank = ctx.block_rank() / blocks;
        session<C> s(ctx, view, rank, ctx.block_rank() % blocks, Body::kind, ctx.now() + patience);
        s.abort_if(aborted);
        // a copy in registers: otherwise each use would look the body up in the array
        const Body mine = bodies[rank];
        if (s.enter()) (void)mine(s, blocks);
    }
};

/// Works as submit_shared() in the public header, with `body_of(r)` for the body of rank r.
template <gang_order Gangs, launcher Stream, class BodyOf>
requires std::invocable<const BodyOf&, std::size_t>
[[nodiscard]] errc submit_shared_each(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                      const BodyOf& body_of, const launch_options& options, std::uint32_t planned = 1) {
    using body = std::remove_cvref_t<std::invoke_result_t<const BodyOf&, std::size_t>>;
    const std::size_t ranks = members.size();
    if (ranks > max_shared_ranks) return errc::invalid_specification;
    if (const errc why = check_members<body>(members, options); why != errc::none) return why;
    const auto some = [&](std::size_t r) -> decltype(auto) { return body_of(r < ranks ? r : 0); };
    const shared_device_kernel<body> kernel{
        members[0].view(),
        bounded(options.patience),
        members[0].asked(),
        {some(0), some(1), some(2), some(3), some(4), some(5), some(6), some(7), some(8), some(9), some(10), some(11),
         some(12), some(13), some(14), some(15)}};
    const std::uint32_t room = stream.max_cooperative_blocks(kernel, options.threads);
    const std::uint32_t blocks =
        static_cast<std::uint32_t>(ranks) * blocks_of(members[0], options, planned, room / ranks);
    const std::uint64_t part = device_parts::part_of(blocks, room);
    if (part > device_parts::whole_device) return errc::too_many_blocks;

    gang_launch<Gangs, Stream> gang(gangs, std::span<const device_id>(&device, 1), members[0].channel());
    if (const errc why = gang.prepare(std::span<Stream>(&stream, 1)); why != errc::none) return why;
    gang.make_room(device, part, stream);
    const errc code = stream.launch_cooperative({.blocks = blocks, .threads = options.threads, .hold = {}}, kernel);
    if (code == errc::none) gang.launched(device, part, 0, stream);
    return code;
}

/// Calls `submit` with a function that makes each rank's body of a call (detail/stream_calls.hpp),
/// and with the number of blocks from the table.
template <stream_call Call, class Submit>
[[nodiscard]] errc submit_call(std::span<const member> members, const Call& call, const Submit& submit) {
    const auto ranks = static_cast<std::uint32_t>(members.size());
    if (members.empty() || !call.fits(ranks)) return errc::invalid_specification;
    const all_reduce_plan plan = members[0].tuning().plan(ranks, call.bytes(ranks));
    return submit([&](std::size_t r) { return call.body(r, plan); }, plan.blocks);
}

/// Submits a call on a stream of each rank's device.
template <gang_order Gangs, launcher Stream, stream_call Call>
[[nodiscard]] errc submit_apart(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                std::span<const member> members, const Call& call, const launch_options& options) {
    return submit_call(members, call, [&](const auto& body_of, std::uint32_t blocks) {
        return submit_each(gangs, devices, streams, members, body_of, options, blocks);
    });
}

/// Submits a call of ranks that share a device, in one launch.
template <gang_order Gangs, launcher Stream, stream_call Call>
[[nodiscard]] errc submit_together(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                   const Call& call, const launch_options& options) {
    return submit_call(members, call, [&](const auto& body_of, std::uint32_t blocks) {
        return submit_shared_each(gangs, device, stream, members, body_of, options, blocks);
    });
}

/// submit_apart(), or submit_together() on the only stream.
template <gang_order Gangs, launcher Stream, stream_call Call>
[[nodiscard]] errc submit_on(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                             std::span<const member> members, const Call& call, const launch_options& options) {
    return streams.size() == 1 ? submit_together(gangs, devices[0], streams[0], members, call, options)
                               : submit_apart(gangs, devices, streams, members, call, options);
}

/// submit_call() for a pipeline.
template <bool Sharded, class Submit, class T, class Op, class... Stages>
[[nodiscard]] errc submit_pipelines(std::span<const member> members, std::span<const pipeline<T, Op, Stages...>> steps,
                                    std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                    const Submit& submit) {
    static_assert(!std::integral<T> && !std::same_as<T, double>, "gpushare: epilogues compute in float");
    if (members.empty() || steps.size() != members.size() || outs.size() != members.size())
        return errc::invalid_specification;
    const std::size_t slot = members[0].view().slot;
    for (const auto& p : steps) {
        constexpr std::size_t columns = columns_in<typename pipeline<T, Op, Stages...>::out_type>;
        constexpr std::size_t unit = columns == 2 ? 2 : row_unit<Stages...>;
        if (p.width == 0 || p.width % unit != 0 || p.count % p.width != 0) return errc::invalid_specification;
        if (epilogue<Stages...>::whole_rows && p.width * sizeof(float) > slot) return errc::invalid_specification;
    }
    const auto plan_of = [&](const auto& p) {
        return members[0].tuning().fused(members[0].size(), p.count * sizeof(T));
    };
    return submit(
        [&](std::size_t r) {
            return fused_body<T, Op, Sharded, Stages...>{steps[r], outs[r], plan_of(steps[r])};
        },
        plan_of(steps[0]).blocks);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
