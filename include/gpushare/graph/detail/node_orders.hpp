// SPDX-License-Identifier: Apache-2.0
// Orders in which a model's nodes can run. The order decides how many values are alive at a cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {
namespace detail {

inline constexpr std::uint32_t nobody = ~0U;

/// The node that makes each value; `nobody` for inputs and weights.
[[nodiscard]] inline std::vector<std::uint32_t> makers(const model_graph& g) {
    std::vector<std::uint32_t> by(g.values.size(), nobody);
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n)
        for (const std::uint32_t v : g.nodes[n].outputs) by[v] = n;
    return by;
}

/// The number of nodes that read each value.
[[nodiscard]] inline std::vector<std::uint32_t> reader_counts(const model_graph& g) {
    std::vector<std::uint32_t> count(g.values.size());
    for (const auto& n : g.nodes)
        for (const std::uint32_t v : n.inputs) ++count[v];
    return count;
}

/// The nodes whose values each node reads, the deepest first. If a shallow branch ran first, its
/// value would stay alive while the deep branch runs.
[[nodiscard]] inline std::vector<std::vector<std::uint32_t>> deepest_first(const model_graph& g) {
    const auto by = makers(g);
    std::vector<std::uint32_t> depth(g.nodes.size());
    std::vector<std::vector<std::uint32_t>> from(g.nodes.size());
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n) {
        for (const std::uint32_t v : g.nodes[n].inputs) {
            if (by[v] == nobody) continue;
            from[n].push_back(by[v]);
            depth[n] = std::max(depth[n], depth[by[v]] + 1);
        }
        std::ranges::stable_sort(from[n], [&](auto a, auto b) { return depth[a] > depth[b]; });
    }
    return from;
}

/// An order with each node right before a node that reads its values: the order goes backwards from
/// the outputs, branch by branch.
[[nodiscard]] inline std::vector<std::uint32_t> depth_first_order(const model_graph& g) {
    const auto from = deepest_first(g);
    const auto by = makers(g);
    std::vector<std::uint32_t> order;
    std::vector<bool> entered(g.nodes.size());
    // nodes, each with the next index into its `from`
    std::vector<std::pair<std::uint32_t, std::size_t>> open;
    const auto visit = [&](std::uint32_t root) {
        if (entered[root]) return;
        entered[root] = true;
        open.emplace_back(root, 0);
        while (!open.empty()) {
            auto& [n, next] = open.back();
            if (next == from[n].size()) {
                order.push_back(n);
                open.pop_back();
                continue;
            }
            const std::uint32_t before = from[n][next++];
            if (entered[before]) continue;
            entered[before] = true;
            open.emplace_back(before, 0);
        }
    };
    for (const std::uint32_t v : g.outputs)
        if (by[v] != nobody) visit(by[v]);
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n) visit(n);  // adds nodes that no output needs
    return order;
}

/// An order in which the next node is always the ready node that leaves the fewest bytes alive.
/// Among equals, the node that became ready last comes first.
class narrow_order {
public:
    narrow_order(const model_graph& g, std::span<const bytes> sizes)
        : g_(g), sizes_(sizes), made_by_(makers(g)), unread_(reader_counts(g)), missing_(g.nodes.size()) {
        readers_.resize(g.values.size());
        for (std::uint32_t n = 0; n < g.nodes.size(); ++n) {
            for (const std::uint32_t v : g.nodes[n].inputs) {
                if (made_by_[v] == nobody) continue;
                readers_[v].push_back(n);
                ++missing_[n];
            }
            if (missing_[n] == 0) ready_.push_back(n);
        }
        // Reversed, so that among equals the model's first node runs first.
        std::ranges::reverse(ready_);
    }

    [[nodiscard]] std::vector<std::uint32_t> find() && {
        std::vector<std::uint32_t> order;
        while (!ready_.empty()) {
            std::size_t best = ready_.size() - 1;
            for (std::size_t i = best; i-- > 0;)
                if (growth(ready_[i]) < growth(ready_[best])) best = i;
            const std::uint32_t n = ready_[best];
            ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(best));
            run(n);
            order.push_back(n);
        }
        return order;
    }

private:
    // How many more bytes are alive after the node has run than before.
    [[nodiscard]] double growth(std::uint32_t n) const {
        double bytes_more = 0;
        for (const std::uint32_t v : g_.nodes[n].outputs)
            if (unread_[v] > 0) bytes_more += static_cast<double>(sizes_[v].count());
        for (const std::uint32_t v : g_.nodes[n].inputs)
            if (made_by_[v] != nobody && unread_[v] == 1) bytes_more -= static_cast<double>(sizes_[v].count());
        return bytes_more;
    }
    void run(std::uint32_t n) {
        for (const std::uint32_t v : g_.nodes[n].inputs) --unread_[v];
        for (const std::uint32_t v : g_.nodes[n].outputs)
            for (const std::uint32_t reader : readers_[v])
                if (--missing_[reader] == 0) ready_.push_back(reader);
    }

    const model_graph& g_;
    std::span<const bytes> sizes_;
    std::vector<std::uint32_t> made_by_;
    std::vector<std::uint32_t> unread_;  // for each value: readers that haven't run
    // for each node: the values that it reads and that no node has made yet
    std::vector<std::uint32_t> missing_;
    std::vector<std::vector<std::uint32_t>> readers_;
    std::vector<std::uint32_t> ready_;
};

/// The model's own order.
[[nodiscard]] inline std::vector<std::uint32_t> given_order(const model_graph& g) {
    std::vector<std::uint32_t> order(g.nodes.size());
    std::iota(order.begin(), order.end(), 0U);
    return order;
}

}  // namespace detail
}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
