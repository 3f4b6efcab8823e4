// SPDX-License-Identifier: Apache-2.0
// A few floats that a stage of an epilogue takes and returns at once. On a CPU the floats are in
// vector registers, the widest that the processor has, whatever flags the file is compiled with. On
// a device the floats are in a thread's registers.
//
//   struct leaky {
//       template <class V> GPUSHARE_HD V operator()(const V& x, const gpushare::place&) const { return max(x * 0.1F, x); }
//   };
//   auto y = leaky{}(gpushare::floats<4>{}, gpushare::place{});
//
// Each operation rounds once, on every machine alike. Otherwise a compiler might contract a product
// and a sum into one operation with one rounding, depending on the surrounding code.
//
// exp() has the same bits on every machine, too. It calls no library function, since those of host
// and device differ, and it computes all floats at once.
//
//   gpushare::floats<4> silu = x / (exp(x * -1.0F) + 1.0F);     // x of the same type
//
// Floats are loaded from and stored to memory of another type: float, bfloat16, float16, the 8-bit
// formats or int8_t. The results have the same bits as conversions of single numbers
// (stored_number). Conversions to integers round to nearest, ties to even. Values that are out of
// range become the largest or smallest integer, and NaN becomes 0.
//
//   using V = gpushare::floats<4>;
//   const V z = gpushare::load_floats<V>(bf16_pointer);
//   gpushare::store_floats(int8_pointer, z + y);                // y of type V
//
// all_finite looks for infinities and NaN in an array.
//
//   // on all ranks alike: they have the same bits
//   if (!gpushare::all_finite(std::span<const float>(gradient))) skip_this_step();
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <gpushare/collective/detail/simd/conversions.hpp>
#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// N floats in registers of Width floats each. N is a power of two, at least Width. Width is 4, or
/// 8 on a host with such registers. Don't store a `floats` object, nor pass one between host and
/// device: their layouts differ. Operations go lane by lane, and their results don't depend on
/// Width.
template <std::uint32_t N, std::uint32_t Width = 4>
class floats {
    static_assert(N > Width && (N & (N - 1)) == 0 && (Width == 4 || Width == 8));
    using half = floats<N / 2, Width>;

public:
    static constexpr std::uint32_t lanes = N;      ///< the number of floats
    static constexpr std::uint32_t width = Width;  ///< the floats in a register

    floats() = default;
    /// Converts from narrower registers.
    template <std::uint32_t Narrow>
    requires(Narrow < Width) floats(const floats<N, Narrow>& x)
    noexcept : low_(x.low()), high_(x.high()) {}
    /// Sets all lanes to one value.
    GPUSHARE_HD floats(float all) noexcept : low_(all), high_(all) {}
    /// Joins two halves.
    GPUSHARE_HD floats(const half& low, const half& high) noexcept : low_(low), high_(high) {}

    /// The first half.
    [[nodiscard]] GPUSHARE_HD const half& low() const noexcept { return low_; }
    /// The second half.
    [[nodiscard]] GPUSHARE_HD const half& high() const noexcept { return high_; }

    /// Applies `f` to the lanes of several objects, as many lanes at once as the machine takes. `f`
    /// is called with floats, or with vectors of floats. Vectors have the operators of floats, and
    /// use gpushare::select() where floats use `?:`.
    template <class F, class... More>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static floats map(const F& f, const floats& x,
                                                              const More&... more) noexcept {
        return {half::map(f, x.low_, more.low_...), half::map(f, x.high_, more.high_...)};
    }
    /// Applies `f(float)` to each lane, one by one.
    template <class F>
    [[nodiscard]] GPUSHARE_HD floats each(const F& f) const noexcept {
        return {low_.each(f), high_.each(f)};
    }
    /// Applies `f(float, float)` to the lanes of two objects, one by one.
    template <class F>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static floats zip(const F& f, const floats& x, const floats& y) noexcept {
        return {half::zip(f, x.low_, y.low_), half::zip(f, x.high_, y.high_)};
    }
    /// Applies `op`, one of reduce_ops.hpp or a user's, to the lanes of two objects.
    template <class Op>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static floats combined(const Op& op, const floats& x,
                                                                   const floats& y) noexcept {
        return {half::combined(op, x.low_, y.low_), half::combined(op, x.high_, y.high_)};
    }
    /// Applies the last step of `op` to each lane, for `ranks` ranks.
    template <class Op>
    [[nodiscard]] GPUSHARE_HD floats finished(const Op& op, float ranks) const noexcept {
        return {low_.finished(op, ranks), high_.finished(op, ranks)};
    }
    /// Combines all lanes into one number by `op`, halves first: a tree, so the order is fixed.
    template <class Op>
    [[nodiscard]] GPUSHARE_HD float folded(const Op& op) const noexcept {
        return half::map(op, low_, high_).folded(op);
    }
    /// The first `n` lanes, with `rest` in the remaining lanes.
    [[nodiscard]] GPUSHARE_HD floats first(std::uint32_t n, float rest) const noexcept {
        if (n >= N / 2) return {low_, high_.first(n - N / 2, rest)};
        return {low_.first(n, rest), half(rest)};
    }

private:
    half low_, high_;
};

#ifdef __CUDA_ARCH__

template <>
class floats<4, 4> {
public:
    static constexpr std::uint32_t lanes = 4, width = 4;

    floats() = default;
    __device__ floats(float all) noexcept : lane_{all, all, all, all} {}
    __device__ floats(float a, float b, float c, float d) noexcept : lane_{a, b, c, d} {}
    [[nodiscard]] __device__ float operator[](std::uint32_t i) const noexcept { return lane_[i]; }

    template <class F, class... More>
    [[nodiscard]] __device__ static floats map(const F& f, const floats& x, const More&... more) noexcept {
        return {f(x.lane_[0], more.lane_[0]...), f(x.lane_[1], more.lane_[1]...), f(x.lane_[2], more.lane_[2]...),
                f(x.lane_[3], more.lane_[3]...)};
    }
    template <class F>
    [[nodiscard]] __device__ floats each(const F& f) const noexcept {
        return {f(lane_[0]), f(lane_[1]), f(lane_[2]), f(lane_[3])};
    }
    template <class F>
    [[nodiscard]] __device__ static floats zip(const F& f, const floats& x, const floats& y) noexcept {
        return {f(x[0], y[0]), f(x[1], y[1]), f(x[2], y[2]), f(x[3], y[3])};
    }
    template <class Op>
    [[nodiscard]] __device__ static floats combined(const Op& op, const floats& x, const floats& y) noexcept {
        return zip(op, x, y);
    }
    template <class Op>
    [[nodiscard]] __device__ floats finished(const Op& op, float ranks) const noexcept {
        return each([&](float x) { return op.finish(x, ranks); });
    }
    template <class Op>
    [[nodiscard]] __device__ float folded(const Op& op) const noexcept {
        return op(op(lane_[0], lane_[2]), op(lane_[1], lane_[3]));
    }
    [[nodiscard]] __device__ floats first(std::uint32_t n, float rest) const noexcept {
        return {n > 0 ? lane_[0] : rest, n > 1 ? lane_[1] : rest, n > 2 ? lane_[2] : rest, n > 3 ? lane_[3] : rest};
    }

private:
    float lane_[4];
};

#else

/// One register of floats: see floats<N, Width>, which has the same members.
template <std::uint32_t W>
class floats<W, W> {
    using vector = detail::simd<float, W>;

public:
    static constexpr std::uint32_t lanes = W;  ///< the number of floats
    static constexpr std::uint32_t width = W;  ///< the floats in the register

    floats() = default;
    /// Sets all lanes to one value.
    floats(float all) noexcept : vector_(all) {}
    /// Takes over the contents of a register.
    floats(const vector& v) noexcept : vector_(v) {}
    /// Converts from narrower registers.
    template <std::uint32_t Narrow>
    requires(Narrow < W) floats(const floats<W, Narrow>& x)
    noexcept {
        for (std::uint32_t i = 0; i < Narrow; ++i) {
            vector_.raw[i] = x.low()[i];
            vector_.raw[i + Narrow] = x.high()[i];
        }
    }
    /// One of the floats.
    [[nodiscard]] float operator[](std::uint32_t i) const noexcept { return vector_.raw[i]; }
    /// The register.
    [[nodiscard]] const detail::simd<float, W>& in_register() const noexcept { return vector_; }

    /// See floats.
    template <class F, class... More>
    [[nodiscard]] GPUSHARE_FLAT static floats map(const F& f, const floats& x, const More&... more) noexcept {
        return floats(f(x.vector_, more.vector_...));
    }
    /// See floats.
    template <class F>
    [[nodiscard]] floats each(const F& f) const noexcept {
        floats y;
        for (std::uint32_t i = 0; i < W; ++i) y.vector_.raw[i] = f((*this)[i]);
        return y;
    }
    /// See floats.
    template <class F>
    [[nodiscard]] GPUSHARE_FLAT static floats zip(const F& f, const floats& x, const floats& y) noexcept {
        floats z;
        for (std::uint32_t i = 0; i < W; ++i) z.vector_.raw[i] = f(x[i], y[i]);
        return z;
    }
    /// See floats.
    template <class Op>
    [[nodiscard]] GPUSHARE_FLAT static floats combined(const Op& op, const floats& x, const floats& y) noexcept {
        if constexpr (requires(typename vector::raw_type & a) { Op::into(a, a); }) {
            floats both = x;
            Op::into(both.vector_.raw, y.vector_.raw);
            return both;
        } else {
            return zip(op, x, y);
        }
    }
    /// See floats.
    template <class Op>
    [[nodiscard]] floats finished(const Op& op, float ranks) const noexcept {
        if constexpr (requires(typename vector::raw_type & a) { Op::finish_into(a, ranks); }) {
            floats mean = *this;
            Op::finish_into(mean.vector_.raw, ranks);
            return mean;
        } else {
            return each([&](float x) { return op.finish(x, ranks); });
        }
    }
    /// See floats.
    template <class Op>
    [[nodiscard]] float folded(const Op& op) const noexcept {
        float x[W];
        for (std::uint32_t i = 0; i < W; ++i) x[i] = (*this)[i];
        for (std::uint32_t half = W / 2; half != 0; half /= 2)
            for (std::uint32_t i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
        return x[0];
    }
    /// See floats.
    [[nodiscard]] floats first(std::uint32_t n, float rest) const noexcept {
        floats y(rest);
        for (std::uint32_t i = 0; i < W && i < n; ++i) y.vector_.raw[i] = (*this)[i];
        return y;
    }

private:
    vector vector_;
};

#endif

namespace detail {

struct plus_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return a + b;
    }
};
struct minus_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return a - b;
    }
};
struct product_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return product_of(a, b);
    }
};
struct quotient_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return quotient_of(a, b);
    }
};
// If either side is NaN, the result is NaN.
struct larger_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return select((a < b) | (b != b), b, a);
    }
};
struct smaller_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return select((b < a) | (b != b), b, a);
    }
};
struct magnitude_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& a) const noexcept {
        return from_bits(bits_of(a) & 0x7fff'ffff);
    }
};

}  // namespace detail

/// Adds lane by lane.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator+(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::plus_lanes{}, a, b);
}
/// Subtracts lane by lane.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator-(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::minus_lanes{}, a, b);
}
/// Multiplies lane by lane.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator*(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::product_lanes{}, a, b);
}
/// Divides lane by lane.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator/(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::quotient_lanes{}, a, b);
}
/// The larger of two lanes, or NaN if either lane is NaN.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> max(const floats<N, W>& a,
                                                         const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::larger_lanes{}, a, b);
}
/// The smaller of two lanes, or NaN if either lane is NaN.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> min(const floats<N, W>& a,
                                                         const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::smaller_lanes{}, a, b);
}
/// The magnitude of each lane.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> abs(const floats<N, W>& a) noexcept {
    return floats<N, W>::map(detail::magnitude_lanes{}, a);
}

namespace detail {

/// Writes x as n ln 2 + r with |r| <= ln(2) / 2, and multiplies 2^n by the Taylor polynomial of
/// degree 7 in r, whose own relative error is below 6e-9. The result is within 2 units in the last
/// place. The result is infinity from 88.73 on, 0 below -104, and NaN for NaN.
struct exp_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(R x) const noexcept {
        x = select(x < -105.0F, -105.0F, x);
        x = select(x > 89.0F, 89.0F, x);
        // Adding 1.5 * 2^23 rounds to an integer, which the last bits then hold.
        constexpr float shift = 12582912.0F;
        const R shifted = product_of(x, R(1.44269504F)) + shift;
        const auto n = bits_of(shifted) - bits_of(shift);
        const R whole = shifted - shift;
        // ln 2 in two parts. The first part has few bits, so its product is exact.
        R r = x - product_of(whole, R(0.693359375F));
        r = r - product_of(whole, R(-2.12194440e-4F));
        R y = product_of(r, R(1.0F / 5040)) + 1.0F / 720;
        y = product_of(y, r) + 1.0F / 120;
        y = product_of(y, r) + 1.0F / 24;
        y = product_of(y, r) + 1.0F / 6;
        y = product_of(y, r) + 0.5F;
        y = product_of(y, r) + 1.0F;
        y = product_of(y, r) + 1.0F;
        // 2^n in two factors, since the smallest and the largest powers don't fit into one factor.
        const auto half = n >> 1;
        y = product_of(y, from_bits((half + 127) << 23));
        return product_of(y, from_bits((n - half + 127) << 23));
    }
};

}  // namespace detail

/// e to the power of each lane, within 2 units in the last place.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> exp(const floats<N, W>& x) noexcept {
    return floats<N, W>::map(detail::exp_lanes{}, x);
}

namespace detail {

template <class V>
inline constexpr bool is_floats = false;
template <std::uint32_t N, std::uint32_t W>
inline constexpr bool is_floats<floats<N, W>> = true;

template <class T>
[[nodiscard]] GPUSHARE_HD T narrow_lane(float x) noexcept {
    if constexpr (std::same_as<T, std::int8_t>)
        return static_cast<T>(integer_lanes{}(x));
    else
        return T{x};
}

/// Four elements of T as they are in memory, in one access where the address allows it.
template <class T>
struct alignas(4 * sizeof(T)) four_elements {
    T lane[4];
};

#ifdef __CUDA_ARCH__

/// The values of one access, as floats.
template <class V, class T>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V widened_four(const four_elements<T>& t) noexcept {
    return {static_cast<float>(t.lane[0]), static_cast<float>(t.lane[1]), static_cast<float>(t.lane[2]),
            static_cast<float>(t.lane[3])};
}

#else

/// One register of floats.
template <std::uint32_t W, class T>
[[gnu::always_inline]] inline void load_register(const T* from, simd<float, W>& to) noexcept {
    if constexpr (std::same_as<T, float>) {
        to.raw = __builtin_bit_cast(typename simd<float, W>::raw_type,
                                    *reinterpret_cast<const typename in_memory<4 * W>::type*>(from));
    } else {
        simd<std::int32_t, W> words;
#if defined(__x86_64__)
        if constexpr (W == 8 && std::same_as<T, float16>) return widen_float16s_by_f16c(from, to);
        if constexpr (W == 8)
            spread_by_avx2(from, words);
        else
#endif
            spread_elements<T, W>::load(from, words);
        to = typename lanes_of_type<T>::widen{}(words);
    }
}

/// Eight floats as eight elements of 16 bits.
template <class T, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT inline eight_halves as_halves(const floats<8, W>& x) noexcept {
    const typename lanes_of_type<T>::narrow to;
    if constexpr (W == 4) {
        return packed_eight(to(x.low().in_register()), to(x.high().in_register()));
    } else {
#if defined(__x86_64__)
        if constexpr (std::same_as<T, float16>) {
            eight_halves h;
            narrow_float16s_by_f16c(x.in_register(), h);
            return h;
        }
#endif
        return packed_eight(to(x.in_register()));
    }
}

/// The number of floats that become 16 bytes of T.
template <class T, std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT inline sixteen_bytes as_stored(const floats<N, W>& x) noexcept {
    static_assert(N * sizeof(T) == 16);
    if constexpr (std::same_as<T, float>)
        return __builtin_bit_cast(sixteen_bytes, x.in_register().raw);
    else if constexpr (sizeof(T) == 2)
        return __builtin_bit_cast(sixteen_bytes, as_halves<T>(x));
    else
        return packed_halves(as_halves<T>(x.low()), as_halves<T>(x.high()));
}

#endif

}  // namespace detail

/// The numbers that an epilogue reads and writes.
template <class T>
concept movable_number = std::same_as<T, float> || std::same_as<T, std::int8_t> || detail::is_stored_number<T>;

/// Loads the elements that begin at `from`, which needs only T's own alignment. V is the floats<N,
/// W> to load.
template <class V, movable_number T>
requires detail::is_floats<V>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load_floats(const T* from) noexcept {
    if constexpr (V::lanes > V::width) {
        using half = floats<V::lanes / 2, V::width>;
        return {load_floats<half>(from), load_floats<half>(from + V::lanes / 2)};
    } else {
#ifdef __CUDA_ARCH__
        detail::four_elements<T> t;
        if (reinterpret_cast<std::uintptr_t>(from) % sizeof t == 0)
            t = *reinterpret_cast<const detail::four_elements<T>*>(from);
        else
            for (int i = 0; i < 4; ++i) t.lane[i] = from[i];
        return detail::widened_four<V>(t);
#else
        detail::simd<float, V::width> x;
        detail::load_register(from, x);
        return V(x);
#endif
    }
}
/// load_floats by the number of floats, instead of their type.
template <std::uint32_t N, movable_number T>
[[nodiscard]] GPUSHARE_HD floats<N> load_floats(const T* from) noexcept {
    return load_floats<floats<N>>(from);
}

namespace detail {

// The last few elements of a row are loaded and stored one by one. On a device no array may be
// indexed by a variable, because such an array would be in memory.
template <class V, class T>
GPUSHARE_RARE GPUSHARE_HD V load_some(const T* from, std::uint32_t n) noexcept {
#ifdef __CUDA_ARCH__
    // V has more than 4 lanes only where nvcc compiles code that the host's threads run.
    if constexpr (V::lanes > 4) {
        using half = floats<V::lanes / 2, V::width>;
        constexpr std::uint32_t in_half = V::lanes / 2;
        return {load_some<half>(from, n), load_some<half>(from + in_half, n > in_half ? n - in_half : 0)};
    } else
        return {n > 0 ? static_cast<float>(from[0]) : 0, n > 1 ? static_cast<float>(from[1]) : 0,
                n > 2 ? static_cast<float>(from[2]) : 0, n > 3 ? static_cast<float>(from[3]) : 0};
#else
    float all[V::lanes] = {};
    for (std::uint32_t i = 0; i < V::lanes && i < n; ++i) all[i] = static_cast<float>(from[i]);
    return load_floats<V>(static_cast<const float*>(all));
#endif
}

}  // namespace detail

/// Loads the first `n` elements, and sets the remaining lanes to zero.
template <class V, movable_number T>
requires detail::is_floats<V>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load_floats(const T* from, std::uint32_t n) noexcept {
    if (n >= V::lanes) [[likely]]
        return load_floats<V>(from);
    return detail::load_some<V>(from, n);
}
/// load_floats() of the first `n` elements, by the number of floats instead of their type.
template <std::uint32_t N, movable_number T>
[[nodiscard]] GPUSHARE_HD floats<N> load_floats(const T* from, std::uint32_t n) noexcept {
    return load_floats<floats<N>>(from, n);
}

/// Stores N elements from `to` on. `to` needs only the alignment of T.
template <movable_number T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT GPUSHARE_HD void store_floats(T* to, const floats<N, W>& x) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (N > 4) {
        store_floats(to, x.low());
        store_floats(to + N / 2, x.high());
    } else {
        detail::four_elements<T> t;
        for (std::uint32_t i = 0; i < 4; ++i) t.lane[i] = detail::narrow_lane<T>(x[i]);
        if (reinterpret_cast<std::uintptr_t>(to) % sizeof t == 0)
            detail::store_at_once(to, t);
        else
            for (int i = 0; i < 4; ++i) to[i] = t.lane[i];
    }
#else
    if constexpr (std::same_as<T, float> && N == W) {
        using memory = typename detail::in_memory<4 * W>::type;
        *reinterpret_cast<memory*>(to) = __builtin_bit_cast(memory, x.in_register().raw);
    } else if constexpr (N * sizeof(T) > 16) {
        store_floats(to, x.low());
        store_floats(to + N / 2, x.high());
    } else if constexpr (N * sizeof(T) == 16) {
        using memory = typename detail::in_memory<16>::type;
        *reinterpret_cast<memory*>(to) = __builtin_bit_cast(memory, detail::as_stored<T>(x));
    } else {
        T more[2 * N];
        store_floats(more, floats<2 * N, W>{x, x});
        std::memcpy(static_cast<void*>(to), more, N * sizeof(T));
    }
#endif
}

namespace detail {
template <class T, std::uint32_t N, std::uint32_t W>
GPUSHARE_RARE GPUSHARE_HD void store_some(T* to, floats<N, W> x, std::uint32_t n) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (N > 4) {
        store_some(to, x.low(), n);
        store_some(to + N / 2, x.high(), n > N / 2 ? n - N / 2 : 0);
    } else {
        if (n > 0) to[0] = narrow_lane<T>(x[0]);
        if (n > 1) to[1] = narrow_lane<T>(x[1]);
        if (n > 2) to[2] = narrow_lane<T>(x[2]);
        if (n > 3) to[3] = narrow_lane<T>(x[3]);
    }
#else
    float all[N];
    store_floats(all, x);
    for (std::uint32_t i = 0; i < N && i < n; ++i) to[i] = narrow_lane<T>(all[i]);
#endif
}
}  // namespace detail

/// Stores the first `n` of N elements.
template <movable_number T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT GPUSHARE_HD void store_floats(T* to, const floats<N, W>& x, std::uint32_t n) noexcept {
    if (n >= N) [[likely]]
        return store_floats(to, x);
    detail::store_some(to, x, n);
}

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
namespace detail {
template <class T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT void stream_aligned(T* to, const floats<N, W>& x) noexcept {
    const auto stream = [](void* at, const sixteen_bytes& s) {
        _mm_stream_si128(static_cast<__m128i*>(at), __builtin_bit_cast(__m128i, s));
    };
    if constexpr (std::same_as<T, float> && N == 8 && W == 8) {
        using bytes = typename vector_of<std::int8_t, 32>::type;
        const auto all = __builtin_bit_cast(typename vector_of<std::int64_t, 32>::type, x.in_register().raw);
        static_assert(sizeof(bytes) == sizeof all);
        stream(to, __builtin_bit_cast(sixteen_bytes, __builtin_shufflevector(all, all, 0, 1)));
        stream(to + 4, __builtin_bit_cast(sixteen_bytes, __builtin_shufflevector(all, all, 2, 3)));
    } else if constexpr (N * sizeof(T) > 16) {
        stream_aligned(to, x.low());
        stream_aligned(to + N / 2, x.high());
    } else {
        stream(to, as_stored<T>(x));
    }
}
}  // namespace detail
#endif

/// Stores past the caches, if `to` is a multiple of 16 and the machine can do that. Use streamed
/// stores for values that no thread reads soon. A later release doesn't order the stores: call
/// finish_streaming() first.
template <movable_number T, std::uint32_t N, std::uint32_t W>
GPUSHARE_FLAT GPUSHARE_HD void stream_floats(T* to, const floats<N, W>& x) noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if constexpr (N * sizeof(T) >= 16) {
        if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) [[likely]]
            return detail::stream_aligned(to, x);
    }
#endif
    store_floats(to, x);
}

/// Call finish_streaming() before the release that tells other threads of streamed elements.
GPUSHARE_HD inline void finish_streaming() noexcept {
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    _mm_sfence();
#endif
}

/// Rounds to T, and converts back.
template <movable_number T, std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> rounded_to(const floats<N, W>& x) noexcept {
    if constexpr (std::same_as<T, float>) {
        return x;
    } else {
        return floats<N, W>::map(
            [](const auto& lane) {
                const typename detail::lanes_of_type<T>::narrow to;
                const typename detail::lanes_of_type<T>::widen from;
                return from(to(lane));
            },
            x);
    }
}

namespace detail {

/// A number's bits as a word, and the place of its exponent. The exponent of a number that isn't
/// finite consists of ones, so adding one at the exponent's lowest bit carries into the sign bit.
template <class Word, Word Exponent>
struct exponent_in {
    using word = Word;
    static constexpr Word mask = Exponent, least = Exponent & (~Exponent + 1), over = static_cast<Word>(mask + least);
};
template <class T>
struct exponent_of;
template <>
struct exponent_of<float> : exponent_in<std::uint32_t, 0x7f80'0000U> {};
template <>
struct exponent_of<float16> : exponent_in<std::uint16_t, 0x7c00U> {};
template <>
struct exponent_of<bfloat16> : exponent_in<std::uint16_t, 0x7f80U> {};
template <class T>
concept has_exponent = requires {
    exponent_of<T>::mask;
};

template <has_exponent T>
[[nodiscard]] bool all_finite_one_by_one(std::span<const T> x) noexcept {
    using in = exponent_of<T>;
    typename in::word over = 0;
    for (const T& v : x) {
        typename in::word word = 0;
        std::memcpy(&word, &v, sizeof word);
        over = static_cast<typename in::word>(over | ((word & in::mask) + in::least));
    }
    return (over & in::over) == 0;
}

inline constexpr std::size_t finite_line = 64;  // bytes

/// Checks whole lines, in registers of `Bytes` bytes. Two accumulators alternate, so that no
/// operation waits for the one before. The function is inlined into a function that is compiled for
/// such registers.
template <std::size_t Bytes, has_exponent T>
[[nodiscard, gnu::always_inline]] inline bool all_finite_lines(const T* x, std::size_t lines) noexcept {
    using in = exponent_of<T>;
    using word = typename in::word;
    using words = typename vector_of<word, Bytes>::type;
    using memory = typename in_memory<Bytes>::type;
    const memory* at = reinterpret_cast<const memory*>(x);  // auto would forget its alignment
    words a{}, b{};
    for (const memory* const end = at + finite_line / Bytes * lines; at != end; at += 2) {
        a |= (__builtin_bit_cast(words, at[0]) & in::mask) + in::least;
        b |= (__builtin_bit_cast(words, at[1]) & in::mask) + in::least;
    }
    a |= b;
    word over = 0;
    for (std::size_t k = 0; k < Bytes / sizeof(word); ++k) over = static_cast<word>(over | a[k]);
    return (over & in::over) == 0;
}
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
template <has_exponent T>
[[nodiscard, gnu::target("avx2"), gnu::noinline]] bool all_finite_lines_by_avx2(const T* x,
                                                                                std::size_t lines) noexcept {
    return all_finite_lines<32>(x, lines);
}
#endif

template <has_exponent T>
[[nodiscard]] bool all_finite_words(std::span<const T> x) noexcept {
    constexpr std::size_t line = finite_line / sizeof(T);
    const std::size_t lines = x.size() / line;
    const auto rest = x.subspan(lines * line);
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if (widest_vectors() != vector_width::narrow)
        return all_finite_lines_by_avx2(x.data(), lines) && all_finite_one_by_one(rest);
#endif
    return all_finite_lines<16>(x.data(), lines) && all_finite_one_by_one(rest);
}

}  // namespace detail

/// Whether no element is infinite or NaN. If one rank's element isn't finite, the sum of the ranks'
/// elements isn't finite either. So a look at the result of an all-reduce covers all ranks'
/// elements, with the same answer on each rank. Sums of fp8_e5m2 saturate, even infinities: look at
/// each rank's own elements before the sum.
[[nodiscard]] inline bool all_finite(std::span<const float> x) noexcept { return detail::all_finite_words(x); }
/// all_finite() for other types; whole numbers are always finite.
template <class T>
requires(!std::same_as<T, float>) [[nodiscard]] bool all_finite(std::span<const T> x) noexcept {
    if constexpr (std::integral<T>)
        return true;
    else if constexpr (detail::has_exponent<T>)
        return detail::all_finite_words(x);
    else if constexpr (std::same_as<T, double>)
        return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
    else
        return std::all_of(x.begin(), x.end(), [](const T& v) { return std::isfinite(static_cast<float>(v)); });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
