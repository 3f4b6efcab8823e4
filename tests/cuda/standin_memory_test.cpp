// SPDX-License-Identifier: Apache-2.0
// The stand-in for CUDA is itself tested: its memory, pools, virtual memory and green contexts.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "support/catch.hpp"
#include "support/cuda_standin/raw.hpp"
#include "support/cuda_standin/session.hpp"
#include "support/cuda_standin/standin.hpp"

namespace standin_memory_test {

using namespace std::chrono_literals;
using gpushare::bytes;
using raw::make_event;
using raw::make_stream;

namespace {

constexpr auto manual = standin::timing::manual;

}  // namespace

// ---- memory

TEST_CASE("memory has a capacity, and of it what a context and others take", "[cuda][standin]") {
    const standin::session gpu{{.memory = bytes{10 << 20}, .taken = bytes{2 << 20}}};
    std::size_t free = 0, total = 0;
    CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
    CHECK(total == 10 << 20);
    CHECK(free == 6 << 20);
    void *p = nullptr, *q = nullptr, *r = nullptr;
    CHECK(cudaMalloc(&p, (2 << 20) + 1) == cudaSuccess);  // two pages
    CHECK(cudaMalloc(&q, 513) == cudaSuccess);            // a page that small blocks share
    CHECK(standin::used(0) == bytes{6 << 20});
    CHECK(cudaMalloc(&r, (1 << 20) + 1) == cudaErrorMemoryAllocation);
    CHECK(r == nullptr);
    CHECK(cudaMalloc(&r, SIZE_MAX) == cudaErrorMemoryAllocation);
    CHECK(cudaMalloc(&r, 1 << 20) == cudaSuccess);  // half a page is a small block
    CHECK(standin::used(0) == bytes{6 << 20});
    std::memset(p, 1, (2 << 20) + 1);

    cudaPointerAttributes what{};
    CHECK(cudaPointerGetAttributes(&what, static_cast<std::byte*>(p) + 5) == cudaSuccess);
    CHECK(what.type == cudaMemoryTypeDevice);
    CHECK(cudaPointerGetAttributes(&what, &gpu) == cudaSuccess);
    CHECK(what.type == cudaMemoryTypeUnregistered);

    CHECK(cudaFree(static_cast<std::byte*>(p) + 512) == cudaErrorInvalidValue);
    CHECK(cudaFree(p) == cudaSuccess);
    CHECK(cudaFree(p) == cudaErrorInvalidValue);
    CHECK(cudaFree(nullptr) == cudaSuccess);
    CHECK(cudaFreeHost(q) == cudaErrorInvalidValue);
    CHECK(cudaFree(q) == cudaSuccess);
    CHECK(cudaFree(r) == cudaSuccess);
    CHECK(standin::used(0) == bytes{});
}

TEST_CASE("freeing device memory waits for the device", "[cuda][standin]") {
    const standin::session gpu;
    const auto s = make_stream();
    void* p = nullptr;
    int ran = 0;
    CHECK(cudaMalloc(&p, 100) == cudaSuccess);
    CHECK(standin::detail::launch(s, 2ms, [&ran] { ++ran; }) == cudaSuccess);
    CHECK(cudaFree(p) == cudaSuccess);
    CHECK(ran == 1);
    raw::destroy(s);
}

TEST_CASE("a pool reserves in steps, and its limit is rounded up to them", "[cuda][standin]") {
    const standin::session gpu{{.memory = bytes{256 << 20}}};
    const auto s = make_stream();
    const auto pool = raw::make_pool(0, 1024);  // 1 KiB, and still 32 MiB
    void *p = nullptr, *q = nullptr;
    CHECK(cudaMallocFromPoolAsync(&p, 32 << 20, pool, s) == cudaSuccess);
    CHECK(cudaMallocFromPoolAsync(&q, 1, pool, s) == cudaErrorMemoryAllocation);
    CHECK(raw::attribute(pool, cudaMemPoolAttrReservedMemCurrent) == 32 << 20);
    CHECK(cudaFreeAsync(p, s) == cudaSuccess);
    CHECK(cudaMallocFromPoolAsync(&p, 600, pool, s) == cudaSuccess);
    CHECK(raw::attribute(pool, cudaMemPoolAttrUsedMemCurrent) == 1024);
    CHECK(raw::attribute(pool, cudaMemPoolAttrUsedMemHigh) == 32 << 20);
    CHECK(cudaFreeAsync(p, s) == cudaSuccess);
    CHECK(standin::used(0) == bytes{32 << 20});
    CHECK(cudaStreamSynchronize(s) == cudaSuccess);  // above the threshold, of 0
    CHECK(standin::used(0) == bytes{});
    CHECK(cudaMemPoolDestroy(pool) == cudaSuccess);
    raw::destroy(s);
}

TEST_CASE("what is freed in a stream can be had again there at once, elsewhere once it is done", "[cuda][standin]") {
    const standin::session gpu{{.memory = bytes{64 << 20}, .time = manual}};
    const auto s = make_stream(), t = make_stream();
    const auto pool = raw::make_pool(0, 32 << 20);
    int coupled = 0;  // else the other stream would be made to wait for this one, and have it at once
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &coupled) == cudaSuccess);
    void *p = nullptr, *q = nullptr, *r = nullptr;
    CHECK(cudaMallocFromPoolAsync(&p, 32 << 20, pool, s) == cudaSuccess);
    CHECK(standin::detail::launch(s, 1ms, {}) == cudaSuccess);
    CHECK(cudaFreeAsync(p, s) == cudaSuccess);
    CHECK(cudaMallocFromPoolAsync(&q, 32 << 20, pool, t) == cudaErrorMemoryAllocation);
    CHECK(cudaMallocFromPoolAsync(&r, 16 << 20, pool, s) == cudaSuccess);
    CHECK(cudaFreeAsync(p, s) == cudaErrorInvalidValue);
    standin::advance(1ms);
    CHECK(cudaMallocFromPoolAsync(&q, 16 << 20, pool, t) == cudaSuccess);
    CHECK(raw::attribute(pool, cudaMemPoolAttrUsedMemCurrent) == 32 << 20);
    CHECK(cudaMemPoolDestroy(pool) == cudaSuccess);  // lives on until its blocks are back
    CHECK(standin::used(0) == bytes{32 << 20});
    CHECK(cudaFreeAsync(r, s) == cudaSuccess);
    CHECK(cudaFreeAsync(q, s) == cudaSuccess);
    CHECK(standin::used(0) == bytes{});
    raw::destroy(s, t);
}

TEST_CASE("physical memory is mapped, opened, and lives until it is neither mapped nor held", "[cuda][standin]") {
    const standin::session gpu;
    const auto drv = raw::load_driver();
    const std::size_t page = 2 << 20;
    auto mapped = raw::map_block(drv, page);
    auto* const bytes_there = reinterpret_cast<unsigned char*>(mapped.at);
    bytes_there[page - 1] = 7;
    CHECK(drv.release(mapped.block) == CUDA_SUCCESS);
    CHECK(standin::used(0) == bytes{page});
    CHECK(bytes_there[page - 1] == 7);
    CHECK(drv.free_range(mapped.at, page) == CUDA_ERROR_INVALID_VALUE);  // still mapped
    CHECK(drv.unmap(mapped.at, page / 2) == CUDA_ERROR_INVALID_VALUE);   // half a mapping
    CHECK(drv.unmap(mapped.at, page) == CUDA_SUCCESS);
    CHECK(standin::used(0) == bytes{});
    CHECK(drv.free_range(mapped.at, page) == CUDA_SUCCESS);

    CUmemGenericAllocationHandle block = 0;
    auto wanted = raw::device_memory(0);
    CHECK(drv.create(&block, page + 1, &wanted, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(drv.create(&block, page * 100, &wanted, 0) == CUDA_ERROR_OUT_OF_MEMORY);
    wanted.location.id = 7;
    CHECK(drv.create(&block, page, &wanted, 0) == CUDA_ERROR_INVALID_DEVICE);
}

// ---- green contexts

TEST_CASE("SMs are split in steps, and streams know theirs", "[cuda][standin]") {
    const standin::session gpu{{.sms = 30}};
    const auto drv = raw::load_driver();
    CUdevResource all{}, parts[4], rest{};
    CHECK(drv.device_resource(0, &all, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS);
    CHECK(all.sm.smCount == 30);
    CHECK(all.sm.smCoscheduledAlignment == 8);
    unsigned groups = 0;
    CHECK(drv.split(nullptr, &groups, &all, nullptr, 0, 5) == CUDA_SUCCESS);
    CHECK(groups == 3);
    groups = 4;
    CHECK(drv.split(parts, &groups, &all, &rest, 0, 5) == CUDA_SUCCESS);
    CHECK(groups == 3);
    CHECK(parts[0].sm.smCount == 8);
    CHECK(rest.sm.smCount == 6);
    CHECK(drv.split(parts, &groups, &parts[1], nullptr, 0, 1) == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    CHECK(drv.split(parts, &groups, &all, nullptr, 0, 31) == CUDA_ERROR_INVALID_VALUE);

    CUdevResourceDesc two = nullptr;
    CHECK(drv.describe(&two, parts, 2) == CUDA_SUCCESS);
    CUgreenCtx green = nullptr;
    CHECK(drv.create_green(&green, two, 1, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_ERROR_INVALID_DEVICE);
    CHECK(drv.create_green(&green, two, 0, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(drv.create_green(&green, two, 0, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS);
    CUstream s = nullptr;
    CHECK(drv.green_stream(&s, green, 0, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(drv.green_stream(&s, green, CU_STREAM_NON_BLOCKING, -3) == CUDA_SUCCESS);
    CHECK(standin::sms_of(s).size() == 16);
    const auto e = make_event();  // of the primary context
    CHECK(cudaEventRecord(e, s) == cudaSuccess);
    raw::destroy(s, e);
    CHECK(drv.destroy_green(green) == CUDA_SUCCESS);
}

TEST_CASE("entry points depend on the version that is asked for, and that there is", "[cuda][standin]") {
    const standin::session gpu{{.driver_version = 12030}};
    void* f = nullptr;
    cudaDriverEntryPointQueryResult status{};
    const auto ask = [&](const char* name, unsigned version) {
        CHECK(cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &status) == cudaSuccess);
        CHECK((f != nullptr) == (status == cudaDriverEntryPointSuccess));
        return status;
    };
    CHECK(ask("cuMemCreate", 13000) == cudaDriverEntryPointSuccess);
    CHECK(ask("cuMemCreate", 10000) == cudaDriverEntryPointVersionNotSufficent);
    CHECK(ask("cuGreenCtxCreate", 13000) == cudaDriverEntryPointVersionNotSufficent);
    CHECK(ask("cuNoSuchThing", 13000) == cudaDriverEntryPointSymbolNotFound);
    standin::hide_entry_point("cuMemCreate");
    CHECK(ask("cuMemCreate", 13000) == cudaDriverEntryPointSymbolNotFound);
}

}  // namespace standin_memory_test
