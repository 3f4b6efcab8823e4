// SPDX-License-Identifier: Apache-2.0
// The version of the headers, for programs that want to check it.
//
//   static_assert(gpushare::version >= gpushare::version_number{0, 1, 0});
#pragma once

#include <compare>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Compares as versions do: by major, then minor, then patch.
struct version_number {
    // Trailing underscores: <sys/types.h> may define major and minor.
    int major_ = 0;  ///< changes what programs may rely on
    int minor_ = 0;  ///< adds to it
    int patch_ = 0;  ///< changes nothing of it

    friend constexpr auto operator<=>(version_number, version_number) = default;
    friend constexpr bool operator==(version_number, version_number) = default;
};

/// The version of these headers.
inline constexpr version_number version{GPUSHARE_VERSION_MAJOR, GPUSHARE_VERSION_MINOR, GPUSHARE_VERSION_PATCH};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
