// SPDX-License-Identifier: Apache-2.0
// Normalisation of whole rows in an epilogue.
//
//   gpushare::add(residual) | gpushare::into(residual_out) | gpushare::rms_norm(weight, 1e-6F) | gpushare::into(normed)
//
// Weights and biases have one number a column; without them the row is normalised only.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// See rms_norm().
template <movable_number T>
struct rms_normalising {
    using combine = row_sum;
    static constexpr std::uint32_t looks = 1;
    struct learnt {
        float inverse;
    };

    const T* weight;
    float epsilon;

    template <std::uint32_t, class V>
    [[nodiscard]] GPUSHARE_HD V measure(const V& x, const place&, const learnt&) const noexcept {
        return x * x;
    }
    GPUSHARE_HD void learn(std::uint32_t, float squares, const place& at, learnt& known) const noexcept {
        const float mean = detail::quotient_of(squares, static_cast<float>(at.width));
        known.inverse = detail::quotient_of(1.0F, detail::root_of(mean + epsilon));
    }
    template <class V>
    [[nodiscard]] GPUSHARE_HD V apply(const V& x, const place& at, const learnt& known) const noexcept {
        const V y = x * known.inverse;
        return weight == nullptr ? y : y * load_floats<V::lanes>(weight + at.column, at.count);
    }
};
static_assert(row_stage<rms_normalising<float>>);

/// x / sqrt(mean of the row's x^2 + epsilon) * weight[column] (Zhang and Sennrich, arXiv 1910.07467).
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr rms_normalising<T> rms_norm(const T* weight, float epsilon) noexcept {
    return {weight, epsilon};
}
[[nodiscard]] GPUSHARE_HD constexpr rms_normalising<float> rms_norm(float epsilon) noexcept {
    return {nullptr, epsilon};
}

/// See layer_norm().
template <movable_number T>
struct layer_normalising {
    using combine = row_sum;
    // The variance is taken around the mean: the difference of two large sums would lose it.
    static constexpr std::uint32_t looks = 2;
    struct learnt {
        float mean, inverse;
    };

    const T* weight;
    const T* offset;
    float epsilon;

    template <std::uint32_t Look, class V>
    [[nodiscard]] GPUSHARE_HD V measure(const V& x, const place&, const learnt& known) const noexcept {
        if constexpr (Look == 0) {
            return x;
        } else {
            const V d = x - known.mean;
            return d * d;
        }
    }
    GPUSHARE_HD void learn(std::uint32_t look, float total, const place& at, learnt& known) const noexcept {
        const float mean = detail::quotient_of(total, static_cast<float>(at.width));
        if (look == 0)
            known.mean = mean;
        else
            known.inverse = detail::quotient_of(1.0F, detail::root_of(mean + epsilon));
    }
    template <class V>
    [[nodiscard]] GPUSHARE_HD V apply(const V& x, const place& at, const learnt& known) const noexcept {
        V y = (x - known.mean) * known.inverse;
        if (weight != nullptr) y = y * load_floats<V::lanes>(weight + at.column, at.count);
        if (offset != nullptr) y = y + load_floats<V::lanes>(offset + at.column, at.count);
        return y;
    }
};
static_assert(row_stage<layer_normalising<float>>);

/// (x - mean) / sqrt(variance + epsilon) * weight[column] + offset[column], mean and variance of the row (Ba, Kiros and
/// Hinton, arXiv 1607.06450). `weight` and `offset` may be null.
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr layer_normalising<T> layer_norm(const T* weight, const T* offset,
                                                                    float epsilon) noexcept {
    return {weight, offset, epsilon};
}

}  // namespace gpushare::inline GPUSHARE_ABI
