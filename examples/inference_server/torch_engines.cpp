// SPDX-License-Identifier: Apache-2.0
#include "inference_server/torch_engines.hpp"

#include <ATen/Parallel.h>
#include <malloc.h>
#include <stdlib.h>
#include <torch/script.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "inference_server/json.hpp"
#include "inference_server/read_file.hpp"
#include "inference_server/torch_package.hpp"
#include "inference_server/torch_place.hpp"

namespace inference_server {

namespace {

/// No value if torch has no such type, or the type isn't one of numbers.
std::optional<at::ScalarType> scalar_type_of(datatype t) {
    switch (t) {
        case datatype::boolean: return at::kBool;
        case datatype::uint8: return at::kByte;
        case datatype::int8: return at::kChar;
        case datatype::int16: return at::kShort;
        case datatype::int32: return at::kInt;
        case datatype::int64: return at::kLong;
        case datatype::fp16: return at::kHalf;
        case datatype::bf16: return at::kBFloat16;
        case datatype::fp32: return at::kFloat;
        case datatype::fp64: return at::kDouble;
        case datatype::uint16:
        case datatype::uint32:
        case datatype::uint64:
        case datatype::bytes: break;
    }
    return std::nullopt;
}

/// The first member of an engine, so that it is destroyed last. It gives freed memory back to the
/// system. Otherwise the next load would reuse that memory, and would be measured as smaller than
/// it is.
struct gives_back {
    gives_back() = default;
    gives_back(const gives_back&) = delete;
    gives_back& operator=(const gives_back&) = delete;
    ~gives_back() { ::malloc_trim(0); }
};

/// Turns a lack of memory into a refusal, which keeps the engine. TorchScript turns torch's
/// exception into another, but keeps its text, whose last line has the tenant's sentence.
void refuse_without_memory(std::string_view text) {
    const auto at = text.rfind("out of memory. ");
    if (at == std::string_view::npos) return;
    const auto line = text.substr(at);
    throw refused(507, std::string(line.substr(0, line.find('\n'))));
}

/// Returns f(). Torch's errors end with a stack trace of this program, which clients don't get.
template <class F>
auto without_trace(F f) try {
    return f();
} catch (const refused&) {
    throw;
} catch (const c10::Error& e) {
    refuse_without_memory(e.what_without_backtrace());
    throw std::runtime_error(e.what_without_backtrace());
} catch (const std::exception& e) {
    refuse_without_memory(e.what());
    throw;
}

/// A model as TorchScript.
class script {
public:
    static constexpr std::string_view platform = "pytorch_torchscript";

    script(const std::string& path, const model_info& info, at::Device on) : module_(torch::jit::load(path, on)) {
        module_.eval();
        const auto method = module_.find_method("forward");
        if (!method) throw std::logic_error("the model has no forward()");
        // includes the module itself
        const auto& takes = method->function().getSchema().arguments();
        const auto needed = std::ranges::count_if(takes, [](const auto& a) { return !a.default_value(); });
        if (std::cmp_greater(needed, info.inputs.size() + 1) || takes.size() < info.inputs.size() + 1)
            throw std::logic_error("the model takes " + std::to_string(takes.size() - 1) +
                                   " tensors, its description has " + std::to_string(info.inputs.size()));
    }

    [[nodiscard]] std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, void* /*stream*/) {
        return tensors_of(module_.forward({inputs.begin(), inputs.end()}));
    }

private:
    [[nodiscard]] static std::vector<at::Tensor> tensors_of(const c10::IValue& result) {
        if (result.isTensor()) return {result.toTensor()};
        if (result.isTensorList()) return result.toTensorVector();
        if (!result.isTuple()) throw std::logic_error("the model gives something else than tensors");
        std::vector<at::Tensor> all;
        for (const auto& e : result.toTuple()->elements()) all.push_back(e.toTensor());
        return all;
    }

    torch::jit::Module module_;
};

/// A model as a package of AOTInductor. Its code tells torch that it has failed, but not why.
class package {
public:
    static constexpr std::string_view platform = "pytorch_aotinductor";

    package(const std::string& path, const model_info& info, at::Device on)
        : model_(path, {info.inputs.size(), info.outputs.size()}, on) {}

    [[nodiscard]] std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, void* stream) {
        return model_.run(inputs, stream);
    }

private:
    torch_package model_;
};

template <class Model>
class torch_engine final : public engine {
public:
    torch_engine(const std::string& path, const model_info& info, const surroundings& at)
        : where_(at), outputs_(info.outputs), batches_(info.max_batch != 0), model_(told([&] {
              const auto inside = where_.enter();
              return Model(path, info, where_.device());
          })) {}

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on) override {
        told([&] { forward(inputs, outputs, on); });
    }

private:
    /// Returns f(). Turns a lack of memory into a refusal, since a package doesn't report it.
    template <class F>
    auto told(F f) {
        const auto before = where_.refusals();
        try {
            return without_trace(std::move(f));
        } catch (const package_failed&) {
            if (where_.refusals() == before) throw;
            throw refused(507, where_.out_of_memory());
        }
    }
    void forward(std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on) {
        const auto inside = where_.enter();
        const c10::InferenceMode only_forward;  // of this thread
        std::vector<at::Tensor> arguments;
        for (const auto& t : inputs) arguments.push_back(where_.input(t, scalar_type_of(t.type).value()));
        const auto results = model_.run(arguments, where_.stream());
        if (results.size() != outputs_.size())
            throw std::logic_error("the model gives " + std::to_string(results.size()) +
                                   " tensors, its description has " + std::to_string(outputs_.size()));
        for (std::size_t i = 0; i < results.size(); ++i) outputs.push_back(described(results[i], outputs_[i]));
        if (batches_) check_rows(outputs, inputs[0].shape[0]);
        for (std::size_t i = 0; i < results.size(); ++i) where_.output(results[i], outputs, i, on);
    }
    [[nodiscard]] static tensor described(const at::Tensor& from, const tensor_info& as) {
        if (from.scalar_type() != scalar_type_of(as.type))
            throw std::logic_error("the model's tensor '" + as.name + "' isn't of the type that is described");
        return {as.name, as.type, from.sizes().vec(), {}};
    }
    /// The server takes a call's rows apart again, one request after another.
    static void check_rows(const std::vector<tensor>& outputs, std::int64_t rows) {
        for (const auto& t : outputs)
            if (t.shape.empty() || t.shape[0] != rows)
                throw refused(500, "the model's tensor '" + t.name + "' has other rows than the batch");
    }

    gives_back last_;
    torch_place where_;
    std::vector<tensor_info> outputs_;
    bool batches_;
    Model model_;
};

std::vector<tensor_info> infos_of(json::value model, std::string_view member) {
    std::vector<tensor_info> all;
    for (const auto& v : model.at(member).elements(most_tensors)) {
        const auto type = datatype_of(v.at("datatype").string());
        if (!type || !scalar_type_of(*type)) throw json::error("a datatype that torch hasn't");
        auto& info = all.emplace_back(tensor_info{v.at("name").string(), *type, {}});
        for (const auto& e : v.at("shape").elements(most_extents)) info.shape.push_back(e.number<std::int64_t>());
    }
    return all;
}

/// Throws if the first extent of a tensor can't be that of a batch.
void check_batches(const model_info& m) {
    if (m.max_batch == 0) return;
    if (m.inputs.empty()) throw json::error("without inputs there are no batches");
    for (const auto* const all : {&m.inputs, &m.outputs})
        for (const auto& t : *all)
            if (t.shape.empty() || t.shape[0] >= 0)
                throw json::error("the first extent of '" + t.name + "' isn't open, so there are no batches");
}

template <class Model>
model_source source_of(const std::filesystem::path& weights) {
    auto described = weights;
    described.replace_extension(".json");
    const auto text = read_file(described.string()).first;
    try {
        const auto v = json::parse(text);
        model_info info{weights.stem().string(), std::string(Model::platform), infos_of(v, "inputs"),
                        infos_of(v, "outputs")};
        if (const auto most = v.find("max_batch_size")) info.max_batch = most->number<std::uint32_t>();
        check_batches(info);
        const auto load = [path = weights.string(), info](const surroundings& at) {
            return std::make_unique<torch_engine<Model>>(path, info, at);
        };
        // On CUDA the weights lie in the tenant's memory, which is charged for them.
        return {std::move(info), load, {}, calls_end_by_returning};
    } catch (const std::exception& e) {
        throw std::runtime_error(described.string() + ": " + e.what());
    }
}

bool is_package(const std::filesystem::path& file) { return file.extension() == ".pt2"; }

/// Throws if this program can't serve a model, or if two models have the same name.
void check_files(const std::vector<std::filesystem::path>& sorted) {
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        const auto& f = sorted[i];
        if (is_package(f) && !has_torch_packages())
            throw unknown_engine(f.string() + ": the libtorch that this server is built with loads no packages of " +
                                 "AOTInductor, only TorchScript; ./dev setup gpu fetches one that does");
        if (i > 0 && f.stem() == sorted[i - 1].stem())
            throw std::runtime_error(f.string() + ": there is " + sorted[i - 1].filename().string() + " of that name");
    }
}

}  // namespace

std::vector<model_source> torch_models(const std::string& folder) {
    at::set_num_threads(1);  // the block of the device is the model's only thread
    // Unless this is set, a package reads beyond an input that is smaller than the input for which
    // it was compiled.
    (void)::setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);
    std::vector<std::filesystem::path> files;
    for (const auto& f : std::filesystem::directory_iterator(folder))
        if (f.path().extension() == ".pt" || is_package(f.path())) files.push_back(f.path());
    if (files.empty()) throw std::runtime_error(folder + ": no model, as NAME.pt or NAME.pt2");
    std::ranges::sort(files);
    check_files(files);
    std::vector<model_source> all;
    for (const auto& f : files) all.push_back(is_package(f) ? source_of<package>(f) : source_of<script>(f));
    return all;
}

}  // namespace inference_server
