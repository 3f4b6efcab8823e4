// SPDX-License-Identifier: Apache-2.0
// A tenant's own ways to submit: several streams, options, callbacks, coroutines, requests,
// cancelling, sleep.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <future>
#include <latch>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/detached.hpp"
#include "support/host_tenants.hpp"

namespace submit_test {

using namespace support::host_tenants;
using gpushare::completion;
using support::detached;
using clock = std::chrono::steady_clock;

namespace {

std::uint64_t kinds = 100;  // of submissions, so far

/// One block for so long.
auto block(gpushare::ns length) {
    return [length](host::stream& s) { s.launch({.blocks = 1, .hold = length}, [](auto&) {}); };
}

}  // namespace

TEST_CASE("a tenant with two streams fills two SMs, and keeps the order of each", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto reader = shared.admit({.name = "reader", .memory = 1_MiB, .compute = 50_pct, .streams = 2});
    std::vector<tenancy::tenant::ticket> calls;
    for (std::uint32_t i = 0; i < 12; ++i) calls.push_back(reader.submit(block(2ms), {.key = 1, .stream = i % 2}));
    for (auto& c : calls) REQUIRE(c.wait(clock::now() + 5min));
    std::vector<host::block_record> blocks = n.ledger({0}).take().blocks;
    REQUIRE(blocks.size() == 12);
    std::size_t beside = 0;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        for (std::size_t j = 0; j < i; ++j)
            beside += blocks[i].start < blocks[j].end && blocks[j].start < blocks[i].end;
    CHECK(beside > 0);
    CHECK(reader.estimate(1).known);
    CHECK(reader.estimate(1).finish() > 0ns);
    CHECK(&reader.work_stream(0, 0) != &reader.work_stream(0, 1));
    CHECK(code_of([&] { (void)reader.work_stream(0, 2); }) == errc::invalid_specification);
    CHECK(reader.try_submit(block(1us), {.stream = 2}).code() == errc::invalid_specification);
    CHECK(code_of([&] { (void)shared.admit({.name = "none", .memory = 1_MiB, .compute = 1_pct, .streams = 0}); }) ==
          errc::invalid_specification);
}

TEST_CASE("an urgent tenant gets in between the pieces of another one, whose one ticket tells of the first that failed",
          "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto batch = shared.admit({.name = "batch", .memory = 1_MiB, .compute = 50_pct, .queue_limit = 16});
    auto chat = shared.admit({.name = "chat", .memory = 1_MiB, .compute = 50_pct, .level = {1}});
    std::mutex mutex;
    std::vector<int> order;
    const auto note = [&](int i) {
        const std::lock_guard lock(mutex);
        order.push_back(i);
    };
    SECTION("in order, and not to the end") {
        std::atomic<bool> go = false;
        auto whole = gpushare::submit_chunked(batch, 12, [&](host::stream& s, std::size_t i) {
            note(static_cast<int>(i));
            s.launch({.blocks = 1}, [&](auto&) {
                while (!go.load()) std::this_thread::yield();
            });
        });
        REQUIRE(whole);
        CHECK(whole->size() == 12);
        const auto urgent = chat.submit([&](host::stream&) { note(-1); });
        go = true;
        REQUIRE(whole->wait(soon()));
        REQUIRE(urgent.wait(soon()));
        CHECK(whole->status() == errc::none);
        CHECK(whole->enqueued() == 12);
        const auto at = std::ranges::find(order, -1);
        REQUIRE(at != order.end());
        CHECK(at - order.begin() < 12);
        order.erase(at);
        CHECK(std::ranges::is_sorted(order));
        CHECK(order.size() == 12);
    }
    SECTION("up to the one whose callable throws") {
        const auto whole = gpushare::submit_chunked(batch, 12, [&](host::stream&, std::size_t i) {
            note(static_cast<int>(i));
            if (i == 3) throw std::runtime_error("no more");
        });
        REQUIRE(whole);
        REQUIRE(whole->wait(soon()));
        CHECK(whole->status() == errc::submission_failed);
        CHECK(whole->enqueued() == 4);
        CHECK(order == std::vector{0, 1, 2, 3});
    }
    SECTION("or none that is refused") {
        const auto nothing = [](host::stream&, std::size_t) {};
        CHECK(gpushare::submit_chunked(batch, 2, nothing, {}, 7).code() == errc::no_device);
        CHECK(gpushare::submit_chunked(batch, 2, nothing, {.stream = 5}).code() ==
              batch.try_submit([](auto&) {}, {.stream = 5}).code());
        CHECK(gpushare::submit_chunked(batch, 0, nothing)->done());
        (void)batch.close();
        CHECK(gpushare::submit_chunked(batch, 2, nothing).code() == errc::closed);
    }
}

TEST_CASE("a tenant's close waits for all of its streams", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 1_MiB, .compute = 50_pct, .streams = 2});
    n.faults({0}).stall(t.work_stream(0, 1));
    t.work_stream(0, 1).launch({.blocks = 1}, [](auto&) {});  // past the limiter
    CHECK_FALSE(t.close(clock::now() + 5ms).complete);
    n.faults({0}).resume(t.work_stream(0, 1));
    CHECK(t.close(clock::now() + 5min).complete);
}

TEST_CASE("a tenant's waiting submissions are cancelled, dropped if late, and limited", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n, {.limiter = {.depth = 1, .horizon = 1ns}});
    auto t = shared.admit(
        {.name = "chat", .memory = 1_MiB, .compute = 50_pct, .ceiling = gpushare::priority{1}, .queue_limit = 2});
    n.faults({0}).stall(t.work_stream());
    std::atomic<int> ran{0};
    const auto work = [&](host::stream& s) { s.launch({.blocks = 1}, [&ran](auto&) { ++ran; }); };
    auto first = t.submit(work);
    auto owned = std::make_unique<int>(7);  // callables needn't be copied
    auto urgent = t.submit([&, own = std::move(owned)](host::stream& s) { ran += *own, work(s); }, {.priority = {1}});
    auto late = t.submit(work, {.deadline = clock::now(), .drop_if_late = true});
    CHECK(late.done());  // at once: it takes no room in the queue
    auto waits = t.submit(work);
    std::atomic<errc> told{errc::none};
    auto cancelled = t.submit(work, {}, [&](const completion& c) { told = c.status; });
    CHECK(ran == 7);  // a higher level has room of its own
    CHECK(t.try_submit(work).code() == errc::queue_full);
    try {
        t.submit(work);
        FAIL("there is no room");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.tenant() == "chat");
    }
    CHECK(cancelled.cancel());
    CHECK(told == errc::stopped);
    CHECK_THROWS_WITH(cancelled.rethrow(), "tenant 'chat': submission: stop requested");
    n.faults({0}).resume(t.work_stream());
    for (auto* one : {&first, &late, &urgent, &waits}) REQUIRE(one->wait(clock::now() + 5min));
    CHECK(late.status() == errc::deadline_exceeded);
    CHECK(first.status() == errc::none);
    CHECK(urgent.status() == errc::none);
    CHECK(ran == 3 + 7);
    CHECK(t.usage().dropped == 1);
    CHECK(t.usage().completed == 3);
    CHECK(t.close(clock::now() + 5min).usage.dropped == 1);
}

TEST_CASE("a width that is declared decides what a submission waits for, however it comes", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto batch = shared.admit({.name = "batch", .memory = 1_MiB, .compute = 50_pct, .longest = 5ms});
    auto voice = shared.admit(
        {.name = "voice", .memory = 1_MiB, .compute = 50_pct, .level = {1}, .keeps = gpushare::sm_width::of_sms(1, 2)});
    using gpushare::sm_width;
    constexpr auto kept = 250us;   // what fits on the SM that is kept waits for short work
    constexpr auto others = 10ms;  // what is wider, or may be, for two of the longest
    for (const auto& [width, bound] : {std::pair<sm_width, gpushare::ns>(sm_width::of_sms(1, 2), kept),
                                       {sm_width(0.01), kept},
                                       {sm_width(0.6), others},
                                       {sm_width(1), others},
                                       {sm_width(3), others},
                                       {sm_width(), others},
                                       {sm_width(-1), others},
                                       {sm_width(std::numeric_limits<double>::quiet_NaN()), others}}) {
        CAPTURE(width.given());
        // Of a kind of its own, so that nothing is known of it but what is declared.
        const gpushare::submit_options o{.key = ++kinds, .width = width};
        const auto work = [](host::stream&) {};  // nothing is learnt from it
        auto plain = voice.submit(work, o);
        CHECK(plain.bound() == bound);
        CHECK(plain.wait(soon()));
        {
            auto r = voice.request();
            auto of_request = r.submit(work, o);
            CHECK(of_request.bound() == bound);
            CHECK(of_request.wait(soon()));
        }
        auto at_gate = voice.acquire(o, soon());
        REQUIRE(at_gate);
        CHECK(at_gate->bound() == bound);
        at_gate->enqueue(voice.work_stream(), [](host::stream&) {});
        completion how;
        how.status = errc::closed;
        const auto coroutine = [&]() -> detached { how = co_await voice.async_submit(work, o); };
        coroutine();
        while (how.status == errc::closed) (void)voice.usage();  // who asks drives
        CHECK(how.status == errc::none);
    }
}

TEST_CASE("a width is one of the slice that the tenant is in: what is wider counts as all of that",
          "[tenant][submit]") {
    host::node n(modelled(1, 4));
    tenancy shared(n);
    constexpr std::array<std::uint32_t, 2> halves{2, 2};
    REQUIRE(shared.slice<host::device_sms>(device_id{0}, halves) == errc::none);
    const auto admit = [&](std::string name, gpushare::priority level, gpushare::sm_width keeps) {
        return shared.admit({.name = std::move(name),
                             .memory = 1_MiB,
                             .compute = 20_pct,
                             .level = level,
                             .slice = 1,
                             .longest = 5ms,
                             .keeps = keeps});
    };
    auto batch = admit("batch", {}, {}), voice = admit("voice", {1}, gpushare::sm_width::of_sms(1, 2));
    const auto bound_of = [&](gpushare::sm_width width) {
        auto t = voice.submit(block(10us), {.width = width});
        const auto bound = t.bound();
        CHECK(t.wait(soon()));
        return bound;
    };
    CHECK(bound_of(gpushare::sm_width::of_sms(3, 2)) == 10ms);  // of three SMs where the slice has two
    CHECK(bound_of(gpushare::sm_width::of_sms(2, 2)) == 10ms);
    CHECK(bound_of(gpushare::sm_width::of_sms(1, 2)) == 250us);
    CHECK(voice.usage().completed == 3);
    CHECK(voice.usage().device_time == 15us);  // half of two SMs each, whatever was said
}

TEST_CASE("a deadline that has passed: what is to be dropped never runs, and the rest does, however it comes",
          "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto t = shared.admit({.name = "chat", .memory = 1_MiB, .compute = 50_pct});
    const auto passed = t.now(), far = soon();
    std::atomic<int> ran{0};
    const auto work = [&ran](host::stream& s) { s.launch({.blocks = 1}, [&ran](auto&) { ++ran; }); };
    const auto outcome = [](auto ticket) {
        CHECK(ticket.wait(soon()));
        return ticket.status();
    };
    const auto by_coroutine = [&](const gpushare::submit_options& o) {
        completion how;
        how.status = errc::closed;
        const auto coroutine = [&]() -> detached { how = co_await t.async_submit(work, o); };
        coroutine();
        while (how.status == errc::closed) (void)t.usage();
        return how.status;
    };
    const gpushare::submit_options late{.deadline = passed, .drop_if_late = true}, said{.deadline = passed},
        in_time{.deadline = far, .drop_if_late = true};
    CHECK(outcome(t.submit(work, late)) == errc::deadline_exceeded);
    CHECK(by_coroutine(late) == errc::deadline_exceeded);
    CHECK(t.acquire(0, gpushare::never, {}, late).code() == errc::deadline_exceeded);
    {
        auto r = t.request({.deadline = passed});  // before that of each of its submissions
        CHECK(outcome(r.submit(work, in_time)) == errc::deadline_exceeded);
        CHECK(outcome(r.submit(work)) == errc::none);
    }
    {
        auto r = t.request({.deadline = far});
        CHECK(outcome(r.submit(work, late)) == errc::deadline_exceeded);
        CHECK(outcome(r.submit(work, in_time)) == errc::none);
    }
    CHECK(t.usage().dropped == 5);
    CHECK(ran == 2);
    CHECK(outcome(t.submit(work, said)) == errc::none);
    CHECK(outcome(t.submit(work, in_time)) == errc::none);
    CHECK(by_coroutine(said) == errc::none);
    CHECK(by_coroutine(in_time) == errc::none);
    CHECK(ran == 6);
    CHECK(t.usage().dropped == 5);
}

TEST_CASE("coroutines, requests and pardons of a tenant", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n, {.limiter = {.quarantine_after = 2}});
    auto t = shared.admit({.name = "chat", .memory = 1_MiB, .compute = 50_pct, .streams = 2});
    std::string said;
    bool ended = false;
    const auto chain = [&]() -> detached {
        const auto good = co_await t.async_submit(block(1us), {.stream = 1});
        said = good.status == errc::none ? "good; " : "bad; ";
        const auto bad = co_await t.async_submit([](host::stream&) { throw std::runtime_error("no such page"); });
        try {
            bad.rethrow();
        } catch (const gpushare::operation_error& e) {
            said += e.what();
        }
        ended = true;
    };
    chain();
    while (!ended) (void)t.usage();  // who asks drives, and calls back
    CHECK(t.usage().completed == 2);
    CHECK(said == "good; tenant 'chat': enqueuing the work threw an exception: no such page");
    {
        auto r = t.request({.deadline = clock::now() + 1s, .level = {1}});
        REQUIRE(r.submit(block(1us), {.key = 3}).wait(clock::now() + 5min));
        REQUIRE(r.submit(block(1us), {.stream = 1}).wait(clock::now() + 5min));
        CHECK(r.try_submit(block(1us), {.stream = 2}).code() == errc::invalid_specification);
    }
    for (int i = 0; i < 2; ++i)
        (void)t.submit([](host::stream&) { throw std::runtime_error("again"); }).wait(clock::now() + 5min);
    CHECK(t.try_submit(block(1us)).code() == errc::quarantined);
    const auto e = shared.limiter_of({0}).take_event();
    REQUIRE(e);
    CHECK(e->name.view() == "chat");
    t.pardon();
    CHECK(t.submit(block(1us)).wait(clock::now() + 5min));
    t.close();
    CHECK(code_of([&] { (void)t.request(); }) == errc::closed);
    CHECK(code_of([&] { (void)t.async_submit(block(1us)); }) == errc::closed);
}

TEST_CASE("a thread that puts a tenant to sleep is woken by any thread that drives", "[tenant][submit][threads]") {
    host::node n(modelled());
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 1_MiB, .compute = 50_pct});
    std::jthread dispatcher([&](const std::stop_token& stop) { shared.dispatch(device_id{0}, stop); });
    for (int i = 0; i < 20; ++i) {
        auto last = t.submit(block(2ms));
        const auto began = clock::now();
        REQUIRE(t.sleep(began + 5min));
        REQUIRE(last.done());
        REQUIRE(clock::now() - began < 2min);  // it wasn't the deadline
        t.wake();
    }
}

TEST_CASE("a bad field of a specification or of a change is named, with its value", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    const auto admit = [&](gpushare::tenant_spec spec) {
        spec.name = "t";
        spec.memory = 1_MiB;
        spec.compute = 10_pct;
        return shared.admit(spec);
    };
    CHECK_THROWS_WITH(admit({.slo = -5ms}), "tenant 't': slo = -5000000 ns: must not be negative");
    CHECK_THROWS_WITH(admit({.longest = -1ns}), "tenant 't': longest = -1 ns: must not be negative");
    CHECK_THROWS_WITH(admit({.yields_within = -1ns}), "tenant 't': yields_within = -1 ns: must not be negative");
    CHECK_THROWS_WITH(admit({.cap = 0_pct}), "tenant 't': cap = 0 permille: must be more than 0");
    CHECK_THROWS_WITH(admit({.soft_cap = true}), "tenant 't': soft_cap = yes: must go with a cap below 100 %");
    CHECK_THROWS_WITH(admit({.unit = 0_B}), "tenant 't': unit = 0 B: must be at least 1 B");
    CHECK_THROWS_WITH(admit({.streams = 0}), "tenant 't': streams = 0: must be at least 1");
    CHECK_THROWS_WITH(admit({.devices = 0}), "tenant 't': devices = 0: must be at least 1");
    // The same check without an admission. More memory than there is isn't a bad field.
    CHECK_THROWS_WITH(tenancy::check_specification({.name = "t", .memory = 1_MiB, .slo = -5ms}),
                      "tenant 't': slo = -5000000 ns: must not be negative");
    CHECK_NOTHROW(tenancy::check_specification({.name = "t", .memory = 1024_GiB}));
    auto t = admit({.unit = 1_KiB});
    CHECK_THROWS_WITH(t.resize({.memory = 3_B}),
                      "tenant 't': memory = 3 B: must be whole in units of 1 KiB on each of its devices");
    CHECK_THROWS_WITH(t.resize({.burst = 5_B}),
                      "tenant 't': burst = 5 B: must be whole in units of 1 KiB on each of its devices");
    CHECK_THROWS_WITH(t.resize({.soft_cap = true}), "tenant 't': soft_cap = yes: must go with a cap below 100 %");
    t.resize({.cap = 50_pct, .soft_cap = true});
    t.resize({.cap = 100_pct});  // which lifts it
    CHECK_THROWS_WITH(t.resize({.slo = -1ns}), "tenant 't': slo = -1 ns: must not be negative");
    CHECK_THROWS_WITH(t.resize({.memory = 0_B}), "tenant 't': needs memory, or burst: both are 0");
    const std::string_view of_sms = ": must be a part of the SMs, from 0 to 1";
    for (const auto& [keeps, text] : {std::pair(1.5, "1.500000"), std::pair(-0.25, "-0.250000")}) {
        const auto why = "tenant 't': keeps = " + std::string(text).append(of_sms);
        CHECK_THROWS_WITH(admit({.keeps = gpushare::sm_width(keeps)}), why);
        CHECK_THROWS_WITH(t.resize({.keeps = gpushare::sm_width(keeps)}), why);
    }
    t.resize({.keeps = gpushare::sm_width(1)});
    CHECK(t.spec().memory == 1_MiB);
}

TEST_CASE("an objective that others' longest work makes impossible isn't admitted, and the error has the figures",
          "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto pages = shared.admit({.name = "pages", .memory = 1_MiB, .compute = 50_pct, .longest = 75ms});
    const gpushare::tenant_spec chat{
        .name = "chat", .memory = 1_MiB, .compute = 10_pct, .level = {1}, .slo = 20ms, .longest = 1ms};
    CHECK_THROWS_WITH(shared.admit(chat), Catch::Matchers::Contains("tenant 'chat'") &&
                                              Catch::Matchers::Contains("asked for 20 ms, at least 76 ms needed"));
    auto later = chat;  // one that can be met; then that one
    later.slo = 80ms;
    auto t = shared.admit(later);
    CHECK_THROWS_WITH(t.resize({.slo = 20ms}), Catch::Matchers::Contains("tenant 'chat'") &&
                                                   Catch::Matchers::Contains("asked for 20 ms, at least 76 ms needed"));
    const auto why = t.try_resize({.compute = 20_pct, .slo = 76ms - 1us});
    CHECK(why == errc::slo_unreachable);
    CHECK(why.asked == 75'999'000);
    CHECK(why.left == 999'000);
    CHECK(why.limit == 76'000'000);
    CHECK(t.spec().slo == 80ms);
    CHECK(t.spec().compute == 10_pct);
    t.resize({.slo = 76ms});
    t.close();
    pages.close();
    CHECK(shared.admit(chat).spec().slo == 20ms);
}

TEST_CASE("observed times of others' work count like declared ones", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto pages = shared.admit({.name = "pages", .memory = 1_MiB, .compute = 50_pct});
    const gpushare::tenant_spec chat{
        .name = "chat", .memory = 1_MiB, .compute = 10_pct, .level = {1}, .slo = 20ms, .longest = 1ms};
    shared.admit(chat).close();  // nothing is known of the others
    for (int i = 0; i < 3; ++i) pages.submit([](auto& stream) { stream.enqueue(30ms); }).wait();
    const auto refused = shared.try_admit(chat);
    REQUIRE_FALSE(refused);
    CHECK(refused.code() == errc::slo_unreachable);
    auto patient = chat;
    patient.slo = 60s;
    CHECK(shared.try_admit(patient));
}

TEST_CASE("a tenant that sleeps runs nothing, keeps nothing for later, and goes on when it wakes", "[tenant][submit]") {
    host::node n(modelled(2));
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 16_MiB, .devices = 2, .compute = 50_pct});
    void* const weights = t.memory().allocate(1 << 20);
    t.memory().deallocate(t.memory().allocate(4 << 20), 4 << 20);
    gpushare::pool_resource cache(t.memory());  // of the program's, on top
    cache.deallocate(cache.allocate(1 << 16), 1 << 16);
    CHECK(t.usage().current > 4_MiB);

    n.faults({1}).stall(t.work_stream(1));
    auto blocked = t.submit(block(1us), 1);
    CHECK_FALSE(t.sleep(clock::now() + 2ms));  // on all devices or none
    CHECK(t.submit(block(1us)).wait(clock::now() + 5min));
    n.faults({1}).resume(t.work_stream(1));
    CHECK(t.sleep(clock::now() + 5min));
    CHECK(blocked.done());
    CHECK(t.usage().current <= 2_MiB);  // the weights, and the segment they are in
    auto waits = t.submit(block(1us));
    CHECK_FALSE(waits.wait(clock::now() + 2ms));
    CHECK(t.usage().waiting == 1);
    t.wake();
    CHECK(waits.wait(clock::now() + 5min));
    CHECK(waits.status() == errc::none);
    t.memory().deallocate(weights, 1 << 20);
    CHECK(t.sleep());
    CHECK(t.close(clock::now() + 5min).leaked_blocks == 0);
    CHECK_FALSE(t.sleep());
}

TEST_CASE("on request, waiting and new submissions of a tenant that goes to sleep are refused", "[tenant][submit]") {
    host::node n(modelled(2));
    tenancy shared(n, {.limiter = {.depth = 1, .horizon = 1ns}});
    auto t = shared.admit({.name = "t", .memory = 2_MiB, .devices = 2, .compute = 50_pct});
    std::atomic<errc> told{errc::none};
    n.faults({0}).stall(t.work_stream());
    auto first = t.submit(block(1us));
    auto second = t.submit(block(1us), {}, [&](const completion& c) { told = c.status; });
    CHECK_FALSE(t.sleep(clock::now() + 2ms, {}, gpushare::while_asleep::refuse));
    CHECK(told == errc::asleep);
    CHECK(second.status() == errc::asleep);
    CHECK_FALSE(first.done());
    n.faults({0}).resume(t.work_stream());
    CHECK(t.submit(block(1us)).wait(clock::now() + 5min));  // it isn't asleep
    REQUIRE(t.sleep(clock::now() + 5min, {}, gpushare::while_asleep::refuse));
    for (std::size_t part = 0; part < 2; ++part) CHECK(t.try_submit(block(1us), part).code() == errc::asleep);
    CHECK(t.acquire().code() == errc::asleep);
    t.wake();
    for (std::size_t part = 0; part < 2; ++part) CHECK(t.submit(block(1us), part).wait(clock::now() + 5min));
}

TEST_CASE("an engine's callback lets urgent work in, by its permit or by the stream that its callable has",
          "[tenant][submit][threads]") {
    std::atomic<bool> inside{false}, go{false}, came{false};
    std::atomic<int> yielded{0};
    host::node n({.memory = 64_MiB, .sms = 1});
    tenancy shared(n);
    auto writer = shared.admit({.name = "writer", .memory = 1_MiB, .compute = 50_pct, .yields_within = 3s});
    auto urgent = shared.admit({.name = "urgent", .memory = 1_MiB, .compute = 10_pct, .level = {1}});
    const auto generate = [&](auto& permit) {
        inside = true;
        while (!go) std::this_thread::yield();
        const auto give_up = clock::now() + 5min;
        while (!came && clock::now() < give_up) yielded += gpushare::yield_point(permit) ? 1 : 0;  // between two tokens
    };
    const auto urgent_call = [&] {
        while (!inside) std::this_thread::yield();
        auto call = urgent.submit([&](host::stream& s) { s.launch({}, [&](auto&) { came = true; }); });
        CHECK(call.bound() == 3s);
        CHECK_FALSE(gpushare::yield_point(writer.work_stream()));  // this thread has no SM
        go = true;
        CHECK(call.wait(clock::now() + 30s));
    };
    SECTION("the stream") {
        auto call = writer.submit([&](host::stream& s) { s.launch({}, [&](auto&) { generate(s); }); });
        urgent_call();
        CHECK(call.wait(clock::now() + 30s));
    }
    SECTION("a permit of the gate") {
        auto permit = writer.acquire();
        if (permit) {
            CHECK_FALSE(gpushare::yield_point(*permit));  // nothing is there to yield
            permit->enqueue(writer.work_stream(),
                            [&](host::stream& s) { s.launch({}, [&](auto&) { generate(*permit); }); });
            urgent_call();
        }
    }
    CHECK(writer.close(clock::now() + 30s).usage.completed == 1);
    CHECK(yielded == 1);
}

TEST_CASE("neither close nor sleep comes back before what was cancelled has been told", "[tenant][submit][threads]") {
    host::node n(modelled());
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 1_MiB, .compute = 50_pct});
    REQUIRE(t.sleep());
    std::latch destroying(1), go_on(1);
    // A callable whose destructor takes its time: the submission waits no more, and isn't over.
    struct slow {
        slow(std::latch& reached, std::latch& held) : reached_(&reached), held_(&held) {}
        slow(const slow&) = delete;
        slow& operator=(const slow&) = delete;
        ~slow() {
            reached_->count_down();
            held_->wait();
        }
        std::latch *reached_, *held_;
    };
    auto own = std::make_unique<slow>(destroying, go_on);
    std::atomic<bool> told{false};
    auto waits = t.submit([own = std::move(own)](host::stream&) {}, {}, [&](const completion&) { told = true; });
    auto cancelled = std::async(std::launch::async, [&] { return waits.cancel(); });
    destroying.wait();
    CHECK_FALSE(t.sleep(clock::now() + 2ms));
    CHECK_FALSE(t.close(clock::now() + 2ms).complete);
    CHECK_FALSE(told);
    go_on.count_down();
    CHECK(t.close(clock::now() + 5min).complete);
    CHECK(told);
    CHECK(cancelled.get());
}

TEST_CASE("wake ends a sleep that is still waiting for work", "[tenant][submit][threads]") {
    host::node n(modelled());
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 1_MiB, .compute = 50_pct});
    n.faults({0}).stall(t.work_stream());
    auto first = t.submit(block(1us));
    auto sleeping = std::async(std::launch::async, [&] { return t.sleep(); });
    for (int i = 0; i < 300'000 && sleeping.wait_for(1ms) != std::future_status::ready; ++i) t.wake();
    CHECK(sleeping.wait_for(0ms) == std::future_status::ready);
    n.faults({0}).resume(t.work_stream());
    CHECK_FALSE(sleeping.get());
    CHECK(first.wait(clock::now() + 5min));
}

TEST_CASE("a thread that waits for room is told of a close while the close waits for the device",
          "[tenant][submit][threads]") {
    host::node n(modelled());
    tenancy shared(n, {.limiter = {.depth = 1, .horizon = 1ns}});
    auto t = shared.admit({.name = "t", .memory = 1_MiB, .compute = 50_pct, .queue_limit = 1});
    n.faults({0}).stall(t.work_stream());
    auto first = t.submit(block(1us));
    // Who watches the device notices everything: the third is to sleep.
    auto watching = std::async(std::launch::async, [&] { return first.wait(clock::now() + 5min); });
    CHECK(watching.wait_for(5ms) == std::future_status::timeout);
    // Who is turned away at the gate is told alone: nothing but the close tells the third.
    auto second = std::async(std::launch::async, [&] { return t.acquire().code(); });
    while (t.usage().waiting != 1) std::this_thread::yield();
    auto third =
        std::async(std::launch::async, [&] { return t.try_submit(block(1us), {.room_by = gpushare::never}).code(); });
    CHECK(third.wait_for(5ms) == std::future_status::timeout);
    auto closing = std::async(std::launch::async, [&] { return t.close(clock::now() + 5min).complete; });
    CHECK(third.wait_for(5min) == std::future_status::ready);
    CHECK(closing.wait_for(0ms) == std::future_status::timeout);
    n.faults({0}).resume(t.work_stream());
    CHECK(third.get() == errc::closed);
    CHECK(closing.get());
    CHECK(watching.get());
    CHECK(first.status() == errc::none);
    CHECK(second.get() == errc::closed);
}

TEST_CASE("wake beside sleep leaves a tenant asleep on all of its devices or on none", "[tenant][submit][threads]") {
    host::node n(modelled(2));
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 2_MiB, .devices = 2, .compute = 50_pct});
    auto neighbour = shared.admit({.name = "n", .memory = 1_MiB, .compute = 50_pct, .on = {{0}}});
    // Its callback holds up whoever drives the first device: wake(), which has come past that one
    // and not to the second.
    std::latch between(1), go_on(1);
    n.faults({0}).stall(neighbour.work_stream());  // or this thread would be the one
    auto work = neighbour.submit(block(1us), {}, [&](const completion&) {
        between.count_down();
        go_on.wait();
    });
    n.faults({0}).resume(neighbour.work_stream());
    auto waking = std::async(std::launch::async, [&] {
        while (!between.try_wait()) t.wake();
    });
    between.wait();
    const bool asleep = t.sleep(clock::now() + 5min);
    go_on.count_down();
    waking.get();
    std::vector<tenancy::tenant::ticket> one_each;
    for (std::size_t part = 0; part < 2; ++part) one_each.push_back(t.submit([](host::stream&) {}, part));
    const auto waiting = t.usage().waiting;
    CHECK((waiting == 0 || waiting == 2));
    CHECK((waiting == 0 || asleep));
    t.wake();
    for (auto& ticket : one_each) CHECK(ticket.wait(clock::now() + 5min));
    CHECK(work.done());
}

TEST_CASE("threads wait for their permits, look at them or drop them, and each sees its own work done",
          "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 1_MiB, .compute = 50_pct, .streams = 2});
    std::atomic<int> ran{0}, wrong{0};
    {
        std::vector<std::jthread> all;
        for (std::uint32_t thread = 0; thread < 4; ++thread)
            all.emplace_back([&, thread] {
                auto& stream = t.work_stream(0, thread % 2);
                for (int i = 0; i < 60; ++i) {
                    std::atomic<bool> mine{false};
                    auto p = t.acquire({.key = 1}, soon());
                    if (!p) ++wrong;
                    if (!p) continue;
                    if (i % 3 == 2) {  // dropped at once
                        p->enqueue(stream, [&](host::stream& s) { s.launch({.blocks = 1}, [&](auto&) { ++ran; }); });
                        continue;
                    }
                    p->enqueue(stream, [&](host::stream& s) {
                        s.launch({.blocks = 1}, [&](auto&) {
                            mine = true;
                            ++ran;
                        });
                    });
                    if (i % 3 == 0)
                        (void)p->wait(soon());
                    else
                        while (!p->poll()) std::this_thread::yield();
                    if (!p->done() || !mine || p->status() != errc::none) ++wrong;
                }
            });
    }
    CHECK(wrong == 0);
    CHECK(t.close(soon()).complete);
    CHECK(ran == 240);
}

TEST_CASE("a tenant's permit says when its work is over on the host, and what the kernel threw", "[tenant][submit]") {
    host::node n(modelled());
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 1_MiB, .compute = 50_pct});
    const auto thrown = [](host::stream& s) {
        s.launch({.blocks = 1}, [](auto&) { throw std::out_of_range("in the kernel"); });
    };
    int ran = 0;
    auto good = t.acquire({.key = 1}, soon());
    n.faults({0}).stall(t.work_stream());
    good->enqueue(t.work_stream(), [&](host::stream& s) { s.launch({.blocks = 1}, [&](auto&) { ++ran; }); });
    CHECK_FALSE(good->poll());
    n.faults({0}).resume(t.work_stream());
    CHECK(good->wait(soon()));
    CHECK(ran == 1);
    CHECK_NOTHROW(good->rethrow());
    auto bad = t.acquire({.key = 1}, soon());
    bad->enqueue(t.work_stream(), thrown);
    CHECK(bad->wait(soon()));
    CHECK(bad->status() == errc::kernel_failed);
    CHECK_THROWS_WITH(bad->rethrow(), Catch::Contains("in the kernel"));
    for (int i = 0; i < 3; ++i) {  // nobody asks, and the record is free all the same
        t.acquire({.key = 1}, soon())->enqueue(t.work_stream(), thrown);
        CHECK(t.submit(block(1us)).wait(soon()));
    }
    CHECK(t.usage().failed == 4);
    CHECK(t.close(soon()).complete);
    CHECK_THROWS_WITH(bad->rethrow(), Catch::Contains("in the kernel"));  // the permit's own, though the tenant is gone
}

}  // namespace submit_test
