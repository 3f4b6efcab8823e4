// SPDX-License-Identifier: Apache-2.0
// Recognises pieces that are a chain or a small tree of element-wise operations with at most one
// norm, and makes the steps that compute such a piece. Once shapes are known, finds where the
// piece's arrays are. Plain functions over plain values, without a device.
//
//   const chain_program c = chain_steps(piece);             // or throws, naming a node
//   chain_shapes(piece, shapes);                            // from inputs' and constants' shapes
//   const chain_kernel k = bound_chain(c, piece, shapes);   // all but addresses
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/detail/chain_kernel.hpp>
#include <gpushare/graph/detail/piece_program.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

using chain_shape = std::vector<std::int64_t>;

/// A piece as steps.
struct chain_program {
    std::vector<chain_step> steps{};
    /// The values that steps read, indexed by chain_step::index.
    std::vector<std::uint32_t> inputs{};
    chain_norm norm = chain_norm::none;
    std::uint32_t norm_at = 0;  ///< the number of steps before the norm
    float epsilon = 0;
    std::size_t norm_node = 0;
};

[[noreturn]] inline void refuse_node(const program_node& n, const std::string& why) {
    throw model_error(model_fault::engine, n.name, n.type + ": " + why);
}
[[nodiscard]] constexpr chain_norm norm_of(std::string_view type) noexcept {
    if (type == "LayerNormalization") return chain_norm::layer;
    if (type == "RMSNormalization") return chain_norm::root_mean_square;
    return type == "Softmax" ? chain_norm::softmax : chain_norm::none;
}
/// The axis of a norm; empty for a Softmax that doesn't name an axis.
[[nodiscard]] inline std::optional<std::int64_t> axis_of(const program_node& n) {
    const auto* const a = n.find("axis");
    if (a != nullptr) return a->integer;
    // A Softmax without an axis begins at axis 1 before operator set 13, and at the last axis
    // since.
    if (n.type == "Softmax") return std::nullopt;
    return -1;
}
/// Throws unless a norm of a value of this shape covers the last axis and no other.
inline void require_last_axis(const program_node& n, const chain_shape& shape) {
    const auto rank = static_cast<std::int64_t>(shape.size());
    const auto axis = axis_of(n);
    if (rank < 1 || (!axis && rank != 2) || (axis && *axis != -1 && *axis != rank - 1))
        refuse_node(n, "it doesn't go over the last axis alone");
}

/// Makes the steps of a piece.
class chain_matcher {
public:
    explicit chain_matcher(const piece_program& p) : p_(&p), made_(p.values.size()) {}

    /// The piece as steps. Throws model_error (engine) with the name of a node that can't be part
    /// of a chain.
    [[nodiscard]] chain_program program() {
        if (p_->nodes.empty()) throw model_error(model_fault::engine, {}, "a piece without nodes");
        next_ = static_cast<std::uint32_t>(p_->values.size());
        for (std::size_t n = 0; n < p_->nodes.size(); ++n) take(n);
        check_outputs();
        find_reads();
        for (std::size_t k = 0; k < operations_.size(); ++k) emit(k);
        return std::move(result_);
    }

private:
    /// An input of an operation: another operation's value, an array, or a number.
    struct operand {
        enum class kind : std::uint8_t { nothing, made, array, number };
        kind is = kind::nothing;
        std::uint32_t value = no_value;  // the value's index, or the array's
        float number = 0;

        friend bool operator==(const operand&, const operand&) = default;
    };
    /// A node, or a part of one.
    struct operation {
        std::size_t node = 0;
        chain_op op = chain_op::load;
        bool norm = false;
        operand a{}, b{};
        std::uint32_t to = no_value;
    };
    /// One operation of a node that needs several.
    struct part {
        chain_op op;
        operand other;
    };
    struct named_op {
        std::string_view type;
        chain_op op;
    };
    static constexpr std::array<named_op, 8> of_one{{{"Abs", chain_op::magnitude},
                                                     {"Erf", chain_op::error_function},
                                                     {"Exp", chain_op::exponential},
                                                     {"Neg", chain_op::negate},
                                                     {"Reciprocal", chain_op::reciprocal},
                                                     {"Sigmoid", chain_op::sigmoid},
                                                     {"Sqrt", chain_op::square_root},
                                                     {"Tanh", chain_op::hyperbolic_tangent}}};
    static constexpr std::array<named_op, 4> of_two{
        {{"Add", chain_op::add}, {"Sub", chain_op::subtract}, {"Mul", chain_op::multiply}, {"Div", chain_op::divide}}};
    [[nodiscard]] static std::optional<chain_op> find(std::span<const named_op> list, std::string_view type) {
        const auto at = std::ranges::find(list, type, &named_op::type);
        return at == list.end() ? std::nullopt : std::optional(at->op);
    }

    // --- from nodes to operations

    void take(std::size_t at) {
        const program_node& n = p_->nodes[at];
        if (!n.onnx) refuse_node(n, "it is no operator of ONNX");
        if (n.outputs.size() != 1 || n.outputs[0] == no_value) refuse_node(n, "it has another number of outputs");
        require_floats(n, n.outputs[0]);
        if (const auto op = find(of_one, n.type))
            take_plain(at, *op, 1);
        else if (const auto of_both = find(of_two, n.type))
            take_plain(at, *of_both, 2);
        else if (norm_of(n.type) != chain_norm::none)
            take_norm(at);
        else
            take_other(at);
        made_[n.outputs[0]] = true;
    }
    void take_plain(std::size_t at, chain_op op, std::size_t inputs) {
        const program_node& n = p_->nodes[at];
        require(n, {}, inputs, inputs);
        const operand a = read(n, 0), b = inputs == 2 ? read(n, 1) : operand{};
        operations_.push_back({at, op, false, a, b, n.outputs[0]});
    }
    void take_other(std::size_t at) {
        const program_node& n = p_->nodes[at];
        if (n.type == "Relu") {
            require(n, {}, 1, 1);
            operations_.push_back({at, chain_op::larger, false, read(n, 0), a_number(0), n.outputs[0]});
        } else if (n.type == "Gelu") {
            require(n, {"approximate"}, 1, 1);
            const auto* const how = n.find("approximate");
            if (how != nullptr && how->text != "none" && how->text != "tanh")
                refuse_node(n, "an unknown approximation");
            const bool by_tanh = how != nullptr && how->text == "tanh";
            operations_.push_back(
                {at, by_tanh ? chain_op::gelu_by_tanh : chain_op::gelu, false, read(n, 0), {}, n.outputs[0]});
        } else if (n.type == "Min" || n.type == "Max") {
            require(n, {}, 1, n.inputs.size());
            std::vector<part> parts;
            for (std::size_t i = 1; i < n.inputs.size(); ++i)
                parts.push_back({n.type == "Min" ? chain_op::smaller : chain_op::larger, read(n, i)});
            take_parts(at, parts, n.outputs[0]);
        } else if (n.type == "HardSigmoid" || n.type == "HardSwish") {
            take_hard(at);
        } else if (n.type == "LeakyRelu") {
            take_leaky(at);
        } else if (n.type == "Clip") {
            take_clip(at);
        } else if (n.type == "Pow") {
            take_power(at);
        } else {
            refuse_node(n, "it is neither element-wise nor a norm that is known");
        }
    }
    /// Applies parts one after the other, beginning with the first input.
    void take_parts(std::size_t at, const std::vector<part>& parts, std::uint32_t to) {
        operand a = read(p_->nodes[at], 0);
        if (parts.empty()) operations_.push_back({at, chain_op::load, false, a, {}, to});
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const std::uint32_t next = i + 1 == parts.size() ? to : next_++;
            operations_.push_back({at, parts[i].op, false, a, parts[i].other, next});
            a = made(next);
        }
    }
    /// max(0, min(1, alpha x + beta)), which HardSwish multiplies by x.
    void take_hard(std::size_t at) {
        const program_node& n = p_->nodes[at];
        const bool product = n.type == "HardSwish";
        if (product)
            require(n, {}, 1, 1);
        else
            require(n, {"alpha", "beta"}, 1, 1);
        const std::uint32_t to = product ? next_++ : n.outputs[0];
        take_parts(at,
                   {{chain_op::multiply, a_number(number_of(n, "alpha", product ? 1.0F / 6 : 0.2F))},
                    {chain_op::add, a_number(number_of(n, "beta", 0.5F))},
                    {chain_op::smaller, a_number(1)},
                    {chain_op::larger, a_number(0)}},
                   to);
        if (product) operations_.push_back({at, chain_op::multiply, false, read(n, 0), made(to), n.outputs[0]});
    }
    /// max(x, alpha x).
    void take_leaky(std::size_t at) {
        const program_node& n = p_->nodes[at];
        require(n, {"alpha"}, 1, 1);
        const float alpha = number_of(n, "alpha", 0.01F);
        if (!(alpha > 0 && alpha <= 1)) refuse_node(n, "its factor isn't between 0 and 1");
        const operand x = read(n, 0);
        operations_.push_back({at, chain_op::multiply, false, x, a_number(alpha), next_});
        operations_.push_back({at, chain_op::larger, false, x, made(next_++), n.outputs[0]});
    }
    [[nodiscard]] static float number_of(const program_node& n, std::string_view attribute, float otherwise) {
        const auto* const a = n.find(attribute);
        return a != nullptr ? a->number : otherwise;
    }
    void take_clip(std::size_t at) {
        const program_node& n = p_->nodes[at];
        require(n, {"min", "max"}, 1, 3);
        std::vector<part> parts{{chain_op::larger, bound(n, 1, "min")}, {chain_op::smaller, bound(n, 2, "max")}};
        std::erase_if(parts, [](const part& each) { return each.other.is == operand::kind::nothing; });
        take_parts(at, parts, n.outputs[0]);
    }
    /// A bound of Clip: an input since operator set 11, an attribute before that set.
    [[nodiscard]] operand bound(const program_node& n, std::size_t input, std::string_view attribute) {
        const auto* const a = n.find(attribute);
        if (a != nullptr) return a_number(a->number);
        if (n.inputs.size() <= input || n.inputs[input] == no_value) return {};
        return read(n, input);
    }
    /// x^2 and x^3, the powers that norms and approximations use.
    void take_power(std::size_t at) {
        const program_node& n = p_->nodes[at];
        require(n, {}, 2, 2);
        const operand a = read(n, 0), b = read(n, 1);
        if (b.is != operand::kind::number || (b.number != 2 && b.number != 3))
            refuse_node(n, "its exponent is neither 2 nor 3");
        const std::uint32_t square = b.number == 2 ? n.outputs[0] : next_++;
        operations_.push_back({at, chain_op::multiply, false, a, a, square});
        if (b.number == 3) operations_.push_back({at, chain_op::multiply, false, made(square), a, n.outputs[0]});
    }
    void take_norm(std::size_t at) {
        const program_node& n = p_->nodes[at];
        const chain_norm norm = norm_of(n.type);
        const std::size_t most = norm == chain_norm::softmax ? 1 : norm == chain_norm::layer ? 3 : 2;
        if (norm == chain_norm::softmax)
            require(n, {"axis"}, 1, most);
        else
            require(n, {"axis", "epsilon", "stash_type"}, 1, most);  // spelt norms have no scale
        if (result_.norm != chain_norm::none) refuse_node(n, "its piece has a second norm");
        const auto* const stash = n.find("stash_type");
        if (stash != nullptr && stash->integer != 1) refuse_node(n, "it isn't computed in floats");
        const auto* const epsilon = n.find("epsilon");
        result_.norm = norm;
        result_.epsilon = epsilon != nullptr ? epsilon->number : 1e-5F;
        result_.norm_node = at;
        const auto& first = n.inputs[0] == no_value ? program_value{} : p_->values[n.inputs[0]];
        if (first.ranked) require_last_axis(n, first.shape);
        operand a = read(n, 0);
        const std::size_t inputs = n.inputs.size() - (n.inputs.size() == 3 && n.inputs[2] == no_value ? 1 : 0);
        operations_.push_back({at, chain_op::load, true, a, {}, inputs == 1 ? n.outputs[0] : next_});
        for (std::size_t i = 1; i < inputs; ++i) {
            a = made(next_++);
            const std::uint32_t to = i + 1 == inputs ? n.outputs[0] : next_;
            operations_.push_back({at, i == 1 ? chain_op::multiply : chain_op::add, false, a, read(n, i), to});
        }
    }

    /// Throws unless a node has only these attributes, and a number of inputs within bounds.
    static void require(const program_node& n, std::initializer_list<std::string_view> attributes, std::size_t least,
                        std::size_t most) {
        using kind = program_attribute::kind;
        for (const auto& a : n.attributes) {
            const kind wanted = a.name == "approximate"                      ? kind::text
                                : a.name == "axis" || a.name == "stash_type" ? kind::integer
                                                                             : kind::number;
            if (std::ranges::find(attributes, a.name) == attributes.end() || a.is != wanted)
                refuse_node(n, "nothing is known about its attribute '" + a.name + "'");
        }
        if (n.inputs.size() < least || n.inputs.size() > most || n.inputs.empty())
            refuse_node(n, "it has another number of inputs");
    }
    void require_floats(const program_node& n, std::uint32_t v) const {
        const auto& value = p_->values[v];
        if (value.type != element::f32 && (value.constant || value.type != element::unknown))
            refuse_node(n, "'" + value.name + "' is of type " + std::string(to_string(value.type)) + ", and not f32");
    }
    [[nodiscard]] static operand made(std::uint32_t v) { return {operand::kind::made, v, 0}; }
    [[nodiscard]] static operand a_number(float x) { return {operand::kind::number, no_value, x}; }
    /// A node's input as an operand.
    [[nodiscard]] operand read(const program_node& n, std::size_t input) {
        const std::uint32_t v = n.inputs[input];
        if (v == no_value) refuse_node(n, "an input is missing");
        require_floats(n, v);
        const auto& value = p_->values[v];
        if (made_[v]) return made(v);
        if (value.constant && value.numbers.size() == 1) return a_number(value.numbers[0]);
        if (!value.constant && std::ranges::find(p_->inputs, v) == p_->inputs.end())
            refuse_node(n, "nothing makes '" + value.name + "'");
        auto& arrays = result_.inputs;
        const auto at = std::ranges::find(arrays, v);
        const auto index = static_cast<std::uint32_t>(at - arrays.begin());
        if (at == arrays.end()) arrays.push_back(v);
        if (index == most_chain_inputs)
            refuse_node(n, "its piece reads more than " + std::to_string(most_chain_inputs) + " arrays");
        return {operand::kind::array, index, 0};
    }
    void check_outputs() const {
        for (const std::uint32_t v : p_->outputs)
            if (!made_[v]) throw model_error(model_fault::engine, p_->values[v].name, "an output that no node makes");
        if (p_->outputs.empty() || p_->outputs.size() > most_chain_outputs)
            throw model_error(model_fault::engine, {},
                              "a piece without outputs, or with more than " + std::to_string(most_chain_outputs));
        if (has_twice(p_->outputs)) throw model_error(model_fault::engine, {}, "an output that is given twice");
    }

    // --- from operations to steps

    void find_reads() {
        last_read_.assign(next_, 0);
        slot_.assign(next_, chain_nowhere);
        for (std::size_t k = 0; k < operations_.size(); ++k)
            for (const operand& o : {operations_[k].a, operations_[k].b})
                if (o.is == operand::kind::made) last_read_[o.value] = k;
    }
    void emit(std::size_t k) {
        const operation& o = operations_[k];
        const bool turned = !at_hand(o.a) && at_hand(o.b);
        if (!at_hand(o.a) && !turned) push(o, chain_op::load, o.a);
        if (o.norm)
            result_.norm_at = static_cast<std::uint32_t>(result_.steps.size());
        else if (o.b.is == operand::kind::nothing)
            push(o, o.op, o.a, true);
        else
            push(o, turned ? reversed(o.op) : o.op, turned ? o.a : o.b, !turned && o.a == o.b);
        finish(k);
    }
    /// Whether the value at hand is this operand.
    [[nodiscard]] bool at_hand(const operand& o) const { return o.is == operand::kind::made && o.value == at_hand_; }
    [[nodiscard]] static chain_op reversed(chain_op op) noexcept {
        switch (op) {
            case chain_op::subtract: return chain_op::subtract_from;
            case chain_op::divide: return chain_op::divide_into;
            case chain_op::smaller: return chain_op::smaller_of;
            case chain_op::larger: return chain_op::larger_of;
            default: return op;
        }
    }
    void push(const operation& o, chain_op op, const operand& y, bool same = false) {
        if (result_.steps.size() == most_chain_steps)
            refuse_node(p_->nodes[o.node], "its piece has more than " + std::to_string(most_chain_steps) + " steps");
        chain_step s{.op = op};
        if (!same) {
            if (y.is == operand::kind::made) s.from = chain_source::kept, s.index = slot_[y.value];
            if (y.is == operand::kind::array)
                s.from = chain_source::input, s.index = static_cast<std::uint8_t>(y.value);
            if (y.is == operand::kind::number) s.from = chain_source::number, s.number = y.number;
        }
        result_.steps.push_back(s);
    }
    /// Ends an operation: frees the slots of values that nothing reads any more, and stores the
    /// operation's own value for outputs and later steps.
    void finish(std::size_t k) {
        const operation& o = operations_[k];
        for (const operand& read : {o.a, o.b})
            if (read.is == operand::kind::made && last_read_[read.value] == k) free_slot(read.value);
        at_hand_ = o.to;
        const auto wanted = std::ranges::find(p_->outputs, o.to);
        const bool later = last_read_[o.to] > k + 1;  // the next operation finds the value at hand
        if (!later && wanted == p_->outputs.end()) return;
        if (o.norm) push(o, chain_op::load, {}, true);
        chain_step& last = result_.steps.back();
        if (wanted != p_->outputs.end()) last.out = static_cast<std::uint8_t>(wanted - p_->outputs.begin());
        if (later) last.keep = slot_[o.to] = take_slot(o);
    }
    [[nodiscard]] std::uint8_t take_slot(const operation& o) {
        const auto free = std::ranges::find(taken_, false);
        if (free == taken_.end())
            refuse_node(p_->nodes[o.node], "more than " + std::to_string(chain_slots) + " values wait for others");
        *free = true;
        return static_cast<std::uint8_t>(free - taken_.begin());
    }
    void free_slot(std::uint32_t v) {
        if (slot_[v] != chain_nowhere) taken_[slot_[v]] = false;
        slot_[v] = chain_nowhere;
    }

    const piece_program* p_;
    std::vector<bool> made_;  // whether the nodes so far made each value
    std::uint32_t next_ = 0;  // the next number of an intermediate value
    std::vector<operation> operations_{};
    std::vector<std::size_t> last_read_{};
    std::vector<std::uint8_t> slot_{};
    std::array<bool, chain_slots> taken_{};
    std::uint32_t at_hand_ = no_value;
    chain_program result_{};
};

/// The steps of a piece; see chain_matcher::program.
[[nodiscard]] inline chain_program chain_steps(const piece_program& p) { return chain_matcher(p).program(); }

/// The shape of an operation on values of these two shapes; empty if the shapes don't fit each
/// other.
[[nodiscard]] inline std::optional<chain_shape> joined_shape(const chain_shape& a, const chain_shape& b) {
    chain_shape out = a.size() < b.size() ? b : a;
    const chain_shape& other = a.size() < b.size() ? a : b;
    for (std::size_t i = 1; i <= other.size(); ++i) {
        std::int64_t& one = out[out.size() - i];
        const std::int64_t two = other[other.size() - i];
        if (one != two && one != 1 && two != 1) return std::nullopt;
        if (one == 1) one = two;
    }
    return out;
}

/// Fills in the shapes of the nodes' outputs. Throws model_error (engine) if the inputs of a node
/// don't fit each other.
inline void chain_shapes(const piece_program& p, std::vector<chain_shape>& shapes) {
    for (const program_node& n : p.nodes) {
        chain_shape made = shapes[n.inputs[0]];
        if (norm_of(n.type) != chain_norm::none) require_last_axis(n, made);
        for (std::size_t i = 1; i < n.inputs.size(); ++i) {
            if (n.inputs[i] == no_value) continue;
            auto joined = joined_shape(made, shapes[n.inputs[i]]);
            if (!joined) refuse_node(n, "its inputs don't fit each other");
            const bool fixed = n.type == "Clip" || n.type == "Pow" || norm_of(n.type) != chain_norm::none;
            if (fixed && *joined != made) refuse_node(n, "another input is larger than the first");
            made = std::move(*joined);
        }
        shapes[n.outputs[0]] = std::move(made);
    }
}

/// Neighbouring axes of the result, merged into one axis because all arrays step through them
/// alike.
struct chain_axis {
    std::uint32_t extent = 1;
    std::array<std::uint32_t, most_chain_inputs> strides{};  // the stride of each array
};

/// The axes of a result, the innermost axis first. With `last_apart`, the innermost axis isn't
/// merged.
[[nodiscard]] inline std::vector<chain_axis> chain_axes(const chain_shape& result,
                                                        const std::vector<const chain_shape*>& arrays,
                                                        bool last_apart) {
    std::vector<chain_axis> axes;
    std::array<std::uint32_t, most_chain_inputs> inner{};
    inner.fill(1);
    for (std::size_t d = 1; d <= result.size(); ++d) {
        chain_axis axis{static_cast<std::uint32_t>(result[result.size() - d]), {}};
        for (std::size_t i = 0; i < arrays.size(); ++i) {
            const chain_shape& own = *arrays[i];
            const auto extent = d <= own.size() ? static_cast<std::uint32_t>(own[own.size() - d]) : 1U;
            if (extent != 1) axis.strides[i] = inner[i];
            inner[i] *= extent;
        }
        const bool apart = last_apart && axes.size() <= 1;
        if (axis.extent == 1 && !(last_apart && axes.empty())) continue;
        const auto follows = [&] {
            for (std::size_t i = 0; i < arrays.size(); ++i)
                if (axis.strides[i] != axes.back().strides[i] * axes.back().extent) return false;
            return true;
        };
        if (!axes.empty() && !apart && follows())
            axes.back().extent *= axis.extent;
        else
            axes.push_back(axis);
    }
    if (axes.empty()) axes.emplace_back();
    return axes;
}

/// Throws unless all outputs have one shape, all other results fit into that shape, the shape has
/// fewer than 2^31 elements, and a norm's rows are as long as the result's.
inline void require_one_shape(const chain_program& c, const piece_program& p, const std::vector<chain_shape>& shapes) {
    const chain_shape& result = shapes[p.outputs[0]];
    for (const std::uint32_t v : p.outputs)
        if (shapes[v] != result)
            throw model_error(model_fault::engine, p.values[v].name, "an output of another shape than the first one");
    for (const program_node& n : p.nodes)
        if (joined_shape(shapes[n.outputs[0]], result) != result)
            refuse_node(n, "its result is larger than the piece's");
    constexpr std::int64_t most = std::int64_t{1} << 31;
    std::int64_t size = 1;
    for (const std::int64_t extent : result) {
        size = size == 0 || extent < most ? size * extent : most;  // the product is less than 2^62
        if (size >= most)
            throw model_error(model_fault::engine, p.values[p.outputs[0]].name, "an output of 2^31 elements or more");
    }
    if (c.norm == chain_norm::none) return;
    const program_node& n = p.nodes[c.norm_node];
    const chain_shape& rows = shapes[n.outputs[0]];
    if (rows.back() != result.back()) refuse_node(n, "its rows are shorter than those of the piece's result");
}

/// The kernel for a piece with values of these shapes, without addresses. Throws model_error
/// (engine) with the node or value if one kernel can't compute these shapes.
[[nodiscard]] inline chain_kernel bound_chain(const chain_program& c, const piece_program& p,
                                              const std::vector<chain_shape>& shapes) {
    require_one_shape(c, p, shapes);
    std::vector<const chain_shape*> arrays;
    for (const std::uint32_t v : c.inputs) arrays.push_back(&shapes[v]);
    auto axes = chain_axes(shapes[p.outputs[0]], arrays, c.norm != chain_norm::none);
    constexpr std::size_t most = 4;
    if (axes.size() > most)
        throw model_error(model_fault::engine, p.nodes[0].name,
                          "its piece's inputs are broadcast against each other along too many axes");
    axes.resize(most);
    chain_kernel k;
    std::ranges::copy(c.steps, k.steps);
    k.count = static_cast<std::uint32_t>(c.steps.size());
    k.norm = c.norm;
    k.norm_at = c.norm_at;
    k.epsilon = c.epsilon;
    k.width = axes[0].extent;
    k.inner = axes[1].extent;
    k.middle = axes[2].extent;
    k.rows = k.inner * k.middle * axes[3].extent;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        k.inputs[i].column = axes[0].strides[i];
        for (std::size_t d = 1; d < most; ++d) k.inputs[i].outer[most - 1 - d] = axes[d].strides[i];
    }
    return k;
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
