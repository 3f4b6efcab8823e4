// SPDX-License-Identifier: Apache-2.0
// Which launches a gate takes for its clients': copies of each kind, streams that each thread has of
// its own, and launches on other devices.
#include <cuda.h>
#include <cupti.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"
#include "waiting_rig.hpp"

namespace launch_kinds_test {

using namespace launch_rig;

// ---- copies

namespace {

/// 64 bytes that are copied, filled or moved, each way that the runtime has.
struct transfers {
    explicit transfers(cudaStream_t stream) : s(stream) {
        REQUIRE(cudaMalloc(&to, 64) == cudaSuccess);
        REQUIRE(cudaMalloc(&from, 64) == cudaSuccess);
        REQUIRE(cudaMemsetAsync(from, 7, 64, s) == cudaSuccess);
    }
    ~transfers() {
        CHECK(cudaFree(to) == cudaSuccess);
        CHECK(cudaFree(from) == cudaSuccess);
    }
    [[nodiscard]] cudaError_t batch() const {
        void* const targets[] = {to, static_cast<char*>(to) + 32};
        const void* const sources[] = {from, static_cast<const char*>(from) + 32};
        const std::size_t sizes[] = {32, 32};
        cudaMemcpyAttributes how{};
        std::size_t first = 0;
        return cudaMemcpyBatchAsync(targets, sources, sizes, 2, &how, &first, 1, s);
    }
    [[nodiscard]] cudaError_t boxes() const {
        cudaMemcpy3DBatchOp one{};
        one.src.type = one.dst.type = cudaMemcpyOperandTypePointer;
        one.src.op.ptr.ptr = from;
        one.dst.op.ptr.ptr = to;
        one.extent = {4, 4, 4};
        return cudaMemcpy3DBatchAsync(1, &one, 0, s);
    }
    [[nodiscard]] cudaError_t box() const {
        cudaMemcpy3DParms p{};
        p.srcPtr = {from, 4, 4, 4};
        p.dstPtr = {to, 4, 4, 4};
        p.extent = {4, 4, 4};
        p.kind = cudaMemcpyDefault;
        return cudaMemcpy3DAsync(&p, s);
    }
    [[nodiscard]] cudaError_t box_of_peers() const {
        cudaMemcpy3DPeerParms p{};
        p.srcPtr = {from, 4, 4, 4};
        p.dstPtr = {to, 4, 4, 4};
        p.extent = {4, 4, 4};
        return cudaMemcpy3DPeerAsync(&p, s);
    }
    [[nodiscard]] cudaError_t rows() const { return cudaMemcpy2DAsync(to, 8, from, 8, 8, 8, cudaMemcpyDefault, s); }
    [[nodiscard]] cudaError_t fill() const { return cudaMemset2DAsync(to, 8, 7, 8, 8, s); }
    [[nodiscard]] cudaError_t pages() const {
        return cudaMemPrefetchAsync(from, 64, {.type = cudaMemLocationTypeDevice, .id = 0}, 0, s);
    }

    cudaStream_t s;
    void *to = nullptr, *from = nullptr;
};
using way = cudaError_t (transfers::*)() const;
constexpr way ways[] = {&transfers::batch, &transfers::boxes, &transfers::box,  &transfers::box_of_peers,
                        &transfers::rows,  &transfers::fill,  &transfers::pages};

/// What a callback of the driver's function tells.
template <class Parameters>
std::optional<cuda::detail::launch_call> read(CUpti_CallbackId id, const Parameters& p) {
    CUpti_CallbackData data{};
    data.functionParams = &p;
    return cuda::detail::read_launch(id, data);
}
std::vector<CUdeviceptr> addresses_of(const cuda::detail::launch_call& call) {
    std::vector<CUdeviceptr> all;
    CHECK_FALSE(call.any_address([&](CUdeviceptr p) {
        all.push_back(p);
        return false;
    }));
    return all;
}

}  // namespace

TEST_CASE("copies, fills and prefetches of each kind wait as kernels do", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1}};
    const std::size_t which = GENERATE(range(std::size_t{0}, std::size(ways)));
    CAPTURE(which);
    rig r;
    const streams s;
    const transfers all(s.batch);
    auto request = std::make_optional(r.gate->announce(r.urgent));
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        return (all.*ways[which])();
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    request.reset();
    CHECK(engine.get() == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
    CHECK(r.gate->usage(r.batch).launches == 1);
    if (ways[which] != &transfers::pages) CHECK(static_cast<const char*>(all.to)[63] == 7);
}

TEST_CASE("a copy is known by its size, and by where it may wait for the host's memory", "[cuda][launch_gate]") {
    CUdeviceptr to[] = {16, 32}, from[] = {64, 128};
    std::size_t sizes[] = {100, 200}, long_sizes[] = {1000, 2000};
    cuMemcpyBatchAsync_params batch{};
    batch.dsts = to;
    batch.srcs = from;
    batch.sizes = sizes;
    batch.count = 2;
    const auto first = read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync, batch);
    REQUIRE(first);
    CHECK(first->copies);
    CHECK(first->stream == CU_STREAM_LEGACY);
    CHECK(addresses_of(*first) == std::vector<CUdeviceptr>{16, 32, 64, 128});
    batch.sizes = long_sizes;
    CHECK(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync, batch)->guess > first->guess);

    cuMemcpyHtoAAsync_v2_params in{};
    in.srcHost = reinterpret_cast<const void*>(256);
    in.ByteCount = 64;
    const auto to_array = read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoAAsync_v2_ptsz, in);
    REQUIRE(to_array);
    CHECK(to_array->of_thread());
    CHECK(addresses_of(*to_array) == std::vector<CUdeviceptr>{256});
    cuMemcpyAtoHAsync_v2_params out{};
    out.dstHost = reinterpret_cast<void*>(512);
    CHECK(addresses_of(*read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyAtoHAsync_v2, out)) == std::vector<CUdeviceptr>{512});

    CUDA_MEMCPY2D rows{};
    rows.srcMemoryType = CU_MEMORYTYPE_HOST;
    rows.srcHost = reinterpret_cast<const void*>(1024);
    rows.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    const cuMemcpy2DAsync_v2_params two{&rows, nullptr};
    CHECK(addresses_of(*read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DAsync_v2, two)) == std::vector<CUdeviceptr>{1024});

    cuMemPrefetchBatchAsync_params pages{};
    pages.sizes = sizes;
    pages.count = 2;
    const auto moved = read(CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchBatchAsync, pages);
    REQUIRE(moved);
    CHECK(moved->guess == first->guess);
    CHECK(addresses_of(*moved).empty());
}

// ---- streams that each thread has of its own

TEST_CASE("threads of a client have a stream each under one handle", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    {
        rig r;
        const auto launches = [&](const char& kernel, ns length) {
            std::thread([&] {
                const auto inside = r.gate->enter(r.batch);
                CHECK(launch(cudaStreamPerThread, kernel, length) == cudaSuccess);
            }).join();
        };
        launches(conv, 100us);
        launches(gemm, 300us);  // beside the other one
        standin::advance(1ms);
        CHECK(r.gate->usage(r.batch).launches == 2);
        CHECK(r.gate->usage(r.batch).time == 400us);
    }
    (void)standin::take_findings();  // that it uses such streams
}

TEST_CASE("what a thread enqueues in its own stream is over, however much and where the thread is",
          "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    {
        const bool waits = GENERATE(true, false);
        rig r{{.longest_hold = 1h}, waits ? in_streams : no_gaps};
        std::thread([&] {
            const auto inside = r.gate->enter(r.urgent);
            for (int i = 0; i < 100; ++i) CHECK(launch(cudaStreamPerThread, gemm, 10us) == cudaSuccess);
        }).join();
        standin::advance(10ms);
        CHECK(r.gate->usage(r.urgent).launches == 100);
        CHECK(r.gate->usage(r.urgent).time == 1ms);
        CHECK(r.gate->in_flight(r.urgent) == 0ns);
    }
    (void)standin::take_findings();  // that it uses such streams
}

TEST_CASE("the end of a request in another thread waits for a thread's own stream", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    {
        waiting_rig w;
        auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
        std::thread([&] {
            const auto inside = w.r.gate->enter(w.r.urgent);
            CHECK(launch(cudaStreamPerThread, gemm, 300us) == cudaSuccess);
        }).join();
        request.reset();  // here that handle means a stream where nothing is
        w.batch_launches(1);
        standin::advance(299us);
        CHECK(w.ran == 0);
        standin::advance(1ms);
        CHECK(w.ran == 1);
    }
    (void)standin::take_findings();
}

// ---- other devices

TEST_CASE("a launch on another device passes, and counts for nobody", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 2, .time = manual}};
    {
        rig r;
        const cudaStream_t other = raw::make_stream(1);
        const bool is_default = GENERATE(true, false);
        const auto request = r.gate->announce(r.urgent);
        const auto inside = r.gate->enter(r.batch);
        for (int i = 0; i < 3; ++i)
            CHECK(launch(is_default ? cudaStreamLegacy : other, conv, 100us) == cudaSuccess);  // isn't held
        standin::advance(1ms);
        CHECK(r.gate->in_flight(r.batch) == 0ns);
        CHECK(r.gate->usage(r.batch).launches == 0);
        raw::destroy(other);
        CHECK(cudaSetDevice(0) == cudaSuccess);
    }
    (void)standin::take_findings();  // that it uses the default stream
}

TEST_CASE("of two scopes that one counts a launch whose gate has the device", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 2, .time = manual}};
    cuda::node node;
    gate_type here{node, first, gpushare::launch_gate({.longest_hold = 1h}), no_gaps};
    gate_type there{node, device_id{1}, gpushare::launch_gate({.longest_hold = 1h}), no_gaps};
    const auto one = here.add({}), two = there.add({});
    const cudaStream_t far = raw::make_stream(1), near = raw::make_stream(0);
    {
        const auto outer = here.enter(one);
        const auto inner = there.enter(two);
        CHECK(launch(near, conv, 100us) == cudaSuccess);
        CHECK(cudaSetDevice(1) == cudaSuccess);
        CHECK(launch(far, gemm, 300us) == cudaSuccess);
    }
    standin::advance(1ms);
    CHECK(here.usage(one).time == 100us);
    CHECK(there.usage(two).time == 300us);
    raw::destroy(far, near);
}

}  // namespace launch_kinds_test
