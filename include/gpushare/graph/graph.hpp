// SPDX-License-Identifier: Apache-2.0
// A model as a plain value: nodes in the order in which they run, and the values between them. Where to cut the model is
// decided on this value (split_plan.hpp); onnx.hpp makes one of a file.
//
//   const gpushare::graph::model_graph& g = model.graph();
//   for (const auto& n : g.nodes) std::puts(n.name.c_str());
//   const auto crossing = gpushare::graph::crossing(g, 10);          // values that pass from nodes 0..9 to the later ones
//   const auto edges = gpushare::graph::edges_of(g, {10, 20});       // what nodes 10..19 read from outside, and leave
//
// Everything here is a value: safe to read from any thread, not while it changes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Models as graphs, cut into pieces that a scheduler sees one by one.
namespace graph {

/// What a tensor consists of.
enum class element : std::uint8_t {
    unknown,     ///< nobody said
    f32,         ///< float
    f64,         ///< double
    f16,         ///< IEEE half
    bf16,        ///< the upper half of a float
    i8,          ///< signed
    i16,         ///< signed
    i32,         ///< signed
    i64,         ///< signed
    u8,          ///< unsigned
    u16,         ///< unsigned
    u32,         ///< unsigned
    u64,         ///< unsigned
    boolean,     ///< a byte, 0 or 1
    complex64,   ///< two floats
    complex128,  ///< two doubles
    text,        ///< strings, which have no fixed size
};

/// Bytes of one element; 0 for `unknown` and `text`.
[[nodiscard]] constexpr std::size_t size_of(element e) noexcept {
    switch (e) {
        case element::i8:
        case element::u8:
        case element::boolean: return 1;
        case element::f16:
        case element::bf16:
        case element::i16:
        case element::u16: return 2;
        case element::f32:
        case element::i32:
        case element::u32: return 4;
        case element::f64:
        case element::i64:
        case element::u64:
        case element::complex64: return 8;
        case element::complex128: return 16;
        case element::unknown:
        case element::text: break;
    }
    return 0;
}

/// The enumerator's name.
[[nodiscard]] constexpr std::string_view to_string(element e) noexcept {
    switch (e) {
        case element::f32: return "f32";
        case element::f64: return "f64";
        case element::f16: return "f16";
        case element::bf16: return "bf16";
        case element::i8: return "i8";
        case element::i16: return "i16";
        case element::i32: return "i32";
        case element::i64: return "i64";
        case element::u8: return "u8";
        case element::u16: return "u16";
        case element::u32: return "u32";
        case element::u64: return "u64";
        case element::boolean: return "boolean";
        case element::complex64: return "complex64";
        case element::complex128: return "complex128";
        case element::text: return "text";
        case element::unknown: break;
    }
    return "unknown";
}

/// One extent of a tensor.
struct dimension {
    std::int64_t extent = -1;  ///< elements; below 0: not known before the model runs
    std::string symbol{};      ///< the model's name for an unknown extent, such as "batch"; may be empty

    friend bool operator==(const dimension&, const dimension&) = default;
};

/// Where a value comes from.
enum class value_kind : std::uint8_t {
    input,   ///< the caller gives it with every run
    weight,  ///< the model's own constant
    inner,   ///< a node makes it, for other nodes
    output,  ///< a node makes it, for the caller, and perhaps for other nodes
};

/// A value between nodes.
struct value {
    std::string name{};                   ///< unique in the graph, not empty
    element type = element::unknown;      ///< of its elements
    std::vector<dimension> shape{};       ///< outermost first; means something only where `ranked`
    value_kind kind = value_kind::inner;  ///< where it comes from
    bool ranked = false;                  ///< whether the number of dimensions is known
    bool tensor = true;                   ///< false: a sequence, a map, an optional, which no buffer holds

    /// Bytes of the tensor, where type and all extents are known. Saturates at bytes::max().
    [[nodiscard]] std::optional<bytes> size() const noexcept {
        const std::size_t one = size_of(type);
        if (!tensor || !ranked || one == 0) return std::nullopt;
        bytes all{one};
        for (const auto& d : shape) {
            if (d.extent < 0) return std::nullopt;
            all = all * static_cast<std::uint64_t>(d.extent);
        }
        return all;
    }
    friend bool operator==(const value&, const value&) = default;
};

/// An operation. A loop or a branch is one node; what its body reads from outside is among its inputs.
struct node {
    std::string name{};                    ///< the model's; not empty, not necessarily unique
    std::string type{};                    ///< the operator's name, such as "Conv"
    std::vector<std::uint32_t> inputs{};   ///< indices of values; each once, those left out aren't there
    std::vector<std::uint32_t> outputs{};  ///< indices of values; likewise

    friend bool operator==(const node&, const node&) = default;
};

/// A model. The nodes stand in an order in which they can run; a piece of the model is a range of them.
struct model_graph {
    std::vector<node> nodes{};             ///< each behind those whose values it reads
    std::vector<value> values{};           ///< in no particular order
    std::vector<std::uint32_t> inputs{};   ///< values that the caller gives, in the model's order
    std::vector<std::uint32_t> outputs{};  ///< values that the caller gets, in the model's order

    friend bool operator==(const model_graph&, const model_graph&) = default;
};

/// Consecutive nodes.
struct node_range {
    std::uint32_t first = 0;   ///< the first of them
    std::uint32_t behind = 0;  ///< behind the last

    /// How many.
    [[nodiscard]] constexpr std::uint32_t size() const noexcept { return behind - first; }
    friend constexpr bool operator==(const node_range&, const node_range&) = default;
};

namespace detail {

/// What is wrong with the values' names, kinds and extents, by themselves; empty if nothing.
[[nodiscard]] inline std::string wrong_values(const model_graph& g) {
    std::vector<std::string_view> names;
    for (const auto& v : g.values) {
        names.push_back(v.name);
        if (v.name.empty()) return "a value has no name";
        if (!v.ranked && !v.shape.empty()) return "value '" + v.name + "' has extents but no rank";
    }
    std::ranges::sort(names);
    if (const auto twice = std::ranges::adjacent_find(names); twice != names.end())
        return "two values are named '" + std::string(*twice) + "'";
    const auto all_there = [&](const auto& list) {
        return std::ranges::all_of(list, [&](std::uint32_t v) { return v < g.values.size(); });
    };
    if (!all_there(g.inputs)) return "an input names no value";
    if (!all_there(g.outputs)) return "an output names no value";
    for (const std::uint32_t v : g.inputs)
        if (g.values[v].kind != value_kind::input) return "input '" + g.values[v].name + "' is of another kind";
    std::vector<bool> leaves(g.values.size());
    for (const std::uint32_t v : g.outputs) leaves[v] = true;
    for (std::size_t v = 0; v < g.values.size(); ++v)
        if (g.values[v].kind == value_kind::output && !leaves[v])
            return "value '" + g.values[v].name + "' is no output of the model";
    return {};
}

/// Whether `list` has an index twice.
[[nodiscard]] inline bool has_twice(std::vector<std::uint32_t> list) {
    std::ranges::sort(list);
    return std::ranges::adjacent_find(list) != list.end();
}

/// What is wrong with node `n` behind those that made `made`; empty if nothing. Adds what the node makes.
[[nodiscard]] inline std::string wrong_node(const model_graph& g, const node& n, std::vector<bool>& made) {
    const auto named = [&](std::string_view what, std::uint32_t v) {
        return "node '" + n.name + "' (" + n.type + ") " + std::string(what) + " '" + g.values[v].name + "'";
    };
    if (n.name.empty() || n.type.empty()) return "a node has no name or no type";
    for (const auto* list : {&n.inputs, &n.outputs}) {
        for (const std::uint32_t v : *list)
            if (v >= g.values.size()) return "node '" + n.name + "' (" + n.type + ") names no value";
        if (has_twice(*list)) return "node '" + n.name + "' (" + n.type + ") names a value twice";
    }
    for (const std::uint32_t v : n.inputs)
        if (!made[v]) return named("reads before it is made", v);
    for (const std::uint32_t v : n.outputs) {
        if (made[v]) return named("makes once more", v);
        made[v] = true;
    }
    return {};
}

}  // namespace detail

/// What is wrong with a graph, for people, with the node's or the value's name; empty if it is sound: all indices name
/// values; names of values are unique; a node stands behind those that make what it reads; each value is made once,
/// inputs and weights by no node; and an output is made, or is an input or a weight that passes through.
[[nodiscard]] inline std::string wrong(const model_graph& g) {
    if (auto text = detail::wrong_values(g); !text.empty()) return text;
    std::vector<bool> made(g.values.size());
    for (std::size_t v = 0; v < g.values.size(); ++v)
        made[v] = g.values[v].kind == value_kind::input || g.values[v].kind == value_kind::weight;
    for (const auto& n : g.nodes)
        if (auto text = detail::wrong_node(g, n, made); !text.empty()) return text;
    for (std::size_t v = 0; v < g.values.size(); ++v)
        if (!made[v]) return "no node makes value '" + g.values[v].name + "'";
    return {};
}

/// When a value is there, in positions between nodes: position p is before node p.
struct lifetime {
    std::uint32_t born = 0;  ///< behind the node that makes the value; 0 for inputs and weights
    std::uint32_t last = 0;  ///< behind the last node that reads the value; `born` if none does

    friend constexpr bool operator==(const lifetime&, const lifetime&) = default;
};

/// The lifetime of each value, by index. O(edges). The caller's reading of an output isn't counted.
[[nodiscard]] inline std::vector<lifetime> lifetimes(const model_graph& g) {
    std::vector<lifetime> all(g.values.size());
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n) {
        for (const std::uint32_t v : g.nodes[n].outputs) all[v] = {n + 1, n + 1};
        for (const std::uint32_t v : g.nodes[n].inputs) all[v].last = std::max(all[v].last, n + 1);
    }
    return all;
}

/// Values that a cut before node `position` has to pass on: made by an earlier node, read by this or a later one. In the
/// order of their indices. Inputs and weights don't count: every piece has them from the caller and from the model.
[[nodiscard]] inline std::vector<std::uint32_t> crossing(const model_graph& g, const std::vector<lifetime>& lives,
                                                         std::uint32_t position) {
    std::vector<std::uint32_t> all;
    for (std::uint32_t v = 0; v < g.values.size(); ++v)
        if (lives[v].born != 0 && lives[v].born <= position && lives[v].last > position) all.push_back(v);
    return all;
}
/// The same, for a single position.
[[nodiscard]] inline std::vector<std::uint32_t> crossing(const model_graph& g, std::uint32_t position) {
    return crossing(g, lifetimes(g), position);
}

/// What a piece has in common with the rest. Indices of values, ascending.
struct piece_edges {
    std::vector<std::uint32_t> inputs{};   ///< read here, made by the caller or an earlier piece
    std::vector<std::uint32_t> weights{};  ///< read here, constants of the model
    std::vector<std::uint32_t> outputs{};  ///< made here, read by a later piece or by the caller

    friend bool operator==(const piece_edges&, const piece_edges&) = default;
};

/// The edges of some nodes, in any order; each must be one of the graph's.
[[nodiscard]] inline piece_edges edges_of(const model_graph& g, std::span<const std::uint32_t> nodes) {
    std::vector<bool> inside(g.nodes.size()), read(g.values.size()), made(g.values.size()), wanted(g.values.size());
    for (const std::uint32_t n : nodes) inside[n] = true;
    for (std::size_t n = 0; n < g.nodes.size(); ++n) {
        for (const std::uint32_t v : g.nodes[n].inputs) (inside[n] ? read : wanted)[v] = true;
        for (const std::uint32_t v : g.nodes[n].outputs) made[v] = inside[n];
    }
    piece_edges e;
    for (std::uint32_t v = 0; v < g.values.size(); ++v) {
        const auto kind = g.values[v].kind;
        if (read[v] && !made[v]) (kind == value_kind::weight ? e.weights : e.inputs).push_back(v);
        if (made[v] && (kind == value_kind::output || wanted[v])) e.outputs.push_back(v);
    }
    return e;
}
/// The same of consecutive nodes.
[[nodiscard]] inline piece_edges edges_of(const model_graph& g, node_range of) {
    std::vector<std::uint32_t> nodes(of.size());
    std::iota(nodes.begin(), nodes.end(), of.first);
    return edges_of(g, nodes);
}

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
