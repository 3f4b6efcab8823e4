// SPDX-License-Identifier: Apache-2.0
// must fail: finer than 0.1 %
// Shares come in steps of 0.1 %.
#include <gpushare/units.hpp>

using namespace gpushare::literals;
constexpr auto part = 0.05_pct;
