// SPDX-License-Identifier: Apache-2.0
// The parts of bench_memory. Each function adds its figures.
#pragma once

#include "harness.hpp"

namespace bench {

void quotas(report& r);
/// Throws std::runtime_error if a pool loses a block.
void pools(report& r);
void workloads(report& r);

}  // namespace bench
