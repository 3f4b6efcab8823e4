// SPDX-License-Identifier: Apache-2.0
// The layers of a tenant's memory(): with each of them quotas are exact, frees are checked,
// neighbours get their promised bytes, and a close takes everything back.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/stack_trace.hpp>
#include <gpushare/tenant/specification_text.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant_directory.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace stack_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;
using gpushare::memory_stack;
using gpushare::tenant_event;

namespace host = gpushare::host;

namespace {

using base = gpushare::tenancy<host::node>;

/// A tenancy of one device that offers every stack.
struct offers {
    explicit offers(host::node& n) : chunks(n.memory({0}), 64_KiB), pool(n, {0}) {}
    host::virtual_memory chunks;
    host::memory_pool pool;
};
struct tenancy : private offers, base {
    explicit tenancy(host::node& n, gpushare::tenancy_options o = {}) : offers(n), base(n, std::move(o)) {
        offer({0}, chunks);
        offer({0}, pool);
    }
};

auto all_stacks() {
    return Catch::Generators::values(
        {memory_stack::direct, memory_stack::pool, memory_stack::arena, memory_stack::stream_ordered});
}
/// What the device has given out, but for what is kept for the next tenant.
bytes used(host::node& n, tenancy& shared) {
    shared.trim({0});
    return n.memory({0}).used();
}

host::node_options small_node() { return {.devices = 1, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled}; }
/// A deadline that no test reaches.
gpushare::instant soon() { return host::steady_clock::now() + 5min; }
constexpr std::size_t mib = 1 << 20;

/// What is in blocks, by the tenant's own account.
bytes in_use(tenancy::tenant& t) {
    const auto u = t.usage();
    return u.current - u.idle;
}

}  // namespace

TEST_CASE("a pool is what tenants get, and may refuse for each or for all", "[tenant][stack]") {
    host::node n(small_node());
    {
        tenancy shared(n);
        auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 10_pct});
        auto b = shared.admit({.name = "b", .memory = 8_MiB, .compute = 10_pct, .stack = memory_stack::direct});
        CHECK(a.memory().made_of() == memory_stack::pool);
        CHECK(a.spec().stack == memory_stack::pool);
        CHECK(b.memory().made_of() == memory_stack::direct);
        CHECK(b.spec().stack == memory_stack::direct);
    }
    tenancy shared(n, {.stack = memory_stack::direct});
    auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 10_pct});
    auto b = shared.admit({.name = "b", .memory = 8_MiB, .compute = 10_pct, .stack = memory_stack::pool});
    CHECK(a.memory().made_of() == memory_stack::direct);
    CHECK(b.memory().made_of() == memory_stack::pool);
}

TEST_CASE("stacks that a device doesn't offer are refused, and offered once", "[tenant][stack]") {
    host::node n(small_node());
    base shared(n);
    for (const auto stack : {memory_stack::arena, memory_stack::stream_ordered}) try {
            (void)shared.admit({.name = "a", .memory = 8_MiB, .compute = 100_pct, .stack = stack});
            FAIL("it isn't there");
        } catch (const gpushare::operation_error& e) {
            CHECK(e.code() == errc::not_supported);
            CHECK(e.tenant() == "a");
        }
    CHECK(shared.unpromised({0}) == 100_pct);
    CHECK(shared.rooms()[0].free == 64_MiB);
    host::virtual_memory chunks{n.memory({0}), 64_KiB};
    shared.offer({0}, chunks);
    CHECK_THROWS_AS(shared.offer({0}, chunks), gpushare::operation_error);
    CHECK_THROWS_AS(shared.offer({1}, chunks), gpushare::operation_error);
    auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 100_pct, .stack = memory_stack::arena});
    CHECK(a.memory().made_of() == memory_stack::arena);
}

TEST_CASE("memory kept for arenas and in stream order stays available to other tenants", "[tenant][stack]") {
    const auto stack = GENERATE(memory_stack::arena, memory_stack::stream_ordered);
    host::node n(small_node());
    tenancy shared(n);
    {
        auto a = shared.admit({.name = "a", .memory = 60_MiB, .compute = 10_pct, .stack = stack});
        void* const p = a.memory().allocate(60 * mib);
        CHECK(a.memory().deallocate(p, 60 * mib) == errc::none);
    }
    CHECK(n.memory({0}).used() == 60_MiB);  // for whoever comes next
    CHECK(shared.rooms()[0].free == 64_MiB);
    auto b = shared.admit({.name = "b", .memory = 64_MiB, .compute = 10_pct, .stack = memory_stack::direct});
    void* const p = b.memory().try_allocate(64 * mib);
    CHECK(p != nullptr);
    CHECK(b.memory().deallocate(p, 64 * mib) == errc::none);
    CHECK(n.memory({0}).used() == 0_B);
}

TEST_CASE("a file says what a tenant's memory is made of, and can't change it live", "[tenant][stack]") {
    const auto direct = gpushare::parse_specification("name=a memory=8MiB compute=10% stack=direct");
    CHECK(direct.stack == memory_stack::direct);
    CHECK(gpushare::parse_specification("name=a stack=pool").stack == memory_stack::pool);
    CHECK_FALSE(gpushare::parse_specification("name=a").stack.has_value());
    CHECK(gpushare::parse_specification("name=a stack=arena").stack == memory_stack::arena);
    CHECK(gpushare::parse_specification("name=a stack=stream_ordered").stack == memory_stack::stream_ordered);
    CHECK_THROWS_AS((void)gpushare::parse_specification("name=a stack=heap"), gpushare::specification_error);
    const auto choosy = gpushare::parse_specification("name=a memory=8MiB compute=10% scrub=on_free wait=20ms");
    CHECK(choosy.scrub == gpushare::scrub_policy::on_free);
    CHECK(choosy.wait == gpushare::ns{20ms});
    CHECK(gpushare::parse_specification("name=a scrub=off").scrub == gpushare::scrub_policy::off);
    CHECK(gpushare::parse_specification("name=a scrub=on_hand_over").scrub == gpushare::scrub_policy::on_hand_over);
    CHECK_FALSE(gpushare::parse_specification("name=a").scrub.has_value());
    CHECK_THROWS_AS((void)gpushare::parse_specification("name=a scrub=always"), gpushare::specification_error);
    CHECK_THROWS_AS((void)gpushare::change_between(
                        choosy, gpushare::parse_specification("name=a memory=8MiB compute=10% scrub=off")),
                    gpushare::operation_error);
    const auto waits =
        gpushare::change_between(choosy, gpushare::parse_specification("name=a memory=8MiB compute=10% wait=1ms"));
    CHECK(waits.wait == gpushare::ns{1ms});
    CHECK_FALSE(gpushare::is_empty(waits));
    auto pool = direct;
    pool.stack = memory_stack::pool;
    CHECK_THROWS_AS((void)gpushare::change_between(direct, pool), gpushare::operation_error);
    pool.stack.reset();
    CHECK(gpushare::is_empty(gpushare::change_between(direct, pool)));
}

TEST_CASE("blocks out of a pool cost the device nothing more", "[tenant][stack]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    void* p = a.memory().allocate(4096);
    const auto held = n.memory({0}).used();
    CHECK(held == a.usage().current);
    for (int i = 0; i < 100; ++i) {
        void* const q = a.memory().allocate(4096);
        CHECK(a.memory().deallocate(q, 4096) == errc::none);
    }
    CHECK(n.memory({0}).used() == held);
    CHECK(in_use(a) == 4_KiB);
    CHECK(a.memory().deallocate(p, 4096) == errc::none);
    const auto u = a.usage();
    CHECK(u.current == held);
    CHECK(u.idle == held);
    CHECK(u.allocations == 101);
    CHECK(u.frees == 101);
    CHECK(u.total == 101 * 4_KiB);
    CHECK(a.memory().free() == 32_MiB);
    CHECK(a.memory().largest_free() == 32_MiB);
    p = a.memory().allocate(32 * mib);  // what is idle is no reason to refuse
    CHECK(a.usage().current == 32_MiB);
    CHECK(a.memory().deallocate(p, 32 * mib) == errc::none);
    CHECK(a.close(soon()).complete);
    CHECK(n.memory({0}).used() == 0_B);
}

TEST_CASE("quotas are exact whatever memory is made of", "[tenant][stack][threads]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto loud = shared.admit({.name = "loud", .memory = 16_MiB, .compute = 30_pct, .burst = 16_MiB});
    auto quiet = shared.admit({.name = "quiet", .memory = 32_MiB, .compute = 30_pct});
    std::atomic<bool> stop{false};
    std::vector<std::jthread> attackers;
    for (unsigned i = 0; i < 2; ++i)
        attackers.emplace_back([&, i] {
            std::vector<std::pair<void*, std::size_t>> held;
            for (std::size_t round = i; !stop.load(); ++round) {
                const std::size_t size = 1 + round * 7919 % (3 * mib);
                if (void* p = loud.memory().try_allocate(size)) held.emplace_back(p, size);
                (void)loud.memory().try_allocate(33 * mib);  // never fits
                if (held.size() > 6 + i || round % 3 == 0) {
                    for (auto [p, s] : held) loud.memory().deallocate(p, s);
                    held.clear();
                }
            }
            for (auto [p, s] : held) loud.memory().deallocate(p, s);
        });
    while (loud.usage().refused < 10) std::this_thread::yield();  // the attack is under way
    std::size_t refused = 0, over = 0;
    for (int round = 0; round < 500; ++round) {
        void* const all = quiet.memory().try_allocate(32 * mib);  // its guarantee, to the byte
        refused += all == nullptr;
        const auto u = loud.memory().limit().usage();
        over += u.current > u.limit() || n.memory({0}).used() > 64_MiB;
        if (all == nullptr) continue;
        void* const small = quiet.memory().try_allocate(1);
        over += small != nullptr;
        quiet.memory().deallocate(all, 32 * mib);
    }
    stop = true;
    attackers.clear();
    CHECK(refused == 0);
    CHECK(over == 0);
    CHECK(loud.usage().peak <= 32_MiB);
    CHECK(in_use(loud) == 0_B);
    CHECK(in_use(quiet) == 0_B);
    // What is left, in one block, though the pool has it in pieces.
    void* const rest = loud.memory().try_allocate(32 * mib);
    CHECK(rest != nullptr);
    CHECK(loud.memory().deallocate(rest, 32 * mib) == errc::none);
    const auto report = loud.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 0);
    CHECK(report.usage.current == 0_B);
    CHECK(report.usage.allocations == report.usage.frees);
}

TEST_CASE("two threads take turns at exactly what fits, and neither is refused", "[tenant][stack][threads]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 30_pct});
    std::atomic<int> refused{0};
    support::together(2, [&](unsigned rank) {
        for (std::size_t i = 0; i < 2'000; ++i) {
            // Small ones first, which leave segments behind; then half of the quota at once.
            for (std::size_t s = 0; s < 3; ++s) {
                void* const p = a.memory().try_allocate(1000 + s * 3000);
                refused += p == nullptr;
                a.memory().deallocate(p, 1000 + s * 3000);
            }
            if (i % 16 != rank) continue;
            const std::size_t half = 7 * mib;
            void* const p = a.memory().try_allocate(half);
            refused += p == nullptr;
            a.memory().deallocate(p, half);
        }
    });
    CHECK(refused.load() == 0);
    CHECK(a.usage().refused == 0);
    CHECK(in_use(a) == 0_B);
}

TEST_CASE("a neighbour gets a pool's idle memory, whichever request asks", "[tenant][stack]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 20_pct, .burst = 56_MiB});
    std::vector<void*> blocks;
    for (int i = 0; i < 54; ++i) blocks.push_back(a.memory().allocate(mib - 4096));
    REQUIRE(a.memory().limit().usage().borrowed > 45_MiB);
    SECTION("frees, and then an admission") {
        for (void* p : blocks) CHECK(a.memory().deallocate(p, mib - 4096) == errc::none);
        auto b = shared.admit({.name = "b", .memory = 56_MiB, .compute = 20_pct});
        void* const p = b.memory().try_allocate(56 * mib);
        CHECK(p != nullptr);
        CHECK(b.memory().deallocate(p, 56 * mib) == errc::none);
    }
    SECTION("frees in stream order, and then an admission") {
        auto& stream = a.work_stream();
        for (void* p : blocks) CHECK(a.memory().deallocate_after(stream.record(), p, mib - 4096) == errc::none);
        REQUIRE(stream.record().wait(soon()));
        auto b = shared.admit({.name = "b", .memory = 56_MiB, .compute = 20_pct});
        CHECK(b.memory().free() == 56_MiB);
    }
    SECTION("frees, and then a neighbour that grows") {
        for (void* p : blocks) CHECK(a.memory().deallocate(p, mib - 4096) == errc::none);
        auto b = shared.admit({.name = "b", .memory = 1_MiB, .compute = 20_pct});
        b.resize({.memory = 56_MiB});
        CHECK(b.memory().free() == 56_MiB);
    }
    SECTION("frees, and then a neighbour's burst") {
        for (void* p : blocks) CHECK(a.memory().deallocate(p, mib - 4096) == errc::none);
        auto b = shared.admit({.name = "b", .memory = 1_MiB, .compute = 20_pct, .burst = 55_MiB});
        void* const p = b.memory().try_allocate(50 * mib);
        CHECK(p != nullptr);
        CHECK(b.memory().deallocate(p, 50 * mib) == errc::none);
    }
    SECTION("a neighbour that waits is told of a free") {
        while (blocks.size() > 50) {
            CHECK(a.memory().deallocate(blocks.back(), mib - 4096) == errc::none);
            blocks.pop_back();
        }
        auto b = shared.admit(
            {.name = "b", .memory = 1_MiB, .compute = 20_pct, .burst = 55_MiB, .stack = memory_stack::direct});
        std::jthread frees([&] {
            while (b.memory().limit().usage().waiting == 0) std::this_thread::yield();
            for (void* p : blocks) a.memory().deallocate(p, mib - 4096);
        });
        void* const p = b.memory().allocate(40 * mib, gpushare::patience{host::steady_clock{}, soon()});
        frees.join();
        CHECK(b.memory().deallocate(p, 40 * mib) == errc::none);
    }
    SECTION("a library's workspace of the same tenant") {
        for (void* p : blocks) CHECK(a.memory().deallocate(p, mib - 4096) == errc::none);
        const auto workspace = a.declare_workspace(64_MiB);
        CHECK(a.usage().idle == 0_B);
    }
}

TEST_CASE("wrong, double and foreign frees of any stack change nothing and are reported", "[tenant][stack]") {
    const auto stack = GENERATE(all_stacks());
    const bool traced = GENERATE(false, true);
    host::node n(small_node());
    std::vector<tenant_event> events;
    tenancy shared(n, {.events = [&](const tenant_event& e) { events.push_back(e); },
                       .stack = stack,
                       .trace = traced ? gpushare::capture_stack : nullptr});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
    auto b = shared.admit({.name = "b", .memory = 16_MiB, .compute = 10_pct});
    auto* const p = static_cast<std::byte*>(a.memory().allocate(mib));
    auto* const q = static_cast<std::byte*>(a.memory().allocate(5000));
    int local = 0;
    CHECK(a.memory().deallocate(&local, 4) == errc::unknown_block);
    CHECK(a.memory().deallocate(p + 256, 1000) == errc::unknown_block);
    CHECK(a.memory().deallocate(p, 2 * mib) == errc::wrong_size);
    CHECK(a.memory().deallocate(q, 4999) == errc::wrong_size);
    CHECK(a.memory().deallocate(p, mib, 512) == errc::wrong_size);
    CHECK(b.memory().deallocate(p, mib) == errc::unknown_block);  // another tenant's
    CHECK(a.memory().deallocate_after(a.work_stream().record(), q, 4999) == errc::wrong_size);
    CHECK(in_use(a) >= 1_MiB + 5000_B);
    CHECK(a.memory().deallocate(p, mib) == errc::none);
    CHECK(a.memory().deallocate(p, mib) == errc::unknown_block);  // twice
    CHECK(a.memory().deallocate(q, 5000) == errc::none);
    CHECK(a.memory().deallocate(q, 5000) == errc::unknown_block);
    CHECK(a.memory().deallocate_after(a.work_stream().record(), q, 5000) == errc::unknown_block);
    CHECK(a.memory().deallocate(nullptr, 5000) == errc::none);
    CHECK(in_use(a) == 0_B);
    CHECK(a.usage().frees == 2);
    REQUIRE(events.size() == 10);
    for (const auto& e : events) CHECK(e.what == tenant_event::kind::wrong_free);
}

TEST_CASE("one of several frees of a block is right, however they race", "[tenant][stack][threads]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    std::atomic<int> events{0};
    tenancy shared(n, {.events = [&](const tenant_event&) { ++events; }, .stack = stack});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
    std::vector<void*> blocks(500);
    for (auto& p : blocks) p = a.memory().allocate(3000);
    std::atomic<int> right{0};
    support::together(2, [&](unsigned) {
        for (void* p : blocks) right += a.memory().deallocate(p, 3000) == errc::none;
    });
    CHECK(right.load() == 500);
    CHECK(events.load() == 500);
    CHECK(in_use(a) == 0_B);
}

TEST_CASE("a free in stream order stays charged until the stream is there, whatever the stack", "[tenant][stack]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
    auto s = n.make_stream({0});
    n.faults({0}).stall(s);
    s.enqueue(1us);
    void* const p = a.memory().allocate(16 * mib);
    CHECK(a.memory().deallocate_after(s.record(), p, 16 * mib) == errc::none);
    CHECK(a.memory().pending() == 16_MiB);
    CHECK(a.usage().pending == 16_MiB);
    CHECK(in_use(a) == 16_MiB);
    CHECK(a.memory().try_allocate(4096) == nullptr);
    CHECK(a.memory().free() == 0_B);
    CHECK_FALSE(a.memory().drain(host::steady_clock::now() + 1ms));
    n.faults({0}).resume(s);
    REQUIRE(s.record().wait(soon()));
    void* const q = a.memory().try_allocate(16 * mib);  // collects
    CHECK(q != nullptr);
    CHECK(a.memory().deallocate(q, 16 * mib) == errc::none);
    CHECK(a.memory().pending() == 0_B);
}

TEST_CASE("a tenant that shrinks hands nothing out before it fits, and keeps nothing for later", "[tenant][stack]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 48_MiB, .compute = 10_pct});
    std::vector<void*> blocks;
    for (int i = 0; i < 40; ++i) blocks.push_back(a.memory().allocate(mib));
    a.resize({.memory = 8_MiB});
    failure why;
    CHECK(a.memory().try_allocate(4096, 256, &why) == nullptr);
    CHECK(why.code == errc::over_quota);
    CHECK(a.memory().free() == 0_B);
    while (blocks.size() > 8) {
        CHECK(a.memory().deallocate(blocks.back(), mib) == errc::none);
        blocks.pop_back();
        if (blocks.size() > 32) CHECK(a.memory().try_allocate(4096) == nullptr);
    }
    for (void* p : blocks) CHECK(a.memory().deallocate(p, mib) == errc::none);
    CHECK(a.memory().limit().usage().current <= 8_MiB);
    auto b = shared.admit({.name = "b", .memory = 56_MiB, .compute = 10_pct});
    void* p = a.memory().allocate(8 * mib);
    CHECK(a.memory().try_allocate(1) == nullptr);
    CHECK(a.memory().deallocate(p, 8 * mib) == errc::none);
    CHECK(b.close(soon()).complete);
    a.resize({.memory = 64_MiB});
    p = a.memory().allocate(64 * mib);
    CHECK(a.memory().deallocate(p, 64 * mib) == errc::none);
    CHECK(a.close(soon()).complete);
}

namespace {

/// A tenant's blocks, and what they take at most: of a pool small ones count as the segment that
/// they may keep alone, of an arena as chunks. A pool may waste a little besides, by blocks that it
/// uses again.
class holdings {
public:
    holdings(tenancy::tenant& of, bytes most) : memory_(&of.memory()), largest_(most), limit(most) {}

    [[nodiscard]] bytes rounded(std::size_t size) const {
        const auto stack = memory_->made_of();
        if (stack == memory_stack::arena) return bytes{(size + 64 * KiB - 1) / (64 * KiB) * (64 * KiB)};
        if (stack == memory_stack::pool) return size < 16 * KiB ? 128_KiB : bytes{(size + 511) / 512 * 512};
        return memory_->charged(size, 256);
    }
    /// False if it was refused and fitted.
    bool allocate(std::size_t size, failure& why) {
        void* const p = memory_->try_allocate(size, 256, &why);
        const bytes wasted = memory_->made_of() == memory_stack::pool ? largest_ / 64 : 0_B;
        if (p == nullptr) return live_ + rounded(size) + wasted > limit;
        blocks_.emplace_back(p, size);
        live_ += rounded(size);
        return true;
    }
    void free(std::size_t i) {
        const auto [p, size] = std::exchange(blocks_[i], blocks_.back());
        blocks_.pop_back();
        live_ = live_ - rounded(size);
        CHECK(memory_->deallocate(p, size) == errc::none);
    }
    [[nodiscard]] std::size_t count() const { return blocks_.size(); }
    [[nodiscard]] bytes live() const { return live_; }

private:
    static constexpr std::size_t KiB = 1024;
    gpushare::tenant<host::node>::memory_type* memory_;
    std::vector<std::pair<void*, std::size_t>> blocks_;
    bytes live_{}, largest_;

public:
    bytes limit;
};

}  // namespace

TEST_CASE("a request that fits beside the live blocks is served, whatever was allocated and freed before",
          "[tenant][stack][property]") {
    const auto stack = GENERATE(all_stacks());
    const bool quick = stack == memory_stack::direct || stack == memory_stack::pool;
    for (std::uint64_t run = 0; run < (quick ? 8U : 2U); ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed, to_string(stack));
        support::random any(seed);
        host::node n({.devices = 1, .memory = 16_MiB, .sms = 1, .timing = host::timing::modelled});
        tenancy shared(n, {.stack = stack});
        // Three that fill the device: what one of them keeps idle must stand in nobody's way.
        auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 10_pct});
        auto b = shared.admit({.name = "b", .memory = 6_MiB, .compute = 10_pct, .burst = 4_MiB});
        auto c = shared.admit({.name = "c", .memory = 2_MiB, .compute = 10_pct});
        std::array all{holdings{a, 8_MiB}, holdings{b, 6_MiB}, holdings{c, 2_MiB}};
        // How much of its limit each keeps live: from all of it to a quarter.
        const std::array<std::uint64_t, 3> parts{1 + any.below(4), 1 + any.below(4), 1};
        for (std::size_t step = 0; step < 400; ++step) {
            const auto who = any.below(3);
            auto& h = all[who];
            if (any.one_in(60) && who == 0) {
                h.limit = bytes{(1 + any.below(8)) * mib};
                a.resize({.memory = h.limit});
            }
            if (any.one_in(100) && who == 1) {
                REQUIRE(b.sleep(soon()));
                b.wake();
            }
            if (h.count() != 0 && (h.live() > bytes{h.limit.count() / parts[who]} || any.one_in(3))) {
                h.free(any.below(h.count()));
                continue;
            }
            // Small ones that stay beside large ones, and now and then all that is left.
            const auto power = any.one_in(2) ? 8 + any.below(8) : 16 + any.below(5);
            auto size = (std::size_t{1} << power) + any.below(std::size_t{1} << power);
            if (any.one_in(12) && h.limit > h.live()) size = (h.limit - h.live()).count() / (64 << 10) * (64 << 10);
            failure why;
            const bool had = size == 0 || h.allocate(size, why);
            CAPTURE(step, who, size, h.live().count(), h.limit.count(), why.left, why.limit, to_string(why.code));
            REQUIRE(had);
        }
        for (auto& h : all)
            while (h.count() != 0) h.free(0);
    }
}

TEST_CASE("a limit for a part of a tenant's memory is charged once", "[tenant][stack]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    {
        gpushare::quota most = a.memory().child_quota(8_MiB);
        gpushare::quota_resource part{most, a.memory(), "cache"};
        void* const p = part.allocate(8 * mib, 256);
        CHECK(part.try_allocate(1, 256) == nullptr);
        CHECK(a.memory().limit().usage().current == 8_MiB);
        CHECK(part.deallocate(p, 8 * mib, 256) == errc::none);
    }
    // A child of the tenant's own quota would set aside 8 MiB, and the blocks would be charged
    // beside them.
    gpushare::quota child{a.memory().limit(), 8_MiB};
    const auto over = [&](auto& memory) {
        return support::code_of([&] { (void)gpushare::quota_resource{child, memory}; });
    };
    CHECK(over(a.memory()) == errc::invalid_specification);
    gpushare::pool_resource pool{a.memory()};
    CHECK(over(pool) == errc::invalid_specification);
    CHECK(over(n.memory({0})) == errc::none);  // what comes from elsewhere is charged to it
}

TEST_CASE("a tenant that shrank uses the memory that its pool can't give back, up to its limit", "[tenant][stack]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    std::vector<void*> blocks;
    while (void* p = a.memory().try_allocate(4096)) blocks.push_back(p);
    std::vector<void*> kept;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        if (i % 16 == 0)
            kept.push_back(blocks[i]);
        else
            CHECK(a.memory().deallocate(blocks[i], 4096) == errc::none);
    a.resize({.memory = 4_MiB});
    CHECK(a.usage().current > 4_MiB);
    CHECK(a.memory().free() == 4_MiB - 4096_B * kept.size());
    failure why;
    while (void* p = a.memory().try_allocate(4096, 256, &why)) kept.push_back(p);
    CHECK(kept.size() == 1024);  // to the byte
    CHECK(why.code == errc::over_quota);
    CHECK(a.memory().free() == 0_B);
    for (void* p : kept) CHECK(a.memory().deallocate(p, 4096) == errc::none);
    void* const p = a.memory().allocate(4 * mib);
    CHECK(a.memory().try_allocate(1) == nullptr);
    CHECK(a.memory().deallocate(p, 4 * mib) == errc::none);
}

TEST_CASE("a thread that waits in a tenant that shrank is served by the tenant's own frees",
          "[tenant][stack][waiters]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    std::vector<void*> blocks, kept;
    while (void* p = a.memory().try_allocate(4096)) blocks.push_back(p);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (i % 4 == 0)
            kept.push_back(blocks[i]);
        else
            CHECK(a.memory().deallocate(blocks[i], 4096) == errc::none);
    }
    a.resize({.memory = 4_MiB});  // 8 MiB are in blocks, and none of what pins them is back before the last are freed
    const gpushare::patience long_enough{host::steady_clock{}, soon()};
    void* had = nullptr;
    std::jthread waits([&] { had = a.memory().allocate(4096, long_enough); });
    while (kept.size() > 1024) {
        CHECK(a.memory().deallocate(kept.back(), 4096) == errc::none);
        kept.pop_back();
    }
    std::this_thread::sleep_for(3ms);
    CHECK(a.memory().deallocate(kept.back(), 4096) == errc::none);  // 4 MiB less a block
    kept.pop_back();
    const auto freed = host::steady_clock::now();
    waits.join();
    CHECK(had != nullptr);
    CHECK(host::steady_clock::now() - freed < 2min);  // of five
    CHECK(a.usage().current > 4_MiB);                 // over its limit still
    failure why;
    const gpushare::patience briefly{host::steady_clock{}, host::steady_clock::now() + 3ms};
    CHECK(a.memory().try_allocate(4096, 256, briefly, &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    auto& memory = a.memory();  // memory() throws once the tenant is closed, perhaps before this thread begins
    void* got = &why;
    std::jthread late([&] { got = memory.try_allocate(4096, 256, long_enough, &why); });
    std::this_thread::sleep_for(2ms);
    (void)a.close(soon());
    late.join();
    CHECK(got == nullptr);
    CHECK(why.code == errc::closed);
}

TEST_CASE("a refusal for lack of one large block says so, with the largest free block", "[tenant][stack]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
    std::vector<void*> blocks;
    while (void* p = a.memory().try_allocate(4096)) blocks.push_back(p);
    for (std::size_t i = 0; i < blocks.size(); ++i)
        if (i % 16 != 0) CHECK(a.memory().deallocate(blocks[i], 4096) == errc::none);
    failure why;
    REQUIRE(a.memory().try_allocate(8 * mib, 256, &why) == nullptr);  // tiny ones pin what they share
    CHECK(why.code == errc::over_quota);
    CHECK(why.because == gpushare::reason::largest_block);
    CHECK(why.left == a.memory().largest_free().count());
    CHECK(why.limit == a.memory().free().count());
    CHECK(why.left < why.asked);
    CHECK(why.limit > why.asked);
    CHECK_THROWS_WITH((void)a.memory().allocate(8 * mib), Catch::Contains("in one block"));
    void* const p = a.memory().try_allocate(why.left);
    CHECK(p != nullptr);
    REQUIRE(a.memory().try_allocate(17 * mib, 256, &why) == nullptr);
    CHECK(why.because != gpushare::reason::largest_block);
    CHECK(a.memory().deallocate(p, why.left) != errc::none);
    (void)a.close(soon());
}

TEST_CASE("an alignment that can't be had is refused as that by every stack", "[tenant][stack]") {
    const auto stack = GENERATE(all_stacks());
    CAPTURE(to_string(stack));
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto t = shared.admit({.name = "t", .memory = 16_MiB});
    const std::size_t most = stack == memory_stack::arena ? 64 << 10 : 16 * mib;
    for (const std::size_t alignment :
         {std::size_t{0}, std::size_t{3}, 4 * most, 256 * mib, std::size_t{1} << 40, std::size_t{1} << 63}) {
        CAPTURE(alignment);
        failure why;
        CHECK(t.memory().try_allocate(100, alignment, &why) == nullptr);
        CHECK(why == errc::bad_alignment);
        CHECK(why.asked == alignment);
        CHECK(t.memory().refuses(100, alignment) == errc::bad_alignment);
        CHECK(support::code_of([&] { (void)t.memory().allocate(100, alignment); }) == errc::bad_alignment);
    }
    void* const p = t.memory().allocate(100, most / 4);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % (most / 4) == 0);
    CHECK(t.memory().deallocate(p, 100, most / 4) == errc::none);
}

TEST_CASE("an arena's guarantee is whole chunks, and is had to the last one", "[tenant][stack]") {
    host::node n(small_node());
    tenancy shared(n, {.stack = memory_stack::arena});  // chunks of 64 KiB
    const auto refused = [&](gpushare::tenant_spec spec) {
        return support::code_of([&] { (void)shared.admit(std::move(spec)); });
    };
    CHECK(refused({.name = "a", .memory = 4_KiB}) == errc::not_whole);
    CHECK(refused({.name = "a", .memory = 1_MiB + 4_KiB}) == errc::not_whole);
    CHECK(refused({.name = "a", .memory = 1_MiB, .burst = 4_KiB}) == errc::not_whole);
    CHECK(shared.rooms()[0].free == 64_MiB);
    auto a = shared.admit({.name = "a", .memory = 128_KiB, .unit = 1_KiB});
    CHECK(a.spec().unit == 1_KiB);
    void* const p = a.memory().try_allocate(128 << 10);
    CHECK(p != nullptr);
    CHECK(a.memory().deallocate(p, 128 << 10) == errc::none);
    std::size_t small = 0;
    while (a.memory().try_allocate(16 << 10) != nullptr) ++small;
    CHECK(small == 8);
    CHECK(support::code_of([&] { a.resize({.memory = 96_KiB}); }) == errc::not_whole);
    a.resize({.memory = 192_KiB});
    auto pool = shared.admit({.name = "b", .memory = 4_KiB, .stack = memory_stack::pool});
    CHECK(pool.memory().try_allocate(4096) != nullptr);
    (void)a.close(soon());
    (void)pool.close(soon());
}

TEST_CASE("a close beside traffic takes everything back, and hands nothing out of it", "[tenant][stack][threads]") {
    const auto stack = GENERATE(all_stacks());
    const bool traced = GENERATE(false, true);
    for (int round = 0; round < 20; ++round) {
        host::node n(small_node());
        std::atomic<std::uint64_t> leaks{0}, leaked{0};
        tenancy shared(n, {.events =
                               [&](const tenant_event& e) {
                                   if (e.what != tenant_event::kind::leak) return;
                                   ++leaks;
                                   leaked += e.size.count();
                               },
                           .stack = stack,
                           .trace = traced ? gpushare::capture_stack : nullptr});
        auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
        auto& memory = a.memory();
        auto& stream = a.work_stream();
        std::atomic<bool> closed{false};
        std::atomic<std::uint64_t> had{0}, freed{0}, late{0};
        std::vector<std::jthread> traffic;
        for (std::size_t i = 0; i < 2; ++i)
            traffic.emplace_back([&, i] {
                std::vector<std::pair<void*, std::size_t>> held;
                for (std::size_t k = i;; ++k) {
                    const bool after = closed.load();
                    const std::size_t size = 100 + k * 977 % 100'000;
                    failure why;
                    void* const p = memory.try_allocate(size, 256, &why, "traffic");
                    if (p != nullptr) {
                        ++had;
                        held.emplace_back(p, size);
                        late += after;
                    } else if (why.code == errc::closed) {
                        break;
                    }
                    if (held.size() < 20 && p != nullptr) continue;
                    for (auto [b, s] : held)
                        freed += (k % 2 == 0 ? memory.deallocate(b, s)
                                             : memory.deallocate_after(stream.record(), b, s)) == errc::none;
                    held.clear();
                }
                for (auto [b, s] : held) freed += memory.deallocate(b, s) == errc::none;
            });
        while (had.load() < 50) std::this_thread::yield();
        auto report = a.close(soon());
        closed = true;
        traffic.clear();
        const auto first = report;
        for (int again = 0; !report.complete && again < 3; ++again) {
            report = a.close(soon());
            report.leaked_blocks += first.leaked_blocks;
        }
        CHECK(report.complete);
        CHECK(late.load() == 0);
        CHECK(had.load() == freed.load() + report.leaked_blocks);
        CHECK(leaks.load() == report.leaked_blocks);
        CHECK(a.usage().current == 0_B);
        CHECK(a.usage().allocations == a.usage().frees);
        CHECK(used(n, shared) == 0_B);
    }
}

TEST_CASE("leaks of any stack are reported with their label, size and trace", "[tenant][stack]") {
    const auto stack = GENERATE(all_stacks());
    const bool traced = GENERATE(false, true);
    host::node n(small_node());
    std::vector<std::string> labels;
    bytes sizes;
    std::size_t frames = 0;
    tenancy shared(n, {.events =
                           [&](const tenant_event& e) {
                               if (e.what != tenant_event::kind::leak) return;
                               labels.emplace_back(e.label);
                               sizes += e.size;
                               frames += e.trace.empty() ? 0 : 1;
                           },
                       .stack = stack,
                       .trace = traced ? gpushare::capture_stack : nullptr});
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    (void)a.memory().allocate(5000, 512, "weights");
    void* const reused = a.memory().allocate(777, 256, "activations");
    a.memory().deallocate(reused, 777);
    (void)a.memory().allocate(777);  // the same block, without a label
    (void)a.memory().allocate(20 * mib, 256, "cache");
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 3);
    CHECK(report.leaked == 20_MiB + 5777_B);
    CHECK(sizes == report.leaked);
    std::ranges::sort(labels);
    CHECK(labels == std::vector<std::string>{"", "cache", "weights"});
    CHECK(frames == (traced ? 3U : 0U));
    CHECK(a.usage().frees == 4);
}

TEST_CASE("blocks may be freed after the close until they are taken back", "[tenant][stack]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    auto& memory = a.memory();
    void* const p = memory.allocate(3 * mib);
    void* const q = memory.allocate(4000);
    memory.close();
    CHECK(memory.try_allocate(4000) == nullptr);
    CHECK(memory.deallocate(p, 3 * mib) == errc::none);
    CHECK(memory.deallocate(q, 4000) == errc::none);
    CHECK(used(n, shared) == 0_B);  // at once the others'
    CHECK(a.close(soon()).leaked_blocks == 0);
}

TEST_CASE("a hook of a pooled tenant may allocate and free there", "[tenant][stack]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
    void* cached = a.memory().allocate(12 * mib);
    int asked = 0;
    const gpushare::quota_hook evict{a.memory().limit(), 0, [&](const gpushare::reclaim_request&) {
                                         ++asked;
                                         (void)a.memory().try_allocate(15 * mib);  // refused, and doesn't hang
                                         if (cached == nullptr) return 0_B;
                                         a.memory().deallocate(cached, 12 * mib);
                                         cached = nullptr;
                                         return 12_MiB;
                                     }};
    void* const p = a.memory().try_allocate(10 * mib);
    CHECK(p != nullptr);
    CHECK(asked == 1);
    CHECK(cached == nullptr);
    CHECK(a.memory().deallocate(p, 10 * mib) == errc::none);
    // What fits without anybody's help asks nobody.
    for (std::size_t size = 1000; size < mib; size *= 2)
        CHECK(a.memory().deallocate(a.memory().allocate(size), size) == errc::none);
    CHECK(asked == 1);
}

TEST_CASE("a pooled tenant waits for its own frees, its streams and its neighbours", "[tenant][stack][waiters]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 10_pct, .burst = 56_MiB});
    auto b = shared.admit({.name = "b", .memory = 8_MiB, .compute = 10_pct, .burst = 48_MiB});
    const gpushare::patience briefly{host::steady_clock{}, host::steady_clock::now() + 3ms};
    const gpushare::patience long_enough{host::steady_clock{}, soon()};
    void* p = b.memory().allocate(56 * mib);
    try {
        (void)a.memory().allocate(16 * mib, briefly);
        FAIL("there is no room");
    } catch (const gpushare::memory_error& e) {
        CHECK(e.code() == errc::deadline_exceeded);
        CHECK(e.tenant() == "a");
    }
    std::jthread frees([&] {
        std::this_thread::sleep_for(5ms);
        b.memory().deallocate(p, 56 * mib);
    });
    p = a.memory().allocate(16 * mib, long_enough);
    frees.join();
    void* const rest = a.memory().allocate(40 * mib);
    auto& stream = a.work_stream();
    stream.enqueue(5ms);
    CHECK(a.memory().deallocate_after(stream.record(), p, 16 * mib) == errc::none);
    p = a.memory().allocate(16 * mib, long_enough);
    CHECK(a.memory().deallocate(p, 16 * mib) == errc::none);
    CHECK(a.memory().deallocate(rest, 40 * mib) == errc::none);
    CHECK_THROWS_AS((void)a.memory().allocate(65 * mib, long_enough), gpushare::memory_error);  // at once
    CHECK(a.close(soon()).complete);
    try {
        (void)a.memory().allocate(4096, long_enough);
        FAIL("closed");
    } catch (const gpushare::error& e) {
        CHECK(e.code() == errc::closed);
    }
}

TEST_CASE("nothing is handed out of a lost device's pool", "[tenant][stack]") {
    host::node n(small_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    void* const p = a.memory().allocate(4096);
    CHECK(a.memory().deallocate(p, 4096) == errc::none);
    void* const q = a.memory().allocate(4096);
    n.faults({0}).lose_device();
    failure why;
    CHECK(a.memory().try_allocate(4096, 256, &why) == nullptr);
    CHECK(why.code == errc::device_lost);
    CHECK(a.memory().deallocate(q, 4096) == errc::none);
    CHECK(a.memory().try_allocate(4096) == nullptr);
    CHECK(a.close(soon()).complete);
}

TEST_CASE("a pool and a sub-quota stand on a pooled tenant as on any memory", "[tenant][stack][close]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack});
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct});
    gpushare::pool_resource pool{a.memory(), {.segment = 1_MiB}};
    void* const out = pool.allocate(1000, 256);
    void* const freed = pool.allocate(3 * mib, 256);
    CHECK(pool.deallocate(freed, 3 * mib, 256) == errc::none);
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 1);  // the segment in which a block is out
    CHECK(pool.deallocate(out, 1000, 256) == errc::closed);
    CHECK(used(n, shared) == 0_B);
}

namespace {

/// Of a block that the host reaches.
bool holds(const void* p, std::size_t size, unsigned char value) {
    const auto* const all = static_cast<const unsigned char*>(p);
    return std::all_of(all, all + size, [&](unsigned char c) { return c == value; });
}

host::node_options stale_node() {
    auto o = small_node();
    o.stale = true;
    return o;
}

}  // namespace

TEST_CASE("no tenant finds data that another tenant wrote, unless scrubbing is off", "[tenant][stack][scrub]") {
    using gpushare::scrub_policy;
    const auto stack = GENERATE(all_stacks());
    const auto scrub = GENERATE(scrub_policy::on_hand_over, scrub_policy::on_free, scrub_policy::off);
    const std::size_t size = GENERATE(std::size_t{4000}, 3 * mib);
    CAPTURE(stack, scrub, size);
    host::node n(stale_node());
    tenancy shared(n, {.stack = stack, .scrub = scrub});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
    CHECK(a.spec().scrub == scrub);
    const auto found = static_cast<unsigned char>(scrub == scrub_policy::off ? 0xA5 : 0);
    void* p = a.memory().allocate(size);
    const bool known =
        stack != memory_stack::arena || scrub != scrub_policy::off;  // the host's chunks are zeros at first
    CHECK((!known || holds(p, size, found)));
    std::memset(p, 0x77, size);
    CHECK(a.memory().deallocate(p, size / 2) == errc::wrong_size);
    CHECK(holds(p, size, 0x77));  // a wrong free overwrites nothing
    CHECK(a.memory().deallocate(p, size) == errc::none);
    const bytes before = a.usage().scrubbed;
    p = a.memory().allocate(size);
    // Its own is its own, where the pool has kept it; or is gone as soon as it is free.
    if (stack == memory_stack::pool && scrub == scrub_policy::on_hand_over) {
        CHECK(holds(p, size, 0x77));
        CHECK(a.usage().scrubbed == before);
    } else if (scrub == scrub_policy::on_free) {
        CHECK(holds(p, size, 0));
    }
    std::memset(p, 0x77, size);
    auto s = n.make_stream({0});
    s.enqueue(1ms);
    CHECK(a.memory().deallocate_after(s.record(), p, size) == errc::none);
    CHECK(a.memory().drain(soon()));
    void* const leaked = a.memory().allocate(size);
    std::memset(leaked, 0x77, size);
    const bytes until_close = a.usage().scrubbed;
    CHECK((scrub == scrub_policy::off) == (until_close == 0_B));
    const auto report = a.close(soon());
    CHECK(report.complete);
    CHECK(report.usage.scrubbed ==
          until_close + (scrub == scrub_policy::on_free ? bytes{size} : 0_B));  // the leaked one
    auto b = shared.admit({.name = "b", .memory = 64_MiB, .compute = 10_pct});
    void* const all = b.memory().allocate(64 * mib);
    CHECK((!known || holds(all, 64 * mib, found)));
    CHECK(b.memory().deallocate(all, 64 * mib) == errc::none);
}

TEST_CASE("a pool pays for clean memory once a segment", "[tenant][stack][scrub]") {
    host::node n(stale_node());
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 10_pct});
    for (std::size_t i = 0; i < 1000; ++i)
        CHECK(a.memory().deallocate(a.memory().allocate(1 + i * 37 % 9000), 1 + i * 37 % 9000) == errc::none);
    CHECK(a.usage().scrubbed == a.usage().current);
}

TEST_CASE("a tenant's freed block is overwritten before it is handed out again", "[tenant][stack][scrub]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(stale_node());
    tenancy shared(n);
    auto a = shared.admit(
        {.name = "a", .memory = 4_MiB, .compute = 10_pct, .stack = stack, .scrub = gpushare::scrub_policy::on_free});
    // What reads it first is held up, and so is the overwriting behind it: until then the block is
    // nobody's.
    auto s = n.make_stream({0});
    n.faults({0}).stall(s);
    s.enqueue(1us);
    void* const p = a.memory().allocate(4 * mib);
    std::memset(p, 0x77, 4 * mib);
    CHECK(a.memory().deallocate_after(s.record(), p, 4 * mib) == errc::none);
    CHECK(a.memory().pending() == 4_MiB);
    CHECK(holds(p, 4 * mib, 0x77));
    CHECK(a.memory().try_allocate(1000) == nullptr);
    n.faults({0}).resume(s);
    CHECK(a.memory().drain(soon()));
    CHECK(a.usage().scrubbed == 8_MiB);  // when it came, and when it went
    void* const q = a.memory().allocate(4 * mib);
    CHECK(holds(q, 4 * mib, 0));
    CHECK(a.memory().deallocate(q, 4 * mib) == errc::none);
    CHECK(a.close(soon()).complete);
}

TEST_CASE("a tenant whose memory waits is refused only after that", "[tenant][stack][waiters]") {
    const auto stack = GENERATE(all_stacks());
    host::node n(small_node());
    tenancy shared(n, {.stack = stack, .wait = 1ms});
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct, .wait = 5min});
    auto b = shared.admit({.name = "b", .memory = 16_MiB, .compute = 10_pct});
    CHECK(b.spec().wait == gpushare::ns{1ms});
    void* p = a.memory().allocate(12 * mib);
    CHECK(a.memory().try_allocate(12 * mib) == nullptr);  // never waits
    std::jthread frees([&] {
        std::this_thread::sleep_for(5ms);
        a.memory().deallocate(p, 12 * mib);
    });
    void* const q = a.memory().allocate(12 * mib);
    frees.join();
    CHECK(a.memory().deallocate(q, 12 * mib) == errc::none);
    p = b.memory().allocate(12 * mib);
    try {
        (void)b.memory().allocate(12 * mib);
        FAIL("there is no room");
    } catch (const gpushare::memory_error& e) {
        CHECK(e.code() == errc::deadline_exceeded);
        CHECK(e.tenant() == "b");
    }
    CHECK(b.usage().refused == 1);
    CHECK_THROWS_AS((void)a.memory().allocate(17 * mib), gpushare::memory_error);  // at once: it can never fit
    b.resize({.wait = gpushare::ns{0}});
    CHECK(b.spec().wait == gpushare::ns{0});
    try {
        (void)b.memory().allocate(12 * mib);
        FAIL("there is no room");
    } catch (const gpushare::memory_error& e) {
        CHECK(e.code() == errc::over_quota);  // nobody waits
    }
    CHECK(b.try_resize({.wait = -1ms}).code == errc::invalid_specification);
    b.resize({.wait = 1ms});
    CHECK_THROWS_WITH((void)b.memory().allocate(12 * mib), Catch::Contains("deadline exceeded"));
    CHECK(b.memory().deallocate(p, 12 * mib) == errc::none);
}

}  // namespace stack_test
