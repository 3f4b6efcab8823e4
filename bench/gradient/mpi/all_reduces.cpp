// SPDX-License-Identifier: Apache-2.0
// All-reduces between processes on both sides of a link. bench_gradient starts this program:
// PROGRAM MEBIBYTES ROUNDS [alone|apart].
//
// Ours has two levels. One process on each side takes part, with a thread for every process on that
// side; with one process per side, only the outer level is left. Ours alternates with MPI_Allreduce
// over all processes and, if there are two processes, with Gloo. With "alone", only ours runs. With
// "apart", MPI_Allreduce isn't in place, because coll_han of OpenMPI 4.1 reads out of bounds in
// place.
//
// Prints a line "NAME SECONDS" for each measurement. Exits with 1 if a sum was wrong or if too few
// bytes crossed the link.
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/mpi.hpp>
#include <gpushare/gradient/two_level.hpp>

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "gradient/gloo.hpp"
#include "gradient/mpi/world.hpp"

namespace {

namespace gs = gpushare;

using bench::rank;
using bench::ranks;

int wrong = 0;

/// Waits without spinning, so that the cores are free for the processes under measurement.
void meet_asleep() {
    MPI_Request all;
    MPI_Ibarrier(MPI_COMM_WORLD, &all);
    for (int over = 0;;) {
        MPI_Test(&all, &over, MPI_STATUS_IGNORE);
        if (over != 0) return;
        ::usleep(200);
    }
}

std::uint64_t bytes_that_left() {
    std::ifstream file("/sys/class/net/wire/statistics/tx_bytes");
    std::uint64_t n = 0;
    file >> n;
    return n;
}

float number(std::size_t i, int of) { return static_cast<float>(i % 13) + static_cast<float>(of); }

/// Measures `f` on the members of `who`; returns the longest time in seconds. `x` are this rank's
/// inputs; the first has number `as` among the `summed` inputs of all ranks. `sums` hold the
/// results of `f`, which the function checks.
double measure(const char* name, MPI_Comm who, int as, int summed, const std::vector<float*>& x,
               const std::vector<float*>& sums, std::size_t n, const std::function<void()>& f) {
    for (float* sum : sums) std::fill(sum, sum + n, 0.0F);
    for (std::size_t t = 0; t < x.size(); ++t)
        for (std::size_t i = 0; i < n; ++i) x[t][i] = number(i, as + static_cast<int>(t));
    meet_asleep();
    double took = 0;
    if (who != MPI_COMM_NULL) {
        MPI_Barrier(who);
        const std::uint64_t before = bytes_that_left();
        const auto begin = std::chrono::steady_clock::now();
        f();
        took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        // The last bytes may still be on their way, so seven eighths are enough.
        if (bytes_that_left() - before < n * sizeof(float) / 8 * 7) {
            std::fprintf(stderr, "%s: %llu bytes crossed the link\n", name,
                         static_cast<unsigned long long>(bytes_that_left() - before));
            wrong = 1;
        }
        for (const float* mine : sums)
            for (std::size_t i = 0; i < n; ++i) {
                float sum = 0;
                for (int r = 0; r < summed; ++r) sum += number(i, r);
                if (mine[i] != sum) {
                    std::fprintf(stderr, "%s: rank %d: element %zu is %g and not %g\n", name, rank, i,
                                 static_cast<double>(mine[i]), static_cast<double>(sum));
                    wrong = 1;
                    break;
                }
            }
    }
    meet_asleep();
    return bench::longest_of_all(took);
}

void run(std::size_t mebibytes, int rounds, std::string_view how) {
    const bool alone = how == "alone", apart = how == "apart";
    const std::size_t n = (mebibytes << 20) / sizeof(float);
    MPI_Comm side = MPI_COMM_NULL, leaders = MPI_COMM_NULL;
    int local = 0, on_side = 1;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &side);
    MPI_Comm_rank(side, &local);
    MPI_Comm_size(side, &on_side);
    MPI_Comm_split(MPI_COMM_WORLD, local == 0 ? 0 : MPI_UNDEFINED, rank, &leaders);
    const bool leads = leaders != MPI_COMM_NULL;
    std::vector<std::vector<float>> memory(leads ? static_cast<std::size_t>(on_side) : 1, std::vector<float>(n + 16));
    std::vector<float*> x;
    for (auto& m : memory)
        x.push_back(m.data() + (64 - reinterpret_cast<std::uintptr_t>(m.data()) % 64) % 64 / sizeof(float));
    std::vector<float> other(apart ? n : 0);
    std::unique_ptr<gs::mpi_transport> outer;
    gs::communicator inner(static_cast<std::uint32_t>(on_side));
    if (leads) outer = std::make_unique<gs::mpi_transport>(leaders);
    const auto must = [](const gs::collective_fault& f) {
        if (f) std::fprintf(stderr, "ours: %s\n", gs::describe(f).c_str());
        if (f) wrong = 1;
    };
    std::optional<gs::two_level_group<gs::mpi_transport>> group;
    if (leads && on_side != 1) group.emplace(gs::split(inner, *outer));
    const auto ours = [&] {
        if (on_side == 1) return must(outer->all_reduce<float>({x[0], n}, {x[0], n}, gs::sum{}, gs::never));
        const auto of_rank = [&](std::uint32_t r) {
            auto net = group->rank(r);
            must(net.all_reduce<float>({x[r], n}, {x[r], n}, gs::sum{}, gs::never));
        };
        std::vector<std::jthread> threads;
        for (std::uint32_t r = 1; r < x.size(); ++r) threads.emplace_back(of_rank, r);
        of_rank(0);
    };
    std::unique_ptr<bench::gloo_group> gloo;
    if (ranks == 2 && !alone) gloo = bench::gloo_group::make(static_cast<unsigned>(rank), static_cast<unsigned>(ranks));
    const auto print = [&](const std::string& name, double seconds, int round) {
        if (rank == 0 && round >= 0) std::printf("%s %.6f\n", name.c_str(), seconds);
    };
    for (int round = -1; round < rounds; ++round) {  // the first round warms up
        const int first = (leads ? outer->rank() : 0) * static_cast<std::uint32_t>(on_side);
        print("ours", measure("ours", leaders, first, ranks, x, x, n, ours), round);
        if (alone) continue;
        float* const sum = apart ? other.data() : x[0];
        const auto mpi = [&] {
            MPI_Allreduce(apart ? x[0] : MPI_IN_PLACE, sum, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        };
        print("mpi", measure("MPI_Allreduce", MPI_COMM_WORLD, rank, ranks, {x[0]}, {sum}, n, mpi), round);
        for (const char* by : {"ring", "bcube"})
            if (gloo)
                print(
                    std::string("gloo_") + by,
                    measure(by, MPI_COMM_WORLD, rank, ranks, {x[0]}, {x[0]}, n, [&] { gloo->all_reduce(by, x[0], n); }),
                    round);
    }
}

}  // namespace

int main(int argc, char** argv) {
    bench::enter_world(argc, argv);
    if (argc >= 3)
        run(std::strtoul(argv[1], nullptr, 10), std::atoi(argv[2]), argc > 3 ? argv[3] : "");
    else
        wrong = 2;
    MPI_Finalize();
    return wrong;
}
