// SPDX-License-Identifier: Apache-2.0
// Language models with layers like Llama's: a prefill without a head, and a decoding step. The code
// creates weights directly on the device, because a module would draw gigabytes of weights on the
// host.
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

/// The weights of all layers, as in Llama, and the rotation angles of queries and keys by position.
struct weights {
    weights(std::int64_t n, std::int64_t width, std::int64_t hidden, std::int64_t head, const Tensor& positions,
            const c10::TensorOptions& o) {
        const auto random = [&](std::int64_t out, std::int64_t in) { return at::randn({out, in}, o).mul_(0.02); };
        for (std::int64_t i = 0; i < n; ++i)
            layers.push_back({at::ones({width}, o), random(3 * width, width), random(width, width),
                              at::ones({width}, o), random(2 * hidden, width), random(width, hidden)});
        const auto wide = o.dtype(at::kFloat);
        const Tensor turns = at::outer(positions.to(wide), at::pow(1e4, at::arange(head / 2, wide) / (-head / 2)));
        const Tensor angles = at::cat({turns, turns}, -1);
        cos = angles.cos().to(c10::typeMetaToScalarType(o.dtype()));
        sin = angles.sin().to(c10::typeMetaToScalarType(o.dtype()));
    }
    [[nodiscard]] Tensor turned(const Tensor& x) const {
        const auto halves = x.chunk(2, -1);
        return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
    }

    std::vector<layer> layers;
    Tensor cos, sin;
};
Tensor mlp(const layer& l, const Tensor& x) {
    const auto parts = at::linear(rms_norm(x, l.before_mlp), l.gate_up).chunk(2, -1);
    return at::linear(at::silu(parts[0]) * parts[1], l.down);
}
Tensor by_head(const Tensor& t, std::int64_t heads) { return t.unflatten(-1, {heads, -1}).transpose(1, 2); }

class prefill final : public model {
public:
    prefill(const llm_sizes& s, const c10::TensorOptions& o)
        : heads_(s.heads),
          prompt_(at::randn({1, s.tokens, s.width}, o)),
          all_(s.layers, s.width, s.hidden, s.width / s.heads, at::arange(s.tokens, o.dtype(at::kFloat)), o) {}
    void step() override {
        const c10::InferenceMode inference;
        Tensor x = prompt_;
        for (const layer& l : all_.layers) {
            x = x + attention(l, rms_norm(x, l.before_attention));
            x = x + mlp(l, x);
        }
        answer_ = x;
    }

private:
    [[nodiscard]] Tensor attention(const layer& l, const Tensor& x) const {
        const auto parts = at::linear(x, l.query_key_value).chunk(3, -1);
        const Tensor seen = at::scaled_dot_product_attention(all_.turned(by_head(parts[0], heads_)),
                                                             all_.turned(by_head(parts[1], heads_)),
                                                             by_head(parts[2], heads_), {}, 0.0, /*is_causal=*/true);
        return at::linear(seen.transpose(1, 2).flatten(2), l.out);
    }

    std::int64_t heads_;
    Tensor prompt_, answer_;
    weights all_;
};

/// Each step computes the last token of a text. The cache holds keys and values of the earlier
/// tokens.
class decoding final : public model {
public:
    decoding(const llm_step_sizes& s, const c10::TensorOptions& o)
        : heads_(s.heads),
          token_(at::randn({s.texts, 1, s.width}, o)),
          head_(at::randn({s.words, s.width}, o).mul_(0.02)),
          norm_(at::ones({s.width}, o)),
          all_(s.layers, s.width, s.hidden, s.width / s.heads, at::full({1}, s.tokens - 1, o.dtype(at::kFloat)), o) {
        for (std::int64_t i = 0; i < 2 * s.layers; ++i)
            caches_.push_back(at::randn({s.texts, s.heads, s.tokens, s.width / s.heads}, o));
    }
    void step() override {
        const c10::InferenceMode inference;
        Tensor x = token_;
        for (std::size_t i = 0; i < all_.layers.size(); ++i) {
            const layer& l = all_.layers[i];
            x = x + attention(l, rms_norm(x, l.before_attention), caches_[2 * i], caches_[2 * i + 1]);
            x = x + mlp(l, x);
        }
        answer_ = at::linear(rms_norm(x, norm_), head_).argmax(-1);
    }

private:
    [[nodiscard]] Tensor attention(const layer& l, const Tensor& x, const Tensor& keys, const Tensor& values) const {
        const auto parts = at::linear(x, l.query_key_value).chunk(3, -1);
        keys.narrow(2, keys.size(2) - 1, 1).copy_(all_.turned(by_head(parts[1], heads_)));
        values.narrow(2, values.size(2) - 1, 1).copy_(by_head(parts[2], heads_));
        const Tensor seen = at::scaled_dot_product_attention(all_.turned(by_head(parts[0], heads_)), keys, values);
        return at::linear(seen.transpose(1, 2).flatten(2), l.out);
    }

    std::int64_t heads_;
    Tensor token_, head_, norm_, answer_;
    weights all_;
    std::vector<Tensor> caches_;  // keys and values of each layer
};

}  // namespace

std::unique_ptr<model> make_llm_prefill(const llm_sizes& s, place p) {
    return std::make_unique<prefill>(s, options_on(p));
}
std::unique_ptr<model> make_llm_step(const llm_step_sizes& s, place p) {
    return std::make_unique<decoding>(s, options_on(p));
}

}  // namespace gpu_engines
