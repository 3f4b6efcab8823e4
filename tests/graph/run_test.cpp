// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// A model in pieces on a tenant gives the results of the whole model. Its pieces are submissions,
// and the values between pieces lie in the tenant's memory.
#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/serving/operator_selection.hpp>

#include "graph/synthetic.hpp"
#include "graph/toy_engine.hpp"
#include "support/catch.hpp"
#include "support/host_tenants.hpp"
#include "support/random.hpp"

namespace {

using namespace support::host_tenants;
using gpushare::graph::cut_model;
using gpushare::graph::element;
using gpushare::graph::model_graph;
using gpushare::graph::split_plan;
using gpushare::graph::tensor;
using support::toy_engine;

static_assert(gpushare::graph::piece_engine<toy_engine, host::stream>);

/// Cuts before these nodes.
split_plan cut_at(const model_graph& g, const std::vector<std::uint32_t>& cuts) {
    split_plan p{.of_graph = fingerprint(g), .limit = 5ms};
    p.order.resize(g.nodes.size());
    std::iota(p.order.begin(), p.order.end(), 0U);
    std::uint32_t first = 0;
    for (const auto cut : cuts) p.pieces.push_back({{std::exchange(first, cut), cut}, 1ms});
    p.pieces.push_back({{first, static_cast<std::uint32_t>(g.nodes.size())}, 1ms});
    return p;
}
std::vector<std::uint32_t> random_cuts(support::random& any, const model_graph& g) {
    std::vector<std::uint32_t> cuts;
    for (std::uint32_t n = 1; n < g.nodes.size(); ++n)
        if (any.one_in(3)) cuts.push_back(n);
    return cuts;
}
toy_engine& load(toy_engine& e, const split_plan& p) {
    for (const auto& piece : p.pieces) e.add(p.nodes(piece.places));
    return e;
}
/// The bytes of a graph's inputs, and what its outputs have to be.
struct example {
    explicit example(const model_graph& g) : whole(g.nodes.size()) {
        toy_engine::bytes_of values;
        for (const auto v : g.inputs) {
            auto& bytes = values[v];
            bytes.resize(g.values[v].size()->count());
            std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(v));
            given.push_back(bytes);
        }
        std::iota(whole.begin(), whole.end(), 0U);
        toy_engine::compute(g, whole, values);
        for (const auto v : g.outputs) expected.push_back(values.at(v));
        for (auto& bytes : given)
            in.push_back({element::u8, {static_cast<std::int64_t>(bytes.size())}, bytes.data(), bytes.size()});
        out.resize(g.outputs.size());
    }
    [[nodiscard]] bool right() const {
        for (std::size_t i = 0; i < out.size(); ++i) {
            const auto* from = static_cast<const unsigned char*>(out[i].data);
            if (!std::equal(expected[i].begin(), expected[i].end(), from, from + out[i].size())) return false;
        }
        return true;
    }
    std::vector<std::uint32_t> whole;
    std::vector<std::vector<unsigned char>> given, expected;
    std::vector<tensor> in, out;
};
/// x -> a -> b -> c -> y, each of 100 bytes.
model_graph chain() {
    support::graph_builder b;
    auto v = b.input(100);
    for (int i = 0; i < 4; ++i) v = b.node("Relu", {v}, 100);
    return b.output(v).graph();
}

/// What a measurer asks of a model: a piece is its nodes.
struct toy_model {
    model_graph g;
    [[nodiscard]] const model_graph& graph() const { return g; }
    [[nodiscard]] static std::vector<std::uint32_t> extract(std::span<const std::uint32_t> nodes) {
        return {nodes.begin(), nodes.end()};
    }
};

struct one_tenant {
    node n{{.devices = 1, .memory = 64_MiB, .sms = 2}};
    tenancy shared{n};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 32_MiB, .compute = 50_pct});
    [[nodiscard]] std::uint64_t charged() {
        chat.memory().collect();
        return (chat.memory().capacity() - chat.memory().free()).count();
    }
};

}  // namespace

TEST_CASE("an input of another type than the model's is refused before anything runs", "[graph]") {
    one_tenant t;
    const auto g = chain();
    const auto plan = cut_at(g, {1});
    toy_engine engine(g);
    load(engine, plan);
    cut_model model(t.chat, g, plan, engine);
    example e(g);
    e.in[0].type = element::i8;  // as large as the model's u8
    CHECK_THROWS_WITH(model.run(e.in, e.out), "tenant 'chat': input 0 of a model is u8, not i8");
    e.in[0].type = element::unknown;
    CHECK_THROWS_AS(model.run(e.in, e.out), gpushare::operation_error);
    CHECK(e.out[0].data == nullptr);
    e.in[0].type = element::u8;
    model.run(e.in, e.out);
    CHECK(e.right());
}

TEST_CASE("a cut model gives what the whole one gives, wherever it is cut", "[graph]") {
    one_tenant t;
    const auto seed = support::seed(GENERATE(range<std::uint64_t>(1, 11)));
    CAPTURE(seed);
    support::random any(seed);
    const auto g = support::random_graph(any, 2 + static_cast<std::uint32_t>(any.below(25)));
    auto hidden = g;  // of some values nobody knows the size before
    for (auto& v : hidden.values)
        if (v.kind != gpushare::graph::value_kind::input && any.one_in(3)) v.shape[0].extent = -1;
    for (const model_graph* known : std::array<const model_graph*, 2>{&g, &hidden}) {
        const auto plan = cut_at(*known, random_cuts(any, g));
        toy_engine engine(g);
        load(engine, plan);
        cut_model model(t.chat, *known, plan, engine, {.ahead = 1 + static_cast<std::uint32_t>(any.below(3))});
        CHECK(model.pieces() == plan.pieces.size());
        for (int run = 0; run < 2; ++run) {
            example e(g);
            model.run(e.in, e.out);
            CHECK(e.right());
        }
        CHECK(engine.runs == static_cast<int>(2 * plan.pieces.size()));
    }
    CHECK(t.charged() == 0);
}

TEST_CASE("values between pieces share the tenant's memory, and outputs can be the caller's", "[graph]") {
    one_tenant t;
    const auto g = chain();
    const auto plan = cut_at(g, {1, 2, 3});
    toy_engine engine(g);
    load(engine, plan);
    {
        cut_model model(t.chat, g, plan, engine);
        CHECK(model.held() == bytes{2 * 256});  // a and c are never there together
        CHECK(t.charged() > 0);
        example e(g);
        model.run(e.in, e.out);
        CHECK(e.right());
        CHECK(model.held() == bytes{2 * 256 + 100});
        std::vector<unsigned char> mine(100);
        e.out[0] = {.data = mine.data(), .capacity = mine.size()};
        model.run(e.in, e.out);
        CHECK(e.out[0].data == mine.data());
        CHECK(mine == e.expected[0]);
        e.out[0] = {.data = mine.data(), .capacity = 99};
        CHECK_THROWS_AS(model.run(e.in, e.out), gpushare::operation_error);
        e.out[0] = {};
        model.run(e.in, e.out);
        CHECK(e.right());
    }
    CHECK(t.charged() == 0);
    auto tight = t.shared.admit({.name = "tight", .memory = bytes{256}, .compute = 10_pct});
    CHECK_THROWS_AS((cut_model(tight, g, plan, engine)), gpushare::memory_error);
}

TEST_CASE("an output of an earlier run is no buffer of the caller's", "[graph]") {
    one_tenant t;
    auto g = chain();
    auto open = g;  // only a run tells how large the output is
    const auto y = g.outputs[0];
    open.values[y].shape[0].extent = -1;
    const auto plan = cut_at(open, {2});
    toy_engine engine(g);
    load(engine, plan);
    {
        cut_model model(t.chat, open, plan, engine);
        std::vector<tensor> out(1);
        for (const std::int64_t size : {100, 300, 50, 400}) {
            CAPTURE(size);
            g.values[y].shape[0].extent = size;
            example e(g);
            e.out = out;
            model.run(e.in, e.out);
            CHECK(e.out[0].size() == static_cast<std::size_t>(size));
            CHECK(e.right());
            out = e.out;
        }
        CHECK(model.held() == bytes{256 + 400});
        example e(g);
        engine.fails = 1;
        CHECK_THROWS(model.run(e.in, out));
        CHECK(out[0].data == nullptr);  // the block may be gone
    }
    CHECK(t.charged() == 0);
}

TEST_CASE("a tensor whose room throws has no memory", "[graph]") {
    one_tenant t;
    {
        gpushare::graph::tensor_blocks blocks(t.chat.memory(), 1);
        tensor to{.room = &blocks};
        void* const first = to.place(element::u8, {1000});
        CHECK(blocks.holds(0, first));
        CHECK_THROWS_AS(to.place(element::u8, {std::int64_t{1} << 30}), gpushare::memory_error);
        CHECK(to.data == nullptr);
        CHECK(blocks.size() == bytes{});
        CHECK_FALSE(blocks.holds(0, to.data));
        to.place(element::u8, {10});
        CHECK(blocks.holds(0, to.data));
        CHECK(blocks.size() == bytes{10});
    }
    CHECK(t.charged() == 0);
}

TEST_CASE("an output that is there twice is in both of the caller's buffers", "[graph]") {
    one_tenant t;
    auto g = chain();
    g.outputs.push_back(g.outputs[0]);
    REQUIRE(wrong(g).empty());
    const auto plan = cut_at(g, {2});
    toy_engine engine(g);
    load(engine, plan);
    cut_model model(t.chat, g, plan, engine);
    example e(g);
    std::vector<unsigned char> first(100), second(100);
    for (const bool both : {true, false}) {
        CAPTURE(both);
        std::ranges::fill(first, static_cast<unsigned char>(0));
        e.out[0] = {element::u8, {100}, first.data(), 100};
        e.out[1] = both ? tensor{element::u8, {100}, second.data(), 100} : tensor{};
        model.run(e.in, e.out);
        CHECK(e.right());
        CHECK(first == e.expected[0]);
        CHECK(e.out[0].data == first.data());
    }
    CHECK(second == e.expected[0]);
}

TEST_CASE("an output that is an input leaves the input of an earlier run alone", "[graph]") {
    one_tenant t;
    auto g = chain();
    g.outputs.push_back(g.inputs[0]);
    REQUIRE(wrong(g).empty());
    const auto plan = cut_at(g, {2});
    toy_engine engine(g);
    load(engine, plan);
    cut_model model(t.chat, g, plan, engine);
    example first(g), second(g);
    std::ranges::fill(second.given[0], static_cast<unsigned char>(9));
    const auto before = first.given[0];
    model.run(first.in, first.out);
    CHECK(first.out[1].data == first.given[0].data());
    second.out = first.out;  // the same array for all runs
    model.run(second.in, second.out);
    CHECK((first.given[0] == before));
    CHECK(second.out[1].data == second.given[0].data());
    std::vector<unsigned char> mine(100);
    second.out[1] = {.data = mine.data(), .capacity = mine.size()};
    model.run(second.in, second.out);
    CHECK(second.out[1].data == mine.data());
    CHECK((mine == second.given[0]));
}

TEST_CASE("each piece is a submission with a key and a length of its own", "[graph]") {
    one_tenant t;
    const auto g = chain();
    const auto plan = cut_at(g, {1, 2, 3});
    toy_engine engine(g);
    load(engine, plan);
    cut_model model(t.chat, g, plan, engine,
                    {.submit = {.key = 70, .width = gpushare::sm_width::of_sms(1, 2)}, .declare_lengths = true});
    example e(g);
    const auto before = t.chat.usage().completed;
    model.run(e.in, e.out);
    CHECK(t.chat.usage().completed == before + 4);
}

namespace {

/// A tenant that notes the options of what is submitted.
struct noting {
    using stream = tenancy::tenant::stream;
    using memory_type = tenancy::tenant::memory_type;
    struct request_type {
        auto submit(gpushare::submission_work<stream> work, const gpushare::submit_options& o = {}) {
            to->push_back(o);
            return of.submit(std::move(work), o);
        }
        decltype(std::declval<tenancy::tenant&>().request({}, 0)) of;
        std::vector<gpushare::submit_options>* to;
    };
    [[nodiscard]] auto& memory(std::size_t part) const { return whose->memory(part); }
    [[nodiscard]] auto name() const { return whose->name(); }
    auto request(const gpushare::request_options& o, std::size_t part) {
        return request_type{whose->request(o, part), &noted};
    }
    auto submit(gpushare::submission_work<stream> work, const gpushare::submit_options& o,
                gpushare::submission_callback on_done, std::size_t part) {
        return whose->submit(std::move(work), o, std::move(on_done), part);
    }
    tenancy::tenant* whose;
    std::vector<gpushare::submit_options> noted{};
};

}  // namespace

TEST_CASE("the limiter is told the key, the length and the deadline of each piece", "[graph]") {
    one_tenant t;
    const auto g = chain();
    auto plan = cut_at(g, {1, 2});
    plan.pieces[1].takes = 4ms;
    plan.pieces[2].takes = gpushare::ns::max();  // of a text that somebody wrote
    toy_engine engine(g);
    load(engine, plan);
    noting to{&t.chat};
    const auto width = gpushare::sm_width::of_sms(1, 2);
    example e(g);
    const auto deadline = t.n.get_clock().now() + 1h;
    cut_model told(to, g, plan, engine, {.submit = {.key = 70, .width = width}, .declare_lengths = true});
    told.run(e.in, e.out, {.deadline = deadline});
    REQUIRE(to.noted.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(to.noted[i].key == 70 + i);
        CHECK(to.noted[i].deadline == deadline);
    }
    CHECK(to.noted[0].cost == 500us);
    CHECK(to.noted[1].cost == 2ms);
    CHECK(to.noted[2].cost > 1h);
    CHECK(to.noted[2].cost < gpushare::ns::max() / 2);
    to.noted.clear();
    cut_model untold(to, g, plan, engine, {.submit = {.key = 70, .width = width}});
    untold.run(e.in, e.out);
    REQUIRE(to.noted.size() == 3);
    CHECK(to.noted[1].key == 71);
    CHECK(to.noted[1].cost == gpushare::ns{});
}

TEST_CASE("a model runs on the device of its tenant that is asked for", "[graph]") {
    node n{{.devices = 2, .memory = 64_MiB, .sms = 1}};
    tenancy shared{n};
    auto chat = shared.admit({.name = "chat", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    const auto g = chain();
    const auto plan = cut_at(g, {2});
    toy_engine engine(g);
    load(engine, plan);
    cut_model model(chat, g, plan, engine, {.part = 1});
    CHECK(chat.memory(0).free() == chat.memory(0).capacity());
    CHECK(chat.memory(1).free() < chat.memory(1).capacity());
    example e(g);
    model.run(e.in, e.out);
    CHECK(e.right());
    const toy_model toy{g};
    gpushare::operator_table table;
    gpushare::graph::piece_measurer times(chat, toy, engine, table, {.part = 1});
    times.run_nodes(e.in);
    CHECK(chat.memory(0).free() == chat.memory(0).capacity());
    CHECK(code_of([&] { cut_model(chat, g, plan, engine, {.part = 2}); }) == errc::no_device);
}

TEST_CASE("urgent work gets in between the pieces of a model", "[graph]") {
    node n{{.devices = 1, .memory = 64_MiB, .sms = 1}};
    tenancy shared{n};
    auto pages = shared.admit({.name = "pages", .memory = 16_MiB, .compute = 50_pct});
    auto voice = shared.admit({.name = "voice", .memory = 16_MiB, .compute = 50_pct, .level = gpushare::priority{1}});
    const auto g = chain();
    const auto plan = cut_at(g, {1, 2, 3});
    toy_engine engine(g);
    load(engine, plan);
    int seen = -1;
    std::vector<tenancy::tenant::ticket> urgent;
    engine.before = [&](std::uint32_t piece) {  // on the SM, while the piece runs
        if (piece == 1)
            urgent.push_back(
                voice.submit([&](auto& to) { to.launch({.blocks = 1}, [&](const auto&) { seen = engine.runs; }); }));
    };
    cut_model model(pages, g, plan, engine, {.ahead = 1});
    example e(g);
    model.run(e.in, e.out);
    CHECK(e.right());
    REQUIRE(urgent.size() == 1);
    CHECK(urgent[0].wait());
    CHECK(seen >= 2);
    CHECK(seen < 4);
}

TEST_CASE("a piece that fails ends its run and nothing else", "[graph]") {
    one_tenant t;
    const auto g = chain();
    const auto plan = cut_at(g, {1, 2, 3});
    toy_engine engine(g);
    load(engine, plan);
    {
        cut_model model(t.chat, g, plan, engine, {.ahead = 4});
        example e(g);
        engine.fails = 1;
        CHECK_THROWS_WITH(model.run(e.in, e.out), Catch::Contains("piece 1 fails") && Catch::Contains("'chat'"));
        engine.fails = toy_engine::none;
        engine.throws_when_enqueued = 2;
        CHECK_THROWS_WITH(model.run(e.in, e.out), Catch::Contains("no such piece today"));
        engine.throws_when_enqueued = toy_engine::none;
        model.run(e.in, e.out);
        CHECK(e.right());
        CHECK(code_of([&] { model.run({}, e.out); }) == errc::invalid_specification);
        t.chat.close();
        CHECK(code_of([&] { model.run(e.in, e.out); }) == errc::closed);
    }
}

TEST_CASE("a plan for another graph is refused, and so is a cut through what is no tensor", "[graph]") {
    one_tenant t;
    const auto g = chain();
    auto other = g;
    other.values[2].shape[0].extent = 101;
    toy_engine engine(g);
    CHECK(code_of([&] { cut_model(t.chat, g, cut_at(other, {}), engine); }) == errc::invalid_specification);
    auto sequence = g;
    sequence.values[2].tensor = false;
    CHECK(code_of([&] { cut_model(t.chat, sequence, cut_at(sequence, {2}), engine); }) == errc::not_supported);
    cut_model(t.chat, sequence, cut_at(sequence, {1, 3}), engine);
}

TEST_CASE("pieces are measured once, and what the values' shapes are is learnt by it", "[graph]") {
    one_tenant t;
    const auto g = chain();
    toy_model model{g};
    for (auto& v : model.g.values)
        if (v.kind != gpushare::graph::value_kind::input) v.shape[0].extent = -1;
    toy_engine engine(g);
    gpushare::operator_table table;
    const example e(g);
    gpushare::graph::piece_measurer times(t.chat, model, engine, table,
                                          {.engine = "toy", .warm_up = 2, .repeats = 3, .submit = {.key = 5}});
    times.run_nodes(e.in);
    CHECK(engine.runs == 4 * 5);
    CHECK(times.graph() == g);
    CHECK(times.nodes().size() == 4);
    CHECK(table.rows().size() == 4);
    const std::vector<std::uint32_t> two{1, 2}, one{1};
    const auto took = times.measure(two);
    REQUIRE(took);
    CHECK(engine.runs == 5 * 5);
    CHECK(times.measure(two) == took);
    CHECK(times.measure(one) == times.nodes()[1]);
    CHECK(engine.runs == 5 * 5);
    CHECK(table.rows().front().operation == "piece/toy");
    CHECK(gpushare::operator_table::load(table.save()) == table);
    gpushare::graph::piece_measurer again(t.chat, model, engine, table,
                                          {.engine = "other", .warm_up = 0, .repeats = 1});
    again.run_nodes(e.in);
    CHECK(engine.runs == 5 * 5 + 4);
    CHECK(again.measure(two));
    CHECK(engine.runs == 5 * 5 + 5);
    CHECK(code_of([&] { again.run_nodes({}); }) == errc::invalid_specification);
}
