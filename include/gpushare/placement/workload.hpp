// SPDX-License-Identifier: Apache-2.0
// The expected workload: the distinct requests and how often each comes, counted in a list of past requests.
//
//   gpushare::workload usual(history);     // any range of placement_request
//   for (const auto& [request, weight] : usual.kinds()) ...
#pragma once

#include <algorithm>
#include <concepts>
#include <ranges>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/placement.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A distinct request with its weight: its frequency, or another measure's weight.
struct request_kind {
    placement_request request{};  ///< without labels
    double weight = 0;            ///< parts of all requests
};

/// Kinds of requests, each with its frequency. A value.
class workload {
public:
    workload() = default;
    /// Labels are ignored: requests that differ in nothing else are of one kind.
    template <std::ranges::input_range R>
    requires std::convertible_to < std::ranges::range_reference_t<R>,
    const placement_request& > explicit workload(R&& history) {
        std::vector<placement_request> all;
        for (placement_request r : history) {
            r.group = r.near = r.apart = label{};
            all.push_back(r);
        }
        std::ranges::sort(all);
        for (auto i = all.begin(); i != all.end();) {
            const auto next = std::upper_bound(i, all.end(), *i);
            kinds_.push_back({*i, static_cast<double>(next - i) / static_cast<double>(all.size())});
            i = next;
        }
    }

    /// In ascending order of the requests; the weights are frequencies and sum to 1.
    [[nodiscard]] std::span<const request_kind> kinds() const noexcept { return kinds_; }
    /// Device time of an average request, in thousandths of a device.
    [[nodiscard]] double mean_permille() const noexcept {
        double sum = 0;
        for (const auto& k : kinds_) sum += k.weight * static_cast<double>(device_permille(k.request));
        return sum;
    }

private:
    std::vector<request_kind> kinds_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
