// SPDX-License-Identifier: Apache-2.0
// Makes a tenant specification of the resources and labels by which a pod asks for parts of GPUs.
// Numbers may have any form that Kubernetes writes (3000 comes back as 3k), as long as they are
// whole.
//
//   std::map<std::string, std::string> labels{{"aliyun.com/gpu-mem", "8"}, {"aliyun.com/gpu-count", "2"}};
//   auto spec = gpushare::read_kubernetes(labels, {.name = pod});          // 4 GiB on each of two devices
//
// Alibaba Cloud (ACK, shared GPU scheduling):
//  aliyun.com/gpu-mem               GiB of all devices together
//  aliyun.com/gpu-count             devices, on one node; gpu-mem must be a multiple of it
//  aliyun.com/gpu-core.percentage   of the time of each device, 1 to 100
// HAMi, another scheduler of shared GPUs:
//  nvidia.com/gpu                   devices
//  nvidia.com/gpumem                MiB of each device
//  nvidia.com/gpumem-percentage     of the memory of each device, 1 to 100; needs to know that memory
//  nvidia.com/gpucores              percent of the time of each device; 0 asks for none in particular
//  nvidia.com/priority              0: level 1, before others; 1, HAMi's default: level 0
// Every other key below aliyun.com and nvidia.com is an error, as a part of a GPU that isn't read
// would be dropped in silence: gpu.shared and mig-* name slices whose memory and share are written
// elsewhere. Keys by which nodes describe themselves (nvidia.com/gpu.product, mig.strategy,
// cuda.driver.major) and keys of others are passed over.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/interop/detail/specification_fields.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// A whole number of `scale` bytes each, at least one.
[[nodiscard]] inline bytes checked_memory(std::string_view key, std::string_view value, bytes scale,
                                          std::string_view allowed) {
    auto number = parse_quantity(value);
    if (number.code == parse_code::ok && number.value > std::numeric_limits<std::uint64_t>::max() / scale.count())
        number = {0, parse_code::overflow};
    number.value *= scale.count();
    return bytes{checked(number, key, value, 1, std::numeric_limits<std::uint64_t>::max() - 1, allowed)};
}

inline constexpr std::string_view percent_allowed = "a whole number of percent from 1 to 100";

[[nodiscard]] inline share checked_whole_percent(std::string_view key, std::string_view value) {
    return share::of_permille(checked(parse_quantity(value), key, value, 1, 100, percent_allowed) * 10);
}

inline void read_aliyun(specification_fields& f, std::string_view key, std::string_view value) {
    if (key == "aliyun.com/gpu-mem") {
        f.set(f.memory, checked_memory(key, value, 1_GiB, "a whole number of GiB, at least 1"), key);
        f.set(f.unit, 1_GiB, key);
    } else if (key == "aliyun.com/gpu-count") {
        f.set(f.devices, checked_devices(key, value, parse_quantity(value)), key);
    } else if (key == "aliyun.com/gpu-core.percentage") {
        f.set(f.compute, checked_whole_percent(key, value), key);
    } else {
        throw specification_error(specification_error::kind::unknown_key, key,
                                  "is none of aliyun.com/gpu-mem, gpu-count, gpu-core.percentage");
    }
}

inline void read_hami(specification_fields& f, std::string_view key, std::string_view value, bytes device_memory) {
    using kind = specification_error::kind;
    if (key == "nvidia.com/gpu") {
        f.set(f.devices, checked_devices(key, value, parse_quantity(value)), key);
    } else if (key == "nvidia.com/gpumem") {
        f.set(f.memory_each, checked_memory(key, value, 1_MiB, "a whole number of MiB, at least 1"), key);
    } else if (key == "nvidia.com/gpumem-percentage") {
        const auto percent = checked(parse_quantity(value), key, value, 1, 100, percent_allowed);
        if (device_memory == bytes{})
            throw specification_error(kind::contradiction, key, "can't be read without the memory of a device");
        // Hundredths of it first: no product can be too big.
        const auto hundredths = device_memory.count() / 100, rest = device_memory.count() % 100;
        f.set(f.memory_each, bytes{hundredths * percent + rest * percent / 100}, key);
    } else if (key == "nvidia.com/gpucores") {
        if (checked(parse_quantity(value), key, value, 0, 100, "a whole number of percent from 0 to 100") != 0)
            f.set(f.compute, checked_whole_percent(key, value), key);
    } else if (key == "nvidia.com/priority") {
        const auto hami = checked(parse_quantity(value), key, value, 0, 1, "0, before others, or 1");
        f.set(f.level, priority{hami == 0 ? 1 : 0}, key);
    } else if (key.ends_with(".shared") || key.starts_with("nvidia.com/mig-")) {
        throw specification_error(kind::unknown_key, key,
                                  "names a slice, and not its memory: say it by nvidia.com/gpumem and gpucores");
    } else {
        throw specification_error(kind::unknown_key, key,
                                  "is none of nvidia.com/gpu, gpumem, gpumem-percentage, gpucores, priority");
    }
}

/// Whether NVIDIA's feature discovery and operator label nodes with it: nobody asks for anything by it.
[[nodiscard]] inline bool describes_node(std::string_view key) noexcept {
    constexpr std::string_view domain = "nvidia.com/";
    if (!key.starts_with(domain) || key.ends_with(".shared")) return false;  // resources of a device plugin
    key.remove_prefix(domain.size());
    constexpr std::array<std::string_view, 8> groups{"gpu.",  "mig.", "cuda.", "gfd.",
                                                     "vgpu.", "mps.", "imex.", "gpu-driver-upgrade-"};
    for (const auto group : groups)
        if (key.starts_with(group)) return true;
    // mig-1g.5gb.product: the resource mig-1g.5gb, which has one dot, of the node
    return key.starts_with("mig-") && std::count(key.begin(), key.end(), '.') > 1;
}

}  // namespace detail

/// Values that aren't given come from `defaults`. `device_memory` is one device's memory, for
/// gpumem-percentage. Throws specification_error, for unknown keys below aliyun.com and nvidia.com
/// as well (see the top of the file).
template <key_values Pairs>
[[nodiscard]] tenant_spec read_kubernetes(Pairs&& pairs, tenant_spec defaults = {}, bytes device_memory = {}) {
    detail::specification_fields f;
    for (auto&& pair : pairs) {
        const std::string_view key(pair.first), value(pair.second);
        const bool aliyun = key.starts_with("aliyun.com/");
        if (!aliyun && (!key.starts_with("nvidia.com/") || detail::describes_node(key))) continue;
        f.see(key);
        if (aliyun)
            detail::read_aliyun(f, key, value);
        else
            detail::read_hami(f, key, value, device_memory);
    }
    return f.finish(std::move(defaults));
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
