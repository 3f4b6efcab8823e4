// SPDX-License-Identifier: Apache-2.0
// A pool in stream order: a block is reused on the same stream at once and without a point,
// elsewhere only when the stream has reached its free, and never sooner.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "support/capped_pool.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"

namespace pool_stream_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::pool_resource;
using gpushare::private_pool;
using support::fault_resource;
using support::manual_point;
using support::manual_stream;

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/// A pool of at most 4 MiB in one segment, and two streams.
struct two_streams : support::capped_pool<manual_point> {
    two_streams() : capped_pool(4_MiB, {.segment = 4_MiB}) {}
    ~two_streams() {
        a.reach_all();
        b.reach_all();
    }

    manual_stream a, b{a, {}};
};

}  // namespace

TEST_CASE("a block freed on a stream is used again there at once, and no point is recorded (rmm 1995)",
          "[memory][pool][stream]") {
    two_streams t;
    auto cache = t.pool.make_cache(t.a);
    void* const p = cache.allocate(64 * KiB, 256);
    for (int i = 0; i < 1'000; ++i) {
        CHECK(cache.deallocate(p, 64 * KiB, 256) == errc::none);
        REQUIRE(cache.allocate(64 * KiB, 256) == p);
    }
    CHECK(t.a.open() == 0);
    CHECK(cache.deallocate(p, 64 * KiB, 256) == errc::none);
    CHECK(t.pool.usage().cached == 64_KiB);
}

TEST_CASE("a block freed on a stream is used elsewhere once the stream reaches the free, and not before",
          "[memory][pool][stream]") {
    two_streams t;
    auto first = t.pool.make_cache(t.a), second = t.pool.make_cache(t.b);
    void* const all = first.allocate(4 * MiB, 256);
    CHECK(first.deallocate(all, 4 * MiB, 256) == errc::none);
    CHECK(second.try_allocate(64 * KiB, 256) == nullptr);  // asks for the point
    CHECK(t.a.open() == 1);
    CHECK(t.pool.try_allocate(64 * KiB, 256) == nullptr);
    CHECK(t.a.open() == 1);  // the same one
    CHECK(t.pool.usage().pending == 4_MiB);
    CHECK(t.pool.usage().reserved == 4_MiB);
    t.a.reach_all();
    CHECK(second.try_allocate(4 * MiB, 256) == all);
    CHECK(second.deallocate(all, 4 * MiB, 256) == errc::none);
}

TEST_CASE("a block that waits for its point can still be used again on its own stream", "[memory][pool][stream]") {
    two_streams t;
    auto mine = t.pool.make_cache(t.a), other = t.pool.make_cache(t.b);
    void* const p = mine.allocate(3 * MiB, 256);
    CHECK(mine.deallocate(p, 3 * MiB, 256) == errc::none);
    CHECK(other.try_allocate(2 * MiB, 256) == nullptr);
    CHECK(t.pool.usage().pending == 3_MiB);
    CHECK(mine.try_allocate(3 * MiB, 256) == p);
    CHECK(t.pool.usage().pending == 0_B);
    t.a.reach_all();  // the block is out: reaching the old point must not free it
    CHECK(other.try_allocate(2 * MiB, 256) == nullptr);
    CHECK(t.pool.usage().used == 3_MiB);
    CHECK(mine.deallocate(p, 3 * MiB, 256) == errc::none);
}

TEST_CASE("many frees share a point", "[memory][pool][stream]") {
    two_streams t;
    auto cache = t.pool.make_cache(t.a);
    std::vector<void*> blocks;
    for (int i = 0; i < 60; ++i) blocks.push_back(cache.allocate(64 * KiB, 256));
    for (auto* p : blocks) CHECK(cache.deallocate(p, 64 * KiB, 256) == errc::none);
    CHECK(t.a.open() == 0);
    cache.flush();
    CHECK(t.a.open() == 1);
    CHECK(t.pool.usage().pending == 60 * 64_KiB);
    CHECK(t.pool.try_allocate(4 * MiB, 256) == nullptr);
    t.a.reach_all();
    void* const all = t.pool.try_allocate(4 * MiB, 256);
    CHECK(all != nullptr);
    CHECK(t.pool.deallocate(all, 4 * MiB, 256) == errc::none);
}

TEST_CASE("blocks that several streams have freed merge when the streams get there (rmm 2039)",
          "[memory][pool][stream]") {
    two_streams t;
    std::vector<manual_stream> streams;
    for (int i = 0; i < 8; ++i) streams.emplace_back(t.a, gpushare::priority{});
    {
        std::vector<decltype(t.pool)::cache> caches;
        for (auto& s : streams) caches.push_back(t.pool.make_cache(s));
        std::vector<void*> blocks;
        for (std::size_t i = 0; i < 64; ++i) blocks.push_back(caches[i % 8].allocate(64 * KiB, 256));
        for (std::size_t i = 0; i < 64; ++i) CHECK(caches[i % 8].deallocate(blocks[i], 64 * KiB, 256) == errc::none);
        CHECK(t.pool.try_allocate(4 * MiB, 256) == nullptr);
        for (auto& s : streams) {
            CHECK(s.open() == 1);
            s.reach_all();
        }
        // One block again, in no stream's hands, and nothing was asked of the upstream for it.
        const auto calls = t.upstream.calls();
        void* const all = t.pool.try_allocate(4 * MiB, 256);
        CHECK(all != nullptr);
        CHECK(t.upstream.calls() == calls);
        CHECK(t.pool.deallocate(all, 4 * MiB, 256) == errc::none);
    }
}

TEST_CASE("a free behind a point of the caller's waits for it", "[memory][pool][stream]") {
    two_streams t;
    void* const p = t.pool.allocate(4 * MiB, 256);
    const auto point = t.b.record();
    CHECK(t.pool.deallocate_after(point, p, 4 * MiB, 128) == errc::wrong_size);
    CHECK(t.pool.deallocate_after(point, p, 4 * MiB, 256) == errc::none);
    CHECK(t.pool.deallocate_after(point, p, 4 * MiB, 256) == errc::unknown_block);
    CHECK(t.pool.deallocate(p, 4 * MiB, 256) == errc::unknown_block);
    CHECK(t.pool.deallocate_after(point, nullptr, 4 * MiB, 256) == errc::none);
    CHECK(t.pool.usage().pending == 4_MiB);
    CHECK(t.pool.try_allocate(1, 256) == nullptr);
    t.b.reach_all();
    CHECK(t.pool.try_allocate(4 * MiB, 256) == p);
    CHECK(t.pool.deallocate_after(point, p, 4 * MiB, 256) == errc::none);  // reached: at once
    CHECK(t.pool.usage().pending == 0_B);
}

TEST_CASE("draining waits for streams until its deadline", "[memory][pool][stream]") {
    two_streams t;
    {
        auto cache = t.pool.make_cache(t.a);
        CHECK(cache.deallocate(cache.allocate(MiB, 256), MiB, 256) == errc::none);
        CHECK_FALSE(t.pool.drain(gpushare::instant{}));
        CHECK(t.pool.usage().pending == 1_MiB);
        t.a.on_wait([&] { std::thread([&] { t.a.reach_all(); }).join(); });
        CHECK(t.pool.drain(gpushare::never));
        CHECK(t.pool.usage().pending == 0_B);
        CHECK(t.pool.trim(0_B) == 0_B);
    }
    t.a.on_wait(nullptr);
}

namespace {

/// A stream whose recording takes as long as the test likes.
struct slow_stream {
    using point = manual_point;
    manual_stream below;
    std::atomic<bool> inside{false}, may_leave{false};

    point record() {
        inside = true;
        while (!may_leave) std::this_thread::yield();
        return below.record();
    }
};
static_assert(gpushare::timeline<slow_stream>);

}  // namespace

TEST_CASE("draining knows of frees whose point is being recorded", "[memory][pool][stream]") {
    support::capped_pool<manual_point> t(4_MiB, {.segment = 4_MiB});
    slow_stream stream;
    auto cache = t.pool.make_cache(stream);
    CHECK(cache.deallocate(cache.allocate(MiB, 256), MiB, 256) == errc::none);
    {
        const std::jthread flusher([&] { cache.flush(); });
        while (!stream.inside) std::this_thread::yield();
        CHECK_FALSE(t.pool.drain(gpushare::instant{}));
        stream.may_leave = true;
    }
    CHECK_FALSE(t.pool.drain(gpushare::instant{}));
    stream.below.reach_all();
    CHECK(t.pool.drain(gpushare::never));
}

TEST_CASE("a stream that can't be recorded on keeps what was freed there, and nothing is lost",
          "[memory][pool][stream]") {
    two_streams t;
    auto cache = t.pool.make_cache(t.a);
    void* const p = cache.allocate(3 * MiB, 256);
    CHECK(cache.deallocate(p, 3 * MiB, 256) == errc::none);
    t.a.fail_next_record();
    CHECK(t.pool.try_allocate(2 * MiB, 256) == nullptr);
    CHECK(t.a.open() == 0);
    CHECK(t.pool.usage().pending == 3_MiB);
    CHECK(cache.try_allocate(3 * MiB, 256) == p);  // its own stream doesn't need a point
    CHECK(cache.deallocate(p, 3 * MiB, 256) == errc::none);
    cache.flush();
    CHECK(t.a.open() == 1);
    t.a.reach_all();
    CHECK(t.pool.trim(0_B) == 0_B);
}

TEST_CASE("a block whose point can't be recorded before its cache ends is never handed out", "[memory][pool][stream]") {
    two_streams t;
    {
        auto cache = t.pool.make_cache(t.a);
        CHECK(cache.deallocate(cache.allocate(3 * MiB, 256), 3 * MiB, 256) == errc::none);
        t.a.fail_next_record();
    }
    CHECK(t.pool.usage().pending == 3_MiB);
    CHECK(t.pool.try_allocate(2 * MiB, 256) == nullptr);
    CHECK(t.pool.trim(0_B) == 3_MiB);
}

TEST_CASE("a cache that ends leaves its frees in stream order", "[memory][pool][stream]") {
    two_streams t;
    {
        auto cache = t.pool.make_cache(t.a);
        CHECK(cache.deallocate(cache.allocate(3 * MiB, 256), 3 * MiB, 256) == errc::none);
    }
    CHECK(t.a.open() == 1);
    auto other = t.pool.make_cache(t.a);  // the same stream, but another worker: it has no claim to them
    CHECK(other.try_allocate(2 * MiB, 256) == nullptr);
    t.a.reach_all();
    CHECK(other.deallocate(other.try_allocate(2 * MiB, 256), 2 * MiB, 256) == errc::none);
    CHECK(t.pool.usage().pending == 0_B);
}

TEST_CASE("random frees on streams are never used elsewhere before their stream gets there",
          "[memory][pool][stream][property]") {
    for (std::uint64_t run = 0; run < 20; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        two_streams t;
        std::array streams{&t.a, &t.b};
        std::optional<decltype(t.pool)::cache> caches[2];
        for (std::size_t i = 0; i < 2; ++i) caches[i].emplace(t.pool.make_cache(*streams[i]));
        struct block {
            std::byte* p;
            std::size_t size, stream;
        };
        struct freed {
            block b;
            manual_point then;  // recorded at the free: the earliest that it may be used elsewhere
        };
        std::vector<block> out;
        std::vector<freed> waiting;
        const auto overlap = [](const block& x, const block& y) { return x.p < y.p + y.size && y.p < x.p + x.size; };
        for (int step = 0; step < 800; ++step) {
            const auto s = any.below(2);
            switch (any.below(8)) {
                case 0: streams[s]->reach_next(); break;
                case 1:
                    if (any.one_in(4)) caches[s]->flush();
                    break;
                case 2:
                case 3:
                case 4:
                    if (!out.empty()) {
                        auto& b = any.of(out);
                        REQUIRE(caches[s]->deallocate(b.p, b.size, 256) == errc::none);
                        waiting.push_back({{b.p, b.size, s}, streams[s]->record()});
                        b = out.back();
                        out.pop_back();
                        break;
                    }
                    [[fallthrough]];
                default:
                    const auto size = 1 + any.below(std::uint64_t{1} << (8 + any.below(13)));
                    auto* const p = static_cast<std::byte*>(caches[s]->try_allocate(size, 256));
                    if (p == nullptr) break;
                    const block fresh{p, size, s};
                    for (const auto& b : out) REQUIRE_FALSE(overlap(b, fresh));
                    for (const auto& f : waiting)
                        if (overlap(f.b, fresh) && f.b.stream != s) REQUIRE(f.then.reached());
                    // From here on the block's next free decides.
                    std::erase_if(waiting, [&](const freed& f) { return overlap(f.b, fresh); });
                    out.push_back(fresh);
            }
            std::erase_if(waiting, [](const freed& f) { return f.then.reached(); });
        }
        t.a.reach_all();
        t.b.reach_all();
        for (const auto& b : out) REQUIRE(caches[b.stream]->deallocate(b.p, b.size, 256) == errc::none);
        for (auto& c : caches) c->flush();
        t.a.reach_all();
        t.b.reach_all();
        REQUIRE(t.pool.trim(0_B) == 0_B);
    }
}

namespace {

/// A point whose end calls out, as one does that holds what a kernel threw.
class talking_point {
public:
    talking_point() = default;
    template <class F>
    explicit talking_point(F at_end) : last_(nullptr, [f = std::move(at_end)](void*) { f(); }), open_(true) {}

    [[nodiscard]] bool reached() const noexcept { return !open_ || asked_->fetch_add(1) > 0; }
    bool wait(gpushare::instant) const { return true; }
    static bool wait_any(std::span<const talking_point>, gpushare::instant) { return true; }
    [[nodiscard]] errc status() const noexcept { return errc::none; }
    [[maybe_unused]] friend gpushare::ns elapsed(const talking_point&, const talking_point&) noexcept { return {}; }

private:
    std::shared_ptr<void> last_;
    bool open_ = false;
    std::shared_ptr<std::atomic<int>> asked_ = std::make_shared<std::atomic<int>>(0);  // reached when asked again
};
static_assert(gpushare::timeline_point<talking_point>);

/// A stream whose recording calls out.
struct talking_stream {
    using point = talking_point;
    std::function<void()> on_record, on_end;

    point record() {
        on_record();
        return point(on_end);
    }
};
static_assert(gpushare::timeline<talking_stream>);

}  // namespace

TEST_CASE("points are recorded and destroyed under no lock: what they call may use the pool",
          "[memory][pool][stream]") {
    fault_resource upstream;
    pool_resource<fault_resource, talking_point> pool(upstream, {.segment = 1_MiB});
    int recorded = 0, ended = 0;
    const auto use = [&] { CHECK(pool.deallocate(pool.allocate(100, 256), 100, 256) == errc::none); };
    talking_stream stream{[&] { ++recorded, use(); }, [&] { ++ended, use(); }};
    auto cache = pool.make_cache(stream);
    CHECK(cache.deallocate(cache.allocate(4096, 256), 4096, 256) == errc::none);
    cache.flush();
    CHECK(recorded == 1);
    (void)pool.trim(0_B);
    CHECK(ended == 1);
}

TEST_CASE("nothing is recorded on a stream that is being captured", "[memory][pool][stream][capture]") {
    two_streams t;
    auto cache = t.pool.make_cache(t.a);
    void* const p = cache.allocate(3 * MiB, 256);
    CHECK(cache.deallocate(p, 3 * MiB, 256) == errc::none);
    {
        const decltype(cache)::pause quiet(cache);
        CHECK(t.pool.try_allocate(2 * MiB, 256) == nullptr);
        CHECK(t.a.open() == 0);
        CHECK(cache.try_allocate(3 * MiB, 256) == p);
        CHECK(cache.deallocate(p, 3 * MiB, 256) == errc::none);
        cache.flush();
        CHECK(t.a.open() == 0);
    }
    CHECK(t.pool.try_allocate(2 * MiB, 256) == nullptr);
    CHECK(t.a.open() == 1);
    t.a.reach_all();
    CHECK(t.pool.trim(0_B) == 0_B);
}

TEST_CASE("a captured graph's memory goes to no other user until the graph is gone",
          "[memory][pool][stream][capture]") {
    two_streams t;
    {
        private_pool graph(t.pool, 1_MiB);
        void* const p = graph.allocate(256 * KiB, 256);
        CHECK(graph.deallocate(p, 256 * KiB, 256) == errc::none);
        CHECK(graph.allocate(256 * KiB, 256) == p);  // used again inside
        CHECK(graph.deallocate(p, 256 * KiB, 256) == errc::none);
        CHECK(graph.reserved() == 1_MiB);
        CHECK(graph.used() == 0_B);
        // Others have the rest and no more, also by force.
        void* const rest = t.pool.try_allocate(3 * MiB, 256);
        CHECK(rest != nullptr);
        CHECK(t.pool.try_allocate(1, 256) == nullptr);
        CHECK(t.pool.trim(0_B) == 4_MiB);
        CHECK(t.pool.deallocate(p, 256 * KiB, 256) != errc::none);
        CHECK(t.pool.deallocate(rest, 3 * MiB, 256) == errc::none);
    }
    CHECK(t.pool.usage().used == 0_B);
    CHECK(t.pool.trim(0_B) == 0_B);
}

TEST_CASE("a captured graph takes more from what the pool holds, but never asks the upstream or a stream",
          "[memory][pool][stream][capture]") {
    two_streams t;
    auto cache = t.pool.make_cache(t.a);
    CHECK(cache.deallocate(cache.allocate(512 * KiB, 256), 512 * KiB, 256) == errc::none);
    private_pool graph(t.pool, 0_B);
    CHECK(graph.reserved() == 256_B);
    const auto calls = t.upstream.calls();
    void* const p = graph.allocate(2 * MiB, 4096);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 4096 == 0);
    gpushare::failure why;
    CHECK(graph.try_allocate(2 * MiB, 256, &why) == nullptr);
    CHECK(why.code == errc::out_of_memory);
    CHECK(why.asked == 2 * MiB);
    CHECK(graph.try_allocate(1, 3, &why) == nullptr);
    CHECK(why.code == errc::bad_alignment);
    CHECK(graph.try_allocate(std::size_t{1} << 50, 1, &why) == nullptr);
    CHECK(why.code == errc::size_overflow);
    CHECK_THROWS_AS((void)graph.allocate(2 * MiB, 256), gpushare::memory_error);
    CHECK(t.upstream.calls() == calls);
    CHECK(t.a.open() == 0);
    CHECK(graph.deallocate(p, 2 * MiB, 256) == errc::wrong_size);
    CHECK(graph.deallocate(&why, 1, 1) == errc::unknown_block);
    CHECK(graph.deallocate(p, 2 * MiB, 4096) == errc::none);
    CHECK(graph.deallocate(p, 2 * MiB, 4096) == errc::unknown_block);
    CHECK(graph.deallocate(nullptr, 0, 1) == errc::none);
    void* const zero = graph.allocate(0, 1);
    CHECK(graph.deallocate(zero, 0, 1) == errc::none);
}

TEST_CASE("a private pool that is closed has nothing set aside", "[memory][pool][capture]") {
    two_streams t;
    private_pool mine(t.pool, 1_MiB);
    (void)mine.allocate(4 * KiB, 256);
    CHECK(mine.used() == 4_KiB);
    mine.close();
    CHECK(mine.reserved() == 0_B);
    CHECK(mine.used() == 0_B);
    CHECK(mine.largest_free() == 0_B);
    CHECK(t.pool.usage().used == 0_B);
}

TEST_CASE("a private pool that can't have its reserve holds nothing", "[memory][pool][capture]") {
    two_streams t;
    CHECK_THROWS_AS(private_pool(t.pool, 5_MiB), gpushare::memory_error);
    CHECK_THROWS_AS(private_pool(t.pool, bytes::max()), gpushare::memory_error);
    CHECK(t.pool.usage().used == 0_B);
}

}  // namespace pool_stream_test
