// SPDX-License-Identifier: Apache-2.0
// Epilogue stages that quantise to int8_t, fp8_e4m3 or fp8_e5m2: an element x is stored as q, with x close to q *
// scale.
//
//   auto one = finish | gpushare::quantise<std::int8_t>(0.02F);                                // one scale, given
//   auto given = finish | gpushare::quantise<std::int8_t>(gpushare::given_scales(of_row));     // one for each row, given
//   auto computed = finish | gpushare::quantise<std::int8_t>(of_row);      // one for each row, computed and written to of_row
//
// A scale of the whole tensor isn't known before the last row is reduced. So, as in training, row_maxima(largest)
// writes the largest magnitude of each row, from which the scale of the next step is computed.
//
// A computed scale is max(largest magnitude of the row / largest q, smallest normal float), so that a row of zeros has
// one, too. q is x times the scale's reciprocal, rounded to nearest even and clamped to +-largest q. A NaN in a row
// makes its scale NaN.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The types to quantise to.
template <class T>
concept quantised_number = std::same_as<T, std::int8_t> || std::same_as<T, fp8_e4m3> || std::same_as<T, fp8_e5m2>;

/// The largest q: 127, 448 or 57344.
template <quantised_number T>
[[nodiscard]] GPUSHARE_HD constexpr float largest_quantum() noexcept {
    if constexpr (std::same_as<T, std::int8_t>)
        return 127;
    else
        return static_cast<float>(T::max());
}

namespace detail {
/// A number for each row: of all rows, or of a shard's.
template <class T, bool Shard>
struct of_rows {
    static constexpr bool is_shard = Shard;
    T* data;
    [[nodiscard]] GPUSHARE_HD T& at(const place& p) const noexcept { return data[Shard ? p.shard_row : p.row]; }
};
}  // namespace detail

namespace detail {

struct cut_to_127 {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& x) const noexcept {
        const R low = select(x < -127.0F, -127.0F, x);  // a NaN passes
        return select(low > 127.0F, 127.0F, low);
    }
};

/// Floats are cut when they are stored.
template <class Q, std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> cut(const floats<N, W>& x) noexcept {
    if constexpr (std::same_as<Q, std::int8_t>)
        return floats<N, W>::map(cut_to_127{}, x);
    else
        return x;
}

}  // namespace detail

namespace detail {
/// Divides by one scale.
template <quantised_number Q>
struct scaling_down {
    static constexpr bool any_row = true;
    using result_type = Q;
    float inverse;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return detail::cut<Q>(x * inverse);
    }
};
}  // namespace detail

namespace detail {
/// Divides by the scale of each row.
template <quantised_number Q, bool Shard>
struct row_scaling {
    static constexpr bool any_row = !Shard;
    using result_type = Q;
    of_rows<const float, Shard> scales;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place& at) const noexcept {
        return detail::cut<Q>(x * detail::quotient_of(1.0F, scales.at(at)));
    }
};
}  // namespace detail

namespace detail {
/// Finds the scale of each row, tells the ranks and divides by it.
template <quantised_number Q, bool Shard>
struct row_fitting {
    static constexpr bool any_row = !Shard;
    using result_type = Q;
    using combine = row_max;
    static constexpr std::uint32_t looks = 1;
    struct learnt {
        float scale, inverse;
    };

    of_rows<float, Shard> scales;

    template <std::uint32_t, class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V measure(const V& x, const place&, const learnt&) const noexcept {
        return abs(x);
    }
    GPUSHARE_HD void learn(std::uint32_t, float largest, const place&, learnt& known) const noexcept {
        known.scale = detail::larger_lanes{}(detail::quotient_of(largest, largest_quantum<Q>()), 0x1p-126F);
        known.inverse = detail::quotient_of(1.0F, known.scale);
    }
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V apply(const V& x, const place&, const learnt& known) const noexcept {
        return x * known.inverse;
    }
    GPUSHARE_HD void publish(const place& at, const learnt& known) const noexcept { scales.at(at) = known.scale; }
    [[nodiscard]] GPUSHARE_HD void* shares() const noexcept requires(!Shard) { return scales.data; }
    [[nodiscard]] GPUSHARE_HD row_fitting with(void* data) const noexcept requires(!Shard) {
        return {{static_cast<float*>(data)}};
    }
};
static_assert(publishing_stage<row_fitting<std::int8_t, false>>);
}  // namespace detail

namespace detail {
/// Notes the largest magnitude of each row; changes nothing.
template <bool Shard>
struct maxima_noting {
    static constexpr bool any_row = !Shard;
    using combine = row_max;
    static constexpr std::uint32_t looks = 1;
    struct learnt {
        float largest;
    };

    of_rows<float, Shard> out;

    template <std::uint32_t, class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V measure(const V& x, const place&, const learnt&) const noexcept {
        return abs(x);
    }
    GPUSHARE_HD void learn(std::uint32_t, float largest, const place&, learnt& known) const noexcept {
        known.largest = largest;
    }
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V apply(const V& x, const place&, const learnt&) const noexcept {
        return x;
    }
    GPUSHARE_HD void publish(const place& at, const learnt& known) const noexcept { out.at(at) = known.largest; }
    [[nodiscard]] GPUSHARE_HD void* shares() const noexcept requires(!Shard) { return out.data; }
    [[nodiscard]] GPUSHARE_HD maxima_noting with(void* data) const noexcept requires(!Shard) {
        return {{static_cast<float*>(data)}};
    }
};
static_assert(publishing_stage<maxima_noting<false>> && sharing_stage<maxima_noting<false>>);
}  // namespace detail

/// Writes the largest magnitude of each row to `out`, one float a row, of every rank that keeps the row; with
/// shard(out), of this rank's own rows.
template <class R>
[[nodiscard]] constexpr auto row_maxima(R&& out) noexcept {
    const auto m = detail::as_matrix(out);
    return detail::maxima_noting<decltype(detail::as_matrix(out))::is_shard>{{m.data}};
}

namespace detail {
template <bool Shard>
struct given_row_scales {
    of_rows<const float, Shard> of;
};
}  // namespace detail
/// A positive scale for each row.
template <class R>
[[nodiscard]] constexpr auto given_scales(const R& of_row) noexcept {
    const auto m = detail::as_const_matrix(of_row);
    return detail::given_row_scales<decltype(detail::as_const_matrix(of_row))::is_shard>{{m.data}};
}

/// Quantises by one given scale.
template <quantised_number Q>
[[nodiscard]] constexpr detail::scaling_down<Q> quantise(float by) noexcept {
    return {1.0F / by};
}
/// Quantises by a given scale for each row.
template <quantised_number Q, bool Shard>
[[nodiscard]] constexpr detail::row_scaling<Q, Shard> quantise(detail::given_row_scales<Shard> scales) noexcept {
    return {scales.of};
}
/// Quantises by a scale computed for each row and written to `scales`, one float a row, of every rank that keeps the
/// row; with shard(scales), of this rank's own rows.
template <quantised_number Q, class R>
requires(!std::is_arithmetic_v<std::remove_cvref_t<R>>) [[nodiscard]] constexpr auto quantise(R&& scales) noexcept {
    const auto m = detail::as_matrix(scales);
    return detail::row_fitting<Q, decltype(detail::as_matrix(scales))::is_shard>{{m.data}};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
