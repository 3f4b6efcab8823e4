// SPDX-License-Identifier: Apache-2.0
// The experiments of bench/gpu/libtorch without a device: the decoder and the slices over the stand-in
// for CUDA, with operators that run on the host.
#include <ATen/cuda/CUDAContextLight.h>

#include "gpu/libtorch/operators.hpp"

#include "interop/torch/fake_cuda.hpp"

// What libtorch_cuda has, and a scope asks it for.
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

namespace gpu_torch {

void start_operators() { fake_cuda::set_up(); }

}  // namespace gpu_torch
