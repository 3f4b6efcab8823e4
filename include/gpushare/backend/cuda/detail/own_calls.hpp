// SPDX-License-Identifier: Apache-2.0
// Marks calls of the driver that the library makes for itself, so that no launch gate takes the
// calling thread for one that waits.
//
//   { const own_calls unwatched;  driver.event_query(e); }
#pragma once

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Calls of the driver by the library itself, under a lock of its own: no gate hears that the
/// thread waits or polls there.
class own_calls {
public:
    own_calls() noexcept { ++depth(); }
    own_calls(const own_calls&) = delete;
    own_calls& operator=(const own_calls&) = delete;
    ~own_calls() { --depth(); }

    [[nodiscard]] static int& depth() noexcept {
        constinit thread_local int of_thread = 0;
        return of_thread;
    }
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
