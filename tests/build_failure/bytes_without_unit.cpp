// SPDX-License-Identifier: Apache-2.0
// must fail: cannot convert 'int' to '[a-z0-9_:]*bytes'
// A size says its unit: 512_MiB, or bytes{512}.
#include <gpushare/memory/quota.hpp>

bool fits(gpushare::quota& q) { return q.try_charge(512) == gpushare::errc::none; }
