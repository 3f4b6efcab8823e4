// SPDX-License-Identifier: Apache-2.0
// A factor that spreads keys, for hash tables and random numbers.
//
//   // Fibonacci hashing (Knuth, TAOCP 3, 6.4): 256 places
//   const auto place = (key * detail::golden_ratio) >> 56;
#pragma once

#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// 2^64 over the golden ratio, made odd.
inline constexpr std::uint64_t golden_ratio = 0x9e37'79b9'7f4a'7c15U;

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
