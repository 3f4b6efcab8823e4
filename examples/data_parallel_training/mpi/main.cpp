// SPDX-License-Identifier: Apache-2.0
// The same training by processes of an MPI, each with --ranks threads:
//
//   mpirun -n 4 data_parallel_training_mpi --ranks 1
//
// When a process is lost, the other processes say which, and stop or continue without it. OpenMPI's
// launcher ends all processes unless it is called with --enable-recovery:
//
//   mpirun --enable-recovery -n 4 data_parallel_training_mpi --ranks 1 --lost go-on --fail 2:100 --patience 1000
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/mpi.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>

#include <mpi.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "data_parallel_training/report.hpp"

namespace {

using namespace data_parallel_training;

/// Doesn't call MPI_Finalize, which would wait for processes that are gone.
[[noreturn]] void leave(int code) {
    std::fflush(nullptr);
    std::_Exit(code);
}

/// Trains in all threads of this process over one transport. `again` says that this follows a
/// fault.
gpushare::collective_fault train_over(gpushare::mpi_transport& between, std::vector<trainer>& threads,
                                      const progress_function& progress, bool again) {
    const auto one = [&](auto net, trainer& mine, const progress_function& told) {
        if (again)
            if (const auto fault = mine.agree(*net)) return fault;
        return mine.run(*net, told);
    };
    if (threads.size() == 1) return one(&between, threads[0], progress);
    gpushare::communicator inside(static_cast<std::uint32_t>(threads.size()));
    const auto group = gpushare::split(inside, between);
    std::vector<gpushare::collective_fault> faults(threads.size());
    {
        std::vector<std::jthread> running;
        for (std::uint32_t r = 0; r < threads.size(); ++r)
            running.emplace_back([&, r] {
                auto net = group.rank(r);
                faults[r] = one(&net, threads[r], r == 0 ? progress : nullptr);
            });
    }
    return faults[0];
}

int run(int argc, char** argv) {
    const command asked = parse(std::span<const char* const>(argv, static_cast<std::size_t>(argc)).subspan(1));
    gpushare::mpi_transport between(MPI_COMM_WORLD);
    const std::uint32_t number = between.rank();
    bool first = number == 0;
    if (asked.help) {
        if (first) std::fputs(help_text().data(), stdout);
        return 0;
    }
    const digits data = load_digits(asked.data);
    check(asked, data, asked.ranks * between.size());
    std::vector<trainer> threads;
    for (std::uint32_t r = 0; r < asked.ranks; ++r) threads.emplace_back(data, asked.training);
    const auto progress = [&](std::size_t step, std::size_t steps, float loss) {
        if (first) draw_progress(step, steps, loss);
        if (asked.fail_step == step && asked.fail_rank == number) (void)std::raise(SIGKILL);
    };
    // transports after faults; earlier transports must stay
    std::vector<std::unique_ptr<gpushare::mpi_transport>> rests;
    auto* net = &between;
    for (;;) {
        const auto fault = train_over(*net, threads, progress, net != &between);
        const std::string who = std::to_string(net->size()) + " processes" +
                                (asked.ranks == 1 ? "" : " of " + std::to_string(asked.ranks) + " threads");
        if (!fault) {
            const bool good = first ? print(threads[0].result(), who) : threads[0].result().all_alike;
            if (first) write_svg(threads[0].result(), who, asked.svg);
            if (rests.empty()) return good ? 0 : 1;
            leave(good ? 0 : 1);
        }
        print(threads[0].result(), who + ", number " + std::to_string(net->rank()));
        const std::uint32_t lost = fault.rank / asked.ranks;
        if (!asked.go_on || lost == net->rank() || net->size() == 1) leave(1);
        std::printf("number %u goes on without number %u\n", net->rank(), lost);
        rests.push_back(net->shrink(std::span(&lost, 1)));
        net = rests.back().get();
        first = net->rank() == 0;
    }
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
