// SPDX-License-Identifier: Apache-2.0
// Tensors on CUDA by Horovod's names: libtorch's own tensors and streams, over the stand-in for
// CUDA. Operators run immediately on the host (fake_cuda.hpp).
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/gradient/horovod_devices.hpp>
#include <gpushare/gradient/torch_gradients.hpp>

#include "fake_cuda.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/named_ranks.hpp"
#include "support/threads.hpp"

namespace torch_horovod_test {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
// NOLINTNEXTLINE(google-build-using-namespace): that is what a program does that moves here
using namespace gs::horovod;
using Catch::Matchers::Contains;
using gs::errc;
using support::refusal_of;

namespace {

using group_type = gs::device_communicator<cuda::node, cuda::pinned_memory>;
using machine_type = support::named_machine<cuda::node, cuda::pinned_memory, group_type, float, std::int64_t>;

/// Two ranks on one device, each with a current stream.
struct rig {
    rig() : m(node, visible, group, true), sets{process_set(*m.ranks, 0), process_set(*m.ranks, 1)} {
        fake_cuda::set_up();
        // Events and what is known of kernels are there before a kernel waits for others.
        let_others_run();
        std::vector<cuda::point> points;
        for (int k = 0; k < 40; ++k) points.push_back(beside.record());
        points.back().wait(gs::never);
    }
    /// Long enough for all that isn't held.
    void let_others_run() {
        beside.enqueue(std::chrono::milliseconds(1));
        beside.record().wait(gs::never);
    }
    [[nodiscard]] c10::cuda::CUDAStreamGuard enter(std::uint32_t r) {
        return c10::cuda::CUDAStreamGuard(c10::cuda::getStreamFromExternal(m.callers[r].native_handle(), 0));
    }
    /// `f(rank, set)` on each rank's stream, one after the other; then the device is done.
    template <class F>
    void on_both(const F& f) {
        for (std::uint32_t r = 0; r < 2; ++r) {
            const auto inside = enter(r);
            f(r, sets[r]);
        }
        for (auto& s : m.streams) s.record().wait(gs::never);
    }

    const standin::session gpu{{.devices = 1, .sms = 16, .blocks_per_sm = 1}};
    cuda::node node;
    cuda::pinned_memory visible{node};
    const std::vector<gs::device_id> on = std::vector<gs::device_id>(2, gs::device_id{0});
    group_type group{node, visible, on, {.blocks = 2}};
    machine_type m;
    cuda::stream beside = node.make_stream(gs::device_id{0});
    process_set sets[2];
};

at::Tensor filled(at::IntArrayRef sizes, double x, at::ScalarType type = at::kFloat) {
    return fake_cuda::moved(at::full(sizes, x, at::TensorOptions(type)), fake_cuda::device);
}
bool same(const at::Tensor& a, const at::Tensor& expected) {
    return a.device() == fake_cuda::device && at::equal(fake_cuda::moved(a, c10::kCPU), expected);
}
}  // namespace

TEST_CASE("tensors on CUDA are summed up in place, beside themselves and in groups", "[interop][torch]") {
    rig r;
    at::Tensor x[2], y[2], from[2], sum[2];
    tensor_handle beside[2];
    std::vector<handle> all;
    r.on_both([&](std::uint32_t k, process_set& of) {
        x[k] = filled({3, 2}, 1 + k);
        y[k] = filled({4}, 5, at::kLong);
        all.push_back(allreduce_async_(x[k], "x", Average, of));
        const std::vector<at::Tensor> list{y[k]};
        for (const handle& h : grouped_allreduce_async_(list, "y", Sum, of)) all.push_back(h);
        from[k] = filled({3, 2}, 1 + k);
        beside[k] = allreduce_async(from[k], "z", Max, of);
    });
    for (std::uint32_t k = 0; k < 2; ++k) {
        const auto inside = r.enter(k);
        sum[k] = synchronize(beside[k]);
        CHECK(poll(beside[k]));
        CHECK(same(x[k], at::full({3, 2}, 1.5F)));
        CHECK(same(y[k], at::full({4}, 10, at::kLong)));
        CHECK(same(from[k], at::full({3, 2}, 1.0F + static_cast<float>(k))));
        CHECK(same(sum[k], at::full({3, 2}, 2.0F)));
    }
    synchronize(all);
}

TEST_CASE("rows of tensors on CUDA are gathered, exchanged and scattered, of any type where they only move",
          "[interop][torch]") {
    rig r;
    tensor_handle all[2], exchanged[2], parts[2];
    const std::vector<std::int64_t> splits[2] = {{1, 2}, {3, 0}};
    r.on_both([&](std::uint32_t k, process_set& of) {
        all[k] = allgather_async(filled({1 + k, 3}, 7 + k, at::kByte), "all", of);
        exchanged[k] = alltoall_async(filled({3, 2}, k), splits[k], "to", of);
        parts[k] = reducescatter_async(filled({3, 2}, 1 + k), "part", Sum, of);
    });
    for (std::uint32_t k = 0; k < 2; ++k) {
        const auto inside = r.enter(k);
        CHECK(same(synchronize(all[k]), at::cat({at::full({1, 3}, 7, at::kByte), at::full({2, 3}, 8, at::kByte)})));
        CHECK(*all[k].rows == std::vector<std::int64_t>{1, 2});
        const at::Tensor got = k == 0 ? at::cat({at::zeros({1, 2}), at::ones({3, 2})}) : at::zeros({2, 2});
        CHECK(same(synchronize(exchanged[k]), got));
        CHECK(same(synchronize(parts[k]), at::full({2 - k, 2}, 3.0F)));
    }
}

TEST_CASE("parameters on CUDA are broadcast by the names that a module has", "[interop][torch]") {
    struct item {
        std::string name;
        at::Tensor tensor;
        [[nodiscard]] const std::string& key() const { return name; }
        [[nodiscard]] const at::Tensor& value() const { return tensor; }
    };
    rig r;
    at::Tensor x[2];
    support::together(2, [&](unsigned k) {
        const auto inside = r.enter(k);
        x[k] = filled({2, 2}, k);
        broadcast_parameters(std::vector<item>{{"weight", x[k]}}, 1, r.sets[k]);
    });
    for (auto& s : r.m.streams) s.record().wait(gs::never);
    for (const auto& t : x) CHECK(same(t, at::ones({2, 2})));
}

TEST_CASE("torch's current stream waits where synchronize is called", "[interop][torch]") {
    rig r;
    at::Tensor x[2];
    std::vector<handle> all;
    standin::hold(r.m.streams[0].native_handle());
    for (std::uint32_t k = 0; k < 2; ++k) {
        const auto inside = r.enter(k);
        x[k] = filled({2}, 1);
        all.push_back(allreduce_async_(x[k], "x", Sum, r.sets[k]));
    }
    CHECK_FALSE(poll(all[0]));
    {
        const auto inside = r.enter(1);
        synchronize(all[0]);
    }
    r.let_others_run();
    CHECK(r.m.callers[0].record().reached());
    CHECK_FALSE(r.m.callers[1].record().reached());
    standin::let_go(r.m.streams[0].native_handle());
    r.m.callers[1].record().wait(gs::never);
    CHECK(same(x[0], at::full({2}, 2.0F)));
}

TEST_CASE("a tensor is kept until its collective is over", "[interop][torch]") {
    rig r;
    standin::hold(r.m.streams[0].native_handle());
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> kept;
    std::vector<handle> all;
    for (std::uint32_t k = 0; k < 2; ++k) {
        const auto inside = r.enter(k);
        const at::Tensor x = filled({2}, 1);
        kept.emplace_back(x.getIntrusivePtr());
        all.push_back(allreduce_async_(x, "x", Sum, r.sets[k]));
    }
    for (const auto& k : kept) CHECK_FALSE(k.expired());
    standin::let_go(r.m.streams[0].native_handle());
    for (auto& s : r.m.streams) s.record().wait(gs::never);
    CHECK(poll(all[0]));
    for (const auto& k : kept) CHECK(k.expired());
}

TEST_CASE("tensors that can't be handed over are refused by their name", "[interop][torch]") {
    rig r;
    const auto inside = r.enter(0);
    const std::string why(to_string(errc::not_supported));
    process_set& of = r.sets[0];
    const at::Tensor columns = fake_cuda::moved(at::ones({2, 3}).t(), fake_cuda::device);
    CHECK_THAT(refusal_of([&] { (void)allreduce_async_(columns, "a", Sum, of); }),
               Contains(why) && Contains("a: a tensor"));
    CHECK_THAT(refusal_of([&] { (void)allreduce_async_(at::ones({2}), "b", Sum, of); }), Contains(why));
    CHECK_THAT(refusal_of([&] { (void)allreduce_async_(filled({2}, 1, at::kInt), "c", Sum, of); }), Contains(why));
    CHECK_THAT(refusal_of([&] { (void)allgather_async(filled({}, 1), "d", of); }),
               Contains("d: a tensor without rows"));
    CHECK_THAT(refusal_of([&] { (void)allgather_async(at::ones({2}), "e", of); }), Contains(why));
    CHECK_THAT(refusal_of([&] { (void)alltoall_async(filled({3}, 1), {}, "f", of); }), Contains("rows for all ranks"));
    CHECK_THAT(refusal_of([&] {
                   (void)alltoall_async(filled({3}, 1), {-1, 4}, "g", of);
               }),
               Contains(std::string(to_string(errc::invalid_specification))));
    const c10::cuda::CUDAStreamGuard outside(c10::cuda::getDefaultCUDAStream(0));
    CHECK_THAT(refusal_of([&] { (void)allreduce_async_(filled({2}, 1), "h", Sum, of); }), Contains("default stream"));
}

}  // namespace torch_horovod_test
