// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// ONNX Runtime's allocator: through the C struct of each version, and, if the library is available,
// with tensors of the library itself, which is loaded as in a program without its headers.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include <gpushare/interop/onnxruntime.hpp>
#include <gpushare/interop/stream_resource.hpp>

#include "interop/onnxruntime_library.hpp"
#include "interop/two_tenants.hpp"

using namespace gpushare::literals;

namespace {

using namespace onnxruntime_library;

constexpr std::size_t MiB = two_tenants::MiB, most = std::numeric_limits<std::size_t>::max();

// The layouts of OrtAllocator in ONNX Runtime's C API; every version adds at the end.
struct allocator_1_0 {
    std::uint32_t version;
    void* (*Alloc)(allocator_1_0*, std::size_t);
    void (*Free)(allocator_1_0*, void*);
    const memory_info* (*Info)(const allocator_1_0*);
};

template <class Struct, class Memory = two_tenants::memory>
using adapted = gpushare::onnxruntime_allocator<Struct, Memory>;

}  // namespace

TEMPLATE_TEST_CASE("a tenant's memory behind OrtAllocator", "[interop][onnxruntime]", allocator_1_0, allocator_1_25) {
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

/// With sessions that take what is registered with their environment.
class own_library : public library {
public:
    own_library() : library(GPUSHARE_ONNXRUNTIME) {}
    void* create_session(void* env, std::string_view model) const {
        void *options = nullptr, *session = nullptr;
        check(api->CreateSessionOptions(&options));
        check(api->SetIntraOpNumThreads(options, 1));
        check(api->AddSessionConfigEntry(options, "session.use_env_allocators", "1"));  // 2
        check(api->CreateSessionFromArray(env, model.data(), model.size(), options, &session));
        api->ReleaseSessionOptions(options);
        return session;
    }
};

}  // namespace

TEST_CASE("the tensors of ONNX Runtime itself are charged to their tenant", "[interop][onnxruntime]") {
    two_tenants f;
    const own_library ort;
    void* const info = ort.create_cpu_info();
    adapted<allocator_1_25> mine{f.chat.memory(), static_cast<const memory_info*>(info), ORT_API_VERSION};

    void* tensor = nullptr;
    CHECK(ort.create_tensor(&mine, MiB, tensor) == "");
    CHECK(f.charged(f.chat.memory()) == 4 * MiB);
    ort.data(tensor)[MiB - 1] = 1;

    void* too_big = nullptr;
    const std::string refusal = "tenant 'chat': allocate: asked for 8 MiB, 4 MiB of 8 MiB left (over the quota)";
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

TEST_CASE("a session of ONNX Runtime itself computes in its tenant's memory, or is refused", "[interop][onnxruntime]") {
    two_tenants f;
    const own_library ort;
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
    CHECK_THAT(ort.run(session, x, z), Catch::Contains("tenant 'chat': allocate: asked for 8 MiB, 0 B of 8 MiB left"));
    CHECK(z == nullptr);
    ort.release_value(x);
    ort.release_session(session);
    CHECK(f.charged(f.chat.memory()) == 0);
    CHECK(f.wrong_frees().empty());
    ort.release_environment(env, info);
    ort.release_info(info);
}

TEST_CASE("sessions of ONNX Runtime itself keep the allocator that was registered when they were made",
          "[interop][onnxruntime]") {
    two_tenants f;
    const own_library ort;
    void* const info = ort.create_cpu_info();
    const auto* const where = static_cast<const memory_info*>(info);
    adapted<allocator_1_25> of_chat{f.chat.memory(), where, ORT_API_VERSION},
        of_batch{f.batch.memory(), where, ORT_API_VERSION};
    void* const env = ort.create_environment();
    ort.check(ort.api->RegisterAllocator(env, &of_chat));
    void* const in_chat = ort.create_session(env, model_of(1000));
    ort.check(ort.api->UnregisterAllocator(env, info));
    ort.check(ort.api->RegisterAllocator(env, &of_batch));
    void* const in_batch = ort.create_session(env, model_of(1000));

    const auto run = [&](void* session, allocator_1_25& in, const auto& of_tenant, const auto& of_other) {
        void *x = nullptr, *z = nullptr;
        CHECK(ort.create_tensor(&in, 1000, x) == "");
        const auto before = of_tenant.counts(), others = of_other.counts();
        CHECK(ort.run(session, x, z) == "");
        CHECK(of_tenant.counts().allocations > before.allocations);
        CHECK(of_other.counts().allocations == others.allocations);
        ort.release_value(z);
        ort.release_value(x);
    };
    run(in_chat, of_chat, f.chat.memory(), f.batch.memory());
    run(in_batch, of_batch, f.batch.memory(), f.chat.memory());
    ort.release_session(in_chat);
    ort.release_session(in_batch);
    CHECK(f.charged(f.chat.memory()) == 0);
    CHECK(f.charged(f.batch.memory()) == 0);
    CHECK(f.wrong_frees().empty());
    ort.release_environment(env, info);
    ort.release_info(info);
}

TEST_CASE("calls of ONNX Runtime itself are submissions, in its own memory and in a tenant's",
          "[interop][onnxruntime]") {
    const bool in_tenant = GENERATE(false, true);
    two_tenants f;
    auto& chat = f.chat;
    const own_library ort;
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
