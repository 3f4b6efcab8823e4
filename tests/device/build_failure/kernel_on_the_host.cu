// SPDX-License-Identifier: Apache-2.0
// must fail: calling a __host__ function.* is not allowed
// A functor without GPUSHARE_HD runs on the host backend only.
#include <gpushare/backend/cuda/launch.cuh>

struct host_only {
    void operator()(gpushare::cuda::device_context&) const {}
};
void launch(gpushare::cuda::stream& s) { s.launch({}, host_only{}); }
