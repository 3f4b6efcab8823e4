// SPDX-License-Identifier: Apache-2.0
// A program with the umbrella of placement/ alone: a request gets the node that it fits best.
#include <gpushare/placement/all.hpp>

int main() {
    using namespace gpushare::literals;
    gpushare::cluster nodes;
    nodes.add({.cpu_milli = 96'000, .memory = 384_GiB, .devices = 8, .device_memory = 80_GiB});
    nodes.add({.cpu_milli = 96'000, .memory = 384_GiB, .devices = 1, .device_memory = 80_GiB});
    gpushare::placement_request request;
    request.cpu_milli = 1000;
    request.devices = 1;
    const auto best = gpushare::choose(gpushare::best_fit{}, nodes, request);
    if (!best) return 1;
    nodes.apply(*best);
    return best->node == gpushare::node_id{1} ? 0 : 1;
}
