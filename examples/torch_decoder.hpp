// SPDX-License-Identifier: Apache-2.0
// A small decoder on libtorch as an engine for batching by iteration. Keys and values lie in pages,
// of a page_store or of a tensor, and the tokens of all texts in a step go through each layer
// together. The code works on any device, because the tensors determine the device.
//
//   const torch_decoder::model model({}, 1, at::kDouble);  // weights by chance, always the same
//   auto cache = torch_decoder::pages_of(store.data(), 64, store.page_stride(), store.lane_stride(), 16, model);
//   torch_decoder::engine engine(model, cache, on_the_host);              // for gpushare::run_step
//   torch_decoder::alone(model, prompt, 20);  // one text, without pages
//
// On CUDA, use .to(at::kCUDA) for the model, at::TensorOptions(at::kCUDA) for the pages, pinned
// memory for the pages on the host, and a torch_scope around run_step(). A step ends with a copy of
// the next tokens to the host, so all of its work is done when step() returns.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/serving/iteration_batch.hpp>
#include <gpushare/units.hpp>

namespace torch_decoder {

using token = gpushare::text_token;

/// A decoder's sizes.
struct sizes {
    std::int64_t vocabulary = 97, width = 32, heads = 4, layers = 2;
};

/// The weights, and the computations of a layer. Copies share the weights. Any thread may call
/// const members.
class model {
public:
    /// Random weights, which depend only on the seed and not on the machine.
    model(const sizes& s, std::uint64_t seed, at::ScalarType type) : sizes_(s) {
        auto chance = at::detail::createCPUGenerator(seed);
        const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
            const auto all = at::randn({rows, columns}, chance, at::TensorOptions(at::kDouble));
            return (all / std::sqrt(static_cast<double>(rows))).to(type);
        };
        embedding_ = matrix(s.vocabulary, s.width) * std::sqrt(static_cast<double>(s.vocabulary));
        for (std::int64_t l = 0; l < s.layers; ++l)
            layers_.push_back({matrix(s.width, 3 * s.width), matrix(s.width, s.width), matrix(s.width, 4 * s.width),
                               matrix(4 * s.width, s.width)});
        head_ = matrix(s.width, s.vocabulary);
    }
    /// The same model on another device.
    [[nodiscard]] model to(at::Device device) const {
        model there = *this;
        there.embedding_ = embedding_.to(device);
        there.head_ = head_.to(device);
        for (auto& l : there.layers_)
            for (auto* m : {&l.attention, &l.out, &l.up, &l.down}) *m = m->to(device);
        return there;
    }

    [[nodiscard]] const sizes& size() const noexcept { return sizes_; }
    /// The number of lanes: keys and values of each layer.
    [[nodiscard]] std::int64_t lanes() const noexcept { return 2 * sizes_.layers; }
    /// The bytes of one token in one lane.
    [[nodiscard]] gpushare::bytes token_bytes() const noexcept {
        return gpushare::bytes{static_cast<std::uint64_t>(sizes_.width) * embedding_.element_size()};
    }
    [[nodiscard]] at::TensorOptions options() const { return embedding_.options(); }
    /// Numbers for index functions, on the model's device.
    [[nodiscard]] at::Tensor numbers(const std::vector<std::int64_t>& n) const {
        const auto here = at::TensorOptions(at::kLong);
        return at::from_blob(const_cast<std::int64_t*>(n.data()), {static_cast<std::int64_t>(n.size())}, here)
            .clone()
            .to(embedding_.device());
    }

    /// The activations of these tokens at these positions before the head, one row for each token.
    /// `attend(layer, query, key, value)` returns the attention of the rows to the tokens that they
    /// may see.
    template <class Attend>
    [[nodiscard]] at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions, Attend attend) const {
        at::Tensor x = embedding_.index_select(0, tokens) + places(positions);
        for (std::size_t l = 0; l < layers_.size(); ++l) {
            const auto parts = normal(x).matmul(layers_[l].attention).chunk(3, 1);
            x = x + attend(static_cast<std::int64_t>(l), parts[0], parts[1], parts[2]).matmul(layers_[l].out);
            x = x + at::silu(normal(x).matmul(layers_[l].up)).matmul(layers_[l].down);
        }
        return normal(x);
    }
    /// The attention of rows, from position `begin` on, to the keys and values of all positions up
    /// to their own.
    [[nodiscard]] at::Tensor attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                                       std::int64_t begin) const {
        const auto by_head = [&](const at::Tensor& t) {
            return t.view({t.size(0), sizes_.heads, sizes_.width / sizes_.heads}).transpose(0, 1);
        };
        const auto q = by_head(query.contiguous()), k = by_head(keys), v = by_head(values);
        const auto here = at::TensorOptions(at::kLong).device(query.device());
        const auto rows = at::arange(begin, begin + query.size(0), here).unsqueeze(1);
        const auto later = at::arange(keys.size(0), here).unsqueeze(0) > rows;
        const auto scores = q.matmul(k.transpose(1, 2)) / std::sqrt(static_cast<double>(sizes_.width / sizes_.heads));
        const auto weights = scores.masked_fill(later, -INFINITY).softmax(-1);
        return weights.matmul(v).transpose(0, 1).reshape({query.size(0), sizes_.width});
    }
    /// A score for each token of the vocabulary.
    [[nodiscard]] at::Tensor scores(const at::Tensor& rows) const { return rows.matmul(head_); }

private:
    struct layer {
        at::Tensor attention, out, up, down;
    };

    [[nodiscard]] static at::Tensor normal(const at::Tensor& x) { return x * at::rsqrt((x * x).mean(-1, true) + 1e-6); }
    [[nodiscard]] at::Tensor places(const at::Tensor& positions) const {
        const auto wave = at::arange(sizes_.width / 2, options()) * (-4.0 / static_cast<double>(sizes_.width));
        const auto angle = positions.to(options().dtype()).unsqueeze(1) * at::exp(wave).unsqueeze(0);
        return at::cat({at::sin(angle), at::cos(angle)}, 1);
    }

    sizes sizes_;
    at::Tensor embedding_, head_;
    std::vector<layer> layers_;
};

/// Existing memory as pages: [page, lane, token of the page, width]. The strides are those of a
/// page_store whose slabs follow each other without gaps, so that slab_stride() is pages_per_slab()
/// page strides.
[[nodiscard]] inline at::Tensor pages_of(void* data, std::uint32_t pages, gpushare::bytes page_stride,
                                         gpushare::bytes lane_stride, std::uint32_t tokens, const model& m) {
    const auto elements = [&](gpushare::bytes b) {
        return static_cast<std::int64_t>(b.count() / m.options().dtype().itemsize());
    };
    return at::from_blob(data, {pages, m.lanes(), tokens, m.size().width},
                         {elements(page_stride), elements(lane_stride), m.size().width, 1}, m.options());
}
/// Pages in memory of their own. `options` may name pinned host memory.
[[nodiscard]] inline at::Tensor make_pages(std::uint32_t pages, std::uint32_t tokens, const model& m,
                                           const at::TensorOptions& options) {
    return at::empty({pages, m.lanes(), tokens, m.size().width}, options);
}

/// Computes the steps of an iteration_batch. Throws what torch throws. One thread at a time uses
/// it.
class engine {
public:
    /// `device` has the pages in which texts are computed; `host` has the pages of texts that
    /// yielded.
    engine(model m, at::Tensor device, at::Tensor host)
        : model_(std::move(m)), device_(std::move(device)), host_(std::move(host)) {}

    void step(const gpushare::step_plan& plan, std::span<token> next) {
        for (const auto& m : plan.moves) move(m);
        if (plan.entries.empty()) return;
        const auto rows = model_.forward(tokens_of(plan), positions_of(plan),
                                         [&](std::int64_t layer, const auto& q, const auto& k, const auto& v) {
                                             return attend(plan, layer, q, k, v);
                                         });
        const auto best = model_.scores(rows.index_select(0, last_of(plan))).argmax(-1).to(at::kCPU);
        for (std::size_t i = 0; i < next.size(); ++i) next[i] = static_cast<token>(best.data_ptr<std::int64_t>()[i]);
    }

private:
    void move(const gpushare::page_move& m) {
        auto& from = m.kind == gpushare::page_move_kind::to_device ? host_ : device_;
        auto& to = m.kind == gpushare::page_move_kind::to_host ? host_ : device_;
        to.select(0, m.to).copy_(from.select(0, m.from));
    }

    // One number for each token of the step: f(entry, the number of the entry's earlier tokens).
    template <class F>
    [[nodiscard]] at::Tensor for_tokens(const gpushare::step_plan& plan, F f) const {
        std::vector<std::int64_t> all;
        all.reserve(plan.tokens);
        for (const auto& e : plan.entries)
            for (std::size_t i = 0; i < e.tokens.size(); ++i) all.push_back(static_cast<std::int64_t>(f(e, i)));
        return model_.numbers(all);
    }
    [[nodiscard]] at::Tensor tokens_of(const gpushare::step_plan& plan) const {
        return for_tokens(plan, [](const auto& e, std::size_t i) { return e.tokens[i]; });
    }
    [[nodiscard]] at::Tensor positions_of(const gpushare::step_plan& plan) const {
        return for_tokens(plan, [](const auto& e, std::size_t i) { return e.begin + i; });
    }
    [[nodiscard]] at::Tensor last_of(const gpushare::step_plan& plan) const {
        std::vector<std::int64_t> last;
        std::int64_t so_far = 0;
        for (const auto& e : plan.entries) last.push_back((so_far += static_cast<std::int64_t>(e.tokens.size())) - 1);
        return model_.numbers(last);
    }

    // Keys and values go into the pages first. Then each text attends to its own pages.
    [[nodiscard]] at::Tensor attend(const gpushare::step_plan& plan, std::int64_t layer, const at::Tensor& q,
                                    const at::Tensor& k, const at::Tensor& v) {
        const auto per_page = static_cast<std::size_t>(device_.size(2));
        const auto page =
            for_tokens(plan, [&](const auto& e, std::size_t i) { return e.pages[(e.begin + i) / per_page]; });
        const auto slot = for_tokens(plan, [&](const auto& e, std::size_t i) { return (e.begin + i) % per_page; });
        auto keys = device_.select(1, 2 * layer), values = device_.select(1, 2 * layer + 1);
        keys.index_put_({page, slot}, k);
        values.index_put_({page, slot}, v);
        std::vector<at::Tensor> seen;
        std::int64_t first = 0;
        for (const auto& e : plan.entries) {
            const auto n = static_cast<std::int64_t>(e.tokens.size());
            const auto known = static_cast<std::int64_t>(e.begin) + n;
            const auto used = model_.numbers({e.pages.begin(), e.pages.end()});
            const auto all = [&](const at::Tensor& lane) {
                return lane.index_select(0, used).view({-1, lane.size(2)}).narrow(0, 0, known);
            };
            seen.push_back(model_.attention(q.narrow(0, first, n), all(keys), all(values), e.begin));
            first += n;
        }
        return at::cat(seen);
    }

    model model_;
    at::Tensor device_, host_;
};
static_assert(gpushare::iteration_engine<engine>);

/// The tokens added to a prompt that runs by itself. The whole text is computed again for each
/// token. If `margin` is given, it is lowered to the least distance between the scores of the best
/// token and the next best.
[[nodiscard]] inline std::vector<token> alone(const model& m, std::span<const token> prompt, std::uint32_t most_new,
                                              double* margin = nullptr) {
    std::vector<std::int64_t> text(prompt.begin(), prompt.end());
    std::vector<token> added;
    while (added.size() < most_new) {
        std::vector<std::int64_t> places(text.size());
        for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int64_t>(i);
        const auto rows = m.forward(m.numbers(text), m.numbers(places),
                                    [&](std::int64_t, const auto& q, const auto& k, const auto& v) {
                                        return m.attention(q, k.contiguous(), v.contiguous(), 0);
                                    });
        const auto [scores, tokens] = m.scores(rows.narrow(0, rows.size(0) - 1, 1)).topk(2, -1);
        if (margin != nullptr) *margin = std::min(*margin, (scores.select(1, 0) - scores.select(1, 1)).item<double>());
        text.push_back(tokens.select(1, 0).item<std::int64_t>());
        added.push_back(static_cast<token>(text.back()));
    }
    return added;
}

}  // namespace torch_decoder
