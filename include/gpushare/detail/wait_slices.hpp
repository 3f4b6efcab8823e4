// SPDX-License-Identifier: Apache-2.0
// How long a waiting thread sleeps at a time.
//
//   woken.wait_for(lock, std::min(deadline - now, detail::longest_sleep));
#pragma once

#include <chrono>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// For a wait in which not every event wakes the thread: the thread looks again after this time.
inline constexpr ns look_slice = std::chrono::milliseconds(2);
/// The same for a wait that is usually short, or for a deadline by a clock other than that of
/// condition variables.
inline constexpr ns short_look_slice = std::chrono::milliseconds(1);
/// For a wait in which every event wakes the thread. The limit only keeps the time of a far
/// deadline from overflowing.
inline constexpr ns longest_sleep = std::chrono::minutes(1);

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
