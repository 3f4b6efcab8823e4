// SPDX-License-Identifier: Apache-2.0
// A transformer's block over two ranks (Megatron-LM's split). Each rank has half of the heads and
// half of the hidden layer, and after each part an all-reduce sums the ranks' contributions. Here
// the sum, the residual and the norm are one pass over memory.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <span>
#include <utility>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>

#include "inference_server/engine.hpp"

namespace inference_server {

namespace {

namespace gs = gpushare;
using namespace std::chrono_literals;
using weights = std::pmr::vector<float>;

constexpr std::size_t tokens = 8, width = 64, ranks = 2, heads = 2, head = 16,
                      hidden = 128;  // heads and hidden elements of a rank
using rows = std::array<float, tokens * width>;

/// One rank's weights, and its input and output of an all-reduce.
struct half {
    half(gs::sim::random& any, std::pmr::memory_resource& memory)
        : query(some(width * heads * head, any, memory)),
          key(some(width * heads * head, any, memory)),
          value(some(width * heads * head, any, memory)),
          out(some(heads * head * width, any, memory)),
          up(some(width * hidden, any, memory)),
          down(some(hidden * width, any, memory)) {}

    static weights some(std::size_t n, gs::sim::random& any, std::pmr::memory_resource& memory) {
        weights w(n, &memory);
        for (auto& x : w) x = static_cast<float>(0.25 * (any.fraction() - 0.5));
        return w;
    }
    weights query, key, value, out, up, down;
};

/// A rank's working memory during a run.
struct working {
    rows partial, attended, result;
    std::array<float, tokens * heads * head> q, k, v, seen;
    std::array<float, tokens * hidden> h;
};

/// to = from * w, row by row.
void multiply(std::span<const float> from, const weights& w, std::span<float> to) {
    const std::size_t in = from.size() / tokens, n = to.size() / tokens;
    std::ranges::fill(to, 0.0F);
    for (std::size_t t = 0; t < tokens; ++t)
        for (std::size_t i = 0; i < in; ++i)
            for (std::size_t o = 0; o < n; ++o) to[t * n + o] += from[t * in + i] * w[i * n + o];
}

/// Computes the rank's heads: each token attends to itself and to earlier tokens.
void attend(const half& mine, working& with, std::span<const float> x, std::span<float> to) {
    auto &q = with.q, &k = with.k, &v = with.v, &seen = with.seen;
    seen.fill(0);
    multiply(x, mine.query, q), multiply(x, mine.key, k), multiply(x, mine.value, v);
    const auto at = [](std::size_t t, std::size_t h) { return (t * heads + h) * head; };
    for (std::size_t h = 0; h < heads; ++h)
        for (std::size_t t = 0; t < tokens; ++t) {
            std::array<float, tokens> weight{};
            float sum = 0;
            for (std::size_t s = 0; s <= t; ++s) {
                float dot = 0;
                for (std::size_t i = 0; i < head; ++i) dot += q[at(t, h) + i] * k[at(s, h) + i];
                sum += weight[s] = std::exp(dot / std::sqrt(float{head}));
            }
            for (std::size_t s = 0; s <= t; ++s)
                for (std::size_t i = 0; i < head; ++i) seen[at(t, h) + i] += weight[s] / sum * v[at(s, h) + i];
        }
    multiply(seen, mine.out, to);
}

void feed_forward(const half& mine, working& with, std::span<const float> x, std::span<float> to) {
    multiply(x, mine.up, with.h);
    for (auto& v : with.h) v = std::max(v, 0.0F);
    multiply(with.h, mine.down, to);
}

class transformer_block final : public engine {
public:
    explicit transformer_block(std::pmr::memory_resource& memory)
        : halves_{half(any_, memory), half(any_, memory)}, norm_(width, 1.0F, &memory), group_(ranks) {}

    [[nodiscard]] std::uint32_t blocks() const noexcept override { return ranks; }

    [[nodiscard]] std::size_t scratch() const noexcept override { return ranks * sizeof(working); }

    void run_in(std::span<std::byte> scratch, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                gs::host::kernel_context& on) override {
        const auto rank = on.block_rank();
        auto& mine = *new (scratch.data() + rank * sizeof(working)) working;
        const half& ours = halves_[rank];
        const auto x = inputs[0].as<float>();
        attend(ours, mine, x, mine.partial);
        join(rank, mine.partial, x, mine.attended);
        feed_forward(ours, mine, mine.attended, mine.partial);
        join(rank, mine.partial, mine.attended, mine.result);
        if (rank != 0) return;
        outputs.push_back({"OUTPUT", datatype::fp32, {tokens, width}, {}});
        const auto bytes = std::as_bytes(std::span(mine.result));
        outputs[0].data.assign(bytes.begin(), bytes.end());
    }

private:
    /// The norm of the sum of both ranks' contributions and the residual.
    void join(std::uint32_t rank, std::span<const float> brought, std::span<const float> residual,
              std::span<float> to) {
        const auto p = gs::reduced(brought, width) | gs::add(residual) | gs::rms_norm(norm_, 1e-6F);
        const auto fault = gs::try_run(group_.rank(rank), p, to, gs::host::steady_clock::now() + 10s);
        if (fault) throw std::runtime_error("the halves of the block didn't meet");
    }

    gs::sim::random any_{3};
    std::array<half, ranks> halves_;
    weights norm_;
    gs::communicator group_;
};

}  // namespace

model_source tensor_parallel_block() {
    const std::vector<std::int64_t> shape{tokens, width};
    return {
        {"block", "gpushare_tiny", {{"INPUT", datatype::fp32, shape}}, {{"OUTPUT", datatype::fp32, shape}}, 0, false},
        [](std::pmr::memory_resource& memory) { return std::make_unique<transformer_block>(memory); }};
}

}  // namespace inference_server
