// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/launch.cuh>

#include "gpu/collective_kind_launches.hpp"
