// SPDX-License-Identifier: Apache-2.0
// Moved: include <gpushare/memory/virtual_arena.hpp> instead. This path stays until 0.3.
#pragma once

#include <gpushare/memory/virtual_arena.hpp>
