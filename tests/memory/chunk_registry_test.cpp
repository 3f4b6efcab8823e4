// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Which chunk goes to which owner, without any memory: against a model; and the separation that
// each policy keeps.
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include <gpushare/memory/detail/chunk_registry.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using gpushare::scrub_policy;
using gpushare::tenant_tag;
using gpushare::detail::chunk_registry;

namespace {
constexpr tenant_tag chat{1}, code{2};
}

TEST_CASE("a chunk goes back to its tenant as it is, and to others scrubbed", "[memory][chunks]") {
    chunk_registry chunks{scrub_policy::on_hand_over};
    chunks.open(chat);
    chunks.open(code);
    const auto c = chunks.add(true);
    CHECK(chunks.take(chat) == c);
    CHECK(chunks.take(chat) == chunk_registry::none);
    chunks.give(c);
    CHECK(chunks.ready(chat) == 1);
    CHECK(chunks.ready(code) == 0);
    CHECK(chunks.take(code) == chunk_registry::none);
    CHECK(chunks.begin_scrub(chat) == chunk_registry::none);
    CHECK(chunks.begin_scrub(code) == c);
    CHECK(chunks.take(chat) == chunk_registry::none);
    chunks.end_scrub(c, false);
    CHECK(chunks.take(chat) == chunk_registry::none);  // half of it may be gone
    CHECK(chunks.begin_scrub(chat) == c);
    chunks.end_scrub(c, true);
    CHECK(chunks.take(code) == c);
}

TEST_CASE("a tenant's own chunks come first, the last one given before the others", "[memory][chunks]") {
    chunk_registry chunks{scrub_policy::on_hand_over};
    chunks.open(chat);
    for (int i = 0; i < 3; ++i) chunks.add(true);
    const auto first = chunks.take(chat), second = chunks.take(chat);
    chunks.give(first);
    chunks.give(second);
    CHECK(chunks.take(chat) == second);
    CHECK(chunks.take(chat) == first);
    CHECK(chunks.take(chat) != chunk_registry::none);
}

TEST_CASE("the chunk that has been free longest is scrubbed first", "[memory][chunks]") {
    chunk_registry chunks{scrub_policy::on_hand_over};
    chunks.open(chat);
    for (int i = 0; i < 3; ++i) chunks.add(true);
    std::vector<chunk_registry::index> taken{chunks.take(chat), chunks.take(chat), chunks.take(chat)};
    for (const auto i : {1, 2, 0}) chunks.give(taken[static_cast<std::size_t>(i)]);
    CHECK(chunks.begin_scrub() == taken[1]);
    CHECK(chunks.begin_scrub(code) == taken[2]);
    CHECK(chunks.begin_scrub() == taken[0]);
    CHECK(chunks.begin_scrub() == chunk_registry::none);
}

TEST_CASE("a chunk that is passed on belongs to who has it then", "[memory][chunks]") {
    chunk_registry chunks{scrub_policy::on_hand_over};
    chunks.open(chat);
    chunks.open(code);
    chunks.add(true);
    const auto c = chunks.take(chat);
    chunks.pass(c, code);
    CHECK(chunks.usage(chat).out == 0);
    CHECK(chunks.usage(code).out == 1);
    chunks.give(c);
    CHECK(chunks.ready(chat) == 0);
    CHECK(chunks.ready(code) == 1);
    chunks.close(code);
    CHECK(chunks.dirty() == 1);
    chunks.open(code);
    CHECK(chunks.ready(code) == 0);  // somebody else of that tag
}

TEST_CASE("numbers of chunks that are gone are used again", "[memory][chunks]") {
    chunk_registry chunks{scrub_policy::on_hand_over};
    chunks.open(chat);
    const auto a = chunks.add(true), b = chunks.add(false);
    CHECK(chunks.drop() == b);  // the dirty one
    CHECK(chunks.drop() == a);
    CHECK(chunks.drop() == chunk_registry::none);
    CHECK(chunks.total() == 0);
    CHECK(chunks.add(true) < 2);
    CHECK(chunks.add(true) < 2);
    CHECK(chunks.add(true) == 2);
}

TEST_CASE("the chunks agrees with a model after any calls", "[memory][chunks][model]") {
    struct cell {
        enum { clean, dirty, scrubbing, out } stage = clean;
        std::optional<std::uint32_t> writer;
    };
    for (const auto policy : {scrub_policy::on_hand_over, scrub_policy::on_free, scrub_policy::off}) {
        const auto seed = support::seed(static_cast<std::uint64_t>(policy));
        CAPTURE(seed);
        support::random any(seed);
        chunk_registry chunks{policy};
        std::map<chunk_registry::index, cell> model;
        for (std::uint32_t t = 0; t < 3; ++t) chunks.open({t});
        const auto count = [&](auto which) {
            return static_cast<std::size_t>(
                std::count_if(model.begin(), model.end(), [&](auto& m) { return which(m.second); }));
        };
        const auto any_of = [&](int stage) {
            std::vector<chunk_registry::index> all;
            for (const auto& [i, c] : model)
                if (c.stage == stage) all.push_back(i);
            return all.empty() ? chunk_registry::none : any.of(all);
        };
        for (int i = 0; i < 20'000; ++i) {
            const auto t = static_cast<std::uint32_t>(any.below(3));
            const auto ready = [&](const cell& c) {
                return c.stage == cell::clean || (c.stage == cell::dirty && c.writer == t);
            };
            switch (any.below(7)) {
                case 0:
                    if (model.size() < 40) {
                        const bool zero = any.one_in(2);
                        const auto added = chunks.add(zero);
                        REQUIRE_FALSE(model.contains(added));
                        model[added].stage = zero || policy == scrub_policy::off ? cell::clean : cell::dirty;
                    }
                    break;
                case 1:
                    if (const auto gone = chunks.drop(); gone != chunk_registry::none) {
                        REQUIRE((model[gone].stage == cell::clean || model[gone].stage == cell::dirty));
                        model.erase(gone);
                    } else {
                        CHECK(chunks.available() == chunks.scrubbing());
                    }
                    break;
                case 2:
                case 3:
                    if (const auto taken = chunks.take({t}); taken != chunk_registry::none) {
                        REQUIRE(ready(model[taken]));
                        model[taken] = {cell::out, t};
                    } else {
                        CHECK(count(ready) == 0);
                    }
                    break;
                case 4:
                    if (const auto back = any_of(cell::out); back != chunk_registry::none) {
                        if (any.one_in(4)) {
                            chunks.pass(back, {t});
                            model[back].writer = t;
                        }
                        chunks.give(back);
                        model[back].stage = policy == scrub_policy::off ? cell::clean : cell::dirty;
                        if (policy == scrub_policy::on_free) model[back].writer.reset();
                    }
                    break;
                case 5:
                    if (const auto begun = chunks.begin_scrub({t}); begun != chunk_registry::none) {
                        REQUIRE(model[begun].stage == cell::dirty);
                        REQUIRE(model[begun].writer != t);
                        model[begun] = {cell::scrubbing, {}};
                    } else {
                        CHECK(count([&](const cell& c) { return c.stage == cell::dirty && c.writer != t; }) == 0);
                    }
                    break;
                default:
                    if (const auto ended = any_of(cell::scrubbing); ended != chunk_registry::none) {
                        const bool done = any.one_in(2);
                        chunks.end_scrub(ended, done);
                        model[ended].stage = done ? cell::clean : cell::dirty;
                    }
            }
            REQUIRE(chunks.total() == model.size());
            REQUIRE(chunks.ready({t}) == count(ready));
            REQUIRE(chunks.out() == count([](const cell& c) { return c.stage == cell::out; }));
            REQUIRE(chunks.clean() == count([](const cell& c) { return c.stage == cell::clean; }));
            REQUIRE(chunks.dirty() == count([](const cell& c) { return c.stage == cell::dirty; }));
        }
    }
}
