// SPDX-License-Identifier: Apache-2.0
// Quantises in an epilogue, to int8_t, fp8_e4m3 or fp8_e5m2: an element is stored as q with x close to q * scale.
//
//   finish | gpushare::quantise(q, 0.02F)                                         one scale, given
//   finish | gpushare::quantise(q, gpushare::given_scales(of_row))                one for each row, given
//   finish | gpushare::quantise(q, gpushare::computed_scales(of_row_out))         one for each row, from its largest element
//
// A scale for the whole tensor can't be had before the last row is reduced. As training does it, row_maxima(largest) notes
// the largest magnitude of each row, for a scale of the next step.
//
// Computed: scale = max(largest magnitude of the row / largest q, smallest normal float), so that a row of zeros has one, too.
// q is x times the scale's reciprocal, rounded to nearest even and cut to what q can hold. A NaN in a row makes its scale NaN.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// What can be quantised to.
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

/// A number for each row: of all rows, or of a shard's.
template <class T, bool Shard>
struct of_rows {
    static constexpr bool is_shard = Shard;
    T* data;
    [[nodiscard]] GPUSHARE_HD T& at(const place& p) const noexcept { return data[Shard ? p.shard_row : p.row]; }
};

/// Divides by the scale of each row.
template <bool Shard>
struct row_scaling {
    of_rows<const float, Shard> scales;

    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place& at) const noexcept {
        return x * detail::quotient_of(1.0F, scales.at(at));
    }
};

/// Finds the scale of each row, tells the ranks and divides by it.
template <quantised_number Q, bool Shard>
struct row_fitting {
    using combine = row_max;
    static constexpr std::uint32_t looks = 1;
    static constexpr bool to_all = !Shard;
    struct learnt {
        float scale, inverse;
    };

    of_rows<float, Shard> scales;

    template <std::uint32_t, class V>
    [[nodiscard]] GPUSHARE_HD V measure(const V& x, const place&, const learnt&) const noexcept {
        return abs(x);
    }
    GPUSHARE_HD void learn(std::uint32_t, float largest, const place&, learnt& known) const noexcept {
        known.scale = detail::larger_lanes{}(detail::quotient_of(largest, largest_quantum<Q>()), 0x1p-126F);
        known.inverse = detail::quotient_of(1.0F, known.scale);
    }
    template <class V>
    [[nodiscard]] GPUSHARE_HD V apply(const V& x, const place&, const learnt& known) const noexcept {
        return x * known.inverse;
    }
    GPUSHARE_HD void publish(const place& at, const learnt& known) const noexcept { scales.at(at) = known.scale; }
};
static_assert(row_stage<row_fitting<std::int8_t, false>>);

/// Notes the largest magnitude of each row; changes nothing.
template <bool Shard>
struct maxima_noting {
    using combine = row_max;
    static constexpr std::uint32_t looks = 1;
    static constexpr bool to_all = !Shard;
    struct learnt {
        float largest;
    };

    of_rows<float, Shard> out;

    template <std::uint32_t, class V>
    [[nodiscard]] GPUSHARE_HD V measure(const V& x, const place&, const learnt&) const noexcept {
        return abs(x);
    }
    GPUSHARE_HD void learn(std::uint32_t, float largest, const place&, learnt& known) const noexcept {
        known.largest = largest;
    }
    template <class V>
    [[nodiscard]] GPUSHARE_HD V apply(const V& x, const place&, const learnt&) const noexcept {
        return x;
    }
    GPUSHARE_HD void publish(const place& at, const learnt& known) const noexcept { out.at(at) = known.largest; }
};

/// Notes the largest magnitude of each row in `out`, one float a row, on each rank; with shard(out) on the row's own.
[[nodiscard]] GPUSHARE_HD constexpr maxima_noting<false> row_maxima(float* out) noexcept { return {{out}}; }
[[nodiscard]] GPUSHARE_HD constexpr maxima_noting<true> row_maxima(matrix<float, true> out) noexcept {
    return {{out.data}};
}

template <bool Shard>
struct given_row_scales {
    of_rows<const float, Shard> of;
};
/// A positive scale for each row.
[[nodiscard]] GPUSHARE_HD constexpr given_row_scales<false> given_scales(const float* of_row) noexcept {
    return {{of_row}};
}
template <class T>
[[nodiscard]] GPUSHARE_HD constexpr given_row_scales<true> given_scales(matrix<T, true> of_row) noexcept {
    return {{of_row.data}};
}

template <bool Shard>
struct computed_row_scales {
    of_rows<float, Shard> out;
};
/// One float a row is written, on each rank; with shard(out) on the row's own.
[[nodiscard]] GPUSHARE_HD constexpr computed_row_scales<false> computed_scales(float* out) noexcept { return {{out}}; }
[[nodiscard]] GPUSHARE_HD constexpr computed_row_scales<true> computed_scales(matrix<float, true> out) noexcept {
    return {{out.data}};
}

template <quantised_number Q, bool Shard>
[[nodiscard]] GPUSHARE_HD constexpr auto quantise(matrix<Q, Shard> out, float scale_of_all) noexcept {
    return scaling{1.0F / scale_of_all} | into(out);
}
template <quantised_number Q, bool Shard, bool ShardedScales>
[[nodiscard]] GPUSHARE_HD constexpr auto quantise(matrix<Q, Shard> out,
                                                  given_row_scales<ShardedScales> scales) noexcept {
    return row_scaling<ShardedScales>{scales.of} | into(out);
}
template <quantised_number Q, bool Shard, bool ShardedScales>
[[nodiscard]] GPUSHARE_HD constexpr auto quantise(matrix<Q, Shard> out,
                                                  computed_row_scales<ShardedScales> scales) noexcept {
    return row_fitting<Q, ShardedScales>{scales.out} | into(out);
}
template <quantised_number Q, class Scales>
[[nodiscard]] GPUSHARE_HD constexpr auto quantise(Q* out, Scales scales) noexcept {
    return quantise(rows(out), scales);
}

}  // namespace gpushare::inline GPUSHARE_ABI
