// SPDX-License-Identifier: Apache-2.0
// Launch gates whose lower clients' streams wait for a word: what opens and closes the word, and
// what can go wrong meanwhile.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "standins/cuda/cupti.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"
#include "support/threads.hpp"
#include "waiting_rig.hpp"

namespace launch_waits_test {

using namespace launch_rig;

TEST_CASE("a lower client's stream waits while a request is there, and its host runs ahead", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(20);  // comes through
    CHECK(w.r.gate->usage(w.r.batch).held == 0);
    standin::advance(10ms);
    CHECK(w.ran == 0);
    request.reset();
    standin::advance(2ms);
    CHECK(w.ran == 20);
}

TEST_CASE("the device opens the waits behind a request's work, with no host in between", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    w.urgent_launches(2);
    w.batch_launches(4);
    standin::advance(600us);
    CHECK(w.ran == 0);
    standin::advance(399us);
    CHECK(w.ran == 3);
    standin::advance(1us);
    CHECK(w.ran == 4);
}

TEST_CASE("one piece of a lower client's queue runs beside a request, and no more", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    w.batch_launches(4);  // each is timed behind others, and a piece of its own
    standin::advance(1ms);
    w.ran = 0;
    const ns bound = w.r.gate->bound(w.r.urgent);
    w.batch_launches(20);
    standin::advance(250us);
    CHECK(w.ran == 2);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    standin::advance(10ms);
    CHECK(w.ran == 4);  // two to a piece
    CHECK(bound >= 200us);
    CHECK(w.r.gate->bound(w.r.urgent) == bound);  // what is queued behind waits is in nobody's way
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 20);
}

TEST_CASE("a piece is no longer than its limit, or one launch", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const char softmax = 0;
    {
        const auto inside = w.r.gate->enter(w.r.batch);
        CHECK(launch(w.s.batch, softmax, 150us) == cudaSuccess);  // is learnt
        standin::advance(1ms);
        CHECK(w.r.gate->usage(w.r.batch).time == 260us);
        for (int i = 0; i < 10; ++i) CHECK(launch(w.s.batch, softmax, 150us, &w.ran) == cudaSuccess);
    }
    standin::advance(20us);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    standin::advance(10ms);
    CHECK(w.ran == 1);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 10);
}

TEST_CASE("a piece may be as long as the longest launch", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const char softmax = 0, prefill = 0;
    {
        const auto inside = w.r.gate->enter(w.r.batch);
        for (const auto& [kernel, time] : {std::pair{&prefill, 310us}, {&softmax, 150us}}) {
            for (int i = 0; i < 4; ++i)
                CHECK(launch(w.s.batch, *kernel, time) == cudaSuccess);  // timed, each behind others
            standin::advance(2ms);
            CHECK(launch(w.s.batch, *kernel, time) == cudaSuccess);  // predicted
        }
        standin::advance(2ms);
        for (int i = 0; i < 10; ++i) CHECK(launch(w.s.batch, softmax, 150us, &w.ran) == cudaSuccess);
    }
    const ns bound = w.r.gate->bound(w.r.urgent);
    standin::advance(20us);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    standin::advance(10ms);
    CHECK(w.ran == 2);
    CHECK(bound >= 300us);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 10);
}

TEST_CASE("a piece without a limit takes all launches", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 1h}, {.waits = cuda::launch_wait::stream, .piece = ns::max(), .gap = ns{0}}};
    w.batch_launches(4);  // each is timed behind others
    standin::advance(1ms);
    w.ran = 0;
    w.batch_launches(10);
    CHECK(w.r.gate->bound(w.r.urgent) > 0ns);
    standin::advance(20us);
    const auto request = w.r.gate->announce(w.r.urgent);
    standin::advance(5ms);
    CHECK(w.ran == 10);
}

TEST_CASE("a launch into a piece that began before the request waits as well", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const auto inside = w.r.gate->enter(w.r.batch);
    CHECK(launch(w.s.batch, norm, 10us, &w.ran) == cudaSuccess);
    standin::advance(50us);  // it is over, and the piece isn't
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    CHECK(launch(w.s.batch, norm, 10us, &w.ran) == cudaSuccess);  // of 150 us that one piece has
    standin::advance(1ms);
    CHECK(w.ran == 1);
    request.reset();
    standin::advance(1ms);
    CHECK(w.ran == 2);
}

TEST_CASE("a slow host's piece is open for twice the time of its work", "[cuda][launch_gate]") {
    const auto [later, share_a_piece] = GENERATE(std::pair{350us, true}, std::pair{450us, false});
    const standin::session gpu{stepped};
    waiting_rig w;
    w.batch_launches(4);  // each is timed behind others
    standin::advance(1ms);
    w.ran = 0;
    const auto inside = w.r.gate->enter(w.r.batch);
    CHECK(launch(w.s.batch, conv, 1ms, &w.ran) == cudaSuccess);  // longer than predicted
    standin::advance(later);
    CHECK(launch(w.s.batch, conv, 100us, &w.ran) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    standin::advance(5ms);
    CHECK(w.ran == (share_a_piece ? 2 : 1));
    request.reset();
    standin::advance(1ms);
    CHECK(w.ran == 2);
}

TEST_CASE("the end of a request's work doesn't let lower clients in beside the next request", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    w.urgent_launches(1);
    w.batch_launches(3);
    auto next = std::make_optional(w.r.gate->announce(w.r.urgent));
    standin::advance(5ms);  // the first is over
    CHECK(w.ran == 0);
    next.reset();
    standin::advance(5ms);
    CHECK(w.ran == 3);
}

TEST_CASE("requests that are enqueued ahead keep lower clients back until the last one is over",
          "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    for (int i = 0; i < 2; ++i) w.urgent_launches(1);
    w.batch_launches(3);
    standin::advance(599us);
    CHECK(w.ran == 0);
    standin::advance(1ms);
    CHECK(w.ran == 3);
}

TEST_CASE("of several streams of a request the last one opens the waits", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const cudaStream_t second = raw::make_stream();
    {
        const auto inside = w.r.gate->enter(w.r.urgent);
        CHECK(launch(w.s.urgent, gemm, 300us) == cudaSuccess);
        CHECK(launch(second, gemm, 300us) == cudaSuccess);
        standin::hold(GENERATE(true, false) ? w.s.urgent : second);
    }
    w.batch_launches(1);
    standin::advance(5ms);
    CHECK(w.ran == 0);
    for (const cudaStream_t each : {w.s.urgent, second}) standin::let_go(each);
    standin::advance(5ms);
    CHECK(w.ran == 1);
    raw::destroy(second);
}

TEST_CASE("all streams of a request keep waits closed, however many batches are in one", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const cudaStream_t second = raw::make_stream();
    {
        const auto inside = w.r.gate->enter(w.r.urgent);
        for (int i = 0; i < 80; ++i) CHECK(launch(w.s.urgent, gemm, 300us) == cudaSuccess);
        CHECK(launch(second, gemm, 300us) == cudaSuccess);
    }
    w.batch_launches(1);
    standin::advance(300us * 80 - 1us);
    CHECK(w.ran == 0);
    standin::advance(1us + 100us);
    CHECK(w.ran == 1);
    raw::destroy(second);
}

TEST_CASE("time in which a stream waited isn't charged", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const ns before = w.r.gate->usage(w.r.batch).time;
    w.urgent_launches(2);
    w.batch_launches(8);
    standin::advance(1ms);
    {
        const auto request = w.r.gate->announce(w.r.urgent);
        standin::advance(5ms);
    }
    standin::advance(5ms);
    CHECK(w.ran == 8);
    CHECK(w.r.gate->usage(w.r.batch).time - before == 800us);
}

TEST_CASE("a thread that is far ahead of the device is held", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 1h, .queued = 800us}};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(8);
    auto engine = std::async(std::launch::async, [&] { w.batch_launches(1); });
    REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
    request.reset();
    CHECK(w.r.gate->held() == 1);
    standin::advance(200us);  // a piece is over
    engine.get();
    standin::advance(10ms);
    CHECK(w.ran == 9);
}

TEST_CASE("a queue of more pieces than a gate can follow is never longer", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 1h, .queued = 1s}};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    auto engine = std::async(std::launch::async, [&] { w.batch_launches(200); });
    REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
    request.reset();
    REQUIRE(eventually([&] {
        standin::advance(100us);
        return engine.wait_for(0s) == std::future_status::ready;
    }));
    standin::advance(30ms);
    CHECK(w.ran == 200);
}

TEST_CASE("clients without anybody above them wait for no word", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    cuda::node node;
    gate_type gate{node, first, gpushare::launch_gate(), in_streams};
    const auto a = gate.add({}), b = gate.add({});
    const streams s;
    for (const auto* each : {&a, &b}) {
        const auto inside = gate.enter(*each);
        for (int i = 0; i < 10; ++i) {
            CHECK(launch(each == &a ? s.batch : s.urgent, conv, 100us) == cudaSuccess);
            standin::advance(1ms);
        }
    }
    CHECK(standin::count("cuStreamWaitValue64") == 0);
    CHECK(standin::count("cuStreamWriteValue32") == 0);
}

TEST_CASE("a driver without such waits gets a gate that holds threads", "[cuda][launch_gate]") {
    const bool hidden = GENERATE(true, false);
    const standin::session gpu{{.devices = 1, .stream_memory_operations = hidden}};
    if (hidden) standin::hide_entry_point("cuStreamWaitValue64");
    rig r{{.longest_hold = 1h}, in_streams};
    CHECK_FALSE(r.gate->waits_in_streams());
    const streams s;
    auto request = std::make_optional(r.gate->announce(r.urgent));
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        return launch(s.batch, conv, 10us);
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    request.reset();
    CHECK(engine.get() == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
}

TEST_CASE("a graph with waits inside stops between two pieces", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    const bool inside_too = GENERATE(true, false);
    {
        waiting_rig w{{.longest_hold = 1h},
                      {.waits = cuda::launch_wait::stream, .waits_in_graphs = inside_too, .gap = ns{0}}};
        REQUIRE(cudaStreamBeginCapture(w.s.batch, cudaStreamCaptureModeGlobal) == cudaSuccess);
        w.batch_launches(20);
        const cudaGraph_t graph = raw::end_capture(w.s.batch);
        cudaGraphExec_t exec = nullptr;
        REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        {
            const auto inside = w.r.gate->enter(w.r.batch);
            CHECK(cudaGraphLaunch(exec, w.s.batch) == cudaSuccess);
        }
        standin::advance(350us);
        CHECK(w.ran == 3);
        auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
        standin::advance(10ms);
        CHECK(w.ran == (inside_too ? 4 : 20));
        request.reset();
        standin::advance(10ms);
        CHECK(w.ran == 20);
        CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    }
    CHECK(standin::take_findings() == (inside_too ? "left behind: 1 host allocations\n" : ""));  // the words
}

TEST_CASE("a stream that waits for a level waits for no other one, whichever levels clients take later",
          "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    {
        waiting_rig w;
        REQUIRE(cudaStreamBeginCapture(w.s.batch, cudaStreamCaptureModeGlobal) == cudaSuccess);
        w.r.gate->wait_in_capture(w.r.batch, w.s.batch);
        w.batch_launches(1);
        const cudaGraph_t graph = raw::end_capture(w.s.batch);
        cudaGraphExec_t exec = nullptr;
        REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        standin::hold(w.s.batch);
        w.batch_launches(4);  // a backlog, whose waits are for level 1
        for (const int level : {-1, -2}) CHECK(w.r.gate->change(w.r.urgent, {.level = level}));
        {
            const auto request = w.r.gate->announce(w.r.urgent);
            standin::let_go(w.s.batch);
            CHECK(cudaGraphLaunch(exec, w.s.batch) == cudaSuccess);  // without other waits
            standin::advance(1ms);
            CHECK(w.ran == 5);  // above the request
        }
        CHECK(w.r.gate->change(w.r.urgent, {.level = 1}));
        {
            const auto request = w.r.gate->announce(w.r.urgent);
            CHECK(cudaGraphLaunch(exec, w.s.batch) == cudaSuccess);
            standin::advance(1ms);
            CHECK(w.ran == 5);
        }
        standin::advance(1ms);
        CHECK(w.ran == 6);
        CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    }
    CHECK(standin::take_findings() == "left behind: 1 host allocations\n");  // the words
}

// ---- what can go wrong

TEST_CASE("an engine's lock beside a closed stream costs an urgent thread the longest hold",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 20ms}};
    std::mutex of_engine;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    const bool by_event = GENERATE(true, false);
    const cudaEvent_t end = raw::make_event();
    std::atomic<bool> locked{false};
    auto engine = std::async(std::launch::async, [&] {
        const std::lock_guard lock(of_engine);
        locked = true;
        const auto inside = w.r.gate->enter(w.r.batch);
        if (launch(w.s.batch, conv, 100us) != cudaSuccess) ++w.failed;
        if (cudaEventRecord(end, w.s.batch) != cudaSuccess) ++w.failed;
        return by_event ? cudaEventSynchronize(end) : cudaStreamSynchronize(w.s.batch);
    });
    REQUIRE(eventually([&] { return locked && w.r.gate->in_flight(w.r.batch) == 100us; }));
    CHECK_FALSE(w.r.gate->take_forced());
    const instant since = device_clock::now();
    REQUIRE(eventually([&] {
        standin::advance(1ms);
        return engine.wait_for(1ms) == std::future_status::ready;
    }));
    CHECK(engine.get() == cudaSuccess);
    CHECK(device_clock::now() - since >= 19ms);
    w.r.was_forced(20ms);

    // The request goes on, and has the device to itself again.
    w.urgent_launches(1);
    w.batch_launches(1);
    standin::advance(10ms);
    CHECK(w.ran == 0);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 1);
    raw::destroy(end);
}

TEST_CASE("a request that waits for the whole device has closed streams opened at once", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(4);
    void* own = nullptr;
    REQUIRE(cudaMalloc(&own, 1 << 20) == cudaSuccess);
    const bool frees = GENERATE(true, false);
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(w.r.urgent);
              (void)launch(w.s.urgent, gemm, 300us);
              return frees ? cudaFree(own) : cudaDeviceSynchronize();
          }) == cudaSuccess);
    CHECK(w.ran == 4);

    // Behind the call they are closed again.
    w.batch_launches(1);
    standin::advance(10ms);
    CHECK(w.ran == 4);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 5);
    CHECK_FALSE(w.r.gate->take_forced());
    if (!frees) CHECK(cudaFree(own) == cudaSuccess);
}

TEST_CASE("an allocator's lock around a free beside a closed stream costs the longest hold",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 20ms}};
    void* theirs = nullptr;
    REQUIRE(cudaMalloc(&theirs, 1 << 20) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    call_under_lock(w, [&] { return cudaFree(theirs); });
}

TEST_CASE("a request that waits for a stream with lower clients' work in it comes through",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    const cudaEvent_t end = raw::make_event();
    const bool by_event = GENERATE(true, false);
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(w.r.urgent);
              (void)launch(w.s.batch, gemm, 300us);  // behind the batch
              if (cudaEventRecord(end, w.s.batch) != cudaSuccess) ++w.failed;
              return by_event ? cudaEventSynchronize(end) : cudaStreamSynchronize(w.s.batch);
          }) == cudaSuccess);
    CHECK(w.ran == 1);
    raw::destroy(end);
}

TEST_CASE("a thread that waits behind a closed stream in another way comes through after the longest hold",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual, .connections = 1}};  // one hardware queue
    waiting_rig w{{.longest_hold = 20ms}};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    const instant since = device_clock::now();
    SECTION("a request, for its own stream") {
        CHECK(meanwhile([&] {
                  const auto inside = w.r.gate->enter(w.r.urgent);
                  (void)launch(w.s.urgent, gemm, 300us);
                  return cudaStreamSynchronize(w.s.urgent);
              }) == cudaSuccess);
    }
    SECTION("behind its scope, for work that is to open the waits") {
        w.urgent_launches(1);
        request.reset();
        CHECK(meanwhile([&] { return cudaStreamSynchronize(w.s.urgent); }) == cudaSuccess);
    }
    SECTION("a thread that is no client's") {
        CHECK(meanwhile([] { return cudaDeviceSynchronize(); }) == cudaSuccess);
    }
    CHECK(device_clock::now() - since >= 20ms);
    w.r.was_forced();
}

TEST_CASE("with 32 streams on 32 connections none stops a request, and with 100 some do, for the longest hold",
          "[cuda][launch_gate][fault]") {
    const std::size_t others = GENERATE(31U, 99U);
    CAPTURE(others);
    const standin::session gpu{{.devices = 1, .time = manual, .connections = 32}};
    waiting_rig w{{.longest_hold = 20ms}};
    std::vector<cudaStream_t> theirs{w.s.batch};
    std::vector<gate_type::binding> bound;
    while (theirs.size() < others) theirs.push_back(raw::make_stream());
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    for (const cudaStream_t s : theirs) {
        bound.push_back(w.r.gate->bind(w.r.batch, s));
        CHECK(launch(s, norm, 10us, &w.ran) == cudaSuccess);
    }
    w.urgent_launches(1);
    standin::advance(1ms);
    CHECK(w.ran == 0);
    if (others == 31) {
        CHECK(cudaStreamQuery(w.s.urgent) == cudaSuccess);
    } else {
        CHECK(cudaStreamQuery(w.s.urgent) == cudaErrorNotReady);  // behind a wait in another stream
        CHECK(meanwhile([&] { return cudaStreamSynchronize(w.s.urgent); }) == cudaSuccess);
        w.r.was_forced(20ms);
    }
    CHECK_FALSE(w.r.gate->take_forced());
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == static_cast<int>(others));
    bound.clear();
    theirs.erase(theirs.begin());
    for (const cudaStream_t s : theirs) raw::destroy(s);
}

TEST_CASE("waits stay open while a thread waits inside the driver, and new launches are held meanwhile",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const cudaStream_t third = raw::make_stream();
    standin::hold(third);
    REQUIRE(launch(third, norm, 10us) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(6);  // two to a piece
    auto waits = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.urgent);
        return cudaDeviceSynchronize();
    });
    REQUIRE(eventually([&] {
        standin::advance(100us);
        return w.ran > 0;
    }));
    w.urgent_launches(1);  // another thread of the client's closes nothing
    standin::advance(10ms);
    CHECK(w.ran == 6);
    auto engine = std::async(std::launch::async, [&] { w.batch_launches(1); });
    REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
    standin::advance(10ms);
    CHECK(w.ran == 6);
    standin::let_go(third);
    standin::advance(1ms);
    CHECK(waits.get() == cudaSuccess);
    engine.get();  // its stream waits again, and its thread doesn't
    standin::advance(10ms);
    CHECK(w.ran == 6);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 7);
    raw::destroy(third);
}

TEST_CASE("a wait for the device that fails leaves streams closed", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    const bool in_capture = GENERATE(true, false);
    {
        waiting_rig w;
        auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
        {
            const auto inside = w.r.gate->enter(w.r.urgent);
            cudaGraph_t none = nullptr;
            if (in_capture)
                REQUIRE(cudaStreamBeginCapture(w.s.urgent, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
            else
                standin::inject({.call = "cudaDeviceSynchronize", .code = cudaErrorUnknown});
            CHECK(cudaDeviceSynchronize() == (in_capture ? cudaErrorStreamCaptureUnsupported : cudaErrorUnknown));
            if (in_capture) CHECK(cudaStreamEndCapture(w.s.urgent, &none) == cudaErrorStreamCaptureInvalidated);
            (void)cudaGetLastError();
        }
        w.batch_launches(1);
        standin::advance(10ms);
        CHECK(w.ran == 0);
        request.reset();
        standin::advance(10ms);
        CHECK(w.ran == 1);
    }
    if (in_capture) (void)standin::take_findings();  // the capture is lost
}

TEST_CASE("a call that waits for the legacy stream opens only the waits of streams that it waits for",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    {
        const bool blocks = GENERATE(true, false);
        waiting_rig w;
        cudaStream_t blocking = nullptr;
        REQUIRE(cudaStreamCreateWithPriority(&blocking, cudaStreamDefault, 0) == cudaSuccess);
        const auto request = w.r.gate->announce(w.r.urgent);
        {
            const auto inside = w.r.gate->enter(w.r.batch);
            CHECK(launch(blocks ? blocking : w.s.batch, conv, 100us, &w.ran) == cudaSuccess);
        }
        {
            const auto inside = w.r.gate->enter(w.r.urgent);
            CHECK(cudaStreamSynchronize(cudaStreamLegacy) == cudaSuccess);
        }
        standin::advance(1ms);
        CHECK(w.ran == (blocks ? 1 : 0));
        raw::destroy(blocking);
    }
    (void)standin::take_findings();  // that it uses such streams
}

TEST_CASE("a thread that waits for another device leaves streams closed", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 2, .time = manual}};
    waiting_rig w;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    const cudaStream_t other = raw::make_stream();
    REQUIRE(launch(other, norm, 10us) == cudaSuccess);
    CHECK(meanwhile([] {
              (void)cudaSetDevice(1);
              return cudaDeviceSynchronize();
          }) == cudaSuccess);
    CHECK(meanwhile([&] { return cudaStreamSynchronize(other); }) == cudaSuccess);
    CHECK(w.ran == 0);
    raw::destroy(other);
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    request.reset();
    standin::advance(1ms);
    CHECK(w.ran == 1);
}

TEST_CASE("a launch into the legacy stream is held beside a request, and for no more than the longest hold",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    {
        waiting_rig w{{.longest_hold = 20ms}};
        std::future<cudaError_t> engine;
        const auto request = w.r.gate->announce(w.r.urgent);  // goes first, should the test fail
        engine = std::async(std::launch::async, [&] {
            const auto inside = w.r.gate->enter(w.r.batch);
            return launch(cudaStreamLegacy, conv, 100us);
        });
        REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
        const instant since = device_clock::now();
        REQUIRE(eventually([&] {
            standin::advance(100us);
            return engine.wait_for(0s) == std::future_status::ready;
        }));
        CHECK(engine.get() == cudaSuccess);
        CHECK(device_clock::now() - since >= 19ms);
        const auto forced = w.r.gate->take_forced();
        REQUIRE(forced);
        CHECK(forced->client == w.r.batch.number());
        standin::advance(1ms);
    }
    (void)standin::take_findings();  // that it uses the default stream
}

TEST_CASE("a gate may go while a thread waits for the device inside the driver", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    rig other{{.longest_hold = 1h}, in_streams};
    const cudaStream_t third = raw::make_stream();
    standin::hold(third);
    REQUIRE(launch(third, norm, 10us) == cudaSuccess);
    const auto request = other.gate->announce(other.urgent);
    std::atomic<bool> begun{false};
    auto waits = std::async(std::launch::async, [&] {
        begun = true;
        return cudaDeviceSynchronize();
    });
    REQUIRE(eventually([&] { return begun.load(); }));
    if (GENERATE(true, false)) other.gate.reset();
    standin::let_go(third);
    CHECK(meanwhile([&] { return waits.get(); }) == cudaSuccess);
    raw::destroy(third);
}

TEST_CASE("a waiting stream takes no more launches than allowed", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 1h, .queued = 1h, .queued_launches = 12}};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(12);
    auto engine = std::async(std::launch::async, [&] { w.batch_launches(1); });
    REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
    request.reset();
    REQUIRE(eventually([&] {
        standin::advance(100us);
        return engine.wait_for(0s) == std::future_status::ready;
    }));
    standin::advance(10ms);
    CHECK(w.ran == 13);
}

TEST_CASE("a launch into a capture waits for no word, and neither does its graph", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    standin::forget_calls();
    REQUIRE(cudaStreamBeginCapture(w.s.batch, cudaStreamCaptureModeGlobal) == cudaSuccess);
    w.batch_launches(3);
    w.urgent_launches(1);  // beside the capture of another thread's stream
    const cudaGraph_t graph = raw::end_capture(w.s.batch);
    CHECK(standin::count("cuStreamWaitValue64") == 0);
    standin::advance(1ms);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("a close, a removal and a destructor open the waits", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::optional<gate_type::client> higher = w.r.gate->add({.level = 2});
    const auto another = w.r.gate->add({.level = 2});
    std::optional<gate_type::request> request = w.r.gate->announce(*higher);
    w.batch_launches(3);
    standin::advance(1ms);
    CHECK(w.ran == 0);
    std::optional<gate_type::request> late;
    SECTION("the gate, and later requests close nothing") {
        w.r.gate->close();
        late.emplace(w.r.gate->announce(w.r.urgent));
    }
    SECTION("the client for whom they wait") { higher.reset(); }
    standin::advance(5ms);
    CHECK(w.ran == 3);
    request.reset();
    late.reset();
    higher.reset();
    // Another gate has the same words.
    w.r.gate.reset();
    rig next{{.longest_hold = 1h}, in_streams};
    CHECK(next.gate->waits_in_streams());
    const auto inside = next.gate->enter(next.batch);
    CHECK(launch(w.s.batch, conv, 100us, &w.ran) == cudaSuccess);
    standin::advance(1ms);
    CHECK(w.ran == 4);
}

TEST_CASE("a gate and its clients may go while streams wait for its words", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    streams s;
    std::atomic<int> ran{0};
    const bool by_client = GENERATE(true, false);
    {
        rig r{{.longest_hold = 1h}, in_streams};
        const auto request = r.gate->announce(r.urgent);
        {
            std::optional<gate_type::client> third;
            if (by_client) third.emplace(r.gate->add({}));
            const auto inside = r.gate->enter(by_client ? *third : r.batch);
            CHECK(launch(s.batch, conv, 100us, &ran) == cudaSuccess);
        }
        standin::advance(1ms);
        CHECK(ran == 0);
    }
    standin::advance(1ms);
    CHECK(ran == 1);
    CHECK(cudaStreamDestroy(std::exchange(s.batch, nullptr)) == cudaSuccess);
    CHECK(cudaStreamDestroy(std::exchange(s.urgent, nullptr)) == cudaSuccess);
    CHECK(standin::take_findings() == "left behind: 1 host allocations\n");  // the words
}

TEST_CASE("a launch that the driver refuses leaves its stream a word to wait for", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    streams s;
    std::atomic<int> ran{0};
    {
        rig r{{.longest_hold = 1h}, in_streams};
        CHECK(launch(s.batch, norm, 300us) == cudaSuccess);  // nobody's: the wait comes later
        const auto request = r.gate->announce(r.urgent);
        const auto third = std::make_optional(r.gate->add({}));
        const auto inside = r.gate->enter(*third);
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidConfiguration});
        CHECK(launch(s.batch, conv, 100us) == cudaErrorInvalidConfiguration);
    }
    CHECK(launch(s.batch, conv, 100us, &ran) == cudaSuccess);
    standin::advance(1ms);
    CHECK(ran == 1);
    CHECK(cudaStreamDestroy(std::exchange(s.batch, nullptr)) == cudaSuccess);
    CHECK(cudaStreamDestroy(std::exchange(s.urgent, nullptr)) == cudaSuccess);
    CHECK(standin::take_findings() == "left behind: 1 host allocations\n");  // the words
}

TEST_CASE("a request may end in a thread that has no context", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 2, .time = manual}};
    {
        cuda::node node{{.devices = {1}}};  // CUDA's device 0 is somebody else's
        gate_type gate{node, first, gpushare::launch_gate({.longest_hold = 1h}), in_streams};
        const auto urgent = gate.add({.level = 1});
        const cudaStream_t one = raw::make_stream(1), other = raw::make_stream(1);
        auto request = std::make_optional(gate.announce(urgent));
        {
            const auto theirs = gate.bind(urgent, one), also = gate.bind(urgent, other);
            CHECK(launch(one, gemm, 500us) == cudaSuccess);
            CHECK(launch(other, norm, 500us) == cudaSuccess);
        }
        std::thread([&] { request.reset(); }).join();
        CHECK(standin::count("cudaStreamWaitEvent") == 1);   // one stream, for the other
        CHECK(standin::count("cuStreamWriteValue32") == 1);  // there, to open the waits
        CHECK_FALSE(standin::has_context(0));
        standin::advance(1ms);
        raw::destroy(one, other);
    }
}

TEST_CASE("a stream of a request may be destroyed with the write that opens the waits", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.longest_hold = 1h}, in_streams};
    streams s;
    std::atomic<int> ran{0};
    {
        const auto inside = r.gate->enter(r.urgent);
        CHECK(launch(s.urgent, gemm, 300us) == cudaSuccess);
    }
    CHECK(cudaStreamDestroy(std::exchange(s.urgent, nullptr)) == cudaSuccess);
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        return launch(s.batch, conv, 100us, &ran);
    });
    REQUIRE(eventually([&] {
        standin::advance(100us);
        return ran == 1;
    }));
    CHECK(engine.get() == cudaSuccess);
}

TEST_CASE("a device that is lost leaves nobody waiting for a word", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    {
        waiting_rig w;
        const auto request = w.r.gate->announce(w.r.urgent);
        w.batch_launches(2);
        auto engine = std::async(std::launch::async, [&] {
            const auto inside = w.r.gate->enter(w.r.batch);
            return cudaStreamSynchronize(w.s.batch);
        });
        standin::poison(0, cudaErrorIllegalAddress);
        CHECK(engine.get() == cudaErrorIllegalAddress);
    }
    (void)standin::take_findings();
}

TEST_CASE("gates with waits in streams come and go while threads launch", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    cuda::node node;
    const streams s;
    std::atomic<int> failed{0}, ran{0};
    for (int round = 0; round < 20; ++round) {
        gate_type gate{node, first, gpushare::launch_gate({.longest_hold = 1h}), in_streams};
        auto urgent = gate.add({.level = 1}), batch = gate.add({});
        support::together(3, [&](unsigned rank) {
            for (int i = 0; i < 20; ++i) {
                const auto inside = gate.enter(rank == 0 ? urgent : batch);
                const cudaStream_t on = rank == 0 ? s.urgent : s.batch;
                if (launch(on, rank == 0 ? gemm : norm, 1us, &ran) != cudaSuccess) ++failed;
                if (i % 4 == 0 && cudaStreamSynchronize(on) != cudaSuccess) ++failed;
            }
        });
    }
    for (const cudaStream_t each : {s.urgent, s.batch}) CHECK(cudaStreamSynchronize(each) == cudaSuccess);
    CHECK(failed == 0);
    CHECK(ran == 20 * 60);
}

}  // namespace launch_waits_test
