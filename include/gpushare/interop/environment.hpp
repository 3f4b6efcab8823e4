// SPDX-License-Identifier: Apache-2.0
// Moved: include <gpushare/tenant/specification_text.hpp> instead. This path stays until 0.3.
#pragma once

#include <gpushare/tenant/specification_text.hpp>
