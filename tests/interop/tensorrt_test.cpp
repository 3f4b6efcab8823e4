// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// TensorRT's allocator, called through interfaces with the virtual functions that NVIDIA documents:
// IGpuAllocator as of TensorRT 8.6, IGpuAsyncAllocator as of 10.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include <gpushare/interop/tensorrt.hpp>

#include "interop/two_tenants.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

using namespace gpushare::literals;
using gpushare::device_id;
using gpushare::errc;

namespace {

constexpr std::size_t MiB = two_tenants::MiB;

struct native;  // behind a handle
using handle = native*;

// Names, argument types and defaults are TensorRT's.
struct gpu_allocator {
    virtual ~gpu_allocator() = default;
    virtual void* allocate(std::uint64_t const size, std::uint64_t const alignment,
                           std::uint32_t const flags) noexcept = 0;
    virtual void* reallocate(void* const, std::uint64_t, std::uint64_t) noexcept { return nullptr; }
    virtual bool deallocate(void* const memory) noexcept = 0;
    virtual void* allocateAsync(std::uint64_t const size, std::uint64_t const alignment, std::uint32_t const flags,
                                handle) noexcept {
        return allocate(size, alignment, flags);
    }
    virtual bool deallocateAsync(void* const memory, handle) noexcept { return deallocate(memory); }
};
struct gpu_async_allocator : gpu_allocator {
    void* allocateAsync(std::uint64_t const size, std::uint64_t const alignment, std::uint32_t const flags,
                        handle stream) noexcept override = 0;
    bool deallocateAsync(void* const memory, handle stream) noexcept override = 0;
    void* allocate(std::uint64_t const size, std::uint64_t const alignment,
                   std::uint32_t const flags) noexcept override {
        return allocateAsync(size, alignment, flags, nullptr);
    }
    bool deallocate(void* const memory) noexcept override { return deallocateAsync(memory, nullptr); }
};
/// A later one may have dropped what is deprecated.
struct later_allocator {
    virtual ~later_allocator() = default;
    virtual void* allocateAsync(std::uint64_t, std::uint64_t, std::uint32_t, handle) noexcept = 0;
    virtual bool deallocateAsync(void*, handle) noexcept = 0;
};

template <class Interface>
using adapted = gpushare::tensorrt_allocator<Interface, two_tenants::memory, two_tenants::node_type>;

static_assert(!std::is_abstract_v<adapted<gpu_allocator>>);
static_assert(!std::is_abstract_v<adapted<gpu_async_allocator>>);
static_assert(!std::is_abstract_v<adapted<later_allocator>>);
static_assert(std::is_same_v<adapted<gpu_allocator>::stream_handle, handle>);

struct fixture : two_tenants {
    adapted<gpu_async_allocator> mine{chat.memory(), node, device_id{0}}, others{batch.memory(), node, device_id{0}};
    gpu_allocator& trt = mine;  // as TensorRT has it
    handle on = reinterpret_cast<handle>(&stream);
};

}  // namespace

TEST_CASE("TensorRT's blocks are charged to the tenant, and credited in the order of their stream",
          "[interop][tensorrt]") {
    fixture f;
    void* const p = f.trt.allocateAsync(6 * MiB, 256, 0, f.on);
    REQUIRE(p != nullptr);
    CHECK(f.charged(f.chat.memory()) == 6 * MiB);
    f.hold();
    CHECK(f.trt.deallocateAsync(p, f.on));
    CHECK(f.charged(f.chat.memory()) == 6 * MiB);
    CHECK(f.trt.allocateAsync(3 * MiB, 256, 0, f.on) == nullptr);
    f.let_go();
    void* const q = f.trt.allocateAsync(8 * MiB, 256, 0, f.on);
    CHECK(q != nullptr);
    CHECK(f.trt.deallocateAsync(q, f.on));
    CHECK(f.charged(f.chat.memory()) == 0);
}

TEST_CASE("a lack of memory is a null pointer for TensorRT, never an exception", "[interop][tensorrt]") {
    fixture f;
    constexpr auto most = std::numeric_limits<std::uint64_t>::max();
    for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{9 * MiB}, most / 2, most - 255, most})
        CHECK(f.trt.allocateAsync(size, 256, 0, f.on) == nullptr);
    for (const std::uint64_t alignment : {std::uint64_t{3}, most}) {
        CHECK(f.trt.allocateAsync(1, alignment, 0, f.on) == nullptr);
        CHECK(f.trt.allocate(1, alignment, 0) == nullptr);
    }
    CHECK(f.chat.memory().counts().refused == 8);
    CHECK(f.charged(f.chat.memory()) == 0);

    void* const any = f.trt.allocateAsync(1, 0, 0, f.on);  // any alignment will do
    CHECK(reinterpret_cast<std::uintptr_t>(any) % 256 == 0);
    CHECK(f.trt.deallocateAsync(any, f.on));
}

TEST_CASE("TensorRT can't free a block that isn't allocated, nor another tenant's block", "[interop][tensorrt]") {
    fixture f;
    void* const p = f.trt.allocate(1000, 256, 0);
    CHECK(f.trt.deallocate(nullptr));
    CHECK(f.trt.deallocateAsync(nullptr, f.on));
    CHECK_FALSE(f.others.deallocateAsync(p, f.on));
    CHECK_FALSE(f.trt.deallocateAsync(&f, f.on));
    CHECK_FALSE(f.trt.deallocate(static_cast<std::byte*>(p) + 256));
    CHECK(f.charged(f.chat.memory()) == 1024);
    CHECK(f.trt.deallocate(p));
    CHECK_FALSE(f.trt.deallocate(p));
    CHECK(f.charged(f.chat.memory()) == 0);
}

TEST_CASE("a block grows for TensorRT if it has room, and stays unchanged otherwise", "[interop][tensorrt]") {
    fixture f;
    void* const p = f.trt.allocateAsync(1000, 256, 1, f.on);
    CHECK(f.trt.reallocate(p, 256, 1000) == p);
    CHECK(f.trt.reallocate(p, 256, 10) == p);
    CHECK(f.trt.reallocate(p, 256, 1001) == nullptr);
    CHECK(f.trt.reallocate(p, 256, 0) == nullptr);
    CHECK(f.trt.reallocate(&f, 256, 10) == nullptr);
    CHECK(f.trt.reallocate(nullptr, 256, 10) == nullptr);
    CHECK(f.trt.deallocateAsync(p, f.on));
    CHECK(f.trt.reallocate(p, 256, 10) == nullptr);
}

TEST_CASE("an older and a later interface of TensorRT work as well", "[interop][tensorrt]") {
    fixture f;
    adapted<gpu_allocator> older{f.chat.memory(), f.node, device_id{0}};
    adapted<later_allocator> later{f.chat.memory(), f.node, device_id{0}};
    gpu_allocator& trt = older;
    void* const p = trt.allocateAsync(MiB, 0, 0, f.on);
    void* const q = trt.allocate(MiB, 0, 0);
    CHECK(f.charged(f.chat.memory()) == 2 * MiB);
    CHECK(trt.deallocateAsync(p, f.on));
    CHECK(trt.deallocate(q));
    later_allocator& newer = later;
    void* const r = newer.allocateAsync(MiB, 0, 0, f.on);
    CHECK(newer.deallocateAsync(r, f.on));
    CHECK(f.charged(f.chat.memory()) == 0);
}

TEST_CASE("TensorRT may call from several threads", "[interop][tensorrt]") {
    fixture f;
    support::together(3, [&](unsigned rank) {
        support::random any{support::seed(rank)};
        auto own = f.node.make_stream({0});
        std::vector<void*> out;
        for (int i = 0; i < 500; ++i) {
            if (void* const p = f.trt.allocateAsync(1 + any.below(100'000), 256, 0, f.on)) out.push_back(p);
            if (!out.empty() && any.one_in(2)) {
                (void)f.trt.deallocateAsync(out.back(), reinterpret_cast<handle>(&own));
                out.pop_back();
            }
        }
        for (void* p : out) (void)f.trt.deallocateAsync(p, reinterpret_cast<handle>(&own));
        own.record().wait(gpushare::never);
    });
    CHECK(f.charged(f.chat.memory()) == 0);
    CHECK(f.wrong_frees().empty());
}
