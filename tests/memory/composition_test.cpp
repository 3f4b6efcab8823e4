// SPDX-License-Identifier: Apache-2.0
// Tags: slow
// Resources on top of each other keep each other's promises: quotas over memory that is scrubbed,
// arenas beside guarantees, pools with impossible requests, many waiting requests.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "support/capped_pool.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/growth.hpp"
#include "support/manual_scrubber.hpp"

namespace composition_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;
using gpushare::instant;
using gpushare::never;
using gpushare::patience;
using gpushare::quota;
using gpushare::quota_claim;
using gpushare::quota_hook;
using gpushare::quota_resource;
using gpushare::reclaim_request;
using gpushare::scrubbing_resource;
using support::fault_resource;

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

}  // namespace

TEST_CASE("memory that a neighbour scrubs is charged to the neighbour, and takes no other guarantee",
          "[memory][composition][scrub]") {
    gpushare::host::device_memory device{{.capacity = 64_MiB}};
    support::manual_scrubber scrubber;
    scrubbing_resource scrubbed{device, scrubber};
    quota all{64_MiB};
    quota of_a{all, 32_MiB}, of_b{all, 32_MiB};
    quota_resource a{of_a, scrubbed, "a"}, b{of_b, scrubbed, "b"};
    void* p = a.allocate(32 * MiB, 256);
    CHECK(a.deallocate(p, 32 * MiB, 256) == errc::none);
    failure why;
    CHECK(a.try_allocate(32 * MiB, 256, &why) == nullptr);  // its 32 MiB are being scrubbed
    CHECK(why.code == errc::over_quota);
    void* const q = b.try_allocate(32 * MiB, 256, &why);
    CHECK(q != nullptr);
    while (scrubber.reach_next()) {
    }
    p = a.try_allocate(32 * MiB, 256, &why);  // collected before it is refused
    CHECK(p != nullptr);
    CHECK(a.deallocate(p, 32 * MiB, 256) == errc::none);
    CHECK(b.deallocate(q, 32 * MiB, 256) == errc::none);
    while (scrubber.reach_next()) {
    }
    CHECK(scrubbed.drain(never));
    CHECK(all.usage().current == 64_MiB);  // as guaranteed
    CHECK(of_a.usage().current + of_b.usage().current == 0_B);
}

TEST_CASE("the end of a scrub wakes a thread that waits for bytes of a quota",
          "[memory][composition][scrub][waiting]") {
    gpushare::host::device_memory device{{.capacity = 64_MiB}};
    support::manual_scrubber scrubber;
    scrubber.by_itself();
    scrubbing_resource scrubbed{device, scrubber};
    quota limit{32_MiB};
    quota_resource mine{limit, scrubbed};
    void* p = mine.allocate(32 * MiB, 256);
    CHECK(mine.deallocate(p, 32 * MiB, 256) == errc::none);
    const patience until{gpushare::host::steady_clock{}, gpushare::host::steady_clock::now() + 5min};
    p = mine.try_allocate(32 * MiB, 256, until);
    CHECK(p != nullptr);
    CHECK(mine.deallocate(p, 32 * MiB, 256) == errc::none);
    CHECK(scrubbed.drain(never));
}

TEST_CASE("chunks that nobody is charged for go back when a guarantee needs them", "[memory][composition][arena]") {
    gpushare::host::node node{{.devices = 1, .memory = 64_MiB}};
    auto& device = node.memory(gpushare::device_id{0});
    gpushare::host::virtual_memory chunks{device};
    auto scrubs = node.make_stream(gpushare::device_id{0});
    gpushare::chunk_pool pool{chunks, scrubs, {.capacity = 32}};
    quota all{64_MiB};
    quota of_a{all, 32_MiB}, of_b{all, 32_MiB};
    quota_resource a{of_a, device, "a"}, b{of_b, device, "b"};
    {
        gpushare::virtual_arena arena{pool, of_a, {1}, 32_MiB};
        arena.commit(0_B, 32_MiB);
    }
    pool.collect();
    REQUIRE(of_a.usage().current == 0_B);
    REQUIRE(device.used() == 32_MiB);  // free chunks, charged to nobody
    void* const p = a.try_allocate(32 * MiB, 256);
    CHECK(p != nullptr);
    void* const q = b.try_allocate(32 * MiB, 256);
    CHECK(q != nullptr);
    CHECK(device.used() == 64_MiB);
    CHECK(a.deallocate(p, 32 * MiB, 256) == errc::none);
    CHECK(b.deallocate(q, 32 * MiB, 256) == errc::none);
}

TEST_CASE("a chunk pool may outlive the quotas of its arenas", "[memory][composition][arena]") {
    gpushare::host::node node{{.devices = 1, .memory = 64_MiB}};
    gpushare::host::virtual_memory chunks{node.memory(gpushare::device_id{0})};
    auto scrubs = node.make_stream(gpushare::device_id{0});
    gpushare::chunk_pool pool{chunks, scrubs, {.capacity = 32}};
    for (int i = 0; i < 3; ++i) {
        quota all{64_MiB};
        gpushare::virtual_arena arena{pool, all, {1}, 32_MiB};
        arena.commit(0_B, 32_MiB, never);  // the chunks of those before are scrubbed first
    }
    CHECK(pool.usage().mapped == 0);
}

TEST_CASE("a request that can never be granted costs a pool nothing", "[memory][composition][pool]") {
    support::capped_pool<> c(64_MiB, {.segment = 8_MiB});
    auto cache = c.pool.make_cache();
    std::vector<void*> blocks(40);
    for (auto& p : blocks) p = cache.allocate(100'000, 256);
    for (auto* p : blocks) CHECK(cache.deallocate(p, 100'000, 256) == errc::none);
    const auto before = c.pool.usage();
    REQUIRE(before.cached != 0_B);
    failure why;
    CHECK(c.pool.try_allocate(std::size_t{1} << 40, 256, &why) == nullptr);
    CHECK(why.code == errc::over_quota);
    CHECK(why.limit == (64_MiB).count());
    CHECK(cache.try_allocate(65 * MiB, 256, &why) == nullptr);
    CHECK(c.pool.usage().reserved == before.reserved);
    CHECK(c.pool.usage().cached == before.cached);
    void* const p = c.pool.try_allocate(60 * MiB, 256);  // whereas this one can, if they are emptied
    CHECK(p != nullptr);
    CHECK(c.pool.deallocate(p, 60 * MiB, 256) == errc::none);
}

namespace {
/// A nanosecond passes whenever a hook is asked: the deadline comes after as many questions.
struct asking_clock {
    const std::vector<bytes>* asked;
    [[nodiscard]] instant now() const noexcept { return instant{gpushare::ns{asked->size()}}; }
};
}  // namespace

TEST_CASE("hooks of strangers aren't asked for who waits, and the others for what is missing",
          "[memory][composition][hook][waiting]") {
    quota device{64_MiB};
    quota a{device, 16_MiB}, b{device, 16_MiB};
    std::uint64_t strangers = 0;
    std::vector<bytes> missing;
    const quota_hook of_b{b, 0, [&](const reclaim_request&) { return ++strangers, bytes{}; },
                          [](instant) { return false; }};
    const quota_hook of_a{a, 0,
                          [&](const reclaim_request& r) {
                              missing.push_back(r.missing);
                              return bytes{};
                          },
                          [](instant) { return false; }};
    REQUIRE(a.try_charge(16_MiB) == errc::none);
    const patience until{asking_clock{&missing}, instant{5ns}};
    CHECK(try_charge(a, 1_MiB, until).code == errc::deadline_exceeded);
    CHECK(strangers == 0);
    REQUIRE(missing.size() >= 2);  // once before it waited
    CHECK(std::ranges::all_of(missing, [](bytes n) { return n == 1_MiB; }));
}

TEST_CASE("collecting asks as many points for a free, however many are pending", "[memory][composition][frees]") {
    CHECK(support::asked_per_free(10'000) <= 1.5 * support::asked_per_free(10));
    CHECK(support::asked_per_free<support::asks_all>(1'000) > 1.5 * support::asked_per_free<support::asks_all>(10));
}

TEST_CASE("a release takes as many steps, however many wait, of however many quotas",
          "[memory][composition][waiting]") {
    const auto steps = [](int waiters, int quotas) {
        support::waiting_line line(waiters, quotas);
        const auto before = line.refusals();
        for (int i = 0; i < 100; ++i) CHECK(line.limit.release(4096_B));
        CHECK(line.device.usage().waiting == static_cast<std::uint32_t>(waiters));
        return line.refusals() - before;
    };
    CHECK(steps(4'000, 0) <= 2 * steps(10, 0));
    CHECK(steps(4'000, 4'000) <= 2 * steps(10, 10));
}

TEST_CASE("so does one that serves somebody", "[memory][composition][waiting]") {
    const auto steps = [](std::size_t quotas) {
        quota device{1_MiB};
        quota limit{device, 0_B, 1_MiB};
        std::vector<std::optional<quota>> others(quotas);
        for (auto& q : others) q.emplace(device, 0_B, 1_MiB);
        REQUIRE(limit.try_charge(1_MiB) == errc::none);
        std::deque<quota_claim> line;
        for (auto& q : others) line.emplace_back(*q, 4_KiB);
        const auto refusals = [&] {
            std::uint64_t sum = 0;
            for (const auto& q : others) sum += q->usage().refusals;
            return sum;
        };
        const auto before = refusals();
        for (std::size_t i = 0; i < 8; ++i) {
            CHECK(limit.release(4_KiB));
            CHECK(line[i].state() == gpushare::claim_state::granted);
        }
        const auto tried = refusals() - before;
        while (!line.empty()) line.pop_back();  // who leaves first would serve the next
        return tried;
    };
    CHECK(steps(4'000) <= 2 * steps(10));
}

TEST_CASE("waiting threads are served in order across quotas, and refused when their limit shrinks",
          "[memory][composition][waiting]") {
    quota device{100_B};
    quota a{device, 0_B, 100_B}, b{device, 0_B, 100_B};
    REQUIRE(a.try_charge(100_B) == errc::none);
    quota_claim a1{a, 10_B}, b1{b, 10_B}, a2{a, 10_B}, b2{b, 60_B}, a3{a, 10_B};
    const auto granted = [](const quota_claim& c) { return c.state() == gpushare::claim_state::granted; };
    a.release(10_B);
    CHECK((granted(a1) && !granted(b1)));
    a.release(10_B);
    CHECK((granted(b1) && !granted(a2)));
    a.release(10_B);
    CHECK((granted(a2) && !granted(b2)));
    a.release(20_B);  // b2 came before a3, and lacks 40 still
    CHECK(!granted(a3));
    REQUIRE(b.resize(0_B, 50_B) == errc::none);
    CHECK(b2.state() == gpushare::claim_state::refused);
    CHECK(granted(a3));
}

TEST_CASE("a block that is resized can't be freed meanwhile", "[memory][composition][handles]") {
    fault_resource upstream;
    gpushare::handle_table table;
    gpushare::handle_resource mine{table, {1}, upstream};
    const auto h = mine.allocate(100, 8);
    CHECK(mine.resize(h, 200, [&](void*, const void*, std::size_t) {
        CHECK(mine.deallocate(h) == errc::in_flight);
        CHECK(mine.resize(h, 300, [](void*, const void*, std::size_t) {}) == errc::in_flight);
    }) == errc::none);
    CHECK(upstream.blocks() == 1);
    CHECK(mine.deallocate(h) == errc::none);
    CHECK(upstream.blocks() == 0);
}

}  // namespace composition_test
