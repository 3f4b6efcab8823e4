// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Which pieces are chains of element-wise operations with a norm, and what the kernel computes for
// them.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/graph/detail/chain_kernel.hpp>
#include <gpushare/graph/detail/chain_steps.hpp>
#include <gpushare/graph/detail/spelt_norms.hpp>

#include "graph/chain_programs.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace chain_steps_test {

using namespace gpushare::graph::detail;
using gpushare::graph::element;
using gpushare::graph::model_error;
using gpushare::graph::model_fault;
using support::extents;
using support::float_values;
using support::integer;
using support::program_builder;

static_assert(gpushare::kernel_for<chain_kernel, gpushare::host::kernel_context>);

namespace {

/// The node and the reason of a refusal.
using refusal = std::pair<std::string, std::string>;
template <class F>
refusal refused(const F& f) {
    try {
        (void)f();
    } catch (const model_error& e) {
        CHECK(e.fault() == model_fault::engine);
        return {e.node(), e.what()};
    }
    return {};
}

/// What the kernel makes of a piece, by so many blocks; what lies behind each output stays.
float_values by_kernel(const piece_program& p, const float_values& inputs, std::uint32_t blocks) {
    const chain_program c = chain_steps(p);
    std::vector<chain_shape> shapes(p.values.size());
    for (std::size_t v = 0; v < p.values.size(); ++v)
        if (p.values[v].constant) shapes[v] = p.values[v].shape;
    for (const auto& [v, t] : inputs) shapes[v] = t.shape;
    chain_shapes(p, shapes);
    chain_kernel k = bound_chain(c, p, shapes);
    for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        const auto v = c.inputs[i];
        k.inputs[i].data = p.values[v].constant ? p.values[v].numbers.data() : inputs.at(v).at.data();
    }
    float_values made;
    constexpr float untouched = 12345;
    for (std::size_t i = 0; i < p.outputs.size(); ++i) {
        auto& out = made[p.outputs[i]];
        out.shape = shapes[p.outputs[i]];
        out.at.assign(support::count(out.shape) + 1, untouched);
        k.outputs[i] = out.at.data();
    }
    for (std::uint32_t b = 0; b < blocks; ++b) {
        gpushare::host::kernel_context ctx(b, blocks, 0, nullptr, gpushare::host::detail::never_lost);
        k(ctx);
    }
    for (auto& [v, out] : made) {
        CHECK(out.at.back() == untouched);
        out.at.pop_back();
    }
    return made;
}
void check_same(const float_values& got, const float_values& want) {
    for (const auto& [v, t] : got) {
        const auto& right = want.at(v);
        REQUIRE(t.shape == right.shape);
        const auto [here, there] = std::ranges::mismatch(t.at, right.at, support::same_number);
        if (here == t.at.end()) continue;
        CAPTURE(v, here - t.at.begin());
        REQUIRE(std::bit_cast<std::uint32_t>(*here) == std::bit_cast<std::uint32_t>(*there));
    }
}
bool is_node(const piece_program& p, const std::string& name) {
    return std::ranges::find(p.nodes, name, &program_node::name) != p.nodes.end();
}

}  // namespace

TEST_CASE("random chains and norms are what their nodes give, bit by bit", "[graph][chains]") {
    int taken = 0, normed = 0, kept = 0;
    const std::uint64_t rounds = support::few(4000);
    for (std::uint64_t i = 0; i < rounds; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        support::random any(seed);
        const support::random_chain made(any);
        const auto& p = made.b.p;
        const auto inputs = made.inputs();
        const auto blocks = static_cast<std::uint32_t>(1 + any.below(3));
        float_values got;
        try {
            got = by_kernel(p, inputs, blocks);
        } catch (const model_error& e) {
            CHECK(e.fault() == model_fault::engine);
            CHECK(is_node(p, e.node()));
            continue;
        }
        REQUIRE(made.foreign.empty());
        check_same(got, support::evaluate_floats(p, inputs));
        const auto c = chain_steps(p);
        ++taken;
        normed += c.norm != chain_norm::none ? 1 : 0;
        kept += std::ranges::any_of(c.steps, [](const chain_step& s) { return s.keep != chain_nowhere; }) ? 1 : 0;
    }
    CHECK(taken > static_cast<int>(rounds / 2));
    CHECK(normed > static_cast<int>(rounds / 8));
    CHECK(kept > static_cast<int>(rounds / 8));
}

TEST_CASE("a chain that each node reads from the one before needs a step a node", "[graph][chains]") {
    support::random any(1);
    program_builder b;
    const auto x = b.input("x", {2, 3}), r = b.input("r", {3});
    const auto sum = b.node("Add", {r, x});
    b.output(b.node("Gelu", {b.node("Sub", {b.constant("one", {}, any), sum})}));
    const auto c = chain_steps(b.p);
    CHECK(c.steps ==
          std::vector<chain_step>{
              {.op = chain_op::load, .from = chain_source::input, .index = 0},
              {.op = chain_op::add, .from = chain_source::input, .index = 1},
              {.op = chain_op::subtract_from, .from = chain_source::number, .number = b.p.values[3].numbers[0]},
              {.op = chain_op::gelu, .out = 0}});
    CHECK(c.inputs == std::vector<std::uint32_t>{r, x});
}

namespace {

/// How far the floats around a positive number are from each other.
double spacing(double x) {
    auto below = static_cast<float>(x);
    if (static_cast<double>(below) > x) below = std::nextafter(below, 0.0F);
    return static_cast<double>(std::nextafter(below, std::numeric_limits<float>::infinity()) - below);
}

/// The largest difference of an operation from a function, in units in the last place: distances
/// from one float to the next where max(|f(x)|, floor) lies.
template <class F>
double ulps(chain_op op, float from, float to, double floor, const F& f) {
    double worst = 0;
    constexpr int points = 200'000;
    for (int i = 0; i <= points; ++i) {
        const float x = from + (to - from) * (static_cast<float>(i) / points);
        const double want = f(static_cast<double>(x));
        const double off = std::abs(static_cast<double>(support::function_of(op, x)) - want);
        worst = std::max(worst, off / spacing(std::max(std::abs(want), floor)));
    }
    return worst;
}

}  // namespace

TEST_CASE("functions are as near as they say, and have their limits", "[graph][chains]") {
    const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
    const auto gelu = [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); };
    CHECK(ulps(chain_op::exponential, -87, 88, 0, [](double x) { return std::exp(x); }) <= 2);
    CHECK(ulps(chain_op::hyperbolic_tangent, -10, 10, 0, [](double x) { return std::tanh(x); }) <= 4);
    CHECK(ulps(chain_op::hyperbolic_tangent, -0.01F, 0.01F, 0, [](double x) { return std::tanh(x); }) <= 2);
    CHECK(ulps(chain_op::error_function, -5, 5, 0, [](double x) { return std::erf(x); }) <= 4);
    CHECK(ulps(chain_op::error_function, -0.01F, 0.01F, 0, [](double x) { return std::erf(x); }) <= 3);
    CHECK(ulps(chain_op::sigmoid, -87, 87, 0, sigmoid) <= 4);
    CHECK(ulps(chain_op::gelu, -6, 6, 1, gelu) <= 4);
    CHECK(ulps(chain_op::gelu_by_tanh, -6, 6, 1, [](double x) { return support::gelu(x); }) <= 4);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto of = [](chain_op op, float x) { return support::function_of(op, x); };
    for (const float sign : {1.0F, -1.0F}) {
        CHECK(of(chain_op::hyperbolic_tangent, sign * infinity) == sign);
        CHECK(of(chain_op::error_function, sign * infinity) == sign);
        CHECK(std::signbit(of(chain_op::hyperbolic_tangent, sign * 0.0F)) == (sign < 0));
    }
    CHECK(of(chain_op::sigmoid, infinity) == 1);
    CHECK(of(chain_op::sigmoid, -infinity) == 0);
    CHECK(of(chain_op::sigmoid, -89) == 0);  // e^89 is infinite; the result would be denormal
    for (auto op = chain_op::negate; op <= chain_op::gelu_by_tanh; op = static_cast<chain_op>(static_cast<int>(op) + 1))
        CHECK(std::isnan(of(op, std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("norms are near their definitions, also of rows far from zero", "[graph][chains]") {
    const auto width = GENERATE(as<std::int64_t>{}, 1, 7, 128, 129, 1000, 4099);
    CAPTURE(width);
    support::random any(support::seed(static_cast<std::uint64_t>(width)));
    const auto type = GENERATE(as<std::string>{}, "LayerNormalization", "RMSNormalization", "Softmax");
    CAPTURE(type);
    program_builder b;
    const auto x = b.input("x", {3, width});
    if (type == "Softmax")
        b.output(b.node(type, {x}, {integer("axis", -1)}));
    else
        b.output(b.node(type, {x, b.constant("scale", {1}, any)}));
    float_values inputs{{x, {{3, width}, {}}}};
    for (std::int64_t i = 0; i < 3 * width; ++i) inputs[x].at.push_back(20 + support::number(any));
    const auto got = by_kernel(b.p, inputs, 2).at(b.p.outputs[0]).at;
    const auto scale = type == "Softmax" ? 1.0 : static_cast<double>(b.p.values[1].numbers[0]);
    const auto columns = static_cast<std::size_t>(width);
    for (std::size_t row = 0; row < 3; ++row) {
        const float* const in = inputs[x].at.data() + row * columns;
        double sum = 0, shift = 0, squares = 0;
        for (std::size_t i = 0; i < columns; ++i) shift += static_cast<double>(in[i]) / static_cast<double>(width);
        if (type == "RMSNormalization") shift = 0;
        for (std::size_t i = 0; i < columns; ++i) {
            squares += std::pow(static_cast<double>(in[i]) - shift, 2);
            sum += std::exp(static_cast<double>(in[i]) - shift);
        }
        const double inverse = 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(1e-5F));
        for (std::size_t i = 0; i < columns; ++i) {
            const double y = static_cast<double>(in[i]) - shift;
            const double want = type == "Softmax" ? std::exp(y) / sum : y * inverse * scale;
            CHECK(std::abs(static_cast<double>(got[row * columns + i]) - want) <= 2e-5 * (1 + std::abs(want)));
        }
    }
}

namespace {

/// A row's norm by its definition.
void normalise(double* row, std::size_t width, bool layer, double epsilon) {
    double mean = 0, squares = 0;
    for (std::size_t i = 0; layer && i < width; ++i) mean += row[i] / static_cast<double>(width);
    for (std::size_t i = 0; i < width; ++i) squares += (row[i] - mean) * (row[i] - mean);
    const double root = std::sqrt(squares / static_cast<double>(width) + epsilon);
    for (std::size_t i = 0; i < width; ++i) row[i] = (row[i] - mean) / root;
}

}  // namespace

TEST_CASE("a norm that a model spells out is one norm, near its definition", "[graph][chains]") {
    constexpr std::array<std::int64_t, 5> widths{1, 3, 128, 129, 700};
    const std::uint64_t rounds = support::few(600);
    for (std::uint64_t i = 0; i < rounds; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        support::random any(seed);
        const bool layer = any.one_in(2), behind_sum = any.one_in(2), scaled = any.one_in(2);
        const auto width = any.of(widths);
        extents shape{2, 3, width};
        shape.erase(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(any.below(3)));
        program_builder b;
        const auto x = b.input("x", shape), r = b.input("r", {width});
        const auto of = behind_sum ? b.node("Add", {x, r}) : x;
        const support::spelt_norm norm(b, any, of, shape.size(), layer);
        auto at = norm.made;
        if (scaled) at = b.node("Add", {b.node("Mul", {at, r}), r});
        b.output(b.node("Neg", {at}));
        const auto p = with_norms(b.p);
        CHECK(p.nodes.size() == (behind_sum ? 1U : 0U) + (scaled ? 2U : 0U) + 2);
        CHECK(chain_steps(p).norm == (layer ? chain_norm::layer : chain_norm::root_mean_square));

        float_values inputs{{x, {shape, {}}}, {r, {{width}, {}}}};
        for (auto& [v, t] : inputs)
            for (std::size_t n = 0; n < support::count(t.shape); ++n) t.at.push_back(3 + support::number(any));
        const auto got = by_kernel(p, inputs, 2).at(p.outputs[0]).at;
        const auto columns = static_cast<std::size_t>(width);
        const auto& other = inputs.at(r).at;
        for (std::size_t from = 0; from < got.size(); from += columns) {
            std::vector<double> row(columns);
            for (std::size_t c = 0; c < columns; ++c)  // a sum is one of floats
                row[c] =
                    static_cast<double>(behind_sum ? inputs.at(x).at[from + c] + other[c] : inputs.at(x).at[from + c]);
            normalise(row.data(), columns, layer, static_cast<double>(norm.epsilon));
            for (std::size_t c = 0; c < columns; ++c) {
                const auto y = static_cast<double>(other[c]), want = -(scaled ? row[c] * y + y : row[c]);
                REQUIRE(std::abs(static_cast<double>(got[from + c]) - want) <= 2e-5 * (1 + std::abs(want)));
            }
        }
    }
}

TEST_CASE("nodes that only look like a norm stay as they are, and are refused with the node", "[graph][chains]") {
    support::random any(1);
    program_builder b;
    const auto x = b.input("x", {4, 8});
    const auto number = [&](float value, extents shape = {}) {
        const auto v = b.constant("c" + std::to_string(b.p.values.size()), shape, any);
        b.p.values[v].numbers = {value};
        return v;
    };
    const auto mean = [&](std::uint32_t of, std::int64_t axis = -1, std::int64_t keep = 1) {
        return b.node("ReduceMean", {of}, {support::integers("axes", {axis}), integer("keepdims", keep)});
    };
    // Each part of it may be replaced.
    std::uint32_t first_mean = mean(x), left = b.node("Sub", {x, first_mean}), exponent = number(2);
    std::uint32_t epsilon = number(1e-5F);
    const auto end = [&](std::int64_t axis = -1, std::int64_t keep = 1) {
        const auto square = b.node("Pow", {left, exponent});
        const auto sum = b.node("Add", {mean(square, axis, keep), epsilon});
        b.output(b.node("Div", {left, b.node("Sqrt", {sum})}));
    };
    const auto is_refused = [&](const std::string& node) {
        CHECK(with_norms(b.p).nodes.size() == b.p.nodes.size());
        CHECK(refused([&] { return chain_steps(with_norms(b.p)); }).first == node);
    };
    SECTION("it is one") {
        end();
        CHECK(with_norms(b.p).nodes.size() == 1);
    }
    SECTION("another reader of the mean") {
        end();
        b.output(b.node("Neg", {first_mean}));
        is_refused("ReduceMean0");
    }
    SECTION("what is left is an output") {
        end();
        b.output(left);
        is_refused("ReduceMean0");
    }
    SECTION("another power") {
        b.p.values[exponent].numbers = {3};
        end();
        is_refused("ReduceMean0");
    }
    SECTION("a constant with more dimensions than the rest") {
        epsilon = number(1e-5F, {1, 1, 1});
        end();
        is_refused("ReduceMean0");
    }
    SECTION("an axis that goes") {
        end(-1, 0);
        is_refused("ReduceMean0");
    }
    SECTION("an operator of another domain") {
        end();
        b.p.nodes.back().onnx = false;
        is_refused("ReduceMean0");
    }
    SECTION("another axis for the variance, of what is left of the mean") {
        end(0);
        // The root-mean-square norm over axis 0 is one, and its input is no chain.
        CHECK(refused([&] { return chain_steps(with_norms(b.p)); }).first == "ReduceMean0");
    }
    SECTION("an axis before the last one") {
        b.p.nodes[0].attributes[0].integers = {0};
        end(0);
        CHECK(refused([&] { return chain_steps(with_norms(b.p)); }).second.find("last axis") != std::string::npos);
    }
    SECTION("several axes") {
        b.p.nodes[0].attributes[0].integers = {0, 1};
        end();
        CHECK(refused([&] { return chain_steps(with_norms(b.p)); }).first == "ReduceMean0");
    }
    SECTION("an unknown attribute") {
        b.p.nodes[0].attributes.push_back(integer("select", 1));
        end();
        CHECK(refused([&] { return chain_steps(with_norms(b.p)); }).first == "ReduceMean0");
    }
}

TEST_CASE("nodes that form no chain are refused with the node and the reason", "[graph][chains]") {
    support::random any(1);
    program_builder b;
    const auto x = b.input("x", {4, 8});
    const auto is = [&](const std::string& node, const std::string& why) {
        const auto got = refused([&] { return chain_steps(b.p); });
        CAPTURE(got.second);
        CHECK(got.first == node);
        CHECK(got.second.find(why) != std::string::npos);
    };
    SECTION("another operator") {
        b.output(b.node("MatMul", {x, x}));
        is("MatMul0", "MatMul: it is neither element-wise nor a norm");
    }
    SECTION("another domain") {
        b.output(b.node("Relu", {x}));
        b.p.nodes[0].onnx = false;
        is("Relu0", "no operator of ONNX");
    }
    SECTION("an attribute") {
        b.output(b.node("Add", {x, x}, {integer("broadcast", 1)}));
        is("Add0", "nothing is known about its attribute 'broadcast'");
    }
    SECTION("an attribute of another kind") {
        b.output(b.node("Softmax", {x}, {support::real("axis", -1)}));
        is("Softmax0", "nothing is known about its attribute 'axis'");
    }
    SECTION("a type") {
        b.p.values[x].type = element::f16;
        b.output(b.node("Relu", {x}));
        is("Relu0", "'x' is of type f16, and not f32");
    }
    SECTION("a number of inputs") {
        b.output(b.node("Add", {x}));
        is("Add0", "another number of inputs");
    }
    SECTION("an input that is left out") {
        b.output(b.node("Mul", {x, no_value}));
        is("Mul0", "an input is missing");
    }
    SECTION("two norms") {
        b.output(b.node("Softmax", {b.node("Softmax", {x}, {integer("axis", 1)})}, {integer("axis", 1)}));
        is("Softmax1", "a second norm");
    }
    SECTION("another axis") {
        b.output(b.node("Softmax", {x}, {integer("axis", 0)}));
        is("Softmax0", "the last axis alone");
    }
    SECTION("a norm in doubles") {
        b.output(b.node("LayerNormalization", {x, b.constant("s", {8}, any)}, {integer("stash_type", 11)}));
        is("LayerNormalization0", "isn't computed in floats");
    }
    SECTION("a norm with further outputs") {
        b.output(b.node("LayerNormalization", {x, b.constant("s", {8}, any)}));
        b.p.nodes[0].outputs.push_back(b.value("mean", {}));
        is("LayerNormalization0", "another number of outputs");
    }
    SECTION("a power") {
        const auto e = b.constant("e", {}, any);
        b.p.values[e].numbers = {2.5F};
        b.output(b.node("Pow", {x, e}));
        is("Pow0", "neither 2 nor 3");
    }
    SECTION("a factor") {
        b.output(b.node("LeakyRelu", {x}, {support::real("alpha", 1.5F)}));
        is("LeakyRelu0", "its factor isn't between 0 and 1");
    }
    SECTION("many arrays") {
        auto at = x;
        for (int i = 0; i < 8; ++i) at = b.node("Add", {at, b.input("more" + std::to_string(i), {8})});
        b.output(at);
        is("Add7", "more than 8 arrays");
    }
    SECTION("many steps") {
        auto at = x;
        for (int i = 0; i < 40; ++i) at = b.node("Tanh", {at});
        b.output(at);
        is("Tanh31", "more than 32 steps");  // the load is a step
    }
    SECTION("many values at once") {
        std::vector<std::uint32_t> five;
        for (int i = 0; i < 6; ++i) five.push_back(b.node("Tanh", {x}));
        auto at = five[0];
        for (std::size_t i = 1; i < five.size(); ++i) at = b.node("Add", {at, five[i]});
        b.output(at);
        is("Tanh4", "more than 4 values wait");
    }
    SECTION("outputs that no node makes") {
        b.node("Relu", {x});
        b.output(x);
        is("x", "an output that no node makes");
    }
    SECTION("no output") {
        b.node("Relu", {x});
        is("", "a piece without outputs");
    }
    SECTION("no node") { is("", "a piece without nodes"); }
}

TEST_CASE("shapes that no one pass goes through are refused with the node", "[graph][chains]") {
    support::random any(1);
    program_builder b;
    const auto is = [&](std::vector<extents> of_inputs, const std::string& node, const std::string& why) {
        const auto c = chain_steps(b.p);
        std::vector<chain_shape> shapes(b.p.values.size());
        for (std::size_t v = 0; v < b.p.values.size(); ++v) shapes[v] = b.p.values[v].shape;
        for (std::size_t i = 0; i < of_inputs.size(); ++i) shapes[b.p.inputs[i]] = of_inputs[i];
        const auto got = refused([&] {
            chain_shapes(b.p, shapes);
            return bound_chain(c, b.p, shapes);
        });
        CAPTURE(got.second);
        CHECK(got.first == node);
        CHECK(got.second.find(why) != std::string::npos);
        CHECK(got.second.empty() == why.empty());
    };
    const auto x = b.input("x", {-1, -1}), y = b.input("y", {-1});
    SECTION("of an addition") {
        b.output(b.node("Add", {x, y}));
        is({{3, 4}, {4}}, "", "");
        is({{3, 4}, {3}}, "Add0", "its inputs don't fit each other");
        is({{3, 4}, {0}}, "Add0", "its inputs don't fit each other");
        is({{1 << 16, 1 << 15}, {1}}, "v0", "2^31 elements or more");
        is({{4, std::int64_t{1} << 62}, {1}}, "v0", "2^31 elements or more");
        is({{1 << 16, (1 << 15) - 1}, {1}}, "", "");
    }
    SECTION("of a bound") {
        b.output(b.node("Clip", {y, x}));
        is({{3, 4}, {4}}, "Clip0", "another input is larger than the first");
    }
    SECTION("of a norm without an axis") {
        b.output(b.node("Softmax", {x}));
        is({{3, 4}, {1}}, "", "");
        is({{3, 4, 5}, {1}}, "Softmax0", "the last axis alone");
        is({{3}, {1}}, "Softmax0", "the last axis alone");
    }
    SECTION("of a norm's scale") {
        b.output(b.node("RMSNormalization", {x, y}));
        is({{3, 4}, {5}}, "RMSNormalization0", "don't fit each other");
        is({{3, 1}, {5}}, "RMSNormalization0", "another input is larger than the first");
    }
    SECTION("of a norm whose rows are repeated element by element") {
        b.output(b.node("Add", {x, b.node("Softmax", {y}, {integer("axis", -1)})}));
        is({{3, 4}, {4}}, "", "");
        is({{3, 4}, {1}}, "Softmax0", "its rows are shorter");
    }
    SECTION("of two outputs") {
        b.output(b.node("Relu", {x}));
        b.output(b.node("Relu", {y}));
        is({{3, 4}, {4}}, "v1", "an output of another shape than the first one");
    }
    SECTION("of a node that nobody needs") {
        b.output(b.node("Relu", {y}));
        b.node("Relu", {x});
        is({{3, 4}, {4}}, "Relu1", "its result is larger than the piece's");
    }
    SECTION("of too many axes") {
        b.output(b.node("Add", {x, y}));
        is({{2, 2, 2, 2}, {2, 1, 2, 1}}, "", "");
        is({{2, 2, 2, 2, 2}, {2, 1, 2, 1, 2}}, "Add0", "along too many axes");
        is({{2, 2, 2, 2, 2}, {2, 2, 1, 2, 2}}, "", "");
    }
}

}  // namespace chain_steps_test
