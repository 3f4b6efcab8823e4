// SPDX-License-Identifier: Apache-2.0
// An equal split: N bytes, SMs or shares of device time over M devices of one node, exactly N/M on
// each. Pure arithmetic over a description of the devices; the caller applies the result to its
// quotas.
//
//   // 12 GiB on each of the four with most room
//   auto p = gpushare::equal_split(48_GiB, 4, devices, 1_GiB);
//   for (auto d : p.devices) reserve(d, p.per_device);
//
// The rules are those of Alibaba Cloud's multi-GPU sharing: N/M is a whole number of the requested
// units, and the M devices are distinct and on one node. Each rule has its own error code, and the
// error's text says what would fit.
//
// Bytes, SMs and device time are all counted in whole numbers. Each has its own error code for a
// lack of room:
//
//   std::vector<gpushare::sm_room> sms;  // the devices, each with its free SMs
//   // 16 SMs on each of four, in groups of 8
//   gpushare::equal_split(gpushare::sm_count{64}, 4, sms, gpushare::sm_count{8});
//   std::vector<gpushare::share_room> times;  // the same with the free device time
//   gpushare::equal_split(60_pct * 4, 4, times);  // 60 % of each of four devices' time
#pragma once

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ranges>
#include <span>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A number of SMs, on one device or several.
struct sm_count {
    std::uint64_t count = 0;  ///< the number of SMs

    friend constexpr auto operator<=>(sm_count, sm_count) = default;
    friend constexpr bool operator==(sm_count, sm_count) = default;
};

/// Device time of several devices together, in permille of one device: 2500 are two and a half
/// devices.
struct share_sum {
    std::uint64_t permille = 0;  ///< in permille of one device

    friend constexpr auto operator<=>(share_sum, share_sum) = default;
    friend constexpr bool operator==(share_sum, share_sum) = default;
};
/// The sum of this share of each device.
[[nodiscard]] constexpr share_sum operator*(share each, std::uint32_t devices) noexcept {
    return {std::uint64_t{each.permille()} * devices};
}

/// Says how an amount on one device is counted, and gives the type of a sum of such amounts.
/// Specialise it to split other kinds.
///   total_type                what several devices have together
///   count(amount or total)    in the smallest unit there is
///   amount(count), total(count)
///   too_little                the code of a refusal for lack of it
///   print(message, count)
template <class Amount>
struct amount_traits;

/// Memory.
template <>
struct amount_traits<bytes> {
    /// A sum over devices.
    using total_type = bytes;
    static constexpr errc too_little = errc::no_room;  ///< the code for a lack of room
    /// The amount in bytes.
    static constexpr std::uint64_t count(bytes b) noexcept { return b.count(); }
    /// The amount on one device.
    static constexpr bytes amount(std::uint64_t n) noexcept { return bytes{n}; }
    /// The amount on several devices.
    static constexpr bytes total(std::uint64_t n) noexcept { return bytes{n}; }
    /// Prints an amount for messages.
    static void print(detail::message& m, std::uint64_t n) noexcept { m.add(bytes{n}); }
};

/// SMs.
template <>
struct amount_traits<sm_count> {
    /// A sum over devices.
    using total_type = sm_count;
    static constexpr errc too_little = errc::too_few_sms;  ///< the code for a lack of room
    /// The number of SMs.
    static constexpr std::uint64_t count(sm_count s) noexcept { return s.count; }
    /// The amount on one device.
    static constexpr sm_count amount(std::uint64_t n) noexcept { return {n}; }
    /// The amount on several devices.
    static constexpr sm_count total(std::uint64_t n) noexcept { return {n}; }
    /// Prints an amount for messages.
    static void print(detail::message& m, std::uint64_t n) noexcept { m.add(n, n == 1 ? " SM" : " SMs"); }
};

/// Device time.
template <>
struct amount_traits<share> {
    /// A sum over devices.
    using total_type = share_sum;
    static constexpr errc too_little = errc::share_exceeded;  ///< the code for a lack of room
    /// The amount in permille of one device.
    static constexpr std::uint64_t count(share s) noexcept { return s.permille(); }
    /// The sum in permille of one device.
    static constexpr std::uint64_t count(share_sum s) noexcept { return s.permille; }
    /// The amount on one device. Throws std::out_of_range above a whole device.
    static constexpr share amount(std::uint64_t n) { return share::of_permille(n); }
    /// The amount on several devices.
    static constexpr share_sum total(std::uint64_t n) noexcept { return {n}; }
    /// Prints an amount for messages.
    static void print(detail::message& m, std::uint64_t n) noexcept {
        m.add(n / 10);
        if (n % 10 != 0) m.add(".", n % 10);
        m.add(" %");
    }
};

// clang-format 14 would break the compound requirements apart:
// clang-format off

/// An amount that can be split over devices.
template <class A>
concept splittable = std::copyable<A> && std::default_initializable<A> &&
    requires(A a, typename amount_traits<A>::total_type t, std::uint64_t n, detail::message& m) {
    { amount_traits<A>::count(a) } -> std::same_as<std::uint64_t>;
    { amount_traits<A>::count(t) } -> std::same_as<std::uint64_t>;
    { amount_traits<A>::amount(n) } -> std::same_as<A>;
    { amount_traits<A>::total(n) } -> std::same_as<typename amount_traits<A>::total_type>;
    { a == a } -> std::same_as<bool>;
    { amount_traits<A>::too_little } -> std::same_as<const errc&>;
    amount_traits<A>::print(m, n);
};

// clang-format on

static_assert(splittable<bytes> && splittable<sm_count> && splittable<share>);

/// A device as a split sees it.
template <splittable Amount>
struct room_of {
    device_id device{};      ///< the device's id on its node
    std::uint32_t node = 0;  ///< its node; all devices of a split must be on one
    Amount free{};           ///< the amount that may still be promised on the device
    Amount whole{};          ///< the device's total, for the figures of a refusal; may be left out
};
/// A device's room for memory.
using device_room = room_of<bytes>;
/// A device's room for SMs.
using sm_room = room_of<sm_count>;
/// A device's room for device time.
using share_room = room_of<share>;

/// The result of a split: `per_device` on each of the devices. The devices are in the order given
/// or, if the split chose them, in ascending order of ids.
template <splittable Amount>
struct partition_of {
    Amount per_device{};               ///< the amount on each device
    std::uint32_t node = 0;            ///< the node of the devices
    std::vector<device_id> devices{};  ///< the devices

    /// The total over all devices.
    [[nodiscard]] typename amount_traits<Amount>::total_type total() const {
        using traits = amount_traits<Amount>;
        // This can't overflow: the total was split before.
        return traits::total(traits::count(per_device) * devices.size());
    }
};
/// A partition of memory.
using partition = partition_of<bytes>;
/// A partition of SMs.
using sm_partition = partition_of<sm_count>;

/// A description of devices: a vector, a span, a view.
template <class R>
concept device_rooms = std::ranges::forward_range<R> &&
    std::same_as<std::ranges::range_value_t<R>, room_of<decltype(std::ranges::range_value_t<R>::free)>>;

/// The type of the free amounts in such a description.
template <device_rooms Rooms>
using amount_in = decltype(std::ranges::range_value_t<Rooms>::free);
/// The type of a sum of those amounts.
template <device_rooms Rooms>
using total_in = typename amount_traits<amount_in<Rooms>>::total_type;

namespace detail {

template <splittable Amount>
inline constexpr Amount smallest = amount_traits<Amount>::amount(1);

/// `a * b`, or the largest number instead of an overflow.
[[nodiscard]] constexpr std::uint64_t saturating_product(std::uint64_t a, std::uint64_t b) noexcept {
    return (bytes{a} * b).count();
}

/// "split of 10 GiB over 4 devices: not whole in units of 1 GiB; 8 GiB or 12 GiB would be"
template <splittable Amount>
[[noreturn]] void raise_split(const failure& f, std::uint64_t total, std::uint64_t devices, std::uint64_t unit) {
    message m;
    const auto amount = [&m](std::uint64_t n) { amount_traits<Amount>::print(m, n); };
    m.add("split of "), amount(total), m.add(" over ", devices, devices == 1 ? " device: " : " devices: ");
    switch (f.code) {
        case errc::not_whole: {
            constexpr auto most = std::numeric_limits<std::uint64_t>::max();
            const auto below = f.left, step = f.limit;
            const bool has_below = below > 0, has_above = step < most - below;
            m.add("not whole in units of "), amount(unit);
            if (has_below) m.add("; "), amount(below);
            if (has_above) m.add(has_below ? " or " : "; "), amount(below + step);
            if (has_below || has_above) m.add(" would be");
            break;
        }
        case errc::too_few_devices: m.add("there are only ", f.left); break;
        case errc::duplicate_device: m.add("device ", f.asked, " is named twice"); break;
        case errc::no_device: m.add("device ", f.asked, " is not in the topology"); break;
        case errc::different_nodes: m.add("device ", f.asked, " is on another node than the first"); break;
        case amount_traits<Amount>::too_little:
            m.add("needs "), amount(f.asked), m.add(" on each, but only "), amount(f.left);
            m.add(" fits on each of ", devices, "; "), amount(saturating_product(f.left, devices));
            m.add(" in all would fit");
            break;
        default:
            if (devices == 0)
                m.add("needs at least one device");
            else
                m.add("needs at least one unit of at least "), amount(1);
    }
    throw operation_error(f, {}, m);
}

/// Checks the rules that don't depend on the devices' room. Returns the rule that a split of
/// `total` over `devices` would break.
[[nodiscard]] constexpr failure check_split(std::uint64_t total, std::uint64_t devices, std::uint64_t unit) noexcept {
    if (devices == 0 || unit == 0 || total == 0) return {errc::invalid_specification};
    const auto step = saturating_product(unit, devices);
    // If the step saturated, the true step is larger.
    if (step == std::numeric_limits<std::uint64_t>::max()) return {errc::not_whole, total, 0, step};
    if (total % step != 0) return {errc::not_whole, total, total - total % step, step};
    return {};
}

/// try_equal_split_over for one type of description.
template <device_rooms Rooms>
[[nodiscard]] result<partition_of<amount_in<Rooms>>> split_over(total_in<Rooms> total, const Rooms& devices,
                                                                amount_in<Rooms> unit) {
    using traits = amount_traits<amount_in<Rooms>>;
    const auto count = static_cast<std::uint64_t>(std::ranges::distance(devices));
    if (const auto broken = check_split(traits::count(total), count, traits::count(unit)); broken.code != errc::none)
        return broken;
    const auto part = traits::count(total) / count;
    // A copy, since a view may compute its elements on the fly.
    room_of<amount_in<Rooms>> fullest = *std::ranges::begin(devices);
    partition_of<amount_in<Rooms>> p{.node = fullest.node};
    for (const auto& d : devices) {
        // The node is compared first, since every node counts devices from 0.
        if (d.node != p.node)
            return failure{.code = errc::different_nodes, .asked = d.device.index, .because = reason::other_node};
        if (std::ranges::find(p.devices, d.device) != p.devices.end())
            return failure{.code = errc::duplicate_device, .asked = d.device.index, .because = reason::device_twice};
        p.devices.push_back(d.device);
        if (d.free < fullest.free) fullest = d;
    }
    const auto free = traits::count(fullest.free);
    if (free < part)
        return failure{traits::too_little, part, free - free % traits::count(unit),
                       std::max(free, traits::count(fullest.whole))};
    p.per_device = traits::amount(part);
    return p;
}

}  // namespace detail

/// Splits `total` over exactly the given devices. Codes and their figures:
///   invalid_specification             no device, nothing to split, or no unit
///   not_whole                         `left` is the next smaller total that is whole, `limit` the
///                                     step between such totals
///   duplicate_device, different_nodes `asked` is the offending device's id
///   no_room, too_few_sms, share_exceeded   by the kind of amount, per device: asked, whole units
///                                          free on the fullest device, and its total if the
///                                          description says so
template <device_rooms Rooms>
[[nodiscard]] result<partition_of<amount_in<Rooms>>> try_equal_split_over(
    total_in<Rooms> total, const Rooms& devices, amount_in<Rooms> unit = detail::smallest<amount_in<Rooms>>) {
    using described = std::span<const room_of<amount_in<Rooms>>>;
    if constexpr (std::convertible_to<const Rooms&, described> && !std::same_as<Rooms, described>)
        // Vectors and spans then share one instantiation.
        return try_equal_split_over(total, described(devices), unit);
    else
        return detail::split_over(total, devices, unit);
}

/// Chooses the `count` devices of one node with the most room (ties: lowest ids), and splits over
/// them. Codes as above, and too_few_devices (`left` is the number of devices of the best node).
template <device_rooms Rooms>
[[nodiscard]] result<partition_of<amount_in<Rooms>>> try_equal_split(
    total_in<Rooms> total, std::uint32_t count, const Rooms& devices,
    amount_in<Rooms> unit = detail::smallest<amount_in<Rooms>>) {
    using traits = amount_traits<amount_in<Rooms>>;
    using room = room_of<amount_in<Rooms>>;
    if (const auto broken = detail::check_split(traits::count(total), count, traits::count(unit));
        broken.code != errc::none)
        return broken;
    std::vector<room> sorted(std::ranges::begin(devices), std::ranges::end(devices));
    // Both orders have one type, so that the compiler instantiates one sort.
    using order = bool (*)(const room&, const room&);
    const order by_room = [](const room& a, const room& b) {
        // Clang parses `node <` as template arguments.
        if (a.node != b.node) return b.node > a.node;
        if (a.free != b.free) return a.free > b.free;
        return a.device < b.device;
    };
    const order by_device = [](const room& a, const room& b) { return a.device < b.device; };
    std::sort(sorted.begin(), sorted.end(), by_room);
    // The node whose count-th freest device has the most room; the devices of a node are adjacent
    // now.
    auto best = sorted.end();
    std::uint64_t most_devices = 0;
    for (auto rest = sorted.begin(); rest != sorted.end();) {
        auto end = rest;
        while (end != sorted.end() && end->node == rest->node) ++end;
        const auto size = end - rest;
        most_devices = std::max(most_devices, static_cast<std::uint64_t>(size));
        if (size >= count && (best == sorted.end() || rest[count - 1].free > best[count - 1].free)) best = rest;
        rest = end;
    }
    if (best == sorted.end()) return failure{errc::too_few_devices, count, most_devices, most_devices};
    std::sort(best, best + count, by_device);
    return try_equal_split_over(total, std::span<const room>{&*best, count}, unit);
}

/// As try_equal_split_over, but throws operation_error with the figures. The text has the violated
/// rule and what would fit.
template <device_rooms Rooms>
[[nodiscard]] partition_of<amount_in<Rooms>> equal_split_over(
    total_in<Rooms> total, const Rooms& devices, amount_in<Rooms> unit = detail::smallest<amount_in<Rooms>>) {
    using traits = amount_traits<amount_in<Rooms>>;
    auto p = try_equal_split_over(total, devices, unit);
    if (!p)
        detail::raise_split<amount_in<Rooms>>(p.why(), traits::count(total),
                                              static_cast<std::uint64_t>(std::ranges::distance(devices)),
                                              traits::count(unit));
    return *std::move(p);
}

/// Splits `total` over the `count` devices with the most room. Throws operation_error with the code
/// of try_equal_split.
template <device_rooms Rooms>
[[nodiscard]] partition_of<amount_in<Rooms>> equal_split(total_in<Rooms> total, std::uint32_t count,
                                                         const Rooms& devices,
                                                         amount_in<Rooms> unit = detail::smallest<amount_in<Rooms>>) {
    using traits = amount_traits<amount_in<Rooms>>;
    auto p = try_equal_split(total, count, devices, unit);
    if (!p) detail::raise_split<amount_in<Rooms>>(p.why(), traits::count(total), count, traits::count(unit));
    return *std::move(p);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
