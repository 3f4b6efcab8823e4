// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/launch.cuh>

#include "gpu/collective_launches.hpp"

namespace bench {

[[gnu::weak]] const bool rehearsal = false;  // a program that rehearses says so itself

}  // namespace bench
