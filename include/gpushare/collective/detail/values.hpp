// SPDX-License-Identifier: Apache-2.0
// The few elements of an array that a thread combines at once, in the type of the computation.
//
//   using values = gpushare::detail::values_of<Context, bfloat16, sum>;
//   auto x = values::load(a + i);    x.combine(sum{}, values::load(b + i));    x.store(out + i);
//
// A host thread takes 16 elements: floats in the vectors of floats.hpp, other numbers in a plain
// array, which compilers vectorise. A device's thread takes as many elements as one instruction
// moves, so that neighbouring threads read neighbouring bytes. On a CPU, most combining doesn't use
// these values but works on whole cache lines: simd/cache_line.hpp.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Converts an element to the type of the computation, and back with a single rounding.
template <class A, class T>
[[nodiscard]] GPUSHARE_HD constexpr A widened(const T& x) noexcept {
    return static_cast<A>(x);
}
template <class T, class A>
[[nodiscard]] GPUSHARE_HD constexpr T narrowed(const A& x) noexcept {
    return static_cast<T>(x);
}

/// N numbers of type A in an array, loaded from and stored as elements of type T.
template <class A, std::uint32_t N>
struct number_values {
    static constexpr std::uint32_t width = N;

    A lane[N];

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    [[nodiscard]] GPUSHARE_HD static number_values load(const T* from) noexcept {
        number_values v;
        constexpr std::uint32_t step = packed<T>::width < N ? packed<T>::width : N;
        for (std::uint32_t j = 0; j < N; j += step) {
            if constexpr (step == packed<T>::width) {
                const packed<T> p = load_packed(from + j);
                for (std::uint32_t i = 0; i < step; ++i) v.lane[j + i] = widened<A>(p[i]);
            } else {
                for (std::uint32_t i = 0; i < step; ++i) v.lane[j + i] = widened<A>(from[j + i]);
            }
        }
        return v;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    GPUSHARE_HD void store(T* to) const noexcept {
        constexpr std::uint32_t step = packed<T>::width < N ? packed<T>::width : N;
        for (std::uint32_t j = 0; j < N; j += step) {
            if constexpr (step == packed<T>::width) {
                packed<T> p;
                for (std::uint32_t i = 0; i < step; ++i) p[i] = narrowed<T>(lane[j + i]);
                store_packed(to + j, p);
            } else {
                for (std::uint32_t i = 0; i < step; ++i) to[j + i] = narrowed<T>(lane[j + i]);
            }
        }
    }
    /// Converts elements that a single access has loaded, as on a device.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    requires(packed<T>::width == N) [[nodiscard]] GPUSHARE_HD static number_values of(const packed<T>& p) noexcept {
        number_values v;
        for (std::uint32_t i = 0; i < N; ++i) v.lane[i] = widened<A>(p[i]);
        return v;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    requires(packed<T>::width == N) [[nodiscard]] GPUSHARE_HD packed<T> as() const noexcept {
        packed<T> p;
        for (std::uint32_t i = 0; i < N; ++i) p[i] = narrowed<T>(lane[i]);
        return p;
    }
    /// Does the same as store(), because only lines and vectors of floats are stored past the
    /// caches.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class T>
    GPUSHARE_HD void stream(T* to) const noexcept {
        store(to);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Op>
    GPUSHARE_HD void combine(const Op& op, const number_values& other) noexcept {
        for (std::uint32_t i = 0; i < N; ++i) lane[i] = op(lane[i], other.lane[i]);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Op>
    GPUSHARE_HD void finish(const Op& op, std::uint32_t ranks) noexcept {
        if constexpr (requires { op.finish(A{}, A{}); })
            for (std::uint32_t i = 0; i < N; ++i) lane[i] = op.finish(lane[i], static_cast<A>(ranks));
    }
};

/// number_values for floats, in vectors.
template <std::uint32_t N>
struct float_values {
    static constexpr std::uint32_t width = N;

    floats<N> all;

    template <class T>
    [[nodiscard]] GPUSHARE_HD static float_values load(const T* from) noexcept {
        return {load_floats<floats<N>>(from)};
    }
    template <class T>
    GPUSHARE_HD void store(T* to) const noexcept {
        store_floats(to, all);
    }
    /// Stores past the caches if `to` is a multiple of 16, for values that no thread reads soon.
    /// Call finish_streaming() before a later release.
    template <class T>
    GPUSHARE_HD void stream(T* to) const noexcept {
        stream_floats(to, all);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Op>
    GPUSHARE_HD void combine(const Op& op, const float_values& other) noexcept {
        all = floats<N>::combined(op, all, other.all);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Op>
    GPUSHARE_HD void finish(const Op& op, std::uint32_t ranks) noexcept {
        if constexpr (requires { op.finish(1.0F, 1.0F); }) all = all.finished(op, static_cast<float>(ranks));
    }
};

/// The values of type T that a thread of such a context takes at once to combine them by Op.
template <class Context, class T, class Op, class A = accumulator_t<T, Op>>
using values_of = std::conditional_t<is_one_thread<Context> && std::same_as<A, float>, float_values<16>,
                                     number_values<A, is_one_thread<Context> ? 16 : 16 / sizeof(T)>>;

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
