// SPDX-License-Identifier: Apache-2.0
// The models that share the device: libtorch's modules and functions, with random weights. They
// launch what the models of data/h100/kernels.csv.gz launch, kernel by kernel, as far as libtorch
// chooses the same kernels.
//
//   const auto bert = gpu_engines::make_bert({}, place::cuda);
//   bert->step();                 // enqueues a pass on the calling thread's stream
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "libtorch.hpp"

namespace gpu_engines {

/// One that does the same pass again and again.
class model {
public:
    model() = default;
    model(const model&) = delete;
    model& operator=(const model&) = delete;
    virtual ~model() = default;
    /// Enqueues a pass and waits for nothing. For one thread at a time.
    virtual void step() = 0;
};

/// BERT-base by default, one text.
struct bert_sizes {
    std::int64_t layers = 12, width = 768, heads = 12, tokens = 128, words = 30522;
};
/// ResNet-50 by default.
struct resnet_sizes {
    std::int64_t images = 64, side = 224, channels = 64, classes = 1000;
    std::array<int, 4> blocks{3, 4, 6, 3};
};
/// Four layers of a Llama-7B by default, one prompt.
struct llm_sizes {
    std::int64_t layers = 4, width = 4096, heads = 32, hidden = 11008, tokens = 2048, words = 32000;
};
/// A step of a language model of 1.2 billion weights by default: a token more for each text.
struct llm_step_sizes {
    std::int64_t layers = 16, width = 2048, heads = 32, hidden = 8192, texts = 8, tokens = 512, words = 32000;
};

[[nodiscard]] std::unique_ptr<model> make_bert(const bert_sizes& s, place p);
[[nodiscard]] std::unique_ptr<model> make_resnet_inference(const resnet_sizes& s, place p);
/// Forward, backward, and a step of plain SGD.
[[nodiscard]] std::unique_ptr<model> make_resnet_training(const resnet_sizes& s, place p);
[[nodiscard]] std::unique_ptr<model> make_llm_prefill(const llm_sizes& s, place p);
[[nodiscard]] std::unique_ptr<model> make_llm_step(const llm_step_sizes& s, place p);

}  // namespace gpu_engines
