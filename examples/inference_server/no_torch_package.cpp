// SPDX-License-Identifier: Apache-2.0
// The functions of torch_package.hpp for a libtorch without AOTInductor.
#include "inference_server/engine.hpp"
#include "inference_server/torch_package.hpp"

namespace inference_server {

struct torch_package::loaded {};

bool has_torch_packages() noexcept { return false; }

torch_package::torch_package(const std::string& path, counts /*described*/, at::Device /*on*/) {
    throw unknown_engine(path + ": this server's libtorch loads no packages of AOTInductor");
}
torch_package::torch_package(torch_package&&) noexcept = default;
torch_package& torch_package::operator=(torch_package&&) noexcept = default;
torch_package::~torch_package() = default;

std::vector<at::Tensor> torch_package::run(const std::vector<at::Tensor>& /*inputs*/, void* /*stream*/) { return {}; }

}  // namespace inference_server
