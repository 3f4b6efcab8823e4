// SPDX-License-Identifier: Apache-2.0
// Behaviour that CUDA doesn't promise, and on which the library doesn't rely. Each test covers one
// thing that works on most machines most of the time, over a stand-in that doesn't grant it.
#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/pool.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gpushare/collective/submit.hpp>
#include <gpushare/compute/compute_limiter.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace faults_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
namespace gs = gpushare;
namespace cuda = gpushare::cuda;
using gs::device_id;
using gs::errc;

namespace {

constexpr device_id first{0}, second{1};

/// The calls of one of these names, in order.
std::vector<std::string> calls_of(std::initializer_list<std::string_view> names) {
    std::vector<std::string> found;
    for (const auto& c : standin::calls())
        if (std::ranges::find(names, std::string_view(c.name)) != names.end()) found.emplace_back(c.name);
    return found;
}

/// A rank on each of two devices, and a body that only waits for the others.
struct two_ranks {
    explicit two_ranks(standin::options o = {.devices = 2, .time = standin::timing::manual}) : gpu(o) {
        for (std::uint32_t r = 0; r < 2; ++r) {
            streams.push_back(node.make_stream(devices[r]));
            members.push_back(group.rank(r));
        }
    }
    errc submit(std::span<cuda::stream> on) {
        return gs::submit(node.gangs(), std::span<const device_id>(devices), on, std::span<const gs::member>(members),
                          std::span<const gs::detail::barrier_body>(bodies));
    }
    /// The kernels of two streams can't run beside each other here: none of them runs.
    void hold_all() {
        for (auto& s : streams) standin::hold(s.native_handle());
    }

    const standin::session gpu;
    cuda::node node;
    cuda::pinned_memory visible{node};
    const std::vector<device_id> devices{first, second};
    gs::device_communicator<cuda::node, cuda::pinned_memory> group{node, visible, devices};
    std::vector<cuda::stream> streams;
    std::vector<gs::member> members;
    const std::vector<gs::detail::barrier_body> bodies{2};
};

}  // namespace

TEST_CASE("a fault is noticed by whoever asks only for the time between two points", "[cuda][promises]") {
    const standin::session gpu{{.time = standin::timing::manual}};
    cuda::node node;
    auto s = node.make_stream(first);
    const auto begin = s.record();
    s.enqueue(1ms);
    const auto end = s.record();
    {
        cuda::point::questions ask;
        CHECK_FALSE(ask.span(begin, end));
    }
    standin::poison(0, cudaErrorIllegalAddress);
    cuda::point::questions ask;
    REQUIRE(ask.span(begin, end).has_value());
    CHECK(end.status() == errc::device_lost);
    CHECK(node.lost(first));
}

TEST_CASE("errors that are told late lose the device when they are told", "[cuda][promises]") {
    const standin::session gpu{{.time = standin::timing::manual}};
    cuda::node node;
    auto s = node.make_stream(first);
    s.enqueue(1ms);
    const auto end = s.record();
    standin::poison(0, cudaErrorIllegalAddress);
    CHECK_NOTHROW(s.enqueue(1us));
    CHECK_FALSE(node.lost(first));
    CHECK(end.wait(gs::never));
    CHECK(end.status() == errc::device_lost);
    CHECK(s.record().status() == errc::device_lost);
}

TEST_CASE("a partition that was destroyed under its streams doesn't lose the device", "[cuda][promises]") {
    CHECK_FALSE(cuda::is_sticky(cudaErrorContextIsDestroyed));
    const standin::session gpu;
    cuda::node node;
    const auto driver = raw::load_driver();
    CUstream theirs = nullptr;
    REQUIRE(driver.green_stream(&theirs, raw::make_green(driver, 8), CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
    auto borrowed = node.borrow(theirs);
    auto other = node.make_stream(first);
    standin::destroy_context_of(theirs);
    int x = 0, y = 1;
    CHECK(support::code_of([&] { borrowed.copy(&x, &y, sizeof x); }) == errc::backend_failed);
    CHECK(support::code_of([&] { (void)borrowed.record(); }) == errc::backend_failed);
    CHECK_FALSE(node.lost(first));
    other.copy(&x, &y, sizeof x);
    CHECK(other.record().wait(gs::never));
    CHECK(x == 1);
    raw::destroy(theirs);
}

TEST_CASE("no thread gets a context that it hadn't, on the node's devices or on others", "[cuda][promises]") {
    const standin::session gpu{{.devices = 2}};
    const auto driver = raw::load_driver();
    std::optional<cuda::node> node;
    const auto in_thread = [&](auto what) {
        std::thread([&] {
            CUcontext now = nullptr;
            int device = -1;
            what();
            CHECK(driver.get_current(&now) == CUDA_SUCCESS);
            CHECK(now == nullptr);
            CHECK(cudaGetDevice(&device) == cudaSuccess);
            CHECK(device == 0);  // what the thread would use first is as before
        }).join();
        CHECK_FALSE(standin::has_context(0));
    };
    in_thread([&] { node.emplace(cuda::node_options{.devices = {1}}); });
    std::optional<cuda::stream> s, t;
    in_thread([&] { s = node->make_stream(first); });
    in_thread([&] { t = node->from_native_handle(node->make_stream(first).release()); });
    cuda::point p;
    in_thread([&] { p = s->record(); });
    in_thread([&] { t->wait(p); });
    in_thread([&] { CHECK(p.wait(gs::never)); });
    in_thread([&] { CHECK(elapsed(p, p) == 0ns); });
    in_thread([&] {
        const auto begin = s->record();
        s->enqueue(1us);
        const auto end = s->record();
        CHECK(end.wait(gs::never));
        CHECK(elapsed(begin, end) > 0ns);
    });
    int x = 0, y = 1;
    in_thread([&] { s->copy(&x, &y, sizeof x); });
    in_thread([&] {
        void* const q = node->memory(first).allocate(100, 256);
        CHECK(node->memory(first).deallocate(q, 100, 256) == errc::none);
    });
    in_thread([&] {
        cuda::memory_pool pool{*node, first};
        void* const q = pool.allocate(*s, 100);
        CHECK(pool.usage().used > 0_B);
        CHECK(pool.deallocate(*s, q) == errc::none);
        CHECK(s->record().wait(gs::never));
        pool.trim();
    });
    in_thread([&] {
        const auto g = cuda::capture(*s, [](cuda::stream& to) { to.enqueue(1us); });
        CHECK(g.num_nodes() == 1);
        cuda::graph_executable run{g};
        CHECK(run.update(g));
        run.launch(*s);
    });
    in_thread([&] {
        auto parts = cuda::make_green_contexts(*node, first, std::vector<std::uint32_t>{8});
        auto inside = parts[0].make_stream();
        CHECK(inside.record().wait(gs::never));
    });
    in_thread([&] {
        auto theirs = node->borrow(s->native_handle());
        CHECK(theirs.record().wait(gs::never));
    });
    in_thread([&] {
        p = {};
        s.reset();
        t.reset();
    });
    in_thread([&] { node.reset(); });
}

TEST_CASE("a graph is launched in the partition that it was captured in, and in no other", "[cuda][promises]") {
    const standin::session gpu{{.sms = 24}};
    cuda::node node;
    auto parts = cuda::make_green_contexts(node, first, std::vector<std::uint32_t>{8, 8});
    auto mine = parts[0].make_stream(), beside = parts[0].make_stream(), others = parts[1].make_stream();
    auto outside = node.make_stream(first);
    const auto record = [](cuda::stream& s) { return cuda::capture(s, [](cuda::stream& to) { to.enqueue(1us); }); };
    const auto g = record(mine);
    cuda::graph_executable run{g}, run_outside{record(outside)};
    CHECK_NOTHROW(run.launch(mine));
    CHECK_NOTHROW(run.launch(beside));
    CHECK(support::code_of([&] { run.launch(others); }) == errc::invalid_specification);
    CHECK(support::code_of([&] { run.launch(outside); }) == errc::invalid_specification);
    CHECK(support::code_of([&] { run_outside.launch(mine); }) == errc::invalid_specification);
    CHECK_NOTHROW(run_outside.launch(outside));
    CHECK_FALSE(run.update(record(others)));
    CHECK(run.update(record(beside)));
    // Into another graph, too.
    CHECK(support::code_of([&] { (void)cuda::capture(others, [&](cuda::stream& to) { run.launch(to); }); }) ==
          errc::invalid_specification);
    for (auto* s : {&mine, &beside, &outside}) CHECK(s->record().wait(gs::never));

    // A graph keeps its partition.
    parts.clear();
    { const auto gone = std::move(mine), gone_too = std::move(beside); }
    CHECK(standin::existing().green_contexts == 2);
}

TEST_CASE("SMs are handed out again when the work of the streams that were there is done", "[cuda][promises]") {
    const standin::session gpu{{.sms = 16, .time = standin::timing::manual}};
    cuda::node node;
    const std::vector<std::uint32_t> all{16};
    const auto again = [&] { return support::code_of([&] { (void)cuda::make_green_contexts(node, first, all); }); };
    {
        auto parts = cuda::make_green_contexts(node, first, all);
        auto s = parts[0].make_stream();
        s.enqueue(1ms);
    }
    CHECK(again() == errc::too_few_sms);
    standin::advance(999us);
    CHECK(again() == errc::too_few_sms);
    standin::advance(1us);
    CHECK(again() == errc::none);
    CHECK(standin::existing().green_contexts == 0);
    {
        auto parts = cuda::make_green_contexts(node, first, all);
        // The ends of streams that came and went aren't kept for ever.
        const auto events = standin::existing().events;
        for (int i = 0; i < 10; ++i) CHECK(parts[0].make_stream().record().wait(gs::never));
        CHECK(standin::existing().events <= events + 3);
        auto s = parts[0].make_stream();
        s.enqueue(1ms);
    }
    // The device's end is the end of what is left.
}

TEST_CASE("streams that share a pool don't come to wait for each other", "[cuda][promises]") {
    const standin::session gpu{{.pool_step = 1_MiB}};
    cuda::node node;
    cuda::memory_pool pool{node, first, {.max_size = 1_MiB}};
    auto a = node.make_stream(first), b = node.make_stream(first);
    void* const p = pool.allocate(a, 1 << 20);
    standin::hold(a.native_handle());
    CHECK(pool.deallocate(a, p) == errc::none);
    void* const q = pool.try_allocate(b, 1 << 20);  // not at the price of waiting for a
    CHECK(q == nullptr);
    const auto end = b.record();
    CHECK(end.wait(node.get_clock().now() + 1s));
    standin::let_go(a.native_handle());
    CHECK(a.record().wait(gs::never));
    void* const later = pool.allocate(b, 1 << 20);
    CHECK(pool.deallocate(b, later) == errc::none);
    CHECK(b.record().wait(gs::never));
}

TEST_CASE_METHOD(two_ranks, "a collective joins a capture that others began, or refuses before the first launch",
                 "[cuda][promises][collective]") {
    const cudaStream_t theirs[] = {raw::make_stream(0), raw::make_stream(1)};
    {
        std::vector<cuda::stream> borrowed;
        for (const auto s : theirs) borrowed.push_back(node.borrow(s));

        REQUIRE(cudaStreamBeginCapture(theirs[1], cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        standin::forget_calls();
        CHECK(submit(borrowed) == errc::capturing);  // one of them would run, and wait for the other one
        CHECK(standin::count("cudaLaunchKernelExC") == 0);
        CHECK(members[0].asked() == 0);

        // Elsewhere enqueued, it can't be waited for in a capture: said without touching that.
        hold_all();
        streams[0].enqueue(1us);
        const auto outside = streams[0].record();
        CHECK(support::code_of([&] { borrowed[1].wait(outside); }) == errc::capturing);

        REQUIRE(cudaStreamBeginCapture(theirs[0], cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        CHECK(submit(borrowed) == errc::none);
        CHECK(standin::count("cudaLaunchKernelExC") >= 2);
        for (const auto s : theirs) {
            const cudaGraph_t g = raw::end_capture(s);  // and wasn't spoilt
            std::size_t nodes = 0;
            CHECK(cudaGraphGetNodes(g, nullptr, &nodes) == cudaSuccess);
            CHECK(nodes == 1);
            CHECK(cudaGraphDestroy(g) == cudaSuccess);
        }
        CHECK(members[0].asked() == 0);

        // A launch that is refused inside of a capture doesn't abort the group either.
        for (const auto s : theirs) REQUIRE(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidValue, .skip = 1});
        CHECK(support::code_of([&] { (void)submit(borrowed); }) == errc::backend_failed);
        CHECK(members[0].asked() == 0);
        for (const auto s : theirs) CHECK(cudaGraphDestroy(raw::end_capture(s)) == cudaSuccess);
    }
    for (auto& s : streams) standin::let_go(s.native_handle());
    standin::advance(1s);
    for (const auto s : theirs) raw::destroy(s);
}

TEST_CASE_METHOD(two_ranks, "a first launch that is refused doesn't abort the group", "[cuda][promises][collective]") {
    standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidValue});
    CHECK(support::code_of([&] { (void)submit(streams); }) == errc::backend_failed);
    CHECK(members[0].asked() == 0);
}

TEST_CASE_METHOD(two_ranks, "nothing is made or loaded between the launches of a gang",
                 "[cuda][promises][collective]") {
    hold_all();
    // Other threads have all the events that there are.
    std::vector<cuda::point> taken;
    for (int i = 0; i < 20; ++i) taken.push_back(streams[0].record()), taken.push_back(streams[1].record());
    standin::forget_calls();
    REQUIRE(submit(streams) == errc::none);
    auto calls =
        calls_of({"cudaLaunchKernelExC", "cudaEventCreateWithFlags", "cudaMalloc", "cudaStreamCreateWithPriority"});
    const auto launch = std::ranges::find(calls, "cudaLaunchKernelExC");
    REQUIRE(launch != calls.end());
    CHECK(std::find(launch, calls.end(), "cudaEventCreateWithFlags") == calls.end());
    CHECK(std::count(launch, calls.end(), "cudaLaunchKernelExC") == 2);
    members[0].close({errc::aborted, gs::collective_kind::barrier, 0, 0});
    taken.clear();
    for (auto& s : streams) standin::let_go(s.native_handle());
    standin::advance(1s);
}

TEST_CASE("however many gangs are in flight, the next one costs as many calls", "[cuda][promises][collective]") {
    two_ranks m{{.devices = 2, .time = standin::timing::manual, .creation_beside_spinning = true}};
    std::vector<std::vector<cuda::stream>> all(20);
    std::vector<std::uint64_t> costs;
    for (auto& on : all) {
        for (const auto d : m.devices) {
            on.push_back(m.node.make_stream(d));
            standin::hold(on.back().native_handle());
        }
        (void)on[0].reserve(), (void)on[1].reserve();  // an event for each
        standin::forget_calls();
        REQUIRE(m.submit(on) == errc::none);
        costs.push_back(standin::count_all());
    }
    CHECK(costs.back() <= costs[2]);
    CHECK(standin::count("cudaOccupancyMaxActiveBlocksPerMultiprocessor") == 0);  // the answer doesn't change
    m.members[0].close({errc::aborted, gs::collective_kind::barrier, 0, 0});
    for (auto& on : all)
        for (auto& s : on) standin::let_go(s.native_handle());
    standin::advance(1s);
}

TEST_CASE("ranks on one device, each with a launch of its own, are refused", "[cuda][promises][collective]") {
    const standin::session gpu{{.devices = 1}};
    cuda::node node;
    cuda::pinned_memory visible{node};
    const std::vector<device_id> devices{first, first};
    const gs::device_communicator<cuda::node, cuda::pinned_memory> group{node, visible, devices};
    std::vector<cuda::stream> streams;
    std::vector<gs::member> members;
    for (std::uint32_t r = 0; r < 2; ++r) {
        streams.push_back(node.make_stream(first));
        members.push_back(group.rank(r));
    }
    const std::vector<gs::detail::barrier_body> bodies(2);
    CHECK(gs::submit(node.gangs(), std::span<const device_id>(devices), std::span(streams),
                     std::span<const gs::member>(members), std::span(bodies)) == errc::duplicate_device);
    CHECK(standin::count("cudaLaunchKernelExC") == 0);
    // In one launch all of them are resident, or none.
    CHECK(gs::submit_shared(node.gangs(), first, streams[0], std::span<const gs::member>(members), std::span(bodies)) ==
          errc::none);
    CHECK(streams[0].record().wait(gs::never));
    CHECK_FALSE(gs::fault_of(members[0]));
}

TEST_CASE("an error that the embedder hasn't fetched yet is still there after the library has asked CUDA",
          "[cuda][promises]") {
    const standin::session gpu{{.time = standin::timing::manual}};
    cuda::node node;
    auto s = node.make_stream(first);
    s.enqueue(1ms);
    const auto p = s.record();
    CHECK(cudaMemcpyAsync(nullptr, nullptr, 1, cudaMemcpyDefault, s.native_handle()) == cudaErrorInvalidValue);
    CHECK_FALSE(p.reached());
    CHECK_FALSE(p.wait(node.get_clock().now() + 1ms));
    {
        cuda::point::questions ask;
        CHECK_FALSE(ask.span(p, s.record()));
    }
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidValue);
    standin::advance(1s);
    CHECK(p.reached());
    CHECK(node.enable_peer_access(first, first));
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
}

TEST_CASE("a launch of the embedder's own that fails is noticed, and its error left to the embedder",
          "[cuda][promises]") {
    const standin::session gpu;
    cuda::node node;
    auto s = node.make_stream(first);
    const auto launch_badly = [&] {
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidConfiguration});
        (void)standin::detail::launch(s.native_handle(), 1us, [] {});  // <<<>>> returns nothing
    };
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    CHECK(cudaEventQuery(nullptr) == cudaErrorInvalidResourceHandle);
    {
        const cuda::stream::launch_errors of_nothing(s);
        s.enqueue(1us);
        CHECK(of_nothing.found() == errc::none);  // what was there before is the embedder's, who finds it there:
        const auto kept = node.health(first).take_last_error();
        CHECK(kept.code == cudaErrorInvalidResourceHandle);
        CHECK(std::string_view(kept.call) == "a call before a submission");
    }
    for (int i = 0; i < 2; ++i) {  // the second time the number is there already
        const cuda::stream::launch_errors left(s);
        launch_badly();
        s.enqueue(1us);
        CHECK(s.record().wait(gs::never));
        CHECK(left.found() == errc::backend_failed);
        CHECK(cudaPeekAtLastError() == cudaErrorInvalidConfiguration);
    }
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
}

TEST_CASE("an error that is left for the embedder and comes of no launch fails no submission", "[cuda][promises]") {
    const standin::session gpu{{.time = standin::timing::manual}};
    cuda::node node;
    auto s = node.make_stream(first);
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    cudaEvent_t event = nullptr;
    REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDefault) == cudaSuccess);
    s.enqueue(1ms);
    REQUIRE(cudaEventRecord(event, s.native_handle()) == cudaSuccess);
    for (const bool before : {false, true}) {
        if (before) CHECK(cudaEventQuery(event) == cudaErrorNotReady);
        const cuda::stream::launch_errors left(s);
        if (!before) CHECK(cudaEventQuery(event) == cudaErrorNotReady);
        CHECK(left.found() == errc::none);
        CHECK(cudaPeekAtLastError() == cudaErrorNotReady);  // nor is it taken away
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidConfiguration});
        (void)standin::detail::launch(s.native_handle(), 1us, [] {});
        CHECK(left.found() == errc::backend_failed);  // nor does it hide what does
        CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    }
    for (int n = 0; n < 1200; ++n) {  // of all numbers
        const auto code = static_cast<cudaError_t>(n);
        if (cuda::is_sticky(code)) CHECK(cuda::is_left_by_launch(code));
    }
    for (const auto code :
         {cudaSuccess, cudaErrorNotReady, cudaErrorPeerAccessAlreadyEnabled, cudaErrorPeerAccessNotEnabled,
          cudaErrorHostMemoryAlreadyRegistered, cudaErrorHostMemoryNotRegistered, cudaErrorTimeout,
          cudaErrorGraphExecUpdateFailure, cudaErrorInvalidMemcpyDirection, cudaErrorInvalidSymbol})
        CHECK_FALSE(cuda::is_left_by_launch(code));
    standin::advance(1s);
    CHECK(s.record().wait(gs::never));
    CHECK(cudaEventDestroy(event) == cudaSuccess);
}

TEST_CASE("a launch past the stream that fails in a submission is told to its owner", "[cuda][promises]") {
    const standin::session gpu;
    cuda::node node;
    auto s = node.make_stream(first);
    gs::compute_limiter<cuda::stream, decltype(node.get_clock())> limiter({}, node.get_clock());
    const auto c = limiter.add({});
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    const auto launch_badly = [](cuda::stream& on) {
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidConfiguration});
        (void)standin::detail::launch(on.native_handle(), 1us, [] {});  // <<<>>> returns nothing
    };
    CHECK(cudaMemcpyAsync(nullptr, nullptr, 1, cudaMemcpyDefault, s.native_handle()) == cudaErrorInvalidValue);
    limiter.acquire(c)->enqueue(s, [](auto& on) { on.enqueue(1us); });  // what was there before is the embedder's
    CHECK(node.health(first).take_last_error().code == cudaErrorInvalidValue);
    using support::code_of;
    CHECK(code_of([&] { limiter.acquire(c)->enqueue(s, launch_badly); }) == errc::backend_failed);
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidConfiguration);  // and there it stays, which hides nothing
    CHECK(code_of([&] { (void)limiter.enqueue(c, s, launch_badly); }) == errc::backend_failed);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    const auto queued = limiter.submit(c, s, launch_badly);
    REQUIRE(queued);
    CHECK(queued->wait());
    CHECK(queued->status() == errc::submission_failed);
    CHECK(code_of([&] { queued->rethrow(); }) == errc::backend_failed);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    CHECK(limiter.close(c));
}

TEST_CASE("the longest patience doesn't end at once", "[cuda][promises][collective]") {
    const std::int64_t now = 1'900'000'000'000'000'000;  // of a device's clock, in 2030
    const std::int64_t patience = gs::detail::bounded(gs::ns::max());
    CHECK(patience <= std::numeric_limits<std::int64_t>::max() - now);
    CHECK(gs::ns{patience} > std::chrono::hours{24 * 365});
    CHECK(gs::detail::bounded(5s) == 5'000'000'000);
}

// ---- the stand-in itself

TEST_CASE("streams beyond a device's connections are held up by what was enqueued before", "[cuda][standin]") {
    for (const bool shared : {false, true}) {
        const standin::session gpu{{.time = standin::timing::manual, .connections = shared ? 1U : 2U}};
        const auto s = raw::make_stream(), t = raw::make_stream();
        int ran = 0;
        CHECK(standin::detail::launch(s, 1ms, [] {}) == cudaSuccess);
        CHECK(standin::detail::launch(s, 1ms, [] {}) == cudaSuccess);
        CHECK(standin::detail::launch(t, 1us, [&] { ++ran; }) == cudaSuccess);
        standin::advance(500us);
        CHECK(ran == (shared ? 0 : 1));  // the second kernel of s hasn't begun yet
        standin::advance(501us);
        CHECK(ran == 1);
        standin::advance(1s);
        raw::destroy(s, t);
    }
}

TEST_CASE("making or loading something beside a kernel that waits for others is found", "[cuda][standin]") {
    const standin::session gpu;
    const auto s = raw::make_stream();
    const int kernel = 0, another = 0;
    standin::hold(s);
    CHECK(standin::detail::launch(s, &kernel, true, 1us, [] {}) == cudaSuccess);
    CHECK(standin::detail::launch(s, &kernel, true, 1us, [] {}) == cudaSuccess);
    CHECK(standin::findings().find("beside a kernel") == std::string::npos);
    CHECK(standin::detail::launch(s, &another, false, 1us, [] {}) == cudaSuccess);
    CHECK(standin::findings().find("cudaLaunchKernelExC beside a kernel") != std::string::npos);
    const auto e = raw::make_event();
    CHECK(standin::findings().find("cudaEventCreateWithFlags beside a kernel") != std::string::npos);
    standin::let_go(s);
    CHECK(cudaStreamSynchronize(s) == cudaSuccess);
    raw::destroy(s);
    raw::destroy(e);
    (void)standin::take_findings();
}

}  // namespace faults_test
