// SPDX-License-Identifier: Apache-2.0
// Moved: include <gpushare/backend/cuda/node.hpp> instead. This path stays until 0.3.
#pragma once

#include <gpushare/backend/cuda/node.hpp>
