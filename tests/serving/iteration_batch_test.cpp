// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Batching by iteration in virtual time: the contents of a step, the owners of pages, and the order
// of texts; and each text equals, to the token, the same text alone.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/serving/iteration_batch.hpp>

#include "conformance/iteration_engine_suite.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/toy_decoder.hpp"

namespace iteration_batch_test {
namespace {

using namespace std::chrono_literals;
using gpushare::ended_text;
using gpushare::errc;
using gpushare::instant;
using gpushare::iteration_batch;
using gpushare::iteration_options;
using gpushare::never;
using gpushare::ns;
using gpushare::page_move_kind;
using gpushare::reason;
using gpushare::text_id;
using gpushare::text_request;
using gpushare::text_token;
using gpushare::yields_by;
using support::toy_decoder;

using text = std::vector<text_token>;
constexpr instant start{};

/// `n` tokens that count up from `first`.
text counted(std::size_t n, text_token first = 0) {
    text t(n);
    for (auto& x : t) x = first++;
    return t;
}
text_id push(iteration_batch& b, text_request q, instant now = start) { return b.try_push(q, now).value(); }
errc refusal(iteration_batch& b, const text_request& q, instant now = start) {
    const auto before = b.usage().waiting;
    const errc why = b.try_push(q, now).code();
    CHECK(b.usage().waiting == before);
    return why;
}
/// Ids and numbers of tokens of the next step, which is done.
std::vector<std::pair<text_id, std::size_t>> step(iteration_batch& b, toy_decoder& e, instant now = start) {
    std::vector<std::pair<text_id, std::size_t>> all;
    for (const auto& x : b.plan(now).entries) all.emplace_back(x.id, x.tokens.size());
    std::ranges::sort(all);
    (void)run_step(b, e, now);
    return all;
}
/// Runs until nothing is left. Each text by its number.
std::map<text_id, ended_text> finish(iteration_batch& b, toy_decoder& e, instant now = start) {
    std::map<text_id, ended_text> all;
    do {
        for (auto& t : b.take_ended()) {
            CHECK(!all.contains(t.id));
            all[t.id] = std::move(t);
        }
    } while (run_step(b, e, now) != 0);
    for (auto& t : b.take_ended()) all[t.id] = std::move(t);
    CHECK(b.empty());
    return all;
}
void check_nothing_is_used(const iteration_batch& b) {
    const auto u = b.usage();
    CHECK(u.free + u.unused == u.pages);
    CHECK(u.host_pages == 0);
    CHECK(u.running + u.waiting == 0);
}

/// The toy, as the suite for engines wants it.
struct toy_model {
    using engine = toy_decoder;
    static constexpr text_token vocabulary = toy_decoder::vocabulary;
    static engine make(std::uint32_t page_tokens, std::uint32_t pages, std::uint32_t host_pages) {
        return {page_tokens, pages, host_pages};
    }
    static text alone(const text& prompt, std::uint32_t most_new) { return toy_decoder::alone(prompt, most_new); }
};

}  // namespace

TEST_CASE("a toy decoder is an engine for batching by iteration", "[serving]") {
    conformance::check_iteration_engine<toy_model>();
}

TEST_CASE("texts join and leave between two steps, and each is what it would be alone", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 32, .step_tokens = 16});
    toy_decoder e(4, 32);
    REQUIRE(b.set_tenant(1).code == errc::none);
    const auto first = push(b, {.tenant = 1, .prompt = counted(6), .most_new = 3});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{first, 6}});
    CHECK(b.tokens(first).size() == 7);
    const auto second = push(b, {.tenant = 1, .prompt = counted(5, 50), .most_new = 1});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{first, 1}, {second, 5}});
    auto over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].id == second);
    CHECK(over[0].why == errc::none);
    CHECK(over[0].tokens == toy_decoder::alone(counted(5, 50), 1));
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{first, 1}});
    over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].tokens == toy_decoder::alone(counted(6), 3));
    CHECK(b.plan(start).entries.empty());
    CHECK(b.take_ended().empty());
    CHECK(b.usage(1).tokens == 6 + 2 + 5);
    check_nothing_is_used(b);
}

TEST_CASE("a text ends with its last token, or when it is as long as it may be", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 64});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    const auto whole = toy_decoder::alone(counted(3), 20);
    const auto id = push(b, {.tenant = 1, .prompt = counted(3), .most_new = 20, .last = whole[7]});
    const auto all = finish(b, e);
    const auto end = std::ranges::find(whole, whole[7]);
    CHECK(all.at(id).tokens == text(whole.begin(), end + 1));
}

TEST_CASE("a step has no more tokens than it may; prompts come in chunks beside others' decoding", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 10, .prompt_chunk = 6, .share_prefixes = false});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    const auto a = push(b, {.tenant = 1, .prompt = counted(2), .most_new = 9});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{a, 2}});
    const auto c = push(b, {.tenant = 1, .prompt = counted(20), .most_new = 2});
    const auto d = push(b, {.tenant = 1, .prompt = counted(20), .most_new = 2});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{a, 1}, {c, 6}, {d, 3}});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{a, 1}, {c, 6}, {d, 3}});
    CHECK(finish(b, e).size() == 3);
}

TEST_CASE("a text that makes no sense is refused with its reason, and nothing has changed", "[serving]") {
    CHECK_THROWS_AS(iteration_batch({.page_tokens = 0}), gpushare::operation_error);
    CHECK_THROWS_AS(iteration_batch({.step_tokens = 0}), gpushare::operation_error);
    CHECK_THROWS_AS(iteration_batch({.prompt_chunk = 0}), gpushare::operation_error);
    CHECK_THROWS_AS(iteration_batch({.texts = 0}), gpushare::operation_error);
    iteration_batch b({.page_tokens = 4, .pages = 8});
    CHECK(b.set_tenant(1, {.weight = 0}).code == errc::invalid_specification);
    CHECK(b.set_tenant(1, {.weight = 1025}).code == errc::invalid_specification);
    // there is no such tenant
    CHECK(refusal(b, {.tenant = 1, .prompt = {1}}) == errc::invalid_specification);
    REQUIRE(b.set_tenant(1, {.pages = 4, .max_waiting = 2}).code == errc::none);
    REQUIRE(b.set_tenant(2).code == errc::none);
    CHECK(refusal(b, {.tenant = 1}) == errc::invalid_specification);
    CHECK(refusal(b, {.tenant = 1, .prompt = {1}, .most_new = 0}) == errc::invalid_specification);
    CHECK(refusal(b, {.tenant = 1, .prompt = {1}, .level = 64}) == errc::invalid_specification);
    CHECK(refusal(b, {.tenant = 1, .prompt = {1}, .deadline = start}) == errc::deadline_exceeded);
    // five pages
    CHECK(refusal(b, {.tenant = 1, .prompt = counted(10), .most_new = 7}) == errc::over_quota);
    // nine
    CHECK(refusal(b, {.tenant = 2, .prompt = counted(10), .most_new = 23}) == errc::no_room);
    CHECK(refusal(b, {.tenant = 2, .prompt = counted(10), .most_new = ~0U}) == errc::no_room);
    (void)push(b, {.tenant = 1, .prompt = counted(10), .most_new = 6});
    (void)push(b, {.tenant = 1, .prompt = counted(10), .most_new = 6});
    CHECK(refusal(b, {.tenant = 1, .prompt = {1}}) == errc::queue_full);
    CHECK(b.try_fork(77, {}, start).code() == errc::invalid_specification);
    CHECK_FALSE(b.abort(77));
    CHECK(b.remove_tenant(3).code == errc::invalid_specification);
    const auto n = b.plan(start).entries.size();
    REQUIRE(n == 1);
    CHECK_THROWS_AS(b.complete({}), gpushare::operation_error);
    CHECK(b.remove_tenant(1).code == errc::in_flight);
    std::array<std::uint32_t, 8> taken{};
    CHECK(b.take_pages(taken) == 0);
    CHECK(b.plan(start).entries.size() == n);  // it is still the same step
}

TEST_CASE("texts of one tenant that begin alike share full pages, and write to none of them", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 64});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    (void)b.set_tenant(2);
    const auto prompt = counted(12);
    (void)push(b, {.tenant = 1, .prompt = prompt, .most_new = 6});
    CHECK(finish(b, e).begin()->second.tokens == toy_decoder::alone(prompt, 6));
    CHECK(b.usage().unused == 4);  // 17 tokens were computed
    const auto longer = counted(14);
    auto id = push(b, {.tenant = 1, .prompt = longer, .most_new = 6});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{id, 2}});
    CHECK(finish(b, e).at(id).tokens == toy_decoder::alone(longer, 6));
    CHECK(b.usage().copies == 0);
    // All of it is there: its last token is computed once more, in a copy of the page.
    id = push(b, {.tenant = 1, .prompt = prompt, .most_new = 6});
    const auto again = push(b, {.tenant = 1, .prompt = prompt, .most_new = 2});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{id, 1}, {again, 1}});
    CHECK(b.usage().copies == 2);
    CHECK(b.usage(1).pages == 3);  // the copies were given back for the page that is like them
    auto all = finish(b, e);
    CHECK(all.at(id).tokens == toy_decoder::alone(prompt, 6));
    CHECK(all.at(again).tokens == toy_decoder::alone(prompt, 2));
    // Another tenant's text has nothing of it.
    id = push(b, {.tenant = 2, .prompt = prompt, .most_new = 1});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{id, 12}});
    CHECK(b.usage().found == 12 + 11 + 11);
    check_nothing_is_used(b);
}

TEST_CASE("the same tokens behind another prefix are another page", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 64});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    auto one = counted(4, 100), two = counted(4, 200);
    const auto tail = counted(8);
    one.insert(one.end(), tail.begin(), tail.end());
    two.insert(two.end(), tail.begin(), tail.end());
    for (const auto& prompt : {one, two, tail}) {
        const auto id = push(b, {.tenant = 1, .prompt = prompt, .most_new = 5});
        CHECK(finish(b, e).at(id).tokens == toy_decoder::alone(prompt, 5));
    }
    CHECK(b.usage().found == 0);
}

TEST_CASE("tokens with the same hash are another page", "[serving]") {
    // Behind the first token the hashes of these two differ in what the second one decides.
    using pages = gpushare::detail::shared_pages;
    const auto hash = [](text t) { return pages::hash_of(pages::root_of(1), t); };
    std::unordered_map<std::uint64_t, text_token> seen;
    support::random any(1);
    text one, two;
    for (int i = 0; one.empty() && i < 2'000'000; ++i) {
        const auto t = static_cast<text_token>(any.below(std::uint64_t{1} << 32));
        const auto first = seen.emplace(hash({t}) >> 32, t).first->second;
        if (first == t) continue;
        one = {first, 0};
        two = {t, static_cast<text_token>(hash({t}) ^ hash({first}))};
    }
    REQUIRE(!one.empty());
    REQUIRE(one != two);
    REQUIRE(hash(one) == hash(two));
    iteration_batch b({.page_tokens = 2, .pages = 16, .step_tokens = 64});
    toy_decoder e(2, 16);
    (void)b.set_tenant(1);
    for (auto prompt : {one, two}) {
        prompt.push_back(7);
        const auto id = push(b, {.tenant = 1, .prompt = prompt, .most_new = 4});
        CHECK(finish(b, e).at(id).tokens == toy_decoder::alone(prompt, 4));
    }
    CHECK(b.usage().found == 0);
}

TEST_CASE("prefixes that nobody uses go by need, those that were unused for longest first", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 8, .step_tokens = 64});
    toy_decoder e(4, 8);
    (void)b.set_tenant(1);
    (void)b.set_tenant(2);
    const auto old = counted(9), recent = counted(9, 100);
    for (const auto& p : {old, recent, old}) {
        (void)push(b, {.tenant = 1, .prompt = p, .most_new = 1});
        (void)finish(b, e);
    }
    CHECK(b.usage().unused == 4);
    // A neighbour needs six pages: `recent` goes, which was used before `old` was once more.
    (void)push(b, {.tenant = 2, .prompt = counted(21, 300), .most_new = 1});
    (void)finish(b, e);
    CHECK(b.usage(1).pages == 0);
    const auto found = b.usage().found;
    (void)push(b, {.tenant = 1, .prompt = old, .most_new = 1});
    (void)step(b, e);
    CHECK(b.usage().found == found + 8);
    (void)push(b, {.tenant = 1, .prompt = recent, .most_new = 1});
    (void)step(b, e);
    CHECK(b.usage().found == found + 8);
    check_nothing_is_used(b);
}

TEST_CASE("a fork shares its pages until one of both writes", "[serving]") {
    const bool shares = GENERATE(false, true);
    CAPTURE(shares);
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 64, .share_prefixes = shares});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    const auto prompt = counted(9);
    const auto whole = toy_decoder::alone(prompt, 8);
    const auto id = push(b, {.tenant = 1, .prompt = prompt, .most_new = 8});
    (void)step(b, e);
    (void)step(b, e);  // 10 tokens in pages, 11 known
    CHECK(b.usage(1).pages == 3);
    text other = prompt;
    other.insert(other.end(), {whole[0], whole[1], 42});
    const auto same = b.try_fork(id, {.most_new = 6}, start).value();
    const auto branch = b.try_fork(id, {.prompt = {42}, .most_new = 6}, start).value();
    CHECK(b.usage(1).pages == 3);
    CHECK(b.usage().running == 3);
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{id, 1}, {same, 1}, {branch, 2}});
    CHECK(b.usage().copies == 2);  // the last one of three has the page for itself
    CHECK(b.usage(1).pages == (shares ? 5U : 5U));
    const auto all = finish(b, e);
    CHECK(all.at(id).tokens == whole);
    CHECK(all.at(same).tokens == text(whole.begin() + 2, whole.end()));
    CHECK(all.at(branch).tokens == toy_decoder::alone(other, 6));
    check_nothing_is_used(b);
}

TEST_CASE("a text that must yield goes on where it was, computed again or moved", "[serving]") {
    const auto how = GENERATE(yields_by::recompute, yields_by::moving);
    CAPTURE(static_cast<int>(how));
    iteration_batch b(
        {.page_tokens = 4, .pages = 8, .host_pages = 8, .step_tokens = 32, .on_yield = how, .share_prefixes = false});
    toy_decoder e(4, 8, 8);
    (void)b.set_tenant(1);
    const auto older = push(b, {.tenant = 1, .prompt = counted(10), .most_new = 22});
    const auto younger = push(b, {.tenant = 1, .prompt = counted(10, 50), .most_new = 22});
    const auto all = finish(b, e);
    CHECK(all.at(older).tokens == toy_decoder::alone(counted(10), 22));
    CHECK(all.at(younger).tokens == toy_decoder::alone(counted(10, 50), 22));
    CHECK(all.at(older).yields == 0);
    CHECK(all.at(younger).yields == 1);
    CHECK(b.usage().moved == (how == yields_by::moving ? 1U : 0U));
    CHECK((b.usage().recomputed != 0) == (how == yields_by::recompute));
    CHECK(b.usage(1).tokens == 2 * 31);  // it isn't charged twice
    check_nothing_is_used(b);
}

TEST_CASE("if the host has no room a text that yields is computed again", "[serving]") {
    iteration_batch b(
        {.page_tokens = 4, .pages = 8, .host_pages = 2, .step_tokens = 32, .on_yield = yields_by::moving});
    toy_decoder e(4, 8, 2);
    (void)b.set_tenant(1);
    (void)push(b, {.tenant = 1, .prompt = counted(10), .most_new = 22});
    const auto younger = push(b, {.tenant = 1, .prompt = counted(10, 50), .most_new = 22});
    CHECK(finish(b, e).at(younger).tokens == toy_decoder::alone(counted(10, 50), 22));
    CHECK(b.usage().yields == 1);
    CHECK(b.usage().moved == 0);
}

TEST_CASE("a tenant has no more pages than its quota, and its neighbour doesn't yield for it", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 12, .step_tokens = 64});
    toy_decoder e(4, 12);
    (void)b.set_tenant(1, {.pages = 8});
    (void)b.set_tenant(2);
    std::vector<text_id> ids;
    for (text_token i = 0; i < 4; ++i)
        ids.push_back(push(b, {.tenant = 1, .prompt = counted(10, 100 * i), .most_new = 20}));
    const auto neighbour = push(b, {.tenant = 2, .prompt = counted(6, 900), .most_new = 10});
    std::map<text_id, ended_text> all;
    do {
        CHECK(b.plan(start).entries.size() <= 12);
        CHECK(b.usage(1).pages <= 8);
        for (auto& t : b.take_ended()) all[t.id] = std::move(t);
    } while (run_step(b, e, start) != 0);
    for (text_token i = 0; i < 4; ++i) CHECK(all.at(ids[i]).tokens == toy_decoder::alone(counted(10, 100 * i), 20));
    CHECK(all.at(neighbour).yields == 0);
    CHECK(all.at(neighbour).tokens == toy_decoder::alone(counted(6, 900), 10));
}

TEST_CASE("a level above begins with the next step, though those below have all pages and places", "[serving]") {
    const bool by_places = GENERATE(false, true);
    CAPTURE(by_places);
    iteration_batch b(
        {.page_tokens = 4, .pages = by_places ? 64U : 16U, .step_tokens = 16, .texts = by_places ? 4U : 64U});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    (void)b.set_tenant(2);
    for (text_token i = 0; i < 8; ++i) (void)push(b, {.tenant = 1, .prompt = counted(10, 100 * i), .most_new = 30});
    for (int i = 0; i < 5; ++i) (void)step(b, e);
    const auto urgent = push(b, {.tenant = 2, .prompt = counted(40, 2000), .most_new = 4, .level = 1});
    // 40 tokens of its prompt are three steps, with the fourth token six: nothing below is in its
    // way.
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{urgent, 16}});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{urgent, 16}});
    (void)step(b, e);
    CHECK(b.tokens(urgent).size() == 41);
    for (int i = 0; i < 3; ++i) (void)step(b, e);
    const auto over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].tokens == toy_decoder::alone(counted(40, 2000), 4));
    for (const auto& [id, t] : finish(b, e)) CHECK(t.why == errc::none);
}

TEST_CASE("a tenant's urgent text takes its own pages where its quota is all in use", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 32});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1, {.pages = 8});
    (void)push(b, {.tenant = 1, .prompt = counted(16), .most_new = 12});
    (void)push(b, {.tenant = 1, .prompt = counted(8, 100), .most_new = 12});
    (void)step(b, e);
    const auto urgent = push(b, {.tenant = 1, .prompt = counted(24, 200), .most_new = 1, .level = 1});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{urgent, 24}});
    for (const auto& [id, t] : finish(b, e)) CHECK(t.why == errc::none);
}

TEST_CASE("of one tenant the earliest deadline begins first, and what is too late ends", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 8, .texts = 1});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    const auto none = push(b, {.tenant = 1, .prompt = counted(4), .most_new = 3});
    const auto late = push(b, {.tenant = 1, .prompt = counted(4, 10), .most_new = 3, .deadline = start + 9s});
    const auto soon = push(b, {.tenant = 1, .prompt = counted(4, 20), .most_new = 3, .deadline = start + 5s});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{soon, 4}});
    (void)step(b, e, start + 5s);  // it runs, and is too late
    auto over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].id == soon);
    CHECK(over[0].why == errc::deadline_exceeded);
    CHECK(over[0].tokens == toy_decoder::alone(counted(4, 20), 1));
    (void)b.plan(start + 9s);
    over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].id == late);
    CHECK(over[0].tokens.size() == 1);
    CHECK(finish(b, e, start + 9s).at(none).why == errc::none);
    check_nothing_is_used(b);
}

TEST_CASE("a text is given up at any time, in a step as well", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 16, .step_tokens = 64});
    toy_decoder e(4, 16);
    (void)b.set_tenant(1);
    const auto first = push(b, {.tenant = 1, .prompt = counted(10), .most_new = 6});
    const auto second = push(b, {.tenant = 1, .prompt = counted(10, 50), .most_new = 6});
    const auto third = push(b, {.tenant = 1, .prompt = counted(10, 90), .most_new = 6});
    CHECK(b.abort(third));
    CHECK(b.take_ended().at(0).why == errc::stopped);
    const auto& plan = b.plan(start);
    std::vector<text_token> next(plan.entries.size());
    e.step(plan, next);
    CHECK(b.abort(first, errc::quarantined));
    CHECK(b.take_ended().empty());  // the engine has its pages
    b.complete(next);
    const auto over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].why == errc::quarantined);
    CHECK_FALSE(b.abort(first));
    CHECK(finish(b, e).at(second).tokens == toy_decoder::alone(counted(10, 50), 6));
    check_nothing_is_used(b);
}

TEST_CASE("a plan stays as it is until its step is completed, whatever comes meanwhile", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 8, .step_tokens = 64});
    toy_decoder e(4, 2048);
    (void)b.set_tenant(1);
    const auto id = push(b, {.tenant = 1, .prompt = counted(8), .most_new = 4});
    (void)run_step(b, e, start);
    const auto fork = b.try_fork(id, {.most_new = 4}, start).value();
    const auto& plan = b.plan(start);
    const std::vector moves(plan.moves.begin(), plan.moves.end());
    std::vector<std::pair<text_id, std::uint32_t>> entries;
    for (const auto& x : plan.entries) entries.emplace_back(x.id, x.begin);
    REQUIRE(entries.size() == 2);
    // Requests, forks and pages, more than there was room for so far.
    std::vector<std::uint32_t> pages(1024);
    for (std::uint32_t p = 0; p < pages.size(); ++p) pages[p] = p;
    b.add_pages(pages);
    for (int i = 0; i < 300; ++i) (void)push(b, {.tenant = 1, .prompt = counted(8, 50), .most_new = 2});
    (void)b.try_fork(fork, {.most_new = 4}, start).value();
    CHECK(std::ranges::equal(plan.moves, moves));
    REQUIRE(plan.entries.size() == entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i)
        CHECK(std::pair{plan.entries[i].id, plan.entries[i].begin} == entries[i]);
    std::vector<text_token> next(plan.entries.size());
    e.step(plan, next);
    b.complete(next);
    CHECK(finish(b, e).at(id).tokens == toy_decoder::alone(counted(8), 4));
    check_nothing_is_used(b);
}

TEST_CASE("an engine may take requests in the middle of a step", "[serving]") {
    struct taking {
        iteration_batch& of;
        toy_decoder& engine;
        bool took = false;
        void step(const gpushare::step_plan& plan, std::span<text_token> next) {
            for (int i = 0; i < 300 && !took; ++i)
                (void)push(of, {.tenant = 1, .prompt = counted(3, 70), .most_new = 2});
            took = true;
            engine.step(plan, next);
        }
    };
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 64});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    const auto id = push(b, {.tenant = 1, .prompt = counted(10), .most_new = 6});
    taking with{b, e};
    REQUIRE(run_step(b, with, start) == 10);
    CHECK(finish(b, e).at(id).tokens == toy_decoder::alone(counted(10), 6));
    check_nothing_is_used(b);
}

TEST_CASE("a step that failed ends who had pages, and what waited is computed with others", "[serving]") {
    struct failing {
        toy_decoder& inner;
        bool fails = true;
        void step(const gpushare::step_plan& plan, std::span<text_token> next) {
            if (fails) throw std::runtime_error("lost");
            inner.step(plan, next);
        }
    };
    iteration_batch b({.page_tokens = 4, .pages = 16, .step_tokens = 64, .texts = 1});
    toy_decoder e(4, 16);
    failing engine{e};
    (void)b.set_tenant(1);
    (void)push(b, {.tenant = 1, .prompt = counted(10), .most_new = 1});
    (void)finish(b, e);
    CHECK(b.usage().unused == 2);
    const auto first = push(b, {.tenant = 1, .prompt = counted(10), .most_new = 6});
    const auto second = push(b, {.tenant = 1, .prompt = counted(10), .most_new = 6});
    CHECK_THROWS_AS(run_step(b, engine, start), std::runtime_error);
    const auto over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].id == first);
    CHECK(over[0].why == errc::kernel_failed);
    CHECK(b.usage().free == 16);
    CHECK(finish(b, e).at(second).tokens == toy_decoder::alone(counted(10), 6));
}

TEST_CASE("pages come and go; a text that never has enough of them ends and says so", "[serving]") {
    iteration_batch b({.page_tokens = 4, .step_tokens = 64});
    toy_decoder e(4, 40);
    (void)b.set_tenant(1);
    CHECK(refusal(b, {.tenant = 1, .prompt = {1}}) == errc::no_room);
    b.add_pages(std::array<std::uint32_t, 6>{30, 31, 32, 33, 34, 35});
    b.add_pages(std::array<std::uint32_t, 1>{30});  // is there
    CHECK(b.usage().pages == 6);
    const auto id = push(b, {.tenant = 1, .prompt = counted(7), .most_new = 9});
    const auto waits = push(b, {.tenant = 1, .prompt = counted(20, 60), .most_new = 4});
    (void)step(b, e);
    std::array<std::uint32_t, 8> taken{};
    CHECK(b.take_pages(taken) == 4);
    CHECK(b.usage().pages == 2);
    const auto all = finish(b, e);
    CHECK(all.at(id).why == errc::no_room);
    CHECK(all.at(id).tokens == toy_decoder::alone(counted(7), 2));
    CHECK(all.at(waits).why == errc::no_room);
    check_nothing_is_used(b);
}

TEST_CASE("a tenant that shrinks or goes ends its texts, and nobody else's", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 32, .step_tokens = 64});
    toy_decoder e(4, 32);
    (void)b.set_tenant(1);
    (void)b.set_tenant(2);
    const auto shrinks = push(b, {.tenant = 1, .prompt = counted(7), .most_new = 9});
    const auto stays = push(b, {.tenant = 2, .prompt = counted(7), .most_new = 9});
    (void)step(b, e);
    (void)b.set_tenant(1, {.pages = 2});
    auto all = finish(b, e);
    CHECK(all.at(shrinks).why == errc::over_quota);
    CHECK(all.at(stays).tokens == toy_decoder::alone(counted(7), 9));
    const auto goes = push(b, {.tenant = 2, .prompt = counted(7), .most_new = 9});
    (void)step(b, e);
    CHECK(b.remove_tenant(2).code == errc::none);
    all = finish(b, e);
    CHECK(all.at(goes).why == errc::closed);
    CHECK(all.at(goes).tenant == 2);
    (void)push(b, {.tenant = 1, .prompt = counted(3), .most_new = 2});
    b.abort_all();
    CHECK(b.take_ended().at(0).why == errc::closed);
    check_nothing_is_used(b);
}

TEST_CASE("a text doesn't yield for another one that can't begin all the same", "[serving]") {
    // All of its tenant's pages are in use: a place alone is of no use to the text above.
    SECTION("for a place") {
        iteration_batch b(
            {.page_tokens = 4, .pages = 64, .step_tokens = 4, .prompt_chunk = 2, .texts = 2, .share_prefixes = false});
        toy_decoder e(4, 64);
        (void)b.set_tenant(1, {.pages = 6});
        (void)b.set_tenant(2);
        const auto first = push(b, {.tenant = 1, .prompt = counted(17), .most_new = 3, .level = 1});
        const auto below = push(b, {.tenant = 2, .prompt = counted(12), .most_new = 2});
        (void)step(b, e);
        const auto above = push(b, {.tenant = 1, .prompt = counted(8), .most_new = 4, .level = 1});
        const auto all = finish(b, e);
        CHECK(all.at(below).yields == 0);
        CHECK(all.at(below).tokens == toy_decoder::alone(counted(12), 2));
        CHECK(all.at(first).why == errc::none);
        CHECK(all.at(above).why == errc::none);
        CHECK(b.usage().recomputed == 0);
    }
    // The pages of the text below aren't enough for the text above.
    SECTION("for pages of their tenant's quota") {
        iteration_batch b(
            {.page_tokens = 4, .pages = 64, .step_tokens = 4, .prompt_chunk = 2, .share_prefixes = false});
        toy_decoder e(4, 64);
        (void)b.set_tenant(1, {.pages = 6});
        const auto first = push(b, {.tenant = 1, .prompt = counted(13), .most_new = 3, .level = 1});
        const auto below = push(b, {.tenant = 1, .prompt = counted(6), .most_new = 2});
        (void)step(b, e);
        const auto above = push(b, {.tenant = 1, .prompt = counted(12), .most_new = 4, .level = 1});
        const auto all = finish(b, e);
        CHECK(all.at(below).yields == 0);
        CHECK(all.at(first).why == errc::none);
        CHECK(all.at(above).tokens == toy_decoder::alone(counted(12), 4));
        CHECK(b.usage().recomputed == 0);
    }
}

// AddressSanitizer finds a look at texts of the step before.
TEST_CASE("a failure is told between two steps, or twice, and ends the texts with pages", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 64});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    (void)push(b, {.tenant = 1, .prompt = counted(6), .most_new = 1});
    CHECK(finish(b, e).size() == 1);
    b.fail(errc::device_lost);
    CHECK(b.take_ended().empty());
    const auto lost = push(b, {.tenant = 1, .prompt = counted(6), .most_new = 2});
    REQUIRE(b.plan(start).entries.size() == 1);
    b.fail(errc::kernel_failed);
    CHECK(b.take_ended().at(0).id == lost);
    b.fail(errc::device_lost);
    CHECK(b.take_ended().empty());
    const auto between = push(b, {.tenant = 1, .prompt = counted(6), .most_new = 2});
    (void)step(b, e);
    b.fail(errc::device_lost);
    const auto over = b.take_ended();
    REQUIRE(over.size() == 1);
    CHECK(over[0].id == between);
    CHECK(over[0].why == errc::device_lost);
    check_nothing_is_used(b);
}

TEST_CASE("a tenant that comes under the number of another one finds none of that one's pages", "[serving]") {
    iteration_batch b({.page_tokens = 4, .pages = 64, .step_tokens = 64});
    toy_decoder e(4, 64);
    (void)b.set_tenant(1);
    (void)push(b, {.tenant = 1, .prompt = counted(12), .most_new = 2});
    CHECK(finish(b, e).size() == 1);
    REQUIRE(b.remove_tenant(1).code == errc::none);
    (void)b.set_tenant(1);
    auto id = push(b, {.tenant = 1, .prompt = counted(12), .most_new = 2});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{id, 12}});
    CHECK(b.usage().found == 0);
    CHECK(finish(b, e).at(id).tokens == toy_decoder::alone(counted(12), 2));
    (void)b.set_tenant(1, {.weight = 2});  // it is the same one
    id = push(b, {.tenant = 1, .prompt = counted(12), .most_new = 2});
    CHECK(step(b, e) == std::vector<std::pair<text_id, std::size_t>>{{id, 1}});
    (void)finish(b, e);
    check_nothing_is_used(b);
}

}  // namespace iteration_batch_test
