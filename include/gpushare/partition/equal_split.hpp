// SPDX-License-Identifier: Apache-2.0
// An equal split: N bytes over M devices of one node, exactly N/M on each. Pure arithmetic over a description of
// the devices; whoever holds the quotas applies the result.
//
//   auto p = gpushare::equal_split(48_GiB, 4, devices, 1_GiB);     // 12 GiB on each of the four with most room
//   for (auto d : p.devices) reserve(d, p.per_device);
//
// The rules are those of Alibaba Cloud's multi-GPU sharing: N/M is whole in the unit asked for, the M devices are
// distinct and on one node. Each violated rule is an error of its own that says what would fit.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// A device as a split sees it.
struct device_room {
    device_id device{};
    std::uint32_t node = 0;
    bytes free{};  // what may still be promised there
};

/// A description of devices: a vector, a span, a view.
template <class R>
concept device_rooms = std::ranges::forward_range<R> && std::same_as<std::ranges::range_value_t<R>, device_room>;

/// N bytes over M devices: `per_device` on each. The devices are in ascending order of the order given, or, where
/// the split chose them, of their ids.
struct partition {
    bytes per_device{};
    std::vector<device_id> devices{};

    [[nodiscard]] bytes total() const noexcept { return per_device * devices.size(); }
};

namespace detail {

/// "10 GiB over 4 devices: not whole in units of 1 GiB; 8 GiB or 12 GiB would be"
[[noreturn]] inline void raise_split(const failure& f, bytes total, std::uint64_t devices, bytes unit) {
    message m;
    m.add("split of ", total, " over ", devices, devices == 1 ? " device: " : " devices: ");
    switch (f.code) {
        case errc::not_whole: {
            const bytes step = unit * devices, below = total - total % step, above = below + step;
            const bool has_below = below > bytes{}, has_above = above < bytes::max();  // sums saturate
            m.add("not whole in units of ", unit);
            if (has_below) m.add("; ", below);
            if (has_above) m.add(has_below ? " or " : "; ", above);
            if (has_below || has_above) m.add(" would be");
            break;
        }
        case errc::too_few_devices: m.add("only ", f.left, " there"); break;
        case errc::duplicate_device: m.add("device ", f.asked, " is named twice"); break;
        case errc::different_nodes: m.add("device ", f.asked, " is on another node than the first"); break;
        case errc::no_room:
            m.add("needs ", bytes{f.asked}, " on each, but only ", bytes{f.left}, " fits on each of ", devices, "; ",
                  bytes{f.left} * devices, " in all would fit");
            break;
        default: m.add(devices == 0 ? "needs at least one device" : "needs at least one unit of at least one byte");
    }
    throw operation_error(f.code, {}, m.c_str());
}

/// The rule that `total` over `devices` breaks by itself, whatever the devices are.
[[nodiscard]] constexpr failure check_split(bytes total, std::uint64_t devices, bytes unit) noexcept {
    if (devices == 0 || unit == bytes{} || total == bytes{}) return {errc::invalid_specification};
    const bytes step = unit * devices;
    if (step == bytes::max() || total % step != bytes{}) return {errc::not_whole, total.count(), 0, step.count()};
    return {};
}

}  // namespace detail

/// Splits over exactly the devices given. Codes: invalid_specification (no device, no bytes, no unit), not_whole,
/// duplicate_device and different_nodes (`asked` is the offending device's id), no_room (`asked` and `left` are bytes
/// per device).
template <device_rooms Rooms>
[[nodiscard]] result<partition> try_equal_split_over(bytes total, const Rooms& devices, bytes unit = bytes{1}) {
    const auto count = static_cast<std::uint64_t>(std::ranges::distance(devices));
    if (const auto broken = detail::check_split(total, count, unit); broken.code != errc::none) return broken;
    partition p{.per_device = total / count};
    bytes fits = bytes::max();
    for (const device_room& d : devices) {
        // In this order: devices are counted from 0 on every node.
        if (d.node != std::ranges::begin(devices)->node) return failure{errc::different_nodes, d.device.index};
        if (std::find(p.devices.begin(), p.devices.end(), d.device) != p.devices.end())
            return failure{errc::duplicate_device, d.device.index};
        p.devices.push_back(d.device);
        fits = std::min(fits, d.free);
    }
    if (fits < p.per_device) {
        const bytes whole = fits - fits % unit;
        return failure{errc::no_room, p.per_device.count(), whole.count(), p.per_device.count()};
    }
    return p;
}

/// Chooses `count` devices of one node with the most room (ties: lowest ids), then splits over them. Codes as above,
/// and too_few_devices (`left` is how many the best node has).
template <device_rooms Rooms>
[[nodiscard]] result<partition> try_equal_split(bytes total, std::uint32_t count, const Rooms& devices,
                                                bytes unit = bytes{1}) {
    if (const auto broken = detail::check_split(total, count, unit); broken.code != errc::none) return broken;
    std::vector<device_room> sorted(std::ranges::begin(devices), std::ranges::end(devices));
    std::ranges::sort(sorted, [](const device_room& a, const device_room& b) {
        if (a.node != b.node) return a.node < b.node;
        if (a.free != b.free) return a.free > b.free;
        return a.device < b.device;
    });
    // The node whose count-th freest device has the most room; a node's devices are now next to each other.
    std::span<device_room> best;
    std::uint64_t most_devices = 0;
    for (auto rest = std::span{sorted}; !rest.empty();) {
        const auto end = std::ranges::find_if(rest, [&](const device_room& d) { return d.node != rest.front().node; });
        const auto size = static_cast<std::size_t>(end - rest.begin());
        most_devices = std::max<std::uint64_t>(most_devices, size);
        if (size >= count && (best.empty() || rest[count - 1].free > best.back().free)) best = rest.first(count);
        rest = rest.subspan(size);
    }
    if (best.empty()) return failure{errc::too_few_devices, count, most_devices, most_devices};
    std::ranges::sort(best, [](const device_room& a, const device_room& b) { return a.device < b.device; });
    return try_equal_split_over(total, best, unit);
}

/// As the try_ forms; throws operation_error with the rule, and what would fit, in its text.
template <device_rooms Rooms>
[[nodiscard]] partition equal_split_over(bytes total, const Rooms& devices, bytes unit = bytes{1}) {
    auto p = try_equal_split_over(total, devices, unit);
    if (!p) detail::raise_split(p.why(), total, static_cast<std::uint64_t>(std::ranges::distance(devices)), unit);
    return *std::move(p);
}

template <device_rooms Rooms>
[[nodiscard]] partition equal_split(bytes total, std::uint32_t count, const Rooms& devices, bytes unit = bytes{1}) {
    auto p = try_equal_split(total, count, devices, unit);
    if (!p) detail::raise_split(p.why(), total, count, unit);
    return *std::move(p);
}

}  // namespace gpushare::inline GPUSHARE_ABI
