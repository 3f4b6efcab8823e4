// SPDX-License-Identifier: Apache-2.0
// The processes of a program started by an MPI launcher.
#pragma once

#include <mpi.h>

namespace bench {

inline int rank = 0, ranks = 1;

/// Allows different threads to call MPI, one at a time.
inline void enter_world(int& argc, char**& argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
}

/// The longest time among all processes.
inline double longest_of_all(double took) {
    double longest = 0;
    MPI_Allreduce(&took, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return longest;
}

}  // namespace bench
