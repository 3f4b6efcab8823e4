// SPDX-License-Identifier: Apache-2.0
// Data-parallel training by the threads of one process. mpi/main.cpp does the same with processes.
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/transport.hpp>

#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "data_parallel_training/report.hpp"
#include "data_parallel_training/tenant.hpp"

int main(int argc, char** argv) try {
    using namespace data_parallel_training;
    const command asked = parse(std::span<const char* const>(argv, static_cast<std::size_t>(argc)).subspan(1));
    if (asked.help) {
        std::fputs(help_text().data(), stdout);
        return 0;
    }
    const digits data = load_digits(asked.data);
    check(asked, data, asked.ranks);
    if (asked.tenant) {
        const tenant_report report = train_as_tenant(asked, data);
        if (!print(report.beside.training, "training as a tenant")) return 1;
        print(report);
        write_svg(report.beside.training, "as a tenant of " + std::to_string(asked.ranks) + " devices", asked.svg);
        return report.alone.training.fingerprint == report.beside.training.fingerprint ? 0 : 1;
    }
    const gpushare::communicator group(asked.ranks);
    std::vector<training_result> results(asked.ranks);
    {
        std::vector<std::jthread> ranks;
        for (std::uint32_t r = 0; r < asked.ranks; ++r)
            ranks.emplace_back([&, r] {
                gpushare::thread_transport net(group.rank(r));
                trainer mine(data, asked.training);
                (void)mine.run(net, r == 0 ? draw_progress : nullptr);
                results[r] = mine.result();
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
