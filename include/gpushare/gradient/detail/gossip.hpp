// SPDX-License-Identifier: Apache-2.0
// The weighted sum of gossip, element by element, with the same bits on host and device.
//
//   gossip_sum k{out, count};   k.add(mine, 0.5F);   k.add(theirs, 0.5F);
//   stream.launch(k.shape(), k);
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/gradient/detail/packing.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Adds `weight * x` to a sum, without a fused multiply-add: the product is rounded by itself.
GPUSHARE_HD inline void add_weighted(float& sum, float weight, float x) noexcept { sum += product_of(weight, x); }

/// `out` becomes the weighted sum of a rank's and its neighbours' arrays, added in the order of the
/// list. If one launch can't list all arrays, a further launch adds the rest to the sum.
struct gossip_sum {
    struct part {
        const float* data;
        float weight;
    };

    float* out;
    std::size_t count;
    bool goes_on = false;  // whether `out` has the sum of an earlier launch
    std::uint32_t listed = 0;
    part parts[most_pieces] = {};

    /// Returns false if the list is full.
    [[nodiscard]] bool add(const float* data, float weight) noexcept {
        if (listed == most_pieces) return false;
        parts[listed] = {data, weight};
        ++listed;
        return true;
    }
    [[nodiscard]] grid shape() const noexcept { return grid_of(count); }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        each_of_block(ctx, count, [&](std::size_t i) {
            float sum = goes_on ? out[i] : 0.0F;
            for (std::uint32_t k = 0; k < listed; ++k) add_weighted(sum, parts[k].weight, parts[k].data[i]);
            out[i] = sum;
        });
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
