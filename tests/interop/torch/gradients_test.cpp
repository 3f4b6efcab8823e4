// SPDX-License-Identifier: Apache-2.0
// torch_gradients on CUDA: two ranks in one process, with libtorch's autograd and the stand-in for
// CUDA. Operators run immediately on the host (fake_cuda.hpp), so the tests of stream order check
// which stream waits for which, and not the data.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/torch_gradients.hpp>
#include <gpushare/gradient/transport.hpp>

#include "fake_cuda.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/average_of_two.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/threads.hpp"

namespace torch_gradients_test {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using gs::errc;
using support::refusal_of;

namespace {

struct combine_on {
    cuda::stream* on;
    int* calls;
    template <class T>
    errc operator()(gs::device_buckets<T>& buckets) const {
        const std::vector<T*> none(2);
        return buckets.advance(std::span(on, 1), none, [this](auto, auto outs, std::size_t n, gs::average) {
            ++*calls;
            on->launch({}, support::average_of_two<T>{outs[0], outs[1], n});
            return errc::none;
        });
    }
};
using all_types = gs::gradient_types<float, double, gs::float16, gs::bfloat16>;

/// As a module's named_parameters() has them.
struct item {
    std::string name;
    at::Tensor tensor;
    [[nodiscard]] const std::string& key() const { return name; }
    [[nodiscard]] const at::Tensor& value() const { return tensor; }
};
/// Two layers, the second in another type; a parameter that some passes use; and one that none
/// uses.
struct network {
    explicit network(c10::Device on, at::ScalarType second = at::kDouble)
        : parameters{{"first.weight", filled({6, 4}, at::kFloat, on)},
                     {"first.bias", filled({6}, at::kFloat, on)},
                     {"second.weight", filled({3, 6}, second, on)},
                     {"sometimes", filled({3}, second, on)},
                     {"never", filled({2}, at::kFloat, on)}} {}
    static at::Tensor filled(at::IntArrayRef sizes, at::ScalarType type, c10::Device on) {
        const auto t = at::arange(c10::multiply_integers(sizes), at::kFloat).sin().view(sizes).to(type);
        return fake_cuda::moved(t, on).detach().requires_grad_();
    }
    [[nodiscard]] at::Tensor loss(const at::Tensor& x, bool sometimes) const {
        const auto& p = parameters;
        const auto h = at::relu(at::matmul(x, p[0].tensor.t()) + p[1].tensor);
        auto y = at::matmul(h.to(p[2].tensor.scalar_type()), p[2].tensor.t());
        if (sometimes) y = y * p[3].tensor;
        return (y * y).sum();
    }
    /// The bytes of all parameters.
    [[nodiscard]] std::string bits() const {
        std::string all;
        for (const auto& p : parameters) all.append(static_cast<const char*>(p.tensor.data_ptr()), p.tensor.nbytes());
        return all;
    }
    std::vector<item> parameters;
};
/// Gradient descent with momentum.
struct optimiser {
    explicit optimiser(const network& n, cuda::stream* on = nullptr) : of(n.parameters), stream(on) {}
    void step() {
        if (stream != nullptr) stream->record().wait(gs::never);  // for which these operators don't wait
        const c10::AutoGradMode off(false);
        for (std::size_t i = 0; i < of.size(); ++i) {
            const at::Tensor gradient = of[i].tensor.grad();
            if (momentum.size() == i) momentum.push_back(at::zeros_like(of[i].tensor));
            momentum[i].mul_(0.5).add_(gradient);
            of[i].tensor.add_(momentum[i], -0.0625);
        }
        ++steps;
    }
    std::vector<item> of;
    cuda::stream* stream;
    std::vector<at::Tensor> momentum{};
    int steps = 0;
};
at::Tensor batch(std::uint32_t rank, int step, c10::Device on) {
    const auto t = at::arange(20, at::kFloat).add(static_cast<double>(7 * rank) + step).cos().view({5, 4});
    return fake_cuda::moved(t, on);
}

/// Two ranks on one device, each with a stream that it trains on, and a third stream that combines.
struct rig {
    explicit rig(gs::bytes bucket = gs::bytes{64}, gs::ns patience = 60s)
        : ranks(node, std::span(&combining, 1), 2, combine_on{&combining, &calls},
                {.bucket = bucket, .patience = patience}, all_types{}) {
        fake_cuda::set_up();
        for (int r = 0; r < 2; ++r) training.push_back(node.make_stream(gs::device_id{0}));
    }
    /// As a torch_scope does, of the tenant's stream.
    [[nodiscard]] c10::cuda::CUDAStreamGuard enter(std::uint32_t r) {
        return c10::cuda::CUDAStreamGuard(c10::cuda::getStreamFromExternal(training[r].native_handle(), 0));
    }
    /// Long enough for all that isn't held.
    void let_others_run() {
        auto beside = node.make_stream(gs::device_id{0});
        beside.enqueue(1ms);
        beside.record().wait(gs::never);
    }

    const standin::session gpu{{.devices = 1}};
    cuda::node node;
    cuda::stream combining = node.make_stream(gs::device_id{0});
    std::vector<cuda::stream> training;
    int calls = 0;
    gs::torch_device_ranks<cuda::node, combine_on, float, double, gs::float16, gs::bfloat16> ranks;
};

/// What two ranks have to learn: on the host, one after the other, with averages of its own.
std::string expected(int steps, at::ScalarType second, int batches_of_rank_1) {
    network n(c10::kCPU, second);
    optimiser sgd(n);
    for (int s = 0; s < steps; ++s) {
        std::vector<at::Tensor> of_rank[2];
        for (std::uint32_t r = 0; r < 2; ++r) {
            for (auto& p : n.parameters) p.tensor.mutable_grad() = at::zeros_like(p.tensor);
            if (r == 0 || s < batches_of_rank_1) n.loss(batch(r, s, c10::kCPU), r == 0).backward();
            for (auto& p : n.parameters) of_rank[r].push_back(p.tensor.grad().clone());
        }
        for (std::size_t i = 0; i < n.parameters.size(); ++i)
            n.parameters[i].tensor.mutable_grad() = (of_rank[0][i] + of_rank[1][i]) / 2;
        sgd.step();
    }
    return n.bits();
}

/// Trains both ranks in threads; faults of each.
std::vector<int> trained(rig& r, const std::vector<network>& models, bool to_none, const std::vector<int>& batches) {
    std::vector<int> faults(2);
    support::together(2, [&](unsigned rank) {
        const auto inside = r.enter(rank);
        const network& model = models[rank];
        gs::torch_gradients mine(model.parameters, r.ranks, rank);
        optimiser sgd(model, &r.training[rank]);
        for (int s = 0; s < batches[rank]; ++s) {
            for (auto& p : model.parameters) {
                if (to_none)
                    p.tensor.mutable_grad() = at::Tensor();
                else
                    p.tensor.mutable_grad().zero_();
            }
            model.loss(batch(rank, s, fake_cuda::device), rank == 0).backward();
            faults[rank] += mine.step(sgd) ? 1 : 0;
        }
        faults[rank] += mine.join(sgd) ? 1 : 0;
    });
    return faults;
}

/// Says what hooks do.
struct recorder : gs::detail::device_ranks {
    void add(std::uint32_t, std::vector<gs::detail::device_gradient> mine, void*) override { registered = mine; }
    void ready(std::uint32_t, std::uint32_t g, void* stream) override {
        order.push_back(g);
        streams.push_back(stream);
    }
    gs::collective_fault wait(std::uint32_t, void*) override { return {}; }
    bool another(std::uint32_t) override { return false; }
    void end(errc why, std::uint32_t) override { ended = why; }

    std::vector<gs::detail::device_gradient> registered;
    std::vector<std::uint32_t> order;
    std::vector<void*> streams;
    errc ended = errc::none;
};

}  // namespace

TEST_CASE("two ranks on CUDA learn the same parameters, to the bit, and those of the averages", "[interop][torch]") {
    const auto second = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16);
    const bool to_none = GENERATE(false, true);
    CAPTURE(static_cast<int>(second), to_none);
    rig r;
    const std::vector<network> models{network(fake_cuda::device, second), network(fake_cuda::device, second)};
    CHECK(trained(r, models, to_none, {5, 5}) == std::vector<int>(2));
    CHECK(models[0].bits() == models[1].bits());
    CHECK(models[0].bits() == expected(5, second, 5));
    CHECK(r.calls > 2 * 5);  // buckets
}

TEST_CASE("a rank with fewer batches joins, and learns what the others learn", "[interop][torch]") {
    const int fewer = GENERATE(0, 2);
    rig r;
    const std::vector<network> models{network(fake_cuda::device), network(fake_cuda::device)};
    CHECK(trained(r, models, false, {5, fewer}) == std::vector<int>(2));
    CHECK(models[0].bits() == models[1].bits());
    CHECK(models[0].bits() == expected(5, at::kDouble, fewer));
}

TEST_CASE("gradients are handed over as autograd makes them ready, on its stream, and the rest at the step",
          "[interop][torch]") {
    rig r;
    recorder seen;
    const network model(fake_cuda::device);
    optimiser sgd(model);
    const auto inside = r.enter(1);
    gs::torch_gradients mine(model.parameters, seen, 0);
    REQUIRE(seen.registered.size() == 5);
    CHECK(seen.registered[3].name == "sometimes");
    CHECK(seen.registered[3].type == gs::detail::gradient_type::f64);
    CHECK(static_cast<double*>(seen.registered[3].data) == static_cast<double*>(seen.registered[2].data) + 18);
    model.loss(batch(0, 0, fake_cuda::device), false).backward();
    REQUIRE(seen.order.size() == 3);
    CHECK(seen.order[0] == 2);
    CHECK_FALSE(mine.step(sgd));
    CHECK(std::vector<std::uint32_t>(seen.order.begin() + 3, seen.order.end()) == std::vector<std::uint32_t>{3, 4});
    CHECK(seen.streams == std::vector<void*>(5, r.training[1].native_handle()));
    for (const auto& p : model.parameters) CHECK(p.tensor.grad().defined());
    CHECK(sgd.steps == 1);
    seen.order.clear();
    mine.hold(true);  // as DDP's no_sync
    model.loss(batch(0, 1, fake_cuda::device), true).backward();
    CHECK(seen.order.empty());
    mine.hold(false);
    CHECK_FALSE(mine.step(sgd));
    CHECK(seen.order.size() == 5);
    CHECK_FALSE(mine.join(sgd));
}

TEST_CASE("buckets are under way while the backward pass goes on, and wait for autograd's stream", "[interop][torch]") {
    rig r;
    const std::vector<network> models{network(fake_cuda::device), network(fake_cuda::device)};
    std::vector<gs::torch_gradients> of;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
        const auto inside = r.enter(rank);
        of.emplace_back(models[rank].parameters, r.ranks, rank);
    }
    standin::hold(r.training[1].native_handle());
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
        const auto inside = r.enter(rank);
        models[rank].loss(batch(rank, 0, fake_cuda::device), true).backward();
    }
    CHECK(r.calls >= 2);
    r.let_others_run();
    CHECK_FALSE(r.combining.record().reached());
    standin::let_go(r.training[1].native_handle());
    r.combining.record().wait(gs::never);
    const auto bits = [](const at::Tensor& t) { return std::string(static_cast<char*>(t.data_ptr()), t.nbytes()); };
    CHECK(bits(models[0].parameters[2].tensor.grad()) == bits(models[1].parameters[2].tensor.grad()));
    of[0].stop();
}

TEST_CASE("the training's stream waits for the averages, and the host for the other rank alone", "[interop][torch]") {
    rig r;
    const std::vector<network> models{network(fake_cuda::device), network(fake_cuda::device)};
    standin::hold(r.combining.native_handle());
    std::vector<int> faults(2);
    support::together(2, [&](unsigned rank) {
        const auto inside = r.enter(rank);
        gs::torch_gradients mine(models[rank].parameters, r.ranks, rank);
        optimiser sgd(models[rank]);
        models[rank].loss(batch(rank, 0, fake_cuda::device), true).backward();
        faults[rank] += mine.step(sgd) || sgd.steps != 1 ? 1 : 0;
    });
    CHECK(faults == std::vector<int>(2));
    r.let_others_run();
    for (auto& s : r.training) CHECK_FALSE(s.record().reached());
    standin::let_go(r.combining.native_handle());
    for (auto& s : r.training) s.record().wait(gs::never);
}

TEST_CASE("a parameter that a rank can't combine is refused by name", "[interop][torch]") {
    rig r;
    const auto inside = r.enter(0);
    const c10::Device other(c10::kCUDA, 1);
    const item good{"good", network::filled({2}, at::kFloat, fake_cuda::device)};
    const auto with = [&](const at::Tensor& bad) {
        return refusal_of([&] { gs::torch_gradients mine(std::vector<item>{good, {"bad", bad}}, r.ranks, 0); });
    };
    const std::string why(to_string(errc::not_supported));
    CHECK_THAT(with(network::filled({2}, at::kFloat, c10::kCPU)), Contains(why) && Contains("bad: a parameter"));
    CHECK_THAT(with(network::filled({2}, at::kFloat, other)), Contains(why) && Contains("bad: a parameter"));
    CHECK_THAT(with(fake_cuda::moved(at::ones({2, 3}).t(), fake_cuda::device).requires_grad_()),
               Contains(why) && Contains("bad: a parameter"));
    CHECK_THAT(with(network::filled({2}, at::kComplexFloat, fake_cuda::device)),
               Contains(why) && Contains("bad: a parameter of another type than floats"));
    CHECK_THAT(refusal_of([&] { gs::torch_gradients mine(std::vector<item>{good}); }),
               Contains(why) && Contains("good: a parameter that isn't of float32, dense, in the host's memory"));
    const c10::cuda::CUDAStreamGuard outside(c10::cuda::getDefaultCUDAStream(0));
    CHECK_THAT(refusal_of([&] { gs::torch_gradients mine(std::vector<item>{good}, r.ranks, 0); }),
               Contains("default stream"));
}

TEST_CASE("a gradient that isn't dense is every rank's fault, and says whose it is", "[interop][torch]") {
    rig r;
    const auto inside = r.enter(0);
    std::vector<gs::torch_gradients> of;
    std::vector<network> models{network(fake_cuda::device), network(fake_cuda::device)};
    for (std::uint32_t rank = 0; rank < 2; ++rank) of.emplace_back(models[rank].parameters, r.ranks, rank);
    optimiser sgd(models[0]);
    models[0].parameters[1].tensor.mutable_grad() = at::ones({6}).to_sparse();
    CHECK_THAT(refusal_of([&] { (void)of[0].step(sgd); }), Contains("first.bias: a gradient that isn't dense"));
    const auto fault = of[1].step(sgd);
    CHECK(fault.code == errc::not_supported);
    CHECK(fault.rank == 0);
    CHECK(sgd.steps == 0);
}

TEST_CASE("a rank that doesn't come within the others' patience is named to them", "[interop][torch]") {
    rig r(gs::bytes{64}, 1ms);
    const auto inside = r.enter(0);
    const network model(fake_cuda::device);
    gs::torch_gradients mine(model.parameters, r.ranks, 0);
    optimiser sgd(model);
    model.loss(batch(0, 0, fake_cuda::device), true).backward();
    const auto fault = mine.step(sgd);
    CHECK(fault.code == errc::deadline_exceeded);
    CHECK(fault.rank == 1);
    CHECK(sgd.steps == 0);
}

TEST_CASE("calls for ranks of the host are refused on devices, and the other way round", "[interop][torch]") {
    rig r;
    const auto inside = r.enter(0);
    const network model(fake_cuda::device), on_host(c10::kCPU, at::kFloat);
    gs::torch_gradients mine(model.parameters, r.ranks, 0), hosts(on_host.parameters);
    gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    CHECK(mine.broadcast(net).code == errc::not_supported);
    CHECK(mine.communicate(net).code == errc::not_supported);
    optimiser sgd(on_host);
    CHECK_THAT(refusal_of([&] { (void)hosts.join(sgd); }), Contains("joining without devices"));
}

}  // namespace torch_gradients_test
