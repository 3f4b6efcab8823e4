// SPDX-License-Identifier: Apache-2.0
// The library of gpushare::compiled_cuda: tenancies on the CUDA backend. See
// include/gpushare/tenant/detail/compiled.hpp.
#define GPUSHARE_INSTANTIATING
#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/gpushare.hpp>
