// SPDX-License-Identifier: Apache-2.0
// An MPI's side of the comparison, started by bench_collective through the launcher of that MPI: PEER [FEWER]. Prints the
// library's version, whether a rank may read another one's memory (what single-copy transfer of large messages needs), wrong
// elements of a few sums, and the medians of its sweep, one per line.
#include <mpi.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "collective/sweep.hpp"

namespace {

void sum(const float* in, float* out, std::size_t n) {
    MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

bool can_read_rank_one(int rank) {
    float there = 42, here = 0;
    unsigned long long told[2] = {static_cast<unsigned long long>(::getpid()), reinterpret_cast<std::size_t>(&there)};
    MPI_Bcast(told, 2, MPI_UNSIGNED_LONG_LONG, 1, MPI_COMM_WORLD);
    if (rank == 0) {
        const iovec to{&here, sizeof here}, from{reinterpret_cast<void*>(told[1]), sizeof there};
        (void)::process_vm_readv(static_cast<pid_t>(told[0]), &to, 1, &from, 1, 0);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    return here == 42;
}

std::size_t wrong_elements(int rank, int ranks) {
    std::size_t wrong = 0;
    for (const std::size_t bytes : bench::sweep_sizes) {
        if (bytes > std::size_t{4} << 20) break;
        std::vector<float> in(bytes / sizeof(float), static_cast<float>(rank + 1)), out(in.size());
        sum(in.data(), out.data(), in.size());
        for (const float x : out) wrong += x != static_cast<float>(ranks * (ranks + 1) / 2);
    }
    return wrong;
}

}  // namespace

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0, ranks = 0, length = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Get_library_version(version, &length);
    const bool single_copy = can_read_rank_one(rank);
    const std::size_t wrong = wrong_elements(rank, ranks);
    bench::arenas memory;
    const auto medians = bench::sweep(
        memory, sum, [] { MPI_Barrier(MPI_COMM_WORLD); },
        argc > 1 ? static_cast<std::size_t>(std::atoi(argv[1])) : std::size_t{1});
    if (rank == 0) {
        std::printf("%.*s\n", static_cast<int>(std::char_traits<char>::length(version)), version);
        std::printf("single-copy %d\nwrong %zu\n", single_copy, wrong);
        for (const double us : medians) std::printf("us %.4f\n", us);
    }
    MPI_Finalize();
}
