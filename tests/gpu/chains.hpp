// SPDX-License-Identifier: Apache-2.0
// The engine for element-wise chains and norms, compiled by nvcc (chains.cu), for chains_test.cpp.
#pragma once

#include <cstdint>
#include <span>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/graph/device_chains.hpp>
#include <gpushare/tenant/tenancy.hpp>

namespace chains {

namespace gs = gpushare;

using tenancy = gs::tenancy<gs::cuda::node>;
using engine = gs::graph::chain_engine<tenancy::tenant>;

/// engine::enqueue.
void enqueue(engine& by, gs::cuda::stream& to, std::uint32_t piece, std::span<const gs::graph::tensor* const> in,
             std::span<gs::graph::tensor* const> out);

}  // namespace chains
