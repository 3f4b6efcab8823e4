// SPDX-License-Identifier: Apache-2.0
// The experiments of bench/gpu/libtorch without a device: the decoder and the slices over the stand-in
// for CUDA, with operators that run on the host.
#include "gpu/libtorch/operators.hpp"

#include "interop/torch/fake_cuda.hpp"

namespace gpu_torch {

void start_operators() { fake_cuda::set_up(); }

}  // namespace gpu_torch
