// SPDX-License-Identifier: Apache-2.0
// Marks driver calls that the library makes for itself, so that no launch gate takes the calling
// thread for a waiting one.
//
//   { const own_calls unwatched;  driver.event_query(e); }
#pragma once

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Marks the thread's driver calls as the library's own, made under one of its locks: gates don't
/// see them as waits or polls.
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
