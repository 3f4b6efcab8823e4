// SPDX-License-Identifier: Apache-2.0
// The models that share the device: libtorch's modules and functions with random weights. The
// models launch the same kernels as those in data/h100/kernels.csv.gz, as far as libtorch chooses
// the same kernels.
//
//   const auto bert = gpu_engines::make_bert({}, place::cuda);
//   bert->step();                 // enqueues a pass on the calling thread's stream
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "libtorch.hpp"

namespace gpu_engines {

/// A model that repeats the same pass.
class model {
public:
    model() = default;
    model(const model&) = delete;
    model& operator=(const model&) = delete;
    virtual ~model() = default;
    /// Enqueues a pass without waiting. For one thread at a time.
    virtual void step() = 0;
};

/// The default is BERT-base with one text.
struct bert_sizes {
    std::int64_t layers = 12, width = 768, heads = 12, tokens = 128, words = 30522;
};
/// The default is ResNet-50.
struct resnet_sizes {
    std::int64_t images = 64, side = 224, channels = 64, classes = 1000;
    std::array<int, 4> blocks{3, 4, 6, 3};
};
/// The default is four layers of a Llama-7B with one prompt.
struct llm_sizes {
    std::int64_t layers = 4, width = 4096, heads = 32, hidden = 11008, tokens = 2048, words = 32000;
};
/// The default is a decoding step of a language model with 1.2 billion weights: one more token for
/// each text.
struct llm_step_sizes {
    std::int64_t layers = 16, width = 2048, heads = 32, hidden = 8192, texts = 8, tokens = 512, words = 32000;
};

[[nodiscard]] std::unique_ptr<model> make_bert(const bert_sizes& s, place p);
[[nodiscard]] std::unique_ptr<model> make_resnet_inference(const resnet_sizes& s, place p);
/// A training step: forward, backward, and plain SGD.
[[nodiscard]] std::unique_ptr<model> make_resnet_training(const resnet_sizes& s, place p);
[[nodiscard]] std::unique_ptr<model> make_llm_prefill(const llm_sizes& s, place p);
[[nodiscard]] std::unique_ptr<model> make_llm_step(const llm_step_sizes& s, place p);

}  // namespace gpu_engines
