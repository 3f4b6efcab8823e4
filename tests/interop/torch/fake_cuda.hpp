// SPDX-License-Identifier: Apache-2.0
// Tensors of libtorch that say they are on a CUDA device, over the stand-in for CUDA and without
// libtorch_cuda: operators run at once, by libtorch's kernels for the host, on the tensors' memory,
// which is the host's. Autograd, its threads and its streams are libtorch's own. Once in a program.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/library.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "no_libtorch_cuda.hpp"

namespace fake_cuda {

inline const c10::Device device(c10::kCUDA, 0);

/// What autograd asks libtorch_cuda for.
struct hooks : at::CUDAHooksInterface {
    explicit hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::Device getDeviceFromPtr(void*) const override { return device; }
};
inline const c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> registered(
    "CUDAHooks", at::CUDAHooksRegistry(), [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<hooks>(at::CUDAHooksArgs());
    });

inline void set_up() {
    c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
}

/// The same elements as a tensor of another device.
inline at::Tensor moved(const at::Tensor& t, c10::Device to) {
    if (!t.defined() || t.device() == to) return t;
    const auto* const holds = new c10::Storage(t.storage());
    c10::DataPtr same(
        t.storage().mutable_data(), const_cast<c10::Storage*>(holds),
        [](void* p) { delete static_cast<c10::Storage*>(p); }, to);
    c10::Storage all(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(same));
    const auto key = to.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(all), c10::DispatchKeySet(key), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return made;
}

/// Any operator: its arguments on the host, and its results, but for arguments, on the device.
inline void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const std::size_t first = stack->size() - op.schema().arguments().size();
    std::vector<std::pair<at::Tensor, at::Tensor>> arguments;
    const auto to_host = [&](const at::Tensor& t) {
        at::Tensor there = moved(t, c10::kCPU);
        arguments.emplace_back(t, there);
        return there;
    };
    for (std::size_t i = first; i < stack->size(); ++i) {
        c10::IValue& v = (*stack)[i];
        if (v.isTensor()) {
            v = to_host(v.toTensor());
        } else if (v.isTensorList()) {
            std::vector<at::Tensor> all;
            for (const at::Tensor& t : v.toTensorVector()) all.push_back(to_host(t));
            v = all;
        } else if (v.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> all;
            for (const auto& t : v.toOptionalTensorVector()) all.push_back(t ? to_host(*t) : t);
            v = all;
        } else if (v.isDevice()) {
            v = c10::Device(c10::kCPU);
        }
    }
    op.callBoxed(stack);
    const auto back = [&](const at::Tensor& t) {
        for (const auto& [ours, there] : arguments)
            if (t.is_same(there)) return ours;
        return moved(t, device);
    };
    for (std::size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
        if (c10::IValue& v = (*stack)[i]; v.isTensor()) v = back(v.toTensor());
}

TORCH_LIBRARY_IMPL(_, CUDA, all) { all.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
// These have kernels for all devices, which ask for one of the device.
TORCH_LIBRARY_IMPL(aten, CUDA, all) {
    for (const char* const name : {"copy_", "arange", "arange.start", "arange.start_step"})
        all.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

}  // namespace fake_cuda
