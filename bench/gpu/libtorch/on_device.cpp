// SPDX-License-Identifier: Apache-2.0
#include "operators.hpp"

namespace gpu_torch {

void start_operators() {}

}  // namespace gpu_torch
