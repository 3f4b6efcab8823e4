// SPDX-License-Identifier: Apache-2.0
// The part of ONNX Runtime's C interface that engines need, with the names of its header, because
// ONNX Runtime's packages for Python don't have that header. Each function keeps its place in the
// library's table permanently.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// A status that isn't null is an error.
struct onnxruntime_api {
    explicit onnxruntime_api(void* const* table) noexcept {
        const auto at = [table]<class Function>(int place, Function*& f) {
            f = reinterpret_cast<Function*>(table[place]);
        };
        at(2, GetErrorMessage), at(3, CreateEnv), at(8, CreateSessionFromArray), at(9, Run);
        at(10, CreateSessionOptions), at(11, SetOptimizedModelFilePath), at(17, DisableMemPattern);
        at(23, SetSessionGraphOptimizationLevel), at(24, SetIntraOpNumThreads);
        at(30, SessionGetInputCount), at(31, SessionGetOutputCount), at(36, SessionGetInputName);
        at(37, SessionGetOutputName), at(49, CreateTensorWithDataAsOrtValue), at(50, IsTensor);
        at(51, GetTensorMutableData), at(60, GetTensorElementType), at(61, GetDimensionsCount);
        at(62, GetDimensions), at(65, GetTensorTypeAndShape), at(69, CreateCpuMemoryInfo), at(76, AllocatorFree);
        at(78, GetAllocatorWithDefaultOptions), at(92, ReleaseEnv), at(93, ReleaseStatus), at(94, ReleaseMemoryInfo);
        at(95, ReleaseSession), at(96, ReleaseValue), at(99, ReleaseTensorTypeAndShapeInfo);
        at(100, ReleaseSessionOptions), at(130, AddSessionConfigEntry), at(144, CreateAndRegisterAllocator);
    }

    /// The interface's version, which newer libraries keep.
    static constexpr std::uint32_t version = 17;

    const char* (*GetErrorMessage)(const void* status);
    void* (*CreateEnv)(int logs, const char* name, void** env);
    void* (*CreateSessionFromArray)(void* env, const void* model, std::size_t size, void* options, void** session);
    void* (*Run)(void* session, void* options, const char* const* names, const void* const* in, std::size_t ins,
                 const char* const* out_names, std::size_t outs, void** out);
    void* (*CreateSessionOptions)(void** options);
    void* (*SetOptimizedModelFilePath)(void* options, const char* path);
    void* (*DisableMemPattern)(void* options);
    void* (*SetSessionGraphOptimizationLevel)(void* options, int level);
    void* (*SetIntraOpNumThreads)(void* options, int threads);
    void* (*SessionGetInputCount)(void* session, std::size_t* count);
    void* (*SessionGetOutputCount)(void* session, std::size_t* count);
    void* (*SessionGetInputName)(void* session, std::size_t i, void* allocator, char** name);
    void* (*SessionGetOutputName)(void* session, std::size_t i, void* allocator, char** name);
    void* (*CreateTensorWithDataAsOrtValue)(void* info, void* data, std::size_t size, const std::int64_t* shape,
                                            std::size_t rank, int type, void** value);
    void* (*IsTensor)(void* value, int* is);
    void* (*GetTensorMutableData)(void* value, void** data);
    void* (*GetTensorElementType)(void* info, int* type);
    void* (*GetDimensionsCount)(void* info, std::size_t* count);
    void* (*GetDimensions)(void* info, std::int64_t* extents, std::size_t count);
    void* (*GetTensorTypeAndShape)(void* value, void** info);
    void* (*CreateCpuMemoryInfo)(int kind, int memory, void** info);
    void* (*AllocatorFree)(void* allocator, void* p);
    void* (*GetAllocatorWithDefaultOptions)(void** allocator);
    void (*ReleaseEnv)(void*);
    void (*ReleaseStatus)(void*);
    void (*ReleaseMemoryInfo)(void*);
    void (*ReleaseSession)(void*);
    void (*ReleaseValue)(void*);
    void (*ReleaseTensorTypeAndShapeInfo)(void*);
    void (*ReleaseSessionOptions)(void*);
    void* (*AddSessionConfigEntry)(void* options, const char* name, const char* value);
    void* (*CreateAndRegisterAllocator)(void* env, const void* info, const void* arena);
};

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
