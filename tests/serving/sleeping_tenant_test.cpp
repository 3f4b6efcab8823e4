// SPDX-License-Identifier: Apache-2.0
// Scale to zero: when and how deeply a model sleeps, how long waking takes, and a tenant that
// really sleeps.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory_resource>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/serving/sleeping_tenant.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace sleeping_tenant_test {
namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::ns;
using gpushare::sleep_level;
using gpushare::sleep_levels;
using enum gpushare::sleep_level;

instant at(ns t) { return instant{t}; }
constexpr gpushare::sleep_rule rule{.drop_caches_after = 10s, .spill_after = 60s, .release_after = 600s};

void go(sleep_levels& s, sleep_level to, instant from, ns took = {}) {
    REQUIRE(s.next(from) == to);
    s.began(to, from);
    CHECK_FALSE(s.next(from));
    CHECK(s.next_at(from) == never);
    s.ended(true, from + took);
    CHECK(s.level() == to);
}

}  // namespace

TEST_CASE("an idle model goes deeper step by step, and wakes for a request", "[serving]") {
    sleep_levels s(rule, at(0s));
    CHECK_FALSE(s.next(at(9s)));
    CHECK(s.next_at(at(9s)) == at(10s));
    go(s, caches_dropped, at(10s));
    CHECK(s.next_at(at(10s)) == at(60s));
    go(s, weights_spilled, at(60s));
    go(s, weights_released, at(600s));
    CHECK(s.next_at(at(600s)) == never);
    s.request_began(at(700s));
    go(s, awake, at(700s), 3s);
    CHECK(s.last_wake(weights_released) == 3s);
    CHECK_FALSE(s.next(at(2000s)));  // it is at work
    s.request_ended(at(2000s));
    CHECK(s.next_at(at(2000s)) == at(2010s));
    // Who looks late goes as deep as it is late.
    go(s, weights_spilled, at(2100s));
}

TEST_CASE("a rule says when each level begins, and how soon what failed is tried again", "[serving]") {
    sleep_levels caches({.drop_caches_after = 1s}, at(0s));
    CHECK_FALSE(caches.next(at(999ms)));
    go(caches, caches_dropped, at(1s));
    CHECK(caches.next_at(at(1s)) == never);  // no deeper by itself
    sleep_levels spills({.spill_after = 2s, .retry_after = 5s}, at(0s));
    CHECK(spills.next_at(at(0s)) == at(2s));
    CHECK(spills.next(at(2s)) == weights_spilled);
    spills.began(weights_spilled, at(2s));
    spills.ended(false, at(3s));
    CHECK_FALSE(spills.next(at(7s)));
    CHECK(spills.next_at(at(7s)) == at(8s));
    go(spills, weights_spilled, at(8s));
    sleep_levels releases({.release_after = 3s}, at(0s));
    CHECK_FALSE(releases.next(at(2s)));
    go(releases, weights_released, at(3s));
}

TEST_CASE("waking is predicted from what was measured, and bounds how deep it goes", "[serving]") {
    auto careful = rule;
    careful.wake_within = 2s;
    sleep_levels s(careful, at(0s));
    CHECK(s.predicted_wake() == 0s);
    s.measured(weights_released, 5s);
    go(s, weights_spilled, at(1000s));         // not to release
    CHECK(s.next_at(at(1000s)) == at(3600s));  // when that is an hour ago
    s.request_began(at(1000s));
    go(s, awake, at(1000s), 1500ms);
    s.request_ended(at(1002s));
    CHECK(s.predicted_wake(weights_spilled) == 1500ms);
    CHECK(s.predicted_wake(weights_released) == 5s);
    // The longest of the last eight.
    for (int i = 0; i < 7; ++i) s.measured(weights_spilled, 100ms);
    CHECK(s.predicted_wake(weights_spilled) == 1500ms);
    s.measured(weights_spilled, 200ms);
    CHECK(s.predicted_wake(weights_spilled) == 200ms);
    CHECK(s.last_wake(weights_spilled) == 200ms);
    // One slow time, and that level isn't gone to for an hour.
    s.measured(weights_spilled, 3s);
    s.measured(weights_released, 5s);
    go(s, caches_dropped, at(1100s));
    CHECK(s.next_at(at(1100s)) == at(1002s) + 1h);
    CHECK_FALSE(s.next(at(4601s)));
    go(s, weights_released, at(4602s));
}

TEST_CASE("after one slow wake a model sleeps again, and each slow one keeps it awake for a while", "[serving]") {
    sleep_levels s({.spill_after = 10s, .wake_within = 2s, .distrust_for = 30min}, at(0s));
    const auto day = [&](int n, ns wake) {
        const auto now = at(n * 24h);
        if (!s.next(now)) return false;
        go(s, weights_spilled, now);
        s.request_began(now + 1h);
        go(s, awake, now + 1h, wake);
        s.request_ended(now + 1h + wake);
        return true;
    };
    s.measured(weights_spilled, 3s);
    int slept = 0;
    for (int n = 1; n < 100; ++n) slept += day(n, n % 10 == 0 ? 3s : 100ms) ? 1 : 0;
    CHECK(slept == 99);
    // Right behind a slow one it doesn't, though it is idle for long enough.
    REQUIRE(day(100, 3s));
    const auto later = at(100 * 24h) + 1h + 3s;
    CHECK_FALSE(s.next(later + 20min));
    CHECK(s.next_at(later + 20min) == later + 30min);
    CHECK(s.next(later + 30min) == weights_spilled);
}

TEST_CASE("a change that failed is tried again later, and for a request at once", "[serving]") {
    sleep_levels s(rule, at(0s));
    s.began(*s.next(at(10s)), at(10s));
    s.ended(false, at(11s));
    CHECK(s.level() == awake);
    CHECK_FALSE(s.next(at(11s)));
    CHECK(s.next_at(at(11s)) == at(12s));
    go(s, caches_dropped, at(12s));
    s.request_began(at(13s));
    s.began(*s.next(at(13s)), at(13s));
    s.ended(false, at(14s));
    CHECK(s.level() == caches_dropped);
    CHECK(s.next(at(14s)) == awake);
    s.request_ended(at(14s));
    s.request_ended(at(14s));  // one too many does nothing
    CHECK(s.requests() == 0);
}

TEST_CASE("requests are served awake and idle models get to sleep, whatever happens", "[serving]") {
    for (std::uint64_t run = 0; run < 200; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        auto r = rule;
        if (any.one_in(3)) r.spill_after = 0s;
        if (any.one_in(3)) r.wake_within = 1s;
        sleep_levels s(r, at(0s));
        instant now = at(0s);
        for (int step = 0; step < 200; ++step) {
            now += std::chrono::seconds(any.below(40));
            if (any.one_in(3)) s.request_began(now);
            if (any.one_in(3)) s.request_ended(now);
            if (const auto to = s.next(now)) {
                CHECK((*to == awake) == (s.requests() != 0));
                CHECK((*to == awake || *to > s.level()));
                CHECK((*to != weights_spilled || r.spill_after > 0s));
                s.began(*to, now);
                now += std::chrono::milliseconds(any.below(3000));
                s.ended(!any.one_in(5), now);
            }
        }
        while (s.requests() != 0) s.request_ended(now);
        for (auto at = s.next_at(now); at != never; at = s.next_at(now)) {
            now = at;
            if (const auto to = s.next(now)) {
                s.began(*to, now);
                s.ended(true, now);
            }
        }
        if (r.wake_within == 0s) CHECK(s.level() == weights_released);
    }
}

// ---- a tenant

namespace {

struct model_rig {
    gpushare::host::node node{{.devices = 1, .memory = 64_MiB, .sms = 1, .timing = gpushare::host::timing::modelled}};
    std::pmr::memory_resource* host = std::pmr::new_delete_resource();
    gpushare::tenancy<gpushare::host::node> shared{node, {.spill = 32_MiB, .spill_to = host}};
    decltype(shared)::tenant chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct});

    [[nodiscard]] gpushare::bytes held() { return chat.usage().current; }
};

// Idle from now on for so long.
constexpr gpushare::sleep_rule at_once(ns drop, ns spill, ns release) { return {drop, spill, release, {}, 1ms}; }

}  // namespace

TEST_CASE("a tenant holds less at each level, and all of it again for a request", "[serving]") {
    model_rig rig;
    auto weights = rig.chat.allocate_spillable(4_MiB);
    { CHECK(weights.use()); }
    std::optional<decltype(rig.chat.allocate_spillable(1_MiB))> engine;
    int loads = 0;
    const auto load = [&] {
        engine.emplace(rig.chat.allocate_spillable(2_MiB));
        (void)engine->use();
        ++loads;
    };
    load();
    void* const cache = rig.chat.memory().allocate(1 << 20);
    CHECK(rig.chat.memory().deallocate(cache, 1 << 20) == errc::none);
    gpushare::sleeping_tenant model(rig.chat, at_once(1ns, 0s, 0s),
                                    {.release = [&] { engine.reset(); }, .restore = load});
    const auto awake_bytes = rig.held();
    (void)model.tick();
    CHECK(model.state().level() == caches_dropped);
    CHECK(rig.chat.memory().idle() == 0_B);
    const auto without_caches = rig.held();
    CHECK(without_caches <= awake_bytes);
    model.set_rule(at_once(1ns, 1ns, 0s));
    (void)model.tick();
    CHECK(model.state().level() == weights_spilled);
    CHECK_FALSE(weights.resident());
    const auto spilled = rig.held();
    CHECK(spilled < without_caches);
    model.set_rule(at_once(1ns, 1ns, 1ns));
    CHECK(model.tick() == never);
    CHECK(model.state().level() == weights_released);
    CHECK_FALSE(engine);
    CHECK(rig.held() == 0_B);
    {
        auto request = model.use();
        CHECK(request);
        CHECK(model.state().level() == awake);
        CHECK(loads == 2);
        CHECK(weights.use());
        rig.chat.submit([](auto&) {}).wait();
        CHECK(model.state().last_wake(weights_released) == model.state().predicted_wake(weights_released));
        CHECK(model.tick() == never);  // a request is there
        CHECK(model.state().level() == awake);
    }
}

TEST_CASE("a request of a model whose memory is lent is refused in its time, and served once that is back",
          "[serving]") {
    model_rig rig;
    rig.chat.resize({.lends_asleep = true});
    void* engine = rig.chat.memory().allocate(4 << 20);
    gpushare::sleeping_tenant model(rig.chat, at_once(0s, 0s, 1ns),
                                    {.release = [&] { (void)rig.chat.memory().deallocate(engine, 4 << 20); },
                                     .restore = [&] { engine = rig.chat.memory().allocate(4 << 20); }});
    (void)model.tick();
    REQUIRE(model.state().level() == weights_released);
    CHECK(rig.chat.recall().lent == 16_MiB);  // what the engine had as well
    auto other = rig.shared.admit({.name = "other", .compute = 10_pct, .burst = gpushare::all_burst});
    void* const lent = other.memory().allocate(60 << 20);
    CHECK(model.use(rig.chat.now() + gpushare::ns{2ms}).code() == errc::deadline_exceeded);
    CHECK(model.state().level() == weights_released);
    std::stop_source stop;
    std::jthread stops([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        stop.request_stop();
    });
    CHECK(model.use(gpushare::never, stop.get_token()).code() == errc::stopped);  // while the memory is recalled
    CHECK(model.state().level() == weights_released);
    CHECK(other.memory().deallocate(lent, 60 << 20) == errc::none);
    CHECK(model.use());
    CHECK(rig.chat.recall().lent == 0_B);
    CHECK(rig.chat.memory().deallocate(engine, 4 << 20) == errc::none);
}

TEST_CASE("a step that throws leaves the tenant at work, and is made again", "[serving]") {
    model_rig rig;
    bool fails = true;
    int calls = 0;
    gpushare::sleeping_tenant model(rig.chat, at_once(0s, 1ns, 0s), {.spill = [&] {
                                        ++calls;
                                        if (fails) throw std::runtime_error("no room on the host");
                                    }});
    (void)model.tick();
    CHECK(model.state().level() == awake);
    rig.chat.submit([](auto&) {}).wait();  // its gate is open
    fails = false;
    while (model.state().level() == awake) (void)model.tick();
    CHECK(calls >= 2);
    CHECK(model.use());

    // A restore that throws is the request's error, and the next one tries again.
    int loads = 0;
    gpushare::sleeping_tenant other(rig.chat, at_once(0s, 0s, 1ns), {.restore = [&] {
                                        if (++loads == 1) throw std::runtime_error("the file is gone");
                                    }});
    (void)other.tick();
    REQUIRE(other.state().level() == weights_released);
    CHECK(other.use().code() == errc::submission_failed);
    CHECK(other.use());
    CHECK(loads == 2);
}

namespace {

// Its node has no memory for the list of what it lends.
struct lends_in_vain : decltype(model_rig::chat) {
    [[noreturn]] static void lend_more() { throw std::bad_alloc(); }
};

}  // namespace

TEST_CASE("a model whose memory can't be lent is back at work with its weights", "[serving]") {
    model_rig rig;
    lends_in_vain chat{std::move(rig.chat)};
    bool weights = true;
    const auto gone = [&] { weights = false; };
    const auto back = [&] { weights = true; };
    const sleep_level to = GENERATE(weights_spilled, weights_released);
    const auto idle = to == weights_spilled ? at_once(0s, 1ns, 0s) : at_once(0s, 0s, 1ns);
    gpushare::sleeping_tenant model(chat, idle, {.spill = gone, .release = gone, .restore = back, .unspill = back});
    (void)model.tick();
    CHECK(model.state().level() == awake);
    CHECK(weights);
    CHECK(model.use());
    chat.submit([](auto&) {}).wait();  // its gate is open
}

TEST_CASE("a model that couldn't be loaded lends its memory again until the next request", "[serving]") {
    model_rig rig;
    rig.chat.resize({.lends_asleep = true});
    bool fails = true;
    gpushare::sleeping_tenant model(rig.chat, at_once(0s, 0s, 1ns), {.restore = [&] {
                                        if (fails) throw std::runtime_error("the file is gone");
                                    }});
    (void)model.tick();
    REQUIRE(model.state().level() == weights_released);
    const auto lent = rig.chat.recall().lent;
    CHECK(lent != 0_B);
    CHECK(model.use().code() == errc::submission_failed);
    CHECK(rig.chat.recall().lent == 0_B);  // it came back for the engine
    (void)model.tick();
    CHECK(model.state().level() == weights_released);
    CHECK(rig.chat.recall().lent == lent);
    fails = false;
    CHECK(model.use());
    rig.chat.submit([](auto&) {}).wait();  // its gate is open
}

TEST_CASE("an action that asks for the model doesn't wait for itself", "[serving]") {
    gpushare::host::node node{{.memory = 64_MiB}};
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 32_MiB, .compute = 50_pct});
    using sleeper = gpushare::sleeping_tenant<decltype(chat)>;
    sleeper* self = nullptr;
    std::vector<gpushare::errc> asleep, waking;
    // Never: were they to wait, they would hang.
    const auto ask = [&](std::vector<gpushare::errc>& answers) { answers.push_back(self->use().code()); };
    sleeper model{
        chat,
        {.spill_after = 1ns, .release_after = 2ns},
        {.drop_caches = [&] { ask(asleep); }, .release = [&] { ask(asleep); }, .restore = [&] { ask(waking); }}};
    self = &model;
    while (model.state().level() == awake) (void)model.tick();
    CHECK(asleep == std::vector(2, gpushare::errc::in_flight));
    {
        const auto lease = model.use();
        CHECK(lease);
        CHECK(model.state().requests() == 1);
    }
    CHECK(waking == std::vector{gpushare::errc::none});
    CHECK(model.state().requests() == 0);
    CHECK(model.state().level() == awake);
}

TEST_CASE("a request that waits for a tenant to wake can be stopped", "[serving]") {
    gpushare::host::node node{{.memory = 64_MiB}};
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 32_MiB, .compute = 50_pct});
    std::stop_source source;
    gpushare::sleeping_tenant<decltype(chat)>* self = nullptr;
    errc stopped = errc::none;
    const auto restore = [&] {  // while it wakes, another request waits for that
        (void)source.request_stop();
        std::jthread([&] { stopped = self->use(never, source.get_token()).code(); }).join();
    };
    gpushare::sleeping_tenant model{chat, {.release_after = 1ns}, {.restore = restore}};
    self = &model;
    while (model.state().level() == awake) (void)model.tick();
    CHECK(model.use(never, std::stop_token{}));
    CHECK(stopped == errc::stopped);
    while (model.state().level() == awake) (void)model.tick();
    CHECK(model.use(never, source.get_token()).code() == errc::stopped);
    CHECK(model.state().requests() == 0);
}

TEST_CASE("requests of several threads wake a tenant once each time it sleeps", "[serving]") {
    model_rig rig;
    std::atomic<int> loaded{1}, loads{0}, wrong{0};
    gpushare::sleeping_tenant model(rig.chat, at_once(0s, 0s, 1ns),
                                    {.release = [&] { --loaded; },
                                     .restore =
                                         [&] {
                                             ++loaded;
                                             ++loads;
                                         }});
    std::atomic<int> running{3};
    support::together(4, [&](unsigned rank) {
        if (rank == 3) {
            while (running != 0) (void)model.tick();
            return;
        }
        for (int i = 0; i < 50; ++i) {
            auto request = model.use();
            if (!request || loaded != 1) ++wrong;
            rig.chat.submit([](auto&) {}).wait();
        }
        --running;
    });
    CHECK(wrong == 0);
    CHECK((loaded == 0 || loaded == 1));
    rig.chat.close();
    CHECK(model.tick() == never);
}

namespace {

using gpushare::group_memory;
using groups_of_chat = gpushare::sleep_groups<decltype(model_rig::chat)>;

void fill(void* at, gpushare::bytes size, int with) { std::memset(at, with, static_cast<std::size_t>(size.count())); }
bool holds(const void* at, gpushare::bytes size, int with) {
    const auto* const all = static_cast<const unsigned char*>(at);
    return std::all_of(all, all + size.count(), [&](unsigned char c) { return c == with; });
}

}  // namespace

TEST_CASE("a model sleeps in parts: caches now, weights later, and weights are back first", "[serving]") {
    model_rig rig;
    gpushare::sleep_groups groups{rig.chat, {{"weights"}, {"kv_cache", group_memory::dropped}}};
    auto& weights = groups.allocate("weights", 4_MiB);
    auto& more = groups.allocate("weights", 1_MiB);
    auto& cache = groups.allocate("kv_cache", 8_MiB);
    CHECK(rig.held() == 13_MiB);
    fill(weights.data(), 4_MiB, 7);
    fill(more.data(), 1_MiB, 8);
    CHECK(groups.use());
    groups.sleep({"kv_cache"});
    CHECK(rig.held() == 5_MiB);
    CHECK(cache.data() == nullptr);
    CHECK(groups.use({"weights"}));
    CHECK(groups.use().code() == errc::asleep);
    CHECK(groups.sleeping() == std::vector<std::string>{"kv_cache"});
    groups.sleep();  // the rest
    CHECK(rig.held() == 0_B);
    CHECK(weights.data() == nullptr);
    CHECK(groups.sleeping() == std::vector<std::string>{"weights", "kv_cache"});
    groups.wake({"weights"});
    CHECK(rig.held() == 5_MiB);
    CHECK(holds(weights.data(), 4_MiB, 7));
    CHECK(holds(more.data(), 1_MiB, 8));
    CHECK(groups.use().code() == errc::asleep);  // no work finds the half of a model
    groups.wake(std::vector<std::string>{"kv_cache", "weights"});
    CHECK(rig.held() == 13_MiB);
    CHECK(groups.sleeping().empty());
    {
        const auto in = groups.use();
        REQUIRE(in);
        fill(cache.data(), 8_MiB, 9);
        CHECK(holds(weights.data(), 4_MiB, 7));
    }
    groups.free(more);
    CHECK(rig.held() == 12_MiB);
    groups.sleep({"weights"});
    groups.free(weights);
    groups.wake();
    CHECK(rig.held() == 8_MiB);
}

TEST_CASE("groups that can't be told apart, and tags that nobody has, are errors, and nothing changes", "[serving]") {
    model_rig rig;
    using support::code_of;
    CHECK(code_of([&] { (void)groups_of_chat(rig.chat, {{"a"}, {"b"}, {"a"}}); }) == errc::duplicate_name);
    CHECK(code_of([&] { (void)groups_of_chat(rig.chat, {{""}}); }) == errc::invalid_specification);
    CHECK(code_of([&] { (void)groups_of_chat(rig.chat, {}); }) == errc::invalid_specification);
    groups_of_chat groups{rig.chat, {{"a"}, {"b", group_memory::dropped}}};
    auto& a = groups.allocate("a", 1_MiB);
    CHECK(groups.try_sleep({"a", "c"}).code == errc::invalid_specification);
    CHECK(groups.try_wake({"c"}).code == errc::invalid_specification);
    CHECK(groups.use({"c"}).code() == errc::invalid_specification);
    CHECK(code_of([&] { groups.sleep({"c"}); }) == errc::invalid_specification);
    CHECK(a.data() != nullptr);
    CHECK(code_of([&] { (void)groups.allocate("c", 1_MiB); }) == errc::invalid_specification);
    groups.sleep({"b"});
    CHECK(code_of([&] { (void)groups.allocate("b", 1_MiB); }) == errc::asleep);
    CHECK(code_of([&] { (void)groups.allocate("a", 64_MiB); }) == errc::over_quota);
    CHECK(rig.held() == 1_MiB);
    gpushare::tenancy<gpushare::host::node> without{rig.node};
    auto plain = without.admit({.name = "plain", .memory = 1_MiB, .compute = 50_pct});
    groups_of_chat nowhere{plain, {{"a"}}};
    CHECK(code_of([&] { (void)nowhere.allocate("a", 1_KiB); }) == errc::not_supported);
}

TEST_CASE("a group that can't sleep is awake, and one that can't wake holds nothing", "[serving]") {
    model_rig rig;
    groups_of_chat groups{rig.chat, {{"weights"}, {"kv_cache", group_memory::dropped}}};
    auto& first = groups.allocate("weights", 2_MiB);
    auto& second = groups.allocate("weights", 2_MiB);
    auto& cache = groups.allocate("kv_cache", 4_MiB);
    fill(first.data(), 2_MiB, 1);
    fill(second.data(), 2_MiB, 2);
    const auto shortly = [&] { return rig.chat.now() + ns{2ms}; };
    SECTION("while work uses it") {
        const auto in = groups.use({"weights"});
        CHECK(groups.try_sleep({"kv_cache", "weights"}, shortly()).code == errc::deadline_exceeded);
        CHECK(groups.sleeping() == std::vector<std::string>{"kv_cache"});  // what came before it
        CHECK(holds(first.data(), 2_MiB, 1));
        CHECK(groups.use({"weights"}));
    }
    SECTION("where the host has no room for all of it") {
        rig.chat.resize({.spill = 3_MiB});
        CHECK(groups.try_sleep().code == errc::out_of_memory);
        CHECK(groups.sleeping().empty());
        CHECK(holds(first.data(), 2_MiB, 1));
        CHECK(holds(second.data(), 2_MiB, 2));
    }
    SECTION("where the device has no room") {
        groups.sleep();
        void* const other = rig.chat.memory().allocate(13 << 20);
        CHECK(groups.try_wake({}, shortly()).code != errc::none);
        CHECK(rig.held() == 13_MiB);
        CHECK(groups.sleeping().size() == 2);
        CHECK(first.data() == nullptr);
        CHECK(rig.chat.memory().deallocate(other, 13 << 20) == errc::none);
        rig.chat.memory().trim();
        void* const less = rig.chat.memory().allocate(9 << 20);
        // The weights need time for their copies, and a slow machine gets more of it. The cache waits
        // for bytes until the deadline.
        for (ns time = 20ms; groups.sleeping().size() == 2 && time < 2min; time *= 4)
            CHECK_THROWS_AS(groups.wake({}, rig.chat.now() + time), gpushare::error);
        CHECK(groups.sleeping() == std::vector<std::string>{"kv_cache"});  // the weights found room
        CHECK(holds(first.data(), 2_MiB, 1));
        CHECK(holds(second.data(), 2_MiB, 2));
        CHECK(rig.chat.memory().deallocate(less, 9 << 20) == errc::none);
        groups.wake();
        CHECK(cache.data() != nullptr);
    }
    SECTION("whose tenant is closed") {
        groups.sleep({"kv_cache"});
        CHECK(rig.chat.close().complete);
        CHECK(groups.try_wake({"kv_cache"}).code == errc::closed);
        CHECK(groups.sleeping() == std::vector<std::string>{"kv_cache"});
    }
}

TEST_CASE("a sleeping tenant's actions are its groups'", "[serving]") {
    model_rig rig;
    groups_of_chat groups{rig.chat, {{"weights"}, {"kv_cache", group_memory::dropped}}};
    auto& weights = groups.allocate("weights", 4_MiB);
    (void)groups.allocate("kv_cache", 8_MiB);
    fill(weights.data(), 4_MiB, 3);
    gpushare::sleeping_tenant model(rig.chat, at_once(1ns, 0s, 0s),
                                    {.drop_caches = [&] { groups.sleep({"kv_cache"}); },
                                     .spill = [&] { groups.sleep({"weights"}); },
                                     .unspill = [&] { groups.wake({"weights"}); }});
    (void)model.tick();
    CHECK(rig.held() == 4_MiB);
    model.set_rule(at_once(1ns, 1ns, 0s));
    (void)model.tick();
    CHECK(rig.held() == 0_B);
    const auto request = model.use();
    REQUIRE(request);
    CHECK(rig.held() == 4_MiB);
    groups.wake();  // caches, for this request
    CHECK(groups.use());
    CHECK(holds(weights.data(), 4_MiB, 3));
    CHECK(rig.held() == 12_MiB);
}

TEST_CASE("a thread with a lease may free a block though a change waits for that lease", "[serving]") {
    model_rig rig;
    groups_of_chat groups{rig.chat, {{"weights"}}};
    (void)groups.allocate("weights", 4_MiB);
    auto& scratch = groups.allocate("weights", 1_MiB);
    auto in = std::make_optional(groups.use());
    REQUIRE(*in);
    std::jthread sleeper([&] { groups.sleep(); });
    while (groups.sleeping().empty()) std::this_thread::yield();
    auto freed = std::async(std::launch::async, [&] { groups.free(scratch); });
    CHECK(freed.wait_for(5min) == std::future_status::ready);
    CHECK(rig.held() == 4_MiB);
    CHECK(groups.use().code() == errc::asleep);  // the change waits on
    in.reset();
    sleeper.join();
    freed.get();
    CHECK(rig.held() == 0_B);
    groups.wake();
    CHECK(rig.held() == 4_MiB);
}

TEST_CASE("work of several threads finds a group awake and whole, however often it sleeps", "[serving]") {
    model_rig rig;
    groups_of_chat groups{rig.chat, {{"weights"}, {"kv_cache", group_memory::dropped}}};
    auto& weights = groups.allocate("weights", 64_KiB);
    auto& cache = groups.allocate("kv_cache", 64_KiB);
    fill(weights.data(), 64_KiB, 5);
    std::atomic<int> worked{0}, wrong{0};
    {
        std::vector<std::jthread> all;
        for (int t = 0; t < 3; ++t)
            all.emplace_back([&](const std::stop_token& stop) {
                while (!stop.stop_requested()) {
                    if (const auto in = groups.use()) {
                        if (cache.data() == nullptr || !holds(weights.data(), 64_KiB, 5)) ++wrong;
                        ++worked;
                    }
                    std::this_thread::yield();
                }
            });
        for (int i = 0; i < 100; ++i) {
            groups.sleep();
            groups.wake();
            const int before = worked;
            while (i % 2 == 0 && worked == before) std::this_thread::yield();  // for work
        }
    }
    CHECK(wrong == 0);
    CHECK(worked >= 50);
    CHECK(groups.sleeping().empty());
}

}  // namespace sleeping_tenant_test
