// SPDX-License-Identifier: Apache-2.0
// The library's own placement policy: put each request where the value of what is left falls least.
//
//   gpushare::value_descent policy(cluster, gpushare::workload(history));
//   if (auto p = gpushare::choose(policy, cluster, request)) cluster.apply(*p);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/bid_prices.hpp>
#include <gpushare/placement/detail/node_value.hpp>
#include <gpushare/placement/fragmentation.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/workload.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// How sought-after the places for a kind of request are: requests that a full cluster is expected to see, over those it
/// can hold if it holds nothing else. At most 1; kinds that fit nowhere have 0.
[[nodiscard]] inline std::vector<request_kind> scarcity(const cluster& c, const workload& expected) {
    const double requests =
        expected.mean_permille() > 0 ? static_cast<double>(c.capacity_permille()) / expected.mean_permille() : 0;
    std::vector<request_kind> kinds(expected.kinds().begin(), expected.kinds().end());
    for (auto& [r, weight] : kinds) {
        std::uint64_t places = 0;
        for (std::uint32_t i = 0; i < c.size() && r.devices != 0; ++i) {
            const auto& n = c[{i}].whole;
            if (!fits_empty(r, n)) continue;
            const auto on_device = r.each == share{} ? n.devices : share::whole().permille() / r.each.permille();
            std::uint64_t here = std::uint64_t{n.devices} * on_device / r.devices;
            if (r.devices > 1) here = std::uint64_t{n.devices / r.devices} * on_device;
            if (r.cpu_milli != 0) here = std::min(here, n.cpu_milli / r.cpu_milli);
            if (r.memory != bytes{}) here = std::min(here, n.memory / r.memory);
            places += here;
        }
        weight = places == 0 ? 0 : std::min(1.0, requests * weight / static_cast<double>(places));
    }
    return kinds;
}

}  // namespace detail

/// The cost of a placement is what the node can earn less at bid prices (detail/node_value.hpp): the first-order term, exact as
/// long as the requests that fill it up do come. That they may not is the second-order term: fragmentation, each kind
/// weighed by how scarce its places are, so that the few nodes which can hold the largest requests stay whole while
/// others will do. The memory of devices limits where a request fits, and has no price.
class value_descent {
public:
    /// Learns prices from what is expected on those nodes, as if they were empty: some tenths of a second.
    value_descent(const cluster& c, const workload& expected)
        : value_(c, expected), fragmentation_(detail::scarcity(c, expected)) {}

    /// By what the node can earn less.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        const double before = worth(detail::reduced_node(n));
        rating best;
        detail::for_each_choice(n, r, [&](device_set at) {
            const double cost = before - worth(detail::reduced_node(n, r, at));
            if (cost < best.cost) best = {cost, at};
        });
        return best;
    }

private:
    // How much a permille of expected fragmentation counts beside one of value. Any weight from 1/64 to 1/8 gives much
    // the same; without it, ties between equally valued nodes break up the ones that large requests need.
    static constexpr double second_order = 1.0 / 16;

    [[nodiscard]] double worth(const detail::reduced_node& n) const noexcept {
        return value_(n) - second_order * fragmentation_(n);
    }

    detail::node_value value_;
    fragmentation fragmentation_;
};

static_assert(stable_placement_policy<value_descent>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
