// SPDX-License-Identifier: Apache-2.0
#include "pupils.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/nn.h>

#include <mutex>

namespace gpu_training {
namespace {

namespace nn = torch::nn;
using at::Tensor;

const c10::Device device(c10::kCUDA, 0);

struct convolutional : nn::Module {
    explicit convolutional(const convolutional_sizes& s)
        : first(convolution(3, s.channels, 1)),
          second(convolution(s.channels, 2 * s.channels, 2)),
          third(convolution(2 * s.channels, 2 * s.channels, 1)),
          norm(nn::GroupNormOptions(4, 2 * s.channels)),
          head(2 * s.channels, s.classes) {
        register_module("first", first);
        register_module("second", second);
        register_module("third", third);
        register_module("norm", norm);
        register_module("head", head);
    }
    static nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t stride) {
        return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1));
    }
    Tensor forward(const Tensor& pictures) {
        const Tensor x = at::relu(second(at::relu(first(pictures))));
        const Tensor y = at::relu(norm(x + third(x)));
        return head(y.mean({2, 3}));
    }

    nn::Conv2d first, second, third;
    nn::GroupNorm norm;
    nn::Linear head;
};

/// Attention followed by two layers. Each part has a norm and a residual.
struct transformer : nn::Module {
    explicit transformer(const transformer_sizes& s)
        : before_attention(nn::LayerNormOptions({s.width})),
          query_key_value(s.width, 3 * s.width),
          out(s.width, s.width),
          before_layers(nn::LayerNormOptions({s.width})),
          up(s.width, 4 * s.width),
          down(4 * s.width, s.width),
          heads(s.heads) {
        register_module("before_attention", before_attention);
        register_module("query_key_value", query_key_value);
        register_module("out", out);
        register_module("before_layers", before_layers);
        register_module("up", up);
        register_module("down", down);
    }
    Tensor forward(const Tensor& x) {
        const auto parts = query_key_value(before_attention(x)).chunk(3, -1);
        const auto by_head = [&](const Tensor& t) { return t.unflatten(-1, {heads, -1}).transpose(1, 2); };
        const Tensor seen = at::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]), by_head(parts[2]));
        const Tensor y = x + out(seen.transpose(1, 2).flatten(2));
        return y + down(at::gelu(up(before_layers(y))));
    }

    nn::LayerNorm before_attention;
    nn::Linear query_key_value, out;
    nn::LayerNorm before_layers;
    nn::Linear up, down;
    std::int64_t heads;
};

/// Seeds the host's generator, which draws all numbers.
void seed(std::uint64_t number) {
    auto source = at::detail::getDefaultCPUGenerator();
    const std::scoped_lock lock(source.mutex());
    source.set_current_seed(number);
}

/// Makes a module with the same weights on all ranks. Afterwards, each rank draws different
/// numbers.
template <class Module, class Sizes>
std::shared_ptr<Module> made(const Sizes& s, std::uint32_t rank) {
    seed(1);
    auto module = std::make_shared<Module>(s);
    module->to(device);
    seed(100 + rank);
    return module;
}

}  // namespace

pupil make_convolutional(const convolutional_sizes& s, std::uint32_t rank) {
    const auto net = made<convolutional>(s, rank);
    const Tensor pictures = at::randn({s.images, 3, s.side, s.side}).to(device);
    const Tensor labels = at::randint(s.classes, {s.images}, at::kLong).to(device);
    return {net, [=] { return at::cross_entropy_loss(net->forward(pictures), labels); }};
}

pupil make_transformer(const transformer_sizes& s, std::uint32_t rank) {
    const auto block = made<transformer>(s, rank);
    const Tensor texts = at::randn({s.texts, s.tokens, s.width}).to(device);
    const Tensor wanted = at::randn({s.texts, s.tokens, s.width}).to(device);
    return {block, [=] { return (block->forward(texts) - wanted).square().mean(); }};
}

}  // namespace gpu_training
