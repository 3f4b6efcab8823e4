// SPDX-License-Identifier: Apache-2.0
// The value of a node: the most that filling its free devices can earn at given bid prices, with
// the remaining cores and memory. For example, a device with 190 permille free is worth nothing if
// no request asks for so little, and eight free devices with only two free cores are worth little
// more than one.
//
//   gpushare::detail::node_value value(workload, gpushare::detail::bid_prices(cluster, workload));
//   const gpushare::detail::reduced_node before(n), after(n, request, devices);
//   double cost = value(before) - value(after);
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/bid_prices.hpp>
#include <gpushare/placement/detail/device_filling.hpp>
#include <gpushare/placement/detail/reduced_node.hpp>
#include <gpushare/placement/placement.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// An upper bound on the best filling, by Lagrangian relaxation. Cores and memory have a price of
/// the node's own: the cheapest price that explains their scarcity there. The bound is the minimum,
/// over host prices q, of q * (the free cores and memory) plus the sum over devices of the best
/// filling of each device, at bid prices less q * (the cores and memory that the filling takes).
/// For a grid of host prices, the second term is a table.
class node_value {
public:
    /// For these prices in permille, one for each kind.
    node_value(const workload& expected, std::span<const double> price) {
        const auto kinds = expected.kinds();
        device_filling device(kinds);
        unit_ = device.unit();
        lay_grid(kinds, price);
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            const auto& r = kinds[i].request;
            if (r.devices > 1 && price[i] > 0) many_.push_back({r, price[i], {}});
        }
        for (std::size_t m = 0; m < device_model::count; ++m) {
            const device_model model{static_cast<std::uint8_t>(m)};
            std::vector<char> allowed(kinds.size());
            for (std::size_t i = 0; i < kinds.size(); ++i) allowed[i] = kinds[i].request.models.allows(model) ? 1 : 0;
            const auto same = std::ranges::find(allowed_, allowed);
            table_of_[m] = static_cast<std::uint8_t>(same - allowed_.begin());
            if (same != allowed_.end()) continue;
            allowed_.push_back(allowed);
            tables_.push_back(table(kinds, price, allowed, device));
        }
    }

    /// The value in permille of device time.
    [[nodiscard]] double operator()(const reduced_node& n) const noexcept {
        const auto& whole_node = n.node.whole;
        const auto& rows = tables_[table_of_[whole_node.model.index]];
        const lanes cpu = spread(static_cast<float>(n.cpu_milli));
        const lanes memory = spread(static_cast<float>(static_cast<double>(n.memory.count()) / host_prices::mib));
        row sum;
        for (std::size_t q = 0; q < groups; ++q) sum[q] = cpu_price_[q] * cpu + memory_price_[q] * memory;
        std::uint32_t whole_devices = 0;
        for (std::uint32_t d = 0; d < whole_node.devices; ++d) {
            const std::uint32_t x = n.free(d);
            whole_devices += x == whole ? 1U : 0U;
            if (x < unit_) continue;
            const row& device = rows[x / unit_];
            for (std::size_t q = 0; q < groups; ++q) sum[q] += device[q];
        }
        float best = least(sum);
        if (whole_devices < 2) return best;
        // One request for several devices, in place of the requests that these devices would
        // otherwise hold.
        const row& device = rows[whole / unit_];
        for (const auto& [r, price, host] : many_) {
            if (r.devices > whole_devices || r.cpu_milli > n.cpu_milli || r.memory > n.memory) continue;
            if (!r.models.allows(whole_node.model)) continue;
            const lanes devices = spread(static_cast<float>(r.devices)), brings = spread(static_cast<float>(price));
            row with;
            for (std::size_t q = 0; q < groups; ++q) with[q] = sum[q] + brings - host[q] - devices * device[q];
            best = std::max(best, least(with));
        }
        return best;
    }

private:
    static constexpr std::uint32_t whole = device_filling::whole;
    static constexpr std::size_t cpu_points = 24, memory_points = 4, points = cpu_points * memory_points;

    // Four floats that are added at once, whatever the compiler's flags are.
    using lanes [[gnu::vector_size(16)]] = float;
    static constexpr std::size_t width = sizeof(lanes) / sizeof(float), groups = points / width;
    using row = std::array<lanes, groups>;  // one value for each point of the grid

    static lanes spread(float x) noexcept { return lanes{x, x, x, x}; }
    static void put(row& r, std::size_t point, double x) noexcept {
        r[point / width][point % width] = static_cast<float>(x);
    }
    static float get(const row& r, std::size_t point) noexcept { return r[point / width][point % width]; }
    static float least(const row& r) noexcept {
        lanes m = r[0];
        for (const lanes& x : r) m = x < m ? x : m;
        return std::min({m[0], m[1], m[2], m[3]});
    }

    struct many {
        placement_request request{};
        double price = 0;
        row host{};  // the cost of its cpu and memory, for each point of the grid
    };

    // The grid of host prices goes from "free" to "so high that no kind pays", with smaller steps
    // between low prices. Cores never cost less than requests without a device pay for them.
    void lay_grid(std::span<const request_kind> kinds, std::span<const double> price) {
        double most_cpu = 0, most_memory = 0;
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            const auto& r = kinds[i].request;
            if (r.cpu_milli != 0) most_cpu = std::max(most_cpu, price[i] / host_prices{1, 0}.of(r));
            if (r.memory != bytes{}) most_memory = std::max(most_memory, price[i] / host_prices{0, 1}.of(r));
        }
        const auto level = [](double most, std::size_t i, std::size_t of) {
            constexpr double finest = 1.0 / 512;
            return i == 0 ? 0.0 : most * std::pow(finest, 1 - static_cast<double>(i) / static_cast<double>(of - 1));
        };
        for (std::size_t m = 0, q = 0; m < memory_points; ++m) {
            const double memory = level(most_memory, m, memory_points);
            double floor = 0;
            for (std::size_t i = 0; i < kinds.size(); ++i) {
                const auto& r = kinds[i].request;
                if (r.devices == 0 && r.cpu_milli != 0)
                    floor = std::max(floor, (price[i] - host_prices{0, memory}.of(r)) / host_prices{1, 0}.of(r));
            }
            for (std::size_t i = 0; i < cpu_points; ++i, ++q) {
                put(cpu_price_, q, floor + level(most_cpu, i, cpu_points));
                put(memory_price_, q, memory);
            }
        }
    }

    [[nodiscard]] host_prices point(std::size_t q) const noexcept {
        return {get(cpu_price_, q), get(memory_price_, q)};
    }

    std::vector<row> table(std::span<const request_kind> kinds, std::span<const double> price,
                           std::span<const char> allowed, device_filling& device) {
        std::vector<row> rows(whole / unit_ + 1);
        for (std::size_t q = 0; q < points; ++q) {
            device.clear();
            for (std::size_t i = 0; i < kinds.size(); ++i) {
                const auto& r = kinds[i].request;
                if (r.devices == 1 && r.each != share{} && allowed[i] != 0) device.offer(i, price[i] - point(q).of(r));
            }
            const auto values = device.solve();
            for (std::size_t x = 0; x < rows.size(); ++x) put(rows[x], q, values[x]);
            for (auto& m : many_) put(m.host, q, point(q).of(m.request));
        }
        return rows;
    }

    std::uint32_t unit_ = whole;
    row cpu_price_{}, memory_price_{};
    std::vector<many> many_;
    // [free units of a device], for each set of models that differs
    std::vector<std::vector<row>> tables_;
    std::vector<std::vector<char>> allowed_;
    std::array<std::uint8_t, device_model::count> table_of_{};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
