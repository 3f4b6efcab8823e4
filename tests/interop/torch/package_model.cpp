// SPDX-License-Identifier: Apache-2.0
// What is in the tests' packages in place of a library that AOTInductor has compiled: y = 3 x + s,
// where s is the address of the stream that the call is for, 0 on the host. It fails if x[0] is
// negative, and where calls are to wait for each other.
#include <torch/csrc/inductor/aoti_runtime/interface.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <cstddef>
#include <cstdint>
#include <exception>

#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>

namespace {

AOTInductorModelContainerHandle one() {
    static char there;
    return reinterpret_cast<AOTInductorModelContainerHandle>(&there);
}

}  // namespace

extern "C" {
AOTIRuntimeError AOTInductorModelContainerCreateWithDevice(AOTInductorModelContainerHandle* made, std::size_t,
                                                           const char*, const char*) {
    *made = one();
    return AOTI_RUNTIME_SUCCESS;
}
AOTIRuntimeError AOTInductorModelContainerDelete(AOTInductorModelContainerHandle) { return AOTI_RUNTIME_SUCCESS; }
AOTIRuntimeError AOTInductorModelContainerGetNumInputs(AOTInductorModelContainerHandle, std::size_t* n) {
    *n = 1;
    return AOTI_RUNTIME_SUCCESS;
}
AOTIRuntimeError AOTInductorModelContainerGetNumOutputs(AOTInductorModelContainerHandle, std::size_t* n) {
    *n = 1;
    return AOTI_RUNTIME_SUCCESS;
}
AOTIRuntimeError AOTInductorModelContainerGetNumConstants(AOTInductorModelContainerHandle, std::size_t* n) {
    *n = 0;
    return AOTI_RUNTIME_SUCCESS;
}
AOTIRuntimeError AOTInductorModelContainerGetCallSpec(AOTInductorModelContainerHandle, const char** in,
                                                      const char** out) {
    *in = *out = "";
    return AOTI_RUNTIME_SUCCESS;
}
AOTIRuntimeError AOTInductorModelContainerRunSingleThreaded(AOTInductorModelContainerHandle, AtenTensorHandle* inputs,
                                                            std::size_t, AtenTensorHandle* outputs, std::size_t,
                                                            AOTInductorStreamHandle stream, AOTIProxyExecutorHandle) {
    try {
        const at::Tensor x = *torch::aot_inductor::tensor_handle_to_tensor_pointer(inputs[0]);
        (void)aoti_torch_delete_tensor_object(inputs[0]);  // which is the package's
        if (x.numel() > 0 && x.data_ptr<float>()[0] < 0) return AOTI_RUNTIME_FAILURE;
        const auto s = static_cast<double>(reinterpret_cast<std::uintptr_t>(stream));
        outputs[0] = torch::aot_inductor::new_tensor_handle(at::add(at::mul(x, 3), s));
        return AOTI_RUNTIME_SUCCESS;
    } catch (const std::exception&) {
        return AOTI_RUNTIME_FAILURE;
    }
}
AOTIRuntimeError AOTInductorModelContainerRun(AOTInductorModelContainerHandle, AtenTensorHandle*, std::size_t,
                                              AtenTensorHandle*, std::size_t, AOTInductorStreamHandle,
                                              AOTIProxyExecutorHandle) {
    return AOTI_RUNTIME_FAILURE;
}
}
