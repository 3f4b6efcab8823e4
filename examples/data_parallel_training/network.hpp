// SPDX-License-Identifier: Apache-2.0
// Two small networks with a backward pass, in plain loops. Their results depend only on the
// parameters and the batch.
//
//   const auto net = make_network(network_kind::encoder, seed);
//   const float loss = net->forward(images, labels);
//   // the last layer comes first
//   net->backward([&](std::size_t p) { ... net->parameters()[p].gradient is there ... });
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "data_parallel_training/digits.hpp"

namespace data_parallel_training {

struct parameter {
    std::string name;
    std::vector<float> value, gradient, velocity;
};

enum class network_kind : std::uint8_t {
    convolutional,  ///< two convolutions and a linear layer
    /// the encoder of a transformer, whose tokens are the rows; parameters have from 10 to 4096
    /// elements
    encoder,
};

class network {
public:
    virtual ~network() = default;
    network(const network&) = delete;
    network& operator=(const network&) = delete;

    /// The mean cross-entropy of a batch. The batch must stay in place until backward() is done.
    float forward(std::span<const std::span<const float>> images, std::span<const std::uint8_t> labels);
    /// Calls ready(p) as soon as the gradient of parameter p is complete.
    virtual void backward(const std::function<void(std::size_t)>& ready) = 0;
    /// A step along all gradients, with momentum. Steps only shard `shard` of `shards` of each
    /// parameter.
    void step(float rate, float momentum, std::uint32_t shard = 0, std::uint32_t shards = 1);
    /// The class that the network gives the image.
    [[nodiscard]] std::size_t classify(std::span<const float> image);

    [[nodiscard]] std::vector<parameter>& parameters() noexcept { return parameters_; }
    /// A hash that depends on every bit of the parameters.
    [[nodiscard]] std::uint64_t fingerprint() const noexcept;

    /// Called between the images of a batch, every few dozen microseconds. This is a good moment to
    /// let other work run.
    std::function<void()> pause = [] {};

protected:
    explicit network(std::uint64_t seed) : any_(seed) {}

    /// Fills scores_ with the scores of each image.
    virtual void run(std::span<const std::span<const float>> images) = 0;

    /// Adds a parameter with uniform random values, scaled for `inputs` inputs after He et al.;
    /// zeros if there are no inputs.
    void add(const char* name, std::size_t n, std::size_t inputs);
    void clear_gradients();
    [[nodiscard]] const float* value(std::size_t p) const { return parameters_[p].value.data(); }
    [[nodiscard]] float* gradient(std::size_t p) { return parameters_[p].gradient.data(); }

    std::vector<parameter> parameters_;
    // of the batch; after forward(), the gradients of the loss with respect to the scores
    std::vector<float> scores_;
    std::size_t batch_ = 0;

private:
    std::mt19937_64 any_;
};

[[nodiscard]] std::unique_ptr<network> make_network(network_kind kind, std::uint64_t seed);
[[nodiscard]] std::unique_ptr<network> make_convolutional(std::uint64_t seed);
[[nodiscard]] std::unique_ptr<network> make_encoder(std::uint64_t seed);

}  // namespace data_parallel_training
