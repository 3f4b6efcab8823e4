// SPDX-License-Identifier: Apache-2.0
// The part of OpenVINO's C interface that engines need, with the names of its header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <dlfcn.h>

#include <gpushare/config.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// ov_shape_t.
struct openvino_shape {
    std::int64_t rank;
    std::int64_t* dims;
};

/// The functions of a loaded library, named without `ov_`. A status that isn't 0 is an error.
struct openvino_api {
    /// Throws model_error (engine) if a function is missing.
    explicit openvino_api(void* library) {
        const auto find = [library]<class Function>(const char* name, Function*& f) {
            f = reinterpret_cast<Function*>(dlsym(library, (std::string("ov_") + name).c_str()));
            if (f == nullptr) throw model_error(model_fault::engine, {}, std::string("OpenVINO has no ov_") + name);
        };
        find("get_last_err_msg", get_last_err_msg), find("free", free);
        find("core_create", core_create), find("core_free", core_free);
        find("core_read_model_from_memory_buffer", core_read_model_from_memory_buffer);
        find("core_compile_model", core_compile_model), find("model_free", model_free);
        find("compiled_model_free", compiled_model_free);
        find("compiled_model_inputs_size", compiled_model_inputs_size);
        find("compiled_model_outputs_size", compiled_model_outputs_size);
        find("compiled_model_input_by_index", compiled_model_input_by_index);
        find("compiled_model_output_by_index", compiled_model_output_by_index);
        find("compiled_model_create_infer_request", compiled_model_create_infer_request);
        find("output_const_port_free", output_const_port_free);
        find("port_get_element_type", port_get_element_type), find("infer_request_free", infer_request_free);
        find("infer_request_infer", infer_request_infer);
        find("infer_request_set_input_tensor_by_index", infer_request_set_input_tensor_by_index);
        find("infer_request_set_output_tensor_by_index", infer_request_set_output_tensor_by_index);
        find("infer_request_get_output_tensor_by_index", infer_request_get_output_tensor_by_index);
        find("tensor_create_from_host_ptr", tensor_create_from_host_ptr), find("tensor_free", tensor_free);
        find("tensor_get_shape", tensor_get_shape), find("tensor_get_byte_size", tensor_get_byte_size);
        find("tensor_data", tensor_data), find("shape_free", shape_free);
    }

    const char* (*get_last_err_msg)();  ///< the caller frees the text
    void (*free)(const char* text);
    int (*core_create)(void** core);
    void (*core_free)(void* core);
    int (*core_read_model_from_memory_buffer)(const void* core, const char* model, std::size_t size,
                                              const void* weights, void** read);
    int (*core_compile_model)(const void* core, const void* model, const char* device, std::size_t properties,
                              void** compiled, ...);
    void (*model_free)(void* model);
    void (*compiled_model_free)(void* compiled);
    int (*compiled_model_inputs_size)(const void* compiled, std::size_t* size);
    int (*compiled_model_outputs_size)(const void* compiled, std::size_t* size);
    int (*compiled_model_input_by_index)(const void* compiled, std::size_t i, void** port);
    int (*compiled_model_output_by_index)(const void* compiled, std::size_t i, void** port);
    int (*compiled_model_create_infer_request)(const void* compiled, void** request);
    void (*output_const_port_free)(void* port);
    int (*port_get_element_type)(const void* port, int* type);
    void (*infer_request_free)(void* request);
    int (*infer_request_infer)(void* request);
    int (*infer_request_set_input_tensor_by_index)(void* request, std::size_t i, const void* tensor);
    int (*infer_request_set_output_tensor_by_index)(void* request, std::size_t i, const void* tensor);
    int (*infer_request_get_output_tensor_by_index)(const void* request, std::size_t i, void** tensor);
    int (*tensor_create_from_host_ptr)(int type, openvino_shape shape, void* data, void** tensor);
    void (*tensor_free)(void* tensor);
    int (*tensor_get_shape)(const void* tensor, openvino_shape* shape);
    int (*tensor_get_byte_size)(const void* tensor, std::size_t* size);
    int (*tensor_data)(const void* tensor, void** data);
    int (*shape_free)(openvino_shape* shape);
};

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
