// SPDX-License-Identifier: Apache-2.0
// Computes the capacity that a waiting request could use on each node, and whether a placement
// takes some of that capacity away.
//
//   const detail::competition waits(cluster, request.members, request.on);
//   // p delays the request: where the request could go, p takes capacity that it then lacks
//   if (waits.harmed_by(p)) ...
//   // the capacity that others may have without delaying the request
//   cluster left = cluster;   waits.keep(left);
//
// A placement harms a waiting request only if it takes a resource that is short for that request.
// If enough of each resource, and enough free devices, are left alongside the placement, it doesn't
// harm the request. Of a gang, only those members count that could be on the placement's node at
// once if the node were empty. Some members share no node with the gang's other members. If all of
// them fit now alongside the placement, they wait for nothing there, and leave that capacity to
// other requests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The competition for one waiting request. Refers to all of its arguments.
class competition {
public:
    competition(const cluster& c, std::span<const placement_request> members, device_set on) noexcept
        : cluster_(c), members_(members), on_(on) {}

    /// Whether the request could wait longer because of that placement, which must fit.
    [[nodiscard]] bool harmed_by(const placement& p) const {
        const wants w = on_node(p.node);
        if (!w.any) return false;
        if (in_the_way(p.request)) return true;
        return takes_wanted(p, w) && !fit_beside(p);
    }

    /// Takes the capacity that is kept for this request out of `left`, a copy of the cluster, so
    /// that no placement there harms the request. `by` has the requests to be placed there.
    /// `shares` says whether these requests want the same device time as this request.
    void keep(cluster& left, std::span<const placement_request> by, bool shares = true) const {
        const bool apart = std::ranges::any_of(by, [&](const placement_request& r) { return in_the_way(r); });
        for (std::uint32_t i = 0; i < cluster_.size(); ++i) {
            wants w = on_node({i});
            if (!w.any) continue;
            if (!shares) w.permille = w.all_permille = 0;
            if (apart) {
                left.drain({i});
                continue;
            }
            left.hold({{.cpu_milli = std::min(w.cpu_milli, left[{i}].cpu_milli),
                        .memory = std::min(w.memory, left[{i}].memory)},
                       {i},
                       {}});
            keep_devices(left, {i}, w);
        }
    }

private:
    struct wants {
        bool any = false;
        std::uint64_t cpu_milli = 0;
        bytes memory{};
        std::uint32_t devices = 0;  // of all members that could be there at once
        // On one device: the largest share of a member, and the sum over all members.
        std::uint32_t permille = 0, all_permille = 0;
        bytes device_memory{}, all_memory{};  // the same for memory
        device_set usable{};
    };
    // The needs of each member that could be on a node.
    struct needs {
        std::vector<std::uint64_t> cpu_milli, memory, devices, permille, device_memory, time, all_memory;

        void add(const placement_request& m) {
            cpu_milli.push_back(m.cpu_milli);
            memory.push_back(m.memory.count());
            devices.push_back(m.devices);
            permille.push_back(m.devices != 0 ? m.each.permille() : 0);
            device_memory.push_back(m.devices != 0 ? m.device_memory.count() : 0);
            time.push_back(device_permille(m));
            all_memory.push_back(m.devices * m.device_memory.count());
        }
        // How many members fit into the whole at most. For each resource, this counts the smallest
        // members.
        [[nodiscard]] static std::size_t most_in(std::vector<std::uint64_t>& each, std::uint64_t whole) {
            std::ranges::sort(each);
            std::size_t n = 0;
            for (std::uint64_t sum = 0; n < each.size() && each[n] <= whole - sum; ++n) sum += each[n];
            return n;
        }
        [[nodiscard]] static std::uint64_t largest(std::vector<std::uint64_t>& each, std::size_t n) {
            std::ranges::sort(each, std::greater<>());
            return std::accumulate(each.begin(), each.begin() + static_cast<std::ptrdiff_t>(n), std::uint64_t{0});
        }
    };

    [[nodiscard]] bool takes_wanted(const placement& p, const wants& w) const noexcept {
        const node_view n = cluster_[p.node];
        if (takes(p.request.cpu_milli, n.cpu_milli, w.cpu_milli)) return true;
        if (takes(p.request.memory.count(), n.memory.count(), w.memory.count())) return true;
        const auto after = [&](std::uint32_t d) {
            const bool here = p.devices.contains({d});
            free_device left = n.devices[d];
            left.permille -= here ? std::min(left.permille, p.request.each.permille()) : 0;
            left.memory -= here ? p.request.device_memory : bytes{};
            return left;
        };
        if (served(w, n, after) >= w.devices) return false;
        return std::ranges::any_of(p.devices, [&](device_id d) {
            return w.usable.contains(d) &&
                   (takes(p.request.each.permille(), n.devices[d.index].permille, w.all_permille) ||
                    takes(p.request.device_memory.count(), n.devices[d.index].memory.count(), w.all_memory.count()));
        });
    }

    // Whether taking `n` leaves less free capacity than the wanted amount.
    [[nodiscard]] static bool takes(std::uint64_t n, std::uint64_t free, std::uint64_t wanted) noexcept {
        return n != 0 && wanted != 0 && free - std::min(n, free) < wanted;
    }

    // The wants of the members that could be on that node at once: as many members as fit into the
    // whole node.
    [[nodiscard]] wants on_node(node_id id) const {
        wants w;
        if (members_.size() == 1) {
            if (goes_to(members_.front(), id)) want_alone(w, members_.front(), id);
            return w;
        }
        needs all;
        for (const placement_request& m : members_) {
            if (!goes_to(m, id)) continue;
            all.add(m);
            want_alone(w, m, id);
        }
        if (!w.any) return w;
        const node_description whole = cluster_.there(id);
        const auto devices = std::uint64_t{w.usable.size()};
        const std::size_t n =
            std::min({needs::most_in(all.cpu_milli, whole.cpu_milli), needs::most_in(all.memory, whole.memory.count()),
                      needs::most_in(all.time, devices * share::whole().permille()),
                      needs::most_in(all.all_memory, devices * whole.device_memory.count())});
        w.cpu_milli = needs::largest(all.cpu_milli, n);
        w.memory = bytes{needs::largest(all.memory, n)};
        w.devices = static_cast<std::uint32_t>(needs::largest(all.devices, n));
        w.all_permille = static_cast<std::uint32_t>(
            std::min<std::uint64_t>(needs::largest(all.permille, n), share::whole().permille()));
        w.all_memory = bytes{needs::largest(all.device_memory, n)};
        return w;
    }
    void want_alone(wants& w, const placement_request& m, node_id id) const noexcept {
        w.any = true;
        w.cpu_milli = m.cpu_milli;
        w.memory = m.memory;
        w.devices = m.devices;
        if (m.devices == 0) return;
        w.permille = std::max(w.permille, m.each.permille());
        w.all_permille = w.permille;
        w.device_memory = std::max(w.device_memory, m.device_memory);
        w.all_memory = w.device_memory;
        for (std::uint32_t d = 0; d < cluster_[id].devices.size(); ++d)
            if ((on_.empty() || on_.contains({d})) && cluster_.could_serve(m, id, {d})) w.usable.add({d});
    }
    [[nodiscard]] bool goes_to(const placement_request& m, node_id id) const noexcept {
        return cluster_.could_fit(m, id, on_) && may_be_near(m, id);
    }

    // Whether all members that could be on that node, and the members that share other nodes with
    // them, have places now alongside the placement. If so, they don't wait for any departure.
    [[nodiscard]] bool fit_beside(const placement& p) const {
        if (members_.size() == 1 || !on_.empty() || std::ranges::any_of(members_, has_labels)) return false;
        const std::vector<std::size_t> all = together_with(p.node);
        for (const auto i : all)
            if (cluster_.why_not(members_[i])) return false;  // the usual case, without a copy
        cluster after = cluster_;
        after.hold(p);
        return std::ranges::all_of(all, [&](std::size_t i) { return place_first(after, members_[i]); });
    }
    [[nodiscard]] static bool place_first(cluster& c, const placement_request& m) {
        for (std::uint32_t i = 0; i < c.size(); ++i) {
            if (!c.fits(m, {i})) continue;
            placement p{m, {i}, {}};
            for (std::uint32_t d = 0; p.devices.size() < m.devices; ++d)
                if (fits(m, c[{i}].devices[d])) p.devices.add({d});
            c.hold(p);
            return true;
        }
        return false;
    }
    // The members that could be on that node, the members that could be on nodes where those could
    // be, and so on.
    [[nodiscard]] std::vector<std::size_t> together_with(node_id id) const {
        std::vector<std::size_t> all;
        std::vector<bool> is_in(members_.size());
        const auto join = [&](node_id at) {
            for (std::size_t i = 0; i < members_.size(); ++i)
                if (!is_in[i] && goes_to(members_[i], at)) is_in[i] = true, all.push_back(i);
        };
        join(id);
        for (std::size_t next = 0; next < all.size() && all.size() < members_.size(); ++next)
            for (std::uint32_t i = 0; i < cluster_.size(); ++i)
                if (goes_to(members_[all[next]], {i})) join({i});
        return all;
    }
    [[nodiscard]] bool may_be_near(const placement_request& m, node_id id) const noexcept {
        return !m.near || cluster_.carries(m.near, id) || (m.near == m.group && !cluster_.carries(m.near)) ||
               std::ranges::find(members_, m.near, &placement_request::group) != members_.end();
    }
    [[nodiscard]] bool in_the_way(const placement_request& r) const noexcept {
        return std::ranges::any_of(members_, [&](const placement_request& m) {
            return (m.apart && r.group == m.apart) || (m.group && r.apart == m.group);
        });
    }

    template <class After>
    [[nodiscard]] static std::uint32_t served(const wants& w, const node_view& n, After after) noexcept {
        std::uint32_t count = 0;
        for (const auto d : w.usable) {
            const free_device left = after(d.index);
            if (left.open && left.permille >= w.permille && left.memory >= w.device_memory) ++count;
        }
        return n.devices.empty() ? 0 : count;
    }

    static void keep_devices(cluster& left, node_id id, const wants& w) {
        const auto as_is = [&](std::uint32_t d) { return left[id].devices[d]; };
        device_set kept = w.usable;
        // some devices suffice; other requests may have the rest
        if (served(w, left[id], as_is) >= w.devices) {
            kept = {};
            while (kept.size() < w.devices) {
                std::uint32_t best = device_set::capacity;
                for (const auto d : w.usable) {
                    const free_device f = as_is(d.index);
                    if (kept.contains(d) || !f.open || f.permille < w.permille || f.memory < w.device_memory) continue;
                    if (best == device_set::capacity || f < as_is(best)) best = d.index;
                }
                kept.add({best});
            }
        }
        const bool all = kept == w.usable;
        for (const auto d : kept) {
            const free_device f = as_is(d.index);
            left.hold({{.devices = 1,
                        .each = share::of_permille(std::min(all ? w.all_permille : w.permille, f.permille)),
                        .device_memory = std::min(all ? w.all_memory : w.device_memory, f.memory)},
                       id,
                       {d}});
        }
    }

    const cluster& cluster_;
    std::span<const placement_request> members_;
    device_set on_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
