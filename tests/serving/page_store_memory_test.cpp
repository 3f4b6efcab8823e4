// SPDX-License-Identifier: Apache-2.0
// Pages come back where the host has no memory.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/serving/page_store.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/failing_new.hpp"

namespace page_store_memory_test {

using namespace gpushare::literals;
using gpushare::errc;
using support::arena_rig;
using support::this_heap;

TEST_CASE("pages are given back one by one where the host has no memory", "[serving]") {
    arena_rig rig;
    gpushare::page_store<arena_rig::memory_type, support::manual_scrubber> cache(
        rig.pool, rig.chat, {1}, {.lanes = 4, .token = 64_B, .tokens = 16, .pages = 64}, "chat");
    for (int round = 0; round < 3; ++round) {
        std::vector<std::uint32_t> pages(48);
        cache.allocate(std::span(pages).first(20));
        cache.allocate(std::span(pages).subspan(20));
        std::size_t refused = 0;
        this_heap = {.good = 0, .recovers = false};
        for (const auto& p : pages)
            if (cache.free({&p, 1}) != errc::none) ++refused;
        const auto nothing = cache.free({});
        this_heap = {};
        CHECK(refused == 0);
        CHECK(nothing == errc::none);
        CHECK(cache.usage().out == 0);
    }
}

}  // namespace page_store_memory_test

#endif
