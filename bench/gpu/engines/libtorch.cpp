// SPDX-License-Identifier: Apache-2.0
#include "libtorch.hpp"

#include <ATen/Parallel.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

#include <memory>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/interop/libtorch.hpp>
#include <gpushare/tenant/tenancy.hpp>

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

struct tenant_memory::parts {
    explicit parts(gpushare::bytes quota) : who(shared.admit({.name = "model", .memory = quota})) {}
    gpushare::cuda::node node{{.devices = {0}}};
    gpushare::tenancy<gpushare::cuda::node> shared{node};
    gpushare::tenant<gpushare::cuda::node> who;
    gpushare::torch_scope<gpushare::cuda::node, gpushare::tenant<gpushare::cuda::node>> scope{node, who};
};

tenant_memory::tenant_memory(gpushare::bytes quota) : parts_(std::make_unique<parts>(quota)) {}
tenant_memory::~tenant_memory() = default;
void tenant_memory::inside(const std::function<void()>& task) {
    const auto in = parts_->scope.enter();
    task();
}
void tenant_memory::give_back() { parts_->scope.give_back(); }
cudaStream_t tenant_memory::native() const { return parts_->who.work_stream().native_handle(); }

}  // namespace gpu_engines
