// SPDX-License-Identifier: Apache-2.0
// must fail: use of deleted function '[a-z0-9_:]*quota::quota\(const [a-z0-9_:]*quota&\)'
// A quota has an identity: others refer to it.
#include <gpushare/memory/quota.hpp>

void copy(const gpushare::quota& q) { auto other = q; }
