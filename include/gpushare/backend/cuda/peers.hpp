// SPDX-License-Identifier: Apache-2.0
// Enables peer access among all the devices given. Returns whether all pairs have it; where false, some may. Compiled
// and tested over the stand-in for the runtime; not yet seen on several devices.
//
//   const bool peers = gpushare::cuda::connect(node, devices);
#pragma once

#include <span>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
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
