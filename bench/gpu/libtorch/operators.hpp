// SPDX-License-Identifier: Apache-2.0
// The difference between libtorch on a device and its rehearsal, whose operators run on the host.
#pragma once

namespace gpu_torch {

/// Must be called before any other function of libtorch. Does nothing on a device.
void start_operators();

}  // namespace gpu_torch
