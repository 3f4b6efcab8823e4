// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// The adaptors that know CUDA streams by their handles, on the stand-in: frees by PyTorch and
// TensorRT, also on the default stream and during captures, and cuBLAS's workspace. Test functions
// replace the libraries' functions and keep their rules.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/interop/cublas.hpp>
#include <gpushare/interop/pytorch.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/interop/tensorrt.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::device_id;
using gpushare::errc;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

using node = gpushare::cuda::node;
using tenancy = gpushare::tenancy<node>;
using memory = gpushare::tenant_memory<node::memory_type, node::stream::point>;

template <class Memory>
std::uint64_t charged_in(Memory& m) {
    m.collect();
    return (m.capacity() - m.free()).count();
}

struct fixture {
    const standin::session gpu{{.devices = 2, .memory = 64_MiB}};
    node devices;
    tenancy shared{devices};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 16_MiB, .devices = 2, .compute = 50_pct});
    node::stream stream = devices.make_stream({0}), other = devices.make_stream({1});
    cudaStream_t handle = stream.native_handle();

    std::uint64_t charged(std::size_t part = 0) { return charged_in(chat.memory(part)); }
};

/// One device, after a reset with manual timing.
struct stepped {
    node devices;
    tenancy shared{devices};
    tenancy::tenant chat =
        shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct, .scrub = gpushare::scrub_policy::off});

    std::uint64_t charged() { return charged_in(chat.memory()); }
};

}  // namespace

/// TensorRT's names, as far as it matters here: its library needs a device.
namespace nvinfer1 {
namespace {

struct IGpuAsyncAllocator {
    virtual ~IGpuAsyncAllocator() = default;
    virtual void* allocateAsync(std::uint64_t, std::uint64_t, std::uint32_t, cudaStream_t) noexcept = 0;
    virtual bool deallocateAsync(void*, cudaStream_t) noexcept = 0;
};
struct IRuntime {
    void setGpuAllocator(IGpuAsyncAllocator* a) noexcept { allocator = a; }
    IGpuAsyncAllocator* allocator = nullptr;
};
/// An engine that needs 4 MiB while it runs, and counts.
struct IExecutionContext {
    bool enqueueV3(cudaStream_t s) noexcept {
        void* const scratch = runtime.allocator->allocateAsync(4 * MiB, 256, 0, s);
        if (scratch == nullptr) return false;
        devices.borrow(s).launch({}, [this](auto&) { ++calls; });
        return runtime.allocator->deallocateAsync(scratch, s);
    }
    const IRuntime& runtime;
    node& devices;
    int calls = 0;
};

}  // namespace
}  // namespace nvinfer1

TEST_CASE("PyTorch's frees on CUDA streams, its own and recorded ones", "[cuda][interop]") {
    fixture f;
    gpushare::pytorch_allocator<memory, node> torch{f.devices};
    torch.add(0, device_id{0}, f.chat.memory(0));
    torch.add(1, device_id{1}, f.chat.memory(1));

    void* const p = torch.allocate(6 * MiB, 0, f.handle);
    void* const q = torch.allocate(6 * MiB, 1, f.other.native_handle());
    standin::hold(f.handle);
    f.stream.launch({}, [](auto&) {});
    torch.deallocate(p, 6 * MiB, 0, f.handle);
    torch.record_stream(q, f.handle);
    torch.deallocate(q, 6 * MiB, 1, f.other.native_handle());
    CHECK(f.charged(0) == 6 * MiB);
    CHECK(f.charged(1) == 6 * MiB);
    CHECK_THROWS_AS(torch.allocate(3 * MiB, 0, f.handle), gpushare::memory_error);
    standin::let_go(f.handle);
    CHECK(f.stream.record().wait(gpushare::never));
    CHECK(f.charged(0) == 0);
    while (f.charged(1) != 0) std::this_thread::yield();
    CHECK(torch.unfreed() == 0);
}

TEST_CASE("PyTorch's default stream is that of the device, whichever is current", "[cuda][interop]") {
    standin::reset({.devices = 2, .memory = 64_MiB});
    {
        node devices;
        tenancy shared{devices};
        auto chat = shared.admit({.name = "chat",
                                  .memory = 16_MiB,
                                  .devices = 2,
                                  .compute = 50_pct,
                                  .scrub = gpushare::scrub_policy::off});  // no events of its own
        gpushare::pytorch_allocator<memory, node> torch{devices};
        torch.add(1, device_id{1}, chat.memory(1));
        REQUIRE(cudaSetDevice(0) == cudaSuccess);
        for (const cudaStream_t by_default : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
            void* const p = torch.allocate(MiB, 1, by_default);
            torch.deallocate(p, MiB, 1, by_default);
        }
        chat.memory(1).collect();
        CHECK(chat.memory(1).free() == 8_MiB);
        CHECK(torch.unfreed() == 0);
        int current = -1;
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK(current == 0);
        CHECK(standin::count("cudaEventRecord") == 2);
    }
    // The stand-in notes all that is done to a default stream. It was asked for captures, and got
    // an event, twice.
    const std::string found = standin::take_findings();
    CAPTURE(found);
    CHECK(found.find("cudaEventRecord on the default stream") != std::string::npos);
    CHECK(found.find("left behind") == std::string::npos);
}

TEST_CASE("a free by PyTorch that can't be ordered leaves the block charged, and counts", "[cuda][interop]") {
    fixture f;
    gpushare::pytorch_allocator<memory, node> torch{f.devices};
    torch.add(0, device_id{0}, f.chat.memory(0));
    void* const p = torch.allocate(2 * MiB, 0, f.handle);
    torch.deallocate(p, 2 * MiB, 0, cudaStreamPerThread);
    CHECK(torch.unfreed() == 1);
    CHECK(f.charged() == 2 * MiB);
    CHECK(f.chat.close().leaked_blocks == 1);
}

TEST_CASE("a free by PyTorch on a stream that is captured is kept until the graph is gone", "[cuda][interop]") {
    fixture f;
    gpushare::pytorch_allocator<memory, node> torch{f.devices};
    torch.add(0, device_id{0}, f.chat.memory(0));
    void* const p = torch.allocate(2 * MiB, 0, f.handle);
    const auto captured = raw::make_stream();
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    CHECK(torch.deallocate(p, 2 * MiB, 0, captured) == errc::none);  // whatever replays the graph uses it
    CHECK(torch.unfreed() == 0);
    CHECK(torch.captured() == 2_MiB);
    CHECK(f.charged() == 2 * MiB);
    const auto graph = raw::end_capture(captured);
    CHECK(torch.free_captured() == 0);
    CHECK(f.charged() == 2 * MiB);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    raw::destroy(captured);
    CHECK(torch.captured() == 0_B);
    CHECK(torch.free_captured() == 1);
    CHECK(torch.free_captured() == 0);
    CHECK(f.charged() == 0);
    CHECK(f.chat.close().leaked_blocks == 0);
}

TEST_CASE("memory of a graph is free once the graph, its executables and their launches are over", "[cuda][interop]") {
    fixture f;
    gpushare::tensorrt_allocator<nvinfer1::IGpuAsyncAllocator, memory, node> trt{f.chat.memory(), f.devices, {0}};
    gpushare::stream_resource ordered{f.chat.memory(), f.stream};
    const bool by_engine = GENERATE(true, false);
    CAPTURE(by_engine);
    for (int turn = 0; turn < 3; ++turn) {
        REQUIRE(cudaStreamBeginCapture(f.handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        void* const p = by_engine ? trt.allocateAsync(4 * MiB, 256, 0, f.handle) : ordered.allocate(4 * MiB);
        f.stream.launch({}, [](auto&) {});
        if (by_engine)
            CHECK(trt.deallocateAsync(p, f.handle));
        else
            CHECK(ordered.deallocate(p, 4 * MiB) == errc::none);
        const auto graph = raw::end_capture(f.handle);
        CHECK(f.charged() == 4 * MiB);
        cudaGraphExec_t run = nullptr;
        REQUIRE(cudaGraphInstantiate(&run, graph, 0) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        CHECK(f.charged() == 4 * MiB);
        standin::hold(f.handle);
        REQUIRE(cudaGraphLaunch(run, f.handle) == cudaSuccess);
        CHECK(cudaGraphExecDestroy(run) == cudaSuccess);
        CHECK(f.charged() == 4 * MiB);  // it runs on
        standin::let_go(f.handle);
        CHECK(f.stream.record().wait(gpushare::never));
        CHECK(f.charged() == 0);
    }
}

TEST_CASE("a graph's block is free only after the work that its stream had enqueued before the capture",
          "[cuda][interop]") {
    fixture f;
    gpushare::stream_resource ordered{f.chat.memory(), f.stream};
    void* const p = ordered.allocate(4 * MiB);
    standin::hold(f.handle);
    f.stream.launch({}, [](auto&) {});
    REQUIRE(cudaStreamBeginCapture(f.handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(ordered.deallocate(p, 4 * MiB) == errc::none);
    CHECK(f.charged() == 4 * MiB);
    CHECK(cudaGraphDestroy(raw::end_capture(f.handle)) == cudaSuccess);
    CHECK(f.charged() == 4 * MiB);
    standin::let_go(f.handle);
    while (f.charged() != 0) std::this_thread::yield();
}

TEST_CASE("an invalidated capture, or a driver that can't watch its graph, leaves the block charged",
          "[cuda][interop]") {
    fixture f;
    gpushare::stream_resource ordered{f.chat.memory(), f.stream};
    void* const p = ordered.allocate(MiB);
    REQUIRE(cudaStreamBeginCapture(f.handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    standin::inject({.call = "cudaUserObjectCreate", .code = cudaErrorInvalidValue});
    CHECK(ordered.deallocate(p, MiB) == errc::backend_failed);
    standin::inject({.call = "cudaGraphRetainUserObject", .code = cudaErrorInvalidValue});
    CHECK(ordered.deallocate(p, MiB) == errc::backend_failed);
    CHECK(standin::existing().user_objects == 0);
    (void)cudaStreamQuery(f.handle);  // forbidden, and CUDA ends the capture
    CHECK(ordered.deallocate(p, MiB) == errc::capturing);
    cudaGraph_t none = nullptr;
    CHECK(cudaStreamEndCapture(f.handle, &none) == cudaErrorStreamCaptureInvalidated);
    (void)standin::take_findings();  // which is the test's own doing; and everything is gone
}

TEST_CASE("PyTorch's recorded streams: the default one is a stream, and none is asked twice", "[cuda][interop]") {
    standin::reset({.devices = 1, .memory = 64_MiB, .time = standin::timing::manual});
    {
        stepped f;
        gpushare::pytorch_allocator<memory, node> torch{f.devices};
        torch.add(0, {0}, f.chat.memory());
        const auto own = raw::make_stream(), gone = raw::make_stream();
        void* const p = torch.allocate(6 * MiB, 0, own);
        (void)standin::detail::launch(nullptr, std::chrono::milliseconds(10), [] {});
        torch.record_stream(p, cudaStream_t{nullptr});
        torch.record_stream(p, gone);
        CHECK(torch.deallocate(p, 6 * MiB, 0, own) == errc::none);
        CHECK(f.charged() == 6 * MiB);
        void* const q = torch.allocate(6 * MiB, 0, own);
        CHECK(q != p);
        standin::advance(std::chrono::milliseconds(20));
        CHECK(f.charged() == 6 * MiB);
        raw::destroy(gone);

        // Whatever became of a free, the next block at that address has no streams of this one's.
        torch.record_stream(q, own);
        standin::inject({.call = "cudaEventRecord", .code = cudaErrorInvalidValue});
        CHECK(torch.deallocate(q, 6 * MiB, 0, own) == errc::backend_failed);
        CHECK(torch.unfreed() == 1);
        standin::forget_calls();
        CHECK(torch.deallocate(q, 6 * MiB, 0, cudaStreamLegacy) == errc::none);
        for (const auto& c : standin::calls()) CHECK(c.stream != own);
        CHECK(f.charged() == 0);
        raw::destroy(own);
    }
    const std::string found = standin::take_findings();  // it notes all that is done to a default stream
    CAPTURE(found);
    CHECK(found.find("left behind") == std::string::npos);
}

TEST_CASE("PyTorch's blocks wait for the streams that use them, and for no others", "[cuda][interop]") {
    fixture f;
    const auto streams = standin::existing().streams;
    gpushare::pytorch_allocator<memory, node> torch{f.devices};
    torch.add(0, device_id{0}, f.chat.memory(0));
    CHECK(standin::existing().streams == streams);  // it needs none of its own
    auto busy = f.devices.make_stream({0}), idle = f.devices.make_stream({0});
    void* const p = torch.allocate(2 * MiB, 0, f.handle);
    void* const q = torch.allocate(2 * MiB, 0, f.handle);
    standin::hold(busy.native_handle());
    busy.launch({}, [](auto&) {});
    torch.record_stream(p, busy.native_handle());
    torch.record_stream(q, idle.native_handle());
    CHECK(torch.deallocate(p, 2 * MiB, 0, f.handle) == errc::none);
    CHECK(torch.deallocate(q, 2 * MiB, 0, f.handle) == errc::none);
    CHECK(f.charged() == 2 * MiB);
    standin::let_go(busy.native_handle());
    CHECK(busy.record().wait(gpushare::never));
    CHECK(f.charged() == 0);
}

TEST_CASE("TensorRT's frees on CUDA streams", "[cuda][interop]") {
    fixture f;
    gpushare::tensorrt_allocator<nvinfer1::IGpuAsyncAllocator, memory, node> mine{f.chat.memory(), f.devices, {0}};
    nvinfer1::IGpuAsyncAllocator& trt = mine;
    void* const p = trt.allocateAsync(6 * MiB, 256, 0, f.handle);
    REQUIRE(p != nullptr);
    CHECK(trt.allocateAsync(3 * MiB, 256, 0, f.handle) == nullptr);
    CHECK_FALSE(trt.deallocateAsync(p, cudaStreamPerThread));
    standin::hold(f.handle);
    f.stream.launch({}, [](auto&) {});
    CHECK(trt.deallocateAsync(p, f.handle));  // a second try is no double free
    CHECK_FALSE(trt.deallocateAsync(p, f.handle));
    CHECK(f.charged() == 6 * MiB);
    standin::let_go(f.handle);
    CHECK(f.stream.record().wait(gpushare::never));
    CHECK(f.charged() == 0);
}

TEST_CASE("TensorRT's frees without a stream are in the order of the default one", "[cuda][interop]") {
    standin::reset({.devices = 1, .memory = 64_MiB, .time = standin::timing::manual});
    {
        stepped f;
        gpushare::tensorrt_allocator<nvinfer1::IGpuAsyncAllocator, memory, node> trt{f.chat.memory(), f.devices, {0}};
        for (const bool named : {true, false}) {
            CAPTURE(named);
            void* const p = trt.allocateAsync(2 * MiB, 256, 0, nullptr);
            (void)standin::detail::launch(nullptr, std::chrono::milliseconds(10), [] {});
            CHECK((named ? trt.deallocateAsync(p, nullptr) : trt.deallocate(p)));
            CHECK(f.charged() == 2 * MiB);
            standin::advance(std::chrono::milliseconds(20));
            CHECK(f.charged() == 0);
        }
    }
    const std::string found = standin::take_findings();  // it notes all that is done to a default stream
    CAPTURE(found);
    CHECK(found.find("left behind") == std::string::npos);
}

TEST_CASE("calls in the style of TensorRT are submissions, with scratch in their tenant's memory", "[cuda][interop]") {
    fixture f;
    auto& chat = f.chat;
    auto& node = f.devices;
    nvinfer1::IRuntime builtin, *runtime = &builtin;
    nvinfer1::IExecutionContext engine{*runtime, node}, *context = &engine;
    // docs/recipes.md has these lines.
    gpushare::tensorrt_allocator<nvinfer1::IGpuAsyncAllocator, memory, gpushare::cuda::node> mine{
        chat.memory(), node, {0}};
    runtime->setGpuAllocator(&mine);  // 1: before the engine is deserialised

    for (int call = 0; call < 3; ++call) {
        auto done = chat.submit([&](auto& stream) { context->enqueueV3(stream.native_handle()); });  // 2
        done.wait();
        CHECK(done.status() == errc::none);
    }
    CHECK(engine.calls == 3);
    CHECK(chat.usage().completed == 3);
    CHECK(chat.usage().allocations == 3);
    CHECK(f.charged() == 0);
    void* const nearly_all = chat.memory().allocate(6 * MiB);
    CHECK_FALSE(context->enqueueV3(f.handle));  // refused, and TensorRT says so
    chat.memory().deallocate(nearly_all, 6 * MiB);
}

TEST_CASE("temporary storage of a captured algorithm is the graph's until the graph is gone", "[cuda][interop]") {
    fixture f;
    const auto captured = raw::make_stream();
    auto borrowed = f.devices.borrow(captured);
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    const auto status = gpushare::with_temporary_storage(f.chat.memory(), borrowed, [](void*, std::size_t& size) {
        size = 1000;
        return cudaSuccess;
    });
    CHECK(status == cudaSuccess);
    CHECK(f.charged() == 1024);
    CHECK(cudaGraphDestroy(raw::end_capture(captured)) == cudaSuccess);
    raw::destroy(captured);
    CHECK(f.charged() == 0);
    CHECK(f.chat.close().leaked_blocks == 0);
}

#if __has_include(<cublas_v2.h>)

namespace {

/// What the functions in place of cuBLAS's did. A handle is a pointer to one.
struct fake_cublas {
    cudaStream_t stream = nullptr;
    void* workspace = nullptr;  // null: its own
    std::size_t size = 0;
    cublasStatus_t next = CUBLAS_STATUS_SUCCESS;  // of cublasSetWorkspace

    cublasHandle_t handle() { return reinterpret_cast<cublasHandle_t>(this); }
};
fake_cublas& behind(cublasHandle_t h) { return *reinterpret_cast<fake_cublas*>(h); }

}  // namespace

cublasStatus_t CUBLASWINAPI cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
    behind(h).stream = s;
    behind(h).workspace = nullptr;  // as cuBLAS does it
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasSetWorkspace_v2(cublasHandle_t h, void* p, std::size_t size) {
    if (behind(h).next != CUBLAS_STATUS_SUCCESS) return behind(h).next;
    if (reinterpret_cast<std::uintptr_t>(p) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    behind(h).workspace = p;
    behind(h).size = size;
    return CUBLAS_STATUS_SUCCESS;
}

TEST_CASE("cuBLAS's workspace is charged to the tenant for as long as the handle has it", "[cuda][interop]") {
    fixture f;
    fake_cublas blas;
    gpushare::stream_resource ordered{f.chat.memory(), f.stream};
    {
        gpushare::cublas_workspace mine{blas.handle(), f.handle, ordered, gpushare::cublas_workspace_size(8)};
        CHECK(blas.stream == f.handle);
        void* const given = blas.workspace;
        CHECK(given != nullptr);
        CHECK(blas.size == 4 * MiB);
        CHECK(f.charged() == 4 * MiB);

        cublasSetStream(blas.handle(), f.handle);
        CHECK(blas.workspace == nullptr);
        mine.restore();
        CHECK(blas.workspace == given);
        standin::hold(f.handle);
        f.stream.launch({}, [](auto&) {});
    }
    CHECK(blas.workspace == nullptr);
    CHECK(f.charged() == 4 * MiB);  // work on the stream still uses it
    standin::let_go(f.handle);
    CHECK(f.stream.record().wait(gpushare::never));
    CHECK(f.charged() == 0);
}

TEST_CASE("a workspace that can't be allocated, or that cuBLAS refuses, is charged to no tenant", "[cuda][interop]") {
    fixture f;
    fake_cublas blas;
    gpushare::stream_resource ordered{f.chat.memory(), f.stream};
    using workspace = gpushare::cublas_workspace<decltype(ordered)>;
    CHECK_THROWS_AS(workspace(blas.handle(), f.handle, ordered, gpushare::cublas_workspace_size(9)),
                    gpushare::memory_error);
    CHECK(blas.stream == nullptr);
    blas.next = CUBLAS_STATUS_NOT_INITIALIZED;
    try {
        const workspace mine(blas.handle(), f.handle, ordered, 1_MiB);
        FAIL("made");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::backend_failed);
        CHECK(std::string(e.what()) == "cublasSetWorkspace: status 1");
    }
    CHECK(f.charged() == 0);
    CHECK(gpushare::cublas_workspace_size(12) == 12_MiB);
    CHECK(gpushare::cublas_workspace_size(10) == 32_MiB);
}

#endif
