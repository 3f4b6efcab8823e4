// SPDX-License-Identifier: Apache-2.0
// How devices are connected, as a plain value that a backend or a person fills in; and the choice of the best connected
// devices.
//
//   gpushare::topology t({{.memory = 80_GiB}, {.memory = 80_GiB}, {.memory = 80_GiB}});
//   t.connect({0}, {2}, {gpushare::link_class::nvlink, 4, true});  // four links, which allow access to each other's memory
//   auto two = gpushare::best_connected(t, 2, all);                // devices 0 and 2; all: a range of device_id
//
// An equal split over the best connected devices among those that have room for their part:
//
//   std::vector<gpushare::device_room> rooms;                        // the devices, each with its free bytes
//   auto p = gpushare::connected_split(48_GiB, 2, rooms, t, 1_GiB);  // parts are multiples of 1 GiB
#pragma once

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The kind of the path between two devices, worst first.
enum class link_class : std::uint8_t {
    none,          ///< unknown
    network,       ///< to another node, through the hosts
    rdma,          ///< to another node, past the hosts' processors
    inter_socket,  ///< between the sockets of a node
    host_bridge,   ///< through the processor, or by PCIe on an unknown path
    pcie_switch,   ///< through PCIe switches only
    nvlink,        ///< the devices' own links
    same_device,   ///< the same device
};

/// In English.
[[nodiscard]] constexpr std::string_view to_string(link_class c) noexcept {
    switch (c) {
        case link_class::none: return "unknown";
        case link_class::network: return "network";
        case link_class::rdma: return "RDMA";
        case link_class::inter_socket: return "between sockets";
        case link_class::host_bridge: return "host bridge";
        case link_class::pcie_switch: return "PCIe switch";
        case link_class::nvlink: return "NVLink";
        case link_class::same_device: return "same device";
    }
    return "unknown";
}

/// Links compare by class, then by width, then by peer access: greater is better.
struct device_link {
    link_class path = link_class::none;  ///< the worst part of the path
    std::uint8_t width = 1;              ///< how many such links in parallel, as of NVLink
    bool peer_access = false;            ///< loads and stores of one reach the memory of the other

    friend constexpr auto operator<=>(const device_link&, const device_link&) = default;
    friend constexpr bool operator==(const device_link&, const device_link&) = default;
    /// The same order as a number.
    [[nodiscard]] constexpr std::uint32_t value() const noexcept {
        return static_cast<std::uint32_t>(path) << 9 | static_cast<std::uint32_t>(width) << 1 | (peer_access ? 1U : 0U);
    }
};

/// A device as a topology knows it.
struct device_description {
    bytes memory{};          ///< that it has
    std::uint32_t sms = 0;   ///< that it has; 0: unknown
    std::uint32_t node = 0;  ///< that it is on

    friend bool operator==(const device_description&, const device_description&) = default;
};

/// Devices, numbered from 0 through all nodes, and a link for each two of them, the same in both directions.
class topology {
public:
    topology() = default;
    /// Links are unknown until they are connected.
    explicit topology(std::vector<device_description> devices)
        : devices_(std::move(devices)), links_(devices_.size() * devices_.size()) {
        for (std::size_t i = 0; i < devices_.size(); ++i)
            links_[i * devices_.size() + i] = {link_class::same_device, 1, true};
    }

    /// Devices.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(devices_.size()); }

    // The following throw operation_error (no_device) for a device that isn't there.

    /// Throws operation_error (no_device), as between().
    [[nodiscard]] const device_description& device(device_id d) const { return devices_[checked(d)]; }
    /// The same in both directions.
    [[nodiscard]] const device_link& between(device_id a, device_id b) const {
        return links_[checked(a) * devices_.size() + checked(b)];
    }
    /// Sets the link between two devices. The link of a device to itself doesn't change.
    void connect(device_id a, device_id b, device_link by) {
        const auto from = checked(a), to = checked(b);
        if (from == to) return;
        links_[from * devices_.size() + to] = links_[to * devices_.size() + from] = by;
    }
    /// Connects every two devices by such a link.
    void connect_all(device_link by) {
        for (std::uint32_t a = 0; a < size(); ++a)
            for (std::uint32_t b = a + 1; b < size(); ++b) connect({a}, {b}, by);
    }

    friend bool operator==(const topology&, const topology&) = default;

private:
    [[nodiscard]] std::size_t checked(device_id d) const {
        if (d.index >= devices_.size()) raise({errc::no_device, d.index, 0, devices_.size()}, {}, "asking a topology");
        return d.index;
    }

    std::vector<device_description> devices_;
    std::vector<device_link> links_;  // by row
};

/// The devices of a node that are all connected alike, such as a host node's, which are all in the memory of one
/// process.
template <node Node>
[[nodiscard]] topology describe(Node& of, device_link each = {link_class::host_bridge, 1, true}) {
    std::vector<device_description> devices(of.num_devices());
    for (std::uint32_t i = 0; i < of.num_devices(); ++i) devices[i].memory = of.memory(device_id{i}).capacity();
    topology t(std::move(devices));
    t.connect_all(each);
    return t;
}

/// A topology that a backend has found out itself: devices with their memory, SMs and nearest NUMA
/// node, and a link of some kind for each two of them. Such a backend doesn't tell switches on the
/// PCIe from bridges, nor how many NVLinks there are.
// clang-format off
template <class D>
concept found_topology = requires(const D& d, device_id i) {
    { d.devices.size() } -> std::convertible_to<std::size_t>;
    { d.devices[0].memory } -> std::convertible_to<bytes>;
    { d.devices[0].sms } -> std::convertible_to<std::uint32_t>;
    { d.between(i, i).access } -> std::convertible_to<bool>;
    d.between(i, i).kind;
};
// clang-format on

/// Describes the topology that a backend has found.
template <found_topology D>
[[nodiscard]] topology describe(const D& found) {
    std::vector<device_description> devices;
    for (const auto& d : found.devices) devices.push_back({d.memory, d.sms});
    topology t(std::move(devices));
    for (std::uint32_t a = 0; a < t.size(); ++a)
        for (std::uint32_t b = a + 1; b < t.size(); ++b) {
            const auto& l = found.between(device_id{a}, device_id{b});
            using kind = std::remove_cvref_t<decltype(l.kind)>;
            const auto path = l.kind == kind::nvlink           ? link_class::nvlink
                              : l.kind == kind::across_sockets ? link_class::inter_socket
                                                               : link_class::host_bridge;
            t.connect(device_id{a}, device_id{b}, device_link{path, 1, l.access});
        }
    return t;
}

/// How well a choice of devices is connected: by its worst link first, then by the sum of all. Greater is better.
struct connection {
    std::uint32_t worst = 0;  ///< of the worst link
    std::uint64_t sum = 0;    ///< over all links

    friend constexpr auto operator<=>(const connection&, const connection&) = default;
    friend constexpr bool operator==(const connection&, const connection&) = default;
};

namespace detail {

inline constexpr connection unconnected{static_cast<std::uint32_t>(-1), 0};  // of one device: nothing is worse

[[nodiscard]] inline connection joined(const topology& t, connection so_far, std::span<const device_id> chosen,
                                       device_id next) {
    for (const auto c : chosen) {
        const auto value = t.between(c, next).value();
        so_far = {std::min(so_far.worst, value), so_far.sum + value};
    }
    return so_far;
}

// Templates, this one and the next, so that programs that don't choose devices don't compile them.

// Tries all choices in ascending order, without those that can't beat the best so far. The first of
// several equal ones stays.
template <std::same_as<topology> Topology>
class exact_choice {
public:
    exact_choice(const Topology& t, std::size_t count, std::span<const device_id> candidates)
        : topology_(t), count_(count), candidates_(candidates) {
        for (const auto a : candidates)
            for (const auto b : candidates)
                if (a != b) highest_ = std::max<std::uint64_t>(highest_, t.between(a, b).value());
        extend(0, unconnected);
    }
    [[nodiscard]] std::vector<device_id> best() && { return std::move(best_); }

private:
    void extend(std::size_t from, connection so_far) {
        if (chosen_.size() == count_) {
            best_ = chosen_;
            quality_ = so_far;
            return;
        }
        for (auto i = from; i + (count_ - chosen_.size()) <= candidates_.size(); ++i) {
            const auto with = joined(topology_, so_far, chosen_, candidates_[i]);
            const auto have = chosen_.size() + 1;
            const auto pairs_to_come = count_ * (count_ - 1) / 2 - have * (have - 1) / 2;
            const connection bound{with.worst, with.sum + pairs_to_come * highest_};
            if (!best_.empty() && bound <= quality_) continue;
            chosen_.push_back(candidates_[i]);
            extend(i + 1, with);
            chosen_.pop_back();
        }
    }

    const Topology& topology_;
    std::size_t count_;
    std::span<const device_id> candidates_;
    std::uint64_t highest_ = 0;
    std::vector<device_id> chosen_{}, best_{};
    connection quality_{};
};

// From each candidate in turn, the one that is connected best to those chosen, again and again.
template <std::same_as<topology> Topology>
[[nodiscard]] std::vector<device_id> greedy_choice(const Topology& t, std::size_t count,
                                                   std::span<const device_id> candidates) {
    std::vector<device_id> best;
    connection quality{};
    for (const auto start : candidates) {
        std::vector<device_id> chosen{start};
        connection so_far = unconnected;
        while (chosen.size() < count) {
            const device_id* next = nullptr;
            connection with{};
            for (const auto& c : candidates) {
                if (std::ranges::find(chosen, c) != chosen.end()) continue;
                const auto candidate = joined(t, so_far, chosen, c);
                if (next == nullptr || candidate > with) next = &c, with = candidate;
            }
            chosen.push_back(*next);
            so_far = with;
        }
        if (best.empty() || so_far > quality) best = std::move(chosen), quality = so_far;
    }
    std::ranges::sort(best);
    return best;
}

}  // namespace detail

/// The worst link and the sum of all links among the devices. Throws operation_error (no_device).
[[nodiscard]] inline connection connection_of(const topology& t, std::span<const device_id> devices) {
    connection c = detail::unconnected;
    for (std::size_t i = 0; i < devices.size(); ++i) c = detail::joined(t, c, devices.first(i), devices[i]);
    return c;
}

/// The `count` best connected of the candidates, ascending: those whose worst link is best, and of these the ones with
/// the greatest sum; ties go to the lowest ids. Exact up to 16 candidates; above that greedy, from each of them in
/// turn. Codes: invalid_specification (count 0), too_few_devices, duplicate_device and no_device (`asked` is the id).
template <std::ranges::input_range Candidates>
requires std::same_as<std::ranges::range_value_t<Candidates>, device_id>
[[nodiscard]] result<std::vector<device_id>> best_connected(const topology& t, std::uint32_t count,
                                                            const Candidates& candidates) {
    constexpr std::size_t exact_up_to = 16;
    if (count == 0) return errc::invalid_specification;
    std::vector<device_id> sorted(std::ranges::begin(candidates), std::ranges::end(candidates));
    std::ranges::sort(sorted);
    if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
        return failure{.code = errc::duplicate_device, .asked = twice->index, .because = reason::device_twice};
    if (!sorted.empty() && sorted.back().index >= t.size())
        return failure{errc::no_device, sorted.back().index, 0, t.size()};
    if (sorted.size() < count) return failure{errc::too_few_devices, count, sorted.size(), sorted.size()};
    if (sorted.size() > exact_up_to) return detail::greedy_choice(t, count, sorted);
    return detail::exact_choice<topology>(t, count, sorted).best();
}

/// As try_equal_split, but best_connected chooses among the devices with room. `rooms` are of one node, with the device
/// ids of the topology. Codes as those of both.
template <device_rooms Rooms>
[[nodiscard]] result<partition_of<amount_in<Rooms>>> try_connected_split(
    total_in<Rooms> total, std::uint32_t count, const Rooms& rooms, const topology& links,
    amount_in<Rooms> unit = detail::smallest<amount_in<Rooms>>) {
    using traits = amount_traits<amount_in<Rooms>>;
    std::vector<device_id> with_room;
    for (const auto& r : rooms) {
        if (r.node != (*std::ranges::begin(rooms)).node)
            return failure{.code = errc::different_nodes, .asked = r.device.index, .because = reason::other_node};
        if (count != 0 && traits::count(r.free) >= traits::count(total) / count) with_room.push_back(r.device);
    }
    // Too few with room: why, the plain split says best.
    if (count == 0 || with_room.size() < count) return try_equal_split(total, count, rooms, unit);
    const auto best = best_connected(links, count, with_room);
    if (!best) return best.why();
    std::vector<room_of<amount_in<Rooms>>> chosen;
    for (const auto d : *best)
        for (const auto& r : rooms)
            if (r.device == d) chosen.push_back(r);
    return try_equal_split_over(total, chosen, unit);
}

/// As try_connected_split, but throws operation_error; its text names the rule and what would fit.
template <device_rooms Rooms>
[[nodiscard]] partition_of<amount_in<Rooms>> connected_split(
    total_in<Rooms> total, std::uint32_t count, const Rooms& rooms, const topology& links,
    amount_in<Rooms> unit = detail::smallest<amount_in<Rooms>>) {
    using traits = amount_traits<amount_in<Rooms>>;
    auto p = try_connected_split(total, count, rooms, links, unit);
    if (!p) detail::raise_split<amount_in<Rooms>>(p.why(), traits::count(total), count, traits::count(unit));
    return *std::move(p);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
