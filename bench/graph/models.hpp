// SPDX-License-Identifier: Apache-2.0
// Real models from installed packages, with inputs. Only models that have been fetched are
// available.
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

/// A model file, with shapes for the inputs whose shapes the model leaves open.
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
/// All models in the packages rapidocr, silero-vad and onnxruntime.
[[nodiscard]] std::vector<model_case> package_cases();
/// All models of Debian's libonnx-testdata, if the package is installed.
[[nodiscard]] std::vector<model_case> test_data();

/// A model with inputs. The inputs come from the model's folder if it has some, and are synthetic
/// otherwise.
class loaded_model {
public:
    /// Loads the model as the file has it, or as ONNX Runtime fuses it if `fused` isn't null.
    /// Throws model_error if the model can't be read, and std::runtime_error if an input has no
    /// fixed size.
    explicit loaded_model(const model_case& c, const gpushare::graph::onnxruntime_library* fused = nullptr);
    loaded_model(const loaded_model&) = delete;
    loaded_model& operator=(const loaded_model&) = delete;

    const gpushare::graph::onnx_model model;
    std::vector<gpushare::graph::tensor> inputs;

private:
    std::vector<std::vector<std::byte>> bytes_;
};

}  // namespace bench::graph
