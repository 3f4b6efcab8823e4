// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Batching by iteration in the pages of a page store: memory comes with the load, and prefixes that
// nobody uses go to a neighbour.
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/serving/iteration_batch.hpp>
#include <gpushare/serving/page_store.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/toy_decoder.hpp"

namespace iteration_pages_test {

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::iteration_batch;
using gpushare::text_token;
using support::arena_rig;
using support::toy_decoder;

using store = gpushare::page_store<arena_rig::memory_type, support::manual_scrubber>;

TEST_CASE("pages of a store come with the load, and go to a neighbour that needs them", "[serving]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    // A page is a chunk of 16 KiB: 2,048 tokens of 8 bytes each.
    const auto four = [] { return gpushare::page_options{.lanes = 1, .token = 8_B, .tokens = 2048, .pages = 16}; };
    iteration_batch texts({.page_tokens = 2048, .step_tokens = 4096});
    store* mine = nullptr;
    std::vector<std::uint32_t> gone(16);
    auto o = four();
    o.evict = [&](const gpushare::reclaim_request&, std::uint32_t n) {
        const auto pages = std::span(gone).first(texts.take_pages(std::span(gone).first(n)));
        CHECK(mine->free(pages) == errc::none);
    };
    store chat(rig.pool, rig.chat, {1}, o, "chat"), code(rig.pool, rig.code, {2}, four(), "code");
    mine = &chat;
    toy_decoder engine(2048, [&](std::uint32_t p) { return chat.address(p); });
    REQUIRE(texts.set_tenant(1).code == errc::none);

    // All that chat may have: 4 chunks guaranteed, 8 lent.
    std::vector<std::uint32_t> pages(12);
    chat.allocate(pages);
    texts.add_pages(pages);
    std::vector<text_token> prompt(2100);
    for (text_token i = 0; i < prompt.size(); ++i) prompt[i] = i;
    for (text_token i = 0; i < 10; ++i) {
        prompt[0] = i;
        REQUIRE(texts.try_push({.tenant = 1, .prompt = prompt, .most_new = 2}, {}));
    }
    while (run_step(texts, engine, {}) != 0) {
    }
    for (const auto& t : texts.take_ended()) {
        prompt[0] = static_cast<text_token>(t.id - 1);
        CHECK(t.tokens == toy_decoder::alone(prompt, 2));
    }
    CHECK(texts.usage().unused == 8);

    std::vector<std::uint32_t> theirs(10);
    code.allocate(theirs);  // 4 chunks are nobody's, and 8 lent
    CHECK(texts.usage().pages == 6);
    CHECK(texts.usage().unused == 6);
    CHECK(chat.usage().out == texts.usage().pages);
    // What is left works, and what is gone isn't found.
    prompt[0] = 9;
    const auto id = texts.try_push({.tenant = 1, .prompt = prompt, .most_new = 5}, {}).value();
    while (run_step(texts, engine, {}) != 0) {
    }
    CHECK(texts.usage().found == 2048);
    const auto over = texts.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].id == id);
    CHECK(over[0].tokens == toy_decoder::alone(prompt, 5));
    pages.resize(texts.usage().pages);
    CHECK(texts.take_pages(pages) == pages.size());
    CHECK(chat.free(pages) == errc::none);
    CHECK(chat.usage().out == 0);
}

}  // namespace iteration_pages_test
