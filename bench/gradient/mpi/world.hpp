// SPDX-License-Identifier: Apache-2.0
// The processes of a program that an MPI started.
#pragma once

#include <mpi.h>

namespace bench {

inline int rank = 0, ranks = 1;

/// The thread that calls MPI may change.
inline void enter_world(int& argc, char**& argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
}

/// The longest of what all processes took.
inline double longest_of_all(double took) {
    double longest = 0;
    MPI_Allreduce(&took, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return longest;
}

}  // namespace bench
