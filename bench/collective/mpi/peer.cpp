// SPDX-License-Identifier: Apache-2.0
// An MPI's side of the comparison, started by bench_collective through the launcher of that MPI: PEER [FEWER]. Prints the
// library's version, how often a rank read or wrote another one's memory (single-copy transfer of large messages), wrong
// elements of a few sums, and the medians of its sweep, one per line.
#include <mpi.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "collective/sweep.hpp"

namespace {

void sum(const float* in, float* out, std::size_t n) {
    MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

std::atomic<unsigned long> single_copies{0};

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

// What the library calls for a single copy, counted: a program's own symbols go before those of the C library.
extern "C" ssize_t process_vm_readv(pid_t of, const iovec* to, unsigned long n, const iovec* from, unsigned long m,
                                    unsigned long flags) {
    single_copies.fetch_add(1, std::memory_order_relaxed);
    return ::syscall(SYS_process_vm_readv, of, to, n, from, m, flags);
}
extern "C" ssize_t process_vm_writev(pid_t of, const iovec* from, unsigned long n, const iovec* to, unsigned long m,
                                     unsigned long flags) {
    single_copies.fetch_add(1, std::memory_order_relaxed);
    return ::syscall(SYS_process_vm_writev, of, from, n, to, m, flags);
}

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0, ranks = 0, length = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Get_library_version(version, &length);
    const std::size_t wrong = wrong_elements(rank, ranks);
    bench::arenas memory;
    const auto medians = bench::sweep(
        memory, sum, [] { MPI_Barrier(MPI_COMM_WORLD); },
        argc > 1 ? static_cast<std::size_t>(std::atoi(argv[1])) : std::size_t{1});
    if (rank == 0) {
        std::printf("%.*s\n", static_cast<int>(std::char_traits<char>::length(version)), version);
        std::printf("single-copies %lu\nwrong %zu\n", single_copies.load(), wrong);
        for (const double us : medians) std::printf("us %.4f\n", us);
    }
    MPI_Finalize();
}
