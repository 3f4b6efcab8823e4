// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Models in ONNX's format: their graphs, pieces that are models again, and refusals, which name the
// node.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include <gpushare/error.hpp>
#include <gpushare/graph/detail/spelt_norms.hpp>
#include <gpushare/graph/onnx.hpp>
#include <gpushare/graph/plan_text.hpp>

#include "graph/onnx_models.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

namespace fs = std::filesystem;
using gpushare::graph::edges_of;
using gpushare::graph::import_options;
using gpushare::graph::model_error;
using gpushare::graph::model_fault;
using gpushare::graph::node_range;
using gpushare::graph::onnx_model;
using gpushare::graph::value_kind;
using support::onnx_builder;

std::uint32_t value_named(const gpushare::graph::model_graph& g, const std::string& name) {
    const auto at = std::ranges::find(g.values, name, &gpushare::graph::value::name);
    REQUIRE(at != g.values.end());
    return static_cast<std::uint32_t>(at - g.values.begin());
}
std::vector<std::string> names(const gpushare::graph::model_graph& g, const std::vector<std::uint32_t>& values) {
    std::vector<std::string> all;
    for (const auto v : values) all.push_back(g.values[v].name);
    return all;
}
/// The fault and the node that a model is refused for.
std::pair<model_fault, std::string> refusal(const std::string& bytes, const import_options& o = {}) {
    try {
        (void)onnx_model::parse(bytes, o);
    } catch (const model_error& e) {
        INFO(e.what());
        CHECK(std::string(e.what()).find(e.node()) != std::string::npos);
        CHECK(e.code() == gpushare::graph::code_of(e.fault()));
        return {e.fault(), e.node()};
    }
    FAIL("it was taken");
    return {};
}
using refused = std::pair<model_fault, std::string>;

/// A folder that goes with the test.
struct folder {
    folder() { fs::create_directories(path / "inside"); }
    ~folder() { fs::remove_all(path); }
    const fs::path path = fs::temp_directory_path() / ("gpushare_onnx_" + std::to_string(getpid()));
};

/// x (of 4 floats) + w, whose bytes are in a file.
onnx_builder with_file(const std::string& location, const char* offset, const char* length) {
    onnx_builder b;
    b.input("x", {4}).weight("w", {4}).node("Add", {"x", "w"}, {"y"}).output("y", {4});
    auto& w = *b.m.mutable_graph()->mutable_initializer(0);
    w.clear_float_data();
    w.set_data_location(onnx::TensorProto::EXTERNAL);
    const auto say = [&](const char* key, const std::string& text) {
        auto& e = *w.add_external_data();
        e.set_key(key);
        e.set_value(text);
    };
    say("location", location);
    if (offset != nullptr) say("offset", offset);
    if (length != nullptr) say("length", length);
    return b;
}

}  // namespace

TEST_CASE("a model becomes a graph, without what depends on weights alone", "[graph][onnx]") {
    const auto model = onnx_model::parse(support::two_layers().bytes(), {.sizes = {{"n", 3}}});
    const auto& g = model.graph();
    CHECK(wrong(g).empty());
    CHECK_FALSE(model.newer());
    CHECK(g.nodes.size() == 8);  // Identity of a weight and the shape's Concat aren't among them
    CHECK(names(g, g.inputs) == std::vector<std::string>{"x"});
    CHECK(names(g, g.outputs) == std::vector<std::string>{"y", "z"});
    CHECK(g.values[value_named(g, "w2")].kind == value_kind::weight);
    CHECK(g.values[value_named(g, "shape")].kind == value_kind::weight);
    CHECK(g.values[value_named(g, "c")].kind == value_kind::inner);
    CHECK(g.values[value_named(g, "y")].kind == value_kind::output);
    CHECK(g.values[value_named(g, "c")].size() == gpushare::bytes{3 * 8 * 4});

    const auto open = onnx_model::parse(support::two_layers().bytes());
    const auto& c = open.graph().values[value_named(open.graph(), "c")];
    CHECK_FALSE(c.size());
    CHECK(c.shape[0].symbol == "n");
    CHECK(c.shape[1].extent == 8);
    const auto given = onnx_model::parse(support::two_layers().bytes(), {.inputs = {{"x", {5, -1}}}});
    CHECK(given.graph().values[value_named(given.graph(), "c")].size() == gpushare::bytes{5 * 8 * 4});
}

TEST_CASE("a piece is a model with the graph's edges, and its own constants", "[graph][onnx]") {
    const auto model = onnx_model::parse(support::two_layers().bytes(), {.sizes = {{"n", 2}}});
    const auto& g = model.graph();
    const auto n = static_cast<std::uint32_t>(g.nodes.size());
    for (std::uint32_t first = 0; first < n; ++first)
        for (std::uint32_t behind = first + 1; behind <= n; ++behind) {
            CAPTURE(first, behind);
            const auto piece = onnx_model::parse(model.extract({first, behind}));
            const auto edges = edges_of(g, {first, behind});
            CHECK(piece.graph().nodes.size() == behind - first);
            CHECK(names(piece.graph(), piece.graph().inputs) == names(g, edges.inputs));
            CHECK(names(piece.graph(), piece.graph().outputs) == names(g, edges.outputs));
            for (std::uint32_t i = first; i < behind; ++i)
                CHECK(piece.graph().nodes[i - first].name == g.nodes[i].name);
        }
    // The shared weight is in both pieces that need it.
    CHECK(model.extract({0, 3}).size() > 8 * 8 * 4);
    CHECK(model.extract({3, 5}).size() > 8 * 8 * 4);
    CHECK(model.extract({7, 8}).size() < 8 * 8 * 4);

    const auto whole = onnx_model::parse(model.whole());
    CHECK(names(whole.graph(), whole.graph().outputs) == std::vector<std::string>{"y", "z"});
    CHECK(whole.graph().nodes.size() == n);

    const std::vector<std::uint32_t> apart{0, 4}, none, beyond{n};
    const auto both = onnx_model::parse(model.extract(apart));
    CHECK(both.graph().nodes.size() == 2);
    for (const auto& bad : {none, beyond}) CHECK_THROWS_AS(model.extract(bad), model_error);
    // at once, however many nodes the range names
    for (const node_range bad : {node_range{0, n + 1}, node_range{n, n + 1}, node_range{5, 5}, node_range{0, ~0U}})
        CHECK_THROWS_AS(model.extract(bad), model_error);
}

TEST_CASE("a branch is one node, which reads what its bodies take from outside", "[graph][onnx]") {
    onnx_builder b;
    b.input("x", {4}).weight("w", {4}).node("Relu", {"x"}, {"a"}).node("ReduceMax", {"a"}, {"m"});
    auto& keep = *b.m.mutable_graph()->mutable_node(1)->add_attribute();
    keep.set_name("keepdims");
    keep.set_type(onnx::AttributeProto::INT);
    keep.set_i(0);
    b.node("Greater", {"m", "m"}, {"yes"}).node("If", {"yes"}, {"y"}).output("y");
    for (const auto* which : {"then_branch", "else_branch"}) {
        auto& a = *b.m.mutable_graph()->mutable_node(3)->add_attribute();
        a.set_name(which);
        a.set_type(onnx::AttributeProto::GRAPH);
        a.mutable_g()->set_name(which);
        onnx_builder::add_node(*a.mutable_g(), "Add", {"a", "w"}, {"sum"});
        onnx_builder::describe(*a.mutable_g()->add_output(), "sum", {4});
    }
    const auto model = onnx_model::parse(b.bytes());
    const auto& g = model.graph();
    REQUIRE(g.nodes.size() == 4);
    CHECK(names(g, g.nodes[3].inputs) == std::vector<std::string>{"yes", "a", "w"});
    const auto piece = onnx_model::parse(model.extract({3, 4}));
    CHECK(names(piece.graph(), piece.graph().inputs) == names(g, edges_of(g, {3, 4}).inputs));
}

TEST_CASE("weights in files are read when a piece needs them, and only in the model's folder", "[graph][onnx]") {
    const folder f;
    std::ofstream(f.path / "inside" / "w.bin", std::ios::binary) << std::string(8, '?') << std::string(16, '\0');
    std::ofstream(f.path / "secret.bin", std::ios::binary) << std::string(24, 's');
    fs::create_symlink(f.path / "secret.bin", f.path / "inside" / "link.bin");
    const import_options here{.folder = f.path / "inside"};

    const auto model = onnx_model::parse(with_file("w.bin", "8", "16").bytes(), here);
    CHECK(onnx_model::parse(model.extract({0, 1})).graph().nodes.size() == 1);
    std::ofstream(f.path / "inside" / "m.onnx", std::ios::binary) << with_file("./w.bin", "8", nullptr).bytes();
    CHECK(onnx_model::load(f.path / "inside" / "m.onnx").graph().nodes.size() == 1);

    const refused outside{model_fault::external_data, "w"};
    for (const char* location : {"../secret.bin", "link.bin", "none.bin", "", ".", "x/../../secret.bin"}) {
        CAPTURE(location);
        CHECK(refusal(with_file(location, "0", "16").bytes(), here) == outside);
    }
    CHECK(refusal(with_file((f.path / "secret.bin").string(), "0", "16").bytes(), here) == outside);
    CHECK(refusal(with_file("w.bin", "9", "16").bytes(), here) == outside);
    CHECK(refusal(with_file("w.bin", "18446744073709551615", "16").bytes(), here) == outside);
    CHECK(refusal(with_file("w.bin", "eight", "16").bytes(), here) == outside);
    CHECK(refusal(with_file("w.bin", "8", "16").bytes()) == outside);  // no folder
    CHECK(refusal(with_file("w.bin", "8", "12").bytes(), here) == refused(model_fault::bad_weight, "w"));

    fs::remove(f.path / "inside" / "w.bin");
    CHECK_THROWS_AS(model.extract({0, 1}), model_error);
}

TEST_CASE("a model that can't be used is refused by what is wrong, with the node's name", "[graph][onnx]") {
    const auto good = support::two_layers();
    const auto broken = [&](auto change) {
        auto b = good;
        change(*b.m.mutable_graph(), b.m);
        return refusal(b.bytes());
    };
    using graph = onnx::GraphProto;
    using model = onnx::ModelProto;
    CHECK(refusal("") == refused(model_fault::unreadable, ""));
    CHECK(refusal(good.bytes().substr(0, good.bytes().size() / 2)) == refused(model_fault::unreadable, ""));
    CHECK(broken([](graph& g, model&) { g.mutable_node(2)->set_op_type("Relv"); }) ==
          refused(model_fault::unknown_operator, "Relu_2"));
    CHECK(broken([](graph& g, model&) { g.mutable_node(2)->set_domain("com.example"); }) ==
          refused(model_fault::unknown_operator, "Relu_2"));
    CHECK(broken([](graph& g, model&) { g.mutable_node(2)->add_input("a"); }) ==
          refused(model_fault::bad_node, "Relu_2"));
    CHECK(broken([](graph& g, model&) { g.mutable_node(2)->set_input(0, "nobody"); }) ==
          refused(model_fault::missing_value, "Relu_2"));
    CHECK(broken([](graph& g, model&) { g.mutable_output(0)->set_name("nobody"); }) ==
          refused(model_fault::missing_value, "nobody"));
    CHECK(broken([](graph& g, model&) { g.mutable_node(0)->set_input(0, "e"); }) ==
          refused(model_fault::cyclic, "MatMul_0"));
    CHECK(broken([](graph& g, model&) { g.mutable_node(2)->set_output(0, "b"); }) ==
          refused(model_fault::bad_model, "b"));
    CHECK(broken([](graph&, model& m) { m.clear_opset_import(); }) == refused(model_fault::bad_model, ""));
    CHECK(broken([](graph& g, model&) { g.mutable_initializer(0)->set_dims(0, 9); }) ==
          refused(model_fault::bad_weight, "w"));
    CHECK(broken([](graph& g, model&) { g.mutable_initializer(1)->mutable_float_data()->RemoveLast(); }) ==
          refused(model_fault::bad_weight, "bias"));
    CHECK(broken([](graph& g, model&) {
              g.mutable_input(0)->mutable_type()->mutable_tensor_type()->mutable_shape()->mutable_dim(1)->set_dim_value(
                  7);
          }).first == model_fault::bad_shapes);
    CHECK(refusal(good.bytes(), {.inputs = {{"x", {2, 9}}}}) == refused(model_fault::bad_shapes, "x"));
    CHECK(refusal(good.bytes(), {.inputs = {{"x", {2}}}}) == refused(model_fault::bad_shapes, "x"));
    CHECK_THROWS_AS(onnx_model::load("no/such/file.onnx"), model_error);
    CHECK(onnx_model::try_load("no/such/file.onnx").code() == gpushare::errc::io_failed);
    CHECK(onnx_model::try_parse("x").code() == gpushare::errc::invalid_specification);
}

TEST_CASE("a file of 2 GiB is refused before it is read", "[graph][onnx]") {
    const folder f;
    const auto path = f.path / "large.onnx";
    std::ofstream(path) << "x";
    fs::resize_file(path, std::uintmax_t{1} << 31);  // with a hole
    CHECK(onnx_model::try_load(path).code() == gpushare::errc::size_overflow);
}

TEST_CASE("a model with 3 GiB of weights elsewhere is cut, and no piece of it reads 2 GiB", "[graph][onnx]") {
    const folder f;
    std::ofstream(f.path / "w.bin") << "x";
    fs::resize_file(f.path / "w.bin", std::uintmax_t{3} << 30);  // with a hole
    onnx_builder b;
    b.input("x", {4}).weight("small", {4}).weight("w0", {4}).weight("w1", {4});
    b.node("Add", {"x", "small"}, {"a"}).node("Mul", {"a", "w0"}, {"b"}).node("Mul", {"b", "w1"}, {"c"});
    for (int i = 1; i < 3; ++i) {
        auto& w = *b.m.mutable_graph()->mutable_initializer(i);
        w.clear_float_data();
        w.set_dims(0, std::int64_t{3} << 27);  // of 4 bytes
        w.set_data_location(onnx::TensorProto::EXTERNAL);
        for (const auto& [key, text] : {std::pair<const char*, std::string>{"location", "w.bin"},
                                        {"offset", i == 1 ? "0" : "1610612736"},
                                        {"length", "1610612736"}}) {
            auto& e = *w.add_external_data();
            e.set_key(key);
            e.set_value(text);
        }
    }
    b.m.mutable_graph()
        ->mutable_input(0)
        ->mutable_type()
        ->mutable_tensor_type()
        ->mutable_shape()
        ->mutable_dim(0)
        ->set_dim_value(1);
    b.m.mutable_graph()->mutable_initializer(0)->set_dims(0, 1);
    b.m.mutable_graph()->mutable_initializer(0)->mutable_float_data()->Truncate(1);
    b.output("c");
    const auto model = onnx_model::parse(b.bytes(), {.folder = f.path});
    REQUIRE(model.graph().nodes.size() == 3);
    CHECK(onnx_model::parse(model.extract({0, 1})).graph().nodes.size() == 1);
    const auto fault = [&](gpushare::graph::node_range of) {
        try {
            (void)model.extract(of);
        } catch (const model_error& e) {
            return refused(e.fault(), e.node());
        }
        return refused(model_fault::no_file, "");
    };
    CHECK(fault({0, 3}) == refused(model_fault::too_large, "Add_0"));
    CHECK(fault({1, 3}) == refused(model_fault::too_large, "Mul_1"));
    CHECK_THROWS_AS(model.whole(), model_error);
}

TEST_CASE("nodes in a wrong order are put in one in which they can run", "[graph][onnx]") {
    auto b = support::two_layers();
    auto& nodes = *b.m.mutable_graph()->mutable_node();
    std::reverse(nodes.begin(), nodes.end());
    const auto model = onnx_model::parse(b.bytes());
    CHECK(wrong(model.graph()).empty());
    CHECK(model.graph().nodes.size() == 8);
}

TEST_CASE("operators of other domains are the engine's, where the caller says so", "[graph][onnx]") {
    onnx_builder b;
    b.input("x", {4}).node("Relu", {"x"}, {"a"}).node("Secret", {"a"}, {"y"}).output("y", {4});
    b.m.mutable_graph()->mutable_node(1)->set_domain("com.example");
    auto& set = *b.m.add_opset_import();
    set.set_domain("com.example");
    set.set_version(1);
    CHECK(refusal(b.bytes()) == refused(model_fault::unknown_operator, "Secret_1"));
    const auto model = onnx_model::parse(b.bytes(), {.other_domains = {"com.example"}});
    CHECK(model.graph().nodes.size() == 2);
    const auto like = model.graph();
    b.node("Relu", {"y"}, {"z"}).output("z");
    b.m.mutable_graph()->mutable_node(1)->set_output(0, "hidden");
    b.m.mutable_graph()->mutable_node(2)->set_input(0, "hidden");
    b.m.mutable_graph()->mutable_output()->DeleteSubrange(0, 1);
    auto named = like;
    named.values[value_named(named, "y")].name = "hidden";
    const auto unknown = onnx_model::parse(b.bytes(), {.other_domains = {"com.example"}});
    CHECK(unknown.graph().values[value_named(unknown.graph(), "hidden")].type == gpushare::graph::element::unknown);
    CHECK_THROWS_AS(unknown.extract({0, 2}), model_error);
    const auto told = onnx_model::parse(b.bytes(), {.other_domains = {"com.example"}, .like = &named});
    CHECK(told.graph().values[value_named(told.graph(), "hidden")].type == gpushare::graph::element::f32);
    CHECK_NOTHROW(told.extract({0, 2}));
    CHECK(model.extract({1, 2}).find("com.example") != std::string::npos);
}

TEST_CASE("that no process can start isn't the model's fault", "[graph][onnx]") {
    onnx_builder b;
    b.input("x", {4}).node("Relu", {"x"}, {"a"}).node("Secret", {"a"}, {"y"}).output("y", {4});
    b.m.mutable_graph()->mutable_node(1)->set_domain("com.example");
    auto& set = *b.m.add_opset_import();
    set.set_domain("com.example");
    set.set_version(1);
    onnx_builder own;
    own.input("x", {4}).node("Relu", {"x"}, {"y"}).output("y", {4});
    rlimit old{};
    getrlimit(RLIMIT_NOFILE, &old);
    const auto code = [&](const std::string& bytes) {
        const rlimit none{3, old.rlim_max};
        setrlimit(RLIMIT_NOFILE, &none);
        const auto made = onnx_model::try_parse(bytes, {.other_domains = {"com.example"}});
        setrlimit(RLIMIT_NOFILE, &old);
        return made.why();
    };
    for (const auto& bytes : {b.bytes(), own.bytes()}) {
        const auto why = code(bytes);
        CHECK(why.code == gpushare::errc::io_failed);
        CHECK(why.because == gpushare::reason::system_error);
        CHECK(why.asked == EMFILE);
    }
}

TEST_CASE("a model on which ONNX's own shape inference crashes is refused", "[graph][onnx]") {
    onnx_builder b;  // it divides by the stride
    b.input("x", {1, 1, 8, 8}).weight("w", {1, 1, 3, 3}).node("Conv", {"x", "w"}, {"y"}).output("y");
    b.attribute("strides", {0, 1});
    CHECK(refusal(b.bytes(), {.apart = true}).first == model_fault::bad_shapes);
    auto sound = b;
    sound.m.mutable_graph()->mutable_node(0)->mutable_attribute(0)->set_ints(0, 2);
    CHECK(onnx_model::parse(sound.bytes(), {.apart = false}).graph() ==
          onnx_model::parse(sound.bytes(), {.apart = true}).graph());
}

namespace {

/// Bytes that are wrong somewhere.
std::string torn(std::string bytes, support::random& any) {
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(any.below(n)); };
    switch (below(3)) {
        case 0: bytes.resize(below(bytes.size())); break;
        case 1: bytes.erase(below(bytes.size()), below(40)); break;
        default:
            for (std::size_t n = below(6) + 1; n > 0; --n) bytes[below(bytes.size())] = static_cast<char>(below(256));
    }
    return bytes;
}
/// A model whose parts don't fit each other.
std::string twisted(onnx_builder b, support::random& any) {
    auto& g = *b.m.mutable_graph();
    const auto below = [&](int n) { return static_cast<int>(any.below(static_cast<std::uint64_t>(n))); };
    auto& n = *g.mutable_node(below(g.node_size()));
    auto& w = *g.mutable_initializer(below(g.initializer_size()));
    const std::int64_t odd = std::vector<std::int64_t>{-1, 0, 1, std::int64_t{1} << 40, INT64_MIN}[any.below(5)];
    switch (below(7)) {
        case 0: n.mutable_input()->RemoveLast(); break;
        case 1: n.add_input(n.input(0)); break;
        case 2: n.set_op_type(g.node(below(g.node_size())).op_type()); break;
        case 3: n.set_input(0, g.node(below(g.node_size())).output(0)); break;
        case 4: w.set_dims(0, odd); break;
        case 5:
            w.clear_int64_data(), w.clear_float_data(), w.set_raw_data(std::string(w.ByteSizeLong(), '\x7f'));
            break;
        default:
            g.mutable_input(0)->mutable_type()->mutable_tensor_type()->mutable_shape()->mutable_dim(0)->set_dim_value(
                odd);
    }
    return b.bytes();
}

}  // namespace

TEST_CASE("a model is read or refused, whatever its bytes", "[graph][onnx]") {
    const auto seed = support::seed(GENERATE(1U, 2U, 3U));
    support::random any(seed);
    std::map<model_fault, int> seen;
    int taken = 0;
    for (int round = 0; round < 200; ++round) {
        CAPTURE(seed, round);
        const auto bytes =
            round % 2 == 0 ? torn(support::two_layers().bytes(), any) : twisted(support::two_layers(), any);
        try {
            const auto model = onnx_model::parse(bytes);
            REQUIRE(wrong(model.graph()).empty());
            const auto n = static_cast<std::uint32_t>(model.graph().nodes.size());
            if (n > 0) (void)model.extract({0, n});
            ++taken;
        } catch (const model_error& e) {
            ++seen[e.fault()];
        }
    }
    CHECK(taken > 0);
    CHECK(seen.size() >= 5);
}

namespace {

/// The same model with other names and in another order, as an engine may write it.
std::string written_anew(const onnx::ModelProto& of, support::random& any) {
    onnx::ModelProto m = of;
    auto& g = *m.mutable_graph();
    std::map<std::string, std::string> names;
    const auto rename = [&](std::string& name) {
        if (name.empty()) return;
        const auto [at, is_new] = names.try_emplace(name, "v" + std::to_string(any.below(1'000'000'000)));
        name = at->second;
    };
    for (const auto& v : g.input()) names[v.name()] = v.name();
    for (const auto& v : g.output()) names[v.name()] = v.name();
    for (auto& w : *g.mutable_initializer()) rename(*w.mutable_name());
    for (auto& n : *g.mutable_node()) {
        n.set_name("n" + std::to_string(any.below(1'000'000'000)));
        for (auto& name : *n.mutable_input()) rename(name);
        for (auto& name : *n.mutable_output()) rename(name);
    }
    for (int i = g.node_size() - 1; i > 0; --i) {
        const auto j = static_cast<int>(any.below(static_cast<std::uint64_t>(i) + 1));
        g.mutable_node()->SwapElements(i, j);
    }
    for (int i = g.initializer_size() - 1; i > 0; --i) {
        const auto j = static_cast<int>(any.below(static_cast<std::uint64_t>(i) + 1));
        g.mutable_initializer()->SwapElements(i, j);
    }
    return m.SerializeAsString();
}

/// Layers in parallel that differ in nothing but in what reads them.
onnx_builder many_branches(support::random& any) {
    onnx_builder b;
    b.input("Relu_2", {1, 4}).weight("w", {4, 4}).weight("u", {4, 4});
    std::vector<std::string> made{"Relu_2"};
    for (int i = 0; i < 24; ++i) {
        const auto& x = made[any.below(made.size())];
        const auto& y = made[any.below(made.size())];
        const auto name = "t" + std::to_string(i);
        if (any.below(3) == 0)
            b.node("MatMul", {x, any.below(2) == 0 ? "w" : "u"}, {name});
        else if (any.below(2) == 0)
            b.node("Relu", {x}, {name});
        else
            b.node("Sub", {x, y}, {name});
        made.push_back(name);
    }
    for (const auto& name : made) {
        const bool is_read = std::ranges::any_of(
            b.m.graph().node(), [&](const auto& n) { return std::ranges::find(n.input(), name) != n.input().end(); });
        if (!is_read) b.output(name, {1, 4});
    }
    return b;
}

}  // namespace

TEST_CASE("names and order of a file don't change a graph with names of its own", "[graph][onnx]") {
    using gpushare::graph::fingerprint;
    for (std::uint64_t round = 0; round < 30; ++round) {
        const auto seed = support::seed(round);
        CAPTURE(seed);
        support::random any(seed);
        const auto b = round == 0 ? support::two_layers() : many_branches(any);
        const auto plain = onnx_model::parse(b.bytes());
        const auto once = onnx_model::parse(b.bytes(), {.own_names = true});
        const auto again = onnx_model::parse(written_anew(b.m, any), {.own_names = true});
        REQUIRE(wrong(again.graph()) == "");
        CHECK(names(once.graph(), once.graph().inputs) == names(plain.graph(), plain.graph().inputs));
        CHECK(names(once.graph(), once.graph().outputs) == names(plain.graph(), plain.graph().outputs));
        CHECK(once.graph().nodes.size() == plain.graph().nodes.size());
        CHECK(again.graph() == once.graph());
        // A plan that was kept of one file cuts the other at the same places, and its pieces are
        // models.
        gpushare::graph::split_plan plan{.of_graph = fingerprint(once.graph()), .limit = gpushare::ns{1}};
        const auto n = static_cast<std::uint32_t>(once.graph().nodes.size());
        for (std::uint32_t i = 0; i < n; ++i) plan.order.push_back(i), plan.pieces.push_back({{i, i + 1}});
        const auto kept = gpushare::graph::parse_split_plan(to_text(plan, once.graph()), again.graph());
        for (const auto& p : kept.pieces) {
            const auto piece = onnx_model::parse(again.extract(kept.nodes(p.places)));
            CHECK(piece.graph().nodes.back().type == once.graph().nodes[p.places.first].type);
        }
        CHECK(onnx_model::parse(again.whole(), {.own_names = true}).graph() == once.graph());
    }
}

TEST_CASE("an engine of one's own reads attributes and constants of a piece", "[graph][onnx][cublaslt]") {
    onnx_builder b;
    b.input("x", {-1, 3}).weight("w", {2, 3}).weight("bias", {2});
    b.node("Transpose", {"w"}, {"turned"}).node("MatMul", {"x", "turned"}, {"p"}).node("Identity", {"bias"}, {"same"});
    b.node("Add", {"p", "same"}, {"q"}).node("Gemm", {"q", "w"}, {"r"});
    auto& alpha = *b.m.mutable_graph()->mutable_node()->rbegin()->add_attribute();
    alpha.set_name("alpha");
    alpha.set_type(onnx::AttributeProto::FLOAT);
    alpha.set_f(0.5F);
    b.output("r");
    const auto model = onnx_model::parse(b.bytes());
    const auto p = gpushare::graph::read_operations(model.extract({0, 3}));
    const auto name = [&](std::uint32_t v) { return p.values.at(v).name; };
    REQUIRE(p.nodes.size() == 3);
    CHECK(p.nodes[0].type == "MatMul");
    CHECK(name(p.inputs.at(0)) == "x");
    CHECK(p.values[p.inputs[0]].shape == std::vector<std::int64_t>{-1, 3});
    CHECK(name(p.outputs.at(0)) == "r");
    const auto& turned = p.values.at(p.nodes[0].inputs.at(1));
    CHECK(turned.shape == std::vector<std::int64_t>{3, 2});
    CHECK(turned.numbers == std::vector<float>{-2, 1, -1, 2, 0, -2});  // of -2 -1 0, 1 2 -2
    CHECK(p.values.at(p.nodes[1].inputs.at(1)).numbers == std::vector<float>{-2, -1});
    REQUIRE(p.nodes[2].find("alpha") != nullptr);
    CHECK(p.nodes[2].find("alpha")->number == 0.5F);

    const auto fault = [](const std::string& bytes) {
        try {
            (void)gpushare::graph::read_operations(bytes);
        } catch (const model_error& e) {
            return refused{e.fault(), e.node()};
        }
        return refused{};
    };
    CHECK(fault("no piece") == refused{model_fault::unreadable, ""});
    auto broken = b;
    broken.m.mutable_graph()->mutable_initializer(0)->set_raw_data("four");
    CHECK(fault(broken.bytes()) == refused{model_fault::bad_weight, "w"});
    broken = b;
    broken.node("Relu", {"nothing"}, {"s"});
    CHECK(fault(broken.bytes()) == refused{model_fault::missing_value, "Relu_5"});
    broken = b;
    broken.node("Relu", {"q"}, {"p"});
    CHECK(fault(broken.bytes()) == refused{model_fault::bad_model, "Relu_5"});
    broken = b;
    broken.weight("flat", {std::int64_t{1} << 62, 0}).node("Transpose", {"flat"}, {"thin"});
    CHECK(fault(broken.bytes()) == refused{});  // and in good time
    const std::string whole = b.bytes();
    for (std::size_t size = 0; size < whole.size(); ++size)  // no prefix leads to anything but a model_error
        (void)fault(whole.substr(0, size));
}

TEST_CASE("a norm that an exporter spelt out is one node for an engine of one's own", "[graph][onnx][chains]") {
    const auto spelt = [](bool since_18) {
        onnx_builder b;
        b.input("x", {-1, 8}).weight("two", {}).weight("epsilon", {}).weight("scale", {8}).weight("bias", {8});
        b.m.mutable_graph()->mutable_initializer(0)->set_float_data(0, 2);
        b.m.mutable_graph()->mutable_initializer(1)->set_float_data(0, 1e-5F);
        if (since_18) b.integers("last", {-1}).m.mutable_opset_import(0)->set_version(18);
        const auto mean = [&](const char* of, const char* to) {
            b.node("ReduceMean", since_18 ? onnx_builder::names{of, "last"} : onnx_builder::names{of}, {to});
            if (!since_18) b.attribute("axes", {-1});
        };
        mean("x", "mean");
        b.node("Sub", {"x", "mean"}, {"d"}).node("Pow", {"d", "two"}, {"square"});
        mean("square", "variance");
        b.node("Add", {"variance", "epsilon"}, {"sum"}).node("Sqrt", {"sum"}, {"root"});
        b.node("Div", {"d", "root"}, {"n"}).node("Mul", {"n", "scale"}, {"m"}).node("Add", {"m", "bias"}, {"y"});
        b.output("y", {-1, 8});
        return b.bytes();
    };
    for (const bool since_18 : {false, true}) {
        CAPTURE(since_18);
        const auto model = onnx_model::parse(spelt(since_18));
        REQUIRE(model.graph().nodes.size() == 9);
        const auto p = gpushare::graph::detail::with_norms(gpushare::graph::read_operations(model.extract({0, 9})));
        REQUIRE(p.nodes.size() == 3);
        CHECK(p.nodes[0].type == "LayerNormalization");
        CHECK(p.nodes[0].find("epsilon")->number == 1e-5F);
        CHECK(p.nodes[0].find("axis")->integer == -1);
    }
}
