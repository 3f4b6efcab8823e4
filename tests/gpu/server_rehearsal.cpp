// SPDX-License-Identifier: Apache-2.0
// The example server on a CUDA node, over the stand-in, with an engine of its own that launches a
// kernel: two tenants, one urgent, are answered, billed and kept within their memory, and the
// server ends beside calls that still run.
#include <gpushare/backend/cuda/pinned.hpp>

#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/serving/usage_journal.hpp>

#include "inference_server/service.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace server_rehearsal {

using namespace inference_server;
using namespace std::chrono_literals;

namespace {

struct triple_kernel {
    float* x;
    const float* weight;
    std::size_t n;
    template <class C>
    void operator()(C&) const {
        for (std::size_t i = 0; i < n; ++i) x[i] *= *weight;
    }
};
struct fill_kernel {
    float* to;
    template <class C>
    void operator()(C&) const {
        *to = 3;
    }
};

/// What a test tells the engines, and learns from them.
struct script {
    std::atomic<bool> holds{false};  // the next call's stream, before the call's work
    std::atomic<cudaStream_t> held{nullptr};
    std::atomic<int> loads{0};
};

/// OUTPUT = 3 INPUT, on the device. The 3 is in the tenant's memory, and a call works in scratch.
class tripling final : public engine {
public:
    tripling(const surroundings& at, std::shared_ptr<script> s, std::size_t size)
        : script_(std::move(s)), at_(at.memory), size_(size), staging_(std::make_shared<staging>(at.whose->on)) {
        ++script_->loads;
        weight_ = static_cast<float*>(at_.allocate(size_, 256));
        auto& stream = at.whose->who.work_stream(0, at.whose->stream);
        stream.launch({.blocks = 1}, fill_kernel{weight_});
        (void)stream.record().wait(gpushare::never);
    }
    tripling(const tripling&) = delete;
    tripling& operator=(const tripling&) = delete;
    ~tripling() override { at_.deallocate(weight_, size_, 256); }

    [[nodiscard]] std::size_t scratch() const noexcept override { return 1024; }
    void run_in(std::span<std::byte> room, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                place& on) override {
        const auto x = inputs[0].as<float>();
        if (x[0] < 0) throw std::runtime_error("a negative number");
        if (x[0] > 1e7F) throw refused(507, "no memory for that number");
        if (x[0] > 1e6F) throw refused(400, "too large a number");
        auto& to = on.stream();
        if (script_->holds.exchange(false)) {
            standin::hold(to.native_handle());
            script_->held = to.native_handle();
        }
        const auto buffer = std::make_shared<staged>(staging_, x.size_bytes());
        std::memcpy(buffer->data, x.data(), x.size_bytes());
        auto* const there = reinterpret_cast<float*>(room.data());
        to.copy(there, buffer->data, x.size_bytes());
        to.launch({.blocks = 1, .hold = 200us}, triple_kernel{there, weight_, x.size()});
        to.copy(buffer->data, there, x.size_bytes());
        outputs.push_back({"OUTPUT", datatype::fp32, inputs[0].shape, {}});
        on.afterwards([buffer, &outputs] {
            const auto bytes = std::span(static_cast<const std::byte*>(buffer->data), buffer->size);
            outputs.front().data.assign(bytes.begin(), bytes.end());
        });
    }

private:
    using staging = gpushare::cuda::pinned_memory;
    struct staged {
        staged(std::shared_ptr<staging> from, std::size_t n)
            : of(std::move(from)), data(of->allocate(n, 64)), size(n) {}
        staged(const staged&) = delete;
        staged& operator=(const staged&) = delete;
        ~staged() { (void)of->deallocate(data, size, 64); }
        const std::shared_ptr<staging> of;
        void* const data;
        const std::size_t size;
    };

    const std::shared_ptr<script> script_;
    std::pmr::memory_resource& at_;
    const std::size_t size_;
    const std::shared_ptr<staging> staging_;
    float* weight_ = nullptr;
};

/// A text, which no device makes.
class talking final : public engine {};
/// A call of two blocks, which only the host starts together.
class wide final : public engine {
    [[nodiscard]] std::uint32_t blocks() const noexcept override { return 2; }
};

template <class F>
void eventually(F f) {
    for (int i = 0; i < 6000 && !f(); ++i) std::this_thread::sleep_for(10ms);
    REQUIRE(f());
}

constexpr std::string_view two_tenants =
    "name=urgent api_key=key-of-urgent memory=8MiB compute=50% priority=1\n"
    "name=batch api_key=key-of-batch memory=8MiB compute=40%\n";

/// One device, two tenants. No tenant has room for the model `large`; `talking` makes
/// texts, and a call of `wide` is two blocks.
struct server {
    explicit server(service_options how = {}) {
        std::string name = (std::filesystem::temp_directory_path() / "gpushare_rehearsal_XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        folder = name;
        write(two_tenants);
        how.tenants = (folder / "tenants").string();
        how.journal = (folder / "usage").string();
        core = std::make_unique<service>(std::move(how), models());
    }
    server(const server&) = delete;
    server& operator=(const server&) = delete;
    ~server() {
        let_go();
        core.reset();
        std::filesystem::remove_all(folder);
    }
    [[nodiscard]] std::vector<model_source> models() const {
        const auto of = [&](const char* name, std::size_t size) {
            const model_info info{
                name, "test", {{"INPUT", datatype::fp32, {-1, 1}}}, {{"OUTPUT", datatype::fp32, {-1, 1}}}, 8, false};
            return model_source{
                info, [s = told, size](const surroundings& at) { return std::make_unique<tripling>(at, s, size); }};
        };
        model_source text;
        text.info = {.name = "talking",
                     .platform = "test",
                     .inputs = {{"text_input", datatype::bytes, {1}}},
                     .outputs = {{"text_output", datatype::bytes, {1}}},
                     .streams = true};
        text.load = [](const surroundings&) { return std::make_unique<talking>(); };
        model_source of_two_blocks = of("wide", 0);
        of_two_blocks.load = [](const surroundings&) { return std::make_unique<wide>(); };
        return {of("triple", 1 << 20), of("large", 12 << 20), std::move(text), std::move(of_two_blocks)};
    }
    void write(std::string_view tenants) const { std::ofstream(folder / "tenants") << tenants; }
    void let_go() const {
        if (const auto stream = told->held.exchange(nullptr); stream != nullptr) standin::let_go(stream);
    }
    [[nodiscard]] std::future<answer> ask(std::string_view who, std::string_view model, float x) const {
        auto told_later = std::make_shared<std::promise<answer>>();
        auto result = told_later->get_future();
        infer_request r;
        tensor t{"INPUT", datatype::fp32, {1, 1}, std::vector<std::byte>(sizeof(float))};
        t.as<float>()[0] = x;
        r.inputs.push_back(std::move(t));
        core->infer(core->authenticate("key-of-" + std::string(who)), model, std::move(r),
                    [told_later](answer a) { told_later->set_value(std::move(a)); });
        return result;
    }
    [[nodiscard]] gpushare::usage_amounts bill_of(std::string_view who) const {
        gpushare::usage_invoices bill{gpushare::wall_time::min(), gpushare::wall_time::max()};
        (void)gpushare::usage_journal::read((folder / "usage").string(),
                                            [&](const gpushare::usage_line& l) { bill.add(l); });
        return bill.of(who);
    }

    const standin::session gpu{{.devices = 1}};  // first: it outlives the node
    std::filesystem::path folder;
    const std::shared_ptr<script> told = std::make_shared<script>();
    std::unique_ptr<service> core;
};

int status_of(const answer& a) {
    const auto* const why = std::get_if<refused>(&a);
    return why == nullptr ? 200 : why->status;
}
/// NaN: there is none.
float value_of(const answer& a) {
    const auto* const r = std::get_if<infer_response>(&a);
    if (r == nullptr || r->outputs.at(0).data.size() != sizeof(float)) return NAN;
    return r->outputs[0].as<float>()[0];
}

}  // namespace

TEST_CASE("the server's calls run on a device, in the tenants' memory, and are billed", "[server]") {
    const server s;
    const auto urgent = s.core->authenticate("key-of-urgent").who, batch = s.core->authenticate("key-of-batch").who;
    for (const float x : {1.F, 7.F, 100.F})
        for (const auto* who : {"urgent", "batch"}) CHECK(value_of(s.ask(who, "triple", x).get()) == 3 * x);
    std::vector<std::future<answer>> together;
    for (int i = 0; i < 20; ++i)
        together.push_back(s.ask(i % 2 == 0 ? "urgent" : "batch", "triple", static_cast<float>(i)));
    for (int i = 0; i < 20; ++i)
        CHECK(value_of(together[static_cast<std::size_t>(i)].get()) == 3 * static_cast<float>(i));
    for (const auto& t : {urgent, batch}) {
        CHECK(t->usage().current >= gpushare::bytes{1 << 20});
        CHECK(t->usage().current <= gpushare::bytes{8 << 20});
    }
    CHECK(s.core->stop(gpushare::never).empty());
    for (const auto& t : {urgent, batch}) {
        CHECK(s.bill_of(t->name()).requests == 13);
        CHECK(s.bill_of(t->name()).device_time == t->usage().device_time);
        CHECK(t->usage().device_time > 0ns);
    }
}

TEST_CASE("a model that a tenant has no memory for is refused, and a neighbour is served", "[server]") {
    const server s;
    CHECK(status_of(s.ask("batch", "large", 1).get()) == 507);
    CHECK(value_of(s.ask("urgent", "triple", 2).get()) == 6);
    CHECK(value_of(s.ask("batch", "triple", 2).get()) == 6);
}

TEST_CASE("an urgent tenant is answered beside a call that runs", "[server]") {
    const server s;
    CHECK(value_of(s.ask("urgent", "triple", 1).get()) == 3);
    CHECK(value_of(s.ask("batch", "triple", 1).get()) == 3);
    s.told->holds = true;
    auto long_call = s.ask("batch", "triple", 5);
    eventually([&] { return s.told->held != nullptr; });
    for (const float x : {1.F, 2.F, 3.F}) CHECK(value_of(s.ask("urgent", "triple", x).get()) == 3 * x);
    CHECK(long_call.wait_for(0s) == std::future_status::timeout);
    s.let_go();
    CHECK(value_of(long_call.get()) == 15);
}

TEST_CASE("what an engine throws is one request's error, and only a refusal keeps the engine", "[server]") {
    const server s;
    CHECK(status_of(s.ask("batch", "triple", 2e6F).get()) == 400);
    CHECK(status_of(s.ask("batch", "triple", 2e7F).get()) == 507);
    CHECK(value_of(s.ask("batch", "triple", 1).get()) == 3);
    CHECK(s.told->loads == 1);
    CHECK(status_of(s.ask("batch", "triple", -1).get()) == 500);
    eventually([&] {  // the request is answered before the engine goes
        CHECK(value_of(s.ask("batch", "triple", 1).get()) == 3);
        return s.told->loads == 2;
    });
}

TEST_CASE("models that make texts, or whose calls are several blocks, aren't served on a device", "[server]") {
    const server s;
    for (const auto* model : {"talking", "wide"}) {
        CAPTURE(model);
        std::promise<int> status;
        s.core->load(s.core->authenticate("key-of-batch"), model,
                     [&](const refused* why) { status.set_value(why == nullptr ? 200 : why->status); });
        CHECK(status.get_future().get() == 501);
    }
}

TEST_CASE("the server names a call that runs on the device at its end, and goes when the call is over", "[server]") {
    server s({.closes_within = 0ms});
    CHECK(value_of(s.ask("urgent", "triple", 1).get()) == 3);
    s.told->holds = true;
    auto call = s.ask("urgent", "triple", 5);
    eventually([&] { return s.told->held != nullptr; });
    SECTION("at the end") {}
    SECTION("of a tenant that a reload has removed") {
        s.write("name=batch api_key=key-of-batch memory=8MiB compute=40%\n");
        CHECK(s.core->reload() == "");
    }
    std::vector<service::running> running;
    eventually([&] {  // the thread that answered the first call may not be back yet
        running = s.core->stop(s.core->now());
        return running.size() == 1;
    });
    CHECK(running[0].tenant == "urgent");
    CHECK(running[0].model == "triple");
    auto gone = std::async(std::launch::async, [&] { s.core.reset(); });
    CHECK(gone.wait_for(100ms) == std::future_status::timeout);  // however slow this machine is
    s.let_go();
    gone.get();
    CHECK(value_of(call.get()) == 15);
}

}  // namespace server_rehearsal
