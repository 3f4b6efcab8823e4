// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Which nodes of a piece become one product, and where the product's matrices lie.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/graph/detail/matmul_steps.hpp>

#include "graph/piece_programs.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace matmul_steps_test {

using gpushare::graph::element;
using gpushare::graph::model_error;
using gpushare::graph::model_fault;
using support::by_tanh;
using support::integer;
using support::numbers;
using support::program_builder;
using support::real;
using support::text;
using namespace gpushare::graph::detail;

namespace {

/// "relu(x*w+b)->y", with ' for a transposed operand.
std::string told(const piece_program& p, const matmul_step& s) {
    const auto name = [&](std::uint32_t v) { return p.values[v].name; };
    std::string t;
    if (s.alpha != 1) t += std::to_string(s.alpha).substr(0, 3) + "*";
    t += name(s.a) + (s.transpose_a ? "'" : "") + "*" + name(s.b) + (s.transpose_b ? "'" : "");
    if (s.addend != no_value)
        t += "+" + (s.beta == 1 ? "" : std::to_string(s.beta).substr(0, 3) + "*") + name(s.addend);
    if (s.bias != no_value)
        t += "+" + (s.bias_factor == 1 ? "" : std::to_string(s.bias_factor).substr(0, 3) + "*") + name(s.bias);
    if (s.act != activation::none) t = (s.act == activation::relu ? "relu(" : "gelu(") + t + ")";
    return t + "->" + name(s.out);
}
std::vector<std::string> told(const piece_program& p) {
    std::vector<std::string> all;
    for (const auto& s : matmul_steps(p)) all.push_back(told(p, s));
    return all;
}
using list = std::vector<std::string>;

/// The node and the text that a piece is refused with.
std::pair<std::string, std::string> refusal(const piece_program& p) {
    try {
        (void)matmul_steps(p);
    } catch (const model_error& e) {
        CHECK(e.fault() == model_fault::engine);
        return {e.node(), e.what()};
    }
    return {"nothing", "it was taken"};
}

/// A product of cuBLAS as its documentation has it: columns behind each other.
void multiply_columns(const column_product& c, std::int64_t batch, const std::vector<double>& first,
                      const std::vector<double>& second, std::vector<double>& out) {
    const auto at = [](const column_matrix& m, std::int64_t row, std::int64_t column) {
        if (m.transpose) std::swap(row, column);
        REQUIRE(row < m.rows);
        REQUIRE(column < m.columns);
        return static_cast<std::size_t>(column * m.leading + row);
    };
    const std::int64_t inner = c.first.transpose ? c.first.rows : c.first.columns;
    REQUIRE(inner == (c.second.transpose ? c.second.columns : c.second.rows));
    for (std::int64_t s = 0; s < batch; ++s)
        for (std::int64_t i = 0; i < c.out.rows; ++i)
            for (std::int64_t j = 0; j < c.out.columns; ++j) {
                double sum = 0;
                for (std::int64_t k = 0; k < inner; ++k)
                    sum += first.at(static_cast<std::size_t>(s * c.first.stride) + at(c.first, i, k)) *
                           second.at(static_cast<std::size_t>(s * c.second.stride) + at(c.second, k, j));
                out.at(static_cast<std::size_t>(s * c.out.stride) + at(c.out, i, j)) = sum;
            }
}
/// What a step computes.
numbers computed(const matmul_step& s, const std::map<std::uint32_t, numbers>& values) {
    const numbers &a = values.at(s.a), &b = values.at(s.b);
    const auto shape = product_shape(a.shape, b.shape, s.transpose_a, s.transpose_b);
    REQUIRE(shape);
    const auto e = extents_of(s, a.shape, b.shape);
    numbers out{*shape, std::vector<double>(support::count(*shape))};
    multiply_columns(in_columns(s, e), e.batch, b.at, a.at, out.at);
    const auto columns = static_cast<std::size_t>(e.columns);
    for (std::size_t i = 0; i < out.at.size(); ++i) {
        double x = static_cast<double>(s.alpha) * out.at[i];
        if (s.addend != no_value) x += static_cast<double>(s.beta) * values.at(s.addend).at.at(i);
        if (s.bias != no_value) x += static_cast<double>(s.bias_factor) * values.at(s.bias).at.at(i % columns);
        if (s.act == activation::relu) x = support::relu(x);
        if (s.act == activation::gelu) x = support::gelu(x);
        out.at[i] = x;
    }
    return out;
}

}  // namespace

TEST_CASE("a product takes in its bias, its residual and its activation", "[graph][cublaslt]") {
    support::random any(1);
    program_builder b;
    const auto x = b.input("x", {-1, 8}), r = b.input("r", {-1, 4});
    const auto w = b.constant("w", {8, 4}, any), bias = b.constant("bias", {4}, any);
    SECTION("in either order") {
        const auto p = b.node("MatMul", {x, w});
        const bool bias_first = GENERATE(true, false);
        const auto one = b.node("Add", {bias_first ? bias : p, bias_first ? p : r});
        const auto both = b.node("Add", {one, bias_first ? r : bias});
        b.output(b.node("Relu", {both}));
        CHECK(told(b.p) == list{"relu(x*w+r+bias)->v3"});
    }
    SECTION("a Gemm's own") {
        const auto turned = b.constant("t", {4, 8}, any);
        const auto p = b.node("Gemm", {x, turned, bias}, {integer("transB", 1), real("alpha", 0.5F), real("beta", 2)});
        b.output(b.node("Gelu", {p}, {by_tanh()}));
        CHECK(told(b.p) == list{"gelu(0.5*x*t'+2.0*bias)->v1"});
    }
    SECTION("a Gemm's third input that counts for nothing") {
        b.output(b.node("Gemm", {x, w, bias}, {real("beta", 0)}));
        CHECK(told(b.p) == list{"x*w->v0"});
    }
    SECTION("a Gemm's residual") {
        b.output(b.node("Gemm", {x, w, r}, {real("beta", 3)}));
        CHECK(told(b.p) == list{"x*w+3.0*r->v0"});
    }
    SECTION("not behind an activation") {
        const auto p = b.node("Relu", {b.node("MatMul", {x, w})});
        const auto q = b.node("MatMul", {p, b.constant("w2", {4, 4}, any)});
        b.output(b.node("Add", {q, p}));
        CHECK(told(b.p) == list{"relu(x*w)->v1", "v1*w2+v1->v3"});
    }
    SECTION("a later product is added to an earlier one") {
        const auto p = b.node("MatMul", {x, w});
        const auto q = b.node("Relu", {b.node("MatMul", {x, b.constant("w2", {8, 4}, any)})});
        b.output(b.node("Add", {p, q}));
        CHECK(told(b.p) == list{"relu(x*w2)->v2", "x*w+v2->v3"});
    }
    SECTION("none of what somebody else reads as well") {
        const auto p = b.node("MatMul", {x, w});
        const auto q = b.node("MatMul", {p, b.constant("w2", {4, 4}, any)});
        b.output(b.node("Add", {q, p}));
        CHECK(told(b.p) == list{"x*w->v0", "v0*w2+v0->v2"});
    }
}

TEST_CASE("a piece that isn't products alone is refused with the node and the reason", "[graph][cublaslt]") {
    support::random any(1);
    program_builder b;
    const auto x = b.input("x", {-1, 8}), w = b.constant("w", {8, 4}, any);
    const auto p = b.node("MatMul", {x, w});
    using refused = std::pair<std::string, std::string>;
    const auto is = [&](const std::string& node, const std::string& why) {
        b.output(static_cast<std::uint32_t>(b.p.values.size() - 1));
        const refused got = refusal(b.p);
        CAPTURE(got.second);
        CHECK(got.first == node);
        CHECK(got.second.find(node) != std::string::npos);
        CHECK(got.second.find(why) != std::string::npos);
    };
    SECTION("another operator") {
        b.node("Softmax", {p});
        is("Softmax1", "Softmax: it is no matrix product");
    }
    SECTION("an operator of the same name that isn't ONNX's") {
        b.node("MatMul", {p, b.constant("w2", {4, 4}, any)});
        b.p.nodes.back().onnx = false;
        is("MatMul1", "no matrix product");
    }
    SECTION("an activation that an output keeps apart") {
        b.output(p);
        b.node("Relu", {p});
        is("Relu1", "can't be folded");
    }
    SECTION("the exact Gelu") {
        const auto how = GENERATE(true, false);
        b.node("Gelu", {p}, how ? std::vector{text("approximate", "none")} : std::vector<program_attribute>());
        is("Gelu1", "by tanh alone");
    }
    SECTION("what is added along the rows") {
        b.node("Add", {p, b.constant("column", {4, 1}, any)});
        is("Add1", "can't be folded");
    }
    SECTION("an addend that may be a single row, or rows to each of which the product is added") {
        const auto extent = GENERATE(1, 3);
        b.node("Add", {p, b.input("r", {extent, 4})});
        if (extent == 1) {
            b.output(static_cast<std::uint32_t>(b.p.values.size() - 1));
            CHECK(told(b.p) == list{"x*w+r->v1"});  // a bias
        } else {
            is("Add1", "can't be folded");
        }
    }
    SECTION("a number alone") {
        b.node("Add", {p, b.constant("one", {1}, any)});
        is("Add1", "can't be folded");
    }
    SECTION("the product twice") {
        b.node("Add", {p, p});
        is("Add1", "can't be folded");
    }
    SECTION("an attribute") {
        b.node("MatMul", {p, b.constant("w2", {4, 4}, any)}, {integer("transA", 1)});
        is("MatMul1", "its attribute 'transA'");
    }
    SECTION("a Gemm of a stack") {
        b.node("Gemm", {b.input("stack", {2, 3, 4}), b.constant("w2", {4, 4}, any)});
        is("Gemm1", "isn't a matrix");
    }
    SECTION("a Gemm's third input along the rows") {
        b.node("Gemm", {p, b.constant("w2", {4, 3}, any), b.constant("c", {3, 1}, any)});
        is("Gemm1", "its third input");
    }
    SECTION("a factor of what isn't constant") {
        b.node("Gemm", {p, b.constant("w2", {4, 3}, any), b.input("c", {3})}, {real("beta", 2)});
        is("Gemm1", "isn't constant");
    }
    SECTION("a vector") {
        b.node("MatMul", {p, b.constant("w2", {4}, any)});
        is("MatMul1", "matrices of matching sizes");
    }
    SECTION("extents that contradict") {
        b.node("MatMul", {p, b.constant("w2", {5, 4}, any)});
        is("MatMul1", "matrices of matching sizes");
    }
    SECTION("an unknown rank") {
        const auto y = b.input("y", {});
        b.p.values[y].ranked = false;
        b.node("MatMul", {y, w});
        is("MatMul1", "number of dimensions");
    }
    SECTION("other numbers") {
        const auto y = b.input("y", {-1, 8});
        b.p.values[y].type = element::f16;
        b.node("MatMul", {y, w});
        is("MatMul1", "'y' is of type f16");
    }
    SECTION("an output that no node makes") {
        b.constant("given", {4}, any);
        is("given", "no product makes");
    }
    SECTION("an output twice") {
        b.output(p);
        b.output(p);
        CHECK(refusal(b.p).second.find("given twice") != std::string::npos);
    }
    CHECK(refusal({}).second.find("without nodes") != std::string::npos);
}

TEST_CASE("the steps of random pieces compute what their nodes compute", "[graph][cublaslt]") {
    int taken = 0, folded = 0;
    for (std::uint64_t i = 0; i < 2000; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        support::random any(seed);
        const support::random_program made(any);
        const auto& p = made.b.p;
        const auto right = support::evaluate(p, made.inputs());
        std::vector<matmul_step> steps;
        try {
            steps = matmul_steps(p);
        } catch (const model_error& e) {
            REQUIRE(std::ranges::find(p.nodes, e.node(), &program_node::name) != p.nodes.end());
            continue;
        }
        ++taken;
        folded += steps.size() < p.nodes.size() ? 1 : 0;
        auto values = right;
        for (const auto& n : p.nodes) values.erase(n.outputs[0]);
        for (const auto& s : steps) values[s.out] = computed(s, values);
        for (const auto v : p.outputs) {
            const auto &got = values.at(v), &want = right.at(v);
            REQUIRE(got.shape == want.shape);
            for (std::size_t k = 0; k < got.at.size(); ++k)
                REQUIRE(std::abs(got.at[k] - want.at[k]) <= 1e-9 * (1 + std::abs(want.at[k])));
        }
    }
    CHECK(taken > 1000);
    CHECK(folded > 500);
}

TEST_CASE("stacks that no single stride describes are refused", "[graph][cublaslt]") {
    const matmul_step s{.node = "product"};
    const auto of = [&](std::vector<std::int64_t> a, std::vector<std::int64_t> b) { return extents_of(s, a, b); };
    CHECK(of({2, 3, 4, 5}, {5, 6}) == matmul_extents{24, 6, 5, 1, 0, 0, 0});
    CHECK(of({2, 3, 4, 5}, {1, 1, 5, 6}) == matmul_extents{24, 6, 5, 1, 0, 0, 0});
    CHECK(of({4, 5}, {3, 5, 6}) == matmul_extents{4, 6, 5, 3, 0, 30, 24});
    CHECK(of({3, 4, 5}, {1, 3, 5, 6}) == matmul_extents{4, 6, 5, 3, 20, 30, 24});
    CHECK(of({0, 4, 5}, {0, 5, 6}).batch == 0);
    // without elements, any extents are possible
    constexpr std::int64_t large = std::int64_t{1} << 40;
    CHECK(of({large, large, 0, 4, 5}, {5, 6}).batch == 0);
    CHECK(of({0, large, 5}, {0, 5, large}).batch == 0);
    CHECK(of({large, large, 4, 0}, {large, large, 0, 0}).columns == 0);
    CHECK_THROWS_AS(of({2, 1, 4, 5}, {1, 3, 5, 6}), model_error);
    CHECK_THROWS_AS(of({2, 3, 4, 5}, {3, 5, 6}), model_error);
    CHECK_THROWS_AS(of({2, 4, 5}, {3, 5, 6}), model_error);
}

}  // namespace matmul_steps_test
