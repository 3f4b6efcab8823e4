// SPDX-License-Identifier: Apache-2.0
// Streams and points of CUDA, over the stand-in: the cost of a point, its lifetime, the end of a
// wait, and all of this around a capture.
#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/point.hpp>
#include <gpushare/backend/cuda/pool.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/threads.hpp"

namespace stream_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::device_id;
using gpushare::errc;
using gpushare::never;
using gpushare::ns;
using gpushare::operation_error;

namespace cuda = gpushare::cuda;

namespace {

constexpr device_id d{0};

struct fixture {
    const standin::session gpu{{.devices = 2}};
    cuda::node node;
    cuda::stream s = node.make_stream(d);
};

struct manual_fixture {
    const standin::session gpu{{.devices = 1, .time = standin::timing::manual}};
    cuda::node node;
    cuda::stream s = node.make_stream(d);
};

}  // namespace

TEST_CASE_METHOD(fixture, "a point costs one call once its pool is warm", "[cuda][point]") {
    for (int i = 0; i < 10; ++i) CHECK(s.record().wait(never));
    standin::forget_calls();
    const auto p = s.record();
    CHECK(standin::count_all() == 1);
    CHECK(standin::count("cudaEventRecord") == 1);
    CHECK(p.wait(never));
    standin::forget_calls();
    for (int i = 0; i < 100; ++i) CHECK(p.reached());  // the answer is remembered
    CHECK(standin::count_all() == 0);
}

TEST_CASE_METHOD(fixture, "a stream whose handle was given out is asked whether somebody captures it",
                 "[cuda][stream][capture]") {
    const auto handle = s.native_handle();
    CHECK(s.record().wait(never));
    CHECK(s.share());  // it is ours all the same
    const auto before = s.record();
    REQUIRE(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(s.captured());
    CHECK_THROWS_AS((void)s.record(), operation_error);
    CHECK_THROWS_AS((void)s.share().record(), operation_error);
    CHECK(before.wait(never));
    auto other = node.make_stream(d);
    standin::hold(other.native_handle());
    other.launch({}, gpushare::detail::empty_kernel{});
    const auto held = other.record();
    CHECK_THROWS_AS(s.wait(held), operation_error);
    standin::let_go(other.native_handle());
    CHECK_THROWS_AS(cuda::graph_capture{s}, operation_error);
    CHECK(cudaGraphDestroy(raw::end_capture(handle)) == cudaSuccess);  // and nobody has spoilt it
    CHECK_FALSE(s.captured());
    CHECK(s.record().wait(never));

    // Begun by another thread between the question and the record.
    standin::before_next("cudaEventRecord",
                         [&] { REQUIRE(cudaStreamBeginCapture(handle, cudaStreamCaptureModeRelaxed) == cudaSuccess); });
    CHECK_THROWS_AS((void)s.record(), operation_error);
    CHECK(cudaGraphDestroy(raw::end_capture(handle)) == cudaSuccess);
    auto mine = node.from_native_handle(raw::make_stream());  // the embedder may have kept it
    CHECK(mine.share());
}

TEST_CASE_METHOD(fixture, "an event that was captured is never reached", "[cuda][point][capture]") {
    const auto p = s.record();
    const auto handle = s.native_handle();
    auto theirs = node.make_stream(d);
    REQUIRE(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    // As if the record had gone into the capture unseen.
    const cuda::point lost(node.state(d)->acquire(node.state(d)));
    REQUIRE(cudaEventRecord(lost.native_handle(), handle) == cudaSuccess);
    CHECK_FALSE(lost.reached());
    CHECK(lost.status() == errc::none);
    cudaGraph_t none = nullptr;
    CHECK(cudaStreamEndCapture(handle, &none) == cudaErrorStreamCaptureInvalidated);  // which is why it isn't asked
    (void)standin::take_findings();
}

TEST_CASE_METHOD(fixture, "a point of several is reached with the last of them", "[cuda][point]") {
    auto a = node.make_stream(d), b = node.make_stream(device_id{1});
    CHECK(cuda::point::all_of({}).reached());
    const auto single = a.record();
    CHECK(single.wait(never));
    CHECK(cuda::point::all_of({single, {}}).known());
    standin::hold(a.native_handle());
    standin::hold(b.native_handle());
    a.launch({}, gpushare::detail::empty_kernel{});
    b.launch({}, gpushare::detail::empty_kernel{});
    const auto on_a = a.record(), on_b = b.record();
    const auto events = standin::existing().events;
    const auto all = cuda::point::all_of({on_a, single, on_b});
    CHECK(all.parts().size() == 2);
    CHECK_FALSE(all.reached());
    s.wait(all);
    const auto behind = s.record();
    standin::let_go(a.native_handle());
    CHECK(on_a.wait(never));
    CHECK_FALSE(all.reached());
    CHECK_FALSE(behind.reached());
    standin::let_go(b.native_handle());
    CHECK(all.wait(never));
    CHECK(behind.wait(never));
    CHECK(elapsed(single, all) == ns{0});  // it has no time of its own
    CHECK(standin::existing().events <= events + 1);
    standin::hold(b.native_handle());
    b.launch({}, gpushare::detail::empty_kernel{});
    const auto failing = cuda::point::all_of({a.record(), b.record()});
    standin::poison(1, cudaErrorIllegalAddress);
    CHECK(failing.wait(never));
    CHECK(failing.status() == errc::device_lost);
    CHECK_FALSE(node.lost(d));
}

TEST_CASE_METHOD(fixture, "a point of several devices outlasts the loss of one of them", "[cuda][point][fault]") {
    auto far = node.make_stream(device_id{1});
    standin::hold(s.native_handle());
    standin::hold(far.native_handle());
    s.launch({}, gpushare::detail::empty_kernel{});
    far.launch({}, gpushare::detail::empty_kernel{});
    const auto here = s.record(), there = far.record();
    const auto all = cuda::point::all_of({here, there}), twice = cuda::point::all_of({here, all});
    standin::poison(0, cudaErrorIllegalAddress);
    CHECK(here.wait(never));
    CHECK(node.lost(d));
    CHECK_FALSE(there.reached());
    CHECK_FALSE(all.reached());  // memory that the other device still uses isn't free
    CHECK_FALSE(twice.reached());
    standin::let_go(far.native_handle());
    CHECK(all.wait(never));
    CHECK(twice.wait(never));
    CHECK(all.status() == errc::device_lost);
    CHECK(there.status() == errc::none);
}

TEST_CASE_METHOD(fixture, "another device's loss isn't blamed on the stream's own", "[cuda][stream][fault]") {
    auto far = node.make_stream(device_id{1});
    standin::hold(s.native_handle());
    s.launch({}, gpushare::detail::empty_kernel{});
    const auto p = s.record();
    standin::poison(0, cudaErrorIllegalAddress);
    standin::inject({.call = "cudaStreamWaitEvent", .code = cudaErrorIllegalAddress});  // as a driver may answer
    CHECK_NOTHROW(far.wait(p));                                                         // what is lost is reached
    CHECK(node.lost(d));
    CHECK_FALSE(node.lost(device_id{1}));
    far.launch({}, gpushare::detail::empty_kernel{});
    CHECK(far.record().wait(never));
    CHECK(far.record().status() == errc::none);
}

TEST_CASE_METHOD(fixture, "work that uses memory of a device that is lost isn't blamed on the stream's own",
                 "[cuda][stream][fault]") {
    constexpr device_id other{1};
    constexpr std::size_t size = 1 << 16;
    void* const here = node.memory(d).allocate(size, 256);
    void* const there = node.memory(other).allocate(size, 256);
    auto run = cuda::graph_executable{cuda::capture(s, [&](auto& to) { to.copy(here, there, size); })};
    standin::poison(1, cudaErrorIllegalAddress);
    const auto works = [&] {
        CHECK_FALSE(node.lost(d));
        s.fill(here, std::byte{1}, size);
        const auto p = s.record();
        CHECK(p.wait(never));
        CHECK(p.status() == errc::none);
    };
    const auto fails_for = [&](const char* call, auto work) {
        CAPTURE(call);
        standin::inject({.call = call, .code = cudaErrorIllegalAddress});  // as a driver may answer
        CHECK(support::code_of([&] { work(); }) == errc::device_lost);
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        works();
    };
    SECTION("a copy from there") {
        fails_for("cudaMemcpyAsync", [&] { s.copy(here, there, size); });
    }
    SECTION("a copy to there") {
        fails_for("cudaMemcpyAsync", [&] { s.copy(there, here, size); });
    }
    SECTION("a copy through the host") {
        standin::inject({.call = "cudaMemcpyAsync", .code = cudaErrorInvalidValue});
        fails_for("cudaMemcpyPeerAsync", [&] { s.copy(here, there, size); });
    }
    SECTION("a fill") {
        fails_for("cudaMemsetAsync", [&] { s.fill(there, std::byte{2}, size); });
    }
    SECTION("a graph") {
        fails_for("cudaGraphLaunch", [&] { run.launch(s); });
    }
    SECTION("but what its own device answers is its own") {
        standin::poison(0, cudaErrorIllegalAddress);
        s.copy(here, there, size);
        CHECK(s.record().status() == errc::device_lost);
        CHECK(node.lost(d));
        CHECK_NOTHROW(s.copy(here, there, size));
    }
    CHECK(node.memory(other).deallocate(there, size, 256) == errc::none);
    CHECK(node.memory(d).deallocate(here, size, 256) == errc::none);
}

TEST_CASE_METHOD(fixture, "pools and virtual memory are made and mapped beside a device that is lost",
                 "[cuda][pool][virtual_memory][fault]") {
    standin::poison(1, cudaErrorIllegalAddress);
    standin::inject({.call = "cudaMemPoolSetAccess", .code = cudaErrorIllegalAddress});  // as a driver may answer
    cuda::memory_pool pool{node, d};
    void* const p = pool.allocate(s, 1000);
    s.fill(p, std::byte{1}, 1000);
    CHECK(pool.deallocate(s, p) == errc::none);
    cuda::virtual_memory memory{node, d};
    const auto range = memory.reserve(memory.granularity().count());
    const auto chunk = memory.create();
    REQUIRE((range && chunk));
    standin::inject({.call = "cuMemSetAccess", .code = cudaErrorIllegalAddress});
    REQUIRE(memory.map(range->data(), *chunk) == errc::none);
    s.fill(range->data(), std::byte{1}, 1000);
    CHECK(s.record().wait(never));
    CHECK(memory.unmap(range->data(), memory.granularity().count()) == errc::none);
    CHECK_FALSE(node.lost(d));
    CHECK(standin::faults_left() == 0);
}

TEST_CASE_METHOD(fixture, "events are used again, never while a copy of their point is left", "[cuda][point]") {
    const auto made = [&] { return standin::existing().events; };
    for (int i = 0; i < 100; ++i) CHECK(s.record().wait(never));
    CHECK(made() == 1);
    {
        const auto kept = s.record();
        const auto copy = kept;
        const auto handle = kept.native_handle();
        for (int i = 0; i < 10; ++i) CHECK(s.record().native_handle() != handle);
        CHECK(made() == 2);
        CHECK(copy.wait(never));
    }
    std::vector<cuda::point> many;
    for (int i = 0; i < 50; ++i) many.push_back(s.record());
    CHECK(made() == 50);
    many.clear();
    for (int i = 0; i < 50; ++i) many.push_back(s.record());
    CHECK(made() == 50);
}

TEST_CASE("a point outlives its stream and its node", "[cuda][point]") {
    const standin::session gpu;
    cuda::point a, b;
    {
        cuda::node node;
        auto s = node.make_stream(d);
        a = s.record();
        s.enqueue(2ms);
        b = s.record();
    }
    CHECK(standin::existing().streams == 0);
    CHECK(b.wait(never));
    CHECK(b.status() == errc::none);
    CHECK(elapsed(a, b) >= 2ms);
    a = {};
    CHECK(standin::existing().events == 2);  // of one pool, which b keeps
    b = {};
    CHECK(standin::existing().events == 0);
}

TEST_CASE_METHOD(manual_fixture, "elapsed is device time to the precision of events", "[cuda][point]") {
    const auto a = s.record();
    s.enqueue(1500us);
    const auto b = s.record();
    CHECK(elapsed(a, b) == 0ns);  // not yet
    standin::advance(10ms);
    CHECK(b.reached());
    const auto between = elapsed(a, b);
    CHECK(between > 1499us);
    CHECK(between < 1501us);
    CHECK(elapsed(b, a) == -between);
    CHECK(elapsed(a, cuda::point{}) == 0ns);
}

TEST_CASE_METHOD(manual_fixture, "a reserved point that a failure has used up isn't reached by itself",
                 "[cuda][point][fault]") {
    auto reserved = s.reserve();
    s.enqueue(1ms);
    standin::inject({.call = "cudaEventRecord", .code = cudaErrorNotPermitted});
    CHECK_THROWS_AS((void)s.record(std::move(reserved)), operation_error);
    const auto again = s.record(std::move(reserved)), without = s.record(cuda::stream::reserved_point{});
    CHECK_FALSE(again.reached());
    CHECK_FALSE(without.reached());
    standin::advance(10ms);
    CHECK(again.wait(never));
    CHECK(without.wait(never));
}

TEST_CASE_METHOD(fixture, "points of different devices have no time between them", "[cuda][point]") {
    auto t = node.make_stream(device_id{1});
    const auto a = s.record(), b = t.record();
    CHECK(a.wait(never));
    CHECK(b.wait(never));
    CHECK(elapsed(a, b) == 0ns);
    CHECK(standin::count("cuEventElapsedTime") == 0);  // CUDA would call it an error
    standin::hold(s.native_handle());
    s.enqueue(1us);
    CHECK(cuda::point::wait_any(std::array{s.record(), t.record()}, never));  // but can be waited for together
    standin::let_go(s.native_handle());
}

TEST_CASE_METHOD(manual_fixture, "a wait ends at its deadline, and one without goes on", "[cuda][point]") {
    s.enqueue(1ms);
    const auto p = s.record();
    const auto clock = node.get_clock();
    const auto began = clock.now();
    CHECK_FALSE(p.wait(began + 3ms));
    CHECK(clock.now() >= began + 3ms);
    CHECK_FALSE(cuda::point::wait_any({}, never));
    gpushare::instant pending_at{};
    CHECK_FALSE(cuda::point::wait_any(std::array{p}, began + 6ms, pending_at));
    CHECK(pending_at >= began + 6ms);  // it looked once more at the end
    CHECK(pending_at <= clock.now());
    CHECK(cuda::point::wait_any(std::array{p, cuda::point{}}, never, pending_at = {}));
    CHECK(pending_at == gpushare::instant{});  // it was reached at once
    std::jthread later([] {
        std::this_thread::sleep_for(5ms);
        standin::advance(1ms);
    });
    CHECK(p.wait(never));
}

TEST_CASE_METHOD(fixture, "many threads ask, wait for and drop the same points", "[cuda][point]") {
    for (int round = 0; round < 50; ++round) {
        s.enqueue(20us);
        const auto p = s.record();
        support::together(3, [&](unsigned) {
            auto mine = p;
            while (!mine.reached()) std::this_thread::yield();
            if (!mine.wait(never) || mine.status() != errc::none) throw std::logic_error("reached, but not well");
        });
    }
}

TEST_CASE_METHOD(fixture, "a stream that comes to lie where another was has another name", "[cuda][stream]") {
    std::set<std::uint64_t> names;
    for (int i = 0; i < 1000; ++i) names.insert(node.make_stream({0}).timeline());
    CHECK(names.size() == 1000);
}

TEST_CASE_METHOD(fixture, "a stream waits for points of other streams and devices", "[cuda][stream]") {
    auto t = node.make_stream(device_id{1});
    standin::hold(t.native_handle());
    t.enqueue(1us);
    s.wait(t.record());
    const auto p = s.record();
    CHECK_FALSE(p.wait(node.get_clock().now() + 1ms));
    standin::let_go(t.native_handle());
    CHECK(p.wait(never));

    standin::forget_calls();
    s.wait(cuda::point{});
    s.wait(p);
    CHECK(standin::count_all() == 0);
}

TEST_CASE_METHOD(fixture, "a stream goes on at once behind a graph that is gone, though nobody has asked",
                 "[cuda][stream][capture]") {
    auto other = node.make_stream(d);
    cuda::point end;
    {
        cuda::graph_capture scope{s};
        end = s.last_use();
        CHECK_THROWS_AS(other.wait(end), operation_error);
        (void)scope.finish();
    }
    const bool asked = GENERATE(true, false);
    if (asked) CHECK(end.wait(never));
    CHECK_NOTHROW(other.wait(end));
    CHECK(other.record().wait(never));
}

TEST_CASE_METHOD(fixture, "copies and fills run in order; none of zero bytes", "[cuda][stream]") {
    constexpr std::size_t size = 4096;
    auto& memory = node.memory(d);
    void* const p = memory.allocate(size, 256);
    void* const far = node.memory(device_id{1}).allocate(size, 256);
    std::array<unsigned char, size> out{};
    s.fill(p, std::byte{7}, size);
    s.copy(far, p, size);
    s.fill(p, std::byte{9}, size);
    s.copy(out.data(), far, size);
    CHECK(s.record().wait(never));
    CHECK(std::ranges::count(out, 7) == size);
    standin::forget_calls();
    s.copy(nullptr, nullptr, 0);
    s.fill(nullptr, std::byte{}, 0);
    CHECK(standin::count_all() == 0);
    CHECK(memory.deallocate(p, size, 256) == errc::none);
    CHECK(node.memory(device_id{1}).deallocate(far, size, 256) == errc::none);
}

TEST_CASE_METHOD(fixture, "a refusal of CUDA is thrown, and the stream goes on", "[cuda][stream][fault]") {
    int x = 1, y = 0;
    standin::inject({.call = "cudaMemcpyAsync", .code = cudaErrorInvalidValue});
    CHECK_THROWS_AS(s.copy(&y, &x, sizeof x), operation_error);
    standin::inject({.call = "cudaEventRecord", .code = cudaErrorInvalidResourceHandle});
    CHECK_THROWS_AS(s.record(), operation_error);
    standin::inject({.call = "cudaEventCreateWithFlags", .code = cudaErrorMemoryAllocation});
    std::vector<cuda::point> all;
    CHECK_THROWS_AS(([&] {
                        for (int i = 0; i < 10; ++i) all.push_back(s.record());
                    }()),
                    std::bad_alloc);
    s.copy(&y, &x, sizeof x);
    CHECK(s.record().wait(never));
    CHECK(y == 1);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE_METHOD(fixture, "a query that CUDA answers with an error ends the point with that", "[cuda][point][fault]") {
    standin::hold(s.native_handle());
    s.enqueue(1us);
    const auto p = s.record();
    standin::inject({.call = "cuEventQuery", .code = cudaErrorInvalidResourceHandle});
    CHECK(p.reached());
    CHECK(p.status() == errc::backend_failed);
    CHECK_FALSE(node.lost(d));
    CHECK(elapsed(p, s.record()) == 0ns);
    standin::let_go(s.native_handle());
}

TEST_CASE_METHOD(fixture, "asking a point never ends another thread's capture, nor one's own",
                 "[cuda][point][capture]") {
    standin::hold(s.native_handle());
    s.enqueue(1us);
    const auto p = s.record();
    auto t = node.make_stream(d);
    for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
        REQUIRE(cudaStreamBeginCapture(t.native_handle(), mode) == cudaSuccess);
        std::thread([&] { CHECK_FALSE(p.reached()); }).join();
        CHECK_FALSE(p.reached());
        CHECK_FALSE(p.wait(node.get_clock().now() + 1ms));
        CHECK(cudaGraphDestroy(raw::end_capture(t.native_handle())) == cudaSuccess);
    }
    standin::let_go(s.native_handle());
    CHECK(p.wait(never));
}

TEST_CASE_METHOD(fixture, "a captured stream has no points", "[cuda][stream][capture]") {
    const auto earlier = s.record();
    CHECK(cudaStreamSynchronize(s.native_handle()) == cudaSuccess);
    SECTION("ours") {
        cuda::graph_capture scope{s};
        CHECK_THROWS_AS(s.record(), operation_error);
        CHECK_NOTHROW(s.wait(earlier));  // reached, though nobody has asked: nothing to wait for
        auto t = node.make_stream(d);
        standin::hold(t.native_handle());
        t.enqueue(1us);
        CHECK_THROWS_AS(s.wait(t.record()), operation_error);
        standin::let_go(t.native_handle());
        s.enqueue(1us);
        CHECK(scope.finish().num_nodes() == 1);  // and the capture is as good as it was
    }
    SECTION("one that others began on a borrowed stream") {
        const auto mine = raw::make_stream();
        {
            auto borrowed = node.borrow(mine);
            REQUIRE(cudaStreamBeginCapture(mine, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
            CHECK_THROWS_AS(borrowed.record(), operation_error);
            CHECK(cudaGraphDestroy(raw::end_capture(mine)) == cudaSuccess);
            CHECK(borrowed.record().wait(never));
        }
        raw::destroy(mine);
    }
    CHECK(s.record().wait(never));
}

}  // namespace stream_test
