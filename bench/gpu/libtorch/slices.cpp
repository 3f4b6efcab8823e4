// SPDX-License-Identifier: Apache-2.0
// Torch keeps a cuBLAS handle and a cuDNN handle for each thread and device, made in the context
// that was current at the thread's first call. In this test, one thread makes its handles in the
// device's primary context, another thread in the slice's context. Both threads enqueue on a stream
// of the slice.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/node.hpp>

#include "../engines/worker.hpp"
#include "experiments.hpp"

namespace gpu_torch {
namespace {

namespace cu = gpushare::cuda;
using at::Tensor;

struct inputs {
    explicit inputs(std::int64_t n) {
        const auto there = [](const Tensor& t) { return t.to(at::Device(at::kCUDA, 0)); };
        a = there(at::rand({n, n}));
        pictures = there(at::rand({8, 16, n / 4, n / 4}));
        kernel = there(at::rand({16, 16, 3, 3}) / 16);
        weight = there(at::rand({16}));
        bias = there(at::rand({16}));
    }
    Tensor a, pictures, kernel, weight, bias;
};

/// An operator, with or without cuDNN.
struct trial {
    std::string name;
    bool cudnn;
    std::function<Tensor()> compute;
};

/// The trials that may leave the device with a sticky error come last.
std::vector<trial> trials(const inputs& in) {
    const auto norm = [&in](bool cudnn) {
        return at::batch_norm(in.pictures, in.weight, in.bias, {}, {}, true, 0.1, 1e-5, cudnn);
    };
    const auto convolution = [&in] { return at::conv2d(in.pictures, in.kernel, {}, 1, 1); };
    return {{"addition", false, [&in] { return in.a + in.a; }},
            {"matmul", false, [&in] { return in.a.matmul(in.a); }},
            {"convolution_without_cudnn", false, convolution},
            {"batch_norm_without_cudnn", false, [norm] { return norm(false); }},
            {"convolution_by_cudnn", true, convolution},
            {"batch_norm_by_cudnn", true, [norm] { return norm(true); }}};
}

/// Empty if the result is right; otherwise the reason of the failure.
std::string outcome(const trial& t, const Tensor& right, const c10::cuda::CUDAStream& on) {
    try {
        const at::NoGradGuard by_itself;
        const c10::cuda::CUDAStreamGuard there(on);
        at::globalContext().setUserEnabledCuDNN(t.cudnn);
        const Tensor found = t.compute();
        cu::check(cudaStreamSynchronize(on.stream()), "waiting for a stream");
        return at::allclose(found.to(at::kCPU), right, 1e-2, 1e-2) ? "" : "another result than outside of the slice";
    } catch (const std::exception& e) {
        (void)cudaGetLastError();
        const std::string why = e.what();
        return why.substr(0, why.find('\n'));
    }
}

CUcontext context_of(CUgreenCtx slice) {
    const cu::entry_point<decltype(::cuCtxFromGreenCtx)> ask{"cuCtxFromGreenCtx", 12040};
    CUcontext context = nullptr;
    cu::check(ask(&context, slice), "asking for the context of a slice");
    return context;
}
void go_into(const cu::driver& api, CUcontext context) {
    cu::check(api.ctx_push_current(context), "entering the context of a slice");
}
void go_out_of(const cu::driver& api, CUcontext context) {
    CUcontext left = nullptr;
    cu::check(api.ctx_pop_current(&left), "leaving the context of a slice");
    if (left != context) std::printf("# on a slice: torch has left the slice's context, so its handles weren't used\n");
}

/// A slice with a quarter of the SMs.
cu::green_context some_sms(const cu::node& node) {
    const auto can = cu::query_sm_split(node, gpushare::device_id{0});
    const std::uint32_t sms[] = {std::max(1U, can.units / 4) * can.unit};
    auto parts = cu::make_green_contexts(node, gpushare::device_id{0}, sms);
    std::printf("# a slice of %u of %u SMs\n", parts[0].sms(), can.sms);
    return std::move(parts[0]);
}

/// Both threads live to the end, because a thread that ends passes its handles to the next thread.
class attempts {
public:
    attempts(bench::report& out, cu::node& node, cu::green_context& slice)
        : out_(out), node_(node), context_(context_of(slice.native_handle())), on_(slice.make_stream()) {
        inside_.begin([this] { go_into(node_.api(), context_); });
        inside_.wait();
    }
    attempts(const attempts&) = delete;
    attempts& operator=(const attempts&) = delete;
    ~attempts() {
        inside_.begin([this] { go_out_of(node_.api(), context_); });
        inside_.wait();
        at::globalContext().setUserEnabledCuDNN(true);
    }

    /// Makes the first thread create its handles outside the slice.
    void begin_outside(const std::vector<trial>& all, const std::vector<Tensor>& right) {
        outside_.begin([&] {
            for (std::size_t i = 0; i < all.size(); ++i)
                if (const auto why = outcome(all[i], right[i], stream_of(elsewhere_)); !why.empty())
                    throw std::runtime_error("outside of a slice, " + all[i].name + " fails: " + why);
        });
        outside_.wait();
    }
    void run(const trial& t, const Tensor& right) {
        attempt(outside_, t, right, t.name);
        attempt(inside_, t, right, t.name + "_by_own_handles");
    }

private:
    static c10::cuda::CUDAStream stream_of(const cu::stream& s) {
        return c10::cuda::getStreamFromExternal(s.native_handle(), 0);
    }
    void attempt(gpu_engines::worker& by, const trial& t, const Tensor& right, const std::string& name) {
        if (!usable_) return;
        std::string why;
        by.begin([&] { why = outcome(t, right, stream_of(on_)); });
        by.wait();
        std::printf("# on a slice: %s %s%s\n", name.c_str(), why.empty() ? "runs" : "fails: ", why.c_str());
        out_.figure("gpu.slice_" + name, {why.empty() ? 1.0 : 0.0}, "seen");
        usable_ = why.empty() || cudaStreamSynchronize(elsewhere_.native_handle()) == cudaSuccess;
        if (!usable_) std::printf("# on a slice: no more was tried, since the device has an error that stays\n");
    }

    bench::report& out_;
    cu::node& node_;
    CUcontext context_;
    cu::stream on_, elsewhere_ = node_.make_stream(gpushare::device_id{0});
    gpu_engines::worker outside_, inside_;
    bool usable_ = true;
};

}  // namespace

void slices(bench::report& out, bool small) {
    cu::node node{{.devices = {0}}};
    auto slice = some_sms(node);
    const inputs in(small ? 32 : 256);
    const auto all = trials(in);
    std::vector<Tensor> right;
    for (const auto& t : all) right.push_back(t.compute().to(at::kCPU));
    c10::cuda::device_synchronize();
    attempts one_by_one(out, node, slice);
    one_by_one.begin_outside(all, right);
    for (std::size_t i = 0; i < all.size(); ++i) one_by_one.run(all[i], right[i]);
}

}  // namespace gpu_torch
