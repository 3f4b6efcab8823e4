// SPDX-License-Identifier: Apache-2.0
// How the devices of a node are connected, as far as the CUDA runtime tells; and peer access among them.
//
//   const gpushare::cuda::node_topology t = gpushare::cuda::query_topology(node);
//   if (t.between(a, b).kind == gpushare::cuda::link_kind::nvlink) ...
//   const bool peers = gpushare::cuda::connect(node, devices);     // enables peer access among all of them
//
// connect() is compiled and tested over the stand-in for the runtime. It hasn't run on several devices yet.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// Best first. The runtime doesn't name links: peers with native atomics are on NVLink (PCIe has none between devices),
/// other peers on PCIe, and the rest goes through the host's memory, across sockets if the devices' NUMA nodes differ.
enum class link_kind : std::uint8_t {
    same_device,    ///< no link
    nvlink,         ///< peers with native atomics
    pcie,           ///< other peers
    host,           ///< through the host's memory
    across_sockets  ///< and from one of its processors to another
};

/// Its name in texts.
[[nodiscard]] constexpr std::string_view to_string(link_kind k) noexcept {
    switch (k) {
        case link_kind::same_device: return "same device";
        case link_kind::nvlink: return "NVLink";
        case link_kind::pcie: return "PCIe";
        case link_kind::host: return "host memory";
        case link_kind::across_sockets: return "host memory across sockets";
    }
    return "unknown link";
}

/// From one device to another.
struct peer_link {
    link_kind kind = link_kind::same_device;  ///< what it seems to be
    bool access = true;                       ///< loads and stores reach the other's memory
    bool native_atomics = true;               ///< and so do atomics
    int performance_rank = 0;                 ///< CUDA's: 0 is the best link of the machine, comparable within it only
};

/// A plain value: all devices, and a link for each ordered pair.
struct node_topology {
    std::vector<device_properties> devices{};  ///< in the node's order
    std::vector<peer_link> links{};            ///< by row: from * devices.size() + to

    /// Throws std::out_of_range for a device that isn't there.
    [[nodiscard]] const peer_link& between(device_id from, device_id to) const {
        return links.at(std::size_t{from.index} * devices.size() + to.index);
    }
};

/// The link of two different devices by what is known about them.
[[nodiscard]] constexpr link_kind classify(bool access, bool native_atomics, std::int32_t numa_from,
                                           std::int32_t numa_to) noexcept {
    if (access) return native_atomics ? link_kind::nvlink : link_kind::pcie;
    return numa_from != numa_to && numa_from >= 0 && numa_to >= 0 ? link_kind::across_sockets : link_kind::host;
}

/// Throws operation_error where the driver doesn't answer.
[[nodiscard]] inline node_topology query_topology(const node& on) {
    node_topology t;
    for (std::uint32_t i = 0; i < on.num_devices(); ++i) t.devices.push_back(on.properties(device_id{i}));
    const auto ask = [](cudaDeviceP2PAttr what, int from, int to) {
        int value = 0;
        check(cudaDeviceGetP2PAttribute(&value, what, from, to), "asking how devices are connected");
        return value;
    };
    for (const device_properties& from : t.devices) {
        for (const device_properties& to : t.devices) {
            peer_link link;
            if (from.ordinal != to.ordinal) {
                link.access = ask(cudaDevP2PAttrAccessSupported, from.ordinal, to.ordinal) != 0;
                link.native_atomics =
                    link.access && ask(cudaDevP2PAttrNativeAtomicSupported, from.ordinal, to.ordinal) != 0;
                link.performance_rank = ask(cudaDevP2PAttrPerformanceRank, from.ordinal, to.ordinal);
                link.kind = classify(link.access, link.native_atomics, from.host_numa_node, to.host_numa_node);
            }
            t.links.push_back(link);
        }
    }
    return t;
}

}  // namespace cuda
namespace cuda {

/// True if kernels on each of `devices` reach the memory of all of them from now on, for the whole process; where false, some
/// pairs may. The same device may come several times. Throws as node::enable_peer_access.
[[nodiscard]] inline bool connect(node& on, std::span<const device_id> devices) {
    bool all = true;
    for (const device_id from : devices)
        for (const device_id to : devices)
            if (from != to) all = on.enable_peer_access(from, to) && all;
    return all;
}

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
