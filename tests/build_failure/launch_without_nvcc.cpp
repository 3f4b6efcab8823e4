// SPDX-License-Identifier: Apache-2.0
// must fail: launch.cuh needs nvcc
#include <gpushare/backend/cuda/launch.cuh>
