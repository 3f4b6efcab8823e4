// SPDX-License-Identifier: Apache-2.0
// Debian's libtorch-dev has the header of torch's reducer, but not this one, which that includes for the names of two types.
#pragma once

#include <ATen/Tensor.h>

#include <functional>
#include <memory>

namespace torch::distributed::autograd {
class DistAutogradContext {
public:
    using GradCallback = std::function<bool(at::Tensor&)>;
};
using ContextPtr = std::shared_ptr<DistAutogradContext>;
}  // namespace torch::distributed::autograd
