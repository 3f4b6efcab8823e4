// SPDX-License-Identifier: Apache-2.0
// The place and type of the models' tensors: half precision on a device.
//
//   const auto prompt = at::randn({1, tokens, width}, options_on(place::cuda));
#pragma once

#include <c10/core/TensorOptions.h>

#include "libtorch.hpp"

namespace gpu_engines {

[[nodiscard]] inline c10::TensorOptions options_on(place p) {
    return p == place::cuda ? c10::TensorOptions().device(c10::Device(c10::kCUDA, 0)).dtype(c10::kHalf)
                            : c10::TensorOptions().device(c10::kCPU).dtype(c10::kFloat);
}

}  // namespace gpu_engines
