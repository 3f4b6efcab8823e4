// SPDX-License-Identifier: Apache-2.0
// Runs the decoder's test (tests/interop/torch/decoder_test.cpp) on a device.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "torch_decoder.hpp"

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>
#include <gpushare/interop/libtorch.hpp>
#include <gpushare/serving/iteration_batch.hpp>
#include <gpushare/serving/page_store.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "experiments.hpp"

namespace gpu_torch {
namespace {

namespace cu = gpushare::cuda;
using namespace gpushare::literals;
using gpushare::errc;
using gpushare::iteration_batch;
using gpushare::text_id;
using gpushare::text_token;
using gpushare::yields_by;
using text = std::vector<text_token>;
using tenancy = gpushare::tenancy<cu::node>;

constexpr std::uint32_t page_tokens = 8, num_pages = 24, host_pages = 16;
/// If the best scores are this close, rounding decides their order.
constexpr double rounding = 1e-9;

/// A text, with the tokens that the model adds when the text runs alone.
struct request {
    text prompt, added;
    std::uint32_t most_new = 0;
    std::uint32_t tenant = 0;
    int level = 0;
};

/// Random but repeatable texts. Half of the texts start with the same prefix.
class requests {
public:
    requests(const torch_decoder::model& m, std::uint64_t longest) : model_(m), longest_(longest) {
        for (auto& t : prefix_) t = token();
    }
    request next(int level) {
        for (;;) {
            request r;
            r.level = level;
            if (below(2) == 0) r.prompt = prefix_;
            for (std::uint64_t n = 1 + below(30); n > 0; --n) r.prompt.push_back(token());
            r.most_new = static_cast<std::uint32_t>(8 + below(longest_));
            r.tenant = static_cast<std::uint32_t>(1 + below(2));
            double margin = 1;
            r.added = torch_decoder::alone(model_, r.prompt, r.most_new, &margin);
            if (margin > rounding) return r;
        }
    }

private:
    std::uint64_t below(std::uint64_t n) { return any_() % n; }
    text_token token() { return static_cast<text_token>(below(static_cast<std::uint64_t>(model_.size().vocabulary))); }

    const torch_decoder::model& model_;
    std::uint64_t longest_;
    std::mt19937_64 any_{3};
    text prefix_ = text(20);
};

/// If `faulty`, erases the keys and values of a page in use at every fourth step.
class pupil {
public:
    pupil(torch_decoder::engine e, at::Tensor cache, bool faulty)
        : engine_(std::move(e)), cache_(std::move(cache)), faulty_(faulty) {}
    void step(const gpushare::step_plan& plan, std::span<text_token> next) {
        engine_.step(plan, next);
        if (faulty_ && !plan.entries.empty() && ++steps_ % 4 == 0)
            (void)cache_.select(0, plan.entries[0].pages[0]).zero_();
    }

private:
    torch_decoder::engine engine_;
    at::Tensor cache_;
    bool faulty_;
    int steps_ = 0;
};
static_assert(gpushare::iteration_engine<pupil>);

/// A tenant with pages for the decoder. All pages lie in one tensor.
struct chat_on_pages {
    explicit chat_on_pages(const torch_decoder::model& m)
        : chunks(addresses, scrubbing, {.capacity = 128}),
          store(chunks, chat.memory().limit(), gpushare::tenant_tag{chat.tag()},
                {.lanes = static_cast<std::uint32_t>(m.lanes()),
                 .token = m.token_bytes(),
                 .tokens = page_tokens,
                 .pages = num_pages},
                "chat") {
        store.allocate(pages);
        scrubbing.record().wait(gpushare::never);
        cache =
            torch_decoder::pages_of(store.data(), num_pages, store.page_stride(), store.lane_stride(), page_tokens, m);
    }
    ~chat_on_pages() { (void)store.free(pages); }
    chat_on_pages(const chat_on_pages&) = delete;
    chat_on_pages& operator=(const chat_on_pages&) = delete;

    cu::node node{{.devices = {0}}};
    tenancy shared{node};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 256_MiB, .compute = 50_pct});
    cu::virtual_memory addresses{node, gpushare::device_id{0}};
    cu::stream scrubbing = node.make_stream(gpushare::device_id{0});
    gpushare::chunk_pool<cu::virtual_memory, cu::stream> chunks;
    gpushare::page_store<cu::virtual_memory, cu::stream> store;
    std::vector<std::uint32_t> pages = std::vector<std::uint32_t>(num_pages);
    at::Tensor cache;
};

std::size_t differing(const text& a, const text& b) {
    std::size_t n = std::max(a.size(), b.size()) - std::min(a.size(), b.size());
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) n += a[i] != b[i];
    return n;
}

/// Submits eight texts at once and the other texts later, some with higher priority. Counts the
/// tokens that differ from those of the texts alone.
double mismatches(const torch_decoder::model& m, chat_on_pages& on, const std::vector<request>& all, yields_by how,
                  bool faulty) {
    iteration_batch texts(
        {.page_tokens = page_tokens, .host_pages = host_pages, .step_tokens = 24, .prompt_chunk = 10, .on_yield = how});
    texts.add_pages(on.pages);
    for (std::uint32_t t = 1; t <= 2; ++t)
        if (texts.set_tenant(t, {.weight = t}).code != errc::none) throw std::logic_error("no such tenant");
    std::map<text_id, const request*> under_way;
    std::size_t come = 0;
    const auto one_comes = [&] {
        const request& r = all[come++];
        auto id =
            texts.try_push({.tenant = r.tenant, .prompt = r.prompt, .most_new = r.most_new, .level = r.level}, {});
        under_way[std::move(id).value()] = &r;
    };
    const auto on_host = torch_decoder::make_pages(host_pages, page_tokens, m, m.options().device(at::kCPU));
    pupil engine(torch_decoder::engine(m, on.cache, on_host), on.cache, faulty);
    while (come < 8 && come < all.size()) one_comes();
    for (int n = 0; run_step(texts, engine, {}) != 0; ++n)
        if (n % 5 == 4 && come < all.size()) one_comes();
    double wrong = 0;
    for (const auto& t : texts.take_ended()) {
        const auto r = under_way.extract(t.id);
        if (t.why != errc::none || r.empty()) throw std::runtime_error("a text failed");
        wrong += static_cast<double>(differing(t.tokens, r.mapped()->added));
    }
    if (!under_way.empty() || come < all.size()) throw std::runtime_error("a text is missing");
    if (texts.usage().yields == 0 || (texts.usage().moved > 0) != (how == yields_by::moving))
        throw std::runtime_error("no text yielded as it should");
    return wrong;
}

}  // namespace

bool decoder(bench::report& out, bool small) {
    const at::NoGradGuard by_itself;
    const auto m = torch_decoder::model({}, 7, at::kDouble).to(at::Device(at::kCUDA, 0));
    chat_on_pages on(m);
    gpushare::torch_scope scope{on.node, on.chat};
    double planted = 0;
    std::vector<double> wrong;
    {
        const auto inside = scope.enter();
        requests any(m, small ? 8 : 40);
        std::vector<request> all;
        std::size_t tokens = 0;
        for (int i = 0; i < (small ? 9 : 24); ++i) {
            all.push_back(any.next(i >= 8 && i % 3 == 2 ? 1 : 0));
            tokens += all.back().added.size();
        }
        for (const auto how : {yields_by::recompute, yields_by::moving})
            wrong.push_back(mismatches(m, on, all, how, false));
        planted = mismatches(m, on, all, yields_by::recompute, true);
        std::printf("# %zu texts, %zu tokens, %.1f MiB of the tenant's memory in torch\n", all.size(), tokens,
                    static_cast<double>(scope.usage().peak_reserved.count()) / (1 << 20));
    }
    out.figure("gpu.decoder_token_mismatches", wrong, "tokens",
               {bench::at_most(0), planted, "pages that lose their keys and values"}, bench::statistic::most);
    return wrong[0] + wrong[1] == 0 && planted > 0;
}

}  // namespace gpu_torch
