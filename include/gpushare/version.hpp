// SPDX-License-Identifier: Apache-2.0
// Moved: include <gpushare/config.hpp> instead. This path stays until 0.3.
#pragma once

#include <gpushare/config.hpp>
