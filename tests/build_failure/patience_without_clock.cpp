// SPDX-License-Identifier: Apache-2.0
// must fail: class template argument deduction failed|no matching function
// A deadline means nothing without its clock.
#include <gpushare/memory/quota_wait.hpp>

gpushare::failure wait(gpushare::quota& q) {
    return gpushare::try_charge(q, gpushare::bytes{1}, gpushare::patience{gpushare::never});
}
