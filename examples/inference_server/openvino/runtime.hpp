// SPDX-License-Identifier: Apache-2.0
// OpenVINO as it is used here: each engine has a compiled model of its own, on one thread, which is
// the caller's. Include it in .cpp files only: it takes seconds to compile.
#pragma once

#include <memory>
#include <string>

#include <openvino/openvino.hpp>

namespace inference_server::openvino {

/// One for all engines.
[[nodiscard]] ov::Core& core();
/// A file of one of the packages in build/tools, such as "serving/silero_vad/data/x.onnx".
[[nodiscard]] std::string file(const std::string& name);
/// Compiles for one thread, not pinned to a core, in single precision: by the default one, bfloat16
/// where the processor has it, the language model writes gibberish.
[[nodiscard]] ov::CompiledModel compile(const std::shared_ptr<ov::Model>& model);

}  // namespace inference_server::openvino
