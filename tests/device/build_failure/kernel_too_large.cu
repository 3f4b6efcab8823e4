// SPDX-License-Identifier: Apache-2.0
// must fail: a kernel's arguments are limited to 32,764 bytes
#include <gpushare/backend/cuda/launch.cuh>

struct huge {
    char bytes[32'765];
    __device__ void operator()(gpushare::cuda::device_context&) const {}
};
void launch(gpushare::cuda::stream& s) { s.launch({}, huge{}); }
