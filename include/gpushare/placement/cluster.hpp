// SPDX-License-Identifier: Apache-2.0
// A cluster: nodes with cores, memory and devices, and what is free on them after all placements. A plain value, with
// no clock and no lock: copy it to plan, compare it to check. The devices of one process are a cluster of one node.
//
//   gpushare::cluster c;
//   c.add({.cpu_milli = 96'000, .memory = 384_GiB, .devices = 8, .device_memory = 80_GiB});
//   c.apply(p);                // whole or not at all
//   c.release(p);              // exactly undoes it
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/labels.hpp>
#include <gpushare/placement/node_view.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Whether one device has room for its part of the request.
[[nodiscard]] constexpr bool fits(const placement_request& r, const free_device& d) noexcept {
    return d.permille >= r.each.permille() && d.memory >= r.device_memory;
}

/// Nodes, and what is free on them. A value; not thread-safe.
class cluster {
public:
    /// Adds an empty node. Throws operation_error (invalid_specification) for more than 64 devices or a model above 63.
    node_id add(const node_description& d) {
        if (d.devices > device_set::capacity || d.model.index >= device_model::count)
            raise({errc::invalid_specification, d.devices, device_set::capacity, device_set::capacity}, {},
                  "a node has at most 64 devices, of a model from 0 to 63");
        const auto first = devices_.size();
        devices_.resize(first + d.devices, free_device{share::whole().permille(), d.device_memory});
        try {
            nodes_.push_back({d, d.cpu_milli, d.memory, first, {}});
        } catch (...) {
            devices_.resize(first);
            throw;
        }
        capacity_permille_ += std::uint64_t{d.devices} * share::whole().permille();
        return {static_cast<std::uint32_t>(nodes_.size() - 1)};
    }

    /// How many nodes there are.
    [[nodiscard]] std::size_t size() const noexcept { return nodes_.size(); }
    /// How many devices all nodes have.
    [[nodiscard]] std::size_t devices() const noexcept { return devices_.size(); }
    /// Device time of all nodes, in thousandths of a device.
    [[nodiscard]] std::uint64_t capacity_permille() const noexcept { return capacity_permille_; }
    /// Device time that is placed.
    [[nodiscard]] std::uint64_t placed_permille() const noexcept { return placed_permille_; }

    /// Whether a placed request on any node carries the label.
    [[nodiscard]] bool carries(label group) const noexcept { return all_labels_[group].carried != 0; }

    /// What is free on a node, which must be one of the cluster's.
    [[nodiscard]] node_view operator[](node_id id) const noexcept {
        const state& n = nodes_[id.index];
        return {id, n.whole, n.cpu_milli, n.memory, {devices_.data() + n.first_device, n.whole.devices}};
    }

    /// Whether the request fits on that node now.
    [[nodiscard]] bool fits(const placement_request& r, node_id id) const noexcept {
        return has_room(r, nodes_[id.index]) && accepts(r, nodes_[id.index]);
    }

    /// What is missing for the request as a whole; nothing if it fits somewhere. Looks at every node.
    [[nodiscard]] refusal why_not(const placement_request& r) const noexcept {
        refusal closest{shortage::nodes};
        double least = 1e9;
        for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
            const auto [gap, missing] = lacks(r, {i});
            if (gap < least) {
                least = gap;
                closest = missing;
            }
        }
        return closest;
    }

    /// Takes what the placement asks for, all of it or nothing. Says what is in the way if the placement doesn't fit
    /// any more, names a node or devices that aren't there, or not as many as its request wants.
    [[nodiscard]] refusal try_apply(const placement& p) {
        if (const auto why = check(p, true)) return why;
        take(p);
        return {};
    }
    /// As try_apply; throws operation_error.
    void apply(const placement& p) {
        if (const auto why = try_apply(p)) throw operation_error(to_errc(why.missing), {}, describe(why).c_str());
    }

    /// As apply, but doesn't check `near` and `apart`: to put released placements back in any order, and to plan with
    /// placements that don't exist at the same time.
    void restore(const placement& p) {
        if (const auto why = check(p, false)) throw operation_error(to_errc(why.missing), {}, describe(why).c_str());
        take(p);
    }

    /// Gives back what `apply` took: the cluster then equals what it was before. False, and nothing happens, if the
    /// node would have more free than it has, since then the placement wasn't applied here. The cluster doesn't
    /// remember single placements, so it notices a second release only if it would overflow.
    [[nodiscard]] bool try_release(const placement& p) noexcept {
        if (p.node.index >= nodes_.size() || p.devices.size() != p.request.devices) return false;
        state& n = nodes_[p.node.index];
        if (p.request.cpu_milli > n.whole.cpu_milli - n.cpu_milli || p.request.memory > n.whole.memory - n.memory)
            return false;
        for (const auto id : p.devices) {
            if (id.index >= n.whole.devices) return false;
            const free_device& d = devices_[n.first_device + id.index];
            if (p.request.each.permille() > share::whole().permille() - d.permille ||
                p.request.device_memory > n.whole.device_memory - d.memory)
                return false;
        }
        if (p.request.group || p.request.apart) {
            if (!n.labels.has(p.request)) return false;
            n.labels.remove(p.request);
            all_labels_.remove(p.request);
        }
        n.cpu_milli += p.request.cpu_milli;
        n.memory += p.request.memory;
        for (const auto id : p.devices) {
            free_device& d = devices_[n.first_device + id.index];
            d.permille += p.request.each.permille();
            d.memory += p.request.device_memory;
        }
        placed_permille_ -= device_permille(p.request);
        return true;
    }
    /// As try_release; throws operation_error (invalid_specification).
    void release(const placement& p) {
        if (!try_release(p))
            throw operation_error(errc::invalid_specification, {}, "release of a placement that was not applied here");
    }

    friend bool operator==(const cluster&, const cluster&) = default;

private:
    struct state {
        node_description whole{};
        std::uint64_t cpu_milli = 0;
        bytes memory{};
        std::size_t first_device = 0;
        label_counts labels{};

        friend bool operator==(const state&, const state&) = default;
    };

    [[nodiscard]] bool accepts(const placement_request& r, const state& n) const noexcept {
        if (r.apart && n.labels[r.apart].carried != 0) return false;
        if (r.group && n.labels[r.group].avoided != 0) return false;
        if (!r.near || n.labels[r.near].carried != 0) return true;
        return r.near == r.group && all_labels_[r.near].carried == 0;
    }

    [[nodiscard]] bool has_room(const placement_request& r, const state& n) const noexcept {
        if (r.cpu_milli > n.cpu_milli || r.memory > n.memory) return false;
        if (r.devices > n.whole.devices || (r.devices != 0 && !r.models.allows(n.whole.model))) return false;
        auto needed = r.devices;
        const free_device* d = devices_.data() + n.first_device;
        for (auto left = n.whole.devices; needed != 0 && left >= needed; --left, ++d)
            needed -= gpushare::fits(r, *d) ? 1U : 0U;
        return needed == 0;
    }

    void take(const placement& p) {
        state& n = nodes_[p.node.index];
        if (p.request.group || p.request.apart) {
            n.labels.reserve();  // only these two can throw
            all_labels_.reserve();
            n.labels.add(p.request);
            all_labels_.add(p.request);
        }
        n.cpu_milli -= p.request.cpu_milli;
        n.memory -= p.request.memory;
        for (const auto id : p.devices) {
            free_device& d = devices_[n.first_device + id.index];
            d.permille -= p.request.each.permille();
            d.memory -= p.request.device_memory;
        }
        placed_permille_ += device_permille(p.request);
    }

    [[nodiscard]] refusal check(const placement& p, bool affinity) const noexcept {
        if (p.node.index >= nodes_.size()) return {shortage::nodes, p.node};
        const state& n = nodes_[p.node.index];
        std::uint32_t present = 0;
        for (const auto id : p.devices) present += id.index < n.whole.devices ? 1U : 0U;
        if (present != p.request.devices || p.devices.size() != present)
            return {shortage::devices, p.node, p.request.devices, present};
        if (!has_room(p.request, n) || (affinity && !accepts(p.request, n))) return lacks(p.request, p.node).missing;
        for (const auto id : p.devices) {
            const free_device& d = devices_[n.first_device + id.index];
            if (d.permille < p.request.each.permille())
                return {shortage::device_share, p.node, p.request.each.permille(), d.permille};
            if (p.request.device_memory > d.memory)
                return {shortage::device_memory, p.node, p.request.device_memory.count(), d.memory.count()};
        }
        return {};
    }

    struct shortfall {
        double gap = 0;  // over all resources, each as the part of the request that is missing
        refusal missing{};
    };

    [[nodiscard]] shortfall lacks(const placement_request& r, node_id id) const noexcept {
        const state& n = nodes_[id.index];
        shortfall s;
        double worst = 0;
        const auto note = [&](shortage what, std::uint64_t asked, std::uint64_t left, double gap) {
            s.gap += gap;
            if (gap <= worst) return;
            worst = gap;
            s.missing = {what, id, asked, left};
        };
        const auto lack = [&](shortage what, std::uint64_t asked, std::uint64_t left) {
            if (left < asked) note(what, asked, left, static_cast<double>(asked - left) / static_cast<double>(asked));
        };
        // Rules weigh more than any amount: another node may have room, but no node changes its model.
        if (r.devices != 0 && !r.models.allows(n.whole.model)) note(shortage::model, 0, 0, 1000);
        if (!accepts(r, n)) note(shortage::affinity, 0, 0, 100);
        lack(shortage::cpu, r.cpu_milli, n.cpu_milli);
        lack(shortage::memory, r.memory.count(), n.memory.count());

        const std::span devices{devices_.data() + n.first_device, n.whole.devices};
        const auto room = [&](auto enough) {
            return static_cast<std::uint64_t>(std::ranges::count_if(devices, enough));
        };
        const auto enough_share = [&](const free_device& d) { return d.permille >= r.each.permille(); };
        const auto both = [&](const free_device& d) { return gpushare::fits(r, d); };
        const bool too_few = room(enough_share) < r.devices;
        if (too_few && (n.whole.devices < r.devices || r.each == share::whole())) {
            lack(shortage::whole_devices, r.devices, room(enough_share));
        } else if (room(both) < r.devices) {
            // What the last of the devices would have to give: the largest amount that enough of them have.
            std::uint64_t most_share = 0, most_memory = 0;
            for (const auto& d : devices) {
                if (room([&](const free_device& o) {
                        return o.permille >= d.permille && o.memory >= r.device_memory;
                    }) >= r.devices)
                    most_share = std::max<std::uint64_t>(most_share, d.permille);
                if (room([&](const free_device& o) { return o.memory >= d.memory && enough_share(o); }) >= r.devices)
                    most_memory = std::max(most_memory, d.memory.count());
            }
            if (too_few)
                lack(shortage::device_share, r.each.permille(), most_share);
            else
                lack(shortage::device_memory, r.device_memory.count(), most_memory);
        }
        return s;
    }

    std::vector<state> nodes_;
    std::vector<free_device> devices_;
    label_counts all_labels_;
    std::uint64_t capacity_permille_ = 0, placed_permille_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
