// SPDX-License-Identifier: Apache-2.0
// Memory that no tenant allocated is measured and set aside: at the start, at each admission, and
// on request. Also memory for which a tenant waits.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <sys/resource.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/tenant/foreign_memory.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/sanitizers.hpp"

namespace overhead_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::tenant_event;
using gpushare::detail::device_overhead;

namespace host = gpushare::host;
using tenancy = gpushare::tenancy<host::node>;

using support::code_of;

namespace {

host::node_options small_node() { return {.devices = 1, .memory = 64_MiB, .sms = 2, .timing = host::timing::modelled}; }

}  // namespace

TEST_CASE("an overhead account sets aside what is taken, less what is declared", "[tenant][overhead]") {
    host::device_memory m{{.capacity = 64_MiB, .taken = 10_MiB}};
    device_overhead account{m};
    CHECK(account.available() == 54_MiB);
    CHECK(account.set_aside() == 10_MiB);
    gpushare::quota tenant{54_MiB};
    REQUIRE(tenant.try_charge(8_MiB) == errc::none);
    {
        const gpushare::workspace declared{tenant, account, 8_MiB};
        m.take_for_others(18_MiB);
        CHECK(account.measure(m) == 54_MiB);
        m.take_for_others(20_MiB);  // more than was declared
        CHECK(account.measure(m) == 52_MiB);
    }
    CHECK(tenant.usage().current == 0_B);
    CHECK(account.measure(m) == 44_MiB);
    m.take_for_others(0_B);
    CHECK(account.measure(m) == 64_MiB);
}

TEST_CASE("memory that an engine takes by itself is measured and charged to its tenant", "[tenant][overhead]") {
    host::node n(small_node());
    auto& m = n.memory({0});
    m.take_for_others(10_MiB);
    tenancy shared(n);
    auto chat = shared.admit({.name = "chat", .memory = 20_MiB, .compute = 10_pct});
    {
        gpushare::foreign_meter load{m};
        CHECK(load.measured() == 0_B);
        m.take_for_others(18_MiB);  // the engine's weights
        CHECK(load.measured() == 8_MiB);
        const auto weights = load.charge(chat);
        CHECK(weights.size() == 8_MiB);
        CHECK(chat.usage().current == 8_MiB);
        CHECK(chat.memory().free() == 12_MiB);
        CHECK(shared.remeasure() == 0_B);
        CHECK(shared.rooms()[0].free == 34_MiB);  // set aside once: 64 - 10 - 20
        CHECK(load.measured() == 0_B);
        // A second engine, which is too large: nothing is charged, and it can be measured again.
        m.take_for_others(31_MiB);
        CHECK(code_of([&] { (void)load.charge(chat); }) == errc::over_quota);
        CHECK(chat.usage().current == 8_MiB);
        CHECK(load.measured() == 13_MiB);
        m.take_for_others(18_MiB);
        CHECK(load.measured() == 0_B);
    }
    CHECK(chat.usage().current == 0_B);
}

#ifndef SUPPORT_THREAD_SANITIZED  // whose own notes about each page are memory of the process, too
TEST_CASE("an engine's host memory is charged, and isn't overhead of a device", "[tenant][overhead]") {
    host::node n(small_node());
    n.memory({0}).take_for_others(10_MiB);
    tenancy shared(n);
    auto chat = shared.admit({.name = "chat", .memory = 40_MiB, .compute = 10_pct});
    gpushare::foreign_meter load{gpushare::process_memory{}};
    // Of the system, for a heap may have had these pages all along.
    constexpr std::size_t size = 24 << 20;
    const auto unmap = [](char* at) { ::munmap(at, size); };
    void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(mapped != MAP_FAILED);
    const std::unique_ptr<char, decltype(unmap)> weights(static_cast<char*>(mapped), unmap);
    std::memset(weights.get(), 1, size);
    const auto measured = load.measured();
    CHECK(measured >= 23_MiB);
    CHECK(measured <= 30_MiB);
    const auto charged = load.charge(chat);
    CHECK(chat.usage().current == charged.size());
    CHECK(weights.get()[size - 1] == 1);
    CHECK(shared.remeasure() == 0_B);
    CHECK(shared.rooms()[0].free == 14_MiB);  // the 10 MiB stay set aside
    CHECK(code_of([&] { (void)chat.declare_foreign(40_MiB); }) == errc::over_quota);
    CHECK(chat.try_declare_foreign(40_MiB).code() == errc::over_quota);
    CHECK(chat.try_declare_foreign(1_MiB, 7).code() == errc::no_device);
    {
        const auto more = chat.try_declare_foreign(1_MiB);
        REQUIRE(more);
        CHECK(shared.rooms()[0].free == 14_MiB);
    }
    CHECK(chat.usage().current == charged.size());
}
#endif

TEST_CASE("a process's memory that can't be read isn't taken for none", "[tenant][overhead]") {
    gpushare::foreign_meter load{gpushare::process_memory{}};
    rlimit was{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &was) == 0);
    const rlimit none{0, was.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    const auto why = code_of([&] { (void)load.measured(); });
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &was) == 0);
    CHECK(why == errc::io_failed);
    CHECK(load.measured() < 100_MiB);
}

TEST_CASE("a workspace is charged once, wherever it is moved", "[tenant][overhead]") {
    const host::device_memory m{{.capacity = 64_MiB}};
    device_overhead account{m};
    gpushare::quota tenant{10_MiB};
    REQUIRE(tenant.try_charge(7_MiB) == errc::none);
    {
        gpushare::workspace a{tenant, account, 4_MiB}, b{tenant, account, 3_MiB};
        gpushare::workspace c{std::move(a)};
        CHECK(c.size() == 4_MiB);
        c = std::move(b);
        CHECK(c.size() == 3_MiB);
        CHECK(tenant.usage().current == 3_MiB);
        c = gpushare::workspace{};
        CHECK(tenant.usage().current == 0_B);
    }
    CHECK(tenant.usage().current == 0_B);
}

TEST_CASE("an admission uses what is really there: contexts and libraries are counted (PyTorch)",
          "[tenant][overhead]") {
    host::node n(small_node());
    tenancy shared(n);
    n.memory({0}).take_for_others(24_MiB);  // a context, modules, another process: after the tenancy was made
    CHECK(code_of([&] { (void)shared.admit({.name = "a", .memory = 41_MiB, .compute = 10_pct}); }) == errc::no_room);
    auto a = shared.admit({.name = "a", .memory = 40_MiB, .compute = 10_pct});
    CHECK(shared.rooms()[0].free == 0_B);
    void* p = a.memory().allocate(40 << 20);  // and it is there
    CHECK(a.memory().deallocate(p, 40 << 20) == errc::none);
    n.memory({0}).take_for_others(4_MiB);
    CHECK(shared.remeasure() == 0_B);
    CHECK(shared.rooms()[0].free == 20_MiB);
    a.resize({.memory = 60_MiB});
}

TEST_CASE("an event tells of others that take promised memory, and nothing new is granted until it fits",
          "[tenant][overhead]") {
    host::node n(small_node());
    std::vector<std::pair<tenant_event::kind, bytes>> events;
    tenancy shared(n, {.events = [&](const tenant_event& e) { events.emplace_back(e.what, e.size); }});
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct, .burst = 32_MiB});
    auto b = shared.admit({.name = "b", .memory = 16_MiB, .compute = 10_pct});
    n.memory({0}).take_for_others(20_MiB);
    CHECK(shared.remeasure() == 4_MiB);
    CHECK(events == std::vector{std::pair(tenant_event::kind::overcommitted, 4_MiB)});
    CHECK(gpushare::to_string(tenant_event::kind::overcommitted) == "overcommitted");
    CHECK(a.memory().try_allocate(33 << 20) == nullptr);  // burst
    CHECK(code_of([&] { (void)shared.admit({.name = "c", .memory = 1_B, .compute = 10_pct}); }) == errc::no_room);
    CHECK(b.close(host::steady_clock::now() + 5min).complete);
    CHECK(shared.remeasure() == 0_B);
    CHECK(shared.rooms()[0].free == 12_MiB);
}

TEST_CASE("a pool's idle memory goes back while its device is overcommitted", "[tenant][overhead]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct, .burst = 48_MiB});
    auto b = shared.admit({.name = "b", .memory = 16_MiB, .compute = 10_pct});
    void *const p = a.memory().allocate(16 << 20), *const q = a.memory().allocate(16 << 20);
    n.memory({0}).take_for_others(30_MiB);
    CHECK(shared.remeasure() == 14_MiB);
    CHECK(a.memory().deallocate(q, 16 << 20) == errc::none);
    CHECK(a.usage().idle == 0_B);
    CHECK(shared.remeasure() == 0_B);
    CHECK(a.memory().deallocate(p, 16 << 20) == errc::none);
}

TEST_CASE("a library's workspace is the tenant's, and measured memory isn't set aside twice", "[tenant][overhead]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    {
        n.memory({0}).take_for_others(8_MiB);  // as a library does that allocates for itself
        const auto blas = a.declare_workspace(8_MiB);
        CHECK(a.usage().current == 8_MiB);
        CHECK(a.memory().free() == 24_MiB);
        CHECK(shared.remeasure() == 0_B);
        CHECK(shared.rooms()[0].free == 32_MiB);
        CHECK_THROWS_WITH((void)a.declare_workspace(25_MiB),
                          "tenant 'a': declare a workspace: asked for 25 MiB, 24 MiB of 32 MiB left (over the quota)");
        CHECK(code_of([&] { (void)a.declare_workspace(1_B, 1); }) == errc::no_device);
        const gpushare::patience brief{host::steady_clock{}, host::steady_clock::now() + 2ms};
        CHECK(a.try_declare_workspace(25_MiB).code() == errc::over_quota);
        CHECK(a.try_declare_workspace(25_MiB, brief).code() == errc::deadline_exceeded);
        CHECK(a.declare_workspace(24_MiB, brief).size() == 24_MiB);
    }
    CHECK(a.usage().current == 0_B);
    CHECK(shared.remeasure() == 0_B);
    CHECK(shared.rooms()[0].free == 24_MiB);
}

TEST_CASE("a communicator's workspaces are charged to the tenant on whose node it is made", "[tenant][overhead]") {
    host::node n({.devices = 3, .memory = 64_MiB, .sms = 2, .timing = host::timing::modelled});
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct, .on = {{0}, {2}}, .unit = 1_MiB});
    gpushare::tenant_node mine{n, a};
    static_assert(gpushare::node<decltype(mine)>);
    auto& visible = *std::pmr::new_delete_resource();
    {
        const gpushare::device_communicator group{mine, visible, a.spec().on, {.blocks = 2, .slot = 64_KiB}};
        const auto charged = a.usage().current;
        CHECK(charged > 0_B);
        CHECK(charged == n.memory({0}).used() + n.memory({2}).used());
        CHECK(n.memory({1}).used() == 0_B);
        CHECK(shared.remeasure() == 0_B);
    }
    CHECK(a.usage().frees == a.usage().allocations);
    CHECK(code_of([&] { (void)mine.memory({1}); }) == errc::no_device);
    CHECK(code_of([&] {
              const gpushare::device_communicator group{mine, visible, std::vector<gpushare::device_id>{{0}, {1}}};
          }) == errc::no_device);
    const auto report = a.close(host::steady_clock::now() + 5min);
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 0);
    CHECK(code_of([&] { (void)gpushare::tenant_node(n, a); }) == errc::closed);
}

TEST_CASE("a lost device isn't taken for a full one", "[tenant][overhead]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    n.faults({0}).lose_device();
    n.memory({0}).take_for_others(64_MiB);
    CHECK(shared.remeasure() == 0_B);
    CHECK(a.memory().limit().free() == 32_MiB);  // nothing is taken from who is there
    CHECK(shared.rooms()[0].free == 0_B);        // and nothing is promised to others
}

TEST_CASE("a tenant waits for its memory: for its streams, its neighbours' burst, and no longer than it says",
          "[tenant][waiters]") {
    host::node n(small_node());
    const auto stack = GENERATE(gpushare::memory_stack::pool, gpushare::memory_stack::direct);
    tenancy shared(n, {.stack = stack});
    auto chat = shared.admit({.name = "chat", .memory = 8_MiB, .compute = 30_pct, .burst = 56_MiB});
    auto code = shared.admit({.name = "code", .memory = 8_MiB, .compute = 30_pct, .burst = 56_MiB});
    void* p = code.memory().allocate(56 << 20);
    const gpushare::patience soon{host::steady_clock{}, host::steady_clock::now() + 1ms};
    CHECK_THROWS_WITH((void)chat.memory().allocate(16 << 20, soon),
                      "tenant 'chat': allocate: asked for 16 MiB, 8 MiB of 64 MiB left (deadline exceeded); "
                      "48 MiB lent to 'code'");
    CHECK(chat.usage().refused == 1);
    const gpushare::patience long_enough{host::steady_clock{}, host::steady_clock::now() + 1min};
    SECTION("a neighbour's free in stream order") {
        auto& stream = code.work_stream();
        stream.enqueue(20ms);
        CHECK(code.memory().deallocate_after(stream.record(), p, 56 << 20) == errc::none);
        p = chat.memory().allocate(16 << 20, long_enough);
        CHECK(code.memory().pending() == 0_B);
    }
    SECTION("a neighbour's free") {
        std::jthread other([&] {
            while (chat.memory().limit().usage().waiting == 0) std::this_thread::yield();
            code.memory().deallocate(p, 56 << 20);
        });
        void* const mine = chat.memory().allocate(16 << 20, 256, long_enough, "waited for");
        other.join();
        p = mine;
    }
    SECTION("a neighbour that is asked") {
        const gpushare::quota_hook back{code.memory().limit(), 0, [&](const gpushare::reclaim_request& r) {
                                            CHECK(r.missing == 8_MiB);
                                            code.memory().deallocate(p, 56 << 20);
                                            return 56_MiB;
                                        }};
        p = chat.memory().allocate(16 << 20, soon);
    }
    CHECK(chat.memory().deallocate(p, 16 << 20) == errc::none);
}

TEST_CASE("a promise that could never be kept is refused at once, however long the caller would wait",
          "[tenant][waiters]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 30_pct, .burst = 56_MiB});
    void* const p = a.memory().allocate(60 << 20);  // lent: not in the way of what follows
    const gpushare::patience for_ever{host::steady_clock{}};
    CHECK(shared.try_admit({.name = "c", .memory = 65_MiB}, for_ever).code() == errc::no_room);
    CHECK(shared.try_admit({.name = "c", .memory = 57_MiB}, for_ever).code() == errc::no_room);
    CHECK(shared.try_admit({.name = "c", .memory = 57_MiB, .on = {{0}}}, for_ever).code() == errc::no_room);
    CHECK(shared.try_admit({.name = "c", .memory = 2_MiB, .devices = 2}, for_ever).code() == errc::too_few_devices);
    CHECK(shared.try_admit({.name = "c", .memory = 1_MiB, .compute = 71_pct}, for_ever).code() == errc::share_exceeded);
    CHECK(a.try_resize({.memory = 65_MiB}, for_ever).code == errc::no_room);
    CHECK(shared.promisable()[0].free == 56_MiB);
    CHECK(a.memory().deallocate(p, 60 << 20) == errc::none);
}

TEST_CASE("an admission calls burst back, and names a tenant that doesn't return it", "[tenant][waiters]") {
    host::node n(small_node());
    tenancy shared(n);
    auto code = shared.admit({.name = "code", .memory = 8_MiB, .compute = 30_pct, .burst = 56_MiB});
    void* p = code.memory().allocate(48 << 20);
    const gpushare::tenant_spec chat{.name = "chat", .memory = 32_MiB, .compute = 30_pct};
    std::optional<gpushare::quota_hook> hook;
    SECTION("nobody is there to be asked") {
        const gpushare::patience briefly{host::steady_clock{}, host::steady_clock::now() + 3ms};
        CHECK_THROWS_WITH(
            (void)shared.admit(chat, briefly),
            "tenant 'chat': asked for 32 MiB, 16 MiB of 64 MiB left (deadline exceeded); 40 MiB lent to 'code'");
        CHECK(shared.try_admit(chat, briefly).code() == errc::deadline_exceeded);
        CHECK(code.memory().deallocate(p, 48 << 20) == errc::none);
    }
    SECTION("a borrower that gives back at once") {
        hook.emplace(code.memory().limit(), 0, [&](const gpushare::reclaim_request& r) {
            CHECK_FALSE(r.own);
            CHECK(r.missing == 16_MiB);
            code.memory().deallocate(p, 48 << 20);
            return 48_MiB;
        });
        const gpushare::patience now{host::steady_clock{}, gpushare::instant::min()};
        auto made = shared.try_admit(chat, now);
        REQUIRE(made);
        auto& a = *made;
        a.memory().deallocate(a.memory().allocate(32 << 20), 32 << 20);
    }
    SECTION("a borrower that gives back later") {
        std::atomic<bool> told{false};
        hook.emplace(code.memory().limit(), 0, [&](const gpushare::reclaim_request&) { return told = true, 0_B; });
        std::jthread later([&] {
            while (!told) std::this_thread::yield();
            code.memory().deallocate(p, 48 << 20);
        });
        auto a = shared.admit(chat, gpushare::patience{host::steady_clock{}});
        CHECK(a.memory().free() == 32_MiB);
    }
    SECTION("a resize that needs it") {
        auto b = shared.admit({.name = "b", .memory = 8_MiB, .compute = 30_pct});
        hook.emplace(code.memory().limit(), 0, [&](const gpushare::reclaim_request&) {
            code.memory().deallocate(p, 48 << 20);
            return 48_MiB;
        });
        b.resize({.memory = 32_MiB}, gpushare::patience{host::steady_clock{}, gpushare::instant::min()});
        CHECK(b.memory().free() == 32_MiB);
        std::stop_source stop;
        stop.request_stop();
        const gpushare::patience stopped{host::steady_clock{}, gpushare::never, stop.get_token()};
        try {
            b.resize({.memory = 60_MiB}, stopped);
            FAIL("more than others' guarantees leave");  // so nobody waits for it, or stops waiting
        } catch (const gpushare::operation_error& e) {
            CHECK(e.code() == errc::no_room);
            CHECK(e.figures().asked == (60_MiB).count());
        }
        CHECK(b.try_resize({.memory = 60_MiB}, stopped).code == errc::no_room);
        CHECK(b.try_resize({.memory = 16_MiB}, stopped).code == errc::none);
        CHECK(b.spec().memory == 16_MiB);
    }
}

}  // namespace overhead_test
