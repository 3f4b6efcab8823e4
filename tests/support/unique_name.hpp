// SPDX-License-Identifier: Apache-2.0
// A number that is unique in this process.
//
//   const auto name = support::unique_name();
#pragma once

#include <atomic>
#include <cstdint>

namespace support {

/// Safe from any thread.
[[nodiscard]] inline std::uint64_t unique_name() noexcept {
    static std::atomic<std::uint64_t> made{0};
    return made.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace support
