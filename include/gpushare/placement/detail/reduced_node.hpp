// SPDX-License-Identifier: Apache-2.0
// A node as it would be with one more request, for policies that compare a node before and after a
// placement. The class copies nothing.
//
//   for_each_choice(n, request, [&](device_set at) { cost(reduced_node(n, request, at)) - cost(reduced_node(n)); });
#pragma once

#include <algorithm>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A node as it would be with `permille` less on each of the devices in `at`.
struct reduced_node {
    const node_view& node;
    std::uint64_t cpu_milli = 0;
    bytes memory{};
    device_set at{};
    std::uint32_t permille = 0;

    /// The node itself, not reduced.
    explicit reduced_node(const node_view& n) noexcept : node(n), cpu_milli(n.cpu_milli), memory(n.memory) {}
    /// The node with the request on those devices. The request must fit there.
    reduced_node(const node_view& n, const placement_request& r, device_set devices) noexcept
        : node(n),
          cpu_milli(n.cpu_milli - r.cpu_milli),
          memory(n.memory - r.memory),
          at(devices),
          permille(r.each.permille()) {}

    [[nodiscard]] std::uint32_t free(std::uint32_t device) const noexcept {
        return node.devices[device].permille - (at.contains({device}) ? permille : 0);
    }
};

/// Calls `use` with sets of devices that the request could take. For a request for one device,
/// these are the devices that differ in free capacity, one by one. For several devices, there is
/// one set, the tightest devices.
template <class Use>
void for_each_choice(const node_view& n, const placement_request& r, Use use) {
    if (r.devices != 1) return use(tightest_devices(n, r));
    for (std::uint32_t d = 0; d < n.devices.size(); ++d) {
        const auto earlier = n.devices.first(d);
        if (fits(r, n.devices[d]) && std::ranges::find(earlier, n.devices[d]) == earlier.end()) use(device_set{{d}});
    }
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
