// SPDX-License-Identifier: Apache-2.0
// The CUDA backend for plain C++: a node, its memory and streams, graphs. Link with libcudart;
// libcuda is looked up when a node is made. Other headers have memory pools and virtual memory
// (<gpushare/backend/cuda/...>), and kernel launches, which need nvcc (<gpushare/gpushare.cuh>).
//
//   #include <gpushare/backend/cuda/cuda.hpp>
//   gpushare::cuda::node node;
#pragma once

#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/point.hpp>
#include <gpushare/backend/cuda/stream.hpp>
