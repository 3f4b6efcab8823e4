// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Models that nobody would write by mistake: each is refused with a name, or cut without changing
// its results.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <gpushare/graph/onnx.hpp>

#include "graph/onnx_models.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace hostile_models_test {

namespace fs = std::filesystem;
using gpushare::graph::import_options;
using gpushare::graph::model_error;
using gpushare::graph::model_fault;
using gpushare::graph::onnx_model;
using support::onnx_builder;

namespace {

using refused = std::pair<model_fault, std::string>;
/// The fault and the node that a model is refused for.
refused refusal(const std::string& bytes, const import_options& o = {}) {
    try {
        (void)onnx_model::parse(bytes, o);
    } catch (const model_error& e) {
        INFO(e.what());
        return {e.fault(), e.node()};
    }
    FAIL_CHECK("it was taken");
    return {};
}

struct folder {
    folder() { fs::create_directories(path); }
    folder(const folder&) = delete;
    folder& operator=(const folder&) = delete;
    ~folder() { fs::remove_all(path); }
    const fs::path path = fs::temp_directory_path() / ("gpushare_hostile_" + std::to_string(getpid()));
};

/// Four floats, or as many numbers of another type, whose bytes are in a file.
void put_elsewhere(onnx::TensorProto& t, const std::string& name, const std::string& location,
                   std::int32_t type = onnx::TensorProto::FLOAT) {
    t.set_name(name);
    t.set_data_type(type);
    if (t.dims_size() == 0) t.add_dims(4);
    t.clear_float_data();
    t.set_data_location(onnx::TensorProto::EXTERNAL);
    auto& e = *t.add_external_data();
    e.set_key("location");
    e.set_value(location);
}
onnx::AttributeProto& attribute(onnx::NodeProto& n, const std::string& name, onnx::AttributeProto::AttributeType type) {
    auto& a = *n.add_attribute();
    a.set_name(name);
    a.set_type(type);
    return a;
}
void import(onnx::ModelProto& m, const std::string& domain) {
    auto& set = *m.add_opset_import();
    set.set_domain(domain);
    set.set_version(1);
}
/// y = x + c by a function of the model's own, whose constant c is in a file.
onnx_builder with_function(const std::string& location) {
    onnx_builder b;
    b.input("x", {4}).node("Twice", {"x"}, {"y"}).output("y", {4});
    b.m.mutable_graph()->mutable_node(0)->set_domain("own");
    import(b.m, "own");
    auto& f = *b.m.add_functions();
    f.set_name("Twice");
    f.set_domain("own");
    f.add_opset_import()->set_version(13);
    f.add_input("in");
    f.add_output("out");
    auto& c = *f.add_node();
    c.set_op_type("Constant");
    c.add_output("c");
    put_elsewhere(*attribute(c, "value", onnx::AttributeProto::TENSOR).mutable_t(), "c", location);
    auto& add = *f.add_node();
    add.set_op_type("Add");
    add.add_input("in");
    add.add_input("c");
    add.add_output("out");
    return b;
}
/// y = x + a constant that is sparse.
onnx_builder with_sparse_constant(const std::string& location) {
    onnx_builder b;
    b.input("x", {4}).node("Constant", {}, {"c"}).node("Add", {"x", "c"}, {"y"}).output("y", {4});
    auto& s = *attribute(*b.m.mutable_graph()->mutable_node(0), "sparse_value", onnx::AttributeProto::SPARSE_TENSOR)
                   .mutable_sparse_tensor();
    s.add_dims(4);
    put_elsewhere(*s.mutable_values(), "c_values", location);
    auto& at = *s.mutable_indices();
    at.set_data_type(onnx::TensorProto::INT64);
    at.add_dims(4);
    for (int i = 0; i < 4; ++i) at.add_int64_data(i);
    return b;
}
/// y = x + a sparse weight.
onnx_builder with_sparse_weight(const std::string& location) {
    onnx_builder b;
    b.input("x", {4}).node("Add", {"x", "w"}, {"y"}).output("y", {4});
    auto& s = *b.m.mutable_graph()->add_sparse_initializer();
    s.add_dims(4);
    put_elsewhere(*s.mutable_values(), "w", location);
    auto& at = *s.mutable_indices();
    at.set_data_type(onnx::TensorProto::INT64);
    at.add_dims(4);
    for (int i = 0; i < 4; ++i) at.add_int64_data(i);
    return b;
}

}  // namespace

TEST_CASE("no weight is outside of the model's folder, wherever the model names it", "[graph][onnx]") {
    const folder f;
    fs::create_directories(f.path / "inside");
    std::ofstream(f.path / "secret.bin", std::ios::binary) << std::string(16, 's');
    std::ofstream(f.path / "inside" / "w.bin", std::ios::binary) << std::string(16, 'w');
    const import_options here{.folder = f.path / "inside"};
    SECTION("a constant of a function") {
        CHECK(refusal(with_function("../secret.bin").bytes(), here) == refused(model_fault::external_data, "c"));
        const auto model = onnx_model::parse(with_function("w.bin").bytes(), here);
        CHECK(model.extract({0, 1}).find("wwwwwwwwwwwwwwww") != std::string::npos);
    }
    SECTION("a sparse constant") {
        CHECK(refusal(with_sparse_constant("../secret.bin").bytes(), here) ==
              refused(model_fault::external_data, "c_values"));
        const auto model = onnx_model::parse(with_sparse_constant("w.bin").bytes(), here);
        CHECK(model.extract({0, 1}).find("wwwwwwwwwwwwwwww") != std::string::npos);
    }
    SECTION("a sparse weight") {
        CHECK(refusal(with_sparse_weight("../secret.bin").bytes(), here) == refused(model_fault::external_data, "w"));
        const auto model = onnx_model::parse(with_sparse_weight("w.bin").bytes(), here);
        CHECK(model.extract({0, 1}).find("wwwwwwwwwwwwwwww") != std::string::npos);
    }
}

TEST_CASE("a function that calls itself is refused", "[graph][onnx]") {
    auto b = with_function("");
    auto& f = *b.m.mutable_functions(0);
    f.clear_node();
    auto& import_own = *f.add_opset_import();
    import_own.set_domain("own");
    import_own.set_version(1);
    auto& n = *f.add_node();
    n.set_op_type("Twice");
    n.set_domain("own");
    n.add_input("in");
    n.add_output("out");
    CHECK(refusal(b.bytes()) == refused(model_fault::cyclic, "Twice"));
    auto& other = *b.m.add_functions();
    other = f;
    other.set_name("Thrice");
    b.m.mutable_functions(0)->mutable_node(0)->set_op_type("Thrice");  // by the other one
    CHECK(refusal(b.bytes()).first == model_fault::cyclic);
    b.m.mutable_functions(1)->mutable_node(0)->set_op_type("Relu");
    b.m.mutable_functions(1)->mutable_node(0)->set_domain("");
    CHECK(onnx_model::parse(b.bytes()).graph().nodes.size() == 1);
}

namespace {

/// y = (x + r) r, with an r that a branch draws by lot.
onnx_builder with_branch() {
    onnx_builder b;
    b.input("x", {4});
    auto& yes = *b.m.mutable_graph()->add_initializer();
    yes.set_name("yes");
    yes.set_data_type(onnx::TensorProto::BOOL);
    yes.add_int32_data(1);
    b.node("If", {"yes"}, {"r"}).node("Add", {"x", "r"}, {"a"}).node("Mul", {"a", "r"}, {"y"}).output("y", {4});
    for (const auto* which : {"then_branch", "else_branch"}) {
        auto& body = *attribute(*b.m.mutable_graph()->mutable_node(0), which, onnx::AttributeProto::GRAPH).mutable_g();
        body.set_name(which);
        onnx_builder::add_node(body, "RandomNormal", {}, {"drawn"});
        attribute(*body.mutable_node(0), "shape", onnx::AttributeProto::INTS).add_ints(4);
        onnx_builder::describe(*body.add_output(), "drawn", {4});
    }
    return b;
}
/// Bytes that are wrong somewhere.
std::string torn(std::string bytes, support::random& any) {
    for (std::uint64_t n = 1 + any.below(4); n > 0; --n) {
        const auto at = any.below(bytes.size());
        switch (any.below(4)) {
            case 0: bytes.erase(at, 1 + any.below(12)); break;
            case 1: bytes.insert(at, bytes.substr(any.below(bytes.size()), any.below(60))); break;
            default: bytes[at] = static_cast<char>(any.below(256));
        }
        if (bytes.empty()) return bytes;
    }
    return bytes;
}

}  // namespace

TEST_CASE("a branch's random numbers are drawn once, and not by each piece that reads them", "[graph][onnx]") {
    CHECK(onnx_model::parse(with_branch().bytes()).graph().nodes.size() == 3);
}

TEST_CASE("a model with bodies, functions and files is read or refused, whatever its bytes", "[graph][onnx]") {
    const folder f;
    std::ofstream(f.path / "w.bin", std::ios::binary) << std::string(16, 'w');
    const import_options here{.folder = f.path};
    const std::vector<std::string> models{with_function("w.bin").bytes(), with_sparse_constant("w.bin").bytes(),
                                          with_sparse_weight("w.bin").bytes(), with_branch().bytes()};
    int taken = 0, away = 0;
    const std::uint64_t rounds = support::few(240);
    for (std::uint64_t i = 0; i < rounds; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        support::random any(seed);
        try {
            const auto model = onnx_model::parse(torn(models[i % models.size()], any), here);
            REQUIRE(wrong(model.graph()).empty());
            const auto n = static_cast<std::uint32_t>(model.graph().nodes.size());
            for (std::uint32_t at = 0; at < n; ++at) (void)model.extract({at, at + 1});
            if (n > 0) (void)onnx_model::parse(model.whole());
            ++taken;
        } catch (const model_error&) {
            ++away;
        }
    }
    CHECK(taken > 0);
    CHECK(away > 0);
}

TEST_CASE("names, extents and places of weights that can't be are refused", "[graph][onnx]") {
    const folder f;
    std::ofstream(f.path / "w.bin", std::ios::binary) << std::string(16, 'w');
    const import_options here{.folder = f.path};
    onnx_builder b;
    b.input("x", {4}).weight("w", {4}).node("Add", {"x", "w"}, {"y"}).output("y", {4});
    SECTION("a weight that is an input as well is a weight") {
        b.input("w", {4});
        const auto model = onnx_model::parse(b.bytes());
        CHECK(model.graph().inputs.size() == 1);
        CHECK(onnx_model::parse(model.whole()).graph().inputs.size() == 1);
    }
    SECTION("a weight that a node makes as well") {
        b.node("Relu", {"x"}, {"w"});
        CHECK(refusal(b.bytes()) == refused(model_fault::bad_model, "w"));
    }
    SECTION("an input that is there twice") {
        b.input("x", {4});
        CHECK(refusal(b.bytes()) == refused(model_fault::bad_model, "x"));
    }
    SECTION("an output without a name, where a node leaves one out") {
        b.node("Dropout", {"y"}, {"d", ""}).output("", {4});
        CHECK(refusal(b.bytes()).first == model_fault::bad_model);
    }
    SECTION("a negative place in a file") {
        auto& w = *b.m.mutable_graph()->mutable_initializer(0);
        put_elsewhere(w, "w", "w.bin");
        auto& e = *w.add_external_data();
        e.set_key("offset");
        e.set_value("-16");
        CHECK(refusal(b.bytes(), here) == refused(model_fault::external_data, "w"));
    }
    SECTION("extents whose product is 0 modulo 2^64") {
        auto& w = *b.m.mutable_graph()->mutable_initializer(0);
        w.clear_float_data();
        w.clear_dims();
        for (int i = 0; i < 4; ++i) w.add_dims(std::int64_t{1} << 32);
        CHECK(refusal(b.bytes()) == refused(model_fault::bad_weight, "w"));
        w.set_raw_data("");
        CHECK(refusal(b.bytes()) == refused(model_fault::bad_weight, "w"));
    }
    SECTION("an output's stated shape against what its node makes") {
        b.m.mutable_graph()
            ->mutable_output(0)
            ->mutable_type()
            ->mutable_tensor_type()
            ->mutable_shape()
            ->mutable_dim(0)
            ->set_dim_value(5);
        CHECK(refusal(b.bytes()).first == model_fault::bad_shapes);
    }
    SECTION("an inner value's stated shape against what its node makes") {
        b.node("Relu", {"y"}, {"z"}).output("z", {4});
        b.m.mutable_graph()->mutable_output()->DeleteSubrange(0, 1);
        onnx_builder::describe(*b.m.mutable_graph()->add_value_info(), "y", {5});
        CHECK(refusal(b.bytes()).first == model_fault::bad_shapes);
    }
    SECTION("no element at all") {
        onnx_builder none;
        none.input("x", {0, 4}).node("Relu", {"x"}, {"a"}).node("Relu", {"a"}, {"y"}).output("y", {0, 4});
        const auto model = onnx_model::parse(none.bytes());
        CHECK(model.graph().nodes.size() == 2);
        CHECK(model.graph().values[0].size() == gpushare::bytes{0});
    }
    SECTION("a weight that is an output, and that no node reads") {
        b.weight("alone", {4}).output("alone", {4});
        const auto model = onnx_model::parse(b.bytes());
        CHECK(onnx_model::parse(model.whole()).graph().outputs.size() == 2);
    }
}

TEST_CASE("a node with very many inputs is read in good time", "[graph][onnx]") {
    onnx_builder b;
    constexpr int many = 200'000;
    auto& n = *b.m.mutable_graph()->add_node();
    n.set_op_type("Sum");
    n.set_name("Sum_0");
    n.add_output("y");
    for (int i = 0; i < many; ++i) n.add_input("missing" + std::to_string(i));
    CHECK(gpushare::graph::detail::reads_of(n).size() == many);
}

}  // namespace hostile_models_test
