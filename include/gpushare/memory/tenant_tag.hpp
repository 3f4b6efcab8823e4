// SPDX-License-Identifier: Apache-2.0
// Who memory belongs to, for all that keeps tenants' memory apart.
//
//   gpushare::tenant_tag chat{1}, code{2};
#pragma once

#include <compare>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A number of the embedder's choosing, one per tenant, as in streams' tags. What one tenant left behind is shown to
/// another one of the same tag, so don't use a tag again before all that its last bearer had is back.
struct tenant_tag {
    std::uint32_t value = 0;  ///< the number

    friend constexpr auto operator<=>(tenant_tag, tenant_tag) = default;
    friend constexpr bool operator==(tenant_tag, tenant_tag) = default;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
