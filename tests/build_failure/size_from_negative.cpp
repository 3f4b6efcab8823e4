// SPDX-License-Identifier: Apache-2.0
// must fail: narrowing conversion of '-1' from 'int'
// There is no negative size, whether it has a unit or not.
#include <gpushare/units.hpp>

void* allocate(gpushare::byte_count size);

void* less() { return allocate({-1}); }
