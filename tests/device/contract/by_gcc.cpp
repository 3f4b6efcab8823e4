// SPDX-License-Identifier: Apache-2.0
// A plain C++ file: no nvcc, no kernels.
#include "side.hpp"

contract::side contract::by_gcc() { return this_side("g++"); }
