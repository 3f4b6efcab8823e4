// SPDX-License-Identifier: Apache-2.0
// A libtorch module trained by two ranks: by gradient/torch_gradients.hpp, and by what is below
// torch's own DistributedDataParallel, its reducer over Gloo. The losses are the same to the bit:
// of two ranks a sum has no order. A program of its own, for `./dev check`.
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/torch_gradients.hpp>
#include <gpushare/gradient/transport.hpp>

#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace gs = gpushare;
using namespace std::chrono_literals;

constexpr std::uint32_t ranks = 2;
constexpr int steps = 30;
int passed = 0, failed = 0;

void check(bool good, const char* what) {
    ++(good ? passed : failed);
    if (!good) std::printf("failed: %s\n", what);
}

struct digits_net : torch::nn::Module {
    digits_net()
        : first(register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)))),
          norm(register_module("norm", torch::nn::GroupNorm(2, 8))),
          second(register_module("second", torch::nn::Linear(8 * 8 * 8, 40))),
          last(register_module("last", torch::nn::Linear(40, 10))),
          unused(register_module("unused", torch::nn::Linear(3, 3))) {}
    torch::Tensor forward(torch::Tensor x) {
        x = torch::relu(norm(first(x))).flatten(1);
        return torch::log_softmax(last(torch::relu(second(x))), 1);
    }
    torch::nn::Conv2d first;
    torch::nn::GroupNorm norm;
    torch::nn::Linear second, last, unused;
};

struct sample {
    torch::Tensor images, labels;
};
/// Of one rank and step: blobs at a place that depends on the label.
std::vector<sample> drawn(std::uint32_t rank) {
    torch::manual_seed(100 + rank);
    std::vector<sample> all;
    for (int i = 0; i < steps; ++i) {
        auto labels = torch::randint(10, {16}, torch::kLong);
        auto images = torch::rand({16, 1, 8, 8}) * 0.3;
        for (int k = 0; k < 16; ++k) images[k][0][labels[k].item<int64_t>() % 8].add_(1);
        all.push_back({images, labels});
    }
    return all;
}
std::vector<std::vector<sample>> data;

/// `train(rank, model)` by threads, on models that begin alike, or not.
using losses = std::vector<std::vector<float>>;
losses trained(const std::function<std::vector<float>(std::uint32_t, digits_net&)>& train, bool alike = true) {
    std::vector<std::shared_ptr<digits_net>> models;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        torch::manual_seed(alike ? 1 : 1 + r);
        models.push_back(std::make_shared<digits_net>());
    }
    losses all(ranks);
    std::vector<std::jthread> threads;
    for (std::uint32_t r = 0; r < ranks; ++r) threads.emplace_back([&, r] { all[r] = train(r, *models[r]); });
    threads.clear();
    return all;
}

std::vector<float> loop(std::uint32_t rank, digits_net& model, torch::optim::Optimizer& optimiser, bool to_none,
                        const std::function<void()>& before, const std::function<bool()>& step) {
    std::vector<float> all;
    for (const auto& s : data[rank]) {
        before();
        optimiser.zero_grad();
        if (to_none)
            for (auto& p : model.parameters()) p.mutable_grad() = torch::Tensor();
        auto loss = torch::nll_loss(model.forward(s.images), s.labels);
        loss.backward();
        if (!step()) throw std::runtime_error("a step failed");
        all.push_back(loss.item<float>());
    }
    return all;
}

losses by_torch() {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    return trained([&](std::uint32_t rank, digits_net& model) {
        const auto options = c10d::ProcessGroupGloo::Options::create();
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
        const auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, ranks, options);
        std::vector<torch::Tensor> used;
        for (const auto& p : model.named_parameters())
            if (p.key().rfind("unused", 0) != 0) used.push_back(p.value());
        std::vector<std::size_t> all(used.size());
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
        c10d::Reducer reducer(used, {all}, {std::size_t{25} << 20}, group, std::vector<bool>(used.size(), false),
                              std::int64_t{25} << 20, false, false, {}, std::int64_t{1} << 20);
        torch::optim::SGD optimiser(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
        return loop(
            rank, model, optimiser, false, [&] { reducer.prepare_for_backward({}); },
            [&] {
                optimiser.step();
                return true;
            });
    });
}

/// `between(rank, net, shared)`, if given, is called between two steps, when no other thread uses
/// the transport.
using between_steps = std::function<void(std::uint32_t, gs::thread_transport&, gs::torch_gradients&)>;
losses by_us(const gs::torch_gradient_options& options, bool to_none, bool alike = true,
             const between_steps& between = {}) {
    const gs::communicator group(ranks);
    return trained(
        [&](std::uint32_t rank, digits_net& model) {
            gs::thread_transport net(group.rank(rank));
            gs::torch_gradients shared(model.named_parameters(), options);
            if (shared.broadcast(net)) throw std::runtime_error("broadcast");
            std::jthread communicates([&] { (void)shared.communicate(net, 60s); });
            torch::optim::SGD optimiser(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
            auto all = loop(
                rank, model, optimiser, to_none, [] {},
                [&] {
                    if (shared.step(optimiser)) return false;
                    if (between) between(rank, net, shared);
                    return true;
                });
            shared.stop();
            return all;
        },
        alike);
}

/// Buckets whose size is tuned on line.
losses by_us_tuned() {
    const gs::bucket_tuner by_default({gs::bytes{2000}, 1});  // all others are larger than all of it
    std::vector<gs::bucket_tuner> tuners(ranks, by_default);
    std::vector<std::chrono::steady_clock::time_point> begins(ranks, std::chrono::steady_clock::now());
    const losses all = by_us({}, false, true, [&](std::uint32_t r, auto& net, auto& shared) {
        gs::ns took = std::chrono::steady_clock::now() - begins[r];
        if (gs::agree(net, took)) throw std::runtime_error("agree");
        tuners[r].step_took(took);
        shared.buckets().arrange(tuners[r].choice());
        begins[r] = std::chrono::steady_clock::now();
    });
    for (const auto& t : tuners) check(t.choice() == tuners[0].choice(), "the same choice");
    return all;
}

/// Two backward passes, whose gradients add up, are one step.
void passes_add_up() {
    gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    torch::nn::Linear model(2, 1);
    gs::torch_gradients shared(model->named_parameters());
    std::jthread communicates([&] { (void)shared.communicate(net); });
    torch::optim::SGD optimiser(model->parameters(), 0.0);
    shared.hold(true);
    for (int i = 0; i < 2; ++i) model->forward(torch::ones({1, 2})).sum().backward();
    shared.hold(false);
    check(!shared.step(optimiser) && model->weight.grad()[0][1].item<float>() == 2, "passes add up");
    shared.stop();
}

/// A step with a gradient that isn't finite changes nothing.
void infinite_steps_are_skipped() {
    gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    torch::nn::Linear model(2, 1);
    gs::torch_gradients shared(model->named_parameters());
    std::jthread communicates([&] { (void)shared.communicate(net); });
    torch::optim::SGD optimiser(model->parameters(), 1.0);
    const auto before = model->weight.clone();
    model->forward(torch::full({1, 2}, HUGE_VAL)).sum().backward();
    check(!shared.step(optimiser) && torch::equal(before, model->weight), "an infinite step");
    shared.stop();
}

/// Norms' weights and biases aren't rounded, however large; nor is what is small.
void what_is_sensitive_stays_as_it_is() {
    torch::nn::Sequential model(torch::nn::Linear(20, 5000), torch::nn::BatchNorm1d(5000), torch::nn::Linear(5000, 1));
    const auto bytes_from = [&](std::size_t least) {
        gs::torch_gradients shared(model->named_parameters(), {.wire = {gs::wire_format::bf16, least}});
        return shared.buckets().wire_bytes().count();
    };
    constexpr std::size_t large = 20 * 5000, small = 5000, of_one_dimension = 3 * 5000 + 1;
    check(bytes_from(5001) == 2 * large + 4 * (small + of_one_dimension), "a small matrix");
    check(bytes_from(0) == 2 * (large + small) + 4 * of_one_dimension, "large ones of one dimension");
}

/// Tensors by Horovod's names, handed over in other orders.
void by_the_names_of_horovod() {
    const gs::communicator group(ranks);
    std::vector<int> wrong(ranks);
    std::vector<std::jthread> threads;
    for (std::uint32_t r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            gs::thread_transport net(group.rank(r));
            gs::horovod::process_set all(net);
            const auto mine = static_cast<double>(r);
            auto a = torch::full({3, 2}, mine, torch::kHalf), b = torch::full({4}, mine, torch::kDouble);
            auto c = torch::full({2}, static_cast<std::int64_t>(r + 1), torch::kLong);
            std::vector<gs::horovod::handle> under_way;
            for (const bool first : {r == 0, r != 0})
                under_way.push_back(first ? gs::horovod::allreduce_async_(a, "a", gs::horovod::Average, all)
                                          : gs::horovod::allreduce_async_(b, "b", gs::horovod::Sum, all));
            gs::horovod::synchronize(under_way);
            const std::vector<torch::Tensor> list{c};
            gs::horovod::synchronize(gs::horovod::grouped_allreduce_async_(list, "c", gs::horovod::Sum, all));
            if (a[2][1].item<float>() != 0.5F || b[3].item<double>() != 1 || c[1].item<std::int64_t>() != 3) ++wrong[r];
            torch::nn::Linear model(2, 1);
            model->weight.data().fill_(mine);
            gs::horovod::broadcast_parameters(model->named_parameters(), 1, all);
            if (model->weight[0][1].item<float>() != 1) ++wrong[r];
            try {
                (void)gs::horovod::allreduce_async_(torch::ones({4, 4}).t(), "d", gs::horovod::Sum, all);
                ++wrong[r];
            } catch (const gs::operation_error& e) {
                if (e.code() != gs::errc::not_supported) ++wrong[r];
            }
        });
    threads.clear();
    check(wrong == std::vector<int>(ranks), "Horovod's names");
}

void other_types_are_refused() {
    torch::nn::Linear model(2, 1);
    model->to(torch::kDouble);
    try {
        gs::torch_gradients shared(model->named_parameters());
        check(false, "double");
    } catch (const gs::operation_error& e) {
        check(e.code() == gs::errc::not_supported && std::string(e.what()).find("weight") != std::string::npos,
              "double");
    }
}

}  // namespace

int main() {
    torch::set_num_threads(1);
    for (std::uint32_t r = 0; r < ranks; ++r) data.push_back(drawn(r));
    const losses theirs = by_torch();
    std::printf("losses by torch: %.6f at first, %.6f at last\n", static_cast<double>(theirs[0].front()),
                static_cast<double>(theirs[0].back()));
    check(theirs[0].back() < theirs[0].front() / 2, "it learns");
    check(by_us({}, false) == theirs, "the same losses");
    check(by_us({.fusion = {gs::bytes{2000}, 1}}, false) == theirs, "in small buckets");
    check(by_us({}, true) == theirs, "gradients that are dropped");
    check(by_us_tuned() == theirs, "tuned on line");
    const auto other = by_us({}, false, false);
    check(other[1] == theirs[1], "rank 0's parameters");
    const auto halves = by_us({.wire = {.large = gs::wire_format::fp16, .least = 100}, .error_feedback = true}, false);
    check(std::abs(halves[0].back() - theirs[0].back()) < 0.05F, "halves");
    passes_add_up();
    infinite_steps_are_skipped();
    what_is_sensitive_stays_as_it_is();
    other_types_are_refused();
    by_the_names_of_horovod();
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
