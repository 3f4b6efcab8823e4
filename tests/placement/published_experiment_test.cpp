// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The published experiment on the public trace, if the trace is there: the replay is right if it
// matches the published table.
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/value_descent.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::cluster;
using gpushare::placement_request;

namespace {

std::ifstream shared_file([[maybe_unused]] const std::string& name) {
#ifdef GPUSHARE_SHARED_DATA
    std::ifstream file(GPUSHARE_SHARED_DATA "/" + name);
#else
    std::ifstream file;
#endif
    std::string header;
    std::getline(file, header);
    return file;
}

std::vector<placement_request> read_pods() {
    std::vector<placement_request> pods;
    auto file = shared_file("openb_pod_list_default.csv");
    for (std::string line; std::getline(file, line);) {
        std::uint64_t cpu = 0, memory = 0, permille = 0;
        std::uint32_t devices = 0;
        REQUIRE(std::sscanf(line.c_str(), "%*[^,],%" SCNu64 ",%" SCNu64 ",%" SCNu32 ",%" SCNu64, &cpu, &memory,
                            &devices, &permille) == 4);
        pods.push_back({.cpu_milli = cpu, .memory = memory * 1_MiB, .devices = devices});
        if (devices != 0) pods.back().each = gpushare::share::of_permille(permille);
    }
    return pods;
}

cluster read_nodes() {
    cluster nodes;
    std::map<std::string, std::uint8_t> models;
    auto file = shared_file("openb_node_list_gpu_node.csv");
    for (std::string line; std::getline(file, line);) {
        std::uint64_t cpu = 0, memory = 0;
        std::uint32_t devices = 0;
        char model[32] = {};
        REQUIRE(std::sscanf(line.c_str(), "%*[^,],%" SCNu64 ",%" SCNu64 ",%" SCNu32 ",%31s", &cpu, &memory, &devices,
                            model) == 4);
        const auto number = models.emplace(model, static_cast<std::uint8_t>(models.size())).first->second;
        nodes.add({cpu, memory * 1_MiB, devices, {number}, {}});
    }
    return nodes;
}

/// Percent of the device time allocated when arrivals have asked for all of it.
template <class Policy>
double allocated_at_100(const cluster& nodes, const std::vector<placement_request>& pods, const Policy& policy) {
    constexpr std::uint64_t seeds = 2;
    double sum = 0;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        std::mt19937_64 engine(seed);
        auto order = pods;
        for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[engine() % i]);
        gpushare::indexed_cluster<Policy> c(nodes, policy);
        std::uint64_t asked = 0;
        for (std::size_t i = 0; asked < nodes.capacity_permille(); ++i) {
            if (i == order.size()) order.push_back(pods[engine() % pods.size()]);
            const auto& r = order[i];
            asked += device_permille(r);
            if (const auto p = c.choose(r)) c.apply(*p);
        }
        sum +=
            100.0 * static_cast<double>(c.nodes().placed_permille()) / static_cast<double>(nodes.capacity_permille());
    }
    return sum / static_cast<double>(seeds);
}

}  // namespace

TEST_CASE("the published table of the public trace comes out, and our own policy above it", "[placement]") {
    const auto pods = read_pods();
    if (pods.empty()) {
        WARN("not checked: the public trace isn't there");
        return;
    }
    const auto nodes = read_nodes();
    REQUIRE(nodes.devices() == 6212);
    const gpushare::workload usual(pods);
    CHECK(allocated_at_100(nodes, pods, gpushare::best_fit{}) == Approx(92.86).margin(0.5));
    CHECK(allocated_at_100(nodes, pods, gpushare::fragmentation_descent(usual)) == Approx(95.23).margin(0.5));
    CHECK(allocated_at_100(nodes, pods, gpushare::value_descent(nodes, usual)) > 95.7);
}
