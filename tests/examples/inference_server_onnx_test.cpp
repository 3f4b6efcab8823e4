// SPDX-License-Identifier: Apache-2.0
// Tenants' own models in ONNX's format: cut into submissions, with the whole model's results; and
// bad models, which are named. The engine is a toy, unless ONNX Runtime has been fetched.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "graph/onnx_models.hpp"
#include "inference_server/onnx_models.hpp"
#include "inference_server/service.hpp"
#include "support/catch.hpp"
#include "support/folder.hpp"

namespace inference_server_onnx_test {

using namespace inference_server;
using namespace std::chrono_literals;
namespace graph = gpushare::graph;

namespace {

void write_file(const std::string& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }
std::string text_of(const std::string& path) {
    std::ifstream from(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(from), {}};
}

/// What the toy engine is told, and what it saw.
struct script {
    std::atomic<int> ms_of_a_node{0}, runs{0}, sessions{0};
    std::atomic<bool> refuses{false}, breaks{false};
    std::function<void()> on_run = [] {};
};

/// Add, Mul and Relu of floats; a second operand's rows are those of the first, or one for all.
class toy_runner final : public piece_runner {
public:
    explicit toy_runner(std::shared_ptr<script> s) : script_(std::move(s)) {}
    void add(const std::string& model) override {
        ++script_->sessions;
        if (script_->refuses) throw graph::model_error(graph::model_fault::engine, "relu", "the toy doesn't like it");
        if (!pieces_.emplace_back().ParseFromString(model)) throw std::runtime_error("no model");
    }
    void remove_last() noexcept override { pieces_.pop_back(); }
    void run(std::uint32_t piece, std::span<const graph::tensor* const> inputs,
             std::span<graph::tensor* const> outputs) override {
        ++script_->runs;
        script_->on_run();
        if (script_->breaks.exchange(false)) throw graph::model_error(graph::model_fault::engine, {}, "it fell over");
        const auto& g = pieces_[piece].graph();
        struct value {
            std::vector<std::int64_t> shape;
            std::vector<float> data;
        };
        std::map<std::string, value> all;
        for (const auto& w : g.initializer())
            all[w.name()] = {{w.dims().begin(), w.dims().end()}, {w.float_data().begin(), w.float_data().end()}};
        for (int i = 0; i < g.input_size(); ++i) {
            const auto& t = *inputs[static_cast<std::size_t>(i)];
            const auto* const at = static_cast<const float*>(t.data);
            all[g.input(i).name()] = {t.shape, {at, at + t.size() / sizeof(float)}};
        }
        for (const auto& n : g.node()) {
            auto a = all.at(n.input(0));
            for (std::size_t i = 0; i < a.data.size(); ++i) {
                float& x = a.data[i];
                if (n.op_type() == "Relu") {
                    x = std::max(x, 0.0F);
                    continue;
                }
                const auto& b = all.at(n.input(1)).data;
                const float y = b[i % b.size()];
                x = n.op_type() == "Add" ? x + y : x * y;
            }
            all[n.output(0)] = std::move(a);
            std::this_thread::sleep_for(script_->ms_of_a_node.load() * 1ms);
        }
        for (int i = 0; i < g.output_size(); ++i) {
            const auto& v = all.at(g.output(i).name());
            void* const to = outputs[static_cast<std::size_t>(i)]->place(graph::element::f32, v.shape);
            std::memcpy(to, v.data.data(), v.data.size() * sizeof(float));
        }
    }

private:
    std::shared_ptr<script> script_;
    std::vector<onnx::ModelProto> pieces_;
};

/// x [n, 8] -> ten nodes in a row -> y; every third one remembers the first.
support::onnx_builder chain(std::int64_t rows = -1) {
    support::onnx_builder b;
    b.input("x", {rows, 8}).weight("w", {8}).weight("v", {8});
    std::string last = "x";
    for (int i = 0; i < 10; ++i) {
        const auto next = i == 9 ? std::string("y") : "v" + std::to_string(i);
        if (i % 3 == 0)
            b.node("Add", {last, "w"}, {next});
        else if (i % 3 == 1)
            b.node("Mul", {last, "v"}, {next});
        else
            b.node("Add", {last, "v0"}, {next});
        last = next;
    }
    b.output("y", {rows, 8});
    return b;
}

infer_request request_of(std::size_t rows, float first = 1) {
    infer_request r;
    tensor x{"x", datatype::fp32, {static_cast<std::int64_t>(rows), 8}, std::vector<std::byte>(rows * 32)};
    for (std::size_t i = 0; i < rows * 8; ++i) x.as<float>()[i] = first + static_cast<float>(i) / 7;
    r.inputs.push_back(std::move(x));
    return r;
}

/// A service with a tenant `pages` that has models, and an urgent one.
struct rig {
    explicit rig(std::string_view words, const std::vector<onnx_engine>* engines = nullptr) {
        files.write("chain.onnx", chain().bytes());
        start(words, engines);
    }
    void start(std::string_view words, const std::vector<onnx_engine>* engines = nullptr) {
        core.reset();
        files.write("tenants.conf", tenants(words));
        auto toys = std::vector<onnx_engine>{
            {.name = "toy", .make = [s = toy](bool) { return std::make_unique<toy_runner>(s); }}};
        core = std::make_unique<service>(service_options{.tenants = files / "tenants.conf",
                                                         .node = {.memory = gpushare::bytes{256 << 20}, .sms = 1},
                                                         .model_of = onnx_models(engines == nullptr ? toys : *engines)},
                                         std::vector<model_source>{stamping(), tiny_mlp()});
    }
    static std::string tenants(std::string_view words) {
        return "name=pages api_key=key-of-pages memory=64MiB compute=60%\n  " + std::string(words) +
               "\nname=urgent api_key=key-of-urgent memory=16MiB compute=40% priority=1\n";
    }
    std::string reload(std::string_view words) {
        files.write("next", tenants(words));
        std::filesystem::rename(files / "next", files / "tenants.conf");
        return core->reload();
    }
    [[nodiscard]] model_source stamping() const {
        struct stamp final : engine {
            explicit stamp(std::shared_ptr<script> s) : of(std::move(s)) {}
            void run(std::span<const tensor> in, std::vector<tensor>& out, gpushare::host::kernel_context&) override {
                ran_at->store(of->runs);
                out.push_back(in[0]);
            }
            std::shared_ptr<script> of;
            std::shared_ptr<std::atomic<int>> ran_at;
        };
        model_info info{"stamp", "test", {{"x", datatype::fp32, {-1, 8}}}, {{"x", datatype::fp32, {-1, 8}}}, 0, false};
        return {info, [s = toy, at = stamped](std::pmr::memory_resource&) {
                    auto e = std::make_unique<stamp>(s);
                    e->ran_at = at;
                    return e;
                }};
    }
    std::future<answer> send(std::string_view key, std::string_view model, infer_request r) const {
        auto done = std::make_shared<std::promise<answer>>();
        auto later = done->get_future();
        core->infer(core->authenticate(key), model, std::move(r), [done](answer a) { done->set_value(std::move(a)); });
        return later;
    }
    [[nodiscard]] answer ask(std::string_view model, infer_request r) const {
        return send("key-of-pages", model, std::move(r)).get();
    }
    [[nodiscard]] std::vector<std::byte> result(std::string_view model, infer_request r) const {
        auto a = ask(model, std::move(r));
        if (const auto* const why = std::get_if<refused>(&a)) FAIL(why->what());
        return std::get<infer_response>(a).outputs.at(0).data;
    }
    [[nodiscard]] std::string error_of(std::string_view words) {
        try {
            start(words);
        } catch (const model_setting_error& e) {
            const std::string what = e.what();
            CHECK_THAT(what, Catch::StartsWith((files / "tenants.conf") + ":" + std::to_string(e.line()) + ": " +
                                               e.setting() + ": "));
            return e.setting() + ' ' + std::to_string(e.line()) + ' ' + what;
        }
        FAIL("it started");
        return {};
    }
    [[nodiscard]] std::uint64_t submissions() const {
        return core->authenticate("key-of-pages").who->usage().completed;
    }
    [[nodiscard]] std::string plan(const char* model = "chain.onnx") const { return plan_path(files / model, 5ms); }

    support::folder files;
    std::shared_ptr<script> toy = std::make_shared<script>();
    std::shared_ptr<std::atomic<int>> stamped = std::make_shared<std::atomic<int>>(-1);
    std::unique_ptr<service> core;
};

int count(std::string_view text, std::string_view word) {
    int n = 0;
    for (auto at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) ++n;
    return n;
}

}  // namespace

TEST_CASE("a model that is cut gives what the whole one gives, each piece as a submission", "[examples]") {
    rig s("model=chain.onnx");
    const auto expected = s.result("chain", request_of(3));
    const auto other = s.result("chain", request_of(5, -2));
    const auto one = s.submissions();
    (void)s.result("chain", request_of(3));
    CHECK(s.submissions() == one + 1);

    s.toy->ms_of_a_node = 2;  // so no piece has more than two nodes
    s.start("model=chain.onnx cut_to=5ms shape=x:4x8");
    CHECK(s.result("chain", request_of(3)) == expected);  // measures first
    const auto pieces = static_cast<std::uint64_t>(count(text_of(s.plan()), "\npiece"));
    CHECK(pieces >= 5);
    s.toy->ms_of_a_node = 0;
    const auto before = s.submissions();
    CHECK(s.result("chain", request_of(5, -2)) == other);  // another number of rows
    CHECK(s.submissions() == before + pieces);
    CHECK_THAT(s.core->status_json(),
               Catch::Contains("\"pieces\":" + std::to_string(pieces)) && Catch::Contains("\"cut_to_ms\":5"));
    CHECK_THAT(s.core->metrics(),
               Catch::Contains("server_model_pieces{tenant=\"pages\",model=\"chain\"} " + std::to_string(pieces)) &&
                   Catch::Contains("server_pieces_total{tenant=\"pages\"} " + std::to_string(2 * pieces)));
}

TEST_CASE("urgent requests get in between the pieces of a model", "[examples]") {
    rig s("model=chain.onnx cut_to=5ms shape=x:1x8");
    const bool cut = GENERATE(true, false);
    CAPTURE(cut);
    s.toy->ms_of_a_node = 2;
    if (!cut) s.start("model=chain.onnx");
    (void)s.result("chain", request_of(1));  // it is loaded
    s.toy->ms_of_a_node = 0;
    (void)s.send("key-of-urgent", "stamp", request_of(1)).get();
    std::promise<void> begins;
    std::promise<void> goes;
    std::atomic<bool> first{true};
    s.toy->on_run = [&] {
        if (!first.exchange(false)) return;
        begins.set_value();
        goes.get_future().wait();
    };
    s.toy->runs = 0;
    auto page = s.send("key-of-pages", "chain", request_of(1));
    begins.get_future().wait();
    auto urgent = s.send("key-of-urgent", "stamp", request_of(1));
    goes.set_value();
    (void)urgent.get();
    CHECK(std::holds_alternative<infer_response>(page.get()));
    if (cut) {
        CHECK(s.stamped->load() < s.toy->runs);
        CHECK(s.stamped->load() <= 2);  // behind the piece that ran, and one that the device had already
    } else {
        CHECK(s.stamped->load() == s.toy->runs);
    }
}

TEST_CASE("a plan beside the model is kept, and may be changed", "[examples]") {
    rig s("model=chain.onnx cut_to=5ms shape=x:1x8");
    s.toy->ms_of_a_node = 2;
    const auto expected = s.result("chain", request_of(2));
    s.toy->ms_of_a_node = 0;
    auto text = text_of(s.plan());
    const auto unload = [&] {
        for (int i = 0; i < 1000; ++i) try {
                return s.core->unload(s.core->authenticate("key-of-pages"), "chain");
            } catch (const refused&) {
                std::this_thread::sleep_for(1ms);
            }
    };
    unload();
    s.toy->runs = 0;
    CHECK(s.result("chain", request_of(2)) == expected);
    CHECK(s.toy->runs == count(text, "\npiece"));  // nothing was measured
    CHECK(text_of(s.plan()) == text);

    // Somebody takes a cut away.
    unload();
    const auto last = text.rfind("\npiece");
    text.erase(last, text.find('\n', last + 1) - last);
    write_file(s.plan(), text);
    s.toy->runs = 0;
    CHECK(s.result("chain", request_of(2)) == expected);
    CHECK(s.toy->runs == count(text, "\npiece"));

    // Or writes nonsense.
    unload();
    write_file(s.plan(), text + "node 99 y Add\n");
    auto a = s.ask("chain", request_of(2));
    REQUIRE(std::holds_alternative<refused>(a));
    CHECK_THAT(std::get<refused>(a).what(), Catch::Contains(s.plan()) && Catch::Contains("line"));
    CHECK_THAT(s.error_of("model=chain.onnx cut_to=5ms shape=x:1x8"),
               Catch::StartsWith("model 2") && Catch::Contains(".plan: ") && Catch::Contains("line"));
}

TEST_CASE("requests to a cut model go together, as rows of a batch or one after the other", "[examples]") {
    const bool rows = GENERATE(true, false);
    CAPTURE(rows);
    const std::string words = rows ? "model=chain.onnx batch=8" : "model=chain.onnx shape=x:1x8";
    rig s(words);
    const auto a = s.result("chain", request_of(1, 3)), b = s.result("chain", request_of(2, -1));
    s.toy->ms_of_a_node = 2;
    s.start(words + " cut_to=5ms");
    (void)s.result("chain", request_of(1));
    s.toy->ms_of_a_node = 0;
    for (int i = 0; i < 8; ++i) (void)s.result("chain", request_of(1));  // calls are known to be short
    const auto before = s.submissions();
    std::promise<void> begins;
    std::promise<void> goes;
    std::atomic<bool> first{true};
    s.toy->on_run = [&] {
        if (!first.exchange(false)) return;
        begins.set_value();
        goes.get_future().wait();
    };
    auto one = s.send("key-of-pages", "chain", request_of(1));
    begins.get_future().wait();
    auto two = s.send("key-of-pages", "chain", request_of(1, 3)),
         three = s.send("key-of-pages", "chain", request_of(2, -1));
    goes.set_value();
    (void)one.get();
    CHECK(std::get<infer_response>(two.get()).outputs[0].data == a);
    CHECK(std::get<infer_response>(three.get()).outputs[0].data == b);
    const auto pieces = static_cast<std::uint64_t>(count(text_of(s.plan()), "\npiece"));
    CHECK(s.submissions() - before == (rows ? 2 : 3) * pieces);
    auto too_many = [&] { (void)s.ask("chain", request_of(9)); };
    if (rows) CHECK_THROWS_AS(too_many(), refused);
}

TEST_CASE("a piece that fails ends its request alone", "[examples]") {
    rig s("model=chain.onnx cut_to=5ms shape=x:1x8");
    s.toy->ms_of_a_node = 2;
    const auto expected = s.result("chain", request_of(2));
    s.toy->ms_of_a_node = 0;
    int piece = 0;
    const int fails = GENERATE(1, 3);
    s.toy->on_run = [&] { s.toy->breaks = ++piece == fails; };
    auto a = s.ask("chain", request_of(2));
    REQUIRE(std::holds_alternative<refused>(a));
    CHECK(std::get<refused>(a).status == 400);
    CHECK_THAT(std::get<refused>(a).what(), Catch::Contains("model 'chain'") && Catch::Contains("it fell over"));
    CHECK(piece == fails);  // the others had nothing to do
    const auto sessions = s.toy->sessions.load();
    CHECK(s.result("chain", request_of(2)) == expected);
    CHECK(s.toy->sessions == sessions);  // by the same engine

    // An engine that may be in any state is loaded anew.
    piece = 0;
    s.toy->on_run = [&] {
        if (++piece == fails) throw std::runtime_error("broken");
    };
    a = s.ask("chain", request_of(2));
    REQUIRE(std::holds_alternative<refused>(a));
    CHECK(std::get<refused>(a).status == 500);
    CHECK(piece == fails);
    CHECK(s.result("chain", request_of(2)) == expected);
    CHECK(s.toy->sessions > sessions);
}

TEST_CASE("a model is its tenant's alone, and changes with the file", "[examples]") {
    rig s("model=chain.onnx");
    const auto expected = s.result("chain", request_of(2));
    const auto urgent = s.core->authenticate("key-of-urgent"), pages = s.core->authenticate("key-of-pages");
    CHECK_THROWS_AS((void)s.core->model(urgent, "chain"), refused);
    CHECK_THROWS_AS((void)s.send("key-of-urgent", "chain", request_of(1)), refused);
    const auto has = [&](const service::caller& c) {
        const auto all = s.core->index(c);
        return std::ranges::find(all, "chain", &service::index_entry::name) != all.end();
    };
    CHECK(has(pages));
    CHECK(!has(urgent));
    const auto sessions = s.toy->sessions.load();
    CHECK(s.reload("model=chain.onnx").empty());
    CHECK(s.result("chain", request_of(2)) == expected);
    CHECK(s.toy->sessions == sessions);  // it is the same one
    CHECK(s.reload("model=chain.onnx batch=4").empty());
    CHECK(s.core->model(pages, "chain")->info.max_batch == 4);
    CHECK(s.result("chain", request_of(2)) == expected);
    CHECK(s.reload("").empty());
    CHECK_THROWS_AS((void)s.core->model(pages, "chain"), refused);
}

TEST_CASE("an impossible description of a model is refused with its line of the file", "[examples]") {
    rig s("model=chain.onnx");
    const auto has = [&](const char* words, const char* begins, const char* says) {
        CAPTURE(words);
        const auto e = s.error_of(words);
        CHECK_THAT(e, Catch::StartsWith(begins) && Catch::Contains(says));
        CHECK_THAT(e, !Catch::Contains("secret"));
    };
    has("model=chain.onnx\n  cut_to=secret", "cut_to 3 ", "such as 5ms");
    has("model=chain.onnx cut_to=0ms", "cut_to 2 ", "such as 5ms");
    has("model=chain.onnx cut_to=5ms cut_to=6ms", "cut_to 2 ", "twice");
    has("cut_to=5ms model=chain.onnx", "cut_to 2 ", "belongs behind");
    has("model=chain.onnx batch=0", "batch 2 ", "from 1 to 1024");
    has("model=chain.onnx shape=x:1xsecret", "shape 2 ", "such as INPUT");
    has("model=chain.onnx shape=z:1x8", "model 2 ", "shape=");
    has("model=chain.onnx cut_to=5ms shape=x:1x9", "model 2 ", "'x'");
    has("model=chain.onnx cut_to=5ms", "model 2 ", "shape= says");
    has("model=chain.onnx engine=secret", "engine 2 ", "it has toy");
    has("model=secret.onnx", "model 2 ", "no such file");
    has("model=secret", "model 2 ", "NAME.onnx");
    has("model=chain.onnx model=./chain.onnx", "model 2 ", "another model");
    s.files.write("mlp.onnx", chain().bytes());
    has("model=mlp.onnx", "model 2 ", "one of the server's");
    support::onnx_builder lone;
    lone.input("x", {1, 8}).node("Relu", {"x"}, {"y"}).output("y", {1, 8});
    s.files.write("lone.onnx", lone.bytes());
    has("model=lone.onnx cut_to=5ms", "model 2 ", "no place where it can be cut");
    support::onnx_builder constant;
    constant.input("x", {1, 8}).weight("w", {8}).node("Relu", {"x"}, {"y"}).output("y", {1, 8}).output("w", {8});
    s.files.write("constant.onnx", constant.bytes());
    has("model=constant.onnx", "model 2 ", "'w': an output that is a weight");
    s.toy->refuses = true;
    has("model=chain.onnx", "model 2 ", "the toy doesn't like it");
    CHECK_THROWS_AS(parse_tenants("model=a.onnx name=chat api_key=key-of-chat memory=1MiB compute=1%\n"),
                    model_setting_error);
    try {
        service({.tenants = s.files / "tenants.conf"}, {});
        FAIL("it started");
    } catch (const model_setting_error& e) {
        CHECK_THAT(e.what(), Catch::Contains("built without ONNX"));
    }
}

TEST_CASE("a bad model is named, and no other model is lost", "[examples]") {
    rig s("model=chain.onnx");
    const auto whole = chain().bytes();
    const auto put = [&](const char* name, const std::string& bytes) { s.files.write(name, bytes); };
    put("torn.onnx", whole.substr(0, whole.size() / 2));
    put("empty.onnx", "");
    auto b = chain();
    b.m.mutable_graph()->mutable_node(0)->set_input(0, "v8");
    put("cyclic.onnx", b.bytes());
    b = chain();
    b.m.mutable_graph()->mutable_node(4)->set_op_type("Frobnicate");
    put("unknown.onnx", b.bytes());
    support::onnx_builder shapes;
    shapes.input("x", {2, 3}).weight("w", {4, 5}).node("MatMul", {"x", "w"}, {"y"}).output("y");
    put("shapes.onnx", shapes.bytes());
    b = chain();
    auto& w = *b.m.mutable_graph()->mutable_initializer(0);
    w.clear_float_data();
    w.set_data_location(onnx::TensorProto::EXTERNAL);
    auto& location = *w.add_external_data();
    location.set_key("location");
    location.set_value("nowhere.bin");
    put("outside.onnx", b.bytes());

    const std::pair<const char*, const char*> bad[] = {{"torn", "model"},      {"empty", "model"},
                                                       {"cyclic", "'Add_0'"},  {"unknown", "'Mul_4'"},
                                                       {"shapes", "MatMul_0"}, {"outside", "'w'"}};
    const auto expected = s.result("chain", request_of(2));
    for (const auto& [name, node] : bad) {
        CAPTURE(name);
        const auto words = "model=chain.onnx\n  model=" + std::string(name) + ".onnx";
        const auto why = s.reload(words);  // changes nothing
        CHECK_THAT(why, Catch::Contains("tenants.conf:3: model: " + std::string(name) + ": ") && Catch::Contains(node));
        CHECK_THAT(s.core->status_json(), Catch::Contains("tenants.conf:3: model: " + std::string(name)));
        CHECK(s.result("chain", request_of(2)) == expected);
    }
    CHECK(s.reload("model=chain.onnx").empty());
    CHECK(s.result("chain", request_of(2)) == expected);
    for (const auto& [name, node] : bad)
        CHECK_THAT(s.error_of("model=" + std::string(name) + ".onnx"),
                   Catch::StartsWith("model 2 ") && Catch::Contains(node));

    // One that goes bad after it was looked at is refused when it is loaded.
    s.start("model=chain.onnx");
    put("chain.onnx", whole.substr(0, 40));
    auto a = s.ask("chain", request_of(2));
    REQUIRE(std::holds_alternative<refused>(a));
    CHECK_THAT(std::get<refused>(a).what(), Catch::Contains("model"));
    put("chain.onnx", whole);
    CHECK(s.result("chain", request_of(2)) == expected);
}

#ifdef GPUSHARE_ONNXRUNTIME

TEST_CASE("ONNX Runtime gives the same bits for a cut model and for the whole one", "[examples]") {
    const std::vector<onnx_engine> engines{onnxruntime_of(GPUSHARE_ONNXRUNTIME)};
    rig s("model=chain.onnx engine=onnxruntime", &engines);
    const auto expected = s.result("chain", request_of(3));
    s.start("model=chain.onnx cut_to=1us shape=x:3x8", &engines);
    CHECK(s.result("chain", request_of(3)) == expected);
}

/// The page detector, where `./dev setup serve` has fetched it; empty elsewhere.
std::filesystem::path page_detector() {
    std::error_code missing;  // then the range is empty
    for (const auto& e : std::filesystem::recursive_directory_iterator(
             GPUSHARE_MODELS, std::filesystem::directory_options::skip_permission_denied, missing))
        if (e.path().extension() == ".onnx" && e.path().filename().string().find("_det_") != std::string::npos)
            return e.path();
    return {};
}

TEST_CASE("ONNX Runtime gives the same bits for a cut page detector and for the whole one", "[examples]") {
    const auto found = page_detector();
    if (found.empty()) {
        WARN("left out: ./dev setup serve fetches the page detector");
        return;
    }
    const std::vector<onnx_engine> engines{onnxruntime_of(GPUSHARE_ONNXRUNTIME)};
    rig s("model=chain.onnx engine=onnxruntime", &engines);
    std::filesystem::copy_file(found, s.files / "detector.onnx");
    const auto page = [&](const std::string& input) {
        infer_request r;
        tensor x{input, datatype::fp32, {1, 3, 64, 96}, std::vector<std::byte>(std::size_t{3} * 64 * 96 * 4)};
        for (std::size_t i = 0; i < x.data.size() / 4; ++i) x.as<float>()[i] = static_cast<float>(i % 211) / 211 - 0.5F;
        r.inputs.push_back(std::move(x));
        return r;
    };
    s.start("model=detector.onnx", &engines);
    const auto input = s.core->model(s.core->authenticate("key-of-pages"), "detector")->info.inputs.at(0).name;
    const auto whole = s.result("detector", page(input));
    s.start("model=detector.onnx cut_to=200us shape=" + input + ":1x3x64x96", &engines);
    CHECK(s.result("detector", page(input)) == whole);
    const auto plan = text_of(plan_path(s.files / "detector.onnx", 200us));
    CHECK(count(plan, "\npiece") > 1);
    // The plan fits what the engine makes of the model the next time: a new measurement would have
    // other lengths.
    s.start("model=detector.onnx cut_to=200us shape=" + input + ":1x3x64x96", &engines);
    CHECK(s.result("detector", page(input)) == whole);
    CHECK(text_of(plan_path(s.files / "detector.onnx", 200us)) == plan);
}

#endif

}  // namespace inference_server_onnx_test
