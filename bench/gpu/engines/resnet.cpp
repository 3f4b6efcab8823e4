// SPDX-License-Identifier: Apache-2.0
// ResNet-50 with channels-last images: inference, and training with plain SGD. The weights and
// statistics of batch norms stay in single precision, as cuDNN requires.
#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include "models.hpp"
#include "tensors.hpp"

namespace gpu_engines {
namespace {

namespace nn = torch::nn;
using at::Tensor;

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

/// Three convolutions and a shortcut. The first convolution narrows the image, the last convolution
/// widens it again.
struct bottleneck : nn::Module {
    bottleneck(std::int64_t in, std::int64_t narrow, std::int64_t stride)
        : first(convolution(in, narrow, 1, 1), nn::BatchNorm2d(narrow)),
          second(convolution(narrow, narrow, 3, stride), nn::BatchNorm2d(narrow)),
          third(convolution(narrow, 4 * narrow, 1, 1), nn::BatchNorm2d(4 * narrow)) {
        register_module("first", first);
        register_module("second", second);
        register_module("third", third);
        if (stride == 1 && in == 4 * narrow) return;
        past = nn::Sequential(convolution(in, 4 * narrow, 1, stride), nn::BatchNorm2d(4 * narrow));
        register_module("past", past);
    }
    Tensor forward(const Tensor& x) {
        Tensor y = second->forward(first->forward(x).relu_()).relu_();
        y = third->forward(y);
        y += past.is_empty() ? x : past->forward(x);
        return y.relu_();
    }

    nn::Sequential first, second, third;
    nn::Sequential past{nullptr};
};

struct resnet : nn::Module {
    explicit resnet(const resnet_sizes& s)
        : stem(convolution(3, s.channels, 7, 2), nn::BatchNorm2d(s.channels)), head(32 * s.channels, s.classes) {
        register_module("stem", stem);
        register_module("head", head);
        std::int64_t in = s.channels, narrow = s.channels;
        for (const int blocks : s.blocks) {
            for (int i = 0; i < blocks; ++i) {
                const std::int64_t stride = i == 0 && narrow != s.channels ? 2 : 1;
                body->push_back(std::make_shared<bottleneck>(in, narrow, stride));
                in = 4 * narrow;
            }
            narrow *= 2;
        }
        register_module("body", body);
    }
    Tensor forward(const Tensor& pictures) {
        Tensor x = at::max_pool2d(stem->forward(pictures).relu_(), 3, 2, 1);
        x = body->forward(x);
        return head(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
    }

    nn::Sequential stem;
    nn::Sequential body;
    nn::Linear head;
};

std::shared_ptr<resnet> on(const resnet_sizes& s, const c10::TensorOptions& o) {
    auto net = std::make_shared<resnet>(s);
    net->to(o.device(), c10::typeMetaToScalarType(o.dtype()));
    for (const auto& m : net->modules())
        if (m->as<nn::BatchNorm2dImpl>() != nullptr) m->to(at::kFloat);
    for (auto& p : net->parameters())
        if (p.dim() == 4) p.set_data(p.contiguous(at::MemoryFormat::ChannelsLast));
    return net;
}

Tensor pictures_of(const resnet_sizes& s, const c10::TensorOptions& o) {
    return at::randn({s.images, 3, s.side, s.side}, o).contiguous(at::MemoryFormat::ChannelsLast);
}

class inference final : public model {
public:
    inference(const resnet_sizes& s, const c10::TensorOptions& o) : net_(on(s, o)), pictures_(pictures_of(s, o)) {
        net_->eval();
    }
    void step() override {
        const c10::InferenceMode no_gradients;
        answer_ = net_->forward(pictures_);
    }

private:
    std::shared_ptr<resnet> net_;
    Tensor pictures_, answer_;
};

class training final : public model {
public:
    training(const resnet_sizes& s, const c10::TensorOptions& o)
        : net_(on(s, o)),
          descent_(net_->parameters(), torch::optim::SGDOptions(1e-4)),
          pictures_(pictures_of(s, o)),
          labels_(at::randint(s.classes, {s.images}, o.dtype(at::kLong))) {}
    void step() override {
        descent_.zero_grad();
        at::cross_entropy_loss(net_->forward(pictures_).to(at::kFloat), labels_).backward();
        descent_.step();
    }

private:
    std::shared_ptr<resnet> net_;
    torch::optim::SGD descent_;
    Tensor pictures_, labels_;
};

}  // namespace

std::unique_ptr<model> make_resnet_inference(const resnet_sizes& s, place p) {
    return std::make_unique<inference>(s, options_on(p));
}
std::unique_ptr<model> make_resnet_training(const resnet_sizes& s, place p) {
    return std::make_unique<training>(s, options_on(p));
}

}  // namespace gpu_engines
