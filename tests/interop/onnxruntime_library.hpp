// SPDX-License-Identifier: Apache-2.0
// ONNX Runtime's own library, loaded as a program without its headers does it.
//
//   const library ort(path);    ort.check(ort.api->RegisterAllocator(env, &mine));
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <dlfcn.h>

#include "support/catch.hpp"

namespace onnxruntime_library {

struct memory_info;

/// OrtAllocator as of version 25 of the API.
struct allocator_1_25 {
    std::uint32_t version;
    void* (*Alloc)(allocator_1_25*, std::size_t);
    void (*Free)(allocator_1_25*, void*);
    const memory_info* (*Info)(const allocator_1_25*);
    void* (*Reserve)(allocator_1_25*, std::size_t);                      // 1.18
    void* (*GetStats)(const allocator_1_25*, void** out);                // 1.23
    void* (*AllocOnStream)(allocator_1_25*, std::size_t, void* stream);  // 1.23
    void* (*Shrink)(allocator_1_25*);                                    // 1.25
};

inline constexpr std::uint32_t ORT_API_VERSION = 25;

/// As much of OrtApi as is needed here, by the names of ONNX Runtime's header, which its packages
/// lack: a function keeps its place in the library's table for good. A status that isn't null is an
/// error.
struct OrtApi {
    explicit OrtApi(void* const* table) {
        const auto at = [table]<class Function>(int place, Function*& f) {
            f = reinterpret_cast<Function*>(table[place]);
        };
        at(2, GetErrorMessage), at(3, CreateEnv), at(8, CreateSessionFromArray), at(9, Run),
            at(10, CreateSessionOptions);
        at(24, SetIntraOpNumThreads), at(48, CreateTensorAsOrtValue), at(51, GetTensorMutableData);
        at(69, CreateCpuMemoryInfo), at(75, AllocatorAlloc), at(78, GetAllocatorWithDefaultOptions), at(92, ReleaseEnv);
        at(93, ReleaseStatus), at(94, ReleaseMemoryInfo), at(95, ReleaseSession), at(96, ReleaseValue);
        at(68, CreateMemoryInfo), at(76, AllocatorFree);
        at(100, ReleaseSessionOptions), at(130, AddSessionConfigEntry), at(176, RegisterAllocator);
        at(177, UnregisterAllocator), at(204, SessionOptionsAppendExecutionProvider_CUDA_V2);
        at(205, CreateCUDAProviderOptions), at(208, ReleaseCUDAProviderOptions);
        at(263, UpdateCUDAProviderOptionsWithValue), at(264, GetCUDAProviderOptionsByName);
    }

    const char* (*GetErrorMessage)(const void* status);
    void* (*CreateEnv)(int logs, const char* name, void** env);
    void* (*CreateSessionFromArray)(void* env, const void* model, std::size_t size, void* options, void** session);
    void* (*Run)(void* session, void* options, const char* const* names, void* const* in, std::size_t ins,
                 const char* const* out_names, std::size_t outs, void** out);
    void* (*CreateSessionOptions)(void** options);
    void* (*SetIntraOpNumThreads)(void* options, int threads);
    void* (*CreateTensorAsOrtValue)(allocator_1_25* from, const std::int64_t* shape, std::size_t rank, int type,
                                    void** value);
    void* (*GetTensorMutableData)(void* value, void** data);
    void* (*CreateCpuMemoryInfo)(int kind, int memory, void** info);
    void* (*AllocatorAlloc)(allocator_1_25* from, std::size_t size, void** p);
    void* (*GetAllocatorWithDefaultOptions)(void** allocator);
    void (*ReleaseEnv)(void*);
    void (*ReleaseStatus)(void*);
    void (*ReleaseMemoryInfo)(void*);
    void (*ReleaseSession)(void*);
    void (*ReleaseValue)(void*);
    void (*ReleaseSessionOptions)(void*);
    void* (*AddSessionConfigEntry)(void* options, const char* name, const char* value);
    void* (*RegisterAllocator)(void* env, allocator_1_25*);
    void* (*UnregisterAllocator)(void* env, const void* info);
    void* (*CreateMemoryInfo)(const char* name, int kind, int device, int memory, void** info);
    void* (*AllocatorFree)(allocator_1_25* from, void* p);
    void* (*SessionOptionsAppendExecutionProvider_CUDA_V2)(void* options, const void* of_provider);
    void* (*CreateCUDAProviderOptions)(void** of_provider);
    void (*ReleaseCUDAProviderOptions)(void* of_provider);
    void* (*UpdateCUDAProviderOptionsWithValue)(void* of_provider, const char* name, void* value);
    void* (*GetCUDAProviderOptionsByName)(const void* of_provider, const char* name, void** value);
};

/// Stays loaded, as with any program that uses it.
inline const OrtApi* load(const char* path) {
    void* const loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    INFO(path);
    REQUIRE(loaded != nullptr);
    struct base {
        void* const* (*get_api)(std::uint32_t);
        const char* (*get_version)();
    };
    const auto get = reinterpret_cast<const base* (*)()>(dlsym(loaded, "OrtGetApiBase"));
    REQUIRE(get != nullptr);
    void* const* const table = get()->get_api(ORT_API_VERSION);
    REQUIRE(table != nullptr);
    static const OrtApi functions(table);
    return &functions;
}

/// The library, and what these tests ask of it.
class library {
public:
    explicit library(const char* path) : api(load(path)) {}
    const OrtApi* const api;

    void* create_cpu_info() const {
        void* info = nullptr;
        check(api->CreateCpuMemoryInfo(0, 0, &info));  // OrtDeviceAllocator, default
        return info;
    }
    void release_info(void* info) const { api->ReleaseMemoryInfo(info); }
    /// A tensor of `n` floats. The status' text if it failed.
    std::string create_tensor(allocator_1_25* from, std::int64_t n, void*& value) const {
        return text(api->CreateTensorAsOrtValue(from, &n, 1, 1, &value));
    }
    float* data(void* value) const {
        void* p = nullptr;
        check(api->GetTensorMutableData(value, &p));
        return static_cast<float*>(p);
    }
    /// Null, and `why`, if there is no memory.
    void* allocate(allocator_1_25* from, std::size_t size, std::string& why) const {
        void* p = nullptr;
        why = text(api->AllocatorAlloc(from, size, &p));
        return p;
    }
    void release_value(void* value) const { api->ReleaseValue(value); }
    /// Its own allocator.
    allocator_1_25* own() const {
        void* found = nullptr;
        check(api->GetAllocatorWithDefaultOptions(&found));
        return static_cast<allocator_1_25*>(found);
    }

    // The environment of a process, and sessions in it. The allocator must outlive the
    // environment's registration.
    void* create_environment() const {
        void* env = nullptr;
        check(api->CreateEnv(3, "gpushare", &env));  // 3: errors are logged
        return env;
    }
    /// `info`: that of the allocator which was registered, if one was.
    void release_environment(void* env, const void* info) const {
        if (info != nullptr) check(api->UnregisterAllocator(env, info));
        api->ReleaseEnv(env);
    }
    void release_session(void* session) const { api->ReleaseSession(session); }
    /// Computes `z` of `x`. The status' text if it failed.
    std::string run(void* session, void* x, void*& z) const {
        const char *in = "x", *out = "z";
        return text(api->Run(session, nullptr, &in, &x, 1, &out, 1, &z));
    }
    [[nodiscard]] std::string text(void* status) const {
        if (status == nullptr) return {};
        std::string why = api->GetErrorMessage(status);
        api->ReleaseStatus(status);
        return why;
    }
    void check(void* status) const { CHECK(text(status) == ""); }
};

}  // namespace onnxruntime_library
