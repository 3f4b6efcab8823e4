// SPDX-License-Identifier: Apache-2.0
// What differs between libtorch on a device and its rehearsal, whose operators run on the host, at
// once, whatever streams still have to do.
#pragma once

#include <cuda_runtime_api.h>

namespace gpu_training {

/// Before anything else of libtorch.
void start_operators();
/// The calling thread's operators find what `s` has been given so far. On a device they do anyway.
void settle(cudaStream_t s);

}  // namespace gpu_training
