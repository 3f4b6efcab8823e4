// SPDX-License-Identifier: Apache-2.0
// must fail: use of deleted function
// A place in the queue is one thread's.
#include <gpushare/memory/quota_wait.hpp>

gpushare::quota_claim copy(const gpushare::quota_claim& c) { return c; }
