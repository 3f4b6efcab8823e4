// SPDX-License-Identifier: Apache-2.0
// A topology: how devices are connected, as a plain value that a backend or a person fills in.
// Functions choose the best connected devices.
//
//   gpushare::topology t({{.memory = 80_GiB}, {.memory = 80_GiB}, {.memory = 80_GiB}});
//   // four links, which allow access to each other's memory
//   t.connect({0}, {2}, {gpushare::link_class::nvlink, 4, true});
//   auto two = gpushare::best_connected(t, 2, all);  // devices 0 and 2; all: a range of device_id
//
// connected_split makes an equal split over the best connected devices that have room for their
// part:
//
//   std::vector<gpushare::device_room> rooms;  // the devices, each with its free bytes
//   // parts are multiples of 1 GiB
//   auto p = gpushare::connected_split(48_GiB, 2, rooms, t, 1_GiB);
//
// The header describes the twelve node types of Alibaba Cloud's Container Compute Service (ACS):
// the memory of a device, the numbers of devices on offer, whether nodes are linked by RDMA, and
// the zones that have the type.
//
//   const auto* type = gpushare::find_node_type("P16EN");
//   gpushare::topology sixteen = gpushare::describe(*type, 16);
//   bool there = gpushare::has_type("cn-wulanchabu-c", *type);
//   // the class, model series and zone that a pod asks for
//   auto wanted = gpushare::read_acs_labels(pod_labels);
//
// Source: ACS documentation, "ACS Pod instance overview", section on accelerated compute types, and
// its list of zones (2026). The names are the provider's. The source lists the names L20N and L20NE
// separately from their rows. Two names and two rows are left over when all others are matched, so
// they are matched by elimination. The source doesn't publish connections within a node or SM
// counts, so they are missing here.
#pragma once

#include <algorithm>
#include <array>
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

/// The kind in English.
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
    std::uint8_t width = 1;              ///< the number of parallel links, for example of NVLink
    /// Whether loads and stores of one device reach the memory of the other.
    bool peer_access = false;

    friend constexpr auto operator<=>(const device_link&, const device_link&) = default;
    friend constexpr bool operator==(const device_link&, const device_link&) = default;
    /// The same order as a number.
    [[nodiscard]] constexpr std::uint32_t value() const noexcept {
        return static_cast<std::uint32_t>(path) << 9 | static_cast<std::uint32_t>(width) << 1 | (peer_access ? 1U : 0U);
    }
};

/// A device in a topology.
struct device_description {
    bytes memory{};          ///< the device's memory
    std::uint32_t sms = 0;   ///< the device's SMs; 0: unknown
    std::uint32_t node = 0;  ///< the device's node

    friend bool operator==(const device_description&, const device_description&) = default;
};

/// Devices, numbered from 0 through all nodes, and a link for each pair of devices, the same in
/// both directions.
class topology {
public:
    topology() = default;
    /// A topology of these devices. All links are unknown at first.
    explicit topology(std::vector<device_description> devices)
        : devices_(std::move(devices)), links_(devices_.size() * devices_.size()) {
        for (std::size_t i = 0; i < devices_.size(); ++i)
            links_[i * devices_.size() + i] = {link_class::same_device, 1, true};
    }

    /// The number of devices.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(devices_.size()); }

    // The following functions throw operation_error (no_device) if there is no such device.

    /// The description of a device. Throws operation_error (no_device), like between().
    [[nodiscard]] const device_description& device(device_id d) const { return devices_[checked(d)]; }
    /// The link between two devices, the same in both directions.
    [[nodiscard]] const device_link& between(device_id a, device_id b) const {
        return links_[checked(a) * devices_.size() + checked(b)];
    }
    /// Sets the link between two devices. The link of a device to itself doesn't change.
    void connect(device_id a, device_id b, device_link by) {
        const auto from = checked(a), to = checked(b);
        if (from == to) return;
        links_[from * devices_.size() + to] = links_[to * devices_.size() + from] = by;
    }
    /// Connects every pair of devices by such a link.
    void connect_all(device_link by) {
        for (std::uint32_t a = 0; a < size(); ++a)
            for (std::uint32_t b = a + 1; b < size(); ++b) connect({a}, {b}, by);
    }

    friend bool operator==(const topology&, const topology&) = default;

private:
    [[nodiscard]] std::size_t checked(device_id d) const {
        if (d.index >= devices_.size())
            raise({errc::no_device, d.index, 0, devices_.size()}, {}, "querying a topology");
        return d.index;
    }

    std::vector<device_description> devices_;
    std::vector<device_link> links_;  // by row
};

/// The topology of a node whose devices are all connected alike, such as a host node, whose devices
/// are all in the memory of one process.
template <node Node>
[[nodiscard]] topology describe(Node& of, device_link each = {link_class::host_bridge, 1, true}) {
    std::vector<device_description> devices(of.num_devices());
    for (std::uint32_t i = 0; i < of.num_devices(); ++i) devices[i].memory = of.memory(device_id{i}).capacity();
    topology t(std::move(devices));
    t.connect_all(each);
    return t;
}

/// A topology that a backend has detected: devices with their memory, SMs and nearest NUMA node,
/// and a kind of link for each pair. Such a backend doesn't distinguish PCIe switches from bridges,
/// and doesn't count NVLinks.
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

/// Converts a topology that a backend has detected.
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

/// How well a set of devices is connected. Sets compare by their worst link, then by the sum over
/// all links. Greater is better.
struct connection {
    std::uint32_t worst = 0;  ///< the value of the worst link
    std::uint64_t sum = 0;    ///< the sum over all links

    friend constexpr auto operator<=>(const connection&, const connection&) = default;
    friend constexpr bool operator==(const connection&, const connection&) = default;
};

namespace detail {

// Of a single device, which has no worst link.
inline constexpr connection unconnected{static_cast<std::uint32_t>(-1), 0};

[[nodiscard]] inline connection joined(const topology& t, connection so_far, std::span<const device_id> chosen,
                                       device_id next) {
    for (const auto c : chosen) {
        const auto value = t.between(c, next).value();
        so_far = {std::min(so_far.worst, value), so_far.sum + value};
    }
    return so_far;
}

// This class and the function behind it are templates, so that programs that don't choose devices
// don't compile them.

// Tries all sets in ascending order, and skips sets that can't beat the best so far. Of equal sets,
// the first one wins.
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

// Greedy: starts from each candidate in turn, and adds the best connected candidate again and
// again.
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

/// The connection of a set of devices: its worst link, and the sum of all links. Throws
/// operation_error (no_device).
[[nodiscard]] inline connection connection_of(const topology& t, std::span<const device_id> devices) {
    connection c = detail::unconnected;
    for (std::size_t i = 0; i < devices.size(); ++i) c = detail::joined(t, c, devices.first(i), devices[i]);
    return c;
}

/// The best connected set of `count` candidates, in ascending order: the set with the best worst
/// link and, among these, with the greatest sum. Ties go to the lowest ids. Exact up to 16
/// candidates; with more, greedy from each candidate in turn. Codes: invalid_specification (count
/// 0), too_few_devices, duplicate_device and no_device (`asked` is the id).
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

/// As try_equal_split, but best_connected chooses among the devices with room. `rooms` are of one
/// node, with the device ids of the topology. Codes: those of both functions.
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
    // Too few devices have room: the plain split gives the best reason.
    if (count == 0 || with_room.size() < count) return try_equal_split(total, count, rooms, unit);
    const auto best = best_connected(links, count, with_room);
    if (!best) return best.why();
    std::vector<room_of<amount_in<Rooms>>> chosen;
    for (const auto d : *best)
        for (const auto& r : rooms)
            if (r.device == d) chosen.push_back(r);
    return try_equal_split_over(total, chosen, unit);
}

/// As try_connected_split, but throws operation_error. Its text names the violated rule and what
/// would fit.
template <device_rooms Rooms>
[[nodiscard]] partition_of<amount_in<Rooms>> connected_split(
    total_in<Rooms> total, std::uint32_t count, const Rooms& rooms, const topology& links,
    amount_in<Rooms> unit = detail::smallest<amount_in<Rooms>>) {
    using traits = amount_traits<amount_in<Rooms>>;
    auto p = try_connected_split(total, count, rooms, links, unit);
    if (!p) detail::raise_split<amount_in<Rooms>>(p.why(), traits::count(total), count, traits::count(unit));
    return *std::move(p);
}

/// A type of node, and the largest sizes on offer.
struct node_type {
    std::string_view name{};  ///< the provider's name of the model series
    bytes device_memory{};    ///< of each device
    /// The numbers of devices on offer, ascending, filled up with zeros.
    std::array<std::uint8_t, 5> counts{};
    bool rdma = false;             ///< whether its nodes are linked by RDMA
    std::uint32_t most_vcpus = 0;  ///< the most vCPUs; 0: not published
    bytes most_memory{};           ///< the most memory of the host; 0: not published

    /// The largest number of devices on offer.
    [[nodiscard]] constexpr std::uint32_t most_devices() const noexcept {
        std::uint32_t most = 0;
        for (const auto n : counts) most = n > most ? n : most;
        return most;
    }
    /// Whether this number of devices is on offer.
    [[nodiscard]] constexpr bool offers(std::uint32_t devices) const noexcept {
        for (const auto n : counts)
            if (n == devices && n != 0) return true;
        return false;
    }
};

/// All node types.
inline constexpr std::array node_types{
    node_type{"GU8TF", 96_GiB, {1, 2, 4, 8}, true, 184, 920_GiB},
    node_type{"GU8TEF", 141_GiB, {1, 2, 4, 8}, true, 184, 1800_GiB},
    node_type{"L20", 48_GiB, {1, 2, 4, 8}, false, 128, 920_GiB},
    node_type{"L20X", 141_GiB, {8}, true, 184, 1800_GiB},
    node_type{"P16EN", 96_GiB, {1, 2, 4, 8, 16}, true, 184, 1800_GiB},
    node_type{"T4", 16_GiB, {1, 2}, false, 48, 180_GiB},
    node_type{"A10", 24_GiB, {1, 2, 4, 8}, false, 128, 480_GiB},
    node_type{"G28Ti", 11_GiB, {1}, false, 0, 0_B},
    node_type{"G49E", 48_GiB, {1, 2, 4, 8}, false, 128, 920_GiB},
    node_type{"G59", 32_GiB, {1, 2, 4, 8}, false, 184, 1440_GiB},
    node_type{"L20N", 48_GiB, {1, 2, 4, 8}, false, 0, 0_B},   // matched by elimination
    node_type{"L20NE", 72_GiB, {1, 2, 4, 8}, false, 0, 0_B},  // matched by elimination
};

/// The link between two devices on different nodes of a type.
[[nodiscard]] constexpr device_link link_between_nodes(const node_type& type) noexcept {
    return {type.rdma ? link_class::rdma : link_class::network, 1, false};
}

/// A zone, and its types of nodes.
struct node_zone {
    std::string_view name{};                  ///< the provider's name
    std::array<std::string_view, 5> types{};  ///< the names of the types, filled up with empty ones
};

/// All zones. "ap-southeast-1" is published as a region.
inline constexpr std::array node_zones{
    node_zone{"cn-wulanchabu-a", {"GU8TF", "L20", "G49E"}},
    node_zone{"cn-wulanchabu-b", {"G59"}},
    node_zone{"cn-wulanchabu-c", {"P16EN"}},
    node_zone{"cn-wulanchabu-d", {"P16EN", "L20NE"}},
    node_zone{"cn-beijing-d", {"GU8TF", "GU8TEF", "P16EN"}},
    node_zone{"cn-beijing-h", {"G28Ti"}},
    node_zone{"cn-beijing-i", {"A10", "G28Ti", "L20N"}},
    node_zone{"cn-beijing-l", {"L20", "G49E", "G59", "L20NE"}},
    node_zone{"cn-shanghai-e", {"G59", "G28Ti"}},
    node_zone{"cn-shanghai-f", {"GU8TF", "GU8TEF", "P16EN"}},
    node_zone{"cn-shanghai-l", {"L20", "G49E", "T4", "G28Ti"}},
    node_zone{"cn-shanghai-n", {"L20", "L20N"}},
    node_zone{"cn-shanghai-o", {"P16EN"}},
    node_zone{"cn-hangzhou-b", {"GU8TF", "L20", "G49E", "P16EN", "G59"}},
    node_zone{"cn-hangzhou-i", {"T4"}},
    node_zone{"cn-shenzhen-c", {"L20"}},
    node_zone{"cn-shenzhen-d", {"GU8TEF", "G49E", "G59"}},
    node_zone{"cn-shenzhen-e", {"T4"}},
    node_zone{"cn-hongkong-d", {"GU8TEF"}},
    node_zone{"ap-southeast-1", {"GU8TF", "L20", "L20X"}},
    node_zone{"eu-central-1-a", {"L20"}},
    node_zone{"eu-central-1-c", {"GU8TEF"}},
    node_zone{"me-east-1-a", {"GU8TEF"}},
    node_zone{"us-east-1-a", {"A10", "L20"}},
    node_zone{"us-east-1-b", {"A10", "L20"}},
};

/// Finds a zone by its name, spelt as in the table. Null if there is none.
[[nodiscard]] constexpr const node_zone* find_node_zone(std::string_view name) noexcept {
    for (const auto& z : node_zones)
        if (z.name == name) return &z;
    return nullptr;
}
/// Whether the zone has nodes of this type. False for a zone that isn't in the table.
[[nodiscard]] constexpr bool has_type(std::string_view zone, const node_type& type) noexcept {
    const auto* const z = find_node_zone(zone);
    if (z == nullptr) return false;
    for (const auto name : z->types)
        if (name == type.name) return true;
    return false;
}

/// Finds a node type by its name, spelt as in the table. Null if there is none.
[[nodiscard]] constexpr const node_type* find_node_type(std::string_view name) noexcept {
    for (const auto& t : node_types)
        if (t.name == name) return &t;
    return nullptr;
}

/// A node of this type, with all devices connected by `each`, since it is known only that they are
/// in one host. Throws operation_error (invalid_specification) for a number of devices that isn't
/// on offer.
[[nodiscard]] inline topology describe(const node_type& type, std::uint32_t devices,
                                       device_link each = {link_class::host_bridge, 1, false}) {
    if (!type.offers(devices))
        raise({errc::invalid_specification, devices, 0, type.most_devices(), reason::node_size}, {}, type.name);
    std::vector<device_description> all;
    for (std::uint32_t i = 0; i < devices; ++i) all.push_back({.memory = type.device_memory});
    topology t(std::move(all));
    t.connect_all(each);
    return t;
}

/// ACS's classes of pods with devices.
enum class compute_class : std::uint8_t {
    any,      ///< the pod doesn't say
    gpu,      ///< with devices
    gpu_hpn,  ///< with devices, on nodes that are linked by RDMA
};

/// The requirements of a pod on its node.
struct node_request {
    compute_class pod = compute_class::any;  ///< the pod's class
    const node_type* type = nullptr;         ///< the required type; null: any type
    const node_zone* zone = nullptr;         ///< the required zone; null: any zone

    /// Whether nodes of this type in this zone satisfy the request.
    [[nodiscard]] constexpr bool accepts(const node_type& of, const node_zone& in) const noexcept {
        if ((type != nullptr && type != &of) || (zone != nullptr && zone != &in)) return false;
        return has_type(in.name, of) && (pod != compute_class::gpu_hpn || of.rdma);
    }
};

/// Reads a pod's labels, pairs of key and value: alibabacloud.com/compute-class ("gpu", "gpu-hpn"),
/// alibabacloud.com/gpu-model-series (the name of a type) and topology.kubernetes.io/zone. Other
/// labels are ignored. Throws operation_error (invalid_specification), with label and value, for an
/// unknown class, type or zone, and if no zone satisfies all labels together.
template <class Pairs>
[[nodiscard]] node_request read_acs_labels(const Pairs& labels) {
    node_request r;
    const auto refuse = [](std::string_view key, std::string_view value, std::string_view why) {
        detail::message m;
        m.add(key, " = ", value, ": ", why);
        throw operation_error(failure{errc::invalid_specification}, {}, m);
    };
    std::string_view last_key, last_value;
    for (const auto& pair : labels) {
        const std::string_view key(pair.first), value(pair.second);
        if (key == "alibabacloud.com/compute-class") {
            if (value != "gpu" && value != "gpu-hpn") refuse(key, value, "no class of pods with devices");
            r.pod = value == "gpu" ? compute_class::gpu : compute_class::gpu_hpn;
        } else if (key == "alibabacloud.com/gpu-model-series") {
            if ((r.type = find_node_type(value)) == nullptr) refuse(key, value, "no such node type");
        } else if (key == "topology.kubernetes.io/zone") {
            if ((r.zone = find_node_zone(value)) == nullptr) refuse(key, value, "no zone with devices");
        } else {
            continue;
        }
        last_key = key;
        last_value = value;
    }
    for (const auto& zone : node_zones)
        for (const auto& type : node_types)
            if (r.accepts(type, zone)) return r;
    refuse(last_key, last_value, "no zone has a node that satisfies all labels");
    return r;  // unreachable
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
