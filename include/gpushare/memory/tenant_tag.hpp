// SPDX-License-Identifier: Apache-2.0
// The number by which resources know whose memory is whose.
//
//   gpushare::tenant_tag chat{1}, code{2};
#pragma once

#include <compare>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A number that the embedder chooses, one per tenant, as the tag of its streams. A tenant may see what an earlier one
/// of the same tag left in memory, so don't reuse a tag before all memory of the last one is back.
struct tenant_tag {
    std::uint32_t value = 0;  ///< the number

    friend constexpr auto operator<=>(tenant_tag, tenant_tag) = default;
    friend constexpr bool operator==(tenant_tag, tenant_tag) = default;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
