// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// A tenant's memory behind libcu++'s concepts and references, on the stand-in. Built twice: with
// the toolkit's CCCL and, if there is one, with a newer CCCL, whose cuda::mr has other names.
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE  // CCCL 3.0 hides it; later ones don't know the macro
#include <cuda/memory_resource>

#include <gpushare/interop/cuda_mr.hpp>

#include <chrono>
#include <cstddef>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::errc;

namespace {

namespace mr = ::cuda::mr;

using tenancy = gpushare::tenancy<gpushare::cuda::node>;
using memory_of_tenant = gpushare::tenant_memory<gpushare::cuda::device_memory, gpushare::cuda::stream::point>;
using resource = gpushare::cuda_mr_resource<memory_of_tenant, gpushare::cuda::node, mr::device_accessible>;

static_assert(gpushare::memory_resource<resource>);
static_assert(::cuda::has_property<resource, mr::device_accessible>);
static_assert(!::cuda::has_property<resource, mr::host_accessible>);

// The two spellings behind one.
#if CCCL_VERSION < 3001000
static_assert(mr::resource_with<resource, mr::device_accessible>);
static_assert(mr::async_resource_with<resource, mr::device_accessible>);
using reference = mr::async_resource_ref<mr::device_accessible>;
void* allocate(reference r, ::cuda::stream_ref s, std::size_t size) { return r.allocate_async(size, 256, s); }
void deallocate(reference r, ::cuda::stream_ref s, void* p, std::size_t size) { r.deallocate_async(p, size, 256, s); }
void* allocate_now(reference r, std::size_t size) { return r.allocate(size, 256); }
void deallocate_now(reference r, void* p, std::size_t size) { r.deallocate(p, size, 256); }
#else
static_assert(mr::synchronous_resource_with<resource, mr::device_accessible>);
static_assert(mr::resource_with<resource, mr::device_accessible>);
using reference = mr::resource_ref<mr::device_accessible>;
void* allocate(reference r, ::cuda::stream_ref s, std::size_t size) { return r.allocate(s, size, 256); }
void deallocate(reference r, ::cuda::stream_ref s, void* p, std::size_t size) { r.deallocate(s, p, size, 256); }
void* allocate_now(reference r, std::size_t size) { return r.allocate_sync(size, 256); }
void deallocate_now(reference r, void* p, std::size_t size) { r.deallocate_sync(p, size, 256); }
#endif

struct fixture {
    const standin::session gpu{{.devices = 1, .memory = 64_MiB}};
    gpushare::cuda::node node;
    tenancy shared{node};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 8_MiB, .compute = 50_pct});
    resource adapted = gpushare::as_cuda_mr<mr::device_accessible>(chat.memory(), node);
    reference ref{adapted};
    gpushare::cuda::stream stream = node.make_stream({0});
    ::cuda::stream_ref handle{stream.native_handle()};
};

}  // namespace

TEST_CASE("a quota holds behind libcu++'s reference to a resource", "[cuda]") {
    fixture f;
    void* const p = allocate_now(f.ref, 6 << 20);
    CHECK(f.chat.memory().free() == 2_MiB);
    CHECK_THROWS_AS(allocate_now(f.ref, 3 << 20), std::bad_alloc);
    CHECK_THROWS_AS(allocate(f.ref, f.handle, 3 << 20), gpushare::memory_error);
    deallocate_now(f.ref, p, 6 << 20);
    CHECK(f.chat.memory().free() == 8_MiB);
}

TEST_CASE("a free through libcu++ is credited once its stream reaches the free", "[cuda]") {
    fixture f;
    void* const p = allocate(f.ref, f.handle, 6 << 20);
    standin::hold(f.stream.native_handle());
    f.stream.launch({}, [](auto&) {});
    deallocate(f.ref, f.handle, p, 6 << 20);
    CHECK(f.chat.memory().pending() == 6_MiB);
    CHECK(f.chat.memory().free() == 2_MiB);

    standin::let_go(f.stream.native_handle());
    CHECK(f.stream.record().wait(gpushare::never));
    void* const q = allocate(f.ref, f.handle, 7 << 20);  // collects what is reached
    deallocate_now(f.ref, q, 7 << 20);
    CHECK(f.chat.memory().free() == 8_MiB);
}

TEST_CASE("the default stream works like any stream: memory for it is allocated and freed in its order", "[cuda]") {
    standin::reset({.devices = 1, .memory = 64_MiB, .time = standin::timing::manual});
    {
        gpushare::cuda::node node;
        tenancy shared{node};
        auto chat =
            shared.admit({.name = "chat", .memory = 8_MiB, .compute = 50_pct, .scrub = gpushare::scrub_policy::off});
        resource adapted = gpushare::as_cuda_mr<mr::device_accessible>(chat.memory(), node);
        reference ref{adapted};
        for (const cudaStream_t by_default : {cudaStream_t{}, cudaStreamLegacy}) {
            void* const p = allocate(ref, ::cuda::stream_ref{by_default}, 1 << 20);
            (void)standin::detail::launch(by_default, std::chrono::milliseconds(1), [] {});
            deallocate(ref, ::cuda::stream_ref{by_default}, p, 1 << 20);
            chat.memory().collect();
            CHECK(chat.memory().free() == 7_MiB);
            standin::advance(std::chrono::milliseconds(2));
            chat.memory().collect();
            CHECK(chat.memory().free() == 8_MiB);
        }
    }
    const std::string found = standin::take_findings();  // it notes all that is done to a default stream
    CAPTURE(found);
    CHECK(found.find("left behind") == std::string::npos);
}

TEST_CASE("memory for a per-thread default stream is refused, since nothing could be freed on it", "[cuda]") {
    fixture f;
    try {
        (void)allocate(f.ref, ::cuda::stream_ref{cudaStreamPerThread}, 1 << 20);
        FAIL("allocated");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::invalid_specification);
    }
    CHECK(f.chat.memory().free() == 8_MiB);
}

TEST_CASE("blocks that are freed through libcu++ under a capture come back with its graph", "[cuda]") {
    fixture f;
    for (int turn = 0; turn < 3; ++turn) {
        REQUIRE(cudaStreamBeginCapture(f.handle.get(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        void* const p = allocate(f.ref, f.handle, 4 << 20);
        deallocate(f.ref, f.handle, p, 4 << 20);
        cudaGraph_t graph = nullptr;
        REQUIRE(cudaStreamEndCapture(f.handle.get(), &graph) == cudaSuccess);
        f.chat.memory().collect();
        CHECK(f.chat.memory().free() == 4_MiB);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        f.chat.memory().collect();
        CHECK(f.chat.memory().free() == 8_MiB);
    }
}

TEST_CASE("a block whose free names an impossible stream stays charged and is reported", "[cuda]") {
    fixture f;
    void* const p = allocate(f.ref, f.handle, 2 << 20);
    deallocate(f.ref, ::cuda::stream_ref{cudaStreamPerThread}, p, 2 << 20);
    CHECK(f.chat.memory().free() == 6_MiB);
    deallocate(f.ref, f.handle, nullptr, 2 << 20);
    CHECK(f.chat.close().leaked_blocks == 1);
}

TEST_CASE("resources are equal if one can free the other's blocks", "[cuda]") {
    fixture f;
    auto other = f.shared.admit({.name = "batch", .memory = 8_MiB, .compute = 50_pct});
    const resource copy = f.adapted;
    const auto others = gpushare::as_cuda_mr<mr::device_accessible>(other.memory(), f.node);
    CHECK(copy == f.adapted);
    CHECK(others != f.adapted);
}
