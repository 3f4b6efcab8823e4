// SPDX-License-Identifier: Apache-2.0
// Tags: lock-free
// Admission, memory, submissions, usage, resize and close of tenants, on the host backend.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/stack_trace.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/host_tenants.hpp"

namespace tenancy_test {

using namespace support::host_tenants;
using gpushare::tenant_event;

namespace {

errc admission(tenancy& t, tenant_spec spec) {
    return code_of([&] { (void)t.admit(std::move(spec)); });
}

/// Everything that is promised and everything that is free must be as before.
void check_untouched(tenancy& t, std::uint32_t devices = 2) {
    for (const auto& room : t.rooms()) CHECK(room.free == 64_MiB);
    for (std::uint32_t d = 0; d < devices; ++d) CHECK(t.unpromised({d}) == gpushare::share::whole());
}

}  // namespace

TEST_CASE("a tenant sees its part of each device as its own (triton 1140, 3507, 3854)", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto chat = shared.admit({.name = "chat", .memory = 32_MiB, .devices = 2, .compute = 60_pct});
    CHECK(chat.name() == "chat");
    CHECK(chat.spec().on == std::vector<device_id>{{0}, {1}});
    for (std::size_t part = 0; part < 2; ++part) {
        CHECK(chat.memory(part).capacity() == 16_MiB);
        CHECK(chat.memory(part).free() == 16_MiB);
        CHECK(shared.rooms()[part].free == 48_MiB);
        CHECK(shared.unpromised({static_cast<std::uint32_t>(part)}) == 40_pct);
    }
    void* p = chat.memory(1).allocate(4 << 20);
    CHECK(chat.memory(1).free() == 12_MiB);
    CHECK(chat.memory(0).free() == 16_MiB);
    CHECK(chat.usage().current == 4_MiB);
    CHECK(chat.memory(1).deallocate(p, 4 << 20) == errc::none);
    CHECK(chat.close(soon()).complete);
    check_untouched(shared);
}

TEST_CASE("memory that others take from the node is set aside before anything is promised", "[tenant]") {
    auto o = modelled(1);
    o.taken = 10_MiB;
    node n(o);
    tenancy shared(n);
    CHECK(shared.rooms()[0].free == 54_MiB);
    CHECK(admission(shared, {.name = "all", .memory = 55_MiB, .compute = 10_pct}) == errc::no_room);
    CHECK(admission(shared, {.name = "rest", .memory = 54_MiB, .compute = 10_pct}) == errc::none);
}

TEST_CASE("a refused admission takes nothing and says why", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    CHECK(admission(shared, {.memory = 1_MiB, .compute = 1_pct}) == errc::invalid_specification);
    CHECK(admission(shared, {.name = "no share", .memory = 1_MiB}) == errc::none);
    CHECK(admission(shared, {.name = "no memory", .compute = 1_pct}) == errc::invalid_specification);
    CHECK(admission(shared, {.name = "none", .memory = 1_MiB, .devices = 0, .compute = 1_pct}) ==
          errc::invalid_specification);
    CHECK(admission(shared, {.name = "3 of 2", .memory = 3_MiB, .devices = 3, .compute = 1_pct}) ==
          errc::too_few_devices);
    CHECK(admission(shared, {.name = "odd", .memory = 1_MiB + 1_B, .devices = 2, .compute = 1_pct}) == errc::not_whole);
    CHECK(admission(shared, {.name = "odd burst", .memory = 2_MiB, .devices = 2, .compute = 1_pct, .burst = 1_B}) ==
          errc::not_whole);
    CHECK(admission(shared, {.name = "big", .memory = 130_MiB, .devices = 2, .compute = 1_pct}) == errc::no_room);
    CHECK(admission(shared, {.name = "where", .memory = 1_MiB, .compute = 1_pct, .on = {{7}}}) == errc::no_device);
    CHECK(admission(shared, {.name = "twice", .memory = 2_MiB, .compute = 1_pct, .on = {{1}, {1}}}) ==
          errc::duplicate_device);
    check_untouched(shared);

    auto first = shared.admit({.name = "first", .memory = 2_MiB, .devices = 2, .compute = 70_pct});
    CHECK(admission(shared, {.name = "first", .memory = 2_MiB, .compute = 1_pct}) == errc::duplicate_name);
    CHECK(admission(shared, {.name = "second", .memory = 2_MiB, .compute = 30.1_pct}) == errc::share_exceeded);
    CHECK(admission(shared, {.name = "second", .memory = 2_MiB, .compute = 30.1_pct, .on = {{1}}}) ==
          errc::share_exceeded);
    try {
        (void)shared.admit({.name = "second", .memory = 2_MiB, .compute = 40_pct});
        FAIL("admitted");
    } catch (const gpushare::error& e) {
        CHECK(
            std::string(e.what()) ==
            "tenant 'second': admission: asked for 40 % of the device's time, 30 % of 100 % left (shares would exceed "
            "the whole device)");
        CHECK(e.tenant() == "second");
    }
    CHECK(admission(shared, {.name = "second", .memory = 2_MiB, .compute = 30_pct}) == errc::none);
    CHECK(first.close(soon()).complete);
    check_untouched(shared);
}

TEST_CASE("the devices with the most room are chosen, among those with device time left", "[tenant]") {
    node n(modelled(3));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 30_MiB, .compute = 10_pct, .on = {{0}}});
    auto b = shared.admit({.name = "b", .memory = 1_MiB, .compute = 95_pct, .on = {{2}}});
    auto c = shared.admit({.name = "c", .memory = 2_MiB, .devices = 2, .compute = 10_pct});
    CHECK(c.spec().on == std::vector<device_id>{{0}, {1}});
    auto d = shared.admit({.name = "d", .memory = 2_MiB, .compute = 5_pct});
    CHECK(d.spec().on == std::vector<device_id>{{1}});  // 63 MiB free on both 1 and 2: the lower id
}

TEST_CASE("a neighbour's memory pressure is never visible", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n, {.stack = gpushare::memory_stack::direct});
    auto loud = shared.admit({.name = "loud", .memory = 32_MiB, .compute = 50_pct});
    auto quiet = shared.admit({.name = "quiet", .memory = 32_MiB, .compute = 50_pct});

    std::atomic<bool> stop{false};
    std::vector<std::jthread> attackers;
    for (int i = 0; i < 3; ++i)
        attackers.emplace_back([&, i] {
            std::vector<void*> held;
            while (!stop.load()) {
                if (void* p = loud.memory().try_allocate(5 << 20)) held.push_back(p);
                if (void* p = loud.memory().try_allocate(std::size_t{33} << 20)) held.push_back(p);  // never fits
                if (held.size() > static_cast<std::size_t>(i)) {
                    loud.memory().deallocate(held.back(), 5 << 20);
                    held.pop_back();
                }
            }
            for (void* p : held) loud.memory().deallocate(p, 5 << 20);
        });
    while (loud.usage().refused == 0) std::this_thread::yield();  // the attack is under way
    std::size_t refused = 0;
    for (int round = 0; round < 2000; ++round) {
        void* all = quiet.memory().try_allocate(std::size_t{32} << 20);
        refused += all == nullptr;
        if (all != nullptr) quiet.memory().deallocate(all, std::size_t{32} << 20);
    }
    stop = true;
    attackers.clear();
    CHECK(refused == 0);
    CHECK(quiet.usage().refused == 0);
    CHECK(loud.usage().refused > 0);
    CHECK(loud.usage().peak <= 32_MiB);
    CHECK(loud.usage().current == 0_B);
}

TEST_CASE("burst uses what nobody was promised, and only that", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct, .burst = 16_MiB});
    auto b = shared.admit({.name = "b", .memory = 40_MiB, .compute = 10_pct});  // leaves 8 MiB unpromised
    CHECK(a.memory().capacity() == 32_MiB);
    CHECK(a.memory().free() == 24_MiB);
    void* p = a.memory().allocate(20 << 20);
    gpushare::failure why;
    CHECK(a.memory().try_allocate(5 << 20, 256, &why) == nullptr);
    CHECK(why.code == errc::out_of_memory);
    void* q = b.memory().allocate(40 << 20);  // the guarantee holds beside the burst
    CHECK(admission(shared, {.name = "c", .memory = 5_MiB, .compute = 1_pct}) == errc::no_room);
    a.memory().deallocate(p, 20 << 20);
    CHECK(admission(shared, {.name = "c", .memory = 8_MiB, .compute = 1_pct}) == errc::none);
    b.memory().deallocate(q, 40 << 20);
}

TEST_CASE("a refusal names the tenant and the figures", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n);
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 10_pct});
    void* p = chat.memory().allocate(10 << 20);
    try {
        (void)chat.memory().allocate(8 << 20);
        FAIL("allocated");
    } catch (const std::bad_alloc& e) {
        CHECK(std::string(e.what()) ==
              "tenant 'chat': allocate: asked for 8 MiB, 6 MiB of 16 MiB left (over the quota)");
    }
    chat.memory().deallocate(p, 10 << 20);
}

TEST_CASE("wrong frees change nothing and are reported", "[tenant]") {
    node n(modelled(1));
    std::vector<tenant_event> events;
    tenancy shared(
        n, {.events = [&](const tenant_event& e) { events.push_back(e); }, .stack = gpushare::memory_stack::direct});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
    auto b = shared.admit({.name = "b", .memory = 16_MiB, .compute = 10_pct});
    void* p = a.memory().allocate(1 << 20);
    int local = 0;
    CHECK(a.memory().deallocate(&local, 4) == errc::unknown_block);
    CHECK(a.memory().deallocate(p, 2 << 20) == errc::wrong_size);
    CHECK(a.memory().deallocate(p, 1 << 20, 512) == errc::wrong_size);
    CHECK(b.memory().deallocate(p, 1 << 20) == errc::unknown_block);  // another tenant's
    CHECK(a.usage().current == 1_MiB);
    CHECK(a.memory().deallocate(p, 1 << 20) == errc::none);
    CHECK(a.memory().deallocate(p, 1 << 20) == errc::unknown_block);  // twice
    CHECK(a.usage().current == 0_B);
    REQUIRE(events.size() == 5);
    for (const auto& e : events) CHECK(e.what == tenant_event::kind::wrong_free);
    CHECK(events[3].tenant == "b");
}

TEST_CASE("work runs, is charged, and its failures are the tenant's own", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n);
    auto good = shared.admit({.name = "good", .memory = 1_MiB, .compute = 50_pct});
    auto bad = shared.admit({.name = "bad", .memory = 1_MiB, .compute = 50_pct});
    std::atomic<int> ran{0};
    const auto began = host::steady_clock::now();
    std::vector<tenancy::tenant::ticket> tickets;
    for (int i = 0; i < 10; ++i) {
        tickets.push_back(good.submit(
            [&](host::stream& s) { s.launch({.blocks = 2, .hold = 1ms}, [&ran](auto&) { ran.fetch_add(1); }); }));
        tickets.push_back(bad.submit([](host::stream& s) {
            s.launch({.blocks = 1, .hold = 1ms}, [](auto&) { throw std::runtime_error("illegal access"); });
        }));
        tickets.push_back(bad.submit([](host::stream&) { throw std::runtime_error("no such engine"); }));
    }
    for (auto& t : tickets) REQUIRE(t.wait(soon()));
    CHECK(ran == 20);
    for (std::size_t i = 0; i < tickets.size(); i += 3) {
        CHECK(tickets[i].status() == errc::none);
        CHECK(tickets[i + 1].status() == errc::kernel_failed);
        CHECK(tickets[i + 2].status() == errc::submission_failed);
        CHECK_THROWS_WITH(tickets[i + 1].rethrow(), "tenant 'bad': the work failed on the device: illegal access");
        CHECK_THROWS_WITH(tickets[i + 2].rethrow(),
                          "tenant 'bad': enqueuing the work threw an exception: no such engine");
    }
    try {
        tickets[1].rethrow();
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::kernel_failed);
        CHECK(e.tenant() == "bad");
        CHECK_THROWS_WITH(std::rethrow_if_nested(e), "illegal access");  // as it was thrown
    }
    CHECK(good.usage().completed == 10);
    CHECK(good.usage().failed == 0);
    CHECK(bad.usage().completed == 20);
    CHECK(bad.usage().failed == 20);

    // The ledger is the truth, and the charge follows it.
    const auto ledger = n.ledger({0}).take();
    gpushare::ns truth{};
    for (const auto& [tag, busy] :
         host::sm_time_by_tag(ledger.blocks, gpushare::instant{}, gpushare::never, n.options().sms))
        if (tag == good.tag()) truth = busy;
    CHECK(good.usage().device_time >= truth / 2);
    // How much more than the ledger has depends on the machine's other work; no instant is charged
    // twice, though.
    CHECK(good.usage().device_time + bad.usage().device_time <= host::steady_clock::now() - began);
}

TEST_CASE("frees in stream order are credited when the stream gets there", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct});
    void* p = a.memory().allocate(16 << 20);
    auto& s = a.work_stream();
    n.faults({0}).stall(s);
    s.enqueue(1ms);
    CHECK(a.memory().deallocate_after(s.record(), p, 16 << 20) == errc::none);
    CHECK(a.usage().pending == 16_MiB);
    CHECK(a.memory().try_allocate(1 << 20) == nullptr);
    n.faults({0}).resume(s);
    CHECK(a.memory().drain(soon()));
    void* q = a.memory().try_allocate(16 << 20);
    CHECK(q != nullptr);
    a.memory().deallocate(q, 16 << 20);
}

TEST_CASE("an allocation collects reached frees before it is refused", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct});
    auto& s = a.work_stream();
    for (int i = 0; i < 50; ++i) {
        void* p = a.memory().allocate(16 << 20);
        s.enqueue(100us);
        const auto point = s.record();
        CHECK(a.memory().deallocate_after(point, p, 16 << 20) == errc::none);
        REQUIRE(point.wait(soon()));
    }
    CHECK(a.memory().drain(soon()));
}

TEST_CASE("resize is live, and all or nothing", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    auto b = shared.admit({.name = "b", .memory = 40_MiB, .compute = 40_pct, .on = {{1}}});
    a.resize({.memory = 48_MiB, .compute = 60_pct});
    CHECK(a.memory(0).capacity() == 24_MiB);
    CHECK(shared.unpromised({0}) == 40_pct);
    CHECK(shared.unpromised({1}) == 0_pct);

    // Device 0 has room for 32 MiB, device 1 has not.
    CHECK(code_of([&] { a.resize({.memory = 64_MiB}); }) == errc::no_room);
    CHECK(code_of([&] { a.resize({.compute = 60.1_pct}); }) == errc::share_exceeded);
    CHECK(code_of([&] { a.resize({.memory = 1_B}); }) == errc::not_whole);
    CHECK(code_of([&] { a.resize({.memory = 0_B}); }) == errc::invalid_specification);
    CHECK(a.spec().memory == 48_MiB);
    CHECK(shared.rooms()[0].free == 40_MiB);
    CHECK(shared.rooms()[1].free == 0_B);

    // Below what is used: nothing is taken, and room comes back as it is freed.
    void* p = a.memory(1).allocate(20 << 20);
    a.resize({.memory = 8_MiB});
    CHECK(a.memory(1).try_allocate(1) == nullptr);
    CHECK(shared.rooms()[0].free == 60_MiB);
    CHECK(shared.rooms()[1].free == 4_MiB);
    a.memory(1).deallocate(p, 20 << 20);
    CHECK(shared.rooms()[1].free == 20_MiB);
    CHECK(a.memory(1).free() == 4_MiB);
}

TEST_CASE("closing returns everything and reports what leaked", "[tenant]") {
    node n(modelled(2));
    std::vector<std::string> leaks;
    tenancy shared(n, {.events = [&](const tenant_event& e) {
                       if (e.what == tenant_event::kind::leak) leaks.emplace_back(e.label);
                   }});
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    (void)a.memory(0).allocate(1 << 20, 256, "weights");
    (void)a.memory(1).allocate(2 << 20, 256, "kv-cache");
    void* pending = a.memory(0).allocate(1 << 20);
    std::vector<tenancy::tenant::ticket> tickets;
    for (int i = 0; i < 8; ++i) tickets.push_back(a.submit([](host::stream& s) { s.enqueue(5ms); }));
    a.memory(0).deallocate_after(a.work_stream(0).record(), pending, 1 << 20);
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 2);
    CHECK(report.leaked == 3_MiB);
    CHECK(leaks == std::vector<std::string>{"weights", "kv-cache"});
    check_untouched(shared);
    CHECK(n.memory({0}).used() == 0_B);
    CHECK(n.memory({1}).used() == 0_B);

    // What had been let in ran; the rest was cancelled.
    std::size_t ran = 0, cancelled = 0;
    for (auto& t : tickets) {
        REQUIRE(t.done());
        ran += t.status() == errc::none;
        cancelled += t.status() == errc::closed;
    }
    CHECK(ran >= 1);
    CHECK(cancelled >= 1);
    CHECK(ran + cancelled == 8);

    CHECK(a.close(soon()).complete);  // again
    CHECK(code_of([&] { a.submit([](host::stream&) {}); }) == errc::closed);
    CHECK(code_of([&] { (void)a.memory(); }) == errc::closed);
    CHECK(a.acquire().code() == errc::closed);
    CHECK(admission(shared, {.name = "a", .memory = 1_MiB, .compute = 100_pct}) == errc::none);  // the name is free
}

namespace {
[[gnu::noinline]] void allocate_and_forget(gpushare::tenant<node>& t) { (void)t.memory().allocate(4096); }
}  // namespace

TEST_CASE("a leak says who allocated it, where the tenancy was asked to remember", "[tenant]") {
    const bool asked = GENERATE(false, true);
    node n(modelled(2));
    std::vector<std::vector<void*>> traces;
    tenancy shared(n, {.events = [&](const tenant_event& e) { traces.emplace_back(e.trace.begin(), e.trace.end()); },
                       .trace = asked ? gpushare::capture_stack : nullptr});
    auto a = shared.admit({.name = "a", .memory = 1_MiB, .compute = 50_pct});
    allocate_and_forget(a);
    allocate_and_forget(a);
    (void)a.memory().allocate(4096);
    CHECK(a.close(soon()).leaked_blocks == 3);
    REQUIRE(traces.size() == 3);
    for (const auto& t : traces) {
        CHECK((t.size() > 2) == asked);
        CHECK(gpushare::symbols_of(t).size() == t.size());
    }
    if (asked) CHECK(traces[0] != traces[2]);
}

TEST_CASE("a tenant knows the largest block that it could have", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    CHECK(a.usage().largest_free == 16_MiB);
    void* const p = a.memory(0).allocate(15 << 20);
    CHECK(a.memory(0).largest_free() == 1_MiB);
    CHECK(a.usage().largest_free == 16_MiB);  // on the other device
    CHECK(a.memory(0).try_allocate((1 << 20) + 1) == nullptr);
    void* const q = a.memory(0).try_allocate(1 << 20);
    CHECK(q != nullptr);
    CHECK(a.memory(0).largest_free() == 0_B);
    a.memory(0).deallocate(p, 15 << 20);
    a.memory(0).deallocate(q, 1 << 20);
}

TEST_CASE("a pool over a tenant's memory is refused in the tenant's name, with its figures", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct});
    gpushare::pool_resource pool{a.memory(), {.segment = 1_MiB}};
    void* const p = pool.allocate(12 << 20, 256);
    CHECK_THROWS_WITH(
        (void)pool.allocate(5 << 20, 256),
        "tenant 'chat': allocate from a pool: asked for 5 MiB, 4 MiB of 16 MiB left (over the quota); the pool "
        "holds 12 MiB, of which 0 B are free, 0 B in one block");
    CHECK(pool.deallocate(p, 12 << 20, 256) == errc::none);
}

TEST_CASE("closing gives up at its deadline and can be repeated", "[tenant]") {
    node n(modelled(1));
    std::vector<tenant_event::kind> events;
    tenancy shared(n, {.close_timeout = 1ms,
                       .events = [&](const tenant_event& e) { events.push_back(e.what); },
                       .stack = gpushare::memory_stack::direct});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct});
    n.faults({0}).stall(a.work_stream());
    (void)a.memory().allocate(1 << 20);
    auto ticket = a.submit([](host::stream& s) { s.enqueue(1ms); });
    CHECK_FALSE(a.close(host::steady_clock::now() + 5ms).complete);
    CHECK_FALSE(ticket.done());
    CHECK(n.memory({0}).used() == 1_MiB);  // the work may still use it
    n.faults({0}).resume(a.work_stream());
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 1);
    CHECK(ticket.done());
    CHECK(n.memory({0}).used() == 0_B);
    CHECK(events == std::vector{tenant_event::kind::leak});
}

TEST_CASE("a tenant dropped with stuck work keeps its memory until the work ends", "[tenant]") {
    node n(modelled(1));
    std::vector<tenant_event::kind> events;
    tenancy shared(n, {.close_timeout = 1ms, .events = [&](const tenant_event& e) { events.push_back(e.what); }});
    host::stream* stuck = nullptr;
    {
        auto a = shared.admit({.name = "a", .memory = 64_MiB, .compute = 50_pct});
        stuck = &a.work_stream();
        n.faults({0}).stall(*stuck);
        (void)a.memory().allocate(1 << 20);
        (void)a.submit([](host::stream& s) { s.enqueue(1ms); });
    }
    CHECK(events == std::vector{tenant_event::kind::stuck});
    CHECK(admission(shared, {.name = "b", .memory = 64_MiB, .compute = 50_pct}) == errc::no_room);
    CHECK(admission(shared, {.name = "a", .memory = 1_MiB, .compute = 10_pct}) == errc::duplicate_name);
    n.faults({0}).resume(*stuck);
    const auto until = soon();
    while (admission(shared, {.name = "b", .memory = 64_MiB, .compute = 100_pct}) != errc::none)
        REQUIRE(host::steady_clock::now() < until);
    CHECK(events.back() == tenant_event::kind::leak);
    CHECK(n.memory({0}).used() == 0_B);
}

TEST_CASE("a lost device fails what runs there, and closing still returns everything", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    (void)a.memory(0).allocate(1 << 20);
    std::vector<tenancy::tenant::ticket> tickets;
    for (int i = 0; i < 6; ++i) tickets.push_back(a.submit([](host::stream& s) { s.enqueue(1h); }, 0));
    n.faults({0}).lose_device();
    for (auto& t : tickets) {
        REQUIRE(t.wait(soon()));
        CHECK(t.status() == errc::device_lost);
    }
    auto other = a.submit([](host::stream& s) { s.enqueue(1ms); }, 1);
    REQUIRE(other.wait(soon()));
    CHECK(other.status() == errc::none);
    CHECK(a.memory(0).try_allocate(1 << 20) == nullptr);
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 1);
    CHECK(shared.rooms()[0].free == 0_MiB);  // lost: there is nothing to promise any more
    CHECK(shared.rooms()[1].free == 64_MiB);
    for (std::uint32_t d = 0; d < 2; ++d) CHECK(shared.unpromised({d}) == gpushare::share::whole());
}

namespace {

/// What one of two backlogged tenants, to which 70 % of the device belong, has of it over about 200
/// ms.
double part_of_seventy_percent() {
    node n(modelled(1));
    tenancy shared(n);
    std::jthread dispatcher([&](const std::stop_token& stop) { shared.dispatch({0}, stop); });
    auto a = shared.admit({.name = "a", .memory = 1_MiB, .compute = 70_pct});
    auto b = shared.admit({.name = "b", .memory = 1_MiB, .compute = 30_pct});
    std::vector<tenancy::tenant::ticket> tickets;
    for (int i = 0; i < 400; ++i) {
        tickets.push_back(a.submit([](host::stream& s) { s.enqueue(500us); }));
        tickets.push_back(b.submit([](host::stream& s) { s.enqueue(1ms); }));
    }
    const auto start = host::steady_clock::now();
    while (a.usage().waiting > 100) std::this_thread::sleep_for(1ms);
    const auto end = host::steady_clock::now();
    REQUIRE(b.usage().waiting > 0);
    const auto busy = host::sm_time_by_tag(n.ledger({0}).take().blocks, start, end, n.options().sms);
    REQUIRE(busy.size() == 2);
    CHECK(a.close(soon()).complete);
    CHECK(b.close(soon()).complete);
    return static_cast<double>(busy[0].busy.count()) / static_cast<double>((busy[0].busy + busy[1].busy).count());
}

}  // namespace

TEST_CASE("shares hold between backlogged tenants, by the device's own ledger", "[tenant]") {
    double part = part_of_seventy_percent();
    // A machine that stops a device's thread for 20 ms lengthens a block by that, near the end for
    // good.
    for (int again = 0; again < 5 && part != Approx(0.7).margin(0.05); ++again) part = part_of_seventy_percent();
    CHECK(part == Approx(0.7).margin(0.05));  // the bench measures it properly
}

TEST_CASE("tenants come and go while others work", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    std::vector<std::jthread> threads;
    std::atomic<int> rounds{0};
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            for (int i = 0; i < 25; ++i) {
                auto mine =
                    shared.admit({.name = "t" + std::to_string(t), .memory = 8_MiB, .devices = 2, .compute = 25_pct});
                void* p = mine.memory(1).allocate(1 << 20);
                auto ticket = mine.submit([p](host::stream& s) { s.fill(p, std::byte{1}, 1 << 20); }, 1);
                if (!ticket.wait(soon()) || ticket.status() != errc::none) return;
                if (i % 2 == 0) mine.memory(1).deallocate(p, 1 << 20);
                if (mine.close(soon()).complete) rounds.fetch_add(1);
            }
        });
    threads.clear();
    CHECK(rounds == 100);
    check_untouched(shared);
}

TEST_CASE("work in flight at the close is in the final account", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n, {.stack = gpushare::memory_stack::direct});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct});
    void* p = a.memory().allocate(1 << 20);
    a.memory().deallocate(p, 1 << 20);
    auto ran = a.submit([](host::stream& s) { s.enqueue(2ms); });
    auto failed = a.submit([](host::stream&) { throw std::runtime_error("no"); });
    const auto report = a.close(soon());
    REQUIRE(report.complete);
    CHECK(report.usage.completed == 2);
    CHECK(report.usage.failed == 1);
    CHECK(report.usage.device_time >= 2ms);
    CHECK(report.usage.peak == 1_MiB);
    CHECK(report.usage.in_flight == 0);
    CHECK(a.usage().device_time == report.usage.device_time);
    CHECK(a.close(soon()).usage.completed == 2);  // again
}

TEST_CASE("calls that overlap a close are refused, and nothing is lost", "[tenant]") {
    for (int round = 0; round < 20; ++round) {
        node n(modelled(2));
        tenancy shared(n);
        {
            auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
            std::atomic<bool> closed{false};
            std::vector<std::jthread> threads;
            for (std::size_t part = 0; part < 2; ++part)
                threads.emplace_back([&, part, &memory = a.memory(part)] {
                    std::vector<tenancy::tenant::ticket> tickets;
                    while (!closed) {
                        (void)memory.try_allocate(1 << 10);  // leaks
                        if (void* p = memory.try_allocate(1 << 12)) memory.deallocate(p, 1 << 12);
                        if (auto t = a.try_submit([](host::stream& s) { s.enqueue(1us); }, part))
                            tickets.push_back(*std::move(t));
                        (void)a.usage();
                        (void)a.acquire(part, host::steady_clock::now() + 1ms);
                        (void)code_of([&] { a.resize({.compute = 40_pct}); });
                    }
                    for (auto& t : tickets) t.wait(soon());
                });
            threads.emplace_back([&] { (void)a.close(soon()); });  // two at once
            std::this_thread::sleep_for(1ms);
            CHECK(a.close(soon()).complete);
            CHECK(code_of([&] { (void)a.memory(); }) == errc::closed);
            CHECK(code_of([&] { a.resize({.memory = 2_MiB}); }) == errc::closed);
            CHECK(a.try_submit([](host::stream&) {}).code() == errc::closed);
            closed = true;
        }
        check_untouched(shared);
        CHECK(n.memory({0}).used() == 0_B);
        CHECK(n.memory({1}).used() == 0_B);
    }
}

TEST_CASE("a tenant may be promised memory alone, or time alone, or nothing of either", "[tenant]") {
    host::node n({.devices = 2, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled});
    tenancy shared(n);
    auto whole = shared.admit({.name = "whole", .memory = 32_MiB, .devices = 2, .compute = 100_pct});
    auto memory = shared.admit({.name = "memory", .memory = 16_MiB, .devices = 2});
    CHECK(memory.spec().compute == 0_pct);
    CHECK(shared.unpromised({0}) == 0_pct);
    auto t = memory.submit([](host::stream& s) { s.enqueue(10us); });
    CHECK(t.wait(soon()));  // of the time that nobody else wants

    // Nothing is set aside, and nobody is refused for it.
    auto lent = shared.admit({.name = "lent", .devices = 2, .burst = gpushare::all_burst, .unit = 1_MiB});
    CHECK(lent.spec().on.size() == 2);
    CHECK(lent.usage().burst == 128_MiB);
    CHECK(shared.rooms()[0].free == 40_MiB);
    void* p = lent.memory().try_allocate(40 << 20);
    CHECK(p != nullptr);
    CHECK(lent.memory().try_allocate(1 << 20) == nullptr);  // the rest is others'
    CHECK(lent.memory().deallocate(p, 40 << 20) == errc::none);
    auto last = shared.admit({.name = "last", .memory = 80_MiB, .devices = 2});
    CHECK(lent.memory().try_allocate(1 << 20) == nullptr);
    CHECK(admission(shared, {.name = "neither", .compute = 1_pct}) == errc::invalid_specification);
    CHECK(code_of([&] { lent.resize({.burst = 0_B}); }) == errc::invalid_specification);
    lent.resize({.burst = 32_MiB});
    CHECK(lent.usage().burst == 32_MiB);
    lent.resize({.burst = gpushare::all_burst});
    CHECK(lent.usage().burst == 128_MiB);
    CHECK(admission(shared, {.name = "on both", .devices = 2, .burst = 2_MiB, .on = {{0}, {1}}}) == errc::none);
    CHECK(admission(shared, {.name = "on none", .burst = 2_MiB, .on = {{2}}}) == errc::no_device);

    // The name of a tenant without a share is its own until it is closed, and then once.
    CHECK(admission(shared, {.name = "memory", .memory = 1_MiB}) == errc::duplicate_name);
    CHECK(last.close(soon()).complete);
    CHECK(memory.close(soon()).complete);
    auto again = shared.admit({.name = "memory", .memory = 1_MiB});
    CHECK(memory.close(soon()).complete);
    CHECK(admission(shared, {.name = "memory", .memory = 1_MiB}) == errc::duplicate_name);
}

}  // namespace tenancy_test
