// SPDX-License-Identifier: Apache-2.0
// Waits for closed streams that no driver call reveals: threads that poll, host functions in
// streams, and copies that wait inside the driver.
#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <thread>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"
#include "waiting_rig.hpp"

namespace launch_unseen_test {

using namespace launch_rig;

namespace {

/// As often as a gate looks at a thread that polls, and longer.
void let_gates_look() { std::this_thread::sleep_for(200us); }

/// Until it says that the work is over. As programs do that mustn't stay inside the driver.
template <class Query>
cudaError_t poll(Query query) {
    const auto end = std::chrono::steady_clock::now() + 5min;
    cudaError_t code = query();
    while (code == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
        code = query();
    }
    return code;
}

void note(void* called) { static_cast<std::atomic<bool>*>(called)->store(true); }
void CUDART_CB note_in_stream(cudaStream_t, cudaError_t, void* called) { note(called); }
cudaError_t call_in_stream(cudaStream_t s, std::atomic<bool>& called, bool old_way = false) {
    return old_way ? cudaStreamAddCallback(s, note_in_stream, &called, 0) : cudaLaunchHostFunc(s, note, &called);
}

}  // namespace

// ---- threads that poll

TEST_CASE("a thread that polls behind a closed wait comes through after the longest hold",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 20ms}};
    const bool by_event = GENERATE(true, false);
    const bool is_client = GENERATE(true, false);
    const cudaEvent_t end = raw::make_event();
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    CHECK(cudaEventRecord(end, w.s.batch) == cudaSuccess);
    const instant since = device_clock::now();
    CHECK(meanwhile([&] {
              const auto polls = [&] {
                  return poll([&] { return by_event ? cudaEventQuery(end) : cudaStreamQuery(w.s.batch); });
              };
              if (!is_client) return polls();
              const auto inside = w.r.gate->enter(w.r.batch);
              return polls();
          }) == cudaSuccess);
    CHECK(device_clock::now() - since >= 20ms);
    w.r.was_forced(20ms);

    // Behind that they are closed again.
    w.ran = 0;
    w.batch_launches(1);
    standin::advance(10ms);
    CHECK(w.ran == 0);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 1);
    raw::destroy(end);
}

TEST_CASE("a request that polls a stream with lower clients' work in it comes through", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const auto request = w.r.gate->announce(w.r.urgent);
    w.batch_launches(1);
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(w.r.urgent);
              (void)launch(w.s.batch, gemm, 300us);  // behind the batch
              return poll([&] { return cudaStreamQuery(w.s.batch); });
          }) == cudaSuccess);
    CHECK(w.ran == 1);
    CHECK_FALSE(w.r.gate->take_forced());
}

TEST_CASE("a thread that launches between its polls doesn't wait", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 5ms}};
    const cudaEvent_t end = raw::make_event();
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    CHECK(cudaEventRecord(end, w.s.batch) == cudaSuccess);
    for (int i = 0; i < 50; ++i) {  // as an allocator asks for its events
        for (int looks = 0; looks < 3; ++looks) {
            CHECK(cudaEventQuery(end) == cudaErrorNotReady);
            let_gates_look();
        }
        const auto inside = w.r.gate->enter(w.r.batch);
        CHECK(launch(w.s.batch, norm, 10us, &w.ran) == cudaSuccess);
        standin::advance(1ms);
    }
    CHECK(w.ran == 0);
    CHECK_FALSE(w.r.gate->take_forced());
    request.reset();
    standin::advance(1ms);
    CHECK(w.ran == 51);
    raw::destroy(end);
}

TEST_CASE("waits that are open for a thread that polls close when it polls no more", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 20ms}};
    const bool launches = GENERATE(true, false);
    const cudaStream_t third = raw::make_stream();
    standin::hold(third);
    REQUIRE(launch(third, norm, 10us) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(2);
    REQUIRE(eventually([&] {
        CHECK(cudaStreamQuery(third) == cudaErrorNotReady);  // the gate doesn't know for whom it waits
        standin::advance(100us);
        return w.ran == 2;
    }));
    if (launches)
        CHECK(launch(third, norm, 10us) == cudaSuccess);
    else
        standin::advance(20ms);  // and the thread does something else, or is gone
    w.urgent_launches(1);
    standin::advance(10ms);
    w.batch_launches(1);
    standin::advance(10ms);
    CHECK(w.ran == 2);
    CHECK(w.r.gate->held() == 0);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 3);
    standin::let_go(third);
    standin::advance(1ms);
    raw::destroy(third);
}

TEST_CASE("polls cost no query while there is no request", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    const waiting_rig w;
    const cudaStream_t third = raw::make_stream();
    standin::hold(third);
    REQUIRE(launch(third, norm, 10us) == cudaSuccess);
    CHECK(cudaStreamQuery(third) == cudaErrorNotReady);  // may look whether the last request's words are open
    standin::forget_calls();
    for (int i = 0; i < 10; ++i) {
        let_gates_look();
        CHECK(cudaStreamQuery(third) == cudaErrorNotReady);
    }
    CHECK(standin::count_all() == 10);
    standin::let_go(third);
    standin::advance(1ms);
    raw::destroy(third);
}

TEST_CASE("nothing is asked for polls once the gate is closed", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const cudaStream_t third = raw::make_stream();
    standin::hold(third);
    REQUIRE(launch(third, norm, 10us) == cudaSuccess);
    const auto request = w.r.gate->announce(w.r.urgent);
    w.r.gate->close();
    standin::forget_calls();
    for (int i = 0; i < 10; ++i) {
        CHECK(cudaStreamQuery(third) == cudaErrorNotReady);
        let_gates_look();
    }
    CHECK(standin::count_all() == 10);
    standin::let_go(third);
    standin::advance(1ms);
    raw::destroy(third);
}

TEST_CASE("a thread that polls comes through beside another gate of its device", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    const bool is_older = GENERATE(true, false);
    std::optional<rig> other;
    if (is_older) other.emplace(launch_gate_options{.longest_hold = 1h}, in_streams);
    waiting_rig w{{.longest_hold = 20ms}};
    if (!is_older) other.emplace(launch_gate_options{.longest_hold = 1h}, in_streams);
    const auto request = w.r.gate->announce(w.r.urgent);
    w.batch_launches(1);
    CHECK(meanwhile([&] { return poll([&] { return cudaStreamQuery(w.s.batch); }); }) == cudaSuccess);
}

TEST_CASE("threads poll while requests come and go", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    rig r{{.longest_hold = 1ms}, in_streams};
    const streams s;
    std::atomic<int> failed{0};
    std::atomic<bool> over{false};
    std::jthread requests([&] {
        (void)cudaSetDevice(0);
        for (int i = 0; i < 50; ++i) {
            const auto inside = r.gate->enter(r.urgent);
            if (launch(s.urgent, gemm, 50us) != cudaSuccess) ++failed;
            if (poll([&] { return cudaStreamQuery(s.urgent); }) != cudaSuccess) ++failed;
        }
        over = true;
    });
    while (!over) {
        {
            const auto inside = r.gate->enter(r.batch);
            if (launch(s.batch, conv, 20us) != cudaSuccess) ++failed;
        }
        if (poll([&] { return cudaStreamQuery(s.batch); }) != cudaSuccess) ++failed;
    }
    CHECK(failed == 0);
}

// ---- functions of the host's

TEST_CASE("a function of the host's waits in its thread while its stream is closed", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    const bool old_way = GENERATE(true, false);
    waiting_rig w;
    std::atomic<bool> called{false};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(2);
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.batch);
        return call_in_stream(w.s.batch, called, old_way);
    });
    REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
    standin::advance(1ms);
    CHECK(standin::count(old_way ? "cudaStreamAddCallback" : "cudaLaunchHostFunc") == 0);
    request.reset();
    CHECK(meanwhile([&] { return engine.get(); }) == cudaSuccess);
    standin::advance(1ms);
    CHECK(called);
    CHECK_FALSE(w.r.gate->take_forced());
}

TEST_CASE("a request doesn't stop a function of the host's that is enqueued", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::atomic<bool> called{false};
    w.batch_launches(20);
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(w.r.batch);
              return call_in_stream(w.s.batch, called);
          }) == cudaSuccess);
    const auto request = w.r.gate->announce(w.r.urgent);  // whose thread waits for the function now
    standin::advance(1ms);
    CHECK(called);
}

TEST_CASE("a wait for a lower client's host function takes the longest hold at most", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 20ms}};
    std::atomic<bool> called{false};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(4);
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.batch);
        return call_in_stream(w.s.batch, called);
    });
    const instant since = device_clock::now();
    REQUIRE(eventually([&] {
        standin::advance(100us);
        return called.load();
    }));
    CHECK(engine.get() == cudaSuccess);
    CHECK(device_clock::now() - since >= 19ms);
    const auto forced = w.r.gate->take_forced();
    REQUIRE(forced);
    CHECK(forced->client == w.r.batch.number());

    w.ran = 0;  // and they are closed again
    w.batch_launches(1);
    standin::advance(10ms);
    CHECK(w.ran == 0);
    request.reset();
    standin::advance(1ms);
    CHECK(w.ran == 1);
}

TEST_CASE("a request's function of the host's comes through behind lower clients' work", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    const bool is_bound = GENERATE(true, false);
    const bool is_legacy = GENERATE(true, false);
    cudaStream_t blocking = nullptr;
    REQUIRE(cudaStreamCreateWithPriority(&blocking, cudaStreamDefault, 0) == cudaSuccess);
    {
        waiting_rig w;
        std::atomic<bool> called{false};
        const cudaStream_t shared = is_legacy ? blocking : w.s.batch;
        const cudaStream_t into = is_legacy ? cudaStreamLegacy : shared;
        auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
        const auto batch_launches = [&](int n) {
            const auto inside = w.r.gate->enter(w.r.batch);
            for (int i = 0; i < n; ++i) CHECK(launch(shared, conv, 100us, &w.ran) == cudaSuccess);
        };
        batch_launches(6);
        standin::advance(10ms);
        CHECK(w.ran == 0);
        auto bound = is_bound ? std::make_optional(w.r.gate->bind(w.r.urgent, into)) : std::nullopt;
        CHECK(meanwhile([&] {
                  if (is_bound) return call_in_stream(into, called);
                  const auto inside = w.r.gate->enter(w.r.urgent);
                  return call_in_stream(into, called);
              }) == cudaSuccess);
        standin::advance(1ms);
        CHECK(called);
        CHECK(w.ran == 6);
        CHECK_FALSE(w.r.gate->take_forced());
        bound.reset();
        w.batch_launches(1);  // closed again
        standin::advance(10ms);
        CHECK(w.ran == 6);
        request.reset();
        standin::advance(10ms);
        CHECK(w.ran == 7);
    }
    raw::destroy(blocking);
    (void)standin::take_findings();  // that it uses the default stream
}

TEST_CASE("a request doesn't stop a higher client's function of the host's that is enqueued",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::atomic<bool> called{false};
    w.batch_launches(20);
    const auto bound = w.r.gate->bind(w.r.urgent, w.s.batch);
    CHECK(meanwhile([&] { return call_in_stream(w.s.batch, called); }) == cudaSuccess);
    const auto request = w.r.gate->announce(w.r.urgent);  // whose thread waits for the function now
    standin::advance(1ms);
    CHECK(called);
}

TEST_CASE("a function of the host's comes through behind another client's closed wait", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    const bool is_own = GENERATE(true, false);  // the request of the function's client closes the wait
    waiting_rig w{{.longest_hold = is_own ? ns{1h} : ns{20ms}}};
    auto between = w.r.gate->add({.level = 1});
    auto highest = w.r.gate->add({.level = 2});
    const auto request = w.r.gate->announce(is_own ? between : highest);
    std::atomic<bool> called{false};
    w.batch_launches(4);
    const instant since = device_clock::now();
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(is_own ? between : w.r.batch);
              return call_in_stream(w.s.batch, called);
          }) == cudaSuccess);
    standin::advance(1ms);
    CHECK(called);
    if (!is_own) CHECK(device_clock::now() - since >= 19ms);
    CHECK(w.r.gate->take_forced().has_value() == !is_own);
}

TEST_CASE("no other client puts a wait in front of a function of the host's", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::atomic<bool> called{false};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    std::future<void> other;
    standin::before_next("cudaLaunchHostFunc", [&] {  // inside the call
        other = std::async(std::launch::async, [&] { w.batch_launches(1); });
        CHECK(eventually([&] { return w.r.gate->held() == 1; }));
    });
    {
        const auto inside = w.r.gate->enter(w.r.urgent);
        CHECK(call_in_stream(w.s.batch, called) == cudaSuccess);
    }
    other.get();
    standin::advance(1ms);
    CHECK(called);
    CHECK(w.ran == 0);
    request.reset();
    standin::advance(1ms);
    CHECK(w.ran == 1);
}

TEST_CASE("no other thread puts a wait in front of a function of the host's", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::atomic<bool> called{false};
    std::future<void> other;
    standin::before_next("cudaLaunchHostFunc", [&] {  // inside the call
        other = std::async(std::launch::async, [&] { w.batch_launches(1); });
        CHECK(eventually([&] { return w.r.gate->held() == 1; }));
    });
    {
        const auto inside = w.r.gate->enter(w.r.batch);
        CHECK(call_in_stream(w.s.batch, called) == cudaSuccess);
    }
    other.get();
    standin::advance(1ms);
    CHECK(called);
    CHECK(w.ran == 1);
}

TEST_CASE("a function of the host's comes through beside a thread that launches all the time",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::atomic<bool> called{false}, over{false};
    w.batch_launches(20);
    std::thread busy([&] {
        while (!over) {
            w.batch_launches(1);
            while (!over && w.r.gate->in_flight(w.r.batch) > 1ms) std::this_thread::yield();
        }
    });
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.batch);
        return call_in_stream(w.s.batch, called);
    });
    CHECK(eventually([&] {  // the device never gets to the end of what is enqueued, unless both are held
        if (w.r.gate->in_flight(w.r.batch) > 600us || w.r.gate->held() == 2) standin::advance(10us);
        return engine.wait_for(0s) == std::future_status::ready;
    }));
    over = true;
    w.r.gate->close();
    CHECK(engine.get() == cudaSuccess);
    busy.join();
    standin::advance(100ms);
    CHECK(called);
}

TEST_CASE("a function of the host's goes although its stream waits for the thread", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w{{.longest_hold = 20ms}};
    std::atomic<bool> called{false};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    if (GENERATE(true, false)) request.reset();
    standin::hold(w.s.batch);  // as a function or a kernel does that waits for the thread
    w.batch_launches(1);
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.batch);
        return call_in_stream(w.s.batch, called);
    });
    CHECK(eventually([&] {
        standin::advance(100us);
        return engine.wait_for(0s) == std::future_status::ready;
    }));
    w.r.gate->close();
    standin::let_go(w.s.batch);
    CHECK(engine.get() == cudaSuccess);
    standin::advance(10ms);
    CHECK(called);
}

TEST_CASE("a binding that ends inside a call leaves nothing of the call behind", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::atomic<bool> called{false};
    auto bound = std::make_optional(w.r.gate->bind(w.r.batch, w.s.batch));
    standin::before_next("cudaLaunchHostFunc", [&] { bound.reset(); });
    CHECK(call_in_stream(w.s.batch, called) == cudaSuccess);
    auto engine = std::async(std::launch::async, [&] { w.batch_launches(1); });
    CHECK(eventually([&] {
        standin::advance(100us);
        return engine.wait_for(0s) == std::future_status::ready;
    }));
    w.r.gate->close();
    engine.get();
    standin::advance(1ms);
    CHECK(w.ran == 1);
}

TEST_CASE("functions of the host's of nobody and of the highest client pass", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    std::atomic<bool> called{false}, higher{false};
    const auto request = w.r.gate->announce(w.r.urgent);
    w.urgent_launches(1);
    CHECK(call_in_stream(w.s.batch, called) == cudaSuccess);
    {
        const auto inside = w.r.gate->enter(w.r.urgent);
        CHECK(call_in_stream(w.s.urgent, higher) == cudaSuccess);
    }
    CHECK(w.r.gate->usage(w.r.urgent).held == 0);
    standin::advance(1ms);
    CHECK(called);
    CHECK(higher);
}

// ---- copies from and to pageable memory

TEST_CASE("a copy of pageable memory waits in its thread while its stream is closed", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual, .pageable_copies_wait = true}};
    const bool is_pageable = GENERATE(true, false);
    waiting_rig w;
    void *device = nullptr, *pinned = nullptr;
    int pageable = 7, back = 0;
    REQUIRE(cudaMalloc(&device, sizeof(int)) == cudaSuccess);
    REQUIRE(cudaHostAlloc(&pinned, sizeof(int), 0) == cudaSuccess);
    *static_cast<int*>(pinned) = 7;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(2);
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.batch);
        return cudaMemcpyAsync(device, is_pageable ? &pageable : pinned, sizeof(int), cudaMemcpyDefault, w.s.batch);
    });
    if (is_pageable) {
        REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
        standin::advance(1ms);
        CHECK(standin::count("cudaMemcpyAsync") == 0);
    } else {
        CHECK(engine.get() == cudaSuccess);  // runs ahead
    }
    request.reset();
    if (is_pageable) CHECK(meanwhile([&] { return engine.get(); }) == cudaSuccess);
    standin::advance(1ms);
    CHECK(w.r.gate->usage(w.r.batch).launches == 5);
    CHECK(cudaMemcpyAsync(&back, device, sizeof(int), cudaMemcpyDefault, w.s.batch) == cudaSuccess);
    CHECK(back == 7);
    CHECK(cudaFree(device) == cudaSuccess);
    CHECK(cudaFreeHost(pinned) == cudaSuccess);
}

TEST_CASE("an engine's lock around a copy of pageable memory costs the longest hold", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual, .pageable_copies_wait = true}};
    waiting_rig w{{.longest_hold = 20ms}};
    void* device = nullptr;
    int pageable = 7;
    REQUIRE(cudaMalloc(&device, sizeof(int)) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    call_under_lock(w, [&] { return cudaMemcpyAsync(device, &pageable, sizeof(int), cudaMemcpyDefault, w.s.batch); });
    CHECK(cudaFree(device) == cudaSuccess);
}

TEST_CASE("a request's copy of pageable memory comes through behind lower clients' work",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual, .pageable_copies_wait = true}};
    waiting_rig w;
    void* device = nullptr;
    int pageable = 7;
    REQUIRE(cudaMalloc(&device, sizeof(int)) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(w.r.urgent);
              return cudaMemcpyAsync(device, &pageable, sizeof(int), cudaMemcpyDefault, w.s.batch);
          }) == cudaSuccess);
    CHECK(w.ran == 1);
    w.batch_launches(1);  // closed again
    standin::advance(10ms);
    CHECK(w.ran == 1);
    request.reset();
    standin::advance(10ms);
    CHECK(w.ran == 2);
    CHECK(cudaFree(device) == cudaSuccess);
}

}  // namespace launch_unseen_test
