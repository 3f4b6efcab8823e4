// SPDX-License-Identifier: Apache-2.0
// What we are compared with. Each gives the medians of a sweep (sweep.hpp), or nothing where it isn't installed.
#pragma once

#include <vector>

namespace bench {

std::vector<double> open_mpi(unsigned ranks);
std::vector<double> gloo_tcp(unsigned ranks);

}  // namespace bench
