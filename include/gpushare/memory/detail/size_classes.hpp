// SPDX-License-Identifier: Apache-2.0
// Sorts sizes into classes whose widths are a fixed fraction of the size, so that one free list per
// class covers every size from one unit to the whole address space.
//
//   // 8 classes a doubling, each at most 1/8 of its size wide
//   using classes = gpushare::detail::size_classes<3>;
//   classes::of(100);  classes::covering(100);  classes::smallest(c);
#pragma once

#include <bit>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// 2^LogSteps classes per doubling, numbered from 0 without gaps; below 2^(LogSteps+1) every size
/// has its own. Sizes are counts of any unit, below 2^63. The mapping is that of two-level
/// segregated fit (Masmano et al., ECRTS 2004), with both levels in one number.
template <unsigned LogSteps>
struct size_classes {
    static constexpr std::uint64_t steps = std::uint64_t{1} << LogSteps;

    /// The class of `n`.
    [[nodiscard]] static constexpr std::uint32_t of(std::uint64_t n) noexcept {
        const unsigned shift = shift_of(n);
        return (shift << LogSteps) + static_cast<std::uint32_t>(n >> shift);
    }
    /// The first class in which nothing is smaller than `n`.
    [[nodiscard]] static constexpr std::uint32_t covering(std::uint64_t n) noexcept {
        return of(n + (std::uint64_t{1} << shift_of(n)) - 1);
    }
    /// The smallest size of a class, to which `covering` rounds a size up.
    [[nodiscard]] static constexpr std::uint64_t smallest(std::uint32_t c) noexcept {
        const unsigned shift = c < steps ? 0 : (c >> LogSteps) - 1;
        return (c - (std::uint64_t{shift} << LogSteps)) << shift;
    }

private:
    // How many low bits of `n` a class doesn't look at.
    static constexpr unsigned shift_of(std::uint64_t n) noexcept {
        return static_cast<unsigned>(std::bit_width(n | steps)) - 1 - LogSteps;
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
