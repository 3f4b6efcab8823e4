// SPDX-License-Identifier: Apache-2.0
// Lets a placement policy choose the devices of a tenancy's tenants, instead of taking those with the most room. So
// later tenants find room: whole devices stay whole, and a device's memory and device time run out together.
//
//   gpushare::tenancy shared{node};
//   const auto devices = gpushare::as_cluster(shared);
//   shared.choose_devices(gpushare::placed_by(gpushare::value_descent(devices, gpushare::workload(expected))));
//   auto chat = shared.admit({.name = "chat", .memory = 24_GiB, .compute = 30_pct});
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A tenant's specification as a placement request: device memory and device time of its level, but
/// no cores and no host memory, which a tenancy doesn't promise.
[[nodiscard]] inline placement_request placement_of(const tenant_spec& spec) noexcept {
    const auto devices = std::max<std::uint32_t>(spec.on.empty() ? spec.devices : 1, 1);
    return {.devices = devices, .each = spec.compute, .device_memory = spec.memory / devices, .level = spec.level};
}

/// Where an admitted tenant is, on the node of as_cluster(): `granted` is its spec().
[[nodiscard]] inline placement place_of(const tenant_spec& granted) {
    placement where{.request = placement_of({.memory = granted.memory,
                                             .devices = static_cast<std::uint32_t>(granted.on.size()),
                                             .compute = granted.compute,
                                             .level = granted.level}),
                    .node = node_id{0}};
    for (const auto d : granted.on) where.devices.add(d);
    return where;
}

namespace detail {

/// One node whose devices have `whole` of these rooms; devices without memory count as gone.
[[nodiscard]] inline cluster cluster_of(const std::vector<device_room>& rooms) {
    cluster c;
    c.add({.devices = static_cast<std::uint32_t>(rooms.size())});
    for (const auto& r : rooms)
        if (r.whole != bytes{}) c.resize({0}, r.device, r.whole);
    for (const auto& r : rooms)
        if (r.whole == bytes{}) c.remove({0}, r.device);
    return c;
}

}  // namespace detail

/// A tenancy's devices as a cluster of one empty node, for policies that learn from the nodes' sizes. Each device has
/// the memory that could be promised there; one that is lost is gone. Throws as cluster::add: at most 64 devices.
template <class Tenancy>
requires requires(const Tenancy& t) {
    { t.rooms() } -> std::same_as<std::vector<device_room>>;
}
[[nodiscard]] cluster as_cluster(const Tenancy& shared) { return detail::cluster_of(shared.rooms()); }

/// A choice for tenancy::choose_devices: among the devices with room, those that `policy` would
/// take. A tenant that names its devices gets these. The policy is called under the tenancy's
/// mutex.
template <placement_policy Policy>
[[nodiscard]] device_choice placed_by(Policy policy) {
    return [policy = std::move(policy)](const tenant_spec& spec, const std::vector<device_room>& rooms,
                                        const node_view& node) mutable {
        const placement_request request = placement_of(spec);
        const auto with_room = std::ranges::count_if(node.devices, [&](const auto& d) { return fits(request, d); });
        // Too few with room: why, the plain split says best.
        if (with_room < static_cast<std::ptrdiff_t>(request.devices))
            return equal_split(spec.memory, spec.devices, rooms, spec.unit);
        const device_set taken = detail::rated(policy, node, request).devices;
        std::vector<device_room> chosen;
        std::ranges::copy_if(rooms, std::back_inserter(chosen),
                             [&](const device_room& r) { return taken.contains(r.device); });
        return equal_split_over(spec.memory, chosen, spec.unit);
    };
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
