// SPDX-License-Identifier: Apache-2.0
// Which gradients go together in one all-reduce, and in which order: a value.
//
//   const gpushare::bucket_plan plan(sizes, order, 4_MiB);      // order: as they become ready in the backward pass
//   for (std::uint32_t g : plan.gradients(0)) ...               // those of the first bucket
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Consecutive gradients of an order, cut where the next one would make a bucket larger than the limit. One that is larger by itself is
/// a bucket of its own. The same on all ranks for the same arguments.
class bucket_plan {
public:
    bucket_plan() = default;  ///< No gradients.
    /// sizes[g] is in bytes; `order` has each gradient once. Throws operation_error (errc::invalid_specification) if it hasn't.
    bucket_plan(std::span<const std::size_t> sizes, std::span<const std::uint32_t> order, bytes limit)
        : order_(order.begin(), order.end()), bucket_of_(sizes.size(), none) {
        bool good = order.size() == sizes.size();
        std::uint64_t filled = 0;
        for (std::uint32_t i = 0; good && i < order_.size(); ++i) {
            const std::uint32_t g = order_[i];
            good = g < sizes.size() && bucket_of_[g] == none;
            if (!good) break;
            if (i == 0 || sizes[g] > limit.count() - filled || filled > limit.count()) {
                first_.push_back(i);
                filled = 0;
            }
            filled += sizes[g];
            bucket_of_[g] = size() - 1;
        }
        together_ = order_;
        for (std::uint32_t b = 0; good && b < size(); ++b) {
            const std::span<std::uint32_t> some = std::span(together_).subspan(first_[b], gradients(b).size());
            std::sort(some.begin(), some.end());
        }
        if (!good)
            raise({errc::invalid_specification, order.size(), 0, sizes.size(), reason::no_order}, {},
                  "an order of gradients");
    }
    /// In the order in which a backward pass is expected to have them: the last that was registered comes first.
    [[nodiscard]] static std::vector<std::uint32_t> backward_order(std::size_t gradients) {
        std::vector<std::uint32_t> order(gradients);
        std::iota(order.rbegin(), order.rend(), 0U);
        return order;
    }

    [[nodiscard]] std::uint32_t size() const noexcept {
        return static_cast<std::uint32_t>(first_.size());
    }                                                                                       ///< buckets
    [[nodiscard]] std::span<const std::uint32_t> order() const noexcept { return order_; }  ///< of all gradients
    /// Those of bucket `b`, as they were registered: memory is fastest forwards, and within a bucket no order is better.
    [[nodiscard]] std::span<const std::uint32_t> gradients(std::uint32_t b) const noexcept {
        const std::size_t behind = b + 1 < first_.size() ? first_[b + 1] : order_.size();
        return std::span(together_).subspan(first_[b], behind - first_[b]);
    }
    /// Which bucket gradient `g` is in.
    [[nodiscard]] std::uint32_t bucket_of(std::uint32_t g) const noexcept { return bucket_of_[g]; }

    friend bool operator==(const bucket_plan&, const bucket_plan&) = default;

private:
    static constexpr std::uint32_t none = ~0U;

    std::vector<std::uint32_t> order_;
    std::vector<std::uint32_t> together_;  // each bucket's in the order of their numbers
    std::vector<std::uint32_t> first_;     // of each bucket, in either
    std::vector<std::uint32_t> bucket_of_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
