// SPDX-License-Identifier: Apache-2.0
#include "support/cuda_standin/engine.hpp"

#include <utility>

#include "support/cuda_standin/machine.hpp"

namespace standin::detail {

engine*& the_engine() {
    static engine* one = nullptr;
    return one;
}

cudaError_t launch(cudaStream_t handle, kernel_start start) {
    return on_stream({"cudaLaunchKernelExC"}, handle, [&](machine& m, stream& on) {
        if (m.current()->device != on.in->device) return cudaErrorInvalidResourceHandle;
        m.enqueue(on, {.starts = std::move(start)});
        return cudaSuccess;
    });
}

}  // namespace standin::detail
