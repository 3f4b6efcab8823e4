// SPDX-License-Identifier: Apache-2.0
// Small clusters, and requests that often don't fit, for property tests.
//
//   support::random any(seed);
//   auto c = random_cluster(any, 5);   auto r = random_request(any);
#pragma once

#include <cstdint>
#include <vector>

#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>

#include "support/random.hpp"

inline gpushare::cluster random_cluster(support::random& any, std::size_t nodes) {
    using namespace gpushare::literals;
    gpushare::cluster c;
    for (std::size_t i = 0; i < nodes; ++i)
        c.add({.cpu_milli = 4'000 * (1 + any.below(8)),
               .memory = 8_GiB * (1 + any.below(8)),
               .devices = static_cast<std::uint32_t>(any.below(5)),
               .model = {static_cast<std::uint8_t>(any.below(3))},
               .device_memory = 16_GiB});
    return c;
}

inline gpushare::placement_request random_request(support::random& any) {
    using namespace gpushare::literals;
    gpushare::placement_request r{.cpu_milli = 1'000 * any.below(9),
                                  .memory = 1_GiB * any.below(17),
                                  .devices = static_cast<std::uint32_t>(any.below(4))};
    if (r.devices != 0) {
        r.each = any.one_in(2) ? gpushare::share::whole() : gpushare::share::of_permille(50 * (1 + any.below(19)));
        r.device_memory = 1_GiB * any.below(9);
        if (any.one_in(4)) r.models.add({static_cast<std::uint8_t>(any.below(3))});
    }
    return r;
}

inline gpushare::placement_request with_labels(gpushare::placement_request r, support::random& any) {
    const auto label = [&] {
        return gpushare::label{static_cast<std::uint32_t>(any.one_in(2) ? 0 : 1 + any.below(3))};
    };
    r.group = label();
    r.near = label();
    r.apart = label();
    return r;
}

inline std::vector<gpushare::placement_request> random_requests(support::random& any, std::size_t kinds,
                                                                std::size_t count) {
    std::vector<gpushare::placement_request> some, all;
    for (std::size_t i = 0; i < kinds; ++i) some.push_back(random_request(any));
    for (std::size_t i = 0; i < count; ++i) all.push_back(any.of(some));
    return all;
}
