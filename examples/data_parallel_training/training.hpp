// SPDX-License-Identifier: Apache-2.0
// Trains a network on digits. Each rank works on its part of every batch, and gradients are sent in
// buckets while the backward pass goes on.
//
//   trainer mine(digits, options);                       // of every rank
//   // over any transport, to the end or until a rank doesn't come
//   auto fault = mine.run(net, on_progress);
//   // goes on where it stood
//   if (fault) ... make a transport of the rest; mine.run(rest, on_progress);
//   const training_result& result = mine.result();
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
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
    network_kind kind = network_kind::convolutional;
    std::size_t epochs = 20, batch = 32;  // the batch of all ranks together
    std::size_t held_out = 297;           // the last digits, which measure the accuracy
    // 0 takes a rate that suits the network, in proportion to the batch.
    float rate = 0, momentum = 0.9F;
    gpushare::bucket_choice fusion{gpushare::bytes{16384}, 1};
    gpushare::wire_format wire = gpushare::wire_format::as_is;
    std::size_t least_on_wire = 1000;  // in elements; smaller gradients stay float32
    // each rank steps its shard of every parameter, and the other ranks get the shard from it
    bool sharded = false;
    // the next step adds the rounding error of 16 bits
    bool error_feedback = false;
    gpushare::ns patience = std::chrono::seconds(30);  // how long to wait for another rank
    std::uint64_t seed = 1;
};

/// The parts of a step's time, in seconds.
struct step_time {
    double compute = 0, exposed = 0, optimiser = 0;
};

struct training_result {
    std::vector<float> losses;     // the loss of each step, over the whole batch
    std::vector<step_time> times;  // of this rank
    std::size_t skipped = 0;       // steps with a gradient that wasn't finite
    double accuracy = 0;
    std::uint64_t fingerprint = 0;  // a hash of the parameters
    bool all_alike = false;         // whether all ranks have these parameters
    gpushare::collective_fault fault{};
    // after a fault: the gradient that this rank lacked, if any
    std::string waiting_for{};
};

/// Digits in a random order that is the same on all ranks, and different in each epoch.
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

/// A place in which a rank computes: its own thread. tenant.hpp has another place, by_tenant.
struct on_this_thread {
    // gradients are handed over while the backward pass goes on
    static constexpr bool overlaps = true;
    template <class F>
    void operator()(network&, F f) const {
        f();
    }
};

/// Called after every step with its number, the number of steps, and its loss.
using progress_function = std::function<void(std::size_t, std::size_t, float)>;

/// One rank. The digits must outlive the object.
class trainer {
public:
    trainer(const digits& data, const training_options& options)
        : data_(&data),
          options_(options),
          model_(make_network(options.kind, options.seed)),
          trained_(data.size() - options.held_out),
          steps_(trained_ / options.batch * options.epochs),
          order_(trained_, options.seed + 1) {
        const float of_32 = options.kind == network_kind::encoder ? 0.02F : 0.05F;
        if (options_.rate == 0) options_.rate = of_32 * static_cast<float>(options.batch) / 32;
    }

    /// Trains over `net` from the current step on. `compute(network, f)` calls f() at the place
    /// where the rank computes.
    template <gpushare::host_transport Net, class Compute = on_this_thread>
    gpushare::collective_fault run(Net& net, const progress_function& progress = {}, Compute&& compute = {}) {
        result_.fault = {};
        float loss = 0;
        gpushare::gradient_buckets<> gradients(options_.fusion);
        // the mean of the loss comes along, without a collective of its own
        gradients.add("loss", std::span(&loss, 1));
        for (auto& p : model_->parameters())
            gradients.add(p.name, p.gradient,
                          {.wire = gpushare::mixed_format{options_.wire, options_.least_on_wire}.of(p.gradient.size()),
                           .error_feedback = options_.error_feedback});
        // gathered after a step on shards
        std::vector<std::span<float>> gathered{std::span(&loss, 1)};
        for (auto& p : model_->parameters()) gathered.emplace_back(p.value);
        std::jthread communicating([&] {
            const auto step = [&] {
                return options_.sharded ? gradients.reduce_scatter(net, gpushare::average{}, options_.patience)
                                        : gradients.reduce(net, gpushare::average{}, options_.patience);
            };
            while (!step()) {
            }
        });
        const stopped_at_end by_an_exception_too{gradients};
        const std::size_t share = options_.batch / net.size(), steps_of_epoch = trained_ / options_.batch;
        std::vector<std::span<const float>> images(share);
        std::vector<std::uint8_t> labels(share);
        while (step() < steps_) {
            for (; shuffled_ <= step() / steps_of_epoch; ++shuffled_) order_.shuffle();
            const auto mine = order_.at(step() % steps_of_epoch * options_.batch + net.rank() * share, share);
            const auto begin = clock::now();
            for (std::size_t i = 0; i < share; ++i) {
                images[i] = data_->image(mine[i]);
                labels[i] = data_->labels[mine[i]];
            }
            std::vector<std::size_t> held_back;
            compute(*model_, [&] {
                loss = model_->forward(images, labels);
                model_->backward([&](std::size_t p) {
                    if constexpr (std::remove_reference_t<Compute>::overlaps)
                        (void)gradients.ready(static_cast<std::uint32_t>(p + 1));
                    else
                        held_back.push_back(p);
                });
            });
            (void)gradients.ready(0);
            for (const std::size_t p : held_back) (void)gradients.ready(static_cast<std::uint32_t>(p + 1));
            const auto computed = clock::now();
            result_.fault = gradients.wait();  // reduce() has the patience
            if (result_.fault) break;
            const auto combined = clock::now();
            if (gradients.was_finite()) {
                const std::uint32_t shards = options_.sharded ? net.size() : 1, own = options_.sharded ? net.rank() : 0;
                compute(*model_, [&] { model_->step(rate_now(), options_.momentum, own, shards); });
            } else {
                ++result_.skipped;
            }
            if (options_.sharded) result_.fault = gpushare::all_gather_shards<float>(net, gathered, deadline());
            if (result_.fault) break;
            const auto end = clock::now();
            const auto seconds = [](auto from, auto to) { return std::chrono::duration<double>(to - from).count(); };
            result_.losses.push_back(loss);
            result_.times.push_back({seconds(begin, computed), seconds(computed, combined), seconds(combined, end)});
            if (progress) progress(step(), steps_, loss);
        }
        gradients.stop();
        communicating.join();
        if (result_.fault)
            result_.waiting_for = gradients.stalled().value_or("");
        else
            finish(net);
        return result_.fault;
    }

    /// Call this after a fault, before run() over a transport of the remaining ranks. All ranks
    /// take the state of the rank that got furthest, because a missing rank may have sent its part
    /// of a step to some ranks only.
    template <gpushare::host_transport Net>
    gpushare::collective_fault agree(Net& net) {
        std::vector<std::uint64_t> all(net.size());
        const std::uint64_t here = step();
        if (const auto f = net.all_gather(std::span(&here, 1), std::span(all), deadline())) return f;
        const auto furthest = std::max_element(all.begin(), all.end());
        const auto root = static_cast<std::uint32_t>(furthest - all.begin());
        float loss = result_.losses.empty() ? 0.0F : result_.losses.back();
        if (const auto f = net.broadcast(std::span(&loss, 1), root, deadline())) return f;
        for (auto& p : model_->parameters())
            for (auto* x : {&p.value, &p.velocity})
                if (const auto f = net.broadcast(std::span(*x), root, deadline())) return f;
        if (step() < *furthest) {
            result_.losses.push_back(loss);
            result_.times.emplace_back();
        }
        return {};
    }

    /// The number of steps that are done.
    [[nodiscard]] std::size_t step() const noexcept { return result_.losses.size(); }
    /// The number of steps in the whole training.
    [[nodiscard]] std::size_t steps() const noexcept { return steps_; }
    [[nodiscard]] const training_result& result() const noexcept { return result_; }

private:
    using clock = std::chrono::steady_clock;
    struct stopped_at_end {
        gpushare::gradient_buckets<>& gradients;
        ~stopped_at_end() { gradients.stop(); }
    };
    /// The learning rate, which rises over the first steps and then falls to zero. A transformer
    /// that begins at its full rate may diverge.
    [[nodiscard]] float rate_now() const noexcept {
        const auto done = static_cast<float>(step()) / static_cast<float>(steps_);
        return options_.rate * std::min(1.0F, 0.01F + 10 * done) * (1 - done);
    }
    [[nodiscard]] gpushare::instant deadline() const { return clock::now() + options_.patience; }

    template <class Net>
    void finish(Net& net) {
        std::size_t right = 0;
        for (std::size_t i = trained_; i < data_->size(); ++i)
            right += model_->classify(data_->image(i)) == data_->labels[i];
        result_.accuracy = static_cast<double>(right) / static_cast<double>(options_.held_out);
        result_.fingerprint = model_->fingerprint();
        const std::uint64_t mine = result_.fingerprint;
        std::vector<std::uint64_t> all(net.size());
        result_.fault = net.all_gather(std::span(&mine, 1), std::span(all), deadline());
        result_.all_alike = std::all_of(all.begin(), all.end(), [&](std::uint64_t f) { return f == mine; });
    }

    const digits* data_;
    training_options options_;
    std::unique_ptr<network> model_;
    std::size_t trained_, steps_, shuffled_ = 0;
    batches order_;
    training_result result_;
};

}  // namespace data_parallel_training
