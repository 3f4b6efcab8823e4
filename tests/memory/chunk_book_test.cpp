// SPDX-License-Identifier: Apache-2.0
// Which chunk goes to whom, without any memory: against a model, and what each policy keeps apart.
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include <gpushare/memory/detail/chunk_book.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using gpushare::chunk_book;
using gpushare::scrub_policy;
using gpushare::tenant_tag;

namespace {
constexpr tenant_tag chat{1}, code{2};
}

TEST_CASE("a chunk goes back to its tenant as it is, and to others scrubbed", "[memory][chunks]") {
    chunk_book book{scrub_policy::on_hand_over};
    book.open(chat);
    book.open(code);
    const auto c = book.add(true);
    CHECK(book.take(chat) == c);
    CHECK(book.take(chat) == chunk_book::none);
    book.give(c);
    CHECK(book.ready(chat) == 1);
    CHECK(book.ready(code) == 0);
    CHECK(book.take(code) == chunk_book::none);
    CHECK(book.begin_scrub(chat) == chunk_book::none);
    CHECK(book.begin_scrub(code) == c);
    CHECK(book.take(chat) == chunk_book::none);
    book.end_scrub(c, false);
    CHECK(book.take(chat) == chunk_book::none);  // half of it may be gone
    CHECK(book.begin_scrub(chat) == c);
    book.end_scrub(c, true);
    CHECK(book.take(code) == c);
}

TEST_CASE("a tenant's own chunks come first, the last one given before the others", "[memory][chunks]") {
    chunk_book book{scrub_policy::on_hand_over};
    book.open(chat);
    for (int i = 0; i < 3; ++i) book.add(true);
    const auto first = book.take(chat), second = book.take(chat);
    book.give(first);
    book.give(second);
    CHECK(book.take(chat) == second);
    CHECK(book.take(chat) == first);
    CHECK(book.take(chat) != chunk_book::none);
}

TEST_CASE("what is scrubbed first has been free longest", "[memory][chunks]") {
    chunk_book book{scrub_policy::on_hand_over};
    book.open(chat);
    for (int i = 0; i < 3; ++i) book.add(true);
    std::vector<chunk_book::index> taken{book.take(chat), book.take(chat), book.take(chat)};
    for (const auto i : {1, 2, 0}) book.give(taken[static_cast<std::size_t>(i)]);
    CHECK(book.begin_scrub() == taken[1]);
    CHECK(book.begin_scrub(code) == taken[2]);
    CHECK(book.begin_scrub() == taken[0]);
    CHECK(book.begin_scrub() == chunk_book::none);
}

TEST_CASE("a chunk that is passed on belongs to who has it then", "[memory][chunks]") {
    chunk_book book{scrub_policy::on_hand_over};
    book.open(chat);
    book.open(code);
    book.add(true);
    const auto c = book.take(chat);
    book.pass(c, code);
    CHECK(book.usage(chat).out == 0);
    CHECK(book.usage(code).out == 1);
    book.give(c);
    CHECK(book.ready(chat) == 0);
    CHECK(book.ready(code) == 1);
    book.close(code);
    CHECK(book.dirty() == 1);
    book.open(code);
    CHECK(book.ready(code) == 0);  // somebody else of that tag
}

TEST_CASE("numbers of chunks that are gone are used again", "[memory][chunks]") {
    chunk_book book{scrub_policy::on_hand_over};
    book.open(chat);
    const auto a = book.add(true), b = book.add(false);
    CHECK(book.drop() == b);  // the dirty one
    CHECK(book.drop() == a);
    CHECK(book.drop() == chunk_book::none);
    CHECK(book.total() == 0);
    CHECK(book.add(true) < 2);
    CHECK(book.add(true) < 2);
    CHECK(book.add(true) == 2);
}

TEST_CASE("the book agrees with a model after any calls", "[memory][chunks][model]") {
    struct cell {
        enum { clean, dirty, scrubbing, out } stage = clean;
        std::optional<std::uint32_t> writer;
    };
    for (const auto policy : {scrub_policy::on_hand_over, scrub_policy::on_free, scrub_policy::off}) {
        const auto seed = support::seed(static_cast<std::uint64_t>(policy));
        CAPTURE(seed);
        support::random any(seed);
        chunk_book book{policy};
        std::map<chunk_book::index, cell> model;
        for (std::uint32_t t = 0; t < 3; ++t) book.open({t});
        const auto count = [&](auto which) {
            return static_cast<std::size_t>(
                std::count_if(model.begin(), model.end(), [&](auto& m) { return which(m.second); }));
        };
        const auto any_of = [&](int stage) {
            std::vector<chunk_book::index> all;
            for (const auto& [i, c] : model)
                if (c.stage == stage) all.push_back(i);
            return all.empty() ? chunk_book::none : any.of(all);
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
                        const auto added = book.add(zero);
                        REQUIRE_FALSE(model.contains(added));
                        model[added].stage = zero || policy == scrub_policy::off ? cell::clean : cell::dirty;
                    }
                    break;
                case 1:
                    if (const auto gone = book.drop(); gone != chunk_book::none) {
                        REQUIRE((model[gone].stage == cell::clean || model[gone].stage == cell::dirty));
                        model.erase(gone);
                    } else {
                        CHECK(book.available() == book.scrubbing());
                    }
                    break;
                case 2:
                case 3:
                    if (const auto taken = book.take({t}); taken != chunk_book::none) {
                        REQUIRE(ready(model[taken]));
                        model[taken] = {cell::out, t};
                    } else {
                        CHECK(count(ready) == 0);
                    }
                    break;
                case 4:
                    if (const auto back = any_of(cell::out); back != chunk_book::none) {
                        if (any.one_in(4)) {
                            book.pass(back, {t});
                            model[back].writer = t;
                        }
                        book.give(back);
                        model[back].stage = policy == scrub_policy::off ? cell::clean : cell::dirty;
                        if (policy == scrub_policy::on_free) model[back].writer.reset();
                    }
                    break;
                case 5:
                    if (const auto begun = book.begin_scrub({t}); begun != chunk_book::none) {
                        REQUIRE(model[begun].stage == cell::dirty);
                        REQUIRE(model[begun].writer != t);
                        model[begun] = {cell::scrubbing, {}};
                    } else {
                        CHECK(count([&](const cell& c) { return c.stage == cell::dirty && c.writer != t; }) == 0);
                    }
                    break;
                default:
                    if (const auto ended = any_of(cell::scrubbing); ended != chunk_book::none) {
                        const bool done = any.one_in(2);
                        book.end_scrub(ended, done);
                        model[ended].stage = done ? cell::clean : cell::dirty;
                    }
            }
            REQUIRE(book.total() == model.size());
            REQUIRE(book.ready({t}) == count(ready));
            REQUIRE(book.out() == count([](const cell& c) { return c.stage == cell::out; }));
            REQUIRE(book.clean() == count([](const cell& c) { return c.stage == cell::clean; }));
            REQUIRE(book.dirty() == count([](const cell& c) { return c.stage == cell::dirty; }));
        }
    }
}
