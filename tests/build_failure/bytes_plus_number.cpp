// SPDX-License-Identifier: Apache-2.0
// must fail: no match for 'operator\+' \(operand types are '[a-z0-9_:]*bytes' and 'int'\)
// No arithmetic between bytes and bare numbers.
#include <gpushare/units.hpp>

gpushare::bytes more(gpushare::bytes b) { return b + 1; }
