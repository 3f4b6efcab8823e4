// SPDX-License-Identifier: Apache-2.0
// must fail: the callable is too big to be stored in place: capture less, or a pointer to what it needs
// A hook captures little: registering it allocates nothing.
#include <array>

#include <gpushare/memory/quota_wait.hpp>

void hook(gpushare::quota& q, const std::array<char, 64>& cache) {
    gpushare::quota_hook spill{q, 0, [cache](const gpushare::reclaim_request&) {
                                   (void)cache;
                                   return gpushare::bytes{};
                               }};
}
