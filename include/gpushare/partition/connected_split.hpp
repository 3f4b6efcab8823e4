// SPDX-License-Identifier: Apache-2.0
// An equal split over the best connected devices among those that have room for their part.
//
//   std::vector<gpushare::device_room> rooms;           // the devices, each with its free bytes
//   gpushare::topology links({{}, {}, {}, {}});         // how they are connected
//   auto p = gpushare::connected_split(48_GiB, 4, rooms, links, 1_GiB);     // parts are multiples of 1 GiB
#pragma once

#include <cstdint>
#include <ranges>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/partition/topology.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

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
