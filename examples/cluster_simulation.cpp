// SPDX-License-Identifier: Apache-2.0
// Simulates days of a cluster in an instant: jobs arrive, wait for devices, run and leave in
// virtual time, with the same result on every run. The same queue and policies can place real jobs.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/value_descent.hpp>

#include "expect.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;

const gpushare::placement_request small{.cpu_milli = 4'000, .devices = 1, .each = 30_pct, .device_memory = 20_GiB};
const gpushare::placement_request large{.cpu_milli = 16'000, .devices = 4, .each = 100_pct, .device_memory = 60_GiB};

struct outcome {
    std::uint64_t jobs = 0, placed = 0;
    gpushare::ns large_waited{};  // summed over all large jobs
    bool operator==(const outcome&) const = default;
};

template <class Policy>
struct simulation {
    Policy policy;
    gpushare::cluster cluster;
    gpushare::sim::world world{};
    gpushare::sim::random any{42};
    gpushare::admission_queue queue{};
    // when each waiting large job arrived
    std::map<std::uint64_t, gpushare::instant> large_since{};
    outcome all{};

    // A job has found its place. It runs for some hours and leaves. Then a waiting job that fits
    // goes next.
    void run(const gpushare::placement& where) {
        ++all.placed;
        world.at(world.now() + any.between(1h, 3h), [this, left = std::make_shared<gpushare::placement>(where)] {
            cluster.release(*left);
            for (const auto& next : queue.advance(world.now(), policy, cluster)) {
                if (large_since.contains(next.id)) all.large_waited += world.now() - large_since.at(next.id);
                run(next.placements.front());
            }
        });
    }

    outcome days(int n) {
        for (auto t = world.now(); t < gpushare::instant{} + n * 24h; t += any.exponential(5min), ++all.jobs) {
            world.run_until(t);
            const bool is_large = any.below(10) == 0;
            const auto a = queue.submit(t, policy, cluster, {.members = {is_large ? large : small}});
            if (is_large) large_since[a.id] = t;
            if (a.outcome == gpushare::admission_result::placed) run(a.placements.front());
        }
        world.run();
        return all;
    }
};

int main() {
    gpushare::cluster nodes;
    for (int i = 0; i < 8; ++i)
        nodes.add({.cpu_milli = 64'000, .memory = 256_GiB, .devices = 4, .device_memory = 80_GiB});
    const std::vector usual{large, small, small, small, small, small, small, small, small, small};
    const gpushare::value_descent ours(nodes, gpushare::workload(usual));
    const auto spread = simulation<gpushare::spreading>{{}, nodes}.days(3);
    const auto valued = simulation<gpushare::value_descent>{ours, nodes}.days(3);
    std::printf("large jobs waited %d h, and %d h by value\n", int(spread.large_waited / 1h),
                int(valued.large_waited / 1h));
    expect(spread.placed == spread.jobs && valued.placed == valued.jobs, "every job runs in the end");
    expect(valued.large_waited < spread.large_waited / 2, "small jobs leave whole nodes to the large ones");
    expect(simulation<gpushare::value_descent>{ours, nodes}.days(3) == valued, "the same on every run");
}
