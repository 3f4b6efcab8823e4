// SPDX-License-Identifier: Apache-2.0
#include "data_parallel_training/network.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace data_parallel_training {

namespace {

constexpr std::size_t taps = 9, first_channels = 16, second_channels = 32, side = digits::side, half = side / 2,
                      quarter = side / 4;
constexpr std::size_t features = second_channels * quarter * quarter;
enum parameter_index : std::size_t { first_weight, first_bias, second_weight, second_bias, last_weight, last_bias };

/// A 3 x 3 convolution of `from` planes of n x n into `to` planes, with zero padding, followed by a
/// rectifier.
void convolve(const float* in, std::size_t from, std::size_t n, const float* weight, const float* bias, std::size_t to,
              float* out) {
    for (std::size_t c = 0; c < to; ++c) {
        float* const plane = out + c * n * n;
        std::fill_n(plane, n * n, bias[c]);
        for (std::size_t k = 0; k < from; ++k)
            for (std::size_t t = 0; t < taps; ++t) {
                const float w = weight[(c * from + k) * taps + t];
                const std::size_t dy = t / 3, dx = t % 3;  // the shift plus one
                for (std::size_t y = dy == 0 ? 1 : 0; y < n - (dy == 2 ? 1 : 0); ++y) {
                    const float* const row = in + k * n * n + (y + dy - 1) * n;
                    for (std::size_t x = dx == 0 ? 1 : 0; x < n - (dx == 2 ? 1 : 0); ++x)
                        plane[y * n + x] += w * row[x + dx - 1];
                }
            }
        for (std::size_t i = 0; i < n * n; ++i) plane[i] = std::max(plane[i], 0.0F);
    }
}
/// The backward pass. `d` is the gradient with respect to the convolution's output before the
/// rectifier.
void convolve_back(const float* in, std::size_t from, std::size_t n, const float* weight, const float* d,
                   std::size_t to, float* d_weight, float* d_bias, float* d_in) {
    for (std::size_t c = 0; c < to; ++c) {
        const float* const plane = d + c * n * n;
        float sum = 0;
        for (std::size_t i = 0; i < n * n; ++i) sum += plane[i];
        d_bias[c] += sum;
        for (std::size_t k = 0; k < from; ++k)
            for (std::size_t t = 0; t < taps; ++t) {
                const std::size_t at = (c * from + k) * taps + t, dy = t / 3, dx = t % 3;
                float of_tap = 0;
                for (std::size_t y = dy == 0 ? 1 : 0; y < n - (dy == 2 ? 1 : 0); ++y) {
                    const std::size_t row = k * n * n + (y + dy - 1) * n;
                    for (std::size_t x = dx == 0 ? 1 : 0; x < n - (dx == 2 ? 1 : 0); ++x) {
                        of_tap += plane[y * n + x] * in[row + x + dx - 1];
                        if (d_in != nullptr) d_in[row + x + dx - 1] += weight[at] * plane[y * n + x];
                    }
                }
                d_weight[at] += of_tap;
            }
    }
}
/// The largest of each 2 x 2 elements.
void pool(const float* in, std::size_t channels, std::size_t n, float* out) {
    for (std::size_t c = 0; c < channels; ++c)
        for (std::size_t y = 0; y < n / 2; ++y)
            for (std::size_t x = 0; x < n / 2; ++x) {
                const float* const at = in + c * n * n + 2 * y * n + 2 * x;
                *out++ = std::max(std::max(at[0], at[1]), std::max(at[n], at[n + 1]));
            }
}
/// The backward pass: the gradient goes to the first of the largest elements, through the
/// rectifier.
void pool_back(const float* in, std::size_t channels, std::size_t n, const float* d_out, float* d_in) {
    std::fill_n(d_in, channels * n * n, 0.0F);
    for (std::size_t c = 0; c < channels; ++c)
        for (std::size_t y = 0; y < n / 2; ++y)
            for (std::size_t x = 0; x < n / 2; ++x) {
                const std::size_t corner = c * n * n + 2 * y * n + 2 * x;
                std::size_t most = corner;
                for (const std::size_t at : {corner + 1, corner + n, corner + n + 1})
                    if (in[at] > in[most]) most = at;
                if (in[most] > 0) d_in[most] = d_out[(c * (n / 2) + y) * (n / 2) + x];
            }
}

class convolutional final : public network {
public:
    explicit convolutional(std::uint64_t seed) : network(seed) {
        add("first.weight", first_channels * taps, taps);
        add("first.bias", first_channels, 0);
        add("second.weight", second_channels * first_channels * taps, first_channels * taps);
        add("second.bias", second_channels, 0);
        add("last.weight", digits::classes * features, features);
        add("last.bias", digits::classes, 0);
    }

    void backward(const std::function<void(std::size_t)>& ready) override {
        clear_gradients();
        constexpr std::size_t full = side * side, pooled = half * half;
        std::vector<float> d_features(batch_ * features), d_second(second_channels * pooled),
            d_small(batch_ * first_channels * pooled), d_first(first_channels * full);
        for (std::size_t i = 0; i < batch_; ++i)
            for (std::size_t c = 0; c < digits::classes; ++c) {
                const float d = scores_[i * digits::classes + c];
                gradient(last_bias)[c] += d;
                for (std::size_t j = 0; j < features; ++j) {
                    gradient(last_weight)[c * features + j] += d * second_pooled_[i * features + j];
                    d_features[i * features + j] += d * value(last_weight)[c * features + j];
                }
            }
        ready(last_bias);
        ready(last_weight);
        for (std::size_t i = 0; i < batch_; ++i) {
            pause();
            pool_back(&second_[i * second_channels * pooled], second_channels, half, &d_features[i * features],
                      d_second.data());
            convolve_back(&first_pooled_[i * first_channels * pooled], first_channels, half, value(second_weight),
                          d_second.data(), second_channels, gradient(second_weight), gradient(second_bias),
                          &d_small[i * first_channels * pooled]);
        }
        ready(second_bias);
        ready(second_weight);
        for (std::size_t i = 0; i < batch_; ++i) {
            pause();
            pool_back(&first_[i * first_channels * full], first_channels, side, &d_small[i * first_channels * pooled],
                      d_first.data());
            convolve_back(&input_[i * full], 1, side, value(first_weight), d_first.data(), first_channels,
                          gradient(first_weight), gradient(first_bias), nullptr);
        }
        ready(first_bias);
        ready(first_weight);
    }

private:
    void run(std::span<const std::span<const float>> images) override {
        batch_ = images.size();
        constexpr std::size_t full = side * side, pooled = half * half;
        input_.resize(batch_ * full);
        first_.resize(batch_ * first_channels * full);
        first_pooled_.resize(batch_ * first_channels * pooled);
        second_.resize(batch_ * second_channels * pooled);
        second_pooled_.resize(batch_ * features);
        scores_.resize(batch_ * digits::classes);
        for (std::size_t i = 0; i < batch_; ++i) {
            pause();
            float* const in = &input_[i * full];
            std::copy(images[i].begin(), images[i].end(), in);
            float *const first = &first_[i * first_channels * full], *const second =
                                                                         &second_[i * second_channels * pooled];
            float *const small = &first_pooled_[i * first_channels * pooled], *const last =
                                                                                  &second_pooled_[i * features];
            convolve(in, 1, side, value(first_weight), value(first_bias), first_channels, first);
            pool(first, first_channels, side, small);
            convolve(small, first_channels, half, value(second_weight), value(second_bias), second_channels, second);
            pool(second, second_channels, half, last);
            for (std::size_t c = 0; c < digits::classes; ++c) {
                float sum = value(last_bias)[c];
                for (std::size_t j = 0; j < features; ++j) sum += value(last_weight)[c * features + j] * last[j];
                scores_[i * digits::classes + c] = sum;
            }
        }
    }

    std::vector<float> input_, first_, first_pooled_, second_, second_pooled_;  // of the batch
};

}  // namespace

std::unique_ptr<network> make_convolutional(std::uint64_t seed) { return std::make_unique<convolutional>(seed); }

}  // namespace data_parallel_training
