// SPDX-License-Identifier: Apache-2.0
// The launches that a gate attributes to its clients: copies of each kind, per-thread default
// streams, and launches on other devices.
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
#include <gpushare/backend/cuda/detail/sync_call.hpp>
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

TEST_CASE("discarded and decompressed memory, and kernels of older functions, are read", "[cuda][launch_gate]") {
    std::size_t sizes[] = {100, 200};
    cuMemDiscardAndPrefetchBatchAsync_params pages{};
    pages.sizes = sizes;
    pages.count = 2;
    const auto discarded = read(CUPTI_DRIVER_TRACE_CBID_cuMemDiscardAndPrefetchBatchAsync_ptsz, pages);
    REQUIRE(discarded);
    CHECK(discarded->copies);
    CHECK(discarded->of_thread());
    CHECK(discarded->guess == ns{2000 + 512 / 25});

    CUmemDecompressParams packed[2] = {};
    packed[0].srcNumBytes = 100;
    packed[1].dstNumBytes = 200;
    cuMemBatchDecompressAsync_params some{};
    some.paramsArray = packed;
    some.count = 2;
    const auto unpacked = read(CUPTI_DRIVER_TRACE_CBID_cuMemBatchDecompressAsync, some);
    REQUIRE(unpacked);
    CHECK(unpacked->stream == CU_STREAM_LEGACY);
    CHECK(unpacked->guess == discarded->guess);
    CHECK_FALSE(unpacked->copies);

    auto* const f = reinterpret_cast<CUfunction>(16);
    auto* const s = reinterpret_cast<CUstream>(32);
    const auto grid = read(CUPTI_DRIVER_TRACE_CBID_cuLaunchGridAsync, cuLaunchGridAsync_params{f, 3, 4, s});
    REQUIRE(grid);
    CHECK(grid->stream == s);
    CHECK(grid->blocks == 12);
    CHECK(grid->code == f);
    CHECK(read(CUPTI_DRIVER_TRACE_CBID_cuLaunchGrid, cuLaunchGrid_params{f, 3, 4})->stream == CU_STREAM_LEGACY);
    CHECK(read(CUPTI_DRIVER_TRACE_CBID_cuLaunch, cuLaunch_params{f})->blocks == 1);

    CUDA_LAUNCH_PARAMS parts[2] = {};
    parts[0].function = f;
    parts[0].gridDimX = parts[0].gridDimY = parts[0].gridDimZ = 2;
    parts[0].hStream = s;
    cuLaunchCooperativeKernelMultiDevice_params together{parts, 2, 0};
    constexpr auto multi = CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernelMultiDevice;
    CHECK(read(multi, together)->stream == s);
    CHECK(read(multi, together)->blocks == 8);
    together.numDevices = 0;
    CHECK_FALSE(read(multi, together));
}

TEST_CASE("the driver, not the gate, refuses a call that lacks an argument", "[cuda][launch_gate][fault]") {
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, cuLaunchKernelEx_params{}));
    cuLaunchCooperativeKernelMultiDevice_params together{};
    together.numDevices = 2;
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernelMultiDevice, together));

    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_params{}));
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DAsync_v2_ptsz, cuMemcpy3DAsync_v2_params{}));
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_params{}));
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy2D_v2, cuMemcpy2D_v2_params{}));
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_params{}));
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3D_v2_ptds, cuMemcpy3D_v2_params{}));
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DPeer, cuMemcpy3DPeer_params{}));

    CUdeviceptr ends[] = {16};
    std::size_t sizes[] = {100};
    cuMemcpyBatchAsync_params batch{};
    batch.dsts = batch.srcs = ends;
    batch.sizes = sizes;
    batch.count = 1;
    const auto without = [&](auto member) {
        auto some = batch;
        some.*member = nullptr;
        return read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync, some);
    };
    CHECK(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyBatchAsync, batch));
    CHECK_FALSE(without(&cuMemcpyBatchAsync_params::dsts));
    CHECK_FALSE(without(&cuMemcpyBatchAsync_params::srcs));
    CHECK_FALSE(without(&cuMemcpyBatchAsync_params::sizes));
    cuMemcpy3DBatchAsync_params boxes{};
    boxes.numOps = 1;
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DBatchAsync, boxes));
    cuMemPrefetchBatchAsync_params pages{};
    pages.count = 1;
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemPrefetchBatchAsync, pages));
    cuMemBatchDecompressAsync_params packed{};
    packed.count = 1;
    CHECK_FALSE(read(CUPTI_DRIVER_TRACE_CBID_cuMemBatchDecompressAsync, packed));
    packed.count = 0;
    CHECK(read(CUPTI_DRIVER_TRACE_CBID_cuMemBatchDecompressAsync, packed));
}

// ---- synchronous copies and fills

namespace {

/// 64 bytes of the device's and of the host's, which is pinned.
struct both_sides {
    both_sides() {
        REQUIRE(cudaMalloc(&device, 64) == cudaSuccess);
        REQUIRE(cudaHostAlloc(&host, 64, 0) == cudaSuccess);
    }
    ~both_sides() {
        CHECK(cudaFree(device) == cudaSuccess);
        CHECK(cudaFreeHost(host) == cudaSuccess);
    }
    [[nodiscard]] cudaError_t move(bool fills) const {
        return fills ? cudaMemset(device, 7, 64) : cudaMemcpy(device, host, 64, cudaMemcpyDefault);
    }
    void *device = nullptr, *host = nullptr;
};

}  // namespace

TEST_CASE("a synchronous copy or fill waits as a kernel does, and counts once", "[cuda][launch_gate]") {
    const bool waits = GENERATE(true, false);
    const bool fills = GENERATE(true, false);
    const standin::session gpu{{.devices = 1}};
    {
        rig r{{.longest_hold = 1h}, waits ? in_streams : no_gaps};
        const both_sides memory;
        auto request = std::make_optional(r.gate->announce(r.urgent));
        auto engine = std::async(std::launch::async, [&] {
            const auto inside = r.gate->enter(r.batch);
            return memory.move(fills);
        });
        REQUIRE(eventually([&] { return r.gate->held() == 1; }));
        CHECK(standin::count(fills ? "cudaMemset" : "cudaMemcpy") == 0);
        {
            const auto inside = r.gate->enter(r.urgent);  // and isn't held itself
            CHECK(memory.move(fills) == cudaSuccess);
        }
        CHECK(r.gate->held() == 1);
        request.reset();
        CHECK(engine.get() == cudaSuccess);
        CHECK(r.gate->usage(r.batch).launches == 1);
        CHECK(r.gate->usage(r.batch).held == 1);
        CHECK(r.gate->usage(r.batch).device_time == 0ns);
        CHECK(r.gate->in_flight(r.batch) == 0ns);
        CHECK(r.gate->usage(r.urgent).launches == 1);
    }
    (void)standin::take_findings();  // that they use the default stream
}

TEST_CASE("a synchronous copy goes after the longest hold, and one that fails counts for nothing",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    {
        const both_sides memory;
        rig r{{.longest_hold = 20ms}};
        const auto request = r.gate->announce(r.urgent);
        const auto copy = [&] {
            return meanwhile([&] {
                const auto inside = r.gate->enter(r.batch);
                return memory.move(false);
            });
        };
        CHECK(copy() == cudaSuccess);
        const auto forced = r.gate->take_forced();
        REQUIRE(forced);
        CHECK(forced->client == r.batch.number());
        standin::inject({.call = "cudaMemcpy", .code = cudaErrorInvalidValue});
        CHECK(copy() == cudaErrorInvalidValue);
        CHECK(r.gate->usage(r.batch).launches == 1);
        CHECK(r.gate->in_flight(r.batch) == 0ns);
    }
    (void)standin::take_findings();
}

TEST_CASE("a request's synchronous copy comes through beside closed streams", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    {
        waiting_rig w;
        const both_sides memory;
        cudaStream_t blocking = nullptr;
        REQUIRE(cudaStreamCreateWithPriority(&blocking, cudaStreamDefault, 0) == cudaSuccess);
        auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
        {
            const auto inside = w.r.gate->enter(w.r.batch);
            CHECK(launch(blocking, conv, 100us, &w.ran) == cudaSuccess);
        }
        CHECK(meanwhile([&] {
                  const auto inside = w.r.gate->enter(w.r.urgent);
                  return memory.move(false);
              }) == cudaSuccess);
        CHECK(w.ran == 1);
        w.batch_launches(1);  // closed again
        standin::advance(1ms);
        CHECK(w.ran == 1);
        request.reset();
        standin::advance(1ms);
        CHECK(w.ran == 2);
        raw::destroy(blocking);
    }
    (void)standin::take_findings();
}

TEST_CASE("a lower client's launch waits while a request is inside a synchronous copy", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual, .synchronous_copy = 300us}};
    {
        rig r;
        const streams s;
        const both_sides memory;
        std::atomic<int> ran{0};
        auto urgent = std::async(std::launch::async, [&] {
            const auto inside = r.gate->enter(r.urgent);
            return memory.move(false);
        });
        REQUIRE(eventually([&] { return r.gate->in_flight(r.urgent) != 0ns; }));
        auto engine = std::async(std::launch::async, [&] {
            const auto inside = r.gate->enter(r.batch);
            return launch(s.batch, conv, 10us, &ran);
        });
        CHECK(eventually([&] { return r.gate->held() == 1; }));
        standin::advance(299us);
        CHECK(ran == 0);
        CHECK(urgent.wait_for(0s) != std::future_status::ready);
        CHECK(eventually([&] {
            standin::advance(10us);
            return ran == 1;
        }));
        CHECK(urgent.get() == cudaSuccess);
        CHECK(engine.get() == cudaSuccess);
    }
    (void)standin::take_findings();
}

TEST_CASE("each synchronous copy and fill is read, for both default streams", "[cuda][launch_gate]") {
    cuMemcpyHtoD_v2_params copy{};
    copy.ByteCount = 1 << 20;
    const auto whole = read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2, copy);
    REQUIRE(whole);
    CHECK(whole->stream == CU_STREAM_LEGACY);
    CHECK(whole->waits == cuda::detail::wait_reach::legacy);
    CHECK(whole->is_synchronous());
    CHECK(whole->guess == ns{2000 + (1 << 20) / 25});
    const auto of_thread = read(CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2_ptds, copy);
    REQUIRE(of_thread);
    CHECK(of_thread->of_thread());
    CHECK(of_thread->waits == cuda::detail::wait_reach::stream);
    CHECK(of_thread->key == whole->key);
    cuMemsetD32_v2_params fill{};
    fill.N = 1 << 18;
    CHECK(read(CUPTI_DRIVER_TRACE_CBID_cuMemsetD32_v2, fill)->guess == whole->guess);
    CUDA_MEMCPY3D box{};
    box.WidthInBytes = box.Height = 1 << 5;
    box.Depth = 1 << 10;
    CHECK(read(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3D_v2, cuMemcpy3D_v2_params{&box})->guess == whole->guess);
    CHECK(cuda::detail::reach_of(CUPTI_DRIVER_TRACE_CBID_cuMemsetD2D8_v2_ptds) == cuda::detail::wait_reach::stream);
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

TEST_CASE("the gate sees the end of all work in a thread's own stream, though the thread is gone",
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

TEST_CASE("a request that waits for its thread's own stream leaves other threads' streams closed",
          "[cuda][launch_gate][fault]") {
    const bool by_event = GENERATE(true, false);
    const standin::session gpu{stepped};
    {
        waiting_rig w;
        auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
        std::thread([&] {
            const auto inside = w.r.gate->enter(w.r.batch);
            CHECK(launch(cudaStreamPerThread, conv, 100us, &w.ran) == cudaSuccess);
        }).join();
        cudaEvent_t end = nullptr;
        REQUIRE(cudaEventCreateWithFlags(&end, cudaEventDisableTiming) == cudaSuccess);
        CHECK(meanwhile([&] {
                  const auto inside = w.r.gate->enter(w.r.urgent);
                  CHECK(launch(cudaStreamPerThread, gemm, 300us) == cudaSuccess);
                  CHECK(cudaEventRecord(end, cudaStreamPerThread) == cudaSuccess);
                  return by_event ? cudaEventSynchronize(end) : cudaStreamSynchronize(cudaStreamPerThread);
              }) == cudaSuccess);
        CHECK(w.ran == 0);
        request.reset();
        standin::advance(1ms);
        CHECK(w.ran == 1);
        CHECK(cudaEventDestroy(end) == cudaSuccess);
    }
    (void)standin::take_findings();  // that it uses such streams
}

// ---- other devices

TEST_CASE("a launch on another device passes, and counts for no client", "[cuda][launch_gate]") {
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
