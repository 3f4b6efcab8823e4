// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Pages come back, and texts go on step by step, while the host has no memory.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/serving/iteration_batch.hpp>
#include <gpushare/serving/page_store.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/manual_timeline.hpp"
#include "support/toy_decoder.hpp"

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

TEST_CASE("a text is added whole or not at all, and steps need no memory of the host's", "[serving]") {
    using gpushare::text_token;
    using support::toy_decoder;
    gpushare::iteration_batch b(
        {.page_tokens = 2, .pages = 30, .host_pages = 10, .step_tokens = 16, .on_yield = gpushare::yields_by::moving});
    toy_decoder e(2, 30, 10);
    (void)b.set_tenant(1);
    const auto prompt_of = [](std::size_t i) {
        return std::vector<text_token>{1, 2, 3, static_cast<text_token>(i % 3), static_cast<text_token>(i)};
    };
    std::size_t refused = 0;
    for (std::size_t i = 0; i < 40; ++i) {
        const gpushare::text_request q{
            .tenant = 1, .prompt = prompt_of(i), .most_new = 20, .level = static_cast<int>(i % 4 / 3)};
        for (std::size_t good = 0;; ++good) {
            const auto before = b.usage();
            this_heap = {.good = good, .recovers = false};
            try {
                const auto made =
                    i % 8 == 7 && b.tokens(i).size() == 5 ? b.try_fork(i, {.most_new = 20}, {}) : b.try_push(q, {});
                this_heap = {};
                REQUIRE(made);
                REQUIRE(*made == i + 1);
                break;
            } catch (const std::bad_alloc&) {
                this_heap = {};
                ++refused;
                CHECK(b.usage().waiting == before.waiting);
                CHECK(b.usage().running == before.running);
            }
        }
    }
    CHECK(refused > 40);
    std::vector<text_token> next(64);
    std::size_t over = 0;
    while (!b.empty()) {
        this_heap = {.good = 0, .recovers = false};
        const auto& plan = b.plan({});  // without exceptions: an allocation would end the program
        this_heap = {};
        e.step(plan, next);
        this_heap = {.good = 0, .recovers = false};
        b.complete(next);
        this_heap = {};
        for (const auto& t : b.take_ended()) {
            ++over;
            CHECK(t.tokens.size() == 20);
        }
    }
    CHECK(over == 40);
    CHECK(b.usage().moved > 0);
}

}  // namespace page_store_memory_test

#endif
