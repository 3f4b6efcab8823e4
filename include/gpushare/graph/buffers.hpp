// SPDX-License-Identifier: Apache-2.0
// Places in one block of memory for the values that pass from one piece of a model to later ones:
// values that are never there together share bytes.
//
//   const auto values = gpushare::graph::crossing_values(g, plan);
//   const auto layout = gpushare::graph::place_buffers(gpushare::graph::needs_of(g, values), 256);
//   std::byte* block = allocate(layout.total);               // values[i]: at block + layout.offsets[i]
//
// Inputs and outputs of the model are the caller's and need no place. Everything here is a value:
// safe to read from any thread, not while it changes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/split_plan.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// Bytes that are needed from one step to another, with both of them.
struct buffer_need {
    bytes size{};             ///< 0 needs no place
    std::uint32_t first = 0;  ///< the step that writes them
    std::uint32_t last = 0;   ///< the last step that reads them; not before `first`

    friend constexpr bool operator==(const buffer_need&, const buffer_need&) = default;
};

/// Where each need's bytes are in one block.
struct buffer_layout {
    std::vector<std::uint64_t> offsets{};  ///< of each need, in their order; multiples of the alignment
    bytes total{};                         ///< the block's size

    friend bool operator==(const buffer_layout&, const buffer_layout&) = default;
};

/// A value that passes from one piece of a plan to later ones.
struct crossing_value {
    std::uint32_t value = 0;  ///< index in the graph
    std::uint32_t first = 0;  ///< the piece that makes the value
    std::uint32_t last = 0;   ///< the last piece that reads it

    friend constexpr bool operator==(const crossing_value&, const crossing_value&) = default;
};

/// The values that a plan's cuts have to keep, by index. The model's outputs aren't among them: the
/// caller has buffers for these. `p` must fit the graph (check() in plan_text.hpp).
[[nodiscard]] inline std::vector<crossing_value> crossing_values(const model_graph& g, const split_plan& p) {
    std::vector<std::optional<crossing_value>> all(g.values.size());
    for (std::uint32_t i = 0; i < p.pieces.size(); ++i)
        for (const std::uint32_t n : p.nodes(p.pieces[i].places)) {
            for (const std::uint32_t v : g.nodes[n].outputs)
                if (g.values[v].kind == value_kind::inner) all[v] = {v, i, i};
            for (const std::uint32_t v : g.nodes[n].inputs)
                if (all[v]) all[v]->last = i;
        }
    std::vector<crossing_value> crossing;
    for (const auto& v : all)
        if (v && v->last > v->first) crossing.push_back(*v);
    return crossing;
}

/// What these values need. `sizes`: of each value of the graph, where the caller knows them better
/// (dynamic shapes); empty: as the graph has them. Throws operation_error (invalid_specification)
/// where nobody knows a size.
[[nodiscard]] inline std::vector<buffer_need> needs_of(const model_graph& g, std::span<const crossing_value> values,
                                                       std::span<const bytes> sizes = {}) {
    if (!sizes.empty() && sizes.size() != g.values.size())
        throw operation_error(errc::invalid_specification, {}, "buffers of a model: each value needs a size");
    std::vector<buffer_need> needs;
    for (const auto& c : values) {
        const auto size = sizes.empty() ? g.values[c.value].size() : std::optional(sizes[c.value]);
        if (!size)
            throw operation_error(errc::invalid_specification, {},
                                  ("buffers of a model: nobody knows the size of " + g.values[c.value].name).c_str());
        needs.push_back({*size, c.first, c.last});
    }
    return needs;
}

namespace detail {

[[nodiscard]] inline bool meet(const buffer_need& a, const buffer_need& b) noexcept {
    return a.first <= b.last && b.first <= a.last;
}

/// The needs' sizes as multiples of the alignment, and their sum. Throws where there is no such
/// sum.
[[nodiscard]] inline std::vector<std::uint64_t> rounded_sizes(std::span<const buffer_need> needs,
                                                              std::size_t alignment) {
    if (!std::has_single_bit(alignment)) raise(gpushare::detail::impossible_block(0, alignment), {}, "placing buffers");
    std::vector<std::uint64_t> sizes;
    bytes sum{};
    for (const auto& n : needs) {
        const bytes up = n.size + bytes{alignment - 1};
        sum += up;
        sizes.push_back(up.count() & ~(std::uint64_t{alignment} - 1));
    }
    if (sum == bytes::max()) raise(gpushare::detail::impossible_block(sum.count(), alignment), {}, "placing buffers");
    return sizes;
}

/// One after the other in `order`, each in the smallest gap that it fits between those that are
/// there with it, else behind all of them.
[[nodiscard]] inline buffer_layout place_in_order(std::span<const buffer_need> needs,
                                                  std::span<const std::uint64_t> sizes,
                                                  std::span<const std::uint32_t> order) {
    buffer_layout out{std::vector<std::uint64_t>(needs.size()), {}};
    std::vector<std::uint32_t> placed;  // by offset
    std::uint64_t total = 0;
    for (const std::uint32_t i : order) {
        if (sizes[i] == 0) continue;
        std::uint64_t until = 0, best = 0, gap = std::numeric_limits<std::uint64_t>::max();
        for (const std::uint32_t other : placed) {
            if (!meet(needs[i], needs[other])) continue;
            const std::uint64_t at = out.offsets[other];
            if (at >= until && at - until >= sizes[i] && at - until < gap) best = until, gap = at - until;
            until = std::max(until, at + sizes[other]);
        }
        const std::uint64_t at = gap == std::numeric_limits<std::uint64_t>::max() ? until : best;
        out.offsets[i] = at;
        total = std::max(total, at + sizes[i]);
        placed.insert(std::ranges::upper_bound(placed, at, {}, [&](std::uint32_t p) { return out.offsets[p]; }), i);
    }
    out.total = bytes{total};
    return out;
}

}  // namespace detail

/// The most bytes that are needed in any one step, in multiples of the alignment: no layout takes
/// less. Throws as place_buffers.
[[nodiscard]] inline bytes least_total(std::span<const buffer_need> needs, std::size_t alignment) {
    const auto sizes = detail::rounded_sizes(needs, alignment);
    std::uint64_t most = 0;
    for (const auto& at : needs) {  // the most is reached where one of them begins
        std::uint64_t there = 0;
        for (std::size_t i = 0; i < needs.size(); ++i)
            if (needs[i].first <= at.first && at.first <= needs[i].last) there += sizes[i];
        most = std::max(most, there);
    }
    return bytes{most};
}

/// A place for each need: no two that are needed in one step overlap, and the block is never larger
/// than the sum of the sizes. Tries the largest first, the longest-lived first, the largest product
/// of both first, and the order of the steps, and takes the smallest block. Throws memory_error:
/// bad_alignment for what is no power of two, size_overflow. O(needs^2).
[[nodiscard]] inline buffer_layout place_buffers(std::span<const buffer_need> needs, std::size_t alignment) {
    const auto sizes = detail::rounded_sizes(needs, alignment);
    const bytes least = least_total(needs, alignment);
    const auto steps = [&](std::uint32_t i) { return std::uint64_t{needs[i].last} - needs[i].first + 1; };
    const auto area = [&](std::uint32_t i) { return static_cast<double>(sizes[i]) * static_cast<double>(steps(i)); };
    std::vector<std::uint32_t> order(needs.size());
    buffer_layout best;
    const auto attempt = [&](auto before) {
        if (!best.offsets.empty() && best.total == least) return;
        std::iota(order.begin(), order.end(), 0U);
        std::ranges::stable_sort(order, before);
        auto layout = detail::place_in_order(needs, sizes, order);
        if (best.offsets.empty() || layout.total < best.total) best = std::move(layout);
    };
    attempt([&](std::uint32_t a, std::uint32_t b) { return sizes[a] > sizes[b]; });
    attempt([&](std::uint32_t a, std::uint32_t b) { return area(a) > area(b); });
    attempt([&](std::uint32_t a, std::uint32_t b) { return steps(a) > steps(b); });
    attempt([&](std::uint32_t a, std::uint32_t b) { return needs[a].first < needs[b].first; });
    return best;
}

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
