// SPDX-License-Identifier: Apache-2.0
// Pages of KV caches: fixed addresses, memory that follows the load, all or nothing, and exact
// under attack.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/serving/page_store.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace page_store_test {
namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::reclaim_request;
using support::arena_rig;
using support::painted;

using store = gpushare::page_store<arena_rig::memory_type, support::manual_scrubber>;
using pages = std::vector<std::uint32_t>;

/// Four pages of 4 KiB in a chunk of 16 KiB.
gpushare::page_options small(std::uint32_t most = 64) {
    return {.lanes = 4, .token = 64_B, .tokens = 16, .pages = most};
}

pages take(store& s, std::size_t n) {
    pages p(n);
    s.allocate(p);
    return p;
}
errc refusal(store& s, std::size_t n, instant deadline = {}) {
    pages p(n);
    return s.try_allocate(p, deadline).code;
}
void fill(store& s, std::uint32_t page, int value) { support::paint(s.address(page), s.page_stride(), value); }

}  // namespace

TEST_CASE("a page has all lanes side by side, and stays where it is", "[serving]") {
    arena_rig rig;
    store cache(rig.pool, rig.chat, {1}, small(), "chat");
    CHECK(cache.lane_stride() == 1_KiB);
    CHECK(cache.page_stride() == 4_KiB);
    CHECK(cache.pages_per_slab() == 4);
    CHECK(rig.chat.usage().current == 0_B);
    auto first = take(cache, 3);
    CHECK(rig.chat.usage().current == rig.chunk);
    CHECK(cache.usage().committed == rig.chunk);
    for (const auto p : first) {
        CHECK(painted(cache.address(p), 4_KiB, 0));
        fill(cache, p, static_cast<int>(p + 1));
        CHECK(cache.address(p) == support::advanced(cache.data(), 4_KiB * p));
        CHECK(cache.address(p, 3) == support::advanced(cache.address(p), 3_KiB));
    }
    (void)take(cache, 20);
    for (const auto p : first) CHECK(painted(cache.address(p), 4_KiB, static_cast<int>(p + 1)));
    CHECK(cache.usage().out == 23);
    CHECK(cache.usage().free == 1);
    CHECK(rig.chat.usage().current == rig.chunks(6));
}

TEST_CASE("a page larger than a chunk takes several, and none is split", "[serving]") {
    arena_rig rig;
    store cache(rig.pool, rig.chat, {1}, {.lanes = 36, .token = 32_B, .tokens = 32, .pages = 4}, "chat");
    CHECK(cache.page_stride() == 36_KiB);
    CHECK(cache.pages_per_slab() == 1);
    CHECK(cache.slab_stride() == rig.chunks(3));
    const auto p = take(cache, 4);
    CHECK(rig.chat.usage().current == rig.chunks(12));
    for (const auto page : p) fill(cache, page, static_cast<int>(page + 1));
    for (const auto page : p) CHECK(painted(cache.address(page), 36_KiB, static_cast<int>(page + 1)));
}

TEST_CASE("an allocation of pages is all or nothing", "[serving]") {
    arena_rig rig;
    store cache(rig.pool, rig.chat, {1}, small(), "chat");
    const auto first = take(cache, 2);
    pages more(47, 99);
    // 12 chunks of 4 pages: 46 are left.
    const auto why = cache.try_allocate(more);
    CHECK(why.code == errc::over_quota);
    CHECK(std::ranges::count(more, 99U) == 47);
    CHECK(rig.chat.usage().current == rig.chunk);
    CHECK(cache.usage().out == 2);
    // Also where the driver fails half way.
    rig.memory.fail(support::vm_call::map, 3);
    CHECK(refusal(cache, 40) != errc::none);
    rig.pool.collect();
    CHECK(rig.chat.usage().current == rig.chunk);
    CHECK(cache.usage().free == 2);
    CHECK(take(cache, 46).size() == 46);
    CHECK(rig.chat.usage().current == rig.chunks(12));
    CHECK(refusal(cache, 1) == errc::over_quota);
    CHECK(support::code_of([&] { (void)take(cache, 1); }) == errc::over_quota);
    CHECK(cache.free(first) == errc::none);
    CHECK(take(cache, 2).size() == 2);
}

TEST_CASE("pages that are freed wrongly change nothing", "[serving]") {
    arena_rig rig;
    store cache(rig.pool, rig.chat, {1}, small(), "chat");
    auto p = take(cache, 4);
    CHECK(cache.free(pages{p[0], 63}) == errc::unknown_block);
    CHECK(cache.free(pages{p[0], p[1], p[0]}) == errc::unknown_block);
    CHECK(cache.free(pages{1000000}) == errc::unknown_block);
    CHECK(cache.usage().out == 4);
    CHECK(cache.free(p) == errc::none);
    CHECK(cache.free(p) == errc::unknown_block);
    CHECK(cache.usage().out == 0);
    CHECK(cache.usage().free == 4);
}

TEST_CASE("a page isn't reused before its stream is done with it", "[serving]") {
    arena_rig rig;
    store cache(rig.pool, rig.chat, {1}, small(4), "chat");
    const auto p = take(cache, 4);
    const auto first = rig.kernels.record(), second = rig.kernels.record();
    CHECK(cache.free(std::span(p).first(2), first) == errc::none);
    CHECK(cache.free(std::span(p).subspan(2), second) == errc::none);
    CHECK(cache.usage().pending == 4);
    CHECK(refusal(cache, 1) == errc::over_quota);
    CHECK(cache.trim() == 0_B);
    rig.kernels.reach_next();
    CHECK(refusal(cache, 3) == errc::over_quota);
    CHECK(take(cache, 2) == pages{p[0], p[1]});
    rig.kernels.reach_next();
    CHECK(cache.collect());
    CHECK(cache.usage().free == 2);
}

TEST_CASE("a store at its cap waits for pages that were freed", "[serving]") {
    arena_rig rig;
    store cache(rig.pool, rig.chat, {1}, small(4), "chat");
    auto p = take(cache, 4);
    CHECK(cache.free(p, rig.kernels.record()) == errc::none);
    CHECK(refusal(cache, 1) == errc::over_quota);  // doesn't wait
    rig.work_by_itself();
    CHECK(refusal(cache, 1, never) == errc::none);
    CHECK(cache.free(take(cache, 3), rig.kernels.record()) == errc::none);
    pages two(2);
    const gpushare::patience until{gpushare::host::steady_clock{}, gpushare::host::steady_clock{}.now() + 5min};
    CHECK(cache.try_allocate(two, until).code == errc::none);
}

TEST_CASE("a call waits for what another brings only where that gives up no later", "[serving]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    std::atomic<bool> asked{false}, go{false};
    store cache(rig.pool, rig.chat, {1}, small(4), "chat");
    auto eater = rig.arena(rig.code, 2), mine = rig.arena(rig.chat, 1);
    mine.commit(0_B, rig.chunks(8));
    gpushare::quota_hook slow(rig.chat, 9, [&](const reclaim_request&) {
        asked = true;
        while (!go) std::this_thread::yield();
        (void)mine.try_decommit(0_B, rig.chunks(8), {}, instant{});
        return rig.chunks(8);
    });
    eater.commit(0_B, rig.chunks(8));
    std::atomic<errc> first{errc::closed}, second{errc::closed};
    std::jthread brings([&] { first = refusal(cache, 1, never); });
    while (!asked) std::this_thread::yield();
    CHECK(refusal(cache, 1) == errc::over_quota);  // not now
    std::jthread waits([&] { second = refusal(cache, 1, never); });
    go = true;
    waits.join();
    brings.join();
    CHECK(first == errc::none);
    CHECK(second == errc::none);
}

TEST_CASE("memory in no page is given back, but for the floor", "[serving]") {
    arena_rig rig;
    auto o = small();
    o.floor = 8;
    store cache(rig.pool, rig.chat, {1}, o, "chat");
    const auto p = take(cache, 40);
    CHECK(cache.trim() == 0_B);
    // Every fourth stays: nothing to give back.
    for (std::size_t i = 0; i < p.size(); ++i)
        if (i % 4 != 0) CHECK(cache.free(std::span(p).subspan(i, 1)) == errc::none);
    CHECK(cache.trim() == 0_B);
    for (std::size_t i = 0; i < p.size(); i += 4) CHECK(cache.free(std::span(p).subspan(i, 1)) == errc::none);
    CHECK(cache.trim(17) == rig.chunks(5));
    CHECK(cache.trim() == rig.chunks(3));
    CHECK(rig.chat.usage().current == rig.chunks(2));
    CHECK(cache.usage().given_back == rig.chunks(8));
    cache.set_limits(0, 4);
    CHECK(cache.trim() == rig.chunks(2));
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(refusal(cache, 5) == errc::over_quota);
    CHECK(take(cache, 4).size() == 4);
}

TEST_CASE("a store never has more pages than it was made with, whatever its limits are set to", "[serving]") {
    arena_rig rig;
    // A slab is more than they need.
    constexpr std::uint32_t made_with = 10;
    store cache(rig.pool, rig.chat, {1}, small(made_with), "chat");
    REQUIRE(made_with % cache.pages_per_slab() != 0);
    for (const std::uint32_t most : {1000U, ~0U, 3U, made_with, 11U}) {
        cache.set_limits(0, most);
        const auto have = std::min(most, made_with);
        CHECK(refusal(cache, have + 1) == errc::over_quota);
        const auto p = take(cache, have);
        CHECK(p.size() == have);
        CHECK(cache.free(p) == errc::none);
    }
}

TEST_CASE("an idle tenant's memory goes to the tenant that needs it, and only spare memory is called back",
          "[serving]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    pages kept, cached;
    auto o = small();
    store* idle = nullptr;
    std::vector<std::uint32_t> asked;
    o.evict = [&](const reclaim_request& r, std::uint32_t n) {
        CHECK_FALSE(r.own);
        asked.push_back(n);
        if (cached.size() < n) return;
        CHECK(idle->free(std::span(cached).first(n)) == errc::none);
        cached.erase(cached.begin(), cached.begin() + n);
    };
    store chat(rig.pool, rig.chat, {1}, o, "chat"), code(rig.pool, rig.code, {2}, small(), "code");
    idle = &chat;
    // All that chat may have: 4 chunks guaranteed, 8 lent.
    cached = take(chat, 24);
    const auto empty = take(chat, 24);
    CHECK(chat.free(empty) == errc::none);
    CHECK(rig.chat.usage().current == rig.chunks(12));
    // Without a page: given without a question. 4 chunks are code's own, 2 more are lent.
    auto mine = take(code, 24);
    CHECK(asked.empty());
    CHECK(rig.chat.usage().current == rig.chunks(10));
    CHECK(rig.code.usage().current == rig.chunks(6));
    auto more = take(code, 16);  // 4 of these are without a page
    CHECK(asked.empty());
    CHECK(rig.chat.usage().current == rig.chunks(6));
    more = take(code, 8);
    CHECK(asked == std::vector<std::uint32_t>{8});
    CHECK(cached.size() == 16);
    CHECK(rig.chat.usage().current == rig.chunks(4));
    // What is guaranteed isn't asked for.
    CHECK(refusal(code, 4) == errc::over_quota);
    CHECK(asked.size() == 1);
}

TEST_CASE("pages that a stream still uses are waited for until the deadline of who needs them", "[serving]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    auto o = small();
    store* idle = nullptr;
    pages cached;
    std::optional<support::manual_point> still;
    o.evict = [&](const reclaim_request&, std::uint32_t n) {
        still = rig.kernels.record();
        CHECK(idle->free(std::span(cached).first(n), *still) == errc::none);
        cached.erase(cached.begin(), cached.begin() + n);
    };
    store chat(rig.pool, rig.chat, {1}, o, "chat"), code(rig.pool, rig.code, {2}, small(), "code");
    idle = &chat;
    cached = take(chat, 48);
    (void)take(code, 16);
    CHECK(refusal(code, 4) == errc::out_of_memory);  // doesn't wait
    CHECK(cached.size() == 44);
    rig.kernels.reach_all();
    (void)take(code, 4);
    rig.work_by_itself();
    CHECK(refusal(code, 4, instant{1ms}) == errc::none);
    CHECK(rig.code.usage().current == rig.chunks(6));
}

TEST_CASE("pages that are enough are given at once, though others' stream isn't there yet", "[serving]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    auto o = small();
    store* idle = nullptr;
    pages cached;
    o.evict = [&](const reclaim_request&, std::uint32_t n) {
        CHECK(idle->free(std::span(cached).last(n)) == errc::none);  // of no stream: free at once
        cached.resize(cached.size() - n);
    };
    store chat(rig.pool, rig.chat, {1}, o, "chat"), code(rig.pool, rig.code, {2}, small(), "code");
    idle = &chat;
    cached = take(chat, 48);
    (void)take(code, 16);
    const auto long_work = rig.kernels.record();
    CHECK(chat.free(std::span(cached).first(4), long_work) == errc::none);
    cached.erase(cached.begin(), cached.begin() + 4);
    rig.kernels.on_wait([&] {  // what is waited for with nothing to scrub is that work
        if (!rig.scrubber.reach_next()) rig.kernels.reach_all();
    });
    CHECK(refusal(code, 4, instant{1ms}) == errc::none);
    CHECK_FALSE(long_work.reached());
}

TEST_CASE("a wait for memory ends with pages that another thread frees", "[serving]") {
    arena_rig rig;
    store cache(rig.pool, rig.chat, {1}, small(), "chat");
    const auto p = take(cache, 48);
    const gpushare::patience until{gpushare::host::steady_clock{}, gpushare::host::steady_clock{}.now() + 5min};
    std::atomic<bool> got{false};
    pages mine(3);
    {
        std::jthread waiter([&] { got = cache.try_allocate(mine, until).code == errc::none; });
        while (rig.chat.usage().waiting == 0) std::this_thread::yield();
        // One of each slab: no chunk can be given back, and no byte of the quota is free.
        CHECK(cache.free(pages{p[0], p[4], p[8]}) == errc::none);
    }
    CHECK(got);
    CHECK(until.time.now() < until.deadline);  // at its deadline it would have found them anyway
    CHECK(mine == pages{p[0], p[4], p[8]});
    CHECK(rig.chat.usage().current == rig.chunks(12));
    // And stopped, or late, it has none.
    const gpushare::patience late{gpushare::host::steady_clock{}, gpushare::host::steady_clock{}.now()};
    CHECK(cache.try_allocate(mine, late).code == errc::deadline_exceeded);
    std::stop_source stop;
    stop.request_stop();
    const gpushare::patience stopped{gpushare::host::steady_clock{}, never, stop.get_token()};
    CHECK(cache.try_allocate(mine, stopped).code == errc::stopped);
}

TEST_CASE("a store closes with its quota, behind the work that uses its pages", "[serving]") {
    arena_rig rig;
    std::optional<store> cache(std::in_place, rig.pool, rig.chat, gpushare::tenant_tag{1}, small(), "chat");
    const auto p = take(*cache, 8);
    const auto busy = rig.kernels.record();
    CHECK(cache->free(p, busy) == errc::none);
    CHECK_FALSE(rig.chat.close(instant{}));
    CHECK(rig.chat.usage().current == rig.chunks(2));  // a kernel may still write there
    CHECK(refusal(*cache, 1) == errc::closed);
    rig.kernels.reach_all();
    CHECK(rig.chat.close(never));
    CHECK(rig.chat.usage().current == 0_B);
    cache.reset();
    // And one that just ends.
    cache.emplace(rig.pool, rig.code, gpushare::tenant_tag{2}, small(), "code");
    const auto q = take(*cache, 8);
    CHECK(cache->free(q, rig.kernels.record()) == errc::none);
    cache.reset();
    rig.pool.collect();
    CHECK(rig.code.usage().current == rig.chunks(2));
    rig.kernels.reach_all();
    rig.pool.collect();
    CHECK(rig.code.usage().current == 0_B);
}

TEST_CASE("options without a page are refused", "[serving]") {
    arena_rig rig;
    const auto code = [&](const gpushare::page_options& o) {
        return support::code_of([&] { store s(rig.pool, rig.chat, {1}, o); });
    };
    CHECK(code({.token = 0_B, .pages = 4}) == errc::invalid_specification);
    CHECK(code({.token = 64_B, .pages = 0}) == errc::invalid_specification);
    CHECK(code({.lanes = 0, .token = 64_B, .pages = 4}) == errc::invalid_specification);
    CHECK(code({.lanes = ~0U, .token = bytes::max(), .pages = 4}) == errc::invalid_specification);
}

TEST_CASE("two tenants with bursts that alternate each get all memory in turn", "[serving]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    store chat(rig.pool, rig.chat, {1}, small(), "chat"), code(rig.pool, rig.code, {2}, small(), "code");
    for (int round = 0; round < 6; ++round) {
        auto& busy = round % 2 == 0 ? chat : code;
        const auto p = take(busy, 48);  // 12 chunks of 16; a static split would have 8
        for (const auto page : p) {
            // Zeros, or what it had there itself two rounds ago: never what the other one had.
            CHECK((painted(busy.address(page), 4_KiB, 0) || painted(busy.address(page), 4_KiB, round - 1)));
            fill(busy, page, round + 1);
        }
        CHECK(busy.free(p) == errc::none);
        CHECK(rig.chat.usage().current + rig.code.usage().current <= rig.chunks(16));
    }
    CHECK(chat.trim() + code.trim() == rig.chunks(16));
    CHECK(rig.chat.usage().current + rig.code.usage().current == 0_B);
    CHECK(rig.whole.usage().current == rig.chunks(8));  // the guarantees
}

TEST_CASE("exact under attack: threads, two stores, requests that can't fit", "[serving]") {
    const int rounds = 300;
    const auto seed = support::seed(1);
    CAPTURE(seed);
    arena_rig rig;
    rig.scrubber.by_itself();
    store chat(rig.pool, rig.chat, {1}, small(), "chat"), code(rig.pool, rig.code, {2}, small(), "code");
    const std::array stores{&chat, &code};
    std::atomic<int> wrong{0}, got{0}, over{0};
    std::atomic<bool> done{false};
    std::thread attacker([&] {  // more than anybody may have
        pages all(64);
        while (!done) {
            for (auto* s : stores)
                if (s->try_allocate(all).code == errc::none) ++wrong;
            if (rig.chat.usage().current > rig.chunks(12) || rig.code.usage().current > rig.chunks(12)) ++over;
        }
    });
    support::together(4, [&](unsigned rank) {
        support::random any(seed + rank);
        auto& s = *stores[rank % 2];
        std::vector<pages> mine;
        for (int round = 0; round < rounds; ++round) {
            if (any.one_in(2) && mine.size() < 4) {
                pages p(1 + any.below(5));
                if (s.try_allocate(p).code != errc::none) continue;
                ++got;
                for (const auto page : p) fill(s, page, static_cast<int>(rank + 1));
                mine.push_back(std::move(p));
            } else if (!mine.empty()) {
                const auto at = any.below(mine.size());
                for (const auto page : mine[at])
                    if (!painted(s.address(page), s.page_stride(), static_cast<int>(rank + 1))) ++wrong;
                if (s.free(mine[at]) != errc::none) ++wrong;
                mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(at));
            }
            if (any.one_in(16)) (void)s.trim();
        }
        for (const auto& p : mine)
            if (s.free(p) != errc::none) ++wrong;
    });
    done = true;
    attacker.join();
    CHECK(wrong == 0);
    CHECK(over == 0);
    CHECK(got > 0);
    for (auto* s : stores) {
        CHECK(s->usage().out == 0);
        CHECK(s->usage().free == s->usage().committed / 4_KiB);
        (void)s->trim();
        CHECK(s->usage().committed == 0_B);
    }
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(rig.code.usage().current == 0_B);
}

// ---- the book alone

TEST_CASE("the book of pages takes from the lowest slab, and lets the highest go", "[serving]") {
    gpushare::detail::page_book book(3, 4);
    pages two(2), four(4);
    CHECK_FALSE(book.take(two));
    CHECK(book.plan(13).empty());
    const auto first = book.plan(4);
    CHECK(first == pages{0, 1});
    CHECK(book.plan(7).empty());  // two are arriving
    for (const auto s : first) book.landed(s);
    CHECK(book.take(four));
    CHECK(four == pages{0, 1, 2, 3});
    CHECK(book.begin_leaving(0) == book.slabs());
    CHECK(book.leave(3));
    CHECK_FALSE(book.leave(3));
    CHECK(book.begin_leaving(0) == book.slabs());  // its stream isn't there yet
    book.put(3);
    CHECK(book.begin_leaving(2) == book.slabs());
    CHECK(book.begin_leaving(1) == 1);
    CHECK(book.free() == 0);
    book.stays(1);
    CHECK(book.free() == 3);
    CHECK(book.begin_leaving(0) == 1);
    book.left(1);
    CHECK(book.plan(1) == pages{1});
    book.fell_through(1);
    CHECK(book.plan(9) == pages{1, 2, 3});
}

TEST_CASE("the book of pages agrees with a plain one", "[serving]") {
    for (std::uint64_t run = 0; run < 100; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        const auto per = static_cast<std::uint32_t>(1 + any.below(7)),
                   slabs = static_cast<std::uint32_t>(1 + any.below(40));
        gpushare::detail::page_book book(per, slabs);
        std::set<std::uint32_t> there, out, left;
        for (int step = 0; step < 300; ++step) {
            switch (any.below(5)) {
                case 0: {
                    for (const auto s : book.plan(static_cast<std::uint32_t>(any.below(3 * per)))) {
                        CHECK_FALSE(there.contains(s));
                        if (any.one_in(4))
                            book.fell_through(s);
                        else {
                            book.landed(s);
                            there.insert(s);
                        }
                    }
                    break;
                }
                case 1: {
                    pages p(any.below(3 * per));
                    const bool fits = p.size() <= there.size() * per - out.size() - left.size();
                    CHECK(book.take(p) == fits);
                    if (!fits) break;
                    for (const auto page : p) {
                        CHECK(there.contains(page / per));
                        CHECK_FALSE(left.contains(page));
                        CHECK(out.insert(page).second);
                    }
                    break;
                }
                case 2: {
                    const auto page = static_cast<std::uint32_t>(any.below(per * slabs + 3));
                    const bool was = out.erase(page) == 1;
                    CHECK(book.leave(page) == was);
                    if (was) left.insert(page);
                    break;
                }
                case 3: {
                    for (const auto page : left) book.put(page);
                    left.clear();
                    break;
                }
                default: {
                    const auto keep = any.below(4);
                    const auto s = book.begin_leaving(static_cast<std::uint32_t>(keep));
                    if (s == slabs) break;
                    CHECK(there.size() > keep);
                    for (const auto page : out) CHECK(page / per != s);
                    for (const auto page : left) CHECK(page / per != s);
                    if (any.one_in(4))
                        book.stays(s);
                    else {
                        book.left(s);
                        CHECK(there.erase(s) == 1);
                    }
                }
            }
            CHECK(book.out() == out.size());
            for (std::uint32_t s = 0; s < slabs; ++s)
                CHECK((book.stage(s) == gpushare::detail::slab_stage::there) == there.contains(s));
            CHECK(book.free() == there.size() * per - out.size() - left.size());
        }
    }
}

}  // namespace page_store_test
