// SPDX-License-Identifier: Apache-2.0
// The library's own placement policy. It gives each node a value, what the node can still earn from expected requests,
// and places a request where that value falls least.
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

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// The scarcity of places for each kind of request: the number of requests of the kind that a full cluster is expected
/// to see, over the number that it could hold of that kind alone. At most 1; 0 for kinds that fit nowhere.
[[nodiscard]] inline std::vector<request_kind> scarcity(const cluster& c, const workload& expected) {
    const double requests =
        expected.mean_permille() > 0 ? static_cast<double>(c.capacity_permille()) / expected.mean_permille() : 0;
    std::vector<request_kind> kinds(expected.kinds().begin(), expected.kinds().end());
    for (auto& [r, weight] : kinds) {
        std::uint64_t places = 0;
        for (std::uint32_t i = 0; i < c.size() && r.devices != 0; ++i) {
            const auto n = c.there({i});
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

/// The tuned parameters of `value_descent`. Half or twice of each changes little on lists that it
/// wasn't tuned on (docs/placement.md), so there is seldom a reason to set one.
struct value_descent_options {
    /// How much a permille of expected fragmentation counts against one of value. With 0, ties between equally valued
    /// nodes may break up the nodes that large requests need. From 0 to 1'000.
    double fragmentation_weight = 1.0 / 16;
    /// Rounds of the search for prices: more take longer and find more exact prices.
    std::size_t rounds = 150;
    /// The fraction by which prices change in the first round; later rounds change them less. From 0 to 1.
    double first_step = 0.5;
};

/// The cost of a placement has two terms. The first is the node's loss of value: how much less it can still earn at bid
/// prices (detail/node_value.hpp). It is exact if the requests that fill the node do come. Since they may not, the
/// second term is fragmentation, each kind weighted by the scarcity of its places; it keeps the few nodes that can hold
/// the largest requests whole while others will do. Device memory limits where a request fits, and has no price.
class value_descent {
public:
    /// See rates_by_state.
    static constexpr bool by_state = true;

    /// Learns prices from what is expected on those nodes, as if they were empty: some tenths of a second. Throws
    /// operation_error (invalid_specification) for an option out of its range, or that is no number.
    value_descent(const cluster& c, const workload& expected, const value_descent_options& o = {})
        : value_(expected, detail::bid_prices(c, expected, checked(o).rounds, o.first_step)),
          fragmentation_(detail::scarcity(c, expected)),
          fragmentation_weight_(o.fragmentation_weight) {}

    /// Rates by the two terms.
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
    [[nodiscard]] static const value_descent_options& checked(const value_descent_options& o) {
        detail::check_number(o.fragmentation_weight, 0, 1'000, "value_descent_options::fragmentation_weight");
        detail::check_number(o.first_step, 0, 1, "value_descent_options::first_step");
        return o;
    }
    [[nodiscard]] double worth(const detail::reduced_node& n) const noexcept {
        return value_(n) - fragmentation_weight_ * fragmentation_(n);
    }

    detail::node_value value_;
    fragmentation fragmentation_;
    double fragmentation_weight_;
};

static_assert(rates_by_state<value_descent>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
