// SPDX-License-Identifier: Apache-2.0
// The contract of every engine for batching by iteration: each text has the same tokens as alone. A
// model is a type with
//   typename engine                                  the model under test
//   engine make(page_tokens, pages, host_pages)      with so many pages of its own
//   std::vector<text_token> alone(prompt, most_new)  what is added to a prompt by itself, in one page or without pages
//   text_token vocabulary                            tokens are below it
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <gpushare/serving/iteration_batch.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace conformance {

/// Texts of two tenants in `b`, and what is to be added to each.
template <class Model>
class engine_check {
    using text = std::vector<gpushare::text_token>;

public:
    engine_check(const gpushare::iteration_options& o, std::uint64_t seed)
        : any_(seed), b_(o), engine_(model_.make(o.page_tokens, o.pages, o.host_pages)) {
        for (std::uint32_t t = 1; t <= 2; ++t) REQUIRE(b_.set_tenant(t).code == gpushare::errc::none);
    }
    text some(std::size_t n) {
        text t(n);
        for (auto& x : t) x = static_cast<gpushare::text_token>(any_.below(model_.vocabulary));
        return t;
    }
    gpushare::text_id push(std::uint32_t tenant, const text& prompt, std::uint32_t most_new) {
        const auto id = b_.try_push({.tenant = tenant, .prompt = prompt, .most_new = most_new}, {}).value();
        expected_[id] = model_.alone(prompt, most_new);
        return id;
    }
    void fork(gpushare::text_id of, const text& more, std::uint32_t most_new) {
        const auto known = b_.tokens(of);
        text whole(known.begin(), known.end());
        whole.insert(whole.end(), more.begin(), more.end());
        const auto id = b_.try_fork(of, {.prompt = more, .most_new = most_new}, {}).value();
        expected_[id] = model_.alone(whole, most_new);
    }
    void steps(int n) {
        while (n-- > 0) (void)run_step(b_, engine_, {});
    }
    /// Until all are over.
    gpushare::iteration_usage finish() {
        while (run_step(b_, engine_, {}) != 0) {
        }
        for (const auto& t : b_.take_ended()) {
            CHECK(t.why == gpushare::errc::none);
            CHECK(t.tokens == expected_.at(t.id));
            expected_.erase(t.id);
        }
        CHECK(expected_.empty());
        return b_.usage();
    }

private:
    support::random any_;
    Model model_{};
    gpushare::iteration_batch b_;
    typename Model::engine engine_;
    std::map<gpushare::text_id, text> expected_;
};

template <class Model>
requires gpushare::iteration_engine<typename Model::engine>
void check_iteration_engine() {
    using gpushare::yields_by;
    const auto seed = support::seed(1);
    CAPTURE(seed);

    SECTION("prompts of any length, in chunks of any length, beside others' decoding") {
        engine_check<Model> c({.page_tokens = 4, .pages = 64, .step_tokens = 7, .share_prefixes = false}, seed);
        for (std::size_t n = 1; n <= 10; ++n) {
            (void)c.push(1 + static_cast<std::uint32_t>(n % 2), c.some(n), 6);
            c.steps(1);
        }
        CHECK(c.finish().found == 0);
    }
    SECTION("prefixes that another text has computed, to the last token") {
        engine_check<Model> c({.page_tokens = 4, .pages = 64, .step_tokens = 64}, seed);
        const auto prompt = c.some(12);
        (void)c.push(1, prompt, 3);
        (void)c.finish();
        for (const std::size_t n : {4U, 8U, 11U, 12U})
            (void)c.push(1, {prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(n)}, 5);
        (void)c.push(2, prompt, 5);
        const auto u = c.finish();
        CHECK(u.found == 3 + 7 + 8 + 11);
        CHECK(u.copies == 3);
    }
    SECTION("forks, with other tokens behind what they have in common, and without") {
        engine_check<Model> c({.page_tokens = 4, .pages = 64, .step_tokens = 64}, seed);
        const auto id = c.push(1, c.some(9), 12);
        c.steps(3);
        c.fork(id, {}, 9);
        c.fork(id, c.some(1), 9);
        c.steps(2);
        c.fork(id, c.some(6), 9);
        CHECK(c.finish().copies >= 2);
    }
    for (const auto how : {yields_by::recompute, yields_by::moving})
        SECTION(how == yields_by::moving ? "texts that yield, and move to the host"
                                         : "texts that yield, and are computed again") {
            engine_check<Model> c({.page_tokens = 4, .pages = 12, .host_pages = 16, .step_tokens = 24, .on_yield = how},
                                  seed);
            const auto prefix = c.some(6);
            for (std::uint32_t i = 0; i < 12; ++i) {
                auto prompt = i % 3 == 0 ? prefix : c.some(1 + i);
                (void)c.push(1 + i % 2, prompt, 20);
            }
            const auto u = c.finish();
            CHECK(u.yields != 0);
            CHECK((u.moved != 0) == (how == yields_by::moving));
        }
}

}  // namespace conformance
