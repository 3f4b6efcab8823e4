// SPDX-License-Identifier: Apache-2.0
// A node's total and free capacity, as seen by code that chooses devices: policies, and a tenancy's
// device_choice.
//
//   auto left_on_first = [](const gpushare::node_view& node) { return node.devices[0].permille; };
#pragma once

#include <cstdint>
#include <span>

#include <gpushare/config.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A node as it is when nothing is placed on it.
struct node_description {
    std::uint64_t cpu_milli = 0;  ///< thousandths of a core
    bytes memory{};               ///< of the host
    std::uint32_t devices = 0;    ///< at most device_set::capacity
    device_model model{};         ///< of all its devices
    bytes device_memory{};        ///< of each device; of the largest, where they differ (cluster::resize)
    node_zone_id zone{};          ///< where it is; 0: nowhere in particular

    friend constexpr bool operator==(const node_description&, const node_description&) = default;
};

/// The free capacity of one device.
struct free_device {
    std::uint32_t permille = 0;  ///< of device time
    bytes memory{};              ///< of the device
    bool open = true;            ///< false: it is drained or gone, and takes nothing, not even a request for nothing

    friend constexpr auto operator<=>(const free_device&, const free_device&) = default;
    friend constexpr bool operator==(const free_device&, const free_device&) = default;
};

/// The free capacity of one node. A view: valid until the cluster changes.
struct node_view {
    node_id id{};                            ///< in its cluster
    const node_description& whole;           ///< as it is when it is empty
    std::uint64_t cpu_milli = 0;             ///< free thousandths of a core
    bytes memory{};                          ///< free, of the host
    std::span<const free_device> devices{};  ///< what is free on each

    /// Free device time, of all devices.
    [[nodiscard]] std::uint64_t permille() const noexcept {
        std::uint64_t sum = 0;
        for (const auto& d : devices) sum += d.permille;
        return sum;
    }
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
