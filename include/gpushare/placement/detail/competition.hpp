// SPDX-License-Identifier: Apache-2.0
// What a request that waits could have of each node, and whether a placement takes some of that away from it.
//
//   const detail::competition waits(cluster, request.members, request.on);
//   if (waits.harmed_by(p)) ...                  // p delays it: on a node where it could go, p takes what it then lacks
//   cluster left = cluster;   waits.keep(left);  // what others may have without delaying it
//
// A placement harms who waits only where it takes what is short for them. A resource of which enough is left beside the
// placement is in nobody's way, and neither is a device if enough others are free for them. A gang is taken to want all of its
// members' needs on each node where one of them could go.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// For one request that waits. Refers to all of its arguments.
class competition {
public:
    competition(const cluster& c, std::span<const placement_request> members, device_set on) noexcept
        : cluster_(c), members_(members), on_(on) {}

    /// Whether it could wait longer for that placement, which fits.
    [[nodiscard]] bool harmed_by(const placement& p) const noexcept {
        const wants w = on_node(p.node);
        if (!w.any) return false;
        if (in_the_way(p.request)) return true;
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

    /// Takes of `left`, which is the cluster, what is kept for it, so that no placement there harms it; `by`: who is to be placed
    /// there.
    void keep(cluster& left, std::span<const placement_request> by) const {
        const bool apart = std::ranges::any_of(by, [&](const placement_request& r) { return in_the_way(r); });
        for (std::uint32_t i = 0; i < cluster_.size(); ++i) {
            const wants w = on_node({i});
            if (!w.any) continue;
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
        std::uint32_t devices = 0;                     // of all members
        std::uint32_t permille = 0, all_permille = 0;  // the most that one wants of a device; all of them together
        bytes device_memory{}, all_memory{};           // likewise
        device_set usable{};
    };

    // Whether so much less of what is free there leaves less than is wanted.
    [[nodiscard]] static bool takes(std::uint64_t n, std::uint64_t free, std::uint64_t wanted) noexcept {
        return n != 0 && wanted != 0 && free - std::min(n, free) < wanted;
    }

    [[nodiscard]] wants on_node(node_id id) const noexcept {
        wants w;
        for (const placement_request& m : members_) {
            if (!cluster_.could_fit(m, id, on_) || !may_be_near(m, id)) continue;
            w.any = true;
            w.cpu_milli += m.cpu_milli;
            w.memory += m.memory;
            w.devices += m.devices;
            if (m.devices == 0) continue;
            w.permille = std::max(w.permille, m.each.permille());
            w.all_permille = std::min(w.all_permille + m.each.permille(), share::whole().permille());
            w.device_memory = std::max(w.device_memory, m.device_memory);
            w.all_memory += m.device_memory;
            for (std::uint32_t d = 0; d < cluster_[id].devices.size(); ++d)
                if ((on_.empty() || on_.contains({d})) && cluster_.could_serve(m, id, {d})) w.usable.add({d});
        }
        return w;
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
        if (served(w, left[id], as_is) >= w.devices) {  // some of them, and the others are anybody's
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
