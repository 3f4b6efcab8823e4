// SPDX-License-Identifier: Apache-2.0
// Which clients of a device get a partition of SMs of their own, and how many each partition gets:
// plain arithmetic on the numbers that the device reports. partitioned_limiter applies it.
//
//   const gpushare::sm_split can = device.split();          // an H100: {.sms = 132, .unit = 8, .units = 16}
//   const auto p = gpushare::plan_sms(can, std::array{60_pct, 35_pct, 5_pct});
//   p.sms;             // 80, 48
//   p.clients[2];      // in partition 1, an eighth of its time: 5 % of the device are less than a unit
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
#include <gpushare/sm_split.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Which partition each client of a device runs in, and which clients share one. A value.
struct sm_plan {
    /// The place of one client.
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
    if (sum > 1000) raise({errc::share_exceeded, sum, 0, 1000, reason::weights_exceeded}, {}, "a split of SMs");
}

/// Not partitioned: everybody has a share of the device's time.
[[nodiscard]] inline sm_plan gated_plan(std::span<const share> shares) {
    sm_plan plan;
    for (const share s : shares) plan.clients.push_back({.partition = 0, .weight = s, .alone = shares.size() == 1});
    return plan;
}

/// The clients of each partition: the two smallest are put together (ties: the earlier) until none
/// is due less than a unit, so that as many clients as possible stay alone.
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
