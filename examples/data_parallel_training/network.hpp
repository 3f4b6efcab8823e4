// SPDX-License-Identifier: Apache-2.0
// Two small networks with a backward pass, in plain loops: what they compute depends on nothing but
// the parameters and the batch.
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
    /// of a transformer, whose tokens are the rows: parameters from 10 to 4096 elements
    encoder,
};

class network {
public:
    virtual ~network() = default;
    network(const network&) = delete;
    network& operator=(const network&) = delete;

    /// The mean cross-entropy of a batch, which must stay until backward() is done.
    float forward(std::span<const std::span<const float>> images, std::span<const std::uint8_t> labels);
    /// Calls ready(p) as soon as the gradient of parameter p is there.
    virtual void backward(const std::function<void(std::size_t)>& ready) = 0;
    /// One step down all gradients, with momentum: of each parameter, one of so many shards.
    void step(float rate, float momentum, std::uint32_t shard = 0, std::uint32_t shards = 1);
    /// The class that the network gives the image.
    [[nodiscard]] std::size_t classify(std::span<const float> image);

    [[nodiscard]] std::vector<parameter>& parameters() noexcept { return parameters_; }
    /// Differs if any bit of a parameter does.
    [[nodiscard]] std::uint64_t fingerprint() const noexcept;

    /// Called between the images of a batch, a few dozen microseconds apart: the moment to let
    /// somebody else go on.
    std::function<void()> pause = [] {};

protected:
    explicit network(std::uint64_t seed) : any_(seed) {}

    /// Fills scores_ with so many for each image.
    virtual void run(std::span<const std::span<const float>> images) = 0;

    /// Uniform, scaled for so many inputs as He et al. have it; 0 for none.
    void add(const char* name, std::size_t n, std::size_t inputs);
    void clear_gradients();
    [[nodiscard]] const float* value(std::size_t p) const { return parameters_[p].value.data(); }
    [[nodiscard]] float* gradient(std::size_t p) { return parameters_[p].gradient.data(); }

    std::vector<parameter> parameters_;
    std::vector<float> scores_;  // of the batch; after forward() the loss' gradients by them
    std::size_t batch_ = 0;

private:
    std::mt19937_64 any_;
};

[[nodiscard]] std::unique_ptr<network> make_network(network_kind kind, std::uint64_t seed);
[[nodiscard]] std::unique_ptr<network> make_convolutional(std::uint64_t seed);
[[nodiscard]] std::unique_ptr<network> make_encoder(std::uint64_t seed);

}  // namespace data_parallel_training
