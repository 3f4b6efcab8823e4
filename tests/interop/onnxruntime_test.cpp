// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// ONNX Runtime's allocator: through the C struct as its versions have it, and, where the library is at hand, by tensors of
// the library itself, loaded as a program without its headers does it.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include <dlfcn.h>

#include <gpushare/interop/onnxruntime.hpp>
#include <gpushare/interop/stream_resource.hpp>

#include "interop/two_tenants.hpp"

using namespace gpushare::literals;

namespace {

constexpr std::size_t MiB = two_tenants::MiB, most = std::numeric_limits<std::size_t>::max();

// The layouts of OrtAllocator in ONNX Runtime's C API; every version adds at the end.
struct memory_info;
struct allocator_1_0 {
    std::uint32_t version;
    void* (*Alloc)(allocator_1_0*, std::size_t);
    void (*Free)(allocator_1_0*, void*);
    const memory_info* (*Info)(const allocator_1_0*);
};
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

template <class Struct, class Memory = two_tenants::memory>
using adapted = gpushare::onnxruntime_allocator<Struct, Memory>;

}  // namespace

TEMPLATE_TEST_CASE("A tenant's memory behind OrtAllocator", "[interop][onnxruntime]", allocator_1_0, allocator_1_25) {
    two_tenants f;
    const int place = 0;
    const auto* const info = reinterpret_cast<const memory_info*>(&place);
    adapted<TestType> mine{f.chat.memory(), info, 25}, others{f.batch.memory(), info, 25};
    TestType* const ort = &mine;
    CHECK(ort->version == 25);
    CHECK(ort->Info(ort) == info);
    if constexpr (std::is_same_v<TestType, allocator_1_25>) {
        CHECK(ort->GetStats == nullptr);
        CHECK(ort->AllocOnStream == nullptr);
        CHECK(ort->Shrink == nullptr);
        void* const kept = ort->Reserve(ort, 1000);
        CHECK(f.charged(f.chat.memory()) == 1024);
        ort->Free(ort, kept);
    }

    void* const p = ort->Alloc(ort, 6 * MiB);
    REQUIRE(p != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 256 == 0);
    CHECK(f.charged(f.chat.memory()) == 6 * MiB);
    CHECK(ort->Alloc(ort, 0) == nullptr);
    for (const std::size_t size : {3 * MiB, most - 255, most})
        CHECK_THROWS_AS(ort->Alloc(ort, size), gpushare::memory_error);

    ort->Free(ort, nullptr);
    ort->Free(ort, &f);
    ort->Free(ort, static_cast<std::byte*>(p) + 1);
    TestType* const other = &others;
    other->Free(other, p);
    CHECK(f.charged(f.chat.memory()) == 6 * MiB);
    ort->Free(ort, p);
    ort->Free(ort, p);
    CHECK(f.charged(f.chat.memory()) == 0);
    CHECK(f.wrong_frees().empty());
}

TEST_CASE("ONNX Runtime's frees are in the order of the provider's stream", "[interop][onnxruntime]") {
    two_tenants f;
    gpushare::stream_resource ordered{f.chat.memory(), f.stream};
    adapted<allocator_1_0, decltype(ordered)> mine{ordered, static_cast<const memory_info*>(nullptr), 16};
    void* const p = mine.Alloc(&mine, 6 * MiB);
    f.hold();
    mine.Free(&mine, p);
    CHECK(f.charged(f.chat.memory()) == 6 * MiB);
    CHECK_THROWS_AS(mine.Alloc(&mine, 3 * MiB), std::bad_alloc);
    f.let_go();
    CHECK(f.charged(f.chat.memory()) == 0);
}

#ifdef GPUSHARE_ONNXRUNTIME

namespace {

constexpr std::uint32_t ORT_API_VERSION = 25;

/// As much of OrtApi as is needed here, by the names of ONNX Runtime's header, which its packages lack: a function keeps its place in
/// the library's table for good. A status that isn't null is an error.
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
        at(100, ReleaseSessionOptions), at(130, AddSessionConfigEntry), at(176, RegisterAllocator);
        at(177, UnregisterAllocator);
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
};

/// Stays loaded, as with any program that uses it.
const OrtApi* load() {
    void* const loaded = dlopen(GPUSHARE_ONNXRUNTIME, RTLD_NOW | RTLD_LOCAL);
    INFO(GPUSHARE_ONNXRUNTIME);
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
    const OrtApi* const api = load();

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

    // The environment of a process, and sessions in it. The allocator must outlive the environment's registration.
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
    void* create_session(void* env, std::string_view model) const {
        void *options = nullptr, *session = nullptr;
        check(api->CreateSessionOptions(&options));
        check(api->SetIntraOpNumThreads(options, 1));
        check(api->AddSessionConfigEntry(options, "session.use_env_allocators", "1"));  // 2
        check(api->CreateSessionFromArray(env, model.data(), model.size(), options, &session));
        api->ReleaseSessionOptions(options);
        return session;
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

}  // namespace

TEST_CASE("The tensors of ONNX Runtime itself are charged to their tenant", "[interop][onnxruntime]") {
    two_tenants f;
    const library ort;
    void* const info = ort.create_cpu_info();
    adapted<allocator_1_25> mine{f.chat.memory(), static_cast<const memory_info*>(info), ORT_API_VERSION};

    void* tensor = nullptr;
    CHECK(ort.create_tensor(&mine, MiB, tensor) == "");
    CHECK(f.charged(f.chat.memory()) == 4 * MiB);
    ort.data(tensor)[MiB - 1] = 1;

    void* too_big = nullptr;
    const std::string refusal = "tenant 'chat': allocate: asked 8 MiB, 4 MiB of 8 MiB left (over the quota)";
    CHECK(ort.create_tensor(&mine, 2 * MiB, too_big) == refusal);
    CHECK(too_big == nullptr);
    std::string why;
    CHECK(ort.allocate(&mine, 8 * MiB, why) == nullptr);
    CHECK(why == refusal);
    CHECK(f.chat.memory().counts().refused == 2);
    CHECK(f.charged(f.chat.memory()) == 4 * MiB);

    ort.release_value(tensor);
    CHECK(f.charged(f.chat.memory()) == 0);
    CHECK(f.wrong_frees().empty());
    ort.release_info(info);
}

namespace {

// Just enough of the encoding of protocol buffers.
std::string field(unsigned number, std::string_view content) {
    std::string all{static_cast<char>(number << 3 | 2)};
    for (std::size_t n = content.size();; n >>= 7) {
        all.push_back(static_cast<char>((n & 127) | (n > 127 ? 128 : 0)));
        if (n <= 127) break;
    }
    return all.append(content);
}
std::string field(unsigned number, std::uint64_t value) {
    std::string all{static_cast<char>(number << 3)};
    for (;; value >>= 7) {
        all.push_back(static_cast<char>((value & 127) | (value > 127 ? 128 : 0)));
        if (value <= 127) return all;
    }
}

/// A model for ONNX Runtime: z = (x + x) * x, of `n` floats.
std::string model_of(std::uint64_t n) {
    const auto node = [](std::string_view a, std::string_view b, std::string_view out, std::string_view kind) {
        return field(1, field(1, a) + field(1, b) + field(2, out) + field(4, kind));
    };
    const auto value = [&](std::string_view name) {  // of floats
        return field(1, name) + field(2, field(1, field(1, std::uint64_t{1}) + field(2, field(1, field(1, n)))));
    };
    const std::string graph = node("x", "x", "y", "Add") + node("y", "x", "z", "Mul") + field(2, "g") +
                              field(11, value("x")) + field(12, value("z"));
    return field(1, std::uint64_t{8}) + field(7, graph) + field(8, field(1, "") + field(2, std::uint64_t{13}));
}

}  // namespace

TEST_CASE("A session of ONNX Runtime itself computes in its tenant's memory, or is refused", "[interop][onnxruntime]") {
    two_tenants f;
    const library ort;
    void* const info = ort.create_cpu_info();
    adapted<allocator_1_25> mine{f.chat.memory(), static_cast<const memory_info*>(info), ORT_API_VERSION};
    void* const env = ort.create_environment();
    ort.check(ort.api->RegisterAllocator(env, &mine));
    void* session = ort.create_session(env, model_of(1000));

    void *x = nullptr, *z = nullptr;
    CHECK(ort.create_tensor(&mine, 1000, x) == "");
    for (int i = 0; i < 1000; ++i) ort.data(x)[i] = static_cast<float>(i);
    const auto before = f.chat.memory().counts();
    CHECK(ort.run(session, x, z) == "");
    CHECK(f.chat.memory().counts().allocations >= before.allocations + 1);  // z, and y unless it is computed in place
    CHECK(ort.data(z)[30] == 1800);
    CHECK(f.charged(f.chat.memory()) >= 8000);
    CHECK(f.charged(f.batch.memory()) == 0);
    ort.release_value(z);
    ort.release_value(x);
    ort.release_session(session);
    CHECK(f.charged(f.chat.memory()) == 0);

    session = ort.create_session(env, model_of(2 * MiB));  // x has all 8 MiB that the tenant has here
    CHECK(ort.create_tensor(&mine, 2 * MiB, x) == "");
    z = nullptr;
    CHECK_THAT(ort.run(session, x, z), Catch::Contains("tenant 'chat': allocate: asked 8 MiB, 0 B of 8 MiB left"));
    CHECK(z == nullptr);
    ort.release_value(x);
    ort.release_session(session);
    CHECK(f.charged(f.chat.memory()) == 0);
    CHECK(f.wrong_frees().empty());
    ort.release_environment(env, info);
    ort.release_info(info);
}

TEST_CASE("Calls of ONNX Runtime itself are submissions, in its own memory and in a tenant's",
          "[interop][onnxruntime]") {
    const bool in_tenant = GENERATE(false, true);
    two_tenants f;
    auto& chat = f.chat;
    const library ort;
    const OrtApi* const api = ort.api;
    const auto check = [&](void* status) { ort.check(status); };
    void* const env = ort.create_environment();
    // These lines, and those of a call and of the option above, are in docs/recipes.md.
    using OrtAllocator = allocator_1_25;
    const auto* memory_info = static_cast<const struct memory_info*>(ort.create_cpu_info());
    gpushare::stream_resource ordered{chat.memory(), chat.work_stream()};
    gpushare::onnxruntime_allocator<OrtAllocator, decltype(ordered)> mine{ordered, memory_info, ORT_API_VERSION};
    if (in_tenant) {
        check(api->RegisterAllocator(env, &mine));  // 1
    }
    void* const session = ort.create_session(env, model_of(1000));
    void* x = nullptr;
    CHECK(ort.create_tensor(in_tenant ? &mine : ort.own(), 1000, x) == "");
    for (int i = 0; i < 1000; ++i) ort.data(x)[i] = static_cast<float>(i);

    const char *in = "x", *out = "z";
    for (int call = 0; call < 3; ++call) {
        void *z = nullptr, *status = &f;
        auto done = chat.submit([&](auto& stream) {  // 3
            stream.launch({.blocks = 1}, [&](auto&) { status = api->Run(session, nullptr, &in, &x, 1, &out, 1, &z); });
        });
        done.wait();
        check(status);
        REQUIRE(z != nullptr);
        CHECK(ort.data(z)[30] == 1800);
        ort.release_value(z);
    }
    CHECK(chat.usage().completed == 3);
    CHECK(chat.usage().device_time > gpushare::ns{});
    CHECK(f.batch.usage().device_time == gpushare::ns{});
    CHECK((chat.usage().allocations > 3) == in_tenant);
    ort.release_value(x);
    ort.release_session(session);
    CHECK(f.charged(chat.memory()) == 0);
    ort.release_environment(env, in_tenant ? memory_info : nullptr);
    ort.release_info(const_cast<struct memory_info*>(memory_info));
}

#endif
