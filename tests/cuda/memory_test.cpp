// SPDX-License-Identifier: Apache-2.0
// CUDA's allocators, over the stand-in: their charges, their refusals, and wrong frees.
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "conformance/memory_resource_suite.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace memory_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::errc;

namespace cuda = gpushare::cuda;

namespace {

constexpr device_id d{0};
constexpr std::size_t most = std::numeric_limits<std::size_t>::max();

struct fixture {
    const standin::session gpu{{.devices = 1, .memory = 64_MiB, .context = 2_MiB}};
    cuda::node node;
    cuda::device_memory& memory = node.memory(d);
};

}  // namespace

TEST_CASE("the allocation model rounds to steps, and from a size on to pages", "[cuda][memory]") {
    constexpr cuda::allocation_model model;
    static_assert(model.charged(1) == 512_B);
    static_assert(model.charged(512) == 512_B);
    static_assert(model.charged(513) == 1_KiB);
    static_assert(model.charged((1 << 20) - 1) == 1_MiB);
    static_assert(model.charged(1 << 20) == 1_MiB);
    static_assert(model.charged((1 << 20) + 1) == 2_MiB);
    static_assert(model.charged((2 << 20) + 1) == 4_MiB);
    static_assert(model.charged(std::numeric_limits<std::uint64_t>::max()) == bytes::max());
}

TEST_CASE_METHOD(fixture,
                 "the memory that the device loses is charged, but for the rest of the page that small blocks share",
                 "[cuda][memory]") {
    support::random any{support::seed(3)};
    struct block {
        void* pointer;
        std::size_t size, alignment;
    };
    std::vector<block> out;
    for (int i = 0; i < 300; ++i) {
        if (!out.empty() && any.one_in(3)) {
            CHECK(memory.deallocate(out.back().pointer, out.back().size, out.back().alignment) == errc::none);
            out.pop_back();
        } else {
            const block b{nullptr, any.below(any.one_in(10) ? 3'000'000 : 50'000), std::size_t{1} << any.below(14)};
            const auto used = memory.used();
            out.push_back({memory.try_allocate(b.size, b.alignment), b.size, b.alignment});
            if (out.back().pointer == nullptr) {
                out.pop_back();
                continue;
            }
            CHECK(reinterpret_cast<std::uintptr_t>(out.back().pointer) % b.alignment == 0);
            CHECK((memory.used() - used == memory.charged(b.size, b.alignment)));
        }
        const bytes lost{standin::used(0)};
        CHECK((lost >= memory.used()));
        CHECK((lost - memory.used() < memory.model().page));
        CHECK((memory.taken_by_others() == 2_MiB + (lost - memory.used())));
    }
    for (const auto& b : out) CHECK(memory.deallocate(b.pointer, b.size, b.alignment) == errc::none);
    CHECK((memory.used() == 0_B));
    CHECK((memory.taken_by_others() == 2_MiB));
}

TEST_CASE_METHOD(fixture, "alignment above 256 is had, and charged", "[cuda][memory]") {
    CHECK(memory.charged(4096, 256) == 4_KiB);
    CHECK(memory.charged(4096, 4096) == 8_KiB);  // 4096 - 256 more, in steps of 512
    CHECK(memory.charged(1, std::size_t{1} << 63) == bytes::max());
    std::vector<void*> out;
    for (int i = 0; i < 10; ++i) {
        void* const p = memory.allocate(1, 64 << 10);
        CHECK(reinterpret_cast<std::uintptr_t>(p) % (64 << 10) == 0);
        std::memset(p, 1, 1);
        out.push_back(p);
    }
    for (void* const p : out) CHECK(memory.deallocate(p, 1, 64 << 10) == errc::none);
}

TEST_CASE_METHOD(fixture, "wrong frees are told apart, change nothing, and never reach CUDA", "[cuda][memory]") {
    void* const p = memory.allocate(1000, 512);
    int local = 0;
    void* foreign = nullptr;
    REQUIRE(cudaMalloc(&foreign, 1000) == cudaSuccess);
    standin::forget_calls();
    const auto used = memory.used();

    CHECK(memory.deallocate(&local, 1000, 512) == errc::unknown_block);
    CHECK(memory.deallocate(foreign, 1000, 512) == errc::unknown_block);
    CHECK(memory.deallocate(static_cast<std::byte*>(p) + 256, 744, 256) == errc::unknown_block);
    CHECK(memory.deallocate(p, 999, 512) == errc::wrong_size);
    CHECK(memory.deallocate(p, 1000, 256) == errc::wrong_size);
    CHECK(memory.deallocate(p, most, 512) == errc::wrong_size);
    CHECK(memory.deallocate(nullptr, 1, 1) == errc::none);
    CHECK(memory.used() == used);
    CHECK(standin::count("cudaFree") == 0);

    CHECK(memory.deallocate(p, 1000, 512) == errc::none);
    CHECK(memory.deallocate(p, 1000, 512) == errc::unknown_block);
    CHECK(standin::count("cudaFree") == 1);
    CHECK(memory.used() == 0_B);
    CHECK(cudaFree(foreign) == cudaSuccess);
}

TEST_CASE_METHOD(fixture, "sizes at the edge of the type, and odd alignments, are refused before CUDA sees them",
                 "[cuda][memory]") {
    standin::forget_calls();
    for (const std::size_t size : {most, most - 255, most - 511, most / 2})
        for (const std::size_t alignment : {std::size_t{1}, std::size_t{256}, std::size_t{4096}}) {
            CHECK(memory.charged(size, alignment) == bytes::max());
            CHECK(memory.try_allocate(size, alignment) == nullptr);
        }
    for (const std::size_t alignment : {std::size_t{0}, std::size_t{3}, most}) {
        CHECK(memory.charged(1, alignment) == bytes::max());
        CHECK(memory.try_allocate(1, alignment) == nullptr);
        try {
            (void)memory.allocate(1, alignment);
            FAIL("allocated");
        } catch (const gpushare::memory_error& e) {
            CHECK(e.code() == errc::bad_alignment);
        }
    }
    for (const std::size_t alignment : {std::size_t{1} << 45, std::size_t{1} << 63}) {  // more than the device has
        gpushare::failure why;
        CHECK(memory.try_allocate(1, alignment, &why) == nullptr);
        CHECK(why.code == errc::bad_alignment);
        CHECK(memory.refuses(1, alignment) == errc::bad_alignment);
        CHECK(memory.charged(1, static_cast<std::size_t>(why.limit)) <= memory.capacity());
        CHECK(memory.charged(1, static_cast<std::size_t>(2 * why.limit)) > memory.capacity());
    }
    CHECK(standin::count("cudaMalloc") == 0);
}

TEST_CASE_METHOD(fixture, "zero bytes have an address of their own", "[cuda][memory]") {
    void* const p = memory.allocate(0, 1);
    void* const q = memory.allocate(0, 256);
    CHECK(p != nullptr);
    CHECK(p != q);
    CHECK(memory.used() == 1_KiB);
    CHECK(memory.deallocate(p, 0, 1) == errc::none);
    CHECK(memory.deallocate(q, 0, 256) == errc::none);
}

TEST_CASE_METHOD(fixture, "a refusal has the figures and the right code, and leaves no error behind (hami)",
                 "[cuda][memory]") {
    void* const p = memory.allocate(60 << 20, 256);
    try {
        (void)memory.allocate(4 << 20, 256);
        FAIL("allocated");
    } catch (const gpushare::memory_error& e) {
        CHECK(e.code() == errc::out_of_memory);
        CHECK(e.figures().asked == 4 << 20);
        CHECK(e.figures().left == 2 << 20);
        CHECK(e.figures().limit == 64 << 20);
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(memory.used() == 60_MiB);
    CHECK(memory.deallocate(p, 60 << 20, 256) == errc::none);

    standin::inject({.call = "cudaMalloc", .code = cudaErrorMemoryAllocation, .skip = 1, .times = 2});
    void* const a = memory.try_allocate(100, 256);
    CHECK(a != nullptr);
    CHECK(memory.try_allocate(100, 256) == nullptr);
    CHECK(memory.try_allocate(100, 256) == nullptr);
    void* const b = memory.try_allocate(100, 256);
    CHECK(b != nullptr);
    CHECK(memory.deallocate(a, 100, 256) == errc::none);
    CHECK(memory.deallocate(b, 100, 256) == errc::none);
}

TEST_CASE_METHOD(fixture, "allocating and freeing beside another thread's capture doesn't end it", "[cuda][memory]") {
    const auto s = raw::make_stream();
    REQUIRE(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal) == cudaSuccess);
    std::thread([&] {
        void* const p = memory.allocate(1000, 256);
        CHECK(memory.deallocate(p, 1000, 256) == errc::none);
        auto other = node.make_stream(d);
        CHECK(other.record().wait(gpushare::never));
    }).join();
    const auto graph = raw::end_capture(s);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    raw::destroy(s);
}

TEST_CASE("blocks that are still out go back with the node", "[cuda][memory]") {
    const standin::session gpu;
    cuda::node node;
    (void)node.memory(d).allocate(1000, 4096);
    (void)node.memory(device_id{1}).allocate(1000, 1);
}

TEST_CASE_METHOD(fixture, "pinned memory is a memory_resource, and catches wrong frees", "[cuda][memory][pinned]") {
    cuda::pinned_memory pinned{node};
    SECTION("conformance") { conformance::check_memory_resource(pinned); }
    SECTION("frees") {
        void* const p = pinned.allocate(5000, 64);
        const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));  // not the same on all hosts
        CHECK(pinned.used() == bytes{(5000 + page - 1) / page * page});
        std::memset(p, 1, 5000);
        CHECK(pinned.deallocate(p, 5001, 64) == errc::wrong_size);
        CHECK(pinned.deallocate(&pinned, 5000, 64) == errc::unknown_block);
        CHECK(pinned.deallocate(p, 5000, 64) == errc::none);
        CHECK(pinned.deallocate(p, 5000, 64) == errc::unknown_block);
        CHECK(pinned.used() == 0_B);
    }
    SECTION("refusals") {
        CHECK(pinned.try_allocate(most, 64) == nullptr);
        gpushare::failure why;
        CHECK(pinned.try_allocate(1, std::size_t{1} << 63, &why) == nullptr);
        CHECK(why.code == errc::bad_alignment);
        CHECK(pinned.refuses(1, std::size_t{1} << 63) == errc::bad_alignment);
        CHECK(pinned.try_allocate(1, 3) == nullptr);
        standin::inject({.call = "cudaHostAlloc", .code = cudaErrorMemoryAllocation});
        CHECK_THROWS_AS(pinned.allocate(1, 1), std::bad_alloc);
        standin::inject({.call = "cudaHostAlloc", .code = cudaErrorMemoryAllocation});
        why = {};
        CHECK(pinned.try_allocate(5000, 64, &why) == nullptr);
        CHECK(why.code == errc::out_of_memory);
        CHECK(why.asked == pinned.charged(5000, 64).count());
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        why = {};
        CHECK(pinned.deallocate(pinned.try_allocate(5000, 64, &why), 5000, 64) == errc::none);
        CHECK(why.code == errc::none);
    }
    SECTION("what is still out goes back") { (void)pinned.allocate(1, 8192); }
}

TEST_CASE_METHOD(fixture, "memory freed between two readings isn't counted as ours and as free", "[cuda][memory]") {
    const bytes others = memory.taken_by_others();
    SECTION("a block") {
        void* const p = memory.allocate(10 << 20, 256);
        errc freed = errc::unknown_block;
        standin::before_next("cudaMemGetInfo", [&] { freed = memory.deallocate(p, 10 << 20, 256); });
        CHECK(memory.taken_by_others() == others);
        CHECK(freed == errc::none);
    }
    SECTION("a chunk") {
        cuda::virtual_memory pages(node, d);
        std::optional chunk(pages.create().value());
        standin::before_next("cudaMemGetInfo", [&] { chunk.reset(); });
        CHECK(memory.taken_by_others() == others);
        CHECK_FALSE(chunk);
    }
    CHECK(memory.taken_by_others() == others);
}

TEST_CASE_METHOD(fixture, "others' memory is never read as less, while memory comes and goes", "[cuda][memory]") {
    void* const fixed = memory.allocate(4 << 20, 256);
    const bytes others = memory.taken_by_others();
    std::atomic<bool> done{false};
    std::jthread traffic([&] {
        while (!done)
            if (void* const p = memory.try_allocate(10 << 20, 256)) (void)memory.deallocate(p, 10 << 20, 256);
    });
    bytes least = bytes::max();
    for (int i = 0; i < 20'000; ++i) least = std::min(least, memory.taken_by_others());
    done = true;
    traffic.join();
    CHECK(least == others);
    CHECK(memory.taken_by_others() == others);
    CHECK(memory.deallocate(fixed, 4 << 20, 256) == errc::none);
}

}  // namespace memory_test
