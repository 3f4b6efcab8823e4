// SPDX-License-Identifier: Apache-2.0
// The square root without <cmath>, which costs every includer; correctly rounded on the host and on devices.
//
//   const float length = gpushare::detail::square_root(x * x + y * y);
#pragma once

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

[[nodiscard]] GPUSHARE_HD inline float square_root(float x) noexcept {
#ifdef __CUDA_ARCH__
    float root = 0;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#else
    return __builtin_sqrtf(x);
#endif
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
