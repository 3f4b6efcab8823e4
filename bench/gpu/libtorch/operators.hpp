// SPDX-License-Identifier: Apache-2.0
// The difference between libtorch on a device and its rehearsal, whose operators run on the host.
#pragma once

namespace gpu_torch {

/// Before anything else of libtorch. On a device there is nothing to do.
void start_operators();

}  // namespace gpu_torch
