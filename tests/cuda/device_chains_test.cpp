// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Element-wise chains and norms by the library's own engine, over the stand-in.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/device_chains.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "cuda/device_pieces.hpp"
#include "graph/chain_programs.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace device_chains_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::graph::element;
using gpushare::graph::model_error;
using gpushare::graph::model_fault;
using gpushare::graph::tensor;
using support::device_floats;
using support::float_tensor;
using support::float_values;
using support::integer;
using support::program_builder;
using tenancy_type = support::cuda_tenancy;
using tenant_type = tenancy_type::tenant;
using engine_type = graph::chain_engine<tenant_type>;
using fixture = support::piece_tenant;
using program_type = graph::detail::piece_program;
using literal_engine = support::literal_engine<support::evaluate_floats>;

static_assert(graph::piece_engine<engine_type, cuda::stream>);

namespace {

engine_type::reader unread() {
    return [](std::string_view) { return program_type{}; };
}

bool same(const tensor& got, const float_tensor& want) {
    if (got.type != element::f32 || got.shape != want.shape) return false;
    for (std::size_t i = 0; i < want.at.size(); ++i)
        if (!support::same_number(static_cast<const float*>(got.data)[i], want.at[i])) return false;
    return true;
}

/// Runs a piece on these inputs. Returns whether its outputs are right. Throws what the engine
/// throws.
bool right(fixture& f, engine_type& engine, std::uint32_t number, const program_type& p, const float_values& inputs,
           std::size_t offset = 0) {
    return support::gives(f, engine, number, p, inputs, support::evaluate_floats(p, inputs), offset * sizeof(float),
                          same);
}
/// x of `rows` rows, and so on.
float_values inputs_of(const program_type& p, std::int64_t rows, support::random& any) {
    return support::inputs_of<float_values>(p, rows, any);
}
/// What stands behind an attention block: the norm of a sum, and an activation.
program_type normed(support::random& any) {
    program_builder b;
    const auto x = b.input("x", {-1, 40});
    const auto sum = b.node("Add", {x, b.constant("bias", {40}, any)});
    const auto norm =
        b.node("LayerNormalization", {sum, b.constant("scale", {40}, any), b.constant("shift", {40}, any)});
    b.output(b.node("Gelu", {norm}));
    return b.p;
}

}  // namespace

TEST_CASE("random chains by the library's engine give what their nodes give", "[cuda][graph][chains]") {
    const standin::session gpu;
    {
        fixture f;
        engine_type engine(f.chat, unread());
        std::uint64_t taken = 0;
        const std::uint64_t rounds = support::few(300);
        for (std::uint64_t i = 0; i < rounds; ++i) {
            const auto seed = support::seed(i);
            CAPTURE(seed);
            support::random any(seed);
            const support::random_chain made(any);
            const auto& p = made.b.p;
            std::optional<std::uint32_t> number;
            try {
                number = engine.add(p);
                // REQUIRE would take what these throw for a failure.
                const bool once = right(f, engine, *number, p, made.inputs(), any.below(5));
                const bool again = right(f, engine, *number, p, made.inputs(), any.below(5));
                REQUIRE(once);
                REQUIRE(again);
                ++taken;
            } catch (const model_error& e) {
                REQUIRE(e.fault() == model_fault::engine);
                REQUIRE(std::ranges::find(p.nodes, e.node(), &graph::detail::program_node::name) != p.nodes.end());
            }
            if (number) engine.remove_last();
        }
        CHECK(taken > rounds / 3);
        CHECK(engine.held() == 0_B);
        CHECK(f.all_back());
    }
}

TEST_CASE("a norm that a model spells out is one launch of the library's engine", "[cuda][graph][chains]") {
    const standin::session gpu;
    fixture f;
    {
        engine_type engine(f.chat, unread());
        for (std::uint64_t i = 0; i < support::few(60); ++i) {
            const auto seed = support::seed(i);
            CAPTURE(seed);
            support::random any(seed);
            program_builder b;
            const auto x = b.input("x", {-1, 40});
            const auto sum = b.node("Add", {x, b.constant("bias", {40}, any)});
            const support::spelt_norm norm(b, any, sum, 2, any.one_in(2));
            b.output(b.node("Gelu", {b.node("Mul", {norm.made, b.constant("scale", {40}, any)})}));
            const auto number = engine.add(b.p);
            CHECK(right(f, engine, number, graph::detail::with_norms(b.p), inputs_of(b.p, 5, any)));
            engine.remove_last();
        }
    }
    CHECK(f.all_back());
}

TEST_CASE("a chain is one launch, and nothing else behind the first of its shape", "[cuda][graph][chains]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    const auto p = normed(any);
    {
        engine_type engine(f.chat, [&](std::string_view) { return p; });
        REQUIRE(engine.add("read by the reader") == 0);
        CHECK(engine.size() == 1);
        CHECK(engine.held() >= 4_B * (3 * 40));
        for (const std::int64_t rows : {3, 7, 3}) CHECK(right(f, engine, 0, p, inputs_of(p, rows, any)));
        const device_floats x(f.chat, inputs_of(p, 7, any).at(p.inputs[0])), y(f.chat, {7, 40}), none(f.chat, {0, 40});
        const auto launches = [&](const tensor& from, const tensor& at) {
            tensor to = at;
            const std::vector<const tensor*> in{&from};
            const std::vector<tensor*> out{&to};
            std::pair<int, int> calls;
            f.submit([&](cuda::stream& s) {
                standin::forget_calls();
                engine.enqueue(s, 0, in, out);
                calls = {standin::count("cudaLaunchKernelExC"),
                         standin::count("cudaMalloc") + standin::count("cudaMemcpyAsync") +
                             standin::count("cudaStreamSynchronize") + standin::count("cudaEventRecord")};
            });
            CHECK(to.data == at.data);
            CHECK(to.shape == from.shape);
            return calls;
        };
        CHECK(launches(x.at, y.at) == std::pair(1, 0));
        CHECK(launches(none.at, none.at) == std::pair(0, 0));
    }
    CHECK(f.all_back());
}

TEST_CASE("a chain is on the device of the part that was asked for", "[cuda][graph][chains]") {
    const standin::session gpu{{.devices = 2}};
    cuda::node node;
    tenancy_type shared{node};
    tenant_type chat = shared.admit({.name = "chat", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    support::random any(1);
    {
        engine_type engine(chat, unread(), 1);
        engine.add(normed(any));
        CHECK(chat.memory(1).free() < chat.memory(1).capacity());
        CHECK(chat.memory(0).free() == chat.memory(0).capacity());
    }
}

namespace {

/// y = gelu(x + bias), and then its softmax.
struct two_pieces {
    explicit two_pieces(support::random& any) {
        const auto x = first.input("x", {-1, 24});
        first.output(first.node("Gelu", {first.node("Add", {x, first.constant("bias", {24}, any)})}));
        second.output(second.node("Softmax", {second.input("h", {-1, 24})}, {integer("axis", -1)}));
        using graph::value_kind;
        g.values = {{"x", element::f32, {{-1, {}}, {24, {}}}, value_kind::input, true},
                    {"h", element::f32, {{-1, {}}, {24, {}}}, value_kind::inner, true},
                    {"y", element::f32, {{-1, {}}, {24, {}}}, value_kind::output, true}};
        g.nodes = {{"first", "Gelu", {0}, {1}}, {"second", "Softmax", {1}, {2}}};
        g.inputs = {0}, g.outputs = {2};
        plan = {.of_graph = fingerprint(g), .order = {0, 1}, .pieces = {{{0, 1}}, {{1, 2}}}};
    }
    [[nodiscard]] float_tensor inputs(std::int64_t rows, support::random& any) const {
        return inputs_of(first.p, rows, any).at(first.p.inputs[0]);
    }
    [[nodiscard]] float_tensor of(const float_tensor& x) const {
        const auto h = support::evaluate_floats(first.p, {{first.p.inputs[0], x}}).at(first.p.outputs[0]);
        return support::evaluate_floats(second.p, {{second.p.inputs[0], h}}).at(second.p.outputs[0]);
    }

    program_builder first{}, second{};
    graph::model_graph g{};
    graph::split_plan plan{};
};
using model_type = graph::captured_model<tenant_type, engine_type, cuda::graph_executable>;

}  // namespace

TEST_CASE("chains are captured into one graph, with a gate between them", "[cuda][graph][chains][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = launch_rig::manual}};
    support::random any(1);
    const two_pieces pieces(any);
    const bool gated = GENERATE(true, false);
    CAPTURE(gated);
    {
        fixture f;
        std::optional<launch_rig::gate_type> gate;
        gate.emplace(f.node, launch_rig::first, launch_gate({.longest_hold = 1h}),
                     cuda::launch_shell_options{.waits = cuda::launch_wait::stream, .gap = ns{0}});
        const auto urgent = gate->add({.level = 1});
        const auto batch = gate->add({});
        engine_type engine(f.chat, unread());
        engine.add(pieces.first.p), engine.add(pieces.second.p);
        model_type::gate between = [&](cuda::stream& to) { gate->wait_in_capture(batch, to.native_handle()); };
        model_type model(f.chat, pieces.g, pieces.plan, engine, gated ? std::move(between) : model_type::gate{});
        const float_tensor brought = pieces.inputs(5, any), want = pieces.of(brought);
        const device_floats x(f.chat, brought), to(f.chat, {5, 24});
        tensor y;
        const auto run = [&] {
            std::memset(to.at.data, 0xff, to.at.size());
            y = to.at;
            return std::async(std::launch::async, [&] { model.run(std::vector{x.at}, std::span(&y, 1)); });
        };
        const auto finish = [&](std::future<void>& of) {
            while (of.wait_for(0s) != std::future_status::ready) standin::advance(100us);
            of.get();
        };
        for (int i = 0; i < 3; ++i) {
            auto once = run();
            finish(once);
            CHECK(same(y, want));
        }
        CHECK(model.made() == 1);
        auto request = std::make_optional(gate->announce(urgent));
        const auto launches = standin::count("cudaGraphLaunch");
        auto page = run();
        CHECK(launch_rig::eventually([&] { return standin::count("cudaGraphLaunch") > launches; }));
        standin::advance(10ms);
        if (!gated) finish(page);
        CHECK(same(to.at, want) == !gated);  // the softmax waits at the gate
        request.reset();
        if (gated) finish(page);
        CHECK(same(y, want));
    }
    (void)standin::take_findings();  // the words of the gate
}

namespace {

/// max(tanh(x), x^2.5 or so), of which no chain has the power.
struct small_model {
    small_model() {
        const auto x = b.input("x", {3, 4});
        const auto power = b.node("Pow", {x, x});
        b.output(b.node("Max", {b.node("Tanh", {power}), power}));
        using graph::value_kind;
        const auto value = [](const char* name, value_kind kind) {
            return graph::value{name, element::f32, {{3, {}}, {4, {}}}, kind, true};
        };
        g.values = {value("x", value_kind::input), value("p", value_kind::inner), value("t", value_kind::inner),
                    value("y", value_kind::output)};
        g.nodes = {{"Pow0", "Pow", {0}, {1}}, {"Tanh1", "Tanh", {1}, {2}}, {"Max2", "Max", {1, 2}, {3}}};
        g.inputs = {0}, g.outputs = {3};
    }
    [[nodiscard]] const graph::model_graph& graph() const { return g; }
    [[nodiscard]] program_type extract(std::span<const std::uint32_t> nodes) const {
        program_type p = b.p;
        p.nodes.clear();
        for (const auto n : nodes) p.nodes.push_back(b.p.nodes[n]);
        const auto edges = gpushare::graph::edges_of(g, nodes);
        p.inputs = edges.inputs, p.outputs = edges.outputs;  // values have the same numbers there
        for (const auto v : p.inputs) p.values[v].ranked = true, p.values[v].shape = {3, 4};
        return p;
    }
    program_builder b{};
    graph::model_graph g{};
};

}  // namespace

TEST_CASE("a choice leaves the library's chains out where they refuse a piece", "[cuda][graph][chains]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    const small_model model;
    literal_engine literal;
    engine_type chains(f.chat, unread());
    graph::engine_set<cuda::stream, program_type> engines;
    engines.add("literal", literal), engines.add("chains", chains);
    operator_table table;
    graph::piece_chooser choice(f.chat, model, engines, table);
    const device_floats x(f.chat, inputs_of(model.b.p, 3, any).at(model.b.p.inputs[0]));
    choice.run_nodes(std::vector{x.at});
    const std::vector<std::uint32_t> whole{0, 1, 2}, behind{1, 2};
    REQUIRE(choice.choose(behind));
    CHECK(choice.left_out().empty());  // the same bits
    REQUIRE(choice.choose(whole));
    CHECK(choice.choose(whole)->candidate == "literal");
    REQUIRE(!choice.left_out().empty());
    CHECK(choice.left_out()[0].engine == "chains");
    CHECK(choice.left_out()[0].why.find("'Pow0': Pow: its exponent is neither 2 nor 3") != std::string::npos);
}

TEST_CASE("a refusal of the library's chains is an error with the node or the input", "[cuda][graph][chains][fault]") {
    const standin::session gpu;
    fixture f;
    support::random any(1);
    const auto p = normed(any);
    {
        engine_type engine(f.chat, unread());
        CHECK_THROWS_AS(engine.add("nothing"), model_error);
        CHECK(engine.size() == 0);
        REQUIRE(engine.add(p) == 0);
        const device_floats x(f.chat, inputs_of(p, 3, any).at(p.inputs[0])), y(f.chat, {3, 40});
        auto stream = f.node.make_stream(device_id{0}, priority{0});
        tensor in = x.at, out = y.at;
        const auto refused = [&] {
            const std::vector<const tensor*> ins{&in};
            const std::vector<tensor*> outs{&out};
            try {
                engine.enqueue(stream, 0, ins, outs);
            } catch (const std::exception& e) {
                return std::string(e.what());
            }
            return std::string("nothing");
        };
        in.type = element::f16;
        CHECK(refused().find("'x': an input that isn't a tensor of floats") != std::string::npos);
        in = {element::f32, {3, 40}, nullptr, 0};
        CHECK(refused().find("'x': an input isn't there") != std::string::npos);
        in = {element::f32, {3, 41}, x.at.data, x.at.capacity};
        CHECK(refused().find("larger than its buffer") != std::string::npos);
        in.shape = {3, 39};
        CHECK(refused().find("'Add0': Add: its inputs don't fit each other") != std::string::npos);
        in = x.at;
        CHECK(refused() == "nothing");  // also behind a refusal
        in.data = static_cast<std::byte*>(x.at.data) + 2;
        in.shape = {2, 40};
        CHECK(refused().find("'x': an input or output isn't aligned as a float") != std::string::npos);
        in = x.at;
        out = {.data = y.at.data, .capacity = 3 * 40 * sizeof(float) - 1};
        CHECK(refused().find("an output has 480 bytes, and its buffer 479") != std::string::npos);
        out = y.at;
        CHECK(refused() == "nothing");
        const std::vector<const tensor*> two{&in, &in};
        const std::vector<tensor*> outs{&out};
        CHECK_THROWS_AS(engine.enqueue(stream, 0, two, outs), model_error);
        stream.record().wait(never);
    }
    CHECK(f.all_back());
}

TEST_CASE("an output in the memory of an input is refused, of short and of long rows", "[cuda][graph][chains][fault]") {
    const standin::session gpu;
    fixture f;
    const auto width = GENERATE(as<std::int64_t>{}, 128, 129);
    CAPTURE(width);
    support::random any(1);
    program_builder b;
    const auto sum = b.node("Add", {b.input("x", {-1, width}), b.input("r", {-1, width})});
    b.output(sum);
    b.output(b.node("LayerNormalization", {sum, b.constant("scale", {width}, any)}));
    {
        engine_type engine(f.chat, unread());
        REQUIRE(engine.add(b.p) == 0);
        const auto given = inputs_of(b.p, 3, any);
        CHECK(right(f, engine, 0, b.p, given));
        const auto row = static_cast<std::size_t>(width) * sizeof(float);
        const device_floats all(f.chat, {40, width}), x(f.chat, given.at(b.p.inputs[0])), r(f.chat, {3, width});
        const auto enqueued = [&](const tensor& to, const tensor& normed) {
            tensor outs[] = {to, normed};
            const std::vector<const tensor*> in{&x.at, &r.at};
            const std::vector<tensor*> out{&outs[0], &outs[1]};
            std::string why = "nothing";
            f.submit([&](cuda::stream& s) {
                standin::forget_calls();
                try {
                    engine.enqueue(s, 0, in, out);
                } catch (const model_error& e) {
                    CHECK(e.fault() == model_fault::engine);
                    why = e.node();
                }
                CHECK(standin::count("cudaLaunchKernelExC") == (why == "nothing" ? 1 : 0));
            });
            return why;
        };
        const auto at = [&](const tensor& in, std::size_t offset) {
            return tensor{element::f32, {3, width}, static_cast<std::byte*>(in.data) + offset, 3 * row};
        };
        const auto name = [&](std::size_t output) { return b.p.values[b.p.outputs[output]].name; };
        const tensor apart = at(all.at, 20 * row);
        CHECK(enqueued(x.at, apart) == name(0));
        CHECK(enqueued(apart, r.at) == name(1));
        CHECK(enqueued(apart, at(all.at, 22 * row)) == name(1));
        CHECK(enqueued(apart, at(all.at, 17 * row + 4)) == name(1));
        CHECK(enqueued(apart, apart) == name(1));
        CHECK(enqueued(apart, at(all.at, 17 * row)) == "nothing");
        CHECK(enqueued(at(all.at, 23 * row), apart) == "nothing");
    }
    CHECK(f.all_back());
}

}  // namespace device_chains_test
