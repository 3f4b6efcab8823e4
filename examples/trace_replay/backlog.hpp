// SPDX-License-Identifier: Apache-2.0
// Shares under backlog: the device time that tenants got in the windows in which they always had
// work waiting.
//
//   backlog_meter meter(tenants, start, end);
//   meter.add_device(backlogs, weights, busy_between);   meter.largest_error_pp();
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <vector>

#include <gpushare/units.hpp>

namespace trace_replay {

struct interval {
    gpushare::instant from{}, to{};
};

/// Joins overlapping and touching intervals, in the order of time.
[[nodiscard]] inline std::vector<interval> joined(std::vector<interval> all) {
    std::ranges::sort(all, {}, &interval::from);
    std::vector<interval> out;
    for (const auto& i : all) {
        if (out.empty() || i.from > out.back().to)
            out.push_back(i);
        else
            out.back().to = std::max(out.back().to, i.to);
    }
    return out;
}

[[nodiscard]] inline bool covers(const std::vector<interval>& all, gpushare::instant from, gpushare::instant to) {
    return std::ranges::any_of(all, [&](const interval& i) { return i.from <= from && to <= i.to; });
}

/// Windows are whole seconds from the start of the run. The first window isn't counted.
class backlog_meter {
public:
    struct account {
        double configured = 0, achieved = 0;  // sums over the windows
        std::size_t windows = 0;
    };

    backlog_meter(std::size_t tenants, gpushare::instant start, gpushare::instant end)
        : accounts_(tenants), start_(start), end_(end), together_(static_cast<std::size_t>((end - start) / tick)) {}

    /// `backlogs` and `weights` are indexed by tenant; a tenant of weight 0 isn't compared.
    /// `busy_between(from, to)` returns the device time by tenant.
    template <std::invocable<gpushare::instant, gpushare::instant> Busy>
    void add_device(std::vector<std::vector<interval>> backlogs, const std::vector<double>& weights,
                    Busy busy_between) {
        for (auto& b : backlogs) b = joined(std::move(b));
        constexpr gpushare::ns window = std::chrono::seconds(1);
        for (auto from = start_ + window; from + window <= end_; from += window) {
            const auto busy = busy_between(from, from + window);
            std::vector<std::size_t> group;
            double weight = 0, time = 0;
            for (std::size_t t = 0; t < backlogs.size(); ++t) {
                if (weights[t] <= 0 || !covers(backlogs[t], from, from + window)) continue;
                group.push_back(t);
                weight += weights[t];
                time += busy[t];
            }
            if (group.size() < 2 || time <= 0) continue;
            for (const auto t : group) {
                const double configured = weights[t] / weight, achieved = busy[t] / time;
                accounts_[t].configured += configured;
                accounts_[t].achieved += achieved;
                ++accounts_[t].windows;
                largest_error_ = std::max(largest_error_, std::abs(achieved - configured));
                largest_relative_ = std::max(largest_relative_, std::abs(achieved / configured - 1));
            }
        }
        for (std::size_t i = 0; i < together_.size(); ++i) {
            const auto at = start_ + static_cast<gpushare::ns::rep>(i) * tick;
            const auto n = std::ranges::count_if(
                backlogs, [&](const std::vector<interval>& b) { return covers(b, at, at + tick); });
            if (n >= 3) together_[i] = true;
        }
    }

    [[nodiscard]] const std::vector<account>& tenants() const { return accounts_; }
    /// The largest error in percentage points, over all tenants, windows and devices.
    [[nodiscard]] double largest_error_pp() const { return largest_error_ * 100; }
    /// The largest error in percent of the tenant's share.
    [[nodiscard]] double largest_relative_error() const { return largest_relative_ * 100; }
    /// How long at least three tenants were backlogged on the same device.
    [[nodiscard]] gpushare::ns together() const { return std::ranges::count(together_, true) * tick; }

private:
    static constexpr gpushare::ns tick = std::chrono::milliseconds(10);

    std::vector<account> accounts_;
    gpushare::instant start_, end_;
    double largest_error_ = 0, largest_relative_ = 0;
    std::vector<bool> together_;  // indexed by tick
};

}  // namespace trace_replay
