// SPDX-License-Identifier: Apache-2.0
#include "data_parallel_training/network.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <gpushare/collective/reduce_ops.hpp>

namespace data_parallel_training {

void network::add(const char* name, std::size_t n, std::size_t inputs) {
    parameter p{name, std::vector<float>(n), std::vector<float>(n), std::vector<float>(n)};
    // Doesn't use a distribution of the standard library, because they differ between libraries.
    const float most = inputs == 0 ? 0.0F : std::sqrt(6.0F / static_cast<float>(inputs));
    for (float& x : p.value) x = (static_cast<float>(any_() >> 40) / 8388608.0F - 1.0F) * most;
    parameters_.push_back(std::move(p));
}

void network::clear_gradients() {
    for (auto& p : parameters_) std::fill(p.gradient.begin(), p.gradient.end(), 0.0F);
}

float network::forward(std::span<const std::span<const float>> images, std::span<const std::uint8_t> labels) {
    run(images);
    float loss = 0;
    for (std::size_t i = 0; i < batch_; ++i) {  // replaces scores by their gradients
        float* const s = &scores_[i * digits::classes];
        const float most = *std::max_element(s, s + digits::classes);
        float sum = 0;
        for (std::size_t c = 0; c < digits::classes; ++c) sum += std::exp(s[c] - most);
        loss += std::log(sum) + most - s[labels[i]];
        for (std::size_t c = 0; c < digits::classes; ++c)
            s[c] = std::exp(s[c] - most) / sum / static_cast<float>(batch_);
        s[labels[i]] -= 1.0F / static_cast<float>(batch_);
    }
    return loss / static_cast<float>(batch_);
}

void network::step(float rate, float momentum, std::uint32_t shard, std::uint32_t shards) {
    for (auto& p : parameters_) {
        const auto own = gpushare::shard_of(p.value.size(), shard, shards);
        for (std::size_t i = own.begin; i < own.end; ++i) {
            p.velocity[i] = momentum * p.velocity[i] + p.gradient[i];
            p.value[i] -= rate * p.velocity[i];
        }
    }
}

std::size_t network::classify(std::span<const float> image) {
    run(std::span(&image, 1));
    return static_cast<std::size_t>(std::max_element(scores_.begin(), scores_.end()) - scores_.begin());
}

std::uint64_t network::fingerprint() const noexcept {
    std::uint64_t all = 0;
    for (const auto& p : parameters_)
        for (const float x : p.value) {
            std::uint32_t word = 0;
            std::memcpy(&word, &x, sizeof word);
            all = (all ^ word) * 0x9e37'79b9'7f4a'7c15U;
            all ^= all >> 29;
        }
    return all;
}

std::unique_ptr<network> make_network(network_kind kind, std::uint64_t seed) {
    return kind == network_kind::encoder ? make_encoder(seed) : make_convolutional(seed);
}

}  // namespace data_parallel_training
