// SPDX-License-Identifier: Apache-2.0
// Tenants, quotas and limiters on CUDA devices, over the stand-in: the same types as on a device.
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pool.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace tenancy_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::device_id;
using gpushare::errc;
using gpushare::tenant_event;

namespace cuda = gpushare::cuda;
using tenancy = gpushare::tenancy<cuda::node>;
using ticket = tenancy::tenant::ticket;

namespace {

constexpr auto context = 2_MiB;  // what the stand-in's context takes
constexpr gpushare::bytes page = 2_MiB;

gpushare::instant soon() { return gpushare::host::steady_clock::now() + 5min; }

struct fixture {
    explicit fixture(bool prompt_errors = false)
        : gpu{{.devices = 2, .memory = 64_MiB + context, .prompt_errors = prompt_errors}} {}

    const standin::session gpu;
    cuda::node node;
    std::vector<tenant_event> events;
    tenancy shared{node, {.close_timeout = 1ms, .events = [this](const tenant_event& e) { events.push_back(e); }}};
};

void hold(const cuda::stream& s) { standin::hold(s.native_handle()); }
void let_go(const cuda::stream& s) { standin::let_go(s.native_handle()); }

/// A kernel that goes wrong, as far as one on the host can.
struct illegal_access {
    template <class C>
    void operator()(C&) const {
        throw std::runtime_error("illegal access");
    }
};

}  // namespace

TEST_CASE_METHOD(fixture, "a tenant's blocks come out of a pool: no call of CUDA but for its segments",
                 "[cuda][stack]") {
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    void* const first = a.memory().allocate(4096);
    standin::forget_calls();
    for (int i = 0; i < 100; ++i) {
        void* const p = a.memory().allocate(4096 + 64 * static_cast<std::size_t>(i));
        CHECK(a.memory().deallocate(p, 4096 + 64 * static_cast<std::size_t>(i)) == errc::none);
    }
    CHECK(standin::calls().empty());
    auto& stream = a.work_stream();
    hold(stream);
    stream.launch({.blocks = 1}, [](auto&) {});
    CHECK(a.memory().deallocate_after(stream.record(), first, 4096) == errc::none);
    CHECK(a.memory().deallocate(first, 4096) == errc::unknown_block);
    CHECK(a.usage().pending == 4_KiB);
    let_go(stream);
    CHECK(a.memory().drain(soon()));
    CHECK(a.usage().pending == 0_B);
    void* const all = a.memory().try_allocate(32 << 20);  // what is idle goes back first
    CHECK(all != nullptr);
    CHECK(a.memory().try_allocate(1) == nullptr);
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked == 32_MiB);
    CHECK(events.size() == 2);  // the free that was wrong, and the leak
}

TEST_CASE("quota_resource over CUDA memory is a memory_resource, and exact", "[cuda]") {
    const standin::session gpu;
    cuda::node node;
    {
        gpushare::quota q{3_MiB};
        gpushare::quota_resource mine{q, node.memory({0}), "chat"};
        conformance::check_memory_resource(mine);
        void* p = mine.allocate(1000, 256);
        CHECK(q.usage().current == 1024_B);
        try {
            (void)mine.allocate(4 << 20, 256);
            FAIL("allocated");
        } catch (const std::bad_alloc& e) {
            CHECK_THAT(e.what(), Catch::Matchers::Contains("tenant 'chat'"));
        }
        CHECK(standin::count("cudaMalloc") > 0);
        standin::forget_calls();
        CHECK(mine.try_allocate(4 << 20, 256) == nullptr);
        CHECK(standin::count_all() == 0);  // refused before CUDA is asked
        mine.deallocate(p, 1000, 256);
        CHECK(q.usage().current == 0_B);
    }
    CHECK(node.memory({0}).used() == 0_B);
}

TEST_CASE("memory that CUDA refuses isn't charged", "[cuda]") {
    const standin::session gpu;
    cuda::node node;
    gpushare::quota q{16_MiB};
    gpushare::quota_resource mine{q, node.memory({1}), "chat"};
    standin::inject({.call = "cudaMalloc", .code = cudaErrorMemoryAllocation, .times = 2});
    CHECK(mine.try_allocate(1 << 20, 256) == nullptr);
    CHECK_THROWS_AS((void)mine.allocate(1 << 20, 256), std::bad_alloc);
    CHECK(q.usage().current == 0_B);
    CHECK(q.usage().peak <= page);
    CHECK(cudaPeekAtLastError() == cudaSuccess);  // nor left behind for the embedder to find
    mine.deallocate(mine.allocate(1 << 20, 256), 1 << 20, 256);
}

TEST_CASE("memory that libraries allocate for themselves is set aside at an admission, or declared", "[cuda]") {
    fixture f;
    auto a = f.shared.admit({.name = "a", .memory = 32_MiB, .compute = 30_pct, .on = {{0}}});
    void* library = nullptr;
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    REQUIRE(cudaMalloc(&library, 8 << 20) == cudaSuccess);
    try {
        (void)f.shared.admit({.name = "b", .memory = 32_MiB, .compute = 30_pct, .on = {{0}}});
        FAIL("admitted to memory that isn't there");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::no_room);
    }
    CHECK(f.shared.rooms()[0].free == 24_MiB);
    CHECK(f.shared.rooms()[1].free == 64_MiB);
    {
        const auto workspace = a.declare_workspace(8_MiB);
        CHECK(f.shared.remeasure() == 0_B);
        CHECK(f.shared.rooms()[0].free == 32_MiB);
        CHECK(a.memory().free() == 24_MiB);
    }
    REQUIRE(cudaFree(library) == cudaSuccess);
    auto b = f.shared.admit({.name = "b", .memory = 32_MiB, .compute = 30_pct, .on = {{0}}});
    b.memory().deallocate(b.memory().allocate(32 << 20), 32 << 20);  // it is there
    CHECK(f.events.empty());
}

TEST_CASE("a tenant waits for memory until its neighbour's stream gets there", "[cuda]") {
    fixture f;
    auto a = f.shared.admit({.name = "a", .memory = 8_MiB, .compute = 30_pct, .burst = 56_MiB, .on = {{0}}});
    auto b = f.shared.admit({.name = "b", .memory = 8_MiB, .compute = 30_pct, .burst = 56_MiB, .on = {{0}}});
    void* p = b.memory().allocate(48 << 20);
    auto& s = b.work_stream();
    hold(s);
    s.enqueue(1ms);
    CHECK(b.memory().deallocate_after(s.record(), p, 48 << 20) == errc::none);
    const gpushare::patience briefly{gpushare::host::steady_clock{}, gpushare::host::steady_clock::now() + 5ms};
    CHECK_THROWS_AS((void)a.memory().allocate(32 << 20, briefly), std::bad_alloc);
    std::jthread gets_there([&] {
        while (a.memory().limit().usage().waiting == 0) std::this_thread::yield();
        let_go(s);
    });
    p = a.memory().allocate(32 << 20, gpushare::patience{gpushare::host::steady_clock{}, soon()});
    gets_there.join();
    CHECK(b.memory().pending() == 0_B);
    CHECK(a.memory().deallocate(p, 32 << 20) == errc::none);
}

TEST_CASE("a freed block is credited when its stream gets there", "[cuda]") {
    fixture f;
    auto a =
        f.shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct, .stack = gpushare::memory_stack::direct});
    void* p = a.memory().allocate(16 << 20);
    auto& s = a.work_stream();
    hold(s);
    s.enqueue(1ms);
    CHECK(a.memory().deallocate_after(s.record(), p, 16 << 20) == errc::none);
    CHECK(a.usage().pending == 16_MiB);
    CHECK(a.memory().try_allocate(1 << 20) == nullptr);
    CHECK(f.node.memory({0}).used() == 16_MiB);
    let_go(s);
    CHECK(a.memory().drain(soon()));
    void* q = a.memory().try_allocate(16 << 20);
    CHECK(q != nullptr);
    CHECK(a.memory().deallocate(q, 16 << 20) == errc::none);
    CHECK(f.node.memory({0}).used() == 0_B);
}

TEST_CASE("memory used on a device before its tenants came is set aside", "[cuda]") {
    const standin::session gpu{{.memory = 64_MiB, .taken = 10_MiB}};
    cuda::node node;
    tenancy shared{node};
    CHECK(shared.rooms()[0].free == 52_MiB);  // less the context
    CHECK_THROWS_AS((void)shared.admit({.name = "all", .memory = 53_MiB, .compute = 10_pct}), gpushare::error);
    (void)shared.admit({.name = "rest", .memory = 52_MiB, .compute = 10_pct});
}

TEST_CASE("tenants on CUDA devices work, use what is theirs and give it back", "[cuda]") {
    fixture f;
    std::jthread dispatcher([&](const std::stop_token& stop) { f.shared.dispatch({1}, stop); });
    auto a = f.shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 70_pct, .level = {1}});
    auto b = f.shared.admit({.name = "b", .memory = 32_MiB, .devices = 2, .compute = 30_pct});
    CHECK(a.work_stream(0).native_priority() < b.work_stream(0).native_priority());  // CUDA counts down
    std::atomic<int> ran{0};
    std::vector<ticket> tickets;
    void* const out = a.memory(1).allocate(4096);
    for (int i = 0; i < 20; ++i)
        for (std::size_t part = 0; part < 2; ++part)
            for (auto* t : {&a, &b})
                tickets.push_back(t->submit(
                    [&ran](cuda::stream& s) {
                        s.launch({.blocks = 2, .threads = 128, .hold = 10ms}, [count = &ran](auto&) { ++*count; });
                    },
                    part));
    tickets.push_back(a.submit([out](cuda::stream& s) { s.fill(out, std::byte{7}, 4096); }, 1));
    for (auto& t : tickets) {
        REQUIRE(t.wait(soon()));
        CHECK(t.status() == errc::none);
    }
    CHECK(ran == 160);
    CHECK(static_cast<std::byte*>(out)[4095] == std::byte{7});
    CHECK(a.usage().completed == 41);
    const auto charged = a.usage().device_time + b.usage().device_time;
    // Each filled two of the 32 blocks that a device has room for. The host's part, however slow, is
    // short of a kernel's time.
    CHECK(charged >= 79 * 10ms * 2 / 32);
    CHECK(charged < 80 * 10ms);
    CHECK(a.memory(1).deallocate(out, 4096) == errc::none);
    CHECK(a.close(soon()).complete);
    CHECK(b.close(soon()).complete);
    for (const auto& room : f.shared.rooms()) CHECK(room.free == 64_MiB);
    CHECK(f.events.empty());
}

TEST_CASE("a permit is out until its point is reached", "[cuda]") {
    fixture f;
    gpushare::compute_limiter<cuda::stream, gpushare::host::steady_clock> limiter({.depth = 1});
    const auto client = limiter.add({.weight = 50_pct});
    auto s = f.node.make_stream({0});
    hold(s);
    auto first = limiter.submit(client, s, [](cuda::stream& x) { x.enqueue(1ms); }).value();
    auto second = limiter.submit(client, s, [](cuda::stream& x) { x.enqueue(1ms); }).value();
    CHECK(standin::count("cudaLaunchKernelExC") == 1);  // depth 1: the second one waits
    CHECK(limiter.usage(client).in_flight == 1);
    let_go(s);
    REQUIRE(second.wait(soon()));
    CHECK(first.status() == errc::none);
    CHECK(limiter.usage(client).device_time >= 2ms);
    CHECK(limiter.close(client, soon()));
}

TEST_CASE("clients whose work fills the device wait for each other's streams on the device, once for each change",
          "[cuda]") {
    fixture f;
    gpushare::compute_limiter<cuda::stream, gpushare::host::steady_clock> limiter({.depth = 4});
    const auto a = limiter.add({.weight = 50_pct}), b = limiter.add({.weight = 50_pct});
    auto first = f.node.make_stream({0}), second = f.node.make_stream({0});
    std::atomic<int> ran{0};
    const auto work = [&ran](cuda::stream& s) { s.launch({}, [&ran](auto&) { ++ran; }); };
    hold(first);
    standin::forget_calls();
    auto a1 = limiter.submit(a, first, work).value(), a2 = limiter.submit(a, first, work).value();
    CHECK(standin::count("cudaStreamWaitEvent") == 0);
    auto b1 = limiter.submit(b, second, work).value(), b2 = limiter.submit(b, second, work).value();
    CHECK(standin::count("cudaStreamWaitEvent") >= 1);
    CHECK(standin::count("cudaStreamWaitEvent") <= 2);  // one for each end of the client before
    CHECK_FALSE(b1.wait(gpushare::host::steady_clock::now() + 5ms));
    CHECK(ran == 0);
    let_go(first);
    for (auto* t : {&a1, &a2, &b1, &b2}) REQUIRE(t->wait(soon()));
    CHECK(ran == 4);
    CHECK(limiter.close(a, soon()));
    CHECK(limiter.close(b, soon()));
}

TEST_CASE("a submission that CUDA refuses fails alone, for its own tenant", "[cuda]") {
    fixture f;
    auto good = f.shared.admit({.name = "good", .memory = 1_MiB, .compute = 50_pct});
    auto bad = f.shared.admit({.name = "bad", .memory = 1_MiB, .compute = 50_pct});
    standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidValue});
    auto refused = bad.submit([](cuda::stream& s) { s.enqueue(1us); });
    REQUIRE(refused.wait(soon()));
    CHECK(refused.status() == errc::submission_failed);
    CHECK_THROWS_WITH(refused.rethrow(), Catch::Matchers::Contains("cudaErrorInvalidValue"));
    auto fine = good.submit([](cuda::stream& s) { s.enqueue(1us); });
    auto again = bad.submit([](cuda::stream& s) { s.enqueue(1us); });
    REQUIRE(fine.wait(soon()));
    REQUIRE(again.wait(soon()));
    CHECK(fine.status() == errc::none);
    CHECK(again.status() == errc::none);
    CHECK(good.usage().failed == 0);
    CHECK(bad.usage().failed == 1);
}

TEST_CASE("an illegal access loses its device for every tenant there, and no other", "[cuda]") {
    fixture f;
    auto a = f.shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct});
    auto b = f.shared.admit({.name = "b", .memory = 16_MiB, .compute = 50_pct, .on = {{0}}});
    (void)a.memory(0).allocate(1 << 20);
    hold(a.work_stream(0));
    hold(b.work_stream());
    auto culprit = a.submit([](cuda::stream& s) { s.launch({}, illegal_access{}); }, 0);
    auto neighbour = b.submit([](cuda::stream& s) { s.enqueue(1us); });
    let_go(a.work_stream(0));
    auto elsewhere = a.submit([](cuda::stream& s) { s.enqueue(1us); }, 1);
    for (auto* t : {&culprit, &neighbour, &elsewhere}) REQUIRE(t->wait(soon()));
    CHECK(culprit.status() == errc::device_lost);
    CHECK(neighbour.status() == errc::device_lost);
    CHECK(elsewhere.status() == errc::none);

    CHECK(f.node.lost({0}));
    CHECK_FALSE(f.node.lost({1}));
    REQUIRE(f.node.health({0}).fatal());
    CHECK(f.node.health({0}).fatal()->code == cudaErrorIllegalAddress);
    CHECK(a.memory(0).try_allocate(1 << 20) == nullptr);
    errc late = errc::none;
    try {
        (void)b.submit([](cuda::stream& s) { s.enqueue(1us); });
    } catch (const gpushare::error& e) {
        late = e.code();
    }
    CHECK(late == errc::device_lost);

    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 1);
    CHECK(b.close(soon()).complete);
    CHECK(f.shared.rooms()[1].free == 64_MiB);
}

TEST_CASE("a lost device holds no tenant and no name, whatever the tenant's memory is made of", "[cuda]") {
    using gpushare::memory_stack;
    const auto stack =
        GENERATE(memory_stack::pool, memory_stack::direct, memory_stack::arena, memory_stack::stream_ordered);
    enum class block : std::uint8_t { freed_before, freed_behind, still_out };
    const auto leaves = GENERATE(block::freed_before, block::freed_behind, block::still_out);
    const std::uint32_t lost = GENERATE(0U, 1U);
    CAPTURE(stack, leaves, lost);
    const standin::session gpu{{.devices = 2, .memory = 128_MiB}};
    {
        cuda::node node;
        cuda::memory_pool pools[] = {{node, {0}}, {node, {1}}};
        cuda::virtual_memory chunks[] = {{node, {0}}, {node, {1}}};
        std::vector<errc> told;
        tenancy shared{node, {.close_timeout = 1ms, .events = [&](const tenant_event& e) { told.push_back(e.code); }}};
        for (std::uint32_t d = 0; d < 2; ++d) {
            shared.offer(device_id{d}, pools[d]);
            shared.offer(device_id{d}, chunks[d]);
        }
        constexpr std::size_t size = 4 << 20;
        auto a = shared.admit({.name = "a", .memory = 16_MiB, .devices = 2, .compute = 50_pct, .stack = stack});
        auto& there = a.memory(lost);
        void* const p = there.allocate(size);
        if (leaves == block::freed_before) CHECK(there.deallocate(p, size) == errc::none);
        standin::poison(static_cast<int>(lost), cudaErrorIllegalAddress);
        (void)node.memory({lost}).taken_by_others();  // somebody sees the loss
        gpushare::failure why;
        CHECK(there.try_allocate(1 << 20, 256, &why) == nullptr);
        CHECK(why.code == errc::device_lost);
        const gpushare::patience until{node.get_clock(), soon()};
        CHECK(there.try_allocate(1 << 20, 256, until, &why) == nullptr);
        CHECK(why.code == errc::device_lost);
        void* const healthy = a.memory(1 - lost).allocate(size);
        CHECK(a.memory(1 - lost).deallocate(healthy, size) == errc::none);
        if (leaves == block::freed_behind) CHECK(there.deallocate(p, size) == errc::none);
        const auto report = a.close(soon());
        CHECK(report.complete);
        CHECK(report.still_charged == 0_B);
        CHECK(report.leaked_blocks == (leaves == block::still_out ? 1 : 0));
        CHECK(told == std::vector<errc>(leaves == block::still_out ? 1 : 0));  // of the leak
        CHECK_NOTHROW((void)shared.admit({.name = "a", .memory = 8_MiB, .compute = 50_pct, .on = {{1 - lost}}}));
    }
    CHECK(standin::existing().allocations == 0);
}

TEST_CASE_METHOD(fixture,
                 "a ring of permits keeps three iterations in flight on a device, and each says when it is over",
                 "[cuda]") {
    auto batch = shared.admit({.name = "batch", .memory = 8_MiB, .compute = 50_pct});
    auto& stream = batch.work_stream();
    int ended = 0;
    const auto iteration = [&](cuda::stream& s) { s.launch({.blocks = 1}, [&ended](auto&) { ++ended; }); };
    hold(stream);
    std::deque<tenancy::tenant::permit> in_flight;
    for (int i = 0; i < 3; ++i) {
        in_flight.push_back(*batch.acquire());
        in_flight.back().enqueue(stream, iteration);
        CHECK_FALSE(in_flight.back().poll());
    }
    CHECK(batch.usage().completed == 0);
    let_go(stream);
    for (int i = 3; i < 10; ++i) {
        in_flight.front().wait();  // the oldest, whose buffers this iteration uses again
        CHECK(ended >= i - 2);
        CHECK(in_flight.front().status() == errc::none);
        in_flight.front().rethrow();
        in_flight.pop_front();
        in_flight.push_back(*batch.acquire());
        in_flight.back().enqueue(stream, iteration);
    }
    for (auto& p : in_flight) CHECK(p.wait(soon()));
    CHECK(ended == 10);
    CHECK(batch.usage().completed == 10);
}

TEST_CASE_METHOD(fixture, "a permit says that its device was lost", "[cuda]") {
    auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 50_pct});
    auto p = a.acquire();
    p->enqueue(a.work_stream(), [](cuda::stream& s) { s.launch({}, illegal_access{}); });
    REQUIRE(p->wait(soon()));
    CHECK(p->status() == errc::device_lost);
    CHECK_THROWS_AS(p->rethrow(), gpushare::operation_error);
}

TEST_CASE("a gate takes nothing more from the launch on that says the device is lost", "[cuda]") {
    fixture f{true};
    gpushare::compute_limiter<cuda::stream, gpushare::host::steady_clock> gate;
    const auto client = gate.add({.weight = 50_pct});
    auto s = f.node.make_stream({0});
    const bool in_one_step = GENERATE(false, true);
    CAPTURE(in_one_step);
    const auto launch = [&] {
        const auto work = [](cuda::stream& x) { x.enqueue(10us); };
        if (in_one_step) return gate.enqueue(client, s, work);
        auto p = gate.acquire(client);
        if (p) p->enqueue(s, work);
        return p.code();
    };
    for (int i = 0; i < 30; ++i) CHECK(launch() == errc::none);  // dozens of a known length share a point
    standin::poison(0, cudaErrorIllegalAddress);
    const errc first = launch();  // nobody can know before, unless the gate looked at what was still out
    CHECK((first == errc::none || first == errc::device_lost));
    CHECK(launch() == errc::device_lost);
    bool told = false;  // perhaps beside others: a busy machine makes kernels long
    while (const auto event = gate.take_event()) told |= event->what == gpushare::limiter_event::kind::device_lost;
    CHECK(told);
    CHECK(gate.close(client, soon()));
}

TEST_CASE("an error that takes the whole process ends every tenant's work, and nobody waits for ever", "[cuda]") {
    const standin::session gpu{{.scope = standin::poison_scope::process}};
    cuda::node node;
    tenancy shared{node};
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .devices = 2, .compute = 50_pct});
    std::vector<ticket> tickets;
    for (std::size_t part = 0; part < 2; ++part) {
        hold(a.work_stream(part));
        for (int i = 0; i < 5; ++i) tickets.push_back(a.submit([](cuda::stream& s) { s.enqueue(1us); }, part));
    }
    standin::poison(1, cudaErrorECCUncorrectable);
    for (auto& t : tickets) {
        REQUIRE(t.wait(soon()));
        CHECK(t.status() == errc::device_lost);
    }
    CHECK(node.lost({0}));
    CHECK(node.lost({1}));
    CHECK(a.close(soon()).complete);
}

TEST_CASE("a tenant dropped with stuck work keeps its memory until the work ends", "[cuda]") {
    fixture f;
    cudaStream_t stuck = nullptr;
    {
        auto a = f.shared.admit(
            {.name = "a", .memory = 64_MiB, .compute = 50_pct, .on = {{0}}, .stack = gpushare::memory_stack::direct});
        stuck = a.work_stream().native_handle();
        standin::hold(stuck);
        (void)a.memory().allocate(2 << 20);
        (void)a.submit([](cuda::stream& s) { s.enqueue(1us); });
    }
    REQUIRE(f.events.size() == 1);
    CHECK(f.events[0].what == tenant_event::kind::stuck);
    CHECK(f.node.memory({0}).used() == page);
    standin::let_go(stuck);
    const auto admitted = [&] {
        try {
            (void)f.shared.admit({.name = "b", .memory = 64_MiB, .compute = 50_pct, .on = {{0}}});
            return true;
        } catch (const gpushare::error&) {
            return false;
        }
    };
    for (const auto until = soon(); !admitted();) REQUIRE(gpushare::host::steady_clock::now() < until);
    CHECK(f.events.back().what == tenant_event::kind::leak);
    CHECK(f.node.memory({0}).used() == 0_B);
}

}  // namespace tenancy_test
