// SPDX-License-Identifier: Apache-2.0
#include "libtorch.hpp"

#include <ATen/Parallel.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

#include <memory>

namespace gpu_engines {

void start_libtorch(place p) {
    if (p == place::cpu) at::set_num_threads(1);
}
std::string libtorch_version() { return TORCH_VERSION; }

void wait_for_weights() { c10::cuda::device_synchronize(); }
void use_stream(cudaStream_t s) { c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(s, 0)); }

std::function<void()> captured(const std::function<void()>& pass) {
    const auto graph = std::make_shared<at::cuda::CUDAGraph>();
    graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    pass();
    graph->capture_end();
    return [graph] { graph->replay(); };
}

}  // namespace gpu_engines
