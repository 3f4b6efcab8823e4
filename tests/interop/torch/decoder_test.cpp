// SPDX-License-Identifier: Apache-2.0
// A decoder on libtorch, batched by iteration: each text has the same tokens as alone. For
// `./dev check`: libtorch's headers take a while to compile.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include "torch_decoder.hpp"  // in front of Catch: glog has a CHECK, too

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/interop/libtorch_cpu.hpp>
#include <gpushare/serving/iteration_batch.hpp>
#include <gpushare/serving/page_store.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "conformance/iteration_engine_suite.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace torch_decoder_test {
namespace {

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::iteration_batch;
using gpushare::text_id;
using gpushare::text_token;
using gpushare::yields_by;
using text = std::vector<text_token>;

/// Where two scores are so close, their order is up to rounding.
constexpr double rounding = 1e-9;

const torch_decoder::model& weights() {
    static const torch_decoder::model all({}, 7, at::kDouble);
    return all;
}
text alone(const text& prompt, std::uint32_t most_new) {
    double margin = 1;
    auto added = torch_decoder::alone(weights(), prompt, most_new, &margin);
    CHECK(margin > rounding);  // else another seed is to be used
    return added;
}

/// The decoder, as the suite for engines wants it.
struct torch_model {
    using engine = torch_decoder::engine;
    static constexpr text_token vocabulary = 97;
    static engine make(std::uint32_t page_tokens, std::uint32_t pages, std::uint32_t host_pages) {
        const auto options = weights().options();
        return {weights(), torch_decoder::make_pages(pages, page_tokens, weights(), options),
                torch_decoder::make_pages(host_pages, page_tokens, weights(), options)};
    }
    static text alone(const text& prompt, std::uint32_t most_new) {
        return torch_decoder_test::alone(prompt, most_new);
    }
};

}  // namespace

TEST_CASE("a decoder on libtorch is an engine for batching by iteration", "[interop][torch]") {
    at::set_num_threads(1);
    conformance::check_iteration_engine<torch_model>();
}

TEST_CASE("the decoder's next token depends on what is far in front of it", "[interop][torch]") {
    text prompt;
    for (text_token i = 0; i < 12; ++i) prompt.push_back(5 * i % 97);
    const auto added = alone(prompt, 20);
    CHECK(std::set<text_token>(added.begin(), added.end()).size() > 5);
    std::set<text> all;
    for (text_token first = 0; first < 10; ++first) {
        prompt[0] = first;
        all.insert(alone(prompt, 8));
    }
    CHECK(all.size() > 5);
}

TEST_CASE("the decoder's pages and tensors are its tenant's, and texts that yield end as they would alone",
          "[interop][torch]") {
    constexpr std::uint32_t page_tokens = 8, num_pages = 24;
    gpushare::host::node node{{.memory = 64_MiB, .sms = 1}};
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 8_MiB, .compute = 50_pct});
    gpushare::host::virtual_memory addresses(node.memory({0}), 64_KiB);
    auto scrubbing = node.make_stream({0});
    gpushare::chunk_pool<gpushare::host::virtual_memory, gpushare::host::stream> chunks(addresses, scrubbing,
                                                                                        {.capacity = 128});
    auto& m = weights();
    gpushare::page_store store(chunks, chat.memory().limit(), gpushare::tenant_tag{chat.tag()},
                               {.lanes = static_cast<std::uint32_t>(m.lanes()),
                                .token = m.token_bytes(),
                                .tokens = page_tokens,
                                .pages = num_pages},
                               "chat");
    std::vector<std::uint32_t> pages(num_pages);
    store.allocate(pages);
    REQUIRE(store.slab_stride() == store.page_stride() * store.pages_per_slab());  // one tensor has them all
    const auto held = chat.usage().current;
    CHECK(held >= m.token_bytes() * (static_cast<std::uint64_t>(m.lanes()) * page_tokens * num_pages));

    const auto seed = support::seed(3);
    CAPTURE(seed);
    support::random any(seed);
    for (const auto how : {yields_by::recompute, yields_by::moving}) {
        iteration_batch texts(
            {.page_tokens = page_tokens, .host_pages = 16, .step_tokens = 24, .prompt_chunk = 10, .on_yield = how});
        texts.add_pages(pages);
        for (std::uint32_t t = 1; t <= 2; ++t) REQUIRE(texts.set_tenant(t, {.weight = t}).code == errc::none);
        std::map<text_id, text> expected;
        gpushare::torch_cpu_scope scope{node, chat};
        torch_decoder::engine engine(
            m,
            torch_decoder::pages_of(store.data(), num_pages, store.page_stride(), store.lane_stride(), page_tokens, m),
            torch_decoder::make_pages(16, page_tokens, m, m.options()));
        text prefix(20);
        for (auto& t : prefix) t = static_cast<text_token>(any.below(97));
        const auto come = [&](int level) {
            text prompt = any.one_in(2) ? prefix : text{};
            for (std::uint64_t n = 1 + any.below(30); n > 0; --n)
                prompt.push_back(static_cast<text_token>(any.below(97)));
            const auto more = static_cast<std::uint32_t>(8 + any.below(40));
            const auto tenant = static_cast<std::uint32_t>(1 + any.below(2));
            auto id = texts.try_push({.tenant = tenant, .prompt = prompt, .most_new = more, .level = level}, {});
            expected[std::move(id).value()] = alone(prompt, more);
        };
        for (int i = 0; i < 8; ++i) come(0);
        const auto inside = scope.enter();
        for (int n = 0; run_step(texts, engine, {}) != 0; ++n)
            if (n % 5 == 4 && n < 60) come(any.one_in(3) ? 1 : 0);
        CHECK(scope.usage().peak_reserved > 0_B);  // what the layers computed with
        for (const auto& t : texts.take_ended()) {
            CHECK(t.why == errc::none);
            CHECK(t.tokens == expected.at(t.id));
            expected.erase(t.id);
        }
        CHECK(expected.empty());
        const auto u = texts.usage();
        CHECK(u.yields > 0);
        CHECK(u.found > 0);
        CHECK((u.moved > 0) == (how == yields_by::moving));
    }
    CHECK(store.free(pages) == errc::none);
}

}  // namespace torch_decoder_test
