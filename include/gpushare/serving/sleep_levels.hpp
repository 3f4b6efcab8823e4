// SPDX-License-Identifier: Apache-2.0
// Moved: include <gpushare/serving/sleeping_tenant.hpp> instead. This path stays until 0.3.
#pragma once

#include <gpushare/serving/sleeping_tenant.hpp>
