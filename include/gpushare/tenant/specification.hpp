// SPDX-License-Identifier: Apache-2.0
// The plain values of the tenant layer: a tenant's specification, its usage, and events and reports
// about it. Also a tenancy's options, each with a default, and the function that chooses devices.
//
//   gpushare::tenant_spec chat{.name = "chat", .memory = 24_GiB, .devices = 2, .compute = 60_pct, .level = {1}};
//   // gpushare::tenancy shared{node, options}
//   gpushare::tenancy_options options{.wait = 50ms, .spill = 32_GiB, .spill_to = &pinned};
//
// The blocks to take along when a tenant is moved or parked (move.hpp):
//
//   std::vector<gpushare::moving_block> blocks{{.at = weights, .size = 1 << 30}, {.part = 1, .at = cache, .size = 1 << 28}};
//
// Without a device_choice, a tenancy takes the devices with the most memory left, or the best
// connected ones if it was given a topology. Another choice is a function of the embedder's, or
// placed_by(policy) of placement/tenant_planner.hpp:
//
//   // rooms: devices with time for it
//   gpushare::device_choice first = [](const auto& spec, const auto& rooms, const auto&) {
//       return gpushare::equal_split_over(spec.memory, std::vector(rooms.begin(), rooms.begin() + spec.devices), spec.unit);
//   };  // shared.choose_devices(first)
//
// The readers of specifications (tenant/specification_text.hpp) throw an error that names the
// unreadable key:
//
//   try { auto spec = gpushare::parse_specification(text); }
//   catch (const gpushare::specification_error& e) { log(e.what()); mark(e.key()); }
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory_resource>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/partition/node_view.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// For tenant_spec::burst: as much as the tenant's devices have.
inline constexpr bytes all_burst = bytes::max();

/// For tenant_spec::slice: the slice with the most device time left to promise.
inline constexpr std::uint32_t any_slice = ~0U;

/// The layers of a tenant's memory() above its quota.
enum class memory_stack : std::uint8_t {
    /// each block comes from the device: freed memory is available to all tenants immediately; each
    /// call is a driver call
    direct,
    /// Blocks out of segments that the tenant keeps: no driver call while the segments suffice.
    /// Only blocks below 16 KiB share a segment. Such a segment has 128 KiB, or a sixteenth of the
    /// bytes that are left if that is less. A small block that stays keeps its segment charged, and
    /// a larger block only itself.
    pool,
    /// a pool whose segments are chunks mapped to addresses, which tenants pass on: a block takes
    /// whole chunks, or shares one with others that are smaller than a chunk; memory is promised in
    /// whole chunks. See tenancy::offer
    arena,
    /// each block comes from the device's pool for all tenants: no call waits for the device. See
    /// tenancy::offer
    stream_ordered,
};

/// In English.
[[nodiscard]] constexpr std::string_view to_string(memory_stack s) noexcept {
    switch (s) {
        case memory_stack::direct: return "direct";
        case memory_stack::pool: return "pool";
        case memory_stack::arena: return "arena";
        case memory_stack::stream_ordered: return "stream_ordered";
    }
    return "unknown stack";
}

/// The specification of a tenant. Bytes are totals over all its devices, and are split equally;
/// `compute` is a share of each device.
struct tenant_spec {
    /// the tenant's name in messages and ledgers, unique among present tenants
    std::string name{};
    bytes memory{};             ///< guaranteed: set aside from the admission on; 0 only with burst
    std::uint32_t devices = 1;  ///< how many, on one node
    /// The tenant's share of device time among the tenants of its level, of the time that higher
    /// levels leave. The shares of each level of a device sum to at most a whole. None: no time is
    /// promised, for a tenant that only wants memory, or time that no other tenant wants. Such a
    /// tenant runs at the level best_effort, below all others, unless `level` isn't 0. Policies
    /// that cap by shares don't serve it.
    share compute{};
    priority level{};  ///< tenants of a higher level always go first
    /// The highest level that the tenant's requests and submissions may have. Requests for a higher
    /// level are served at this level. None: the tenant's own level. Time at the ceiling is charged
    /// to the tenant's share as usual.
    std::optional<priority> ceiling{};
    /// A submission with a declared width (submit_options::width) counts as filling at least this
    /// part of the SMs. If the device doesn't tell which part the work fills, the submission is
    /// charged by this width. 0: the declared width counts.
    sm_width narrowest{};
    /// further bytes, lent while no guarantee needs them; or all_burst
    bytes burst{};
    std::vector<device_id> on{};  ///< the devices to use; empty: those with the most room
    /// memory / devices and burst / devices must be multiples of this
    bytes unit{1};
    /// the slice of SMs on each of its devices; see tenancy::slice
    std::uint32_t slice = any_slice;
    std::optional<memory_stack> stack{};  ///< the layers of memory(); none: as in tenancy_options
    /// When its memory is overwritten; none: the tenancy's default. `off` takes effect only while
    /// every tenant that its devices ever had says `off`; otherwise memory that others left behind
    /// is still overwritten.
    std::optional<scrub_policy> scrub{};
    /// how long memory().allocate() waits for bytes; 0s: no wait; none: default
    std::optional<ns> wait{};
    /// how many bytes may be on the host when memory is short; 0: none; unset: the default
    std::optional<bytes> spill{};
    /// While the tenant sleeps, the unused part of its guarantee is lent to others as burst. The
    /// bytes are recalled when the tenant wakes, and the wake waits for them: tenant::recall() says
    /// how long. They are never promised to another tenant.
    bool lends_asleep = false;

    // For policies of the tenancy that use them; see client_settings. A policy without caps refuses
    // a cap.
    share cap = share::whole();  ///< the most of each device's time
    bool soft_cap = false;       ///< holds only while others want the device
    ns slo{};                    ///< latency goal: how long after arrival a request is due; 0: none
    std::uint32_t group = 0;     ///< the tenant's class, if the policy is a tree
    /// the longest kernel, by which others' waits are bounded and a cap is enforced; 0: learnt
    ns longest{};
    ns yields_within{};  ///< the longest time between two yields; 0: the work never yields
    /// the part of its slice's SMs that its level keeps free of lower levels' long work
    sm_width keeps{};

    /// on each device; work of one stream runs in order, work of several side by side
    std::uint32_t streams = 1;
    /// how many submissions may wait on a device; 0: as in limiter_options
    std::uint32_t queue_limit = 0;
};

/// Counts of a tenant's calls since its admission.
struct allocation_counts {
    bytes total{};                  ///< bytes of all allocations, as requested
    std::uint64_t allocations = 0;  ///< allocations that succeeded
    std::uint64_t frees = 0;        ///< including those at a close
    std::uint64_t refused = 0;      ///< allocations that were refused
};

/// Changes to a tenant_spec. Fields that aren't set stay as they are.
struct tenant_change {
    std::optional<bytes> memory{};               ///< of all its devices together
    std::optional<bytes> burst{};                ///< of all its devices together
    std::optional<share> compute{};              ///< of each of its devices
    std::optional<priority> level{};             ///< from its next submission on
    std::optional<priority> ceiling{};           ///< as in tenant_spec
    std::optional<sm_width> narrowest{};         ///< as in tenant_spec
    std::optional<share> cap{};                  ///< as in tenant_spec
    std::optional<bool> soft_cap{};              ///< as in tenant_spec
    std::optional<ns> slo{};                     ///< as in tenant_spec
    std::optional<std::uint32_t> group{};        ///< as in tenant_spec
    std::optional<ns> longest{};                 ///< as in tenant_spec
    std::optional<ns> yields_within{};           ///< as in tenant_spec
    std::optional<sm_width> keeps{};             ///< as in tenant_spec
    std::optional<std::uint32_t> queue_limit{};  ///< as in tenant_spec
    std::optional<ns> wait{};                    ///< as in tenant_spec: for allocations from now on
    std::optional<bool> lends_asleep{};          ///< as in tenant_spec, from its next sleep on
    /// as in tenant_spec; only if the tenant was admitted with `spill`. Blocks on the host stay
    /// there
    std::optional<bytes> spill{};
};

/// A tenant's usage, now and so far, summed over its devices. device_time is that of each device
/// or, on a sliced one, of the tenant's slice.
struct tenant_usage {
    bytes memory{};   ///< guaranteed, as granted
    bytes burst{};    ///< the burst, as granted
    bytes current{};  ///< charged now
    /// the part of `current` that pools keep for the next allocation, given back once a request
    /// lacks memory
    bytes idle{};
    bytes peak{};  ///< the most that was charged at once: the sum of the devices' peaks
    /// freed in stream order, and still charged: the stream hasn't reached the free
    bytes pending{};
    /// the largest block that could be allocated now, on the device with the largest such block
    bytes largest_free{};
    /// bytes overwritten so far, so that no tenant reads another's data; zeroed memory isn't
    /// counted
    bytes scrubbed{};
    bytes total{};                  ///< bytes of all allocations of memory() so far
    std::uint64_t allocations = 0;  ///< allocations of memory() so far
    std::uint64_t frees = 0;        ///< frees of memory() so far
    std::uint64_t refused = 0;      ///< allocations that were refused
    ns device_time{};               ///< the charged device time
    std::uint64_t completed = 0;    ///< submissions that ended
    std::uint64_t failed = 0;       ///< of these, the failed ones
    std::uint64_t waiting = 0;      ///< submissions that wait for admission
    std::uint64_t in_flight = 0;    ///< submissions on the devices
    std::uint64_t dropped = 0;      ///< submissions that were too late and never ran
    unrun_counts turned_away{};     ///< submissions that were refused on arrival
    /// submissions that waited and never ran, including dropped ones
    unrun_counts cancelled{};
    duration_histogram queueing{};  ///< how long each admitted submission waited
    duration_histogram running{};   ///< how long each lasted on its device
};

/// The forecast for getting back a sleeping tenant's guarantee; see tenant_spec::lends_asleep.
struct recall_forecast {
    bytes lent{};  ///< the lent part of the guarantee, on all devices
    /// the part of `lent` that others use now, so that it must be recalled; 0: waking waits for no
    /// memory
    bytes missing{};
    ns usual_longest{};  ///< the longest of its last eight recalls that had to wait; 0: none had to
};

/// An event that no return value can report. Texts and traces are valid during the call of the
/// sink.
struct tenant_event {
    /// The kind of event.
    enum class kind : std::uint8_t {
        leak,  ///< a block that was still allocated at close, and was taken back
        /// a free of a block that isn't allocated, or isn't of that size; nothing was changed, but
        /// an adaptor for other libraries then frees the block at that address
        wrong_free,
        overcommitted,  ///< something other than tenants took `size` bytes of promised memory
        /// work was still on the device when closing gave up; the memory stays charged until it
        /// ends
        stuck,
        /// the handle was destroyed before a resource built on it: `size` bytes stay charged until
        /// that goes
        charged,
    };
    kind what{};  ///< what happened
    /// the tenant, with control characters escaped; empty: no tenant
    std::string_view tenant{};
    device_id device{};              ///< the device
    errc code = errc::none;          ///< the reason, if there is one
    bytes size{};                    ///< the size of the block, or of the excess
    std::string_view label{};        ///< for a leak: the label of the allocation
    std::span<void* const> trace{};  ///< for a leak, if the tenancy takes traces: of its allocation
};

/// In English.
[[nodiscard]] constexpr std::string_view to_string(tenant_event::kind k) noexcept {
    switch (k) {
        case tenant_event::kind::leak: return "leak";
        case tenant_event::kind::wrong_free: return "wrong free";
        case tenant_event::kind::overcommitted: return "overcommitted";
        case tenant_event::kind::stuck: return "stuck";
        case tenant_event::kind::charged: return "still charged";
    }
    return "unknown event";
}

/// Called under no lock by the thread that notices the event, possibly by several at once.
/// Exceptions are ignored.
using event_sink = std::function<void(const tenant_event&)>;

namespace detail {
inline void tell(const event_sink& sink, const tenant_event& e) noexcept {
    if (!sink) return;
    try {
        sink(e);
    } catch (...) {  // see event_sink
    }
}
}  // namespace detail

/// The reason why a close isn't complete.
enum class close_wait : std::uint8_t {
    nothing,  ///< the close is complete
    work,     ///< submissions in flight, and permits that threads hold: see usage.in_flight
    streams,  ///< work on a stream of the tenant's that went past its limiter
    frees,    ///< frees that the streams haven't reached
    memory,   ///< pools and arenas in use, workspaces, memory handed over: see still_charged
};
/// In English.
[[nodiscard]] constexpr std::string_view to_string(close_wait w) noexcept {
    switch (w) {
        case close_wait::nothing: return "nothing";
        case close_wait::work: return "submissions and permits";
        case close_wait::streams: return "work on its streams past the limiter";
        case close_wait::frees: return "frees in stream order";
        case close_wait::memory: return "memory that is still charged";
    }
    return "unknown";
}

/// How a close went. If it is complete, everything was returned and nothing is charged. Otherwise
/// `waits_for` says what must end first: call close again after that. Everything else is as it was
/// at the deadline.
struct close_report {
    bool complete = false;            ///< everything was returned
    std::uint64_t leaked_blocks = 0;  ///< leaked blocks of memory(), taken back
    bytes leaked{};                   ///< their sizes
    /// bytes charged to the tenant's quotas by arenas, workspaces and pending frees, which must end
    /// first
    bytes still_charged{};
    tenant_usage usage{};                        ///< final, if complete
    close_wait waits_for = close_wait::nothing;  ///< if not complete: what must end first
    device_id device{};                          ///< if not complete: the device where
};

/// Options of a tenancy.
struct tenancy_options {
    limiter_options limiter{};  ///< of each device, or of each slice of one
    /// how long a tenant's destructor waits for its work
    ns close_timeout = std::chrono::seconds(10);
    event_sink events{};  ///< gets events that no return value can report

    // Defaults for tenants whose specification leaves them open.
    memory_stack stack = memory_stack::pool;  ///< the layers of their memory
    /// when memory is overwritten, so that no tenant reads another tenant's data
    scrub_policy scrub = scrub_policy::on_hand_over;
    /// how long memory().allocate() waits for bytes
    ns wait{};
    /// how many bytes of its spillable blocks a tenant may have on the host when memory is short
    bytes spill{};
    /// the host's memory for spilled blocks, pinned for speed; must outlive the tenancy
    std::pmr::memory_resource* spill_to = nullptr;
    /// capture_stack, from memory/stack_trace.hpp: stack traces of leaks
    trace_function trace = nullptr;
};

namespace detail {
/// Fills in the defaults that a tenant's specification leaves open.
inline void fill_in(tenant_spec& spec, const tenancy_options& by_default) {
    if (!spec.stack) spec.stack = by_default.stack;
    if (!spec.scrub) spec.scrub = by_default.scrub;
    if (!spec.wait) spec.wait = by_default.wait;
    if (!spec.spill) spec.spill = by_default.spill;
}
}  // namespace detail

/// A block of a tenant's memory that moves with the tenant.
struct moving_block {
    std::size_t part = 0;         ///< the number of the tenant's device, from 0
    void* at = nullptr;           ///< its address; after a move, its new address
    std::size_t size = 0;         ///< as allocated, in bytes
    std::size_t alignment = 256;  ///< as allocated
};

/// A function that chooses a tenant's devices. `rooms` are the devices with enough device time left
/// for the tenant, and the memory that could still be promised there. `node` is what is left of all
/// devices: nothing of a lost device, and of a sliced device what is left of the slice where the
/// tenant would be. Returns the bytes on each chosen device of `rooms`, or throws operation_error,
/// as equal_split does. Called under the tenancy's mutex, while all devices' quotas are held: it
/// must not call the tenancy.
using device_choice =
    std::function<partition(const tenant_spec& spec, const std::vector<device_room>& rooms, const node_view& node)>;

/// A specification that can't be read. The code is size_overflow for `overflow`, and otherwise
/// invalid_specification.
class specification_error final : public std::runtime_error, public error {
public:
    /// The kind of error in a key.
    enum class kind : std::uint8_t {
        unknown_key,    ///< an unknown key in a place where all keys are known
        bad_value,      ///< not of the allowed form, or out of the allowed range
        overflow,       ///< a number that doesn't fit
        duplicate,      ///< the same key twice
        contradiction,  ///< keys that contradict each other
    };

    /// `text` is a sentence about the key. The key is put in front of it.
    specification_error(kind why, std::string_view key, std::string_view text)
        : std::runtime_error(detail::whole_sentence(errc::none, std::string(key).append(": ").append(text))),
          error(failure{why == kind::overflow ? errc::size_overflow : errc::invalid_specification}, {}),
          why_(why),
          key_(key) {}

    /// The kind of error.
    [[nodiscard]] kind why() const noexcept { return why_; }
    /// The key with the error.
    [[nodiscard]] const std::string& key() const noexcept { return key_; }
    /// A sentence for people. Characters of the input that can't be printed are escaped.
    [[nodiscard]] const char* what() const noexcept override { return std::runtime_error::what(); }

private:
    kind why_;
    std::string key_;
};

/// Keys with their values, such as a map of strings or an array of pairs of string views.
template <class R>
concept key_values = std::ranges::input_range<R> && requires(std::ranges::range_reference_t<R> pair) {
    std::string_view(pair.first);
    std::string_view(pair.second);
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
