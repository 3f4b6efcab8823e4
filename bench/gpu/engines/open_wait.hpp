// SPDX-License-Identifier: Apache-2.0
// Measures the cost of an open wait in a stream. A launch gate puts such a wait in front of each
// piece of a lower client's work.
//
//   const auto us = open_wait_us(false);
#pragma once

#include <vector>

namespace gpu_engines {

/// The device's time per wait, with one value for each repeat. Needs a device. Empty if the driver
/// has no such waits. `small` is for a trial.
[[nodiscard]] std::vector<double> open_wait_us(bool small);

}  // namespace gpu_engines
