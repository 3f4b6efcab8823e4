// SPDX-License-Identifier: Apache-2.0
// Finds the matrix products of a piece, the nodes that can be folded into each product, and where a
// product's matrices are. Plain functions over plain values, without a device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/detail/piece_program.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// The function applied to each element of a product at the end.
enum class activation : std::uint8_t { none, relu, gelu };

/// out = act(alpha * op(a) op(b) + beta * addend + bias_factor * bias), in row-major order.
struct matmul_step {
    std::string node{};  ///< the name of the product's node
    std::uint32_t a = no_value, b = no_value, out = no_value;
    bool transpose_a = false, transpose_b = false;
    float alpha = 1;
    float beta = 0;                   ///< 0 means that there is no addend
    std::uint32_t addend = no_value;  ///< a value of the product's shape
    std::uint32_t bias = no_value;    ///< a value with an element for each column
    float bias_factor = 1;            ///< other than 1 only if the bias is constant
    activation act = activation::none;
};

/// The shape of a product of two stacks of matrices of known ranks. Negative extents are unknown.
/// Empty if the operands don't fit each other or aren't matrices.
[[nodiscard]] inline std::optional<std::vector<std::int64_t>> product_shape(std::span<const std::int64_t> a,
                                                                            std::span<const std::int64_t> b,
                                                                            bool transpose_a, bool transpose_b) {
    if (a.size() < 2 || b.size() < 2) return std::nullopt;
    const auto last = [](std::span<const std::int64_t> of, std::size_t from_behind) {
        return of[of.size() - from_behind];
    };
    const std::int64_t inner_a = last(a, transpose_a ? 2 : 1), inner_b = last(b, transpose_b ? 1 : 2);
    if (inner_a >= 0 && inner_b >= 0 && inner_a != inner_b) return std::nullopt;
    std::vector<std::int64_t> out(std::max(a.size(), b.size()));
    out[out.size() - 1] = last(b, transpose_b ? 2 : 1);
    out[out.size() - 2] = last(a, transpose_a ? 1 : 2);
    for (std::size_t i = 3; i <= out.size(); ++i) {
        const std::int64_t of_a = i <= a.size() ? last(a, i) : 1, of_b = i <= b.size() ? last(b, i) : 1;
        if (of_a > 1 && of_b > 1 && of_a != of_b) return std::nullopt;
        out[out.size() - i] = of_a == 1 ? of_b : of_b == 1 ? of_a : std::max(of_a, of_b);
        if (of_a == 0 || of_b == 0) out[out.size() - i] = 0;
    }
    return out;
}

/// The shape of an element-wise operation on two values of known ranks. Negative extents are
/// unknown. Empty if the values don't fit each other.
[[nodiscard]] inline std::optional<std::vector<std::int64_t>> broadcast_shape(std::span<const std::int64_t> a,
                                                                              std::span<const std::int64_t> b) {
    if (a.size() < b.size()) std::swap(a, b);
    std::vector<std::int64_t> out(a.begin(), a.end());
    for (std::size_t i = 1; i <= b.size(); ++i) {
        std::int64_t& one = out[out.size() - i];
        const std::int64_t other = b[b.size() - i];
        if (one == other || other == 1) continue;
        if (one > 1 && other > 1) return std::nullopt;
        one = one == 1 ? other : one == 0 || other == 0 ? 0 : std::max(one, other);
    }
    return out;
}

/// Whether an array has an element for each column of a product, and is the same for all rows.
[[nodiscard]] inline bool has_columns_of(std::span<const std::int64_t> product, std::span<const std::int64_t> own) {
    return !own.empty() && own.size() <= product.size() && own.back() == product.back() &&
           std::all_of(own.begin(), own.end() - 1, [](std::int64_t extent) { return extent == 1; });
}

/// Finds the products of a piece.
class matmul_matcher {
public:
    explicit matmul_matcher(const piece_program& p) : p_(&p), shapes_(p.values.size()), taken_(p.nodes.size()) {
        for (std::uint32_t v = 0; v < p.values.size(); ++v)
            if (p.values[v].ranked) shapes_[v] = p.values[v].shape;
        for (const auto& n : p.nodes) infer(n);
    }

    /// The steps, each after the steps whose results it reads. Throws model_error (engine) with the
    /// name of a node that isn't part of a product.
    [[nodiscard]] std::vector<matmul_step> steps() {
        // each product with the place of its last node
        std::vector<std::pair<std::size_t, matmul_step>> found;
        for (std::size_t n = 0; n < p_->nodes.size(); ++n) {
            if (taken_[n]) continue;
            auto step = product(p_->nodes[n]);
            taken_[n] = true;
            const std::size_t last = fold_readers(step, n);
            found.emplace_back(last, std::move(step));
        }
        if (found.empty()) throw model_error(model_fault::engine, {}, "a piece without nodes");
        // The addend of an earlier product may be a later product, so the last node of each product
        // decides the order.
        std::ranges::sort(found, {}, &std::pair<std::size_t, matmul_step>::first);
        std::vector<matmul_step> all;
        for (auto& each : found) all.push_back(std::move(each.second));
        for (const std::uint32_t v : p_->outputs)
            if (std::ranges::find(all, v, &matmul_step::out) == all.end())
                throw model_error(model_fault::engine, p_->values[v].name, "an output that no product makes");
        if (has_twice(p_->outputs)) throw model_error(model_fault::engine, {}, "an output that is given twice");
        return all;
    }

private:
    using shape = std::optional<std::vector<std::int64_t>>;

    /// Infers the shape of a node's output if the piece doesn't state the shape. The order matters
    /// because an Add may read a value that is made later than the product into which the Add is
    /// folded.
    void infer(const program_node& n) {
        const auto there = [&](std::size_t i) { return i < n.inputs.size() && n.inputs[i] != no_value; };
        if (!n.onnx || n.outputs.size() != 1 || n.outputs[0] == no_value || !there(0) || shapes_[n.outputs[0]]) return;
        const shape& first = shapes_[n.inputs[0]];
        if (n.type == "Relu" || n.type == "Gelu") shapes_[n.outputs[0]] = first;
        if (!there(1) || !first || !shapes_[n.inputs[1]]) return;
        const shape& second = shapes_[n.inputs[1]];
        if (n.type == "Add") shapes_[n.outputs[0]] = broadcast_shape(*first, *second);
        if (n.type == "MatMul" || n.type == "Gemm")
            shapes_[n.outputs[0]] = product_shape(*first, *second, is_set(n, "transA"), is_set(n, "transB"));
    }
    [[nodiscard]] static bool is_set(const program_node& n, std::string_view attribute) noexcept {
        const auto* const a = n.find(attribute);
        return a != nullptr && a->integer != 0;
    }

    [[noreturn]] static void refuse(const program_node& n, const std::string& why) {
        throw model_error(model_fault::engine, n.name, n.type + ": " + why);
    }

    /// A MatMul or Gemm by itself.
    [[nodiscard]] matmul_step product(const program_node& n) {
        if (!n.onnx || (n.type != "MatMul" && n.type != "Gemm")) refuse(n, why_alone(n));
        const std::size_t most = n.type == "Gemm" ? 3 : 2;
        if (n.inputs.size() < 2 || n.inputs.size() > most || n.outputs.size() != 1)
            refuse(n, "it has another number of inputs or outputs");
        matmul_step s{.node = n.name, .a = n.inputs[0], .b = n.inputs[1], .out = n.outputs[0]};
        for (const std::uint32_t v : {s.a, s.b, s.out})
            if (v == no_value) refuse(n, "an input or output is missing");
        require_floats(n, s.a), require_floats(n, s.b);
        float factor = 1;
        take_attributes(n, s, factor);
        take_shape(n, s);
        if (n.inputs.size() == 3 && n.inputs[2] != no_value && factor != 0) take_c(n, s, factor);
        return s;
    }
    void take_attributes(const program_node& n, matmul_step& s, float& factor) const {
        using kind = program_attribute::kind;
        for (const auto& a : n.attributes) {
            const bool gemm = n.type == "Gemm";
            if (gemm && a.name == "alpha" && a.is == kind::number)
                s.alpha = a.number;
            else if (gemm && a.name == "beta" && a.is == kind::number)
                factor = a.number;
            else if (gemm && a.name == "transA" && a.is == kind::integer)
                s.transpose_a = a.integer != 0;
            else if (gemm && a.name == "transB" && a.is == kind::integer)
                s.transpose_b = a.integer != 0;
            else
                refuse(n, "nothing is known about its attribute '" + a.name + "'");
        }
    }
    void take_shape(const program_node& n, const matmul_step& s) {
        if (!shapes_[s.a] || !shapes_[s.b]) refuse(n, "an input's number of dimensions is unknown");
        if (n.type == "Gemm" && (shapes_[s.a]->size() != 2 || shapes_[s.b]->size() != 2))
            refuse(n, "an input isn't a matrix");
        auto made = product_shape(*shapes_[s.a], *shapes_[s.b], s.transpose_a, s.transpose_b);
        if (!made) refuse(n, "its inputs aren't matrices of matching sizes");
        shapes_[s.out] = std::move(made);
    }
    void take_c(const program_node& n, matmul_step& s, float factor) const {
        const std::uint32_t c = n.inputs[2];
        require_floats(n, c);
        if (is_bias(c, s)) {
            if (factor != 1 && !p_->values[c].constant) refuse(n, "a bias that isn't constant has a factor");
            s.bias = c;
            s.bias_factor = factor;
        } else if (is_alike(c, s)) {
            s.addend = c;
            s.beta = factor;
        } else {
            refuse(n, "its third input has neither an element for each column nor the product's shape");
        }
    }

    /// Folds the only reader of the result into the step, then the only reader of that node, and so
    /// on. Returns the place of the last node.
    [[nodiscard]] std::size_t fold_readers(matmul_step& s, std::size_t at) {
        while (s.act == activation::none) {
            const auto reader = only_reader(s.out);
            if (!reader || taken_[*reader] || !folds(s, p_->nodes[*reader])) break;
            at = *reader;
            taken_[at] = true;
            shapes_[p_->nodes[at].outputs[0]] = shapes_[s.out];  // folded readers keep the shape
            s.out = p_->nodes[at].outputs[0];
        }
        return at;
    }
    /// Whether the step can do a node's work as well. If so, changes the step accordingly.
    [[nodiscard]] bool folds(matmul_step& s, const program_node& n) const {
        if (!n.onnx || n.outputs.size() != 1 || n.outputs[0] == no_value) return false;
        if (n.type == "Relu" && n.attributes.empty() && n.inputs.size() == 1) {
            s.act = activation::relu;
            return true;
        }
        if (n.type == "Gelu" && is_by_tanh(n) && n.inputs.size() == 1) {
            s.act = activation::gelu;
            return true;
        }
        if (n.type != "Add" || !n.attributes.empty() || n.inputs.size() != 2) return false;
        const std::uint32_t other = n.inputs[n.inputs[0] == s.out ? 1 : 0];
        if (other == s.out || other == no_value || !has_floats(other)) return false;
        if (s.bias == no_value && is_bias(other, s)) {
            s.bias = other;
            return true;
        }
        if (s.addend != no_value || !is_alike(other, s)) return false;
        s.addend = other;
        s.beta = 1;
        return true;
    }
    /// The only node that reads a value, and reads it once; none if the value is an output of the
    /// piece.
    [[nodiscard]] std::optional<std::size_t> only_reader(std::uint32_t v) const {
        if (std::ranges::find(p_->outputs, v) != p_->outputs.end()) return std::nullopt;
        std::optional<std::size_t> found;
        for (std::size_t n = 0; n < p_->nodes.size(); ++n)
            for (const std::uint32_t in : p_->nodes[n].inputs) {
                if (in != v) continue;
                if (found) return std::nullopt;
                found = n;
            }
        return found;
    }
    /// cuBLASLt's epilogue computes Gelu by tanh, and not by the error function.
    [[nodiscard]] static bool is_by_tanh(const program_node& n) noexcept {
        const auto* const how = n.find("approximate");
        return how != nullptr && n.attributes.size() == 1 && how->text == "tanh";
    }
    [[nodiscard]] bool has_floats(std::uint32_t v) const noexcept {
        const element type = p_->values[v].type;
        return type == element::f32 || type == element::unknown;
    }
    void require_floats(const program_node& n, std::uint32_t v) const {
        if (!has_floats(v))
            refuse(n, "'" + p_->values[v].name + "' is of type " + std::string(to_string(p_->values[v].type)) +
                          ", and not f32");
    }
    /// Whether a value is a bias of the product, as far as both shapes are known.
    [[nodiscard]] bool is_bias(std::uint32_t v, const matmul_step& s) const {
        const auto& product = *shapes_[s.out];
        return product.back() > 0 && shapes_[v] && has_columns_of(product, *shapes_[v]);
    }
    /// Whether a value has the product's shape, as far as both are known. If an extent is known on
    /// one side only, the answer is no, because the value may be broadcast there.
    [[nodiscard]] bool is_alike(std::uint32_t v, const matmul_step& s) const {
        return shapes_[v] && *shapes_[v] == *shapes_[s.out];
    }
    /// The reason why a node that isn't part of a product can't be computed.
    [[nodiscard]] static std::string why_alone(const program_node& n) {
        if (n.onnx && n.type == "Gelu" && !is_by_tanh(n)) return "cuBLASLt computes it by tanh alone";
        if (n.onnx && (n.type == "Add" || n.type == "Relu" || n.type == "Gelu"))
            return "it can't be folded into the product before it";
        return "it is no matrix product";
    }

    const piece_program* p_;
    std::vector<shape> shapes_;  // of each value whose rank is known
    std::vector<bool> taken_;    // by node
};

/// The steps of a piece; see matmul_matcher::steps.
[[nodiscard]] inline std::vector<matmul_step> matmul_steps(const piece_program& p) { return matmul_matcher(p).steps(); }

/// A product with all extents known. Strides between matrices of a stack are in elements; with 0,
/// the whole stack uses one matrix.
struct matmul_extents {
    std::int64_t rows = 0, columns = 0, inner = 0;
    std::int64_t batch = 1;  ///< matrices of the stack; 0 if the product has no elements
    std::int64_t stride_a = 0, stride_b = 0, stride_out = 0;

    friend bool operator==(const matmul_extents&, const matmul_extents&) = default;
};

/// The extents for operands of these shapes. Throws model_error (engine) with the step's node if
/// they don't fit each other, or if no single stride describes how they are broadcast.
[[nodiscard]] inline matmul_extents extents_of(const matmul_step& s, std::span<const std::int64_t> a,
                                               std::span<const std::int64_t> b) {
    const auto refuse = [&](std::string_view why) { throw model_error(model_fault::engine, s.node, why); };
    const auto out = product_shape(a, b, s.transpose_a, s.transpose_b);
    if (!out) refuse("its inputs aren't matrices of matching sizes");
    matmul_extents e;
    e.rows = (*out)[out->size() - 2];
    e.columns = out->back();
    e.inner = a[a.size() - (s.transpose_a ? 2 : 1)];
    if (std::ranges::find(*out, 0) != out->end()) {  // products of the other extents may overflow
        e.batch = 0;
        return e;
    }
    for (std::size_t i = 0; i + 2 < out->size(); ++i) e.batch *= (*out)[i];
    const auto stack = [](std::span<const std::int64_t> of) {
        std::int64_t n = 1;
        for (std::size_t i = 0; i + 2 < of.size(); ++i) n *= of[i];
        return n;
    };
    if (e.batch == 1) return e;
    const std::int64_t of_a = stack(a), of_b = stack(b);
    if (of_b == 1 && !s.transpose_a) {  // the rows of all matrices are contiguous
        e.rows *= e.batch;
        e.batch = 1;
        return e;
    }
    if ((of_a != e.batch && of_a != 1) || (of_b != e.batch && of_b != 1))
        refuse("its inputs are broadcast against each other in several dimensions");
    e.stride_a = of_a == 1 ? 0 : e.rows * e.inner;
    e.stride_b = of_b == 1 ? 0 : e.inner * e.columns;
    e.stride_out = e.rows * e.columns;
    return e;
}

/// A matrix in column-major order, as in cuBLAS.
struct column_matrix {
    std::int64_t rows = 0, columns = 0;
    std::int64_t leading = 0;  ///< elements from one column to the next
    std::int64_t stride = 0;   ///< elements from one matrix of a stack to the next
    bool transpose = false;

    friend bool operator==(const column_matrix&, const column_matrix&) = default;
};

/// A product of cuBLAS: first * second = out.
struct column_product {
    column_matrix first{}, second{}, out{};
};

/// The same product in column-major order. A row-major matrix is its own transpose in column-major
/// order, so the operands change places, and the bias has an element for each of cuBLAS's rows.
[[nodiscard]] inline column_product in_columns(const matmul_step& s, const matmul_extents& e) {
    const auto stored = [](std::int64_t rows, std::int64_t columns, std::int64_t stride, bool transpose) {
        if (transpose) std::swap(rows, columns);  // as the operand is stored
        return column_matrix{columns, rows, columns, stride, transpose};
    };
    return {stored(e.inner, e.columns, e.stride_b, s.transpose_b), stored(e.rows, e.inner, e.stride_a, s.transpose_a),
            stored(e.rows, e.columns, e.stride_out, false)};
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
