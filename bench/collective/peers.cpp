// SPDX-License-Identifier: Apache-2.0
#include "collective/peers.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "collective/sweep.hpp"

#ifdef GPUSHARE_BENCH_GLOO
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#include <memory>
#include <thread>
#endif

namespace bench {

std::vector<double> open_mpi([[maybe_unused]] unsigned ranks) {
    std::vector<double> medians;
#ifdef GPUSHARE_BENCH_MPI
    // Ranks that outnumber cores have to yield when idle, or they spin for a time slice.
    std::string command =
        "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --bind-to none --oversubscribe ";
    command += "--mca btl self,vader ";
    if (ranks > 2) command += "--mca mpi_yield_when_idle 1 ";
    command += "-n " + std::to_string(ranks) + " " GPUSHARE_BENCH_MPI " 2>/dev/null";
    std::FILE* const output = ::popen(command.c_str(), "r");
    if (output == nullptr) return {};
    std::array<char, 64> line{};
    while (std::fgets(line.data(), line.size(), output) != nullptr)
        medians.push_back(std::strtod(line.data(), nullptr));
    if (::pclose(output) != 0 || medians.size() != std::size(sweep_buffers) * std::size(sweep_sizes)) medians.clear();
#endif
    return medians;
}

#ifdef GPUSHARE_BENCH_GLOO
std::vector<double> gloo_tcp(unsigned ranks) {
    std::vector<double> medians;
    gloo::rendezvous::HashStore store;
    auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
    {
        std::vector<std::jthread> threads;
        for (unsigned rank = 0; rank < ranks; ++rank)
            threads.emplace_back([&, rank] {
                auto context =
                    std::make_shared<gloo::rendezvous::Context>(static_cast<int>(rank), static_cast<int>(ranks));
                context->connectFullMesh(store, device);
                arenas memory;
                auto mine = sweep(
                    memory,
                    [&](float* in, float* out, std::size_t n) {
                        gloo::AllreduceOptions o(context);
                        o.setInput(in, n);
                        o.setOutput(out, n);
                        o.setReduceFunction([](void* to, const void* a, const void* b, std::size_t count) {
                            gloo::sum<float>(to, a, b, count);
                        });
                        gloo::allreduce(o);
                    },
                    [&] {
                        gloo::BarrierOptions o(context);
                        gloo::barrier(o);
                    });
                if (rank == 0) medians = std::move(mine);
            });
    }
    return medians;
}
#else
std::vector<double> gloo_tcp(unsigned) { return {}; }
#endif

}  // namespace bench
