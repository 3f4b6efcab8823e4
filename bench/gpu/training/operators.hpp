// SPDX-License-Identifier: Apache-2.0
// The differences between libtorch on a device and its rehearsal. The rehearsal's operators run on
// the host immediately, without waiting for the work on their streams.
#pragma once

#include <cuda_runtime_api.h>

namespace gpu_training {

/// Must be called before any other function of libtorch.
void start_operators();
/// Makes the results of all earlier work on `s` visible to the calling thread's operators. Not
/// needed on a device.
void settle(cudaStream_t s);

}  // namespace gpu_training
