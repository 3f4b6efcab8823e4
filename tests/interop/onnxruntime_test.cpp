// SPDX-License-Identifier: Apache-2.0
// ONNX Runtime's allocator: through the C struct as its versions have it, and, where the library is at hand, by tensors of
// the library itself, loaded as a program without its headers does it.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <string>
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

/// As much of the library's table of functions as is needed here: a function keeps its place for good.
class library {
public:
    static constexpr std::uint32_t version = 25;

    library() : loaded_(dlopen(GPUSHARE_ONNXRUNTIME, RTLD_NOW | RTLD_LOCAL)) {
        INFO(GPUSHARE_ONNXRUNTIME);
        REQUIRE(loaded_ != nullptr);
        struct base {
            void* const* (*get_api)(std::uint32_t);
            const char* (*get_version)();
        };
        const auto get = reinterpret_cast<const base* (*)()>(dlsym(loaded_, "OrtGetApiBase"));
        REQUIRE(get != nullptr);
        api_ = get()->get_api(version);
        REQUIRE(api_ != nullptr);
    }
    // Stays loaded, as with any program that uses it.

    template <class Function>
    [[nodiscard]] Function* at(std::size_t place) const {
        return reinterpret_cast<Function*>(api_[place]);
    }
    void* create_cpu_info() const {
        void* info = nullptr;
        check(at<void*(int, int, void**)>(69)(0, 0, &info));  // CreateCpuMemoryInfo(OrtDeviceAllocator, default)
        return info;
    }
    void release_info(void* info) const { at<void(void*)>(94)(info); }
    /// A tensor of `n` floats. The status' text if it failed.
    std::string create_tensor(allocator_1_25* from, std::int64_t n, void*& value) const {
        return text(
            at<void*(allocator_1_25*, const std::int64_t*, std::size_t, int, void**)>(48)(from, &n, 1, 1, &value));
    }
    float* data(void* value) const {
        void* p = nullptr;
        check(at<void*(void*, void**)>(51)(value, &p));
        return static_cast<float*>(p);
    }
    /// Null, and `why`, if there is no memory.
    void* allocate(allocator_1_25* from, std::size_t size, std::string& why) const {
        void* p = nullptr;
        why = text(at<void*(allocator_1_25*, std::size_t, void**)>(75)(from, size, &p));
        return p;
    }
    void release_value(void* value) const { at<void(void*)>(96)(value); }

private:
    [[nodiscard]] std::string text(void* status) const {
        if (status == nullptr) return {};
        std::string why = at<const char*(const void*)>(2)(status);
        at<void(void*)>(93)(status);
        return why;
    }
    void check(void* status) const { CHECK(text(status) == ""); }

    void* loaded_;
    void* const* api_ = nullptr;
};

}  // namespace

TEST_CASE("The tensors of ONNX Runtime itself are charged to their tenant", "[interop][onnxruntime]") {
    two_tenants f;
    const library ort;
    void* const info = ort.create_cpu_info();
    adapted<allocator_1_25> mine{f.chat.memory(), static_cast<const memory_info*>(info), library::version};

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

#endif
