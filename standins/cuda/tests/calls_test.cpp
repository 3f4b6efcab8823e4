// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Tests of the stand-in for CUDA itself: streams, events, graphs and errors behave as modelled, and
// the stand-in finds each misuse that it should find.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/threads.hpp"

namespace standin_test {

using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using gpushare::bytes;
using raw::make_event;
using raw::make_stream;
using standin::ns;

namespace {

constexpr auto manual = standin::timing::manual;

/// Enqueues work of that length, which adds 1 to `*ran`.
void work(cudaStream_t s, ns length, int* ran = nullptr) {
    CHECK(standin::detail::launch(s, length, [ran] {
              if (ran != nullptr) ++*ran;
          }) == cudaSuccess);
}

}  // namespace

// ---- findings

TEST_CASE("every leftover is found", "[cuda][standin]") {
    standin::reset();
    SECTION("streams and events") {
        make_stream();
        make_event();
        CHECK(standin::take_findings() == "left behind: 1 streams\nleft behind: 1 events\n");
    }
    SECTION("memory of all kinds") {
        void *device = nullptr, *host = nullptr, *pooled = nullptr;
        const auto s = make_stream();
        CHECK(cudaMalloc(&device, 1000) == cudaSuccess);
        CHECK(cudaHostAlloc(&host, 1000, cudaHostAllocDefault) == cudaSuccess);
        const auto pool = raw::make_pool(0);
        CHECK(cudaMallocFromPoolAsync(&pooled, 1000, pool, s) == cudaSuccess);
        CHECK(cudaStreamDestroy(s) == cudaSuccess);
        CHECK(standin::take_findings() ==
              "left behind: 1 memory pools\nleft behind: 2 allocations\nleft behind: 1 host allocations\n");
    }
    SECTION("graphs, and a capture that nobody ended") {
        const auto s = make_stream(), t = make_stream();
        CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
        CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        CHECK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK(standin::take_findings() ==
              "left behind: 2 streams\nleft behind: 1 graphs\nleft behind: 1 executable graphs\n"
              "left behind: 1 captures\n");
    }
    SECTION("virtual memory") {
        const auto drv = raw::load_driver();
        const auto page = std::size_t{2} << 20;
        CUdeviceptr at = 0;
        CUmemGenericAllocationHandle block = 0;
        CHECK(drv.reserve(&at, 2 * page, 0, 0, 0) == CUDA_SUCCESS);
        const auto wanted = raw::device_memory(0);
        CHECK(drv.create(&block, page, &wanted, 0) == CUDA_SUCCESS);
        CHECK(drv.map(at, page, 0, block, 0) == CUDA_SUCCESS);
        CHECK(standin::take_findings() ==
              "left behind: 1 address ranges\nleft behind: 1 physical blocks\nleft behind: 1 mappings\n");
    }
    SECTION("green contexts, and contexts that were pushed and not popped") {
        const auto drv = raw::load_driver();
        const auto green = raw::make_green(drv, 8);
        CUcontext context = nullptr;
        CHECK(drv.context_of(&context, green) == CUDA_SUCCESS);
        CHECK(drv.push(context) == CUDA_SUCCESS);
        CHECK(standin::take_findings() ==
              "left behind: 1 green contexts\nleft behind: 1 contexts pushed and not popped\n");
    }
    CHECK(standin::findings() == "");
}

TEST_CASE("a program that leaks, and doesn't look, fails at its end", "[cuda][standin]") {
    const auto exit_status = [](bool leak, bool then_reset) {
        const pid_t child = ::fork();
        if (child == 0) {
            (void)::freopen("/dev/null", "w", stderr);
            standin::reset();
            if (leak) make_event();
            if (then_reset) standin::reset();
            std::exit(EXIT_SUCCESS);
        }
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        return WEXITSTATUS(status);
    };
    CHECK(exit_status(true, false) == EXIT_FAILURE);
    CHECK(exit_status(true, true) == EXIT_FAILURE);
    CHECK(exit_status(false, true) == EXIT_SUCCESS);
}

TEST_CASE("a child of fork() is refused while a thread of its parent is inside a call", "[cuda][standin]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    const auto s = make_stream();
    std::atomic<bool> inside{false}, forked{false};
    CHECK(standin::detail::launch(s, 0ns, [&] {  // runs under the mutex of all calls
              inside = true;
              while (!forked) std::this_thread::yield();
          }) == cudaSuccess);
    std::thread caller([&] { (void)cudaStreamSynchronize(s); });
    while (!inside) std::this_thread::yield();
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(300);
        ::_exit(cudaStreamQuery(s) == cudaErrorInitializationError ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    forked = true;
    caller.join();
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS));
    CHECK(cudaStreamDestroy(s) == cudaSuccess);
}

TEST_CASE("every use of the default stream is found", "[cuda][standin]") {
    standin::reset();
    const auto e = make_event();
    SECTION("null") {
        CHECK(cudaEventRecord(e, nullptr) == cudaSuccess);
        CHECK_THAT(standin::findings(), Contains("cudaEventRecord on the default stream"));
    }
    SECTION("legacy") {
        CHECK(cudaStreamSynchronize(cudaStreamLegacy) == cudaSuccess);
        CHECK_THAT(standin::findings(), Contains("cudaStreamSynchronize on the default stream"));
    }
    SECTION("per thread") {
        char x = 0;
        CHECK(cudaMemsetAsync(&x, 1, 1, cudaStreamPerThread) == cudaSuccess);
        CHECK_THAT(standin::findings(), Contains("cudaMemsetAsync on the default stream"));
    }
    SECTION("a stream that synchronises with it") {
        cudaStream_t s = nullptr;
        CHECK(cudaStreamCreateWithPriority(&s, cudaStreamDefault, 0) == cudaSuccess);
        CHECK_THAT(standin::findings(), Contains("synchronises with the default stream"));
    }
    standin::take_findings();
}

TEST_CASE("misuse that CUDA leaves undefined is found", "[cuda][standin]") {
    standin::reset();
    SECTION("unmapping under queued work") {
        const auto drv = raw::load_driver();
        const auto page = std::size_t{2} << 20;
        const auto mapped = raw::map_block(drv, page);
        const auto s = make_stream();
        standin::hold(s);
        CHECK(cudaMemsetAsync(reinterpret_cast<void*>(mapped.at), 1, 100, s) == cudaSuccess);
        CHECK(drv.unmap(mapped.at, page) == CUDA_SUCCESS);
        CHECK_THAT(standin::findings(), Contains("cuMemUnmap of addresses that queued work uses"));
    }
    SECTION("unmapping under a copy from there") {
        const auto drv = raw::load_driver();
        const auto page = std::size_t{2} << 20;
        const auto mapped = raw::map_block(drv, page);
        const auto s = make_stream();
        char to = 0;
        standin::hold(s);
        CHECK(cudaMemcpyAsync(&to, reinterpret_cast<void*>(mapped.at), 1, cudaMemcpyDefault, s) == cudaSuccess);
        CHECK(drv.unmap(mapped.at, page) == CUDA_SUCCESS);
        CHECK_THAT(standin::findings(), Contains("cuMemUnmap of addresses that queued work uses"));
    }
    SECTION("unmapping under a kernel whose arguments point there") {
        const auto drv = raw::load_driver();
        const auto page = std::size_t{2} << 20;
        const auto mapped = raw::map_block(drv, page), other = raw::map_block(drv, page);
        const auto s = make_stream();
        standin::hold(s);
        CHECK(standin::detail::launch(s, nullptr, false, 1us, [] {}, {mapped.at + 100}) == cudaSuccess);
        CHECK(drv.unmap(other.at, page) == CUDA_SUCCESS);
        CHECK_THAT(standin::findings(), !Contains("cuMemUnmap"));
        CHECK(drv.unmap(mapped.at, page) == CUDA_SUCCESS);
        CHECK_THAT(standin::findings(), Contains("cuMemUnmap of addresses that queued work uses"));
    }
    SECTION("handles of what was destroyed") {
        const auto s = make_stream();
        const auto e = make_event();
        raw::destroy(s, e);
        CHECK(cudaStreamDestroy(s) == cudaErrorInvalidResourceHandle);
        CHECK_THAT(standin::findings(), Contains("cudaStreamDestroy of something that was destroyed"));
        CHECK(cudaEventQuery(e) == cudaErrorInvalidResourceHandle);
        CHECK_THAT(standin::findings(), Contains("cudaEventQuery of something that was destroyed"));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, e, e) == cudaErrorInvalidResourceHandle);
        CHECK_THAT(standin::findings(), Contains("cudaEventElapsedTime of something that was destroyed"));
    }
    SECTION("graphs that were destroyed") {
        const auto s = make_stream();
        CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        const auto graph = raw::end_capture(s);
        cudaGraphExec_t run = nullptr;
        CHECK(cudaGraphInstantiate(&run, graph, 0) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        CHECK(cudaGraphExecDestroy(run) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaErrorInvalidValue);
        CHECK_THAT(standin::findings(), Contains("cudaGraphDestroy of something that was destroyed"));
        CHECK(cudaGraphExecDestroy(run) == cudaErrorInvalidValue);
        CHECK_THAT(standin::findings(), Contains("cudaGraphExecDestroy of something that was destroyed"));
        raw::destroy(s);
    }
    SECTION("a green context that goes before its streams") {
        const auto drv = raw::load_driver();
        const auto green = raw::make_green(drv, 8);
        CUstream s = nullptr;
        CHECK(drv.green_stream(&s, green, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
        CHECK(drv.destroy_green(green) == CUDA_SUCCESS);
        CHECK_THAT(standin::findings(), Contains("destroyed before its streams"));
    }
    standin::take_findings();
}

// ---- streams, events, time

TEST_CASE("work of a stream runs in its order, and takes its length", "[cuda][standin]") {
    const standin::session gpu{{.time = manual}};
    const auto s = make_stream();
    const auto a = make_event(), b = make_event();
    int ran = 0;
    CHECK(cudaEventRecord(a, s) == cudaSuccess);
    CHECK(cudaEventQuery(a) == cudaSuccess);  // on an idle stream it is reached at once
    work(s, 3ms, &ran);
    work(s, 4ms, &ran);
    CHECK(cudaEventRecord(b, s) == cudaSuccess);
    standin::advance(2999us);
    CHECK(ran == 0);
    standin::advance(1us);
    CHECK(ran == 1);
    CHECK(cudaStreamQuery(s) == cudaErrorNotReady);
    float took = 0;
    CHECK(cudaEventElapsedTime(&took, a, b) == cudaErrorNotReady);
    standin::advance(10ms);
    CHECK(ran == 2);
    CHECK(cudaEventElapsedTime(&took, a, b) == cudaSuccess);
    CHECK(took == 7.0F);  // the end of the work counts, not the time of a query
    CHECK(cudaEventElapsedTime(&took, b, a) == cudaSuccess);
    CHECK(took == -7.0F);
    CHECK(cudaStreamQuery(s) == cudaSuccess);
    raw::destroy(s, a, b);
}

TEST_CASE("a stream waits for an event of another one, as it was recorded at that moment", "[cuda][standin]") {
    const standin::session gpu{{.time = manual}};
    const auto s = make_stream(), t = make_stream(1);
    const auto e = make_event();
    int ran = 0;
    work(s, 5ms);
    CHECK(cudaEventRecord(e, s) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(t, e, 0) == cudaSuccess);
    CHECK(cudaEventRecord(e, s) == cudaSuccess);  // a later recording doesn't matter
    standin::hold(s);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    work(t, 1ms, &ran);
    standin::advance(20ms);
    CHECK(ran == 0);
    standin::let_go(s);
    standin::advance(5999us);
    CHECK(ran == 0);
    standin::advance(1us);
    CHECK(ran == 1);
    raw::destroy(s, t, e);
}

TEST_CASE("work outlives its stream, and whoever synchronises waits", "[cuda][standin]") {
    const standin::session gpu;
    int ran = 0;
    const auto e = make_event();
    auto s = make_stream();
    work(s, 2ms, &ran);
    CHECK(cudaEventRecord(e, s) == cudaSuccess);
    CHECK(cudaStreamDestroy(s) == cudaSuccess);
    CHECK(cudaEventSynchronize(e) == cudaSuccess);
    CHECK(ran == 1);

    s = make_stream();
    standin::hold(s);
    work(s, 1ms, &ran);
    std::jthread later([&] {
        std::this_thread::sleep_for(2ms);
        standin::let_go(s);
    });
    CHECK(cudaStreamSynchronize(s) == cudaSuccess);
    CHECK(ran == 2);
    raw::destroy(s, e);
}

TEST_CASE("handles are checked", "[cuda][standin]") {
    const standin::session gpu;
    const auto s = make_stream(), other = make_stream(1);
    const auto e = make_event();
    cudaEvent_t untimed = nullptr;
    CHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming) == cudaSuccess);
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, e, e) == cudaErrorInvalidResourceHandle);  // never recorded
    CHECK(cudaEventRecord(e, other) == cudaErrorInvalidResourceHandle);        // another device's
    CHECK(cudaEventRecord(e, s) == cudaSuccess);
    CHECK(cudaEventRecord(untimed, s) == cudaSuccess);
    CHECK(cudaEventElapsedTime(&ms, e, untimed) == cudaErrorInvalidResourceHandle);
    raw::destroy(s, other, e, untimed);
}

TEST_CASE("threads call at once", "[cuda][standin]") {
    const standin::session gpu;
    std::atomic<int> ran{0}, failed{0};
    support::together(3, [&](unsigned rank) {
        cudaStream_t s = nullptr;
        cudaEvent_t e = nullptr;
        bool good = cudaSetDevice(static_cast<int>(rank % 2)) == cudaSuccess &&
                    cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, 0) == cudaSuccess &&
                    cudaEventCreateWithFlags(&e, 0) == cudaSuccess;
        for (int i = 0; i < 500; ++i) {
            void* p = nullptr;
            good &= cudaMallocAsync(&p, 4096, s) == cudaSuccess;
            good &= standin::detail::launch(s, 1us, [&ran] { ++ran; }) == cudaSuccess;
            good &= cudaFreeAsync(p, s) == cudaSuccess && cudaEventRecord(e, s) == cudaSuccess;
            good &= cudaEventSynchronize(e) == cudaSuccess;
        }
        good &= cudaStreamDestroy(s) == cudaSuccess && cudaEventDestroy(e) == cudaSuccess;
        failed += good ? 0 : 1;
    });
    CHECK(ran == 1500);
    CHECK(failed == 0);
}

// ---- capture

TEST_CASE("captured work runs at each launch of the graph, and not before", "[cuda][standin]") {
    const standin::session gpu{{.time = manual}};
    const auto s = make_stream(), t = make_stream();
    const auto fork = make_event(), join = make_event();
    std::string order;
    const auto note = [&order](cudaStream_t on, char what) {
        CHECK(standin::detail::launch(on, 1ms, [&order, what] { order += what; }) == cudaSuccess);
    };
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    note(s, 'a');
    CHECK(cudaEventRecord(fork, s) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(t, fork, 0) == cudaSuccess);
    note(t, 'b');
    CHECK(cudaEventRecord(join, t) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(s, join, 0) == cudaSuccess);
    note(s, 'c');
    cudaStreamCaptureStatus status{};
    CHECK(cudaStreamIsCapturing(t, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusActive);
    const auto graph = raw::end_capture(s);
    CHECK(cudaStreamIsCapturing(t, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusNone);
    std::size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess);
    CHECK(nodes == 3);

    cudaGraphExec_t exec = nullptr;
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    standin::advance(10ms);
    CHECK(order.empty());
    CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, t) == cudaSuccess);  // launches of one graph don't overlap
    standin::advance(3ms);
    CHECK(order == "abc");
    standin::advance(3ms);
    CHECK(order == "abcabc");

    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    for (const char c : {'x', 'y', 'z'}) note(s, c);
    const auto other = raw::end_capture(s);
    cudaGraphExecUpdateResultInfo why{};
    CHECK(cudaGraphExecUpdate(exec, other, &why) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
    standin::advance(3ms);
    CHECK(order == "abcabcxyz");
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    const auto nothing = raw::end_capture(s);
    CHECK(cudaGraphExecUpdate(exec, nothing, &why) == cudaErrorGraphExecUpdateFailure);
    CHECK(why.result == cudaGraphExecUpdateErrorTopologyChanged);
    // An update can't move the nodes to another device either.
    const auto far = make_stream(1);
    CHECK(cudaStreamBeginCapture(far, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    for (const char c : {'x', 'y', 'z'}) note(far, c);
    const auto foreign = raw::end_capture(far);
    CHECK(cudaGraphExecUpdate(exec, foreign, &why) == cudaErrorGraphExecUpdateFailure);
    raw::destroy(far);

    for (const auto g : {graph, other, nothing, foreign}) CHECK(cudaGraphDestroy(g) == cudaSuccess);
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    raw::destroy(s, t, fork, join);
}

TEST_CASE("both modes decide which threads a capture forbids unsafe calls", "[cuda][standin]") {
    struct row {
        cudaStreamCaptureMode captured, thread;
        bool same_thread, forbidden;
    };
    constexpr auto global = cudaStreamCaptureModeGlobal, local = cudaStreamCaptureModeThreadLocal,
                   relaxed = cudaStreamCaptureModeRelaxed;
    const auto [captured, thread, same_thread, forbidden] = GENERATE_COPY(values<row>({
        {global, global, true, true},
        {global, local, true, true},
        {global, relaxed, true, false},
        {local, global, true, true},
        {local, relaxed, true, false},
        {relaxed, global, true, false},
        {global, global, false, true},
        {global, local, false, false},
        {global, relaxed, false, false},
        {local, global, false, false},
        {relaxed, global, false, false},
    }));
    CAPTURE(captured, thread, same_thread);
    standin::reset();
    const auto s = make_stream();
    const auto e = make_event();
    CHECK(cudaStreamBeginCapture(s, captured) == cudaSuccess);
    cudaError_t answer{}, malloc_answer{};
    auto ask = [&, mode = thread]() mutable {
        cudaThreadExchangeStreamCaptureMode(&mode);
        answer = cudaEventQuery(e);
        void* p = nullptr;
        malloc_answer = cudaMalloc(&p, 1);
        if (malloc_answer == cudaSuccess) cudaFree(p);
        cudaThreadExchangeStreamCaptureMode(&mode);
    };
    if (same_thread)
        ask();
    else
        std::thread{ask}.join();
    CHECK(answer == (forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess));
    CHECK(malloc_answer == answer);
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(s, &graph) == (forbidden ? cudaErrorStreamCaptureInvalidated : cudaSuccess));
    if (graph != nullptr) CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    raw::destroy(s, e);
    const auto found = standin::take_findings();
    CHECK(found.empty() != forbidden);
    if (forbidden) CHECK_THAT(found, Contains("cudaEventQuery isn't allowed during a stream capture"));
}

TEST_CASE("a capture that is used wrongly is found, and ends with an error", "[cuda][standin]") {
    standin::reset();
    const auto s = make_stream(), t = make_stream();
    const auto e = make_event(), outside = make_event();
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    cudaGraph_t graph = nullptr;
    auto ends_with = cudaErrorStreamCaptureInvalidated;
    bool found = true;
    SECTION("the stream is asked") { CHECK(cudaStreamQuery(s) == cudaErrorStreamCaptureUnsupported); }
    SECTION("the stream is waited for") { CHECK(cudaStreamSynchronize(s) == cudaErrorStreamCaptureUnsupported); }
    SECTION("an event that was recorded in it is asked") {
        CHECK(cudaEventRecord(e, s) == cudaSuccess);
        CHECK(cudaEventQuery(e) == cudaErrorCapturedEvent);
    }
    SECTION("a block that isn't the graph's is freed in it") {
        void *before = nullptr, *within = nullptr;
        CHECK(cudaMallocAsync(&before, 100, t) == cudaSuccess);
        CHECK(cudaMallocAsync(&within, 100, s) == cudaSuccess);
        CHECK(cudaFreeAsync(within, s) == cudaSuccess);
        CHECK(standin::findings().find("cudaFreeAsync") == std::string::npos);
        CHECK(cudaFreeAsync(before, s) == cudaErrorInvalidValue);
        CHECK(cudaFreeAsync(before, t) == cudaSuccess);
    }
    SECTION("the default stream is used beside a stream that waits for it") {
        cudaStream_t blocking = nullptr;
        REQUIRE(cudaStreamCreateWithPriority(&blocking, cudaStreamDefault, 0) == cudaSuccess);
        REQUIRE(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        auto status = cudaStreamCaptureStatusNone;
        CHECK(cudaStreamIsCapturing(nullptr, &status) == cudaErrorStreamCaptureImplicit);
        CHECK(cudaStreamIsCapturing(blocking, &status) == cudaSuccess);
        CHECK(status == cudaStreamCaptureStatusActive);  // the query doesn't invalidate the capture
        CHECK(cudaEventRecord(e, nullptr) == cudaErrorStreamCaptureImplicit);
        CHECK(cudaStreamEndCapture(blocking, &graph) == cudaErrorStreamCaptureInvalidated);
        CHECK(cudaStreamQuery(s) == cudaErrorStreamCaptureUnsupported);
        raw::destroy(blocking);
    }
    SECTION("an event from outside is waited for") {
        standin::hold(t);
        work(t, 1us);
        CHECK(cudaEventRecord(outside, t) == cudaSuccess);
        CHECK(cudaStreamWaitEvent(s, outside, 0) == cudaErrorStreamCaptureIsolation);
    }
    SECTION("two captures meet") {
        CHECK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK(cudaEventRecord(e, t) == cudaSuccess);
        CHECK(cudaStreamWaitEvent(s, e, 0) == cudaErrorStreamCaptureMerge);
        CHECK(cudaStreamEndCapture(t, &graph) == cudaErrorStreamCaptureInvalidated);
    }
    SECTION("a stream that joined never came back") {
        CHECK(cudaEventRecord(e, s) == cudaSuccess);
        CHECK(cudaStreamWaitEvent(t, e, 0) == cudaSuccess);
        CHECK(cudaStreamEndCapture(t, &graph) == cudaErrorStreamCaptureUnmatched);
        ends_with = cudaErrorStreamCaptureUnjoined;
        found = false;
    }
    CHECK(cudaStreamEndCapture(s, &graph) == ends_with);
    CHECK(graph == nullptr);
    raw::destroy(s, t, e, outside);
    CHECK(standin::take_findings().empty() != found);
}

// ---- errors

TEST_CASE("faults strike the calls that they are meant for", "[cuda][standin]") {
    const standin::session gpu;
    standin::inject({.call = "cudaMalloc", .code = cudaErrorMemoryAllocation, .skip = 1, .times = 2});
    void* p = nullptr;
    std::vector<cudaError_t> results;
    for (int i = 0; i < 4; ++i) {
        results.push_back(cudaMalloc(&p, 100));
        if (results.back() == cudaSuccess) CHECK(cudaFree(p) == cudaSuccess);
    }
    CHECK(results == std::vector{cudaSuccess, cudaErrorMemoryAllocation, cudaErrorMemoryAllocation, cudaSuccess});
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(standin::count("cudaMalloc") == 4);
}

TEST_CASE("an illegal access sticks to its device, or to the process", "[cuda][standin]") {
    const bool whole = GENERATE(false, true);
    const standin::session gpu{{.scope = whole ? standin::poison_scope::process : standin::poison_scope::device}};
    const auto t = make_stream(1), s = make_stream();
    const auto before = make_event(), after = make_event();
    void* p = nullptr;
    CHECK(cudaMalloc(&p, 100) == cudaSuccess);
    CHECK(cudaEventRecord(before, s) == cudaSuccess);
    standin::hold(s);
    CHECK(standin::detail::launch(s, 1us, [] { throw std::runtime_error("illegal access"); }) == cudaSuccess);
    CHECK(cudaEventRecord(after, s) == cudaSuccess);
    standin::let_go(s);
    CHECK(cudaStreamSynchronize(s) == cudaErrorIllegalAddress);
    CHECK(cudaEventQuery(before) == cudaErrorIllegalAddress);
    CHECK(cudaEventQuery(after) == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);  // stays
    void* q = nullptr;
    CHECK(cudaMalloc(&q, 1) == cudaErrorIllegalAddress);
    CHECK(cudaStreamQuery(t) == (whole ? cudaErrorIllegalAddress : cudaSuccess));
    int n = 0;
    CHECK(cudaGetDeviceCount(&n) == cudaSuccess);

    // Nothing can be freed any more, but a program that tries counts as having freed the objects.
    CHECK(cudaFree(p) == cudaErrorIllegalAddress);
    CHECK(cudaStreamDestroy(s) == cudaErrorIllegalAddress);
    CHECK(cudaEventDestroy(before) == cudaErrorIllegalAddress);
    CHECK(cudaEventDestroy(after) == cudaErrorIllegalAddress);
    CHECK(cudaStreamDestroy(t) == (whole ? cudaErrorIllegalAddress : cudaSuccess));
}

TEST_CASE("without a driver or a device, every call says so", "[cuda][standin]") {
    const bool driver = GENERATE(false, true);
    const standin::session gpu{{.devices = 0, .driver_version = driver ? 13000 : 0}};
    const auto expected = driver ? cudaErrorNoDevice : cudaErrorInsufficientDriver;
    int n = -1;
    CHECK(cudaGetDeviceCount(&n) == expected);
    CHECK(n == 0);
    void* p = nullptr;
    CHECK(cudaMalloc(&p, 1) == expected);
    CHECK(cudaSetDevice(0) == expected);
    CHECK(cudaDriverGetVersion(&n) == cudaSuccess);
    CHECK(n == (driver ? 13000 : 0));
}

TEST_CASE("the log keeps the last calls, with stream and thread", "[cuda][standin]") {
    const standin::session gpu{{.log_capacity = 3}};
    const auto s = make_stream();
    for (int i = 0; i < 5; ++i) work(s, 0ns);
    CHECK(cudaStreamSynchronize(s) == cudaSuccess);
    raw::destroy(s);
    const auto log = standin::calls();
    REQUIRE(log.size() == 3);
    CHECK(std::string(log[0].name) == "cudaLaunchKernelExC");
    CHECK(std::string(log[1].name) == "cudaStreamSynchronize");
    CHECK(std::string(log[2].name) == "cudaStreamDestroy");
    CHECK(log[0].stream == s);
    CHECK(log[0].thread == std::this_thread::get_id());
    CHECK(standin::count("cudaLaunchKernelExC") == 5);
    CHECK(standin::count_all() == 9);  // with cudaSetDevice
    standin::forget_calls();
    CHECK(standin::count_all() == 0);
}

}  // namespace standin_test
