// SPDX-License-Identifier: Apache-2.0
// Chooses the devices of a tenant that doesn't name them: a function of the embedder's, or placed_by(policy) of
// placed_by.hpp. By default a tenancy takes the devices with the most memory left, or the best connected ones if it was
// given a topology.
//
//   shared.choose_devices([](const auto& spec, const auto& rooms, const auto&) {           // rooms: devices with time for it
//       const std::vector first(rooms.begin(), rooms.begin() + spec.devices);
//       return gpushare::equal_split_over(spec.memory, first, spec.unit);
//   });
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/placement/node_view.hpp>
#include <gpushare/tenant/specification.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A function that chooses a tenant's devices. `rooms` are the devices with enough device time left for the tenant,
/// with the memory that could still be promised. `node` is what is left of all devices: of a lost one nothing, of a
/// sliced one what is left of the slice where the tenant would be. Returns the bytes on each chosen device of `rooms`,
/// or throws operation_error, as equal_split does. Called under the tenancy's mutex, with all devices' quotas held
/// still: it must not call the tenancy.
using device_choice =
    std::function<partition(const tenant_spec& spec, const std::vector<device_room>& rooms, const node_view& node)>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
