// SPDX-License-Identifier: Apache-2.0
// The stages of an epilogue that take elements one by one, and what writes them.
//
//   gpushare::add(residual) | gpushare::into(residual_out) | gpushare::cast<gpushare::bfloat16>() | gpushare::into(out)
//
// Matrices are given by the address of their first element. A plain pointer is a matrix that each rank has a whole copy of:
// rows are counted as in the result, and what is written goes to every rank's copy. shard(p) has only the rows that its rank
// reduces, counted from the first of them, and what is written stays with that rank. Elements are numbers of any type that
// load_floats takes. Pointers must last until the collective is done, and be readable by the rank that runs the stage; a
// sink's by all ranks.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/float_exp.hpp>
#include <gpushare/collective/float_moves.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// A matrix of T: all rows, or a rank's shard of them. `pitch` is the number of elements from a row to the next, 0: as many as
/// the result has columns.
template <class T, bool Shard>
struct matrix {
    using value_type = std::remove_const_t<T>;
    static constexpr bool is_shard = Shard;

    T* data;
    std::size_t pitch;

    [[nodiscard]] GPUSHARE_HD T* at(const place& p) const noexcept {
        return data + (Shard ? p.shard_row : p.row) * (pitch == 0 ? p.width : pitch) + p.column;
    }
};
template <class T>
[[nodiscard]] GPUSHARE_HD constexpr matrix<T, false> rows(T* data, std::size_t pitch = 0) noexcept {
    return {data, pitch};
}
template <class T>
[[nodiscard]] GPUSHARE_HD constexpr matrix<T, true> shard(T* data, std::size_t pitch = 0) noexcept {
    return {data, pitch};
}

template <class M>
struct adding {
    M other;

    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place& at) const noexcept {
        return x + load_floats<V::lanes>(other.at(at), at.count);
    }
};
/// x + residual: the same elements of another matrix.
template <class T, bool Shard>
[[nodiscard]] GPUSHARE_HD constexpr auto add(matrix<T, Shard> residual) noexcept {
    return adding<matrix<const T, Shard>>{{residual.data, residual.pitch}};
}
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr auto add(const T* residual) noexcept {
    return add(rows(residual));
}

template <movable_number T>
struct biasing {
    const T* of_column;

    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place& at) const noexcept {
        return x + load_floats<V::lanes>(of_column + at.column, at.count);
    }
};
/// x + of_column[column].
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr biasing<T> bias(const T* of_column) noexcept {
    return {of_column};
}

struct scaling {
    float factor;

    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return x * factor;
    }
};
/// x * factor.
[[nodiscard]] GPUSHARE_HD constexpr scaling scale(float factor) noexcept { return {factor}; }

/// max(x, 0); NaN stays.
struct relu {
    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return max(x, 0.0F);
    }
};

/// x / (1 + e^-x).
struct silu {
    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return x / (exp(x * -1.0F) + 1.0F);
    }
};

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3): the usual approximation of the Gaussian error linear unit
/// (Hendrycks and Gimpel, arXiv 1606.08415).
struct gelu_tanh {
    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
        const V u = x * (x * x * 0.044715F + 1.0F);
        return x / (exp(u * -1.59576912F) + 1.0F);
    }
};

template <class F>
struct for_each_element {
    F f;

    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return x.each(f);
    }
};
/// f(x) of each element, one by one: for functions that can't be written on gpushare::floats.
template <class F>
requires std::is_invocable_r_v<float, const F&, float>
[[nodiscard]] GPUSHARE_HD constexpr for_each_element<F> each(F f) noexcept { return {f}; }

template <movable_number T>
struct rounding {
    using rounded_type = T;

    template <class V>
    [[nodiscard]] GPUSHARE_HD V operator()(const V& x, const place&) const noexcept {
        return rounded_to<T>(x);
    }
};
/// x rounded to T, for the stages behind it. What is stored by into() is rounded anyway.
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr rounding<T> cast() noexcept {
    return {};
}

template <class M>
struct storing {
    using stored_type = typename M::value_type;
    static constexpr bool to_all = !M::is_shard;

    M to;

    template <class V>
    GPUSHARE_HD void store(const V& x, const place& at) const noexcept {
        if (at.streams && at.count == V::lanes)
            stream_floats(to.at(at), x);
        else
            store_floats(to.at(at), x, at.count);
    }
};
/// Writes x, rounded to what `out` consists of; x itself goes on as it was. Anywhere in an epilogue, as often as one likes.
template <movable_number T, bool Shard>
[[nodiscard]] GPUSHARE_HD constexpr storing<matrix<T, Shard>> into(matrix<T, Shard> out) noexcept {
    return {out};
}
template <movable_number T>
[[nodiscard]] GPUSHARE_HD constexpr storing<matrix<T, false>> into(T* out) noexcept {
    return into(rows(out));
}

static_assert(element_stage<scaling> && element_stage<silu> && element_stage<rounding<bfloat16>>);
static_assert(sink_stage<storing<matrix<bfloat16, false>>>);

}  // namespace gpushare::inline GPUSHARE_ABI
