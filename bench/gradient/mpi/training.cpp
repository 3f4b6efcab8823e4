// SPDX-License-Identifier: Apache-2.0
// Trains a convolutional network of 10.24 million parameters with two processes across a link.
// bench_gradient starts this program: PROGRAM BATCH ROUNDS.
//
// All trainings use the same network, initial parameters and data. One training runs without
// communication. One uses libtorch's own DDP over Gloo: its Reducer, driven as torch.nn.parallel
// drives it. Three use torch_gradients over an MPI transport: without options, with the best of
// DDP's candidate bucket sizes, and with fp16 on the wire. The trainings alternate by steps. Each
// step with communication runs between two steps without communication that start from the same
// parameters. Each process has one core and one computing thread.
//
// Prints "NAME SECONDS" for each step, as the slower process measured it, and "NAME_exposed
// SECONDS", which subtracts the mean of the two surrounding steps. "floor_exposed SECONDS"
// describes an ideal link: it costs the core nothing and carries each gradient as soon as the
// gradient is ready in a step without communication. Exits with 1 if the losses of DDP and of ours
// in float32 differ anywhere.
#define USE_C10D_GLOO
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <gpushare/gradient/mpi.hpp>
#include <gpushare/gradient/torch_gradients.hpp>

#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradient/mpi/world.hpp"

namespace {

namespace gs = gpushare;

using bench::rank;
using bench::ranks;

int batch = 16;
constexpr double link = 1e9 / 8 * 1448 / 1514;  // data rate of the shaped link, with frames of 1,514 bytes

torch::nn::Sequential network() {
    torch::manual_seed(1);
    torch::nn::Sequential net;
    int in = 3;
    for (const auto& [out, stride] : std::vector<std::pair<int, int>>{
             {64, 1}, {128, 1}, {128, 2}, {256, 1}, {256, 2}, {512, 1}, {512, 2}, {512, 1}, {512, 1}}) {
        net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).stride(stride).bias(false)));
        net->push_back(torch::nn::BatchNorm2d(out));
        net->push_back(torch::nn::ReLU());
        in = out;
    }
    net->push_back(torch::nn::AdaptiveAvgPool2d(1));
    net->push_back(torch::nn::Flatten());
    net->push_back(torch::nn::Linear(512, 576));
    net->push_back(torch::nn::ReLU());
    net->push_back(torch::nn::Linear(576, 1000));
    return net;
}

/// A training step. Derived classes differ only in the work around the forward and backward pass.
class training {
public:
    explicit training(std::string name)
        : name_(std::move(name)), net_(network()), optimiser_(net_->parameters(), torch::optim::SGDOptions(0.02)) {}
    virtual ~training() = default;
    training(const training&) = delete;
    training& operator=(const training&) = delete;

    /// Runs a step; returns the slower process's seconds.
    double step() {
        auto any = torch::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(steps_++ * ranks + rank));
        const auto x = torch::randn({batch, 3, 32, 32}, any);
        const auto y = torch::randint(0, 1000, {batch}, any, torch::kLong);
        MPI_Barrier(MPI_COMM_WORLD);
        const auto begin = std::chrono::steady_clock::now();
        before();
        const auto loss = torch::nn::functional::cross_entropy(net_->forward(x), y);
        before_backward();
        loss.backward();
        update(optimiser_);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        losses_.push_back(loss.item<float>());
        return bench::longest_of_all(took.count());
    }
    /// Makes the next step repeat the other training's: from its parameters, over its data. With
    /// other numbers, a step could take another time.
    void follow(const training& other) {
        const torch::NoGradGuard none;
        const auto to = net_->parameters(), from = other.net_->parameters();
        for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
        steps_ = other.steps_;
    }
    [[nodiscard]] const std::vector<float>& losses() const { return losses_; }
    [[nodiscard]] const std::string& name() const { return name_; }

protected:
    virtual void before() { zero(); }
    virtual void before_backward() {}
    virtual void update(torch::optim::SGD& optimiser) { optimiser.step(); }
    void zero() {
        for (auto& p : net_->parameters())
            if (p.grad().defined()) p.mutable_grad().zero_();
    }
    [[nodiscard]] std::vector<torch::Tensor> parameters() const { return net_->parameters(); }
    [[nodiscard]] const torch::nn::Sequential& module() const { return net_; }

private:
    std::string name_;
    torch::nn::Sequential net_;
    torch::optim::SGD optimiser_;
    std::vector<float> losses_;
    int steps_ = 0;
};

/// Uses the Reducer as torch.nn.parallel.DistributedDataParallel does.
class ddp : public training {
public:
    ddp(std::string name, const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::int64_t bucket, bool views)
        : training(std::move(name)), views_(views) {
        const auto all = parameters();
        const std::vector<bool> sparse(all.size(), false);
        auto [indices, limits] = c10d::compute_bucket_assignment_by_size(
            all,
            {static_cast<std::size_t>(std::min<std::int64_t>(bucket, c10d::kDefaultFirstBucketBytes)),
             static_cast<std::size_t>(bucket)},
            sparse);
        std::reverse(indices.begin(), indices.end());
        std::reverse(limits.begin(), limits.end());
        reducer_ = std::make_unique<c10d::Reducer>(all, indices, limits, group, sparse, bucket, false, views,
                                                   std::unordered_map<std::size_t, std::string>{},
                                                   std::min<std::int64_t>(bucket, c10d::kDefaultFirstBucketBytes));
    }

private:
    void before() override {
        if (views_)
            zero();
        else
            for (auto& p : parameters()) p.mutable_grad().reset();
        reducer_->prepare_for_forward();
        (void)reducer_->rebuild_buckets();
    }
    void before_backward() override { reducer_->prepare_for_backward({}); }

    bool views_;
    std::unique_ptr<c10d::Reducer> reducer_;
};

/// Trains without communication and records when each gradient becomes ready.
class alone : public training {
public:
    alone() : training("compute") {
        for (const auto& p : parameters()) {
            accumulators_.push_back(torch::autograd::impl::grad_accumulator(p));
            accumulators_.back()->add_post_hook(std::make_unique<hook>(this, p.numel() * 4));
        }
    }
    /// Seconds that the last step would have waited for an ideal link, which sends each gradient as
    /// soon as the gradient is ready and the link is free. With two ranks, each rank sends as many
    /// bytes as the gradients have.
    [[nodiscard]] double exposed(double bytes_per_second) const {
        double sent = 0;
        for (const auto& [at, bytes] : ready_)
            sent = std::max(sent, at) + static_cast<double>(bytes) / bytes_per_second;
        return std::max(0.0, sent - passes_);
    }

private:
    struct hook final : torch::autograd::FunctionPostHook {
        hook(alone* in, std::int64_t size) : all(in), bytes(size) {}
        torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                  const torch::autograd::variable_list&) override {
            all->ready_.emplace_back(all->since(), bytes);
            return outputs;
        }
        alone* all;
        std::int64_t bytes;
    };
    [[nodiscard]] double since() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    }
    void before_backward() override {
        begin_ = std::chrono::steady_clock::now();
        ready_.clear();
    }
    void update(torch::optim::SGD& optimiser) override {
        passes_ = since();
        optimiser.step();
    }

    std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
    std::vector<std::pair<double, std::int64_t>> ready_;
    std::chrono::steady_clock::time_point begin_;
    double passes_ = 0;
};

/// Uses the library as gradient/torch_gradients.hpp describes.
class ours : public training {
public:
    explicit ours(std::string name, const gs::torch_gradient_options& options = {})
        : training(std::move(name)),
          net_(MPI_COMM_WORLD),
          shared_(module()->named_parameters(), options),
          communicates_([this] { (void)shared_.communicate(net_); }) {}
    ~ours() override { shared_.stop(); }
    ours(const ours&) = delete;
    ours& operator=(const ours&) = delete;

private:
    void update(torch::optim::SGD& optimiser) override {
        if (const auto f = shared_.step(optimiser)) {
            std::fprintf(stderr, "%s: %s\n", name().c_str(), gs::describe(f).c_str());
            std::_Exit(1);
        }
    }

    gs::mpi_transport net_;
    gs::torch_gradients shared_;
    std::jthread communicates_;
};

int run(int rounds) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(static_cast<unsigned>(rank % 2), &core);
    sched_setaffinity(0, sizeof core, &core);
    at::set_num_threads(1);
    const auto store =
        c10::make_intrusive<c10d::FileStore>(std::string(std::getenv("GPUSHARE_SHARED")) + "/ddp", ranks);
    const auto options = c10d::ProcessGroupGloo::Options::create();
    options->devices = {c10d::ProcessGroupGloo::createDeviceForInterface("wire")};
    const c10::intrusive_ptr<c10d::ProcessGroup> group =
        c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, ranks, options);
    const auto say = [](const std::string& name, double seconds) {
        if (rank == 0) std::printf("%s %.6f\n", name.c_str(), seconds);
        std::fflush(stdout);
    };
    // Finds each side's best settings: the fastest of a few steps, after two warm-up steps.
    struct choice {
        double seconds = 1e9;
        std::int64_t bucket = 0;
        bool views = false;
    };
    const auto look = [&](training& tried, const choice& how, choice& best) {
        for (int i = 0; i < 4; ++i) {
            const double took = tried.step();
            if (i < 2) continue;
            say(tried.name(), took);
            if (took < best.seconds) best = {took, how.bucket, how.views};
        }
    };
    const auto buckets_of = [](std::int64_t size) {
        return gs::torch_gradient_options{.fusion = {gs::bytes{static_cast<std::uint64_t>(size)}, 1}};
    };
    choice ddp_best, our_best;  // equal in both processes, because a step's time is
    for (const std::int64_t mebibytes : {1, 5, 25}) {
        const std::string name = "_" + std::to_string(mebibytes) + "_mib";
        for (const bool views : {true, false}) {
            ddp tried("look_ddp" + name + (views ? "_views" : "_copies"), group, mebibytes << 20, views);
            look(tried, {0, mebibytes << 20, views}, ddp_best);
        }
        ours tried("look_ours" + name, buckets_of(mebibytes << 20));
        look(tried, {0, mebibytes << 20}, our_best);
    }
    alone compute;
    ddp theirs("ddp", group, ddp_best.bucket, ddp_best.views);
    ours floats("ours"), tuned("ours_tuned", buckets_of(our_best.bucket)),
        halves("ours_half", {.wire = {.large = gs::wire_format::fp16}});
    // Each training step runs between two steps without communication, so that slow changes of the
    // machine's speed affect all trainings alike.
    const std::vector<training*> all{&theirs, &floats, &tuned, &halves};
    for (int round = -2; round < rounds; ++round) {
        for (std::size_t i = 0; i < all.size(); ++i) {
            training& t = *all[(i + static_cast<std::size_t>(round + 2)) % all.size()];
            compute.follow(t);
            const double before = compute.step(), took = t.step();
            compute.follow(t);
            const double behind = compute.step();
            if (round >= 0) {
                say(t.name(), took);
                say(t.name() + "_exposed", took - (before + behind) / 2);
                if (i == 0) say("floor_exposed", bench::longest_of_all(compute.exposed(link)));
            }
        }
    }
    say("ddp_bucket_mib", static_cast<double>(ddp_best.bucket >> 20));
    say("our_bucket_mib", static_cast<double>(our_best.bucket >> 20));
    bool same = true;
    for (const training* mine : {&floats, &tuned})
        for (std::size_t i = 0; i < mine->losses().size(); ++i) {
            if (mine->losses()[i] == theirs.losses()[i]) continue;
            std::fprintf(stderr, "%s, step %zu: a loss of %.9g and not %.9g\n", mine->name().c_str(), i,
                         static_cast<double>(mine->losses()[i]), static_cast<double>(theirs.losses()[i]));
            same = false;
        }
    double off = 0;
    for (std::size_t i = 0; i < floats.losses().size(); ++i)
        off = std::max(off, static_cast<double>(std::abs(halves.losses()[i] / floats.losses()[i] - 1)));
    say("half_loss_off", off);
    say("last_loss", static_cast<double>(floats.losses().back()));
    return same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    bench::enter_world(argc, argv);
    if (argc != 3 || ranks != 2) return 2;
    batch = std::atoi(argv[1]);
    const int code = run(std::atoi(argv[2]));
    std::fflush(nullptr);
    MPI_Finalize();
    std::_Exit(code);  // ends without destructors, because Gloo's threads may still run
}
