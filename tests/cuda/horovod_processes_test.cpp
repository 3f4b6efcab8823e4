// SPDX-License-Identifier: Apache-2.0
// Horovod's names for arrays on devices of several processes, over the stand-in: which work waits
// for which stream, how long arrays are kept, and the results of ranks whose devices fail.
// tests/interop/horovod_processes_test.cpp has the results that ranks get from each other.
#include <gpushare/gradient/horovod_processes.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/transport.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/named_process.hpp"
#include "support/visible_floats.hpp"

namespace horovod_processes_cuda_test {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
// NOLINTNEXTLINE(google-build-using-namespace): that is what a program does that moves here
using namespace gs::horovod;
using namespace std::chrono_literals;
using gs::errc;

namespace {

using process = support::named_process<cuda::node, cuda::pinned_memory, gs::thread_transport>;

/// Two processes, on one device.
struct rig {
    rig() {
        for (std::uint32_t r = 0; r < 2; ++r)
            transports.push_back(std::make_unique<gs::thread_transport>(group.rank(r)));
        ranks.resize(2);
        std::thread second([&] { make(1); });
        make(0);
        second.join();
    }
    ~rig() {
        std::thread second([&] { ranks[1].reset(); });
        ranks[0].reset();
        second.join();
    }
    void make(std::uint32_t r) {
        ranks[r] =
            std::make_unique<process>(node, visible, *transports[r], device_process_options{.chunk = gs::bytes{256}});
    }
    void compute(std::uint32_t r, float value) {
        const auto all = x[r].all();
        ranks[r]->caller().launch({}, support::count_up{all.data(), all.size(), value, 1});
    }
    [[nodiscard]] handle all_reduce(std::uint32_t r) {
        return allreduce_async(ranks[r]->array(x[r].all()), "x", Sum, ranks[r]->set());
    }
    /// Long enough for all that isn't held.
    void let_others_run() {
        beside.enqueue(1ms);
        beside.record().wait(gs::never);
    }

    const standin::session gpu{{.devices = 1}};
    support::visible_floats x[2] = {support::visible_floats(200), support::visible_floats(200)};
    support::visible_floats to[2] = {support::visible_floats(11, 1), support::visible_floats(11, 2)};
    std::shared_ptr<cuda::node> node = std::make_shared<cuda::node>();
    cuda::pinned_memory visible{*node};
    cuda::stream beside = node->make_stream(gs::device_id{0});
    gs::communicator group{2};
    std::vector<std::unique_ptr<gs::thread_transport>> transports;
    std::vector<std::unique_ptr<process>> ranks;
};

/// Whether the stream has work that isn't done. The stand-in's log wouldn't tell: others who wait
/// for their work push the copy out of the log before a slow machine looks.
bool has_work(cudaStream_t on) { return cudaStreamQuery(on) == cudaErrorNotReady; }

errc code_of(const handle& h) {
    return support::code_of([&] { synchronize(h); });
}

}  // namespace

TEST_CASE("arrays of processes wait for their streams, and these for the sum", "[cuda][interop]") {
    rig r;
    standin::hold(r.ranks[1]->caller().native_handle());
    std::vector<handle> handles;
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.compute(k, static_cast<float>(1 + k));
        handles.push_back(r.all_reduce(k));
    }
    while (!has_work(r.ranks[1]->copies().native_handle())) std::this_thread::yield();
    r.let_others_run();
    CHECK_FALSE(poll(handles[0]));
    CHECK_FALSE(poll(handles[1]));
    standin::let_go(r.ranks[1]->caller().native_handle());
    synchronize(std::span<const handle>(handles));
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.ranks[k]->wait();
        CHECK(poll(handles[k]));
        CHECK(r.x[k].seen() == std::vector<float>(200, 3));
    }
}

TEST_CASE("the sum is enqueued when synchronize returns, and arrays are kept until it is there", "[cuda][interop]") {
    rig r;
    std::vector<handle> handles;
    std::vector<std::weak_ptr<const void>> kept;
    for (std::uint32_t k = 0; k < 2; ++k) {
        auto one = r.ranks[k]->array(r.to[k].all());
        auto owner = std::make_shared<int>(1);
        one.keeps = owner;
        kept.push_back(owner);
        handles.push_back(broadcast_async(one, 1, "sent", r.ranks[k]->set()));
        // Process 0 only gets something: what it gets waits for its own stream alone.
        if (k == 0) standin::hold(r.ranks[0]->copies().native_handle());
    }
    synchronize(std::span<const handle>(handles));
    r.let_others_run();
    CHECK_FALSE(poll(handles[0]));
    CHECK_FALSE(kept[0].expired());
    // What is enqueued behind synchronize waits for it.
    r.compute(0, 5);
    r.let_others_run();
    CHECK(r.x[0].seen() == std::vector<float>(200, 0));
    CHECK(r.to[0].seen() == std::vector<float>(11, 1));
    standin::let_go(r.ranks[0]->copies().native_handle());
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.ranks[k]->wait();
        CHECK(poll(handles[k]));
        CHECK(kept[k].expired());
        CHECK(r.to[k].seen() == std::vector<float>(11, 2));
    }
}

TEST_CASE("rows of processes go where a block's user before is done", "[cuda][interop]") {
    rig r;
    std::vector<handle> handles;
    const auto place = [&](std::uint32_t k) {
        return [&r, k](std::span<const std::uint64_t> rows) -> void* {
            const std::span<float> to = r.to[k].all();
            if (k == 0 && rows[1] == to.size()) {
                standin::hold(r.ranks[0]->caller().native_handle());
                r.ranks[0]->caller().launch({}, support::count_up{to.data(), to.size(), -1, 1});
            }
            return to.data();
        };
    };
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.compute(k, 3);  // process 0 has no rows: nothing of what it brings waits
        handles.push_back(
            allgather_async(r.ranks[k]->array(r.x[k].all().first(11 * k)), place(k), "all", r.ranks[k]->set()));
    }
    synchronize(std::span<const handle>(handles));
    r.let_others_run();
    CHECK_FALSE(poll(handles[0]));
    standin::let_go(r.ranks[0]->caller().native_handle());
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.ranks[k]->wait();
        CHECK(r.to[k].seen() == std::vector<float>(11, 3));
    }
}

TEST_CASE("a device that fails is named to all processes", "[cuda][interop]") {
    rig r;
    standin::inject({.call = "cudaMemcpyAsync", .code = cudaErrorInvalidValue});
    std::vector<handle> handles;
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.compute(k, 1);
        handles.push_back(r.all_reduce(k));
    }
    for (const handle& h : handles) CHECK(code_of(h) == errc::backend_failed);
    CHECK(standin::faults_left() == 0);
    for (std::uint32_t k = 0; k < 2; ++k) r.ranks[k]->wait();
}

TEST_CASE("an array of a captured stream is refused", "[cuda][interop]") {
    rig r;
    auto& caller = r.ranks[0]->caller();
    REQUIRE(cudaStreamBeginCapture(caller.native_handle(), cudaStreamCaptureModeRelaxed) == cudaSuccess);
    errc code = errc::none;
    try {
        (void)r.all_reduce(0);
    } catch (const gs::error& e) {
        code = e.code();
    }
    CHECK(code == errc::capturing);
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(caller.native_handle(), &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

}  // namespace horovod_processes_cuda_test
