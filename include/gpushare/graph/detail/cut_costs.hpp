// SPDX-License-Identifier: Apache-2.0
// The costs of cutting a model that runs in one order: values that leave a piece and enter another,
// and fusions that the cut prevents.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/detail/node_orders.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {
namespace detail {

/// The nodes of a model in one order, and the costs of cuts. Position p is before the node at place
/// p.
class cut_costs {
public:
    /// A fusion that a cut would undo: `before` is the place of the node that makes the value.
    struct fusion {
        std::uint32_t before = 0;
        ns lost{};
    };

    cut_costs(const model_graph& g, std::vector<std::uint32_t> order, std::span<const bytes> sizes,
              std::span<const fusion_rule> rules, bytes bandwidth)
        : order_(std::move(order)),
          sizes_(sizes.begin(), sizes.end()),
          lives_(g.values.size()),
          fused_(g.nodes.size()) {
        for (std::uint32_t p = 0; p < order_.size(); ++p) {
            const auto& n = g.nodes[order_[p]];
            for (const std::uint32_t v : n.outputs) lives_[v] = {p + 1, p + 1};
            for (const std::uint32_t v : n.inputs) lives_[v].last = std::max(lives_[v].last, p + 1);
            inputs_.push_back(n.inputs);
            outputs_.push_back(n.outputs);
        }
        price(g, bandwidth);
        find_fusions(g, rules);
        find_cuts(g);
    }

    [[nodiscard]] const std::vector<std::uint32_t>& order() const noexcept { return order_; }
    /// Positions where a cut is possible, the first and the last included.
    [[nodiscard]] const std::vector<std::uint32_t>& cuts() const noexcept { return cuts_; }
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(order_.size()); }
    [[nodiscard]] const std::vector<lifetime>& lives() const noexcept { return lives_; }

    /// The bytes of values alive at a cut at `position`, without inputs and weights.
    [[nodiscard]] bytes crossing(std::uint32_t position) const noexcept {
        bytes all{};
        for (std::size_t v = 0; v < lives_.size(); ++v)
            if (crosses(lives_[v], position)) all += sizes_[v];
        return all;
    }

    /// A piece that grows node by node, and the cost of the cuts around the piece: each value that
    /// enters is read once, each value that leaves is written once, and fusions across the cut
    /// before the piece are lost.
    class piece {
    public:
        explicit piece(const cut_costs& of) : of_(of), read_(of.lives_.size(), nobody) {}
        /// Begins an empty piece, whose first node will be the one at place `first`. A second call
        /// must have another `first`.
        void begin(std::uint32_t first) noexcept {
            first_ = behind_ = first;
            cost_ = ns{};
        }
        /// Adds the next node.
        void add() noexcept {
            const std::uint32_t p = behind_++;
            for (const std::uint32_t v : of_.inputs_[p]) {
                const auto& life = of_.lives_[v];
                if (life.born == 0) continue;
                if (life.born <= first_ && std::exchange(read_[v], first_) != first_) cost_ += of_.pass_[v];
                if (life.born > first_ && life.last == behind_) cost_ -= of_.written_[v];
            }
            for (const std::uint32_t v : of_.outputs_[p])
                if (of_.lives_[v].last > behind_) cost_ += of_.written_[v];
            for (const auto& f : of_.fused_[p])
                if (f.before < first_) cost_ += f.lost;
        }
        [[nodiscard]] ns cost() const noexcept { return cost_; }

    private:
        const cut_costs& of_;
        // for each value: the `first_` of the piece that read the value
        std::vector<std::uint32_t> read_;
        std::uint32_t first_ = 0, behind_ = 0;
        ns cost_{};
    };

    /// The cost of a piece with the nodes at `places`.
    [[nodiscard]] ns cost(node_range places) const {
        piece p(*this);
        p.begin(places.first);
        for (std::uint32_t i = 0; i < places.size(); ++i) p.add();
        return p.cost();
    }

private:
    [[nodiscard]] static bool crosses(const lifetime& life, std::uint32_t position) noexcept {
        return life.born != 0 && life.born <= position && life.last > position;
    }

    // No time exceeds `longest_`, so sums of all times can't overflow.
    void price(const model_graph& g, bytes bandwidth) {
        std::size_t edges = 1;
        for (const auto& list : inputs_) edges += list.size();
        for (const auto& list : outputs_) edges += list.size();
        longest_ = static_cast<double>(std::int64_t{1} << 58) / static_cast<double>(edges);
        per_byte_ = 1e9 / static_cast<double>(std::max<std::uint64_t>(bandwidth.count(), 1));
        for (std::size_t v = 0; v < g.values.size(); ++v) {
            pass_.push_back(time_of(sizes_[v], 1));
            // An output of the model is written anyway, so a cut adds no cost of writing.
            written_.push_back(g.values[v].kind == value_kind::output ? ns{} : pass_[v]);
        }
    }
    [[nodiscard]] ns time_of(bytes size, double passes) const noexcept {
        const double t = static_cast<double>(size.count()) * per_byte_ * passes;
        return ns{static_cast<std::int64_t>(t > 0 ? std::min(std::ceil(t), longest_) : 0)};
    }
    void find_fusions(const model_graph& g, std::span<const fusion_rule> rules) {
        const auto readers = reader_counts(g);
        for (std::uint32_t p = 0; p < order_.size(); ++p)
            for (const std::uint32_t v : inputs_[p]) {
                if (lives_[v].born == 0 || readers[v] != 1 || g.values[v].kind == value_kind::output) continue;
                const std::uint32_t before = lives_[v].born - 1;
                const double passes = fusion_passes(rules, g.nodes[order_[before]].type, g.nodes[order_[p]].type);
                if (passes > 0) fused_[p].push_back({before, time_of(sizes_[v], passes)});
            }
    }
    // No buffer can hold a sequence, a map, strings or a value of unknown type, so no cut is
    // possible where such a value is alive.
    void find_cuts(const model_graph& g) {
        std::vector<std::int32_t> kept(order_.size() + 2);
        for (std::size_t v = 0; v < lives_.size(); ++v) {
            const bool held =
                g.values[v].tensor && g.values[v].type != element::text && g.values[v].type != element::unknown;
            if (held || lives_[v].born == 0 || lives_[v].last == lives_[v].born) continue;
            ++kept[lives_[v].born];
            --kept[lives_[v].last];
        }
        std::int32_t there = 0;
        for (std::uint32_t p = 0; p <= order_.size(); ++p) {
            there += kept[p];
            if (there == 0) cuts_.push_back(p);
        }
    }

    std::vector<std::uint32_t> order_;
    std::vector<bytes> sizes_;
    std::vector<lifetime> lives_;                     // of each value, in positions of this order
    std::vector<std::vector<std::uint32_t>> inputs_;  // of the node at each place
    std::vector<std::vector<std::uint32_t>> outputs_;
    std::vector<std::vector<fusion>> fused_;  // by the place of the later node
    std::vector<ns> pass_;                    // the time of one pass over each value
    std::vector<ns> written_;                 // the time that a cut adds to write each value
    std::vector<std::uint32_t> cuts_;
    double longest_ = 0;
    double per_byte_ = 0;
};

}  // namespace detail
}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
