// SPDX-License-Identifier: Apache-2.0
// A cluster with a policy whose ratings it keeps, so that a decision doesn't rate every node: the same answers as
// `choose`, in a time that hardly grows with the cluster.
//
//   gpushare::indexed_cluster c(nodes, gpushare::value_descent(nodes, usual));
//   if (auto p = c.choose(request)) c.apply(*p);
//   c.change_nodes([](gpushare::cluster& nodes) { nodes.drain({3}); });
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/placement/cluster.hpp>
#include <gpushare/placement/detail/alike_nodes.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Costs by node, and the lowest of them: minima of blocks, so that one change costs one block at most.
class cost_table {
public:
    explicit cost_table(std::size_t nodes) : cost_(nodes, none), lowest_((nodes + block - 1) / block, none) {}

    static constexpr double none = std::numeric_limits<double>::infinity();

    void set(std::size_t node, double cost) noexcept {
        const double before = std::exchange(cost_[node], cost);
        double& lowest = lowest_[node / block];
        if (cost <= lowest) {
            lowest = cost;
        } else if (before == lowest) {
            const auto first = node - node % block;
            lowest = none;
            for (auto i = first; i < std::min(first + block, cost_.size()); ++i) lowest = std::min(lowest, cost_[i]);
        }
    }
    [[nodiscard]] double of(std::size_t node) const noexcept { return cost_[node]; }
    /// The first node with the lowest cost, or none.
    [[nodiscard]] std::optional<std::size_t> best() const noexcept {
        const auto at = std::ranges::min_element(lowest_);
        if (at == lowest_.end() || *at == none) return std::nullopt;
        auto node = static_cast<std::size_t>(at - lowest_.begin()) * block;
        while (cost_[node] != *at) ++node;
        return node;
    }

private:
    static constexpr std::size_t block = 64;
    std::vector<double> cost_, lowest_;
};

}  // namespace detail

/// Keeps the cost of every node for each distinct request that it was asked about. It also keeps a list of changed
/// nodes; a decision rates only the nodes that have changed since the last decision about the same request. On average
/// these are at most as many as there are distinct requests, however large the cluster. Memory: 8 bytes per node and
/// distinct request, for at most `most_requests` of them (the least recently used are dropped). Not thread-safe.
template <class Policy>
requires stable_placement_policy<Policy>
class indexed_cluster {
public:
    /// Remembers the costs of the latest `most_requests` distinct requests.
    indexed_cluster(cluster nodes, Policy policy, std::size_t most_requests = 1024)
        : cluster_(std::move(nodes)),
          policy_(std::move(policy)),
          most_requests_(std::max<std::size_t>(most_requests, 1)),
          changed_(std::max<std::size_t>(cluster_.size(), 1)),
          last_change_(cluster_.size(), 0) {}

    /// The nodes and their free capacity.
    [[nodiscard]] const cluster& nodes() const noexcept { return cluster_; }
    /// The policy.
    [[nodiscard]] const Policy& policy() const noexcept { return policy_; }

    /// Adds, resizes, drains, resumes and removes nodes and devices, or places on them:
    /// `change(nodes)` does it on the cluster. Known ratings are forgotten. If `change` throws,
    /// nothing happens.
    template <std::invocable<cluster&> Change>
    void change_nodes(Change change) {
        cluster changed = cluster_;
        change(changed);
        std::vector<std::uint32_t> ring(std::max<std::size_t>(changed.size(), 1));
        std::vector<std::uint64_t> last(changed.size(), 0);
        known_.clear();
        cluster_ = std::move(changed);
        changed_ = std::move(ring);
        last_change_ = std::move(last);
        changes_ = 0;
    }

    /// As `gpushare::choose`. For requests with labels it rates every node, since whether they fit depends on more than
    /// the node.
    [[nodiscard]] std::optional<placement> choose(const placement_request& r) {
        if (has_labels(r)) return gpushare::choose(policy_, cluster_, r);
        known& k = look_up(r);
        refresh(k, r);
        const auto best = k.costs.best();
        if (!best) return std::nullopt;
        const node_id id{static_cast<std::uint32_t>(*best)};
        return placement{r, id, detail::rated(policy_, cluster_[id], r).devices};
    }

    /// As the cluster's own.
    [[nodiscard]] refusal try_apply(const placement& p) {
        const auto why = cluster_.try_apply(p);
        if (!why) note_change(p.node);
        return why;
    }
    /// As of cluster.
    void apply(const placement& p) {
        cluster_.apply(p);
        note_change(p.node);
    }
    /// As of cluster.
    [[nodiscard]] bool try_release(const placement& p) noexcept {
        const bool done = cluster_.try_release(p);
        if (done) note_change(p.node);
        return done;
    }
    /// As of cluster.
    void release(const placement& p) {
        cluster_.release(p);
        note_change(p.node);
    }

private:
    struct known {
        detail::cost_table costs;
        std::uint64_t seen = 0;  // changes taken into account
        std::uint64_t used = 0;  // number of the last decision about it
        bool fresh = true;
    };

    void note_change(node_id id) noexcept {
        changed_[changes_ % changed_.size()] = id.index;
        last_change_[id.index] = ++changes_;
    }

    known& look_up(const placement_request& r) {
        auto at = known_.find(r);
        if (at == known_.end()) {
            if (known_.size() >= most_requests_)
                known_.erase(std::ranges::min_element(known_, {}, [](const auto& k) { return k.second.used; }));
            at = known_.emplace(r, known{detail::cost_table(cluster_.size())}).first;
        }
        at->second.used = ++decisions_;
        return at->second;
    }

    void refresh(known& k, const placement_request& r) {
        if (std::exchange(k.fresh, false) || changes_ - k.seen > changed_.size()) {
            rate_all(k, r);
        } else {
            for (auto c = k.seen; c < changes_; ++c) {
                const node_id id{changed_[c % changed_.size()]};
                if (last_change_[id.index] == c + 1) rate(k, r, id);  // else it comes again, later
            }
        }
        k.seen = changes_;
    }

    void rate(known& k, const placement_request& r, node_id id) {
        k.costs.set(id.index,
                    cluster_.fits(r, id) ? detail::rated(policy_, cluster_[id], r).cost : detail::cost_table::none);
    }

    void rate_all(known& k, const placement_request& r) {
        if constexpr (rates_by_state<Policy>) alike_.clear(cluster_.size());
        for (std::uint32_t i = 0; i < cluster_.size(); ++i) {
            if constexpr (rates_by_state<Policy>) {
                if (const node_id other = alike_.first_like(cluster_, {i}); other.index != i) {
                    k.costs.set(i, k.costs.of(other.index));
                    continue;
                }
            }
            rate(k, r, {i});
        }
    }

    cluster cluster_;
    Policy policy_;
    std::size_t most_requests_;
    std::map<placement_request, known> known_;
    std::vector<std::uint32_t> changed_;      // the latest changes, a ring
    std::vector<std::uint64_t> last_change_;  // of each node, from 1
    std::uint64_t changes_ = 0, decisions_ = 0;
    detail::alike_nodes alike_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
