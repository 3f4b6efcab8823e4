// SPDX-License-Identifier: Apache-2.0
// e to the power of a few floats, with the same bits on every machine. It calls no library function, since those of
// host and device differ, and it works on all the floats at once.
//
//   gpushare::floats<4> y = x / (exp(x * -1.0F) + 1.0F);     // x of the same type
#pragma once

#include <cstdint>

#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

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
