// SPDX-License-Identifier: Apache-2.0
// The comparison as a rank with its own process runs it, for any library. Every rank checks a few
// sums. Rank 0 prints, one per line, the library's version, the number of single-copy transfers
// (reads and writes of another rank's memory for large messages), the number of wrong elements, and
// the medians of the sweep. The program of a peer includes this header once.
#pragma once

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include "collective/sweep.hpp"

namespace bench {

inline std::atomic<unsigned long> single_copies{0};

struct process_rank {
    int rank = 0, ranks = 1;
    std::string version;    // a line in the form that bench::mpi_peers reads
    std::size_t fewer = 1;  // as in sweep()
};

/// `sum(in, out, n)` is collective, and in place if `in` and `out` are equal. `meet()` is a
/// barrier.
template <class Sum, class Meet>
void compare(const process_rank& me, const Sum& sum, const Meet& meet) {
    std::size_t wrong = 0;
    for (const std::size_t bytes : sweep_sizes) {
        if (bytes > std::size_t{4} << 20) break;
        std::vector<float> in(bytes / sizeof(float), static_cast<float>(me.rank + 1)), out(in.size());
        sum(in.data(), out.data(), in.size());
        for (const float x : out) wrong += x != static_cast<float>(me.ranks * (me.ranks + 1) / 2);
    }
    arenas memory;
    const auto medians = sweep(memory, sum, meet, me.fewer);
    if (me.rank != 0) return;
    std::printf("%s\nsingle-copies %lu\nwrong %zu\n", me.version.c_str(), single_copies.load(), wrong);
    for (const double us : medians) std::printf("us %.4f\n", us);
}

}  // namespace bench

// Counts a library's single copies. A program's own symbols take precedence over the C library's.
extern "C" ssize_t process_vm_readv(pid_t of, const iovec* to, unsigned long n, const iovec* from, unsigned long m,
                                    unsigned long flags) {
    bench::single_copies.fetch_add(1, std::memory_order_relaxed);
    return ::syscall(SYS_process_vm_readv, of, to, n, from, m, flags);
}
extern "C" ssize_t process_vm_writev(pid_t of, const iovec* from, unsigned long n, const iovec* to, unsigned long m,
                                     unsigned long flags) {
    bench::single_copies.fetch_add(1, std::memory_order_relaxed);
    return ::syscall(SYS_process_vm_writev, of, from, n, to, m, flags);
}
