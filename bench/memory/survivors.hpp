// SPDX-License-Identifier: Apache-2.0
// Small blocks that stay while large blocks come and go, in tenants' default stacks. Measures the
// memory that such blocks waste and the requests that are refused because of them.
#pragma once

#include <cstdint>

#include <gpushare/tenant/specification.hpp>

namespace bench {

struct survivors_outcome {
    std::uint64_t operations = 0;
    std::uint64_t false_refusals = 0;  // of requests that fit beside the live blocks
    // The peak of bytes that other tenants can't have, per live byte.
    double held_over_live = 1;
};

/// Runs all workloads on one stack. In the first workload, tenants with one to four times their
/// live memory grow, shrink and sleep. In the second, scratch grows beside the pages of a cache.
/// The third puts a small block where a large block was.
survivors_outcome survivors(gpushare::memory_stack stack);

}  // namespace bench
