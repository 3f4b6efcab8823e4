// SPDX-License-Identifier: Apache-2.0
// The modules that the ranks train: a convolutional network and a transformer block. All ranks
// start with the same random weights, but have different batches.
//
//   const pupil mine = make_transformer({}, rank);
//   mine.loss().backward();
#pragma once

#include <ATen/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace gpu_training {

/// A module on the device, with its task.
struct pupil {
    std::shared_ptr<torch::nn::Module> module;
    std::function<at::Tensor()> loss;  ///< for the rank's batch, which never changes
};

struct convolutional_sizes {
    std::int64_t images = 32, side = 32, channels = 64, classes = 10;
};
struct transformer_sizes {
    std::int64_t texts = 8, tokens = 128, width = 256, heads = 4;
};

/// Only one thread may call these functions at a time, because libtorch draws all numbers from a
/// single generator. The default stream may still be copying weights when they return.
[[nodiscard]] pupil make_convolutional(const convolutional_sizes& s, std::uint32_t rank);
[[nodiscard]] pupil make_transformer(const transformer_sizes& s, std::uint32_t rank);

}  // namespace gpu_training
