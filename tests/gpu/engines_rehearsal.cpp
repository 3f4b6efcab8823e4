// SPDX-License-Identifier: Apache-2.0
// The experiment of bench/gpu/engines without a device and without libtorch: its threads, streams,
// graphs and gates over the stand-ins for CUDA and CUPTI, with models that launch some kernels of a
// given length. Its figures mean nothing here.
#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "gpu/engines/libtorch.hpp"
#include "gpu/engines/models.hpp"
#include "standins/cuda/launch.hpp"

namespace gpu_engines {
namespace {

using namespace std::chrono_literals;

thread_local cudaStream_t current = nullptr;

class some_kernels final : public model {
public:
    some_kernels(int kernels, gpushare::ns each, bool backwards) : n_(kernels), each_(each), backwards_(backwards) {}
    void step() override {
        launch_all(current);
        if (!backwards_) return;
        std::jthread([this, s = current] { launch_all(s); });  // as autograd does
    }

private:
    void launch_all(cudaStream_t s) const {
        for (int i = 0; i < n_; ++i)
            if (standin::detail::launch(s, this, false, each_, [] {}) != cudaSuccess)
                throw std::runtime_error("a launch failed");
    }
    int n_;
    gpushare::ns each_;
    bool backwards_;
};

}  // namespace

void start_libtorch(place) {}
std::string libtorch_version() { return "none"; }
void wait_for_weights() {}
void use_stream(cudaStream_t s) { current = s; }

std::function<void()> captured(const std::function<void()>& pass) {
    using gpushare::cuda::check;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    check(cudaStreamBeginCapture(current, cudaStreamCaptureModeThreadLocal), "beginning to capture");
    pass();
    check(cudaStreamEndCapture(current, &graph), "capturing");
    check(cudaGraphInstantiate(&made, graph, 0), "making a graph");
    check(cudaGraphDestroy(graph), "forgetting how a graph was captured");
    const std::shared_ptr<std::remove_pointer_t<cudaGraphExec_t>> kept(
        made, [](cudaGraphExec_t g) { (void)cudaGraphExecDestroy(g); });
    return [kept] { check(cudaGraphLaunch(kept.get(), current), "launching a graph"); };
}

struct tenant_memory::parts {
    explicit parts(gpushare::bytes quota) : who(shared.admit({.name = "model", .memory = quota})) {}
    gpushare::cuda::node node{{.devices = {0}}};
    gpushare::tenancy<gpushare::cuda::node> shared{node};
    gpushare::tenant<gpushare::cuda::node> who;
};

tenant_memory::tenant_memory(gpushare::bytes quota) : parts_(std::make_unique<parts>(quota)) {}
tenant_memory::~tenant_memory() = default;
void tenant_memory::inside(const std::function<void()>& task) {
    const cudaStream_t before = std::exchange(current, native());
    task();
    current = before;
}
void tenant_memory::give_back() { parts_->who.memory().trim(); }
cudaStream_t tenant_memory::native() const { return parts_->who.work_stream().native_handle(); }

std::unique_ptr<model> make_bert(const bert_sizes&, place) { return std::make_unique<some_kernels>(10, 50us, false); }
std::unique_ptr<model> make_resnet_inference(const resnet_sizes&, place) {
    return std::make_unique<some_kernels>(10, 300us, false);
}
std::unique_ptr<model> make_resnet_training(const resnet_sizes&, place) {
    return std::make_unique<some_kernels>(5, 400us, true);
}
std::unique_ptr<model> make_llm_step(const llm_step_sizes&, place) {
    return std::make_unique<some_kernels>(10, 50us, false);
}
std::unique_ptr<model> make_llm_prefill(const llm_sizes&, place) {
    return std::make_unique<some_kernels>(8, 500us, false);
}

}  // namespace gpu_engines
