// SPDX-License-Identifier: Apache-2.0
// A model as a package of AOTInductor: torch._inductor.aoti_compile_and_package() makes one, a
// NAME.pt2, for one kind of device.
//
//   torch_package model("net.pt2", {.inputs = 1, .outputs = 1}, at::kCPU);
//   const auto results = model.run({x}, nullptr);    // on CUDA: the tenant's current stream
//
// A package is machine code, which calls libtorch by its C interface. On CUDA its results and what
// it works in come of libtorch's allocator, so of the memory of the stream's tenant. Its weights do
// only where it was compiled with aot_inductor.weight_use_caching_allocator: else they would lie
// past every quota, so the package is refused.
//
// Two files define these functions: torch_package.cpp, and no_torch_package.cpp for a libtorch
// without AOTInductor. CMake takes the one that the libtorch has headers for.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace inference_server {

/// A package said that its load or its call failed. It says why on standard error, nowhere else.
struct package_failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Whether this program's libtorch loads packages.
[[nodiscard]] bool has_torch_packages() noexcept;

/// A loaded package, unpacked in a temporary folder of its own as long as it is loaded. One call at
/// a time, on one stream. Movable.
class torch_package {
public:
    struct counts {
        std::size_t inputs = 0, outputs = 0;
    };

    /// For tensors on `on`. Throws std::logic_error where the package is for another device, takes
    /// or gives another number of tensors, or would take its weights past the tenant;
    /// unknown_engine where the libtorch loads none; package_failed; and what torch throws.
    torch_package(const std::string& path, counts described, at::Device on);
    torch_package(torch_package&&) noexcept;
    torch_package& operator=(torch_package&&) noexcept;
    ~torch_package();

    /// Enqueues the model's work on `stream`, a cudaStream_t, without a wait. On the host the
    /// stream is null, and the work is over. Throws package_failed, as for an input of another
    /// shape or type than the model was compiled for.
    [[nodiscard]] std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, void* stream);

private:
    struct loaded;
    std::unique_ptr<loaded> loaded_;
};

}  // namespace inference_server
