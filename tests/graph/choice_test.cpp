// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Pieces of models run on the fastest engine that computes them correctly. Engines with some fault
// are named and left out.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/serving/operator_selection.hpp>

#include "graph/synthetic.hpp"
#include "support/catch.hpp"
#include "support/host_tenants.hpp"

namespace {

using namespace support::host_tenants;
using gpushare::ns;
using gpushare::graph::element;
using gpushare::graph::model_error;
using gpushare::graph::model_graph;
using gpushare::graph::split_plan;
using gpushare::graph::tensor;
using node_list = std::vector<std::uint32_t>;

constexpr std::size_t numbers = 25;  // of a value
constexpr std::uint32_t nodes = 6;

/// Nodes that each add 1 to all numbers.
model_graph chain() {
    support::graph_builder b;
    auto v = b.input(numbers * sizeof(float));
    for (std::uint32_t i = 0; i < nodes; ++i) v = b.node("Add", {v}, numbers * sizeof(float));
    auto& g = b.output(v).graph();
    for (auto& each : g.values) {
        each.type = element::f32;
        each.shape = {{.extent = numbers}};
    }
    return g;
}
struct chain_model {
    model_graph g = chain();
    [[nodiscard]] const model_graph& graph() const { return g; }
    [[nodiscard]] static node_list extract(std::span<const std::uint32_t> of) { return {of.begin(), of.end()}; }
};

/// Computes pieces of the chain, each node in its time, and may do wrong what has more nodes than
/// one, or any piece.
class chain_engine {
public:
    using results = std::span<float>;
    std::function<ns(std::uint32_t node)> takes = [](std::uint32_t) { return ns(2ms); };
    std::function<void(const node_list&)> when_added = [](const node_list&) {};
    std::function<void(const node_list&)> when_enqueued = [](const node_list&) {};
    std::function<void(const node_list&, tensor&)> when_run = [](const node_list&, tensor&) {};
    int runs = 0;

    std::uint32_t add(const node_list& piece) {
        when_added(piece);
        pieces_.push_back(piece);
        return static_cast<std::uint32_t>(pieces_.size() - 1);
    }
    void remove_last() { pieces_.pop_back(); }
    [[nodiscard]] std::size_t size() const { return pieces_.size(); }

    template <gpushare::launcher Stream>
    void enqueue(Stream& to, std::uint32_t number, std::span<const tensor* const> in, std::span<tensor* const> out) {
        when_enqueued(pieces_.at(number));
        ns all{};
        for (const auto n : pieces_.at(number)) all += takes(n);
        to.launch({.blocks = 1, .hold = all}, [this, number, in, out](const auto&) {
            ++runs;
            const auto& piece = pieces_.at(number);
            std::array<float, numbers> x{};
            std::memcpy(x.data(), in[0]->data, sizeof x);
            for (float& each : x) each += static_cast<float>(piece.size());
            tensor result{element::f32, {numbers}, x.data(), sizeof x};
            when_run(piece, result);
            if (result.data == nullptr) return;
            std::memcpy(out[0]->place(result.type, result.shape), x.data(), std::min(result.size(), sizeof x));
        });
    }

private:
    std::vector<node_list> pieces_;
};

/// What engines do to results.
void change(tensor& t, const std::function<void(float&, std::size_t)>& by) {
    for (std::size_t i = 0; i < numbers; ++i) by(static_cast<float*>(t.data)[i], i);
}

struct rig {
    rig() {
        std::iota(given.begin(), given.end(), 1.0F);
        engines.add("first", first);
        engines.add("second", second);
    }
    /// Of seven runs four would have to be late for another engine to be chosen.
    auto chooser(gpushare::graph::choice_options o = {.measure = {.warm_up = 0, .repeats = 7}}) {
        return gpushare::graph::piece_chooser(chat, model, engines, table, o);
    }
    [[nodiscard]] std::span<const tensor> inputs() const { return in; }

    node n{modelled(1)};
    tenancy shared{n};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 32_MiB, .compute = 50_pct});
    chain_model model;
    chain_engine first, second;
    gpushare::graph::engine_set<host::stream, node_list> engines;
    gpushare::operator_table table;
    std::array<float, numbers> given{};
    std::array<tensor, 1> in{tensor{element::f32, {numbers}, given.data(), sizeof given}};
};
ns quickly(std::uint32_t) { return 1ms; }

/// Each node a piece.
split_plan single_nodes(const model_graph& g) {
    split_plan p{.of_graph = fingerprint(g), .limit = 5ms};
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n) {
        p.order.push_back(n);
        p.pieces.push_back({{n, n + 1}});
    }
    return p;
}

}  // namespace

TEST_CASE("each piece runs on the engine that is fastest there", "[graph]") {
    rig r;
    r.second.takes = [](std::uint32_t n) { return ns(n % 2 == 0 ? 500us : 8ms); };
    split_plan plan;
    {
        auto choice = r.chooser();
        choice.run_nodes(r.inputs());
        plan = choice.chosen(single_nodes(choice.graph()));
        for (std::uint32_t n = 0; n < nodes; ++n) CHECK(plan.pieces[n].engine == (n % 2 == 0 ? "second" : "first"));
        CHECK(plan.pieces[0].takes < plan.pieces[1].takes);
        CHECK(choice.left_out().empty());
        CHECK(r.engines.size() == 0);

        r.engines.load(r.model, plan);
        gpushare::graph::cut_model model(r.chat, choice.graph(), plan, r.engines);
        std::vector<tensor> out(1);
        const int before = r.second.runs;
        model.run(r.in, out);
        CHECK(r.second.runs == before + 3);
        CHECK(static_cast<const float*>(out[0].data)[24] == 25 + nodes);
        CHECK(choice.difference(out).empty());
        CHECK(choice.difference({}) == "another number of outputs");
    }
    r.engines.clear();
    r.table = gpushare::operator_table::load(r.table.save());
    const int before = r.second.runs;
    int added = 0;
    r.second.when_added = [&](const node_list&) { ++added; };
    auto again = r.chooser();
    again.run_nodes(r.inputs());
    CHECK(again.chosen(single_nodes(again.graph())) == plan);
    CHECK(added == 0);  // all of it is in the table
    CHECK(r.second.runs == before);
    CHECK(r.table.rows().front().operation == "choice/first+second");
}

TEST_CASE("an engine that is wrong is named and left out, and one that rounds isn't", "[graph]") {
    using fault = std::pair<const char*, std::function<void(const node_list&, tensor&)>>;
    const std::array<fault, 7> faults{
        fault{"and should be", [](auto&, tensor& t) { change(t, [](float& x, std::size_t i) { x += i == 7; }); }},
        fault{"nan and should be",
              [](auto&, tensor& t) {
                  change(t, [](float& x, std::size_t i) {
                      if (i == 24) x = std::numeric_limits<float>::quiet_NaN();
                  });
              }},
        fault{"inf and should be",
              [](auto&, tensor& t) {
                  change(t, [](float& x, std::size_t) { x = std::numeric_limits<float>::infinity(); });
              }},
        fault{"nan and should be", [](auto&, tensor& t) { t.data = nullptr; }},  // nothing is written
        fault{"no such piece", [](auto&, tensor&) { throw std::runtime_error("no such piece today"); }},
        fault{"wrong", [](auto&, tensor& t) { t.shape = {numbers - 1}; }},
        fault{"buffer", [](auto&, tensor& t) { t.shape = {numbers + 1}; }}};
    for (const auto& [why, what] : faults) {
        CAPTURE(why);
        rig r;
        r.second.takes = quickly;
        r.second.when_run = what;
        auto choice = r.chooser();
        choice.run_nodes(r.inputs());
        const node_list piece{2, 3};
        const auto best = choice.choose(piece);
        REQUIRE(best);
        CHECK(best->candidate == "first");
        REQUIRE(choice.left_out().size() == 1);
        CHECK(choice.left_out()[0].engine == "second");
        CHECK(choice.left_out()[0].nodes == piece);
        CHECK_THAT(choice.left_out()[0].why, Catch::Contains(why));
        // What it left behind isn't what the next piece gets.
        r.second.when_run = [](auto&, tensor&) {};
        CHECK(choice.choose(node_list{4})->candidate == "second");
    }
    rig r;
    r.second.takes = quickly;
    r.second.when_run = [](auto&, tensor& t) { change(t, [](float& x, std::size_t) { x *= 1.0005F; }); };
    auto choice = r.chooser();
    choice.run_nodes(r.inputs());
    CHECK(choice.choose(node_list{2, 3})->candidate == "second");
    auto exact = r.chooser({.within = {}, .of_largest = 0, .measure = {.warm_up = 0, .repeats = 7}});
    r.table = {};
    exact.run_nodes(r.inputs());
    CHECK(exact.choose(node_list{2, 3})->candidate == "first");
}

TEST_CASE("small numbers beside large ones may be off by a part of the largest", "[graph]") {
    rig r;
    r.given[3] = 1e6F;
    r.second.takes = quickly;
    r.second.when_run = [](auto&, tensor& t) { change(t, [](float& x, std::size_t i) { x += i == 0 ? 50.F : 0.F; }); };
    auto choice = r.chooser({.of_largest = 1e-4, .measure = {.warm_up = 0, .repeats = 7}});
    choice.run_nodes(r.inputs());
    CHECK(choice.choose(node_list{2})->candidate == "second");
    r.second.when_run = [](auto&, tensor& t) { change(t, [](float& x, std::size_t i) { x += i == 0 ? 200.F : 0.F; }); };
    CHECK(choice.choose(node_list{3})->candidate == "first");
}

TEST_CASE("a NaN of the first engine is right as a NaN", "[graph]") {
    rig r;
    r.given[5] = std::numeric_limits<float>::quiet_NaN();
    r.second.takes = quickly;
    auto choice = r.chooser();
    choice.run_nodes(r.inputs());
    CHECK(choice.choose(node_list{1})->candidate == "second");
}

TEST_CASE("an infinity excuses no other number", "[graph]") {
    rig r;
    r.given[5] = std::numeric_limits<float>::infinity();
    r.second.takes = quickly;
    auto choice = r.chooser();
    choice.run_nodes(r.inputs());
    CHECK(choice.choose(node_list{1})->candidate == "second");
    r.second.when_run = [](auto&, tensor& t) { change(t, [](float& x, std::size_t i) { x += i == 7; }); };
    CHECK(choice.choose(node_list{2})->candidate == "first");
}

TEST_CASE("of engines that are equally fast one is chosen, and stays chosen", "[graph]") {
    rig r;
    auto choice = r.chooser({.measure = {.warm_up = 1, .repeats = 4}});
    choice.run_nodes(r.inputs());
    const node_list piece{1, 2};
    const auto best = choice.choose(piece);
    REQUIRE(best);
    CHECK(best->candidates == 2);
    CHECK(r.second.runs == 1 + 4);
    (best->candidate == "first" ? r.second : r.first).takes = [](std::uint32_t) { return ns(1us); };
    CHECK(choice.choose(piece) == best);
    auto again = r.chooser();
    again.run_nodes(r.inputs());
    CHECK(again.choose(piece) == best);
    r.table.forget(best->operation, best->shape);
    CHECK(again.choose(piece) != best);
}

TEST_CASE("an engine that refuses a piece is left out, and a piece that none takes is cut", "[graph]") {
    rig r;
    const auto refuse = [](const node_list& piece) {
        if (piece.size() > 1 && piece.size() < nodes) throw std::runtime_error("one by one, please");
    };
    r.second.takes = quickly;
    r.second.when_added = refuse;
    auto choice = r.chooser();
    choice.run_nodes(r.inputs());
    CHECK(choice.choose(node_list{1, 2})->candidate == "first");
    CHECK(choice.left_out()[0].why == "one by one, please");
    r.first.when_added = refuse;
    CHECK_FALSE(choice.measure(node_list{2, 3}));
    r.first.when_added = [](auto&) {};
    r.first.when_run = [](const node_list& piece, tensor& t) {
        if (piece.size() > 1) t.shape = {1};
    };
    CHECK_FALSE(choice.measure(node_list{3, 4}));
    CHECK(choice.measure(node_list{1, 2}));  // as the table has it
    auto plan = single_nodes(choice.graph());
    plan.pieces = {{{0, 3}}, {{3, 5}}, {{5, 6}}};
    CHECK_THROWS_WITH(choice.chosen(plan),
                      Catch::Contains("first: its results are wrong") && Catch::Contains("second: one by one, please"));
    r.second.when_added = [](const node_list& piece) {
        if (piece.size() > 1) throw std::runtime_error("one by one, please");
    };
    gpushare::graph::split_planner planner(choice.graph(), choice.nodes(), {.limit = 100ms, .measurements = 1000});
    plan = choice.chosen(refine(planner, [&](auto piece) { return choice.measure(piece); }));
    for (const auto& p : plan.pieces) CHECK((p.places.size() == 1 || p.places == gpushare::graph::node_range{1, 3}));
}

TEST_CASE("pieces that a faster engine leaves short are joined as long as they keep the limit", "[graph]") {
    rig r;
    r.first.takes = [](std::uint32_t) { return ns(12ms); };
    r.second.takes = [](std::uint32_t n) { return n < 3 ? ns(3ms) : ns(60ms); };
    auto choice = r.chooser({.measure = {.warm_up = 0, .repeats = 3}});
    choice.run_nodes(r.inputs());
    gpushare::graph::split_planner planner(choice.graph(), choice.nodes(), {.limit = 21ms, .per_piece = 20us});
    const auto plan = choice.chosen(refine(planner, [&](auto piece) { return choice.measure(piece); }));
    REQUIRE(plan.pieces.size() == 4);
    CHECK(plan.pieces[0].places.behind == 3);
    CHECK(plan.pieces[0].engine == "second");
    for (std::size_t i = 1; i < 4; ++i) CHECK(plan.pieces[i].engine == "first");
    CHECK(gpushare::graph::parse_split_plan(to_text(plan, choice.graph()), choice.graph()) == plan);
}

TEST_CASE("the errors of pieces add up, and show at the end", "[graph]") {
    rig r;
    r.second.takes = quickly;
    r.second.when_run = [](auto&, tensor& t) { change(t, [](float& x, std::size_t) { x *= 1.0009F; }); };
    auto choice = r.chooser();
    choice.run_nodes(r.inputs());
    const auto run = [&](const split_plan& plan) {
        r.engines.load(r.model, plan);
        gpushare::graph::cut_model model(r.chat, choice.graph(), plan, r.engines);
        std::vector<tensor> out(1);
        model.run(r.in, out);
        auto text = choice.difference(out);
        r.engines.clear();
        return text;
    };
    auto plan = choice.chosen(single_nodes(choice.graph()));
    CHECK(plan.pieces[0].engine == "second");
    CHECK_THAT(run(plan), Catch::Contains("should be"));
    for (auto& p : plan.pieces) p.engine = "first";
    CHECK(run(plan).empty());
    plan.pieces[3].engine = "third";
    CHECK_THROWS_AS(r.engines.load(r.model, plan), model_error);
    CHECK(r.engines.size() == 0);
    CHECK(r.first.size() + r.second.size() == 0);
    for (auto& p : plan.pieces) p.engine.clear();  // the first, where nobody chose
    const int before = r.second.runs;
    CHECK(run(plan).empty());
    CHECK(r.second.runs == before);
}

TEST_CASE("an engine that contradicts itself is no measure of others", "[graph]") {
    rig r;
    r.first.when_run = [](const node_list& piece, tensor& t) {
        if (piece.size() == nodes) change(t, [](float& x, std::size_t i) { x += i == 9; });
    };
    auto choice = r.chooser();
    CHECK_THROWS_WITH(choice.run_nodes(r.inputs()), Catch::Contains("element 9"));
    CHECK(r.first.size() == 0);
}

TEST_CASE("a model with an output that is a weight is refused before anything runs", "[graph]") {
    rig r;
    auto& g = r.model.g;
    g.values.push_back({.name = "constant",
                        .type = element::f32,
                        .shape = {{.extent = numbers}},
                        .kind = gpushare::graph::value_kind::weight,
                        .ranked = true});
    g.outputs.push_back(static_cast<std::uint32_t>(g.values.size() - 1));
    REQUIRE(wrong(g).empty());
    auto choice = r.chooser();
    CHECK_THROWS_WITH(choice.run_nodes(r.inputs()), Catch::Contains("'constant': an output that is a weight"));
    CHECK(r.first.runs == 0);
}

TEST_CASE("a tenant that is closed is no engine's fault", "[graph]") {
    rig r;
    auto choice = r.chooser();
    choice.run_nodes(r.inputs());
    r.chat.close();
    CHECK(code_of([&] { (void)choice.measure(node_list{1}); }) == errc::closed);
    CHECK(choice.left_out().empty());
    CHECK(r.engines.size() == 0);
}

TEST_CASE("a tenant that can't load a piece is no engine's fault", "[graph]") {
    rig r;
    r.second.takes = quickly;
    r.second.when_added = [&](const node_list&) {
        constexpr std::size_t size = std::size_t{1} << 30;
        r.chat.memory().deallocate(r.chat.memory().allocate(size, 256), size, 256);
    };
    auto choice = r.chooser();
    choice.run_nodes(r.inputs());
    const node_list piece{1, 2};
    CHECK_THROWS_AS(choice.choose(piece), gpushare::memory_error);
    r.second.when_added = [&](const node_list&) {  // as an engine that copies its constants
        const auto ticket = r.chat.submit([](auto&) { throw gpushare::operation_error(errc::asleep, {}, "asleep"); });
        (void)ticket.wait();
        ticket.rethrow();
    };
    CHECK_THROWS_WITH(choice.choose(piece), Catch::Contains("asleep"));
    CHECK(choice.left_out().empty());
    CHECK(r.engines.size() == 0);
    r.second.when_added = [](const node_list&) {};
    r.first.takes = [](std::uint32_t) { return ns(20ms); };  // slower, however late a thread is
    CHECK(choice.choose(piece)->candidate == "second");      // nothing slower is in the table
    r.second.when_added = [&](const node_list&) {
        r.chat.close();
        (void)r.chat.submit([](auto&) {});
    };
    CHECK(code_of([&] { (void)choice.choose(node_list{3}); }) == errc::closed);
    CHECK(choice.left_out().empty());
}

TEST_CASE("a piece that an engine refuses when it runs has no time, and is cut", "[graph]") {
    const model_error refusal(gpushare::graph::model_fault::engine, "Add1", "one by one, please");
    rig r;
    gpushare::graph::piece_measurer times(r.chat, r.model, r.first, r.table, {.warm_up = 0, .repeats = 1});
    times.run_nodes(r.inputs());
    const auto refuse = [&](const node_list& piece) {
        if (piece.size() > 1) throw refusal;
    };
    SECTION("on the device") {
        r.first.when_run = [&](const node_list& piece, tensor&) { refuse(piece); };
    }
    SECTION("when it is enqueued") { r.first.when_enqueued = refuse; }
    CHECK_FALSE(times.measure(node_list{1, 2}));
    CHECK(times.measure(node_list{1}));
    gpushare::graph::split_planner planner(times.graph(), times.nodes(), {.limit = 5ms, .measurements = 1000});
    const auto plan = refine(planner, [&](auto piece) { return times.measure(piece); });
    CHECK(plan.pieces.size() == nodes);
    r.first.when_run = [](const node_list&, tensor&) { throw std::runtime_error("broken"); };
    r.first.when_enqueued = [](const node_list&) {};
    CHECK_THROWS_WITH(times.measure(node_list{3, 4}), Catch::Contains("broken"));
    CHECK(r.first.size() == 0);
}

TEST_CASE("engines have names of their own that a plan's text can hold", "[graph]") {
    rig r;
    for (const char* bad : {"", "a b", "first", "tab\t", "back\\slash"})
        CHECK(code_of([&] { r.engines.add(bad, r.first); }) == errc::invalid_specification);
    gpushare::graph::engine_set<host::stream, node_list> none;
    CHECK(code_of([&] { gpushare::graph::piece_chooser(r.chat, r.model, none, r.table); }) ==
          errc::invalid_specification);
    const auto plan = single_nodes(r.model.g);
    CHECK_THROWS_AS(none.load(r.model, plan), model_error);
}
