// SPDX-License-Identifier: Apache-2.0
// The stages of an epilogue: element-wise stages, sinks that write elements to an array, norms, and
// quantisation.
//
//   auto finish = gpushare::add(residual) | gpushare::silu() | gpushare::into(copy) | gpushare::cast<gpushare::bfloat16>();
//   // adds the residual, and stores the sum in it
//   auto keeps_sum = gpushare::add_to(residual) | gpushare::silu();
//
// A stage takes an array as a vector, a span or anything with std::data. If rows aren't contiguous,
// use rows(p, pitch). Arrays must last until the collective is done. An array holds one of two sets
// of rows:
//  - `x` has the rows of the result that its rank keeps: all rows, or after run_sharded the rank's
//    shard. For a sink, the rank that reduces a row writes the row to the arrays of all ranks that
//    keep it.
//  - `shard(x)` has the rows that its rank reduces. For a sink, only that rank writes the rows.
//
// rms_norm and layer_norm normalise whole rows. Weights and biases have one number for each column.
// Without weights and biases, the row is only normalised.
//
//   auto normed = gpushare::add(residual) | gpushare::rms_norm(weight, 1e-6F) | gpushare::cast<gpushare::bfloat16>();
//
// quantise converts to int8_t, fp8_e4m3 or fp8_e5m2. An element x is stored as q, with x close to q
// * scale.
//
//   auto one = normed | gpushare::quantise<std::int8_t>(0.02F);  // one scale, given
//   // one for each row, given
//   auto given = normed | gpushare::quantise<std::int8_t>(gpushare::given_scales(of_row));
//   // one for each row, computed and written to of_row
//   auto computed = normed | gpushare::quantise<std::int8_t>(of_row);
//
// The scale of a whole tensor isn't known before the last row is reduced. So row_maxima(largest)
// writes the largest magnitude of each row, and the program computes the scale of the next step
// from these magnitudes, as is usual in training.
//
// A computed scale is max(largest magnitude of the row / largest q, smallest normal float), so a
// row of zeros has a scale, too. q is x times the scale's reciprocal, rounded to nearest even and
// clamped to +-largest q. A NaN in a row makes the row's scale NaN.
//
// quantise_groups has a scale for each group of neighbouring columns: rows * ceil(width / 128)
// scales in all.
//
//   auto by_group = normed | gpushare::quantise_groups<gpushare::fp8_e4m3>(of_group);
//
// quantise_nvfp4 stores two elements in a byte, with an fp8 scale for each 16 columns and one scale
// for the whole tensor, which the caller gives. An element x is close to q * scale * whole.
//
//   auto four_bits = normed | gpushare::quantise_nvfp4(of_16, largest_of_last_step / (6 * 448));
//
// apply_rows applies an epilogue to rows of elements without a collective. An all-reduce runs its
// epilogue by the same code (detail/epilogue_run.hpp).
//
//   const auto scaled = gpushare::rms_norm(weight, 1e-6F) | gpushare::cast<gpushare::bfloat16>();
//   float scratch[4096];
//   gpushare::apply_rows(ctx, scaled, {.rows = n, .width = 4096}, gpushare::from_rows(sums), scratch);
//
// For a collective of your own, pass a source that reduces the ranks' elements, and a table of the
// ranks' arrays:
//
//   struct my_source { template <class V> GPUSHARE_HD V load(const gpushare::place& at) const { return V{} + float(at.row); } };
//   const gpushare::shared_outputs outputs{arrays, ranks, scaled.sharing};
//   gpushare::apply_rows(ctx, scaled, range, my_source{}, scratch, outputs);
//
// apply_rows passes over each row once, and once more for each look of a row stage. Between the
// passes the row is in `scratch`.
//
// A chain of element-wise stages needs no scratch. The chain is a kernel for the operations between
// two engines' calls: one pass over memory, on any launcher. Host and device run the same code.
//
//   auto chain = gpushare::elements(x, width) | gpushare::bias(b) | gpushare::silu() | gpushare::into(y);
//   stream.launch({.blocks = 4, .threads = 256}, chain);
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <type_traits>

#include <gpushare/collective/detail/epilogue_run.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Two numbers of 4 bits in a byte, the first number in the low half: the toolkit's
/// __nv_fp4x2_e2m1, and the order in which cuBLASLt takes CUDA_R_4F_E2M1. The format is E2M1 of the
/// OCP microscaling formats 1.0: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
class fp4_pair {
public:
    fp4_pair() = default;  ///< leaves the bits unset
    /// Rounds each number to nearest, ties to even. Numbers above 6 become 6. A NaN becomes 6 as
    /// well, as in the toolkit.
    GPUSHARE_HD constexpr fp4_pair(float first, float second) noexcept
        : bits_(static_cast<std::uint8_t>(narrow(first) | narrow(second) << 4)) {}

    /// The pair with these bits.
    [[nodiscard]] GPUSHARE_HD static constexpr fp4_pair from_bits(std::uint8_t bits) noexcept {
        fp4_pair p{};
        p.bits_ = bits;
        return p;
    }
    /// The pair's bits.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint8_t bits() const noexcept { return bits_; }
    /// The number in the low half. Exact.
    [[nodiscard]] GPUSHARE_HD constexpr float first() const noexcept { return widen(bits_ & 15U); }
    /// The number in the high half. Exact.
    [[nodiscard]] GPUSHARE_HD constexpr float second() const noexcept { return widen(bits_ >> 4U); }

private:
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t narrow(float x) noexcept {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
        const float a = __builtin_bit_cast(float, bits & 0x7fff'ffffU);
        // The code is the number of midpoints between neighbouring values that are below `a`. A
        // midpoint itself rounds to the even neighbour.
        const std::uint32_t code = (a > 0.25F ? 1U : 0U) + (a >= 0.75F ? 1U : 0U) + (a > 1.25F ? 1U : 0U) +
                                   (a >= 1.75F ? 1U : 0U) + (a > 2.5F ? 1U : 0U) + (a >= 3.5F ? 1U : 0U) +
                                   (a > 5.0F ? 1U : 0U);
        return a != a ? 7U : code | bits >> 31 << 3;
    }
    [[nodiscard]] GPUSHARE_HD static constexpr float widen(std::uint32_t code) noexcept {
        const std::uint32_t low = code & 1U, exponent = code >> 1U & 3U;
        const std::uint32_t halves = exponent == 0 ? low : (2U + low) << (exponent - 1U);
        const float magnitude = static_cast<float>(halves) / 2;
        return code < 8 ? magnitude : -magnitude;
    }

    std::uint8_t bits_;
};
static_assert(sizeof(fp4_pair) == 1 && std::is_trivial_v<fp4_pair>);

namespace detail {
/// The number of elements of a row that a T holds.
template <class T>
inline constexpr std::size_t columns_in = std::same_as<T, fp4_pair> ? 2 : 1;
template <class S>
inline constexpr std::size_t columns_stored = 1;
template <class S>
requires requires { typename S::stored_type; }
inline constexpr std::size_t columns_stored<S> = columns_in<typename S::stored_type>;
/// The width of a row is a multiple of row_unit: 2 if a stage stores pairs, otherwise 1. With an
/// odd width, the second half of the last pair would be in the next row, or outside the array.
template <class... Stages>
inline constexpr std::size_t row_unit = ((columns_stored<Stages> == 2) || ...) ? 2 : 1;

/// Stores the first `n` elements, an even number, to the pairs from `to` on.
template <std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT GPUSHARE_HD void store_pairs(fp4_pair* to, const floats<N, W>& x, std::uint32_t n) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (N > 4) {
        store_pairs(to, x.low(), n < N / 2 ? n : N / 2);
        if (n > N / 2) store_pairs(to + N / 4, x.high(), n - N / 2);
    } else {
        to[0] = fp4_pair(x[0], x[1]);
        if (n != 2) to[1] = fp4_pair(x[2], x[3]);
    }
#else
    float all[N];
    store_floats(all, x);
    for (std::uint32_t i = 0; i < N && i < n; i += 2) to[i / 2] = fp4_pair(all[i], all[i + 1]);
#endif
}
}  // namespace detail

/// A matrix of T: all rows, or a rank's shard of the rows. `pitch` is the number of elements of
/// type T from one row to the next; 0 means as many as the result's columns take. An fp4_pair is
/// two columns, and rows of pairs have an even number of columns.
template <class T, bool Shard>
struct matrix {
    using value_type = std::remove_const_t<T>;  ///< the type of an element
    static constexpr bool is_shard = Shard;     ///< whether it has the rows of one rank only

    T* data;            ///< the address of row 0
    std::size_t pitch;  ///< elements from one row to the next

    /// Where the elements of `p` are.
    [[nodiscard]] GPUSHARE_HD T* at(const place& p) const noexcept {
        constexpr std::size_t columns = detail::columns_in<value_type>;
        return data + (Shard ? p.shard_row : p.row) * (pitch == 0 ? p.width / columns : pitch) + p.column / columns;
    }
};
/// All rows, from `data` on.
template <class T>
[[nodiscard]] GPUSHARE_HD constexpr matrix<T, false> rows(T* data, std::size_t pitch = 0) noexcept {
    return {data, pitch};
}
/// The rows that this rank reduces, from `data` on.
template <class T>
[[nodiscard]] GPUSHARE_HD constexpr matrix<T, true> shard(T* data, std::size_t pitch = 0) noexcept {
    return {data, pitch};
}

namespace detail {

template <class T>
inline constexpr bool is_matrix = false;
template <class T, bool Shard>
inline constexpr bool is_matrix<matrix<T, Shard>> = true;

/// A user's argument as a matrix: the matrix itself, or the whole of a range.
template <class R>
[[nodiscard]] constexpr auto as_matrix(R&& array) noexcept {
    if constexpr (is_matrix<std::remove_cvref_t<R>>)
        return array;
    else if constexpr (std::is_pointer_v<std::remove_cvref_t<R>>)
        return rows(array);
    else
        return rows(std::data(array));
}
template <class R>
[[nodiscard]] constexpr auto as_const_matrix(const R& array) noexcept {
    const auto m = as_matrix(array);
    using M = decltype(m);
    return matrix<const typename M::value_type, M::is_shard>{m.data, m.pitch};
}
template <class R>
[[nodiscard]] constexpr auto as_pointer(const R& array) noexcept {
    return as_const_matrix(array).data;
}

template <class M>
struct adding {
    static constexpr bool any_row = !M::is_shard;
    M other;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place& at) const noexcept {
        return x + load_floats<V>(other.at(at), at.count);
    }
};
}  // namespace detail
/// x + residual: adds the same elements of another array.
template <class R>
[[nodiscard]] constexpr auto add(const R& residual) noexcept {
    return detail::adding<decltype(detail::as_const_matrix(residual))>{detail::as_const_matrix(residual)};
}

namespace detail {
template <movable_number T>
struct biasing {
    static constexpr bool any_row = true;
    const T* of_column;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place& at) const noexcept {
        return x + load_floats<V>(of_column + at.column, at.count);
    }
};
}  // namespace detail
/// x + of_column[column].
template <class R>
[[nodiscard]] constexpr auto bias(const R& of_column) noexcept {
    const auto* const p = detail::as_pointer(of_column);
    return detail::biasing<std::remove_cvref_t<decltype(*p)>>{p};
}

namespace detail {
struct scaling {
    static constexpr bool any_row = true;
    float factor;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return x * factor;
    }
};
}  // namespace detail
/// x * factor.
[[nodiscard]] constexpr detail::scaling scale(float factor) noexcept { return {factor}; }

namespace detail {
struct rectifying {
    static constexpr bool any_row = true;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return max(x, 0.0F);
    }
};
}  // namespace detail

/// max(x, 0); a NaN stays.
[[nodiscard]] constexpr detail::rectifying relu() noexcept { return {}; }

namespace detail {
struct sigmoid_weighting {
    static constexpr bool any_row = true;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return x / (exp(x * -1.0F) + 1.0F);
    }
};
}  // namespace detail

/// x / (1 + e^-x).
[[nodiscard]] constexpr detail::sigmoid_weighting silu() noexcept { return {}; }

namespace detail {
struct gaussian_gating {
    static constexpr bool any_row = true;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
        const V u = x * (x * x * 0.044715F + 1.0F);
        return x / (exp(u * -1.59576912F) + 1.0F);
    }
};
}  // namespace detail

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3): the usual approximation of the
/// Gaussian error linear unit (Hendrycks and Gimpel, arXiv 1606.08415).
[[nodiscard]] constexpr detail::gaussian_gating gelu_tanh() noexcept { return {}; }

namespace detail {
template <class F>
struct mapping {
    static constexpr bool any_row = true;
    F f;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return x.each(f);
    }
};
}  // namespace detail
/// Applies f(x) to each element, one by one, for functions that can't be written on
/// gpushare::floats. On a device, f must be a functor.
template <class F>
requires std::is_invocable_r_v<float, const F&, float>
[[nodiscard]] constexpr detail::mapping<F> map(F f) noexcept { return {f}; }

namespace detail {
template <movable_number T>
struct rounding {
    static constexpr bool any_row = true;
    using rounded_type = T;
    using result_type = T;  // the element type of a collective that ends with this stage

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return rounded_to<T>(x);
    }
};
}  // namespace detail
/// Rounds x to T for the stages behind, and makes T the type in which the collective stores its
/// result.
template <movable_number T>
[[nodiscard]] constexpr detail::rounding<T> cast() noexcept {
    return {};
}

namespace detail {
template <class M>
struct storing {
    static constexpr bool any_row = !M::is_shard;
    using stored_type = typename M::value_type;

    M to;

    template <class V>
    GPUSHARE_FLAT GPUSHARE_HD void store(const V& x, const place& at) const noexcept {
        if constexpr (columns_in<stored_type> == 2)
            store_pairs(to.at(at), x, at.count);
        else if (at.streams && at.count == V::lanes)
            stream_floats(to.at(at), x);
        else
            store_floats(to.at(at), x, at.count);
    }
    [[nodiscard]] GPUSHARE_HD void* shares() const noexcept requires(!M::is_shard) { return to.data; }
    [[nodiscard]] GPUSHARE_HD storing with(void* data) const noexcept requires(!M::is_shard) {
        return {{static_cast<stored_type*>(data), to.pitch}};
    }
};
}  // namespace detail
/// Writes x to `out`, rounded to the element type of `out`; x itself passes through unchanged. An
/// epilogue may have any number of these sinks, anywhere.
template <class R>
[[nodiscard]] constexpr auto into(R&& out) noexcept {
    return detail::storing<decltype(detail::as_matrix(out))>{detail::as_matrix(out)};
}

/// Adds an array, such as the residual stream of a transformer, and stores the sum in it. Later
/// stages see the sum as stored.
template <class R>
[[nodiscard]] constexpr auto add_to(R&& residual) noexcept {
    const auto m = detail::as_matrix(residual);
    return add(m) | cast<typename decltype(detail::as_matrix(residual))::value_type>() | into(m);
}

static_assert(element_stage<detail::scaling> && element_stage<detail::sigmoid_weighting> &&
              element_stage<detail::rounding<bfloat16>>);
static_assert(sink_stage<detail::storing<matrix<bfloat16, false>>> &&
              sharing_stage<detail::storing<matrix<bfloat16, false>>>);
static_assert(sink_stage<detail::storing<matrix<bfloat16, true>>> &&
              !sharing_stage<detail::storing<matrix<bfloat16, true>>>);

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

/// x / sqrt(mean of the row's x^2 + epsilon) * weight[column] (Zhang and Sennrich, arXiv
/// 1910.07467). The mean's bits depend on where it is summed up: see row_sum.
template <class R>
[[nodiscard]] constexpr auto rms_norm(const R& weight, float epsilon) noexcept {
    const auto* const p = detail::as_pointer(weight);
    return detail::rms_normalising<std::remove_cvref_t<decltype(*p)>>{p, epsilon};
}
/// rms_norm without weights.
[[nodiscard]] constexpr detail::rms_normalising<float> rms_norm(float epsilon) noexcept { return {nullptr, epsilon}; }

namespace detail {
/// See layer_norm().
template <movable_number W, movable_number O>
struct layer_normalising {
    static constexpr bool any_row = true;
    using combine = row_sum;
    // The variance is computed around the mean, because a difference of two large sums would lose
    // precision.
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

/// (x - mean) / sqrt(variance + epsilon) * weight[column] + offset[column], with the mean and the
/// variance of the row (Ba, Kiros and Hinton, arXiv 1607.06450). The bits of mean and variance
/// depend on the order of the additions (see row_sum), so a device's result may differ from a
/// host's by some ulps of the added values. The bits never depend on the rank, the collective or
/// the row.
template <class W, class O>
[[nodiscard]] constexpr auto layer_norm(const W& weight, const O& offset, float epsilon) noexcept {
    const auto* const w = detail::as_pointer(weight);
    const auto* const o = detail::as_pointer(offset);
    return detail::layer_normalising<std::remove_cvref_t<decltype(*w)>, std::remove_cvref_t<decltype(*o)>>{w, o,
                                                                                                           epsilon};
}
/// layer_norm without weights and offsets.
[[nodiscard]] constexpr detail::layer_normalising<float, float> layer_norm(float epsilon) noexcept {
    return {nullptr, nullptr, epsilon};
}

/// The types that quantise() can convert to.
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
/// A number for each row: for all rows, or for a shard's rows.
template <class T, bool Shard>
struct of_rows {
    static constexpr bool is_shard = Shard;
    T* data;
    [[nodiscard]] GPUSHARE_HD T& at(const place& p) const noexcept { return data[Shard ? p.shard_row : p.row]; }
};

struct cut_to_127 {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& x) const noexcept {
        const R low = select(x < -127.0F, -127.0F, x);  // a NaN passes
        return select(low > 127.0F, 127.0F, low);
    }
};

/// Clamps values of int8_t to 127 either way. fp8 values pass unchanged, since storing them clamps
/// them.
template <class Q, std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> cut(const floats<N, W>& x) noexcept {
    if constexpr (std::same_as<Q, std::int8_t>)
        return floats<N, W>::map(cut_to_127{}, x);
    else
        return x;
}

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

/// Finds the scale of each row, writes the scale to the ranks' arrays and divides by it.
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

/// Writes the largest magnitude of each row; doesn't change the elements.
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

/// A number for each group of columns of each row, row by row: for all rows, or for a shard's rows.
template <class T, std::uint32_t Group, bool Shard>
struct of_groups {
    T* data;
    [[nodiscard]] GPUSHARE_HD T& at(const place& p) const noexcept {
        return data[(Shard ? p.shard_row : p.row) * ((p.width + Group - 1) / Group) + p.column / Group];
    }
};

/// Finds the scale of each group, writes the scale to the ranks' arrays and divides by it.
template <quantised_number Q, std::uint32_t Group, bool Shard>
struct group_fitting {
    static_assert(Group >= 16 && Group <= 128 && (Group & (Group - 1)) == 0,
                  "gpushare: a group has 16, 32, 64 or 128 columns");
    static constexpr bool any_row = !Shard;
    using result_type = Q;
    static constexpr std::uint32_t group = Group;
    struct learnt {
        float scale, inverse;
    };

    of_groups<float, Group, Shard> scales;

    GPUSHARE_HD void learn(float largest, learnt& known) const noexcept {
        known.scale = detail::larger_lanes{}(detail::quotient_of(largest, largest_quantum<Q>()), 0x1p-126F);
        known.inverse = detail::quotient_of(1.0F, known.scale);
        // Stores the same NaN everywhere, because the NaNs that arithmetic yields differ between
        // machines.
        if (largest == __builtin_huge_valf()) known.scale = __builtin_bit_cast(float, 0x7fff'ffff);
    }
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V apply(const V& x, const place&, const learnt& known) const noexcept {
        return known.scale == known.scale ? x * known.inverse : V(known.scale);
    }
    GPUSHARE_HD void publish(const place& at, const learnt& known) const noexcept { scales.at(at) = known.scale; }
    [[nodiscard]] GPUSHARE_HD void* shares() const noexcept requires(!Shard) { return scales.data; }
    [[nodiscard]] GPUSHARE_HD group_fitting with(void* data) const noexcept requires(!Shard) {
        return {{static_cast<float*>(data)}};
    }
};
static_assert(group_stage<group_fitting<fp8_e4m3, 128, false>> && sharing_stage<group_fitting<fp8_e4m3, 128, false>>);

/// Finds the fp8 scale of each 16 columns, writes the scale to the ranks' arrays, and divides by
/// the product of this scale and the tensor's scale.
template <bool Shard>
struct nvfp4_fitting {
    static constexpr bool any_row = !Shard;
    using result_type = fp4_pair;
    static constexpr std::uint32_t group = 16;
    struct learnt {
        fp8_e4m3 scale;
        float inverse;  // 0: the group isn't finite
    };

    of_groups<fp8_e4m3, group, Shard> scales;
    float whole, to_scale;

    GPUSHARE_HD void learn(float largest, learnt& known) const noexcept {
        const fp8_e4m3 near{detail::product_of(largest, to_scale)};
        known.scale = near.bits() == 0 ? fp8_e4m3::from_bits(1) : near;
        known.inverse = detail::quotient_of(1.0F, detail::product_of(static_cast<float>(known.scale), whole));
        if (largest == __builtin_huge_valf()) known = {fp8_e4m3::from_bits(0x7f), 0.0F};
    }
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V apply(const V& x, const place&, const learnt& known) const noexcept {
        return known.inverse == 0 ? V(0.0F) : x * known.inverse;
    }
    GPUSHARE_HD void publish(const place& at, const learnt& known) const noexcept { scales.at(at) = known.scale; }
    [[nodiscard]] GPUSHARE_HD void* shares() const noexcept requires(!Shard) { return scales.data; }
    [[nodiscard]] GPUSHARE_HD nvfp4_fitting with(void* data) const noexcept requires(!Shard) {
        return {{static_cast<fp8_e4m3*>(data)}, whole, to_scale};
    }
};
static_assert(group_stage<nvfp4_fitting<false>> && sharing_stage<nvfp4_fitting<false>>);
}  // namespace detail

/// Writes the largest magnitude of each row to `out`, one float for each row. Every rank that keeps
/// the row gets the magnitude in its `out`; with shard(out), each rank gets only its own rows'
/// magnitudes.
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
/// A positive scale for each row, given by the caller.
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
/// Quantises by a scale that is computed for each row, and writes the scales to `scales`, one float
/// for each row. Every rank that keeps the row gets its scale; with shard(scales), each rank gets
/// only its own rows' scales.
template <quantised_number Q, class R>
requires(!std::is_arithmetic_v<std::remove_cvref_t<R>>) [[nodiscard]] constexpr auto quantise(R&& scales) noexcept {
    const auto m = detail::as_matrix(scales);
    return detail::row_fitting<Q, decltype(detail::as_matrix(scales))::is_shard>{{m.data}};
}

/// Quantises by a scale that is computed for each `Group` neighbouring columns of a row: 16, 32, 64
/// or 128. The scales are written to `scales` row by row, ceil(width / Group) floats for each row.
/// Every rank that keeps the row gets its scales; with shard(scales), each rank gets only its own
/// rows' scales. The last group of a row may be shorter.
///
/// A scale is max(largest magnitude of the group / largest q, smallest normal float), and q is
/// computed as for a row's scale. For fp8_e4m3, the error of q * scale is at most |x| / 16 or scale
/// / 1024, whichever is more, plus |x| * 2^-22 for the rounding of the scale's reciprocal. A group
/// with an infinity or a NaN has the scale NaN, and each q that can be NaN is NaN; no other group
/// is affected. The bits are the same on host and device, whatever the number of threads.
template <quantised_number Q, std::uint32_t Group = 128, class R>
[[nodiscard]] constexpr auto quantise_groups(R&& scales) noexcept {
    const auto m = detail::as_matrix(scales);
    return detail::group_fitting<Q, Group, decltype(detail::as_matrix(scales))::is_shard>{{m.data}};
}

/// Quantises to 4 bits, two columns in an fp4_pair, with an fp8_e4m3 scale for each 16 columns and
/// the scale `whole` of the tensor. The caller gives `whole`, calibrated or from the step before,
/// since the tensor's largest magnitude isn't known before the last row is reduced. Largest
/// magnitude / (6 * 448) uses the whole range.
///
/// `whole` is clamped to the range from 2^-100 to 2^100, and a NaN counts as 1. A step of zeros
/// yields a `whole` of 0, which counts as 2^-100. With this `whole`, zeros stay zeros, and all but
/// the smallest numbers become 6 * 448 * 2^-100. So after a step of zeros, a caller should keep the
/// last `whole` above 0.
///
/// Rows have an even width, and the result has width / 2 bytes for each row. The scales are written
/// to `scales` row by row, ceil(width / 16) for each row; cuBLASLt's mode VEC16_UE4M3 takes the
/// scales in tiles of 128 rows by 4 groups. Otherwise works as quantise_groups.
///
/// A scale is the group's largest magnitude / (6 * whole), rounded to fp8_e4m3 and at least 2^-9; q
/// is x divided by scale * whole. If |x| is at most 6 * 448 * whole, the error of q * scale * whole
/// is at most |x| / 5 or scale * whole / 4, whichever is more. Two terms are added: 6 * whole /
/// 1024 where the scale is below 2^-6, and |x| * 2^-20 for the rounding of floats. A larger x
/// becomes 6 * 448 * whole. A group with an infinity or a NaN has the scale NaN and only zeros.
template <class R>
[[nodiscard]] constexpr auto quantise_nvfp4(R&& scales, float whole) noexcept {
    const auto m = detail::as_matrix(scales);
    constexpr float least = 0x1p-100F, most = 0x1p100F;
    const float used = whole != whole ? 1.0F : whole < least ? least : whole > most ? most : whole;
    return detail::nvfp4_fitting<decltype(detail::as_matrix(scales))::is_shard>{{m.data}, used, 1.0F / (6.0F * used)};
}

/// The arrays that sharing stages write to: `of(rank, k)` is the array of the kth sharing stage.
/// This type is a table with a row for each rank, as epilogue::collect fills it. A collective has
/// its own type with the same members.
struct shared_outputs {
    void* const* arrays;      ///< the table
    std::uint32_t of_ranks;   ///< rows of the table
    std::uint32_t of_stages;  ///< arrays in a row

    /// How many ranks have arrays.
    [[nodiscard]] GPUSHARE_HD std::uint32_t ranks() const noexcept { return of_ranks; }
    /// The array of a rank.
    [[nodiscard]] GPUSHARE_HD void* of(std::uint32_t rank, std::uint32_t k) const noexcept {
        return arrays[rank * of_stages + k];
    }
};

/// A source of elements that are stored in memory row by row. `pitch` is the number of elements
/// from one row to the next.
template <movable_number T>
struct row_source {
    const T* data;      ///< the address of row 0
    std::size_t pitch;  ///< elements from one row to the next; 0 means the width

    /// The elements of `at`.
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load(const place& at) const noexcept {
        return load_floats<V>(data + at.row * (pitch == 0 ? at.width : pitch) + at.column, at.count);
    }
};
/// A source of the elements from `data` on.
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr row_source<T> from_rows(const T* data, std::size_t pitch = 0) noexcept {
    return {data, pitch};
}

/// Applies an epilogue to whole rows. All threads of a block call apply_rows and go through the
/// rows together.
///
/// `scratch` belongs to the block and has `range.width` floats if there is a row stage or a group
/// stage; otherwise `scratch` may be null. Stores past the caches are ordered before the calling
/// thread's next release. Returns false, with nothing written, if a stage stores pairs of 4 bits
/// and the width is odd.
template <kernel_context Context, class... Stages, class Source, class Outputs = own_outputs>
GPUSHARE_HD bool apply_rows(Context& ctx, const epilogue<Stages...>& mine, const row_range& range, const Source& source,
                            float* scratch = nullptr, const Outputs& outputs = {}) noexcept {
    if (range.width % detail::row_unit<Stages...> != 0) return false;
    detail::run_rows(ctx, mine, range, source, scratch, outputs);
    return true;
}

/// Applies an epilogue without row stages to `count` elements of the whole result, from element
/// `first` on. The elements may begin and end within a row. `range.first` and `range.rows` don't
/// matter. Returns false, with nothing written, if a stage stores pairs of 4 bits and the width,
/// `first` or `count` is odd.
template <kernel_context Context, class... Stages, class Source, class Outputs = own_outputs>
GPUSHARE_HD bool apply_elements(Context& ctx, const epilogue<Stages...>& mine, const row_range& range,
                                std::size_t first, std::size_t count, const Source& source,
                                const Outputs& outputs = {}) noexcept {
    static_assert(!epilogue<Stages...>::whole_rows, "a row or group stage needs whole rows: apply_rows");
    constexpr std::size_t unit = detail::row_unit<Stages...>;
    if (range.width % unit != 0 || first % unit != 0 || count % unit != 0) return false;
    detail::run_widest(ctx, mine, source, nullptr, outputs, [&](auto&& run) {
        place at;
        at.width = range.width;
        at.streams = range.streams;
        if (count != 0) at.row = first / range.width;
        for (at.column = count == 0 ? 0 : first % range.width; count != 0; at.column = 0, ++at.row) {
            const std::size_t here = range.width - at.column < count ? range.width - at.column : count;
            at.shard_row = at.row - range.shard_first;
            run(at, at.column + here);
            count -= here;
        }
    });
    if (range.streams) finish_streaming();
    return true;
}

/// `count` elements in rows of `width`, and the stages that run on each element. A chain is a value
/// that points to its arrays. It is also the kernel that runs the stages; each block takes an equal
/// part. The bits are the same for any number of blocks and threads. Nothing is written if a stage
/// stores pairs of 4 bits and the width or the count is odd.
template <movable_number T, class... Stages>
struct element_chain {
    const T* in = nullptr;       ///< the elements
    std::size_t count = 0;       ///< the number of elements
    std::size_t width = 1;       ///< elements of a row, for stages with an element for each column
    epilogue<Stages...> list{};  ///< the stages

    /// Adds stages.
    template <detail::epilogue_part S>
    [[nodiscard]] friend constexpr auto operator|(const element_chain& c, const S& more) {
        const auto with = [&c]<class... All>(const epilogue<All...>& all) {
            return element_chain<T, All...>{c.in, c.count, c.width, all};
        };
        return with(detail::joined(c.list, detail::as_epilogue(more)));
    }

    /// The part of one block; all threads of the block call the operator.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context Context>
    GPUSHARE_HD void operator()(Context& ctx) const noexcept {
        // 64 elements are one or more cache lines, so a part begins at a line if the array does.
        constexpr std::size_t line = 64;
        const std::size_t lines = (count + line - 1) / line, blocks = ctx.num_blocks();
        const std::size_t each = (lines + blocks - 1) / blocks * line;
        const std::size_t first = ctx.block_rank() * each;
        if (first >= count || count % detail::row_unit<Stages...> != 0) return;
        apply_elements(ctx, list, row_range{.rows = 0, .width = width}, first,
                       count - first < each ? count - first : each, from_rows(in));
    }
};

/// The beginning of a chain. A `width` of 0 makes all elements one row.
template <class R>
requires requires(const R& r) { std::span(r); }
[[nodiscard]] constexpr auto elements(const R& in, std::size_t width = 0) {
    using T = std::remove_cvref_t<decltype(*std::data(in))>;
    const std::size_t count = std::size(in);
    return element_chain<T>{std::data(in), count, width == 0 ? (count == 0 ? 1 : count) : width, {}};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
