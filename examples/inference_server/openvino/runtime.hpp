// SPDX-License-Identifier: Apache-2.0
// OpenVINO as the example uses it: each engine has a compiled model of its own, on one thread, the
// caller's. Include this header only in .cpp files, because it takes seconds to compile.
#pragma once

#include <memory>
#include <string>

#include <openvino/openvino.hpp>

namespace inference_server::openvino {

/// One core for all engines.
[[nodiscard]] ov::Core& core();
/// The path of a file in one of the packages in build/tools, such as
/// "serving/silero_vad/data/x.onnx".
[[nodiscard]] std::string file(const std::string& name);
/// Compiles for one thread, not pinned to a core, in single precision. With the default precision,
/// bfloat16 if the processor has it, the language model writes nonsense.
[[nodiscard]] ov::CompiledModel compile(const std::shared_ptr<ov::Model>& model);

}  // namespace inference_server::openvino
