// SPDX-License-Identifier: Apache-2.0
// Defines the functions of collective_kernels.hpp. The including file must be able to launch
// kernels on cuda::stream, and must include the launch headers first: nvcc's collective_kernels.cu,
// and the rehearsal over the stand-in.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>

#include "gpu/collective_kernels.hpp"

namespace bench {

namespace collective_launches {

/// The ranks' parts of an array.
template <class T>
class parts {
public:
    parts(T* first, std::size_t of_rank, std::size_t ranks) : ranks_(ranks) {
        for (std::size_t r = 0; r < ranks; ++r) each_[r] = first + r * of_rank;
    }
    [[nodiscard]] std::span<T* const> all() const noexcept { return std::span(each_).first(ranks_); }
    [[nodiscard]] T* operator[](std::size_t r) const noexcept { return each_[r]; }

private:
    std::array<T*, gpushare::max_shared_ranks> each_{};
    std::size_t ranks_;
};

/// Every rank passes once over all its rows, independently of the other ranks.
template <class Epilogue>
struct pass {
    std::uint32_t ranks;
    std::size_t tokens;
    const float* from;
    float* scratch;
    Epilogue of[gpushare::max_shared_ranks];

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD void operator()(Context& ctx) const {
        constexpr std::size_t width = transformer_step::width;
        const std::uint32_t blocks = ctx.num_blocks() / ranks, rank = ctx.block_rank() / blocks;
        const auto rows = gpushare::shard_of(tokens, ctx.block_rank() % blocks, blocks);
        gpushare::apply_rows(ctx, of[rank], {.first = rows.begin, .rows = rows.size(), .width = width},
                             gpushare::from_rows(from + rank * tokens * width), scratch + ctx.block_rank() * width);
    }
};

/// `of(r)` returns the epilogue of rank r.
template <class Of>
void launch_pass(const rank_group& g, const transformer_step& step, const float* from,
                 const gpushare::launch_options& shape, const Of& of) {
    const auto ranks = static_cast<std::uint32_t>(g.members.size());
    const auto some = [&](std::uint32_t r) { return of(r < ranks ? r : 0); };
    const pass<decltype(of(0U))> kernel{ranks,
                                        step.tokens,
                                        from,
                                        step.scratch,
                                        {some(0), some(1), some(2), some(3), some(4), some(5), some(6), some(7),
                                         some(8), some(9), some(10), some(11), some(12), some(13), some(14), some(15)}};
    g.stream.launch({.blocks = ranks * shape.blocks, .threads = shape.threads, .hold = {}}, kernel);
}

/// The kernel that needs the most of an SM determines the limit.
using sum_body = gpushare::detail::all_reduce_body<float, gpushare::sum>;

}  // namespace collective_launches

std::uint32_t most_blocks(const rank_group& g, std::uint32_t threads) {
    const gpushare::detail::shared_device_kernel<collective_launches::sum_body> kernel{};
    return g.stream.max_cooperative_blocks(kernel, threads) / static_cast<std::uint32_t>(g.members.size());
}

gpushare::errc launch_all_reduce(const rank_group& g, const float* in, float* out, std::size_t n,
                                 const gpushare::launch_options& shape) {
    const collective_launches::parts<const float> ins(in, n, g.members.size());
    const collective_launches::parts<float> outs(out, n, g.members.size());
    return gpushare::submit_shared_all_reduce<float>(g.node.gangs(), g.device, g.stream, g.members, ins.all(),
                                                     outs.all(), n, gpushare::sum{}, shape);
}

gpushare::errc launch_buckets(const rank_group& g, gpushare::device_buckets<float>& gradients,
                              std::span<float* const> staging, const gpushare::launch_options& shape) {
    for (std::uint32_t r = 0; r < gradients.ranks(); ++r)
        for (std::uint32_t k = 0; k < gradients.size(); ++k) (void)gradients.ready(r, k);
    const auto engine = [&](auto ins, auto outs, std::size_t n, auto op) {
        return gpushare::submit_shared_all_reduce<float>(g.node.gangs(), g.device, g.stream, g.members, ins, outs, n,
                                                         op, shape);
    };
    return gradients.advance(std::span(&g.stream, 1), staging, engine, gpushare::sum{});
}

gpushare::errc launch_fused(const rank_group& g, const transformer_step& step, const gpushare::launch_options& shape) {
    namespace gs = gpushare;
    const std::size_t n = step.of_rank();
    const auto steps_of = [&](std::size_t r) {
        return gs::reduced(std::span(step.x + r * n, n), transformer_step::width) | gs::add(step.residual + r * n) |
               gs::rms_norm(step.weight, 1e-6F) | gs::cast<gs::bfloat16>();
    };
    std::array<decltype(steps_of(0)), gs::max_shared_ranks> steps{};
    for (std::size_t r = 0; r < g.members.size(); ++r) steps[r] = steps_of(r);
    const collective_launches::parts<gs::bfloat16> outs(step.out, n, g.members.size());
    return gs::submit_shared_run(g.node.gangs(), g.device, g.stream, g.members,
                                 std::span<const decltype(steps_of(0))>(steps).first(g.members.size()), outs.all(),
                                 shape);
}

void launch_passes(const rank_group& g, const transformer_step& step, const gpushare::launch_options& shape) {
    namespace gs = gpushare;
    const std::size_t n = step.of_rank();
    const auto pass = [&](const float* from, const auto& of) {
        collective_launches::launch_pass(g, step, from, shape, of);
    };
    pass(step.summed, [&](std::size_t r) { return gs::add(step.residual + r * n) | gs::into(step.added + r * n); });
    pass(step.added, [&](std::size_t r) { return gs::rms_norm(step.weight, 1e-6F) | gs::into(step.normed + r * n); });
    pass(step.normed, [&](std::size_t r) { return gs::cast<gs::bfloat16>() | gs::into(step.out + r * n); });
}

void launch_one_pass(const rank_group& g, const transformer_step& step, const gpushare::launch_options& shape) {
    namespace gs = gpushare;
    const std::size_t n = step.of_rank();
    collective_launches::launch_pass(g, step, step.summed, shape, [&](std::size_t r) {
        return gs::add(step.residual + r * n) | gs::rms_norm(step.weight, 1e-6F) | gs::cast<gs::bfloat16>() |
               gs::into(step.out + r * n);
    });
}

}  // namespace bench
