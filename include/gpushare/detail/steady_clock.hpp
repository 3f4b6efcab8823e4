// SPDX-License-Identifier: Apache-2.0
// Real time, for the backends whose devices run in real time. Programs call this clock
// host::steady_clock on either backend, or clock_type of a node.
//
//   detail::steady_clock clock;    const instant deadline = clock.now() + 5ms;
#pragma once

#include <chrono>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Real time that never goes back.
struct steady_clock {
    /// Since the start of the machine.
    [[nodiscard]] static instant now() noexcept {
        return instant{std::chrono::duration_cast<ns>(std::chrono::steady_clock::now().time_since_epoch())};
    }
};
static_assert(clock<steady_clock>);

}  // namespace detail

namespace host {

// Also here, since programs on CUDA name the clock like this, and don't include the host backend.
using steady_clock = gpushare::detail::steady_clock;

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
