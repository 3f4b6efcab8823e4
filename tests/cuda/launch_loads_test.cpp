// SPDX-License-Identifier: Apache-2.0
// Code that the driver loads inside a launch or another call, for which it may wait for the device.
#include <cuda.h>
#include <cupti.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <vector>

#include <gpushare/backend/cuda/detail/loaded_code.hpp>
#include <gpushare/backend/cuda/detail/patience.hpp>
#include <gpushare/backend/cuda/detail/sync_call.hpp>
#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "standins/cuda/cupti.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"
#include "waiting_rig.hpp"

namespace launch_loads_test {

using namespace launch_rig;
using cuda::detail::code_use;

namespace {

constexpr standin::options lazy{.devices = 1, .time = manual, .loading_waits = true};

/// Kernels that no test has launched before.
const char prefill = 0, decode = 0;

/// A graph of one kernel, captured by a thread that is no client's.
cudaGraph_t capture(cudaStream_t s, const char& kernel, std::atomic<int>* ran = nullptr) {
    REQUIRE(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(launch(s, kernel, 10us, ran) == cudaSuccess);
    return raw::end_capture(s);
}

/// The call of a driver's function that the stand-in lacks, and what lower clients do inside.
template <class Parameters>
int run_inside(waiting_rig& w, CUpti_CallbackId id, const Parameters& p, CUresult result = CUDA_SUCCESS) {
    const int before = w.ran;
    (void)standin::detail::traced_call(id, "", p, [&] {
        standin::advance(1ms);
        return static_cast<cudaError_t>(result);
    });
    return w.ran - before;
}

}  // namespace

TEST_CASE("a lower client's first launch of a kernel waits in its thread beside a request",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{lazy};
    waiting_rig w;
    const bool has_work = GENERATE(true, false);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    if (has_work) w.batch_launches(2);
    standin::forget_calls();
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.batch);
        return launch(w.s.batch, prefill, 100us, &w.ran);
    });
    REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
    standin::advance(1ms);
    CHECK(standin::count("cudaLaunchKernelExC") == 0);
    CHECK(w.ran == 0);
    request.reset();
    CHECK(meanwhile([&] { return engine.get(); }) == cudaSuccess);
    standin::advance(1ms);
    CHECK(w.ran == (has_work ? 3 : 1));
    CHECK(w.r.gate->usage(w.r.batch).held == 1);
    CHECK_FALSE(w.r.gate->take_forced());

    request.emplace(w.r.gate->announce(w.r.urgent));
    {
        const auto inside = w.r.gate->enter(w.r.batch);
        CHECK(launch(w.s.batch, prefill, 100us) == cudaSuccess);  // runs ahead
    }
    CHECK(w.r.gate->usage(w.r.batch).held == 1);
    request.reset();
    standin::advance(1ms);
}

TEST_CASE("a request's first launch of a kernel comes through beside closed streams", "[cuda][launch_gate][fault]") {
    const standin::session gpu{lazy};
    waiting_rig w;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    const auto urgent_launches = [&] {
        return meanwhile([&] {
            const auto inside = w.r.gate->enter(w.r.urgent);
            return launch(w.s.urgent, decode, 10us);
        });
    };
    w.batch_launches(2);
    CHECK(urgent_launches() == cudaSuccess);
    CHECK(w.ran == 2);
    w.batch_launches(1);  // closed again, and the kernel is loaded
    CHECK(urgent_launches() == cudaSuccess);
    standin::advance(1ms);
    CHECK(w.ran == 2);
    CHECK_FALSE(w.r.gate->take_forced());
    request.reset();
    standin::advance(1ms);
    CHECK(w.ran == 3);
}

TEST_CASE("an unbound thread's first launch beside closed streams comes through after the longest hold",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{lazy};
    waiting_rig w{{.longest_hold = 20ms}};
    const cudaStream_t third = raw::make_stream();
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    const instant since = device_clock::now();
    CHECK(meanwhile([&] { return launch(third, prefill, 10us); }) == cudaSuccess);
    CHECK(device_clock::now() - since >= 20ms);
    w.r.was_forced();
    CHECK(w.ran == 1);
    w.batch_launches(1);  // closed again
    CHECK(launch(third, prefill, 10us) == cudaSuccess);
    standin::advance(1ms);
    CHECK(w.ran == 1);
    raw::destroy(third);
    request.reset();
    standin::advance(10ms);
}

TEST_CASE("an engine's lock around a first launch costs the longest hold", "[cuda][launch_gate][fault]") {
    const standin::session gpu{lazy};
    waiting_rig w{{.longest_hold = 20ms}};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    call_under_lock(w, [&] { return launch(w.s.batch, prefill, 100us); });
    request.reset();
    standin::advance(10ms);
}

TEST_CASE("a request's graph is made and changed beside closed streams", "[cuda][launch_gate][fault]") {
    const standin::session gpu{lazy};
    waiting_rig w;
    const bool changes = GENERATE(true, false);
    const cudaGraph_t first_graph = capture(w.s.urgent, prefill), next = capture(w.s.urgent, decode);
    cudaGraphExec_t exec = nullptr;
    if (changes) REQUIRE(cudaGraphInstantiate(&exec, first_graph, 0) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    w.batch_launches(1);
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(w.r.urgent);
              cudaGraphExecUpdateResultInfo why{};
              return changes ? cudaGraphExecUpdate(exec, next, &why) : cudaGraphInstantiate(&exec, first_graph, 0);
          }) == cudaSuccess);
    CHECK(w.ran == 1);
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    for (const cudaGraph_t g : {first_graph, next}) CHECK(cudaGraphDestroy(g) == cudaSuccess);
    request.reset();
    standin::advance(10ms);
}

TEST_CASE("the waits are open inside the first launch of a graph, and of a graph with new kernels",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const cudaGraph_t graph = capture(w.s.urgent, prefill);
    cudaGraphExec_t exec = nullptr;
    REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    const auto run_beside = [&] {  // by lower clients
        const int before = w.ran;
        w.batch_launches(1);
        const auto inside = w.r.gate->enter(w.r.urgent);
        standin::before_next("cudaGraphLaunch", [] { standin::advance(1ms); });
        CHECK(cudaGraphLaunch(exec, w.s.urgent) == cudaSuccess);
        return w.ran - before;
    };
    CHECK(run_beside() == 1);
    CHECK(run_beside() == 0);
    cudaGraph_t other = nullptr;
    {
        const auto inside = w.r.gate->enter(w.r.urgent);
        other = capture(w.s.urgent, decode);  // the graph may have it now
    }
    CHECK(run_beside() >= 1);
    CHECK(run_beside() == 0);
    standin::advance(1ms);
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    for (const cudaGraph_t g : {graph, other}) CHECK(cudaGraphDestroy(g) == cudaSuccess);
    request.reset();
    standin::advance(10ms);
}

TEST_CASE("waits are open while code is looked up for the first time, and not later", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    auto* const module = reinterpret_cast<CUmodule>(16);
    auto* const function = reinterpret_cast<CUfunction>(32);
    const cuModuleGetFunction_params by_name{nullptr, module, "attention"}, other_name{nullptr, module, "softmax"};
    const cuFuncGetAttribute_params by_handle{nullptr, CU_FUNC_ATTRIBUTE_NUM_REGS, function};
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    const auto look_up = [&](const auto& p, CUpti_CallbackId id, CUresult result = CUDA_SUCCESS) {
        w.batch_launches(1);
        const auto inside = w.r.gate->enter(w.r.urgent);
        return run_inside(w, id, p, result);
    };
    constexpr auto get_function = CUPTI_DRIVER_TRACE_CBID_cuModuleGetFunction;
    constexpr auto get_attribute = CUPTI_DRIVER_TRACE_CBID_cuFuncGetAttribute;
    CHECK(look_up(by_name, get_function, CUDA_ERROR_NOT_FOUND) == 1);
    CHECK(look_up(by_name, get_function) == 1);
    CHECK(look_up(by_name, get_function) == 0);
    CHECK(look_up(other_name, get_function) > 0);
    CHECK(look_up(by_handle, get_attribute) == 1);
    CHECK(look_up(by_handle, get_attribute) == 0);
    request.reset();
    standin::advance(10ms);
}

TEST_CASE("once code was unloaded, each kernel counts as new", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    const cuModuleUnload_params of_any{reinterpret_cast<CUmodule>(16)};
    CHECK(run_inside(w, CUPTI_DRIVER_TRACE_CBID_cuModuleUnload, of_any) == 0);
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    auto engine = std::async(std::launch::async, [&] { w.batch_launches(1); });
    REQUIRE(eventually([&] { return w.r.gate->held() == 1; }));
    request.reset();
    engine.get();
    standin::advance(1ms);
    CHECK(w.ran == 1);
}

TEST_CASE("a launch that fails has loaded nothing", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    waiting_rig w;
    auto request = std::make_optional(w.r.gate->announce(w.r.urgent));
    const auto run_beside = [&](cudaError_t expected) {
        const int before = w.ran;
        w.batch_launches(1);
        const auto inside = w.r.gate->enter(w.r.urgent);
        standin::before_next("cudaLaunchKernelExC", [] { standin::advance(1ms); });
        CHECK(launch(w.s.urgent, prefill, 10us) == expected);
        return w.ran - before;
    };
    standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidConfiguration, .skip = 1});
    CHECK(run_beside(cudaErrorInvalidConfiguration) == 1);
    CHECK(run_beside(cudaSuccess) == 1);
    CHECK(run_beside(cudaSuccess) == 0);
    standin::advance(1ms);
    request.reset();
    standin::advance(10ms);
}

// ---- the table

TEST_CASE("code is known by its handle, its name, its context and its use", "[cuda][launch_gate]") {
    const int a = 0, b = 0;
    cuda::detail::loaded_code seen;
    const code_use launched{.what = &a, .context = &b};
    CHECK_FALSE(seen.has(launched));
    seen.add(launched);
    seen.add(launched);
    CHECK(seen.has(launched));
    CHECK_FALSE(seen.has({.what = &b, .context = &b}));
    CHECK_FALSE(seen.has({.what = &a, .context = &a}));
    CHECK_FALSE(seen.has({.what = &a, .name = "f", .context = &b}));
    CHECK_FALSE(seen.has({.what = &a, .context = &b, .how = code_use::way::look_up}));
    seen.clear();
    CHECK_FALSE(seen.has(launched));
}

TEST_CASE("a graph counts as new once another graph has its handle, or a new function was recorded",
          "[cuda][launch_gate]") {
    const int graph = 0, function = 0, context = 0;
    cuda::detail::loaded_code seen;
    const code_use launched{.what = &graph, .context = &context, .graph = true};
    seen.add(launched);
    CHECK(seen.has(launched));
    seen.forget(&graph);
    CHECK_FALSE(seen.has(launched));
    seen.add(launched);
    const code_use recorded{.what = &function, .context = &context, .how = code_use::way::record};
    seen.add(recorded);
    CHECK_FALSE(seen.has(launched));
    seen.add(launched);
    seen.add(recorded);
    CHECK(seen.has(launched));
}

TEST_CASE("a full table forgets some code and keeps the latest", "[cuda][launch_gate]") {
    const int context = 0;
    std::vector<char> functions(100'000);
    cuda::detail::loaded_code seen;
    std::size_t known = 0;
    for (const char& f : functions) {
        const code_use use{.what = &f, .context = &context};
        seen.add(use);
        CHECK(seen.has(use));
    }
    for (const char& f : functions) known += seen.has({.what = &f, .context = &context});
    CHECK(known <= 32'768);
    CHECK(known >= 16'384);
}

TEST_CASE("the table keeps all code of a large program", "[cuda][launch_gate]") {
    constexpr std::uintptr_t functions = 16'000;
    cuda::detail::loaded_code seen;
    const auto use = [](std::uintptr_t i) { return code_use{.what = reinterpret_cast<const void*>(i * 16)}; };
    for (std::uintptr_t i = 1; i <= functions; ++i) seen.add(use(i));
    std::uintptr_t known = 0;
    for (std::uintptr_t i = 1; i <= functions; ++i) known += seen.has(use(i)) ? 1U : 0U;
    CHECK(known == functions);
}

// ---- how a held thread looks

TEST_CASE("a held thread looks often again once something has happened", "[cuda][launch_gate]") {
    cuda::detail::patience seen;
    const auto looks = [&](std::uint32_t whose, bool request, ns left) {
        unsigned first_of_all = seen.look(whose, request, left);
        for (int i = 0; i < 100; ++i) (void)seen.look(whose, request, left);
        return first_of_all;
    };
    CHECK(looks(1, true, 500us) == 0);
    CHECK(looks(1, true, 100us) == 101);  // the request keeps the thread back in any case
    CHECK(looks(1, true, 0us) == 0);      // the request may end now
    CHECK(looks(1, true, 0us) == 101);
    CHECK(looks(1, false, 0us) == 0);
    CHECK(looks(1, false, 300us) == 0);
    CHECK(looks(1, false, 100us) == 0);
    CHECK(looks(1, false, 100us) == 101);
    CHECK(looks(2, false, 100us) == 0);
}

TEST_CASE("a held thread takes what has passed off the time that it waits for", "[cuda][launch_gate]") {
    cuda::detail::patience seen;
    CHECK(seen.remaining(1, 300us, instant{1ms}) == 300us);
    CHECK(seen.remaining(1, 300us, instant{1ms + 150us}) == 150us);
    CHECK(seen.remaining(1, 300us, instant{2ms}) == 0us);  // it takes longer than predicted
    CHECK(seen.remaining(1, 200us, instant{2ms}) == 200us);
    CHECK(seen.remaining(2, 200us, instant{3ms}) == 200us);
}

}  // namespace launch_loads_test
