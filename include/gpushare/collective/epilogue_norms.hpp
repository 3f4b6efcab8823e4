// SPDX-License-Identifier: Apache-2.0
// Epilogue stages that normalise whole rows: rms_norm and layer_norm.
//
//   auto finish = gpushare::add(residual) | gpushare::rms_norm(weight, 1e-6F) | gpushare::cast<gpushare::bfloat16>();
//
// Weights and biases have one number a column; without them the row is only normalised.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {
/// See rms_norm().
template <movable_number T>
struct rms_normalising {
    static constexpr bool any_row = true;
    using combine = row_sum;
    static constexpr std::uint32_t looks = 1;
    struct learnt {
        float inverse;
    };

    const T* weight;
    float epsilon;

    template <std::uint32_t, class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V measure(const V& x, const place&, const learnt&) const noexcept {
        return x * x;
    }
    GPUSHARE_HD void learn(std::uint32_t, float squares, const place& at, learnt& known) const noexcept {
        const float mean = detail::quotient_of(squares, static_cast<float>(at.width));
        known.inverse = detail::quotient_of(1.0F, std::sqrt(mean + epsilon));
    }
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V apply(const V& x, const place& at, const learnt& known) const noexcept {
        const V y = x * known.inverse;
        return weight == nullptr ? y : y * load_floats<V>(weight + at.column, at.count);
    }
};
static_assert(row_stage<rms_normalising<float>>);
}  // namespace detail

/// x / sqrt(mean of the row's x^2 + epsilon) * weight[column] (Zhang and Sennrich, arXiv 1910.07467). The mean's bits depend on
/// where it is summed up: see row_sum.
template <class R>
[[nodiscard]] constexpr auto rms_norm(const R& weight, float epsilon) noexcept {
    const auto* const p = detail::as_pointer(weight);
    return detail::rms_normalising<std::remove_cvref_t<decltype(*p)>>{p, epsilon};
}
/// The same without weights.
[[nodiscard]] constexpr detail::rms_normalising<float> rms_norm(float epsilon) noexcept { return {nullptr, epsilon}; }

namespace detail {
/// See layer_norm().
template <movable_number W, movable_number O>
struct layer_normalising {
    static constexpr bool any_row = true;
    using combine = row_sum;
    // The variance is taken around the mean: the difference of two large sums would lose it.
    static constexpr std::uint32_t looks = 2;
    struct learnt {
        float mean, inverse;
    };

    const W* weight;
    const O* offset;
    float epsilon;

    template <std::uint32_t Look, class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V measure(const V& x, const place&, const learnt& known) const noexcept {
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
            known.inverse = detail::quotient_of(1.0F, std::sqrt(mean + epsilon));
    }
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V apply(const V& x, const place& at, const learnt& known) const noexcept {
        V y = (x - known.mean) * known.inverse;
        if (weight != nullptr) y = y * load_floats<V>(weight + at.column, at.count);
        if (offset != nullptr) y = y + load_floats<V>(offset + at.column, at.count);
        return y;
    }
};
static_assert(row_stage<layer_normalising<float, float>>);
}  // namespace detail

/// (x - mean) / sqrt(variance + epsilon) * weight[column] + offset[column], mean and variance of the row (Ba, Kiros and
/// Hinton, arXiv 1607.06450). The bits of mean and variance depend on where they are summed up (see row_sum): a device's result may
/// differ from a host's by some ulps of what is added up in it. By which rank, in which collective or row, it never differs.
template <class W, class O>
[[nodiscard]] constexpr auto layer_norm(const W& weight, const O& offset, float epsilon) noexcept {
    const auto* const w = detail::as_pointer(weight);
    const auto* const o = detail::as_pointer(offset);
    return detail::layer_normalising<std::remove_cvref_t<decltype(*w)>, std::remove_cvref_t<decltype(*o)>>{w, o,
                                                                                                           epsilon};
}
/// The same without weights and offsets.
[[nodiscard]] constexpr detail::layer_normalising<float, float> layer_norm(float epsilon) noexcept {
    return {nullptr, nullptr, epsilon};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
