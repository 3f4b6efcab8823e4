// SPDX-License-Identifier: Apache-2.0
// Recognises norms that a model spells out. Operator sets before 17 have no LayerNormalization, and
// sets before 23 have no RMSNormalization, so exporters write means, squares, roots and quotients.
// with_norms turns each such norm into one node again. A plain function over plain values.
//
//   const piece_program p = with_norms(read_operations(bytes));
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/detail/piece_program.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// Finds the norms that a piece spells out. The last node of each norm computes:
///
///   d / sqrt(mean(d^2) + epsilon)    or    d * (1 / sqrt(mean(d^2) + epsilon))
///
/// If d = x - mean(x), the result is a layer norm of x, otherwise a root-mean-square norm of d. A
/// mean is over one axis and keeps that axis with one element. A square is a Pow by 2 or a product.
/// No other node may read the values in between. A scale and a bias after a norm remain separate
/// nodes.
class norm_finder {
public:
    explicit norm_finder(const piece_program& p) : p_(&p), maker_(p.values.size(), nothing), same_(p.values.size()) {
        for (std::uint32_t v = 0; v < same_.size(); ++v) same_[v] = v;
        for (std::size_t n = 0; n < p.nodes.size(); ++n) {
            const auto& outputs = p.nodes[n].outputs;
            if (outputs.size() != 1 || outputs[0] == no_value) continue;
            maker_[outputs[0]] = n;
            if (is(n, "Sub", 2)) same_[outputs[0]] = earlier_difference(n);
        }
    }

    /// The piece's nodes, with one node in place of each spelt-out norm. The node has the name of
    /// the norm's last node.
    [[nodiscard]] std::vector<program_node> nodes() const {
        std::vector<bool> gone(p_->nodes.size());
        std::vector<program_node> all = p_->nodes, left;
        for (std::size_t n = 0; n < all.size(); ++n) {
            const auto found = norm_at(n);
            if (!found) continue;
            for (const std::size_t inner : found->inside) gone[inner] = true;
            all[n].type = found->layer ? "LayerNormalization" : "RMSNormalization";
            all[n].inputs = {found->of};
            all[n].attributes = {{.name = "axis", .is = program_attribute::kind::integer, .integer = found->axis},
                                 {.name = "epsilon", .is = program_attribute::kind::number, .number = found->epsilon}};
        }
        for (std::size_t n = 0; n < all.size(); ++n)
            if (!gone[n]) left.push_back(std::move(all[n]));
        return left;
    }

private:
    static constexpr std::size_t nothing = ~std::size_t{0};

    struct norm {
        std::uint32_t of = no_value;  ///< the value that is normalised
        bool layer = false;
        std::int64_t axis = 0;
        float epsilon = 0;
        std::vector<std::size_t> inside{};  ///< the norm's nodes except the last
    };

    [[nodiscard]] std::optional<norm> norm_at(std::size_t last) const {
        if (is(last, "Div", 2)) return norm_of(last, input(last, 0), input(last, 1), {});
        if (!is(last, "Mul", 2)) return std::nullopt;
        for (const std::size_t i : {0U, 1U}) {
            const std::size_t inverse = maker(input(last, i));
            const bool quotient = is(inverse, "Div", 2) && number(input(inverse, 0)) == 1.0F;
            if (!quotient && !is(inverse, "Reciprocal", 1)) continue;
            if (auto n = norm_of(last, input(last, 1 - i), input(inverse, quotient ? 1 : 0), {inverse})) return n;
        }
        return std::nullopt;
    }
    /// The norm `d` / `root`, or nothing if this quotient isn't a norm.
    [[nodiscard]] std::optional<norm> norm_of(std::size_t last, std::uint32_t d, std::uint32_t root,
                                              std::vector<std::size_t> inside) const {
        const std::size_t square_root = maker(root);
        if (!is(square_root, "Sqrt", 1)) return std::nullopt;
        const std::size_t sum = maker(input(square_root, 0));
        if (!is(sum, "Add", 2)) return std::nullopt;
        const std::size_t constant = number(input(sum, 0)) ? 0 : 1;
        const auto epsilon = number(input(sum, constant));
        const std::size_t mean = maker(input(sum, 1 - constant));
        const auto axis = axis_of_mean(mean);
        if (!epsilon || !axis) return std::nullopt;
        const std::size_t square = maker(input(mean, 0));
        if (!is_square_of(square, d)) return std::nullopt;
        norm n{d, false, *axis, *epsilon, std::move(inside)};
        n.inside.insert(n.inside.end(), {square_root, sum, mean, square});
        find_difference(n);
        return is_closed(n, last) ? std::optional(std::move(n)) : std::nullopt;
    }
    /// Turns `n` into a layer norm if `n` normalises the difference of a value and the value's
    /// mean.
    void find_difference(norm& n) const {
        const std::size_t difference = maker(n.of);
        if (!is(difference, "Sub", 2)) return;
        const std::size_t mean = maker(input(difference, 1));
        if (axis_of_mean(mean) != n.axis || input(mean, 0) != input(difference, 0)) return;
        n.inside.push_back(mean);
        // some models subtract twice
        for (std::size_t other = 0; other < p_->nodes.size(); ++other)
            if (is(other, "Sub", 2) && same_[p_->nodes[other].outputs[0]] == same_[n.of]) n.inside.push_back(other);
        n.of = input(difference, 0);
        n.layer = true;
    }
    /// Whether no other node and no output needs a value made inside.
    [[nodiscard]] bool is_closed(const norm& n, std::size_t last) const {
        const auto inside = [&](std::size_t node) {
            return node == last || std::ranges::find(n.inside, node) != n.inside.end();
        };
        const auto made = [&](std::uint32_t v) {
            return v != no_value && maker(v) != nothing && maker(v) != last && inside(maker(v));
        };
        if (std::ranges::any_of(p_->outputs, made)) return false;
        for (std::size_t node = 0; node < p_->nodes.size(); ++node)
            if (!inside(node) && std::ranges::any_of(p_->nodes[node].inputs, made)) return false;
        return true;
    }

    /// Whether a node is this operator of ONNX, with this many inputs and no attributes.
    [[nodiscard]] bool is(std::size_t node, std::string_view type, std::size_t inputs) const {
        return is_plain(node, type, inputs) && p_->nodes[node].attributes.empty();
    }
    [[nodiscard]] bool is_plain(std::size_t node, std::string_view type, std::size_t inputs) const {
        if (node == nothing) return false;
        const program_node& n = p_->nodes[node];
        return n.onnx && n.type == type && n.inputs.size() == inputs && n.outputs.size() == 1 &&
               n.outputs[0] != no_value && std::ranges::find(n.inputs, no_value) == n.inputs.end();
    }
    [[nodiscard]] std::uint32_t input(std::size_t node, std::size_t i) const { return p_->nodes[node].inputs[i]; }
    [[nodiscard]] std::size_t maker(std::uint32_t v) const { return maker_[v]; }
    /// The number of a one-element constant that doesn't enlarge a shape when it is broadcast.
    [[nodiscard]] std::optional<float> number(std::uint32_t v) const {
        const program_value& c = p_->values[v];
        if (!c.constant || c.shape.size() > 1) return std::nullopt;
        if (c.type == element::f32 && c.numbers.size() == 1) return c.numbers[0];
        return std::nullopt;
    }
    [[nodiscard]] bool is_square_of(std::size_t node, std::uint32_t d) const {
        if (is(node, "Pow", 2)) return same_[input(node, 0)] == same_[d] && number(input(node, 1)) == 2.0F;
        return is(node, "Mul", 2) && same_[input(node, 0)] == same_[d] && same_[input(node, 1)] == same_[d];
    }
    /// The axis of a mean, or nothing if the node isn't a mean over one axis. The axis is an
    /// attribute before operator set 18, and an input since.
    [[nodiscard]] std::optional<std::int64_t> axis_of_mean(std::size_t node) const {
        using kind = program_attribute::kind;
        const bool by_input = is_plain(node, "ReduceMean", 2);
        if (!by_input && !is_plain(node, "ReduceMean", 1)) return std::nullopt;
        std::vector<std::int64_t> axes;
        if (by_input) axes = p_->values[input(node, 1)].integers;
        for (const auto& a : p_->nodes[node].attributes) {
            const bool keeps = a.name == "keepdims" && a.is == kind::integer && a.integer == 1;
            const bool names = a.name == "axes" && a.is == kind::integers && !by_input;
            if (!keeps && !names && a.name != "noop_with_empty_axes") return std::nullopt;
            if (names) axes = a.integers;
        }
        return axes.size() == 1 ? std::optional(axes[0]) : std::nullopt;
    }
    /// The output of the first node that subtracts the same two values.
    [[nodiscard]] std::uint32_t earlier_difference(std::size_t node) const {
        for (std::size_t n = 0; n < node; ++n)
            if (is(n, "Sub", 2) && p_->nodes[n].inputs == p_->nodes[node].inputs) return p_->nodes[n].outputs[0];
        return p_->nodes[node].outputs[0];
    }

    const piece_program* p_;
    std::vector<std::size_t> maker_;  // for each value: the node that makes it
    // for each value: the first value that is the same difference
    std::vector<std::uint32_t> same_;
};

/// The piece with one node in place of each norm that it spells out; see norm_finder.
[[nodiscard]] inline piece_program with_norms(piece_program p) {
    p.nodes = norm_finder(p).nodes();
    return p;
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
