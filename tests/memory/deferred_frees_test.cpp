// SPDX-License-Identifier: Apache-2.0
// Frees in stream order: memory and credit come back when the stream has reached the free, not
// earlier, and no later than the next collect.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include <gpushare/concepts.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_timeline.hpp"
#include "support/refusing_memory.hpp"
#include "support/threads.hpp"

using namespace gpushare::literals;
using gpushare::deferred_frees;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;
using support::manual_point;
using support::manual_stream;

namespace {

/// A tenant's memory in small.
struct memory_under_test {
    void* allocate(std::size_t size) { return mine.allocate(size, 8); }

    quota limit{1_KiB};
    fault_resource upstream;
    quota_resource<fault_resource> mine{limit, upstream, "chat"};
    deferred_frees<manual_point, quota_resource<fault_resource>> frees{mine};
};

}  // namespace

TEST_CASE("a free is credited when the stream reaches it, not before (rmm's limiter)", "[memory][deferred]") {
    memory_under_test m;
    manual_stream s;
    m.frees.add(s.record(), m.allocate(1000), 1000, 8);
    CHECK(m.frees.pending() == 1000_B);
    CHECK(m.frees.collect() == 0);
    CHECK(m.upstream.blocks() == 1);
    CHECK(m.limit.usage().current == 1000_B);
    CHECK(m.mine.try_allocate(1000, 8) == nullptr);

    s.reach_next();
    CHECK(m.limit.usage().current == 1000_B);  // nobody has looked yet: there is no hidden thread
    CHECK(m.frees.collect() == 1);
    CHECK(m.frees.collect() == 0);
    CHECK(m.frees.pending() == 0_B);
    CHECK(m.upstream.blocks() == 0);
    CHECK(m.limit.usage().current == 0_B);
}

TEST_CASE("a free behind a point that is reached happens at once", "[memory][deferred]") {
    memory_under_test m;
    m.frees.add(manual_point{}, m.allocate(100), 100, 8);
    CHECK(m.frees.pending() == 0_B);
    CHECK(m.upstream.blocks() == 0);
    CHECK(m.limit.usage().current == 0_B);
}

TEST_CASE("frees of several streams come back in whatever order the streams reach them", "[memory][deferred]") {
    memory_under_test m;
    manual_stream first, second(first, {1});
    m.frees.add(first.record(), m.allocate(100), 100, 8);
    m.frees.add(second.record(), m.allocate(200), 200, 8);
    m.frees.add(first.record(), m.allocate(300), 300, 8);
    m.frees.add(second.record(), m.allocate(400), 400, 8);

    second.reach_next();
    CHECK(m.frees.collect() == 1);
    CHECK(m.frees.pending() == 800_B);
    first.reach_all();
    CHECK(m.frees.collect() == 2);
    CHECK(m.frees.pending() == 400_B);
    CHECK(m.limit.usage().current == 400_B);
    second.reach_all();
    CHECK(m.frees.collect() == 1);
    CHECK(m.limit.usage().current == 0_B);
    CHECK(m.upstream.wrong_frees() == 0);
}

TEST_CASE("a drain ends when all is freed, or at its deadline", "[memory][deferred]") {
    memory_under_test m;
    manual_stream s;
    CHECK(m.frees.drain(instant{}));
    m.frees.add(s.record(), m.allocate(100), 100, 8);
    m.frees.add(s.record(), m.allocate(200), 200, 8);
    CHECK_FALSE(m.frees.drain(instant{}));
    s.reach_next();
    CHECK_FALSE(m.frees.drain(instant{}));
    CHECK(m.frees.pending() == 200_B);

    SECTION("reached already") { s.reach_all(); }
    SECTION("reached while it waits") {
        s.on_wait([&] { s.reach_next(); });
    }
    CHECK(m.frees.drain(never));
    CHECK(m.limit.usage().current == 0_B);
}

TEST_CASE("a drain waits for another thread that reaches the points", "[memory][deferred]") {
    memory_under_test m;
    manual_stream s;
    for (int i = 0; i < 8; ++i) m.frees.add(s.record(), m.allocate(100), 100, 8);
    std::jthread device([&] {
        while (s.reach_next()) std::this_thread::yield();
    });
    CHECK(m.frees.drain(never));
    CHECK(m.upstream.blocks() == 0);
}

TEST_CASE("the resource may look at the pending frees while it takes a block back", "[memory][deferred]") {
    // Were a lock held around the resource, this would hang.
    fault_resource resource;
    deferred_frees<manual_point, fault_resource> frees{resource};
    gpushare::bytes seen;
    resource.on_deallocate = [&] { seen = frees.pending(); };
    manual_stream s;
    frees.add(s.record(), resource.allocate(100, 8), 100, 8);
    frees.add(s.record(), resource.allocate(200, 8), 200, 8);
    s.reach_next();
    CHECK(frees.collect() == 1);
    CHECK(seen == 200_B);
    s.reach_next();
    CHECK(frees.collect() == 1);
    CHECK(seen == 0_B);
}

TEST_CASE("threads free in stream order and nothing is lost or freed twice", "[memory][deferred]") {
    quota limit{1_MiB};
    fault_resource upstream;
    quota_resource mine{limit, upstream};
    deferred_frees<manual_point, quota_resource<fault_resource>> frees{mine};
    manual_stream s;
    std::atomic<std::uint64_t> collected{0}, refused{0}, asked{0};
    {
        support::background device(1, [&](unsigned) {
            s.reach_next();
            std::this_thread::yield();
        });
        support::together(3, [&](unsigned rank) {
            for (int i = 0; i < 1'000 || collected == 0; ++i) {  // the device thread may have to wait for a core
                asked.fetch_add(1);
                const std::size_t size = 64 * (rank + 1);
                void* p = mine.try_allocate(size, 8);
                if (p == nullptr) {
                    refused.fetch_add(1);
                    continue;
                }
                frees.add(s.record(), p, size, 8);
                collected += frees.collect();
            }
        });
    }
    s.reach_all();
    CHECK(frees.drain(instant{}));
    CHECK(collected.load() > 0);
    CHECK(frees.pending() == 0_B);
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
    CHECK(limit.usage().current == 0_B);
    CHECK(limit.usage().charges + refused.load() == asked.load());
}

TEST_CASE("a block that the resource doesn't take back is tried again, and credited then", "[memory][deferred]") {
    quota limit{1_KiB};
    support::refusing_memory upstream;
    quota_resource mine{limit, upstream};
    deferred_frees<manual_point, quota_resource<support::refusing_memory>> frees{mine};
    manual_stream s;
    int told = 0;
    const gpushare::when_back note{[](void* to, gpushare::bytes) noexcept { ++*static_cast<int*>(to); }, &told, 100_B};
    CHECK(frees.add(s.record(), mine.allocate(100, 4), 100, 4, note));
    CHECK(frees.add(s.record(), mine.allocate(200, 8), 200, 8));
    upstream.refuse(errc::capturing);
    s.reach_next();
    auto seen = frees.returned();
    CHECK_FALSE(frees.settle(seen));
    CHECK(frees.collect() == 0);
    CHECK(frees.pending() == 300_B);
    CHECK(limit.usage().current == 300_B);
    CHECK(told == 0);
    int waits = 0;
    s.on_wait([&] { ++waits; });
    CHECK(frees.wait_any(instant{}));  // for the other one
    CHECK_FALSE(frees.drain(instant{}));
    CHECK(waits == 2);
    s.reach_next();
    CHECK_FALSE(frees.drain(never));
    CHECK_FALSE(frees.wait_any(never));
    void* const p = mine.allocate(300, 4);
    CHECK_FALSE(frees.add(manual_point{}, p, 300, 4));
    upstream.refuse(errc::none);
    CHECK(frees.add(manual_point{}, p, 300, 4));
    CHECK(frees.drain(never));
    CHECK(told == 1);
    CHECK(frees.pending() == 0_B);
    CHECK(frees.returned() == 2);
    CHECK(limit.usage().current == 0_B);
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
}
