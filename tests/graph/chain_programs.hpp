// SPDX-License-Identifier: Apache-2.0
// Random pieces of element-wise nodes and a norm, and their results, computed node by node in
// floats. Sums of rows are in the order that detail::chain_kernel states.
//
//   const support::random_chain made(any);
//   const auto values = support::evaluate_floats(made.b.p, made.inputs());
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/collective/floats.hpp>
#include <gpushare/graph/detail/chain_kernel.hpp>
#include <gpushare/graph/detail/chain_steps.hpp>
#include <gpushare/graph/detail/piece_program.hpp>

#include "graph/piece_programs.hpp"
#include "support/random.hpp"

namespace support {

struct float_tensor {
    extents shape{};
    std::vector<float> at{};
};
using float_values = std::map<std::uint32_t, float_tensor>;

/// The same bits, or both a NaN: 0 and -0 differ.
inline bool same_number(float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

/// The library's function of one number, whose accuracy has a test of its own.
inline float function_of(program::chain_op op, float x) {
    using four = gpushare::floats<4>;
    return program::applied(op, four(x), four(0.0F))[0];
}

inline float hard(float x, float alpha) {
    const float y = gpushare::detail::product_of(x, alpha) + 0.5F;
    return y > 1 ? 1 : y < 0 ? 0 : y;
}
inline float of_one(const program::program_node& n, float x) {
    using program::chain_op;
    const auto* const how = n.find("approximate");
    const auto* const alpha = n.find("alpha");
    if (n.type == "Relu") return x < 0 ? 0.0F : x;
    if (n.type == "LeakyRelu") return x < 0 ? (alpha != nullptr ? alpha->number : 0.01F) * x : x;
    if (n.type == "HardSigmoid") return hard(x, alpha != nullptr ? alpha->number : 0.2F);
    if (n.type == "HardSwish") return x * hard(x, 1.0F / 6);
    if (n.type == "Neg") return -x;
    if (n.type == "Abs") return std::abs(x);
    if (n.type == "Sqrt") return std::sqrt(x);
    if (n.type == "Reciprocal") return 1.0F / x;
    if (n.type == "Exp") return function_of(chain_op::exponential, x);
    if (n.type == "Sigmoid") return function_of(chain_op::sigmoid, x);
    if (n.type == "Tanh") return function_of(chain_op::hyperbolic_tangent, x);
    if (n.type == "Erf") return function_of(chain_op::error_function, x);
    if (n.type == "Gelu")
        return function_of(how != nullptr && how->text == "tanh" ? chain_op::gelu_by_tanh : chain_op::gelu, x);
    throw std::runtime_error("no such node: " + n.type);
}
inline float of_two(const std::string& type, float a, float b) {
    if (type == "Add") return a + b;
    if (type == "Sub") return a - b;
    if (type == "Mul") return a * b;
    if (type == "Div") return a / b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
    if (type == "Min") return b < a ? b : a;
    return a < b ? b : a;
}
inline float_tensor joined(const std::string& type, const float_tensor& a, const float_tensor& b) {
    float_tensor out{broadcast(a.shape, b.shape), {}};
    for (std::size_t i = 0; i < count(out.shape); ++i)
        out.at.push_back(
            of_two(type, a.at[broadcast_place(a.shape, out.shape, i)], b.at[broadcast_place(b.shape, out.shape, i)]));
    return out;
}

/// f(element) of a row, combined: by each of 32 lanes of four elements, and then by halves.
template <class F>
float over_row(const float* row, std::size_t width, bool largest, const F& f) {
    const float none = largest ? -std::numeric_limits<float>::infinity() : 0.0F;
    const auto both = [&](float a, float b) { return largest ? of_two("Max", a, b) : a + b; };
    std::array<std::array<float, 4>, 32> part;
    for (auto& each : part) each.fill(none);
    for (std::size_t i = 0; i < width; ++i) {
        float& to = part[i / 4 % 32][i % 4];
        to = both(to, f(row[i]));
    }
    std::array<float, 32> lane{};
    for (std::size_t l = 0; l < 32; ++l) lane[l] = both(both(part[l][0], part[l][2]), both(part[l][1], part[l][3]));
    for (std::size_t by = 16; by != 0; by /= 2)
        for (std::size_t l = 0; l < by; ++l) lane[l] = both(lane[l], lane[l + by]);
    return lane[0];
}
inline void normalise_row(const program::program_node& n, float* row, std::size_t width) {
    const auto* const given = n.find("epsilon");
    const float epsilon = given != nullptr ? given->number : 1e-5F;
    const auto squared = [](float x) { return gpushare::detail::product_of(x, x); };
    const auto size = static_cast<float>(width);
    if (n.type == "Softmax") {
        const auto e = [](float x) { return function_of(program::chain_op::exponential, x); };
        const float most = over_row(row, width, true, [](float x) { return x; });
        const float sum = over_row(row, width, false, [&](float x) { return e(x - most); });
        for (std::size_t i = 0; i < width; ++i) row[i] = e(row[i] - most) / sum;
        return;
    }
    const bool layer = n.type == "LayerNormalization";
    const float mean = layer ? over_row(row, width, false, [](float x) { return x; }) / size : 0;
    const float square = over_row(row, width, false, [&](float x) { return squared(x - mean); }) / size;
    const float inverse = 1.0F / std::sqrt(square + epsilon);
    for (std::size_t i = 0; i < width; ++i) row[i] = (row[i] - mean) * inverse;
}

inline float_tensor computed_floats(const program::program_node& n, const std::vector<const float_tensor*>& in) {
    float_tensor out = *in[0];
    if (program::norm_of(n.type) != program::chain_norm::none) {
        const auto width = static_cast<std::size_t>(out.shape.back());
        for (std::size_t i = 0; i < out.at.size(); i += width) normalise_row(n, out.at.data() + i, width);
        if (in.size() > 1) out = joined("Mul", out, *in[1]);
        return in.size() > 2 ? joined("Add", out, *in[2]) : out;
    }
    if (n.type == "Clip") {
        if (in.size() > 1 && in[1] != nullptr) out = joined("Max", out, *in[1]);
        return in.size() > 2 && in[2] != nullptr ? joined("Min", out, *in[2]) : out;
    }
    if (n.type == "Pow") {
        const float_tensor square = joined("Mul", out, out);
        return in[1]->at[0] == 2 ? square : joined("Mul", square, out);
    }
    if (n.type == "Min" || n.type == "Max" || in.size() == 2) {
        for (std::size_t i = 1; i < in.size(); ++i) out = joined(n.type, out, *in[i]);
        return out;
    }
    for (float& x : out.at) x = of_one(n, x);
    return out;
}

/// All values of a program, node by node.
inline float_values evaluate_floats(const program::piece_program& p, float_values values) {
    for (std::uint32_t v = 0; v < p.values.size(); ++v)
        if (const auto& c = p.values[v]; c.constant) values[v] = {c.shape, c.numbers};
    for (const auto& n : p.nodes) {
        std::vector<const float_tensor*> in;
        for (const auto v : n.inputs) in.push_back(v == program::no_value ? nullptr : &values.at(v));
        auto made = computed_floats(n, in);
        values[n.outputs[0]] = std::move(made);
    }
    return values;
}

/// A norm over the last axis as exporters spell it, in one of the ways.
class spelt_norm {
public:
    /// Of `x`, which has so many dimensions.
    spelt_norm(program_builder& in, random& by, std::uint32_t x, std::size_t rank, bool layer) : b(&in), any(&by) {
        axis = any->one_in(2) ? -1 : static_cast<std::int64_t>(rank) - 1;
        constexpr std::array epsilons{1e-5F, 1e-6F, 0.01F};
        epsilon = any->of(epsilons);
        const auto d = layer ? b->node("Sub", {x, mean(x)}) : x;
        const auto again = layer && any->one_in(3) ? b->node("Sub", b->p.nodes.back().inputs) : d;
        const auto square = any->one_in(2) ? b->node("Pow", {again, number(2)}) : b->node("Mul", {again, d});
        const auto variance = mean(square), constant = number(epsilon);
        const auto root = b->node("Sqrt", {either("Add", variance, constant)});
        switch (any->below(3)) {
            case 0: made = b->node("Div", {d, root}); break;
            case 1: made = either("Mul", d, b->node("Reciprocal", {root})); break;
            default: made = either("Mul", d, b->node("Div", {number(1), root}));
        }
    }

    program_builder* b;
    random* any;
    std::uint32_t made = program::no_value;  // the result
    std::int64_t axis = 0;
    float epsilon = 0;

private:
    std::uint32_t number(float x) {
        const auto v = b->constant("c" + std::to_string(b->p.values.size()), {}, *any);
        b->p.values[v].numbers = {x};
        if (any->one_in(3)) b->p.values[v].shape = {1};
        return v;
    }
    std::uint32_t either(const std::string& type, std::uint32_t x, std::uint32_t y) {
        return any->one_in(2) ? b->node(type, {x, y}) : b->node(type, {y, x});
    }
    std::uint32_t mean(std::uint32_t of) {
        std::vector<program::program_attribute> attributes;
        if (any->one_in(2)) attributes.push_back(integer("keepdims", 1));
        if (any->one_in(2)) {  // since operator set 18
            const auto v = b->value("axes" + std::to_string(b->p.values.size()), {1});
            b->p.values[v].type = gpushare::graph::element::i64;
            b->p.values[v].constant = true;
            b->p.values[v].integers = {axis};
            return b->node("ReduceMean", {of, v}, std::move(attributes));
        }
        attributes.push_back(integers("axes", {axis}));
        return b->node("ReduceMean", {of}, std::move(attributes));
    }
};

/// Nodes one behind the other, some of which read earlier values again. Seldom a node is one that
/// no chain has.
class random_chain {
public:
    /// Of a result of this shape, or of any.
    explicit random_chain(random& by, std::optional<extents> of = {}) : any(&by) {
        shape = of ? *of : any_shape();
        std::uint32_t at = know(b.input("x", shape), shape);
        const auto nodes = 1 + any->below(8);
        for (std::uint64_t i = 0; i < nodes; ++i) at = node(at);
        if (shapes.at(at) != shape) at = know(b.node("Add", {b.p.inputs[0], at}), shape);
        b.output(at);
        for (const auto& n : b.p.nodes) {
            const auto v = n.outputs[0];
            const bool fits = v != at && shapes.at(v) == shape && b.p.outputs.size() < program::most_chain_outputs;
            if (fits && any->one_in(12)) b.output(v);
        }
    }
    /// Numbers for its inputs, seldom one that isn't finite, or is denormal.
    [[nodiscard]] float_values inputs() const {
        constexpr float infinity = std::numeric_limits<float>::infinity();
        constexpr std::array special{infinity, -infinity, std::numeric_limits<float>::quiet_NaN(),
                                     -0.0F,    1e-40F,    3e38F};
        const bool all_finite = any->one_in(2);
        float_values all;
        for (const auto v : b.p.inputs) {
            all[v].shape = shapes.at(v);
            for (std::size_t i = 0; i < count(shapes.at(v)); ++i)
                all[v].at.push_back(!all_finite && any->one_in(40) ? any->of(special) : 4 * number(*any));
        }
        return all;
    }

    program_builder b{};
    extents shape{};
    std::map<std::uint32_t, extents> shapes{};
    std::string foreign{};  // the node that no chain has

private:
    std::uint32_t know(std::uint32_t v, extents of) {
        shapes[v] = std::move(of);
        return v;
    }
    extents any_shape() {
        constexpr std::array<std::int64_t, 8> last{1, 2, 3, 4, 5, 31, 128, 301};
        extents s;
        for (std::uint64_t rank = any->below(4); rank > 0; --rank)
            s.push_back(static_cast<std::int64_t>(1 + any->below(4)));
        s.push_back(any->one_in(30) ? 0 : any->of(last));
        return s;
    }
    /// A shape that is broadcast to the result's.
    extents smaller_shape() {
        extents s(shape.begin() + static_cast<std::ptrdiff_t>(any->below(shape.size() + 1)), shape.end());
        for (auto& extent : s)
            if (any->one_in(3)) extent = 1;
        return s;
    }
    /// An input or a constant.
    std::uint32_t given(const extents& of) {
        const std::string name = "g" + std::to_string(b.p.values.size());
        return know(any->one_in(2) ? b.input(name, of) : b.constant(name, of, *any), of);
    }
    std::uint32_t known() {
        auto at = shapes.begin();
        std::advance(at, static_cast<std::ptrdiff_t>(any->below(shapes.size())));
        return at->first;
    }
    std::uint32_t operand() { return any->one_in(2) ? known() : given(any->one_in(3) ? shape : smaller_shape()); }
    std::uint32_t node(std::uint32_t at) {
        static const std::vector<std::string> one{"Relu",      "Neg",         "Abs",      "Sqrt", "Reciprocal",
                                                  "Exp",       "Sigmoid",     "Tanh",     "Erf",  "Gelu",
                                                  "LeakyRelu", "HardSigmoid", "HardSwish"};
        static const std::vector<std::string> two{"Add", "Sub", "Mul", "Div"}, most{"Min", "Max"};
        if (any->one_in(4)) at = known();
        const extents own = shapes.at(at);
        switch (any->below(9)) {
            case 0: return clip(at);
            case 1: return norm(at);
            case 2: return several(any->of(most), at, any->below(3));
            case 3:
            case 4:
            case 5: {
                const auto& type = any->of(one);
                std::vector<program::program_attribute> attributes;
                if (type == "Gelu" && any->one_in(2)) attributes.push_back(by_tanh());
                if ((type == "LeakyRelu" || type == "HardSigmoid") && any->one_in(2))
                    attributes.push_back(real("alpha", 0.25F));
                return know(b.node(type, {at}, std::move(attributes)), own);
            }
            case 6:
                if (!any->one_in(6)) return several(any->of(two), at, 1);
                foreign = "Sin" + std::to_string(b.p.nodes.size());
                return know(b.node("Sin", {at}), own);
            default: return several(any->of(two), at, 1);
        }
    }
    std::uint32_t several(const std::string& type, std::uint32_t at, std::uint64_t others) {
        std::vector<std::uint32_t> in{at};
        extents out = shapes.at(at);
        for (std::uint64_t i = 0; i < others; ++i) {
            in.push_back(operand());
            out = broadcast(out, shapes.at(in.back()));
        }
        if (any->one_in(2)) std::swap(in.front(), in.back());
        return know(b.node(type, std::move(in)), out);
    }
    std::uint32_t clip(std::uint32_t at) {
        std::vector<std::uint32_t> in{at};
        const auto bound = [&](float x) {
            const auto v = know(b.constant("bound" + std::to_string(b.p.values.size()), {}, *any), {});
            b.p.values[v].numbers = {x};
            in.push_back(v);
        };
        if (any->one_in(2)) {
            bound(-0.5F);
            if (any->one_in(2)) bound(0.75F);
        } else if (any->one_in(2)) {
            in.push_back(program::no_value);
            bound(0.75F);
        }
        return know(b.node("Clip", std::move(in)), shapes.at(at));
    }
    std::uint32_t norm(std::uint32_t at) {
        const extents own = shapes.at(at);
        if (own.empty()) return several("Mul", at, 1);
        const extents columns{own.back()};
        if (any->one_in(3))
            return know(b.node("Softmax", {at},
                               {integer("axis", any->one_in(2) ? -1 : static_cast<std::int64_t>(own.size()) - 1)}),
                        own);
        const bool layer = any->one_in(2);
        std::vector<std::uint32_t> in{at, given(columns)};
        if (layer && any->one_in(2)) in.push_back(given(columns));
        std::vector<program::program_attribute> attributes;
        if (any->one_in(2)) attributes.push_back(real("epsilon", 0.01F));
        return know(b.node(layer ? "LayerNormalization" : "RMSNormalization", std::move(in), std::move(attributes)),
                    own);
    }

    random* any;
};

}  // namespace support
