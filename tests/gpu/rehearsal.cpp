// SPDX-License-Identifier: Apache-2.0
// What the experiments of bench/gpu need to run through without a device, whether their kernels are those of rehearsal_kernels.cpp or
// as nvcc compiled them, on the PTX executor. Their figures mean nothing then.
#include <cuda_runtime_api.h>

#include "support/cuda_standin/standin.hpp"

namespace bench {

namespace {

// Before main, which is the experiments' own: they know of no stand-in.
const bool started = (standin::reset({.devices = 2, .memory = gpushare::bytes{12ULL << 30}}), true);

}  // namespace

}  // namespace bench

// What the library never calls, and the stand-in therefore doesn't have.

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
    return cudaStreamCreateWithPriority(made, flags, 0);
}
