// SPDX-License-Identifier: Apache-2.0
// Collectives on the devices' streams: one cooperative launch per device, with the same body that
// rank threads run. Either all launches happen, or none.
//
//   // pinned: e.g. gpushare::cuda::pinned_memory
//   gpushare::device_communicator group(node, pinned, devices, {.blocks = 8});
//   for (unsigned r = 0; r < group.size(); ++r) members.push_back(group.rank(r));
//   auto code = gpushare::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, ins, outs, n);
//   streams[0].record().wait(gpushare::never);   auto fault = gpushare::fault_of(members[0]);
//
// The results have the same bits as those of rank threads, with two exceptions: the payloads of
// NaNs, and on a device the stages that add up rows, because the order of the additions depends on
// the block's threads (see row_sum).
//
// The launches of a collective wait for each other on the devices, so all blocks must be resident
// at once. A launch that a device can't hold is refused. Sometimes a group would fit alone, but not
// alongside the groups that were submitted to its devices before. Such a group waits on the devices
// until there is room. A collective that follows on the same channel (a sequence of the group's
// collectives) waits likewise if it uses other streams. The node's gang order,
// detail/gang_residents.hpp, knows all these groups. It doesn't know collectives in captured graphs
// that other parts of the program launch.
//
// There are two forms of each call:
//  submit, submit_all_reduce, submit_run, submit_run_sharded
//                     each rank has a stream of its own
//  submit_shared, submit_shared_all_reduce, submit_shared_run, ...
//                     several ranks share a device, and one launch serves all of them
//
// The other collectives have the same two forms, submit_NAME and submit_shared_NAME:
//
//   // ins and outs: a pointer of each rank, to memory of its device
//   code = gpushare::submit_reduce_scatter<float>(node.gangs(), devices, std::span(streams), members, ins, outs, n);
//   code = gpushare::submit_shared_all_to_all<float>(node.gangs(), devices[0], streams[0], members, ins, outs, n);
//
//  - reduce_scatter: each rank brings size() * count elements, and rank r gets part r of all ranks'
//    elements, combined. In place, outs[r] is part r of ins[r].
//  - all_gather: each rank brings count elements and gets all ranks' elements. In place, ins[r] is
//    part r of outs[r].
//  - all_to_all: each rank brings a part of count elements for each rank, and rank r gets every
//    rank's part for rank r. In place, outs[r] is ins[r], on all ranks or on none.
//  - broadcast: the root's count elements go to all ranks, always in place.
//  - reduce: each rank brings count elements, and the root gets them combined. In place, outs[root]
//    is ins[root].
//
// Elements are combined in the order of ranks, so the results have the same bits as those of rank
// threads (collectives.hpp). Every collective of this list needs devices that reach each other's
// memory; without such access the call returns errc::not_supported.
//
// **Unequal parts**: submit_all_gatherv, submit_reduce_scatterv and submit_all_to_allv. Each rank
// reads the lengths from its own memory when its kernel runs, so the lengths must not change until
// the kernel has run. Kernels may compute the lengths (for example the number of tokens for each
// rank), and each launch of a captured graph takes the current lengths. A part may be empty.
// Lengths that don't fit into an array end the collective before anything is written. Ranks that
// disagree also end the collective, and their outputs are then undefined. In both cases all ranks
// get errc::mismatch, which names a rank with wrong lengths.
//
//   // as many numbers as ranks, on each rank's device
//   const std::uint64_t* counts[] = {counts_on_0, counts_on_1};
//   code = gpushare::submit_all_gatherv<float>(node.gangs(), devices, std::span(streams), members, parts, wholes, counts);
//
// The `run` forms take pipelines (epilogue.hpp), one for each rank, which differ only in the memory
// that they point to:
//
//   // finish(r): gs::reduced(x[r], width) | gs::rms_norm(weight[r], 1e-6F)
//   std::vector<decltype(finish(0))> steps;
//   auto fused = gpushare::submit_run(node.gangs(), devices, std::span(streams), members,
//                                     std::span(std::as_const(steps)), outs);
//
// The workspaces of a device_communicator, the memory through which the ranks talk to each other,
// are on the ranks' devices. The host never touches the workspaces. The host sees the ranks'
// progress, and asks for aborts, in memory that the host and all devices reach. Several ranks may
// be on one device. The constructor allocates all memory, so captured launches stay valid. If the
// devices don't reach each other's memory (gpushare::cuda::connect), the workspaces can be in the
// host's memory:
//
//   gpushare::device_communicator apart(node, pinned, devices, {.blocks = 8}, gpushare::workspaces::on_host);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/collectives.hpp>
#include <gpushare/collective/detail/groups.hpp>
#include <gpushare/collective/detail/ring.hpp>
#include <gpushare/collective/detail/stream_calls.hpp>
#include <gpushare/collective/detail/submit.hpp>
#include <gpushare/collective/detail/workspace.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The place of the ranks' workspaces.
///  - on_devices: each workspace is on its rank's device. All devices must reach each other's
///    memory.
///  - on_host: the workspaces are in the host's memory, for devices that don't reach each other's
///    memory. Only all_reduce, the quantised all-reduce and barrier work. Collectives that read the
///    other ranks' buffers, fused all-reduces among them, fail with errc::not_supported.
enum class workspaces : std::uint8_t {
    on_devices,  ///< each on its rank's device
    on_host,     ///< in memory of the host
};

/// A group of ranks on devices. One thread makes and destroys the group, at times when no
/// collective runs; const members are safe from any thread. `Visible` is memory that the host and
/// all devices read and write at the same addresses, with single-copy atomic accesses of 8 bytes.
template <class Node, class Visible>
class device_communicator {
    static_assert(node<Node> && copier<typename Node::stream>);
    static_assert(memory_resource<Visible>);

public:
    /// Rank r is on devices[r]. Allocates from the devices and from `visible`, both of which must
    /// outlive the communicator, and waits until the memory is initialised. Throws memory_error.
    /// Throws operation_error with errc::no_device, with errc::invalid_specification for 0 ranks,
    /// channels or blocks, or with a device's error from the initialisation.
    ///
    /// Without options, the communicator has the largest number of blocks for which
    /// tuning_table::for_devices() asks.
    device_communicator(Node& on, Visible& visible, std::span<const device_id> devices,
                        communicator_options options = {.blocks = 36}, workspaces where = workspaces::on_devices)
        : options_(std::move(options)), state_(std::make_unique<state>(on, visible)) {
        state& s = *state_;
        s.devices.assign(devices.begin(), devices.end());
        s.tuning = options_.tuning ? *options_.tuning : tuning_table::for_devices();
        if (size() == 0 || options_.channels == 0 || options_.blocks == 0)
            raise({.code = errc::invalid_specification, .because = reason::no_ranks}, {}, "making a communicator");
        const std::size_t areas = std::size_t{size()} * channels();
        const auto [slot, area] = detail::sizes_of_workspaces(
            size(), options_.blocks, std::max(options_.slot, bytes{detail::smallest_ring_slot}), areas);
        s.views.resize(areas);

        // The initial contents of one rank's workspace, for the devices to copy, followed by the
        // table of the addresses of all workspaces.
        std::vector<std::byte> image(area + table_bytes() + detail::interference_bytes);
        void* start = image.data();
        std::size_t space = image.size();
        auto* const first = static_cast<std::byte*>(std::align(detail::interference_bytes, area, start, space));
        const detail::workspace_view alone{&first, size(), options_.blocks, slot, 0, true, nullptr};
        alone.prepare_rank(0, options_.first_epoch);

        for (std::uint32_t c = 0; c < channels(); ++c) make_channel(c, first, area, slot, where);
    }

    device_communicator(device_communicator&&) noexcept = default;
    device_communicator& operator=(device_communicator&&) noexcept = default;

    /// The number of ranks.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(state_->devices.size()); }
    /// The number of channels of each rank.
    [[nodiscard]] std::uint32_t channels() const noexcept { return options_.channels; }
    /// The device of each rank.
    [[nodiscard]] std::span<const device_id> devices() const noexcept { return state_->devices; }

    /// Throws operation_error (errc::invalid_specification) for a rank or channel that doesn't
    /// exist.
    [[nodiscard]] member rank(std::uint32_t r, std::uint32_t channel = 0) const {
        if (r >= size())
            raise({errc::invalid_specification, r, 0, size(), reason::no_such_rank}, {},
                  "getting a rank of a communicator");
        if (channel >= channels())
            raise({errc::invalid_specification, channel, 0, channels(), reason::no_such_channel}, {},
                  "getting a channel of a communicator");
        return {state_->views[std::size_t{channel} * size() + r], state_->tuning, r};
    }

    /// The table of algorithms by size.
    [[nodiscard]] const tuning_table& tuning() const noexcept { return state_->tuning; }
    /// Sets the table. Only while no collective is submitted or runs.
    void set_tuning(tuning_table table) noexcept { state_->tuning = std::move(table); }

    /// A group of some of the ranks, in the given order, with memory of its own. The new group can
    /// be used alongside this group, or in place of this group after an abort. Throws as the
    /// constructor does, and errc::invalid_specification for a rank that doesn't exist.
    [[nodiscard]] device_communicator subgroup(std::span<const std::uint32_t> ranks) const {
        std::vector<device_id> of;
        for (const std::uint32_t r : ranks) of.push_back((void(rank(r)), state_->devices[r]));
        return remade(of);
    }

    /// One group for each colour, in ascending order of colours; colours[r] is the colour of rank
    /// r. Throws as subgroup() does, and errc::invalid_specification if the number of colours
    /// differs from the number of ranks.
    [[nodiscard]] std::vector<device_communicator> split(std::span<const std::uint32_t> colours) const {
        if (colours.size() != size())
            raise({errc::invalid_specification, colours.size(), 0, size(), reason::wrong_count}, {},
                  "splitting a communicator, colours");
        std::vector<device_communicator> groups;
        for (const auto& ranks : detail::ranks_by_colour(colours)) groups.push_back(subgroup(ranks));
        return groups;
    }

    /// A group of the ranks that aren't in `dead`. Throws as subgroup() does.
    [[nodiscard]] device_communicator shrink(std::span<const std::uint32_t> dead) const {
        return subgroup(detail::ranks_without(dead, size()));
    }

    /// A group of all ranks, in their order, followed by new ranks on these devices, with memory of
    /// its own. The new ranks replace dead ranks. New devices must reach the other devices' memory
    /// if workspaces are on devices (gpushare::cuda::connect). Throws as the constructor does.
    [[nodiscard]] device_communicator grow(std::span<const device_id> joining) const {
        std::vector<device_id> all = state_->devices;
        all.insert(all.end(), joining.begin(), joining.end());
        return remade(all);
    }

    /// Asks the ranks to end every current and later collective, on all channels, with this error.
    /// Doesn't wait.
    ///
    /// A rank notices the request while its first block waits for others: every 256 polls, a
    /// fraction of a millisecond. Its other blocks look every 65,536 polls. In an all-reduce, the
    /// first block also looks once for each MiB of its work, and rank 0 also looks once in each
    /// collective, while the ranks meet. The fault names the last collective that rank 0 has
    /// reported.
    ///
    /// So running collectives may still succeed, as may the first launch of a graph that was
    /// captured before. Collectives that are submitted from now on don't begin.
    void abort(std::uint32_t rank = 0, errc why = errc::aborted) const noexcept {
        for (std::uint32_t c = 0; c < channels(); ++c) {
            const member first(state_->views[std::size_t{c} * size()], state_->tuning, 0);
            const rank_progress at = first.progress();
            first.close({why, at.what, rank, at.epoch});
        }
    }

    /// The progress of each rank on one channel, for a hang_watch.
    [[nodiscard]] std::vector<rank_progress> progress(std::uint32_t channel = 0) const {
        std::vector<rank_progress> all(size());
        for (std::uint32_t r = 0; r < size(); ++r) all[r] = rank(r, channel).progress();
        return all;
    }

private:
    /// A group with the options of this group, on these devices.
    [[nodiscard]] device_communicator remade(std::span<const device_id> devices) const {
        communicator_options options = options_;
        options.tuning = state_->tuning;
        return {state_->node, state_->visible, devices, std::move(options),
                state_->views[0].direct ? workspaces::on_devices : workspaces::on_host};
    }
    struct block {
        void* at;
        std::size_t size;
        bool visible;
        device_id device;
    };
    /// The state is at a fixed address, so that members stay valid when the communicator moves.
    struct state {
        state(Node& on, Visible& visible_memory) : node(on), visible(visible_memory) {}
        state(const state&) = delete;
        state& operator=(const state&) = delete;
        ~state() {
            for (const block& b : blocks)
                if (b.visible)
                    (void)visible.deallocate(b.at, b.size, detail::interference_bytes);
                else
                    (void)node.memory(b.device).deallocate(b.at, b.size, detail::interference_bytes);
        }
        [[nodiscard]] void* take(device_id d, std::size_t n) {
            blocks.reserve(blocks.size() + 1);
            void* const p = node.memory(d).allocate(n, detail::interference_bytes);
            blocks.push_back({p, n, false, d});
            return p;
        }
        [[nodiscard]] void* take_visible(std::size_t n) {
            blocks.reserve(blocks.size() + 1);
            void* const p = visible.allocate(n, detail::interference_bytes);
            blocks.push_back({p, n, true, {}});
            return p;
        }

        Node& node;
        Visible& visible;
        tuning_table tuning;
        std::vector<device_id> devices;
        // of each rank, channel by channel: each has its own table of workspaces
        std::vector<detail::workspace_view> views;
        std::vector<block> blocks;
    };

    /// Allocates and initialises channel `c`. `image` is the initial workspace of one rank: `area`
    /// bytes, followed by room for the table of all workspaces. `slot` is in bytes.
    void make_channel(std::uint32_t c, std::byte* image, std::size_t area, std::size_t slot, workspaces where) {
        state& s = *state_;
        const bool on_devices = where == workspaces::on_devices;
        const bool one_device = on_devices && std::ranges::count(s.devices, s.devices[0]) == size();
        const std::size_t whole = area + table_bytes();
        std::vector<std::byte*> areas(size());
        for (std::uint32_t r = 0; r < size(); ++r)
            areas[r] = static_cast<std::byte*>(on_devices ? s.take(s.devices[r], whole) : s.take_visible(whole));
        auto* const reports = static_cast<detail::host_report*>(s.take_visible(size() * sizeof(detail::host_report)));
        std::copy_n(areas.data(), size(), reinterpret_cast<std::byte**>(image + area));
        std::memset(static_cast<void*>(reports), 0, size() * sizeof(detail::host_report));
        for (std::uint32_t r = 0; r < size(); ++r) {
            reports[r].place = std::uint64_t{options_.first_epoch} << 32;
            write(r, areas[r], image, whole);
            // 0 turns: the number only matters for rank threads, and this group has none.
            s.views[std::size_t{c} * size() + r] = {reinterpret_cast<std::byte* const*>(areas[r] + area),
                                                    size(),
                                                    options_.blocks,
                                                    slot,
                                                    0,
                                                    on_devices,
                                                    reports,
                                                    one_device};
        }
    }

    [[nodiscard]] std::size_t table_bytes() const noexcept {
        const std::size_t n = size() * sizeof(std::byte*);
        return (n + detail::interference_bytes - 1) / detail::interference_bytes * detail::interference_bytes;
    }

    void write(std::uint32_t rank, void* to, const void* from, std::size_t n) {
        auto stream = state_->node.make_stream(state_->devices[rank], priority{}, 0);
        stream.copy(to, from, n);
        const auto done = stream.record();
        done.wait(never);
        if (done.status() != errc::none)
            throw operation_error(done.status(), {}, "preparing the memory of a communicator");
    }

    communicator_options options_;
    std::unique_ptr<state> state_;
};

/// The fault with which the group's collectives fail; no fault until one has failed. The answer is
/// final once all ranks have returned.
[[nodiscard]] inline collective_fault fault_of(const member& me) noexcept { return me.fault(); }

/// Launches body[r] for rank r on streams[r], which is a stream of devices[r]. Launches all of
/// them, or returns an error and launches none:
///  - too_many_blocks: a device can't hold that many blocks at once
///  - invalid_specification: the sizes of the spans differ, or there are more blocks than the
///    communicator has
///  - not_supported: the ranks' devices don't reach each other's memory, which this collective
///    needs
///  - duplicate_device: several ranks are on one device whose launches may not run at once; see
///    submit_shared
///  - capturing: only some of the streams are being captured. If all streams are being captured,
///    the graph gets the collective.
/// Throws what the streams throw. If a stream throws between two launches, the group is aborted, so
/// that no rank hangs. Up to 32 ranks, nothing allocates but the streams and the gang order.
template <gang_order Gangs, launcher Stream, class Body>
[[nodiscard]] errc submit(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                          std::span<const member> members, std::span<const Body> bodies,
                          const launch_options& options = {}) {
    if (bodies.size() != members.size()) return errc::invalid_specification;
    return detail::submit_each(
        gangs, devices, streams, members, [&](std::size_t r) -> const Body& { return bodies[r]; }, options);
}

/// An all-reduce of `count` elements from ins[r] to outs[r] on every device. Otherwise works as
/// submit().
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_all_reduce(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     std::span<const member> members, std::span<const T* const> ins,
                                     std::span<T* const> outs, std::size_t count, Op op = {},
                                     const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::all_reduce_call<T, Op>{{ins, outs, count}, op}, options);
}

/// Launches bodies[r] for rank r, all of them in one launch on `stream` of `device`.
/// `options.blocks` counts each rank's blocks. Returns errors as submit() does, and
/// invalid_specification for more than max_shared_ranks ranks.
template <gang_order Gangs, launcher Stream, class Body>
[[nodiscard]] errc submit_shared(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                 std::span<const Body> bodies, const launch_options& options = {}) {
    if (bodies.size() != members.size()) return errc::invalid_specification;
    return detail::submit_shared_each(
        gangs, device, stream, members, [&](std::size_t r) -> const Body& { return bodies[r]; }, options);
}

/// An all-reduce of `count` elements from ins[r] to outs[r]. Otherwise works as submit_shared().
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_all_reduce(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count, Op op = {},
                                            const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members,
                                   detail::all_reduce_call<T, Op>{{ins, outs, count}, op}, options);
}

/// Launches steps[r] for rank r on streams[r], with the whole result to outs[r]. Otherwise works as
/// submit(), and returns invalid_specification in two more cases:
///  - the elements aren't whole rows
///  - a stage needs whole rows, and a row has more floats than fit into a slot of the communicator
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_run(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                              std::span<const member> members, std::span<const pipeline<T, Op, Stages...>> steps,
                              std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                              const launch_options& options = {}) {
    return detail::submit_pipelines<false>(members, steps, outs, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_each(gangs, devices, streams, members, body_of, options, blocks);
    });
}

/// Like submit_run, but rank r keeps its own rows (`shard_of`) in outs[r].
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

/// submit_run for ranks that share `device`: one launch on `stream` for all ranks. Otherwise works
/// as submit_shared().
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_shared_run(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                     std::span<const pipeline<T, Op, Stages...>> steps,
                                     std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                     const launch_options& options = {}) {
    return detail::submit_pipelines<false>(members, steps, outs, [&](const auto& body_of, std::uint32_t blocks) {
        return detail::submit_shared_each(gangs, device, stream, members, body_of, options, blocks);
    });
}

/// Like submit_shared_run, but rank r keeps its own rows (`shard_of`) in outs[r].
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

/// Types that devices move in whole vectors of 16 bytes: trivially copyable types of 1, 2, 4, 8 or
/// 16 bytes.
template <class T>
concept movable_on_devices = std::is_trivially_copyable_v<T> && 16 % sizeof(T) == 0;

/// Rank r gets the combination of part r of all inputs, `count` elements, in outs[r]. Returns
/// errors as submit() does, and errc::invalid_specification for spans that aren't as long as
/// `members`.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_reduce_scatter(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                         std::span<const member> members, std::span<const T* const> ins,
                                         std::span<T* const> outs, std::size_t count, Op op = {},
                                         const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::reduce_scatter_call<T, Op>{{ins, outs, count}, op}, options);
}

/// submit_reduce_scatter for ranks that share `device`, in one launch. Returns errors as
/// submit_shared() does.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_reduce_scatter(Gangs& gangs, device_id device, Stream& stream,
                                                std::span<const member> members, std::span<const T* const> ins,
                                                std::span<T* const> outs, std::size_t count, Op op = {},
                                                const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members,
                                   detail::reduce_scatter_call<T, Op>{{ins, outs, count}, op}, options);
}

/// Every rank gets the `count` elements of each rank, in the order of ranks. Returns errors as
/// submit_reduce_scatter does.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_gather(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     std::span<const member> members, std::span<const T* const> ins,
                                     std::span<T* const> outs, std::size_t count, const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::all_gather_call<T>{{ins, outs, count}},
                                options);
}

/// submit_all_gather for ranks that share `device`, in one launch. Returns errors as
/// submit_shared() does.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_all_gather(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count,
                                            const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::all_gather_call<T>{{ins, outs, count}},
                                   options);
}

/// Part q of ins[r] becomes part r of outs[q]; each part has `count` elements. All ranks work in
/// place, or none does. Returns errors as submit_reduce_scatter does, and
/// errc::invalid_specification if only some ranks are in place.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_to_all(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     std::span<const member> members, std::span<const T* const> ins,
                                     std::span<T* const> outs, std::size_t count, const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::all_to_all_call<T>{{ins, outs, count}},
                                options);
}

/// submit_all_to_all for ranks that share `device`, in one launch. Returns the errors of
/// submit_shared() as well.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_all_to_all(Gangs& gangs, device_id device, Stream& stream,
                                            std::span<const member> members, std::span<const T* const> ins,
                                            std::span<T* const> outs, std::size_t count,
                                            const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::all_to_all_call<T>{{ins, outs, count}},
                                   options);
}

/// Every rank gets the `count` elements of data[root]. Returns errors as submit_reduce_scatter
/// does, and errc::invalid_specification if `root` isn't a rank.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_broadcast(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                    std::span<const member> members, std::span<T* const> data, std::size_t count,
                                    std::uint32_t root, const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::broadcast_call<T>{data, count, root},
                                options);
}

/// submit_broadcast for ranks that share `device`, in one launch. Returns the errors of
/// submit_shared() as well.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_broadcast(Gangs& gangs, device_id device, Stream& stream,
                                           std::span<const member> members, std::span<T* const> data, std::size_t count,
                                           std::uint32_t root, const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::broadcast_call<T>{data, count, root},
                                   options);
}

/// outs[root] gets the combination of all inputs, `count` elements. The other ranks' outputs aren't
/// used. Returns errors as submit_broadcast does.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_reduce(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                 std::span<const member> members, std::span<const T* const> ins,
                                 std::span<T* const> outs, std::size_t count, std::uint32_t root, Op op = {},
                                 const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::reduce_call<T, Op>{{ins, outs, count}, op, root}, options);
}

/// submit_reduce for ranks that share `device`, in one launch. Returns the errors of
/// submit_shared() as well.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_shared_reduce(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                        std::span<const T* const> ins, std::span<T* const> outs, std::size_t count,
                                        std::uint32_t root, Op op = {}, const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members,
                                   detail::reduce_call<T, Op>{{ins, outs, count}, op, root}, options);
}

/// Every rank gets the elements of each rank, in the order of ranks. counts[r] points to the
/// lengths of all ranks' inputs, in memory that rank r's device reads; the numbers are the same on
/// every rank. ins[r] and outs[r] are at least as long as the counts require. Returns errors as
/// submit_reduce_scatter does, and errc::invalid_specification if a pointer to counts is null. If
/// lengths don't fit or differ between ranks, the collective runs and its fault is errc::mismatch.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_gatherv(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                      std::span<const member> members, std::span<const std::span<const T>> ins,
                                      std::span<const std::span<T>> outs, std::span<const std::uint64_t* const> counts,
                                      const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members, detail::all_gatherv_call<T>{{ins, outs, counts}},
                                options);
}

/// submit_all_gatherv for ranks that share `device`, in one launch. Returns the errors of
/// submit_shared() as well.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_shared_all_gatherv(Gangs& gangs, device_id device, Stream& stream,
                                             std::span<const member> members, std::span<const std::span<const T>> ins,
                                             std::span<const std::span<T>> outs,
                                             std::span<const std::uint64_t* const> counts,
                                             const launch_options& options = {}) {
    return detail::submit_together(gangs, device, stream, members, detail::all_gatherv_call<T>{{ins, outs, counts}},
                                   options);
}

/// Rank r gets the combination of part r of all inputs in outs[r]. counts[r] points to the lengths
/// of all parts. Otherwise works as submit_all_gatherv.
template <reducible T, gang_order Gangs, launcher Stream, class Op = sum>
[[nodiscard]] errc submit_reduce_scatterv(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                          std::span<const member> members, std::span<const std::span<const T>> ins,
                                          std::span<const std::span<T>> outs,
                                          std::span<const std::uint64_t* const> counts, Op op = {},
                                          const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::reduce_scatterv_call<T, Op>{{ins, outs, counts}, op}, options);
}

/// submit_reduce_scatterv for ranks that share `device`, in one launch. Returns the errors of
/// submit_shared() as well.
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

/// Rank r brings one part for each rank, one after the other, and gets the ranks' parts for rank r,
/// in the order of ranks. sends[r][q] elements go from r to q, and receives[q][r] is the number of
/// elements that q expects from r. Inputs and outputs must not overlap. Otherwise works as
/// submit_all_gatherv. A program that knows only its sends can learn its receives by a
/// submit_all_to_all of the counts first.
template <movable_on_devices T, gang_order Gangs, launcher Stream>
[[nodiscard]] errc submit_all_to_allv(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                      std::span<const member> members, std::span<const std::span<const T>> ins,
                                      std::span<const std::span<T>> outs, std::span<const std::uint64_t* const> sends,
                                      std::span<const std::uint64_t* const> receives,
                                      const launch_options& options = {}) {
    return detail::submit_apart(gangs, devices, streams, members,
                                detail::all_to_allv_call<T>{{ins, outs, sends}, receives}, options);
}

/// submit_all_to_allv for ranks that share `device`, in one launch. Returns the errors of
/// submit_shared() as well.
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
