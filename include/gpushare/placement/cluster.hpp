// SPDX-License-Identifier: Apache-2.0
// A cluster: nodes with cores, memory and devices, and the capacity that all placements leave free
// on them. A plain value, without a clock or a lock: copy the cluster to plan, and compare clusters
// to check. The devices of one process are a cluster of one node.
//
//   gpushare::cluster c;
//   c.add({.cpu_milli = 96'000, .memory = 384_GiB, .devices = 8, .device_memory = 80_GiB});
//   c.apply(p);                // whole or not at all
//   c.release(p);              // exactly undoes it
//
// Nodes and devices come and go. `drain` admits no new placement, and existing placements stay;
// `resume` ends a drain. `remove` is permanent. It also works for a lost device in use, whose
// placement is released like any other. Ids don't change.
//
//   c.drain({3});     ...     if (nobody_is_there) c.remove({3});
//
// Labels express affinity and anti-affinity. A request carries a label (`group`), and wants a node
// that has a label (`near`) or doesn't have one (`apart`). A cluster counts labels by label_counts:
// one for each node, and one for the whole cluster:
//
//   gpushare::label_counts on_node;
//   on_node.add(request);
//   if (on_node[other.apart].carried == 0) ...      // nothing here that `other` avoids
//   on_node.remove(request);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Counts the labels of placed requests. A value; equal contents compare equal.
class label_counts {
public:
    /// Counts the placed requests that carry a label, and those that want to be apart from it.
    struct count {
        label of{};                 ///< the label
        std::uint32_t carried = 0;  ///< placed requests that carry the label
        std::uint32_t avoided = 0;  ///< placed requests that want to be apart from the label

        friend bool operator==(const count&, const count&) = default;
    };

    /// The counts of one label.
    [[nodiscard]] count operator[](label of) const noexcept {
        const std::size_t at = place_of(of);
        return at < counts_.size() && counts_[at].of == of ? counts_[at] : count{of};
    }

    /// Records a placed request. Doesn't throw after reserve().
    void add(const placement_request& r) {
        reserve();
        if (r.group) ++counter(r.group).carried;
        if (r.apart) ++counter(r.apart).avoided;
    }
    /// Removes a placed request, whose labels must have been added.
    void remove(const placement_request& r) noexcept {
        if (r.group) --counter(r.group).carried;
        if (r.apart) --counter(r.apart).avoided;
        std::erase_if(counts_, [](const count& c) { return c.carried == 0 && c.avoided == 0; });
    }
    /// Whether remove() would find the request's labels.
    [[nodiscard]] bool has(const placement_request& r) const noexcept {
        return (!r.group || (*this)[r.group].carried != 0) && (!r.apart || (*this)[r.apart].avoided != 0);
    }

    /// Makes room, so that the next calls of add(), one by default, don't throw.
    void reserve(std::size_t calls = 1) {
        constexpr std::size_t labels_of_a_request = 2;
        const std::size_t most = calls * labels_of_a_request;
        if (counts_.capacity() - counts_.size() < most) counts_.reserve(2 * counts_.size() + most);
    }

    friend bool operator==(const label_counts&, const label_counts&) = default;

private:
    // The place of the first label that isn't smaller. Doesn't use std::ranges::lower_bound,
    // because including it costs as much as one of our own headers.
    [[nodiscard]] std::size_t place_of(label of) const noexcept {
        std::size_t first = 0, end = counts_.size();
        while (first < end) {
            const std::size_t middle = first + (end - first) / 2;
            if (counts_[middle].of < of)
                first = middle + 1;
            else
                end = middle;
        }
        return first;
    }
    count& counter(label of) {
        const std::size_t at = place_of(of);
        if (at < counts_.size() && counts_[at].of == of) return counts_[at];
        return *counts_.insert(counts_.begin() + static_cast<std::ptrdiff_t>(at), count{of});
    }

    std::vector<count> counts_;  // ascending
};

/// Whether one device has room for its part of the request.
[[nodiscard]] constexpr bool fits(const placement_request& r, const free_device& d) noexcept {
    return d.open && d.permille >= r.each.permille() && d.memory >= r.device_memory;
}

/// Whether the request allows a node of that zone.
[[nodiscard]] constexpr bool may_be_in(const placement_request& r, node_zone_id zone) noexcept {
    return r.zone == node_zone_id{} || r.zone == zone;
}

/// Nodes, and their free capacity. A value; not thread-safe.
class cluster {
public:
    /// Adds an empty node. Throws operation_error (invalid_specification) for more than 64 devices
    /// or a model above 63.
    node_id add(const node_description& d) {
        if (d.devices > device_set::capacity || d.model.index >= device_model::count)
            raise({errc::invalid_specification, d.devices, 0, device_set::capacity, reason::count_limit}, {},
                  "a node has at most 64 devices, of a model from 0 to 63");
        make_room(d.devices);
        nodes_.push_back({.whole = d, .cpu_milli = d.cpu_milli, .memory = d.memory, .first_device = devices_.size()});
        for (std::uint32_t i = 0; i < d.devices; ++i) {  // no statement from here on throws
            devices_.push_back({whole_permille, d.device_memory});
            extents_.push_back({.memory = d.device_memory});
        }
        there_ += d.devices;
        return {static_cast<std::uint32_t>(nodes_.size() - 1)};
    }
    /// Adds a device to a node, with the next id. Throws as add(node) does, and for a node that
    /// doesn't exist.
    device_id add(node_id id, bytes device_memory) {
        check(id);
        state& n = nodes_[id.index];
        if (n.whole.devices == device_set::capacity)
            raise({errc::invalid_specification, device_set::capacity + 1, 0, device_set::capacity, reason::count_limit},
                  {}, "devices of a node");
        make_room(1);
        const auto at = static_cast<std::ptrdiff_t>(n.first_device + n.whole.devices);
        devices_.insert(devices_.begin() + at, free_device{});
        extents_.insert(extents_.begin() + at, extent{.memory = device_memory});
        for (auto other = id.index + 1; other < nodes_.size(); ++other) ++nodes_[other].first_device;
        const device_id added{n.whole.devices++};
        ++there_;
        find_largest(n);
        return added;
    }
    /// Sets the memory of one device: for an uneven node, or after memory was taken or given back
    /// outside placements. If more is placed on the device, nothing is free there until releases
    /// have made up for the difference. Throws as drain() does.
    void resize(node_id id, device_id d, bytes device_memory) {
        check(id, d);
        extents_[nodes_[id.index].first_device + d.index].memory = device_memory;
        find_largest(nodes_[id.index]);
    }

    /// Places no new requests on the node. Existing placements stay, and count until they are
    /// released. Throws operation_error (no_device) for a node that doesn't exist.
    void drain(node_id id) { set(id, presence::drained); }
    /// Places no new requests on one device of the node. Throws operation_error (no_device) for a
    /// device that doesn't exist.
    void drain(node_id id, device_id d) { set(id, d, presence::drained); }
    /// Ends a drain. Throws as drain() does.
    void resume(node_id id) { set(id, presence::open); }
    /// Ends a drain. Throws as drain() does.
    void resume(node_id id, device_id d) { set(id, d, presence::open); }
    /// Removes the node permanently. Its capacity no longer counts, and its id is never used again.
    /// Its placements can be released; no other operation is possible. Throws as drain() does.
    void remove(node_id id) { set(id, presence::gone); }
    /// Removes one device of the node permanently.
    void remove(node_id id, device_id d) { set(id, d, presence::gone); }

    /// The number of nodes, including removed nodes. All ids are below this number.
    [[nodiscard]] std::size_t size() const noexcept { return nodes_.size(); }
    /// The number of devices of all nodes, without removed devices.
    [[nodiscard]] std::size_t devices() const noexcept { return there_; }
    /// The device time of all nodes, in thousandths of a device.
    [[nodiscard]] std::uint64_t capacity_permille() const noexcept {
        return std::uint64_t{there_} * share::whole().permille();
    }
    /// The device time that is placed, in thousandths of a device.
    [[nodiscard]] std::uint64_t placed_permille() const noexcept { return placed_permille_; }

    /// Whether a placed request on any node carries the label.
    [[nodiscard]] bool carries(label group) const noexcept { return all_labels_[group].carried != 0; }
    /// Whether a placed request on that node carries the label.
    [[nodiscard]] bool carries(label group, node_id id) const noexcept {
        return nodes_[id.index].labels[group].carried != 0;
    }

    /// The free capacity of a node, which must be one of the cluster's.
    [[nodiscard]] node_view operator[](node_id id) const noexcept {
        const state& n = nodes_[id.index];
        return {id, n.whole, n.cpu_milli, n.memory, {devices_.data() + n.first_device, n.whole.devices}};
    }
    /// The current capacity of a node, with or without placements: its description, without removed
    /// devices.
    [[nodiscard]] node_description there(node_id id) const noexcept {
        node_description d = nodes_[id.index].whole;
        d.devices = static_cast<std::uint32_t>(present(nodes_[id.index]));
        if (nodes_[id.index].here == presence::gone) d = {};
        return d;
    }
    /// The memory of one device of a node, with or without placements; 0 for a removed device.
    [[nodiscard]] bytes there(node_id id, device_id d) const noexcept {
        const state& n = nodes_[id.index];
        const extent& whole = extents_[n.first_device + d.index];
        return n.here == presence::gone || whole.here == presence::gone ? bytes{} : whole.memory;
    }
    /// The device memory of all nodes, without removed devices.
    [[nodiscard]] bytes capacity_memory() const noexcept {
        bytes sum{};
        for (const auto& n : nodes_)
            for (std::size_t d = n.first_device; d < n.first_device + n.whole.devices; ++d)
                if (n.here != presence::gone && extents_[d].here != presence::gone) sum += extents_[d].memory;
        return sum;
    }
    /// The same nodes without placements.
    [[nodiscard]] cluster emptied() const {
        cluster c = *this;
        for (auto& n : c.nodes_) {
            n.labels = {};
            n.used_cpu_milli = 0;
            n.used_memory = {};
        }
        for (auto& d : c.extents_) d = {.memory = d.memory, .here = d.here};
        c.all_labels_ = {};
        c.placed_permille_ = 0;
        for (auto& n : c.nodes_) c.measure(n);
        return c;
    }
    /// The same cluster without drains. Drained nodes and devices may come back; removed ones
    /// don't.
    [[nodiscard]] cluster resumed() const {
        cluster c = *this;
        for (auto& n : c.nodes_)
            if (n.here == presence::drained) n.here = presence::open;
        for (auto& d : c.extents_)
            if (d.here == presence::drained) d.here = presence::open;
        for (auto& n : c.nodes_) c.measure(n);
        return c;
    }

    /// Whether that device could ever serve such a request, if nothing were placed or drained.
    /// Ignores labels.
    [[nodiscard]] bool could_serve(const placement_request& r, node_id id, device_id d) const noexcept {
        const state& n = nodes_[id.index];
        const extent& whole = extents_[n.first_device + d.index];
        return whole.here != presence::gone && r.models.allows(n.whole.model) && whole.memory >= r.device_memory;
    }
    /// Whether such a request could ever fit on that node. If `on` isn't empty, the request may
    /// only have these devices.
    [[nodiscard]] bool could_fit(const placement_request& r, node_id id, device_set on = {}) const noexcept {
        const state& n = nodes_[id.index];
        if (n.here == presence::gone || !may_be_in(r, n.whole.zone) || r.cpu_milli > n.whole.cpu_milli ||
            r.memory > n.whole.memory)
            return false;
        std::uint32_t serving = 0;
        for (std::uint32_t d = 0; d < n.whole.devices; ++d)
            if ((on.empty() || on.contains({d})) && could_serve(r, id, {d})) ++serving;
        return serving >= r.devices;
    }

    /// Whether the request fits on that node now.
    [[nodiscard]] bool fits(const placement_request& r, node_id id) const noexcept {
        return has_room(r, nodes_[id.index]) && accepts(r, nodes_[id.index]);
    }

    /// The shortage of the request; no refusal if the request fits somewhere. Looks at every node.
    [[nodiscard]] refusal why_not(const placement_request& r) const noexcept {
        refusal closest{shortage::nodes};
        double least = 1e9;
        for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
            if (nodes_[i].here == presence::gone) continue;
            const auto [gap, missing] = lacks(r, {i});
            if (gap < least) {
                least = gap;
                closest = missing;
            }
        }
        return closest;
    }

    /// Takes everything that the placement needs, or nothing. Returns the shortage if the placement
    /// no longer fits, names a node or devices that don't exist, or doesn't have as many devices as
    /// its request wants.
    [[nodiscard]] refusal try_apply(const placement& p) {
        if (const auto why = check(p, true)) return why;
        take(p);
        return {};
    }
    /// try_apply(), but throws operation_error.
    void apply(const placement& p) {
        if (const auto why = try_apply(p)) throw operation_error(to_errc(why.missing), {}, describe(why).c_str());
    }

    /// Like apply, but doesn't check `near` and `apart`. Use restore() to put released placements
    /// back in any order, and to plan with placements that don't exist at the same time.
    void restore(const placement& p) {
        if (const auto why = check(p, false)) throw operation_error(to_errc(why.missing), {}, describe(why).c_str());
        take(p);
    }
    /// Like apply, but also works if the placement doesn't fit. For placements that exist already,
    /// for example on a device that has shrunk, is drained or was removed. Missing capacity is
    /// owed: nothing is free there until releases have made up for it. Throws operation_error
    /// (invalid_specification) for a node or devices that never existed, for a different number of
    /// devices than the request wants, or if the sums of the amounts there exceed 64 bits, or a
    /// device's sum of shares four million devices.
    void hold(const placement& p) {
        if (!names_devices(p))
            throw operation_error(errc::invalid_specification, {}, "hold devices that never existed");
        if (!sums_fit(p)) throw operation_error(errc::invalid_specification, {}, "hold more than 64 bits can count");
        take(p);
    }

    /// Makes room for the labels of these placements: until other labels come or the cluster is
    /// assigned to, apply(), restore() and hold() of each of them don't throw std::bad_alloc.
    void reserve(std::span<const placement> all) {
        const auto labelled = static_cast<std::size_t>(
            std::ranges::count_if(all, [](const placement& p) { return p.request.group || p.request.apart; }));
        if (labelled == 0) return;
        for (const auto& p : all)
            if (p.node.index < nodes_.size()) nodes_[p.node.index].labels.reserve(labelled);
        all_labels_.reserve(labelled);
    }

    /// Gives back the capacity that `apply` took: the cluster then equals its earlier value. If
    /// less is placed there, the placement can't have been applied here; then returns false and
    /// changes nothing. The cluster doesn't remember single placements, so it doesn't notice every
    /// second release of a placement.
    [[nodiscard]] bool try_release(const placement& p) noexcept {
        if (!names_devices(p)) return false;
        state& n = nodes_[p.node.index];
        if (p.request.cpu_milli > n.used_cpu_milli || p.request.memory > n.used_memory) return false;
        for (const auto id : p.devices) {
            const extent& d = extents_[n.first_device + id.index];
            if (p.request.each.permille() > d.used_permille || p.request.device_memory > d.used_memory) return false;
        }
        if (p.request.group || p.request.apart) {
            if (!n.labels.has(p.request)) return false;
            n.labels.remove(p.request);
            all_labels_.remove(p.request);
        }
        n.used_cpu_milli -= p.request.cpu_milli;
        n.used_memory -= p.request.memory;
        for (const auto id : p.devices) {
            extent& d = extents_[n.first_device + id.index];
            d.used_permille -= p.request.each.permille();
            d.used_memory -= p.request.device_memory;
            devices_[n.first_device + id.index] = left_of(d, n);
        }
        measure_host(n);
        placed_permille_ -= device_permille(p.request);
        return true;
    }
    /// try_release(), but throws operation_error (invalid_specification).
    void release(const placement& p) {
        if (!try_release(p))
            throw operation_error(errc::invalid_specification, {}, "release of a placement that was not applied here");
    }

    friend bool operator==(const cluster&, const cluster&) = default;

private:
    static constexpr std::uint32_t whole_permille = share::whole().permille();

    enum class presence : std::uint8_t {
        open,     ///< takes requests that fit
        drained,  ///< takes no requests for now
        gone,     ///< no longer exists
    };

    struct state {
        node_description whole{};
        std::uint64_t cpu_milli = 0;  // free thousandths of a core
        bytes memory{};               // free memory
        std::size_t first_device = 0;
        label_counts labels{};
        std::uint64_t used_cpu_milli = 0;
        bytes used_memory{};
        presence here = presence::open;

        friend bool operator==(const state&, const state&) = default;
    };
    // A device's capacity, and the amount placed on it, which may exceed the capacity.
    struct extent {
        bytes memory{};
        presence here = presence::open;
        std::uint32_t used_permille = 0;
        bytes used_memory{};

        friend bool operator==(const extent&, const extent&) = default;
    };

    // The free capacity of a device of that node.
    [[nodiscard]] static free_device left_of(const extent& d, const state& n) noexcept {
        if (d.here != presence::open || n.here != presence::open) return {.open = false};
        return {whole_permille - std::min(whole_permille, d.used_permille), d.memory - d.used_memory};
    }
    static void measure_host(state& n) noexcept {
        const bool open = n.here == presence::open;
        n.cpu_milli = open ? n.whole.cpu_milli - std::min(n.whole.cpu_milli, n.used_cpu_milli) : 0;
        n.memory = open ? n.whole.memory - n.used_memory : bytes{};  // bytes don't go below 0
    }
    void measure(state& n) noexcept {
        measure_host(n);
        for (std::size_t d = n.first_device; d < n.first_device + n.whole.devices; ++d)
            devices_[d] = left_of(extents_[d], n);
    }
    // Call this after a change of the node's devices.
    void find_largest(state& n) noexcept {
        n.whole.device_memory = {};
        for (std::size_t d = n.first_device; d < n.first_device + n.whole.devices; ++d)
            if (extents_[d].here != presence::gone)
                n.whole.device_memory = std::max(n.whole.device_memory, extents_[d].memory);
        measure(n);
    }

    // Makes room for more devices. Doubles the room, so that adding many nodes takes linear time.
    void make_room(std::size_t more) {
        const std::size_t all = devices_.size() + more;
        if (all > devices_.capacity()) devices_.reserve(std::max(all, 2 * devices_.capacity()));
        if (all > extents_.capacity()) extents_.reserve(std::max(all, 2 * extents_.capacity()));
    }

    void check(node_id id) const {
        if (id.index >= nodes_.size() || nodes_[id.index].here == presence::gone)
            raise({.code = errc::no_device, .because = reason::no_such_node}, {}, "a node of a cluster");
    }
    void check(node_id id, device_id d) const {
        check(id);
        const auto& n = nodes_[id.index];
        if (d.index >= n.whole.devices)
            raise({errc::no_device, d.index, 0, n.whole.devices, reason::no_such_device}, {}, "a device of a node");
    }
    [[nodiscard]] std::size_t present(const state& n) const noexcept {
        if (n.here == presence::gone) return 0;
        const std::span all{extents_.data() + n.first_device, n.whole.devices};
        return static_cast<std::size_t>(
            std::ranges::count_if(all, [](const extent& d) { return d.here != presence::gone; }));
    }
    void set(node_id id, presence to) {
        check(id);
        state& n = nodes_[id.index];
        there_ -= present(n);
        n.here = to;
        there_ += present(n);
        measure(n);
    }
    void set(node_id id, device_id d, presence to) {
        check(id, d);
        state& n = nodes_[id.index];
        if (extents_[n.first_device + d.index].here == presence::gone)
            raise({errc::no_device, d.index, 0, n.whole.devices, reason::no_such_device}, {}, "a device of a node");
        there_ -= present(n);
        extents_[n.first_device + d.index].here = to;
        there_ += present(n);
        find_largest(n);
    }

    [[nodiscard]] bool accepts(const placement_request& r, const state& n) const noexcept {
        if (r.apart && n.labels[r.apart].carried != 0) return false;
        if (r.group && n.labels[r.group].avoided != 0) return false;
        if (!r.near || n.labels[r.near].carried != 0) return true;
        return r.near == r.group && all_labels_[r.near].carried == 0;
    }

    [[nodiscard]] bool has_room(const placement_request& r, const state& n) const noexcept {
        if (n.here != presence::open || !may_be_in(r, n.whole.zone) || r.cpu_milli > n.cpu_milli || r.memory > n.memory)
            return false;
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
            n.labels.reserve();  // only these two calls can throw
            all_labels_.reserve();
            n.labels.add(p.request);
            all_labels_.add(p.request);
        }
        n.used_cpu_milli += p.request.cpu_milli;
        n.used_memory += p.request.memory;
        for (const auto id : p.devices) {
            extent& d = extents_[n.first_device + id.index];
            d.used_permille += p.request.each.permille();
            d.used_memory += p.request.device_memory;
            devices_[n.first_device + id.index] = left_of(d, n);
        }
        measure_host(n);
        placed_permille_ += device_permille(p.request);
    }

    [[nodiscard]] bool names_devices(const placement& p) const noexcept {
        if (p.node.index >= nodes_.size() || p.devices.size() != p.request.devices) return false;
        return std::ranges::all_of(p.devices,
                                   [&](device_id d) { return d.index < nodes_[p.node.index].whole.devices; });
    }

    // Whether the sums would be exact, so that a release can undo them.
    [[nodiscard]] bool sums_fit(const placement& p) const noexcept {
        const state& n = nodes_[p.node.index];
        const auto left_of_cpu = std::numeric_limits<std::uint64_t>::max() - n.used_cpu_milli;
        if (p.request.cpu_milli > left_of_cpu || p.request.memory > bytes::max() - n.used_memory) return false;
        return std::ranges::all_of(p.devices, [&](device_id id) {
            const extent& d = extents_[n.first_device + id.index];
            const auto left_of_shares = std::numeric_limits<std::uint32_t>::max() - d.used_permille;
            return p.request.device_memory <= bytes::max() - d.used_memory &&
                   p.request.each.permille() <= left_of_shares;
        });
    }

    [[nodiscard]] refusal check(const placement& p, bool affinity) const noexcept {
        if (p.node.index >= nodes_.size() || nodes_[p.node.index].here == presence::gone)
            return {shortage::nodes, p.node};
        const state& n = nodes_[p.node.index];
        if (!names_devices(p)) {
            std::uint32_t present = 0;
            for (const auto id : p.devices) present += id.index < n.whole.devices ? 1U : 0U;
            return {shortage::devices, p.node, p.request.devices, present};
        }
        if (!has_room(p.request, n) || (affinity && !accepts(p.request, n))) return lacks(p.request, p.node).missing;
        for (const auto id : p.devices) {
            const free_device& d = devices_[n.first_device + id.index];
            if (!d.open) return {shortage::drained, p.node, 1, 0};
            if (d.permille < p.request.each.permille())
                return {shortage::device_share, p.node, p.request.each.permille(), d.permille};
            if (p.request.device_memory > d.memory)
                return {shortage::device_memory, p.node, p.request.device_memory.count(), d.memory.count()};
        }
        return {};
    }

    struct shortfall {
        double gap = 0;  // over all resources, the sum of the missing fractions of the request
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
        // A rule weighs more than any amount, because another node may have room, but no node
        // changes its model.
        if (r.devices != 0 && !r.models.allows(n.whole.model)) note(shortage::model, 0, 0, 1000);
        if (!may_be_in(r, n.whole.zone)) note(shortage::zone, 0, 0, 1000);
        if (n.here == presence::drained) note(shortage::drained, 0, 0, 500);
        if (!accepts(r, n)) note(shortage::affinity, 0, 0, 100);
        if (n.here != presence::open) return s;  // the figures wouldn't help
        lack(shortage::cpu, r.cpu_milli, n.cpu_milli);
        lack(shortage::memory, r.memory.count(), n.memory.count());
        lack_devices(r, n, lack);
        return s;
    }
    // Each figure is the largest amount of one resource that enough devices have, even if these
    // devices lack other resources. So each figure is true on its own.
    template <class Lack>
    void lack_devices(const placement_request& r, const state& n, Lack lack) const noexcept {
        const std::span devices{devices_.data() + n.first_device, n.whole.devices};
        const auto count = [&](auto enough) {
            return static_cast<std::uint64_t>(
                std::ranges::count_if(devices, [&](const free_device& d) { return d.open && enough(d); }));
        };
        const auto enough_share = [&](const free_device& d) { return d.permille >= r.each.permille(); };
        const auto enough_memory = [&](const free_device& d) { return d.memory >= r.device_memory; };
        // the most of one resource, among the devices with enough of the other
        const auto most = [&](auto amount, auto beside) {
            std::uint64_t best = 0;
            for (const auto& d : devices)
                if (d.open &&
                    count([&](const free_device& o) { return amount(o) >= amount(d) && beside(o); }) >= r.devices)
                    best = std::max(best, amount(d));
            return best;
        };
        const auto of_share = [](const free_device& d) { return std::uint64_t{d.permille}; };
        const auto of_memory = [](const free_device& d) { return d.memory.count(); };
        const auto any = [](const free_device&) { return true; };
        if (count([&](const free_device& d) { return gpushare::fits(r, d); }) >= r.devices) return;
        if (count(any) < r.devices || (r.each == share::whole() && count(enough_share) < r.devices))
            return lack(shortage::whole_devices, r.devices,
                        count(any) < r.devices && r.each != share::whole() ? count(any) : count(enough_share));
        const bool share_short = count(enough_share) < r.devices, memory_short = count(enough_memory) < r.devices;
        if (share_short) lack(shortage::device_share, r.each.permille(), most(of_share, any));
        if (memory_short) lack(shortage::device_memory, r.device_memory.count(), most(of_memory, any));
        if (!share_short && !memory_short)  // each amount exists, but not on the same devices
            lack(shortage::device_memory, r.device_memory.count(), most(of_memory, enough_share));
    }

    std::vector<state> nodes_;
    std::vector<free_device> devices_;  // free capacity, as policies see it
    std::vector<extent> extents_;       // for each device: its capacity, and how much is placed
    label_counts all_labels_;
    std::size_t there_ = 0;  // devices that aren't gone
    std::uint64_t placed_permille_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
