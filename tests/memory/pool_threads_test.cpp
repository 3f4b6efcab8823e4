// SPDX-License-Identifier: Apache-2.0
// Pools with many threads: blocks that wander between workers, caches that are emptied while their
// owners work, and refusals of impossible requests beside requests that always fit.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "support/capped_pool.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/upstream_answers.hpp"

namespace pool_threads_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::pool_resource;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

struct block {
    std::byte* p = nullptr;
    std::size_t size = 0;
    std::uint64_t mark = 0;  // in its first and last bytes, where it has 16
};

/// Blocks on their way from one thread to any other. What is taken has no pointer where there is
/// none.
class exchange {
public:
    void give(block b) {
        if (b.p == nullptr) return;
        const std::lock_guard lock(mutex_);
        blocks_.push_back(b);
    }
    block take() {
        const std::lock_guard lock(mutex_);
        if (blocks_.empty()) return {};
        const block b = blocks_.back();
        blocks_.pop_back();
        return b;
    }

private:
    std::mutex mutex_;
    std::vector<block> blocks_;
};

/// Writes and checks marks: an overlap of two blocks, or a block in two hands, shows.
void write_mark(const block& b) {
    if (b.size < 16) return;
    std::memcpy(b.p, &b.mark, 8);
    std::memcpy(b.p + b.size - 8, &b.mark, 8);
}
bool mark_is_there(const block& b) {
    if (b.size < 16) return true;
    std::uint64_t first = 0, last = 0;
    std::memcpy(&first, b.p, 8);
    std::memcpy(&last, b.p + b.size - 8, 8);
    return first == b.mark && last == b.mark;
}

struct counters {
    std::atomic<std::uint64_t> wrong{0}, refused{0};
};

/// What a worker does: takes blocks, gives half of them to others, frees those of others, is
/// interrupted anywhere.
template <class Source>
void wander(Source& source, exchange& others, counters& count, std::uint64_t seed, int steps) {
    support::random any(seed);
    std::array<block, 16> mine;
    const auto free = [&](block b) {
        if (b.p == nullptr) return;
        if (!mark_is_there(b)) count.wrong.fetch_add(1);
        if (source.deallocate(b.p, b.size + 1, 256) != errc::wrong_size) count.wrong.fetch_add(1);
        if (source.deallocate(b.p, b.size, 256) != errc::none) count.wrong.fetch_add(1);
    };
    for (int i = 0; i < steps; ++i) {
        auto& slot = any.of(mine);
        if (any.one_in(2))
            others.give(std::exchange(slot, {}));
        else
            free(std::exchange(slot, {}));
        if (any.one_in(2)) free(others.take());
        slot.size = any.below(std::uint64_t{1} << any.below(18));
        slot.p = static_cast<std::byte*>(source.try_allocate(slot.size, 256));
        slot.mark = seed << 32 | static_cast<std::uint64_t>(i);
        if (slot.p == nullptr) {
            count.refused.fetch_add(1);
            continue;
        }
        write_mark(slot);
        if (any.one_in(64)) std::this_thread::yield();
    }
    for (const auto& b : mine) free(b);
}

template <class Pool>
void wind_down(Pool& pool, exchange& others) {
    for (auto b = others.take(); b.p != nullptr; b = others.take())
        CHECK(pool.deallocate(b.p, b.size, 256) == errc::none);
    CHECK(pool.trim(0_B) == 0_B);
    const auto u = pool.usage();
    CHECK(u.used == 0_B);
    CHECK(u.requested == 0_B);
    CHECK(u.cached == 0_B);
}

void stress(int steps) {
    const auto seed = support::seed(31);
    CAPTURE(seed);
    fault_resource upstream;
    quota limit{256_MiB};
    quota_resource mine(limit, upstream);
    counters count;
    exchange others;
    {
        pool_resource pool(mine, {.segment = 1_MiB, .kept = 256_KiB});
        {
            // Trims, refusals of what can't be had, and caches that come and go.
            support::background noise(1, [&](unsigned) {
                (void)pool.trim(2_MiB);
                if (pool.try_allocate(300 * MiB, 256) != nullptr) count.wrong.fetch_add(1);
                auto passing = pool.make_cache();
                void* const p = passing.try_allocate(100 * KiB, 256);
                if (p != nullptr && passing.deallocate(p, 100 * KiB, 256) != errc::none) count.wrong.fetch_add(1);
                const auto u = pool.usage();
                if (u.used + u.cached + u.pending > u.reserved) count.wrong.fetch_add(1);
            });
            support::together(4, [&](unsigned rank) {
                if (rank == 0) return wander(pool, others, count, seed + rank, steps);
                auto cache = pool.make_cache();
                wander(cache, others, count, seed + rank, steps);
            });
        }
        CHECK(count.wrong.load() == 0);
        CHECK(count.refused.load() == 0);
        wind_down(pool, others);
    }
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
    CHECK(limit.usage().current == 0_B);
}

/// Lets its first caller wait, with the memory in its hands.
struct slow_upstream : support::upstream_answers {
    explicit slow_upstream(quota_resource<fault_resource>& below) : from(below) {}
    quota_resource<fault_resource>& from;
    std::atomic<bool> asked{false};

    void* try_allocate(std::size_t size, std::size_t alignment, gpushare::failure* why) noexcept {
        void* const p = from.try_allocate(size, alignment, why);
        if (!asked.exchange(true)) std::this_thread::sleep_for(std::chrono::milliseconds{30});
        return p;
    }
    void* allocate(std::size_t size, std::size_t alignment) { return from.allocate(size, alignment); }
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        return from.deallocate(p, size, alignment);
    }
    [[nodiscard]] gpushare::bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return from.charged(size, alignment);
    }
};

/// Asks for what fits over and over. Returns how often it was refused.
template <class Source>
std::uint64_t count_refusals(Source& source, std::size_t size, int times) {
    std::uint64_t refused = 0;
    for (int i = 0; i < times; ++i) {
        void* const p = source.try_allocate(size, 256);
        if (p == nullptr || source.deallocate(p, size, 256) != errc::none) ++refused;
    }
    return refused;
}

}  // namespace

TEST_CASE("blocks move between workers, and none is ever allocated twice", "[memory][pool][threads]") { stress(4'000); }

TEST_CASE("blocks wander between workers, for long", "[.long]") { stress(300'000); }

TEST_CASE("a block freed by two threads at once is freed once (rmm 2303)", "[memory][pool][threads]") {
    fault_resource upstream;
    pool_resource pool(upstream, {.segment = 1_MiB});
    constexpr int rounds = 2'000;
    std::vector<void*> blocks;
    for (int i = 0; i < rounds; ++i) blocks.push_back(pool.allocate(512, 256));
    std::atomic<int> freed{0};
    support::together(3, [&](unsigned) {
        auto cache = pool.make_cache();
        for (auto* p : blocks)
            if (cache.deallocate(p, 512, 256) == errc::none) freed.fetch_add(1);
    });
    CHECK(freed.load() == rounds);
    CHECK(pool.trim(0_B) == 0_B);
}

TEST_CASE("a pool is never said to use more than it holds while blocks wander", "[memory][pool][threads]") {
    support::capped_pool<> c(8_MiB, {.segment = 1_MiB});
    // A reading looks at one cache after the other. The block goes from the first to the last and
    // back.
    std::vector<decltype(c.pool.make_cache())> caches;
    for (int i = 0; i < 16; ++i) caches.push_back(c.pool.make_cache());
    auto &first = caches.front(), &last = caches.back();
    support::background wanders(1, [&](unsigned) {
        last.deallocate(first.allocate(4096, 256), 4096, 256);
        first.deallocate(last.allocate(4096, 256), 4096, 256);
    });
    std::size_t wrong = 0;
    for (int i = 0; i < 20'000; ++i) {
        const auto now = c.pool.usage();
        if (now.used > now.reserved) ++wrong;
    }
    CHECK(wrong == 0);
}

TEST_CASE("a request that fits is granted while others ask for what can never be had", "[memory][pool][attack]") {
    const auto segment = GENERATE(64_KiB, 1_MiB, 4_MiB);
    CAPTURE(segment.count());
    support::capped_pool<> c(4_MiB, {.segment = segment});
    auto cache = c.pool.make_cache();
    {
        support::background doomed(2, [&](unsigned) {
            if (c.pool.try_allocate(4 * MiB + 1, 256) != nullptr) std::abort();
        });
        for (const std::size_t size : {std::size_t{100}, 64 * KiB, MiB, 3 * MiB, 4 * MiB}) {
            CAPTURE(size);
            CHECK(count_refusals(cache, size, 300) == 0);
            CHECK(count_refusals(c.pool, size, 300) == 0);
        }
    }
    CHECK(c.limit.usage().peak <= 4_MiB);
    CHECK(c.pool.trim(0_B) == 0_B);
}

TEST_CASE("a request never misses memory that a sleeping worker has freed", "[memory][pool][attack]") {
    // Two workers in turn need the whole pool, which the other one has just put into its cache.
    support::capped_pool<> c(4_MiB, {.segment = 4_MiB});
    std::atomic<int> turn{0};
    std::atomic<int> refused{0};
    support::together(2, [&](unsigned rank) {
        auto cache = c.pool.make_cache();
        for (int i = 0; i < 300; ++i) {
            while (turn.load() % 2 != static_cast<int>(rank)) std::this_thread::yield();
            std::array<void*, 8> parts{};
            for (auto& p : parts) p = cache.try_allocate(512 * KiB, 256);
            refused += static_cast<int>(std::ranges::count(parts, nullptr));
            for (auto* p : parts) cache.deallocate(p, 512 * KiB, 256);
            turn.fetch_add(1);
        }
    });
    CHECK(refused.load() == 0);
    CHECK(c.pool.trim(0_B) == 0_B);
}

TEST_CASE("memory on its way back to the upstream is waited for, not missed", "[memory][pool][attack]") {
    support::capped_pool<> c(4_MiB, {.segment = 4_MiB});
    CHECK(c.pool.deallocate(c.pool.allocate(MiB, 256), MiB, 256) == errc::none);
    std::atomic<bool> on_its_way{false};
    c.upstream.on_deallocate = [&] {
        on_its_way = true;
        std::this_thread::sleep_for(std::chrono::milliseconds{30});
    };
    std::jthread trimming([&] { (void)c.pool.trim(0_B); });
    while (!on_its_way) std::this_thread::yield();
    void* const all = c.pool.try_allocate(4 * MiB, 256);
    CHECK(all != nullptr);
    trimming.join();
    c.upstream.on_deallocate = nullptr;
    CHECK(c.pool.deallocate(all, 4 * MiB, 256) == errc::none);
}

TEST_CASE("memory on its way from the upstream is waited for, not missed", "[memory][pool][attack]") {
    // One thread gets a segment for a small request, slowly; what is left of it suffices another
    // one meanwhile.
    fault_resource upstream;
    quota limit{4_MiB};
    quota_resource mine(limit, upstream);
    slow_upstream slow{mine};
    pool_resource pool(slow, {.segment = 4_MiB});
    void* small = nullptr;
    std::jthread first([&] { small = pool.try_allocate(MiB, 256); });
    while (!slow.asked) std::this_thread::yield();
    CHECK(pool.try_allocate(3 * MiB, 256) != nullptr);
    first.join();
    CHECK(small != nullptr);
}

TEST_CASE("workers with streams, and a device that gets on while they allocate", "[memory][pool][threads][stream]") {
    const auto seed = support::seed(32);
    CAPTURE(seed);
    fault_resource upstream;
    {
        pool_resource<fault_resource, support::manual_point> pool(upstream, {.segment = 1_MiB, .kept = 128_KiB});
        support::manual_stream a, b(a, {});
        std::array streams{&a, &b};
        counters count;
        exchange others;
        {
            support::background device(1, [&](unsigned) {
                a.reach_next();
                b.reach_next();
                (void)pool.trim(4_MiB);
            });
            support::together(2, [&](unsigned rank) {
                auto cache = pool.make_cache(*streams[rank]);
                wander(cache, others, count, seed + rank, 3'000);
            });
        }
        a.reach_all();
        b.reach_all();
        CHECK(count.wrong.load() == 0);
        wind_down(pool, others);
    }
    CHECK(upstream.blocks() == 0);
}

namespace {

/// What the points of a busy device share: the first question is answered no, and who asks again
/// waits for the answer.
struct slow_answer {
    std::atomic<unsigned> questions{0};
    std::atomic<bool> known{false}, gave_up{false};

    [[nodiscard]] bool ask() noexcept {
        if (questions.fetch_add(1) == 0) return false;
        const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(5);
        while (!known && !gave_up) {
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() > end) gave_up = true;
        }
        return true;
    }
};

struct slow_stream {
    struct point {
        slow_answer* answer = nullptr;

        [[nodiscard]] bool reached() const noexcept { return answer == nullptr || answer->ask(); }
        bool wait(gpushare::instant) const { return reached(); }
        static bool wait_any(std::span<const point> points, gpushare::instant) { return points.front().reached(); }
        [[nodiscard]] errc status() const noexcept { return errc::none; }
        [[maybe_unused]] friend gpushare::ns elapsed(const point&, const point&) noexcept { return {}; }
    };
    point record() { return {}; }
};
static_assert(gpushare::timeline<slow_stream>);

}  // namespace

TEST_CASE("32 streams allocate and free while somebody holds the pool's lock (rmm 1887)", "[memory][pool][threads]") {
    fault_resource upstream;
    pool_resource<fault_resource, slow_stream::point> pool(upstream);
    std::array<slow_stream, 32> streams;
    std::vector<decltype(pool)::cache> caches;
    for (auto& s : streams) caches.push_back(pool.make_cache(s));
    for (auto& c : caches) CHECK(c.deallocate(c.allocate(64 * KiB, 256), 64 * KiB, 256) == errc::none);
    auto sorter = pool.make_cache();
    slow_answer answer;
    CHECK(pool.deallocate_after({&answer}, pool.allocate(KiB, 256), KiB, 256) == errc::none);
    std::jthread holds([&] { sorter.flush(); });  // looks whether the point is reached, under the lock
    while (answer.questions < 2) std::this_thread::yield();
    std::size_t done = 0;
    for (int round = 0; round < 100; ++round)
        for (auto& c : caches)
            if (void* const p = c.try_allocate(64 * KiB, 256))
                done += c.deallocate(p, 64 * KiB, 256) == errc::none ? 1U : 0U;
    CHECK_FALSE(answer.gave_up);  // nobody had to wait for it
    answer.known = true;
    holds.join();
    CHECK(done == 3'200);
    CHECK(pool.usage().used == 0_B);
}

}  // namespace pool_threads_test
