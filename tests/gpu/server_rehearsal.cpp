// SPDX-License-Identifier: Apache-2.0
// The example server on a CUDA node, over the stand-in, with engines of its own that launch
// kernels: tenants, one urgent, are answered, billed and kept within their memory, launches are
// held behind those of more urgent calls, and the server ends beside calls that still run.
#include <gpushare/backend/cuda/pinned.hpp>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/serving/usage_journal.hpp>

#include "inference_server/service.hpp"
#include "standins/cuda/cupti.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/folder.hpp"

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

struct nothing_kernel {
    template <class C>
    void operator()(C&) const {}
};

/// Where a call's thread stops in the middle of the call, as one that computes on the host.
class stop_sign {
public:
    void put_up() noexcept { is_up_ = true; }
    void take_down() noexcept {
        is_up_ = false;
        is_up_.notify_all();
    }
    [[nodiscard]] bool is_waited_for() const noexcept { return waits_; }
    void pass() noexcept {
        if (!is_up_) return;
        waits_ = true;
        is_up_.wait(true);
        waits_ = false;
    }

private:
    std::atomic<bool> is_up_{false}, waits_{false};
};

/// What a test tells the engines, and learns from them.
struct script {
    stop_sign step, pause;           // of the models of these names
    std::atomic<int> launched{0};    // by `step`
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

/// OUTPUT = INPUT. A call launches ten kernels, of a millisecond each, and stops at a sign before
/// the fifth.
class stepping final : public engine {
public:
    stepping(std::shared_ptr<script> s, stop_sign& sign, std::atomic<int>* launched)
        : script_(std::move(s)), sign_(sign), launched_(launched) {}

    [[nodiscard]] std::size_t scratch() const noexcept override { return 512; }
    void run_in(std::span<std::byte>, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                place& on) override {
        for (int i = 0; i < 10; ++i) {
            if (i == 4) sign_.pass();
            if (i == 4 && inputs[0].as<float>()[0] < 0) throw std::runtime_error("a negative number");
            on.stream().launch({.blocks = 1, .hold = 1ms}, nothing_kernel{});
            if (launched_ != nullptr) ++*launched_;
        }
        outputs.push_back({"OUTPUT", datatype::fp32, inputs[0].shape, inputs[0].data});
    }

private:
    const std::shared_ptr<script> script_;
    stop_sign& sign_;
    std::atomic<int>* const launched_;
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

/// Fails, instead of waiting for ever, where the answer doesn't come.
answer answer_of(std::future<answer>& asked) {
    REQUIRE(asked.wait_for(60s) == std::future_status::ready);
    return asked.get();
}
answer answer_of(std::future<answer>&& asked) { return answer_of(asked); }

/// What the server prints on standard error as long as this is there.
class printed {
public:
    printed() : into_(std::tmpfile()), before_(::dup(STDERR_FILENO)) {
        std::fflush(stderr);
        if (into_ != nullptr) (void)::dup2(::fileno(into_), STDERR_FILENO);
    }
    printed(const printed&) = delete;
    printed& operator=(const printed&) = delete;
    ~printed() {
        back();
        if (into_ != nullptr) std::fclose(into_);
    }
    /// Whether the text is there so far.
    [[nodiscard]] bool has(std::string_view what) const {
        std::string all(4096, '\0');
        const auto n = into_ == nullptr ? -1 : ::pread(::fileno(into_), all.data(), all.size(), 0);
        return n > 0 &&
               std::string_view(all).substr(0, static_cast<std::size_t>(n)).find(what) != std::string_view::npos;
    }
    [[nodiscard]] std::string text() {
        back();
        REQUIRE(into_ != nullptr);
        std::rewind(into_);
        std::string all(4096, '\0');
        all.resize(std::fread(all.data(), 1, all.size(), into_));
        return all;
    }

private:
    void back() noexcept {
        std::fflush(stderr);
        if (before_ < 0) return;
        (void)::dup2(before_, STDERR_FILENO);
        ::close(std::exchange(before_, -1));
    }
    std::FILE* const into_;
    int before_;
};

constexpr std::string_view two_tenants =
    "name=urgent api_key=key-of-urgent memory=8MiB compute=50% priority=1\n"
    "name=batch api_key=key-of-batch memory=8MiB compute=40%\n";
constexpr std::string_view three_tenants =
    "name=urgent api_key=key-of-urgent memory=8MiB compute=50% priority=1\n"
    "name=batch api_key=key-of-batch memory=8MiB compute=40%\n"
    "name=top api_key=key-of-top memory=8MiB compute=5% priority=2\n";

constexpr std::string_view equal_tenants =
    "name=batch api_key=key-of-batch memory=8MiB compute=40%\n"
    "name=neighbour api_key=key-of-neighbour memory=8MiB compute=40%\n";

/// However long the machine takes for a test, no launch goes for having been held for long.
[[nodiscard]] service_options patient() { return {.closes_within = 0ms, .gate = {.longest_hold = 1h}}; }

/// One device, two tenants or more. No tenant has room for the model `large`; `talking` makes
/// texts, and a call of `wide` is two blocks. Calls of `step` and `pause` launch ten kernels.
struct server {
    explicit server(service_options how = {}, std::string_view tenants = two_tenants,
                    standin::timing time = standin::timing::automatic)
        : gpu(standin::options{.devices = 1, .time = time}) {
        write(tenants);
        how.tenants = folder / "tenants";
        how.journal = folder / "usage";
        core = std::make_unique<service>(std::move(how), models());
    }
    server(const server&) = delete;
    server& operator=(const server&) = delete;
    ~server() {
        let_go();
        told->step.take_down();
        told->pause.take_down();
        std::jthread time;  // goes on for what a test that has failed left on the device
        if (standin::detail::current_options().time == standin::timing::manual)
            time = std::jthread([](const std::stop_token& over) {
                for (; !over.stop_requested(); std::this_thread::sleep_for(1ms)) standin::advance(1ms);
            });
        core.reset();
        time = {};
        if (lost) (void)standin::take_findings();
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
        const auto in_steps = [&](const char* name, stop_sign& sign, std::atomic<int>* launched) {
            auto model = of(name, 0);
            model.load = [s = told, &sign, launched](const surroundings&) {
                return std::make_unique<stepping>(s, sign, launched);
            };
            return model;
        };
        return {of("triple", 1 << 20),
                of("large", 12 << 20),
                std::move(text),
                std::move(of_two_blocks),
                in_steps("step", told->step, &told->launched),
                in_steps("pause", told->pause, nullptr)};
    }
    void write(std::string_view tenants) const { folder.write("tenants", tenants); }
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
        (void)gpushare::usage_journal::read(folder / "usage", [&](const gpushare::usage_line& l) { bill.add(l); });
        return bill.of(who);
    }

    const standin::session gpu;  // first: it outlives the node
    bool lost = false;           // the device
    const support::folder folder;
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
        CHECK(s.bill_of(t->name()).device_time == s.core->usage_of(*t).device_time);
        CHECK(s.core->usage_of(*t).device_time > 0ns);
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

TEST_CASE("an engine's exception is one request's error, and only a refusal keeps the engine", "[server]") {
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
    CHECK(status_of(s.ask("batch", "step", -1).get()) == 500);
    CHECK(value_of(s.ask("batch", "step", 1).get()) == 1);
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

// ---- launches pass a gate

namespace {

/// The batch tenant's call is held before its fifth launch, since a call of the urgent tenant's is
/// under way.
struct held_call {
    explicit held_call(standin::timing time = standin::timing::automatic) : s(patient(), three_tenants, time) {
        REQUIRE(s.core->gates_launches());
        s.told->step.put_up();
        batch = s.ask("batch", "step", 5);
        passes([&] { return s.told->step.is_waited_for(); });
        s.told->pause.put_up();
        urgent = s.ask("urgent", "pause", 7);
        passes([&] { return s.told->pause.is_waited_for(); });
        s.told->step.take_down();
        passes([&] { return s.core->held_calls() == 1; });
        CHECK(s.told->launched == 4);
    }
    void let_go() const { s.told->pause.take_down(); }
    // On a device whose time stands still.
    template <class F>
    void passes(F f) const {
        eventually([&] {
            if (standin::detail::current_options().time == standin::timing::manual) standin::advance(1ms);
            return f();
        });
    }
    [[nodiscard]] static bool is_there(const std::future<answer>& a) {
        return a.wait_for(0s) == std::future_status::ready;
    }

    server s;
    std::future<answer> batch, urgent;
};

}  // namespace

TEST_CASE("an urgent tenant is answered while a batch tenant's thread is in the middle of its call", "[server]") {
    const server s(patient());
    s.told->step.put_up();
    auto batch = s.ask("batch", "step", 5);
    eventually([&] { return s.told->step.is_waited_for(); });
    for (const float x : {1.F, 2.F, 3.F}) CHECK(value_of(answer_of(s.ask("urgent", "triple", x))) == 3 * x);
    CHECK(s.told->launched == 4);
    s.told->step.take_down();
    CHECK(value_of(answer_of(batch)) == 5);
}

TEST_CASE("a tenant's waiting calls leave other tenants of its level their turns", "[server]") {
    const server s(patient(), equal_tenants);
    for (const auto* who : {"batch", "neighbour"}) CHECK(value_of(answer_of(s.ask(who, "triple", 1))) == 3);
    s.told->step.put_up();
    std::vector<std::future<answer>> mine;  // one computes on the host, and the others wait for it
    mine.push_back(s.ask("batch", "step", 5));
    eventually([&] { return s.told->step.is_waited_for(); });
    mine.push_back(s.ask("batch", "step", 5));
    mine.push_back(s.ask("batch", "triple", 5));
    for (int i = 0; i < 50; ++i) CHECK(value_of(answer_of(s.ask("neighbour", "triple", 2))) == 6);
    CHECK(s.told->launched == 4);
    s.told->step.take_down();
    CHECK(value_of(answer_of(mine[0])) == 5);
    CHECK(value_of(answer_of(mine[1])) == 5);
    CHECK(value_of(answer_of(mine[2])) == 15);
}

TEST_CASE("a launch that was held for the longest time goes, and the server says so", "[server]") {
    printed log;
    const server s({.gate = {.longest_hold = 1ms}});
    s.told->step.put_up();
    auto batch = s.ask("batch", "step", 5);
    eventually([&] { return s.told->step.is_waited_for(); });
    s.told->pause.put_up();
    auto urgent = s.ask("urgent", "pause", 7);
    eventually([&] { return s.told->pause.is_waited_for(); });
    s.told->step.take_down();
    CHECK(value_of(answer_of(batch)) == 5);
    CHECK_FALSE(held_call::is_there(urgent));
    eventually([&] { return log.has("the last was of tenant 'batch', held for "); });
    CHECK(log.has(" ms behind tenant 'urgent'"));
    s.told->pause.take_down();
    CHECK(value_of(answer_of(urgent)) == 7);
}

TEST_CASE("launches of a batch tenant wait while an urgent call is in progress, and those of a higher tenant don't",
          "[server]") {
    held_call t;
    for (const float x : {1.F, 2.F, 3.F}) CHECK(value_of(answer_of(t.s.ask("top", "triple", x))) == 3 * x);
    CHECK(t.s.core->held_calls() == 1);
    CHECK(t.s.told->launched == 4);
    t.let_go();
    CHECK(value_of(answer_of(t.urgent)) == 7);
    CHECK(value_of(answer_of(t.batch)) == 5);
    CHECK(t.s.told->launched == 10);
    CHECK(t.s.core->held_calls() == 0);
}

TEST_CASE("a model is loaded while another call of its tenant is held", "[server]") {
    held_call t;
    std::promise<int> status;
    t.s.core->load(t.s.core->authenticate("key-of-batch"), "triple",
                   [&](const refused* why) { status.set_value(why == nullptr ? 200 : why->status); });
    auto loaded = status.get_future();
    REQUIRE(loaded.wait_for(60s) == std::future_status::ready);
    CHECK(loaded.get() == 200);
    CHECK(t.s.core->held_calls() == 1);
    t.let_go();
    CHECK(value_of(answer_of(t.s.ask("batch", "triple", 4))) == 12);
    CHECK(value_of(answer_of(t.batch)) == 5);
}

TEST_CASE("a call is billed what its launches took, and not the time in which its thread was held", "[server]") {
    held_call t(standin::timing::manual);
    standin::advance(100s);
    t.let_go();
    t.passes([&] { return held_call::is_there(t.urgent) && held_call::is_there(t.batch); });
    CHECK(value_of(t.urgent.get()) == 7);
    CHECK(value_of(t.batch.get()) == 5);
    CHECK(t.s.core->stop(gpushare::never).empty());
    for (const auto* who : {"urgent", "batch"}) {
        CAPTURE(who);
        CHECK(t.s.bill_of(who).requests == 1);
        CHECK(t.s.bill_of(who).device_time > 0ns);
        // Ten launches of a millisecond each, and what the device's time moves beside them.
        CHECK(t.s.bill_of(who).device_time < 1s);
    }
}

TEST_CASE("the server names calls whose threads are held at its end, and goes when they are over", "[server]") {
    held_call t;
    SECTION("at the end") {}
    SECTION("of a tenant that a reload has removed") {
        t.s.write("name=urgent api_key=key-of-urgent memory=8MiB compute=50% priority=1\n");
        CHECK(t.s.core->reload() == "");
    }
    CHECK(t.s.core->held_calls() == 1);
    const auto running = t.s.core->stop(t.s.core->now());
    REQUIRE(running.size() == 2);
    const auto names = [&](std::string_view tenant, std::string_view model) {
        return std::ranges::any_of(running, [&](const auto& r) { return r.tenant == tenant && r.model == model; });
    };
    CHECK(names("batch", "step"));
    CHECK(names("urgent", "pause"));
    auto gone = std::async(std::launch::async, [&] { t.s.core.reset(); });
    CHECK(gone.wait_for(100ms) == std::future_status::timeout);  // however slow this machine is
    t.let_go();
    gone.get();
    CHECK(value_of(answer_of(t.urgent)) == 7);
    CHECK(value_of(answer_of(t.batch)) == 5);
}

TEST_CASE("a tenant that a reload makes urgent goes on, though its thread was held", "[server]") {
    held_call t;
    t.s.write(
        "name=urgent api_key=key-of-urgent memory=8MiB compute=50% priority=1\n"
        "name=batch api_key=key-of-batch memory=8MiB compute=40% priority=3\n");
    CHECK(t.s.core->reload() == "");
    CHECK(value_of(answer_of(t.batch)) == 5);
    CHECK_FALSE(held_call::is_there(t.urgent));
    t.let_go();
    CHECK(value_of(answer_of(t.urgent)) == 7);
}

TEST_CASE("a tenant that is gone isn't billed what the next one of its name uses", "[server]") {
    const server s;
    const auto gone = s.core->authenticate("key-of-batch").who;
    CHECK(value_of(answer_of(s.ask("batch", "triple", 1))) == 3);
    s.write("name=urgent api_key=key-of-urgent memory=8MiB compute=50% priority=1\n");
    CHECK(s.core->reload() == "");
    s.write(two_tenants);
    CHECK(s.core->reload() == "");
    const auto next = s.core->authenticate("key-of-batch").who;
    REQUIRE(next != gone);
    for (int i = 0; i < 3; ++i) CHECK(value_of(answer_of(s.ask("batch", "triple", 1))) == 3);
    CHECK(s.core->usage_of(*gone).device_time == gone->usage().device_time);
    CHECK(s.core->stop(gpushare::never).empty());
    CHECK(s.bill_of("batch").requests == 4);
    CHECK(s.bill_of("batch").device_time > s.core->usage_of(*next).device_time);
}

TEST_CASE("calls end with errors where the device is lost while a thread is held", "[server]") {
    held_call t;
    CHECK(value_of(answer_of(t.s.ask("top", "step", 1))) == 1);
    t.s.lost = true;
    standin::poison(0, cudaErrorIllegalAddress);
    t.let_go();
    CHECK(status_of(answer_of(t.urgent)) >= 500);
    CHECK(status_of(answer_of(t.batch)) >= 500);
    for (int i = 0; i < 3; ++i) CHECK(status_of(answer_of(t.s.ask("top", "step", 1))) >= 500);
    CHECK(t.s.core->stop(gpushare::never).empty());
}

TEST_CASE("beside a profiler the server says that it holds no launches, and serves", "[server]") {
    struct profiler {
        profiler() { standin::take_subscriber("a profiler"); }
        profiler(const profiler&) = delete;
        profiler& operator=(const profiler&) = delete;
        ~profiler() { standin::give_subscriber_back(); }
    };
    printed log;
    const profiler other;  // the session, which begins with the server, forgets nobody's subscriber
    const server s;
    CHECK(log.text().find("no launch is held: ") != std::string::npos);
    CHECK_FALSE(s.core->gates_launches());
    for (const auto* who : {"urgent", "batch"}) CHECK(value_of(answer_of(s.ask(who, "triple", 7))) == 21);
    const auto batch = s.core->authenticate("key-of-batch").who;
    CHECK(s.core->stop(gpushare::never).empty());
    CHECK(s.bill_of("batch").device_time == batch->usage().device_time);
    CHECK(batch->usage().device_time > 0ns);
}

}  // namespace server_rehearsal
