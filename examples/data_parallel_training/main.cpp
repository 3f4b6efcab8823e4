// SPDX-License-Identifier: Apache-2.0
// Data-parallel training by the threads of one process. The same by processes: mpi/main.cpp.
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/transport.hpp>

#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "data_parallel_training/report.hpp"

int main(int argc, char** argv) try {
    using namespace data_parallel_training;
    const command asked = parse(std::span<const char* const>(argv, static_cast<std::size_t>(argc)).subspan(1));
    if (asked.help) {
        std::fputs(help_text().data(), stdout);
        return 0;
    }
    const digits data = load_digits(asked.data);
    check(asked, data, asked.ranks);
    const gpushare::communicator group(asked.ranks);
    std::vector<training_result> results(asked.ranks);
    {
        std::vector<std::jthread> ranks;
        for (std::uint32_t r = 0; r < asked.ranks; ++r)
            ranks.emplace_back([&, r] {
                gpushare::thread_transport net(group.rank(r));
                results[r] = train(net, data, asked.training, r == 0 ? draw_progress : nullptr);
            });
    }
    const std::string who = std::to_string(asked.ranks) + (asked.ranks == 1 ? " thread" : " threads");
    if (!print(results[0], who)) return 1;
    write_svg(results[0], who, asked.svg);
} catch (const data_parallel_training::usage_error& e) {
    std::fprintf(stderr, "data_parallel_training: %s\n", e.what());
    return 2;
} catch (const std::exception& e) {
    std::fprintf(stderr, "data_parallel_training: %s\n", e.what());
    return 2;
}
