// SPDX-License-Identifier: Apache-2.0
// The vocabulary of placement: a request, the placement that answers it, or the refusal that says
// what is missing. Also the expected workload, from which policies learn; partition/node_view.hpp
// has their other input, a node with its free capacity. Plain values: a placement can be inspected,
// stored or sent before `cluster::apply` takes its capacity.
//
//   // 47 % of one device's time
//   gpushare::placement_request r{.cpu_milli = 4000, .memory = 16_GiB, .devices = 1, .each = 47_pct};
//   if (auto p = gpushare::choose(policy, cluster, r)) cluster.apply(*p);
//   else puts(gpushare::describe(cluster.why_not(r)).c_str());
//   gpushare::workload usual(history);                   // of any range of placement_request
//   for (const auto& [request, weight] : usual.kinds()) ...
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <ranges>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/node_view.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The models that a request may run on; an empty set allows every model.
class model_set {
public:
    constexpr model_set() noexcept = default;
    /// The set of these models.
    constexpr model_set(std::initializer_list<device_model> models) noexcept {
        for (const auto m : models) add(m);
    }

    /// Adds a model.
    constexpr void add(device_model m) noexcept {
        assert(m.index < device_model::count);
        bits_ |= std::uint64_t{1} << m.index;
    }
    /// Whether the set has the model, or is empty.
    [[nodiscard]] constexpr bool allows(device_model m) const noexcept {
        return bits_ == 0 || (m.index < device_model::count && (bits_ >> m.index & 1) != 0);
    }

    friend constexpr auto operator<=>(model_set, model_set) = default;
    friend constexpr bool operator==(model_set, model_set) = default;

private:
    std::uint64_t bits_ = 0;
};

/// Devices of one node, which has at most 64. A range of device_id in ascending order.
class device_set {
public:
    static constexpr std::uint32_t capacity = 64;  ///< the most devices of a node

    /// Visits the devices in ascending order.
    class iterator {
    public:
        /// Required of iterators.
        using value_type = device_id;
        /// Required of iterators.
        using difference_type = std::ptrdiff_t;

        constexpr iterator() noexcept = default;
        /// Iterates over the devices whose bits are set.
        constexpr explicit iterator(std::uint64_t rest) noexcept : rest_(rest) {}
        /// The lowest remaining device.
        constexpr device_id operator*() const noexcept { return {static_cast<std::uint32_t>(std::countr_zero(rest_))}; }
        /// Moves to the next device.
        constexpr iterator& operator++() noexcept {
            rest_ &= rest_ - 1;
            return *this;
        }
        /// Moves to the next device.
        constexpr iterator operator++(int) noexcept {
            const auto before = *this;
            ++*this;
            return before;
        }
        friend constexpr bool operator==(iterator, iterator) = default;

    private:
        std::uint64_t rest_ = 0;
    };

    constexpr device_set() noexcept = default;
    /// The set of these devices.
    constexpr device_set(std::initializer_list<device_id> devices) noexcept {
        for (const auto d : devices) add(d);
    }

    /// Adds a device.
    constexpr void add(device_id d) noexcept {
        assert(d.index < capacity);
        bits_ |= std::uint64_t{1} << d.index;
    }
    /// Whether the set has the device.
    [[nodiscard]] constexpr bool contains(device_id d) const noexcept {
        return d.index < capacity && (bits_ >> d.index & 1) != 0;
    }
    /// The number of devices.
    [[nodiscard]] constexpr std::uint32_t size() const noexcept {
        return static_cast<std::uint32_t>(std::popcount(bits_));
    }
    /// Whether the set is empty.
    [[nodiscard]] constexpr bool empty() const noexcept { return bits_ == 0; }
    /// The lowest device.
    [[nodiscard]] constexpr iterator begin() const noexcept { return iterator{bits_}; }
    /// Past the highest device.
    [[nodiscard]] constexpr iterator end() const noexcept { return iterator{}; }

    friend constexpr auto operator<=>(device_set, device_set) = default;
    friend constexpr bool operator==(device_set, device_set) = default;

private:
    std::uint64_t bits_ = 0;
};

static_assert(std::forward_iterator<device_set::iterator>);

/// A name by which requests can be placed near one another or apart. The embedder numbers the
/// names; 0 isn't a label.
struct label {
    std::uint32_t id = 0;  ///< 0 isn't a label

    /// Whether there is a label.
    [[nodiscard]] constexpr explicit operator bool() const noexcept { return id != 0; }
    friend constexpr auto operator<=>(label, label) = default;
    friend constexpr bool operator==(label, label) = default;
};

/// A request for capacity of one node: `devices` distinct devices, each with the share `each` (100
/// % for whole devices) and `device_memory`, together with cores and host memory.
struct placement_request {
    std::uint64_t cpu_milli = 0;  ///< thousandths of a core
    bytes memory{};               ///< host memory
    std::uint32_t devices = 0;    ///< the number of devices; may be 0
    share each{};                 ///< the share of device time, on each device
    bytes device_memory{};        ///< device memory, on each device
    model_set models{};           ///< the models on which the request may run
    label group{};                ///< the label of the request
    /// The request only fits a node with this label. The first request of a group fits any node.
    label near{};
    /// The request doesn't fit a node with this label, and requests with the label don't fit its
    /// node.
    label apart{};
    node_zone_id zone{};  ///< only on a node of this zone; 0: on any node
    /// The level of whose time `each` is a share, if shares are promised level by level, as in a
    /// tenancy. A cluster adds up the shares of all levels; see capacity_calendar and
    /// admission_queue.
    priority level{};

    friend constexpr auto operator<=>(const placement_request&, const placement_request&) = default;
    friend constexpr bool operator==(const placement_request&, const placement_request&) = default;
};

/// Whether the request has labels. The fit of such a request depends on other placements and their
/// places.
[[nodiscard]] constexpr bool has_labels(const placement_request& r) noexcept { return r.group || r.near || r.apart; }

/// The device time that a request takes, in thousandths of a device.
[[nodiscard]] constexpr std::uint64_t device_permille(const placement_request& r) noexcept {
    return std::uint64_t{r.devices} * r.each.permille();
}

/// A request and the devices that are to serve it.
struct placement {
    placement_request request{};  ///< the request that is placed
    node_id node{};               ///< the node
    device_set devices{};         ///< as many devices as the request wants

    friend constexpr auto operator<=>(const placement&, const placement&) = default;
    friend constexpr bool operator==(const placement&, const placement&) = default;
};

/// The placement as that level sees it: without device time if the share is a share of another
/// level's time.
[[nodiscard]] constexpr placement seen_at(placement p, priority level) noexcept {
    if (p.request.level != level) p.request.each = {};
    return p;
}

/// The resource that a request lacks.
enum class shortage : std::uint8_t {
    none,   ///< nothing
    nodes,  ///< the cluster doesn't have the node, or has no nodes
    model,  ///< a device model that the request allows
    zone,   ///< a node in the request's zone
    /// A node with `near`, without `apart`, and without requests apart from `group`.
    affinity,
    whole_devices,  ///< `asked` and `left` are devices
    device_share,   ///< permille on each device
    device_memory,  ///< bytes on each device
    cpu,            ///< thousandths of a core
    memory,         ///< bytes
    devices,        ///< the placement doesn't name the devices that the request asks for
    drained,        ///< a node that isn't drained
    consent,        ///< no resource: the function that carries out plans refused the only plan
    /// No resource: an earlier request, number `asked` in the queue, was overtaken too often and
    /// wants the same capacity.
    turn,
};

/// The shortage in English.
[[nodiscard]] constexpr std::string_view to_string(shortage s) noexcept {
    switch (s) {
        case shortage::none: return "nothing";
        case shortage::nodes: return "node";
        case shortage::model: return "device model";
        case shortage::zone: return "node of the zone";
        case shortage::affinity: return "affinity";
        case shortage::whole_devices: return "whole devices";
        case shortage::device_share: return "device share";
        case shortage::device_memory: return "device memory";
        case shortage::cpu: return "cpu";
        case shortage::memory: return "memory";
        case shortage::devices: return "devices of the placement";
        case shortage::drained: return "node that is not drained";
        case shortage::consent: return "consent: the caller refused the placement";
        case shortage::turn: return "turn";
    }
    return "unknown shortage";
}

/// Why a request can't be placed: the resource that the closest node lacks, the amount that was
/// asked for, and the amount that would fit, in the unit that `shortage` states.
struct refusal {
    shortage missing = shortage::none;  ///< the missing resource
    node_id node{};                     ///< the closest node
    std::uint64_t asked = 0;            ///< in the unit of the missing resource
    std::uint64_t left = 0;             ///< the most that a node has

    /// Whether there is a refusal.
    [[nodiscard]] constexpr explicit operator bool() const noexcept { return missing != shortage::none; }
    friend constexpr bool operator==(const refusal&, const refusal&) = default;
};

/// The code that fits the shortage best.
[[nodiscard]] constexpr errc to_errc(shortage s) noexcept {
    switch (s) {
        case shortage::none: return errc::none;
        case shortage::nodes:
        case shortage::model:
        case shortage::zone:
        case shortage::affinity: return errc::no_device;
        case shortage::whole_devices: return errc::too_few_devices;
        case shortage::device_share: return errc::share_exceeded;
        case shortage::devices: return errc::invalid_specification;
        case shortage::device_memory:
        case shortage::cpu:
        case shortage::memory:
        case shortage::drained:
        case shortage::consent:
        case shortage::turn: break;
    }
    return errc::no_room;
}

/// A refusal as a failure, with its figures.
[[nodiscard]] constexpr failure to_failure(const refusal& why) noexcept {
    const auto because = [&] {
        switch (why.missing) {
            case shortage::whole_devices: return reason::too_few_devices;
            case shortage::device_share: return reason::share_there;
            case shortage::devices: return reason::named_devices;
            case shortage::device_memory:
            case shortage::memory: return reason::memory_there;
            case shortage::cpu: return reason::cpu_there;
            case shortage::nodes:
            case shortage::model:
            case shortage::zone:
            case shortage::affinity: return reason::no_such_node;
            case shortage::none:
            case shortage::drained:
            case shortage::consent:
            case shortage::turn: break;
        }
        return reason::unsaid;
    }();
    if (because == reason::unsaid) return {.code = to_errc(why.missing)};
    return {to_errc(why.missing), why.asked, why.left, why.asked, because};
}

/// For example "device share: asked for 810 permille, at most 470 on node 17".
[[nodiscard]] inline detail::message describe(const refusal& r) noexcept {
    detail::message m;
    m.add(to_string(r.missing));
    switch (r.missing) {
        case shortage::none:
        case shortage::consent:
        case shortage::zone:
        case shortage::nodes: break;
        case shortage::drained: m.add(": the closest is node ", r.node.index); break;
        case shortage::turn: m.add(": request ", r.asked, " came before it and wants the same"); break;
        case shortage::model: m.add(": no node has an allowed one"); break;
        case shortage::affinity: m.add(": no node satisfies it; the closest is node ", r.node.index); break;
        case shortage::devices: m.add(": asked for ", r.asked, ", named ", r.left, " of node ", r.node.index); break;
        case shortage::device_memory:
        case shortage::memory:
            m.add(": asked for ", bytes{r.asked}, ", at most ", bytes{r.left}, " on node ", r.node.index);
            break;
        case shortage::whole_devices:
            m.add(": asked for ", r.asked, ", at most ", r.left, " on node ", r.node.index);
            break;
        case shortage::device_share:
            m.add(": asked for ", r.asked, " permille, at most ", r.left, " on node ", r.node.index);
            break;
        case shortage::cpu:
            m.add(": asked for ", r.asked, " milli, at most ", r.left, " on node ", r.node.index);
            break;
    }
    return m;
}

/// A distinct request with its weight, which is its frequency or another measure.
struct request_kind {
    placement_request request{};  ///< without labels
    double weight = 0;            ///< for example its fraction of all requests
};

/// Kinds of requests, each with its frequency. A value.
class workload {
public:
    workload() = default;
    /// Ignores labels: requests that differ only in labels are of one kind.
    template <std::ranges::input_range R>
    requires std::convertible_to < std::ranges::range_reference_t<R>,
    const placement_request& > explicit workload(R&& history) {
        std::vector<placement_request> all;
        for (placement_request r : history) {
            r.group = r.near = r.apart = label{};
            all.push_back(r);
        }
        count(std::move(all));
    }

    /// The kinds, in ascending order of the requests. The weights are frequencies and sum to 1.
    [[nodiscard]] std::span<const request_kind> kinds() const noexcept { return kinds_; }
    /// The device time of an average request, in thousandths of a device.
    [[nodiscard]] double mean_permille() const noexcept;

private:
    // Counts the equal requests of `all`, which have no labels.
    void count(std::vector<placement_request> all);

    std::vector<request_kind> kinds_;
};

inline void workload::count(std::vector<placement_request> all) {
    std::sort(all.begin(), all.end());
    for (auto i = all.begin(); i != all.end();) {
        const auto next = std::upper_bound(i, all.end(), *i);
        kinds_.push_back({*i, static_cast<double>(next - i) / static_cast<double>(all.size())});
        i = next;
    }
}

inline auto workload::mean_permille() const noexcept -> double {
    double sum = 0;
    for (const auto& k : kinds_) sum += k.weight * static_cast<double>(device_permille(k.request));
    return sum;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
