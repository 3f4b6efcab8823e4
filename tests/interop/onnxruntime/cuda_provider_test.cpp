// SPDX-License-Identifier: Apache-2.0
// The recipe for ONNX Runtime's CUDA provider, with the library of PyPI's onnxruntime-gpu, over the
// stand-in for CUDA. The provider itself is a separate library, which needs cuBLAS, cuDNN and a
// device, and isn't loaded here.
#include <cstddef>
#include <cstdint>
#include <string>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/interop/onnxruntime.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "interop/onnxruntime_library.hpp"
#include "standins/cuda/session.hpp"

using namespace gpushare::literals;
using namespace onnxruntime_library;

TEST_CASE("ONNX Runtime's CUDA provider is given a tenant's stream and memory", "[interop][onnxruntime]") {
    const standin::session gpu{{.devices = 1, .memory = 64_MiB}};
    gpushare::cuda::node node;
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 8_MiB, .compute = 50_pct});
    const library ort(GPUSHARE_ONNXRUNTIME_CUDA);
    const OrtApi* const api = ort.api;
    const auto check = [&](void* status) { ort.check(status); };
    const auto charged = [&] {
        chat.memory().collect();
        return chat.memory().capacity() - chat.memory().free();
    };
    void *env = nullptr, *options = nullptr;
    check(api->CreateEnv(4, "gpushare", &env));  // 4: without a line about the provider that isn't there
    check(api->CreateSessionOptions(&options));
    using OrtAllocator = allocator_1_25;
    // These lines are in docs/recipes.md.
    void *of_provider = nullptr, *on_device = nullptr;
    check(api->CreateCUDAProviderOptions(&of_provider));
    check(api->UpdateCUDAProviderOptionsWithValue(of_provider, "user_compute_stream",
                                                  chat.work_stream().native_handle()));  // 1

    check(api->CreateMemoryInfo("Cuda", 0, 0, 0, &on_device));  // OrtDeviceAllocator, device 0, OrtMemTypeDefault
    const auto* memory_info = static_cast<const struct memory_info*>(on_device);
    gpushare::stream_resource ordered{chat.memory(), chat.work_stream()};
    gpushare::onnxruntime_allocator<OrtAllocator, decltype(ordered)> mine{ordered, memory_info, ORT_API_VERSION};
    check(api->RegisterAllocator(env, &mine));                                      // 2
    check(api->AddSessionConfigEntry(options, "session.use_env_allocators", "1"));  // 3

    CHECK_THAT(ort.text(api->SessionOptionsAppendExecutionProvider_CUDA_V2(options, of_provider)),  // 4
               Catch::Contains("Failed to load shared library"));

    void* stream = nullptr;
    check(api->GetCUDAProviderOptionsByName(of_provider, "user_compute_stream", &stream));
    CHECK(stream == chat.work_stream().native_handle());
    std::string why;
    void* const p = ort.allocate(&mine, 4 << 20, why);
    CHECK(p != nullptr);
    CHECK(charged() >= 4_MiB);
    CHECK(ort.allocate(&mine, 8 << 20, why) == nullptr);
    CHECK_THAT(why, Catch::Contains("tenant 'chat': allocate: asked for 8 MiB"));
    check(api->AllocatorFree(&mine, p));
    CHECK(chat.work_stream().record().wait(gpushare::never));
    CHECK(charged() == 0_B);
    ort.release_environment(env, on_device);
    api->ReleaseCUDAProviderOptions(of_provider);
    api->ReleaseSessionOptions(options);
    ort.release_info(on_device);
}
