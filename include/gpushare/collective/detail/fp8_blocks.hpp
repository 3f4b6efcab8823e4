// SPDX-License-Identifier: Apache-2.0
// Blocks of 8-bit codes with one scale each, as a quantised all-reduce sends them. A code is an
// e4m3. The scale is the smallest power of two with which none of the block's finite numbers
// exceeds 448, the largest code. A byte b stands for 2^(b - 127), as in the MX formats.
//
//   const fp8_blocks at{codes, scales};
//   encode_block<128, Context>(team, at, 3, source);        // block 3 of what the source has
//   const coded_floats x = decoded<128>(at, 3 * 128);       // 16 numbers of it
//
// Scales are powers of two, so scaling rounds nothing, and no bit of a result depends on how a
// machine divides.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/detail/block_team.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/detail/simd/registers.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The elements that a thread codes or decodes at once: 16 bytes of codes.
using coded_floats = floats<16>;

/// The byte of a block's scale, 1 to 247, where `largest` is the largest finite magnitude in the
/// block. 448 is 1.75 * 2^8. The function adds ones in all bits below the fraction of 1.75. The sum
/// carries into the exponent if and only if the fraction is larger than that of 1.75.
[[nodiscard]] GPUSHARE_HD inline std::uint8_t scale_byte(float largest) noexcept {
    const std::uint32_t exponent = (__builtin_bit_cast(std::uint32_t, largest) + 0x1f'ffff) >> 23;
    return static_cast<std::uint8_t>(exponent > 9 ? exponent - 8 : 1);
}
/// The scale for which a byte stands, and its reciprocal.
[[nodiscard]] GPUSHARE_HD inline float scale_of(std::uint8_t byte) noexcept {
    return __builtin_bit_cast(float, std::uint32_t{byte} << 23);
}
[[nodiscard]] GPUSHARE_HD inline float inverse_scale(std::uint8_t byte) noexcept {
    return __builtin_bit_cast(float, (254U - byte) << 23);
}
/// The largest code that may have this scale. With the largest scale, a code above 240 would become
/// infinite when it is scaled.
[[nodiscard]] GPUSHARE_HD inline float largest_code(std::uint8_t byte) noexcept { return byte < 247 ? 448.0F : 240.0F; }

/// The magnitude of a finite number; 0 for any other number.
struct finite_magnitude_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& x) const noexcept {
        const auto bits = bits_of(x) & 0x7fff'ffff;
        return select(bits > 0x7f7f'ffff, 0.0F, from_bits(bits));
    }
};
/// Prepares numbers for the rounding to codes. Infinities and NaNs become NaN, since e4m3 has no
/// infinity.
struct coding_lanes {
    float inverse, largest;
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& x) const noexcept {
        R y = product_of(x, R(inverse));
        y = select(y > largest, largest, y);
        y = select(y < -largest, -largest, y);
        return select((bits_of(x) & 0x7fff'ffff) > 0x7f7f'ffff, __builtin_bit_cast(float, 0x7fff'ffff), y);
    }
};

/// The addresses of the codes and the scales of some blocks. Codes begin at a multiple of 16.
struct fp8_blocks {
    fp8_e4m3* codes;
    std::uint8_t* scales;
};

/// Converts numbers within the codes' range to codes.
[[nodiscard]] GPUSHARE_HD inline packed<fp8_e4m3> as_codes(const coded_floats& x) noexcept {
    packed<fp8_e4m3> to;
#ifdef __CUDA_ARCH__
    for (std::uint32_t i = 0; i < 4; ++i) {
        to[i] = fp8_e4m3(x.low().low()[i]);
        to[i + 4] = fp8_e4m3(x.low().high()[i]);
        to[i + 8] = fp8_e4m3(x.high().low()[i]);
        to[i + 12] = fp8_e4m3(x.high().high()[i]);
    }
#else
    store_floats(to.lane, x);
#endif
    return to;
}
/// The numbers for which codes stand with the scale 1.
[[nodiscard]] GPUSHARE_HD inline coded_floats as_numbers(const packed<fp8_e4m3>& from) noexcept {
#ifdef __CUDA_ARCH__
    const auto four = [&](std::uint32_t i) {
        return floats<4>{static_cast<float>(from[i]), static_cast<float>(from[i + 1]), static_cast<float>(from[i + 2]),
                         static_cast<float>(from[i + 3])};
    };
    return {{four(0), four(4)}, {four(8), four(12)}};
#else
    return load_floats<coded_floats>(from.lane);
#endif
}

/// The 16 numbers from element `i` on, a multiple of 16, in blocks of `Block` elements.
template <std::uint32_t Block>
[[nodiscard]] GPUSHARE_HD coded_floats decoded(const fp8_blocks& from, std::size_t i) noexcept {
    return as_numbers(load_aligned(from.codes + i)) * coded_floats(scale_of(from.scales[i / Block]));
}
template <std::uint32_t Block>
[[nodiscard]] GPUSHARE_HD float decoded_one(const fp8_blocks& from, std::size_t i) noexcept {
    return product_of(static_cast<float>(from.codes[i]), scale_of(from.scales[i / Block]));
}

/// Writes block `b` with numbers from `source`. `source(i)` is the 16 numbers from element i on,
/// and `source.one(i)` is a single number.
GPUSHARE_EXEC_CHECK_DISABLE
template <std::uint32_t Block, class Context, class Source>
GPUSHARE_HD void encode_block(const block_team& team, const fp8_blocks& to, std::size_t b,
                              const Source& source) noexcept {
    constexpr std::uint32_t at_once = coded_floats::lanes, pieces = Block / at_once;
    const std::size_t first = b * Block;
    const auto coding = [](std::uint8_t scale) { return coding_lanes{inverse_scale(scale), largest_code(scale)}; };
    if constexpr (is_one_thread<Context>) {
        coded_floats x[pieces], most(0.0F);
        for (std::uint32_t p = 0; p < pieces; ++p) {
            x[p] = source(first + p * at_once);
            most = max(most, coded_floats::map(finite_magnitude_lanes{}, x[p]));
        }
        const std::uint8_t scale = scale_byte(most.folded(larger_lanes{}));
        for (std::uint32_t p = 0; p < pieces; ++p)
            store_aligned(to.codes + first + p * at_once, as_codes(coded_floats::map(coding(scale), x[p])));
        to.scales[b] = scale;
    } else if (team.lanes() == pieces) {
        const coded_floats x = source(first + team.lane() * at_once);
        const float most = coded_floats::map(finite_magnitude_lanes{}, x).folded(larger_lanes{});
        const std::uint8_t scale = scale_byte(team.largest(most));
        store_aligned(to.codes + first + team.lane() * at_once, as_codes(coded_floats::map(coding(scale), x)));
        if (team.lane() == 0) to.scales[b] = scale;
    } else {  // few threads: codes one number at a time, and computes each number twice
        float most = 0;
        for (std::uint32_t i = 0; i < Block; ++i)
            most = larger_lanes{}(most, finite_magnitude_lanes{}(source.one(first + i)));
        const std::uint8_t scale = scale_byte(most);
        for (std::uint32_t i = 0; i < Block; ++i) to.codes[first + i] = fp8_e4m3(coding(scale)(source.one(first + i)));
        to.scales[b] = scale;
    }
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
