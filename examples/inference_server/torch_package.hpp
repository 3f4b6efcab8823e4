// SPDX-License-Identifier: Apache-2.0
// A model as a package of AOTInductor. torch._inductor.aoti_compile_and_package() makes a package,
// a NAME.pt2, for one kind of device.
//
//   torch_package model("net.pt2", {.inputs = 1, .outputs = 1}, at::kCPU);
//   const auto results = model.run({x}, nullptr);    // on CUDA: the tenant's current stream
//
// A package is machine code that calls libtorch through its C interface. On CUDA, its results and
// its working memory come from libtorch's allocator, and so from the memory of the stream's tenant.
// Its weights do so only if the package was compiled with
// aot_inductor.weight_use_caching_allocator. Otherwise they would lie outside of every quota, so
// the package is refused.
//
// Two files define these functions: torch_package.cpp, and no_torch_package.cpp for a libtorch
// without AOTInductor. CMake takes the file for which the libtorch has headers.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace inference_server {

/// Says that a package's load or call failed. The package gives the reason only on standard error.
struct package_failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Whether this program's libtorch loads packages.
[[nodiscard]] bool has_torch_packages() noexcept;

/// A loaded package, unpacked in a temporary folder of its own while it is loaded. One call at a
/// time, on one stream. The object can be moved.
class torch_package {
public:
    struct counts {
        std::size_t inputs = 0, outputs = 0;
    };

    /// For tensors on `on`. Throws std::logic_error if the package is for another device, has
    /// another number of inputs or outputs, or would allocate its weights outside of the tenant's
    /// memory. Throws unknown_engine if the libtorch can't load packages; package_failed; and what
    /// torch throws.
    torch_package(const std::string& path, counts described, at::Device on);
    torch_package(torch_package&&) noexcept;
    torch_package& operator=(torch_package&&) noexcept;
    ~torch_package();

    /// Enqueues the model's work on `stream`, a cudaStream_t, without waiting. On the host the
    /// stream is null, and the work is over on return. Throws package_failed, for example for an
    /// input of another shape or type than the model was compiled for.
    [[nodiscard]] std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, void* stream);

private:
    struct loaded;
    std::unique_ptr<loaded> loaded_;
};

}  // namespace inference_server
