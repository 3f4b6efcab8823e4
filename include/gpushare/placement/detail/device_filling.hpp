// SPDX-License-Identifier: Apache-2.0
// The best filling of one device with requests, and its value at given prices. This is the knapsack
// problem inside bid prices and node values.
//
//   gpushare::detail::device_filling device(kinds);
//   device.clear();
//   for (...) device.offer(kind, net);  // permille of device time that a part of this kind brings
//   double best = device.solve().back();   // of a whole device
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/placement.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A knapsack over the sizes of the parts, solved for every free share at once; a request for
/// several devices has several parts. Which kind takes a part of a given size depends on chance and
/// profit, by a logit choice: kinds come in proportion to their frequency, and a kind that brings
/// `temperature` more is taken e times as often. For that reason alone, a size with few requests is
/// worth less than its share. (McFadden, "Conditional logit analysis of qualitative choice
/// behavior", 1974.)
class device_filling {
public:
    static constexpr std::uint32_t whole = 1000;
    /// The temperature in permille of device time. Results are much the same from 15 to 25.
    static constexpr double temperature = 20;

    explicit device_filling(std::span<const request_kind> kinds) : size_of_(kinds.size()), odds_(kinds.size()) {
        double parts = 0;
        for (const auto& [r, weight] : kinds) {
            if (r.devices == 0 || r.each == share{}) continue;
            sizes_.push_back(r.each.permille());
            unit_ = std::gcd(unit_, r.each.permille());
            parts += weight * r.devices;
        }
        std::ranges::sort(sizes_);
        sizes_.erase(std::unique(sizes_.begin(), sizes_.end()), sizes_.end());
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            const auto& [r, weight] = kinds[i];
            size_of_[i] =
                static_cast<std::size_t>(std::ranges::lower_bound(sizes_, r.each.permille()) - sizes_.begin());
            odds_[i] = parts > 0 ? weight * r.devices / parts : 0;
        }
        sum_.resize(sizes_.size());
        net_.resize(sizes_.size());
        value_.resize(whole / unit_ + 1);
        last_.resize(value_.size());
    }

    /// The unit, in permille. All shares are multiples of it.
    [[nodiscard]] std::uint32_t unit() const noexcept { return unit_; }

    void clear() noexcept { std::ranges::fill(sum_, 0.0); }
    /// Offers a part of kind `i`, which brings `net`. The kind has devices, and a share of each.
    void offer(std::size_t i, double net) noexcept { sum_[size_of_[i]] += odds(i, net); }

    /// The value of a device with 0, 1, ... units free.
    std::span<const double> solve() noexcept {
        for (std::size_t s = 0; s < sizes_.size(); ++s) net_[s] = sizes_[s] + temperature * std::log(sum_[s]);
        for (std::size_t x = 1; x < value_.size(); ++x) {
            value_[x] = value_[x - 1];
            last_[x] = sizes_.size();
            for (std::size_t s = 0; s < sizes_.size() && sizes_[s] / unit_ <= x; ++s) {
                const double v = net_[s] + value_[x - sizes_[s] / unit_];
                if (v <= value_[x]) continue;
                value_[x] = v;
                last_[x] = s;
            }
        }
        return value_;
    }

    /// The number of parts of each size that fill a whole device best. Call best() after solve().
    /// Writes one number for each size to `count`.
    void best(std::vector<double>& count) const {
        count.assign(sizes_.size(), 0.0);
        for (auto x = value_.size() - 1; x > 0;) {
            if (last_[x] == sizes_.size()) {
                --x;
            } else {
                ++count[last_[x]];
                x -= sizes_[last_[x]] / unit_;
            }
        }
    }
    /// The fraction of a size's parts that goes to kind `i`, which brings `net`.
    [[nodiscard]] double chance(std::size_t i, double net) const noexcept {
        const double all = sum_[size_of_[i]];
        return all > 0 ? odds(i, net) / all : 0;
    }
    [[nodiscard]] std::size_t size_of(std::size_t i) const noexcept { return size_of_[i]; }

private:
    // Computed relative to a net that equals the share, so that the exponentials stay in range.
    [[nodiscard]] double odds(std::size_t i, double net) const noexcept {
        constexpr double limit = 600;  // exp(limit) is finite
        return odds_[i] * std::exp(std::clamp((net - sizes_[size_of_[i]]) / temperature, -limit, limit));
    }

    std::uint32_t unit_ = whole;
    std::vector<std::uint32_t> sizes_;  // permille, ascending
    std::vector<std::size_t> size_of_;  // of each kind
    std::vector<double> odds_;          // of each kind: its fraction of all requested parts
    std::vector<double> sum_, net_;     // of each size
    std::vector<double> value_;         // indexed by free units
    std::vector<std::size_t> last_;     // indexed by free units: the size that was put last
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
