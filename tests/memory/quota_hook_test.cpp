// SPDX-License-Identifier: Apache-2.0
// Which hooks are called to make room, for how many bytes, in which order and under no lock. Burst
// comes back in this way, and guaranteed bytes never do.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/threads.hpp"
#include "support/waiting.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::instant;
using gpushare::patience;
using gpushare::quota;
using gpushare::quota_hook;
using gpushare::quota_resource;
using gpushare::reclaim_request;
using support::fault_resource;
using support::real_clock;
using support::within;

namespace {

/// Blocks that a tenant can do without.
struct cache {
    quota_resource<fault_resource>& from;
    std::vector<void*> blocks{};
    std::vector<bytes> asked{};

    void fill(std::size_t count) {
        while (count-- != 0) blocks.push_back(from.allocate(100, 4));
    }
    bytes evict(bytes missing) {
        asked.push_back(missing);
        bytes freed{};
        for (; freed < missing && !blocks.empty(); blocks.pop_back()) {
            from.deallocate(blocks.back(), 100, 4);
            freed += 100_B;
        }
        return freed;
    }
};

}  // namespace

TEST_CASE("a hook frees what is missing, and the request is granted: spilling, as asked of rmm", "[memory][hooks]") {
    quota q{1'000_B};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    cache c{mine};
    c.fill(9);
    const quota_hook spill{q, 0, [&](const reclaim_request& r) {
                               CHECK(r.own);
                               CHECK(r.until == instant::min());
                               return c.evict(r.missing);
                           }};
    void* p = mine.allocate(300, 4);
    CHECK(c.asked == std::vector{200_B});
    CHECK(c.blocks.size() == 7);
    CHECK(mine.try_allocate(2'000, 4) == nullptr);  // could never fit: nothing is spilled for it
    CHECK(c.asked.size() == 1);
    CHECK(c.blocks.size() == 7);
    CHECK(mine.deallocate(p, 300, 4) == errc::none);
    CHECK(c.evict(bytes::max()) == 700_B);
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("hooks are asked in their order, each once, until the request fits", "[memory][hooks]") {
    quota q{100_B};
    REQUIRE(q.try_charge(100_B) == errc::none);
    std::vector<std::pair<int, bytes>> calls;
    const auto frees = [&](int which, bytes n) {
        return [&calls, &q, which, n](const reclaim_request& r) mutable {
            calls.emplace_back(which, r.missing);
            q.release(n);
            return std::exchange(n, 0_B);
        };
    };
    const quota_hook last{q, 3, frees(3, 0_B)}, second{q, 2, frees(2, 40_B)}, first{q, 1, frees(1, 10_B)};
    fault_resource upstream;
    quota_resource mine{q, upstream};
    void* p = mine.try_allocate(50, 2);
    CHECK(p != nullptr);
    CHECK(calls == std::vector{std::pair(1, 50_B), std::pair(2, 40_B)});
    calls.clear();
    CHECK(mine.try_allocate(2, 2) == nullptr);
    CHECK(calls == std::vector{std::pair(1, 2_B), std::pair(2, 2_B), std::pair(3, 2_B)});
    CHECK(mine.deallocate(p, 50, 2) == errc::none);
}

TEST_CASE("a hook's exception is contained, and its claim isn't believed", "[memory][hooks]") {
    quota q{100_B};
    REQUIRE(q.try_charge(100_B) == errc::none);
    int calls = 0;
    const quota_hook throws{q, 0, [&](const reclaim_request&) -> bytes { ++calls, throw std::runtime_error("no"); }};
    const quota_hook lies{q, 1, [&](const reclaim_request&) { return ++calls, 100_B; }};
    fault_resource upstream;
    quota_resource mine{q, upstream};
    CHECK_THROWS_AS((void)mine.allocate(1, 1), gpushare::memory_error);
    CHECK(calls == 2);
    CHECK(q.release(100_B));
}

TEST_CASE("an allocation inside a hook asks no hook, in its own tree or by way of another", "[memory][hooks]") {
    quota q{100_B}, other{100_B};
    REQUIRE(q.try_charge(100_B) == errc::none);
    REQUIRE(other.try_charge(100_B) == errc::none);
    fault_resource upstream;
    quota_resource mine{q, upstream}, elsewhere{other, upstream};
    int calls = 0, there = 0;
    const quota_hook spill{q, 0, [&](const reclaim_request&) {
                               ++calls;
                               CHECK(mine.try_allocate(10, 1) == nullptr);
                               CHECK(elsewhere.try_allocate(10, 1) == nullptr);
                               return bytes{};
                           }};
    const quota_hook round_about{other, 0, [&](const reclaim_request&) {
                                     ++there;
                                     CHECK(mine.try_allocate(10, 1) == nullptr);
                                     return bytes{};
                                 }};
    CHECK(mine.try_allocate(10, 1) == nullptr);
    CHECK(calls == 1);
    CHECK(there == 1);
    CHECK(q.release(100_B));
    CHECK(other.release(100_B));
}

TEST_CASE("another thread's request asks hooks while this one is in a hook: the guard is a thread's",
          "[memory][hooks]") {
    quota q{100_B};
    REQUIRE(q.try_charge(100_B) == errc::none);
    fault_resource upstream;
    quota_resource mine{q, upstream};
    int calls = 0;
    const quota_hook spill{q, 0, [&](const reclaim_request& r) {
                               if (++calls == 2) {  // by the other thread, which lacks 10 bytes
                                   CHECK(r.missing == 10_B);
                                   CHECK(q.in_hook(std::this_thread::get_id()));
                                   return q.release(10_B) ? 10_B : 0_B;
                               }
                               std::jthread([&] {
                                   CHECK_FALSE(q.in_hook(std::this_thread::get_id()));
                                   void* const p = mine.try_allocate(10, 1);
                                   CHECK(p != nullptr);
                                   CHECK(mine.deallocate(p, 10, 1) == errc::none);
                               }).join();
                               return 10_B;
                           }};
    void* const p = mine.try_allocate(10, 1);
    CHECK(p != nullptr);
    CHECK(calls == 2);
    CHECK_FALSE(q.in_hook(std::this_thread::get_id()));
    CHECK(mine.deallocate(p, 10, 1) == errc::none);
    CHECK(q.release(90_B));
}

TEST_CASE("two hooks that allocate from each other's pool don't wait for each other",
          "[memory][hooks][pool][threads]") {
    fault_resource device;
    quota limit{64_KiB}, above{1_MiB};
    quota_resource mine{limit, device};
    quota_resource high{above, mine};
    gpushare::pool_resource common{mine, {.segment = 4_KiB}};
    const auto meet = [&](auto& upstream) {
        using pool = gpushare::pool_resource<std::remove_reference_t<decltype(upstream)>>;
        std::array pools{pool(upstream), pool(upstream)};
        std::array<void*, 2> halves{};
        for (unsigned i = 0; i < 2; ++i) halves[i] = pools[i].allocate(32 << 10, 256);
        std::atomic<int> inside{0}, granted{0};
        std::atomic<std::thread::id> first{};
        const quota_hook spill{limit, 0, [&](const reclaim_request&) {
                                   const bool is_first = first.load() == std::this_thread::get_id();
                                   for (inside.fetch_add(1); inside.load() < 2;) std::this_thread::yield();
                                   if (pools[is_first ? 1 : 0].try_allocate(1'000, 256) != nullptr)
                                       granted.fetch_add(1);
                                   return bytes{};
                               }};
        support::together(2, [&](unsigned rank) {
            if (rank == 0) first.store(std::this_thread::get_id());
            while (first.load() == std::thread::id{}) std::this_thread::yield();
            if (pools[rank].try_allocate(1'000, 256) != nullptr) granted.fetch_add(1);
        });
        CHECK(granted == 0);
        for (unsigned i = 0; i < 2; ++i) CHECK(pools[i].deallocate(halves[i], 32 << 10, 256) == errc::none);
        return inside.load();
    };
    SECTION("over the quota of the hook") { CHECK(meet(mine) == 2); }  // each of them once
    SECTION("over another quota, of a tree of its own") { CHECK(meet(high) >= 2); }
    SECTION("over a pool") { CHECK(meet(common) >= 2); }
}

TEST_CASE("hooks are asked when the memory behind the quota runs out, too", "[memory][hooks]") {
    quota q{1_KiB};
    fault_resource upstream;
    quota_resource mine{q, upstream};
    int calls = 0;
    const quota_hook spill{q, 0, [&](const reclaim_request& r) {
                               CHECK(r.missing == 64_B);
                               CHECK(q.usage().current == 0_B);  // the charge is back
                               return ++calls, 1_B;
                           }};
    upstream.fail_next();
    void* p = mine.allocate(64, 8);
    CHECK(calls == 1);
    CHECK(mine.deallocate(p, 64, 8) == errc::none);
    upstream.fail_next([] { throw std::runtime_error("device lost"); });
    CHECK_THROWS_AS((void)mine.allocate(64, 8), std::runtime_error);
    CHECK(calls == 1);  // it wasn't for want of memory
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("a borrower is asked for what it has borrowed and no more", "[memory][hooks]") {
    quota device{1'000_B};
    quota chat{device, 200_B, 800_B}, code{device, 300_B, 500_B}, idle{device, 100_B};
    fault_resource upstream;
    quota_resource mine{chat, upstream}, others{code, upstream};
    cache borrowed{others}, own{mine};
    borrowed.fill(6);  // half of it burst
    own.fill(2);
    std::vector<bool> asked_as_own;
    std::optional<quota_hook> back;
    back.emplace(code, 0, [&](const reclaim_request& r) {
        asked_as_own.push_back(r.own);
        return borrowed.evict(r.missing);
    });
    const quota_hook spill{chat, 1, [&](const reclaim_request& r) {
                               asked_as_own.push_back(r.own);
                               return own.evict(r.missing);
                           }};
    const quota_hook guaranteed_only{idle, -1, [&](const reclaim_request&) -> bytes {
                                         FAIL("it has borrowed nothing");
                                         return {};
                                     }};
    // 100 of the device are free, chat has used up its guarantee.
    void* p = mine.try_allocate(200, 4);
    CHECK(p != nullptr);
    CHECK(borrowed.asked == std::vector{100_B});
    void* q = mine.try_allocate(400, 4);  // 200 more can come from code, the rest is its guarantee
    CHECK(q != nullptr);
    CHECK(borrowed.asked == std::vector{100_B, 200_B});
    CHECK(own.asked == std::vector{200_B});
    CHECK(asked_as_own == std::vector{false, false, true});
    CHECK(code.usage().current == 300_B);
    CHECK(code.usage().borrowed == 0_B);
    CHECK(mine.try_allocate(100, 4) == nullptr);  // and now code isn't asked
    CHECK(borrowed.asked.size() == 2);
    back.reset();
    mine.deallocate(p, 200, 4);
    mine.deallocate(q, 400, 4);
    borrowed.evict(bytes::max());
    CHECK(device.usage().current == 600_B);
}

TEST_CASE("over its own limit, a tenant's neighbours aren't asked", "[memory][hooks]") {
    quota device{1'000_B};
    quota chat{device, 100_B, 100_B}, code{device, 0_B, 500_B};
    REQUIRE(chat.try_charge(200_B) == errc::none);
    REQUIRE(code.try_charge(500_B) == errc::none);
    const quota_hook back{code, 0, [&](const reclaim_request&) -> bytes {
                              FAIL("nothing of code's would help");
                              return {};
                          }};
    CHECK(try_charge(chat, 50_B, within(1ms)).code == errc::deadline_exceeded);
    CHECK(gpushare::holder_of_burst(chat, 50_B).borrowed == 0_B);
    CHECK(chat.release(200_B));
    CHECK(code.release(500_B));
}

TEST_CASE("a borrower that is told a deadline gives back later, and the request is served then", "[memory][hooks]") {
    quota device{1'000_B};
    quota chat{device, 0_B, 1'000_B}, code{device, 200_B, 800_B};
    code.name("code");
    REQUIRE(code.try_charge(1'000_B) == errc::none);
    std::atomic<bool> told{false};
    const instant deadline = real_clock::now() + 1h;
    const quota_hook back{code, 0, [&](const reclaim_request& r) {
                              CHECK(r.until == deadline);
                              CHECK(r.missing == 500_B);
                              told = true;
                              return bytes{};
                          }};
    std::jthread busy([&] {
        while (!told) std::this_thread::yield();
        code.release(200_B);
        code.release(300_B);
    });
    CHECK(try_charge(chat, 500_B, patience{real_clock{}, deadline}).code == errc::none);
    busy.join();
    CHECK(chat.release(500_B));
    CHECK(code.release(500_B));
}

TEST_CASE("of those that wait in several quotas a hook is told of the oldest", "[memory][hooks]") {
    quota device{200_B};
    quota a{device, 0_B, 200_B}, b{device, 0_B, 200_B}, cache{device, 0_B, 200_B};
    REQUIRE(cache.try_charge(200_B) == errc::none);
    std::atomic<bool> helps{false};
    bool fresh = false;
    std::vector<bytes> asked;
    const quota_hook back{cache, 0,
                          [&](const reclaim_request& r) {
                              if (!helps || !std::exchange(fresh, true)) return bytes{};  // told before, perhaps
                              asked.push_back(r.missing);
                              return cache.release(r.missing) ? r.missing : bytes{};
                          },
                          [](instant) { return true; }};
    gpushare::quota_claim first{a, 50_B};
    std::jthread second([&] { CHECK(try_charge(b, 100_B, within(60s)).code == errc::none); });
    while (device.usage().waiting != 2) std::this_thread::yield();
    gpushare::quota_claim third{a, 1_B};  // came last, but is in the line of the quota that came first
    CHECK(cache.release(50_B));
    CHECK(first.state() == gpushare::claim_state::granted);
    helps = true;
    second.join();
    REQUIRE_FALSE(asked.empty());
    CHECK(asked.front() == 100_B);
    CHECK(b.release(100_B));
}

TEST_CASE("a borrower that doesn't give back is named in the refusal, and keeps what it has", "[memory][hooks]") {
    quota device{1'000_B};
    quota chat{device, 0_B, 1'000_B}, code{device, 200_B, 800_B}, other{device, 0_B, 100_B};
    code.name("code");
    REQUIRE(code.try_charge(900_B) == errc::none);
    REQUIRE(other.try_charge(100_B) == errc::none);
    int asked = 0;
    const quota_hook stubborn{code, 0, [&](const reclaim_request&) { return ++asked, bytes{}; }};
    fault_resource upstream;
    quota_resource mine{chat, upstream, "chat"};
    CHECK_THROWS_WITH(
        (void)mine.allocate(500, 4, within(2ms)),
        "tenant 'chat': allocate: asked for 500 B, 0 B of 1000 B left (deadline exceeded); 700 B lent to 'code'");
    CHECK(asked == 1);
    CHECK(code.usage().current == 900_B);
    CHECK(code.release(900_B));
    CHECK(other.release(100_B));
}

TEST_CASE("a pool's empty segments are a neighbour's by a hook that trims it", "[memory][hooks]") {
    quota device{1_MiB};
    quota chat{device, 0_B, 1_MiB}, code{device, 0_B, 1_MiB};
    fault_resource upstream;
    quota_resource mine{chat, upstream}, theirs{code, upstream};
    gpushare::pool_resource pool{theirs, {.segment = 512_KiB}};
    const quota_hook trim{code, 0, [&](const reclaim_request& r) {
                              const auto before = pool.usage().reserved;
                              return before - pool.trim(before - r.missing);
                          }};
    pool.deallocate(pool.allocate(1000, 8), 1000, 8);
    CHECK(code.usage().current >= 512_KiB);
    void* p = mine.try_allocate(768 << 10, 256);
    CHECK(p != nullptr);
    CHECK(code.usage().current == 0_B);
    CHECK(mine.deallocate(p, 768 << 10, 256) == errc::none);
}

TEST_CASE("hooks come and go while others are in them", "[memory][hooks]") {
    quota device{100_B};
    quota q{device, 0_B, 100_B}, full{device, 0_B, 100_B};
    REQUIRE(full.try_charge(100_B) == errc::none);
    std::atomic<int> wrong{0}, calls{0};
    {
        support::background askers(2, [&](unsigned) {
            fault_resource upstream;
            quota_resource mine{q, upstream};
            if (mine.try_allocate(10, 1) != nullptr) wrong.fetch_add(1);
        });
        for (int i = 0; i < 60 || calls < 30; ++i) {
            const auto alive = std::make_unique<std::atomic<bool>>(true);
            {
                const quota_hook hook{i % 2 == 0 ? q : full, i % 3, [&](const reclaim_request&) {
                                          if (!*alive) wrong.fetch_add(1);
                                          calls.fetch_add(1);
                                          return bytes{};
                                      }};
                std::this_thread::yield();
            }
            *alive = false;
        }
    }
    CHECK(wrong.load() == 0);
    CHECK(full.release(100_B));
}

TEST_CASE("a thread is in a hook until it has left, though the hook is ending", "[memory][hooks]") {
    quota root{100_B};
    REQUIRE(root.try_charge(100_B) == errc::none);
    const auto ask = [&] {
        gpushare::detail::hook_cursor asked;
        return root.ask_next(asked, 1_B);
    };
    std::atomic<int> others{0}, calls{0}, nested{0};
    const quota_hook other{root, 1, [&](const reclaim_request&) {
                               ++others;
                               return bytes{};
                           }};
    std::atomic<bool> inside{false}, may_leave{false};
    const auto first_call = [&] {
        inside = true;
        while (!may_leave) std::this_thread::yield();
        const int before = others;
        (void)ask();
        nested = others - before;
    };
    auto ending = std::make_unique<quota_hook>(root, 0, [&](const reclaim_request&) {
        if (calls++ == 0) first_call();
        return bytes{};
    });
    {
        const std::jthread asks([&] { (void)ask(); });
        while (!inside) std::this_thread::yield();
        const auto its_id = asks.get_id();
        const std::jthread ends([&] { ending.reset(); });
        for (int before = 0; before != calls; (void)ask()) before = calls;  // until it is asked no more
        CHECK(root.in_hook(its_id));
        may_leave = true;
    }
    CHECK(nested == 0);
}

TEST_CASE("a wait within a hook calls no hook of that tree", "[memory][hooks]") {
    quota root{100_B};
    REQUIRE(root.try_charge(100_B) == errc::none);
    int depth = 0, deepest = 0;  // of calls by this thread, the only one
    const auto wait_once = [&] {
        deepest = std::max(deepest, ++depth);
        if (depth == 1) {
            CHECK(try_charge(root, 1_B, within(2ms)).code == errc::deadline_exceeded);
            gpushare::quota_claim claim(root, 1_B);
            CHECK(claim.poll() == gpushare::claim_state::waiting);
        }
        --depth;
        return bytes{};
    };
    const quota_hook hook{root, 0, [&](const reclaim_request&) { return wait_once(); }, [](instant) { return false; }};
    CHECK(try_charge(root, 1_B, within(5ms)).code == errc::deadline_exceeded);
    CHECK(deepest == 1);
}
