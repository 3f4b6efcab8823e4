// SPDX-License-Identifier: Apache-2.0
#include "gradient/devices.hpp"

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>

namespace bench {

namespace {

namespace gs = gpushare;

constexpr std::uint32_t nodes = 2, ranks = 3;
constexpr std::size_t elements = 100'003;
using arrays = std::vector<std::vector<float>>;  // one array for each rank, ordered by node

arrays gradients(std::uint64_t seed) {
    std::mt19937_64 any(seed);
    std::normal_distribution<float> normal;
    arrays x(std::size_t{nodes} * ranks, std::vector<float>(elements));
    for (auto& v : x)
        for (float& one : v) one = normal(any);
    return x;
}

/// Calls f(node, transport) on a thread for each node. `transport` is the node's end of the
/// connection between nodes.
template <class F>
void on_nodes(const F& f) {
    const gs::communicator between(nodes);
    std::vector<std::jthread> threads;
    for (std::uint32_t p = 0; p < nodes; ++p)
        threads.emplace_back([&, p] {
            gs::thread_transport outer(between.rank(p));
            f(p, outer);
        });
}

arrays by_threads(const arrays& x) {
    arrays y = x;
    on_nodes([&](std::uint32_t p, gs::thread_transport& outer) {
        gs::communicator inner(ranks);
        const auto group = gs::split(inner, outer);
        std::vector<std::jthread> threads;
        for (std::uint32_t r = 0; r < ranks; ++r)
            threads.emplace_back([&, r] {
                const std::size_t mine = std::size_t{p} * ranks + r;
                (void)group.rank(r).all_reduce(std::span<const float>(x[mine]), std::span(y[mine]), gs::average{},
                                               gs::never);
            });
    });
    return y;
}

/// With `together`, each node has one device for all ranks; otherwise, each rank has a device.
arrays by_devices(const arrays& x, bool together) {
    arrays y = x;
    on_nodes([&](std::uint32_t p, gs::thread_transport& outer) {
        gs::host::node node({.devices = together ? 1 : ranks, .sms = ranks});
        const gs::communicator group(ranks);
        std::vector<gs::device_id> devices;
        std::vector<gs::host::stream> streams;
        std::vector<gs::member> members;
        std::vector<const float*> ins;
        std::vector<float*> outs;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            members.push_back(group.rank(r));
            ins.push_back(x[std::size_t{p} * ranks + r].data());
            outs.push_back(y[std::size_t{p} * ranks + r].data());
            if (together && r != 0) continue;
            devices.push_back({r});
            streams.push_back(node.make_stream(devices[r]));
        }
        gs::two_level_devices levels(node.gangs(), std::span<const gs::device_id>(devices), std::span(streams),
                                     std::span<const gs::member>(members), outer, *std::pmr::new_delete_resource(),
                                     {.chunk = gs::bytes{64 << 10}});
        (void)levels.all_reduce<float>(ins, outs, elements, gs::average{});
        for (auto& s : streams) s.record().wait(gs::never);
    });
    return y;
}

/// The fraction of all elements that are equal.
double equal_part(const arrays& a, const arrays& b) {
    std::size_t same = 0;
    for (std::size_t r = 0; r < a.size(); ++r)
        for (std::size_t i = 0; i < elements; ++i) same += a[r][i] == b[r][i] ? 1U : 0U;
    return static_cast<double>(same) / static_cast<double>(a.size() * elements);
}

arrays of_one_level(const arrays& x) {
    arrays y = x;
    for (std::size_t i = 0; i < elements; ++i) {
        float sum = x[0][i];
        for (std::size_t r = 1; r < x.size(); ++r) sum += x[r][i];
        for (auto& v : y) v[i] = sum / static_cast<float>(x.size());
    }
    return y;
}

}  // namespace

void gradients_on_devices(report& r) {
    std::vector<double> equal;
    double planted = 1;
    for (const bool together : {false, true}) {
        const arrays x = gradients(together ? 1 : 2), expected = by_threads(x);
        equal.push_back(equal_part(by_devices(x, together), expected));
        planted = equal_part(of_one_level(x), expected);
    }
    r.figure("gradient.two_level_device_equal", equal, "", {at_least(1), planted, "the sums of one level"},
             statistic::least);
}

}  // namespace bench
