// SPDX-License-Identifier: Apache-2.0
// Launches of engines on the stand-in for CUDA and CUPTI: which launches are held, for which client
// and how long, and what can go wrong meanwhile.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "standins/cuda/cupti.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"
#include "support/threads.hpp"

namespace launch_gate_test {

using namespace launch_rig;
using Catch::Matchers::Contains;

namespace {

/// Follows each launch and holds none.
struct following_gate final : cuda::detail::launch_listener {
    std::function<void()> at_end;
    int ended = 0;

    cuda::detail::launch_verdict before(cuda::detail::launch_owner, const cuda::detail::launch_call&,
                                        std::uint64_t& note) noexcept override {
        note = 1;
        return cuda::detail::launch_verdict::followed;
    }
    void after(cuda::detail::launch_owner, const cuda::detail::launch_call&, std::uint64_t,
               CUresult) noexcept override {
        ++ended;
        if (at_end) std::exchange(at_end, {})();
    }
    [[nodiscard]] bool waits_in_streams() const noexcept override { return false; }
    [[nodiscard]] bool synchronises(const cuda::detail::launch_owner*,
                                    const cuda::detail::sync_call&) noexcept override {
        return false;
    }
    void synchronised() noexcept override {}
    [[nodiscard]] bool polls(const cuda::detail::launch_owner*, const cuda::detail::sync_call&,
                             std::optional<instant>&) noexcept override {
        return false;
    }
    void poll_over(const void*) noexcept override {}
    void ends(CUstream) noexcept override {}
};

}  // namespace

// ---- who waits for whom

TEST_CASE("a launch waits inside the driver's call while a request of a higher client is there",
          "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    std::atomic<int> ran{0};
    std::optional<gate_type::scope> chat;
    auto request = std::make_optional(r.gate->announce(r.urgent));
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        return launch(s.batch, conv, 10us, &ran);
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    {
        const auto inside = r.gate->enter(r.urgent);  // and isn't held itself
        CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
        CHECK(cudaStreamSynchronize(s.urgent) == cudaSuccess);
    }
    CHECK(r.gate->held() == 1);
    CHECK(standin::count("cudaLaunchKernelExC") == 1);
    request.reset();
    CHECK(engine.get() == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
    CHECK(ran == 1);
    CHECK(r.gate->usage(r.batch).held == 1);
    CHECK(r.gate->usage(r.urgent).held == 0);
}

TEST_CASE("a launch waits for the higher client's work on the device, which only the held thread looks at",
          "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    std::atomic<int> first_ran{0}, second_ran{0};
    standin::hold(s.urgent);
    {
        const auto inside = r.gate->enter(r.urgent);
        CHECK(launch(s.urgent, gemm, 10us, &first_ran) == cudaSuccess);
    }
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        const cudaError_t code = launch(s.batch, conv, 10us, &second_ran);
        return std::pair{code, first_ran.load()};
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    CHECK(standin::count("cudaLaunchKernelExC") == 1);
    standin::let_go(s.urgent);
    CHECK(engine.get() == std::pair{cudaSuccess, 1});  // the urgent kernel was over by then
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
    CHECK(second_ran == 1);
}

TEST_CASE("graphs, copies and fills wait as kernels do", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    int from = 7, to = 0;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    REQUIRE(cudaStreamBeginCapture(s.batch, cudaStreamCaptureModeGlobal) == cudaSuccess);
    REQUIRE(launch(s.batch, conv, 10us) == cudaSuccess);
    REQUIRE(cudaStreamEndCapture(s.batch, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    void* device = nullptr;
    REQUIRE(cudaMalloc(&device, 256) == cudaSuccess);

    for (const int what : {0, 1, 2}) {
        CAPTURE(what);
        auto request = std::make_optional(r.gate->announce(r.urgent));
        auto engine = std::async(std::launch::async, [&] {
            const auto inside = r.gate->enter(r.batch);
            if (what == 0) return cudaGraphLaunch(exec, s.batch);
            if (what == 1) return cudaMemcpyAsync(&to, &from, sizeof to, cudaMemcpyDefault, s.batch);
            return cudaMemsetAsync(device, 0, 256, s.batch);
        });
        REQUIRE(eventually([&] { return r.gate->held() == 1; }));
        request.reset();
        CHECK(engine.get() == cudaSuccess);
    }
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
    CHECK(to == 7);
    const auto used = r.gate->usage(r.batch);
    CHECK(used.launches == 3);
    CHECK(used.held == 3);
    CHECK(cudaFree(device) == cudaSuccess);
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("threads and streams that are bound to no client pass, without any query", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    const auto request = r.gate->announce(r.urgent);
    standin::forget_calls();
    for (int i = 0; i < 10; ++i) CHECK(launch(s.batch, conv, 1us) == cudaSuccess);
    CHECK(standin::count_all() == 10);  // the launches, and no question to the driver
    CHECK(r.gate->held() == 0);
    CHECK(r.gate->in_flight(r.batch) == 0ns);
}

TEST_CASE("a bound stream's launches are the client's, in whatever thread", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    std::optional<gate_type::binding> bound = r.gate->bind(r.batch, s.batch);
    const auto from_another_thread = [&] {
        return std::async(std::launch::async, [&] { return launch(s.batch, conv, 10us); });
    };
    {
        auto request = std::make_optional(r.gate->announce(r.urgent));
        auto autograd = from_another_thread();
        REQUIRE(eventually([&] { return r.gate->held() == 1; }));
        request.reset();
        CHECK(autograd.get() == cudaSuccess);
    }
    SECTION("nor another client's, whose thread makes them") {
        const auto inside = r.gate->enter(r.urgent);
        auto autograd = from_another_thread();
        REQUIRE(eventually([&] { return r.gate->held() == 1; }));
        const auto more = std::async(std::launch::async, [&] {
            const auto urgent_too = r.gate->enter(r.urgent);
            return launch(s.batch, conv, 10us);
        });
        CHECK(eventually([&] { return r.gate->held() == 2; }));
        r.gate->close();
        CHECK(autograd.get() == cudaSuccess);
    }
    SECTION("until the binding is over") {
        bound.reset();
        const auto request = r.gate->announce(r.urgent);
        CHECK(launch(s.batch, conv, 10us) == cudaSuccess);
        CHECK(r.gate->usage(r.batch).held == 1);
    }
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
}

TEST_CASE("an urgent client is present while its bound streams have work, without a scope", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    const auto bound = r.gate->bind(r.urgent, s.urgent);
    standin::hold(s.urgent);
    for (int i = 0; i < 5; ++i) CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);  // no event is behind the last
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        return launch(s.batch, conv, 10us);
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    standin::let_go(s.urgent);
    CHECK(engine.get() == cudaSuccess);  // the held thread has put an event behind what the other one left open
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
}

TEST_CASE("below a higher client little is in flight", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.in_flight = 200us, .longest_hold = 1h}};
    const streams s;
    std::atomic<int> launched{0};
    {
        const auto inside = r.gate->enter(r.batch);
        for (int i = 0; i < 4; ++i) {  // what conv takes is learnt, behind nothing and behind others
            CHECK(launch(s.batch, conv, 60us) == cudaSuccess);
            standin::advance(1ms);
        }
        CHECK(r.gate->in_flight(r.batch) == 0ns);
    }
    CHECK(r.gate->bound(r.urgent) == 200us);  // as much may be in flight when a request comes
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        for (int i = 0; i < 9; ++i) {
            if (launch(s.batch, conv, 60us) != cudaSuccess) return false;
            ++launched;
        }
        return true;
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    CHECK(launched == 3);  // 180 us of 200
    CHECK(r.gate->in_flight(r.batch) == 180us);
    {
        const auto request = r.gate->announce(r.urgent);  // nothing more passes from here on
        CHECK(r.gate->bound(r.urgent) == 180us);
        standin::advance(180us);
        CHECK(r.gate->bound(r.urgent) == 0us);
        CHECK(launched == 3);
    }
    CHECK(eventually([&] {
        standin::advance(60us);
        return engine.wait_for(0s) == std::future_status::ready;
    }));
    CHECK(engine.get());
    standin::advance(1ms);
}

// ---- what it costs, and what is charged

TEST_CASE("there is an event for a batch, and not for each launch", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    cuda::node node;
    gate_type gate{node, first, gpushare::launch_gate(), no_gaps};
    const auto only = gate.add({});
    const streams s;
    const auto inside = gate.enter(only);
    for (int i = 0; i < 4; ++i) CHECK(launch(s.batch, conv, 10us) == cudaSuccess);  // each behind others, and timed
    standin::advance(1ms);
    CHECK(gate.in_flight(only) == 0ns);
    standin::forget_calls();
    for (int i = 0; i < 600; ++i) CHECK(launch(s.batch, conv, 10us) == cudaSuccess);
    CHECK(standin::count("cuEventRecord") == 600 * 10 / 150 + 1);  // one in front, since the device was idle
    CHECK(standin::count("cuEventQuery") <= 4 * 600 * 10 / 150);
    standin::advance(10ms);
    CHECK(gate.usage(only).time == 6040us);
}

TEST_CASE("a client is charged the time of its launches, times their width", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .sms = 16, .time = manual}};
    cuda::node node;
    gate_type gate{node, first, gpushare::launch_gate(), no_gaps};
    const auto only = gate.add({});
    const streams s;
    {
        const auto inside = gate.enter(only);
        for (int round = 0; round < 8; ++round) {
            standin::next_dimensions() = {.blocks = 4};  // of 16 SMs
            for (int i = 0; i < 10; ++i) CHECK(launch(s.batch, conv, 40us) == cudaSuccess);
            standin::next_dimensions() = {.blocks = 640};
            for (int i = 0; i < 5; ++i) CHECK(launch(s.batch, gemm, 100us) == cudaSuccess);
            standin::advance(2ms);
        }
        standin::next_dimensions() = {};
    }
    const auto used = gate.usage(only);
    CHECK(used.launches == 120);
    CHECK(used.time == 8 * 900us);
    CHECK(in_seconds(used.device_time) == Approx(8 * (100e-6 + 500e-6)).epsilon(0.02));
}

TEST_CASE("a kernel that takes longer for other arguments is told apart by the launches before it",
          "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    cuda::node node;
    gate_type gate{node, first, gpushare::launch_gate(), no_gaps};
    const auto only = gate.add({});
    const streams s;
    const auto conv_behind = [&](const char& other, ns length) {
        {
            const auto inside = gate.enter(only);
            CHECK(launch(s.batch, other, 10us) == cudaSuccess);
            CHECK(launch(s.batch, conv, length) == cudaSuccess);
        }
        const ns predicted = gate.in_flight(only);
        standin::advance(1ms);
        CHECK(gate.in_flight(only) == 0ns);
        return predicted;
    };
    for (int round = 0; round < 2; ++round) {  // the second one has behind each launch what is there from then on
        (void)conv_behind(gemm, 40us);
        (void)conv_behind(norm, 400us);
    }
    CHECK(conv_behind(gemm, 40us) == 50us);
    CHECK(conv_behind(norm, 400us) == 410us);
    CHECK(gate.usage(only).time == 3 * 460us);
}

namespace {

/// Two clients of one level, whose kernels of 100 us have been timed.
struct neighbours {
    const standin::session gpu{{.devices = 1, .sms = 1, .time = manual}};
    cuda::node node;
    gate_type gate{node, first, gpushare::launch_gate(), no_gaps};
    gate_type::client a, b;
    const streams s;

    explicit neighbours(std::uint32_t weight = 0) : a(gate.add({.weight = weight})), b(gate.add({.weight = weight})) {
        of_a();
        standin::advance(1ms);
        CHECK(gate.usage(a).time == 100us);
        standin::advance(50us);  // for so long it keeps its turn
        of_b();
        standin::advance(1ms);
        CHECK(gate.usage(b).time == 100us);
        standin::advance(50us);
    }
    void of_a() {
        const auto inside = gate.enter(a);
        CHECK(launch(s.batch, conv, 100us) == cudaSuccess);
    }
    void of_b() {
        const auto inside = gate.enter(b);
        CHECK(launch(s.urgent, gemm, 100us) == cudaSuccess);
    }
};

}  // namespace

TEST_CASE("the time that others' launches take between a client's own isn't charged to it", "[cuda][launch_gate]") {
    neighbours n;
    n.of_b();
    standin::hold(n.s.batch);  // as the device would, while it works for the other one
    for (int i = 0; i < 2; ++i) n.of_a();
    standin::advance(1ms);
    standin::let_go(n.s.batch);
    standin::advance(1ms);
    CHECK(n.gate.usage(n.a).time == 300us);
    CHECK(n.gate.usage(n.b).time == 200us);
}

TEST_CASE("now and then a client's launches run alone, to be timed, and its neighbour waits", "[cuda][launch_gate]") {
    neighbours n;
    const auto held = n.gate.usage(n.b).held;
    standin::advance(50ms);
    n.of_b();
    auto samples = std::async(std::launch::async, [&] { n.of_a(); });
    REQUIRE(eventually([&] { return n.gate.held() == 1; }));  // until the neighbour's launch is over
    auto neighbour = std::async(std::launch::async, [&] { n.of_b(); });
    REQUIRE(eventually([&] { return n.gate.held() == 2; }));
    const auto is_over = [](auto& f) { return f.wait_for(0s) == std::future_status::ready; };
    REQUIRE(eventually([&] {
        standin::advance(100us);
        return is_over(samples) && is_over(neighbour);
    }));
    standin::advance(1ms);
    CHECK(n.gate.usage(n.a).held == 1);
    CHECK(n.gate.usage(n.b).held == held + 1);
}

TEST_CASE("if clients have weights, one client's launches run at a time", "[cuda][launch_gate]") {
    neighbours n(1);
    const auto held = n.gate.usage(n.b).held;
    n.of_a();
    auto neighbour = std::async(std::launch::async, [&] { n.of_b(); });
    REQUIRE(eventually([&] { return n.gate.held() == 1; }));
    standin::advance(99us);
    CHECK(n.gate.held() == 1);
    standin::advance(1us);
    CHECK(n.gate.usage(n.a).time == 200us);
    standin::advance(50us);  // for so long it keeps its turn
    // Time stands still while the neighbour records an event and launches behind it.
    CHECK(eventually([&] { return neighbour.wait_for(0s) == std::future_status::ready; }));
    standin::advance(1ms);
    CHECK(n.gate.usage(n.b).time == 200us);
    CHECK(n.gate.usage(n.b).held == held + 1);
}

TEST_CASE("gaps between a client's kernels aren't charged", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    cuda::node node;
    gate_type gate{node, first, gpushare::launch_gate(), {.gap = 2us}};
    const auto only = gate.add({});
    const streams s;
    for (int round = 0; round < 10; ++round) {
        const auto inside = gate.enter(only);
        for (int i = 0; i < 30; ++i) CHECK(launch(s.batch, conv, 10us) == cudaSuccess);  // 8 us, and a gap of 2 us
        standin::advance(1ms);
    }
    const auto used = gate.usage(only);
    CHECK(used.launches == 300);
    CHECK(in_seconds(used.time) == Approx(300 * 8e-6).epsilon(0.001));
}

TEST_CASE("a launch that the driver refuses is in nobody's way", "[cuda][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.longest_hold = 1h}};
    const streams s;
    {
        const auto inside = r.gate->enter(r.urgent);
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorLaunchOutOfResources});
        CHECK(launch(s.urgent, gemm, 10us) == cudaErrorLaunchOutOfResources);
        CHECK(r.gate->in_flight(r.urgent) == 0ns);
    }
    const auto inside = r.gate->enter(r.batch);
    CHECK(launch(s.batch, conv, 10us) == cudaSuccess);
    CHECK(r.gate->usage(r.urgent).time == 0ns);
    standin::advance(1ms);
}

TEST_CASE("a refused launch leaves nothing in flight, though its batch ended and the next one is open",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r;
    const streams s;
    const auto inside = r.gate->enter(r.batch);
    for (int i = 0; i < 32; ++i) {  // until both are known behind each other
        CHECK(launch(s.batch, conv, 10us) == cudaSuccess);
        CHECK(launch(s.batch, gemm, 30us) == cudaSuccess);
        { const auto ends_batches = r.gate->enter(r.batch); }
        standin::advance(1ms);
        CHECK(r.gate->in_flight(r.batch) == 0ns);
    }
    standin::before_next("cudaLaunchKernelExC", [&] {
        { const auto ends_batches = r.gate->enter(r.batch); }
        CHECK(launch(s.batch, gemm, 30us) == cudaSuccess);
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorLaunchOutOfResources});
    });
    CHECK(launch(s.batch, conv, 10us) == cudaErrorLaunchOutOfResources);
    { const auto ends_batches = r.gate->enter(r.batch); }
    standin::advance(1ms);
    CHECK(r.gate->in_flight(r.batch) == 0ns);
}

// ---- what can go wrong

TEST_CASE("an engine's lock that a held thread holds costs an urgent thread the longest hold",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.longest_hold = 20ms}};
    const streams s;
    std::mutex of_engine;
    auto request = std::make_optional(r.gate->announce(r.urgent));
    auto engine = std::async(std::launch::async, [&] {
        const std::lock_guard lock(of_engine);
        const auto inside = r.gate->enter(r.batch);
        return launch(s.batch, conv, 10us);
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    CHECK_FALSE(r.gate->take_forced());
    standin::advance(20ms);
    {
        const std::lock_guard lock(of_engine);  // comes through
    }
    CHECK(engine.get() == cudaSuccess);
    const auto forced = r.gate->take_forced();
    REQUIRE(forced);
    CHECK(forced->client == r.batch.number());
    CHECK(forced->held_by == r.urgent.number());
    CHECK(forced->held == 20ms);
    CHECK_FALSE(r.gate->take_forced());
    standin::advance(1ms);
}

// A held thread has launched nothing that waits for the request. So the default must not be waits
// in streams.
TEST_CASE("by default a request may wait for the whole device, or for the lock of a thread that does so",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    void *own = nullptr, *theirs = nullptr;
    for (void** const p : {&own, &theirs}) REQUIRE(cudaMalloc(p, 1 << 20) == cudaSuccess);
    std::mutex of_allocator;
    std::atomic<bool> locked{false};
    auto request = std::make_optional(r.gate->announce(r.urgent));
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        const cudaError_t launched = launch(s.batch, conv, 10us);
        const std::lock_guard lock(of_allocator);
        locked = true;
        return launched == cudaSuccess ? cudaFree(theirs) : launched;
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1 || locked; }));
    {
        const auto inside = r.gate->enter(r.urgent);
        CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
        SECTION("it frees memory, which waits for all streams") {
            CHECK(cudaFree(std::exchange(own, nullptr)) == cudaSuccess);
        }
        SECTION("the other thread does so, with an allocator's lock") { const std::lock_guard lock(of_allocator); }
    }
    request.reset();
    CHECK(engine.get() == cudaSuccess);
    CHECK(cudaFree(own) == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
}

TEST_CASE("a launch into a capture is only recorded: it isn't held, followed or invalidated",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    cudaGraph_t graph = nullptr;
    auto request = std::make_optional(r.gate->announce(r.urgent));
    {
        const auto inside = r.gate->enter(r.batch);
        REQUIRE(cudaStreamBeginCapture(s.batch, cudaStreamCaptureModeGlobal) == cudaSuccess);
        CHECK(launch(s.batch, conv, 10us) == cudaSuccess);
        CHECK(launch(s.batch, gemm, 10us) == cudaSuccess);
    }
    // A global capture forbids all threads what might wait, and the gate asks and makes events
    // beside it.
    std::thread([&] {
        const auto inside = r.gate->enter(r.urgent);
        for (int i = 0; i < 3; ++i) CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
    }).join();
    CHECK(r.gate->in_flight(r.batch) == 0ns);
    request.reset();
    CHECK(eventually([&] { return r.gate->in_flight(r.urgent) == 0ns; }));
    REQUIRE(cudaStreamEndCapture(s.batch, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(r.gate->usage(r.batch).launches == 0);
}

TEST_CASE("a capture that begins behind launches takes in none of the gate's events", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r;
    const streams s;
    cudaGraph_t graph = nullptr;
    {
        const auto inside = r.gate->enter(r.batch);
        for (int i = 0; i < 4; ++i) CHECK(launch(s.batch, conv, 10us) == cudaSuccess);  // a batch each
        standin::advance(1ms);
        CHECK(r.gate->usage(r.batch).launches == 4);
        CHECK(launch(s.batch, conv, 10us) == cudaSuccess);  // no event is behind this one
        REQUIRE(cudaStreamBeginCapture(s.batch, cudaStreamCaptureModeGlobal) == cudaSuccess);
    }
    standin::forget_calls();
    standin::advance(1ms);
    CHECK(r.gate->usage(r.batch).launches == 4);
    REQUIRE(cudaStreamEndCapture(s.batch, &graph) == cudaSuccess);
    { const auto inside = r.gate->enter(r.batch); }
    standin::advance(1ms);
    CHECK(r.gate->usage(r.batch).launches == 5);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("streams and threads may end with work that others wait for", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    rig r{{.longest_hold = 1h}};
    streams s;
    const auto bound = r.gate->bind(r.urgent, s.urgent);
    standin::hold(s.urgent);
    std::thread([&] {
        const auto inside = r.gate->enter(r.urgent);
        for (int i = 0; i < 5; ++i) CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);  // the last one's batch is open
    }).join();
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        return launch(s.batch, conv, 10us);
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    standin::let_go(s.urgent);
    CHECK(cudaStreamDestroy(std::exchange(s.urgent, nullptr)) == cudaSuccess);
    CHECK(engine.get() == cudaSuccess);
    // Another stream, which may have the handle that the old one had, is nobody's.
    s.urgent = raw::make_stream();
    const auto request = r.gate->announce(r.urgent);
    CHECK(launch(s.urgent, conv, 10us) == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
}

TEST_CASE("a stream may be destroyed with more in flight than a gate can follow", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.longest_hold = 1h}};
    streams s;
    {
        const auto inside = r.gate->enter(r.urgent);
        for (int i = 0; i < 100; ++i) CHECK(launch(s.urgent, gemm, 200us) == cudaSuccess);
        CHECK(cudaStreamDestroy(std::exchange(s.urgent, nullptr)) == cudaSuccess);
        standin::advance(19ms);
        CHECK(r.gate->in_flight(r.urgent) > 0ns);
        standin::advance(1ms);
        CHECK(r.gate->in_flight(r.urgent) == 0ns);
    }
    CHECK(r.gate->usage(r.urgent).launches == 100);
}

TEST_CASE("a gate learns of the end of a launch once, though another gate leaves meanwhile",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    auto& hub = cuda::detail::launch_hub::of_process();
    const auto leaves = std::make_shared<following_gate>(), stays = std::make_shared<following_gate>();
    hub.join(leaves);
    hub.join(stays);
    const streams s;
    const auto number = hub.bind(s.batch, stays, {});
    stays->at_end = [&] { hub.leave(*leaves); };
    CHECK(launch(s.batch, conv, 10us) == cudaSuccess);
    CHECK(stays->ended == 1);
    hub.unbind(number);
    hub.leave(*stays);
}

TEST_CASE("a stream stays bound as long as the later one of two bindings is there", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    const bool by_calls = GENERATE(false, true);
    if (by_calls) standin::take_subscriber("a profiler");
    {
        rig r{{.longest_hold = 1h}, {.gap = ns{0}, .calls_instead = true}};
        const streams s;
        auto before = std::make_optional(r.gate->bind(r.batch, s.batch));
        const auto after = r.gate->bind(r.batch, s.batch);
        before.reset();
        {
            std::unique_ptr<gate_type::scope> call;
            if (by_calls) call.reset(new gate_type::scope(r.gate->enter(r.batch)));
            CHECK(launch(s.batch, conv, 500us) == cudaSuccess);
        }
        CHECK(r.gate->in_flight(r.batch) > 0ns);
        standin::advance(500us);
        CHECK(r.gate->in_flight(r.batch) == 0ns);
        CHECK(r.gate->usage(r.batch).time == 500us);
    }
    if (by_calls) standin::give_subscriber_back();
}

TEST_CASE("scopes of a thread may go in any order", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.longest_hold = 1h}};
    const streams s;
    std::unique_ptr<gate_type::scope> outer(new gate_type::scope(r.gate->enter(r.batch)));
    std::unique_ptr<gate_type::scope> inner(new gate_type::scope(r.gate->enter(r.urgent)));
    outer.reset();
    CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
    inner.reset();
    CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);  // nobody's
    standin::advance(1ms);
    CHECK(r.gate->usage(r.urgent).launches == 1);
    CHECK(r.gate->usage(r.batch).launches == 0);
    CHECK(cuda::detail::thread_binding::innermost() == nullptr);
}

TEST_CASE("a thread without a context reads what was measured", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.longest_hold = 1h}};
    const streams s;
    {
        const auto inside = r.gate->enter(r.batch);
        CHECK(launch(s.batch, conv, 500us) == cudaSuccess);
    }
    standin::advance(1ms);
    std::thread([&] { CHECK(r.gate->usage(r.batch).time == 500us); }).join();
}

TEST_CASE("a request that ends in a thread without a context is followed to its end", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    rig r{{.longest_hold = 1h}};
    const streams s;
    const auto bound = r.gate->bind(r.urgent, s.urgent);
    for (int i = 0; i < 6; ++i) CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
    standin::advance(1ms);
    CHECK(r.gate->in_flight(r.urgent) == 0ns);
    auto request = std::make_optional(r.gate->announce(r.urgent));
    for (int i = 0; i < 3; ++i) CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
    // (Driver API, cuEventRecord: CUDA_ERROR_INVALID_CONTEXT is one of its errors.)
    standin::inject({.call = "cuEventRecord", .code = CUDA_ERROR_INVALID_CONTEXT});
    std::thread([&] { request.reset(); }).join();
    CHECK(standin::faults_left() == 0);
    CHECK(r.gate->in_flight(r.urgent) > 0ns);
    standin::advance(30us);
    CHECK(r.gate->in_flight(r.urgent) == 0ns);
}

TEST_CASE("a close, a removal and a destructor let held threads go", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    rig r{{.longest_hold = 1h}};
    const streams s;
    std::optional<gate_type::client> batch = r.gate->add({}), urgent = r.gate->add({.level = 2});
    const auto request = r.gate->announce(*urgent);
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(*batch);
        return launch(s.batch, conv, 10us);
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    SECTION("the gate") { r.gate->close(); }
    SECTION("the client that is held") { batch.reset(); }
    SECTION("the client that it is held for") { urgent.reset(); }
    SECTION("all of it") {
        r.gate.reset();
        CHECK_FALSE(standin::has_subscriber());
    }
    CHECK(engine.get() == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
}

TEST_CASE("nobody is held for a device that is lost", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    {
        rig r{{.longest_hold = 1h}};
        const streams s;
        standin::hold(s.urgent);
        {
            const auto inside = r.gate->enter(r.urgent);
            CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
        }
        auto engine = std::async(std::launch::async, [&] {
            const auto inside = r.gate->enter(r.batch);
            return launch(s.batch, conv, 10us);
        });
        REQUIRE(eventually([&] { return r.gate->held() == 1; }));
        standin::poison(0, cudaErrorIllegalAddress);
        CHECK(engine.get() == cudaErrorIllegalAddress);
        CHECK(r.node.lost(first));
    }
    (void)standin::take_findings();
}

TEST_CASE("a child of fork() waits for none of its parent's held threads", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    rig r;
    const streams s;
    auto request = std::make_optional(r.gate->announce(r.urgent));
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = r.gate->enter(r.batch);
        return launch(s.batch, conv, 10us);
    });
    REQUIRE(eventually([&] { return r.gate->held() == 1; }));
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(300);
        {
            const auto inside = r.gate->enter(r.batch);
            if (launch(s.batch, conv, 10us) != cudaErrorInitializationError) ::_exit(2);
        }
        request.reset();
        r.gate.reset();
        ::_exit(EXIT_SUCCESS);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS));
    request.reset();
    CHECK(engine.get() == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
}

TEST_CASE("gates come and go while threads launch", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    cuda::node node;
    const streams s;
    std::atomic<int> failed{0};
    {
        const support::background unbound(1, [&](unsigned) {
            if (launch(s.batch, conv, 1us) != cudaSuccess) ++failed;
        });
        for (int round = 0; round < 40; ++round) {
            gate_type gate{node, first};
            auto urgent = gate.add({.level = 1}), batch = gate.add({});
            const auto bound = gate.bind(batch, s.batch);
            support::together(2, [&](unsigned rank) {
                for (int i = 0; i < 10; ++i) {
                    const auto inside = gate.enter(rank == 0 ? urgent : batch);
                    if (launch(rank == 0 ? s.urgent : s.batch, rank == 0 ? gemm : norm, 1us) != cudaSuccess) ++failed;
                }
            });
        }
    }
    CHECK(failed == 0);
    CHECK_FALSE(standin::has_subscriber());
    for (const cudaStream_t each : {s.urgent, s.batch}) CHECK(cudaStreamSynchronize(each) == cudaSuccess);
}

// ---- a subscriber that is there already

TEST_CASE("another subscriber to CUPTI is named", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    cuda::node node;
    standin::take_subscriber("Nsight Systems");
    try {
        const gate_type gate{node, first};
        FAIL("there are two subscribers");
    } catch (const cuda::subscriber_taken& e) {
        CHECK(e.code() == errc::not_supported);
        CHECK(e.holder() == "Nsight Systems");
        CHECK_THAT(e.what(), Contains("Nsight Systems"));
    }
    standin::give_subscriber_back();
    const gate_type gate{node, first};
    const gate_type another{node, first};  // has the same subscriber
    CHECK(gate.gates_launches());
}

TEST_CASE("without the subscriber a scope waits for its whole call", "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    standin::take_subscriber("a profiler");
    {
        rig r{{.longest_hold = 1h}, {.calls_instead = true}};
        CHECK_FALSE(r.gate->gates_launches());
        const streams s;
        std::optional<gate_type::binding> urgent, batch;
        const bool bound = GENERATE(true, false);
        if (bound) {
            urgent.emplace(r.gate->bind(r.urgent, s.urgent));
            batch.emplace(r.gate->bind(r.batch, s.batch));
        }
        std::atomic<int> entered{0};
        const auto callbacks = standin::callbacks();
        std::unique_ptr<gate_type::scope> request(new gate_type::scope(r.gate->enter(r.urgent)));
        CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
        auto engine = std::async(std::launch::async, [&] {
            const auto inside = r.gate->enter(r.batch);
            ++entered;
            return launch(s.batch, conv, 10us);
        });
        REQUIRE(eventually([&] { return r.gate->held() == 1; }));
        CHECK(entered == 0);
        if (bound) standin::hold(s.urgent);
        request.reset();
        if (bound) {
            CHECK(r.gate->in_flight(r.urgent) > 0ns);
            standin::let_go(s.urgent);
        }
        CHECK(engine.get() == cudaSuccess);
        CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
        CHECK(r.gate->usage(r.urgent).launches == 1);
        CHECK(r.gate->usage(r.batch).held == 1);
        CHECK(standin::callbacks() == callbacks);
    }
    standin::give_subscriber_back();
}

TEST_CASE("without the subscriber a call doesn't touch a stream that is no longer bound",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    standin::take_subscriber("a profiler");
    {
        rig r{{.longest_hold = 1h}, {.calls_instead = true}};
        streams s;
        {
            const auto bound = r.gate->bind(r.batch, s.batch);
            const auto inside = r.gate->enter(r.batch);
            CHECK(launch(s.batch, conv, 10us) == cudaSuccess);
        }
        CHECK(cudaStreamDestroy(std::exchange(s.batch, nullptr)) == cudaSuccess);
        standin::advance(1ms);
        const auto inside = r.gate->enter(r.batch);
    }
    standin::give_subscriber_back();
}

}  // namespace launch_gate_test
