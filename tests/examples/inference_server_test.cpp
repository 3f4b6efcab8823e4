// SPDX-License-Identifier: Apache-2.0
// The inference server as its clients see it: over loopback, with its own engines. Never asserts a
// duration.
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "inference_server/client.hpp"
#include "inference_server/http_server.hpp"
#include "inference_server/worker.hpp"
#include "support/catch.hpp"
#include "support/folder.hpp"
#include "support/sanitizers.hpp"

namespace inference_server_test {

using namespace inference_server;
using namespace std::chrono_literals;
using support::folder;

namespace {

constexpr std::string_view two_tenants =
    "name=chat api_key=key-of-chat memory=16MiB compute=60%\nname=batch api_key=key-of-batch memory=16MiB compute=40% "
    "queue_limit=2\n";

/// An engine that runs until it is let go, and throws then for a negative number, and refuses one
/// beyond a million.
class held final : public engine {
public:
    explicit held(std::shared_ptr<std::atomic<bool>> go) : go_(std::move(go)) {}
    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, gpushare::host::kernel_context&) override {
        while (!go_->load()) std::this_thread::sleep_for(1ms);
        if (inputs[0].as<float>()[0] < 0) throw std::runtime_error("a negative number");
        if (inputs[0].as<float>()[0] > 1e6F) throw refused(400, "too large a number");
        outputs.push_back(inputs[0]);
    }

private:
    std::shared_ptr<std::atomic<bool>> go_;
};

/// The same, and notes in which order requests come.
class noting final : public engine {
public:
    struct notes {
        std::mutex mutex;
        std::vector<float> came;
    };
    noting(std::shared_ptr<std::atomic<bool>> go, std::shared_ptr<notes> n)
        : go_(std::move(go)), notes_(std::move(n)) {}
    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, gpushare::host::kernel_context&) override {
        {
            const std::lock_guard lock(notes_->mutex);
            notes_->came.push_back(inputs[0].as<float>()[0]);
        }
        while (!go_->load()) std::this_thread::sleep_for(1ms);
        outputs.push_back(inputs[0]);
    }

private:
    std::shared_ptr<std::atomic<bool>> go_;
    std::shared_ptr<notes> notes_;
};

/// Says letters; the one at `breaks_at` waits until it is let go, and throws.
class fragile final : public engine {
public:
    struct script {
        std::atomic<int> loads{0}, breaks_at{-1}, breaks{0}, may_break{0};
        std::atomic<bool> slowly{false};  // a token takes a millisecond
    };
    explicit fragile(std::shared_ptr<script> s) : script_(std::move(s)) { ++script_->loads; }
    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, gpushare::host::kernel_context&) override {
        if (inputs[0].as<float>()[0] < 0) throw std::runtime_error("a negative number");
        outputs.push_back(inputs[0]);
    }
    std::unique_ptr<generation> generate(const std::string&, std::size_t) override {
        return std::make_unique<text>(script_);
    }

private:
    class text final : public generation {
    public:
        explicit text(std::shared_ptr<script> s) : script_(std::move(s)) {}
        std::optional<std::string> next() override {
            if (said_ == script_->breaks_at) {
                for (const int n = script_->breaks++; script_->may_break <= n;) std::this_thread::sleep_for(1ms);
                throw std::runtime_error("broken");
            }
            ++said_;
            if (script_->slowly) std::this_thread::sleep_for(1ms);
            return "a";
        }

    private:
        std::shared_ptr<script> script_;
        int said_ = 0;
    };
    std::shared_ptr<script> script_;
};

struct server {
    explicit server(http_options options = {}, std::string_view tenants = two_tenants, service_options how = {})
        : files(written(tenants)),
          service_how(std::move(how)),
          core(service_of()),
          http(std::make_unique<http_server>(*core, std::move(options))) {}
    ~server() {
        go->store(true);
        script->may_break = 1000;
    }

    static std::unique_ptr<folder> written(std::string_view tenants) {
        auto f = std::make_unique<folder>();
        f->write("tenants", tenants);
        return f;
    }
    [[nodiscard]] std::unique_ptr<service> service_of() const {
        model_info info{"held", "test", {{"INPUT", datatype::fp32, {1}}}, {{"INPUT", datatype::fp32, {1}}}, 0, false};
        auto slow = info, fragile_info = info;
        slow.name = "slow";  // to load
        fragile_info.name = "fragile";
        fragile_info.streams = true;
        auto noting_info = info, wide = info;
        noting_info.name = "noting";
        wide.name = "wide";
        wide.inputs[0].shape = wide.outputs[0].shape = {-1};
        auto how = service_how;
        how.tenants = *files / "tenants";
        how.journal = *files / "usage";
        how.node = {.memory = gpushare::bytes{64 << 20}, .sms = 2};
        return std::make_unique<service>(
            std::move(how),
            std::vector<model_source>{
                tiny_mlp(),
                tiny_letters(),
                tensor_parallel_block(),
                busy_model("busy", 0ns),
                {info, [g = go](std::pmr::memory_resource&) { return std::make_unique<held>(g); }},
                {wide, [g = go](std::pmr::memory_resource&) { return std::make_unique<held>(g); }},
                {slow,
                 [g = go, n = slow_loads](std::pmr::memory_resource&) {
                     ++*n;
                     while (!g->load()) std::this_thread::sleep_for(1ms);
                     return std::make_unique<held>(g);
                 }},
                {noting_info,
                 [g = go, n = notes](std::pmr::memory_resource&) { return std::make_unique<noting>(g, n); }},
                {fragile_info, [s = script](std::pmr::memory_resource&) { return std::make_unique<fragile>(s); }}});
    }
    void rewrite(std::string_view tenants) const {
        files->write("next", tenants);
        std::filesystem::rename(*files / "next", *files / "tenants");
    }
    [[nodiscard]] gpushare::usage_amounts bill_of(std::string_view tenant) const {
        gpushare::usage_invoices bill{gpushare::wall_time::min(), gpushare::wall_time::max()};
        (void)gpushare::usage_journal::read(*files / "usage", [&](const gpushare::usage_line& l) { bill.add(l); });
        return bill.of(tenant);
    }
    [[nodiscard]] connection connect() const { return connection(http->port()); }

    std::shared_ptr<std::atomic<bool>> go = std::make_shared<std::atomic<bool>>(false);
    std::shared_ptr<std::atomic<int>> slow_loads = std::make_shared<std::atomic<int>>(0);  // that have begun
    std::shared_ptr<fragile::script> script = std::make_shared<fragile::script>();
    std::shared_ptr<noting::notes> notes = std::make_shared<noting::notes>();
    std::unique_ptr<folder> files;
    service_options service_how;
    std::unique_ptr<service> core;
    std::unique_ptr<http_server> http;
};

std::string rows_of_mlp(std::size_t rows, float first = 0) {
    std::string body =
        R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[)" + std::to_string(rows) + ",16],\"data\":[";
    for (std::size_t i = 0; i < rows * 16; ++i)
        body += (i == 0 ? "" : ",") + std::to_string(first + 0.25F * static_cast<float>(i % 16));
    return body + "]}]}";
}
std::string one(std::string_view number, std::string_view shape = "[1,1]") {
    return std::string(R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":)")
        .append(shape)
        .append(",\"data\":[")
        .append(number)
        .append("]}]}");
}
constexpr std::string_view mlp = "/v2/models/mlp/infer", chat_key = "key-of-chat", batch_key = "key-of-batch";

void eventually(const std::function<bool()>& holds) {
    for (int i = 0; i < 6000 && !holds(); ++i) std::this_thread::sleep_for(10ms);
    CHECK(holds());
}

}  // namespace

TEST_CASE("an inference server answers over one connection, in both forms", "[examples]") {
    server s;
    auto c = s.connect();
    CHECK(c.ask("GET", "/v2/health/live").body == R"({"live":true})");  // KServe's client looks at the bodies
    CHECK(c.ask("GET", "/v2/health/ready").body == R"({"ready":true})");
    CHECK(c.ask("GET", "/v2/models/mlp/ready", chat_key).body == R"({"ready":true})");
    CHECK_THAT(c.ask("GET", "/v2").body, Catch::Contains("binary_tensor_data"));
    CHECK_THAT(c.ask("GET", "/v2/models/mlp", chat_key).body, Catch::Contains("\"shape\":[-1,16]"));
    const auto as_json = c.ask("POST", mlp, chat_key, rows_of_mlp(2));
    REQUIRE(as_json.status == 200);
    const auto y = json::parse(as_json.body).at("outputs").elements()[0];
    CHECK(y.at("shape").text() == "[2,4]");
    CHECK(y.at("data").elements()[1].text() == y.at("data").elements()[5].text());  // the rows are alike

    const std::string head =
        R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,16],"parameters":{"binary_data_size":64}}],"parameters":{"binary_data_output":true}})";
    const auto as_bytes = c.ask("POST", mlp, chat_key, head + std::string(64, '\0'),
                                "Inference-Header-Content-Length: " + std::to_string(head.size()) + "\r\n");
    REQUIRE(as_bytes.status == 200);
    const auto size = std::stoul(as_bytes.header("Inference-Header-Content-Length"));
    CHECK(as_bytes.body.substr(size) == std::string(16, '\0'));  // no bias: zeros give zeros

    CHECK(c.ask(
               "POST", "/v2/models/block/infer", chat_key,
               R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[8,64],"data":[)" +
                   [] {
                       std::string all = "1";
                       for (int i = 1; i < 512; ++i) all += "," + std::to_string(i % 5);
                       return all;
                   }() +
                   "]}]}")
              .status == 200);
}

TEST_CASE("an unknown client and a nonsensical request are told so, and the next request is served", "[examples]") {
    server s({.max_json = 4096});
    const auto fails = [&](int status, std::string_view method, std::string_view path, std::string_view key,
                           std::string_view body = {}, std::string_view more = {}) {
        CAPTURE(path, key, more);
        auto c = s.connect();
        const auto r = c.ask(method, path, key, body, more);
        CHECK(r.status == status);
        CHECK_FALSE(json::parse(r.body).at("error").string().empty());
    };
    fails(401, "POST", mlp, "");
    fails(401, "POST", mlp, "key-of-chaT");
    fails(404, "POST", "/v2/models/none/infer", chat_key, one("1"));
    fails(400, "POST", mlp, chat_key, "{");
    fails(400, "POST", mlp, chat_key, one("1"));
    fails(405, "GET", mlp, chat_key);
    fails(400, "GET", "/v2/models/%2e%2e/ready", chat_key);
    fails(413, "POST", mlp, chat_key, std::string(5000, ' '));
    fails(413, "POST", "/v2/models/letters/generate", chat_key, std::string(5000, ' '),
          "Inference-Header-Content-Length: 10\r\n");
    fails(413, "POST", mlp, chat_key, std::string(5000, ' '), "Inference-Header-Content-Length: 5000\r\n");
    fails(413, "POST", "/v2/repository/index", chat_key, std::string(5000, ' '));
    fails(413, "GET", "/v2/health/live", "", "x");
    fails(400, "POST", mlp, chat_key,
          R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,16],"data":[]}],"parameters":{"sequence_id":1}})");
    fails(415, "POST", mlp, chat_key, "x", "Content-Encoding: gzip\r\n");
    fails(400, "POST", mlp, chat_key, one("1"), "Inference-Header-Content-Length: -1\r\n");
    fails(431, "GET", "/v2", "", "", "X: " + std::string(10'000, 'x') + "\r\n");
    fails(404, "POST", "/v2/models/none/generate_stream", chat_key, R"({"text_input":"a"})");
    fails(400, "POST", "/v2/models/mlp/generate_stream", chat_key, R"({"text_input":"a"})");
    {
        auto c = s.connect();
        c.send("\x16\x03\x01 this is TLS\r\n\r\n");
        CHECK(c.answer().status == 400);
    }
    {
        auto c = s.connect();  // what it announces is too much: refused before it comes
        c.send(
            "POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-chat\r\nContent-Length: "
            "99999999999\r\n\r\n");
        CHECK(c.answer().status == 413);
    }
    auto c = s.connect();
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
}

TEST_CASE("an engine that throws fails its own request, and is loaded anew", "[examples]") {
    server s;
    auto c = s.connect();
    const auto r = c.ask("POST", "/v2/models/busy/infer", chat_key, one("-1"));
    CHECK(r.status == 500);
    CHECK_THAT(r.body, Catch::Contains("a negative number") && Catch::Contains("chat"));
    CHECK(c.ask("POST", "/v2/models/busy/infer", chat_key, one("1")).status == 200);
    CHECK(c.ask("POST", "/v2/models/busy/infer", batch_key, one("1")).status == 200);
}

TEST_CASE("engines that throw beside work that is handed over are followed by new ones, and everybody is answered",
          "[examples]") {
    server s;
    constexpr int askers = 6, each = 150;
    std::atomic<int> good{0}, bad{0};
    std::vector<std::thread> threads;
    for (int n = 0; n < askers; ++n)
        threads.emplace_back([&, n] {
            auto c = s.connect();
            for (int i = 0; i < each; ++i) {
                const auto r = c.ask("POST", "/v2/models/busy/infer", n % 2 == 0 ? chat_key : batch_key,
                                     one((i + n) % 3 == 0 ? "-1" : "1"));
                (r.status == 200 ? good : bad) += 1;
            }
        });
    for (auto& t : threads) t.join();
    CHECK(good + bad == askers * each);
    CHECK(good > 0);
    CHECK(bad >= askers * each / 3);
}

TEST_CASE("requests beyond a tenant's queue are refused with a time; others' aren't", "[examples]") {
    server s;
    std::vector<connection> all;
    for (int i = 0; i < 8; ++i) {
        all.push_back(s.connect());
        std::string body = one("1", "[1]");
        all.back().send(
            "POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nX-API-Key: key-of-batch\r\nContent-Length: " +
            std::to_string(body.size()) + "\r\n\r\n" + body);
    }
    // At most two run or are handed over, and two wait: of eight, four are refused at least.
    eventually([&] {
        const auto status = s.core->status_json();  // of the tenants in the order of their names
        return json::parse(status).at("tenants").elements()[0].at("refusals").number<int>() >= 4;
    });
    auto other = s.connect();
    CHECK(other.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    s.go->store(true);
    int served = 0, refused_ = 0;
    for (auto& c : all) {
        const auto r = c.answer();
        served += r.status == 200;
        if (r.status != 429) continue;
        ++refused_;
        CHECK(std::stoi(r.header("Retry-After")) >= 1);
        CHECK_THAT(r.body, !Catch::Contains(" ms"));  // nobody knows what none has taken
    }
    CHECK(served + refused_ == 8);
    CHECK(refused_ >= 4);

    // Once it is known what they take, it is said.
    auto c = s.connect();
    for (int i = 0; i < 20; ++i)
        CHECK(c.ask("POST", "/v2/models/held/infer", batch_key, one("1", "[1]")).status == 200);
    s.go->store(false);
    const auto refusals = [&] {
        const auto status = s.core->status_json();
        return json::parse(status).at("tenants").elements()[0].at("refusals").number<int>();
    };
    const auto before = refusals();
    for (auto& each : all) each.send_request("POST", "/v2/models/held/infer", batch_key, one("1", "[1]"));
    eventually([&] { return refusals() >= before + 2; });  // two batches may have two each, and two wait
    s.go->store(true);
    int told = 0;
    for (auto& each : all) told += each.answer().body.find(" ms") != std::string::npos;
    CHECK(told >= 2);
}

TEST_CASE("a client that waits past a deadline is told then, whatever runs or is loaded meanwhile", "[examples]") {
    server s;
    std::vector<connection> running;
    for (int i = 0; i < 3; ++i) {  // those that are handed over are late no more
        running.push_back(s.connect());
        running.back().send_request("POST", "/v2/models/held/infer", chat_key, one("1", "[1]"));
    }
    std::string body = one("1", "[1]");
    body.insert(body.size() - 1, R"(,"parameters":{"timeout":50000})");
    std::vector<std::future<int>> told;
    for (const std::string model : {"held", "slow"})
        told.push_back(std::async(std::launch::async, [&, model] {
            return s.connect().ask("POST", "/v2/models/" + model + "/infer", chat_key, body).status;
        }));
    for (auto& t : told) CHECK(t.wait_for(5min) == std::future_status::ready);
    s.go->store(true);
    for (auto& t : told) CHECK(t.get() == 504);
    for (auto& c : running) CHECK(c.answer().status == 200);
}

TEST_CASE("a request with a priority goes before its tenant's others, as far as the tenant's ceiling lets it",
          "[examples]") {
    const std::string ceiling = GENERATE("", " ceiling=3");
    CAPTURE(ceiling);
    std::atomic<int> answered{0};
    server s({}, "name=chat api_key=key-of-chat memory=16MiB compute=60%" + ceiling + "\n");
    const auto chat = s.core->authenticate(chat_key);
    // Without a connection, so that requests arrive in this order.
    const auto ask = [&](int i, std::string_view priority) {
        std::string body = one(std::to_string(i), "[1]");
        if (!priority.empty())
            body.insert(body.size() - 1, R"(,"parameters":{"priority":)" + std::string(priority) + "}");
        s.core->infer(chat, "noting", parse_infer(body, {}),
                      [&](answer a) { answered += std::holds_alternative<infer_response>(a); });
    };
    ask(0, "");
    eventually([&] {  // it runs; the second may be taken from the queue, too, before the urgent ones come
        const std::lock_guard lock(s.notes->mutex);
        return !s.notes->came.empty();
    });
    for (int i = 1; i < 5; ++i) ask(i, "");
    ask(5, "2");
    ask(6, "1");
    ask(7, "0");
    s.go->store(true);
    eventually([&] { return answered == 8; });
    const auto& came = s.notes->came;
    REQUIRE(came.size() == 8);
    const auto place = [&](float n) { return std::ranges::find(came, n) - came.begin(); };
    for (const float urgent : {5.F, 6.F}) {
        CHECK((place(urgent) < place(2)) == !ceiling.empty());
        CHECK((place(urgent) > place(4)) == ceiling.empty());
    }
    for (const auto& [first, then] : {std::pair(2.F, 3.F), {3.F, 4.F}, {4.F, 7.F}}) CHECK(place(first) < place(then));
}

TEST_CASE("short calls of a model without batches go together, and each has an answer of its own", "[examples]") {
    server s;
    constexpr std::string_view held_model = "/v2/models/held/infer";
    auto first = s.connect();
    const auto number_of = [&](std::string_view name) {
        const auto text = s.core->metrics();
        const auto at = text.find(std::string(name) + R"({tenant="chat"} )");
        return at == std::string::npos ? -1 : std::stoi(text.substr(text.find('}', at) + 1));
    };
    const auto batches_of_eight = [&] {
        s.go->store(true);  // until it is known that they are short
        for (int i = 0; i < 20; ++i) CHECK(first.ask("POST", held_model, chat_key, one("1", "[1]")).status == 200);
        const int before = number_of("server_batches_total");
        s.go->store(false);
        std::vector<connection> all;
        // The one that runs, and behind it those that come meanwhile.
        for (int i = 0; i < 8; ++i) {
            all.push_back(s.connect());
            all.back().send_request("POST", held_model, chat_key, one(i == 5 ? "2e6" : std::to_string(i), "[1]"));
        }
        const auto waiting = [&] {
            const auto status = s.core->status_json();  // the values point into the text
            return json::parse(status).at("tenants").elements()[1].at("waiting").number<int>();
        };
        // Fewer wait where a batch that was handed over took several of them, which is as good.
        for (int i = 0; i < 200 && waiting() < 6; ++i) std::this_thread::sleep_for(10ms);
        s.go->store(true);
        for (int i = 0; i < 8; ++i) {
            const auto r = all[static_cast<std::size_t>(i)].answer();
            CAPTURE(i, r.body);
            CHECK(r.status == (i == 5 ? 400 : 200));
            CHECK_THAT(r.body, Catch::Contains(i == 5 ? "too large a number" : "[" + std::to_string(i)));
        }
        return number_of("server_batches_total") - before;
    };
    int batches = batches_of_eight();
    // A busy machine may stop a short call for so long that it counts as a long one.
    for (int again = 0; again < 20 && batches > 3; ++again) batches = batches_of_eight();
    CHECK(batches <= 3);
}

TEST_CASE("texts and loads beyond a tenant's queue are refused as well", "[examples]") {
    server s;
    const auto batch = s.core->authenticate(batch_key);
    const auto text = [&] { return s.core->generate(batch, "letters", {.prompt = "a", .most_tokens = 4096}); };
    const auto status = [&] {
        try {
            (void)text();
            return 200;
        } catch (const refused& r) {
            return r.status;
        }
    };
    {
        std::vector<std::shared_ptr<token_stream>> open;
        for (int i = 0; i < 4; ++i) open.push_back(text());  // two wait, and two are handed over
        CHECK(status() == 429);
        open.pop_back();
        CHECK(status() == 200);
    }
    CHECK(status() == 200);
    std::atomic<int> told{0}, refused_{0};
    for (int i = 0; i < 5; ++i)
        s.core->load(batch, "slow", [&](const refused* why) {
            refused_ += why != nullptr && why->status == 429;
            ++told;
        });
    CHECK(refused_ == 3);
    s.go->store(true);
    eventually([&] { return told == 5; });
}

TEST_CASE("texts that go on and on keep no request waiting", "[examples]") {
    server s;
    const auto chat = s.core->authenticate(chat_key);
    std::atomic<int> over{0};
    std::atomic<bool> stop{false};
    struct reader : std::enable_shared_from_this<reader> {
        std::shared_ptr<token_stream> text;
        std::atomic<int>* over;
        std::atomic<bool>* stop;
        void go() {
            text->more(
                8, [self = shared_from_this()](const std::string&) { return !*self->stop; },
                [self = shared_from_this()](const token_stream::end& e) { e.last ? void(++*self->over) : self->go(); });
        }
    };
    for (int i = 0; i < 4; ++i) {
        auto r = std::make_shared<reader>();
        r->text = s.core->generate(chat, "letters", {.prompt = "a", .most_tokens = 4096});
        r->over = &over;
        r->stop = &stop;
        r->go();
    }
    int over_before = -1;
    std::promise<void> answered;
    auto r = parse_infer(R"({"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["a"]}]})", {});
    s.core->infer(chat, "letters", std::move(r), [&](const answer&) {
        over_before = over;
        answered.set_value();
    });
    answered.get_future().wait();
    stop = true;
    CHECK(over_before < 2);  // else they would have had to end first
    eventually([&] { return over == 4; });
}

TEST_CASE("a text ends with the longest one that its engine knows", "[examples]") {
    const auto files = server::written(two_tenants);
    service core({.tenants = *files / "tenants", .node = {.memory = gpushare::bytes{64 << 20}, .sms = 2}},
                 {tiny_letters(64)});
    const auto chat = core.authenticate(chat_key);
    // The number of letters, or the status.
    const auto said = [&](std::size_t prompt) {
        std::promise<std::size_t> answered;
        auto r = parse_infer(R"({"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":[")" +
                                 std::string(prompt, 'a') + R"("]}]})",
                             {});
        core.infer(chat, "letters", std::move(r), [&](const answer& a) {
            const auto* const why = std::get_if<refused>(&a);
            answered.set_value(why != nullptr ? static_cast<std::size_t>(why->status)
                                              : std::get<infer_response>(a).outputs.at(0).texts().at(0).size());
        });
        return answered.get_future().get();
    };
    CHECK(said(48) == 16);
    CHECK(said(49) == 15);
    CHECK(said(63) == 1);
    CHECK(said(64) == 0);
    CHECK(said(65) == 400);
    CHECK(said(1) == 16);
}

namespace {

/// Reads a prompt until it is told that this is enough, and gives up after a while.
class reader final : public engine {
public:
    struct orders {
        std::atomic<bool> reads{false}, enough{false}, gave_up{false};
    };
    explicit reader(std::shared_ptr<orders> o) : orders_(std::move(o)) {}
    std::unique_ptr<generation> generate(const std::string&, std::size_t) override {
        return std::make_unique<text>(orders_);
    }

private:
    class text final : public generation {
    public:
        explicit text(std::shared_ptr<orders> o) : orders_(std::move(o)) {}
        bool read_on() override {
            orders_->reads = true;
            std::this_thread::sleep_for(1ms);
            if (!orders_->enough && std::chrono::steady_clock::now() > until_) orders_->gave_up = true;
            return !orders_->enough && !orders_->gave_up;
        }
        std::optional<std::string> next() override { return "a"; }

    private:
        std::shared_ptr<orders> orders_;
        const std::chrono::steady_clock::time_point until_ = std::chrono::steady_clock::now() + 5min;
    };
    std::shared_ptr<orders> orders_;
};

}  // namespace

TEST_CASE("others get their turns while a long prompt is read", "[examples]") {
    const auto files = server::written(two_tenants);
    const auto orders = std::make_shared<reader::orders>();
    model_info info{"reader", "test", {{"text_input", datatype::bytes, {1}}}, {{"text_output", datatype::bytes, {1}}},
                    0,        true};
    service core(
        {.tenants = *files / "tenants", .node = {.memory = gpushare::bytes{64 << 20}, .sms = 1}},
        {tiny_mlp(), {info, [orders](std::pmr::memory_resource&) { return std::make_unique<reader>(orders); }}});
    const auto text = core.generate(core.authenticate(chat_key), "reader", {.prompt = "a", .most_tokens = 4});
    std::string said;
    std::promise<token_stream::end> ended;
    text->more(
        8, [&](const std::string& t) { return said += t, true; },
        [&](token_stream::end e) { ended.set_value(std::move(e)); });
    eventually([&] { return orders->reads.load(); });
    core.infer(core.authenticate(batch_key), "mlp", parse_infer(rows_of_mlp(1), {}),
               [&](const answer&) { orders->enough = true; });
    const auto end = ended.get_future().get();
    CHECK_FALSE(orders->gave_up);
    CHECK(orders->enough);
    CHECK(end.last);
    CHECK(end.status() == 200);
    CHECK(said == "aaaa");
}

TEST_CASE("an engine that breaks twice is followed by one, not by two", "[examples]") {
    server s;
    const auto chat = s.core->authenticate(chat_key);
    auto c = s.connect();
    const auto ask = [&](std::string_view number) {
        return c.ask("POST", "/v2/models/fragile/infer", chat_key, one(number, "[1]")).status;
    };
    CHECK(ask("1") == 200);
    const auto piece = [&](const std::shared_ptr<token_stream>& text) {
        std::promise<token_stream::end> end;
        text->more(
            8, [](const std::string&) { return true; }, [&](token_stream::end e) { end.set_value(std::move(e)); });
        return end.get_future().get();
    };
    const auto text = [&] { return s.core->generate(chat, "fragile", {.prompt = "", .most_tokens = 100}); };
    const auto first = text(), second = text();
    CHECK_FALSE(piece(first).last);
    CHECK_FALSE(piece(second).last);
    s.script->breaks_at = 8;
    std::promise<token_stream::end> ends[2];
    std::size_t n = 0;
    for (const auto& t : {first, second})  // the second one waits behind the first
        t->more(
            8, [](const std::string&) { return true; },
            [end = &ends[n++]](token_stream::end e) { end->set_value(std::move(e)); });
    s.script->may_break = 1;
    CHECK(ends[0].get_future().get().status() == 500);
    c.send_request("POST", "/v2/models/fragile/infer", chat_key, one("1", "[1]"));
    eventually([&] { return s.script->loads == 2; });
    s.script->may_break = 2;
    CHECK(ends[1].get_future().get().status() == 500);
    CHECK(c.answer().status == 200);
    CHECK(ask("1") == 200);
    CHECK(s.script->loads == 2);
    CHECK(piece(first).status() == 503);  // another engine doesn't know the text
}

TEST_CASE("tokens come as events, and a client that goes away ends its text alone", "[examples]") {
    server s;
    const std::string
        body = R"({"text_input":"once upon","max_tokens":20})",
        head =
            "POST /v2/models/letters/generate_stream HTTP/1.1\r\nHost: x\r\nX-API-Key: key-of-chat\r\nContent-Length: ";
    std::string streamed;
    {
        auto c = s.connect();
        c.send(head + std::to_string(body.size()) + "\r\n\r\n" + body);
        CHECK_THAT(c.until("\r\n\r\n"), Catch::Contains("text/event-stream"));
        for (int i = 0; i < 20; ++i) {
            const auto event = c.until("\n\n\r\n");
            streamed += json::parse(std::string_view(event).substr(event.find("data: ") + 6,
                                                                   event.size() - event.find("data: ") - 10))
                            .at("text_output")
                            .string();
        }
        CHECK_FALSE(c.until("0\r\n\r\n").empty());
        CHECK(c.ends());
    }
    auto c = s.connect();
    CHECK(json::parse(c.ask("POST", "/v2/models/letters/generate", chat_key, body).body).at("text_output").string() ==
          streamed);
    {
        const std::string endless = R"({"text_input":"once","max_tokens":4096})";
        auto leaves = s.connect();
        leaves.send(head + std::to_string(endless.size()) + "\r\n\r\n" + endless);
        CHECK_FALSE(leaves.until("text_output").empty());
    }
    eventually([&] { return s.http->connections() == 1; });
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
}

TEST_CASE("a client that sends nothing more still reads its text", "[examples]") {
    server s;
    auto c = s.connect();
    c.send_request("POST", "/v2/models/letters/generate_stream", chat_key, R"({"text_input":"once","max_tokens":200})");
    c.end_of_requests();
    int events = 0;
    while (!c.until("\n\n\r\n").empty()) ++events;
    CHECK(events == 200);
}

TEST_CASE("a request for the head gets no body, whatever the answer", "[examples]") {
    server s;
    for (const auto port : {s.http->port(), s.http->admin_port()}) {
        connection c(port);
        for (const auto* path : {"/v2/health/live", "/metrics", "/nothing"}) {
            c.send_request("HEAD", path);
            const auto head = c.until("\r\n\r\n");
            CHECK_THAT(head, Catch::StartsWith("HTTP/1.1"));
            if (head.find("Connection: close") != std::string::npos) {
                CHECK(c.until("}").empty());
                break;
            }
        }
    }
    connection c(s.http->admin_port());
    c.send_request("HEAD", "/metrics");
    CHECK_THAT(c.until("\r\n\r\n"), Catch::StartsWith("HTTP/1.1 200"));
    CHECK(c.ask("GET", "/status.json").status == 200);  // not the rest of a body
}

TEST_CASE("a client of HTTP/1.0 is told whether its connection stays", "[examples]") {
    server s;
    auto c = s.connect();
    for (const bool stays : {true, true, false}) {
        c.send(std::string("GET /v2/health/live HTTP/1.0\r\n") + (stays ? "Connection: keep-alive\r\n\r\n" : "\r\n"));
        const auto r = c.answer();
        CHECK(r.status == 200);
        // otherwise such a client waits for the end
        CHECK((r.header("Connection") == "keep-alive") == stays);
    }
    CHECK(c.ends());
}

TEST_CASE("an exception in the server's thread ends nothing", "[examples]") {
    server s;
    auto c = s.connect();
    s.http->post([] { throw std::runtime_error("of a test"); });
    CHECK(c.ask("GET", "/v2/health/live").status == 200);
}

TEST_CASE("a body isn't kept when it has been read", "[examples]") {
    server s;
    std::vector<connection> all;
    const auto body = std::string(1 << 20, ' ') + one("1", "[1]");
    for (int i = 0; i < 24; ++i) all.push_back(s.connect());
    const auto before = ::mallinfo2();
    for (auto& c : all) c.send_request("POST", "/v2/models/held/infer", chat_key, body);
    eventually([&] {
        const auto status = s.core->status_json();
        return json::parse(status).at("tenants").elements()[1].at("waiting").number<int>() >= 22;
    });
    const auto after = ::mallinfo2();
    CHECK(after.uordblks + after.hblkhd < before.uordblks + before.hblkhd + (std::size_t{12} << 20));
    s.go->store(true);
    for (auto& c : all) CHECK(c.answer().status == 200);
}

TEST_CASE("a client that leaves much work to a thread keeps others waiting for one piece of it", "[examples]") {
    inference_server::worker reads;
    std::string order;
    const auto letter = [&](char c) { return [&order, c] { order += c; }; };
    const int a = 0, b = 0, c = 0;
    std::latch begun(1), all_there(1);
    reads.later(
        [&] {
            begun.count_down();
            all_there.wait();
            order += 'a';
        },
        &a);
    begun.wait();
    for (int i = 0; i < 3; ++i) reads.later(letter('a'), &a);
    reads.later([]() -> void { throw std::runtime_error("nobody hears of it"); }, &b);
    reads.later(letter('b'), &b);
    reads.later(letter('c'), &c);
    all_there.count_down();
    reads.stop();
    CHECK(order == "acabaa");
    reads.later(letter('d'), &c);
    CHECK(order == "acabaa");
}

TEST_CASE("a large body is answered as a small one is, though another thread reads it", "[examples]") {
    server s;
    auto c = s.connect();
    const std::string padding(GENERATE(std::size_t{10'000}, std::size_t{100'000}), ' ');  // another one reads each
    const std::string text = R"({"text_input":"abc","max_tokens":5})";
    const auto generate = "/v2/models/letters/generate";
    const auto small = c.ask("POST", generate, chat_key, text);
    REQUIRE(small.status == 200);
    CHECK(c.ask("POST", generate, chat_key, padding + text).body == small.body);
    CHECK(c.ask("POST", generate, chat_key, padding + text + "}").status == 400);
    CHECK(c.ask("POST", mlp, chat_key, padding + rows_of_mlp(1)).body ==
          c.ask("POST", mlp, chat_key, rows_of_mlp(1)).body);
    constexpr std::size_t bytes = 2 << 20;  // more rows than the model takes
    const std::string head = R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[)" + std::to_string(bytes / 64) +
                             R"(,16],"parameters":{"binary_data_size":)" + std::to_string(bytes) + "}}]}";
    CHECK(c.ask("POST", mlp, chat_key, head + std::string(bytes, '\0'),
                "Inference-Header-Content-Length: " + std::to_string(head.size()) + "\r\n")
              .status == 400);
    auto streamed = s.connect();
    const auto all = streamed.ask("POST", "/v2/models/letters/generate_stream", chat_key, padding + text);
    CHECK(all.status == 200);
}

TEST_CASE("a large answer is written as a small one is, though another thread writes it", "[examples]") {
    server s;
    s.go->store(true);
    auto c = s.connect();
    const auto n = GENERATE(std::size_t{100}, std::size_t{4000}, std::size_t{40'000}, std::size_t{300'000});
    const bool binary = GENERATE(true, false);
    CAPTURE(n, binary);
    const auto bytes = n * sizeof(float);
    const std::string head = R"({"parameters":{"binary_data_output":)" + std::string(binary ? "true" : "false") +
                             R"(},"inputs":[{"name":"INPUT","datatype":"FP32","shape":[)" + std::to_string(n) +
                             R"(],"parameters":{"binary_data_size":)" + std::to_string(bytes) + "}}]}";
    const auto ask = [&] {
        return c.ask("POST", "/v2/models/wide/infer", chat_key, head + std::string(bytes, '\0'),
                     "Inference-Header-Content-Length: " + std::to_string(head.size()) + "\r\n");
    };
    for (int i = 0; i < 2; ++i) {
        const auto a = ask();
        CHECK(a.status == 200);
        if (binary)
            CHECK(std::string_view(a.body).ends_with(std::string(bytes, '\0')));
        else
            CHECK(json::parse(a.body).at("outputs").elements(1).at(0).at("data").elements(n).size() == n);
    }
}

TEST_CASE("a slow sender is closed, and doesn't keep others from coming", "[examples]") {
    server s({.connections = {.most = 4, .strangers = 4}, .header_timeout = 1s, .body_timeout = 1s});
    std::vector<connection> slow;
    for (int i = 0; i < 4; ++i) slow.push_back(s.connect());
    slow[0].send("POST /v2/mod");
    slow[1].send(
        "POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nX-API-Key: key-of-chat\r\nContent-Length: 100\r\n\r\n{");
    auto c = s.connect();  // in place of the oldest one
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    for (auto& each : slow) CHECK(each.ends());
}

namespace {

/// Of 4000 bytes each, of which `some` come.
std::vector<connection> four_uploads(const server& to, std::string_view key, std::string_view some) {
    std::vector<connection> all;
    for (int i = 0; i < 4; ++i) {
        all.push_back(to.connect());
        std::string request = "POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nX-API-Key: ";
        all.back().send(request.append(key).append("\r\nContent-Length: 4000\r\n\r\n").append(some));
    }
    return all;
}

}  // namespace

TEST_CASE("connections that say nothing keep nobody out", "[examples]") {
    server s({.connections = {.most = 4, .strangers = 2}});
    auto mine = s.connect();
    CHECK(mine.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    std::vector<connection> silent;
    for (int i = 0; i < 10; ++i) silent.push_back(s.connect());
    CHECK(s.connect().ask("POST", mlp, batch_key, rows_of_mlp(1)).status == 200);
    for (int i = 0; i < 8; ++i) CHECK(silent[static_cast<std::size_t>(i)].ends());
    CHECK(mine.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);  // it has shown a key
    std::vector<connection> keyed;
    for (int i = 0; i < 8; ++i) {
        keyed.push_back(s.connect());
        CHECK(keyed.back().ask("POST", "/v2/repository/index", batch_key).status == 200);
    }
    CHECK(keyed[0].ends());  // who has most goes
    CHECK(mine.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
}

TEST_CASE("strangers hold up no client whose key is known", "[examples]") {
    server s;
    auto known = s.connect(), stranger = s.connect();
    CHECK(known.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    std::promise<void> go;
    std::atomic<bool> waited{false};
    s.http->post([&, until = go.get_future().share()] { waited = until.wait_for(5min) == std::future_status::ready; },
                 true);
    stranger.send_request("GET", "/v2/health/live");
    for (int i = 0; i < 3; ++i) CHECK(known.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    CHECK(known.ask("POST", mlp, "of nobody", rows_of_mlp(1)).status == 401);
    CHECK(!stranger.has_some());
    go.set_value();
    CHECK(stranger.answer().status == 200);
    CHECK(waited);
}

TEST_CASE("a connection keeps what it has sent when its key is known", "[examples]") {
    server s;
    auto all_at_once = s.connect(), by_bytes = s.connect(), waits = s.connect();
    const auto body = rows_of_mlp(1);
    const auto request = [&](std::string_view key) {
        return "POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nX-API-Key: " + std::string(key) +
               "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    };
    const std::string live = "GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n";
    const auto some = live + request(chat_key) + request(batch_key) + live + request(chat_key);
    all_at_once.send(some);
    for (const char byte : some) by_bytes.send({&byte, 1});
    for (auto* c : {&all_at_once, &by_bytes})
        for (int i = 0; i < 5; ++i) CHECK(c->answer().status == 200);
    waits.send(
        "POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nX-API-Key: key-of-chat\r\nExpect: 100-continue\r\n"
        "Content-Length: " +
        std::to_string(body.size()) + "\r\n\r\n");
    CHECK(waits.answer().status == 100);
    waits.send(body);
    CHECK(waits.answer().status == 200);
}

TEST_CASE("a server may go while connections come and show their keys", "[examples]") {
    server s;
    for (int round = 0; round < support::few(20); ++round) {
        s.http = nullptr;
        s.http = std::make_unique<http_server>(*s.core, http_options{.connections = {.most = 6, .strangers = 3}});
        std::vector<std::jthread> clients;
        std::atomic<int> asked{0};
        for (int i = 0; i < 4; ++i)
            clients.emplace_back([&, port = s.http->port()](const std::stop_token& over) {
                while (!over.stop_requested()) try {
                        connection c(port);
                        c.reset_at_end();
                        c.send_request("POST", mlp, chat_key, rows_of_mlp(1));
                        ++asked;
                        if (asked % 3 != 0) (void)c.answer();
                    } catch (const std::runtime_error&) {  // the server is gone
                        std::this_thread::sleep_for(1ms);
                    }
            });
        eventually([&] { return asked > 4 * round; });
        round % 2 == 0 ? s.http->stop(0ms) : s.http->stop(10min);
        for (auto& c : clients) c.request_stop();
        clients.clear();
    }
    s.http = nullptr;
    s.http = std::make_unique<http_server>(*s.core, http_options{});
    CHECK(s.connect().ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
}

TEST_CASE("a request says its end and its key once and in one way", "[examples]") {
    server s;
    const std::string smuggled =
        "POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nX-API-Key: key-of-chat\r\nContent-Length: 0\r\n\r\n";
    for (const std::string lines :
         {"Host: x\r\nTransfer-Encoding: xchunked\r\n", "Host: x\r\nTransfer-Encoding: gzip, chunked\r\n",
          "Host: x\r\nTransfer-Encoding: chunked, identity\r\n", "Host: x\r\nTransfer-Encoding: identity\r\n",
          "Host: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
          "Host: x\r\nTransfer-Encoding:\r\n", "Host: x\r\nTransfer-Encoding: \"chunked\"\r\n",
          "Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n",
          "Host: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n",
          "Host: x\r\nContent-Length: 0\r\nContent-Length: 4\r\n", "Host: x\r\nContent-Length: 0, 4\r\n",
          "Host: x\r\nContent-Length: +4\r\n", "Host: x\r\nContent-Length: 4\r\nContent-Length: 4\r\n",
          "Host: x\r\nHost: y\r\nContent-Length: 0\r\n", "Content-Length: 0\r\n",
          "Host: x\r\nAuthorization: Bearer key-of-chat\r\nContent-Length: 0\r\n",
          "Host: x\r\nX-API-Key: key-of-batch\r\nContent-Length: 0\r\n"}) {
        CAPTURE(lines);
        auto c = s.connect();
        c.send("POST /v2/repository/index HTTP/1.1\r\nX-API-Key: key-of-chat\r\n" + lines + "\r\n" + smuggled);
        c.end_of_requests();
        CHECK(c.answer().status == 400);
        CHECK(c.answer().status == 0);  // nothing of what follows is a request
    }
    auto old = s.connect();
    old.send("POST /v2/repository/index HTTP/1.0\r\nX-API-Key: key-of-chat\r\nTransfer-Encoding: chunked\r\n\r\n" +
             smuggled);
    CHECK(old.answer().status == 400);
    auto c = s.connect();
    c.send(
        "POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nX-API-Key: key-of-chat\r\nTransfer-Encoding: "
        "Chunked\r\n\r\n0\r\n\r\n" +
        smuggled);
    CHECK(c.answer().status == 200);
    CHECK(c.answer().status == 200);
}

TEST_CASE("pages of others in an operator's browser ask nothing", "[examples]") {
    server s;
    const auto status = [&](std::string_view method, const std::string& lines) {
        connection c(s.http->admin_port());
        c.send(std::string(method) + (method == "POST" ? " /reload" : " /status.json") + " HTTP/1.1\r\n" + lines +
               "Content-Length: 0\r\n\r\n");
        return c.answer().status;
    };
    for (const std::string host : {"127.0.0.1:8002", "localhost:8002", "LocalHost", "[::1]:8002", "127.0.0.1"}) {
        CAPTURE(host);
        CHECK(status("GET", "Host: " + host + "\r\n") == 200);
        CHECK(status("POST", "Host: " + host + "\r\nOrigin: http://" + host + "\r\n") == 200);
    }
    for (const std::string host : {"rebound.example:8002", "localhost.example", "127.0.0.1.example:8002", "", "[::1",
                                   "x[::1]", "localhost:8002@y"}) {
        CAPTURE(host);
        CHECK(status("GET", "Host: " + host + "\r\n") == 403);
    }
    for (const std::string origin :
         {"http://example.org", "null", "http://localhost", "https://localhost:8002", "http://localhost:8000"}) {
        CAPTURE(origin);
        CHECK(status("POST", "Host: localhost:8002\r\nOrigin: " + origin + "\r\n") == 403);
    }
    CHECK(status("POST", "Host: localhost:8002\r\nSec-Fetch-Site: cross-site\r\n") == 403);
}

TEST_CASE("a protocol that takes no connections isn't ready", "[examples]") {
    server s;
    s.core->shut(true);
    CHECK(s.connect().ask("GET", "/v2/health/ready").status == 503);
    s.core->shut(false);
    CHECK(s.connect().ask("GET", "/v2/health/ready").status == 200);
}

TEST_CASE("uploads that are announced and never come keep nobody out", "[examples]") {
    server s({.max_bodies = 4096});
    const auto announced = four_uploads(s, chat_key, "{");
    eventually([&] { return s.http->connections() == 4; });
    CHECK(s.connect().ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    CHECK(s.connect().ask("POST", mlp, chat_key, std::string(5000, ' ')).status == 429);
}

TEST_CASE("a tenant's uploads take half of the room, and leave the rest to others", "[examples]") {
    server s({.max_bodies = 8192});
    const auto uploads = four_uploads(s, batch_key, std::string(2000, ' '));
    eventually([&] { return s.http->connections() == 4 && (uploads[2].has_some() || uploads[3].has_some()); });
    CHECK(s.connect().ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
}

TEST_CASE("a changed file of tenants changes who is served", "[examples]") {
    server s;
    auto c = s.connect();
    CHECK(c.ask("POST", mlp, batch_key, rows_of_mlp(1)).status == 200);
    s.files->write("tenants",
                   "name=chat api_key=newer-key-of-chat memory=16MiB compute=60%\nname=third api_key=key-of-third "
                   "memory=16MiB compute=40%\n");
    CHECK(s.core->reload().empty());
    CHECK(c.ask("POST", mlp, "newer-key-of-chat", rows_of_mlp(1)).status == 200);
    CHECK(s.connect().ask("POST", mlp, chat_key).status == 401);
    CHECK(s.connect().ask("POST", mlp, batch_key).status == 401);
    CHECK(c.ask("POST", mlp, "key-of-third", rows_of_mlp(1)).status == 200);
    s.files->write("tenants", "name=chat memory=nonsense");
    CHECK_THAT(s.core->reload(), Catch::Contains("nonsense") || Catch::Contains("memory"));
    CHECK(c.ask("POST", mlp, "key-of-third", rows_of_mlp(1)).status == 200);
    auto operators = connection(s.http->admin_port());
    CHECK_THAT(operators.ask("GET", "/status.json").body, Catch::Contains("\"name\":\"third\""));
    CHECK_THAT(operators.ask("GET", "/metrics").body, Catch::Contains("server_requests_total{tenant=\"third\"} 2"));
    CHECK_THAT(operators.ask("GET", "/").body, Catch::Contains("</html>"));
    CHECK_THAT(operators.ask("GET", "/timeline.json").body, Catch::Contains("traceEvents"));
    CHECK(operators.ask("GET", "/etc/passwd").status == 404);
    CHECK(s.connect().ask("GET", "/metrics").status == 404);  // not for tenants
}

TEST_CASE("a late request of a tenant that a reload removed is refused, and leaves nothing behind", "[examples]") {
    server s;
    const auto late = s.core->authenticate(chat_key);
    s.files->write("tenants", "name=third api_key=key-of-third memory=16MiB compute=40%\n");
    CHECK(s.core->reload().empty());
    CHECK_THROWS(s.core->load(late, "mlp", [](const refused*) {}));
    CHECK(s.connect().ask("POST", mlp, "key-of-third", rows_of_mlp(1)).status == 200);
    CHECK(s.core->drain(std::chrono::steady_clock::now() + 5min));
}

TEST_CASE("a tenant that comes back under its name is another one", "[examples]") {
    server s;
    auto c = s.connect();
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    auto late = s.core->authenticate(chat_key);
    s.rewrite("name=batch api_key=key-of-batch memory=16MiB compute=40%\n");
    CHECK(s.core->reload().empty());
    s.rewrite(
        "name=chat api_key=newer-key-of-chat memory=16MiB\nname=batch api_key=key-of-batch memory=16MiB compute=40%\n");
    CHECK(s.core->reload().empty());
    CHECK(c.ask("POST", mlp, "newer-key-of-chat", rows_of_mlp(1)).status == 200);
    CHECK_THROWS_AS(s.core->load(late, "mlp", [](const refused*) {}), refused);
    CHECK(c.ask("POST", mlp, "newer-key-of-chat", rows_of_mlp(1)).status == 200);
    late = {};  // before the service goes
    s.http.reset();
    s.core.reset();
    CHECK(s.bill_of("chat").requests == 3);
}

namespace {

/// Counts calls with an input of another size than the model's.
class of_size final : public engine {
public:
    of_size(std::size_t size, std::shared_ptr<std::atomic<int>> wrong) : size_(size), wrong_(std::move(wrong)) {}
    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, gpushare::host::kernel_context&) override {
        if (inputs[0].data.size() != size_ * sizeof(float)) ++*wrong_;
        outputs.push_back(inputs[0]);
    }

private:
    std::size_t size_;
    std::shared_ptr<std::atomic<int>> wrong_;
};

}  // namespace

TEST_CASE("a request fits the model that computes it, though a reload changes the model meanwhile", "[examples]") {
    const auto wrong = std::make_shared<std::atomic<int>>(0);
    service_options how;
    how.model_of = [wrong](const model_setting& m, const std::string&) {
        // here the setting is the size of the input
        const tensor_info info{"INPUT", datatype::fp32, {m.batch}};
        return model_source{
            {m.name, "test", {info}, {info}, 0, false},
            [wrong, n = m.batch](std::pmr::memory_resource&) { return std::make_unique<of_size>(n, wrong); }};
    };
    server s({}, two_tenants, std::move(how));
    s.files->write("m.onnx", "a model");
    const auto who = s.core->authenticate(chat_key);
    std::atomic<bool> over{false};
    std::atomic<int> asked{0};
    const auto ask = [&] {
        for (std::int64_t n = 1; !over; n = 3 - n) {
            infer_request r;
            r.inputs.push_back({"INPUT", datatype::fp32, {n}, std::vector<std::byte>(4 * static_cast<std::size_t>(n))});
            try {
                s.core->infer(who, "m", std::move(r), [](const answer&) {});
                ++asked;
            } catch (const refused&) {
            }
        }
    };
    std::vector<std::thread> clients;
    for (int i = 0; i < 3; ++i) clients.emplace_back(ask);
    for (int i = 0; i < 200; ++i) {
        s.rewrite("name=chat api_key=key-of-chat memory=16MiB compute=60%\n  model=m.onnx batch=" +
                  std::to_string(1 + i % 2) + "\n");
        CHECK(s.core->reload().empty());
    }
    eventually([&] { return asked > 100; });
    over = true;
    for (auto& each : clients) each.join();
    CHECK(s.core->drain(std::chrono::steady_clock::now() + 5min));
    CHECK(*wrong == 0);
}

TEST_CASE("a bad file of tenants changes nothing", "[examples]") {
    server s;
    auto c = s.connect();
    CHECK(c.ask("POST", mlp, batch_key, rows_of_mlp(1)).status == 200);
    for (const auto* bad :
         {"", "\n# nobody\n", "name=chat api_key=key-of-chat memory=16MiB compute=60%",
          "name=chat api_key=key-of-chat memory=16MiB compute=60% streams=3\n"}) {  // what can't be changed
        CAPTURE(bad);
        s.rewrite(bad);
        CHECK_FALSE(s.core->reload().empty());
        CHECK_THAT(c.ask("POST", "/v2/repository/index", batch_key).body,
                   Catch::Contains(R"("mlp","version":"1","state":"READY")"));
        CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    }
    s.rewrite("tenants=none\n");
    CHECK(s.core->reload().empty());
    CHECK(s.connect().ask("POST", mlp, chat_key).status == 401);
}

TEST_CASE("a key that is taken away opens nothing that it had opened", "[examples]") {
    server s;
    const auto chat = s.core->authenticate(chat_key), batch = s.core->authenticate(batch_key);
    CHECK(s.core->reload().empty());
    CHECK_FALSE(chat.is_revoked());
    s.rewrite(
        "name=chat api_key=newer-of-chat memory=16MiB compute=60%\nname=batch api_key=key-of-batch memory=16MiB "
        "compute=40%\n");
    CHECK(s.core->reload().empty());
    CHECK(chat.is_revoked());
    CHECK_FALSE(batch.is_revoked());
    CHECK_THROWS_AS(s.core->authenticate(chat_key), refused);
    s.rewrite(
        "name=chat api_key=key-of-batch memory=16MiB compute=60%\nname=batch api_key=key-of-chat memory=16MiB "
        "compute=40%\n");
    CHECK(s.core->reload().empty());
    CHECK(batch.is_revoked());  // it is another one's
    CHECK(s.core->authenticate(batch_key).who->name() == "chat");
    s.rewrite("name=batch api_key=key-of-chat memory=16MiB compute=40%\n");
    CHECK(s.core->reload().empty());
    CHECK_THROWS_AS(s.core->authenticate(batch_key), refused);
}

#ifndef SUPPORT_SANITIZED  // UndefinedBehaviorSanitizer opens a pipe to look at an exception's type
TEST_CASE("a revocation that can't be read comes when it can", "[examples]") {
    server s;
    ::rlimit files{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &files) == 0);
    auto none = files;
    none.rlim_cur = 3;  // those that are open stay
    s.rewrite(
        "name=chat api_key=newer-of-chat memory=16MiB compute=60%\nname=batch api_key=key-of-batch memory=16MiB "
        "compute=40%\n");
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    const auto why = s.core->reload();
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &files) == 0);
    CHECK_THAT(why, Catch::Contains("cannot read"));
    const auto is_known = [&](std::string_view key) {
        try {
            (void)s.core->authenticate(key);
            return true;
        } catch (const refused&) {
            return false;
        }
    };
    eventually([&] { return is_known("newer-of-chat"); });
    CHECK_FALSE(is_known(chat_key));
    // Another file of the same size and time is noticed, too.
    const auto time = std::filesystem::last_write_time(*s.files / "tenants");
    s.files->write(
        "next",
        "name=chat api_key=other-of-chat memory=16MiB compute=60%\nname=batch api_key=key-of-batch memory=16MiB "
        "compute=40%\n");
    std::filesystem::last_write_time(*s.files / "next", time);
    std::filesystem::rename(*s.files / "next", *s.files / "tenants");
    eventually([&] { return is_known("other-of-chat"); });
    CHECK_FALSE(is_known("newer-of-chat"));
    std::filesystem::remove(*s.files / "tenants");
    REQUIRE(::mkfifo((*s.files / "tenants").c_str(), 0600) == 0);
    CHECK_THAT(s.core->reload(), Catch::Contains("no regular file"));
    CHECK(is_known("other-of-chat"));
}
#endif

TEST_CASE("tenants take turns with what they load", "[examples]") {
    server s;
    const auto chat = s.core->authenticate(chat_key), batch = s.core->authenticate(batch_key);
    std::mutex mutex;
    std::vector<std::string> loaded;
    const auto load = [&](const service::caller& c, const char* model) {
        s.core->load(c, model, [&, what = c.who->name() + "'s " + model](const refused*) {
            const std::lock_guard lock(mutex);
            loaded.push_back(what);
        });
    };
    for (const auto* model : {"slow", "letters", "mlp", "busy"}) load(chat, model);  // the first one takes long
    load(batch, "mlp");
    s.go->store(true);
    eventually([&] {
        const std::lock_guard lock(mutex);
        return loaded.size() == 5;
    });
    CHECK(loaded[0] == "chat's slow");
    CHECK(loaded[1] == "batch's mlp");
}

TEST_CASE("a text whose reader goes is over, though it was to come in one piece", "[examples]") {
    server s;
    s.script->slowly = true;
    {
        auto c = s.connect();
        c.send_request("POST", "/v2/models/fragile/generate", chat_key, R"({"text_input":"a","max_tokens":4096})");
        eventually([&] { return s.core->authenticate(chat_key).counts->tokens > 8; });
    }
    const auto counts = s.core->authenticate(chat_key).counts;
    CHECK(s.core->drain(std::chrono::steady_clock::now() + 5min));
    CHECK(counts->tokens < 4096);
}

TEST_CASE("a reload that waits keeps nobody else waiting", "[examples]") {
    server s;
    const auto batch = s.core->authenticate(batch_key);
    auto busy = s.connect(), other = s.connect(), operators = connection(s.http->admin_port());
    busy.send_request("POST", "/v2/models/held/infer", batch_key, one("1", "[1]"));
    eventually([&] {
        const auto status = s.core->status_json();
        const auto row = json::parse(status).at("tenants").elements()[0];
        return row.at("models").text().find("awake") != std::string::npos && row.at("waiting").text() == "0";
    });
    s.rewrite("name=chat api_key=key-of-chat memory=16MiB compute=60%\n");
    operators.send_request("POST", "/reload");
    const auto gone = [&] {  // no request: it would be answered behind the one that is held
        try {
            s.core->load(batch, "mlp", [](const refused*) {});
            return false;
        } catch (const refused&) {
            return true;
        }
    };
    eventually(gone);
    CHECK(other.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    CHECK_FALSE(operators.has_some());
    s.go->store(true);
    CHECK(operators.answer().status == 200);
}

TEST_CASE("files of tenants that are read at once leave one of them", "[examples]") {
    server s;
    std::atomic<bool> stop{false};
    std::vector<std::thread> readers;
    for (int i = 0; i < 2; ++i)
        readers.emplace_back([&] {
            while (!stop) (void)s.core->reload();
        });
    std::thread asker([&] {
        while (!stop) (void)s.connect().ask("POST", mlp, batch_key, rows_of_mlp(1));
    });
    for (int i = 0; i < 20; ++i) {
        s.rewrite(i % 2 == 0 ? "name=chat api_key=key-of-chat memory=16MiB compute=60%\n" : two_tenants);
        std::this_thread::sleep_for(5ms);
    }
    stop = true;
    for (auto& r : readers) r.join();
    asker.join();
    CHECK(s.core->reload().empty());
    CHECK(s.connect().ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    CHECK(s.connect().ask("POST", mlp, batch_key, rows_of_mlp(1)).status == 200);
}

TEST_CASE("requests that wait for a model are told when the server goes", "[examples]") {
    std::atomic<int> told{0};
    {
        server s;
        for (const auto* model : {"slow", "mlp"})  // whose caller doesn't outlive the service
            s.core->load(s.core->authenticate(chat_key), model, [&](const refused*) { ++told; });
        std::thread soon([&] { s.go->store(true); });
        s.http.reset();
        s.core.reset();
        soon.join();
    }
    CHECK(told == 2);
}

TEST_CASE("models are loaded and unloaded by their tenant, and are in its memory", "[examples]") {
    server s;
    auto c = s.connect();
    const auto used = [&] {
        const auto status = s.core->status_json();  // of the tenants in the order of their names
        return json::parse(status).at("tenants").elements()[1].at("used").number<std::uint64_t>();
    };
    CHECK(c.ask("POST", "/v2/repository/models/mlp/load", chat_key).status == 200);
    CHECK_THAT(c.ask("POST", "/v2/repository/index", chat_key).body,
               Catch::Contains(R"("mlp","version":"1","state":"READY")"));
    CHECK_THAT(c.ask("POST", "/v2/repository/index", batch_key).body,
               Catch::Contains(R"("mlp","version":"1","state":"UNAVAILABLE")"));
    CHECK(used() > 0);
    CHECK(c.ask("POST", "/v2/repository/models/mlp/unload", chat_key).status == 200);
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);  // it comes back by itself
    CHECK(c.ask("POST", "/v2/repository/models/none/load", chat_key).status == 404);
}

TEST_CASE("a client that has its answer may unload the model", "[examples]") {
    server s;
    const auto chat = s.core->authenticate(chat_key);
    for (int i = 0; i < 3; ++i) {
        std::promise<void> unloaded;
        s.core->infer(chat, "mlp", parse_infer(rows_of_mlp(1), {}), [&](const answer&) {
            try {
                s.core->unload(chat, "mlp");
                unloaded.set_value();
            } catch (...) {
                unloaded.set_exception(std::current_exception());
            }
        });
        CHECK_NOTHROW(unloaded.get_future().get());
    }
}

TEST_CASE("a client that is told of a loaded model may unload it", "[examples]") {
    server s;
    const auto chat = s.core->authenticate(chat_key);
    for (int i = 0; i < 3; ++i) {
        std::promise<void> unloaded;
        s.core->load(chat, "mlp", [&](const refused* why) {
            try {
                if (why == nullptr) s.core->unload(chat, "mlp");
                unloaded.set_value();
            } catch (...) {
                unloaded.set_exception(std::current_exception());
            }
        });
        CHECK_NOTHROW(unloaded.get_future().get());
    }
}

TEST_CASE("a tenant without room for a model is told so", "[examples]") {
    server s({},
             "name=chat api_key=key-of-chat memory=4KiB compute=60% stack=direct\nname=batch api_key=key-of-batch "
             "memory=16MiB compute=40%\n");
    auto c = s.connect();
    const auto body = R"({"text_input":"a"})";
    CHECK(c.ask("POST", "/v2/models/letters/generate", chat_key, body).status == 507);
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    CHECK(c.ask("POST", "/v2/models/letters/generate", batch_key, body).status == 200);
}

TEST_CASE("the journal has all usage, to the last request, after a restart too", "[examples]") {
    server s;
    for (int life = 1; life <= 2; ++life) {
        auto c = s.connect();
        for (int i = 0; i < 5; ++i) CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
        s.http.reset();
        s.core.reset();
        gpushare::usage_invoices bill{gpushare::wall_time::min(), gpushare::wall_time::max()};
        CHECK(gpushare::usage_journal::read(*s.files / "usage", [&](const gpushare::usage_line& l) { bill.add(l); }) ==
              0);
        CHECK(bill.of("chat").requests == static_cast<std::uint64_t>(5 * life));
        CHECK(bill.of("chat").device_time.count() > 0);
        s.core = s.service_of();
        s.http = std::make_unique<http_server>(*s.core, http_options{});
    }
}

TEST_CASE("no bill is lost where the journal can't be written for a while", "[examples]") {
    server s({}, two_tenants, {.kept_lines = 2});
    (void)::signal(SIGXFSZ, SIG_IGN);
    ::rlimit was{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &was) == 0);
    auto c = s.connect();
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    const ::rlimit none{std::filesystem::file_size(*s.files / "usage"), was.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &none) == 0);
    for (int i = 0; i < 5; ++i) {
        (void)c.ask("POST", mlp, i % 2 == 0 ? chat_key : batch_key, rows_of_mlp(1));
        (void)s.core->reload();  // it bills as well
    }
    const auto waiting = json::parse(s.core->status_json()).at("journal_lines_waiting").number<int>();
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &was) == 0);
    CHECK(waiting >= 2);
    CHECK(waiting <= 4);
    s.http.reset();
    s.core.reset();
    CHECK(s.bill_of("chat").requests == 4);
    CHECK(s.bill_of("batch").requests == 2);
}

TEST_CASE("a text's cache is in its tenant's memory, page by page, and goes with the load", "[examples]") {
    server s({},
             "name=chat api_key=key-of-chat memory=256KiB compute=60% stack=direct\nname=batch api_key=key-of-batch "
             "memory=16MiB compute=40%\n",
             {.idle_after = 4s});
    auto c = s.connect();
    const auto used = [&](std::size_t tenant) {
        const auto status = s.core->status_json();
        return json::parse(status).at("tenants").elements()[tenant].at("used").number<std::uint64_t>();
    };
    const auto ask = [&](std::string_view key, std::size_t letters) {
        const auto body = R"({"text_input":")" + std::string(letters, 'a') + R"(","max_tokens":1})";
        return c.ask("POST", "/v2/models/letters/generate", key, body).status;
    };
    CHECK(ask(batch_key, 1) == 200);
    const auto before = used(0);
    CHECK(ask(batch_key, 1000) == 200);
    CHECK(used(0) > before);  // pages that the next text has
    CHECK(ask(chat_key, 1) == 200);
    CHECK(ask(chat_key, 1000) == 507);  // 63 pages of 8 KiB
    CHECK(ask(chat_key, 100) == 200);   // the engine is as good as before
    CHECK(ask(batch_key, 20'000) == 400);
    CHECK(ask(batch_key, 1000) == 200);
    eventually([&] { return used(0) == 0 && used(1) == 0; });
}

TEST_CASE("texts wait for memory of their caches, and none is refused because there is none just now", "[examples]") {
    // Each takes 64 KiB, and a tenant has memory for a few at once.
    server s({},
             "name=chat api_key=key-of-chat memory=320KiB compute=60% stack=direct queue_limit=64\n"
             "name=batch api_key=key-of-batch memory=320KiB compute=40% stack=direct queue_limit=64\n");
    const auto body = R"({"text_input":"some words","max_tokens":100})";
    const auto expected = s.connect().ask("POST", "/v2/models/letters/generate", chat_key, body);
    REQUIRE(expected.status == 200);
    std::atomic<int> answered{0};
    {
        std::vector<std::jthread> askers;
        for (int i = 0; i < 24; ++i)
            askers.emplace_back([&, i] {
                auto c = s.connect();
                const auto a = c.ask("POST", "/v2/models/letters/generate", i % 2 == 0 ? chat_key : batch_key, body);
                answered += a.status == 200 && a.body == expected.body ? 1 : 0;
            });
    }
    CHECK(answered == 24);
}

namespace {

/// A text of the tenant's, of which pieces are asked for one by one. It takes 256 KiB.
struct paused_text {
    explicit paused_text(server& s, std::string_view key = chat_key)
        : text(s.core->generate(s.core->authenticate(key), "letters",
                                {.prompt = std::string(500, 'a'), .most_tokens = 10})) {
        text->more(
            1, [](const std::string&) { return true; },
            [ends = ended](const token_stream::end& e) { ends->set_value(e); });
    }
    [[nodiscard]] bool waits() const { return end.wait_for(100ms) == std::future_status::timeout; }
    [[nodiscard]] token_stream::end how() {
        return end.wait_for(5min) == std::future_status::ready ? end.get()
                                                               : token_stream::end{true, refused(0, "nothing comes")};
    }
    std::shared_ptr<std::promise<token_stream::end>> ended = std::make_shared<std::promise<token_stream::end>>();
    std::future<token_stream::end> end = ended->get_future();
    std::shared_ptr<token_stream> text;
};

constexpr std::string_view room_for_one =
    "name=chat api_key=key-of-chat memory=448KiB compute=60% stack=direct\nname=batch api_key=key-of-batch memory=1MiB "
    "compute=40%\n";

}  // namespace

TEST_CASE("a text that waits for memory begins as soon as another one's is free", "[examples]") {
    server s({}, room_for_one);
    std::optional<paused_text> first(std::in_place, s);
    CHECK(first->how().status() == 200);
    std::optional<paused_text> second(std::in_place, s), third(std::in_place, s);
    CHECK(second->waits());
    CHECK(third->waits());
    first.reset();
    CHECK(second->how().status() == 200);
    CHECK(third->waits());  // it came later
    second.reset();
    CHECK(third->how().status() == 200);
}

TEST_CASE("a text that waits for memory too long, or whose tenant goes, is told so", "[examples]") {
    server s({}, room_for_one, {.text_waits = 300ms});
    paused_text first(s), other(s, batch_key);
    CHECK(first.how().status() == 200);
    CHECK(other.how().status() == 200);
    paused_text late(s);
    const auto end = late.how();
    CHECK(end.status() == 503);
    REQUIRE(end.why);
    CHECK(std::string(end.why->what()) == "no memory for the text's cache came in time");
    CHECK(end.last);
    // What is asked of it then isn't a new text.
    std::promise<token_stream::end> again;
    late.text->more(
        1, [](const std::string&) { return true; }, [&](const token_stream::end& e) { again.set_value(e); });
    CHECK(std::string(again.get_future().get().why.value().what()) == "the text is over");
}

TEST_CASE("texts that wait for memory are refused when their tenant is closed", "[examples]") {
    server s({}, room_for_one);
    paused_text first(s);
    CHECK(first.how().status() == 200);
    paused_text waiting(s);
    CHECK(waiting.waits());
    s.rewrite("name=batch api_key=key-of-batch memory=1MiB compute=40%\n");
    CHECK(s.core->reload().empty());
    CHECK(waiting.how().status() == 503);
}

TEST_CASE("engines of a tenant work in one block of scratch", "[examples]") {
    server s;
    auto c = s.connect();
    std::string x = "1";
    for (int i = 1; i < 512; ++i) x += "," + std::to_string(i % 5);
    const auto body = one(x, "[8,64]");
    const auto ask = [&] { return c.ask("POST", "/v2/models/block/infer", chat_key, body); };
    const auto first = ask();
    REQUIRE(first.status == 200);
    for (int i = 0; i < 5; ++i) CHECK(ask().body == first.body);  // whatever was left in it
}

TEST_CASE("an idle model sleeps by levels, and what waking took is known", "[examples]") {
    server s({}, two_tenants, {.idle_after = 400ms});
    auto c = s.connect();
    const auto model = [&] {
        return std::string(json::parse(s.core->status_json()).at("tenants").elements()[1].at("models").text());
    };
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    CHECK_THAT(model(), Catch::Contains("awake") || Catch::Contains("caches dropped") || Catch::Contains("weights"));
    eventually([&] { return model().find("weights released") != std::string::npos; });
    CHECK_THAT(model(), !Catch::Contains("\"last_wake_ms\":0,") && !Catch::Contains("\"predicted_wake_ms\":0,"));
    CHECK_THAT(s.core->metrics(), Catch::Contains(R"(server_model_sleep_level{tenant="chat",model="mlp"} 3)") &&
                                      Catch::Contains("server_model_predicted_wake_seconds{"));
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
}

TEST_CASE("a call that wakes a tenant calls others back, and they may ask the service", "[examples]") {
    server s({}, two_tenants, {.idle_after = 200ms});
    const auto sleeper = s.core->authenticate(chat_key), other = s.core->authenticate(batch_key);
    const auto ask = [&](const service::caller& who, const char* model, const std::string& body, on_answer f) {
        s.core->infer(who, model, parse_infer(body, {}), std::move(f));
    };
    std::atomic<int> rounds{0}, answered{0};
    auto all = std::async(std::launch::async, [&] {
        const std::jthread busy([&](const std::stop_token& stop) {
            for (std::atomic<int> under_way{0}; !stop.stop_requested() || under_way != 0;) {
                if (stop.stop_requested() || under_way == 2) {
                    std::this_thread::yield();
                    continue;
                }
                ++under_way;
                ask(other, "busy", one("1"), [&](const answer&) {
                    (void)s.core->ready();
                    --under_way;
                });
            }
        });
        for (; rounds < 300; ++rounds) {
            std::promise<bool> told;
            ask(sleeper, "mlp", rows_of_mlp(1),
                [&](const answer& a) { told.set_value(std::holds_alternative<infer_response>(a)); });
            answered += told.get_future().get();
            (void)sleeper.who->sleep(s.core->now(), {}, gpushare::while_asleep::refuse);
        }
    });
    if (all.wait_for(5min) != std::future_status::ready) {
        std::fprintf(stderr, "who wakes a tenant waits for itself, in round %d\n", rounds.load());
        std::abort();  // it would wait for ever
    }
    CHECK(answered == rounds);
}

TEST_CASE("a killed server comes back with its tenants and its journal", "[examples]") {
    const auto files = server::written(two_tenants);
    struct life {
        ::pid_t pid = -1;
        int ends = -1;
        std::uint16_t port = 0;
    };
    const auto begin = [&] {
        int told[2], ends[2];
        REQUIRE(::pipe(told) == 0);
        REQUIRE(::pipe(ends) == 0);
        const auto pid = ::fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            ::close(ends[1]);
            {
                service s({.tenants = *files / "tenants", .journal = *files / "usage"}, {tiny_mlp()});
                http_server http(s, {});
                const auto port = http.port();
                char c = 0;
                if (::write(told[1], &port, sizeof port) != sizeof port) ::_exit(1);
                (void)!::read(ends[0], &c, 1);
            }
            ::_exit(0);
        }
        ::close(told[1]);
        ::close(ends[0]);
        life l{pid, ends[1]};
        REQUIRE(::read(told[0], &l.port, sizeof l.port) == sizeof l.port);
        ::close(told[0]);
        return l;
    };
    const auto ask = [](const life& l, std::string_view key) {
        return connection(l.port).ask("POST", mlp, key, rows_of_mlp(1)).status;
    };
    const auto requests = [&] {
        gpushare::usage_invoices bill{gpushare::wall_time::min(), gpushare::wall_time::max()};
        const auto torn =
            gpushare::usage_journal::read(*files / "usage", [&](const gpushare::usage_line& l) { bill.add(l); });
        CHECK(torn <= 1);
        return bill.of("chat").requests;
    };
    const auto first = begin();
    for (int i = 0; i < 5; ++i) CHECK(ask(first, chat_key) == 200);
    eventually([&] { return requests() == 5; });
    files->write("tenants", "name=chat api_key=newer-key-of-chat memory=16MiB\n");
    eventually([&] { return ask(first, "newer-key-of-chat") == 200; });
    int how = 0;
    REQUIRE(::kill(first.pid, SIGKILL) == 0);
    REQUIRE(::waitpid(first.pid, &how, 0) == first.pid);
    const auto kept = requests();
    CHECK(kept >= 5);
    CHECK(kept <= 7);                                                   // eventually() may ask twice
    std::ofstream(*files / "usage", std::ios::app) << "1800000000 18";  // as if it had been writing

    const auto second = begin();
    CHECK(ask(second, chat_key) == 401);
    for (int i = 0; i < 3; ++i) CHECK(ask(second, "newer-key-of-chat") == 200);
    ::close(second.ends);
    REQUIRE(::waitpid(second.pid, &how, 0) == second.pid);
    CHECK(how == 0);
    CHECK(requests() == kept + 3);
    ::close(first.ends);
}

TEST_CASE("a server that goes down answers what was asked, and nothing else", "[examples]") {
    server s;
    auto busy = s.connect(), idle = s.connect();
    CHECK(idle.ask("GET", "/v2/health/ready").status == 200);
    const auto body = one("1", "[1]");
    busy.send("POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nX-API-Key: key-of-chat\r\nContent-Length: " +
              std::to_string(body.size()) + "\r\n\r\n" + body);
    eventually([&] { return s.core->status_json().find("held") != std::string::npos; });
    auto drained = std::async(std::launch::async, [&] { return s.core->drain(gpushare::never); });
    eventually([&] { return !s.core->ready(); });
    CHECK(idle.ask("GET", "/v2/health/ready").status == 503);
    CHECK(idle.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 503);
    s.go->store(true);
    CHECK(drained.get());
    s.http->stop(60s);
    CHECK(busy.answer().status == 200);
    CHECK(idle.ends());
}

namespace {

/// A check that fails leaves no call behind that the server's end would wait for.
struct let_go {
    std::shared_ptr<std::atomic<bool>> go;
    ~let_go() { go->store(true); }
};
infer_request request_of(std::string_view body) { return parse_infer(body, {}); }
void wait_for_first(const std::shared_ptr<noting::notes>& n) {
    eventually([&] {
        const std::lock_guard lock(n->mutex);
        return n->came.size() == 1;
    });
}

}  // namespace

TEST_CASE("a call that doesn't end is named, and the service goes when it has ended", "[examples]") {
    std::atomic<int> answered{0};
    const auto ask = [&](server& s, std::string_view model, std::string_view body) {
        s.core->infer(s.core->authenticate(chat_key), model, request_of(body), [&](const answer&) { ++answered; });
    };
    server s({}, two_tenants, {.closes_within = 0ms});
    s.http.reset();
    const let_go at_the_end{s.go};
    ask(s, "mlp", rows_of_mlp(1));
    eventually([&] { return answered == 1; });
    ask(s, "noting", one("1", "[1]"));
    wait_for_first(s.notes);
    std::uint64_t billed = 1;
    SECTION("at the end") { billed = 2; }
    SECTION("of a tenant that a reload has removed") {
        s.rewrite("name=batch api_key=key-of-batch memory=16MiB compute=40%\n");
        (void)s.core->reload();
    }
    CHECK_FALSE(s.core->drain(s.core->now()));
    auto running = s.core->stop(s.core->now());
    for (int i = 0; i < 6000 && running.size() > 1; ++i) {  // the thread that answered may not be back yet
        std::this_thread::sleep_for(10ms);
        running = s.core->stop(s.core->now());
    }
    REQUIRE(running.size() == 1);
    CHECK(running[0].tenant == "chat");
    CHECK(running[0].model == "noting");
    CHECK(s.bill_of("chat").requests == 1);  // what had ended
    std::stop_source second;
    auto hurried =
        std::async(std::launch::async, [&] { return s.core->stop(gpushare::never, second.get_token()).size(); });
    second.request_stop();
    CHECK(hurried.get() == 1);
    auto gone = std::async(std::launch::async, [&] { s.core.reset(); });
    CHECK(gone.wait_for(100ms) == std::future_status::timeout);  // however slow this machine is
    s.go->store(true);
    gone.get();
    CHECK(answered == 2);
    CHECK(s.bill_of("chat").requests == billed);  // the bills come behind the calls
}

TEST_CASE("an end beside a reload that waits names the call that the reload waits for", "[examples]") {
    server s({}, two_tenants, {.closes_within = 60s});
    s.http.reset();
    const let_go at_the_end{s.go};
    const auto chat = s.core->authenticate(chat_key);
    s.core->infer(chat, "noting", request_of(one("1", "[1]")), [](const answer&) {});
    wait_for_first(s.notes);
    s.rewrite("name=batch api_key=key-of-batch memory=16MiB compute=40%\n");
    s.core->reload_soon([](std::string_view) {});
    eventually([&] { return s.core->status_json().find("noting") == std::string::npos; });  // in no row any more
    CHECK_FALSE(s.core->drain(s.core->now()));
    const auto running = s.core->stop(s.core->now());
    REQUIRE(running.size() == 1);
    CHECK(running[0].model == "noting");
}

TEST_CASE("a load that doesn't end is named as well, and loads behind it don't begin", "[examples]") {
    std::atomic<int> told{0}, refused_{0};
    server s;
    s.http.reset();
    const let_go at_the_end{s.go};
    const auto load = [&](std::string_view key, const char* model) {
        s.core->load(s.core->authenticate(key), model, [&](const refused* why) {
            refused_ += why != nullptr;
            ++told;
        });
    };
    load(chat_key, "slow");
    eventually([&] { return *s.slow_loads == 1; });
    load(batch_key, "slow");
    const auto running = s.core->stop(s.core->now());
    CHECK(running.size() == 2);
    CHECK(std::ranges::all_of(running, [](const auto& r) { return r.model == "slow"; }));
    CHECK(told == 0);
    s.go->store(true);
    CHECK(s.core->stop(gpushare::never).empty());
    CHECK(told == 2);
    CHECK(refused_ >= 1);
    CHECK(*s.slow_loads == 1);
}

TEST_CASE("a process ends beside a call that doesn't, with a status and a sentence, and its bills are written",
          "[examples]") {
    const auto files = server::written(two_tenants);
    int said[2];
    REQUIRE(::pipe(said) == 0);
    const auto pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        ::alarm(100);  // else a fault would be waited for
        ::dup2(said[1], STDERR_FILENO);
        try {
            const auto never_goes = std::make_shared<std::atomic<bool>>(false);
            const auto notes = std::make_shared<noting::notes>();
            const model_info info{"noting", "test", {{"INPUT", datatype::fp32, {1}}}, {{"INPUT", datatype::fp32, {1}}}};
            service s(
                {.tenants = *files / "tenants", .journal = *files / "usage"},
                {tiny_mlp(), {info, [&](const surroundings&) { return std::make_unique<noting>(never_goes, notes); }}});
            std::atomic<bool> answered{false};
            s.infer(s.authenticate(chat_key), "mlp", request_of(rows_of_mlp(1)),
                    [&](const answer&) { answered = true; });
            while (!answered) std::this_thread::sleep_for(1ms);
            s.infer(s.authenticate(chat_key), "noting", request_of(one("1", "[1]")), [](const answer&) {});
            for (bool runs = false; !runs; std::this_thread::sleep_for(1ms)) {
                const std::lock_guard lock(notes->mutex);
                runs = !notes->came.empty();
            }
            leave(s.stop(s.now()));
        } catch (...) {  // nothing of Catch2 in this process
            std::_Exit(9);
        }
    }
    ::close(said[1]);
    std::string text;
    char c = 0;
    while (::read(said[0], &c, 1) == 1) text += c;
    ::close(said[0]);
    int how = 0;
    REQUIRE(::waitpid(pid, &how, 0) == pid);
    INFO(text);
    CHECK(WIFEXITED(how));
    CHECK(WEXITSTATUS(how) == exit_beside_calls);
    CHECK(text.find("tenant 'chat': model 'noting' still runs") != std::string::npos);
    gpushare::usage_invoices bill{gpushare::wall_time::min(), gpushare::wall_time::max()};
    (void)gpushare::usage_journal::read(*files / "usage", [&](const gpushare::usage_line& l) { bill.add(l); });
    CHECK(bill.of("chat").requests == 1);
}

TEST_CASE("a lost device is no secret", "[examples]") {
    server s;
    auto c = s.connect();
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 200);
    s.core->node().faults({0}).lose_device();
    CHECK(c.ask("GET", "/v2/health/ready").status == 503);
    CHECK(c.ask("POST", mlp, chat_key, rows_of_mlp(1)).status == 503);
}

}  // namespace inference_server_test
