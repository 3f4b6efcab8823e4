// SPDX-License-Identifier: Apache-2.0
// Pieces as programs, built node by node or at random, and the literal results of their nodes.
//
//   support::program_builder b;
//   const auto x = b.input("x", {2, 3}), w = b.constant("w", {3, 4}, any);
//   b.output(b.node("Relu", {b.node("MatMul", {x, w})}));
//   const auto values = support::evaluate(b.p, {{x, numbers}});
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/graph/detail/piece_program.hpp>

#include "support/random.hpp"

namespace support {

namespace program = gpushare::graph::detail;
using extents = std::vector<std::int64_t>;

/// -1 to 1, in steps that floats have.
inline float number(random& any) { return (static_cast<float>(any.below(257)) - 128) / 128; }

class program_builder {
public:
    std::uint32_t value(const std::string& name, const extents& shape) {
        p.values.push_back({.name = name, .type = gpushare::graph::element::f32, .ranked = true, .shape = shape});
        return static_cast<std::uint32_t>(p.values.size() - 1);
    }
    std::uint32_t input(const std::string& name, const extents& shape) {
        p.inputs.push_back(value(name, shape));
        return p.inputs.back();
    }
    std::uint32_t constant(const std::string& name, const extents& shape, random& any) {
        const auto v = value(name, shape);
        p.values[v].constant = true;
        std::int64_t count = 1;
        for (const auto e : shape) count *= e;
        for (std::int64_t i = 0; i < count; ++i) p.values[v].numbers.push_back(number(any));
        return v;
    }
    /// The value that the node makes, which says nothing about its shape.
    std::uint32_t node(const std::string& type, std::vector<std::uint32_t> in,
                       std::vector<program::program_attribute> attributes = {}) {
        const std::string n = std::to_string(p.nodes.size());
        const auto out = value("v" + n, {});
        p.values[out].ranked = false;
        p.nodes.push_back({.name = type + n,
                           .type = type,
                           .inputs = std::move(in),
                           .outputs = {out},
                           .attributes = std::move(attributes)});
        return out;
    }
    void output(std::uint32_t v) { p.outputs.push_back(v); }

    program::piece_program p{};
};

inline program::program_attribute integer(const std::string& name, std::int64_t i) {
    return {.name = name, .is = program::program_attribute::kind::integer, .integer = i};
}
inline program::program_attribute integers(const std::string& name, extents list) {
    return {.name = name, .is = program::program_attribute::kind::integers, .integers = std::move(list)};
}
inline program::program_attribute real(const std::string& name, float f) {
    return {.name = name, .is = program::program_attribute::kind::number, .number = f};
}
inline program::program_attribute text(const std::string& name, const std::string& t) {
    return {.name = name, .is = program::program_attribute::kind::text, .text = t};
}
inline program::program_attribute by_tanh() { return text("approximate", "tanh"); }

// --- what nodes compute

struct numbers {
    extents shape{};
    std::vector<double> at{};
};
inline std::size_t count(const extents& shape) {
    std::size_t n = 1;
    for (const auto e : shape) n *= static_cast<std::size_t>(e);
    return n;
}
/// The place in `of` of element `i` of a tensor of shape `out`, to which `of` is broadcast.
inline std::size_t broadcast_place(const extents& of, const extents& out, std::size_t i) {
    std::size_t place = 0, step = 1;
    for (std::size_t d = 1; d <= out.size(); ++d) {
        const auto extent = static_cast<std::size_t>(out[out.size() - d]), at = i % extent;
        i /= extent;
        if (d > of.size()) continue;
        const auto own = static_cast<std::size_t>(of[of.size() - d]);
        if (own != 1) place += step * at;
        step *= own;
    }
    return place;
}
inline extents broadcast(const extents& a, const extents& b) {
    extents out(std::max(a.size(), b.size()));
    for (std::size_t d = 1; d <= out.size(); ++d) {
        const auto of_a = d <= a.size() ? a[a.size() - d] : 1, of_b = d <= b.size() ? b[b.size() - d] : 1;
        if (of_a != of_b && of_a != 1 && of_b != 1) throw std::runtime_error("shapes that don't fit");
        out[out.size() - d] = of_a == 1 ? of_b : of_a;
    }
    return out;
}
inline numbers added(const numbers& a, const numbers& b, double factor = 1) {
    numbers out{broadcast(a.shape, b.shape), {}};
    for (std::size_t i = 0; i < count(out.shape); ++i)
        out.at.push_back(a.at[broadcast_place(a.shape, out.shape, i)] +
                         factor * b.at[broadcast_place(b.shape, out.shape, i)]);
    return out;
}
inline numbers transposed(const numbers& a) {
    numbers out{{a.shape[1], a.shape[0]}, std::vector<double>(a.at.size())};
    const auto rows = static_cast<std::size_t>(a.shape[0]), columns = static_cast<std::size_t>(a.shape[1]);
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < columns; ++c) out.at[c * rows + r] = a.at[r * columns + c];
    return out;
}
inline numbers product(const numbers& a, const numbers& b) {
    const auto rows = static_cast<std::size_t>(a.shape[a.shape.size() - 2]);
    const auto inner = static_cast<std::size_t>(a.shape.back()), columns = static_cast<std::size_t>(b.shape.back());
    if (static_cast<std::size_t>(b.shape[b.shape.size() - 2]) != inner) throw std::runtime_error("no such product");
    const extents stack_a(a.shape.begin(), a.shape.end() - 2), stack_b(b.shape.begin(), b.shape.end() - 2);
    const extents stack = broadcast(stack_a, stack_b);
    numbers out{stack, {}};
    out.shape.push_back(a.shape[a.shape.size() - 2]);
    out.shape.push_back(b.shape.back());
    for (std::size_t s = 0; s < count(stack); ++s) {
        const std::size_t from_a = broadcast_place(stack_a, stack, s) * rows * inner;
        const std::size_t from_b = broadcast_place(stack_b, stack, s) * inner * columns;
        for (std::size_t r = 0; r < rows; ++r)
            for (std::size_t c = 0; c < columns; ++c) {
                double sum = 0;
                for (std::size_t k = 0; k < inner; ++k)
                    sum += a.at[from_a + r * inner + k] * b.at[from_b + k * columns + c];
                out.at.push_back(sum);
            }
    }
    return out;
}
inline double relu(double x) { return x > 0 ? x : 0; }
inline double gelu(double x) { return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

inline numbers computed(const program::program_node& n, const std::vector<const numbers*>& in) {
    const auto set = [&](const char* name) {
        const auto* const a = n.find(name);
        return a != nullptr && a->integer != 0;
    };
    const auto factor = [&](const char* name) {
        const auto* const a = n.find(name);
        return a != nullptr ? static_cast<double>(a->number) : 1;
    };
    if (n.type == "MatMul") return product(*in[0], *in[1]);
    if (n.type == "Add") return added(*in[0], *in[1]);
    if (n.type == "Gemm") {
        auto out = product(set("transA") ? transposed(*in[0]) : *in[0], set("transB") ? transposed(*in[1]) : *in[1]);
        for (double& x : out.at) x *= factor("alpha");
        return in.size() == 3 ? added(out, *in[2], factor("beta")) : out;
    }
    auto out = *in[0];
    for (double& x : out.at) x = n.type == "Relu" ? relu(x) : gelu(x);
    return out;
}

/// All values of a program, node by node.
inline std::map<std::uint32_t, numbers> evaluate(const program::piece_program& p,
                                                 std::map<std::uint32_t, numbers> values) {
    for (std::uint32_t v = 0; v < p.values.size(); ++v)
        if (const auto& c = p.values[v]; c.constant) values[v] = {c.shape, {c.numbers.begin(), c.numbers.end()}};
    for (const auto& n : p.nodes) {
        std::vector<const numbers*> in;
        for (const auto v : n.inputs) in.push_back(&values.at(v));
        auto made = computed(n, in);
        values[n.outputs[0]] = std::move(made);
    }
    return values;
}

// --- at random

/// Products one behind the other, with what can be folded into them and sometimes something more.
class random_program {
public:
    explicit random_program(random& by) : any(&by) {
        std::uint32_t at = b.input("x", shape_of_input());
        shapes[at] = b.p.values[at].shape;
        const auto products = 1 + any->below(3);
        for (std::uint64_t i = 0; i < products; ++i) at = followed(multiplied(at));
        if (std::ranges::find(b.p.outputs, at) == b.p.outputs.end()) b.output(at);
    }
    /// Numbers for its inputs.
    [[nodiscard]] std::map<std::uint32_t, numbers> inputs() const {
        std::map<std::uint32_t, numbers> all;
        for (const auto v : b.p.inputs) {
            all[v].shape = shapes.at(v);
            for (std::size_t i = 0; i < count(shapes.at(v)); ++i) all[v].at.push_back(number(*any));
        }
        return all;
    }

    program_builder b{};
    std::map<std::uint32_t, extents> shapes{};

private:
    std::int64_t extent() { return static_cast<std::int64_t>(1 + any->below(5)); }
    extents shape_of_input() {
        extents s;
        for (std::uint64_t rank = 2 + any->below(3); rank > 2; --rank) s.push_back(extent());
        s.push_back(extent());
        s.push_back(extent());
        return s;
    }
    /// An input or a constant.
    std::uint32_t given(const extents& shape) {
        const std::string name = "g" + std::to_string(b.p.values.size());
        const auto v = any->one_in(2) ? b.input(name, shape) : b.constant(name, shape, *any);
        shapes[v] = shape;
        return v;
    }
    std::uint32_t made(std::uint32_t v, extents shape) {
        shapes[v] = std::move(shape);
        return v;
    }
    std::uint32_t multiplied(std::uint32_t at) {
        const extents a = shapes.at(at);
        const auto columns = extent();
        if (a.size() == 2 && any->one_in(2)) return gemm(at, columns);
        extents with(a.begin(), a.end() - 2);
        switch (any->below(4)) {
            case 0: break;
            case 1: with.clear(); break;
            case 2: std::ranges::fill(with, 1); break;
            default:
                if (a.size() == 2) with = {extent()};  // one matrix by a stack
        }
        with.push_back(a.back());
        with.push_back(columns);
        extents out(a.begin(), a.end() - 1);
        if (with.size() > out.size() + 1) out.insert(out.begin(), with[0]);
        out.push_back(columns);
        return made(b.node("MatMul", {at, given(with)}), out);
    }
    std::uint32_t gemm(std::uint32_t at, std::int64_t columns) {
        const extents a = shapes.at(at);
        const bool turn_a = any->one_in(3), turn_b = any->one_in(2);
        const auto rows = turn_a ? a[1] : a[0], inner = turn_a ? a[0] : a[1];
        std::vector in{at, given(turn_b ? extents{columns, inner} : extents{inner, columns})};
        if (any->one_in(2)) in.push_back(given(any->one_in(2) ? extents{columns} : extents{rows, columns}));
        std::vector<program::program_attribute> attributes;
        if (turn_a) attributes.push_back(integer("transA", 1));
        if (turn_b) attributes.push_back(integer("transB", 1));
        if (any->one_in(2)) attributes.push_back(real("alpha", 0.5F));
        if (any->one_in(3)) attributes.push_back(real("beta", -2));
        return made(b.node("Gemm", std::move(in), std::move(attributes)), {rows, columns});
    }
    std::uint32_t followed(std::uint32_t at) {
        const extents shape = shapes.at(at);
        const auto plus = [&](std::uint32_t other) {
            const bool first = any->one_in(2);
            return made(b.node("Add", first ? std::vector{other, at} : std::vector{at, other}), shape);
        };
        if (any->one_in(2)) at = plus(given(any->one_in(3) ? extents{1, shape.back()} : extents{shape.back()}));
        if (any->one_in(3)) at = plus(given(shape));
        if (any->one_in(20)) b.output(at);  // may not be folded any further
        switch (any->below(4)) {
            case 0: at = made(b.node("Relu", {at}), shape); break;
            case 1: at = made(b.node("Gelu", {at}, {by_tanh()}), shape); break;
            default: break;
        }
        return at;
    }

    random* any;
};

}  // namespace support
