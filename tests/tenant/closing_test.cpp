// SPDX-License-Identifier: Apache-2.0
// Closing a tenant with layers on its memory and with overlapping calls: no memory is lost, no
// memory is handed out that was taken back, and a complete close leaves nothing charged.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <latch>
#include <memory_resource>
#include <new>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/tenant/detail/turns.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/threads.hpp"

namespace closing_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::errc;
using gpushare::failure;

namespace host = gpushare::host;
using support::code_of;
using tenancy = gpushare::tenancy<host::node>;

namespace {

/// A device's memory that calls `freeing` before it takes a block back.
struct telling_memory : host::device_memory {
    using host::device_memory::device_memory;

    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        if (freeing) freeing();
        return host::device_memory::deallocate(p, size, alignment);
    }

    std::function<void()> freeing;
};
/// A node with one device of such memory.
struct telling_node : host::node {
    using memory_type = telling_memory;

    telling_node() : host::node(host::node_options{.devices = 1, .sms = 1, .timing = host::timing::modelled}) {}
    [[nodiscard]] telling_memory& memory(device_id) noexcept { return memory_; }

private:
    telling_memory memory_{{.capacity = 64_MiB}};
};
using telling_tenancy = gpushare::tenancy<telling_node>;

host::node_options node_of(std::uint32_t devices) {
    return {.devices = devices, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled};
}
/// A deadline that no test reaches.
gpushare::instant soon() { return host::steady_clock::now() + 5min; }

/// The report of a close that is stopped while it waits, long before its deadline.
template <class Tenant>
gpushare::close_report stopped_close(Tenant& t) {
    std::stop_source stop;
    auto closing = std::async(std::launch::async, [&] { return t.close(soon(), stop.get_token()); });
    std::this_thread::sleep_for(5ms);
    stop.request_stop();
    CHECK(closing.wait_for(5min) == std::future_status::ready);
    const auto report = closing.get();
    CHECK_FALSE(report.complete);
    return report;
}

using arena = gpushare::virtual_arena<host::virtual_memory, host::stream>;

}  // namespace

TEST_CASE("an arena closes with its tenant", "[tenant][close]") {
    host::node n(node_of(1));
    tenancy shared(n);
    host::virtual_memory pages(n.memory({0}));
    auto scrubs = n.make_stream({0});
    gpushare::chunk_pool chunks(pages, scrubs, {.capacity = 16});
    std::optional<arena> cache;
    {
        auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
        cache.emplace(chunks, a.memory().limit(), gpushare::tenant_tag{a.tag()}, 32_MiB, "a");
        cache->commit(0_B, 8_MiB);
        const auto report = a.close(soon());
        CHECK(report.complete);
        CHECK(report.still_charged == 0_B);
        CHECK(report.usage.current == 0_B);
        CHECK(cache->try_commit(8_MiB, 8_MiB, soon()).code == errc::closed);
        CHECK(shared.rooms()[0].free == 64_MiB);
        CHECK(shared.unpromised({0}) == 100_pct);
    }
    cache.reset();  // outlives the tenant's handle, and touches nothing of it
    CHECK(shared.rooms()[0].free == 64_MiB);
}

TEST_CASE("a pool over a closed tenant hands nothing out, not even what it had", "[tenant][close]") {
    host::node n(node_of(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    gpushare::pool_resource pool(a.memory(), {.segment = 1_MiB});
    auto cache = pool.make_cache();
    void* const kept = pool.allocate(1000);
    void* const freed = cache.allocate(1000);
    cache.deallocate(freed, 1000);
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.usage.current == 0_B);
    CHECK(n.memory({0}).used() == 0_B);
    failure why;
    CHECK(pool.try_allocate(1000, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(cache.try_allocate(1000) == nullptr);
    CHECK(pool.deallocate(kept, 1000) == errc::closed);  // it was taken back
    CHECK(pool.usage().reserved == 0_B);
}

TEST_CASE("a close is not complete while a workspace is charged", "[tenant][close]") {
    host::node n(node_of(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    std::optional library(a.declare_workspace(4_MiB));
    const auto report = a.close(soon());
    CHECK_FALSE(report.complete);
    CHECK(report.still_charged == 4_MiB);
    CHECK(report.waits_for == gpushare::close_wait::memory);
    library.reset();
    CHECK(a.close(soon()).complete);
    CHECK(shared.rooms()[0].free == 64_MiB);
}

TEST_CASE("a workspace that outlives its tenant's handle is reported, and released into a quota that is there",
          "[tenant][close]") {
    host::node n(node_of(1));
    bytes reported;
    tenancy shared(n, {.events = [&](const gpushare::tenant_event& e) {
                       if (e.what == gpushare::tenant_event::kind::charged) reported += e.size;
                   }});
    std::optional<gpushare::workspace> library;
    {
        auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
        library.emplace(a.declare_workspace(8_MiB));
    }
    CHECK(reported == 8_MiB);
    CHECK(shared.rooms()[0].free == 56_MiB);
    library.reset();
    auto b = shared.admit({.name = "a", .memory = 64_MiB, .compute = 100_pct});  // the first is reaped by then
    CHECK(b.spec().memory == 64_MiB);
}

TEST_CASE("a free on one device while another is awaited is neither lost nor unreported", "[tenant][close]") {
    host::node n(node_of(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    auto& first = a.memory(0);
    auto& second = a.memory(1);
    auto slow = n.make_stream({0}), slower = n.make_stream({1});
    n.faults({0}).stall(slow);
    n.faults({1}).stall(slower);
    slow.enqueue(1us);
    slower.enqueue(1us);
    void* const p = first.allocate(1 << 20);
    void* const q = second.allocate(1 << 20);
    REQUIRE(second.deallocate_after(slower.record(), q, 1 << 20) == errc::none);

    auto closing = std::async(std::launch::async, [&] { return a.close(soon()); });
    std::this_thread::sleep_for(30ms);  // the first device is drained, and the second one awaited
    REQUIRE(first.deallocate_after(slow.record(), p, 1 << 20) == errc::none);
    n.faults({1}).resume(slower);
    CHECK(closing.wait_for(30ms) == std::future_status::timeout);  // it waits for this free, too
    n.faults({0}).resume(slow);

    const auto report = closing.get();
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 0);
    CHECK(report.usage.current == 0_B);
    CHECK(report.usage.pending == 0_B);
    CHECK(report.usage.allocations == 2);
    CHECK(report.usage.frees == 2);
    CHECK(n.memory({0}).used() == 0_B);
    CHECK(n.memory({1}).used() == 0_B);
}

TEST_CASE("a free that is still pending at the deadline leaves the close incomplete", "[tenant][close]") {
    host::node n(node_of(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    auto slow = n.make_stream({0});
    n.faults({0}).stall(slow);
    slow.enqueue(1us);
    void* const p = a.memory().allocate(1 << 20);
    REQUIRE(a.memory().deallocate_after(slow.record(), p, 1 << 20) == errc::none);
    const auto report = a.close(host::steady_clock::now() + 10ms);
    CHECK_FALSE(report.complete);
    CHECK(report.waits_for == gpushare::close_wait::frees);
    CHECK(report.still_charged >= 1_MiB);
    CHECK(report.usage.allocations == 1);
    n.faults({0}).resume(slow);
    const auto last = a.close(soon());
    CHECK(last.complete);
    CHECK(last.waits_for == gpushare::close_wait::nothing);
    CHECK(last.still_charged == 0_B);
    CHECK(n.memory({0}).used() == 0_B);
}

TEST_CASE("an incomplete close says what it waits for, and where", "[tenant][close]") {
    host::node n(node_of(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    auto& stream = a.work_stream(1);
    n.faults({1}).stall(stream);
    auto t = a.submit([](auto& s) { s.enqueue(1us); }, {}, {}, 1);
    auto report = a.close(host::steady_clock::now() + 5ms);
    CHECK_FALSE(report.complete);
    CHECK(report.waits_for == gpushare::close_wait::work);
    CHECK(to_string(report.waits_for) == "submissions and permits");
    CHECK(report.device == device_id{1});
    CHECK(report.usage.in_flight == 1);
    // The same by a stop request in place of the deadline, before and during the wait.
    std::stop_source stop;
    auto stopping = std::async(std::launch::async, [&] { return a.close(gpushare::never, stop.get_token()); });
    std::this_thread::sleep_for(5ms);
    stop.request_stop();
    report = stopping.get();
    CHECK_FALSE(report.complete);
    CHECK(report.waits_for == gpushare::close_wait::work);
    n.faults({1}).resume(stream);
    t.wait();
    CHECK(a.close(soon(), stop.get_token()).complete == a.close(soon()).complete);
}

TEST_CASE("a close that waits for a free or a stream ends by a stop request", "[tenant][close]") {
    host::node n(node_of(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    auto other = n.make_stream({0});
    const auto stall = [&](host::stream& s) -> host::stream& {
        n.faults({0}).stall(s);
        s.enqueue(1us);  // past the limiter
        return s;
    };
    SECTION("of a stream") {
        auto& stream = stall(a.work_stream());
        CHECK(stopped_close(a).waits_for == gpushare::close_wait::streams);
        n.faults({0}).resume(stream);
    }
    SECTION("of a free") {
        REQUIRE(a.memory().deallocate_after(stall(other).record(), a.memory().allocate(1_MiB), 1_MiB) == errc::none);
        CHECK(stopped_close(a).waits_for == gpushare::close_wait::frees);
        n.faults({0}).resume(other);
    }
    SECTION("of a free that a pool on it keeps") {
        gpushare::pool_resource<std::remove_reference_t<decltype(a.memory())>, host::point> pool(a.memory());
        REQUIRE(pool.deallocate_after(stall(other).record(), pool.allocate(1_MiB), 1_MiB) == errc::none);
        CHECK(stopped_close(a).waits_for == gpushare::close_wait::memory);
        n.faults({0}).resume(other);
        CHECK(a.close(soon()).complete);
    }
    CHECK(a.close(soon()).complete);
}

TEST_CASE("a handle that outlives its tenancy ends the program, and is named", "[tenant][close]") {
    int pipes[2];
    REQUIRE(::pipe(pipes) == 0);
    const auto child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        (void)::dup2(pipes[1], 2);
        std::signal(SIGABRT, SIG_DFL);
        host::node n(node_of(1));
        std::optional<tenancy> shared(std::in_place, n);
        auto a = shared->admit({.name = "a\x1b", .memory = 1_MiB});
        shared.reset();
        ::_exit(0);
    }
    (void)::close(pipes[1]);
    std::string said;
    char c = 0;
    while (::read(pipes[0], &c, 1) == 1) said += c;
    (void)::close(pipes[0]);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT));
    CHECK(said.find("gpushare: tenant 'a\\x1b' outlives its tenancy") != std::string::npos);
    // One that is closed and destroyed in time, or moved from, says nothing.
    host::node n(node_of(1));
    tenancy shared(n);
    auto b = shared.admit({.name = "b", .memory = 1_MiB});
    auto moved = std::move(b);
}

TEST_CASE("after a close memory is refused as closed", "[tenant][close]") {
    host::node n(node_of(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    auto& memory = a.memory();
    CHECK_FALSE(memory.closed());
    REQUIRE(a.close(soon()).complete);
    CHECK(memory.closed());
    failure why;
    CHECK(memory.try_allocate(1, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    try {
        (void)memory.allocate(1 << 10);
        FAIL("allocated of a closed tenant");
    } catch (const std::bad_alloc&) {  // so containers take it for what it is
        try {
            throw;
        } catch (const gpushare::error& e) {
            CHECK(e.code() == errc::closed);
            CHECK(e.tenant() == "a");
        }
    }
    CHECK(a.usage().refused == 2);
}

TEST_CASE("frees that overlap a close, at once and in stream order, are all credited", "[tenant][close]") {
    for (int round = 0; round < 20; ++round) {
        host::node n(node_of(2));
        tenancy shared(n);
        auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
        std::atomic<bool> go{false};
        std::vector<std::jthread> threads;
        for (std::size_t part = 0; part < 2; ++part)
            threads.emplace_back([&, &memory = a.memory(part), part] {
                auto stream = n.make_stream(device_id{static_cast<std::uint32_t>(part)});
                while (!go) {
                    void* const p = memory.try_allocate(1 << 12);
                    void* const q = memory.try_allocate(1 << 12);
                    stream.enqueue(1us);
                    if (p != nullptr) (void)memory.deallocate_after(stream.record(), p, 1 << 12);
                    if (q != nullptr) (void)memory.deallocate(q, 1 << 12);
                }
                stream.record().wait(gpushare::never);
            });
        std::this_thread::sleep_for(1ms);
        auto report = a.close(soon());
        go = true;
        threads.clear();
        if (!report.complete) report = a.close(soon());  // a thread was held up on its way
        CHECK(report.complete);
        const auto usage = a.usage();
        CHECK(usage.current == 0_B);
        CHECK(usage.frees == usage.allocations);
        CHECK(usage.total == usage.allocations * bytes{1 << 12});
        CHECK(n.memory({0}).used() == 0_B);
        CHECK(n.memory({1}).used() == 0_B);
    }
}

TEST_CASE("memory that a close gives back goes to the driver under no lock of the tenancy", "[tenant][close]") {
    telling_node n;
    telling_tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    a.memory().deallocate(a.memory().allocate(1 << 20), 1 << 20);
    std::future<gpushare::share> other;
    bool answered = false;
    n.memory({0}).freeing = [&] {
        if (other.valid()) return;
        other = std::async(std::launch::async, [&] { return shared.unpromised({0}); });
        answered = other.wait_for(5min) == std::future_status::ready;
    };
    CHECK(a.close(soon()).complete);
    n.memory({0}).freeing = nullptr;
    REQUIRE(other.valid());
    CHECK(answered);
    CHECK(other.get() == 50_pct);
}

TEST_CASE("a close beside another one waits for what that has on the way to the driver", "[tenant][close][threads]") {
    std::latch on_the_way(1);
    std::atomic<bool> first{true}, go_on{false};
    telling_node n;
    telling_tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    a.memory().deallocate(a.memory().allocate(1 << 20), 1 << 20);
    n.memory({0}).freeing = [&] {
        if (!first.exchange(false)) return;
        on_the_way.count_down();
        while (!go_on) std::this_thread::sleep_for(1ms);
    };
    auto one = std::async(std::launch::async, [&] { return a.close(soon()); });
    on_the_way.wait();
    auto other = std::async(std::launch::async, [&] { return a.close(soon()); });
    CHECK(other.wait_for(30ms) == std::future_status::timeout);  // one that doesn't wait is over by then
    go_on = true;
    CHECK(other.get().complete);
    CHECK(one.get().complete);
    CHECK(n.memory({0}).used() == 0_B);
}

namespace {
/// A clock that shows a later time at each look, as if other threads had run meanwhile.
struct hurried_clock {
    [[nodiscard]] gpushare::instant now() const noexcept { return *at += step; }
    gpushare::instant* at;
    gpushare::ns step;
};

/// How many turns a close gets whose deadline has passed before it begins.
int late_turns(gpushare::ns step) {
    gpushare::instant at{};
    gpushare::detail::turns turn(gpushare::patience{hurried_clock{&at, step}, gpushare::instant::min()});
    int n = 0;
    while (n < 10'000 && turn.again()) ++n;
    return n;
}
}  // namespace

TEST_CASE("a close waits for calls of microseconds, also on a busy machine", "[tenant][close]") {
    CHECK(late_turns(0ns) == 1'000);
    CHECK(late_turns(1us) == 1'000);
    CHECK(late_turns(8ms) == 16);  // each yield takes that long: otherwise the close is seconds late
    CHECK(late_turns(1h) == 16);
}

TEST_CASE("a close waits for a slow driver until its deadline, and no longer", "[tenant][close][threads]") {
    const auto stack = GENERATE(gpushare::memory_stack::pool, gpushare::memory_stack::direct);
    std::latch on_the_way(1);
    std::atomic<bool> first{true}, go_on{false};
    telling_node n;
    telling_tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    auto& memory = a.memory();
    void* const p = memory.allocate(12 << 20);
    n.memory({0}).freeing = [&] {
        if (!first.exchange(false)) return;
        on_the_way.count_down();
        while (!go_on) std::this_thread::sleep_for(1ms);
    };
    auto slow = std::async(std::launch::async, [&] {
        const errc why = memory.deallocate(p, 12 << 20);
        memory.trim();
        return why;
    });
    on_the_way.wait();
    const auto report = a.close(host::steady_clock::now() + 2ms);
    CHECK_FALSE(report.complete);
    CHECK(report.still_charged >= 12_MiB);
    auto patient = std::async(std::launch::async, [&] { return a.close(soon()); });
    CHECK(patient.wait_for(300ms) == std::future_status::timeout);  // 10,000 turns were over by then
    CHECK(stopped_close(a).still_charged >= 12_MiB);
    go_on = true;
    CHECK(slow.get() == errc::none);
    CHECK(patient.get().complete);
    CHECK(n.memory({0}).used() == 0_B);
}

TEST_CASE("a close by a hook of its own tenant's doesn't wait for itself", "[tenant][close]") {
    const auto stack = GENERATE(gpushare::memory_stack::pool, gpushare::memory_stack::direct);
    host::node n(node_of(1));
    tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct});
    auto& memory = a.memory();
    void* const all = memory.allocate(16 << 20);
    const auto deadline = soon();
    std::optional<bool> complete;
    {
        const gpushare::quota_hook closes(memory.limit(), 0, [&](const gpushare::reclaim_request&) {
            if (!complete) complete = a.close(deadline).complete;
            return 0_B;
        });
        failure why;
        CHECK(memory.try_allocate(1 << 20, 256, &why) == nullptr);
        CHECK(why.code == errc::closed);
    }
    CHECK(complete == false);  // the bytes of who asked may be on their way
    CHECK(host::steady_clock::now() < deadline);
    CHECK(memory.deallocate(all, 16 << 20) == errc::closed);  // it was taken back
    CHECK(a.close(soon()).complete);
    CHECK(n.memory({0}).used() == 0_B);
}

TEST_CASE("a close takes no block back that a free is overwriting", "[tenant][close][threads]") {
    host::node n(node_of(1));
    gpushare::quota device(64_MiB);
    const gpushare::event_sink nobody;
    std::latch overwriting(1), go_on(1);
    std::atomic<bool> held{false}, its_own{false};
    gpushare::tenant_memory<host::device_memory, host::stream::point> memory(
        device, n.memory({0}), "a", {0}, 32_MiB, 0_B, nobody,
        {.scrub = gpushare::scrub_policy::on_free, .fill = [&](const auto*, void*, std::size_t) {
             if (held.exchange(false)) {
                 overwriting.count_down();
                 go_on.wait();
                 its_own = n.memory({0}).used() != 0_B;
             }
             return host::stream::point{};
         }});
    void* const p = memory.allocate(1 << 20);
    held = true;
    auto freed = std::async(std::launch::async, [&] { return memory.deallocate(p, 1 << 20); });
    overwriting.wait();
    memory.close();
    gpushare::close_report report;
    auto taken = std::async(std::launch::async, [&] {
        return memory.take_back(report, gpushare::patience{host::steady_clock{}, soon()});
    });
    CHECK(taken.wait_for(20ms) == std::future_status::timeout);
    go_on.count_down();
    CHECK(freed.get() == errc::none);
    CHECK(taken.get());
    CHECK(its_own);
    CHECK(memory.drain(soon()));
    CHECK(n.memory({0}).used() == 0_B);
}

TEST_CASE("a reader of the usage beside a close sees each submission once", "[tenant][close][threads]") {
    host::node n(node_of(4));
    tenancy shared(n);
    std::uint64_t too_many = 0, too_few = 0;
    for (int round = 0; round < 100; ++round) {
        auto a = shared.admit({.name = "a", .memory = 4_MiB, .devices = 4, .compute = 50_pct});
        for (std::size_t part = 0; part < 4; ++part) REQUIRE(a.submit([](auto&) {}, part).wait(soon()));
        std::atomic<bool> over{false};
        support::together(2, [&](unsigned who) {
            if (who == 0) {
                (void)a.close(soon());
                over = true;
                return;
            }
            while (!over) {
                const auto seen = a.usage().completed;
                too_many += seen > 4 ? 1 : 0;
                too_few += seen < 4 ? 1 : 0;
            }
        });
        CHECK(a.usage().completed == 4);
    }
    CHECK(too_many == 0);
    CHECK(too_few == 0);
}

TEST_CASE("everything of a closed tenant is refused as closed", "[tenant][close]") {
    host::node n(node_of(2));
    std::vector<gpushare::tenant_event::kind> events;
    tenancy shared(n, {.events = [&](const gpushare::tenant_event& e) { events.push_back(e.what); }});
    const auto stack = GENERATE(gpushare::memory_stack::pool, gpushare::memory_stack::direct);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .devices = 2, .compute = 50_pct, .stack = stack});
    auto& memory = a.memory();
    void* const left = memory.allocate(1000);
    auto request = a.request();
    REQUIRE(a.sleep());
    auto waits = a.submit([](auto&) {});
    auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 1);
    CHECK(waits.status() == errc::closed);

    const auto nothing = [](auto&) {};
    const std::vector<device_id> there{{0}, {1}};
    std::vector<gpushare::moving_block> none;
    auto& aside = *std::pmr::new_delete_resource();
    const gpushare::patience until{host::steady_clock{}, soon()};
    CHECK(code_of([&] { (void)a.submit(nothing); }) == errc::closed);
    CHECK(code_of([&] { (void)a.submit(nothing, 1); }) == errc::closed);
    CHECK(a.try_submit(nothing).code() == errc::closed);
    CHECK(a.try_submit(nothing, 7).code() == errc::closed);
    CHECK(a.acquire().code() == errc::closed);
    CHECK(code_of([&] { (void)a.async_submit(nothing); }) == errc::closed);
    CHECK(code_of([&] { (void)a.request(); }) == errc::closed);
    CHECK(request.try_submit(nothing).code() == errc::closed);
    CHECK(code_of([&] { (void)a.memory(); }) == errc::closed);
    CHECK(code_of([&] { (void)a.work_stream(); }) == errc::closed);
    CHECK(code_of([&] { (void)a.slice(); }) == errc::closed);
    CHECK(code_of([&] { (void)a.estimate(); }) == errc::closed);
    CHECK(code_of([&] { (void)a.declare_workspace(1_KiB); }) == errc::closed);
    CHECK(a.try_declare_workspace(1_KiB).code() == errc::closed);
    CHECK(a.try_declare_workspace(1_KiB, until).code() == errc::closed);
    CHECK(a.try_resize({.memory = 8_MiB}).code == errc::closed);
    CHECK(shared.try_admit({.name = "too much", .memory = 1_GiB}).code() == errc::no_room);
    CHECK(shared.try_admit({.memory = 1_MiB}).code() == errc::invalid_specification);
    CHECK(code_of([&] { a.resize({.memory = 8_MiB}); }) == errc::closed);
    CHECK(code_of([&] { a.resize({.memory = 8_MiB}, until); }) == errc::closed);
    CHECK(code_of([&] { (void)move_tenant(shared, a, there, none); }) == errc::closed);
    CHECK(code_of([&] { (void)park_tenant(a, none, aside); }) == errc::closed);
    CHECK_FALSE(a.sleep());
    a.wake();
    a.pardon();

    failure why;
    CHECK(memory.try_allocate(1000, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(code_of([&] { (void)memory.allocate(1000); }) == errc::closed);
    CHECK(code_of([&] { (void)memory.allocate(1000, until); }) == errc::closed);
    CHECK(memory.deallocate(left, 1000) == errc::closed);
    CHECK(memory.deallocate_after(host::stream::point{}, left, 1000) == errc::closed);
    CHECK(events == std::vector{gpushare::tenant_event::kind::leak});
}

}  // namespace closing_test
