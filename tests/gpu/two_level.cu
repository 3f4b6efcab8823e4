// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/launch.cuh>

#include "gpu/two_level.hpp"

namespace two_level {

sums sums_on_devices(const std::vector<std::uint32_t>& ranks, layout how, std::size_t n) {
    const cluster all(ranks, how, {.chunk = gs::bytes{4096}, .depth = 2});
    sums got{std::vector<gs::collective_fault>(ranks.size()), std::vector<std::size_t>(ranks.size()),
             std::vector<gs::bytes>(ranks.size())};
    all.each([&](unsigned p, machine& m) {
        const auto x = m.arrays<float>(n, number<float>);
        const std::vector<const float*> in(x.begin(), x.end());
        got.faults[p] = m.levels->all_reduce<float>(in, x, n, gs::sum{});
        got.wrong[p] = m.wrong(x, n, [&](std::size_t i) { return sum_of<float>(all.size, i); });
        got.copied[p] = m.levels->copied();
    });
    return got;
}

}  // namespace two_level
