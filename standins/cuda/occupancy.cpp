// SPDX-License-Identifier: Apache-2.0
// The number of blocks of a kernel that fit on an SM. The function has a file of its own, because a
// program that runs compiled kernels knows the exact number and replaces the function.
#include "machine.hpp"

namespace standin {

using namespace detail;

namespace {
constexpr int most_threads = 1024;  // of a block
}

extern "C" cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                                     std::size_t) {
    constexpr call_info info{"cudaOccupancyMaxActiveBlocksPerMultiprocessor"};
    return on_device(info, [&](machine& m, int device) {
        if (!m.load(device, kernel, info.name)) return cudaErrorUnknown;
        *blocks = threads <= 0 || threads > most_threads ? 0 : static_cast<int>(m.chosen.blocks_per_sm);
        return cudaSuccess;
    });
}

}  // namespace standin
