// SPDX-License-Identifier: Apache-2.0
// Threads that wait for bytes: served in order, woken by anything that could let them through, and
// back at their deadline or stop request in any case.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/waiting.hpp"

namespace quota_wait_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;
using gpushare::instant;
using gpushare::patience;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;
using support::forever;
using support::real_clock;
using support::wait_for_line;
using support::within;

TEST_CASE("a wait ends at its deadline, and says what was left and who holds the rest", "[memory][waiters]") {
    quota device{4_MiB};
    quota chat{device, 1_MiB, 3_MiB}, code{device, 0_B, 4_MiB};
    code.name("code");
    REQUIRE(code.try_charge(3_MiB) == errc::none);
    fault_resource upstream;
    quota_resource mine{chat, upstream, "chat"};
    failure why;
    CHECK(mine.try_allocate(2 << 20, 256, within(1ms), &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    CHECK(why.asked == (2_MiB).count());
    CHECK(why.left == (1_MiB).count());
    CHECK(why.limit == (4_MiB).count());
    CHECK_THROWS_WITH(
        (void)mine.allocate(2 << 20, 256, within(1ms)),
        "tenant 'chat': allocate: asked for 2 MiB, 1 MiB of 4 MiB left (deadline exceeded); 3 MiB lent to 'code'");
    CHECK_THROWS_AS((void)mine.allocate(2 << 20, 256, within(0ms)), std::bad_alloc);
    CHECK(device.usage().waiting == 0);
    CHECK(code.try_charge(1_B) == errc::out_of_memory);  // the guarantee of chat
    CHECK(mine.try_allocate(1 << 20, 256) != nullptr);   // which is there still
    CHECK(code.release(3_MiB));
}

TEST_CASE("a deadline that has passed lets through what fits", "[memory][waiters]") {
    quota q{1_KiB};
    const patience late{real_clock{}, instant::min()};
    CHECK(try_charge(q, 1_KiB, late).code == errc::none);
    CHECK(try_charge(q, 1_B, late).code == errc::deadline_exceeded);
    CHECK(try_charge(q, 2_KiB, forever()).code == errc::over_quota);  // never
    CHECK(try_charge(q, bytes::max(), forever()).code == errc::size_overflow);
    CHECK(q.usage().waiting == 0);
    CHECK(q.release(1_KiB));
}

TEST_CASE("a request that others' guarantees leave no room for doesn't wait", "[memory][waiters]") {
    quota device{100_MiB};
    quota a{device, 20_MiB, 30_MiB}, b{device, 40_MiB, 60_MiB};
    quota below{b, 10_MiB, 100_MiB};
    CHECK(b.attainable() == 70_MiB);      // below has 10 of the 80
    CHECK(below.attainable() == 80_MiB);  // and all of them
    CHECK(device.attainable() == 40_MiB);
    const auto refused = try_charge(below, 81_MiB, forever());
    CHECK(refused.code == errc::out_of_memory);
    CHECK(refused.because == gpushare::reason::guaranteed_to_others);
    CHECK(refused.left == (80_MiB).count());
    CHECK(try_charge(b, 71_MiB, forever()).because == gpushare::reason::guaranteed_to_others);
    CHECK(try_charge(device, 41_MiB, forever()).code == errc::over_quota);
    CHECK(try_charge(a, 51_MiB, forever()).because == gpushare::reason::size_left);  // its own limit
    // What is lent, or charged, may come back: that is waited for.
    REQUIRE(a.try_charge(30_MiB) == errc::none);
    CHECK(try_charge(below, 80_MiB, within(1ms)).code == errc::deadline_exceeded);
    fault_resource upstream;
    quota_resource resource{below, upstream, "below"};
    gpushare::pool_resource pool{resource};
    failure why;
    CHECK(pool.try_allocate(81 << 20, 256, forever(), &why) == nullptr);
    CHECK(why.because == gpushare::reason::guaranteed_to_others);
    CHECK(pool.try_allocate(80 << 20, 256, within(1ms), &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    // Who waits when the guarantees change goes with them.
    errc waited = errc::none;
    std::jthread waits([&] { waited = try_charge(below, 75_MiB, forever()).code; });
    wait_for_line(device, 1);
    CHECK(a.resize(30_MiB, 20_MiB) == errc::none);
    waits.join();
    CHECK(waited == errc::out_of_memory);
    CHECK(below.attainable() == 70_MiB);
    CHECK(a.release(30_MiB));
    // A hook may change them, and is asked first.
    const gpushare::quota_hook gives{device, 0, [&](const gpushare::reclaim_request&) {
                                         CHECK(a.resize(0_B, 50_MiB) == errc::none);
                                         return 30_MiB;
                                     }};
    CHECK(try_charge(below, 100_MiB, forever()).code == errc::none);
    CHECK(below.release(100_MiB));
    a.stop();
    CHECK(a.attainable() == 0_B);
}

TEST_CASE("a stop request ends the wait, before it and during it", "[memory][waiters]") {
    quota q{1_KiB};
    REQUIRE(q.try_charge(1_KiB) == errc::none);
    std::stop_source stop;
    std::atomic<errc> why{errc::none};
    std::jthread waiter([&] { why = try_charge(q, 1_B, patience<real_clock>{.stop = stop.get_token()}).code; });
    wait_for_line(q, 1);
    stop.request_stop();
    waiter.join();
    CHECK(why.load() == errc::stopped);
    CHECK(try_charge(q, 1_B, patience<real_clock>{.stop = stop.get_token()}).code == errc::stopped);
    CHECK(q.release(1_KiB));
    CHECK(q.usage().waiting == 0);
}

TEST_CASE("threads are served in the order in which they came, the big one first", "[memory][waiters]") {
    quota device{100_B};
    quota q{device, 0_B, 100_B}, neighbour{device, 0_B, 100_B};
    REQUIRE(neighbour.try_charge(100_B) == errc::none);
    std::array<bytes, 4> sizes{90_B, 1_B, 5_B, 4_B};
    std::atomic<unsigned> served{0};
    std::array<unsigned, 4> order{};
    {
        std::vector<std::jthread> threads;
        for (unsigned i = 0; i < 4; ++i) {
            threads.emplace_back([&, i] {
                if (try_charge(q, sizes[i], forever()).code == errc::none) order[i] = ++served;
            });
            wait_for_line(q, i + 1);
        }
        for (int i = 0; i < 8; ++i) {
            CHECK(neighbour.release(10_B));
            CHECK(q.usage().waiting == 4);  // 10 would do for all but the first
        }
        CHECK(neighbour.release(10_B));
        while (served != 1) std::this_thread::yield();
        CHECK(neighbour.release(1_B));
        while (served != 2) std::this_thread::yield();
        CHECK(neighbour.release(5_B));
        while (served != 3) std::this_thread::yield();
        CHECK(neighbour.release(4_B));
    }
    CHECK(order == std::array<unsigned, 4>{1, 2, 3, 4});
    CHECK(q.release(100_B));
    CHECK(device.usage().current == 0_B);
}

TEST_CASE("a wait for memory ends when a stream reaches a free, a neighbour's too", "[memory][waiters]") {
    const bool neighbours = GENERATE(false, true);
    quota device{1_KiB};
    quota chat{device, 0_B, 1_KiB}, code{device, 0_B, 1_KiB};
    fault_resource upstream;
    quota_resource mine{chat, upstream}, other{code, upstream};
    auto& from = neighbours ? other : mine;
    gpushare::deferred_frees<support::manual_point, quota_resource<fault_resource>> frees{from};
    const auto hook = collecting_hook(from.limit(), frees);
    support::manual_stream stream;
    void* p = from.allocate(1024, 8);
    frees.add(stream.record(), p, 1024, 8);
    CHECK(mine.try_allocate(1024, 8) == nullptr);
    std::jthread waiter([&] { p = mine.allocate(1024, 8, forever()); });
    wait_for_line(device, 1);
    stream.reach_all();
    waiter.join();
    CHECK(mine.deallocate(p, 1024, 8) == errc::none);
    CHECK(upstream.blocks() == 0);
    CHECK(device.usage().current == 0_B);
}

TEST_CASE("frees that streams have reached are collected before a neighbour is refused", "[memory][waiters]") {
    quota device{1_KiB};
    quota chat{device, 0_B, 1_KiB}, code{device, 0_B, 1_KiB};
    fault_resource upstream;
    quota_resource mine{chat, upstream}, other{code, upstream};
    gpushare::deferred_frees<support::manual_point, quota_resource<fault_resource>> frees{other};
    const auto hook = collecting_hook(code, frees);
    support::manual_stream stream;
    frees.add(stream.record(), other.allocate(512, 8), 512, 8);
    frees.add(stream.record(), other.allocate(512, 8), 512, 8);
    CHECK(mine.try_allocate(512, 8) == nullptr);
    stream.reach_next();
    void* p = mine.try_allocate(512, 8);
    CHECK(p != nullptr);
    CHECK(mine.deallocate(p, 512, 8) == errc::none);
    stream.reach_all();
    CHECK(frees.collect() == 1);
}

namespace {

// More is asked for than there is, nobody gives up: if a wake-up were lost, this would not end.
// Some beside them ask and go, some give up at once; none of it leaves a trace.
void queue_up(unsigned threads, int rounds, std::size_t leaves = 0) {
    quota device{1'000_B};
    quota left{device, 100_B, 600_B}, right{device, 100_B, 800_B};
    quota deep{left, 0_B, 500_B};
    std::vector<quota*> all{&device, &left, &right, &deep};
    std::vector<std::optional<quota>> further(leaves);
    for (std::size_t i = 0; i < leaves; ++i) all.push_back(&further[i].emplace(*all[i % 4], 0_B, 500_B));
    const auto seed = support::seed(3);
    CAPTURE(seed);
    std::atomic<std::uint64_t> held{0}, over{0}, failed{0};
    support::together(threads, [&](unsigned rank) {
        support::random any{seed + rank};
        for (int i = 0; i < rounds; ++i) {
            auto& q = *all[any.below(all.size())];
            const bytes n{1 + any.below(any.one_in(4) ? 500 : 100)};
            const auto how = any.below(8);
            bool charged = false;
            if (how == 0) {
                charged = q.try_charge(n) == errc::none;
            } else if (how == 1) {
                const auto why = try_charge(q, n, within(50us)).code;
                if (why != errc::none && why != errc::deadline_exceeded) failed.fetch_add(1);
                charged = why == errc::none;
            } else {
                charged = try_charge(q, n, forever()).code == errc::none;
                if (!charged) failed.fetch_add(1);
            }
            if (!charged) continue;
            if (held.fetch_add(n.count()) + n.count() > 1'000) over.fetch_add(1);
            if (any.one_in(4)) std::this_thread::yield();
            held.fetch_sub(n.count());
            if (!q.release(n)) failed.fetch_add(1);
        }
    });
    CHECK(over.load() == 0);
    CHECK(failed.load() == 0);
    for (const auto* q : all) {
        CHECK(q->usage().waiting == 0);
        CHECK(q->usage().borrowed == 0_B);
    }
    CHECK(device.usage().current == 200_B);
    CHECK(device.free() == 800_B);
}

}  // namespace

TEST_CASE("threads that wait, ask and give up at random are all served, and nothing drifts", "[memory][waiters]") {
    queue_up(6, 150);
}

TEST_CASE("so are those of many quotas", "[memory][waiters]") { queue_up(6, 150, 40); }

TEST_CASE("threads that wait, ask and give up at random, for long", "[.long]") {
    queue_up(8, 20'000);
    queue_up(8, 20'000, 40);
}

TEST_CASE("no wake-up is lost between a release and a wait", "[memory][waiters]") {
    // Two threads hand the only bytes to and fro: each release may be beside the other's joining
    // the queue, at any place.
    quota device{100_B};
    quota a{device, 0_B, 100_B}, b{device, 0_B, 100_B};
    std::atomic<int> failed{0};
    support::together(2, [&](unsigned rank) {
        quota& q = rank == 0 ? a : b;
        for (int i = 0; i < 1'000; ++i)
            if (try_charge(q, 100_B, forever()).code != errc::none || !q.release(100_B)) failed.fetch_add(1);
    });
    CHECK(failed.load() == 0);
    CHECK(device.usage().current == 0_B);
    CHECK(a.usage().charges == 1'000);
}

TEST_CASE("under pressure nobody is refused, and what is freed goes back to the root at once",
          "[memory][waiters][pressure]") {
    quota device{10_MiB};
    quota chat{device, 1_MiB, 9_MiB}, code{device, 0_B, 10_MiB};
    REQUIRE(chat.try_charge(8_MiB) == errc::none);
    CHECK(chat.release(6_MiB));
    CHECK_FALSE(chat.pressed());
    {
        const gpushare::quota_pressure looks{code};
        CHECK(device.usage().current == 2_MiB);  // nothing lies idle below from here on
        CHECK(chat.usage().borrowed == 1_MiB);
        CHECK(chat.pressed());
        CHECK(device.usage().waiting == 0);  // which is no request
        const gpushare::quota_pressure looks_too{chat};
        CHECK(chat.try_charge(4_MiB) == errc::none);
        CHECK(code.try_charge(4_MiB) == errc::none);
        CHECK(code.try_charge(1_B) == errc::out_of_memory);  // for want of bytes, and nothing else
        CHECK(code.release(4_MiB));
        CHECK(device.usage().current == 6_MiB);
        CHECK(chat.try_charge(4_MiB) == errc::none);
        CHECK(chat.release(10_MiB));
        CHECK(device.usage().current == 1_MiB);  // as guaranteed
    }
    CHECK_FALSE(chat.pressed());
    CHECK_FALSE(code.pressed());
    CHECK(device.usage().waiting == 0);
}

TEST_CASE("waiting requests are served in order under pressure, and later ones stay behind",
          "[memory][waiters][pressure]") {
    quota device{10_KiB};
    quota chat{device, 0_B, 10_KiB}, code{device, 0_B, 10_KiB};
    REQUIRE(chat.try_charge(10_KiB) == errc::none);
    auto looks = std::make_unique<gpushare::quota_pressure>(device);
    gpushare::quota_claim claim{code, 4_KiB};
    CHECK(device.usage().waiting == 1);
    CHECK(chat.release(3_KiB));
    CHECK(chat.try_charge(1_KiB) == errc::out_of_memory);  // it waits for these
    looks.reset();
    CHECK(claim.state() == gpushare::claim_state::waiting);
    CHECK(chat.release(1_KiB));
    CHECK(claim.state() == gpushare::claim_state::granted);
    CHECK(chat.release(6_KiB));
}

TEST_CASE("pressure comes and goes beside charges that all fit", "[memory][waiters][pressure][threads]") {
    quota device{8_MiB};
    std::array<std::optional<quota>, 3> leaf;
    for (auto& q : leaf) q.emplace(device, 0_B, 8_MiB);
    std::atomic<std::uint64_t> refused{0}, lost{0};
    std::atomic<int> working{3};
    support::together(4, [&](unsigned rank) {
        if (rank == 3) {
            while (working.load() != 0) const gpushare::quota_pressure looks{device};
            return;
        }
        for (int i = 0; i < 20'000; ++i) {  // all three together have six of eight
            if (leaf[rank]->try_charge(2_MiB) != errc::none)
                refused.fetch_add(1);
            else if (!leaf[rank]->release(2_MiB))
                lost.fetch_add(1);
        }
        working.fetch_sub(1);
    });
    CHECK(refused == 0);
    CHECK(lost == 0);
    for (auto& q : leaf) {
        CHECK(q->usage().current == 0_B);
        q.reset();
    }
    CHECK(device.usage().current == 0_B);
}

}  // namespace quota_wait_test
