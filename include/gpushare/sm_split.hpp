// SPDX-License-Identifier: Apache-2.0
// How many SMs each partition of a device gets: plain arithmetic on the numbers that the device
// reports. compute/partitioned_limiter.hpp decides which clients get their own partition.
//
//   // an H100: {.sms = 132, .unit = 8, .units = 16}
//   const gpushare::sm_split can = device.split();
//   gpushare::equal_sms(can, 3);                            // 40, 40, 40; the other 12 stay unused
//   gpushare::weighted_sms(can, std::array{3U, 1U});        // 96, 32
//   auto parts = device.partition(gpushare::equal_sms(can, 2));
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a device can be split; no units if it can't be. Throws the errors of `device.split()`,
/// except errc::not_supported.
template <sm_partitionable Device>
[[nodiscard]] sm_split split_of(const Device& device) {
    try {
        return device.split();
    } catch (const operation_error& e) {
        if (e.code() != errc::not_supported) throw;
        return {};
    }
}

/// Throws operation_error (invalid_specification) if a partitioned device has streams in no
/// partition. `tags` comes from the device's outside_any_partition(). The error's text has the
/// tags; its figures have the first tag and the number of tags.
inline void refuse_strays(std::span<const std::uint32_t> tags) {
    if (tags.empty()) return;
    detail::message text;
    text.add("streams in no partition, whose kernels run on the SMs of all, have the tags");
    for (std::size_t i = 0; i < tags.size(); ++i) text.add(i == 0 ? " " : ", ", std::uint64_t{tags[i]});
    throw operation_error(failure{errc::invalid_specification, tags.front(), tags.size()}, {}, text);
}

/// Throws operation_error: errc::not_whole if one of `sms` isn't a multiple of the unit (figures:
/// asked, the multiple below, the unit), errc::too_few_sms if the sum is more than the device has,
/// or more than `units_left` units.
inline void check_sms(const sm_split& can, std::span<const std::uint32_t> sms, std::uint32_t units_left) {
    std::uint64_t sum = 0;
    for (const std::uint32_t n : sms) {
        if (can.unit == 0 || n == 0 || n % can.unit != 0)
            raise({errc::not_whole, n, can.unit == 0 ? 0 : n / can.unit * can.unit, can.unit, reason::whole_sms}, {},
                  "a partition of SMs");
        sum += n;
    }
    const std::uint64_t most = std::uint64_t{can.unit} * units_left;
    if (sum > most) raise({errc::too_few_sms, sum, most, can.sms, reason::sms_left}, {}, "partitions of a device");
}
/// The same for a device without partitions.
inline void check_sms(const sm_split& can, std::span<const std::uint32_t> sms) { check_sms(can, sms, can.units); }

/// The same number of SMs for each of `parts` partitions, as many as possible. The rest, less than
/// a unit for each partition, stays unused. Throws operation_error: errc::too_few_sms (in units) if
/// there are fewer units than partitions, and errc::invalid_specification for no partitions.
[[nodiscard]] inline std::vector<std::uint32_t> equal_sms(const sm_split& can, std::uint32_t parts) {
    if (parts == 0) throw operation_error(errc::invalid_specification, {}, "a device is split into one part or more");
    if (parts > can.units)
        raise({errc::too_few_sms, parts, 0, can.units, reason::count_limit}, {}, "partitions of a device");
    return std::vector<std::uint32_t>(parts, can.units / parts * can.unit);
}

/// All units in proportion to the weights, by largest remainder: one unit for each part, then one
/// by one to the part that is furthest below its due (ties: the earlier one). So no part is off by
/// a whole unit unless the minimum forces it. Throws as equal_sms, and errc::invalid_specification
/// for a weight of 0.
[[nodiscard]] inline std::vector<std::uint32_t> weighted_sms(const sm_split& can,
                                                             std::span<const std::uint32_t> weights) {
    const auto parts = static_cast<std::uint32_t>(weights.size());
    (void)equal_sms(can, parts);
    std::uint64_t total = 0;
    for (const std::uint32_t w : weights) {
        if (w == 0) throw operation_error(errc::invalid_specification, {}, "a partition without weight gets no SMs");
        total += w;
    }

    std::vector<std::uint32_t> units(parts, 1);
    // In units times total. A device has at most hundreds of units, so nothing overflows.
    const auto owed = [&](std::size_t i) {
        return static_cast<std::int64_t>(std::uint64_t{can.units} * weights[i]) -
               static_cast<std::int64_t>(units[i] * total);
    };
    for (std::uint32_t left = can.units - parts; left > 0; --left) {
        std::size_t neediest = 0;
        for (std::size_t i = 1; i < parts; ++i)
            if (owed(i) > owed(neediest)) neediest = i;
        ++units[neediest];
    }
    for (auto& n : units) n *= can.unit;
    return units;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
