// SPDX-License-Identifier: Apache-2.0
// Models in ONNX's format that tenants bring, whole or cut into pieces that each take at most a
// given time:
//
//   service s({.tenants = "tenants.conf", .model_of = onnx_models({onnxruntime_of("libonnxruntime.so.1")})}, {});
//
// A line of a tenant in that file says   model=detector.onnx cut_to=5ms
//
// The cuts are measured when a tenant loads a model for the first time, on the tenant's share. The
// plan is kept beside the model, as `detector.onnx.5ms.plan`. While the plan fits the model, the
// cuts aren't measured again. Needs libonnx.
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

/// Computes pieces of one loaded model. One call at a time. Throws gpushare::graph::model_error,
/// and what a tensor's room throws.
class piece_runner {
public:
    piece_runner() = default;
    piece_runner(const piece_runner&) = delete;
    piece_runner& operator=(const piece_runner&) = delete;
    virtual ~piece_runner() = default;

    /// Adds a model in ONNX's format; the first model is piece 0.
    virtual void add(const std::string& model) = 0;
    virtual void remove_last() noexcept = 0;
    /// Computes like a gpushare::graph::piece_engine: on this thread, until the piece is done.
    virtual void run(std::uint32_t piece, std::span<const gpushare::graph::tensor* const> inputs,
                     std::span<gpushare::graph::tensor* const> outputs) = 0;
};

/// An engine for models in ONNX's format.
struct onnx_engine {
    std::string name{};  ///< the name that `engine=` has
    /// With `cut`, makes a runner for pieces of the model that `fused` made. Otherwise makes a
    /// runner for a whole model, which the engine may optimise as it likes.
    std::function<std::unique_ptr<piece_runner>(bool cut)> make{};
    /// The engine's own form of a whole model, so that no cut undoes a fusion. If empty, the
    /// original model is cut.
    std::function<std::string(const std::string& model)> fused{};
    /// The domains of the operators in the model that `fused` makes.
    std::vector<std::string> domains{};
};

/// ONNX Runtime, with one thread for each session. Throws gpushare::graph::model_error if the
/// library can't be loaded.
[[nodiscard]] onnx_engine onnxruntime_of(const std::string& library);

/// For service_options::model_of. The function throws unknown_engine, gpushare::graph::model_error,
/// and std::runtime_error if a plan beside the model can't be read.
[[nodiscard]] std::function<model_source(const model_setting&, const std::string& path)> onnx_models(
    std::vector<onnx_engine> engines);

/// The path of the plan of a cut model.
[[nodiscard]] std::string plan_path(const std::string& model, gpushare::ns cut_to);

}  // namespace inference_server
