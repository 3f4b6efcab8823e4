// SPDX-License-Identifier: Apache-2.0
#include "operators.hpp"

namespace gpu_training {

void start_operators() {}
void settle(cudaStream_t) {}

}  // namespace gpu_training
