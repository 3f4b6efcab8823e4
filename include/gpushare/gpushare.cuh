// SPDX-License-Identifier: Apache-2.0
// gpushare.hpp, the CUDA backend as in backend/cuda/cuda.hpp, and kernel launches, which need nvcc.
// For .cu files.
//
//   #include <gpushare/gpushare.cuh>
//   // with `using namespace gpushare`, cuda would also be the toolkit's ::cuda
//   namespace cu = gpushare::cuda;
#pragma once

#ifndef __CUDACC__
#error "gpushare: gpushare.cuh needs nvcc: include it from .cu files only; gpushare.hpp is for the others"
#endif

#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/launch.cuh>
#include <gpushare/gpushare.hpp>
#include <gpushare/numbers.hpp>
