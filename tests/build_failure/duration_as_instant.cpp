// SPDX-License-Identifier: Apache-2.0
// must fail: could not convert .*milliseconds.* to '[a-z0-9_:]*instant'
// A deadline is a point in time, not a duration.
#include <chrono>

#include <gpushare/units.hpp>

void wait_until(gpushare::instant deadline);
void wait() { wait_until(std::chrono::milliseconds(5)); }
