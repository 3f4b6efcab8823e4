// SPDX-License-Identifier: Apache-2.0
// BERT: a text encoder followed by a pooler.
#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn.h>

#include "models.hpp"
#include "tensors.hpp"

namespace gpu_engines {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct encoder_layer : nn::Module {
    encoder_layer(std::int64_t width, std::int64_t n)
        : query(width, width),
          key(width, width),
          value(width, width),
          out(width, width),
          up(width, 4 * width),
          down(4 * width, width),
          behind_attention(nn::LayerNormOptions({width})),
          behind_all(nn::LayerNormOptions({width})),
          heads(n) {
        register_module("query", query);
        register_module("key", key);
        register_module("value", value);
        register_module("out", out);
        register_module("up", up);
        register_module("down", down);
        register_module("behind_attention", behind_attention);
        register_module("behind_all", behind_all);
    }
    Tensor forward(const Tensor& x) {
        const auto by_head = [&](const Tensor& t) { return t.unflatten(-1, {heads, -1}).transpose(1, 2); };
        const Tensor seen = at::scaled_dot_product_attention(by_head(query(x)), by_head(key(x)), by_head(value(x)));
        const Tensor y = behind_attention(x + out(seen.transpose(1, 2).flatten(2)));
        return behind_all(y + down(at::gelu(up(y))));
    }

    nn::Linear query, key, value, out, up, down;
    nn::LayerNorm behind_attention, behind_all;
    std::int64_t heads;
};

struct encoder : nn::Module {
    explicit encoder(const bert_sizes& s)
        : words(s.words, s.width), norm(nn::LayerNormOptions({s.width})), pooler(s.width, s.width) {
        register_module("words", words);
        register_module("norm", norm);
        register_module("pooler", pooler);
        positions = register_parameter("positions", at::randn({1, s.tokens, s.width}));
        for (std::int64_t i = 0; i < s.layers; ++i)
            layers.push_back(
                register_module("layer" + std::to_string(i), std::make_shared<encoder_layer>(s.width, s.heads)));
    }
    Tensor forward(const Tensor& text) {
        Tensor x = norm(words(text) + positions);
        for (const auto& l : layers) x = l->forward(x);
        return at::tanh(pooler(x.select(1, 0)));
    }

    nn::Embedding words;
    nn::LayerNorm norm;
    nn::Linear pooler;
    Tensor positions;
    std::vector<std::shared_ptr<encoder_layer>> layers;
};

class bert final : public model {
public:
    bert(const bert_sizes& s, const c10::TensorOptions& o)
        : encoder_(s), text_(at::randint(s.words, {1, s.tokens}, o.dtype(at::kLong))) {
        encoder_.to(o.device(), c10::typeMetaToScalarType(o.dtype()));
        encoder_.eval();
    }
    void step() override {
        const c10::InferenceMode inference;
        answer_ = encoder_.forward(text_);
    }

private:
    encoder encoder_;
    Tensor text_, answer_;
};

}  // namespace

std::unique_ptr<model> make_bert(const bert_sizes& s, place p) { return std::make_unique<bert>(s, options_on(p)); }

}  // namespace gpu_engines
