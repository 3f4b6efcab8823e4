// SPDX-License-Identifier: Apache-2.0
// The few floats that an epilogue's stage takes and returns at once. On a CPU they lie in vector
// registers, the widest that the processor has, whatever flags the file is compiled with; on a
// device in a thread's registers.
//
//   struct leaky {
//       template <class V> GPUSHARE_HD V operator()(const V& x, const gpushare::place&) const { return max(x * 0.1F, x); }
//   };
//   auto y = leaky{}(gpushare::floats<4>{}, gpushare::place{});
//
// Each operation rounds once, on every machine alike. Compilers otherwise may contract a product
// and a sum into one operation with one rounding, depending on the code around.
//
// exp() has the same bits on every machine, too. It calls no library function, since those of host
// and device differ, and it works on all the floats at once.
//
//   gpushare::floats<4> silu = x / (exp(x * -1.0F) + 1.0F);     // x of the same type
#pragma once

#include <cstdint>
#include <type_traits>

#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// N floats in registers of Width floats each. N is a power of two, at least Width; Width is 4, or
/// 8 on a host with such registers. Don't store one, nor pass it between host and device: their
/// layouts differ. Operations go lane by lane, and their results don't depend on Width.
template <std::uint32_t N, std::uint32_t Width = 4>
class floats {
    static_assert(N > Width && (N & (N - 1)) == 0 && (Width == 4 || Width == 8));
    using half = floats<N / 2, Width>;

public:
    static constexpr std::uint32_t lanes = N;      ///< how many they are
    static constexpr std::uint32_t width = Width;  ///< of a register

    floats() = default;
    /// From narrower registers.
    template <std::uint32_t Narrow>
    requires(Narrow < Width) floats(const floats<N, Narrow>& x)
    noexcept : low_(x.low()), high_(x.high()) {}
    /// All of them the same.
    GPUSHARE_HD floats(float all) noexcept : low_(all), high_(all) {}
    /// Joins two halves.
    GPUSHARE_HD floats(const half& low, const half& high) noexcept : low_(low), high_(high) {}

    [[nodiscard]] GPUSHARE_HD const half& low() const noexcept { return low_; }    ///< the first half
    [[nodiscard]] GPUSHARE_HD const half& high() const noexcept { return high_; }  ///< the second half

    /// `f` of the lanes of several, as many at once as the machine takes: called with floats, or
    /// with vectors of them that have their operators and go into gpushare::select() where one
    /// float would go into `?:`.
    template <class F, class... More>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static floats map(const F& f, const floats& x,
                                                              const More&... more) noexcept {
        return {half::map(f, x.low_, more.low_...), half::map(f, x.high_, more.high_...)};
    }
    /// `f(float)` of each lane, one by one.
    template <class F>
    [[nodiscard]] GPUSHARE_HD floats each(const F& f) const noexcept {
        return {low_.each(f), high_.each(f)};
    }
    /// `f(float, float)` of the lanes of two, one by one.
    template <class F>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static floats zip(const F& f, const floats& x, const floats& y) noexcept {
        return {half::zip(f, x.low_, y.low_), half::zip(f, x.high_, y.high_)};
    }
    /// `op`, of those in reduce_ops.hpp or a user's, of the lanes of two.
    template <class Op>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static floats combined(const Op& op, const floats& x,
                                                                   const floats& y) noexcept {
        return {half::combined(op, x.low_, y.low_), half::combined(op, x.high_, y.high_)};
    }
    /// Applies the last step of `op` to each lane, for so many ranks.
    template <class Op>
    [[nodiscard]] GPUSHARE_HD floats finished(const Op& op, float ranks) const noexcept {
        return {low_.finished(op, ranks), high_.finished(op, ranks)};
    }
    /// All lanes in one by `op`, halves first: a tree, so the order is fixed.
    template <class Op>
    [[nodiscard]] GPUSHARE_HD float folded(const Op& op) const noexcept {
        return half::map(op, low_, high_).folded(op);
    }
    /// The first `n` lanes, and `rest` in the others.
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

/// One register of them: see floats<N, Width>, whose members it has.
template <std::uint32_t W>
class floats<W, W> {
    using vector = detail::simd<float, W>;

public:
    static constexpr std::uint32_t lanes = W;  ///< how many they are
    static constexpr std::uint32_t width = W;  ///< of a register

    floats() = default;
    /// All of them the same.
    floats(float all) noexcept : vector_(all) {}
    /// Takes the contents of a register.
    floats(const vector& v) noexcept : vector_(v) {}
    /// From narrower registers.
    template <std::uint32_t Narrow>
    requires(Narrow < W) floats(const floats<W, Narrow>& x)
    noexcept {
        for (std::uint32_t i = 0; i < Narrow; ++i) {
            vector_.raw[i] = x.low()[i];
            vector_.raw[i + Narrow] = x.high()[i];
        }
    }
    /// One of them.
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
// A NaN on either side is the result.
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

/// Each with each.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator+(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::plus_lanes{}, a, b);
}
/// Each from each.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator-(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::minus_lanes{}, a, b);
}
/// Each with each.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator*(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::product_lanes{}, a, b);
}
/// Each by each.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> operator/(const floats<N, W>& a,
                                                               const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::quotient_lanes{}, a, b);
}
/// The larger of two, a NaN if there is one.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> max(const floats<N, W>& a,
                                                         const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::larger_lanes{}, a, b);
}
/// The smaller of two, a NaN if there is one.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> min(const floats<N, W>& a,
                                                         const std::type_identity_t<floats<N, W>>& b) noexcept {
    return floats<N, W>::map(detail::smaller_lanes{}, a, b);
}
/// The magnitude of each.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> abs(const floats<N, W>& a) noexcept {
    return floats<N, W>::map(detail::magnitude_lanes{}, a);
}

namespace detail {

/// x = n ln 2 + r with |r| <= ln(2) / 2; then 2^n times the Taylor polynomial of degree 7, whose own relative error is below
/// 6e-9. Within 2 units in the last place; to infinity from 88.73, to 0 below -104, NaN for NaN.
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
        // ln 2 in two parts; the first has few bits, so that its product is exact.
        R r = x - product_of(whole, R(0.693359375F));
        r = r - product_of(whole, R(-2.12194440e-4F));
        R y = product_of(r, R(1.0F / 5040)) + 1.0F / 720;
        y = product_of(y, r) + 1.0F / 120;
        y = product_of(y, r) + 1.0F / 24;
        y = product_of(y, r) + 1.0F / 6;
        y = product_of(y, r) + 0.5F;
        y = product_of(y, r) + 1.0F;
        y = product_of(y, r) + 1.0F;
        // 2^n in two factors, since neither the smallest nor the largest fit into one.
        const auto half = n >> 1;
        y = product_of(y, from_bits((half + 127) << 23));
        return product_of(y, from_bits((n - half + 127) << 23));
    }
};

}  // namespace detail

/// e to the power of each: within 2 units in the last place.
template <std::uint32_t N, std::uint32_t W>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD floats<N, W> exp(const floats<N, W>& x) noexcept {
    return floats<N, W>::map(detail::exp_lanes{}, x);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
