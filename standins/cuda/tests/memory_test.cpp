// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Tests of the stand-in for CUDA itself: memory, pools, virtual memory and green contexts.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"

namespace standin_memory_test {

using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using gpushare::bytes;
using gpushare::ns;
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

TEST_CASE("a synchronous copy or fill may return before it is over", "[cuda][standin]") {
    const standin::session gpu{{.devices = 1, .time = manual, .synchronous_copy = 1ms}};
    {
        void *to = nullptr, *from = nullptr;
        REQUIRE(cudaMalloc(&to, 64) == cudaSuccess);
        REQUIRE(cudaMalloc(&from, 64) == cudaSuccess);
        std::memset(to, 0, 64);
        std::memset(from, 2, 64);
        const auto now = [&] { return int{static_cast<const char*>(to)[63]}; };
        const auto after = [&](ns time) {
            standin::advance(time);
            return now();
        };
        CHECK(cudaMemset(to, 1, 64) == cudaSuccess);
        CHECK(after(999us) == 0);
        CHECK(after(1us) == 1);
        CHECK(cudaMemcpy(to, from, 64, cudaMemcpyDefault) == cudaSuccess);
        CHECK(now() == 1);
        CHECK(after(1ms) == 2);
        std::vector<char> pageable(64, 3);
        CHECK(cudaMemcpy(to, pageable.data(), 64, cudaMemcpyDefault) == cudaSuccess);
        pageable.assign(64, 0);  // the copy has staged its source
        CHECK(now() == 2);
        CHECK(after(1ms) == 3);

        cudaStream_t blocking = nullptr;  // the legacy stream waits for this stream
        REQUIRE(cudaStreamCreateWithPriority(&blocking, cudaStreamDefault, 0) == cudaSuccess);
        standin::hold(blocking);
        CHECK(cudaMemsetAsync(from, 4, 64, blocking) == cudaSuccess);
        CHECK(cudaMemcpy(to, from, 64, cudaMemcpyDefault) == cudaSuccess);
        CHECK(after(10ms) == 3);
        standin::let_go(blocking);
        CHECK(after(1ms) == 4);
        CHECK(cudaStreamDestroy(blocking) == cudaSuccess);
        CHECK(cudaFree(to) == cudaSuccess);
        CHECK(cudaFree(from) == cudaSuccess);
    }
    (void)standin::take_findings();  // the finding that the test uses the default stream
}

TEST_CASE("a pool reserves in steps, and its limit is rounded up to them", "[cuda][standin]") {
    const standin::session gpu{{.memory = bytes{256 << 20}}};
    const auto s = make_stream();
    const auto pool = raw::make_pool(0, 1024);  // asks for 1 KiB, and gets 32 MiB
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
    CHECK(cudaStreamSynchronize(s) == cudaSuccess);  // the pool gives back memory above its threshold, which is 0
    CHECK(standin::used(0) == bytes{});
    CHECK(cudaMemPoolDestroy(pool) == cudaSuccess);
    raw::destroy(s);
}

TEST_CASE("memory freed in a stream can be had again there at once, and elsewhere once the free is done",
          "[cuda][standin]") {
    const standin::session gpu{{.memory = bytes{64 << 20}, .time = manual}};
    const auto s = make_stream(), t = make_stream();
    const auto pool = raw::make_pool(0, 32 << 20);
    int coupled = 0;  // otherwise the other stream would wait for this one, and get the block at once
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

// ---- access to memory, and contexts

TEST_CASE("memory of pools and virtual memory is for the devices that it is open to", "[cuda][standin]") {
    const standin::session gpu{{.memory = bytes{128 << 20}}};
    const auto drv = raw::load_driver();
    constexpr std::size_t size = 2 << 20;
    const auto near = make_stream(0), far = make_stream(1);
    const auto pool = raw::make_pool(0);
    void* pooled = nullptr;
    REQUIRE(cudaMallocFromPoolAsync(&pooled, size, pool, near) == cudaSuccess);
    const auto mapped = raw::map_block(drv, size);
    const auto there = reinterpret_cast<void*>(mapped.at);
    char host = 0;
    const auto copy = [&](int current, void* to, const void* from, cudaStream_t on) {
        REQUIRE(cudaSetDevice(current) == cudaSuccess);
        return cudaMemcpyAsync(to, from, 1, cudaMemcpyDefault, on);
    };
    for (void* const p : {pooled, there}) {
        CHECK(copy(0, p, &host, near) == cudaSuccess);
        CHECK(copy(1, p, &host, near) == cudaErrorInvalidValue);  // out of the current device's reach
        CHECK(copy(0, p, &host, far) == cudaErrorInvalidValue);
        CHECK(copy(0, &host, p, far) == cudaErrorInvalidValue);
        CHECK(cudaMemsetAsync(p, 1, 1, far) == cudaErrorInvalidValue);
    }
    const CUmemAccessDesc to_far{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1},
                                 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    cudaMemAccessDesc pool_to_far{};
    pool_to_far.location = {.type = cudaMemLocationTypeDevice, .id = 1};
    pool_to_far.flags = cudaMemAccessFlagsProtReadWrite;
    CHECK(drv.open(mapped.at, size, &to_far, 1) == CUDA_SUCCESS);
    CHECK(cudaMemPoolSetAccess(pool, &pool_to_far, 1) == cudaSuccess);
    for (void* const p : {pooled, there}) {
        CHECK(copy(1, p, &host, near) == cudaSuccess);
        CHECK(copy(1, &host, p, far) == cudaSuccess);
        CHECK(cudaMemsetAsync(p, 1, 1, far) == cudaSuccess);
    }
    for (const auto s : {near, far}) CHECK(cudaStreamSynchronize(s) == cudaSuccess);
    CHECK(cudaFreeAsync(pooled, near) == cudaSuccess);
    CHECK(cudaMemPoolDestroy(pool) == cudaSuccess);
    CHECK(drv.unmap(mapped.at, size) == CUDA_SUCCESS);
    CHECK(drv.release(mapped.block) == CUDA_SUCCESS);
    CHECK(drv.free_range(mapped.at, size) == CUDA_SUCCESS);
    raw::destroy(near, far);
}

TEST_CASE("copies between devices name them rightly, and open pools aren't copied that way", "[cuda][standin]") {
    const standin::session gpu{{.memory = bytes{128 << 20}}};
    const auto s = make_stream(0);
    void *here = nullptr, *there = nullptr;
    REQUIRE(cudaMalloc(&here, 100) == cudaSuccess);
    const auto pool = raw::make_pool(1);
    REQUIRE(cudaMallocFromPoolAsync(&there, 100, pool, s) == cudaSuccess);
    CHECK(cudaMemcpyPeerAsync(there, 0, here, 0, 100, s) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 1, 100, s) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, 100, s) == cudaSuccess);
    CHECK_THAT(standin::findings(), !Contains("cudaMemcpyPeerAsync"));
    cudaMemAccessDesc open{};
    open.location = {.type = cudaMemLocationTypeDevice, .id = 0};
    open.flags = cudaMemAccessFlagsProtReadWrite;
    CHECK(cudaMemPoolSetAccess(pool, &open, 1) == cudaSuccess);
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, 100, s) == cudaSuccess);
    CHECK_THAT(standin::findings(), Contains("memory that is open to another device"));
    CHECK(cudaFreeAsync(there, s) == cudaSuccess);
    CHECK(cudaFree(here) == cudaSuccess);
    CHECK(cudaMemPoolDestroy(pool) == cudaSuccess);
    raw::destroy(s);
    standin::take_findings();
}

TEST_CASE("the devices to which memory is opened are checked", "[cuda][standin]") {
    const bool peers = GENERATE(true, false);
    CAPTURE(peers);
    const standin::session gpu{{.peers = peers}};
    const auto drv = raw::load_driver();
    constexpr std::size_t size = 2 << 20;
    const auto pool = raw::make_pool(0);
    const auto open_pool = [&](std::vector<int> to, cudaMemAccessFlags flags = cudaMemAccessFlagsProtReadWrite) {
        std::vector<cudaMemAccessDesc> list(to.size());
        for (std::size_t i = 0; i < to.size(); ++i) {
            list[i].location = {.type = cudaMemLocationTypeDevice, .id = to[i]};
            list[i].flags = flags;
        }
        return cudaMemPoolSetAccess(pool, list.data(), list.size());
    };
    CHECK(open_pool({0}) == cudaSuccess);
    CHECK(open_pool({0, 1}) == (peers ? cudaSuccess : cudaErrorInvalidDevice));
    CHECK(open_pool({0, 0}) == cudaErrorInvalidValue);
    CHECK(open_pool({7}) == cudaErrorInvalidDevice);
    CHECK(open_pool({0}, cudaMemAccessFlagsProtNone) == cudaErrorInvalidDevice);
    CHECK(cudaMemPoolDestroy(pool) == cudaSuccess);

    const auto mapped = raw::map_block(drv, size);
    const auto open = [&](std::vector<int> to, CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        std::vector<CUmemAccessDesc> list(to.size());
        for (std::size_t i = 0; i < to.size(); ++i)
            list[i] = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = to[i]}, .flags = flags};
        return drv.open(mapped.at, size, list.data(), list.size());
    };
    CHECK(open({0, 1}) == (peers ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE));
    CHECK(open({}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(open({0, 0}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(open({0}, CU_MEM_ACCESS_FLAGS_PROT_READ) == CUDA_ERROR_INVALID_VALUE);
    CHECK(open({7}) == CUDA_ERROR_INVALID_DEVICE);
    CHECK(drv.unmap(mapped.at, size) == CUDA_SUCCESS);
    CHECK(drv.release(mapped.block) == CUDA_SUCCESS);
    CHECK(drv.free_range(mapped.at, size) == CUDA_SUCCESS);
}

TEST_CASE("memory of cudaMalloc is for the contexts whose peers have it", "[cuda][standin]") {
    const standin::session gpu;
    const auto drv = raw::load_driver();
    void* p = nullptr;
    REQUIRE(cudaMalloc(&p, 100) == cudaSuccess);  // of device 0
    const auto far = make_stream(1);
    char host = 0;
    CHECK(cudaMemsetAsync(p, 1, 1, far) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(p, &host, 1, cudaMemcpyDefault, far) == cudaSuccess);  // if need be, through the host
    CUcontext mine = nullptr;
    REQUIRE(drv.create_context(&mine, nullptr, 0, 1) == CUDA_SUCCESS);
    CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaSuccess);
    CHECK(cudaMemsetAsync(p, 1, 1, far) == cudaErrorInvalidValue);  // peer access was enabled in the other context
    CHECK(drv.destroy_context(mine) == CUDA_SUCCESS);
    CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaSuccess);
    CHECK(cudaMemsetAsync(p, 1, 1, far) == cudaSuccess);
    raw::destroy(far);
    CHECK(cudaFree(p) == cudaSuccess);
}

TEST_CASE("objects made in a context of cuCtxCreate belong to the context, and go with it", "[cuda][standin]") {
    const standin::session gpu;
    const auto drv = raw::load_driver();
    const auto s = make_stream();
    const auto e = make_event();
    CUcontext mine = nullptr;
    REQUIRE(drv.create_context(&mine, nullptr, 0, 0) == CUDA_SUCCESS);
    void *p = nullptr, *pinned = nullptr;
    CHECK(cudaMalloc(&p, 100) == cudaSuccess);
    CHECK(cudaHostAlloc(&pinned, 100, cudaHostAllocDefault) == cudaSuccess);
    cudaStream_t inside = nullptr;
    CHECK(cudaStreamCreateWithPriority(&inside, cudaStreamNonBlocking, 0) == cudaSuccess);
    CHECK(cudaEventRecord(e, inside) == cudaErrorInvalidResourceHandle);
    CHECK(standin::detail::launch(s, 1us, [] {}) == cudaErrorInvalidResourceHandle);
    CHECK(standin::detail::launch(inside, 1us, [] {}) == cudaSuccess);
    CHECK(cudaStreamSynchronize(inside) == cudaSuccess);
    raw::destroy(inside);
    CHECK(drv.destroy_context(mine) == CUDA_SUCCESS);
    CHECK(standin::detail::launch(s, 1us, [] {}) == cudaSuccess);
    CHECK(cudaFree(p) == cudaErrorInvalidValue);
    CHECK(cudaFreeHost(pinned) == cudaErrorInvalidValue);
    raw::destroy(s, e);
}

TEST_CASE("the driver's functions make no contexts", "[cuda][standin]") {
    const standin::session gpu;
    const auto drv = raw::load_driver();
    CUmemGenericAllocationHandle block = 0;
    const auto wanted = raw::device_memory(0);
    CUcontext now = nullptr;
    CHECK(drv.create(&block, 2 << 20, &wanted, 0) == CUDA_SUCCESS);
    CHECK(drv.release(block) == CUDA_SUCCESS);
    CHECK(drv.get_current(&now) == CUDA_SUCCESS);
    CHECK(now == nullptr);
    CUdevice which = 0;
    CHECK(drv.current_device(&which) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK_FALSE(standin::has_context(0));
    CHECK(cudaFree(nullptr) == cudaSuccess);  // a call of the runtime makes the context
    CHECK(standin::has_context(0));
    const auto e = make_event();
    auto elsewhere = CUDA_SUCCESS;
    std::thread([&] {
        float ms = 0;
        elsewhere = drv.elapsed_time(&ms, e, e);
    }).join();
    CHECK(elsewhere == CUDA_ERROR_INVALID_CONTEXT);
    raw::destroy(e);
}

TEST_CASE("memory for network cards is refused where the driver has none", "[cuda][standin]") {
    const standin::session gpu{{.rdma = false}};
    const auto drv = raw::load_driver();
    CUmemGenericAllocationHandle block = 0;
    auto wanted = raw::device_memory(0);
    wanted.allocFlags.gpuDirectRDMACapable = 1;
    CHECK(drv.create(&block, 2 << 20, &wanted, 0) == CUDA_ERROR_NOT_SUPPORTED);
}

TEST_CASE("cudaDeviceReset takes all that the device has, and leaves the others alone", "[cuda][standin]") {
    const standin::session gpu;
    const auto far = make_stream(1), near = make_stream(0);
    const auto e = make_event();
    void* p = nullptr;
    REQUIRE(cudaMalloc(&p, 100) == cudaSuccess);
    CHECK(cudaDeviceReset() == cudaSuccess);
    CHECK(standin::existing().streams == 1);
    CHECK(standin::existing().events == 0);
    CHECK(standin::existing().allocations == 0);
    CHECK(cudaStreamDestroy(near) == cudaErrorInvalidResourceHandle);  // the owner can't know of the reset: no finding
    CHECK(cudaEventDestroy(e) == cudaErrorInvalidResourceHandle);
    raw::destroy(far);
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
