// SPDX-License-Identifier: Apache-2.0
// Threads that wait for memory of a pool: served in order, woken by anything that could let them
// through, back at their deadline or stop request in any case, and gone without a trace.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/capped_pool.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/waiting.hpp"

namespace pool_wait_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::failure;
using gpushare::patience;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;
using support::forever;
using support::manual_point;
using support::manual_stream;
using support::within;

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/// For ever, by a clock that stands still: who waits like this looks at nothing unless it is told.
patience<support::manual_clock> until_told() { return {}; }

/// A tenant's pool of at most 4 MiB, full: one block is out.
struct full_pool {
    fault_resource upstream;
    quota device{4_MiB};
    quota limit{device, 0_B, 4_MiB};
    quota_resource<fault_resource> mine{limit, upstream, "chat"};
    gpushare::pool_resource<quota_resource<fault_resource>, manual_point> pool{mine, {.segment = 1_MiB}};
    manual_stream stream;
    void* all = pool.allocate(4 * MiB, 256);

    void let_go() { CHECK(pool.deallocate(all, 4 * MiB, 256) == errc::none); }
};

/// A thread that waits for a block, and frees it when it has it.
template <class Source>
class customer {
public:
    template <class Clock = support::manual_clock>
    customer(Source& from, std::size_t size, std::atomic<unsigned>& served, const patience<Clock>& until = until_told())
        : thread_([this, &from, size, &served, until] {
              void* const p = from.try_allocate(size, 256, until, &why_);
              turn_ = ++served;
              if (p != nullptr) from.deallocate(p, size, 256);
          }) {}
    /// When it was served, counted from 1; 0 if it was refused.
    unsigned turn() {
        thread_.join();
        return why_.code == errc::none ? turn_ : 0;
    }

private:
    failure why_;
    unsigned turn_ = 0;
    std::jthread thread_;
};

template <class Pool>
void wait_for_line(const Pool& pool, std::size_t waiting) {
    while (pool.waiting() != waiting) std::this_thread::yield();
}

}  // namespace

TEST_CASE("a wait for a pool's memory ends at its deadline, and says why in its tenant's name",
          "[memory][pool][waiters]") {
    full_pool f;
    failure why;
    CHECK(f.pool.try_allocate(MiB, 256, within(1ms), &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    CHECK(why.asked == MiB);
    CHECK(why.left == 0);
    CHECK(why.limit == 4 * MiB);
    CHECK_THROWS_WITH(
        (void)f.pool.allocate(MiB, 256, within(1ms)),
        "tenant 'chat': allocate from a pool: asked for 1 MiB, 0 B of 4 MiB left (deadline exceeded); the pool "
        "holds 4 MiB, of which 0 B are free, 0 B in one block");
    CHECK_THROWS_AS((void)f.pool.allocate(MiB, 256, within(0ms)), std::bad_alloc);
    auto cache = f.pool.make_cache();
    CHECK_THROWS_AS((void)cache.allocate(MiB, 256, within(0ms)), gpushare::memory_error);
    CHECK(f.pool.waiting() == 0);
    f.let_go();
    void* const p = cache.allocate(MiB, 256, within(0ms));  // a deadline that has passed lets through what fits
    CHECK(cache.deallocate(p, MiB, 256) == errc::none);
}

namespace {
/// One nanosecond passes whenever somebody looks.
struct ticking_clock {
    std::shared_ptr<std::atomic<std::int64_t>> looks = std::make_shared<std::atomic<std::int64_t>>(0);
    [[nodiscard]] gpushare::instant now() const noexcept { return gpushare::instant{gpushare::ns{++*looks}}; }
};
}  // namespace

TEST_CASE("a deadline holds while there is always something to try", "[memory][pool][waiters]") {
    fault_resource upstream;
    gpushare::pool_resource pool(upstream);
    auto cache = pool.make_cache();
    int asked = 0;
    std::function<void()> refuse = [&] {
        if (++asked < 1'000) {
            const decltype(cache)::pause capture{cache};  // when it ends, there may be something to come
        }
        upstream.fail_next(refuse);
        throw std::bad_alloc();
    };
    upstream.fail_next(refuse);
    const ticking_clock clock;
    failure why;
    CHECK(pool.try_allocate(KiB, 256, patience{clock, gpushare::instant{gpushare::ns{100}}}, &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    CHECK(*clock.looks <= 102);
}

TEST_CASE("a request that a pool can never serve, or refuses for another reason than memory, doesn't wait",
          "[memory][pool][waiters]") {
    full_pool f;
    failure why;
    CHECK(f.pool.try_allocate(4 * MiB + 1, 256, forever(), &why) == nullptr);
    CHECK(why.code == errc::over_quota);
    CHECK(f.pool.try_allocate(~std::size_t{0}, 256, forever(), &why) == nullptr);
    CHECK(why.code == errc::size_overflow);
    CHECK(f.pool.try_allocate(1, 3, forever(), &why) == nullptr);
    CHECK(why.code == errc::bad_alignment);
    f.let_go();
    gpushare::pool_resource bare(f.upstream, {.segment = 64_KiB});
    f.upstream.fail_next([] { throw std::runtime_error("device lost"); });
    CHECK_THROWS_WITH((void)bare.allocate(MiB, 256, forever()), "device lost");
    f.upstream.fail_next();  // out of memory: asked again
    void* const p = bare.allocate(MiB, 256, forever());
    CHECK(bare.deallocate(p, MiB, 256) == errc::none);
}

TEST_CASE("a request that can never be served doesn't wait behind others, either", "[memory][pool][waiters]") {
    full_pool f;
    std::atomic<unsigned> served{0};
    customer first(f.pool, MiB, served);
    wait_for_line(f.pool, 1);
    failure why;
    CHECK(f.pool.try_allocate(4 * MiB + 1, 256, within(50ms), &why) == nullptr);
    CHECK(why.code == errc::over_quota);
    CHECK(f.pool.try_allocate(MiB, 256, within(1ms), &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    f.let_go();
    CHECK(first.turn() == 1);
}

TEST_CASE("a stop request ends the wait for a pool's memory, before it and during it", "[memory][pool][waiters]") {
    full_pool f;
    std::stop_source stop;
    failure why;
    std::jthread waiter(
        [&] { (void)f.pool.try_allocate(1, 256, patience<support::real_clock>{.stop = stop.get_token()}, &why); });
    wait_for_line(f.pool, 1);
    stop.request_stop();
    waiter.join();
    CHECK(why.code == errc::stopped);
    CHECK(f.pool.try_allocate(1, 256, patience<support::real_clock>{.stop = stop.get_token()}, &why) == nullptr);
    CHECK(why.code == errc::stopped);
    CHECK(f.pool.waiting() == 0);
}

TEST_CASE("threads that wait for a pool are served in the order in which they came, the big one first",
          "[memory][pool][waiters]") {
    full_pool f;
    f.let_go();
    std::array<void*, 4> parts{};
    for (auto& p : parts) p = f.pool.allocate(MiB, 256);
    std::atomic<unsigned> served{0};
    customer big(f.pool, 4 * MiB, served);
    wait_for_line(f.pool, 1);
    customer small(f.pool, 3 * MiB, served);  // one at a time
    wait_for_line(f.pool, 2);
    auto cache = f.pool.make_cache();
    customer last(cache, 3 * MiB, served);
    wait_for_line(f.pool, 3);
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(f.pool.deallocate(parts[i], MiB, 256) == errc::none);
        CHECK(f.pool.waiting() == 3);                     // in the end there is enough for all but the first
        CHECK(f.pool.try_allocate(KiB, 256) == nullptr);  // who doesn't wait isn't before those who do
        CHECK(f.pool.try_allocate_held(KiB, 256) == nullptr);
    }
    CHECK(f.pool.deallocate(parts[3], MiB, 256) == errc::none);
    CHECK(big.turn() == 1);
    CHECK(small.turn() == 2);
    CHECK(last.turn() == 3);
    CHECK(f.pool.waiting() == 0);
    void* const p = f.pool.try_allocate(KiB, 256);
    CHECK(p != nullptr);
    CHECK(f.pool.deallocate(p, KiB, 256) == errc::none);
}

TEST_CASE("a thread that leaves a pool's queue lets those behind go on", "[memory][pool][waiters]") {
    full_pool f;
    f.let_go();
    void* const most = f.pool.allocate(3 * MiB, 256);
    std::stop_source stop;
    std::jthread big(
        [&] { (void)f.pool.try_allocate(4 * MiB, 256, patience<support::real_clock>{.stop = stop.get_token()}); });
    wait_for_line(f.pool, 1);
    std::atomic<unsigned> served{0};
    customer small(f.pool, MiB, served);
    wait_for_line(f.pool, 2);
    stop.request_stop();
    CHECK(small.turn() == 1);
    CHECK(f.pool.deallocate(most, 3 * MiB, 256) == errc::none);
}

TEST_CASE("a wait for a pool ends when a block is freed, whichever way", "[memory][pool][waiters]") {
    const auto how = GENERATE(0, 1, 2, 3, 4, 5);
    CAPTURE(how);
    full_pool f;
    auto plain = f.pool.make_cache();
    auto ordered = f.pool.make_cache(f.stream);
    f.let_go();
    // On a bin of a cache there is room for it, but while somebody waits, nothing stays there.
    const std::size_t size = 4 * MiB;
    f.all = how == 3 ? ordered.allocate(size, 256) : plain.allocate(size, 256);
    std::atomic<unsigned> served{0};
    std::optional<customer<decltype(f.pool)>> waiter;
    if (how == 4) CHECK(plain.deallocate(f.all, size, 256) == errc::none);  // before anybody waits
    if (how == 5) CHECK(f.pool.deallocate_after(f.stream.record(), f.all, size, 256) == errc::none);
    waiter.emplace(f.pool, size, served);
    if (how != 4) wait_for_line(f.pool, 1);
    switch (how) {
        case 0: CHECK(f.pool.deallocate(f.all, size, 256) == errc::none); break;
        case 1: CHECK(plain.deallocate(f.all, size, 256) == errc::none); break;
        case 2: CHECK(f.pool.deallocate_after(f.stream.record(), f.all, size, 256) == errc::none); break;
        case 3: CHECK(ordered.deallocate(f.all, size, 256) == errc::none); break;
        default: break;
    }
    if (how == 3)
        while (f.stream.open() == 0) std::this_thread::yield();  // the waiter asks for the point
    f.stream.reach_all();
    CHECK(waiter->turn() == 1);
    CHECK(f.pool.usage().used == 0_B);
}

TEST_CASE("a wait for a pool ends when its upstream has memory again", "[memory][pool][waiters]") {
    const auto how = GENERATE(0, 1, 2);
    CAPTURE(how);
    full_pool f;
    f.let_go();
    CHECK(f.pool.trim(0_B) == 0_B);
    quota other{f.device, 0_B, 4_MiB};
    quota_resource theirs{other, f.upstream};
    gpushare::pool_resource neighbour{theirs, {.segment = 4_MiB}};
    void* const p = neighbour.allocate(KiB, 256);
    std::atomic<bool> idle{false};
    const gpushare::quota_hook trim{other, 0, [&](const gpushare::reclaim_request&) {
                                        return idle && how == 1 ? 4_MiB - neighbour.trim(0_B) : 0_B;
                                    }};
    if (how == 2) (void)f.limit.resize(0_B, 4_KiB);  // fits, but for the tenant's own limit
    std::atomic<unsigned> served{0};
    customer waiter(f.pool, how == 2 ? 4 * KiB : MiB, served, forever());
    wait_for_line(f.pool, 1);
    CHECK(neighbour.deallocate(p, KiB, 256) == errc::none);
    if (how != 1) CHECK(neighbour.trim(0_B) == 0_B);
    idle = true;
    CHECK(waiter.turn() == 1);
}

TEST_CASE("a cache keeps what is freed again once nobody waits", "[memory][pool][waiters]") {
    full_pool f;
    f.let_go();
    auto before = f.pool.make_cache();
    void* const p = f.pool.allocate(4 * MiB - 64 * KiB, 256);
    void* const q = before.allocate(KiB, 256);
    std::stop_source stop;
    std::jthread big(
        [&] { (void)f.pool.try_allocate(4 * MiB, 256, patience<support::real_clock>{.stop = stop.get_token()}); });
    wait_for_line(f.pool, 1);
    auto during = f.pool.make_cache();
    CHECK(during.deallocate(q, KiB, 256) == errc::none);
    CHECK(f.pool.usage().cached == 0_B);
    stop.request_stop();
    big.join();
    for (auto* cache : {&before, &during}) {
        void* const r = cache->allocate(KiB, 256);
        CHECK(cache->deallocate(r, KiB, 256) == errc::none);
        CHECK(f.pool.usage().cached != 0_B);
        cache->flush();
    }
    CHECK(f.pool.deallocate(p, 4 * MiB - 64 * KiB, 256) == errc::none);
}

namespace {

// More is asked for than there is. Some wait until they are told: if a wake-up were lost, this
// would not end. Some give up; some free behind points.
void queue_up(unsigned threads, int rounds) {
    support::capped_pool<manual_point> c(2_MiB, {.segment = 2_MiB});
    auto& pool = c.pool;
    const auto seed = support::seed(7);
    CAPTURE(seed);
    std::atomic<unsigned> failed{0}, over{0};
    std::atomic<std::uint64_t> held{0};
    support::together(threads, [&](unsigned rank) {
        support::random any{seed + rank};
        manual_stream stream;
        auto cache = pool.make_cache();
        for (int i = 0; i < rounds; ++i) {
            const std::size_t size = any.one_in(8) ? 1 + any.below(2 * MiB) : 1 + any.below(256 * KiB);
            const bool patient = !any.one_in(3);
            failure why;
            const auto from = [&](auto& source) {
                return patient ? source.try_allocate(size, 256, until_told(), &why)
                               : source.try_allocate(size, 256, within(50us), &why);
            };
            void* const p = any.one_in(2) ? from(cache) : from(pool);
            if (p == nullptr) {
                if (patient || why.code != errc::deadline_exceeded) failed.fetch_add(1);
                continue;
            }
            if (held.fetch_add(size) + size > 2 * MiB) over.fetch_add(1);
            if (any.one_in(4)) std::this_thread::yield();
            held.fetch_sub(size);
            errc freed = errc::none;
            if (any.one_in(4)) {
                const auto point = stream.record();
                freed = pool.deallocate_after(point, p, size, 256);
                stream.reach(point);
            } else {
                freed = any.one_in(2) ? cache.deallocate(p, size, 256) : pool.deallocate(p, size, 256);
            }
            if (freed != errc::none) failed.fetch_add(1);
        }
    });
    CHECK(failed.load() == 0);
    CHECK(over.load() == 0);
    CHECK(pool.waiting() == 0);
    CHECK(pool.trim(0_B) == 0_B);
    CHECK(c.limit.usage().current == 0_B);
    CHECK(c.upstream.blocks() == 0);
    CHECK(c.upstream.wrong_frees() == 0);
}

}  // namespace

TEST_CASE("threads that wait for a pool and give up at random are all served, and nothing is lost",
          "[memory][pool][waiters][property]") {
    queue_up(4, 150);
}

TEST_CASE("threads that wait for a pool and give up at random, for long", "[.long]") { queue_up(8, 10'000); }

TEST_CASE(
    "threads that wait for memory of a captured graph are served in order, from what comes back there or to the pool",
    "[memory][pool][waiters][private]") {
    support::capped_pool<> c(4_MiB, {.segment = 1_MiB});
    void* all = c.pool.allocate(2 * MiB, 256);
    gpushare::private_pool graph(c.pool, 2_MiB);
    void* const mine = graph.allocate(2 * MiB, 256);
    std::atomic<unsigned> served{0};
    SECTION("the big one first, and nobody overtakes") {
        customer big(graph, 2 * MiB, served, until_told());
        wait_for_line(graph, 1);
        customer small(graph, KiB, served, until_told());
        wait_for_line(graph, 2);
        failure why;
        CHECK(graph.try_allocate(KiB, 256, &why) == nullptr);
        CHECK(why.code == errc::out_of_memory);
        CHECK(graph.deallocate(mine, 2 * MiB, 256) == errc::none);
        CHECK(big.turn() == 1);
        CHECK(small.turn() == 2);
    }
    SECTION("what the pool has again is found") {
        customer one(graph, MiB, served, until_told());
        wait_for_line(graph, 1);
        CHECK(c.pool.deallocate(std::exchange(all, nullptr), 2 * MiB, 256) == errc::none);
        CHECK(one.turn() == 1);
        CHECK(graph.reserved() == 3_MiB);
    }
    SECTION("a deadline, a stop request, a close and what can never be end a wait") {
        failure why;
        CHECK(graph.try_allocate(KiB, 256, within(1ms), &why) == nullptr);
        CHECK(why.code == errc::deadline_exceeded);
        CHECK(why.asked == KiB);
        CHECK(why.limit == 2 * MiB);
        CHECK_THROWS_AS((void)graph.allocate(KiB, 256, within(0ms)), gpushare::memory_error);
        CHECK(graph.try_allocate(5 * MiB, 256, forever(), &why) == nullptr);
        CHECK(why.code == errc::over_quota);
        CHECK(graph.try_allocate(KiB, 3, forever(), &why) == nullptr);
        CHECK(why.code == errc::bad_alignment);
        std::stop_source stop;
        const auto waits = [&](errc expected) {
            return std::jthread([&, expected] {
                const patience until{support::manual_clock{}, gpushare::never, stop.get_token()};
                failure ended;
                if (graph.try_allocate(KiB, 256, until, &ended) == nullptr && ended.code == expected) ++served;
            });
        };
        auto stopped = waits(errc::stopped);
        wait_for_line(graph, 1);
        stop.request_stop();
        stopped.join();
        stop = {};
        auto first = waits(errc::closed), second = waits(errc::closed);
        wait_for_line(graph, 2);
        graph.close();
        first.join(), second.join();
        CHECK(served == 3);
    }
    SECTION("so is who sets memory aside") {
        CHECK(graph.deallocate(mine, 2 * MiB, 256) == errc::none);
        CHECK_THROWS_AS(gpushare::private_pool(c.pool, 1_MiB, within(1ms)), gpushare::memory_error);
        std::jthread waits([&] {
            const gpushare::private_pool other(c.pool, 1_MiB, forever());
            served = other.reserved() == 1_MiB ? 1 : 0;
        });
        wait_for_line(c.pool, 1);
        CHECK(c.pool.deallocate(std::exchange(all, nullptr), 2 * MiB, 256) == errc::none);
        waits.join();
        CHECK(served == 1);
    }
    CHECK(graph.waiting() == 0);
    if (all != nullptr) CHECK(c.pool.deallocate(all, 2 * MiB, 256) == errc::none);
}

}  // namespace pool_wait_test
