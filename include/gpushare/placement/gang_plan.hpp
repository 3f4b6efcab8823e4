// SPDX-License-Identifier: Apache-2.0
// Gang admission: several requests are placed together or not at all. The plan is a value, to be inspected before it is
// applied.
//
//   auto plan = gpushare::plan_gang(policy, cluster, workers);
//   if (plan) gpushare::apply_gang(cluster, *plan.placements);
//   else log(plan.member, gpushare::describe(plan.why));      // the member that lacks something, and why
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/gang_search.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A placement for each member, in the order of the requests; or the first member, in the order in which they were
/// tried, that found no place beside those before it.
struct gang_plan {
    std::optional<std::vector<placement>> placements{};  ///< one for each member; none if one has no place
    std::size_t member = 0;                              ///< the one that has no place
    refusal why{};                                       ///< what it lacks
    bool proven = false;  ///< where there are none: no plan is possible; else none was found in `most_steps`

    /// Whether all have a place.
    [[nodiscard]] explicit operator bool() const noexcept { return placements.has_value(); }
};

/// Whether one of the members carries that label.
[[nodiscard]] inline bool carried_in(std::span<const placement_request> members, label group) noexcept {
    return std::ranges::find(members, group, &placement_request::group) != members.end();
}

namespace detail {

/// The largest first: most devices, then most device time, then most of the host; equal ones in the
/// order given; after them those that want to be near another member.
[[nodiscard]] inline std::vector<std::size_t> order_of_placing(std::span<const placement_request> members) {
    std::vector<std::size_t> order(members.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
        const auto rank = [&](std::size_t i) {
            const placement_request& r = members[i];
            const bool leads = !r.near || r.near == r.group || !carried_in(members, r.near);
            return std::tuple(leads, r.devices, device_permille(r), r.device_memory, r.cpu_milli, r.memory);
        };
        return rank(a) > rank(b);
    });
    return order;
}

/// A member that has no place even alone, labels aside: then there is none for all of them.
[[nodiscard]] inline std::optional<gang_plan> lonely_member(const cluster& c,
                                                            std::span<const placement_request> members) {
    for (std::size_t i = 0; i < members.size(); ++i) {
        placement_request alone = members[i];
        alone.group = alone.near = alone.apart = {};
        if (const auto why = c.why_not(alone)) return gang_plan{.member = i, .why = why, .proven = true};
    }
    return std::nullopt;
}

}  // namespace detail

/// The steps that plan_gang() takes at most after the greedy plan: some hundred microseconds.
inline constexpr std::size_t gang_steps = 2'000;

/// Plans the largest members first, then members that want to be near another one: the policy
/// places each beside those before it. If this leaves a member without a place, all ways to place
/// them are tried, within `most_steps` nodes or choices of devices. So a gang of a few members on
/// some tens of nodes is placed if it fits.
template <class P>
requires placement_policy<P>
[[nodiscard]] gang_plan plan_gang(P&& policy, const cluster& c, std::span<const placement_request> members,
                                  std::size_t most_steps = gang_steps) {
    auto order = detail::order_of_placing(members);
    gang_plan plan{.placements = std::vector<placement>(members.size())};
    cluster after = c;
    for (const auto i : order) {
        const auto p = choose(policy, after, members[i]);
        if (!p) {
            plan = {.member = i, .why = after.why_not(members[i]), .proven = members.size() == 1};
            break;
        }
        after.apply(*p);
        (*plan.placements)[i] = *p;
    }
    if (plan || plan.proven) return plan;
    if (auto alone = detail::lonely_member(c, members)) return *std::move(alone);
    detail::gang_search search(c, members, std::move(order), most_steps);
    if (search.run([](const cluster&, const placement&) { return true; }))
        plan = {.placements = std::move(search).placements()};
    else
        plan.proven = search.proven();
    return plan;
}

/// Applies all or nothing, and says what is in the way if the cluster has changed since the plan was made.
[[nodiscard]] inline refusal try_apply_gang(cluster& c, std::span<const placement> gang) {
    // In the order in which they were planned: who wants to be near another member comes after it.
    // Labels can throw, so what is there is undone in the reverse order.
    std::vector<placement_request> members;
    for (const auto& p : gang) members.push_back(p.request);
    const auto order = detail::order_of_placing(members);
    std::size_t done = 0;
    const auto undo = [&] {
        while (done != 0) (void)c.try_release(gang[order[--done]]);
    };
    try {
        for (; done < gang.size(); ++done) {
            if (const auto why = c.try_apply(gang[order[done]])) {
                undo();
                return why;
            }
        }
    } catch (...) {
        undo();
        throw;
    }
    return {};
}
/// As try_apply_gang; throws operation_error.
inline void apply_gang(cluster& c, std::span<const placement> gang) {
    if (const auto why = try_apply_gang(c, gang))
        throw operation_error(to_errc(why.missing), {}, describe(why).c_str());
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
