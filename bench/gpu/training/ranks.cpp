// SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <stdexcept>
#include <thread>

#include <gpushare/gradient/torch_gradients.hpp>

#include "average.hpp"
#include "operators.hpp"

namespace gpu_training {
namespace {

namespace gs = gpushare;
namespace cu = gpushare::cuda;
using namespace std::chrono_literals;
using steady = std::chrono::steady_clock;

constexpr gs::device_id device{0};
constexpr std::array<gs::device_id, 2> of_ranks{device, device};
constexpr int first_steps = 5;  // libtorch chooses kernels and allocates memory

/// libtorch's optimiser, on a stream.
struct optimiser {
    torch::optim::SGD& sgd;
    cu::stream& on;
    void step() {
        settle(on.native_handle());
        sgd.step();
    }
};

/// The work of a rank in its thread.
struct rank_of_training {
    const pupil& mine;
    cu::stream& on;
    std::uint32_t rank;
    int steps;
    bool planted;
    double first_loss = 0, last_loss = 0, seconds = 0;

    void run(gs::detail::device_ranks& ranks) {
        const c10::cuda::CUDAStreamGuard inside(c10::cuda::getStreamFromExternal(on.native_handle(), 0));
        gs::torch_gradients shared(mine.module->named_parameters(), ranks, rank);
        torch::optim::SGD sgd(mine.module->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
        optimiser all{sgd, on};
        auto begin = steady::now();
        for (int s = 0; s < first_steps + steps; ++s) {
            if (s == first_steps) begin = when_done();
            if (planted && rank == 1 && s == first_steps + steps / 2) {
                shared.hold(true);
                (void)backward(sgd);
                sgd.step();
                shared.hold(false);
            }
            const at::Tensor loss = backward(sgd);
            gs::raise_fault(shared.step(all));
            if (s == 0) first_loss = loss.item<double>();
            if (s + 1 == first_steps + steps) last_loss = loss.item<double>();
        }
        seconds = std::chrono::duration<double>(when_done() - begin).count();
    }

private:
    [[nodiscard]] at::Tensor backward(torch::optim::SGD& sgd) const {
        sgd.zero_grad(/*set_to_none=*/false);
        at::Tensor loss = mine.loss();
        loss.backward();
        return loss;
    }
    [[nodiscard]] steady::time_point when_done() const {
        on.record().wait(gs::never);
        return steady::now();
    }
};

/// Runs both ranks at the same time. Rethrows an exception of either rank.
void run_both(std::span<rank_of_training> of, gs::detail::device_ranks& ranks) {
    std::array<std::exception_ptr, 2> why;
    {
        std::vector<std::jthread> threads;
        for (std::size_t r = 0; r < of.size(); ++r)
            threads.emplace_back([&, r] {
                try {
                    of[r].run(ranks);
                } catch (...) {
                    why[r] = std::current_exception();
                    // So that the other rank doesn't wait for this rank.
                    ranks.end(gs::errc::stopped, of[r].rank);
                }
            });
    }
    for (const auto& w : why)
        if (w) std::rethrow_exception(w);
}

/// Counts the floats whose bits differ between the modules.
double differing(const torch::nn::Module& a, const torch::nn::Module& b) {
    const auto of_a = a.parameters(), of_b = b.parameters();
    double n = 0;
    for (std::size_t i = 0; i < of_a.size(); ++i) {
        const at::Tensor x = of_a[i].detach().cpu().contiguous(), y = of_b[i].detach().cpu().contiguous();
        const auto* const p = static_cast<const char*>(x.data_ptr());
        const auto* const q = static_cast<const char*>(y.data_ptr());
        for (std::size_t at = 0; at < x.nbytes(); at += sizeof(float))
            n += std::memcmp(p + at, q + at, sizeof(float)) != 0 ? 1 : 0;
    }
    return n;
}

}  // namespace

two_ranks::two_ranks(std::uint32_t blocks, std::uint32_t threads)
    : group_(node_, visible_, of_ranks, {.blocks = blocks}),
      shape_{.threads = threads},
      combining_(node_.make_stream(device)) {
    for (std::uint32_t r = 0; r < of_ranks.size(); ++r) {
        training_.push_back(node_.make_stream(device));
        members_.push_back(group_.rank(r));
    }
}

lesson two_ranks::train(const std::array<pupil, 2>& pupils, int steps, bool planted) {
    c10::cuda::device_synchronize();  // until weights and batches are on the device
    const bench::rank_group all{node_, device, combining_, members_};
    const auto combine = [&](gs::device_buckets<float>& gradients) { return launch_average(all, gradients, shape_); };
    gs::torch_device_ranks ranks(node_, std::span(&combining_, 1), 2, combine,
                                 {.bucket = gs::bytes{256 << 10}, .patience = 60s});
    std::array<rank_of_training, 2> of{rank_of_training{pupils[0], training_[0], 0, steps, planted},
                                       rank_of_training{pupils[1], training_[1], 1, steps, planted}};
    run_both(of, ranks);
    gs::raise_fault(gs::fault_of(members_[0]));
    if (!(of[0].last_loss + of[1].last_loss < of[0].first_loss + of[1].first_loss))
        throw std::runtime_error("the losses don't fall");
    return {differing(*pupils[0].module, *pupils[1].module), steps / of[0].seconds};
}

}  // namespace gpu_training
