// SPDX-License-Identifier: Apache-2.0
// What the experiments of bench/gpu need to run through without a device, whether their kernels are
// those of rehearsal_kernels.cpp or as nvcc compiled them, on the PTX executor. Their figures mean
// nothing then.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>

#include "standins/cuda/standin.hpp"

namespace bench {

namespace {

/// Before main, which is the experiments' own: they know of no stand-in. GPUSHARE_REHEARSAL_DRIVER
/// chooses an older driver; CUDA's own variable the hardware queues.
bool start() {
    standin::options o{.devices = 2, .memory = gpushare::bytes{12ULL << 30}};
    if (const char* driver = std::getenv("GPUSHARE_REHEARSAL_DRIVER")) o.driver_version = std::atoi(driver);
    if (const char* queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"))
        o.connections = static_cast<std::uint32_t>(std::atoi(queues));
    standin::reset(o);
    return true;
}
const bool started = start();

}  // namespace

}  // namespace bench

// What the library never calls, and the stand-in therefore doesn't have.

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
    return cudaStreamCreateWithPriority(made, flags, 0);
}
