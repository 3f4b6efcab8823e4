// SPDX-License-Identifier: Apache-2.0
// How long a test waits for memory, by the real clock.
//
//   pool.try_allocate(4096, 256, support::within(1ms));      pool.allocate(4096, 256, support::forever());
#pragma once

#include <cstdint>
#include <thread>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace support {

using real_clock = gpushare::host::steady_clock;

[[nodiscard]] inline gpushare::patience<real_clock> within(gpushare::ns d) {
    return {.deadline = real_clock::now() + d};
}
[[nodiscard]] inline gpushare::patience<real_clock> forever() { return {}; }

/// Waits until that many requests wait for bytes of the quota's tree.
inline void wait_for_line(const gpushare::quota& q, std::uint32_t waiting) {
    while (q.usage().waiting != waiting) std::this_thread::yield();
}

}  // namespace support
