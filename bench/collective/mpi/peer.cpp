// SPDX-License-Identifier: Apache-2.0
// OpenMPI's side of the comparison: prints the medians of its sweep, one per line. Started by bench_collective through mpirun.
#include <mpi.h>

#include <cstdio>

#include "collective/sweep.hpp"

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    bench::arenas memory;
    const auto medians = bench::sweep(
        memory,
        [](const float* in, float* out, std::size_t n) {
            MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        },
        [] { MPI_Barrier(MPI_COMM_WORLD); });
    if (rank == 0)
        for (const double us : medians) std::printf("%.4f\n", us);
    MPI_Finalize();
}
