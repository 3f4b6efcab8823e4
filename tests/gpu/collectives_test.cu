// SPDX-License-Identifier: Apache-2.0
// The suite of collectives on devices.
#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/launch.cuh>

#include "gpu/collectives_suite.hpp"

namespace {
[[maybe_unused]] const bool said =
    (collectives_suite::least_capability = 90, true);  // as tests/gpu/CMakeLists.txt compiles them
}  // namespace
