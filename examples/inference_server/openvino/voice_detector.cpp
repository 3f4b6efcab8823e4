// SPDX-License-Identifier: Apache-2.0
#include "inference_server/openvino/voice_detector.hpp"

#include <algorithm>
#include <cstring>

#include "inference_server/openvino/runtime.hpp"

namespace inference_server::openvino {

struct voice_detector::model {
    ov::InferRequest request;
};

voice_detector::voice_detector() : model_(std::make_unique<model>()) {
    const auto m = core().read_model(file("serving/silero_vad/data/silero_vad_16k_sequence.onnx"));
    m->reshape({{"input", ov::PartialShape{chunks, context + chunk}}});
    model_->request = compile(m).create_infer_request();
}
voice_detector::~voice_detector() = default;

void voice_detector::begin() noexcept { first_ = true; }

std::span<const float, voice_detector::chunks> voice_detector::hear(std::span<const float, samples> sound) {
    auto& request = model_->request;
    for (const auto* state : {"h", "c"}) {
        auto to = request.get_tensor(state);
        if (first_)
            std::memset(to.data(), 0, to.get_byte_size());
        else
            request.get_tensor(std::string(state) + "n").copy_to(to);
    }
    first_ = false;
    auto* to = request.get_tensor("input").data<float>();
    const float* from = sound.data();
    for (std::size_t c = 0; c < chunks; ++c, from += chunk) to = std::copy(from, from + context + chunk, to);
    request.infer();
    return std::span<const float, chunks>(request.get_tensor("speech_probs").data<float>(), chunks);
}

}  // namespace inference_server::openvino
