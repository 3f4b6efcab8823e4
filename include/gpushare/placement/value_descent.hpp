// SPDX-License-Identifier: Apache-2.0
// The library's own placement policy. Each node has a value: the amount that the node can still
// earn from expected requests. The policy places a request on the node whose value falls least.
//
//   gpushare::value_descent policy(cluster, gpushare::workload(history));
//   if (auto p = gpushare::choose(policy, cluster, request)) cluster.apply(*p);
//
// Fragmentation is the part of a node's free device time that an average next request could not
// use. The value includes fragmentation. A separate policy only keeps fragmentation low, after Weng
// et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
// Descent", USENIX ATC 2023.
//
//   gpushare::fragmentation_descent fragments{gpushare::workload(history)};
//   auto q = gpushare::choose(fragments, cluster, request);
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/bid_prices.hpp>
#include <gpushare/placement/detail/node_value.hpp>
#include <gpushare/placement/detail/reduced_node.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A node's fragmentation: the sum over the kinds of `weight` times the free permille that a
/// request of the kind can't use. If cores, model or number of devices don't suffice, all free
/// permille count; otherwise the permille on devices with too little left count. Kinds that need
/// one device are summed in advance, so that a node costs a few additions per device instead of one
/// per kind.
class fragmentation {
public:
    /// For the kinds of a workload. Throws operation_error (invalid_specification) for a weight
    /// that is below 0 or isn't a finite number.
    explicit fragmentation(std::span<const request_kind> kinds) {
        for (const auto& k : kinds) {
            detail::check_number(k.weight, 0, std::numeric_limits<float>::max(), "the weight of a kind of request");
            total_weight_ += k.weight;
            if (k.request.devices == 0) continue;
            if (k.request.devices > 1) {
                many_.push_back(k);
            } else {
                cpus_.push_back(k.request.cpu_milli);
                shares_.push_back(k.request.each.permille());
            }
        }
        unique(shares_);
        unique(cpus_);
        for (std::uint32_t x = 0, rank = 0; x <= whole; ++x) {
            while (rank < shares_.size() && shares_[rank] <= x) ++rank;
            rank_of_[x] = static_cast<std::uint16_t>(rank);
        }
        for (std::size_t m = 0; m < device_model::count; ++m) fill(kinds, static_cast<std::uint8_t>(m));
    }

    /// The fragmentation of a node as it is, in permille of device time.
    [[nodiscard]] double operator()(const node_view& n) const noexcept { return (*this)(detail::reduced_node(n)); }
    /// The fragmentation of a node as it would be with a request on it.
    [[nodiscard]] double operator()(const detail::reduced_node& n) const noexcept {
        const auto row = static_cast<std::size_t>(std::ranges::upper_bound(cpus_, n.cpu_milli) - cpus_.begin());
        const auto& whole_node = n.node.whole;
        const double* usable = tables_[table_of_[whole_node.model.index]].data() + row * (shares_.size() + 1);
        std::uint32_t free = 0;
        double used = 0;
        for (std::uint32_t d = 0; d < whole_node.devices; ++d) {
            const std::uint32_t x = n.free(d);
            free += x;
            used += x * usable[rank_of_[x]];
        }
        for (const auto& [r, weight] : many_) {
            if (r.cpu_milli > n.cpu_milli || r.memory > n.memory || !r.models.allows(whole_node.model)) continue;
            std::uint32_t devices = 0, sum = 0;
            for (std::uint32_t d = 0; d < whole_node.devices; ++d) {
                const std::uint32_t x = n.free(d);
                devices += x >= r.each.permille() ? 1U : 0U;
                sum += x >= r.each.permille() ? x : 0U;
            }
            if (devices >= r.devices) used += weight * sum;
        }
        return total_weight_ * free - used;
    }

private:
    static constexpr std::uint32_t whole = 1000;

    template <class T>
    static void unique(std::vector<T>& v) {
        std::ranges::sort(v);
        v.erase(std::unique(v.begin(), v.end()), v.end());
    }

    // weights_[cpu rank][share rank] is the weight of the kinds for one device that find enough of
    // both.
    void fill(std::span<const request_kind> kinds, std::uint8_t model) {
        const auto columns = shares_.size() + 1;
        std::vector<double> table((cpus_.size() + 1) * columns);
        const auto rank = [](const auto& v, auto x) {
            return static_cast<std::size_t>(std::ranges::lower_bound(v, x) - v.begin());
        };
        for (const auto& [r, weight] : kinds) {
            if (r.devices != 1 || !r.models.allows({model})) continue;
            for (auto row = rank(cpus_, r.cpu_milli) + 1; row <= cpus_.size(); ++row) {
                for (auto c = rank(shares_, r.each.permille()) + 1; c < columns; ++c)
                    table[row * columns + c] += weight;
            }
        }
        const auto same = std::ranges::find(tables_, table);
        table_of_[model] = static_cast<std::uint8_t>(same - tables_.begin());
        if (same == tables_.end()) tables_.push_back(std::move(table));
    }

    double total_weight_ = 0;
    std::vector<request_kind> many_;  // kinds for several devices
    // of the kinds for one device: distinct numbers of cores, ascending
    std::vector<std::uint64_t> cpus_;
    std::vector<std::uint32_t> shares_;               // likewise, distinct shares
    std::array<std::uint16_t, whole + 1> rank_of_{};  // how many of shares_ fit into each amount
    std::vector<std::vector<double>> tables_;
    std::array<std::uint8_t, device_model::count> table_of_{};
};

/// The published policy: takes the place where fragmentation, weighted by frequency, grows least,
/// in the published score's hundred steps. Like the published policy, it ignores memory.
class fragmentation_descent {
public:
    /// See rates_by_state.
    static constexpr bool by_state = true;

    /// `expected` has the expected requests.
    explicit fragmentation_descent(const workload& expected) : measure_(expected.kinds()) {}

    /// Rates by the growth of fragmentation.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        const double before = measure_(blind(detail::reduced_node(n)));
        rating best;
        double least = 0;
        detail::for_each_choice(n, r, [&](device_set at) {
            const double growth = measure_(blind(detail::reduced_node(n, r, at))) - before;
            if (best.devices.empty() || growth < least) {
                least = growth;
                best.devices = at;
            }
        });
        best.cost = -std::floor(100 / (1 + std::exp(least / 1000)));
        return best;
    }

private:
    static detail::reduced_node blind(detail::reduced_node n) noexcept {
        n.memory = bytes::max();
        return n;
    }

    fragmentation measure_;
};

static_assert(rates_by_state<fragmentation_descent>);

namespace detail {

/// The scarcity of places for each kind of request: the number of requests of the kind that a full
/// cluster is expected to see, divided by the number that it could hold of that kind alone. At most
/// 1; 0 for kinds that don't fit anywhere.
[[nodiscard]] inline std::vector<request_kind> scarcity(const cluster& c, const workload& expected) {
    const double requests =
        expected.mean_permille() > 0 ? static_cast<double>(c.capacity_permille()) / expected.mean_permille() : 0;
    std::vector<request_kind> kinds(expected.kinds().begin(), expected.kinds().end());
    for (auto& [r, weight] : kinds) {
        std::uint64_t places = 0;
        for (std::uint32_t i = 0; i < c.size() && r.devices != 0; ++i) {
            const auto n = c.there({i});
            if (!fits_empty(r, n)) continue;
            const auto on_device = r.each == share{} ? n.devices : share::whole().permille() / r.each.permille();
            std::uint64_t here = std::uint64_t{n.devices} * on_device / r.devices;
            if (r.devices > 1) here = std::uint64_t{n.devices / r.devices} * on_device;
            if (r.cpu_milli != 0) here = std::min(here, n.cpu_milli / r.cpu_milli);
            if (r.memory != bytes{}) here = std::min(here, n.memory / r.memory);
            places += here;
        }
        weight = places == 0 ? 0 : std::min(1.0, requests * weight / static_cast<double>(places));
    }
    return kinds;
}

}  // namespace detail

/// The tuned parameters of `value_descent`. Halving or doubling a parameter changes little on
/// request lists that it wasn't tuned on (docs/placement.md), so there is seldom a reason to set
/// one.
struct value_descent_options {
    /// How much a permille of expected fragmentation counts against a permille of value. With 0,
    /// ties between equally valued nodes may break up the nodes that large requests need. From 0 to
    /// 1'000.
    double fragmentation_weight = 1.0 / 16;
    /// Rounds of the search for prices: more rounds take longer and give more exact prices.
    std::size_t rounds = 150;
    /// The fraction by which prices change in the first round; later rounds change them less. From
    /// 0 to 1.
    double first_step = 0.5;
};

/// The cost of a placement has two terms. The first is the node's loss of value: how much less the
/// node can still earn at bid prices (detail/node_value.hpp). This term is exact if the requests
/// that fill the node do come. They may not come, so the second term is fragmentation, with each
/// kind weighted by the scarcity of its places. This term keeps the few nodes that can hold the
/// largest requests whole while other nodes suffice. Device memory limits where a request fits, but
/// has no price.
class value_descent {
public:
    /// See rates_by_state.
    static constexpr bool by_state = true;

    /// Learns prices from the requests that are expected on those nodes, as if the nodes were
    /// empty. This takes a few tenths of a second. Throws operation_error (invalid_specification)
    /// for an option that is out of its range or isn't a number.
    value_descent(const cluster& c, const workload& expected, const value_descent_options& o = {})
        : value_(expected, detail::bid_prices(c, expected, checked(o).rounds, o.first_step)),
          fragmentation_(detail::scarcity(c, expected)),
          fragmentation_weight_(o.fragmentation_weight) {}

    /// Rates by the two terms.
    [[nodiscard]] rating rate(const node_view& n, const placement_request& r) const {
        const double before = worth(detail::reduced_node(n));
        rating best;
        detail::for_each_choice(n, r, [&](device_set at) {
            const double cost = before - worth(detail::reduced_node(n, r, at));
            if (cost < best.cost) best = {cost, at};
        });
        return best;
    }

private:
    [[nodiscard]] static const value_descent_options& checked(const value_descent_options& o) {
        detail::check_number(o.fragmentation_weight, 0, 1'000, "value_descent_options::fragmentation_weight");
        detail::check_number(o.first_step, 0, 1, "value_descent_options::first_step");
        return o;
    }
    [[nodiscard]] double worth(const detail::reduced_node& n) const noexcept {
        return value_(n) - fragmentation_weight_ * fragmentation_(n);
    }

    detail::node_value value_;
    fragmentation fragmentation_;
    double fragmentation_weight_;
};

static_assert(rates_by_state<value_descent>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
