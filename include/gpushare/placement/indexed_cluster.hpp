// SPDX-License-Identifier: Apache-2.0
// Moved: include <gpushare/placement/placement_policy.hpp> instead. This path stays until 0.3.
#pragma once

#include <gpushare/placement/placement_policy.hpp>
