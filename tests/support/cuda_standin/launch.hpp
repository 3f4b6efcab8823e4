// SPDX-License-Identifier: Apache-2.0
// Moved to standins/cuda/launch.hpp. Programs that were written before 0.2.0 find the header here.
#pragma once

#include "../../../standins/cuda/launch.hpp"
