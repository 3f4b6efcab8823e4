// SPDX-License-Identifier: Apache-2.0
// Measures the cost of a wait in a stream that nothing closes. A launch gate puts one in front of
// each piece of a lower client's work.
//
//   const auto us = open_wait_us(false);
#pragma once

#include <vector>

namespace gpu_engines {

/// On a device: its time for each wait, one value for each repeat. Empty where the driver has no
/// such waits. `small`: a trial.
[[nodiscard]] std::vector<double> open_wait_us(bool small);

}  // namespace gpu_engines
