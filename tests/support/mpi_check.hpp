// SPDX-License-Identifier: Apache-2.0
// Checks of programs that run as several processes of MPI, without Catch2.
//
//   support::check(trouble_of(...), "two levels");    // empty: nothing is wrong
//   return support::wrongs == 0 ? 0 : 1;
#pragma once

#include <cstdio>
#include <string>

#include <mpi.h>

namespace support {

inline int wrongs = 0;  ///< The number of failed checks of this process.

inline void check(const std::string& wrong, const char* what) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (wrong.empty()) return;
    std::fprintf(stderr, "rank %d: %s: %s\n", rank, what, wrong.c_str());
    ++wrongs;
}

}  // namespace support
