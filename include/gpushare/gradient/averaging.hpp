// SPDX-License-Identifier: Apache-2.0
// Averaging of parameters in place of gradients: with the neighbours in a topology at every step
// (gossip), or with all ranks every so many steps (local steps).
//
//   const auto ring = gpushare::neighbour_graph::ring(net.size());
//   gpushare::gossip_average(net, ring, parameters, deadline);
//
//   constexpr gpushare::local_steps local{.every = 8};
//   if (local.due(step)) gpushare::average_all(net, list_of_parameters, deadline);
//
// Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017;
// Stich, "Local SGD converges fast and communicates little", ICLR 2019. Weights: Xiao and Boyd,
// "Fast linear iterations for distributed averaging", 2004 (Metropolis).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A transport that exchanges elements with some ranks alone: `out` gets each neighbour's elements,
/// one behind the other. The relation is mutual: a neighbour of a rank has that rank as its
/// neighbour.
template <class T>
concept neighbour_transport = transport<T> && requires(T& t, std::span<const float> in, std::span<float> out,
                                                       std::span<const std::uint32_t> neighbours, instant deadline) {
    { t.exchange(in, neighbours, out, deadline) } -> std::same_as<collective_fault>;
};

/// The averaging partners: a graph of ranks, with weights for which repeated averages converge to
/// the average of all ranks, if the graph is connected. A value, the same on all ranks.
class neighbour_graph {
public:
    /// Made of pairs; each counts for both. Throws operation_error (errc::invalid_specification)
    /// for a rank that isn't there, or a pair of a rank with itself.
    neighbour_graph(std::uint32_t ranks, std::span<const std::pair<std::uint32_t, std::uint32_t>> edges)
        : neighbours_(ranks) {
        for (const auto& [a, b] : edges) {
            if (a >= ranks || b >= ranks || a == b)
                raise({errc::invalid_specification, std::max(a, b), 0, ranks, reason::no_such_link}, {}, "a topology");
            neighbours_[a].push_back(b);
            neighbours_[b].push_back(a);
        }
        for (auto& n : neighbours_) {
            std::sort(n.begin(), n.end());
            n.erase(std::unique(n.begin(), n.end()), n.end());
        }
    }
    /// Each with the one before and the one behind.
    [[nodiscard]] static neighbour_graph ring(std::uint32_t ranks) {
        std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
        for (std::uint32_t r = 0; r + 1 < ranks; ++r) edges.emplace_back(r, r + 1);
        if (ranks > 2) edges.emplace_back(ranks - 1, 0);
        return {ranks, edges};
    }
    /// Connects ranks whose numbers differ in one bit: few neighbours each, and short paths between
    /// all ranks.
    [[nodiscard]] static neighbour_graph hypercube(std::uint32_t ranks) {
        std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::uint32_t bit = 1; bit < ranks; bit <<= 1)
                if ((r & bit) == 0 && (r | bit) < ranks) edges.emplace_back(r, r | bit);
        return {ranks, edges};
    }

    [[nodiscard]] std::uint32_t size() const noexcept {
        return static_cast<std::uint32_t>(neighbours_.size());
    }  ///< ranks
    /// A rank's neighbours, ascending.
    [[nodiscard]] std::span<const std::uint32_t> neighbours(std::uint32_t r) const noexcept { return neighbours_[r]; }
    /// The weight with which rank r takes rank q's numbers. The weights that a rank takes sum to 1,
    /// and so do the weights with which others take its numbers.
    [[nodiscard]] float weight(std::uint32_t r, std::uint32_t q) const noexcept {
        if (r != q) {
            const auto& mine = neighbours_[r];
            if (!std::binary_search(mine.begin(), mine.end(), q)) return 0;
            return 1.0F / static_cast<float>(1 + std::max(mine.size(), neighbours_[q].size()));
        }
        float rest = 1;
        for (const std::uint32_t n : neighbours_[r]) rest -= weight(r, n);
        return rest;
    }

private:
    std::vector<std::vector<std::uint32_t>> neighbours_;
};

/// One step of averaging: `x` becomes the weighted mean of this rank's and its neighbours', added
/// in the order of ranks. Called by all ranks, with as many elements and the same topology.
/// errc::mismatch, on this rank alone, for a topology of another size.
template <neighbour_transport Net>
requires host_transport<Net>
[[nodiscard]] collective_fault gossip_average(Net& net, const neighbour_graph& among, std::span<float> x,
                                              instant deadline = never) {
    if (among.size() != net.size()) return {errc::mismatch, collective_kind::all_gather, net.rank(), 0};
    const auto beside = among.neighbours(net.rank());
    std::vector<float> theirs(x.size() * beside.size());
    if (const auto f = net.exchange(std::span<const float>(x), beside, std::span(theirs), deadline)) return f;
    std::vector<float> weights;
    for (const std::uint32_t q : beside) weights.push_back(among.weight(net.rank(), q));
    const float own = among.weight(net.rank(), net.rank());
    const auto before =
        static_cast<std::size_t>(std::lower_bound(beside.begin(), beside.end(), net.rank()) - beside.begin());
    for (std::size_t i = 0; i < x.size(); ++i) {
        float sum = 0;
        for (std::size_t k = 0; k < before; ++k) sum += weights[k] * theirs[k * x.size() + i];
        sum += own * x[i];
        for (std::size_t k = before; k < beside.size(); ++k) sum += weights[k] * theirs[k * x.size() + i];
        x[i] = sum;
    }
    return {};
}

/// Steps between two averages of all ranks.
struct local_steps {
    std::uint64_t every = 1;  ///< 1: after each
    /// Whether the ranks average behind this step, which is counted from 0.
    [[nodiscard]] constexpr bool due(std::uint64_t step) const noexcept {
        return every != 0 && (step + 1) % every == 0;
    }
};

/// Each array becomes the mean of all ranks'.
template <transport Net>
[[nodiscard]] collective_fault average_all(Net& net, std::span<const std::span<float>> list, instant deadline = never) {
    if constexpr (list_transport<Net>) {
        return net.all_reduce_list(list, average{}, deadline);
    } else {
        for (const auto& x : list)
            if (const auto f = net.all_reduce(std::span<const float>(x), x, average{}, deadline)) return f;
        return {};
    }
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
