// SPDX-License-Identifier: Apache-2.0
// Errors, in three forms: `errc` is the code, `failure` adds the reason with its figures but
// without text or allocation (for `try_` calls), and exceptions add a sentence for people.
//
//   try { ... } catch (const gpushare::error& e) { log(e.what()); if (e.code() == gpushare::errc::over_quota) ...; }
//
// A refusal of memory is a std::bad_alloc, every other exception a std::runtime_error, and both are
// a gpushare::error.
//
// A `reason` gives more detail than a code, and says what the figures of a failure mean:
//
//   gpushare::failure why{.code = gpushare::errc::bad_alignment, .asked = 3, .because = gpushare::reason::no_power_of_two};
//
// To add an error, add a line to `reason` and a line to `detail::sentences`;
// tests/base/error_test.cpp prints all of them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Error codes.
enum class errc : std::uint8_t {
    none,  ///< nothing
    // memory
    over_quota,     ///< the tenant's own limit
    out_of_memory,  ///< the device, or whatever is below the quota
    size_overflow,  ///< a size that no device has, or that wraps when it is rounded up
    bad_alignment,  ///< zero, not a power of two, or larger than supported
    unknown_block,  ///< a free of something never allocated here, or freed already
    wrong_size,     ///< a free whose size or alignment differs from the allocation's
    // admission and partitions
    invalid_specification,  ///< the request makes no sense
    duplicate_name,         ///< a tenant has that name
    not_whole,              ///< N doesn't divide into M parts of whole units
    too_few_devices,        ///< fewer devices than asked for
    duplicate_device,       ///< the same device twice in one partition
    different_nodes,        ///< devices of several nodes in one partition
    no_room,                ///< not enough unpromised memory
    share_exceeded,         ///< the promised shares would sum to more than the whole device
    too_few_sms,            ///< fewer SMs than asked for
    slo_unreachable,        ///< others' longest work alone takes longer than the latency goal
    // compute
    deadline_exceeded,  ///< it took longer than the caller would wait
    stopped,            ///< a stop was requested while waiting
    closed,             ///< the tenant or limiter is closing
    queue_full,         ///< the tenant's queue limit
    quarantined,        ///< the tenant failed too often in a row
    asleep,             ///< the tenant sleeps, and refuses requests
    too_many_blocks,    ///< a cooperative launch that can't be resident at once
    submission_failed,  ///< the callable that enqueues work threw
    kernel_failed,      ///< the work itself failed on the device
    stuck,              ///< the work doesn't end
    device_lost,        ///< the device is gone: everything on it failed
    // backends
    no_driver,       ///< the machine has no driver, or one that doesn't fit
    not_supported,   ///< the driver or device can't do that
    capturing,       ///< not while work is captured into a graph
    backend_failed,  ///< the device's runtime refused a call for another reason
    no_device,       ///< there is no such device
    io_failed,       ///< a file couldn't be read or written
    // collectives
    in_flight,  ///< earlier work is in flight: a rank's collective, or a block's or tenant's move
    mismatch,   ///< ranks called different collectives, or with different sizes
    aborted,    ///< a rank, or the embedder, gave up the collective
};

/// In English, without a full stop.
[[nodiscard]] constexpr std::string_view to_string(errc code) noexcept {
    switch (code) {
        case errc::none: return "no error";
        case errc::over_quota: return "over the quota";
        case errc::out_of_memory: return "out of device memory";
        case errc::size_overflow: return "more than any device has";
        case errc::bad_alignment: return "unsupported alignment";
        case errc::unknown_block: return "block is not allocated here";
        case errc::wrong_size: return "block was allocated with another size or alignment";
        case errc::invalid_specification: return "invalid specification";
        case errc::duplicate_name: return "name is taken";
        case errc::not_whole: return "does not divide into equal whole parts";
        case errc::too_few_devices: return "not enough devices";
        case errc::duplicate_device: return "the same device twice";
        case errc::different_nodes: return "devices are not on one node";
        case errc::no_room: return "not enough unpromised memory";
        case errc::share_exceeded: return "shares would exceed the whole device";
        case errc::too_few_sms: return "not enough SMs";
        case errc::slo_unreachable: return "others' longest work makes the latency goal impossible";
        case errc::deadline_exceeded: return "deadline exceeded";
        case errc::stopped: return "stop requested";
        case errc::closed: return "closed";
        case errc::queue_full: return "queue is full";
        case errc::quarantined: return "quarantined after repeated failures";
        case errc::asleep: return "asleep";
        case errc::too_many_blocks: return "blocks cannot all be resident at once";
        case errc::submission_failed: return "enqueuing the work threw an exception";
        case errc::kernel_failed: return "the work failed on the device";
        case errc::stuck: return "the work does not end";
        case errc::device_lost: return "device lost";
        case errc::no_driver: return "no usable device driver";
        case errc::not_supported: return "not supported by the driver or device";
        case errc::capturing: return "not allowed during a graph capture";
        case errc::backend_failed: return "the device's runtime refused the call";
        case errc::no_device: return "no such device";
        case errc::io_failed: return "a file could not be read or written";
        case errc::in_flight: return "an earlier operation is still in flight";
        case errc::mismatch: return "the ranks called different collectives";
        case errc::aborted: return "aborted";
    }
    return "unknown error";
}

/// The unit of a failure's figures.
enum class figure_unit : std::uint8_t {
    none,          ///< the failure has no figures
    bytes,         ///< of memory
    permille,      ///< of a device's time
    nanoseconds,   ///< of time
    count,         ///< of the things that the reason names
    position,      ///< an index or rank from 0, or a line from 1, as the reason says
    error_number,  ///< `asked` is errno
};

/// The detailed reason for a refusal, which also says what `failure::asked`, `left` and `limit`
/// are. Figures that aren't named are 0.
enum class reason : std::uint16_t {
    unsaid,  ///< as the code alone says
    // of any code
    size,          ///< bytes: asked
    size_left,     ///< bytes: asked, left, limit
    size_limit,    ///< bytes: asked; limit: the most that is allowed
    count_limit,   ///< a count: asked; limit: the most that is allowed
    wrong_count,   ///< a count: asked: how many were given; limit: how many are needed
    system_error,  ///< asked: errno
    text_line,     ///< asked: the line of a text, from 1, that can't be read
    host_memory,   ///< the host, not the device, is out of memory: no figures
    // memory
    quota_above,  ///< bytes: asked, left, limit of a quota above, used by other quotas, too
    /// bytes: asked; left: the most that others' guarantees leave; limit: of the quota
    guaranteed_to_others,
    beyond_device,  ///< bytes: asked; limit: the device's size
    /// bytes: asked; left: the largest contiguous block; limit: all free bytes
    largest_block,
    no_power_of_two,      ///< asked: the alignment
    alignment_too_large,  ///< asked: the alignment; limit: the largest available
    whole_sizes,          ///< bytes: asked; limit: the required unit
    no_addresses,         ///< bytes: asked
    beyond_arena,         ///< bytes: asked; left: from its offset to the end; limit: the arena
    occupied,             ///< memory is there already, or the ranges overlap: no figures
    other_pool,           ///< the arenas are of two pools: no figures
    no_lender,            ///< bytes: asked to borrow, by a quota without a quota above it
    other_tree,           ///< the quota isn't below the quota that is exchanged: no figures
    /// asked: the part that the block says it is of; limit: how many there are
    other_part,
    pages_of_nothing,  ///< bytes: asked: the page
    // admission and partitions
    shares_exceeded,  ///< permille: asked, left, limit
    too_few_devices,  ///< a count: asked; left: how many there are
    share_there,      ///< permille: asked; left: in the best place
    memory_there,     ///< bytes: asked; left: in the best place
    cpu_there,        ///< thousandths of a CPU: asked; left: on the best node
    /// no node has the model, is in the zone, or is near enough, as asked for: no figures
    no_such_node,
    named_devices,     ///< a count: asked; left: how many the placement names
    node_size,         ///< asked: devices of a node; limit: the most that its type has
    weights_exceeded,  ///< permille: asked: the sum of all shares; limit: the whole
    no_such_part,      ///< asked: the part; limit: the number of the tenant's devices
    device_twice,      ///< asked: the device's index
    other_node,        ///< asked: the index of the device that isn't on the first one's node
    no_such_device,    ///< asked: the device's index; limit: how many there are
    no_such_slice,     ///< asked: the slice; limit: how many the device has
    sms_left,          ///< SMs: asked, left, limit
    /// SMs: asked; left: the next smaller available number; limit: the unit
    whole_sms,
    no_memory_named,  ///< neither memory nor burst: no figures
    burst_limit,      ///< bytes: asked: memory and burst of a device; limit: the most of a quota
    has_source,       ///< the device has memory of that kind already: no figures
    no_spill,         ///< the tenant was admitted without `spill`: no figures
    no_spill_target,  ///< the tenancy was made without `spill_to`: no figures
    no_such_stack,    ///< the device doesn't offer the tenant's memory stack: no figures
    bad_usage_line,   ///< a line of a usage journal without a name or a length: no figures
    no_time,          ///< a time span that ends before it begins: no figures
    other_place,      ///< the tenant isn't where the plan assumes: no figures
    victims_left,     ///< a count: asked: tenants still there; limit: tenants that got notice
    wrong_blocks,     ///< a count: asked: how many were given; limit: how many were parked
    unknown_number,   ///< asked: a reservation's or a notice's number
    // compute
    /// ns: asked; left: alongside others' longest work; limit: the shortest that can be kept
    objective_too_short,
    queue_limit,     ///< limit: how many submissions may wait
    no_caps,         ///< a cap, under a policy that has none: no figures
    no_classes,      ///< a class, under a policy that has none: no figures
    empty_callable,  ///< the callable that enqueues the work is empty: no figures
    no_such_stream,  ///< asked: the stream; limit: how many the tenant has
    no_such_group,   ///< no group of allocations has that tag: no figures
    no_such_width,   ///< a part of the SMs that isn't from 0 to 1: no figures
    no_candidates,   ///< nothing to choose from: no figures
    no_words,        ///< a name with blanks, or a time below 0: no figures
    no_members,      ///< a gang, or a set of ranks, without members: no figures
    // collectives
    rank_failed,      ///< asked: the epoch; left: the rank
    no_such_rank,     ///< asked: the rank; limit: how many there are
    no_ranks,         ///< a communicator without a rank, a channel or a block: no figures
    rank_twice,       ///< asked: the rank
    no_such_channel,  ///< asked: the channel; limit: how many there are
    tuned_sizes,      ///< bytes: asked: the smallest size; limit: the largest
    unequal_parts,    ///< a count: asked: elements; limit: parts
    no_such_link,     ///< asked: the larger rank of a link; limit: how many there are
    no_order,         ///< a count: asked: how many are named; limit: how many there are
    bad_choice,       ///< text that isn't what save() wrote: no figures
    not_float,        ///< 16 bits on the wire for a type that isn't a float: no figures
    no_channel,       ///< nothing in flight: no figures
    no_mpi,           ///< MPI isn't initialised: no figures
    main_thread,      ///< only the main thread may call MPI, and this is another: no figures
    mpi_threads,      ///< levels of MPI_Init_thread: asked, limit
    all               ///< not a reason: the number of reasons
};

namespace detail {

/// The sentence for a reason.
struct sentence {
    reason of = reason::unsaid;            ///< the reason that the sentence is for
    errc code = errc::none;                ///< the only code with this reason; none: any code
    figure_unit unit = figure_unit::none;  ///< of its figures
    /// {asked}, {left}, {limit} in its unit, {code} as to_string() says it
    std::string_view text{};
};

/// One line for each reason, in their order.
inline constexpr std::array<sentence, static_cast<std::size_t>(reason::all)> sentences{{
    {reason::unsaid, errc::none, figure_unit::none, "{code}"},
    {reason::size, errc::none, figure_unit::bytes, "asked for {asked} ({code})"},
    {reason::size_left, errc::none, figure_unit::bytes, "asked for {asked}, {left} of {limit} left ({code})"},
    {reason::size_limit, errc::none, figure_unit::bytes, "asked for {asked}, at most {limit} is allowed ({code})"},
    {reason::count_limit, errc::none, figure_unit::count, "asked for {asked}, at most {limit} is allowed ({code})"},
    {reason::wrong_count, errc::none, figure_unit::count, "{asked} given, {limit} needed ({code})"},
    {reason::system_error, errc::none, figure_unit::error_number, "{code}: {asked}"},
    {reason::text_line, errc::invalid_specification, figure_unit::position, "line {asked} can't be read"},
    {reason::host_memory, errc::out_of_memory, figure_unit::none, "the host, not the device, is out of memory"},
    {reason::quota_above, errc::out_of_memory, figure_unit::bytes,
     "asked for {asked}, {left} of {limit} left (others who share the memory have the rest)"},
    {reason::guaranteed_to_others, errc::none, figure_unit::bytes,
     "asked for {asked}, but others' guarantees leave at most {left} of {limit} ({code})"},
    {reason::beyond_device, errc::out_of_memory, figure_unit::bytes,
     "asked for {asked}, but the device has only {limit}"},
    {reason::largest_block, errc::none, figure_unit::bytes,
     "asked for {asked} in one block, but the largest free block has {left}, of {limit} free in all ({code})"},
    {reason::no_power_of_two, errc::bad_alignment, figure_unit::count, "alignment {asked} is not a power of two"},
    {reason::alignment_too_large, errc::bad_alignment, figure_unit::count,
     "alignment {asked} is not supported: at most {limit}"},
    {reason::whole_sizes, errc::not_whole, figure_unit::bytes,
     "asked for {asked}, which must be more than 0 and a multiple of {limit}"},
    {reason::no_addresses, errc::none, figure_unit::bytes, "no range of addresses is left for {asked}"},
    {reason::beyond_arena, errc::size_overflow, figure_unit::bytes,
     "asked for {asked} at an offset with {left} of {limit} behind it"},
    {reason::occupied, errc::invalid_specification, figure_unit::none,
     "memory is there already, or two ranges overlap"},
    {reason::other_pool, errc::invalid_specification, figure_unit::none, "the two arenas are of different pools"},
    {reason::no_lender, errc::invalid_specification, figure_unit::bytes,
     "asked to borrow {asked}, and there is no quota above to borrow from"},
    {reason::other_tree, errc::invalid_specification, figure_unit::none,
     "the quota isn't below the quota whose bytes are exchanged"},
    {reason::other_part, errc::unknown_block, figure_unit::position,
     "the block names part {asked}: there are {limit} parts, from 0"},
    {reason::pages_of_nothing, errc::invalid_specification, figure_unit::bytes,
     "a page of {asked}: a page has at least 1 B, and a store has 1 to 2^30 pages"},
    {reason::shares_exceeded, errc::share_exceeded, figure_unit::permille,
     "asked for {asked} of the device's time, {left} of {limit} left ({code})"},
    {reason::too_few_devices, errc::none, figure_unit::count, "asked for {asked} devices, but there are only {left}"},
    {reason::share_there, errc::share_exceeded, figure_unit::permille,
     "asked for {asked} of a device's time, but the best place has only {left}"},
    {reason::memory_there, errc::no_room, figure_unit::bytes, "asked for {asked}, but the best place has only {left}"},
    {reason::cpu_there, errc::no_room, figure_unit::count,
     "asked for {asked} thousandths of a CPU, but the best node has only {left}"},
    {reason::no_such_node, errc::no_device, figure_unit::none, "no node has the requested model in an allowed place"},
    {reason::named_devices, errc::invalid_specification, figure_unit::count,
     "asked for {asked} devices, but the placement names {left}"},
    {reason::node_size, errc::invalid_specification, figure_unit::count,
     "nodes of this type don't come with {asked} devices (at most {limit})"},
    {reason::weights_exceeded, errc::share_exceeded, figure_unit::permille, "the shares sum to {asked} of the device"},
    {reason::no_such_part, errc::no_device, figure_unit::position, "no part {asked}: the tenant has {limit}, from 0"},
    {reason::device_twice, errc::duplicate_device, figure_unit::position, "device {asked} is named twice"},
    {reason::other_node, errc::different_nodes, figure_unit::position,
     "device {asked} is on another node than the first"},
    {reason::no_such_device, errc::no_device, figure_unit::position, "no device {asked}: there are {limit}, from 0"},
    {reason::no_such_slice, errc::invalid_specification, figure_unit::position,
     "no slice {asked}: the device has {limit}, from 0"},
    {reason::sms_left, errc::too_few_sms, figure_unit::count, "asked for {asked} SMs, {left} of {limit} left"},
    {reason::whole_sms, errc::not_whole, figure_unit::count, "asked for {asked} SMs, which come in units of {limit}"},
    {reason::no_memory_named, errc::invalid_specification, figure_unit::none, "needs memory, or burst: both are 0"},
    {reason::burst_limit, errc::invalid_specification, figure_unit::bytes,
     "memory and burst are {asked} on a device, and a quota has at most {limit}"},
    {reason::has_source, errc::invalid_specification, figure_unit::none, "the device has memory of this kind already"},
    {reason::no_spill, errc::not_supported, figure_unit::none, "the tenant was admitted without `spill`"},
    {reason::no_spill_target, errc::not_supported, figure_unit::none,
     "the tenant has `spill`, and the tenancy no `spill_to`"},
    {reason::no_such_stack, errc::not_supported, figure_unit::none,
     "the device doesn't offer the tenant's memory stack"},
    {reason::bad_usage_line, errc::invalid_specification, figure_unit::none,
     "a line needs a tenant's name, and an end after its beginning"},
    {reason::no_time, errc::invalid_specification, figure_unit::none, "the reservation ends before it begins"},
    {reason::other_place, errc::invalid_specification, figure_unit::none,
     "the tenant isn't where the plan moves it from"},
    {reason::victims_left, errc::no_room, figure_unit::count,
     "{asked} of the {limit} tenants that got notice are still there"},
    {reason::wrong_blocks, errc::invalid_specification, figure_unit::count,
     "{asked} blocks given: give the {limit} blocks that were parked"},
    {reason::unknown_number, errc::invalid_specification, figure_unit::position,
     "this tenant has nothing with the number {asked}, or it is over"},
    {reason::objective_too_short, errc::slo_unreachable, figure_unit::nanoseconds,
     "{code} (asked for {asked}, at least {limit} needed)"},
    {reason::queue_limit, errc::queue_full, figure_unit::count,
     "{code}: {limit} submissions wait already, the most allowed"},
    {reason::no_caps, errc::invalid_specification, figure_unit::none,
     "the policy has no caps: weighted_fair has caps, and capped<> adds them to any policy"},
    {reason::no_classes, errc::invalid_specification, figure_unit::none,
     "the policy has no classes, so `group` must be 0: policy_tree<> has classes"},
    {reason::empty_callable, errc::invalid_specification, figure_unit::none,
     "the callable is empty: there is nothing to enqueue"},
    {reason::no_such_stream, errc::invalid_specification, figure_unit::position,
     "no stream {asked}: the tenant has {limit}, from 0"},
    {reason::no_such_group, errc::invalid_specification, figure_unit::none,
     "no group of allocations has that tag, or the tag is empty"},
    {reason::no_such_width, errc::invalid_specification, figure_unit::none, "a part of the SMs is from 0 to 1"},
    {reason::no_candidates, errc::invalid_specification, figure_unit::none, "there is nothing to choose from"},
    {reason::no_words, errc::invalid_specification, figure_unit::none,
     "a name has a blank, or is empty or too long, or a time is below 0"},
    {reason::no_members, errc::invalid_specification, figure_unit::none, "a gang needs a member"},
    {reason::rank_failed, errc::none, figure_unit::position, "epoch {asked}: rank {left} ({code})"},
    {reason::no_such_rank, errc::invalid_specification, figure_unit::position,
     "no rank {asked}: there are {limit}, from 0"},
    {reason::no_ranks, errc::invalid_specification, figure_unit::none,
     "a communicator needs a rank, a channel and a block"},
    {reason::rank_twice, errc::invalid_specification, figure_unit::position, "rank {asked} is in two groups"},
    {reason::no_such_channel, errc::invalid_specification, figure_unit::position,
     "no channel {asked}: there are {limit}, from 0"},
    {reason::tuned_sizes, errc::invalid_specification, figure_unit::bytes,
     "asked for sizes from {asked} to {limit}: sizes are from 4 B to 4 EiB"},
    {reason::unequal_parts, errc::mismatch, figure_unit::count,
     "{asked} elements don't divide into {limit} equal parts"},
    {reason::no_such_link, errc::invalid_specification, figure_unit::position,
     "a link to rank {asked}, or of a rank with itself: there are {limit} ranks, from 0"},
    {reason::no_order, errc::invalid_specification, figure_unit::count,
     "an order names each of the {limit} gradients once; this one names {asked}"},
    {reason::bad_choice, errc::invalid_specification, figure_unit::none, "the text isn't one that save() wrote"},
    {reason::not_float, errc::invalid_specification, figure_unit::none,
     "only gradients of type float can be sent in 16 bits"},
    {reason::no_channel, errc::invalid_specification, figure_unit::none, "at least one bucket must be in flight"},
    {reason::no_mpi, errc::not_supported, figure_unit::none, "MPI is not initialised: call MPI_Init_thread first"},
    {reason::main_thread, errc::not_supported, figure_unit::none,
     "MPI was initialised for its main thread alone, and this is another thread"},
    {reason::mpi_threads, errc::not_supported, figure_unit::count,
     "needs level {asked} of MPI_Init_thread, and has {limit}"},
}};

/// The sentence for `r`.
[[nodiscard]] constexpr const sentence& sentence_of(reason r) noexcept {
    return sentences[r < reason::all ? static_cast<std::size_t>(r) : 0];
}

/// Whether every line is at the place of its reason, has a text, and names only figures.
[[nodiscard]] constexpr bool in_order(const decltype(sentences)& all) noexcept {
    for (std::size_t i = 0; i < all.size(); ++i) {
        auto rest = all[i].text;
        if (static_cast<std::size_t>(all[i].of) != i || rest.empty()) return false;
        for (auto at = rest.find('{'); at != rest.npos; at = rest.find('{')) {
            rest.remove_prefix(at + 1);
            const auto name = rest.substr(0, rest.find('}'));
            const bool figure = name == "asked" || name == "left" || name == "limit";
            if (!(name == "code" || (figure && all[i].unit != figure_unit::none))) return false;
        }
    }
    return true;
}
static_assert(in_order(sentences), "a line of `sentences` is missing, misplaced, empty, or names an unknown figure");

}  // namespace detail

/// Whether raise() throws a memory_error for `code`.
[[nodiscard]] constexpr bool is_memory_refusal(errc code) noexcept {
    return code == errc::over_quota || code == errc::out_of_memory || code == errc::size_overflow ||
           code == errc::bad_alignment;
}

/// The reason for a refusal. Trivial to copy: costs nothing to return. `because` gives the figures
/// a meaning. Without `because`, the code implies the meaning (reason_of); if the code implies
/// none, messages don't show the figures.
struct failure {
    errc code = errc::none;           ///< the error; none: no error
    std::uint64_t asked = 0;          ///< how much was asked for
    std::uint64_t left = 0;           ///< how much there was
    std::uint64_t limit = 0;          ///< the most that is possible
    reason because = reason::unsaid;  ///< the detailed reason, and the unit of the figures

    friend constexpr bool operator==(const failure& f, errc c) noexcept {
        return f.code == c;
    }  ///< Whatever the figures.
};

/// The reason of a failure: its own, or the one that its code implies.
[[nodiscard]] constexpr reason reason_of(const failure& f) noexcept {
    if (f.because != reason::unsaid) return f.because;
    if (f.asked == 0 && f.left == 0 && f.limit == 0) return reason::unsaid;
    switch (f.code) {
        case errc::over_quota:
        case errc::out_of_memory:
        case errc::no_room: return f.limit == 0 && f.left == 0 ? reason::size : reason::size_left;
        case errc::size_overflow: return reason::size;
        case errc::share_exceeded: return reason::shares_exceeded;
        case errc::slo_unreachable: return f.limit == 0 ? reason::unsaid : reason::objective_too_short;
        case errc::too_few_devices: return f.asked == 0 ? reason::unsaid : reason::too_few_devices;
        case errc::no_device: return f.limit == 0 ? reason::unsaid : reason::no_such_device;
        case errc::queue_full: return f.limit == 0 ? reason::unsaid : reason::queue_limit;
        case errc::io_failed: return f.asked == 0 ? reason::unsaid : reason::system_error;
        default: return reason::unsaid;
    }
}

/// The unit of a failure's figures.
[[nodiscard]] constexpr figure_unit unit_of(const failure& f) noexcept {
    return detail::sentence_of(reason_of(f)).unit;
}

namespace detail {

/// Text in a fixed buffer: building an error message must not itself run out of memory. Cuts text
/// that doesn't fit, and escapes characters that can't be printed, because names and texts may come
/// from any source.
class message {
public:
    /// Appends text, numbers, bytes, durations or failures, one after the other. The member isn't
    /// operator<<, because every includer would then pay for a search through all of std's
    /// overloads.
    template <class... Parts>
    message& add(const Parts&... parts) noexcept {
        (append(parts), ...);
        return *this;
    }
    /// Puts the tenant's name in front; nothing for an empty name. The name is cut, because the
    /// figures after it must fit as well.
    message& of(std::string_view tenant) noexcept;
    [[nodiscard]] const char* c_str() const noexcept { return buffer_.data(); }
    /// Whether there is no text.
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

private:
    void append(std::string_view text) noexcept;
    template <std::same_as<tenant_name> Name>  // so that a text isn't taken for a name
    void append(const Name& name) noexcept {
        append(name.view());
    }
    // The sentence of its reason.
    void append(const failure& f) noexcept;
    void append(std::uint64_t n) noexcept { print("%llu", static_cast<unsigned long long>(n)); }
    // In the largest unit that keeps the figure exact, else with the rounded MiB next to it.
    void append(bytes b) noexcept;
    // In the largest unit that is at most the figure; digits below a thousandth of the unit are
    // dropped.
    void append(ns t) noexcept;
    void append(std::uint64_t n, figure_unit unit) noexcept;
    // 250 as ".25", 0 as nothing.
    void append_thousandths(std::uint64_t n) noexcept;
    // POSIX's strerror_r returns a number, GNU's the text.
    void append_error(int number) noexcept;

    template <class... Args>
    void print(const char* format, Args... args) noexcept {
        const int n = std::snprintf(buffer_.data() + size_, buffer_.size() - size_, format, args...);
        if (n > 0) size_ = std::min(size_ + static_cast<std::size_t>(n), buffer_.size() - 1);
    }

    static constexpr auto most_ns = static_cast<std::uint64_t>(ns::max().count());
    std::array<char, 320> buffer_{};
    std::size_t size_ = 0;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto message::of(std::string_view tenant) noexcept -> message& {
    return tenant.empty() ? *this : add("tenant '", tenant_name{tenant}, "': ");
}

GPUSHARE_INLINE void message::append(std::string_view text) noexcept {
    size_ += copy_printable(text, buffer_.data() + size_, buffer_.size() - 1 - size_);
    buffer_[size_] = '\0';
}

GPUSHARE_INLINE void message::append(const failure& f) noexcept {
    const auto& how = sentence_of(reason_of(f));
    for (auto rest = how.text; !rest.empty();) {
        const auto open = std::min(rest.find('{'), rest.size());
        append(rest.substr(0, open));
        if (open == rest.size()) break;
        const auto close = rest.find('}', open);
        const auto name = rest.substr(open + 1, close - open - 1);
        if (name == "code")
            append(to_string(f.code));
        else
            append(name == "asked" ? f.asked : name == "left" ? f.left : f.limit, how.unit);
        rest.remove_prefix(close + 1);
    }
}

GPUSHARE_INLINE void message::append(bytes b) noexcept {
    constexpr std::array<const char*, 4> unit{"B", "KiB", "MiB", "GiB"};
    auto n = b.count();
    std::size_t i = 0;
    for (; i + 1 < unit.size() && n != 0 && n % 1024 == 0; ++i) n /= 1024;
    if (i == 0 && n >= 10240)
        print("%llu B (%.1f MiB)", static_cast<unsigned long long>(n), static_cast<double>(n) / 1048576.0);
    else
        print("%llu %s", static_cast<unsigned long long>(n), unit[i]);
}

GPUSHARE_INLINE void message::append(ns t) noexcept {
    struct scale {
        std::uint64_t size;
        const char* unit;
    };
    constexpr std::array<scale, 4> scales{{{1'000'000'000, " s"}, {1'000'000, " ms"}, {1'000, " us"}, {1, " ns"}}};
    if (t < ns{0}) append("-");
    const auto n =
        t < ns{0} ? std::uint64_t{0} - static_cast<std::uint64_t>(t.count()) : static_cast<std::uint64_t>(t.count());
    std::size_t i = 0;
    while (n < scales[i].size && scales[i].size != 1) ++i;
    const scale& in = scales[i];
    append(n / in.size);
    append_thousandths(n % in.size * 1000 / in.size);
    append(in.unit);
}

GPUSHARE_INLINE void message::append(std::uint64_t n, figure_unit unit) noexcept {
    switch (unit) {
        case figure_unit::bytes: return append(bytes{n});
        case figure_unit::permille: return append(n / 10), append_thousandths(n % 10 * 100), append(" %");
        case figure_unit::nanoseconds: return append(ns{static_cast<std::int64_t>(std::min(n, most_ns))});
        case figure_unit::error_number: return append_error(static_cast<int>(n));
        default: return append(n);
    }
}

GPUSHARE_INLINE void message::append_thousandths(std::uint64_t n) noexcept {
    if (n == 0) return;
    auto digits = 3;
    for (; n % 10 == 0; n /= 10) --digits;
    print(".%0*llu", digits, static_cast<unsigned long long>(n));
}

GPUSHARE_INLINE void message::append_error(int number) noexcept {
    std::array<char, 128> text{};
    const auto said = ::strerror_r(number, text.data(), text.size());
    if constexpr (std::is_pointer_v<decltype(said)>)
        append(said);
    else
        append(text.data());
    add(" (errno ", static_cast<std::uint64_t>(number), ")");
}

#endif  // GPUSHARE_BODIES

/// Why no memory has a block of that size and alignment: the alignment is not a power of two or
/// above `most`, or the size is more than any device has.
[[nodiscard]] constexpr failure impossible_block(std::uint64_t size, std::uint64_t alignment,
                                                 std::uint64_t most = ~std::uint64_t{0}) noexcept {
    if (!std::has_single_bit(alignment))
        return {.code = errc::bad_alignment, .asked = alignment, .because = reason::no_power_of_two};
    if (alignment > most)
        return {.code = errc::bad_alignment, .asked = alignment, .limit = most, .because = reason::alignment_too_large};
    return {.code = errc::size_overflow, .asked = size, .because = reason::size};
}
/// Whether only its alignment keeps a block from fitting into `most` bytes: the reason if so, with
/// the largest alignment that fits; otherwise errc::none. `charged(alignment)`: the bytes that the
/// block takes.
template <std::invocable<std::size_t> Charged>
[[nodiscard]] constexpr failure too_aligned(std::size_t alignment, bytes most, Charged charged) noexcept {
    if (!std::has_single_bit(alignment) || charged(alignment) <= most || charged(std::size_t{1}) > most) return {};
    std::size_t fits = alignment / 2;
    while (charged(fits) > most) fits /= 2;
    return impossible_block(0, alignment, fits);
}
/// Why a layer of `most` bytes in all can never have that block, if the reason is the alignment, or
/// a size beyond that of any device; otherwise errc::none. `charged`: as above.
template <std::invocable<std::size_t> Charged>
[[nodiscard]] constexpr failure never_had(std::size_t size, std::size_t alignment, bytes most,
                                          Charged charged) noexcept {
    if (!std::has_single_bit(alignment)) return impossible_block(size, alignment);
    const auto why = too_aligned(alignment, std::min(most, bytes::max() - bytes{1}), charged);
    if (why.code != errc::none) return why;
    return charged(alignment) == bytes::max() ? impossible_block(size, alignment) : failure{};
}
/// The host has no memory for the record of a block.
inline constexpr failure no_host_memory{.code = errc::out_of_memory, .because = reason::host_memory};

/// Characters of a name that errors keep.
inline constexpr std::size_t longest_name = tenant_name::longest;

/// "tenant 'chat': asked for 512 MiB, 37 MiB of 4 GiB left (over the quota)"
[[nodiscard]] inline message describe(const failure& f, std::string_view tenant, std::string_view what) noexcept {
    message m;
    m.of(tenant);
    if (!what.empty()) m.add(what, ": ");
    return m.add(f);
}

/// `text`, with unprintable characters escaped.
[[nodiscard]] inline std::string printable(std::string_view text) {
    std::string all(text.size() * 4, '\0');
    all.resize(copy_printable(text, all.data(), all.size()));
    return all;
}
/// The same; the code's sentence instead of an empty text.
[[nodiscard]] inline std::string whole_sentence(errc code, std::string_view text) {
    return printable(text.empty() ? to_string(code) : text);
}

}  // namespace detail

/// The base of every exception of the library, alongside its std base. Not itself a std::exception:
/// a class with two std::exception bases would slip through `catch (const std::exception&)`.
class error {
public:
    /// The error code.
    [[nodiscard]] errc code() const noexcept { return failure_.code; }
    /// The same with the reason and its figures.
    [[nodiscard]] const failure& figures() const noexcept { return failure_; }
    /// Empty where no tenant is concerned. Cut at 63 characters.
    [[nodiscard]] std::string_view tenant() const noexcept { return tenant_.view(); }
    /// A sentence for people: the request, who made it, and why it was refused.
    [[nodiscard]] virtual const char* what() const noexcept = 0;

protected:
    /// Keeps a copy of the name.
    error(const failure& f, std::string_view tenant) noexcept : failure_(f), tenant_(tenant) {}
    error(const error&) = default;
    error& operator=(const error&) = default;
    ~error() = default;

private:
    failure failure_;
    tenant_name tenant_;
};

/// A refusal of memory. Containers treat it as the std::bad_alloc that it is.
class memory_error final : public std::bad_alloc, public error {
public:
    /// `what` was attempted, such as "allocate".
    memory_error(const failure& f, std::string_view tenant, std::string_view what) noexcept
        : error(f, tenant), text_(detail::describe(f, tenant, what)) {}
    /// With a text of its own.
    template <std::same_as<detail::message> Text>  // so that {} is no text of its own
    memory_error(const failure& f, std::string_view tenant, const Text& text) noexcept
        : error(f, tenant), text_(text.empty() ? detail::describe(f, tenant, {}) : text) {}
    /// A sentence for people.
    [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

private:
    detail::message text_;
};

/// Every other failure. Not final, because std::throw_with_nested derives from the type that it
/// throws.
class operation_error : public std::runtime_error, public error {
public:
    /// `what` was attempted, such as "admission".
    operation_error(const failure& f, std::string_view tenant, std::string_view what)
        : std::runtime_error(detail::describe(f, tenant, what).c_str()), error(f, tenant) {}
    /// `text` is the whole sentence. Unprintable characters are escaped.
    operation_error(errc code, std::string_view tenant, const char* text)
        : std::runtime_error(detail::whole_sentence(code, text)), error(failure{code}, tenant) {}
    /// With a text of its own, and the figures as well.
    template <std::same_as<detail::message> Text>
    operation_error(const failure& f, std::string_view tenant, const Text& text)
        : std::runtime_error((text.empty() ? detail::describe(f, tenant, {}) : text).c_str()), error(f, tenant) {}
    /// A sentence for people.
    [[nodiscard]] const char* what() const noexcept override { return std::runtime_error::what(); }
};

/// Throws the exception for `f`. `what` says what was attempted; `tenant` may be empty.
[[noreturn]] inline void raise(const failure& f, std::string_view tenant = {}, std::string_view what = {}) {
    if (is_memory_refusal(f.code)) throw memory_error(f, tenant, what);
    throw operation_error(f, tenant, what);
}

/// A value, or the reason why there is none: a small `std::expected` for `try_` calls.
template <class T>
class [[nodiscard]] result {
public:
    /// A value.
    result(T value) : value_(std::move(value)) {}  // NOLINT: implicit, as in std::expected
    /// The reason why there is none.
    result(const failure& why) noexcept : failure_(why) {}  // NOLINT
    /// The reason without figures.
    result(errc code) noexcept : failure_(failure{.code = code}) {}  // NOLINT

    /// Whether there is a value.
    [[nodiscard]] explicit operator bool() const noexcept { return value_.has_value(); }
    /// The value, which must be there.
    [[nodiscard]] T& operator*() & noexcept { return *value_; }
    /// The value, which must be there.
    [[nodiscard]] const T& operator*() const& noexcept { return *value_; }
    /// The value, which must be there.
    [[nodiscard]] T&& operator*() && noexcept { return *std::move(value_); }
    /// The value, which must be there.
    [[nodiscard]] T* operator->() noexcept { return &*value_; }
    /// The value, which must be there.
    [[nodiscard]] const T* operator->() const noexcept { return &*value_; }
    /// errc::none when there is a value.
    [[nodiscard]] const failure& why() const noexcept { return failure_; }
    /// errc::none when there is a value.
    [[nodiscard]] errc code() const noexcept { return failure_.code; }
    /// The value, or the exception that `why()` calls for.
    [[nodiscard]] T value(std::string_view tenant = {}, std::string_view what = {}) && {
        if (!value_) raise(failure_, tenant, what);
        return *std::move(value_);
    }

private:
    std::optional<T> value_;
    failure failure_;
};

namespace detail {

/// Returns the result of `make`, or the figures of the library error that it throws. Other
/// exceptions pass through, such as a lack of host memory.
template <std::invocable F>
[[nodiscard]] auto or_why(F make) {
    using made = result<decltype(make())>;
    try {
        return made(make());
    } catch (const error& e) {
        return made(e.figures());
    }
}

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
