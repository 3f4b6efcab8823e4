// SPDX-License-Identifier: Apache-2.0
#include "inference_server/torch_package.hpp"

#include <ATen/DynamicLibrary.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace inference_server {

namespace {

using runner = torch::inductor::AOTIModelContainerRunner;

/// The runner's handle of the package's library. The runner itself doesn't check the number of
/// inputs.
class opened : public runner {
public:
    [[nodiscard]] static torch_package::counts counts_of(runner& of) {
        auto& code = *(of.*(&opened::model_so_));
        const auto package = of.*(&opened::container_handle_);
        torch_package::counts n;
        ask<&AOTInductorModelContainerGetNumInputs>(code, "AOTInductorModelContainerGetNumInputs", package, n.inputs);
        ask<&AOTInductorModelContainerGetNumOutputs>(code, "AOTInductorModelContainerGetNumOutputs", package,
                                                     n.outputs);
        return n;
    }

private:
    template <auto Declared>
    static void ask(at::DynamicLibrary& code, const char* name, AOTInductorModelContainerHandle package,
                    std::size_t& n) {
        const auto f = reinterpret_cast<decltype(Declared)>(code.sym(name));
        if (f(package, &n) != AOTI_RUNTIME_SUCCESS) throw package_failed("the package doesn't say what it takes");
    }
};

/// Whether the file, which isn't compressed, contains that text.
bool has_text(const std::string& path, std::string_view text) {
    std::ifstream file(path, std::ios::binary);
    const std::boyer_moore_horspool_searcher find(text.begin(), text.end());
    std::vector<char> part(std::size_t{1} << 20);
    std::size_t kept = 0;  // the end of the last part, because the text may span two parts
    while (file.read(part.data() + kept, static_cast<std::streamsize>(part.size() - kept)) || file.gcount() > 0) {
        const auto end = part.begin() + static_cast<std::ptrdiff_t>(kept) + file.gcount();
        if (std::search(part.begin(), end, find) != end) return true;
        kept = std::min(text.size() - 1, static_cast<std::size_t>(end - part.begin()));
        std::copy(end - static_cast<std::ptrdiff_t>(kept), end, part.begin());
    }
    return false;
}

void check_device(const std::string& path, at::Device on) {
    const auto says = torch::inductor::AOTIModelPackageLoader::load_metadata_from_package(path, "model");
    const auto at = says.find("AOTI_DEVICE_KEY");
    const auto here = c10::DeviceTypeName(on.type(), true);
    if (at != says.end() && at->second != here)
        throw std::logic_error("the package is compiled for '" + at->second + "', and models run on '" + here + "'");
    if (on.is_cuda() && !has_text(path, "aoti_torch_cuda_caching_allocator_raw_alloc"))
        throw std::logic_error(
            "the package would take its weights past the tenant's memory: compile it with "
            "aot_inductor.weight_use_caching_allocator");
}

void check_counts(std::string_view verb, std::size_t has, std::size_t described) {
    if (has != described)
        throw std::logic_error("the model " + std::string(verb) + " " + std::to_string(has) +
                               " tensors, its description has " + std::to_string(described));
}

/// Returns f(). Torch's runner has no exception type of its own for a package's errors.
template <class F>
auto as_failure(const char* what, F f) try {
    return f();
} catch (const c10::Error&) {
    throw;
} catch (const std::runtime_error&) {
    throw package_failed(std::string("the package failed while it ") + what +
                         "; its reason is on the server's standard error");
}

}  // namespace

/// Uses a runner that waits neither for an earlier call nor for an event, because the stream keeps
/// the calls in order.
struct torch_package::loaded {
    loaded(const std::string& path, at::Device on)
        : loader(path, "model", true, 1, on.is_cuda() ? on.index() : c10::DeviceIndex{-1}) {}
    torch::inductor::AOTIModelPackageLoader loader;
};

bool has_torch_packages() noexcept { return true; }

torch_package::torch_package(const std::string& path, counts described, at::Device on) {
    check_device(path, on);
    loaded_ = as_failure("was loaded", [&] { return std::make_unique<loaded>(path, on); });
    const auto has = opened::counts_of(*loaded_->loader.get_runner());
    check_counts("takes", has.inputs, described.inputs);
    check_counts("gives", has.outputs, described.outputs);
}
torch_package::torch_package(torch_package&&) noexcept = default;
torch_package& torch_package::operator=(torch_package&&) noexcept = default;
torch_package::~torch_package() = default;

std::vector<at::Tensor> torch_package::run(const std::vector<at::Tensor>& inputs, void* stream) {
    return as_failure("ran", [&] { return loaded_->loader.run(inputs, stream); });
}

}  // namespace inference_server
