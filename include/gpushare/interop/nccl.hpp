// SPDX-License-Identifier: Apache-2.0
// Moved: include <gpushare/gradient/nccl.hpp> instead. This path stays until 0.3.
#pragma once

#include <gpushare/gradient/nccl.hpp>
