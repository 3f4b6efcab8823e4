// SPDX-License-Identifier: Apache-2.0
// Bytes that change hands: charged to one quota instead of another, although the device may be full.
//
//   if (gpushare::try_transfer(chat, code, 2_MiB).why == gpushare::errc::none) ...;    // code's now
#pragma once

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

struct transfer_result {
    errc why = errc::none;
    bool kept = false;  // refused, and `from` is charged as before
};

/// Charges `n` bytes to `to` that are charged to `from`, and releases them there. over_quota: beyond `to`'s own limit.
/// out_of_memory: burst that isn't there, even when `from` gives its bytes back. Only then can it be that somebody else
/// charged them in that moment, and that `from` couldn't have them again: it has lost them (`kept` is false).
[[nodiscard]] inline transfer_result try_transfer(quota& from, quota& to, bytes n) noexcept {
    if (&from == &to) return {};
    errc why = to.try_charge(n);
    if (why == errc::none) {
        from.release(n);
        return {};
    }
    if (why == errc::over_quota) return {.why = why, .kept = true};
    from.release(n);  // may be the very bytes that are missing above
    why = to.try_charge(n);
    return {.why = why, .kept = why != errc::none && from.try_charge(n) == errc::none};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
