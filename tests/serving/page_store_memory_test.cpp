// SPDX-License-Identifier: Apache-2.0
// Pages come back where the host has no memory.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/serving/page_store.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/manual_timeline.hpp"

namespace page_store_memory_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using support::arena_rig;
using support::this_heap;

TEST_CASE("pages are given back one by one where the host has no memory", "[serving]") {
    arena_rig rig;
    gpushare::page_store<arena_rig::memory_type, support::manual_scrubber> cache(
        rig.pool, rig.chat, {1}, {.lanes = 4, .token = 64_B, .tokens = 16, .pages = 64}, "chat");
    std::uint32_t none = 0;
    support::manual_stream work;
    const auto free = [&](std::span<const std::uint32_t> pages, const auto&... after) {
        this_heap = {.good = 0, .recovers = false};
        const auto code = cache.free(pages, after...);
        this_heap = {};
        return code;
    };
    CHECK(free({&none, 1}) == errc::unknown_block);  // of a store that never had any
    for (int round = 0; round < 3; ++round) {
        std::vector<std::uint32_t> pages(48);
        cache.allocate(std::span(pages).first(20));
        cache.allocate(std::span(pages).subspan(20));
        work.enqueue(1us);
        const auto after = work.record();  // not reached: each page is a batch of its own until it is
        for (const auto& p : pages) CHECK(free({&p, 1}, after) == errc::none);
        CHECK(free({&pages[0], 1}, after) == errc::unknown_block);  // again
        CHECK(free({}, after) == errc::none);
        CHECK(cache.usage().pending == 48);
        work.reach_all();
        (void)cache.collect();
        CHECK(cache.usage().pending == 0);
        CHECK(cache.usage().out == 0);
    }
}

}  // namespace page_store_memory_test

#endif
