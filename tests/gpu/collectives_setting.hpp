// SPDX-License-Identifier: Apache-2.0
// Facts that the suite of collectives doesn't know itself: the linking program sets them before
// main.
#pragma once

#include <cstdint>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/units.hpp>

namespace collectives_suite {

/// The compute capability from which on there are kernels, where that isn't all.
inline std::uint32_t least_capability = 0;
/// Devices have a time of their own, which isn't the host's.
inline bool time_is_virtual = false;
/// Has such devices run so many instructions.
inline void (*run_on)(std::uint64_t instructions) = nullptr;

/// Whether the devices run the kernels that were compiled.
[[nodiscard]] inline bool has_kernels() {
    const gpushare::cuda::node node;
    return node.num_devices() == 0 || node.properties(gpushare::device_id{0}).capability >= least_capability;
}

}  // namespace collectives_suite
