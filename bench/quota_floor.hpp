// SPDX-License-Identifier: Apache-2.0
// The floor for quotas and for allocators with a quota: the cheapest correct quota needs one
// compare-and-swap to reserve and one subtraction to release.
//
//   r.figure("core.quota_pair_vs_cas", bench::ratios(repeats, ours, [] { return bench::quota_floor(calls); }), "x");
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "harness.hpp"

namespace bench {

/// Reserves and releases 4 KiB of 1 GiB once.
inline void floor_pair(std::atomic<std::uint64_t>& used) {
    auto now = used.load(std::memory_order_relaxed);
    while (now + 4096 <= (1ULL << 30) && !used.compare_exchange_weak(now, now + 4096)) {
    }
    keep(now);
    used.fetch_sub(4096);
}

/// Nanoseconds per pair, over `calls` pairs.
[[nodiscard]] inline double quota_floor(std::size_t calls) {
    std::atomic<std::uint64_t> used{0};
    return ns_per_call(calls, [&] { floor_pair(used); });
}

}  // namespace bench
