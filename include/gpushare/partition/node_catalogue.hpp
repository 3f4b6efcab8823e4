// SPDX-License-Identifier: Apache-2.0
// Ready descriptions of node types: the twelve of Alibaba Cloud's Container Compute Service (ACS),
// with the memory of a device, the numbers of devices on offer, whether nodes are linked by RDMA,
// and the zones that have them.
//
//   const auto* type = gpushare::find_node_type("P16EN");
//   gpushare::topology t = gpushare::describe(*type, 16);
//   bool there = gpushare::has_type("cn-wulanchabu-c", *type);
//   auto wanted = gpushare::read_acs_labels(pod_labels);          // the class, model series and zone that a pod asks for
//
// Source: ACS documentation, "ACS Pod instance overview", section on accelerated compute types, and
// its list of zones (2026). The names are the provider's. The names and the rows of L20N and L20NE
// were published apart; they are matched by elimination, as the two rows and the two names left
// over. Connections within a node and SM counts aren't published there, so they aren't here.
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

/// A type of node and the most that it offers.
struct node_type {
    std::string_view name{};               ///< the provider's, of the model series
    bytes device_memory{};                 ///< of each device
    std::array<std::uint8_t, 5> counts{};  ///< numbers of devices on offer, ascending, then zeros
    bool rdma = false;                     ///< whether its nodes are linked by RDMA
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
    node_type{"GU8TF", 96_GiB, {1, 2, 4, 8}, true, 184, 920_GiB},
    node_type{"GU8TEF", 141_GiB, {1, 2, 4, 8}, true, 184, 1800_GiB},
    node_type{"L20", 48_GiB, {1, 2, 4, 8}, false, 128, 920_GiB},
    node_type{"L20X", 141_GiB, {8}, true, 184, 1800_GiB},
    node_type{"P16EN", 96_GiB, {1, 2, 4, 8, 16}, true, 184, 1800_GiB},
    node_type{"T4", 16_GiB, {1, 2}, false, 48, 180_GiB},
    node_type{"A10", 24_GiB, {1, 2, 4, 8}, false, 128, 480_GiB},
    node_type{"G28Ti", 11_GiB, {1}, false, 0, 0_B},
    node_type{"G49E", 48_GiB, {1, 2, 4, 8}, false, 128, 920_GiB},
    node_type{"G59", 32_GiB, {1, 2, 4, 8}, false, 184, 1440_GiB},
    node_type{"L20N", 48_GiB, {1, 2, 4, 8}, false, 0, 0_B},   // matched by elimination
    node_type{"L20NE", 72_GiB, {1, 2, 4, 8}, false, 0, 0_B},  // likewise
};

/// The link between two devices on different nodes of a type.
[[nodiscard]] constexpr device_link link_between_nodes(const node_type& type) noexcept {
    return {type.rdma ? link_class::rdma : link_class::network, 1, false};
}

/// A zone, and the types of nodes that are there.
struct node_zone {
    std::string_view name{};                  ///< the provider's
    std::array<std::string_view, 5> types{};  ///< their names, then empty ones
};

/// All of them. "ap-southeast-1" is published as a region.
inline constexpr std::array node_zones{
    node_zone{"cn-wulanchabu-a", {"GU8TF", "L20", "G49E"}},
    node_zone{"cn-wulanchabu-b", {"G59"}},
    node_zone{"cn-wulanchabu-c", {"P16EN"}},
    node_zone{"cn-wulanchabu-d", {"P16EN", "L20NE"}},
    node_zone{"cn-beijing-d", {"GU8TF", "GU8TEF", "P16EN"}},
    node_zone{"cn-beijing-h", {"G28Ti"}},
    node_zone{"cn-beijing-i", {"A10", "G28Ti", "L20N"}},
    node_zone{"cn-beijing-l", {"L20", "G49E", "G59", "L20NE"}},
    node_zone{"cn-shanghai-e", {"G59", "G28Ti"}},
    node_zone{"cn-shanghai-f", {"GU8TF", "GU8TEF", "P16EN"}},
    node_zone{"cn-shanghai-l", {"L20", "G49E", "T4", "G28Ti"}},
    node_zone{"cn-shanghai-n", {"L20", "L20N"}},
    node_zone{"cn-shanghai-o", {"P16EN"}},
    node_zone{"cn-hangzhou-b", {"GU8TF", "L20", "G49E", "P16EN", "G59"}},
    node_zone{"cn-hangzhou-i", {"T4"}},
    node_zone{"cn-shenzhen-c", {"L20"}},
    node_zone{"cn-shenzhen-d", {"GU8TEF", "G49E", "G59"}},
    node_zone{"cn-shenzhen-e", {"T4"}},
    node_zone{"cn-hongkong-d", {"GU8TEF"}},
    node_zone{"ap-southeast-1", {"GU8TF", "L20", "L20X"}},
    node_zone{"eu-central-1-a", {"L20"}},
    node_zone{"eu-central-1-c", {"GU8TEF"}},
    node_zone{"me-east-1-a", {"GU8TEF"}},
    node_zone{"us-east-1-a", {"A10", "L20"}},
    node_zone{"us-east-1-b", {"A10", "L20"}},
};

/// Null if there is none of that name, which is spelt as in the table.
[[nodiscard]] constexpr const node_zone* find_node_zone(std::string_view name) noexcept {
    for (const auto& z : node_zones)
        if (z.name == name) return &z;
    return nullptr;
}
/// Whether the zone has nodes of that type. False for a zone that isn't in the table.
[[nodiscard]] constexpr bool has_type(std::string_view zone, const node_type& type) noexcept {
    const auto* const z = find_node_zone(zone);
    if (z == nullptr) return false;
    for (const auto name : z->types)
        if (name == type.name) return true;
    return false;
}

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

/// ACS's classes of pods with devices.
enum class compute_class : std::uint8_t {
    any,      ///< the pod doesn't say
    gpu,      ///< with devices
    gpu_hpn,  ///< with devices, on nodes that are linked by RDMA
};

/// A pod's requirements of its node.
struct node_request {
    compute_class pod = compute_class::any;  ///< of its class
    const node_type* type = nullptr;         ///< of this type; null: of any
    const node_zone* zone = nullptr;         ///< in this zone; null: in any

    /// Whether nodes of that type in that zone will do.
    [[nodiscard]] constexpr bool accepts(const node_type& of, const node_zone& in) const noexcept {
        if ((type != nullptr && type != &of) || (zone != nullptr && zone != &in)) return false;
        return has_type(in.name, of) && (pod != compute_class::gpu_hpn || of.rdma);
    }
};

/// Reads a pod's labels, pairs of key and value: alibabacloud.com/compute-class ("gpu", "gpu-hpn"),
/// alibabacloud.com/gpu-model-series (the name of a type) and topology.kubernetes.io/zone. Other
/// labels are ignored. Throws operation_error (invalid_specification), with label and value, for a
/// class, type or zone that isn't known, and where no zone has what all of them ask for together.
template <class Pairs>
[[nodiscard]] node_request read_acs_labels(const Pairs& labels) {
    node_request r;
    const auto refuse = [](std::string_view key, std::string_view value, std::string_view why) {
        detail::message m;
        m.add(key, " = ", value, ": ", why);
        throw operation_error(failure{errc::invalid_specification}, {}, m);
    };
    std::string_view last_key, last_value;
    for (const auto& pair : labels) {
        const std::string_view key(pair.first), value(pair.second);
        if (key == "alibabacloud.com/compute-class") {
            if (value != "gpu" && value != "gpu-hpn") refuse(key, value, "no class of pods with devices");
            r.pod = value == "gpu" ? compute_class::gpu : compute_class::gpu_hpn;
        } else if (key == "alibabacloud.com/gpu-model-series") {
            if ((r.type = find_node_type(value)) == nullptr) refuse(key, value, "no type of node");
        } else if (key == "topology.kubernetes.io/zone") {
            if ((r.zone = find_node_zone(value)) == nullptr) refuse(key, value, "no zone with devices");
        } else {
            continue;
        }
        last_key = key;
        last_value = value;
    }
    for (const auto& zone : node_zones)
        for (const auto& type : node_types)
            if (r.accepts(type, zone)) return r;
    refuse(last_key, last_value, "no zone has a node for all that the labels ask for");
    return r;  // not reached
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
