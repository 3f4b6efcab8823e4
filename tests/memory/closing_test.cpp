// SPDX-License-Identifier: Apache-2.0
// Resources on memory that closes give back the memory that they keep, and hand out no memory that
// was taken back.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <latch>
#include <memory>
#include <optional>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/memory/spillable_block.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/units.hpp>

#include "support/arena_rig.hpp"
#include "support/capped_pool.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_scrubber.hpp"
#include "support/manual_timeline.hpp"
#include "support/threads.hpp"
#include "support/waiting.hpp"

namespace closing_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::close_callback;
using gpushare::close_source;
using gpushare::errc;
using gpushare::failure;
using gpushare::instant;
using gpushare::never;
using gpushare::pool_resource;
using gpushare::private_pool;
using gpushare::quota;
using gpushare::quota_resource;
using gpushare::scrubbing_resource;
using support::fault_resource;

namespace {
constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;
constexpr instant now{};
}  // namespace

TEST_CASE("callbacks are told last made first, again until they are done, and not once they are gone",
          "[memory][closing]") {
    close_source closing;
    std::vector<int> told;
    bool ready = false;
    close_callback below(closing.token(), [&](instant) { return told.push_back(1), true; });
    std::optional<close_callback> between(std::in_place, closing.token(),
                                          [&](instant) { return told.push_back(2), true; });
    close_callback above(closing.token(), [&](instant) { return told.push_back(3), ready; });
    std::unique_ptr<close_callback> itself;
    itself = std::make_unique<close_callback>(closing.token(), [&](instant) {
        told.push_back(4);
        itself.reset();  // as the last owner of something may
        return true;
    });
    between.reset();
    CHECK_FALSE(closing.closed());
    CHECK_FALSE(closing.close(now));
    CHECK(closing.closed());
    CHECK(told == std::vector{4, 3, 1});
    ready = true;
    CHECK(closing.close(now));
    CHECK(told == std::vector{4, 3, 1, 3});
    CHECK(closing.close(now));
    CHECK(told.size() == 4);
}

TEST_CASE("a quota that closes says so to whoever asks or waits, from the first moment on",
          "[memory][closing][quota]") {
    quota device{64_MiB};
    quota limit{device, 16_MiB, 16_MiB}, team{limit, 0_B, 8_MiB};
    fault_resource below;
    quota_resource mine{limit, below, "chat"};
    REQUIRE(limit.try_charge(32_MiB) == errc::none);
    gpushare::quota_claim waits{limit, 1_MiB};
    errc during = errc::none;
    const close_callback asks{limit.closing(), [&](instant) {
                                  during = limit.try_charge(1_B);
                                  return true;
                              }};
    failure why;
    SECTION("all at once") {
        CHECK(limit.close(now));
        CHECK(during == errc::closed);
    }
    SECTION("in two steps") {
        limit.stop();
        CHECK(during == errc::none);
        CHECK_FALSE(limit.closing().closed());
    }
    CHECK(limit.closed());
    CHECK(waits.state() == gpushare::claim_state::refused);
    CHECK(waits.why() == errc::closed);
    CHECK(mine.try_allocate(1, 1, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(team.try_charge(1_B) == errc::closed);
    CHECK(team.refuses(1_B).code == errc::closed);
    CHECK(limit.resize(32_MiB, 0_B) == errc::closed);
    CHECK(limit.adopt(1_MiB, 0_B) == errc::closed);
    CHECK(gpushare::quota_charge(limit, 1_B).prepare().code == errc::closed);
    CHECK(gpushare::quota_resize(limit, 32_MiB, 0_B).prepare().code == errc::closed);
    CHECK(support::code_of([&] { const quota late(limit, 1_MiB); }) == errc::closed);
    const auto moved = gpushare::try_transfer(device, limit, 1_B);
    CHECK((moved.why == errc::closed && moved.kept));
    CHECK(limit.try_charge(0_B) == errc::none);
    CHECK(limit.release(32_MiB));
    CHECK(device.usage().current == 0_B);
    CHECK(device.try_charge(64_MiB) == errc::none);
    CHECK(device.release(64_MiB));
}

TEST_CASE("everything that stands on closed memory refuses with closed", "[memory][closing]") {
    support::arena_rig rig;
    rig.work_by_itself();
    fault_resource device;
    quota_resource mine{rig.chat, device, "chat"};
    pool_resource pool{mine, {.segment = 4_KiB}};
    auto cache = pool.make_cache();
    private_pool graph{pool, 1_KiB};
    scrubbing_resource scrubbed{mine, rig.scrubber};
    gpushare::statistics_resource counted{mine};
    gpushare::handle_table table;
    gpushare::handle_resource handles{table, {1}, mine};
    const auto h = handles.allocate(100, 8);
    REQUIRE(handles.pointer(h) != nullptr);
    auto arena = rig.arena(rig.chat, 1);
    arena.commit(0_B, rig.chunk);
    struct reaching {  // every copy is done at once
        using point = gpushare::immediate_point;
        static void copy(void*, const void*, std::size_t) {}
        static void wait(const point&) {}
        static point record() { return {}; }
    } by;
    gpushare::spillable_block spills{by, mine, device, 1_KiB};
    CHECK(rig.chat.close(never));

    const auto refusal = [](auto& resource) {
        failure why;
        return resource.try_allocate(64, 8, &why) == nullptr ? why.code : errc::none;
    };
    CHECK(refusal(mine) == errc::closed);
    CHECK(refusal(pool) == errc::closed);
    CHECK(refusal(cache) == errc::closed);
    CHECK(refusal(graph) == errc::closed);
    CHECK(refusal(scrubbed) == errc::closed);
    CHECK(refusal(counted) == errc::closed);
    const auto waits = [](auto& resource) {
        failure why;
        return resource.try_allocate(64, 8, support::forever(), &why) == nullptr ? why.code : errc::none;
    };
    CHECK(waits(mine) == errc::closed);
    CHECK(waits(pool) == errc::closed);
    CHECK(waits(cache) == errc::closed);
    CHECK(waits(counted) == errc::closed);
    CHECK(waits(scrubbed) == errc::closed);
    CHECK(handles.try_allocate(64, 8, support::forever()).code() == errc::closed);
    CHECK(handles.try_resize(h, 200, [](void*, const void*, std::size_t) {}).code == errc::closed);
    CHECK(try_charge(rig.chat, 1_B, support::forever()).code == errc::closed);
    for (const auto& r : {mine.refuses(64, 8), pool.refuses(64, 8), cache.refuses(64, 8), graph.refuses(64, 8),
                          scrubbed.refuses(64, 8), counted.refuses(64, 8)})
        CHECK(r.code == errc::closed);
    CHECK(support::code_of([&] { (void)handles.allocate(64, 8); }) == errc::closed);
    CHECK(handles.try_allocate(64, 8).code() == errc::closed);
    CHECK(support::code_of([&] { (void)handles.resize(h, 200, [](void*, const void*, std::size_t) {}); }) ==
          errc::closed);
    CHECK(handles.pointer(h) == nullptr);  // it may be somebody else's by now
    CHECK(arena.try_commit(0_B, rig.chunk, never).code == errc::closed);
    CHECK(arena.try_commit(0_B, rig.chunk, support::forever()).code == errc::closed);
    CHECK(spills.spill(never) == errc::closed);
    CHECK(spills.restore() == errc::closed);
    CHECK(spills.data() == nullptr);
    CHECK(handles.deallocate(h) == errc::none);  // what is out goes back all the same
}

TEST_CASE("a pool over closed memory hands out no block that was taken back", "[memory][closing][pool]") {
    fault_resource device;
    quota limit{32_MiB};
    quota_resource mine{limit, device, "chat"};
    pool_resource pool{mine, {.segment = 1_MiB}};
    auto cache = pool.make_cache();
    void* const out = pool.allocate(1000, 256);
    void* const big = pool.allocate(2 * MiB, 256);
    void* const kept = cache.allocate(5000, 256);
    CHECK(cache.deallocate(kept, 5000, 256) == errc::none);  // in a bin
    CHECK(pool.deallocate(big, 2 * MiB, 256) == errc::none);

    CHECK(limit.close(now));
    CHECK(device.blocks() == 1);  // the segment in which a block is out: whose memory it is takes it back
    failure why;
    CHECK(pool.try_allocate(1000, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(cache.try_allocate(5000, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(mine.try_allocate(1000, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK_THROWS_AS((void)pool.allocate(1000, 256), gpushare::memory_error);
    CHECK(pool.deallocate(out, 1000, 256) == errc::closed);
    CHECK(cache.deallocate(out, 1000, 256) == errc::closed);
    CHECK(pool.usage().reserved == 0_B);
}

TEST_CASE("a pool may outlive the memory that it stood on", "[memory][closing][pool]") {
    fault_resource device;
    auto limit = std::make_unique<quota>(8_MiB);
    auto mine = std::make_unique<quota_resource<fault_resource>>(*limit, device, "chat");
    pool_resource pool{*mine, {.segment = 1_MiB}};
    (void)pool.allocate(1000, 256);
    CHECK(limit->close(now));
    mine.reset();
    limit.reset();
    CHECK(pool.try_allocate(1000, 256) == nullptr);
}

TEST_CASE("a pool gives back what streams use once they have got there", "[memory][closing][pool]") {
    support::manual_stream stream;
    support::capped_pool<support::manual_point> c(8_MiB, {.segment = 1_MiB});
    auto cache = c.pool.make_cache(stream);
    void* const p = cache.allocate(1000, 256);
    stream.enqueue(gpushare::ns{1});
    CHECK(cache.deallocate(p, 1000, 256) == errc::none);
    CHECK_FALSE(c.limit.close(now));
    CHECK(c.limit.usage().current == 1_MiB);
    CHECK(c.pool.try_allocate(1000, 256) == nullptr);
    stream.reach_all();
    CHECK(c.limit.close(now));
    CHECK(c.limit.usage().current == 0_B);
    CHECK(c.upstream.blocks() == 0);
}

TEST_CASE("memory of a captured graph goes back with its pool", "[memory][closing][pool]") {
    support::capped_pool<> c(8_MiB, {.segment = 1_MiB});
    private_pool graph{c.pool, 64_KiB};
    void* const p = graph.allocate(4096, 256);
    CHECK(c.limit.close(now));
    CHECK(c.limit.usage().current == 0_B);
    failure why;
    CHECK(graph.try_allocate(4096, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(graph.deallocate(p, 4096, 256) == errc::closed);
}

TEST_CASE("an arena closes with its quota, which it may outlive", "[memory][closing][arena]") {
    support::arena_rig rig;
    rig.work_by_itself();
    auto limit = std::make_unique<quota>(16 * rig.chunk);
    auto arena = rig.arena(*limit, 7);
    arena.commit(0_B, rig.chunks(4));
    CHECK(limit->usage().current == rig.chunks(4));
    CHECK(limit->close(never));
    CHECK(limit->usage().current == 0_B);
    CHECK(arena.committed() == 0_B);
    limit.reset();
    CHECK(arena.try_commit(0_B, rig.chunks(1)).code == errc::closed);
    CHECK(arena.close().code == errc::closed);
}

TEST_CASE("memory that is being scrubbed is back before it closes", "[memory][closing][scrub]") {
    fault_resource device;
    quota limit{1_MiB};
    quota_resource mine{limit, device};
    support::manual_scrubber scrubber;
    scrubbing_resource scrubbed{mine, scrubber};
    void* const p = scrubbed.allocate(4096, 256);
    CHECK(scrubbed.deallocate(p, 4096, 256) == errc::none);
    CHECK_FALSE(limit.close(now));
    CHECK(scrubbed.try_allocate(4096, 256) == nullptr);
    CHECK(device.blocks() == 1);
    while (scrubber.reach_next()) {
    }
    CHECK(limit.close(now));
    CHECK(device.blocks() == 0);
    CHECK(limit.usage().current == 0_B);
    CHECK(scrubbed.deallocate(&device, 4096, 256) == errc::closed);
}

TEST_CASE("a close beside traffic loses no byte and hands none out afterwards", "[memory][closing][pool][threads]") {
    for (int round = 0; round < 20; ++round) {
        fault_resource device;
        quota limit{32_MiB};
        quota_resource mine{limit, device};
        pool_resource pool{mine, {.segment = 256_KiB}};
        std::atomic<bool> closed{false};
        std::atomic<std::uint64_t> late{0};
        support::together(3, [&](unsigned rank) {
            if (rank == 0) {
                support::spin(20'000);
                closed.store(limit.close(never));
                return;
            }
            auto cache = pool.make_cache();
            for (int i = 0; i < 3'000; ++i) {
                const std::size_t size = 256 + 512 * static_cast<std::size_t>(i % 40);
                const bool before = closed.load();
                void* const p = i % 3 == 0 ? pool.try_allocate(size, 256) : cache.try_allocate(size, 256);
                if (p != nullptr && before) late.fetch_add(1);
                if (p != nullptr) (void)cache.deallocate(p, size, 256);
            }
        });
        CHECK(closed);
        CHECK(late == 0);
        // What was out at that moment stays charged, with the device, whose owner takes it back:
        // nothing drifts.
        CHECK(limit.usage().current.count() == device.bytes());
        CHECK(device.wrong_frees() == 0);
    }
}

TEST_CASE("a close waits for a thread in a hook until its deadline, and no longer", "[memory][closing][threads]") {
    using namespace std::chrono_literals;
    const auto soon = [](std::chrono::milliseconds d) { return std::chrono::steady_clock::now() + d; };
    const bool scrubs = GENERATE(false, true);
    std::latch inside(1), go_on(1);
    std::atomic<bool> first{true};
    fault_resource device;
    quota limit{1_MiB};
    quota_resource mine{limit, device};
    pool_resource pool{mine, {.segment = 64_KiB}};
    support::manual_scrubber scrubber;
    scrubbing_resource scrubbed{mine, scrubber};
    REQUIRE(limit.try_charge(1_MiB) == errc::none);
    bool by_itself = true;
    const gpushare::quota_hook slow{limit, 0, [&](const gpushare::reclaim_request&) {
                                        if (!first.exchange(false)) return 0_B;
                                        by_itself = limit.close(never);  // it would wait for this very call
                                        inside.count_down();
                                        go_on.wait();
                                        return 0_B;
                                    }};
    auto asks = std::async(std::launch::async, [&] {
        failure why;
        void* const p = scrubs ? scrubbed.try_allocate(4096, 256, &why) : pool.try_allocate(4096, 256, &why);
        return p == nullptr ? why.code : errc::none;
    });
    inside.wait();
    CHECK_FALSE(by_itself);
    auto closing = std::async(std::launch::async, [&] { return limit.close(soon(2ms)); });
    const bool over = closing.wait_for(5min) == std::future_status::ready;
    CHECK(over);
    auto patient = std::async(std::launch::async, [&] { return limit.close(soon(5min)); });
    auto beside = std::async(std::launch::async, [&] { return limit.close(soon(2ms)); });
    CHECK(beside.wait_for(5min) == std::future_status::ready);  // nor for another close
    go_on.count_down();
    CHECK(asks.get() == errc::closed);
    CHECK_FALSE(closing.get());
    CHECK(patient.get());
    (void)beside.get();
    CHECK(limit.close(never));
    CHECK(device.blocks() == 0);
    CHECK(limit.release(1_MiB));
}

TEST_CASE("statistics pass on what the upstream says of a free", "[memory][statistics][closing]") {
    support::capped_pool<> c(8_MiB, {.segment = 1_MiB});
    gpushare::statistics_resource counted{c.pool};
    void* const p = counted.allocate(4096, 256);
    CHECK(c.limit.close(now));
    CHECK(counted.deallocate(p, 4096, 256) == errc::closed);
}

}  // namespace closing_test
