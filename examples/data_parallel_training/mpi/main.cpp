// SPDX-License-Identifier: Apache-2.0
// The same training by processes of an MPI, with --ranks threads in each:
//
//   mpirun -n 4 data_parallel_training_mpi --ranks 1
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>
#include <gpushare/interop/mpi.hpp>

#include <mpi.h>

#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "data_parallel_training/report.hpp"

namespace {

using namespace data_parallel_training;

int run(int argc, char** argv) {
    const command asked = parse(std::span<const char* const>(argv, static_cast<std::size_t>(argc)).subspan(1));
    gpushare::mpi_transport between(MPI_COMM_WORLD);
    const bool first = between.rank() == 0;
    if (asked.help) {
        if (first) std::fputs(help_text().data(), stdout);
        return 0;
    }
    const digits data = load_digits(asked.data);
    check(asked, data, asked.ranks * between.size());
    const auto progress = first ? draw_progress : nullptr;
    std::vector<training_result> results(asked.ranks);
    if (asked.ranks == 1) {
        results[0] = train(between, data, asked.training, progress);
    } else {
        gpushare::communicator inside(asked.ranks);
        const auto group = gpushare::split(inside, between);
        std::vector<std::jthread> ranks;
        for (std::uint32_t r = 0; r < asked.ranks; ++r)
            ranks.emplace_back([&, r] {
                auto net = group.rank(r);
                results[r] = train(net, data, asked.training, r == 0 ? progress : nullptr);
            });
        ranks.clear();
    }
    const std::string who = std::to_string(between.size()) + " processes" +
                            (asked.ranks == 1 ? "" : " of " + std::to_string(asked.ranks) + " threads");
    if (results[0].fault) {  // MPI_Finalize would wait for who is gone
        print(results[0], who + ", number " + std::to_string(between.rank()));
        std::fflush(nullptr);
        std::_Exit(1);
    }
    if (!first) return results[0].all_alike ? 0 : 1;
    const bool good = print(results[0], who);
    write_svg(results[0], who, asked.svg);
    return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    int level = 0, code = 2;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    try {
        code = run(argc, argv);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "data_parallel_training_mpi: %s\n", e.what());
    }
    MPI_Finalize();
    return code;
}
