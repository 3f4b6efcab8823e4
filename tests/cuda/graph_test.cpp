// SPDX-License-Identifier: Apache-2.0
// Graphs and green contexts of CUDA, over the stand-in.
#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace graph_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using gpushare::device_id;
using gpushare::errc;
using gpushare::never;
using gpushare::operation_error;
using gpushare::priority;

namespace cuda = gpushare::cuda;

using support::code_of;

namespace {

constexpr device_id d{0};

struct fixture {
    const standin::session gpu;
    cuda::node node;
    cuda::stream s = node.make_stream(d);
};

/// *counter += step, by one thread.
struct add {
    int* counter;
    int step;
    template <class C>
    void operator()(C& ctx) const {
        if (ctx.block_rank() == 0 && ctx.thread_rank() == 0) *counter += step;
    }
};

}  // namespace

TEST_CASE_METHOD(fixture, "captured work runs at each launch, and not before", "[cuda][graph]") {
    int n = 0;
    const auto g = cuda::capture(s, [&](cuda::stream& to) {
        to.launch({}, add{&n, 1});
        to.launch({}, add{&n, 10});
    });
    CHECK(g.num_nodes() == 2);
    cuda::graph_executable run{g};
    CHECK(s.record().wait(never));
    CHECK(n == 0);
    for (int i = 0; i < 3; ++i) run.launch(s);
    CHECK(s.record().wait(never));
    CHECK(n == 33);
}

TEST_CASE_METHOD(fixture, "a capture that throws leaves a usable stream and no graph", "[cuda][graph]") {
    int n = 0;
    const auto spoilt = [&] {
        (void)cuda::capture(s, [&](cuda::stream& to) {
            to.launch({}, add{&n, 1});
            throw std::runtime_error("half-way");
        });
    };
    CHECK_THROWS_AS(spoilt(), std::runtime_error);
    CHECK_FALSE(s.capturing());
    CHECK(standin::existing().graphs == 0);
    s.launch({}, add{&n, 5});
    CHECK(s.record().wait(never));
    CHECK(n == 5);
}

TEST_CASE_METHOD(fixture, "a capture that was spoilt says so at its end", "[cuda][graph]") {
    cuda::graph_capture scope{s};
    CHECK(code_of([&] { cuda::graph_capture twice{s}; }) == errc::capturing);
    CHECK(s.capturing());
    (void)cudaStreamSynchronize(s.native_handle());  // forbidden, and CUDA ends the capture
    CHECK(code_of([&] { (void)scope.finish(); }) == errc::capturing);
    CHECK_FALSE(s.capturing());
    CHECK(s.record().wait(never));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    (void)standin::take_findings();  // which is the test's own doing
}

TEST_CASE_METHOD(fixture, "a point that another thread records as a capture begins isn't of the graph",
                 "[cuda][graph][threads]") {
    std::promise<void> begun, go_on;
    std::size_t nodes = 0;
    std::thread capturer;
    standin::before_next("cudaEventRecord", [&] {
        capturer = std::thread([&] {
            cuda::graph_capture scope{s};
            begun.set_value();
            s.launch({}, gpushare::detail::empty_kernel{});
            go_on.get_future().wait();
            nodes = scope.finish().num_nodes();
        });
        begun.get_future().wait();
    });
    CHECK(code_of([&] { (void)s.share().record(); }) == errc::capturing);
    CHECK(s.capturing());
    go_on.set_value();
    capturer.join();
    CHECK(nodes == 1);
    CHECK(s.record().wait(never));
}

TEST_CASE_METHOD(fixture, "a capture that another thread begins beside a wait doesn't get the wait",
                 "[cuda][graph][threads]") {
    auto other = node.make_stream(d);
    standin::hold(other.native_handle());
    other.launch({}, gpushare::detail::empty_kernel{});
    const auto outside = other.record();
    std::promise<void> begun, go_on;
    errc ended = errc::none;
    std::size_t nodes = 1;
    std::thread capturer;
    standin::before_next("cudaStreamWaitEvent", [&] {
        capturer = std::thread([&] {
            ended = code_of([&] {
                cuda::graph_capture scope{s};
                begun.set_value();
                go_on.get_future().wait();
                nodes = scope.finish().num_nodes();
            });
        });
        // It begins when the stream has its wait, so nobody can wait for it here.
        CHECK(begun.get_future().wait_for(50ms) == std::future_status::timeout);
    });
    CHECK_NOTHROW(s.wait(outside));
    go_on.set_value();
    capturer.join();
    CHECK(ended == errc::none);
    CHECK(nodes == 0);
    const auto behind = s.record();
    CHECK_FALSE(behind.reached());
    standin::let_go(other.native_handle());
    CHECK(behind.wait(never));
}

TEST_CASE_METHOD(fixture, "threads that record beside captures spoil none, and have no point of one",
                 "[cuda][graph][threads]") {
    std::atomic<bool> done{false};
    std::atomic<int> points{0}, wrong{0};
    std::thread recorder([&] {
        const auto shared = s.share();
        while (!done) try {
                ++(shared.record().wait(gpushare::host::steady_clock::now() + 5min) ? points : wrong);
            } catch (const gpushare::error& e) {
                if (e.code() != errc::capturing) ++wrong;
            }
    });
    int captures = 0;
    for (; captures < 200 || points < 5; ++captures) {
        const auto g = cuda::capture(s, [&](cuda::stream& to) { to.launch({}, gpushare::detail::empty_kernel{}); });
        REQUIRE(g.num_nodes() == 1);
    }
    done = true;
    recorder.join();
    CHECK(wrong == 0);
}

TEST_CASE("a graph belongs to its device", "[cuda][graph]") {
    const standin::session gpu{{.devices = 2}};
    cuda::node node, beside{{.devices = {1}}};
    auto near = node.make_stream({0}), far = node.make_stream({1}), same = beside.make_stream({0});
    const auto graph_on = [](cuda::stream& s) {
        return cuda::capture(s, [](cuda::stream& to) { to.launch({}, gpushare::detail::empty_kernel{}); });
    };
    cuda::graph_executable run{graph_on(far)};
    CHECK(code_of([&] { run.launch(near); }) == errc::invalid_specification);
    CHECK_FALSE(run.update(graph_on(near)));
    CHECK_NOTHROW(run.launch(same));  // another node's stream of the very device
    CHECK(run.update(graph_on(same)));
    CHECK(same.record().wait(never));
    // The stand-in notices, too.
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    CHECK(cudaGraphLaunch(run.native_handle(), near.native_handle()) == cudaSuccess);
    CHECK(near.record().wait(never));
    CHECK(standin::findings().find("captured on one device") != std::string::npos);
    run = cuda::graph_executable{graph_on(far)};
    { const cuda::graph_executable gone = std::move(run); }
    near = cuda::stream(std::move(far));
    standin::take_findings();
}

TEST_CASE("a partition goes after the graphs that were captured in it, whichever way they go", "[cuda][graph][green]") {
    const standin::session gpu;
    cuda::node node;
    const auto can = cuda::query_sm_split(node, {0});
    auto parts = cuda::make_green_contexts(node, {0}, gpushare::equal_sms(can, 2));
    const auto graph_in = [](cuda::green_context& part) {
        auto s = part.make_stream();
        return cuda::capture(s, [](cuda::stream& to) { to.launch({}, gpushare::detail::empty_kernel{}); });
    };
    auto a = graph_in(parts[0]), b = graph_in(parts[1]);
    cuda::graph_executable run_a{a}, run_b{b};
    parts.clear();
    standin::forget_calls();
    a = std::move(b);
    run_a = std::move(run_b);
    std::string order;
    const auto note = [&] {
        order.clear();
        for (const auto& c : standin::calls()) {
            const std::string_view name = c.name;
            if (name == "cudaGraphDestroy" || name == "cudaGraphExecDestroy") order += 'g';
            if (name == "cuGreenCtxDestroy") order += 'p';
        }
    };
    note();
    CHECK(order == "ggp");
    standin::forget_calls();
    {
        const auto last_graph = std::move(a);
        const auto last_run = std::move(run_a);
    }
    note();
    CHECK(order == "ggp");
}

TEST_CASE_METHOD(fixture, "threads that know nothing of a capture call what they like beside it",
                 "[cuda][graph][capture]") {
    const auto g = cuda::capture(s, [&](cuda::stream& to) {
        to.launch({}, gpushare::detail::empty_kernel{});
        std::thread([] {
            void* p = nullptr;
            CHECK(cudaMalloc(&p, 100) == cudaSuccess);
            CHECK(cudaFree(p) == cudaSuccess);
        }).join();
    });
    CHECK(g.num_nodes() == 1);
}

TEST_CASE_METHOD(fixture, "an executable takes new arguments, and refuses another shape", "[cuda][graph]") {
    int n = 0;
    const auto graph_of = [&](int step, int launches) {
        return cuda::capture(s, [&](cuda::stream& to) {
            for (int i = 0; i < launches; ++i) to.launch({}, add{&n, step});
        });
    };
    cuda::graph_executable run{graph_of(1, 2)};
    CHECK(run.update(graph_of(7, 2)));
    run.launch(s);
    CHECK(s.record().wait(never));
    CHECK(n == 14);
    CHECK_FALSE(run.update(graph_of(7, 3)));
    run.launch(s);
    CHECK(s.record().wait(never));
    CHECK(n == 28);
    CHECK(cudaPeekAtLastError() == cudaSuccess);

    auto moved = std::move(run);
    moved.launch(s);
    CHECK(s.record().wait(never));
    CHECK(n == 42);
}

TEST_CASE_METHOD(fixture, "graphs in and out", "[cuda][graph]") {
    REQUIRE(cudaStreamBeginCapture(s.native_handle(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    auto g = cuda::graph::from_native_handle(s, raw::end_capture(s.native_handle()));
    CHECK(g.num_nodes() == 0);
    auto moved = std::move(g);
    const auto native = moved.release();
    CHECK(standin::existing().graphs == 1);
    CHECK(cudaGraphDestroy(native) == cudaSuccess);
}

TEST_CASE_METHOD(fixture, "executables in and out", "[cuda][graph]") {
    int n = 0;
    cudaGraphExec_t native = nullptr;
    {
        cuda::graph_executable run{cuda::capture(s, [&](cuda::stream& to) { to.launch({}, add{&n, 3}); })};
        native = run.release();
        CHECK(run.native_handle() == nullptr);
    }
    CHECK(standin::existing().executables == 1);
    {
        auto run = cuda::graph_executable::from_native_handle(s, native);
        run.launch(s);
        CHECK(s.record().wait(never));
        CHECK(n == 3);
    }
    CHECK(standin::existing().executables == 0);
}

TEST_CASE_METHOD(fixture, "the permit is for the launch of a graph, and its time is the tenant's", "[cuda][graph]") {
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 1_MiB, .compute = 50_pct});
    const auto g = cuda::capture(s, [&](cuda::stream& to) {
        for (int i = 0; i < 4; ++i) to.enqueue(2ms);
    });
    cuda::graph_executable run{g};
    auto done = chat.submit([&](cuda::stream& to) { run.launch(to); });
    CHECK(done.wait());
    CHECK(chat.usage().completed == 1);
    CHECK(chat.usage().device_time >= 8ms);
}

TEST_CASE_METHOD(fixture, "a device that is lost ends a capture and the launches behind it quietly",
                 "[cuda][graph][fault]") {
    int n = 0;
    std::optional<cuda::graph_executable> run;
    run.emplace(cuda::capture(s, [&](cuda::stream& to) { to.launch({}, add{&n, 1}); }));
    standin::poison(0, cudaErrorIllegalAddress);
    CHECK_NOTHROW(run->launch(s));
    CHECK(s.record().status() == errc::device_lost);
    CHECK(code_of([&] { (void)cuda::capture(s, [](cuda::stream&) {}); }) == errc::device_lost);
    CHECK_FALSE(s.capturing());
    CHECK(n == 0);
}

TEST_CASE("partitions have the SMs that were asked for, and their streams know it", "[cuda][green]") {
    const standin::session gpu{{.sms = 132, .sm_step = 8}};
    cuda::node node;
    const auto can = cuda::query_sm_split(node, d);
    CHECK(can.sms == 132);
    CHECK(can.unit == 8);
    CHECK(can.units == 16);
    auto parts = cuda::make_green_contexts(node, d, weighted_sms(can, std::array{3U, 1U}));
    REQUIRE(parts.size() == 2);
    std::set<std::uint32_t> taken;
    for (auto& part : parts) {
        CUdevResource has{};
        CHECK(node.api().green_get_resource(part.native_handle(), &has, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS);
        CHECK(has.sm.smCount == part.sms());
        auto s = part.make_stream(priority{2}, 9);
        CHECK(s.sms() == part.sms());
        CHECK(s.in_partition());
        CHECK(s.level() == priority{2});
        CHECK(s.native_priority() == -2);
        CHECK(s.tag() == 9);
        CHECK(s.max_cooperative_blocks() == 2 * part.sms());
        auto own = standin::sms_of(s.native_handle());
        CHECK(own.size() == part.sms());
        taken.merge(own);
        CHECK(own.empty());  // no SM is in two partitions
        s.enqueue(100us);
        CHECK(s.record().wait(never));

        const auto borrowed = node.borrow(s.native_handle());
        CHECK(borrowed.in_partition());
        CHECK(borrowed.sms() == part.sms());
    }
    CHECK(parts[0].sms() == 96);
    CHECK(parts[1].sms() == 32);
    CHECK(node.make_stream(d).sms() == 132);
}

TEST_CASE("a partition stays until its last stream is gone", "[cuda][green]") {
    const standin::session gpu;
    cuda::node node;
    std::optional<cuda::stream> s;
    {
        auto parts = cuda::make_green_contexts(node, d, std::array{8U, 8U});
        s = parts[1].make_stream();
    }
    CHECK(standin::existing().green_contexts == 1);
    s->enqueue(1us);
    CHECK(s->record().wait(never));
    const auto p = s->record();
    s.reset();
    CHECK(standin::existing().green_contexts == 0);
    CHECK(p.wait(never));
}

TEST_CASE("partitions in and out", "[cuda][green]") {
    const standin::session gpu;
    cuda::node node;
    CUgreenCtx native = nullptr;
    {
        auto parts = cuda::make_green_contexts(node, d, std::array{8U, 8U});
        native = parts[0].release();
        CHECK(parts[0].make_stream().sms() == 8);
    }
    CHECK(standin::existing().green_contexts == 1);
    {
        auto part = cuda::green_context::from_native_handle(node, d, native);
        CHECK(part.sms() == 8);
        CHECK(part.make_stream().in_partition());
    }
    CHECK(standin::existing().green_contexts == 0);
}

TEST_CASE("partitions are made all or none", "[cuda][green][fault]") {
    const standin::session gpu;  // 16 SMs
    cuda::node node;
    CHECK(code_of([&] { (void)cuda::make_green_contexts(node, d, std::array{8U, 16U}); }) == errc::too_few_sms);
    CHECK(code_of([&] { (void)cuda::make_green_contexts(node, d, std::array{12U}); }) == errc::not_whole);
    CHECK(code_of([&] { (void)cuda::make_green_contexts(node, device_id{9}, std::array{8U}); }) == errc::no_device);
    standin::inject({.call = "cuGreenCtxCreate", .code = cudaErrorMemoryAllocation, .skip = 1});
    CHECK(code_of([&] { (void)cuda::make_green_contexts(node, d, std::array{8U, 8U}); }) == errc::out_of_memory);
    CHECK(standin::existing().green_contexts == 0);
    CHECK(cuda::make_green_contexts(node, d, std::array{8U, 8U}).size() == 2);
    CHECK(cuda::make_green_contexts(node, d, {}).empty());
}

TEST_CASE("a stream outside of all partitions is named", "[cuda][green]") {
    const standin::session gpu;
    cuda::node node;
    auto parts = cuda::make_green_contexts(node, d, std::array{8U, 8U});
    std::vector<cuda::stream> streams;
    streams.push_back(parts[0].make_stream({}, 1));
    streams.push_back(parts[1].make_stream({}, 2));
    CHECK_NOTHROW(cuda::require_partitioned(node, streams));
    streams.push_back(node.make_stream(d, {}, 42));
    CHECK_THROWS_WITH(cuda::require_partitioned(node, streams), Contains("tag 42"));
}

TEST_CASE("a driver without green contexts says so", "[cuda][green]") {
    const standin::session gpu{{.driver_version = 12030}};
    cuda::node node;
    CHECK(code_of([&] { (void)cuda::query_sm_split(node, d); }) == errc::not_supported);
    CHECK_FALSE(node.make_stream(d).in_partition());
}

TEST_CASE("nothing is begun that couldn't be given back: a driver without one function of a feature",
          "[cuda][driver]") {
    for (const char* const lacks : {"cuGreenCtxDestroy", "cuGreenCtxStreamCreate"}) {
        CAPTURE(lacks);
        const standin::session gpu;
        standin::hide_entry_point(lacks);
        cuda::node node;
        CHECK(code_of([&] { (void)cuda::make_green_contexts(node, d, std::array{8U}); }) == errc::not_supported);
    }
    for (const char* const lacks : {"cuMemRelease", "cuMemAddressFree", "cuMemUnmap", "cuMemSetAccess"}) {
        CAPTURE(lacks);
        const standin::session gpu;
        standin::hide_entry_point(lacks);
        cuda::node node;
        CHECK(code_of([&] { const cuda::virtual_memory none(node, d); }) == errc::not_supported);
    }
}

}  // namespace graph_test
