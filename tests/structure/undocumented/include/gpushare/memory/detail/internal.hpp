// SPDX-License-Identifier: Apache-2.0
// Internal: nothing here needs documentation.
#pragma once

namespace gpushare {
inline namespace GPUSHARE_ABI {

struct internal {
    int field;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
