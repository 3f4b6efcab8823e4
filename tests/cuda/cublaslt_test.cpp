// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Pieces computed by cuBLASLt on the stand-in, with a reference in place of cuBLASLt: the calls to
// it, and their results.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/cublaslt.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/tenant/tenancy.hpp>

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif

#include "cuda/device_pieces.hpp"
#include "cuda/reference_cublaslt.hpp"
#include "graph/piece_programs.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace cublaslt_test {

using namespace gpushare;
using namespace gpushare::literals;
using gpushare::graph::element;
using gpushare::graph::model_error;
using gpushare::graph::model_fault;
using gpushare::graph::tensor;
using reference = support::reference_cublaslt;
using lt = gpushare::graph::detail::cublaslt;
using support::by_tanh;
using support::device_floats;
using support::integer;
using support::numbers;
using support::program_builder;
using tenancy_type = support::cuda_tenancy;
using tenant_type = tenancy_type::tenant;
using engine_type = graph::cublaslt_engine<tenant_type>;
using program_type = graph::detail::piece_program;
using literal_engine = support::literal_engine<support::evaluate>;
using values = std::map<std::uint32_t, numbers>;

static_assert(graph::piece_engine<engine_type, cuda::stream>);

#if __has_include(<cublasLt.h>)
static_assert(lt::success == CUBLAS_STATUS_SUCCESS && lt::invalid_value == CUBLAS_STATUS_INVALID_VALUE);
static_assert(lt::real_32f == CUDA_R_32F && lt::compute_32f == CUBLAS_COMPUTE_32F);
static_assert(lt::compute_fast_tf32 == CUBLAS_COMPUTE_32F_FAST_TF32);
static_assert(lt::op_n == CUBLAS_OP_N && lt::op_t == CUBLAS_OP_T);
static_assert(lt::transa == CUBLASLT_MATMUL_DESC_TRANSA && lt::transb == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(lt::epilogue == CUBLASLT_MATMUL_DESC_EPILOGUE && lt::bias_pointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(lt::batch_count == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
static_assert(lt::strided_batch_offset == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
static_assert(lt::max_workspace_bytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(lt::min_alignment[0] == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(lt::min_alignment[3] == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(lt::by_default == CUBLASLT_EPILOGUE_DEFAULT && lt::bias == CUBLASLT_EPILOGUE_BIAS);
static_assert((lt::relu | lt::bias) == CUBLASLT_EPILOGUE_RELU_BIAS && lt::relu == CUBLASLT_EPILOGUE_RELU);
static_assert((lt::gelu | lt::bias) == CUBLASLT_EPILOGUE_GELU_BIAS && lt::gelu == CUBLASLT_EPILOGUE_GELU);
static_assert(sizeof(lt::algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(lt::heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(lt::heuristic, workspace) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(lt::heuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
#endif

namespace {

graph::cublaslt_library fresh() {
    reference::forget();
    return graph::cublaslt_library(reference::functions());
}
struct fixture : support::piece_tenant {
    graph::cublaslt_library library = fresh();
};
engine_type::reader unread() {
    return [](std::string_view) { return program_type{}; };
}

/// Products are summed in doubles here and rounded once a step there.
bool near(const tensor& got, const numbers& want) {
    if (got.type != element::f32 || got.shape != want.shape) return false;
    for (std::size_t i = 0; i < want.at.size(); ++i) {
        const auto x = static_cast<double>(static_cast<const float*>(got.data)[i]);
        if (!(std::abs(x - want.at[i]) <= 1e-4 * (1 + std::abs(want.at[i])))) return false;
    }
    return true;
}

/// Runs a piece on these inputs. Returns whether its outputs are right. Throws what the engine
/// throws.
bool right(fixture& f, engine_type& engine, std::uint32_t number, const program_type& p, const values& inputs,
           std::size_t offset = 0) {
    return support::gives(f, engine, number, p, inputs, support::evaluate(p, inputs), offset, near);
}
/// x of `rows` rows, and a residual.
values inputs_of(const program_type& p, std::int64_t rows, support::random& any) {
    return support::inputs_of<values>(p, rows, any);
}
/// relu(x w + bias) w2 + x, of any number of rows.
program_type two_layers(support::random& any) {
    program_builder b;
    const auto x = b.input("x", {-1, 4});
    const auto p = b.node("MatMul", {x, b.constant("w", {4, 8}, any)});
    const auto h = b.node("Relu", {b.node("Add", {p, b.constant("bias", {8}, any)})});
    b.output(b.node("Add", {b.node("MatMul", {h, b.constant("w2", {8, 4}, any)}), x}));
    return b.p;
}

}  // namespace

TEST_CASE("random pieces by cuBLASLt give what their nodes give", "[cuda][graph][cublaslt]") {
    const standin::session gpu;
    {
        fixture f;
        engine_type engine(f.chat, f.library, unread());
        std::uint64_t taken = 0;
        const std::uint64_t rounds = support::few(300);
        for (std::uint64_t i = 0; i < rounds; ++i) {
            const auto seed = support::seed(i);
            CAPTURE(seed);
            support::random any(seed);
            const support::random_program made(any);
            reference::now().workspace = any.below(3) * 1000;
            std::optional<std::uint32_t> number;
            try {
                number = engine.add(made.b.p);
            } catch (const model_error& e) {
                REQUIRE(e.fault() == model_fault::engine);
                continue;
            }
            ++taken;
            REQUIRE(right(f, engine, *number, made.b.p, made.inputs(), 4 * any.below(80)));
            REQUIRE(right(f, engine, *number, made.b.p, made.inputs(), 4 * any.below(80)));
            engine.remove_last();
        }
        CHECK(taken > rounds / 3);
        CHECK(engine.held() == 0_B);
    }
    CHECK(reference::now().objects == 0);
    CHECK(reference::now().handles == 0);
}

TEST_CASE("a piece asks cuBLASLt once for each shape, and then only enqueues", "[cuda][graph][cublaslt]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    const auto p = two_layers(any);
    {
        engine_type engine(f.chat, f.library, unread(), {.shapes = 2});
        reference::now().workspace = 5000;
        REQUIRE(engine.add(p) == 0);
        const bytes constants = engine.held();
        CHECK(constants >= 4_B * (4 * 8 + 8 + 8 * 4));
        const auto asked = [&](std::int64_t rows) {
            const int before = reference::now().heuristics;
            CHECK(right(f, engine, 0, p, inputs_of(p, rows, any)));
            return reference::now().heuristics - before;
        };
        CHECK(asked(3) == 2);
        CHECK(asked(3) == 0);
        const bytes held = engine.held();
        CHECK(held >= constants + 5000_B + 4_B * (3 * 8));
        CHECK(asked(7) == 2);
        CHECK(asked(3) == 0);
        CHECK(engine.held() > held);
        CHECK(asked(9) == 2);
        CHECK(asked(3) == 0);
        CHECK(asked(7) == 2);  // one of three is forgotten
        const device_floats x(f.chat, inputs_of(p, 7, any).at(p.inputs[0])), y(f.chat, {7, 4});
        const std::vector<const tensor*> in{&x.at};
        tensor to = y.at;
        const std::vector<tensor*> out{&to};
        f.submit([&](cuda::stream& s) {
            standin::forget_calls();
            engine.enqueue(s, 0, in, out);
            CHECK(standin::count_all() - standin::count("cudaLaunchKernelExC") <= 4);  // which device is current
            CHECK(standin::count("cudaLaunchKernelExC") == 2);
            CHECK(standin::count("cudaMalloc") + standin::count("cudaMemcpyAsync") == 0);
            CHECK(standin::count("cudaStreamSynchronize") + standin::count("cudaEventRecord") == 0);
        });
        CHECK(to.data == y.at.data);
    }
    CHECK(f.all_back());
}

TEST_CASE("a piece by cuBLASLt is on the device of the part that was asked for", "[cuda][graph][cublaslt]") {
    const standin::session gpu{{.devices = 2}};
    cuda::node node;
    tenancy_type shared{node};
    tenant_type chat = shared.admit({.name = "chat", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    const auto library = fresh();
    support::random any(1);
    {
        engine_type engine(chat, library, unread(), {.part = 1});
        engine.add(two_layers(any));
        CHECK(chat.memory(1).free() < chat.memory(1).capacity());
        CHECK(chat.memory(0).free() == chat.memory(0).capacity());
    }
}

TEST_CASE("pieces by cuBLASLt are captured into one graph", "[cuda][graph][cublaslt]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    {
        engine_type engine(f.chat, f.library, unread());
        const auto both = two_layers(any);
        program_builder first, second;  // the same nodes
        const auto x1 = first.input("x", {-1, 4}), x2 = second.input("x", {-1, 4}), h2 = second.input("h", {-1, 8});
        const auto copied = [&](program_builder& to, std::uint32_t v) {
            to.p.values.push_back(both.values[v]);
            return static_cast<std::uint32_t>(to.p.values.size() - 1);
        };
        const auto p1 = first.node("MatMul", {x1, copied(first, both.nodes[0].inputs[1])});
        first.output(first.node("Relu", {first.node("Add", {p1, copied(first, both.nodes[1].inputs[1])})}));
        const auto p2 = second.node("MatMul", {h2, copied(second, both.nodes[3].inputs[1])});
        second.output(second.node("Add", {p2, x2}));
        engine.add(first.p), engine.add(second.p);

        using graph::value_kind;
        graph::model_graph g;
        g.values = {{"x", element::f32, {{-1, {}}, {4, {}}}, value_kind::input, true},
                    {"h", element::f32, {{-1, {}}, {8, {}}}, value_kind::inner, true},
                    {"y", element::f32, {{-1, {}}, {4, {}}}, value_kind::output, true}};
        g.nodes = {{"first", "MatMul", {0}, {1}}, {"second", "MatMul", {0, 1}, {2}}};
        g.inputs = {0}, g.outputs = {2};
        const graph::split_plan plan{.of_graph = fingerprint(g), .order = {0, 1}, .pieces = {{{0, 1}}, {{1, 2}}}};
        graph::captured_model<tenant_type, engine_type, cuda::graph_executable> model(f.chat, g, plan, engine);
        for (const std::int64_t rows : {3, 3, 3, 3, 6, 6, 6, 3, 3, 3}) {
            const auto inputs = inputs_of(both, rows, any);
            const device_floats x(f.chat, inputs.at(both.inputs[0]), rows == 6 ? 16 : 0);
            tensor y;
            model.run(std::vector{x.at}, std::span(&y, 1));
            CHECK(near(y, support::evaluate(both, inputs).at(both.outputs[0])));
        }
        CHECK(model.made() == 3);
        const device_floats x(f.chat, inputs_of(both, 3, any).at(both.inputs[0]));
        tensor y;
        model.run(std::vector{x.at}, std::span(&y, 1));
        y = {};
        const int products = reference::now().products;
        model.run(std::vector{x.at}, std::span(&y, 1));
        CHECK(reference::now().products == products);  // the graph alone
    }
    CHECK(f.all_back());
}

TEST_CASE("a captured piece by cuBLASLt outlives runs at less aligned addresses", "[cuda][graph][cublaslt]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    {
        engine_type engine(f.chat, f.library, unread());
        const auto p = two_layers(any);
        engine.add(p);
        using graph::value_kind;
        graph::model_graph g;
        g.values = {{"x", element::f32, {{3, {}}, {4, {}}}, value_kind::input, true},
                    {"y", element::f32, {{3, {}}, {4, {}}}, value_kind::output, true}};
        g.nodes = {{"both", "MatMul", {0}, {1}}};
        g.inputs = {0}, g.outputs = {1};
        const graph::split_plan plan{.of_graph = fingerprint(g), .order = {0}, .pieces = {{{0, 1}}}};
        graph::captured_model<tenant_type, engine_type, cuda::graph_executable> model(f.chat, g, plan, engine);
        const auto inputs = inputs_of(p, 3, any);
        const auto want = support::evaluate(p, inputs).at(p.outputs[0]);
        const device_floats x(f.chat, inputs.at(p.inputs[0]));
        std::vector<tensor> y(1);  // the same for all runs, as the caller of a graph has it
        reference::now().workspace = 1000;
        for (int i = 0; i < 2; ++i) model.run(std::vector{x.at}, y);
        CHECK(model.made() == 1);
        const bytes before = engine.held();
        for (const std::size_t offset : std::array<std::size_t, 6>{128, 64, 32, 16, 8, 4}) {
            reference::now().workspace += 1000;
            CHECK(right(f, engine, 0, p, inputs, offset));
        }
        CHECK(engine.held() >= before + 27000_B);  // 2000 to 7000, and none freed
        reference::now().workspace = 1000;
        const int products = reference::now().products;
        model.run(std::vector{x.at}, y);
        CHECK(reference::now().products == products);  // the graph alone
        CHECK(near(y[0], want));
    }
    CHECK(f.all_back());
}

namespace {

/// relu(x w + bias), of which a Relu is the second node.
struct small_model {
    explicit small_model(support::random& any) {
        const auto x = b.input("x", {3, 4});
        const auto p = b.node("Gemm", {x, b.constant("w", {4, 8}, any), b.constant("bias", {8}, any)});
        b.output(b.node("Relu", {p}));
        using graph::value_kind;
        g.values = {{"x", element::f32, {{3, {}}, {4, {}}}, value_kind::input, true},
                    {"p", element::f32, {{3, {}}, {8, {}}}, value_kind::inner, true},
                    {"y", element::f32, {{3, {}}, {8, {}}}, value_kind::output, true}};
        g.nodes = {{"Gemm0", "Gemm", {0}, {1}}, {"Relu1", "Relu", {1}, {2}}};
        g.inputs = {0}, g.outputs = {2};
    }
    [[nodiscard]] const graph::model_graph& graph() const { return g; }
    [[nodiscard]] program_type extract(std::span<const std::uint32_t> nodes) const {
        program_type p = b.p;
        p.nodes.clear();
        for (const auto n : nodes) p.nodes.push_back(b.p.nodes[n]);
        p.inputs = {b.p.nodes[nodes.front()].inputs[0]};
        p.outputs = {b.p.nodes[nodes.back()].outputs[0]};
        auto& in = p.values[p.inputs[0]];
        in.ranked = true;
        in.shape = nodes.front() == 0 ? support::extents{3, 4} : support::extents{3, 8};
        return p;
    }
    program_builder b{};
    graph::model_graph g{};
};

}  // namespace

TEST_CASE("a choice leaves cuBLASLt out where it refuses a piece or is wrong", "[cuda][graph][cublaslt]") {
    const standin::session gpu;
    const bool wrong = GENERATE(false, true);
    CAPTURE(wrong);
    fixture f;
    support::random any(1);
    const small_model model(any);
    literal_engine literal;
    engine_type fused(f.chat, f.library, unread());
    reference::now().without_bias = wrong;
    graph::engine_set<cuda::stream, program_type> engines;
    engines.add("literal", literal), engines.add("cublaslt", fused);
    operator_table table;
    graph::piece_chooser choice(f.chat, model, engines, table);
    const device_floats x(f.chat, inputs_of(model.b.p, 3, any).at(model.b.p.inputs[0]));
    choice.run_nodes(std::vector{x.at});
    const std::vector<std::uint32_t> whole{0, 1}, relu{1};
    REQUIRE(choice.choose(whole));
    REQUIRE(choice.left_out().size() == (wrong ? 1 : 0));
    if (wrong) CHECK(choice.left_out()[0].engine == "cublaslt");
    CHECK(choice.choose(relu)->candidate == "literal");
    CHECK(choice.left_out().back().nodes == relu);
    CHECK(choice.left_out().back().why.find("'Relu1': Relu: it can't be folded") != std::string::npos);
}

TEST_CASE("a bias that a run gives more rows than the model does is refused", "[cuda][graph][cublaslt]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    program_builder b;
    const auto x = b.input("x", {-1, 4}), bias = b.input("bias", {1, 8});
    b.output(b.node("Add", {b.node("MatMul", {x, b.constant("w", {4, 8}, any)}), bias}));
    engine_type engine(f.chat, f.library, unread());
    engine.add(b.p);
    const auto with = [&](const support::extents& shape) {
        values all = inputs_of(b.p, 3, any);
        all.at(bias) = {shape, {}};
        for (std::size_t i = 0; i < support::count(shape); ++i) all.at(bias).at.push_back(support::number(any));
        return right(f, engine, 0, b.p, all);
    };
    CHECK(with({1, 8}));
    CHECK(with({8}));
    CHECK_THROWS_AS(with({3, 8}), model_error);
    CHECK_THROWS_AS(with({1, 1, 8}), model_error);  // the result would have three dimensions
    CHECK(with({1, 8}));
}

TEST_CASE("a refusal of cuBLASLt is an error with the node", "[cuda][graph][cublaslt][fault]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    const auto p = two_layers(any);
    const auto why = [&](auto does) {
        try {
            does();
        } catch (const std::exception& e) {
            return std::string(e.what());
        }
        return std::string("nothing");
    };
    reference::now().create_status = 1;
    CHECK(why([&] { engine_type(f.chat, f.library, unread()); }) != "nothing");
    reference::now().create_status = 0;
    {
        engine_type engine(f.chat, f.library, [&](std::string_view) { return p; }, {.workspace = 1000_B});
        REQUIRE(engine.add("read by the reader") == 0);
        const device_floats x(f.chat, inputs_of(p, 3, any).at(p.inputs[0])), y(f.chat, {3, 4});
        auto stream = f.node.make_stream(device_id{0}, priority{0});
        tensor in = x.at, out = y.at;
        const auto refused = [&] {
            const std::vector<const tensor*> ins{&in};
            const std::vector<tensor*> outs{&out};
            return why([&] { engine.enqueue(stream, 0, ins, outs); });
        };
        reference::now().workspace = 1001;
        CHECK(refused().find("'MatMul0': cuBLASLt has no algorithm") != std::string::npos);
        reference::now().workspace = 1000;
        CHECK(refused() == "nothing");
        reference::now().product_status = 13;
        CHECK(refused().find("'MatMul0': cuBLASLt: the reference refuses") != std::string::npos);
        reference::now().product_status = 0;
        in.type = element::f16;
        CHECK(refused().find("'x': an input that isn't a tensor of floats") != std::string::npos);
        in = {element::f32, {3, 4}, nullptr, 0};
        CHECK(refused().find("'x': an input isn't there") != std::string::npos);
        in = {element::f32, {3, 5}, x.at.data, x.at.capacity};
        CHECK(refused() != "nothing");  // larger than its buffer
        in.shape = {2, 3};
        CHECK(refused().find("'MatMul0': its inputs aren't matrices of matching sizes") != std::string::npos);
        in = x.at;
        in.data = static_cast<std::byte*>(x.at.data) + 2;
        in.shape = {2, 4};
        CHECK(refused().find("aligned as a float") != std::string::npos);
        in = x.at;
        CHECK(refused() == "nothing");
        in.shape = {0, 4};
        CHECK(refused() == "nothing");
        CHECK(out.shape == support::extents{0, 4});
        CHECK(reference::now().compute == lt::compute_32f);
        engine_type rounding(f.chat, f.library, unread(), {.tf32 = true});
        rounding.add(p);
        reference::now().workspace = 0;
        CHECK(right(f, rounding, 0, p, inputs_of(p, 3, any)));
        CHECK(reference::now().compute == lt::compute_fast_tf32);
        stream.record().wait(never);
    }
    CHECK(f.all_back());
    CHECK(reference::now().objects == 0);
    CHECK_THROWS_AS(graph::cublaslt_library("no/such/library.so"), model_error);
}

}  // namespace cublaslt_test
