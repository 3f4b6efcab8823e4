// SPDX-License-Identifier: Apache-2.0
// The element-wise stages of an epilogue, and the sinks that write elements to an array.
//
//   auto finish = gpushare::add(residual) | gpushare::silu() | gpushare::into(copy) | gpushare::cast<gpushare::bfloat16>();
//   auto keeps_sum = gpushare::add_to(residual) | gpushare::silu();      // adds the residual, and stores the sum in it
//
// Arrays are vectors, spans or anything with std::data; where rows don't lie one right after the other, rows(p, pitch).
//  x          has the rows of the result that its rank keeps (all; by run_sharded its shard). A sink: the rank that
//             reduces a row writes it to the arrays of all ranks that keep it
//  shard(x)   has the rows that its rank reduces. A sink: that rank alone writes to it
// Arrays must last until the collective is done.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/float_exp.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A matrix of T: all rows, or a rank's shard of them. `pitch` is the number of elements from a row
/// to the next, 0: as many as the result has columns.
template <class T, bool Shard>
struct matrix {
    using value_type = std::remove_const_t<T>;  ///< of an element
    static constexpr bool is_shard = Shard;     ///< whether it has the rows of one rank only

    T* data;            ///< row 0
    std::size_t pitch;  ///< elements from a row to the next

    /// Where the elements of `p` are.
    [[nodiscard]] GPUSHARE_HD T* at(const place& p) const noexcept {
        return data + (Shard ? p.shard_row : p.row) * (pitch == 0 ? p.width : pitch) + p.column;
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

}  // namespace detail

namespace detail {
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
/// x + residual: the same elements of another array.
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

/// max(x, 0); NaN stays.
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
/// f(x) of each element, one by one: for functions that can't be written on gpushare::floats. On a device, a functor.
template <class F>
requires std::is_invocable_r_v<float, const F&, float>
[[nodiscard]] constexpr detail::mapping<F> map(F f) noexcept { return {f}; }

namespace detail {
template <movable_number T>
struct rounding {
    static constexpr bool any_row = true;
    using rounded_type = T;
    using result_type = T;  // of a collective that ends so

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return rounded_to<T>(x);
    }
};
}  // namespace detail
/// Rounds x to T, for the stages behind it; the result of the collective is stored as T.
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
        if (at.streams && at.count == V::lanes)
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
/// Writes x to `out`, rounded to its element type; x itself goes on unchanged. May be anywhere in an epilogue, any
/// number of times.
template <class R>
[[nodiscard]] constexpr auto into(R&& out) noexcept {
    return detail::storing<decltype(detail::as_matrix(out))>{detail::as_matrix(out)};
}

/// Adds an array, such as the residual stream of a transformer, and stores the sum in it. Later stages see the sum as
/// stored.
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

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
