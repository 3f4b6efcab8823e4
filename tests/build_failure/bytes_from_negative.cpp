// SPDX-License-Identifier: Apache-2.0
// must fail: narrowing conversion of '-1' from 'int'
// There is no negative size.
#include <gpushare/units.hpp>

constexpr gpushare::bytes less{-1};
