// SPDX-License-Identifier: Apache-2.0
// Short forms of CUDA's own calls, for tests of the stand-in itself, and for calls that the library
// doesn't make.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <catch2/catch.hpp>

namespace raw {

/// Makes a stream on the device, which is current from then on.
inline cudaStream_t make_stream(int device = 0) {
    cudaStream_t s = nullptr;
    REQUIRE(cudaSetDevice(device) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, 0) == cudaSuccess);
    return s;
}

/// Makes an event on device 0, which is current from then on.
inline cudaEvent_t make_event() {
    cudaEvent_t e = nullptr;
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    REQUIRE(cudaEventCreateWithFlags(&e, cudaEventDefault) == cudaSuccess);
    return e;
}

inline void destroy(cudaStream_t s) { CHECK(cudaStreamDestroy(s) == cudaSuccess); }
inline void destroy(cudaEvent_t e) { CHECK(cudaEventDestroy(e) == cudaSuccess); }
template <class... More>
requires(sizeof...(More) > 1) void destroy(More... each) { (destroy(each), ...); }

inline cudaGraph_t end_capture(cudaStream_t s) {
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(s, &graph) == cudaSuccess);
    return graph;
}

inline cudaMemPool_t make_pool(int device, std::size_t limit = 0) {
    cudaMemPoolProps props{};
    props.allocType = cudaMemAllocationTypePinned;
    props.location = {.type = cudaMemLocationTypeDevice, .id = device};
    props.maxSize = limit;
    cudaMemPool_t pool = nullptr;
    REQUIRE(cudaMemPoolCreate(&pool, &props) == cudaSuccess);
    return pool;
}

inline std::uint64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr what) {
    std::uint64_t value = 0;
    CHECK(cudaMemPoolGetAttribute(pool, what, &value) == cudaSuccess);
    return value;
}

/// The driver functions that these tests call.
struct driver {
    decltype(&cuCtxPushCurrent) push = nullptr;
    decltype(&cuCtxSetCurrent) set_current = nullptr;
    decltype(&cuCtxGetCurrent) get_current = nullptr;
    decltype(&cuCtxGetDevice) current_device = nullptr;
    decltype(&cuEventElapsedTime) elapsed_time = nullptr;
    decltype(&cuCtxCreate) create_context = nullptr;
    decltype(&cuCtxDestroy) destroy_context = nullptr;
    decltype(&cuMemAddressReserve) reserve = nullptr;
    decltype(&cuMemAddressFree) free_range = nullptr;
    decltype(&cuMemCreate) create = nullptr;
    decltype(&cuMemRelease) release = nullptr;
    decltype(&cuMemMap) map = nullptr;
    decltype(&cuMemUnmap) unmap = nullptr;
    decltype(&cuMemSetAccess) open = nullptr;
    decltype(&cuDeviceGetDevResource) device_resource = nullptr;
    decltype(&cuDevSmResourceSplitByCount) split = nullptr;
    decltype(&cuDevResourceGenerateDesc) describe = nullptr;
    decltype(&cuGreenCtxCreate) create_green = nullptr;
    decltype(&cuGreenCtxDestroy) destroy_green = nullptr;
    decltype(&cuGreenCtxStreamCreate) green_stream = nullptr;
    decltype(&cuCtxFromGreenCtx) context_of = nullptr;
};

inline driver load_driver() {
    const auto load = [](const char* name, auto& f) {
        void* p = nullptr;
        cudaDriverEntryPointQueryResult status{};
        REQUIRE(cudaGetDriverEntryPointByVersion(name, &p, CUDA_VERSION, cudaEnableDefault, &status) == cudaSuccess);
        REQUIRE(status == cudaDriverEntryPointSuccess);
        f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(p);
    };
    driver d;
    load("cuCtxPushCurrent", d.push);
    load("cuCtxSetCurrent", d.set_current);
    load("cuCtxGetCurrent", d.get_current);
    load("cuCtxGetDevice", d.current_device);
    load("cuEventElapsedTime", d.elapsed_time);
    load("cuCtxCreate", d.create_context);
    load("cuCtxDestroy", d.destroy_context);
    load("cuMemAddressReserve", d.reserve);
    load("cuMemAddressFree", d.free_range);
    load("cuMemCreate", d.create);
    load("cuMemRelease", d.release);
    load("cuMemMap", d.map);
    load("cuMemUnmap", d.unmap);
    load("cuMemSetAccess", d.open);
    load("cuDeviceGetDevResource", d.device_resource);
    load("cuDevSmResourceSplitByCount", d.split);
    load("cuDevResourceGenerateDesc", d.describe);
    load("cuGreenCtxCreate", d.create_green);
    load("cuGreenCtxDestroy", d.destroy_green);
    load("cuGreenCtxStreamCreate", d.green_stream);
    load("cuCtxFromGreenCtx", d.context_of);
    return d;
}

inline CUmemAllocationProp device_memory(int device) {
    CUmemAllocationProp p{};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    return p;
}

/// A range of that size, mapped to its own block on device 0 and accessible to that device.
struct mapped_block {
    CUdeviceptr at = 0;
    CUmemGenericAllocationHandle block = 0;
};
inline mapped_block map_block(const driver& d, std::size_t size) {
    mapped_block m;
    const auto wanted = device_memory(0);
    const CUmemAccessDesc open{.location = wanted.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    REQUIRE(d.reserve(&m.at, size, 0, 0, 0) == CUDA_SUCCESS);
    REQUIRE(d.create(&m.block, size, &wanted, 0) == CUDA_SUCCESS);
    REQUIRE(d.map(m.at, size, 0, m.block, 0) == CUDA_SUCCESS);
    REQUIRE(d.open(m.at, size, &open, 1) == CUDA_SUCCESS);
    return m;
}

/// A green context of `sms` SMs of device 0.
inline CUgreenCtx make_green(const driver& d, unsigned sms) {
    CUdevResource all{}, part{};
    unsigned groups = 1;
    CUdevResourceDesc what = nullptr;
    CUgreenCtx green = nullptr;
    REQUIRE(d.device_resource(0, &all, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS);
    REQUIRE(d.split(&part, &groups, &all, nullptr, 0, sms) == CUDA_SUCCESS);
    REQUIRE(d.describe(&what, &part, 1) == CUDA_SUCCESS);
    REQUIRE(d.create_green(&green, what, 0, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS);
    return green;
}

}  // namespace raw
