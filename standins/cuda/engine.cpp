// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <utility>

#include "machine.hpp"

namespace standin::detail {

engine*& the_engine() {
    static engine* one = nullptr;
    return one;
}

cudaError_t launch(cudaStream_t handle, const void* kernel, bool together, kernel_start start) {
    return enqueue_kernel(handle, kernel, {.starts = std::move(start), .spins = together});
}

}  // namespace standin::detail
