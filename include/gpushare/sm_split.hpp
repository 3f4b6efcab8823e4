// SPDX-License-Identifier: Apache-2.0
// How many SMs each partition of a device gets, and which clients get a partition of their own: plain arithmetic on the
// numbers that the device reports. partitioned_limiter applies it.
//
//   const gpushare::sm_split can = device.split();          // an H100: {.sms = 132, .unit = 8, .units = 16}
//   gpushare::equal_sms(can, 3);                            // 40, 40, 40; the other 12 stay unused
//   gpushare::weighted_sms(can, std::array{3U, 1U});        // 96, 32
//   auto parts = device.partition(gpushare::equal_sms(can, 2));
//
//   const auto p = gpushare::plan_sms(can, std::array{60_pct, 35_pct, 5_pct});
//   p.sms              // 80, 48
//   p.clients[2]       // in partition 1, an eighth of its time: 5 % of the device are less than a unit
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a device can be split; no units where it can't be. Throws what `device.split()` throws but for errc::not_supported.
template <sm_partitionable Device>
[[nodiscard]] sm_split split_of(const Device& device) {
    try {
        return device.split();
    } catch (const operation_error& e) {
        if (e.code() != errc::not_supported) throw;
        return {};
    }
}

/// Throws operation_error (invalid_specification, with the tags in its text, the first one and how many in its figures) if there
/// are streams of a partitioned device in no partition: `tags` is what its outside_any_partition() says.
inline void refuse_strays(std::span<const std::uint32_t> tags) {
    if (tags.empty()) return;
    detail::message text;
    text.add("streams in no partition, whose kernels run on the SMs of all, have the tags");
    for (std::size_t i = 0; i < tags.size(); ++i) text.add(i == 0 ? " " : ", ", std::uint64_t{tags[i]});
    throw operation_error(failure{errc::invalid_specification, tags.front(), tags.size()}, {}, text);
}

/// Throws operation_error: errc::not_whole if one of `sms` isn't a multiple of the unit (figures: asked, the multiple
/// below, the unit), errc::too_few_sms if the sum is more than there is, or than `units_left` of it.
inline void check_sms(const sm_split& can, std::span<const std::uint32_t> sms, std::uint32_t units_left) {
    std::uint64_t sum = 0;
    for (const std::uint32_t n : sms) {
        if (can.unit == 0 || n == 0 || n % can.unit != 0)
            raise({errc::not_whole, n, can.unit == 0 ? 0 : n / can.unit * can.unit, can.unit}, {},
                  "SMs of a partition, which are had in units");
        sum += n;
    }
    const std::uint64_t most = std::uint64_t{can.unit} * units_left;
    if (sum > most) raise({errc::too_few_sms, sum, most, can.sms}, {}, "partitions of a device");
}
/// The same where nobody has any yet.
inline void check_sms(const sm_split& can, std::span<const std::uint32_t> sms) { check_sms(can, sms, can.units); }

/// The same number of SMs for each of `parts`, as many as possible; the rest, less than a unit for each, stays unused.
/// Throws operation_error: errc::too_few_sms (in units) if there isn't one unit for each; errc::invalid_specification
/// for no parts.
[[nodiscard]] inline std::vector<std::uint32_t> equal_sms(const sm_split& can, std::uint32_t parts) {
    if (parts == 0) throw operation_error(errc::invalid_specification, {}, "a device is split into one part or more");
    if (parts > can.units) raise({errc::too_few_sms, parts, can.units, can.units}, {}, "units of SMs");
    return std::vector<std::uint32_t>(parts, can.units / parts * can.unit);
}

/// All units in proportion to the weights, by largest remainder: one unit for each part, then one by one to the part
/// that is furthest below its due (ties: the earlier one). So no part is off by a whole unit unless the minimum forces
/// it. Throws as equal_sms, and errc::invalid_specification for a weight of 0.
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
    // In units times total. A device has hundreds of units at the most, so nothing overflows.
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

/// Which partition each client of a device runs in, and which clients share one. A value.
struct sm_plan {
    /// Of one client.
    struct place {
        std::uint32_t partition = 0;    ///< which, from 0; 0 where the device isn't partitioned
        share weight = share::whole();  ///< of the partition's time, in proportion to the others in it
        bool alone = true;              ///< no other client is in the partition

        friend bool operator==(const place&, const place&) = default;
    };

    std::vector<std::uint32_t>
        sms;                     ///< SMs of each partition; empty: the device isn't partitioned, and all share its time
    std::vector<place> clients;  ///< in the order in which they were given

    /// Whether the device is partitioned.
    [[nodiscard]] bool partitioned() const noexcept { return !sms.empty(); }
    /// How many partitions; 1 where the device isn't partitioned.
    [[nodiscard]] std::uint32_t num_partitions() const noexcept {
        return std::max<std::uint32_t>(static_cast<std::uint32_t>(sms.size()), 1);
    }

    friend bool operator==(const sm_plan&, const sm_plan&) = default;
};

namespace detail {

inline void check_shares(std::span<const share> shares) {
    std::uint64_t sum = 0;
    for (const share s : shares) sum += s.permille();
    if (shares.empty() || std::count(shares.begin(), shares.end(), share{}) != 0)
        throw operation_error(errc::invalid_specification, {},
                              "a split of SMs needs clients, and each of them a share");
    if (sum > 1000) raise({errc::share_exceeded, sum, 1000, 1000}, {}, "a split of SMs, in permille");
}

/// Not partitioned: everybody has a share of the device's time.
[[nodiscard]] inline sm_plan gated_plan(std::span<const share> shares) {
    sm_plan plan;
    for (const share s : shares) plan.clients.push_back({.partition = 0, .weight = s, .alone = shares.size() == 1});
    return plan;
}

/// The clients of each partition: the two smallest are put together (ties: the earlier) until none is due less than a unit,
/// so that as many clients as possible stay alone.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> sm_groups(std::span<const share> shares,
                                                                     std::uint32_t units) {
    struct group {
        std::uint64_t weight = 0;
        std::vector<std::size_t> clients;
    };
    std::vector<group> groups;
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
        groups.push_back({shares[i].permille(), {i}});
        total += shares[i].permille();
    }
    const auto lighter = [](const group& a, const group& b) { return a.weight < b.weight; };
    while (groups.size() > 1) {
        std::stable_sort(groups.begin(), groups.end(), lighter);
        if (groups[0].weight * units >= total) break;
        groups[1].weight += groups[0].weight;
        groups[1].clients.insert(groups[1].clients.end(), groups[0].clients.begin(), groups[0].clients.end());
        groups.erase(groups.begin());
    }
    std::vector<std::vector<std::size_t>> clients;
    for (auto& g : groups) {
        std::sort(g.clients.begin(), g.clients.end());
        clients.push_back(std::move(g.clients));
    }
    std::sort(clients.begin(), clients.end());  // partitions in the order of their first clients
    return clients;
}

}  // namespace detail

/// Gives out all SMs in proportion to the shares (see weighted_sms: no client is off by a unit). Clients that are due
/// less than a unit share a partition with one another, or else with the client that is due least. If all would share
/// one, the device isn't partitioned. Throws operation_error: invalid_specification (no client, or one without a
/// share), share_exceeded.
[[nodiscard]] inline sm_plan plan_sms(const sm_split& can, std::span<const share> shares) {
    detail::check_shares(shares);
    const auto groups = detail::sm_groups(shares, can.units);
    if (groups.size() == 1 || can.unit == 0) return detail::gated_plan(shares);
    std::vector<std::uint32_t> weights;
    sm_plan plan;
    plan.clients.resize(shares.size());
    for (const auto& clients : groups) {
        std::uint32_t sum = 0;
        for (const std::size_t i : clients) sum += shares[i].permille();
        for (const std::size_t i : clients)
            plan.clients[i] = {.partition = static_cast<std::uint32_t>(weights.size()),
                               .weight = share::of_permille(std::uint64_t{shares[i].permille()} * 1000 / sum),
                               .alone = clients.size() == 1};
        weights.push_back(sum);
    }
    plan.sms = weighted_sms(can, weights);
    return plan;
}

/// Gives each client the same number of SMs and leaves the rest unused; equal shares of the device's time if there
/// isn't a unit for each. Throws operation_error: invalid_specification (no client, or more than a thousand).
[[nodiscard]] inline sm_plan plan_equal_sms(const sm_split& can, std::size_t clients) {
    const std::vector<share> shares(
        clients, clients > 1000 ? share{} : share::of_permille(1000 / std::max<std::size_t>(clients, 1)));
    detail::check_shares(shares);
    sm_plan plan = detail::gated_plan(shares);
    if (clients == 1 || clients > can.units) return plan;
    plan.sms = equal_sms(can, static_cast<std::uint32_t>(clients));
    for (std::uint32_t i = 0; i < clients; ++i) plan.clients[i] = {.partition = i};
    return plan;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
