// SPDX-License-Identifier: Apache-2.0
// A process with a device, over the stand-in for CUDA, started by an MPI's launcher: Horovod's
// names for arrays on devices of several processes. Prints what is wrong and ends with 1.
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/gradient/horovod_processes.hpp>
#include <gpushare/gradient/mpi.hpp>

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "conformance/named_suite.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/standin.hpp"
#include "support/mpi_check.hpp"
#include "support/named_process.hpp"
#include "support/random.hpp"
#include "support/visible_floats.hpp"

namespace {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
namespace hvd = gpushare::horovod;
using namespace std::chrono_literals;

using support::check;
using support::wrongs;

using process = support::named_process<cuda::node, cuda::pinned_memory, gs::mpi_transport>;

/// What is computed on a stream is summed up, in an order of each process's own.
void computed_on_devices(const std::shared_ptr<cuda::node>& node, cuda::pinned_memory& pinned) {
    gs::mpi_transport net(MPI_COMM_WORLD);
    process mine(node, pinned, net, {.chunk = gs::bytes{1024}});
    const std::uint64_t seed = 47;
    gs::horovod::process_set& of = mine.set();
    support::random same(seed), own(seed + 1 + net.rank());
    for (int step = 0; step < 4; ++step) {
        std::vector<support::visible_floats> x;
        for (int g = 0; g < 8; ++g) x.emplace_back(same.one_in(4) ? 0 : same.below(2000));
        std::vector<std::size_t> order(x.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        for (std::size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[own.below(k)]);
        std::vector<hvd::handle> handles;
        for (const std::size_t g : order) {
            const auto all = x[g].all();
            mine.caller().launch({}, support::count_up{all.data(), all.size(), static_cast<float>(step + net.rank())});
            handles.push_back(hvd::allreduce_async(mine.array(all), "g" + std::to_string(g), hvd::Sum, of));
        }
        hvd::synchronize(handles);
        mine.wait();
        const auto n = static_cast<float>(net.size());
        for (std::size_t g = 0; g < x.size(); ++g) {
            const auto there = x[g].seen();
            for (std::size_t i = 0; i < there.size(); ++i)
                if (there[i] != n * static_cast<float>(step) + n * (n - 1) / 2 + n * static_cast<float>(i % 100))
                    return check("array " + std::to_string(g), "computed on devices");
        }
    }
}

/// The last process says something else of an array: all hear of it, and go on.
void one_differs(const std::shared_ptr<cuda::node>& node, cuda::pinned_memory& pinned) {
    gs::mpi_transport net(MPI_COMM_WORLD);
    process mine(node, pinned, net);
    const bool last = net.rank() + 1 == net.size();
    const support::visible_floats x(last ? 11 : 10), y(5);
    gs::errc code = gs::errc::none;
    try {
        hvd::allreduce(mine.array(x.all()), "x", hvd::Sum, mine.set());
    } catch (const gs::operation_error& e) {
        code = e.code();
    }
    if (code != gs::errc::mismatch) check("no mismatch", "one differs");
    mine.caller().launch({}, support::count_up{y.all().data(), 5, 1});
    hvd::allreduce(mine.array(y.all()), "y", hvd::Average, mine.set());
    mine.wait();
    if (y.seen() != std::vector<float>{1, 2, 3, 4, 5}) check("another average", "one differs");
}

/// The last process's device has nothing to give within the others' patience: all name it.
void one_is_late(const std::shared_ptr<cuda::node>& node, cuda::pinned_memory& pinned) {
    gs::mpi_transport net(MPI_COMM_WORLD, {.grace = 2s});
    const std::uint32_t last = net.size() - 1;
    process mine(node, pinned, net, {}, {.patience = 2s});
    const support::visible_floats x(10);
    hvd::allreduce(mine.array(x.all()), "before", hvd::Sum, mine.set());
    if (net.rank() == last) standin::hold(mine.caller().native_handle());
    gs::failure seen;
    try {
        hvd::allreduce(mine.array(x.all()), "x", hvd::Sum, mine.set());
    } catch (const gs::operation_error& e) {
        seen = e.figures();
    }
    if (net.rank() == last) standin::let_go(mine.caller().native_handle());
    if (seen.code != gs::errc::deadline_exceeded || seen.left != last)
        check(std::string(gs::to_string(seen.code)) + " of " + std::to_string(seen.left), "one is late");
    mine.wait();
}

void all_of_it() {
    const auto node = std::make_shared<cuda::node>();
    cuda::pinned_memory pinned(*node);
    {
        gs::mpi_transport net(MPI_COMM_WORLD);
        process mine(node, pinned, net, {.chunk = gs::bytes{512}});
        check(conformance::check_named(mine.set(), support::named_in_process<process>{mine}), "by each operator");
    }
    MPI_Barrier(MPI_COMM_WORLD);
    computed_on_devices(node, pinned);
    MPI_Barrier(MPI_COMM_WORLD);
    one_differs(node, pinned);
    MPI_Barrier(MPI_COMM_WORLD);
    one_is_late(node, pinned);
    MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace

int main(int argc, char** argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    standin::reset({.devices = 1});
    try {
        all_of_it();
    } catch (const std::exception& e) {
        check(e.what(), "an exception");
        std::fflush(nullptr);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    check(standin::take_findings(), "the stand-in's findings");
    MPI_Finalize();
    return wrongs == 0 ? 0 : 1;
}
