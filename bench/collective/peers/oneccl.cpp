// SPDX-License-Identifier: Apache-2.0
// oneCCL's side of the comparison, with oneCCL's communicators for the host. bench_collective
// starts this program through the launcher of the underlying MPI: PEER [FEWER]. The ranks find each
// other through the file GPUSHARE_BENCH_KVS, which must not exist at the start.
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <oneapi/ccl.hpp>
#include <string>
#include <thread>

#include "collective/peers/process.hpp"

namespace {

// Reads a number that PMI gives to each process of a launcher.
int told(const char* name) {
    const char* const value = std::getenv(name);
    return value == nullptr ? 0 : std::atoi(value);
}

ccl::shared_ptr_class<ccl::kvs> store_of(int rank, const std::string& file) {
    using namespace std::chrono_literals;
    if (rank == 0) {
        auto store = ccl::create_main_kvs();
        const auto address = store->get_address();
        const std::string whole = file + ".whole";
        std::ofstream(whole, std::ios::binary).write(address.data(), static_cast<std::streamsize>(address.size()));
        std::rename(whole.c_str(), file.c_str());
        return store;
    }
    ccl::kvs::address_type address{};
    std::ifstream in;
    // The program that started the ranks has a time limit.
    while (in.open(file, std::ios::binary), !in) std::this_thread::sleep_for(1ms);
    in.read(address.data(), static_cast<std::streamsize>(address.size()));
    return ccl::create_kvs(address);
}

}  // namespace

int main(int argc, char** argv) {
    ccl::init();
    bench::process_rank me{told("PMI_RANK"), told("PMI_SIZE"), {}, 1};
    const auto version = ccl::get_library_version();
    me.version = "oneCCL " + std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
                 std::to_string(version.update);
    if (argc > 1) me.fewer = static_cast<std::size_t>(std::atoi(argv[1]));
    const char* const file = std::getenv("GPUSHARE_BENCH_KVS");
    if (file == nullptr || me.ranks < 1) {
        std::puts("started without a launcher, or without GPUSHARE_BENCH_KVS");
        return 2;
    }
    const auto store = store_of(me.rank, file);
    const auto group = ccl::create_communicator(me.ranks, me.rank, store);
    std::remove(file);
    bench::compare(
        me,
        [&](const float* in, float* out, std::size_t n) {
            ccl::allreduce(in, out, n, ccl::reduction::sum, group).wait();
        },
        [&] { ccl::barrier(group); });
}
