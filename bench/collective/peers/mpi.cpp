// SPDX-License-Identifier: Apache-2.0
// An MPI library's side of the comparison. bench_collective starts this program through the MPI's
// own launcher: PEER [FEWER].
#include <mpi.h>

#include <cstddef>
#include <cstdlib>

#include "collective/peers/process.hpp"

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    bench::process_rank me;
    MPI_Comm_rank(MPI_COMM_WORLD, &me.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &me.ranks);
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    me.version = version;
    if (argc > 1) me.fewer = static_cast<std::size_t>(std::atoi(argv[1]));
    bench::compare(
        me,
        [](const float* in, float* out, std::size_t n) {
            MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        },
        [] { MPI_Barrier(MPI_COMM_WORLD); });
    MPI_Finalize();
}
