// SPDX-License-Identifier: Apache-2.0
// Horovod's names for arrays on devices, over the stand-in: which work waits for which stream, how
// long arrays are kept, and the results of ranks whose devices fail.
// tests/interop/horovod_devices_test.cpp has the results that ranks get from each other.
#include <gpushare/gradient/horovod_devices.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/collective/submit.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/named_ranks.hpp"
#include "support/threads.hpp"

namespace horovod_cuda_test {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
// NOLINTNEXTLINE(google-build-using-namespace): that is what a program does that moves here
using namespace gs::horovod;
using namespace std::chrono_literals;
using gs::errc;

namespace {

struct fill {
    float* to;
    std::size_t n;
    float x;
    template <class C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (std::size_t i = ctx.thread_rank(); i < n; i += ctx.num_threads()) to[i] = x;
    }
};

using group_type = gs::device_communicator<cuda::node, cuda::pinned_memory>;
using machine_type = support::named_machine<cuda::node, cuda::pinned_memory, group_type, float>;

/// Two ranks that share a device, each with a stream that computes.
struct rig {
    explicit rig(const device_options& o = {})
        : m(node, visible, group, true, 512, o), sets{process_set(*m.ranks, 0), process_set(*m.ranks, 1)} {
        // Events and what is known of kernels are there before a kernel waits for others.
        let_others_run();
        compute(0, y[0], 0);
        std::vector<cuda::point> points;
        for (int k = 0; k < 40; ++k) points.push_back(beside.record());
        points.back().wait(gs::never);
        m.wait(0);
    }
    [[nodiscard]] device_array<float> array(std::uint32_t r, std::vector<float>& of) {
        return m.array(r, std::span(of));
    }
    void compute(std::uint32_t r, std::vector<float>& to_fill, float value) {
        m.callers[r].launch({}, fill{to_fill.data(), to_fill.size(), value});
    }
    /// Long enough for all that isn't held.
    void let_others_run() {
        beside.enqueue(1ms);
        beside.record().wait(gs::never);
    }

    const standin::session gpu{{.devices = 1, .sms = 16, .blocks_per_sm = 1}};
    std::vector<float> x[2] = {std::vector<float>(20), std::vector<float>(20)};  // outlive the streams
    std::vector<float> y[2] = {std::vector<float>(3), std::vector<float>(3)}, to[2];
    std::vector<std::uint64_t> rows[2];
    cuda::node node;
    cuda::pinned_memory visible{node};
    const std::vector<gs::device_id> on = std::vector<gs::device_id>(2, gs::device_id{0});
    group_type group{node, visible, on, {.blocks = 2}};
    machine_type m;
    cuda::stream beside = node.make_stream(gs::device_id{0}), other = node.make_stream(gs::device_id{0});
    process_set sets[2];
};

template <class F>
gs::failure failure_of(const F& f) {
    try {
        f();
    } catch (const gs::error& e) {
        return e.figures();
    }
    return {};
}

}  // namespace

TEST_CASE("a collective waits for what its ranks' streams were given, and the host for no device", "[cuda][interop]") {
    rig r;
    standin::hold(r.m.callers[1].native_handle());
    std::vector<handle> handles;
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.compute(k, r.x[k], static_cast<float>(1 + k));
        handles.push_back(allreduce_async(r.array(k, r.x[k]), "x", Sum, r.sets[k]));
    }
    synchronize(handles);
    CHECK_FALSE(poll(handles[0]));
    r.let_others_run();
    CHECK_FALSE(poll(handles[0]));
    CHECK(r.x[0] == std::vector<float>(20, 1));
    // What is enqueued behind synchronize waits for the sum: of rank 0, whose own work is over.
    r.compute(0, r.y[0], 5);
    r.let_others_run();
    CHECK(r.y[0] == std::vector<float>(3, 0));
    standin::let_go(r.m.callers[1].native_handle());
    for (std::uint32_t k = 0; k < 2; ++k) r.m.wait(k);
    for (std::uint32_t k = 0; k < 2; ++k) {
        CHECK(poll(handles[k]));
        CHECK(r.x[k] == std::vector<float>(20, 3));
    }
    CHECK(r.y[0] == std::vector<float>(3, 5));
}

TEST_CASE("a stream that isn't synchronised waits for nothing, and another one may be", "[cuda][interop]") {
    rig r;
    auto& other = r.other;
    standin::hold(r.m.streams[0].native_handle());
    std::vector<handle> handles;
    for (std::uint32_t k = 0; k < 2; ++k) {
        r.compute(k, r.x[k], 1);
        handles.push_back(allreduce_async(r.array(k, r.x[k]), "x", Sum, r.sets[k]));
    }
    synchronize(handles[0], other.native_handle());
    r.m.wait(0);
    other.launch({}, fill{r.y[0].data(), 3, 5});
    r.let_others_run();
    CHECK(r.y[0] == std::vector<float>(3, 0));
    standin::let_go(r.m.streams[0].native_handle());
    other.record().wait(gs::never);
    CHECK(r.y[0] == std::vector<float>(3, 5));
    CHECK(r.x[1] == std::vector<float>(20, 2));
}

TEST_CASE("arrays are kept until the device is done with them, and not longer", "[cuda][interop]") {
    rig r;
    standin::hold(r.m.streams[0].native_handle());
    std::vector<handle> handles;
    std::vector<std::weak_ptr<const void>> kept;
    for (std::uint32_t k = 0; k < 2; ++k) {
        auto one = r.array(k, r.x[k]);
        auto owner = std::make_shared<int>(1);
        one.keeps = owner;
        kept.push_back(owner);
        handles.push_back(allreduce_async(one, "x", Sum, r.sets[k]));
    }
    synchronize(handles);
    handles[1] = {};
    for (const auto& k : kept) CHECK_FALSE(k.expired());
    standin::let_go(r.m.streams[0].native_handle());
    r.m.wait(0);
    CHECK(poll(handles[0]));
    for (const auto& k : kept) CHECK(k.expired());
}

TEST_CASE("the end of a set waits for the device alone", "[cuda][interop]") {
    rig r;
    auto mine = std::make_unique<group_type>(r.node, r.visible, r.on, gs::communicator_options{.blocks = 1});
    machine_type m(r.node, r.visible, *mine, true);
    auto first = std::make_unique<process_set>(*m.ranks, 0);
    const process_set second(*m.ranks, 1);
    r.compute(0, r.x[0], 1);
    (void)allreduce_async(r.array(0, r.x[0]), "x", Sum, *first);
    first.reset();  // its partner never comes
    CHECK(failure_of([&] { process_set(*m.ranks, 0); }).code == errc::invalid_specification);
}

TEST_CASE("rows are gathered into memory that is asked for once all ranks have come", "[cuda][interop]") {
    rig r;
    std::vector<handle> handles;
    const auto place = [&](std::uint32_t k) {
        return [&r, k](std::span<const std::uint64_t> rows) -> void* {
            r.rows[k].assign(rows.begin(), rows.end());
            r.to[k].assign(std::accumulate(rows.begin(), rows.end(), std::uint64_t{0}), 0);
            // As an allocator's block that somebody used before.
            if (k == 0) {
                standin::hold(r.m.callers[0].native_handle());
                r.m.callers[0].launch({}, fill{r.to[0].data(), r.to[0].size(), -1});
            }
            return r.to[k].data();
        };
    };
    for (std::uint32_t k = 0; k < 2; ++k) r.compute(k, k == 0 ? r.x[0] : r.y[1], static_cast<float>(1 + k));
    for (std::uint32_t k = 0; k < 2; ++k) r.m.wait(k);
    handles.push_back(allgather_async(r.array(0, r.x[0]), place(0), "all", r.sets[0]));
    CHECK(r.rows[0].empty());
    handles.push_back(allgather_async(r.array(1, r.y[1]), place(1), "all", r.sets[1]));
    synchronize(handles);
    r.let_others_run();
    CHECK_FALSE(poll(handles[0]));
    standin::let_go(r.m.callers[0].native_handle());
    for (std::uint32_t k = 0; k < 2; ++k) r.m.wait(k);
    std::vector<float> all(20, 1);
    all.insert(all.end(), 3, 2);
    for (std::uint32_t k = 0; k < 2; ++k) {
        CHECK(r.rows[k] == std::vector<std::uint64_t>{20, 3});
        CHECK(r.to[k] == all);
    }
}

TEST_CASE("calls behind a device's failure throw it, with the rank", "[cuda][interop]") {
    rig r;
    const auto both = [&](auto& arrays, const char* name) {
        std::vector<handle> handles;
        for (std::uint32_t k = 0; k < 2; ++k)
            handles.push_back(allreduce_async(r.array(k, arrays[k]), name, Sum, r.sets[k]));
        return handles;
    };
    synchronize(both(r.x, "x"));
    r.m.wait(0);
    r.group.abort(1, errc::stopped);  // of the communicator: the next collective learns it on the device
    const auto handles = both(r.y, "y");
    r.m.streams[0].record().wait(gs::never);
    CHECK(poll(handles[0]));
    const auto late = failure_of([&] { synchronize(handles[0]); });
    CHECK(late.code == errc::stopped);
    CHECK(late.left == 1);
    CHECK(failure_of([&] { allreduce(r.array(0, r.x[0]), "z", Sum, r.sets[0]); }).code == errc::stopped);
}

TEST_CASE("a default stream is refused before anything is handed over", "[cuda][interop]") {
    rig r;
    CHECK(failure_of([&] {
              (void)allreduce_async(device_array<float>{r.x[0].data(), 20, nullptr}, "x", Sum, r.sets[0]);
          }).code == errc::invalid_specification);
    std::vector<handle> handles;
    for (std::uint32_t k = 0; k < 2; ++k) handles.push_back(allreduce_async(r.array(k, r.x[k]), "x", Sum, r.sets[k]));
    synchronize(handles);
    for (std::uint32_t k = 0; k < 2; ++k) r.m.wait(k);
}

TEST_CASE("ranks in threads sum up many arrays, each in its own order", "[cuda][interop]") {
    rig r;
    constexpr int rounds = 20;
    std::vector<int> wrong(2);
    support::together(2, [&](unsigned k) {
        for (int round = 0; round < rounds; ++round) {
            r.compute(k, r.x[k], 1);
            r.compute(k, r.y[k], static_cast<float>(round));
            const auto of = [&](bool first) {
                return first ? allreduce_async(r.array(k, r.x[k]), "x", Sum, r.sets[k])
                             : allreduce_async(r.array(k, r.y[k]), "y", Average, r.sets[k]);
            };
            const std::vector<handle> both{of(k == 0), of(k != 0)};
            synchronize(both);
            r.m.wait(k);
            if (r.x[k] != std::vector<float>(20, 2) || r.y[k] != std::vector<float>(3, static_cast<float>(round)))
                ++wrong[k];
        }
    });
    CHECK(wrong == std::vector<int>(2));
}

}  // namespace horovod_cuda_test
