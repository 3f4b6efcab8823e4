// SPDX-License-Identifier: Apache-2.0
// What libtorch_cuda has, and c10 and scopes ask it for, in programs without it. Once in a program.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAMacros.h>
#include <cuda_runtime_api.h>

extern "C" cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*func)(DeviceIndex));
}
namespace at::cuda {
WorkspaceMapWithMutex& cublas_handle_stream_to_workspace() {
    static auto* const all = new WorkspaceMapWithMutex;
    return *all;
}
WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace() {
    static auto* const all = new WorkspaceMapWithMutex;
    return *all;
}
}  // namespace at::cuda
