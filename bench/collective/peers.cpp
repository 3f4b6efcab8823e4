// SPDX-License-Identifier: Apache-2.0
#include "collective/peers.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "collective/sweep.hpp"

#ifdef GPUSHARE_BENCH_GLOO
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#include <memory>
#endif

namespace bench {

namespace {

constexpr std::size_t cells = std::size(sweep_buffers) * std::size(sweep_sizes);

/// Keeps the lower time at each size.
void keep_least(std::vector<double>& least, const std::vector<double>& us) {
    if (us.empty()) return;
    if (least.empty()) least.assign(us.size(), std::numeric_limits<double>::infinity());
    for (std::size_t i = 0; i < us.size(); ++i) least[i] = std::min(least[i], us[i]);
}

}  // namespace

std::vector<mpi_peers::setting> mpi_peers::all_settings([[maybe_unused]] unsigned ranks) {
    std::vector<setting> all;
    [[maybe_unused]] const std::string n = " -n " + std::to_string(ranks) + " ";
    [[maybe_unused]] const bool enough_cores = ranks <= std::thread::hardware_concurrency();
#ifdef GPUSHARE_BENCH_MPI
    // Debian's Open MPI, and the wheel's, which has the same binary interface.
    const auto open_mpi = [&](const std::string& launcher) {
        // With more ranks than cores, an idle rank must yield; otherwise the rank spins until its
        // time slice ends.
        const std::string start = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " + launcher +
                                  (enough_cores ? "" : " --mca mpi_yield_when_idle 1"),
                          unbound = start + " --bind-to none --oversubscribe",
                          tuned =
                              unbound + " --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm ",
                          program = n + GPUSHARE_BENCH_MPI;
        all.push_back({"default", unbound + program, {}});
        if (enough_cores) all.push_back({"bound to cores", start + " --bind-to core" + program, {}});
        all.push_back({"recursive doubling", tuned + "3" + program, {}});
        all.push_back({"ring", tuned + "4" + program, {}});
        all.push_back({"segmented ring", tuned + "5" + program, {}});
        all.push_back({"Rabenseifner", tuned + "6" + program, {}});
        all.push_back({"shared-memory collectives", unbound + " --mca coll_sm_priority 100" + program, {}});
    };
    open_mpi("mpirun");
#ifdef GPUSHARE_BENCH_OPENMPI5
    const std::string there = GPUSHARE_BENCH_OPENMPI5;
    open_mpi("OPAL_PREFIX=" + there + " LD_LIBRARY_PATH=" + there + "/lib " + there + "/bin/mpirun");
#endif
#endif
#ifdef GPUSHARE_BENCH_MPICH
    const std::string mpich = GPUSHARE_BENCH_MPICH, paths = "LD_LIBRARY_PATH=" + mpich + "/lib ",
                      start = mpich + "/bin/mpiexec.hydra", program = n + GPUSHARE_BENCH_MPICH_PEER;
    const auto algorithm = [&](const char* name, const std::string& variables) {
        all.push_back({name, paths + variables + " " + start + program, {}});
    };
    algorithm("default", "");
    if (enough_cores) all.push_back({"bound to cores", paths + start + " -bind-to core" + program, {}});
    algorithm("recursive doubling", "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=recursive_doubling");
    algorithm("reduce_scatter and allgather", "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=reduce_scatter_allgather");
    algorithm("ring", "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=ring");
    algorithm("shared-memory release and gather", "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=release_gather");
    algorithm("single copy", "MPIR_CVAR_CH4_CMA_ENABLE=1");
#endif
#ifdef GPUSHARE_BENCH_ONECCL
    // oneCCL's communication threads would compete with the ranks for cores.
    const std::string oneccl = GPUSHARE_BENCH_ONECCL,
                      found = "LD_LIBRARY_PATH=" + oneccl + "/lib I_MPI_ROOT=" + oneccl +
                              " CCL_WORKER_OFFLOAD=0 GPUSHARE_BENCH_KVS=$(mktemp -u) ",
                      by_mpi = found + "CCL_ATL_TRANSPORT=mpi I_MPI_FABRICS=shm ",
                      launch = oneccl + "/bin/mpiexec.hydra" + n + GPUSHARE_BENCH_ONECCL_PEER;
    all.push_back({"default", by_mpi + launch, {}});
    if (enough_cores) all.push_back({"bound to cores", by_mpi + "I_MPI_PIN=1 " + launch, {}});
    for (const char* const name : {"direct", "recursive_doubling", "ring", "rabenseifner", "nreduce"})
        all.push_back({name, by_mpi + "CCL_ALLREDUCE=" + name + " " + launch, {}});
#endif
    return all;
}

mpi_peers::outcome mpi_peers::run(const setting& s, unsigned fewer) {
    outcome o;
    // A setting that hangs counts as a failure. A normal trial takes five seconds.
    const std::string patience = fewer > 1 ? "20" : "120";
    std::string quoted = s.command;
    for (std::size_t at = 0; (at = quoted.find('\'', at)) != std::string::npos; at += 4) quoted.replace(at, 1, "'\\''");
    const std::string command = "timeout " + patience + " sh -c '" + quoted + " " + std::to_string(fewer) + "' 2>&1";
    // Adopts the ranks of a launcher that has been stopped. Otherwise machine_load would count
    // their CPU time as another program's.
    ::prctl(PR_SET_CHILD_SUBREAPER, 1UL, 0UL, 0UL, 0UL);
    std::FILE* const output = ::popen(command.c_str(), "r");
    if (output == nullptr) return {{}, {}, "it couldn't be started", 0, 0};
    std::array<char, 1024> line{};
    std::string first;
    while (std::fgets(line.data(), line.size(), output) != nullptr) {
        const std::string_view text(line.data());
        if (text.starts_with("us "))
            o.us.push_back(std::strtod(line.data() + 3, nullptr));
        else if (text.starts_with("single-copies "))
            o.single_copies = std::strtoull(line.data() + 14, nullptr, 10);
        else if (text.starts_with("wrong "))
            o.wrong = std::strtoull(line.data() + 6, nullptr, 10);
        else if (text.starts_with("Open MPI v") || text.starts_with("MPICH Version") || text.starts_with("oneCCL "))
            o.version = text.substr(0, text.find_first_of(",\n"));
        else if (first.empty() && text.find_first_not_of("-\n ") != std::string_view::npos)
            first = text.substr(0, text.find('\n'));
    }
    std::ranges::replace(o.version, '\t', ' ');
    const int status = ::pclose(output);
    while (::waitpid(-1, nullptr, 0) > 0) {
    }
    if (status != 0 || o.us.size() != cells) {
        o.us.clear();
        constexpr int of_timeout = 124;
        if (WIFEXITED(status) && WEXITSTATUS(status) == of_timeout)
            o.trouble = "it took longer than " + patience + " s";
        else
            o.trouble = first.empty() ? "it ended with " + std::to_string(status) : first;
    } else if (o.wrong != 0) {
        o.us.clear();
        o.trouble = std::to_string(o.wrong) + " elements of its sums were wrong";
    }
    return o;
}

mpi_peers::mpi_peers(unsigned ranks) {
    auto all = all_settings(ranks);
    std::vector<std::vector<double>> looks;
    std::vector<double> best;
    std::printf("# MPI, %u ranks: a look at each setting; us at 1 KiB, 64 KiB, 1 MiB and 64 MiB, warm\n", ranks);
    std::size_t failed_in_a_row = 0;  // within the settings of one MPI
    for (std::size_t i = 0; i < all.size(); ++i) {
        auto& s = all[i];
        if (s.name == "default") failed_in_a_row = 0;
        // With more ranks than cores, MPICH's ranks wait without yielding, and each setting would
        // take very long.
        outcome o;
        if (failed_in_a_row >= 2)
            o.trouble = "not tried, after two settings that failed";
        else
            o = run(s, 10);
        failed_in_a_row = o.us.empty() ? failed_in_a_row + 1 : 0;
        s.version = o.version;
        if (o.us.empty()) {
            std::printf("#   %s: %s: failed: %s\n", s.version.c_str(), s.name.c_str(), o.trouble.c_str());
        } else {
            std::printf("#   %s: %s: %.1f %.1f %.0f %.0f, %zu single copies by a rank\n", s.version.c_str(),
                        s.name.c_str(), o.us[0], o.us[3], o.us[5], o.us[8], o.single_copies);
            s.single_copies = o.single_copies != 0;
        }
        std::fflush(stdout);
        keep_least(best, o.us);
        looks.push_back(std::move(o.us));
    }
    // A greedy choice of few settings: each round keeps the setting that is good at the most sizes
    // that no kept setting covers.
    constexpr double good = 1.05;
    std::vector<bool> covered(cells);
    for (constexpr std::size_t at_most = 5; kept_.size() < at_most && !best.empty();) {
        const auto gain = [&](std::size_t s) {
            std::size_t n = 0;
            for (std::size_t i = 0; i < looks[s].size(); ++i) n += !covered[i] && looks[s][i] <= good * best[i];
            return n;
        };
        std::size_t most = 0;
        for (std::size_t s = 1; s < all.size(); ++s)
            if (gain(s) > gain(most)) most = s;
        if (gain(most) == 0) break;
        for (std::size_t i = 0; i < looks[most].size(); ++i)
            if (looks[most][i] <= good * best[i]) covered[i] = true;
        kept_.push_back(all[most]);
    }
}

std::vector<double> mpi_peers::sweep() const {
    std::vector<double> least;
    for (const auto& s : kept_) keep_least(least, run(s, 1).us);
    return least;
}

std::string mpi_peers::kept() const {
    std::string text;
    for (const auto& s : kept_)
        text += (text.empty() ? "" : "; ") + s.version + ": " + s.name + (s.single_copies ? ", by single copies" : "");
    return text.empty() ? "none" : text;
}

#ifdef GPUSHARE_BENCH_GLOO
namespace {

std::vector<double> gloo_by(gloo::AllreduceOptions::Algorithm how, unsigned ranks) {
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
                        o.setAlgorithm(how);
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
                    },
                    4);
                if (rank == 0) medians = std::move(mine);
            });
    }
    return medians;
}

}  // namespace

std::vector<double> gloo_tcp(unsigned ranks) {
    std::vector<double> least;
    for (const auto how : {gloo::AllreduceOptions::Algorithm::RING, gloo::AllreduceOptions::Algorithm::BCUBE})
        keep_least(least, gloo_by(how, ranks));
    return least;
}
std::string gloo_settings() { return GPUSHARE_BENCH_GLOO ", TCP on the loopback: the faster of ring and bcube"; }
#else
std::vector<double> gloo_tcp(unsigned) { return {}; }
std::string gloo_settings() { return {}; }
#endif

}  // namespace bench
