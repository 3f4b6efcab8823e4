// SPDX-License-Identifier: Apache-2.0
// The differences between libtorch on a device and its rehearsal. The rehearsal's operators run on
// the host, at once, no matter what its streams still have to do.
#pragma once

#include <cuda_runtime_api.h>

namespace gpu_training {

/// Before anything else of libtorch.
void start_operators();
/// The calling thread's operators find what `s` has been given so far. On a device they do anyway.
void settle(cudaStream_t s);

}  // namespace gpu_training
