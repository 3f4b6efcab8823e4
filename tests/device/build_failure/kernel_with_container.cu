// SPDX-License-Identifier: Apache-2.0
// must fail: hold pointers, not containers
#include <gpushare/backend/cuda/launch.cuh>

#include <vector>

struct owner {
    std::vector<int> v;
    __device__ void operator()(gpushare::cuda::device_context&) const {}
};
void launch(gpushare::cuda::stream& s) { s.launch({}, owner{}); }
