// SPDX-License-Identifier: Apache-2.0
#include "inference_server/openvino/runtime.hpp"

namespace inference_server::openvino {

ov::Core& core() {
    static ov::Core one;
    return one;
}

std::string file(const std::string& name) { return INFERENCE_SERVER_TOOLS "/" + name; }

ov::CompiledModel compile(const std::shared_ptr<ov::Model>& model) {
    return core().compile_model(model, "CPU", ov::inference_num_threads(1), ov::num_streams(1),
                                ov::hint::enable_cpu_pinning(false), ov::hint::inference_precision(ov::element::f32));
}

}  // namespace inference_server::openvino
