// SPDX-License-Identifier: Apache-2.0
// Trains the network on digits, each rank on its part of every batch: gradients go in buckets while the backward pass goes on.
//
//   const training_result mine = train(net, digits, options, on_progress);     // by every rank, over any transport
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

#include "data_parallel_training/digits.hpp"
#include "data_parallel_training/network.hpp"

namespace data_parallel_training {

struct training_options {
    std::size_t epochs = 20, batch = 32;  // of all ranks together
    std::size_t held_out = 297;           // the last digits: what accuracy is measured on
    float rate = 0.05F, momentum = 0.9F;
    gpushare::bucket_choice fusion{gpushare::bytes{16384}, 1};
    gpushare::wire_format wire = gpushare::wire_format::as_is;
    gpushare::ns patience = std::chrono::seconds(30);  // with another rank
    std::uint64_t seed = 1;
};

/// Where the time of a step goes, in seconds.
struct step_time {
    double compute = 0, exposed = 0, optimiser = 0;
};

struct training_result {
    std::vector<float> losses;     // of each step, over the whole batch
    std::vector<step_time> times;  // of this rank
    std::size_t skipped = 0;       // steps with a gradient that wasn't finite
    double accuracy = 0;
    std::uint64_t fingerprint = 0;  // of the parameters
    bool all_alike = false;         // all ranks have these
    gpushare::collective_fault fault{};
    std::string waiting_for{};  // where there was a fault: the gradient that this rank didn't have, if any
};

/// Digits in the same random order on all ranks, another one in each epoch.
class batches {
public:
    batches(std::size_t samples, std::uint64_t seed) : order_(samples), any_(seed) {
        std::iota(order_.begin(), order_.end(), std::size_t{0});
    }
    void shuffle() {
        for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[any_() % i]);
    }
    [[nodiscard]] std::span<const std::size_t> at(std::size_t first, std::size_t n) const {
        return std::span(order_).subspan(first, n);
    }

private:
    std::vector<std::size_t> order_;
    std::mt19937_64 any_;
};

/// `progress` is called behind every step with its number, of how many, and its loss.
template <gpushare::transport Net>
training_result train(Net& net, const digits& data, const training_options& options,
                      const std::function<void(std::size_t, std::size_t, float)>& progress = {}) {
    using clock = std::chrono::steady_clock;
    const auto deadline = [&] { return clock::now() + options.patience; };
    training_result result;
    network model(options.seed);
    float loss = 0;
    gpushare::gradient_buckets<> gradients(options.fusion);
    gradients.add("loss", std::span(&loss, 1));  // its mean comes along, without a collective of its own
    for (auto& p : model.parameters())
        gradients.add(p.name, p.gradient, {.wire = gpushare::mixed_format{options.wire, 1000}.of(p.gradient.size())});

    const std::size_t trained = data.size() - options.held_out, share = options.batch / net.size(),
                      steps_of_epoch = trained / options.batch, steps = steps_of_epoch * options.epochs;
    std::jthread communicating([&] {
        for (std::size_t step = 0; step < steps; ++step)
            if (gradients.reduce(net, gpushare::average{}, options.patience)) return;
    });
    batches order(trained, options.seed + 1);
    std::vector<std::span<const float>> images(share);
    std::vector<std::uint8_t> labels(share);
    for (std::size_t step = 0; step < steps && !result.fault; ++step) {
        if (step % steps_of_epoch == 0) order.shuffle();
        const auto mine = order.at(step % steps_of_epoch * options.batch + net.rank() * share, share);
        const auto begin = clock::now();
        for (std::size_t i = 0; i < share; ++i) {
            images[i] = data.image(mine[i]);
            labels[i] = data.labels[mine[i]];
        }
        loss = model.forward(images, labels);
        (void)gradients.ready(0);
        model.backward([&](std::size_t p) { (void)gradients.ready(static_cast<std::uint32_t>(p + 1)); });
        const auto computed = clock::now();
        result.fault = gradients.wait(deadline());
        if (result.fault) break;
        const auto combined = clock::now();
        if (gradients.was_finite())
            model.step(options.rate, options.momentum);
        else
            ++result.skipped;
        const auto end = clock::now();
        const auto seconds = [](auto from, auto to) { return std::chrono::duration<double>(to - from).count(); };
        result.losses.push_back(loss);
        result.times.push_back({seconds(begin, computed), seconds(computed, combined), seconds(combined, end)});
        if (progress) progress(step + 1, steps, loss);
    }
    communicating.join();
    if (result.fault) {
        result.waiting_for = gradients.stalled().value_or("");
        return result;
    }
    std::size_t right = 0;
    for (std::size_t i = trained; i < data.size(); ++i) right += model.classify(data.image(i)) == data.labels[i];
    result.accuracy = static_cast<double>(right) / static_cast<double>(options.held_out);
    result.fingerprint = model.fingerprint();
    std::vector<std::uint64_t> all(net.size());
    result.fault = net.all_gather(std::span<const std::uint64_t>(&result.fingerprint, 1), std::span(all), deadline());
    result.all_alike = std::all_of(all.begin(), all.end(), [&](std::uint64_t f) { return f == result.fingerprint; });
    return result;
}

}  // namespace data_parallel_training
