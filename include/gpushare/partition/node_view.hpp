// SPDX-License-Identifier: Apache-2.0
// A node, and what is left of it, for a function that chooses devices: a tenancy's device_choice
// (tenant/specification.hpp), or a placement policy (placement/placement_policy.hpp). Plain values.
//
//   auto left_on_first = [](const gpushare::node_view& node) { return node.devices[0].permille; };
//   const gpushare::node_description whole{.devices = 2, .device_memory = 80_GiB};
//   const std::array left{gpushare::free_device{.permille = 470, .memory = 16_GiB},
//                         gpushare::free_device{.open = false}};       // lost, or drained
//   left_on_first({.whole = whole, .devices = left});                  // 470
#pragma once

#include <compare>
#include <cstdint>
#include <span>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A node's place in its cluster, from 0.
struct node_id {
    std::uint32_t index = 0;  ///< from 0

    friend constexpr auto operator<=>(node_id, node_id) = default;
    friend constexpr bool operator==(node_id, node_id) = default;
};

/// A kind of device, such as T4 or H200. The embedder numbers the kinds, from 0 to 63.
struct device_model {
    std::uint8_t index = 0;  ///< from 0

    static constexpr std::uint8_t count = 64;  ///< the number of possible models

    friend constexpr auto operator<=>(device_model, device_model) = default;
    friend constexpr bool operator==(device_model, device_model) = default;
};

/// The location of nodes. The embedder numbers the zones from 1; 0 stands for no particular zone.
struct node_zone_id {
    std::uint16_t index = 0;  ///< 0 stands for no zone

    friend constexpr auto operator<=>(node_zone_id, node_zone_id) = default;
    friend constexpr bool operator==(node_zone_id, node_zone_id) = default;
};

/// A node without placements.
struct node_description {
    std::uint64_t cpu_milli = 0;  ///< thousandths of a core
    bytes memory{};               ///< host memory
    std::uint32_t devices = 0;    ///< at most 64
    device_model model{};         ///< the model of all its devices
    /// the memory of each device; of the largest device, where they differ (cluster::resize)
    bytes device_memory{};
    node_zone_id zone{};  ///< 0 stands for no particular zone

    friend constexpr bool operator==(const node_description&, const node_description&) = default;
};

/// The free capacity of one device.
struct free_device {
    std::uint32_t permille = 0;  ///< free device time
    bytes memory{};              ///< free device memory
    /// false if the device is drained or gone; it then takes no request, not even an empty request
    bool open = true;

    friend constexpr auto operator<=>(const free_device&, const free_device&) = default;
    friend constexpr bool operator==(const free_device&, const free_device&) = default;
};

/// The free capacity of one node. A view: valid until the cluster changes.
struct node_view {
    node_id id{};                            ///< the node's number in its cluster
    const node_description& whole;           ///< the node without placements
    std::uint64_t cpu_milli = 0;             ///< free thousandths of a core
    bytes memory{};                          ///< free host memory
    std::span<const free_device> devices{};  ///< the free capacity of each device

    /// The free device time of all devices.
    [[nodiscard]] std::uint64_t permille() const noexcept {
        std::uint64_t sum = 0;
        for (const auto& d : devices) sum += d.permille;
        return sum;
    }
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
