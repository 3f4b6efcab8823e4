// SPDX-License-Identifier: Apache-2.0
// What a consumer's first program may look like: the limit of a quota holds.
#include <gpushare/gpushare.hpp>

int main() {
    using namespace gpushare::literals;
    static_assert(gpushare::version >= gpushare::version_number{0, 1, 0});
    gpushare::quota tenant(1_GiB);
    const bool fits = tenant.try_charge(512_MiB) == gpushare::errc::none;
    const bool exceeds = tenant.try_charge(513_MiB) == gpushare::errc::over_quota;
    return fits && exceeds ? 0 : 1;
}
