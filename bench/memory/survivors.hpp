// SPDX-License-Identifier: Apache-2.0
// Small blocks that stay beside large ones that come and go, in tenants' default stacks: what that
// costs in memory, and what is refused for it.
#pragma once

#include <cstdint>

#include <gpushare/tenant/specification.hpp>

namespace bench {

struct survivors_outcome {
    std::uint64_t operations = 0;
    std::uint64_t false_refusals = 0;  // of what fits beside the live blocks
    double held_over_live = 1;         // the most that nobody else could have, for a live byte
};

/// All workloads on one stack: tenants with one to four times what they keep live, that grow and
/// shrink and sleep; scratch that grows beside a cache's pages; a small block where a large one
/// was.
survivors_outcome survivors(gpushare::memory_stack stack);

}  // namespace bench
