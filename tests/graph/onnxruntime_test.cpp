// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Models on ONNX Runtime itself, in pieces: the same bits as the whole model; also on OpenVINO; and
// real models, if they have been fetched.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/onnx.hpp>
#include <gpushare/graph/onnxruntime.hpp>
#include <gpushare/graph/openvino.hpp>
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/run.hpp>

#include "graph/onnx_models.hpp"
#include "support/catch.hpp"
#include "support/host_tenants.hpp"
#include "support/random.hpp"

TEST_CASE("a library that isn't ONNX Runtime is refused", "[graph][onnx]") {
    using gpushare::graph::onnxruntime_library;
    CHECK_THROWS_AS(onnxruntime_library("no_such_library.so"), gpushare::graph::model_error);
    CHECK_THROWS_WITH(onnxruntime_library("libm.so.6"), Catch::Contains("isn't ONNX Runtime"));
    CHECK_THROWS_AS(onnxruntime_library::linked(nullptr), gpushare::graph::model_error);
}

TEST_CASE("a library that isn't OpenVINO is refused", "[graph][onnx]") {
    using gpushare::graph::openvino_library;
    CHECK_THROWS_AS(openvino_library("no_such_library.so"), gpushare::graph::model_error);
    CHECK_THROWS_WITH(openvino_library("libm.so.6"), Catch::Contains("OpenVINO has no ov_"));
}

#ifdef GPUSHARE_ONNXRUNTIME

namespace {

using namespace support::host_tenants;
using gpushare::graph::cut_model;
using gpushare::graph::element;
using gpushare::graph::model_graph;
using gpushare::graph::onnx_model;
using gpushare::graph::onnxruntime_engine;
using gpushare::graph::split_plan;
using gpushare::graph::tensor;

static_assert(gpushare::graph::piece_engine<onnxruntime_engine, host::stream>);

const gpushare::graph::onnxruntime_library& library() {
    static const gpushare::graph::onnxruntime_library one(GPUSHARE_ONNXRUNTIME);
    return one;
}
/// Cuts behind each so many nodes, or at the next place behind them where nothing crosses but
/// tensors of known type.
split_plan pieces_of(const model_graph& g, std::uint32_t each) {
    split_plan p{.of_graph = fingerprint(g), .limit = 5ms};
    p.order.resize(g.nodes.size());
    std::iota(p.order.begin(), p.order.end(), 0U);
    const auto n = static_cast<std::uint32_t>(g.nodes.size());
    for (std::uint32_t first = 0, at = 1; at <= n; ++at) {
        const auto over = crossing(g, at);
        const bool can = std::ranges::all_of(over, [&](std::uint32_t v) { return size_of(g.values[v].type) != 0; });
        if (at != n && (at - first < each || !can)) continue;
        p.pieces.push_back({{first, at}});
        first = at;
    }
    return p;
}
/// Inputs of a graph whose shapes are known: waves, and for integers a rate of samples.
struct given {
    explicit given(const model_graph& g) {
        for (const auto v : g.inputs) {
            const auto size = g.values[v].size();
            REQUIRE(size);
            bytes.emplace_back(size->count());
            tensor t{.type = g.values[v].type, .data = bytes.back().data(), .capacity = bytes.back().size()};
            for (const auto& d : g.values[v].shape) t.shape.push_back(d.extent);
            fill(t);
            in.push_back(std::move(t));
        }
    }
    static void fill(const tensor& t) {
        for (std::size_t i = 0; i < t.capacity / size_of(t.type); ++i) {
            const float f = static_cast<float>(i * i % 977) / 500 - 0.9F;
            const std::int64_t rate = 16000;
            auto* const to = static_cast<std::byte*>(t.data) + i * size_of(t.type);
            if (t.type == element::f32) std::memcpy(to, &f, sizeof f);
            if (t.type == element::i64) std::memcpy(to, &rate, sizeof rate);
        }
    }
    std::vector<std::vector<std::byte>> bytes{};
    std::vector<tensor> in{};
};
struct one_tenant {
    node n{{.devices = 1, .memory = 1_GiB, .sms = 2}};
    tenancy shared{n};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 900_MiB, .compute = 50_pct});
};
/// All outputs' bytes, of a model in pieces.
std::string outputs(one_tenant& t, const onnx_model& m, const model_graph& g, const split_plan& plan, given& with,
                    int optimisation = 99) {
    onnxruntime_engine engine(library(), {.optimisation = optimisation});
    for (const auto& p : plan.pieces) engine.add(m.extract(plan.nodes(p.places)));
    cut_model model(t.chat, g, plan, engine);
    std::vector<tensor> out(g.outputs.size());
    model.run(with.in, out);
    std::string all;
    for (const auto& o : out) all.append(static_cast<const char*>(o.data), o.size());
    return all;
}

}  // namespace

TEST_CASE("a model of ONNX in pieces computes on ONNX Runtime what the whole one does", "[graph][onnx]") {
    one_tenant t;
    const auto m = onnx_model::parse(support::two_layers().bytes(), {.sizes = {{"n", 6}}});
    const auto open = onnx_model::parse(support::two_layers().bytes());
    given with(m.graph());
    const auto whole = outputs(t, m, m.graph(), pieces_of(m.graph(), 100), with);
    CHECK(whole.size() == 2 * 6 * 8 * 4);
    for (std::uint32_t each = 1; each < 8; ++each) {
        CAPTURE(each);
        CHECK(outputs(t, m, m.graph(), pieces_of(m.graph(), each), with, 0) == whole);
        CHECK(outputs(t, open, open.graph(), pieces_of(open.graph(), each), with) == whole);  // no size is known before
    }
}

TEST_CASE("one cut model runs batches of any size", "[graph][onnx]") {
    one_tenant t;
    const auto m = onnx_model::parse(support::two_layers().bytes());
    const auto plan = pieces_of(m.graph(), 2);
    onnxruntime_engine engine(library());
    for (const auto& p : plan.pieces) engine.add(m.extract(plan.nodes(p.places)));
    cut_model model(t.chat, m.graph(), plan, engine);
    for (const std::int64_t n : {2, 64, 1, 7}) {
        CAPTURE(n);
        const auto fixed = onnx_model::parse(support::two_layers().bytes(), {.sizes = {{"n", n}}});
        given with(fixed.graph());
        std::vector<tensor> out(2);
        model.run(with.in, out);
        std::string all;
        for (const auto& o : out) all.append(static_cast<const char*>(o.data), o.size());
        CHECK(out[1].shape == std::vector<std::int64_t>{n, 8});
        CHECK(all == outputs(t, fixed, fixed.graph(), pieces_of(fixed.graph(), 100), with));
    }
}

namespace {

/// x, five times a weight more, and x again: what is between is a loop.
support::onnx_builder with_a_loop() {
    support::onnx_builder b;
    b.input("x", {4}).weight("w", {4}).integers("five", {5}).node("Relu", {"x"}, {"a"});
    b.node("Loop", {"five", "", "a"}, {"b"}).node("Add", {"b", "x"}, {"y"}).output("y");
    auto& body = *b.m.mutable_graph()->mutable_node(1)->add_attribute();
    body.set_name("body");
    body.set_type(onnx::AttributeProto::GRAPH);
    auto& g = *body.mutable_g();
    g.set_name("body");
    for (const char* name : {"round", "go"}) {
        auto& v = *g.add_input();
        support::onnx_builder::describe(v, name, {});
        v.mutable_type()->mutable_tensor_type()->set_elem_type(name[0] == 'r' ? onnx::TensorProto::INT64
                                                                              : onnx::TensorProto::BOOL);
    }
    support::onnx_builder::describe(*g.add_input(), "sum", {4});
    support::onnx_builder::add_node(g, "Identity", {"go"}, {"on"});
    support::onnx_builder::add_node(g, "Add", {"sum", "w"}, {"more"});
    auto& on = *g.add_output();
    support::onnx_builder::describe(on, "on", {});
    on.mutable_type()->mutable_tensor_type()->set_elem_type(onnx::TensorProto::BOOL);
    support::onnx_builder::describe(*g.add_output(), "more", {4});
    return b;
}

}  // namespace

TEST_CASE("a loop is one node, and cuts before and behind it change nothing", "[graph][onnx]") {
    one_tenant t;
    const auto m = onnx_model::parse(with_a_loop().bytes());
    REQUIRE(m.graph().nodes.size() == 3);
    given with(m.graph());
    const auto whole = outputs(t, m, m.graph(), pieces_of(m.graph(), 100), with);
    const auto plan = pieces_of(m.graph(), 1);
    CHECK(plan.pieces.size() == 3);
    CHECK(outputs(t, m, m.graph(), plan, with) == whole);
    float first = 0;
    std::memcpy(&first, whole.data(), sizeof first);
    const float x = *static_cast<const float*>(with.in[0].data);
    CHECK(first == Approx(std::max(x, 0.F) + 5 * -2.F + x));
}

TEST_CASE("ONNX Runtime's objection to a piece is passed on", "[graph][onnx]") {
    one_tenant t;
    onnxruntime_engine engine(library(), {.threads = 1});
    CHECK_THROWS_WITH(engine.add("no model"), Catch::Contains("ONNX Runtime: "));
    CHECK(engine.size() == 0);
    const auto m = onnx_model::parse(support::two_layers().bytes());
    engine.add(m.extract({0, 8}));
    cut_model model(t.chat, m.graph(), pieces_of(m.graph(), 100), engine);
    std::vector<float> x(7);
    std::vector<tensor> in{{element::f32, {1, 7}, x.data(), 28}}, out(2);
    CHECK_THROWS_WITH(model.run(in, out), Catch::Contains("ONNX Runtime: ") && Catch::Contains("'chat'"));
    in[0] = {element::f32, {1, 8}, x.data(), 28};  // more than its buffer
    CHECK_THROWS_WITH(model.run(in, out), Catch::Contains("larger than its buffer"));
    in[0] = {element::f32, {1, 7, 1}, nullptr, 0};
    CHECK_THROWS_WITH(model.run(in, out), Catch::Contains("isn't there"));
}

namespace {

/// A real model and the shapes of its inputs, where it has been fetched.
struct real_case {
    const char* name;
    std::map<std::string, std::vector<std::int64_t>> inputs;
    [[nodiscard]] std::filesystem::path path() const { return std::string(GPUSHARE_MODELS "/") + name; }
};
const std::vector<real_case> real_cases{
    {"rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", {{"x", {1, 3, 48, 192}}}},
    {"silero_vad/data/silero_vad_16k_sequence.onnx", {{"input", {16, 576}}}},
    {"silero_vad/data/silero_vad_16k_op15.onnx", {{"input", {1, 512}}, {"state", {2, 1, 128}}}}};

}  // namespace

TEST_CASE("real models in pieces give the same bits as whole", "[graph][onnx]") {
    for (const auto& c : real_cases) {
        CAPTURE(c.name);
        if (!std::filesystem::exists(c.path())) continue;  // `./dev setup serve` fetches them
        one_tenant t;
        const auto m = onnx_model::load(c.path(), {.inputs = c.inputs});
        given with(m.graph());
        onnxruntime_engine engine(library());
        gpushare::operator_table table;
        gpushare::graph::piece_measurer times(t.chat, m, engine, table, {.warm_up = 0, .repeats = 1});
        times.run_nodes(with.in);
        const auto& g = times.graph();
        for (const auto& v : g.values) CHECK((v.kind == gpushare::graph::value_kind::weight || v.size()));
        // A fusion across a cut may round otherwise; without any there is nothing to be undone.
        const auto whole = outputs(t, m, g, pieces_of(g, 10000), with, 0);
        CHECK(outputs(t, m, g, pieces_of(g, 7), with, 0) == whole);
        CHECK(outputs(t, m, m.graph(), pieces_of(m.graph(), 13), with, 0) == whole);
    }
}

TEST_CASE("pieces of what ONNX Runtime made of a model give the bits of the model, with all fusions", "[graph][onnx]") {
    for (const auto& c : real_cases) {
        CAPTURE(c.name);
        if (!std::filesystem::exists(c.path())) continue;
        one_tenant t;
        const auto m = onnx_model::load(c.path(), {.inputs = c.inputs});
        const auto n = static_cast<std::uint32_t>(m.graph().nodes.size());
        const auto fused = onnx_model::parse(
            gpushare::graph::optimised(library(), m.whole()),
            {.inputs = c.inputs, .other_domains = gpushare::graph::onnxruntime_domains(), .like = &m.graph()});
        CHECK(fused.graph().nodes.size() < n);
        given with(m.graph());
        onnxruntime_engine pieces(library(), {.optimisation = 0});
        const auto plan = pieces_of(fused.graph(), 5);
        CHECK(plan.pieces.size() > 1);
        for (const auto& p : plan.pieces) pieces.add(fused.extract(plan.nodes(p.places)));
        cut_model model(t.chat, fused.graph(), plan, pieces);
        std::vector<tensor> out(fused.graph().outputs.size());
        model.run(with.in, out);
        std::string all;
        for (const auto& o : out) all.append(static_cast<const char*>(o.data), o.size());
        CHECK(all == outputs(t, m, m.graph(), pieces_of(m.graph(), n), with, 99));
    }
}

TEST_CASE("a kept plan fits what ONNX Runtime makes of the model once more", "[graph][onnx]") {
    for (const auto& c : real_cases) {
        CAPTURE(c.name);
        if (!std::filesystem::exists(c.path())) continue;
        const auto m = onnx_model::load(c.path(), {.inputs = c.inputs});
        const auto fused = [&] {
            return onnx_model::parse(gpushare::graph::optimised(library(), m.whole()),
                                     {.inputs = c.inputs,
                                      .other_domains = gpushare::graph::onnxruntime_domains(),
                                      .like = &m.graph(),
                                      .own_names = true});
        };
        const auto first = fused();
        const auto text = to_text(pieces_of(first.graph(), 5), first.graph());
        for (int time = 0; time < 2; ++time) {
            const auto again = fused();
            CHECK(again.graph() == first.graph());
            CHECK(gpushare::graph::parse_split_plan(text, again.graph()).order.size() == first.graph().nodes.size());
        }
    }
}

#ifdef GPUSHARE_OPENVINO

namespace {

using gpushare::graph::openvino_engine;
static_assert(gpushare::graph::piece_engine<openvino_engine, host::stream>);

const gpushare::graph::openvino_library& openvino() {
    static const gpushare::graph::openvino_library one(GPUSHARE_OPENVINO);
    return one;
}
struct both_engines {
    both_engines() {
        set.add("onnxruntime", first);
        set.add("openvino", second);
    }
    onnxruntime_engine first{library()};
    openvino_engine second{openvino()};
    gpushare::graph::engine_set<host::stream> set;
};

}  // namespace

TEST_CASE("a model in pieces on OpenVINO gives what it gives on ONNX Runtime", "[graph][onnx]") {
    one_tenant t;
    const auto m = onnx_model::parse(support::two_layers().bytes(), {.sizes = {{"n", 6}}});
    const auto open = onnx_model::parse(support::two_layers().bytes());  // no size is known before
    given with(m.graph());
    both_engines engines;
    gpushare::operator_table table;
    gpushare::graph::piece_chooser choice(t.chat, open, engines.set, table, {.measure = {.warm_up = 0, .repeats = 1}});
    choice.run_nodes(with.in);
    for (const auto* from : {&m, &open})
        for (std::uint32_t each = 1; each < 8; ++each) {
            CAPTURE(each, from == &m);
            const auto& g = from->graph();
            auto plan = pieces_of(g, each);
            for (std::size_t i = 0; i < plan.pieces.size(); ++i) {
                const auto edges = edges_of(g, plan.nodes(plan.pieces[i].places));
                // OpenVINO wants to know how many extents an input has.
                const bool ranked = std::ranges::all_of(edges.inputs, [&](auto v) { return g.values[v].ranked; });
                plan.pieces[i].engine = ranked && i % 2 != each % 2 ? "openvino" : "onnxruntime";
            }
            engines.set.load(*from, plan);
            cut_model model(t.chat, g, plan, engines.set);
            std::vector<tensor> out(2);
            for (int run = 0; run < 2; ++run) {
                model.run(with.in, out);
                CHECK(choice.difference(out).empty());
                for (auto& o : out) o = {};
            }
            engines.set.clear();
        }
    std::vector<std::uint32_t> piece{0, 1, 2};
    CHECK(choice.choose(piece));
    CHECK(choice.left_out().empty());
}

TEST_CASE("a piece on OpenVINO takes places and shapes as they come", "[graph][onnx]") {
    const auto m =
        onnx_model::parse(support::onnx_builder().input("x", {-1, 2}).node("Relu", {"x"}, {"y"}).output("y").bytes());
    openvino_engine engine(openvino());
    engine.add(m.extract({0, 1}));
    std::vector<float> x{-1, 2, 3, -4, 5, 6}, mine(6);
    one_tenant t;
    gpushare::graph::tensor_blocks blocks(t.chat.memory(), 1);
    const auto run = [&](std::int64_t rows, tensor y) {
        const tensor in{element::f32, {rows, 2}, x.data(), x.size() * sizeof(float)};
        const tensor* ins[]{&in};
        tensor* outs[]{&y};
        engine.run(0, ins, outs);
        CHECK(y.shape == in.shape);
        const auto* made = static_cast<const float*>(y.data);
        return std::vector<float>(made, made + 2 * rows);
    };
    const std::vector<float> right{0, 2, 3, 0, 5, 6};
    const tensor open{element::f32, {-1, 2}, nullptr, 0, &blocks, 0};
    const auto placed = [&](std::int64_t rows) { return tensor{element::f32, {rows, 2}, mine.data(), 24}; };
    CHECK(run(3, placed(3)) == right);
    CHECK(mine == right);
    CHECK(run(3, open) == right);
    x[1] = 7;
    CHECK(run(2, open) == std::vector<float>{0, 7, 3, 0});
    CHECK(mine == right);  // the request has forgotten it
    CHECK(run(1, placed(1)) == std::vector<float>{0, 7});
    CHECK(mine[1] == 7);
}

TEST_CASE("OpenVINO neither reads nor writes beyond a tensor of a smaller type", "[graph][onnx]") {
    const auto m =
        onnx_model::parse(support::onnx_builder().input("x", {-1, 2}).node("Relu", {"x"}, {"y"}).output("y").bytes());
    openvino_engine engine(openvino());
    engine.add(m.extract({0, 1}));
    std::vector<float> x{-1, 2, 3, -4}, mine(4, 9.F);
    const auto run = [&](element in_type, element out_type) {
        const tensor in{in_type, {2, 2}, x.data(), 16};
        tensor out{out_type, {2, 2}, mine.data(), 16};
        const tensor* ins[]{&in};
        tensor* outs[]{&out};
        engine.run(0, ins, outs);
    };
    CHECK_THROWS_WITH(run(element::u8, element::f32), Catch::Contains("another type"));
    CHECK_THROWS_WITH(run(element::f32, element::f16), Catch::Contains("another type"));
    CHECK(mine == std::vector<float>(4, 9.F));
    run(element::f32, element::f32);
    CHECK(mine == std::vector<float>{0, 2, 3, 0});
    CHECK_THROWS_WITH(run(element::u8, element::f32), Catch::Contains("another type"));  // in the same place
}

TEST_CASE("OpenVINO forgets an output's place after a failure", "[graph][onnx]") {
    const auto m =
        onnx_model::parse(support::onnx_builder().input("x", {-1, 2}).node("Relu", {"x"}, {"y"}).output("y").bytes());
    openvino_engine engine(openvino());
    engine.add(m.extract({0, 1}));
    one_tenant t;
    gpushare::graph::tensor_blocks blocks(t.chat.memory(), 1);
    std::vector<float> x{-1, 2, 3, -4}, mine(6);
    const tensor in{element::f32, {2, 2}, x.data(), 16};
    const tensor* ins[]{&in};
    tensor placed{element::f32, {2, 2}, mine.data(), 16}, wrong{element::f32, {2, 3}, mine.data(), 24},
        small{element::u8, {2, 2}, mine.data(), 24}, open{element::f32, {-1, 2}, nullptr, 0, &blocks, 0};
    for (tensor* const refused : {&wrong, &small}) {
        tensor* outs[]{&placed};
        engine.run(0, ins, outs);
        CHECK(mine[1] == 2);
        outs[0] = refused;
        CHECK_THROWS_AS(engine.run(0, ins, outs), gpushare::graph::model_error);
        mine.assign(6, 9.F);
        outs[0] = &open;
        engine.run(0, ins, outs);
        CHECK(mine == std::vector<float>(6, 9.F));
        CHECK(static_cast<const float*>(open.data)[1] == 2);
        open = {element::f32, {-1, 2}, nullptr, 0, &blocks, 0};
    }
}

TEST_CASE("OpenVINO's objection to a piece is passed on", "[graph][onnx]") {
    openvino_engine engine(openvino(), {.threads = 1});
    CHECK_THROWS_WITH(engine.add("no model"), Catch::Contains("OpenVINO: "));
    CHECK(engine.size() == 0);
    const auto m = onnx_model::parse(support::two_layers().bytes());
    engine.add(m.extract({0, 8}));
    std::vector<float> x(7);
    tensor in{element::f32, {1, 7}, x.data(), 28}, y{}, z{};
    const tensor* ins[]{&in};
    tensor* outs[]{&y, &z};
    CHECK_THROWS_WITH(engine.run(0, ins, outs), Catch::Contains("OpenVINO: "));
    in = {element::f32, {1, 8}, x.data(), 28};
    CHECK_THROWS_WITH(engine.run(0, ins, outs), Catch::Contains("larger than its buffer"));
    CHECK_THROWS_WITH(engine.run(0, {}, outs), Catch::Contains("another number"));
}

#endif
#endif
