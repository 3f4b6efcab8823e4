// SPDX-License-Identifier: Apache-2.0
// The concept of a placement policy: it rates one node for one request. `choose` asks it about every node on which the
// request fits and takes the lowest cost; `indexed_cluster` gives the same answers without asking about every node.
//
//   struct emptiest {
//       gpushare::rating rate(const gpushare::node_view& n, const gpushare::placement_request& r) const {
//           return {-double(n.permille()), gpushare::tightest_devices(n, r)};    // permille(): of free device time
//       }
//   };
//   auto p = gpushare::choose(emptiest{}, cluster, request);
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string_view>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A policy's rating of a node: its cost, and the devices that the policy would take.
struct rating {
    /// lower is better. Not a number counts as the highest of all numbers, and an infinite cost as the nearest number
    double cost = std::numeric_limits<double>::infinity();
    device_set devices{};  ///< as many as the request wants
};

/// Rates a node on which the request fits, with a finite cost and as many fitting devices as the request wants. It
/// can't refuse and doesn't see other nodes, so a request that fits somewhere is placed.
template <class P>
concept placement_policy = requires(P& policy, const node_view& n, const placement_request& r) {
    { policy.rate(n, r) } -> std::same_as<rating>;
};

/// The rating depends on the node and the request alone: asked twice, it answers the same.
template <class P>
concept stable_placement_policy = placement_policy<const P>;

/// And not on which node it is: a policy with `static constexpr bool by_state = true` rates nodes
/// alike that are of the same description and have the same free, so that one of them has to be
/// rated.
template <class P>
concept rates_by_state = stable_placement_policy<P> && P::by_state;

/// The fitting devices with the least free share; ties by least free memory, then by lowest id.
[[nodiscard]] inline device_set tightest_devices(const node_view& n, const placement_request& r) noexcept {
    device_set taken;
    for (std::uint32_t i = 0; i < r.devices; ++i) {
        std::optional<device_id> best;
        for (std::uint32_t d = 0; d < n.devices.size(); ++d) {
            if (taken.contains({d}) || !fits(r, n.devices[d])) continue;
            if (!best || n.devices[d] < n.devices[best->index]) best = device_id{d};
        }
        if (!best) break;
        taken.add(*best);
    }
    return taken;
}

namespace detail {

/// Throws operation_error (invalid_specification) for a number that isn't from `least` to `most`, or none at all.
inline void check_number(double value, double least, double most, std::string_view what) {
    if (value >= least && value <= most) return;
    message m;
    std::array<char, 32> text{};
    (void)std::snprintf(text.data(), text.size(), "%g", value);
    m.add(what, " is ", std::string_view(text.data()), ", which is no use there");
    throw operation_error(failure{errc::invalid_specification}, {}, m);
}

/// The policy's rating, made safe: its cost is a number, and the request fits on its devices. Any
/// request that fits is placed, whatever a policy says.
template <class P>
[[nodiscard]] rating rated(P& policy, const node_view& n, const placement_request& r) {
    constexpr double most = std::numeric_limits<double>::max();
    rating here = policy.rate(n, r);
    if (!(here.cost < most)) here.cost = most;  // not a number, too
    if (here.cost < -most) here.cost = -most;
    std::uint32_t fitting = 0;
    for (const auto d : here.devices) fitting += d.index < n.devices.size() && fits(r, n.devices[d.index]) ? 1U : 0U;
    if (fitting != r.devices || here.devices.size() != r.devices) here.devices = tightest_devices(n, r);
    return here;
}

}  // namespace detail

/// The placement with the lowest cost (ties: the lowest node id); none if the request fits nowhere. Looks at every
/// node.
template <class P>
requires placement_policy<P>
[[nodiscard]] std::optional<placement> choose(P&& policy, const cluster& c, const placement_request& r) {
    rating best;
    std::optional<placement> chosen;
    for (std::uint32_t i = 0; i < c.size(); ++i) {
        const node_id id{i};
        if (!c.fits(r, id)) continue;
        const rating here = detail::rated(policy, c[id], r);
        if (chosen && here.cost >= best.cost) continue;
        best = here;
        chosen = placement{r, id, here.devices};
    }
    return chosen;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
