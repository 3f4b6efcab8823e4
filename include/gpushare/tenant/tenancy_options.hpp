// SPDX-License-Identifier: Apache-2.0
// Options of a tenancy. Each has a default.
//
//   gpushare::tenancy_options options{.wait = 50ms, .spill = 32_GiB, .spill_to = &pinned};      // gpushare::tenancy shared{node, options}
#pragma once

#include <chrono>
#include <memory_resource>

#include <gpushare/compute/admission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/memory/block.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a tenancy.
struct tenancy_options {
    limiter_options limiter{};                    ///< of each device, or of each slice of one
    ns close_timeout = std::chrono::seconds(10);  ///< how long a tenant's destructor waits for its work
    event_sink events{};                          ///< gets what no return value can tell

    // Defaults for tenants whose specification doesn't say.
    memory_stack stack = memory_stack::pool;          ///< what backs their memory
    scrub_policy scrub = scrub_policy::on_hand_over;  ///< when it is overwritten, so that no tenant reads another's
    ns wait{};                                        ///< how long memory().allocate() waits for bytes
    bytes spill{};  ///< how much a tenant may have on the host when bytes lack, of allocate_spillable()
    std::pmr::memory_resource* spill_to =
        nullptr;                     ///< the host's memory for that, pinned for speed; outlives the tenancy
    trace_function trace = nullptr;  ///< capture_stack, from memory/stack_trace.hpp: stack traces of leaks
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

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
