// SPDX-License-Identifier: Apache-2.0
// A small convolutional network with a backward pass, in plain loops: what it computes depends on nothing but its parameters and the
// batch.
//
//   network net(seed);
//   const float loss = net.forward(images, labels);
//   net.backward([&](std::size_t p) { ... net.parameters()[p].gradient is there ... });     // the last layer comes first
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "data_parallel_training/digits.hpp"

namespace data_parallel_training {

struct parameter {
    std::string name;
    std::vector<float> value, gradient, velocity;
};

class network {
public:
    explicit network(std::uint64_t seed);

    /// The mean cross-entropy of a batch, which must stay until backward() is done.
    float forward(std::span<const std::span<const float>> images, std::span<const std::uint8_t> labels);
    /// Calls ready(p) as soon as the gradient of parameter p is there.
    void backward(const std::function<void(std::size_t)>& ready);
    /// One step down all gradients, with momentum.
    void step(float rate, float momentum);
    /// What it takes the image for.
    [[nodiscard]] std::size_t classify(std::span<const float> image);

    [[nodiscard]] std::vector<parameter>& parameters() noexcept { return parameters_; }
    /// Differs if any bit of a parameter does.
    [[nodiscard]] std::uint64_t fingerprint() const noexcept;

private:
    void run(std::span<const std::span<const float>> images);

    std::vector<parameter> parameters_;  // weight and bias of each layer
    std::size_t batch_ = 0;
    std::vector<float> input_, first_, first_pooled_, second_, second_pooled_, scores_;  // of the batch
    std::vector<std::uint8_t> labels_;
};

}  // namespace data_parallel_training
