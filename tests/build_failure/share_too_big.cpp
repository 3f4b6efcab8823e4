// SPDX-License-Identifier: Apache-2.0
// must fail: more than 1000 permille of a device
// A share is at most a whole device.
#include <gpushare/units.hpp>

using namespace gpushare::literals;
constexpr auto part = 101_pct;
