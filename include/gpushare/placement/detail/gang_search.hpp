// SPDX-License-Identifier: Apache-2.0
// Looks for places for all members of a gang by backtracking. Used for gangs that a greedy plan
// doesn't place, and to find out whether a gang can be placed at all.
//
//   detail::gang_search search(cluster, members, order, 2'000);
//   if (search.run([](const cluster&, const placement&) { return true; })) use(search.placements());
//   else if (search.proven()) ...      // there is no plan
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/alike_nodes.hpp>
#include <gpushare/placement/placement.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// One search. Nodes that are alike, devices with the same free capacity, and equal members are
/// tried in one order only. One step looks at one node, or at one choice of devices.
class gang_search {
public:
    /// `order` has the members' numbers in the order in which they are tried. `members` must
    /// outlive the object.
    gang_search(const cluster& c, std::span<const placement_request> members, std::vector<std::size_t> order,
                std::size_t most_steps)
        : cluster_(c), members_(members), order_(std::move(order)), steps_(most_steps), placed_(members.size()) {
        alike_.resize(order_.size());
        labels_ = std::ranges::any_of(members_, [](const placement_request& r) { return has_labels(r); });
    }

    /// Whether there is a plan in which `allowed(cluster, placement)` admits each placement; the
    /// cluster already has the earlier placements. With `any_device`, `allowed` may distinguish
    /// devices with the same free capacity.
    template <class Allowed>
    [[nodiscard]] bool run(Allowed allowed, bool any_device = false) {
        distinct_ = any_device;
        return place(0, allowed);
    }
    /// After run() has returned false: whether no plan exists. Otherwise the steps didn't suffice.
    [[nodiscard]] bool proven() const noexcept { return steps_ != 0; }
    /// After run() has returned true: one placement for each member.
    [[nodiscard]] std::vector<placement> placements() && { return std::move(placed_); }

private:
    [[nodiscard]] bool step() noexcept { return steps_ != 0 && --steps_ != 0; }

    template <class Allowed>
    bool place(std::size_t depth, Allowed& allowed) {
        if (depth == order_.size()) return true;
        const placement_request& r = members_[order_[depth]];
        const placement* const twin =
            depth != 0 && members_[order_[depth - 1]] == r ? &placed_[order_[depth - 1]] : nullptr;
        const bool skips = !labels_ && !distinct_;
        if (skips) alike_[depth].clear(cluster_.size());
        for (std::uint32_t i = twin != nullptr ? twin->node.index : 0; i < cluster_.size(); ++i) {
            if (!step()) return false;
            if (!cluster_.fits(r, {i})) continue;
            if (skips && alike_[depth].first_like(cluster_, {i}).index != i) continue;
            if (choose_devices(depth, {r, {i}, {}}, 0, allowed)) return true;
        }
        return false;
    }

    // Adds devices from number `d` on, in all ways that make a difference.
    template <class Allowed>
    bool choose_devices(std::size_t depth, placement p, std::uint32_t d, Allowed& allowed) {
        if (p.devices.size() == p.request.devices) return attempt(depth, p, allowed);
        const auto count = static_cast<std::uint32_t>(cluster_[p.node].devices.size());
        for (; d < count && steps_ != 0; ++d) {
            if (!fits(p.request, cluster_[p.node].devices[d]) || is_like_skipped(p, d)) continue;
            placement with = p;
            with.devices.add({d});
            if (choose_devices(depth, with, d + 1, allowed)) return true;
        }
        return false;
    }

    // Whether an earlier device that isn't taken is the same choice.
    [[nodiscard]] bool is_like_skipped(const placement& p, std::uint32_t d) const noexcept {
        if (distinct_) return false;
        const auto devices = cluster_[p.node].devices;
        for (std::uint32_t before = 0; before < d; ++before)
            if (!p.devices.contains({before}) && devices[before] == devices[d]) return true;
        return false;
    }

    template <class Allowed>
    bool attempt(std::size_t depth, const placement& p, Allowed& allowed) {
        if (!step() || !allowed(std::as_const(cluster_), p) || cluster_.try_apply(p)) return false;
        placed_[order_[depth]] = p;
        if (place(depth + 1, allowed)) return true;
        cluster_.release(p);
        return false;
    }

    cluster cluster_;
    std::span<const placement_request> members_;
    std::vector<std::size_t> order_;
    std::size_t steps_;
    std::vector<placement> placed_;
    std::vector<alike_nodes> alike_;  // one for each depth, because the nodes change between depths
    bool labels_ = false, distinct_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
