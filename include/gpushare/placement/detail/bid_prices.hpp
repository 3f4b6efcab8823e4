// SPDX-License-Identifier: Apache-2.0
// Bid prices: the cost of each kind of request to a cluster, in permille of device time. The cost
// counts all scarce resources that the request takes. For example, a request for half a device and
// half the node's cores costs more than a request for half a device.
//
//   // one per kind
//   const auto price = gpushare::detail::bid_prices(cluster, gpushare::workload(history));
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/device_filling.hpp>
#include <gpushare/placement/placement.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The prices of a milli of cpu and of a MiB of host memory on a node, in permille of device time.
struct host_prices {
    double cpu = 0, memory = 0;

    static constexpr double mib = 1 << 20;
    [[nodiscard]] double of(const placement_request& r) const noexcept {
        return cpu * static_cast<double>(r.cpu_milli) + memory * static_cast<double>(r.memory.count()) / mib;
    }
};

/// Whether an empty node of that description can hold the request.
[[nodiscard]] constexpr bool fits_empty(const placement_request& r, const node_description& n) noexcept {
    return may_be_in(r, n.zone) && r.cpu_milli <= n.cpu_milli && r.memory <= n.memory && r.devices <= n.devices &&
           (r.devices == 0 || (r.models.allows(n.model) && r.device_memory <= n.device_memory));
}

/// Finds the prices at which the stream of requests is served evenly when it is spread over the
/// cluster's nodes by profit. This is the dual of a linear program that serves as many average
/// streams as the empty cluster holds. (Talluri and van Ryzin, "An analysis of bid-price controls
/// for network revenue management", 1998.) The updates are multiplicative: in each round every kind
/// of node takes the most profitable requests, and kinds that are taken more often than others get
/// cheaper.
class price_search {
public:
    price_search(const cluster& c, const workload& expected)
        : kinds_(expected.kinds()), mean_permille_(expected.mean_permille()), device_(kinds_), price_(kinds_.size()) {
        double cpu = 0, memory = 0;
        for (std::uint32_t i = 0; i < c.size(); ++i) {
            const auto n = c.there({i});
            if (n.devices == 0) continue;
            cpu += static_cast<double>(n.cpu_milli);
            memory += mib(n.memory);
            const auto same = std::ranges::find(nodes_, n, &node_kind::node);
            if (same != nodes_.end())
                ++same->count;
            else
                nodes_.push_back({n, 1, {}, {}});
        }
        // Initially, the cores that go with a device cost a tenth of the device, and memory costs
        // next to nothing.
        const auto capacity = static_cast<double>(c.capacity_permille());
        idle_cpu_ = cpu > 0 ? 0.1 * capacity / cpu : 0;
        for (auto& n : nodes_) {
            n.host = {idle_cpu_, memory > 0 ? 1e-4 * capacity / memory : 0};
            for (std::size_t i = 0; i < kinds_.size(); ++i) {
                const auto& r = kinds_[i].request;
                if (!takes_devices(r) || !fits_empty(r, n.node)) continue;
                n.kinds.push_back(i);
                price_[i] = static_cast<double>(device_permille(r)) + idle_cpu_ * static_cast<double>(r.cpu_milli);
            }
        }
        for (const auto& [r, weight] : kinds_)
            if (!takes_devices(r)) cpu_without_device_ += weight * static_cast<double>(r.cpu_milli);
        if (cpu_without_device_ == 0) idle_cpu_ = 0;
        normalise();
    }

    [[nodiscard]] std::vector<double> after(std::size_t rounds, double first_step) {
        std::vector<double> sum(price_.size());
        double idle_sum = 0;
        for (std::size_t round = 0; round < rounds; ++round) {
            step(first_step / std::sqrt(1.0 + static_cast<double>(round)));
            // The answer is the average of the later rounds, or the only round.
            if (2 * round < rounds && round + 1 < rounds) continue;
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += price_[i];
            idle_sum += idle_cpu_;
        }
        if (rounds != 0) {
            price_ = sum;
            idle_cpu_ = idle_sum;
            normalise();
        }
        for (std::size_t i = 0; i < price_.size(); ++i)
            if (!takes_devices(kinds_[i].request)) price_[i] = host_prices{idle_cpu_, 0}.of(kinds_[i].request);
        return price_;
    }

private:
    struct node_kind {
        node_description node{};
        double count = 0;
        host_prices host{};
        std::vector<std::size_t> kinds{};  // the kinds that fit
    };
    struct usage {
        double cpu = 0, memory = 0;
    };

    static bool takes_devices(const placement_request& r) noexcept { return device_permille(r) != 0; }
    static double mib(bytes b) noexcept { return static_cast<double>(b.count()) / host_prices::mib; }

    // Scales the prices so that an average request costs the device time that it takes.
    double normalise() {
        double is = 0;
        for (std::size_t i = 0; i < price_.size(); ++i)
            if (takes_devices(kinds_[i].request)) is += kinds_[i].weight * price_[i];
        const double factor = is > 0 ? mean_permille_ / is : 1;
        for (double& p : price_) p *= factor;
        idle_cpu_ *= factor;
        return factor;
    }

    [[nodiscard]] double net(const node_kind& n, std::size_t i) const noexcept {
        const auto& r = kinds_[i].request;
        return (price_[i] - n.host.of(r)) / r.devices;
    }

    /// The requests that the node takes at its host prices. Adds the fraction `part` of them to
    /// `taken_`.
    usage fill(const node_kind& n, double part) {
        device_.clear();
        for (const auto i : n.kinds) device_.offer(i, net(n, i));
        device_.solve();
        device_.best(parts_);
        usage u;
        for (const auto i : n.kinds) {
            const double parts = n.node.devices * parts_[device_.size_of(i)];
            if (parts == 0) continue;
            const auto& r = kinds_[i].request;
            const double requests = parts * device_.chance(i, net(n, i)) / r.devices;
            u.cpu += requests * static_cast<double>(r.cpu_milli);
            u.memory += requests * mib(r.memory);
            taken_[i] += part * n.count * requests;
        }
        return u;
    }

    /// The cheapest cpu price at which the node's cores suffice. Between two fillings at that
    /// price, takes a mixture of both.
    void balance(node_kind& n, double rate) {
        const auto there = static_cast<double>(n.node.cpu_milli);
        double previous = n.host.cpu, memory = 0;
        n.host.cpu = idle_cpu_;
        if (const auto all = fill(n, 0); all.cpu <= there) {
            memory = fill(n, 1).memory;
            idle_taken_ += n.count * (there - all.cpu);
        } else {
            constexpr double lowest = 1e-6;
            double low = idle_cpu_, high = std::max({previous, 1.1 * low, lowest});
            for (n.host.cpu = high; fill(n, 0).cpu > there && high < 1e6; n.host.cpu = high) {
                low = high;
                high *= 2;
            }
            for (int i = 0; i < 5; ++i) {
                n.host.cpu = (low + high) / 2;
                (fill(n, 0).cpu > there ? low : high) = n.host.cpu;
            }
            n.host.cpu = low;
            const double above = fill(n, 0).cpu;
            n.host.cpu = high;
            const double below = fill(n, 0).cpu;
            const double part = above > below ? std::clamp((there - below) / (above - below), 0.0, 1.0) : 0;
            memory = (1 - part) * fill(n, 1 - part).memory;
            n.host.cpu = low;
            memory += part * fill(n, part).memory;
            n.host.cpu = high;
        }
        if (n.node.memory != bytes{})
            n.host.memory *= std::exp(rate * std::clamp(memory / mib(n.node.memory) - 1, -1.0, 1.0));
    }

    void step(double rate) {
        taken_.assign(price_.size(), 0.0);
        idle_taken_ = 0;
        for (auto& n : nodes_) balance(n, rate);

        double served = idle_cpu_ * idle_taken_, asked = idle_cpu_ * cpu_without_device_;
        for (std::size_t i = 0; i < price_.size(); ++i) {
            served += price_[i] * taken_[i];
            asked += price_[i] * kinds_[i].weight;
        }
        if (served <= 0 || asked <= 0) return;
        const double streams = served / asked;
        // Moves a price towards even service, by at most `limit` in a round.
        const auto adjusted = [&](double price, double taken, double weight, double limit) {
            return price * std::exp(-rate * limit * std::clamp(taken / (streams * weight) - 1, -1.0, 1.0));
        };
        for (std::size_t i = 0; i < price_.size(); ++i)
            if (price_[i] > 0) price_[i] = adjusted(price_[i], taken_[i], kinds_[i].weight, 0.2);
        if (idle_cpu_ > 0) idle_cpu_ = adjusted(idle_cpu_, idle_taken_, cpu_without_device_, 1);
        const double factor = normalise();
        for (auto& n : nodes_) n.host = {n.host.cpu * factor, n.host.memory * factor};
    }

    std::span<const request_kind> kinds_;
    double mean_permille_ = 0;
    device_filling device_;
    std::vector<node_kind> nodes_;
    std::vector<double> price_;  // of kinds with devices; other kinds pay idle_cpu_ for each milli
    double idle_cpu_ = 0;
    double cpu_without_device_ = 0;  // the cpu, in milli, of an average request
    std::vector<double> taken_, parts_;
    double idle_taken_ = 0;
};

/// The price of each of `expected.kinds()`, in permille of device time, scaled so that an average
/// request costs the device time that it takes. Kinds that don't fit on any node cost nothing.
/// Looks at the nodes as if they were empty. Takes a tenth of a second for 150 kinds of requests,
/// with shares in steps of 1 %, on 15 kinds of nodes. Takes seconds for thousands of kinds, or for
/// steps of 0.1 %.
[[nodiscard]] inline std::vector<double> bid_prices(const cluster& c, const workload& expected,
                                                    std::size_t rounds = 150, double first_step = 0.5) {
    return price_search(c, expected).after(rounds, first_step);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
