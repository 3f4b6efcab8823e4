// SPDX-License-Identifier: Apache-2.0
// What a consumer's first program may look like; both consumer projects build it.
#include <gpushare/gpushare.hpp>

int main() {
    using namespace gpushare::literals;
    static_assert(gpushare::version >= gpushare::version_number{0, 1, 0});
    return 512_MiB + 512_MiB == 1_GiB ? 0 : 1;
}
