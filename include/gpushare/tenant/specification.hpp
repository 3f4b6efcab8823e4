// SPDX-License-Identifier: Apache-2.0
// What a tenant asks for, what it has used, and what is reported about it: the plain values of the tenant layer.
//
//   gpushare::tenant_spec chat{.name = "chat", .memory = 24_GiB, .devices = 2, .compute = 60_pct, .level = {1}};
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The one with the most device time left to promise.
inline constexpr std::uint32_t any_slice = ~0U;

/// Bytes are totals over all devices of the tenant, and split equally; `compute` is a share of each of them.
struct tenant_spec {
    std::string name{};
    bytes memory{};             // guaranteed: set aside from the admission on
    std::uint32_t devices = 1;  // how many, on one node
    share compute{};            // of device time among the tenants of its level; the shares of a device sum to a whole
    priority level{};           // tenants of a higher level go first, always
    bytes burst{};              // further bytes while nobody was promised them
    std::vector<device_id> on{};      // these devices; empty: those with the most room
    bytes unit{1};                    // memory / devices and burst / devices must be whole in it
    std::uint32_t slice = any_slice;  // of SMs, of each of its devices; see tenancy::slice

    // For policies of the tenancy that look at it; see client_settings.
    share cap = share::whole();  // the most of each device's time
    bool soft_cap = false;       // holds only while others want the device
    ns slo{};                    // its work is due so long after its arrival; 0: it has no objective
    std::uint32_t group = 0;     // its class, where the policy is a tree
    ns longest{};                // its longest kernel, for the bound on others' waits; 0: learnt
};

/// What is to be different. What isn't set stays.
/// A template so that where it is included and not used it costs little.
template <template <class> class Optional = std::optional>
struct basic_tenant_change {
    Optional<bytes> memory{}, burst{};
    Optional<share> compute{};
    Optional<priority> level{};
    Optional<share> cap{};
    Optional<bool> soft_cap{};
    Optional<ns> slo{};
    Optional<std::uint32_t> group{};
    Optional<ns> longest{};
};
using tenant_change = basic_tenant_change<>;

/// Sums over the tenant's devices. device_time counts each device's time, of a device in slices that of the tenant's slice.
struct tenant_usage {
    bytes memory{}, burst{};  // as granted
    bytes current{}, peak{};  // bytes charged; the peak sums each device's own
    bytes pending{};          // freed, but the stream hasn't got there
    bytes largest_free{};     // the largest block that it could have now, on the device with the largest
    ns device_time{};
    std::uint64_t completed = 0, failed = 0, waiting = 0, in_flight = 0;  // submissions
    bytes total{};                                                        // of all allocations so far
    std::uint64_t allocations = 0, frees = 0, refused = 0;                // of memory(), so far
};

/// Something that no caller can be told by a return value. Texts and traces are valid during the call of the
/// sink.
struct tenant_event {
    enum class kind : std::uint8_t {
        leak,           // a block that was still out at close; it was taken back
        wrong_free,     // a free of something that isn't out, or isn't of that size; nothing was changed
        overcommitted,  // others took of a device what was promised: `size` bytes too much; no tenant's doing
        stuck,          // work was still on the device when closing gave up; the memory stays charged until it ends
    };
    kind what{};
    std::string_view tenant{};
    device_id device{};
    errc code = errc::none;
    bytes size{};
    std::string_view label{};
    std::span<void* const> trace{};  // of a leak, where the tenancy takes traces: who allocated it
};

[[nodiscard]] constexpr std::string_view to_string(tenant_event::kind k) noexcept {
    switch (k) {
        case tenant_event::kind::leak: return "leak";
        case tenant_event::kind::wrong_free: return "wrong free";
        case tenant_event::kind::overcommitted: return "overcommitted";
        case tenant_event::kind::stuck: return "stuck";
    }
    return "unknown event";
}

/// Called by whichever thread finds out, several at once if need be, under no lock. What it throws is ignored: there is
/// nobody to catch it.
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

/// How a close went. Complete means that everything was returned, and nothing is charged; else call close again, once the
/// work has ended, or what is still charged was given back.
struct close_report {
    bool complete = false;            ///< all is returned
    std::uint64_t leaked_blocks = 0;  ///< blocks of memory() that were out, and were taken back
    bytes leaked{};                   ///< their sizes
    bytes still_charged{};  ///< to the tenant's quotas, by what must go first: arenas, workspaces, pending frees
    tenant_usage usage{};   ///< final, if complete
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
