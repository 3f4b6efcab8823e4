// SPDX-License-Identifier: Apache-2.0
#include "graph/models.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace bench::graph {

namespace {

namespace fs = std::filesystem;
using gpushare::graph::element;
using gpushare::graph::onnx_model;
using gpushare::graph::tensor;

const std::string tools = GPUSHARE_BENCH_TOOLS;

/// Fills a tensor: floats get varied values between -1 and 1; integers get the sampling rate, which
/// is the only integer input that these models have.
void fill(const tensor& t) {
    for (std::size_t i = 0; i < t.capacity / size_of(t.type); ++i) {
        const float f = std::sin(static_cast<float>(i % 7919) * 0.37F);
        const std::int64_t rate = 16000;
        auto* const to = static_cast<std::byte*>(t.data) + i * size_of(t.type);
        if (t.type == element::f32) std::memcpy(to, &f, sizeof f);
        if (t.type == element::i64) std::memcpy(to, &rate, sizeof rate);
    }
}

/// Reads the inputs that are stored next to a model of the test data. Empty if there are none.
std::vector<onnx::TensorProto> inputs_beside(const fs::path& model) {
    std::vector<onnx::TensorProto> all;
    for (int i = 0;; ++i) {
        std::ifstream file(model.parent_path() / "test_data_set_0" / ("input_" + std::to_string(i) + ".pb"),
                           std::ios::binary);
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        onnx::TensorProto t;
        if (!file || !t.ParseFromString(text)) return all;
        all.push_back(std::move(t));
    }
}

onnx_model read(const model_case& c, const gpushare::graph::onnxruntime_library* fused) {
    auto plain = onnx_model::load(c.path, {.inputs = c.shapes});
    if (fused == nullptr) return plain;
    return onnx_model::parse(optimised(*fused, plain.whole()), {.inputs = c.shapes,
                                                                .other_domains = gpushare::graph::onnxruntime_domains(),
                                                                .like = &plain.graph(),
                                                                .own_names = true});
}

}  // namespace

model_case page_detector() {
    return {tools + "/serving/rapidocr/models/PP-OCRv6_det_small.onnx", {{"x", {1, 3, 320, 320}}}};
}
model_case text_reader() {
    return {tools + "/serving/rapidocr/models/PP-OCRv6_rec_small.onnx", {{"x", {1, 3, 48, 320}}}};
}
model_case voice_detector() {
    return {tools + "/serving/silero_vad/data/silero_vad_16k_sequence.onnx", {{"input", {16, 576}}}};
}

std::vector<model_case> package_cases() {
    const std::string ocr = tools + "/serving/rapidocr/models/", vad = tools + "/serving/silero_vad/data/",
                      own = tools + "/onnxruntime/onnxruntime/datasets/";
    const std::vector<std::int64_t> chunk{1, 512}, state{2, 1, 128};
    return {page_detector(),
            text_reader(),
            {ocr + "ch_ppocr_mobile_v2.0_cls_mobile.onnx", {{"x", {1, 3, 48, 192}}}},
            voice_detector(),
            {vad + "silero_vad.onnx", {{"input", chunk}, {"state", state}}},
            {vad + "silero_vad_16k_op15.onnx", {{"input", chunk}, {"state", state}}},
            {vad + "silero_vad_half.onnx", {{"input", chunk}, {"state", state}}},
            {vad + "silero_vad_op18_ifless.onnx", {{"input", chunk}, {"state", state}}},
            {vad + "silero_vad_openvino_16k.onnx", {}},
            {own + "mul_1.onnx", {}},
            {own + "sigmoid.onnx", {}}};
}

std::vector<model_case> test_data() {
    std::vector<model_case> all;
    const fs::path root = "/usr/share/libonnx-testdata/data";
    std::error_code none;
    for (const auto& file :
         fs::recursive_directory_iterator(root, fs::directory_options::follow_directory_symlink, none))
        if (file.path().filename() == "model.onnx") all.push_back({file.path().string(), {}});
    std::ranges::sort(all, {}, &model_case::path);
    return all;
}

loaded_model::loaded_model(const model_case& c, const gpushare::graph::onnxruntime_library* fused)
    : model(read(c, fused)) {
    const auto& g = model.graph();
    const auto beside = inputs_beside(c.path);
    for (std::size_t i = 0; i < g.inputs.size(); ++i) {
        const auto& v = g.values[g.inputs[i]];
        tensor t{.type = v.type};
        for (const auto& d : v.shape) t.shape.push_back(d.extent);
        if (i < beside.size()) t.shape.assign(beside[i].dims().begin(), beside[i].dims().end());
        if (!t.shaped() || size_of(t.type) == 0 || (i < beside.size() && beside[i].raw_data().size() != t.size()))
            throw std::runtime_error(v.name + ": an input of no fixed size");
        bytes_.emplace_back(t.size());
        t.data = bytes_.back().data();
        t.capacity = bytes_.back().size();
        if (i >= beside.size())
            fill(t);
        else if (t.capacity > 0)
            std::memcpy(t.data, beside[i].raw_data().data(), t.capacity);
        inputs.push_back(std::move(t));
    }
}

}  // namespace bench::graph
