// SPDX-License-Identifier: Apache-2.0
// The encoder of a transformer (Vaswani et al., "Attention is all you need", NeurIPS 2017), with
// norms in front of each part (Xiong et al., ICML 2020). Tokens are an image's rows; the classifier
// sees all tokens.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "data_parallel_training/network.hpp"

namespace data_parallel_training {

namespace {

constexpr std::size_t tokens = digits::side, width = 32, heads = 4, of_head = width / heads, hidden = 128,
                      features = tokens * width;
enum parameter_index : std::size_t {
    embed_weight,
    embed_bias,
    positions,
    first_gain,
    first_shift,
    query_key_value,
    mix_weight,
    mix_bias,
    second_gain,
    second_shift,
    up_weight,
    up_bias,
    down_weight,
    down_bias,
    last_weight,
    last_bias
};

/// Multiplies rows of I elements by a matrix of I x O. Without a bias, adds to `out`.
template <std::size_t I, std::size_t O>
void linear(std::size_t rows, const float* in, const float* weight, const float* bias, float* out) {
    for (; rows > 0; --rows, in += I, out += O) {
        if (bias != nullptr) std::copy_n(bias, O, out);
        for (std::size_t i = 0; i < I; ++i)
            for (std::size_t o = 0; o < O; ++o) out[o] += in[i] * weight[i * O + o];
    }
}
/// The backward pass. Adds to `d_in` unless it is null.
template <std::size_t I, std::size_t O>
void linear_back(std::size_t rows, const float* in, const float* weight, const float* d, float* d_weight, float* d_bias,
                 float* d_in) {
    // the order of each sum is fixed, and the compiler can still use vectors
    constexpr std::size_t lanes = O % 8 == 0 ? 8 : 1;
    for (; rows > 0; --rows, in += I, d += O) {
        if (d_bias != nullptr)
            for (std::size_t o = 0; o < O; ++o) d_bias[o] += d[o];
        for (std::size_t i = 0; i < I; ++i) {
            for (std::size_t o = 0; o < O; ++o) d_weight[i * O + o] += in[i] * d[o];
            if (d_in == nullptr) continue;
            std::array<float, lanes> part{};
            for (std::size_t o = 0; o < O; o += lanes)
                for (std::size_t k = 0; k < lanes; ++k) part[k] += weight[i * O + o + k] * d[o + k];
            float sum = 0;
            for (const float x : part) sum += x;
            d_in[i] += sum;
        }
        if (d_in != nullptr) d_in += I;
    }
}

struct spread {
    float mean = 0, scale = 0;
    explicit spread(const float* x) {
        for (std::size_t i = 0; i < width; ++i) mean += x[i];
        mean /= width;
        float variance = 0;
        for (std::size_t i = 0; i < width; ++i) variance += (x[i] - mean) * (x[i] - mean);
        scale = 1 / std::sqrt(variance / width + 1e-5F);
    }
};
void norm(std::size_t rows, const float* in, const float* gain, const float* shift, float* out) {
    for (; rows > 0; --rows, in += width, out += width) {
        const spread s(in);
        for (std::size_t i = 0; i < width; ++i) out[i] = (in[i] - s.mean) * s.scale * gain[i] + shift[i];
    }
}
/// The backward pass. Adds to `d_in`.
void norm_back(std::size_t rows, const float* in, const float* gain, const float* d, float* d_gain, float* d_shift,
               float* d_in) {
    for (; rows > 0; --rows, in += width, d += width, d_in += width) {
        const spread s(in);
        float sum = 0, product = 0;
        for (std::size_t i = 0; i < width; ++i) {
            const float x = (in[i] - s.mean) * s.scale;
            d_gain[i] += d[i] * x;
            d_shift[i] += d[i];
            sum += d[i] * gain[i];
            product += d[i] * gain[i] * x;
        }
        for (std::size_t i = 0; i < width; ++i) {
            const float x = (in[i] - s.mean) * s.scale;
            d_in[i] += s.scale * (d[i] * gain[i] - sum / width - x * product / width);
        }
    }
}

/// Attention within one image. `qkv` has the query, key and value of each token. `taken` keeps the
/// weight with which each token attends to each other token.
void attend(const float* qkv, float* taken, float* out) {
    const float scale = 1 / std::sqrt(static_cast<float>(of_head));
    std::fill_n(out, tokens * width, 0.0F);
    for (std::size_t h = 0; h < heads; ++h)
        for (std::size_t t = 0; t < tokens; ++t, taken += tokens) {
            const float* const query = qkv + t * 3 * width + h * of_head;
            float most = -HUGE_VALF, sum = 0;
            for (std::size_t u = 0; u < tokens; ++u) {
                const float* const key = qkv + (u * 3 + 1) * width + h * of_head;
                float score = 0;
                for (std::size_t i = 0; i < of_head; ++i) score += query[i] * key[i];
                taken[u] = score * scale;
                most = std::max(most, taken[u]);
            }
            for (std::size_t u = 0; u < tokens; ++u) sum += taken[u] = std::exp(taken[u] - most);
            for (std::size_t u = 0; u < tokens; ++u) {
                taken[u] /= sum;
                const float* const v = qkv + (u * 3 + 2) * width + h * of_head;
                for (std::size_t i = 0; i < of_head; ++i) out[t * width + h * of_head + i] += taken[u] * v[i];
            }
        }
}
/// The backward pass. `d_qkv` must be zero before the call.
void attend_back(const float* qkv, const float* taken, const float* d, float* d_qkv) {
    const float scale = 1 / std::sqrt(static_cast<float>(of_head));
    for (std::size_t h = 0; h < heads; ++h)
        for (std::size_t t = 0; t < tokens; ++t, taken += tokens) {
            const std::size_t query = t * 3 * width + h * of_head;
            const float* const d_out = d + t * width + h * of_head;
            std::array<float, tokens> d_taken{};
            float sum = 0;
            for (std::size_t u = 0; u < tokens; ++u) {
                const std::size_t v = (u * 3 + 2) * width + h * of_head;
                for (std::size_t i = 0; i < of_head; ++i) {
                    d_taken[u] += d_out[i] * qkv[v + i];
                    d_qkv[v + i] += d_out[i] * taken[u];
                }
                sum += d_taken[u] * taken[u];
            }
            for (std::size_t u = 0; u < tokens; ++u) {
                const std::size_t key = (u * 3 + 1) * width + h * of_head;
                const float d_score = taken[u] * (d_taken[u] - sum) * scale;
                for (std::size_t i = 0; i < of_head; ++i) {
                    d_qkv[query + i] += d_score * qkv[key + i];
                    d_qkv[key + i] += d_score * qkv[query + i];
                }
            }
        }
}

/// The values that the forward pass of one image keeps for the backward pass.
struct activations {
    std::array<float, digits::pixels> input;
    std::array<float, features> embedded, first_norm, attended, mixed, second_norm, last;
    std::array<float, tokens * 3 * width> qkv;
    std::array<float, heads * tokens * tokens> taken;
    std::array<float, tokens * hidden> up;
};

class encoder final : public network {
public:
    explicit encoder(std::uint64_t seed) : network(seed) {
        const auto ones = [&](const char* name) {
            add(name, width, 0);
            std::fill(parameters_.back().value.begin(), parameters_.back().value.end(), 1.0F);
        };
        add("embed.weight", digits::side * width, digits::side);
        add("embed.bias", width, 0);
        add("positions", features, width);
        ones("first_norm.gain");
        add("first_norm.shift", width, 0);
        add("query_key_value", width * 3 * width, width);
        add("mix.weight", width * width, width);
        add("mix.bias", width, 0);
        ones("second_norm.gain");
        add("second_norm.shift", width, 0);
        add("up.weight", width * hidden, width);
        add("up.bias", hidden, 0);
        add("down.weight", hidden * width, hidden);
        add("down.bias", width, 0);
        add("last.weight", features * digits::classes, features);
        add("last.bias", digits::classes, 0);
    }

    void backward(const std::function<void(std::size_t)>& ready) override {
        clear_gradients();
        std::vector<std::array<float, features>> d(
            // for each image: the gradient with respect to the activations that the backward pass
            // has reached
            batch_);
        const auto each = [&](auto f) {
            for (std::size_t i = 0; i < batch_; ++i) {
                pause();
                f(kept_[i], d[i].data(), i);
            }
        };
        each([&](const activations& a, float* to, std::size_t i) {
            linear_back<features, digits::classes>(1, a.last.data(), value(last_weight), &scores_[i * digits::classes],
                                                   gradient(last_weight), gradient(last_bias), to);
        });
        ready(last_bias);
        ready(last_weight);
        std::vector<std::array<float, tokens * hidden>> d_up(batch_);
        each([&](const activations& a, const float* from, std::size_t i) {
            linear_back<hidden, width>(tokens, a.up.data(), value(down_weight), from, gradient(down_weight),
                                       gradient(down_bias), d_up[i].data());
            for (std::size_t k = 0; k < a.up.size(); ++k)
                if (a.up[k] == 0) d_up[i][k] = 0;
        });
        ready(down_bias);
        ready(down_weight);
        each([&](const activations& a, float* to, std::size_t i) {
            std::array<float, features> d_norm{};
            linear_back<width, hidden>(tokens, a.second_norm.data(), value(up_weight), d_up[i].data(),
                                       gradient(up_weight), gradient(up_bias), d_norm.data());
            norm_back(tokens, a.mixed.data(), value(second_gain), d_norm.data(), gradient(second_gain),
                      gradient(second_shift), to);
        });
        for (const std::size_t p : {up_bias, up_weight, second_shift, second_gain}) ready(p);
        each([&](const activations& a, float* to, std::size_t) {
            std::array<float, features> d_attended{}, d_norm{};
            std::array<float, tokens * 3 * width> d_qkv{};
            linear_back<width, width>(tokens, a.attended.data(), value(mix_weight), to, gradient(mix_weight),
                                      gradient(mix_bias), d_attended.data());
            attend_back(a.qkv.data(), a.taken.data(), d_attended.data(), d_qkv.data());
            linear_back<width, 3 * width>(tokens, a.first_norm.data(), value(query_key_value), d_qkv.data(),
                                          gradient(query_key_value), nullptr, d_norm.data());
            norm_back(tokens, a.embedded.data(), value(first_gain), d_norm.data(), gradient(first_gain),
                      gradient(first_shift), to);
        });
        for (const std::size_t p : {mix_bias, mix_weight, query_key_value, first_shift, first_gain}) ready(p);
        each([&](const activations& a, const float* from, std::size_t) {
            for (std::size_t k = 0; k < features; ++k) gradient(positions)[k] += from[k];
            linear_back<digits::side, width>(tokens, a.input.data(), value(embed_weight), from, gradient(embed_weight),
                                             gradient(embed_bias), nullptr);
        });
        for (const std::size_t p : {positions, embed_bias, embed_weight}) ready(p);
    }

private:
    void run(std::span<const std::span<const float>> images) override {
        batch_ = images.size();
        kept_.resize(batch_);
        scores_.resize(batch_ * digits::classes);
        for (std::size_t i = 0; i < batch_; ++i) {
            pause();
            activations& a = kept_[i];
            std::copy(images[i].begin(), images[i].end(), a.input.begin());
            linear<digits::side, width>(tokens, a.input.data(), value(embed_weight), value(embed_bias),
                                        a.embedded.data());
            for (std::size_t k = 0; k < features; ++k) a.embedded[k] += value(positions)[k];
            norm(tokens, a.embedded.data(), value(first_gain), value(first_shift), a.first_norm.data());
            a.qkv.fill(0);
            linear<width, 3 * width>(tokens, a.first_norm.data(), value(query_key_value), nullptr, a.qkv.data());
            attend(a.qkv.data(), a.taken.data(), a.attended.data());
            linear<width, width>(tokens, a.attended.data(), value(mix_weight), value(mix_bias), a.mixed.data());
            for (std::size_t k = 0; k < features; ++k) a.mixed[k] += a.embedded[k];
            norm(tokens, a.mixed.data(), value(second_gain), value(second_shift), a.second_norm.data());
            linear<width, hidden>(tokens, a.second_norm.data(), value(up_weight), value(up_bias), a.up.data());
            for (float& x : a.up) x = std::max(x, 0.0F);
            linear<hidden, width>(tokens, a.up.data(), value(down_weight), value(down_bias), a.last.data());
            for (std::size_t k = 0; k < features; ++k) a.last[k] += a.mixed[k];
            linear<features, digits::classes>(1, a.last.data(), value(last_weight), value(last_bias),
                                              &scores_[i * digits::classes]);
        }
    }

    std::vector<activations> kept_;
};

}  // namespace

std::unique_ptr<network> make_encoder(std::uint64_t seed) { return std::make_unique<encoder>(seed); }

}  // namespace data_parallel_training
