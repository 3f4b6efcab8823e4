// SPDX-License-Identifier: Apache-2.0
// Models in ONNX's format that tenants bring, whole or cut into pieces that each take at most a
// given time:
//
//   service s({.tenants = "tenants.conf", .model_of = onnx_models({onnxruntime_of("libonnxruntime.so.1")})}, {});
//
// in whose file a line of a tenant says   model=detector.onnx cut_to=5ms
//
// Where to cut is measured when a tenant loads a model for the first time, on the tenant's share.
// The plan lies beside the model, as `detector.onnx.5ms.plan`: as long as it fits the model,
// nothing is measured. Needs libonnx.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gpushare/graph/graph.hpp>

#include "inference_server/engine.hpp"
#include "inference_server/tenants_file.hpp"

namespace inference_server {

/// Computes pieces of one loaded model. One call at a time. Throws gpushare::graph::model_error, or
/// what a tensor's room throws.
class piece_runner {
public:
    piece_runner() = default;
    piece_runner(const piece_runner&) = delete;
    piece_runner& operator=(const piece_runner&) = delete;
    virtual ~piece_runner() = default;

    /// A model in ONNX's format; the first one is piece 0.
    virtual void add(const std::string& model) = 0;
    virtual void remove_last() noexcept = 0;
    /// As a gpushare::graph::piece_engine computes: on this thread, until it is done.
    virtual void run(std::uint32_t piece, std::span<const gpushare::graph::tensor* const> inputs,
                     std::span<gpushare::graph::tensor* const> outputs) = 0;
};

/// An engine for models in ONNX's format.
struct onnx_engine {
    std::string name{};  ///< as `engine=` has it
    /// `cut`: for pieces of what `fused` made; else for a whole model, with which it does what it
    /// likes.
    std::function<std::unique_ptr<piece_runner>(bool cut)> make{};
    /// The engine's own form of a whole model, so that no cut undoes a fusion; empty: the model is
    /// cut as it is.
    std::function<std::string(const std::string& model)> fused{};
    std::vector<std::string> domains{};  ///< of the operators in what `fused` makes
};

/// ONNX Runtime, one thread a session. Throws gpushare::graph::model_error where the library can't
/// be loaded.
[[nodiscard]] onnx_engine onnxruntime_of(const std::string& library);

/// For service_options::model_of, which throws unknown_engine, gpushare::graph::model_error, and
/// std::runtime_error where a plan beside the model can't be read.
[[nodiscard]] std::function<model_source(const model_setting&, const std::string& path)> onnx_models(
    std::vector<onnx_engine> engines);

/// Where the plan of a model lies that is cut.
[[nodiscard]] std::string plan_path(const std::string& model, gpushare::ns cut_to);

}  // namespace inference_server
