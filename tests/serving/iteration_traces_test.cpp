// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Batching by iteration with random traces in virtual time. Pages, quotas and budgets hold in every
// step. Every text ends, or learns why not, and has the same tokens as alone. Tenants that always
// have work get tokens by their weights.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/serving/iteration_batch.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/toy_decoder.hpp"

namespace iteration_traces_test {
namespace {

using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::iteration_batch;
using gpushare::iteration_options;
using gpushare::never;
using gpushare::text_id;
using gpushare::text_request;
using gpushare::text_token;
using gpushare::yields_by;
using support::toy_decoder;

using text = std::vector<text_token>;

/// One random trace: texts of three tenants, with prefixes in common, forks, deadlines, aborts and
/// failures to fit.
class trace {
public:
    explicit trace(std::uint64_t seed) : any_(seed), o_(drawn()), b_(o_), e_(o_.page_tokens, o_.pages, o_.host_pages) {
        for (std::uint32_t t = 0; t < tenants; ++t) set_tenant(t);
        for (auto& p : prefixes_) p = some_text(o_.page_tokens * 3);
    }

    void run() {
        for (int i = 0; i < 120; ++i) {
            now_ += std::chrono::seconds(1);
            if (i < 80)
                for (auto n = any_.below(4); n-- > 0;) act();
            one_step();
        }
        for (int i = 0; i < 3000 && !b_.empty(); ++i) one_step();
        INFO("texts never end");
        REQUIRE(b_.empty());
        collect();
        check_end();
    }
    [[nodiscard]] gpushare::iteration_usage usage() const { return b_.usage(); }
    [[nodiscard]] std::size_t ended(errc why) const {
        return static_cast<std::size_t>(std::ranges::count(ended_, why, [](const auto& e) { return e.second; }));
    }

private:
    static constexpr std::uint32_t tenants = 3;
    struct expected {
        std::uint32_t tenant = 0, most_new = 0;
        text prompt{};
        std::optional<text_token> last{};
        instant deadline = never;
    };

    iteration_options drawn() {
        iteration_options o;
        o.page_tokens = static_cast<std::uint32_t>(1 + any_.below(5));
        o.pages = static_cast<std::uint32_t>(10 + any_.below(30));
        o.host_pages = static_cast<std::uint32_t>(any_.below(20));
        o.step_tokens = static_cast<std::uint32_t>(1 + any_.below(24));
        o.prompt_chunk = any_.one_in(2) ? ~0U : static_cast<std::uint32_t>(1 + any_.below(8));
        o.texts = static_cast<std::uint32_t>(1 + any_.below(12));
        o.on_yield = any_.one_in(2) ? yields_by::moving : yields_by::recompute;
        o.share_prefixes = !any_.one_in(4);
        return o;
    }
    void set_tenant(std::uint32_t t) {
        quota_[t] = any_.one_in(2) ? o_.pages : static_cast<std::uint32_t>(4 + any_.below(o_.pages));
        REQUIRE(b_.set_tenant(t, {.weight = static_cast<std::uint32_t>(1 + any_.below(4)), .pages = quota_[t]}).code ==
                errc::none);
    }
    text some_text(std::size_t n) {
        text t(n);
        for (auto& x : t) x = static_cast<text_token>(any_.below(toy_decoder::vocabulary));
        return t;
    }
    text some_prompt() {
        text t(prefixes_[any_.below(2)]);
        t.resize(any_.below(t.size() + 1));
        const auto more = some_text((t.empty() ? 1 : 0) + any_.below(8));
        t.insert(t.end(), more.begin(), more.end());
        return t;
    }
    text_request some_request() {
        text_request q;
        q.tenant = static_cast<std::uint32_t>(any_.below(tenants));
        q.prompt = some_prompt();
        q.most_new = static_cast<std::uint32_t>(1 + any_.below(16));
        if (any_.one_in(2)) q.last = static_cast<text_token>(any_.below(toy_decoder::vocabulary));
        q.level = any_.one_in(4) ? static_cast<int>(any_.below(3)) - 1 : 0;
        if (any_.one_in(4)) q.deadline = now_ + std::chrono::seconds(1 + any_.below(40));
        return q;
    }
    void act() {
        switch (any_.below(8)) {
            case 0: {
                if (texts_.empty()) return;
                const auto id =
                    std::next(texts_.begin(), static_cast<std::ptrdiff_t>(any_.below(texts_.size())))->first;
                if (b_.abort(id)) aborted_.insert(id);
                return;
            }
            case 1: {
                if (texts_.empty()) return;
                const auto of = std::next(texts_.begin(), static_cast<std::ptrdiff_t>(any_.below(texts_.size())));
                auto q = some_request();
                if (any_.one_in(2)) q.prompt.clear();
                const auto before = b_.tokens(of->first);
                text whole(before.begin(), before.end());
                whole.insert(whole.end(), q.prompt.begin(), q.prompt.end());
                const auto made = b_.try_fork(of->first, q, now_);
                if (made) texts_[*made] = {of->second.tenant, q.most_new, whole, q.last, q.deadline};
                return;
            }
            default: {
                const auto q = some_request();
                const auto made = b_.try_push(q, now_);
                if (made)
                    texts_[*made] = {q.tenant, q.most_new, q.prompt, q.last, q.deadline};
                else
                    CHECK((made.code() == errc::over_quota || made.code() == errc::no_room));
            }
        }
    }
    void one_step() {
        const auto& plan = b_.plan(now_);
        check(plan);
        // At the worst time: pages are with the engine.
        if (!plan.entries.empty() && any_.one_in(8)) {
            const auto id = plan.entries[any_.below(plan.entries.size())].id;
            REQUIRE(b_.abort(id));
            aborted_.insert(id);
        }
        (void)run_step(b_, e_, now_);
        check_pages();
        collect();
    }
    void check(const gpushare::step_plan& plan) {
        std::uint32_t sum = 0;
        std::set<text_id> ids;
        std::map<std::uint32_t, std::uint32_t> owner;
        std::map<std::uint32_t, std::uint32_t> users;
        for (const auto& x : plan.entries) {
            sum += static_cast<std::uint32_t>(x.tokens.size());
            CHECK(ids.insert(x.id).second);
            REQUIRE(!x.tokens.empty());
            CHECK(x.tokens.size() <= o_.prompt_chunk);
            const auto end = x.begin + x.tokens.size();
            REQUIRE(x.pages.size() * o_.page_tokens >= end);
            CHECK(x.samples == (end == b_.tokens(x.id).size()));
            for (const auto p : x.pages) {
                REQUIRE(p < o_.pages);
                CHECK(owner.emplace(p, x.tenant).first->second == x.tenant);
            }
            // What is written is read by nobody else.
            for (auto at = x.begin / o_.page_tokens; at * o_.page_tokens < end; ++at) ++users[x.pages[at]];
        }
        for (const auto& x : plan.entries)
            for (std::uint32_t at = 0; at < x.pages.size(); ++at) {
                const bool writes = at >= x.begin / o_.page_tokens && at * o_.page_tokens < x.begin + x.tokens.size();
                if (!writes) CHECK(!users.contains(x.pages[at]));
                if (writes) CHECK(users[x.pages[at]] == 1);
            }
        CHECK((sum != 0 || b_.empty()));  // somebody always gets on
        CHECK(sum == plan.tokens);
        CHECK(sum <= o_.step_tokens);
        CHECK(plan.entries.size() <= o_.texts);
        check_pages();
    }
    void check_pages() {
        const auto u = b_.usage();
        std::uint32_t held = 0;
        for (std::uint32_t t = 0; t < tenants; ++t) {
            CHECK(b_.usage(t).pages <= quota_[t]);
            held += b_.usage(t).pages;
        }
        CHECK(u.pages == o_.pages);
        CHECK(held + u.free + u.unused == u.pages);
        CHECK(u.host_pages <= o_.host_pages);
        CHECK(u.running <= o_.texts);
    }
    void collect() {
        for (auto& t : b_.take_ended()) {
            const auto at = texts_.find(t.id);
            REQUIRE(at != texts_.end());
            const auto& x = at->second;
            CHECK(t.tenant == x.tenant);
            const auto whole = toy_decoder::alone(x.prompt, x.most_new, x.last);
            CAPTURE(t.id, static_cast<int>(t.why), t.yields);
            if (t.why == errc::none) {
                CHECK(t.tokens == whole);
            } else {
                CHECK((t.why == errc::stopped ? aborted_.contains(t.id)
                                              : t.why == errc::deadline_exceeded && x.deadline <= now_));
                REQUIRE(t.tokens.size() <= whole.size());
                CHECK(std::ranges::equal(t.tokens, std::span(whole).first(t.tokens.size())));
            }
            ended_[t.id] = t.why;
            texts_.erase(at);
        }
    }
    void check_end() {
        CHECK(texts_.empty());  // each ended once
        const auto u = b_.usage();
        CHECK(u.free + u.unused == u.pages);
        CHECK(u.host_pages == 0);
        std::vector<std::uint32_t> all(u.pages);
        CHECK(b_.take_pages(all) == u.pages);
        std::ranges::sort(all);
        for (std::uint32_t p = 0; p < u.pages; ++p) CHECK(all[p] == p);
    }

    support::random any_;
    iteration_options o_;
    iteration_batch b_;
    toy_decoder e_;
    std::uint32_t quota_[tenants] = {};
    text prefixes_[2];
    instant now_{};
    std::map<text_id, expected> texts_;
    std::set<text_id> aborted_;
    std::map<text_id, errc> ended_;
};

}  // namespace

TEST_CASE("by random traces nothing leaks, no limit is exceeded, and each text is what it is alone", "[serving]") {
    gpushare::iteration_usage all;
    std::size_t stopped = 0, late = 0, complete = 0;
    for (std::uint64_t i = 0; i < 300; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        trace t(seed);
        t.run();
        const auto u = t.usage();
        all.yields += u.yields;
        all.moved += u.moved;
        all.found += u.found;
        all.copies += u.copies;
        all.recomputed += u.recomputed;
        complete += t.ended(errc::none);
        stopped += t.ended(errc::stopped);
        late += t.ended(errc::deadline_exceeded);
    }
    // The traces had all of it.
    CHECK(complete > 10'000);
    CHECK(stopped > 1000);
    CHECK(late > 1000);
    CHECK(all.yields > 2 * all.moved);
    CHECK(all.moved > 300);
    CHECK(all.found > 10'000);
    CHECK(all.copies > 300);
    CHECK(all.recomputed > 1000);
}

namespace {

/// Tenants that always have work: more texts than there are tokens in a step wait, each tenant's of
/// another size.
class busy {
public:
    busy(std::uint64_t seed, std::vector<std::uint32_t> weights, const iteration_options& o)
        : any_(seed),
          weights_(std::move(weights)),
          o_(o),
          b_(o),
          e_(o.page_tokens, o.pages, o.host_pages),
          longest_(weights_.size()) {
        for (std::uint32_t t = 0; t < weights_.size(); ++t) {
            (void)b_.set_tenant(t, {.weight = weights_[t]});
            longest_[t] = static_cast<std::uint32_t>(4 + any_.below(40));
        }
    }
    void one_step(std::size_t tenants) {
        for (std::uint32_t t = 0; t < tenants; ++t)
            while (b_.usage(t).waiting < o_.step_tokens) {
                text prompt(1 + any_.below(longest_[t]));
                for (auto& x : prompt) x = static_cast<text_token>(any_.below(toy_decoder::vocabulary));
                const auto most = static_cast<std::uint32_t>(1 + any_.below(longest_[t]));
                REQUIRE(b_.try_push({.tenant = t, .prompt = prompt, .most_new = most}, {}));
            }
        (void)run_step(b_, e_, {});
        (void)b_.take_ended();
    }
    /// A text of a tenant that has no others.
    gpushare::text_id push_long(std::uint32_t t, std::size_t tokens) {
        (void)b_.set_tenant(t);
        text prompt(tokens);
        for (auto& x : prompt) x = static_cast<text_token>(any_.below(toy_decoder::vocabulary));
        return b_.try_push({.tenant = t, .prompt = prompt, .most_new = 2}, {}).value();
    }
    [[nodiscard]] double served(std::uint32_t t) const { return static_cast<double>(b_.usage(t).tokens) / weights_[t]; }
    [[nodiscard]] const iteration_batch& batch() const { return b_; }

private:
    support::random any_;
    std::vector<std::uint32_t> weights_;
    iteration_options o_;
    iteration_batch b_;
    toy_decoder e_;
    std::vector<std::uint32_t> longest_;  // each tenant's texts are of another size
};

}  // namespace

TEST_CASE("tenants that always have work are apart by no more than a step's tokens", "[serving]") {
    for (std::uint64_t i = 0; i < 20; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        busy all(seed, {1, 2, 5}, {.page_tokens = 4, .pages = 2000, .step_tokens = 48});
        std::vector<double> since(3);
        for (int step = 0; step < 400; ++step) {
            all.one_step(3);
            // What any two got so far, each over its weight.
            double least = all.served(0), most = least;
            for (std::uint32_t t = 1; t < 3; ++t) {
                least = std::min(least, all.served(t));
                most = std::max(most, all.served(t));
            }
            CAPTURE(step, all.served(0), all.served(1), all.served(2));
            REQUIRE(most - least <= 48);
        }
    }
}

TEST_CASE("a tenant that comes back, or had less to do than its part, has no credit", "[serving]") {
    for (const bool was_there : {false, true}) {
        CAPTURE(was_there);
        busy all(support::seed(1), {1, 1, 1}, {.page_tokens = 4, .pages = 2000, .step_tokens = 48});
        if (was_there) all.one_step(3);
        for (int step = 0; step < 200; ++step) all.one_step(2);
        const double first = all.served(0), third = all.served(2);
        for (int step = 0; step < 60; ++step) all.one_step(3);
        const double got = all.served(0) - first, back = all.served(2) - third;
        CAPTURE(got, back);
        CHECK(std::abs(got - back) <= 2 * 48);
    }
}

TEST_CASE("one that lacks its own quota has no credit for it either", "[serving]") {
    const auto seed = support::seed(1);
    iteration_batch b({.page_tokens = 4, .pages = 1000, .step_tokens = 40});
    toy_decoder e(4, 1000);
    (void)b.set_tenant(0, {.pages = 8});  // one text of 31 tokens at a time
    (void)b.set_tenant(1);
    (void)b.set_tenant(2);
    support::random any(seed);
    const auto keep_busy = [&](std::uint32_t t) {
        while (b.usage(t).waiting < 4) {
            text prompt(16);
            for (auto& x : prompt) x = static_cast<text_token>(any.below(toy_decoder::vocabulary));
            REQUIRE(b.try_push({.tenant = t, .prompt = prompt, .most_new = 15}, {}));
        }
    };
    const auto steps = [&](int n, std::uint32_t tenants) {
        for (int i = 0; i < n; ++i) {
            for (std::uint32_t t = 0; t < tenants; ++t) keep_busy(t);
            (void)run_step(b, e, {});
            (void)b.take_ended();
        }
    };
    steps(300, 2);
    const auto before = b.usage(1).tokens;
    steps(50, 3);  // a third one comes, and begins where those are who want more
    const auto second = b.usage(1).tokens - before, third = b.usage(2).tokens;
    CAPTURE(second, third);
    CHECK(second + 80 >= third);
    CHECK(third + 80 >= second);
}

TEST_CASE("each tenant gets its part of scarce pages", "[serving]") {
    std::uint64_t yields = 0;
    for (std::uint64_t i = 0; i < 10; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        busy all(seed, {1, 1}, {.page_tokens = 4, .pages = 60, .step_tokens = 48});
        for (int step = 0; step < 2000; ++step) all.one_step(2);
        const double sum = all.served(0) + all.served(1);
        CAPTURE(all.served(0) / sum);
        yields += all.batch().usage().yields;
        CHECK(all.served(0) / sum > 0.49);
        CHECK(all.served(1) / sum > 0.49);
    }
    CHECK(yields > 0);
}

TEST_CASE("a long text is not overtaken for ever by short ones", "[serving]") {
    busy all(support::seed(1), {1, 1}, {.page_tokens = 4, .pages = 40, .step_tokens = 48});
    for (int step = 0; step < 20; ++step) all.one_step(2);
    const auto id = all.push_long(2, 36 * 4);  // nearly all pages
    int steps = 0;
    for (; all.batch().tokens(id).size() == 36 * 4 && steps < 2000; ++steps) all.one_step(2);
    CAPTURE(steps);
    CHECK(steps < 100);
}

TEST_CASE("a level above isn't delayed by those below: a prompt takes as many steps as its tokens need", "[serving]") {
    for (std::uint64_t i = 0; i < 40; ++i) {
        const auto seed = support::seed(i);
        CAPTURE(seed);
        support::random any(seed);
        const iteration_options o{.page_tokens = 4,
                                  .pages = 40,
                                  .host_pages = static_cast<std::uint32_t>(any.below(40)),
                                  .step_tokens = static_cast<std::uint32_t>(8 + any.below(30)),
                                  .texts = static_cast<std::uint32_t>(2 + any.below(20)),
                                  .on_yield = any.one_in(2) ? yields_by::moving : yields_by::recompute};
        iteration_batch b(o);
        toy_decoder e(4, 40, o.host_pages);
        (void)b.set_tenant(0);
        (void)b.set_tenant(1);
        const auto random_text = [&](std::size_t n) {
            text t(n);
            for (auto& x : t) x = static_cast<text_token>(any.below(toy_decoder::vocabulary));
            return t;
        };
        for (int round = 0; round < 20; ++round) {
            while (b.usage(0).waiting < 4)
                REQUIRE(b.try_push({.tenant = 0, .prompt = random_text(1 + any.below(60)), .most_new = 20}, {}));
            for (auto n = any.below(20); n-- > 0;) (void)run_step(b, e, {});
            const auto prompt = random_text(1 + any.below(100));
            const auto id = b.try_push({.tenant = 1, .prompt = prompt, .most_new = 3, .level = 1}, {}).value();
            const auto steps = (prompt.size() + o.step_tokens - 1) / o.step_tokens;
            for (std::size_t s = 0; s < steps; ++s) (void)run_step(b, e, {});
            REQUIRE(b.tokens(id).size() == prompt.size() + 1);
            for (int s = 0; s < 2; ++s) (void)run_step(b, e, {});
            const auto over = b.take_ended();
            const auto it = std::ranges::find(over, id, &gpushare::ended_text::id);
            REQUIRE(it != over.end());
            CHECK(it->tokens == toy_decoder::alone(prompt, 3));
        }
    }
}

}  // namespace iteration_traces_test
