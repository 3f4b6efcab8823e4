// SPDX-License-Identifier: Apache-2.0
// Collectives that rank threads call, in a file that nvcc compiles: its device pass looks at them,
// too, although the threads are the host's.
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>

namespace gs = gpushare;

void run_in_threads(const gs::member& me, std::vector<gs::bfloat16>& x, std::vector<gs::bfloat16>& residual,
                    const std::vector<float>& weight, std::vector<std::int8_t>& out, std::vector<float>& scales) {
    gs::all_reduce(me, x, std::span(x));
    gs::run(me, gs::reduced(x, 4096) | gs::add_to(residual) | gs::rms_norm(weight, 1e-6F), std::span(x));
    gs::run_sharded(me, gs::reduced(x, 4096) | gs::silu() | gs::quantise<std::int8_t>(gs::shard(scales.data())),
                    std::span(out));
}
