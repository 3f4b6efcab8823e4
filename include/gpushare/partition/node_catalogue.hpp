// SPDX-License-Identifier: Apache-2.0
// Ready descriptions of node types: those of Alibaba Cloud's Container Compute Service (ACS), with the memory of a
// device and the numbers of devices on offer.
//
//   const auto* type = gpushare::find_node_type("P16EN");
//   gpushare::topology t = gpushare::describe(*type, 16);
//
// Source: ACS documentation, "ACS Pod instance overview", section on accelerated compute types (2026): model series,
// memory and number of devices, the most vCPUs and host memory. The names are the provider's. Connections within a node
// and SM counts aren't published there, so they aren't here. RDMA is a property of the compute class, not of the model.
// Of three more models, G28Ti, L20N and L20NE, the documentation has the names and drivers only ("GPU driver version
// guide", 2026), and of a type with 72 GB not even those: without their memory and counts they aren't here.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/topology.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Classes of nodes: `gpu_hpn` has the high-performance network, RDMA, between nodes.
enum class compute_class : std::uint8_t {
    gpu,      ///< an ordinary network between nodes
    gpu_hpn,  ///< RDMA
};

/// The link between two devices on different nodes of a class.
[[nodiscard]] constexpr device_link link_between_nodes(compute_class c) noexcept {
    return {c == compute_class::gpu_hpn ? link_class::rdma : link_class::network, 1, false};
}

/// A type of node: what it offers at the most.
struct node_type {
    std::string_view name{};               ///< the provider's, of the model series
    bytes device_memory{};                 ///< of each device
    std::array<std::uint8_t, 5> counts{};  ///< numbers of devices on offer, ascending, then zeros
    std::uint32_t most_vcpus = 0;          ///< 0 where the source doesn't say
    bytes most_memory{};                   ///< of the host; 0 likewise

    /// The largest number on offer.
    [[nodiscard]] constexpr std::uint32_t most_devices() const noexcept {
        std::uint32_t most = 0;
        for (const auto n : counts) most = n > most ? n : most;
        return most;
    }
    /// Whether that number is on offer.
    [[nodiscard]] constexpr bool offers(std::uint32_t devices) const noexcept {
        for (const auto n : counts)
            if (n == devices && n != 0) return true;
        return false;
    }
};

/// All of them.
inline constexpr std::array node_types{
    node_type{"T4", 16_GiB, {1, 2}, 48, 180_GiB},
    node_type{"A10", 24_GiB, {1, 2, 4, 8}, 128, 480_GiB},
    node_type{"G59", 32_GiB, {1, 2, 4, 8}, 184, 1440_GiB},
    node_type{"L20", 48_GiB, {1, 2, 4, 8}, 128, 920_GiB},
    node_type{"G49E", 48_GiB, {1, 2, 4, 8}, 128, 920_GiB},
    node_type{"GU8TF", 96_GiB, {1, 2, 4, 8}, 184, 920_GiB},
    node_type{"P16EN", 96_GiB, {1, 2, 4, 8, 16}, 184, 1800_GiB},
    node_type{"GU8TEF", 141_GiB, {1, 2, 4, 8}, 184, 1800_GiB},
    node_type{"L20X", 141_GiB, {8}, 184, 1800_GiB},
    // Smaller cards, which that list doesn't name.
    node_type{"generic 11 GiB", 11_GiB, {1, 2, 4, 8}, 0, 0_B},
};

/// Null if there is none of that name, which is spelt as in the table.
[[nodiscard]] constexpr const node_type* find_node_type(std::string_view name) noexcept {
    for (const auto& t : node_types)
        if (t.name == name) return &t;
    return nullptr;
}

/// A node of that type, all devices connected by `each`; nothing better is known than that they are in one host.
/// Throws operation_error (invalid_specification) for a number of devices that isn't on offer.
[[nodiscard]] inline topology describe(const node_type& type, std::uint32_t devices,
                                       device_link each = {link_class::host_bridge, 1, false}) {
    if (!type.offers(devices))
        raise({errc::invalid_specification, devices, 0, type.most_devices(), reason::node_size}, {}, type.name);
    std::vector<device_description> all;
    for (std::uint32_t i = 0; i < devices; ++i) all.push_back({.memory = type.device_memory});
    topology t(std::move(all));
    t.connect_all(each);
    return t;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
