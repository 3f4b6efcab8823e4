// SPDX-License-Identifier: Apache-2.0
// must fail: a kernel is called with a context
#include <gpushare/backend/cuda/launch.cuh>

struct bare {
    __device__ void operator()() const {}
};
void launch(gpushare::cuda::stream& s) { s.launch({}, bare{}); }
