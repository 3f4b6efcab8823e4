// SPDX-License-Identifier: Apache-2.0
// A few floats that a thread works on at once: vector registers on a CPU, whatever the compiler's flags, and a thread's
// registers on a device. What an epilogue's stage takes and returns.
//
//   template <class V> GPUSHARE_HD V operator()(const V& x, const gpushare::place&) const { return max(x * 0.1F, x); }
//
// Each operation rounds once, the same on every machine: a product and a sum are never contracted into one operation with
// one rounding, which compilers otherwise do or don't as the code around happens to be.
#pragma once

#include <cstdint>
#include <type_traits>

#include <gpushare/config.hpp>

namespace gpushare::inline GPUSHARE_ABI {

namespace detail {

// What operations are written on: four floats at once on the host, or one, and as many integers of their bits. Comparison and
// selection are spelled alike for both. Device code must not even name a vector.
template <class Raw>
struct bits_as;
template <>
struct bits_as<float> {
    using words = std::int32_t;
    using wrapping = std::uint32_t;
};
[[nodiscard]] GPUSHARE_HD inline float from_bits(const std::int32_t& w) noexcept {
    return __builtin_bit_cast(float, w);
}

#ifndef __CUDA_ARCH__
using four_floats [[gnu::vector_size(16)]] = float;
using four_words [[gnu::vector_size(16)]] = std::int32_t;
using four_unsigned [[gnu::vector_size(16)]] = std::uint32_t;
template <>
struct bits_as<four_floats> {
    using words = four_words;
    using wrapping = four_unsigned;
};
[[nodiscard]] inline four_floats from_bits(const four_words& w) noexcept { return __builtin_bit_cast(four_floats, w); }
#endif

template <class Raw>
using words_of = typename bits_as<Raw>::words;
template <class Raw>
[[nodiscard]] GPUSHARE_HD inline words_of<Raw> bits_of(const Raw& x) noexcept {
    return __builtin_bit_cast(words_of<Raw>, x);
}

/// A product that no addition is contracted with.
template <class Raw>
[[nodiscard]] GPUSHARE_HD inline Raw product_of(const Raw& a, const Raw& b) noexcept {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    Raw p = a * b;
#if defined(__FMA__) || defined(__FMA4__) || defined(__AVX512F__)
    asm("" : "+x"(p));
#elif defined(__aarch64__)
    asm("" : "+w"(p));
#endif
    return p;
#endif
}
template <class Raw>
[[nodiscard]] GPUSHARE_HD inline Raw quotient_of(const Raw& a, const Raw& b) noexcept {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

}  // namespace detail

/// N floats, N a power of two from 4. Lives in registers: neither stored nor passed between host and device, whose layouts
/// differ. Operations go lane by lane.
template <std::uint32_t N>
class floats {
    static_assert(N > 4 && (N & (N - 1)) == 0);
    using half = floats<N / 2>;

public:
    static constexpr std::uint32_t lanes = N;

    floats() = default;
    GPUSHARE_HD floats(float all) noexcept : low_(all), high_(all) {}
    GPUSHARE_HD floats(const half& low, const half& high) noexcept : low_(low), high_(high) {}

    [[nodiscard]] GPUSHARE_HD const half& low() const noexcept { return low_; }
    [[nodiscard]] GPUSHARE_HD const half& high() const noexcept { return high_; }

    /// `f` of the lanes of several, as many at once as the machine takes: called with vectors of four, or with floats.
    template <class F, class... More>
    [[nodiscard]] GPUSHARE_HD static floats map(const F& f, const floats& x, const More&... more) noexcept {
        return {half::map(f, x.low_, more.low_...), half::map(f, x.high_, more.high_...)};
    }
    /// `f(float)` of each lane, one by one.
    template <class F>
    [[nodiscard]] GPUSHARE_HD floats each(const F& f) const noexcept {
        return {low_.each(f), high_.each(f)};
    }
    /// `f(float, float)` of the lanes of two, one by one.
    template <class F>
    [[nodiscard]] GPUSHARE_HD static floats zip(const F& f, const floats& x, const floats& y) noexcept {
        return {half::zip(f, x.low_, y.low_), half::zip(f, x.high_, y.high_)};
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

template <>
class floats<4> {
public:
    static constexpr std::uint32_t lanes = 4;

    floats() = default;
#ifdef __CUDA_ARCH__
    GPUSHARE_HD floats(float all) noexcept : lane_{all, all, all, all} {}
    GPUSHARE_HD floats(float a, float b, float c, float d) noexcept : lane_{a, b, c, d} {}
    [[nodiscard]] GPUSHARE_HD float operator[](std::uint32_t i) const noexcept { return lane_[i]; }

    template <class F, class... More>
    [[nodiscard]] GPUSHARE_HD static floats map(const F& f, const floats& x, const More&... more) noexcept {
        return {f(x.lane_[0], more.lane_[0]...), f(x.lane_[1], more.lane_[1]...), f(x.lane_[2], more.lane_[2]...),
                f(x.lane_[3], more.lane_[3]...)};
    }

private:
    float lane_[4];

public:
#else
    GPUSHARE_HD floats(float all) noexcept : vector_{all, all, all, all} {}
    GPUSHARE_HD floats(float a, float b, float c, float d) noexcept : vector_{a, b, c, d} {}
    GPUSHARE_HD floats(detail::four_floats vector) noexcept : vector_(vector) {}
    [[nodiscard]] GPUSHARE_HD float operator[](std::uint32_t i) const noexcept { return vector_[i]; }
    [[nodiscard]] GPUSHARE_HD const detail::four_floats& vector() const noexcept { return vector_; }

    template <class F, class... More>
    [[nodiscard]] GPUSHARE_HD static floats map(const F& f, const floats& x, const More&... more) noexcept {
        return floats(f(x.vector_, more.vector_...));
    }

private:
    detail::four_floats vector_;

public:
#endif
    template <class F>
    [[nodiscard]] GPUSHARE_HD floats each(const F& f) const noexcept {
        return {f((*this)[0]), f((*this)[1]), f((*this)[2]), f((*this)[3])};
    }
    template <class F>
    [[nodiscard]] GPUSHARE_HD static floats zip(const F& f, const floats& x, const floats& y) noexcept {
        return {f(x[0], y[0]), f(x[1], y[1]), f(x[2], y[2]), f(x[3], y[3])};
    }
    template <class Op>
    [[nodiscard]] GPUSHARE_HD float folded(const Op& op) const noexcept {
        return op(op((*this)[0], (*this)[2]), op((*this)[1], (*this)[3]));
    }
    [[nodiscard]] GPUSHARE_HD floats first(std::uint32_t n, float rest) const noexcept {
        return {n > 0 ? (*this)[0] : rest, n > 1 ? (*this)[1] : rest, n > 2 ? (*this)[2] : rest,
                n > 3 ? (*this)[3] : rest};
    }
};

namespace detail {

struct plus_lanes {
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return a + b;
    }
};
struct minus_lanes {
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return a - b;
    }
};
struct product_lanes {
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return product_of(a, b);
    }
};
struct quotient_lanes {
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return quotient_of(a, b);
    }
};
// A NaN on either side is the result.
struct larger_lanes {
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return ((a < b) | (b != b)) ? b : a;
    }
};
struct smaller_lanes {
    template <class R>
    GPUSHARE_HD R operator()(const R& a, const R& b) const noexcept {
        return ((b < a) | (b != b)) ? b : a;
    }
};
struct magnitude_lanes {
    template <class R>
    GPUSHARE_HD R operator()(const R& a) const noexcept {
        return from_bits(bits_of(a) & 0x7fff'ffff);
    }
};

}  // namespace detail

template <std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> operator+(const floats<N>& a, const std::type_identity_t<floats<N>>& b) noexcept {
    return floats<N>::map(detail::plus_lanes{}, a, b);
}
template <std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> operator-(const floats<N>& a, const std::type_identity_t<floats<N>>& b) noexcept {
    return floats<N>::map(detail::minus_lanes{}, a, b);
}
template <std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> operator*(const floats<N>& a, const std::type_identity_t<floats<N>>& b) noexcept {
    return floats<N>::map(detail::product_lanes{}, a, b);
}
template <std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> operator/(const floats<N>& a, const std::type_identity_t<floats<N>>& b) noexcept {
    return floats<N>::map(detail::quotient_lanes{}, a, b);
}
/// The larger of two, a NaN if there is one.
template <std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> max(const floats<N>& a, const std::type_identity_t<floats<N>>& b) noexcept {
    return floats<N>::map(detail::larger_lanes{}, a, b);
}
/// The smaller of two, a NaN if there is one.
template <std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> min(const floats<N>& a, const std::type_identity_t<floats<N>>& b) noexcept {
    return floats<N>::map(detail::smaller_lanes{}, a, b);
}
template <std::uint32_t N>
[[nodiscard]] GPUSHARE_HD floats<N> abs(const floats<N>& a) noexcept {
    return floats<N>::map(detail::magnitude_lanes{}, a);
}

}  // namespace gpushare::inline GPUSHARE_ABI
