// SPDX-License-Identifier: Apache-2.0
// Real models and inputs for them: what packages bring, wherever these have been fetched.
//
//   for (const auto& c : bench::graph::small_cases()) { bench::graph::loaded_model m(c); ... m.model, m.inputs }
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/onnx.hpp>
#include <gpushare/graph/onnxruntime.hpp>

namespace bench::graph {

/// A file, and the shapes of its inputs where the model leaves them open.
struct model_case {
    std::string path{};
    std::map<std::string, std::vector<std::int64_t>> shapes{};
};

/// Finds lines of text on a page of 320 x 320 pixels.
[[nodiscard]] model_case page_detector();
/// Reads a line of 48 x 320 pixels.
[[nodiscard]] model_case text_reader();
/// Half a second of sound.
[[nodiscard]] model_case voice_detector();
/// All that rapidocr, silero-vad and onnxruntime bring.
[[nodiscard]] std::vector<model_case> package_cases();
/// Those of Debian's libonnx-testdata that have inputs beside them.
[[nodiscard]] std::vector<model_case> test_data();

/// A model with inputs: those of its folder, else waves of numbers.
class loaded_model {
public:
    /// As the file has it, or as `fused` by ONNX Runtime, unless that is null. Throws model_error
    /// for a model that can't be read, std::runtime_error for inputs of no fixed size.
    explicit loaded_model(const model_case& c, const gpushare::graph::onnxruntime_library* fused = nullptr);
    loaded_model(const loaded_model&) = delete;
    loaded_model& operator=(const loaded_model&) = delete;

    const gpushare::graph::onnx_model model;
    std::vector<gpushare::graph::tensor> inputs;

private:
    std::vector<std::vector<std::byte>> bytes_;
};

}  // namespace bench::graph
