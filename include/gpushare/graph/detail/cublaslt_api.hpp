// SPDX-License-Identifier: Apache-2.0
// The part of cuBLASLt's C interface that the engine needs, with the numbers of cublasLt.h, so that
// nothing includes that header. Tests pass functions of their own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <dlfcn.h>

#include <gpushare/config.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// Numbers of cublasLt.h and of the headers that it includes.
struct cublaslt {
    static constexpr int success = 0, invalid_value = 7;            // cublasStatus_t
    static constexpr int real_32f = 0;                              // cudaDataType: CUDA_R_32F
    static constexpr int compute_32f = 68, compute_fast_tf32 = 77;  // cublasComputeType_t
    static constexpr std::int32_t op_n = 0, op_t = 1;               // cublasOperation_t
    // CUBLASLT_MATMUL_DESC_..., int32_t
    static constexpr int transa = 3, transb = 4;
    static constexpr int epilogue = 7;      // uint32_t
    static constexpr int bias_pointer = 8;  // const void*
    // CUBLASLT_MATRIX_LAYOUT_..., int32_t
    static constexpr int batch_count = 5;
    static constexpr int strided_batch_offset = 6;  // int64_t
    // CUBLASLT_MATMUL_PREF_..., uint64_t
    static constexpr int max_workspace_bytes = 1;
    static constexpr std::array<int, 4> min_alignment{5, 6, 7, 8};  // of A, B, C and D, uint32_t
    // CUBLASLT_EPILOGUE_...
    static constexpr std::uint32_t by_default = 1, relu = 2, bias = 4, gelu = 32;

    /// cublasLtMatmulAlgo_t.
    struct algorithm {
        std::uint64_t data[8];
    };
    /// cublasLtMatmulHeuristicResult_t.
    struct heuristic {
        algorithm algo;
        std::size_t workspace;
        int state;
        float waves;
        int reserved[4];
    };
};

/// The functions. A status that isn't 0 is an error.
struct cublaslt_api {
    int (*create)(void** handle);
    int (*destroy)(void* handle);
    const char* (*status_string)(int status);
    int (*desc_create)(void** desc, int compute, int scale);
    int (*desc_destroy)(void* desc);
    int (*desc_set)(void* desc, int attribute, const void* value, std::size_t size);
    int (*layout_create)(void** layout, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t leading);
    int (*layout_destroy)(void* layout);
    int (*layout_set)(void* layout, int attribute, const void* value, std::size_t size);
    int (*preference_create)(void** preference);
    int (*preference_destroy)(void* preference);
    int (*preference_set)(void* preference, int attribute, const void* value, std::size_t size);
    int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted,
                     cublaslt::heuristic* found, int* count);
    int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,
                  void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                  const cublaslt::algorithm* algo, void* workspace, std::size_t size, void* stream);
};

/// The functions of the shared library at `path`, which stays loaded. Throws model_error (engine)
/// if the library can't be loaded or lacks a function.
[[nodiscard]] inline cublaslt_api load_cublaslt(const std::string& path) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw model_error(model_fault::engine, {}, dlerror());
    const auto find = [&]<class Function>(Function*& to, const char* name) {
        void* const at = dlsym(library, name);
        if (at == nullptr) throw model_error(model_fault::engine, {}, std::string("the library has no ") + name);
        to = reinterpret_cast<Function*>(at);
    };
    cublaslt_api api{};
    find(api.create, "cublasLtCreate"), find(api.destroy, "cublasLtDestroy");
    find(api.status_string, "cublasLtGetStatusString");
    find(api.desc_create, "cublasLtMatmulDescCreate"), find(api.desc_destroy, "cublasLtMatmulDescDestroy");
    find(api.desc_set, "cublasLtMatmulDescSetAttribute");
    find(api.layout_create, "cublasLtMatrixLayoutCreate"), find(api.layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(api.layout_set, "cublasLtMatrixLayoutSetAttribute");
    find(api.preference_create, "cublasLtMatmulPreferenceCreate");
    find(api.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(api.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(api.heuristic, "cublasLtMatmulAlgoGetHeuristic"), find(api.matmul, "cublasLtMatmul");
    return api;
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
