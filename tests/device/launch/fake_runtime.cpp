// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA runtime that objects of nvcc need and the stand-in doesn't have, because it
// runs kernels without nvcc: registration, which does nothing, and launches, which are noted down.
#include <cuda_runtime_api.h>

#include <cstring>

#include "launches.hpp"
#include "standins/cuda/standin.hpp"

launches::fake& launches::runtime() {
    static fake instance;
    return instance;
}

extern "C" {

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
    auto& fake = launches::runtime();
    launches::request r{.kernel = kernel,
                        .stream = config->stream,
                        .blocks = config->gridDim.x,
                        .threads = config->blockDim.x,
                        .shared_memory = config->dynamicSmemBytes};
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeCooperative)
            r.cooperative = config->attrs[i].val.cooperative != 0;
    (void)cudaGetDevice(&r.device);
    // Of a kernel with less the rest isn't looked at; its first word is always there.
    std::memcpy(&r.arguments, arguments[0], r.threads > 1 ? sizeof r.arguments : sizeof(std::uint32_t));
    if (fake.answer != cudaSuccess) return fake.answer;
    fake.requests.push_back(r);
    return standin::detail::launch(config->stream, gpushare::ns{1000}, [] {});
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = launches::runtime().blocks_per_sm;
    return launches::runtime().answer;
}

// Called by what nvcc generates.
void** __cudaRegisterFatBinary(void*) {
    static void* handle = nullptr;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
cudaError_t __cudaGetKernel(void**, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }

}  // extern "C"
