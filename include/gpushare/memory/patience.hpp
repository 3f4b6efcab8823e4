// SPDX-License-Identifier: Apache-2.0
// How long to wait for memory: until a deadline by some clock, or until a stop is requested.
//
//   const gpushare::patience until{clock, clock.now() + 50ms, stop};
//   auto* p = pool.allocate_until(512_MiB, 256, until);
#pragma once

#include <stop_token>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Until `deadline` by `time`, or until a stop is requested.
template <clock Clock>
struct patience {
    Clock time{};              ///< whose time the deadline is in
    instant deadline = never;  ///< when to give up
    std::stop_token stop{};    ///< gives up when a stop is requested
};
/// Waits without limit.
template <class Clock>
patience(Clock) -> patience<Clock>;
/// Until a deadline.
template <class Clock>
patience(Clock, instant) -> patience<Clock>;
/// Until a deadline or a stop.
template <class Clock>
patience(Clock, instant, std::stop_token) -> patience<Clock>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
