// SPDX-License-Identifier: Apache-2.0
// The training of bench/gpu/training without a device: libtorch's autograd, over the stand-in for
// CUDA, with operators that run on the host. The averages are the library's own.
#include <cuda_runtime_api.h>

#include "gpu/training/operators.hpp"
#include "interop/torch/fake_cuda.hpp"
#include "standins/cuda/launch.hpp"

#include "gpu/training/average_launch.hpp"

namespace gpu_training {

void start_operators() { fake_cuda::set_up(); }
void settle(cudaStream_t s) { (void)cudaStreamSynchronize(s); }

}  // namespace gpu_training
