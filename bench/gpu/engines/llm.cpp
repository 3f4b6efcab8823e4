// SPDX-License-Identifier: Apache-2.0
// The prefill of a language model: layers as in Llama, without a head. Its weights are made where
// they stay, since a module would draw gigabytes of them on the host.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/InferenceMode.h>

#include <vector>

#include "models.hpp"
#include "tensors.hpp"

namespace gpu_engines {
namespace {

using at::Tensor;

struct layer {
    Tensor before_attention, query_key_value, out, before_mlp, gate_up, down;
};

Tensor rms_norm(const Tensor& x, const Tensor& weight) {
    const Tensor wide = x.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    return weight * (wide * at::rsqrt(wide.pow(2).mean(-1, true) + 1e-5)).to(x.scalar_type());
}

class prefill final : public model {
public:
    prefill(const llm_sizes& s, const c10::TensorOptions& o)
        : heads_(s.heads), prompt_(at::randn({1, s.tokens, s.width}, o)) {
        const auto weight = [&](std::int64_t out, std::int64_t in) { return at::randn({out, in}, o).mul_(0.02); };
        for (std::int64_t i = 0; i < s.layers; ++i)
            layers_.push_back({at::ones({s.width}, o), weight(3 * s.width, s.width), weight(s.width, s.width),
                               at::ones({s.width}, o), weight(2 * s.hidden, s.width), weight(s.width, s.hidden)});
        const std::int64_t half = s.width / s.heads / 2;
        const auto wide = o.dtype(at::kFloat);
        const Tensor turns = at::outer(at::arange(s.tokens, wide), at::pow(1e4, at::arange(half, wide) / -half));
        const Tensor angles = at::cat({turns, turns}, -1);
        cos_ = angles.cos().to(prompt_.scalar_type());
        sin_ = angles.sin().to(prompt_.scalar_type());
    }
    void step() override {
        const c10::InferenceMode inference;
        Tensor x = prompt_;
        for (const layer& l : layers_) {
            x = x + attention(l, rms_norm(x, l.before_attention));
            const auto parts = at::linear(rms_norm(x, l.before_mlp), l.gate_up).chunk(2, -1);
            x = x + at::linear(at::silu(parts[0]) * parts[1], l.down);
        }
        answer_ = x;
    }

private:
    /// Positions turn queries and keys.
    [[nodiscard]] Tensor turned(const Tensor& x) const {
        const auto halves = x.chunk(2, -1);
        return x * cos_ + at::cat({-halves[1], halves[0]}, -1) * sin_;
    }
    [[nodiscard]] Tensor attention(const layer& l, const Tensor& x) const {
        const auto parts = at::linear(x, l.query_key_value).chunk(3, -1);
        const auto by_head = [&](const Tensor& t) { return t.unflatten(-1, {heads_, -1}).transpose(1, 2); };
        const Tensor seen = at::scaled_dot_product_attention(turned(by_head(parts[0])), turned(by_head(parts[1])),
                                                             by_head(parts[2]), {}, 0.0, /*is_causal=*/true);
        return at::linear(seen.transpose(1, 2).flatten(2), l.out);
    }

    std::int64_t heads_;
    Tensor prompt_, cos_, sin_, answer_;
    std::vector<layer> layers_;
};

}  // namespace

std::unique_ptr<model> make_llm_prefill(const llm_sizes& s, place p) {
    return std::make_unique<prefill>(s, options_on(p));
}

}  // namespace gpu_engines
